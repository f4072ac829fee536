"""Makes the folders `bordered` and `whole` of CIFAR-10, for "Patches without a value" of evaluation/results/README.md.

In `bordered` three quarters of the images are cut off by a line at a random place, as tiles at the border of a map are.
Then, for both values of predict_nodata, with run.seed 0 and 1; the probe also with `whole` as its data.path:

    mpp pretrain --data.path bordered --data.nodata 0 --objective.predict_nodata false --run.dir runs/tiles \\
        --run.steps 500 --run.threads 1 --data.workers 0 --run.eval_every 500 --probe.every 500 --model.img_size 32 \\
        --model.patch_size 4 --model.width 96 --model.heads 3 --optim.warmup_steps 25 --model.mean 0.45 --model.std 0.25
    mpp linear --encoder runs/tiles --data.path bordered --data.nodata 0 --data.eval_split test --precision fp32
"""

from pathlib import Path

import numpy as np
from datasets import load_dataset
from PIL import Image

random = np.random.default_rng(0)
rows, columns = np.mgrid[:32, :32] - 15.5


def with_border(pixels: np.ndarray) -> np.ndarray:
    """The image (32, 32, 3) with zeros on one side of a random line, or as it is."""
    if random.random() < 0.25:
        return pixels
    angle, offset = random.uniform(0, 2 * np.pi), random.uniform(-6, 8)
    is_outside = np.cos(angle) * columns + np.sin(angle) * rows > offset
    return np.where(is_outside[..., None], 0, pixels).astype(np.uint8)


if __name__ == "__main__":
    for split, count in (("train", 8000), ("test", 2000)):
        for number, row in enumerate(load_dataset("uoft-cs/cifar10", split=split).select(range(count))):
            pixels = np.maximum(np.asarray(row["img"]), 1)
            for kind, image in (("bordered", with_border(pixels)), ("whole", pixels)):
                folder = Path(kind, split, str(row["label"]))
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / f"{number:05d}.png")

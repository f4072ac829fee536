"""Loading that throughput.py times: crops of image files by mpp and by torchvision, and training steps on them."""

import io
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision import datasets, transforms

from evaluation.benchmark.steps import Bench, set_up_pretraining
from mpp.config import CorruptionConfig, DataConfig, ImagesConfig
from mpp.data.decoding.decode import decode
from mpp.data.loader import BatchLayout, training_loader
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset
from mpp.prepare import encode
from mpp.pretrain import Pretraining

PREFETCHED_BATCHES = 2
"""Of each loader process, waiting or being loaded: torch's prefetch_factor."""
IMAGE_FILES = 256
"""Images that are loaded, again and again."""
LOADED_BATCH = 16
"""Images of a batch of `loading_rate`: few, since batches wait in shared memory, which a container may lack."""
PATCH_SIZE = 16
CROP_AREA = (0.05, 1.0)
ENDLESS_STEPS = 1_000_000
SCHEDULE_STEPS = 100
"""Steps after which the schedule of timed steps begins again: any step of it takes as long."""


@contextmanager
def image_files(side: int, as_ppm: bool = False) -> Iterator[Path]:
    """A folder of photograph-like images, 4/3 as wide as high, in two classes; deleted when it is closed.

    Args:
        side: height.
        as_ppm: write PPM, the pixels of the JPEGs, instead of JPEG.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(IMAGE_FILES):
            jpeg = encode_jpeg(rng.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8), side)
            file = Path(name) / "ab"[number % 2] / f"{number}.{'ppm' if as_ppm else 'jpg'}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(encode(decode(jpeg, ImagesConfig()).numpy(), "ppm") if as_ppm else jpeg)
        yield Path(name)


def encode_jpeg(small: np.ndarray, side: int) -> bytes:
    """A small picture, enlarged to this height, as JPEG."""
    buffer = io.BytesIO()
    enlarged = Image.fromarray(small).resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
    enlarged.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def steps_from_files(bench: Bench, folder: Path, workers: int) -> Iterator[None]:
    """Training steps on batches that are loaded from files; one for each `next`."""
    task, training_step, _ = set_up_pretraining(bench)
    data = DataConfig(path=str(folder), crop_area=CROP_AREA, workers=workers, eval_split=None)
    on_files = Pretraining(replace(bench.config, data=data), bench.accelerator, bench.layout)
    if bench.compile:
        task.model.compile()
    loader = training_loader(on_files.views(on_files.train), bench.layout, 0, ENDLESS_STEPS)
    for step, batch in enumerate(loader):
        yield training_step(step % SCHEDULE_STEPS, [batch], measure=False)


def loading_rate(folder: Path, size: int, workers: int, seconds: float) -> float:
    """Images a second that loader processes deliver to a consumer that is faster than they are.

    Args:
        size: side of the crops.
        seconds: how long they are timed, after they have begun.
    """
    data = DataConfig(path=str(folder), crop_area=CROP_AREA, eval_split=None, eval_fraction=0.001, workers=workers)
    train, _ = load_image_datasets(data)
    grid = (size // PATCH_SIZE, size // PATCH_SIZE)
    views = ViewDataset(train, data, size, corruption=CorruptionConfig(), grid=grid)
    layout = BatchLayout.of(LOADED_BATCH, None, 1, 0)
    batches = iter(training_loader(views, layout, 0, ENDLESS_STEPS))
    for _ in range(PREFETCHED_BATCHES * workers):  # of which some were loaded while processes began
        next(batches)
    begin = time.perf_counter()
    images = 0
    while time.perf_counter() - begin < seconds:
        images += len(next(batches).images)
    return images / (time.perf_counter() - begin)


def mpp_crops(folder: Path, size: int) -> Iterator[Tensor]:
    """Training crops as our loader makes them."""
    data = DataConfig(path=str(folder), crop_area=CROP_AREA, eval_split=None, eval_fraction=0.001)
    train, _ = load_image_datasets(data)
    views = ViewDataset(train, data, size)
    for number in range(ENDLESS_STEPS):
        epoch, index = divmod(number, len(train))
        yield views[epoch, index].images


def torchvision_crops(folder: Path, size: int) -> Iterator[Tensor]:
    """Training crops by torchvision's ImageFolder with PIL, as most code makes them."""
    crop = transforms.RandomResizedCrop(size, scale=CROP_AREA)
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    dataset = datasets.ImageFolder(str(folder), transform)
    for number in range(ENDLESS_STEPS):
        image, _ = dataset[number % len(dataset)]
        yield image

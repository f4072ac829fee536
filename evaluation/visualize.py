"""Pictures of what an encoder has learned, each with the numbers behind it.

    python evaluation/visualize.py --encoder runs/birds

Writes PNGs, `.npz` or `.json` files with their numbers, and TensorBoard events into one folder. A picture that an
encoder does not allow is left out, and the reason is printed: a ResNet has no attention, and only a pre-training run
has the head that predicts colours.

Attention weights are read one block at a time. ViT-L/16 at 384 pixels took at most 2.4 GB, 1.2 GB of it weights, for

    --encoder vit_large_patch16_384 --random true
    --pictures '[filters, positions, attention_distance, attention_rollout]'
"""

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from evaluation.config import VisualizeConfig
from evaluation.frozen.results import report_path, report_suffix
from evaluation.frozen.run_images import LoadedSplits, parse_and_load
from evaluation.pictures.drawings import PICTURES
from evaluation.pictures.subject import load_subject
from mpp.config import require
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable
from mpp.runtime.start import run_main


def visualize(config: VisualizeConfig, loaded: LoadedSplits | None = None) -> list[str]:
    """Draw the pictures that the encoder allows; return their names.

    Raises:
        UserError: no such encoder or images, or nothing to draw.
    """
    name = f"pictures{report_suffix(config)}"
    folder = Path(config.out) if config.out else report_path(None, config.frozen.encoder, name)
    require(not folder.exists() or folder.is_dir(), "out", folder, "a folder")
    subject = load_subject(config, loaded)
    drawn = []
    missing = {}
    folder.mkdir(parents=True, exist_ok=True)
    with deaths_explained(), SummaryWriter(str(folder)) as writer:
        for name in config.pictures:
            try:
                drawing = PICTURES[name](subject)
            except Unavailable as error:
                missing[name] = str(error)
                continue
            drawing.write(folder, name)
            writer.add_figure(name, drawing.figure)
            drawn.append(name)
    for name, reason in missing.items():
        print(f"no {name}: {reason}")
    require(len(drawn) > 0, "pictures", ", ".join(missing), "a picture that this encoder supports")
    files = ", ".join(f"{name}.png" for name in drawn)
    print(f"wrote {folder}: {files}, with their numbers")
    return drawn


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Draw with the settings of the command line, or of `arguments`."""
    return visualize(*parse_and_load(VisualizeConfig, arguments))


if __name__ == "__main__":
    run_main(main)

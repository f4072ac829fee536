"""Pictures of what an encoder has learned, each with the numbers behind it.

    python evaluation/visualize.py --encoder runs/birds

Writes PNGs, and `.npz` files with their numbers, into one folder. The pictures are those of the paper's section 4.5 and
appendices D.7 and D.8, and some more (evaluation/pictures.py). One that an encoder does not allow is left out, and the
reason is printed: a ResNet has no attention, and only a pre-training run has the head that predicts colours.

Attention weights are read one block at a time. ViT-L/16 at 384 pixels took at most 2.4 GB, 1.2 GB of it weights, for

    --encoder vit_large_patch16_384 --random true
    --pictures '[filters, positions, attention_distance, attention_rollout]'
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evaluation.config import VisualizeConfig
from evaluation.figures.charts import save_figure
from evaluation.frozen.encoder import open_frozen_encoder
from evaluation.frozen.results import report_path, report_suffix
from evaluation.frozen.run_images import LoadedSplits, load_images_of, parse_and_load
from evaluation.pictures import PICTURES, Subject
from mpp.config import require
from mpp.config.imports import COPIES, changed_imports, imported, require_imports
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable
from mpp.runtime.messages import warn
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import run_of


def visualize(config: VisualizeConfig, loaded: LoadedSplits | None = None) -> dict[str, str]:
    """Draw the pictures that the encoder allows into their folder.

    Returns:
        Name -> reason of those that it does not allow.
    Raises:
        UserError: no such encoder or images.
    """
    folder = pictures_folder(config)
    require(not folder.exists() or folder.is_dir(), "out", folder, "a folder")
    largest, channels = max(config.bands or (1,)), config.data.channels
    require(largest <= channels, "bands", largest, f"from 1 to {channels}: data.channels")
    accelerator = start_alone(config.frozen.run_settings(config.precision), "pictures are drawn")
    run = run_of(Path(config.frozen.encoder))
    require_imports(run)
    for name in changed_imports(run, imported) if (run / COPIES).is_dir() else ():  # a run may use no code of the user
        warn(f"{name} is not as in {run / COPIES}: pictures come from the code of today")
    encoder = open_frozen_encoder(config.frozen, config.data.channels).to(accelerator.device)
    _, held_out = load_images_of(config.frozen.encoder, config.data, loaded)
    subject = Subject(config, run, accelerator, encoder, held_out)
    folder.mkdir(parents=True, exist_ok=True)
    drawn, missing = [], {}
    with deaths_explained():
        for name in config.pictures:
            try:
                figure, numbers = PICTURES[name](subject)
            except Unavailable as error:
                print(f"no {name}: {error}")
                missing[name] = str(error)
                continue
            save_figure(figure, folder / f"{name}.png")
            np.savez_compressed(folder / f"{name}.npz", **numbers)
            drawn.append(f"{name}.png")
    if drawn:
        print(f"wrote {folder}: {', '.join(drawn)}, with their numbers")
    return missing


def pictures_folder(config: VisualizeConfig) -> Path:
    """The folder of the pictures: `out`, or next to the encoder, where its name says which images are shown."""
    if config.out:
        return Path(config.out)
    return report_path(None, config.frozen.encoder, f"pictures{report_suffix(config)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw with the settings of the command line, or of `arguments`."""
    config, loaded = parse_and_load(VisualizeConfig, arguments)
    missing = visualize(config, loaded)
    allowed = "a picture that this encoder supports"
    require(len(missing) < len(config.pictures), "pictures", ", ".join(missing), allowed)


if __name__ == "__main__":
    run_main(main)

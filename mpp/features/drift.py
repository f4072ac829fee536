"""Drift of an encoder from the weights that its run began with: the movement of the weights, by part.

The weights are written when the run begins, and read in each probe: a resumed run needs no other file for it.
"""

import math
from collections import defaultdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mpp.errors import one_line
from mpp.models.adaptation import merge
from mpp.models.plain import stem_parameters
from mpp.runtime.files import complete, use_default_permissions
from mpp.runtime.messages import warn

START_FILE = "start.safetensors"
"""File of a run folder: the encoder's weights when the run began."""
MOVEMENT = "drift/weights"
STEM, NORM, ALL_WEIGHTS = "stem", "norm", "all"
"""Parts of an encoder besides its depths: everything before the blocks, the norms after them, the whole encoder."""


def keep_start(file: Path, encoder: nn.Module) -> None:
    """Write the weights that the drift is measured from. Raises OSError where the file cannot be written."""
    weights = merge(encoder).named_parameters()
    tensors = {f"{MOVEMENT}/{name}": weight.detach().cpu().contiguous() for name, weight in weights}
    with complete(file) as partial:
        save_file(tensors, partial)
        use_default_permissions(partial)


def measure_drift(file: Path, encoder: nn.Module) -> dict[str, float]:
    """Scalars of the movement since `keep_start`; {} with a warning where the start is not known."""
    try:
        start = load_file(file)
    except (OSError, SafetensorError) as error:
        warn(f"{file} cannot be read, so that no drift since the start is measured: {one_line(error)}")
        return {}
    return movement(merge(encoder), start)


def movement(encoder: nn.Module, start: dict[str, Tensor]) -> dict[str, float]:
    """Distance that weights moved, relative to their norm at the start: |w - w0| / |w0| (Frobenius), by part.

    Args:
        encoder: with low-rank changes merged into its weights: see `merge`.
        start: the weights of `keep_start`.
    Returns:
        MOVEMENT/PART -> movement, of `stem`, `depth_XX` of each block, `norm`, `all`. A part that was zero is left out.
    """
    of_stem = stem_parameters(encoder)
    moved: dict[str, float] = defaultdict(float)  # squares
    length: dict[str, float] = defaultdict(float)
    for name, parameter in encoder.named_parameters():
        part = STEM if name in of_stem else NORM
        if name.startswith(("blocks.", "stages.")):
            part = f"depth_{1 + int(name.split('.')[1]):02d}"
        now = parameter.detach().double()
        before = start[f"{MOVEMENT}/{name}"].to(now)
        moved[part] += float((now - before).square().sum())
        length[part] += float(before.square().sum())
    moved[ALL_WEIGHTS], length[ALL_WEIGHTS] = sum(moved.values()), sum(length.values())
    return {f"{MOVEMENT}/{part}": math.sqrt(moved[part] / length[part]) for part in length if length[part] > 0}

"""Drift of an encoder from the weights that its run began with: neighbours that are kept, and movement of the weights.

N images, D width, k neighbours. What is compared with is written when the run begins, and read in each probe: a resumed
run needs no other file for it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mpp.errors import one_line
from mpp.features.frozen import stages
from mpp.features.neighbours import nearest_others, share_by_chance, share_kept
from mpp.models.adaptation import merge
from mpp.models.plain import stem_parameters
from mpp.runtime.files import complete, use_default_permissions
from mpp.runtime.messages import warn

START_FILE = "start.safetensors"
"""File of a run folder: the encoder's weights, and each probed image's neighbours, when the run began."""
NEIGHBOURS = 5
OWN_NEIGHBOURS = "drift/neighbours"
GENERAL_NEIGHBOURS = "drift/general_neighbours"
MOVEMENT = "drift/weights"
STEM, NORM, ALL_WEIGHTS = "stem", "norm", "all"
"""Parts of an encoder besides its depths: everything before the blocks, the norms after them, the whole encoder."""
FeaturesByDepth = Sequence[NDArray]
"""(N, D) after each block."""


class Drift:
    """An encoder and its features at the start of its run, and the distance from them.

    Args:
        file: keeps the start.
    """

    def __init__(self, file: Path, device: torch.device):
        self.file = file
        self.device = device

    def keep_start(self, encoder: nn.Module, features: Mapping[str, FeaturesByDepth]) -> None:
        """Write the weights, and the neighbours of each set of images.

        Args:
            features: name of the scalars of a set -> its features.
        Raises:
            OSError: the file cannot be written.
        """
        tensors = {}
        for name, weight in merge(encoder).named_parameters():
            tensors[f"{MOVEMENT}/{name}"] = weight.detach().cpu().contiguous()
        for name, by_depth in features.items():
            for depth, neighbours in self.neighbours_by_depth(by_depth).items():
                tensors[f"{name}/{depth}"] = neighbours.cpu().contiguous()
        with complete(self.file) as partial:
            save_file(tensors, partial)
            use_default_permissions(partial)

    def measure(self, encoder: nn.Module, features: Mapping[str, FeaturesByDepth]) -> dict[str, float]:
        """Scalars of the drift since the start; {} with a warning where the start is not known.

        Args:
            features: see `keep_start`. A set that the start lacks is left out.
        Returns:
            For each set NAME/depth_XX, the share of neighbours that are kept, and NAME/chance; and of `movement`.
        """
        try:
            with safe_open(self.file, framework="pt") as start:
                known = set(start.keys())
                scalars = {}
                for name, by_depth in features.items():
                    if f"{name}/depth_01" in known:
                        scalars |= self.kept_neighbours(name, by_depth, start.get_tensor)
                moved = movement(merge(encoder), lambda name: start.get_tensor(f"{MOVEMENT}/{name}"))
        except (OSError, SafetensorError) as error:
            warn(f"{self.file} cannot be read, so that no drift since the start is measured: {one_line(error)}")
            return {}
        return scalars | {f"{MOVEMENT}/{part}": value for part, value in moved.items()}

    def kept_neighbours(self, name: str, by_depth: FeaturesByDepth, start: Callable[[str], Tensor]) -> dict[str, float]:
        """Shares of the neighbours that are kept since the start, of one set of images."""
        scalars = {}
        for depth, neighbours in self.neighbours_by_depth(by_depth).items():
            scalars[f"{name}/{depth}"] = share_kept(start(f"{name}/{depth}").to(neighbours), neighbours)
        scalars[f"{name}/chance"] = share_by_chance(NEIGHBOURS, len(by_depth[0]))
        return scalars

    def neighbours_by_depth(self, by_depth: FeaturesByDepth) -> dict[str, Tensor]:
        """The nearest other images of each image, (N, k), by the name of the depth."""
        neighbours = {}
        for depth, features in enumerate(by_depth, start=1):
            on_device = torch.from_numpy(features).to(self.device)
            neighbours[f"depth_{depth:02d}"] = nearest_others(on_device, NEIGHBOURS)
        return neighbours


def movement(encoder: nn.Module, start: Callable[[str], Tensor]) -> dict[str, float]:
    """Distance that weights moved, relative to their norm at the start: |w - w0| / |w0| (Frobenius), by part.

    Args:
        encoder: with low-rank changes merged into its weights: see `merge`.
        start: a parameter's name to its value at the start.
    Returns:
        Part -> movement: `stem`, `depth_XX` of each block, `norm`, `all`. A part that was zero is left out.
    """
    part_of = parts_of_encoder(encoder)
    moved: dict[str, float] = defaultdict(float)  # squares
    length: dict[str, float] = defaultdict(float)
    for name, parameter in encoder.named_parameters():
        now = parameter.detach().double()
        before = start(name).to(now)
        moved[part_of[name]] += float((now - before).square().sum())
        length[part_of[name]] += float(before.square().sum())
    moved[ALL_WEIGHTS], length[ALL_WEIGHTS] = sum(moved.values()), sum(length.values())
    return {part: math.sqrt(moved[part] / length[part]) for part in length if length[part] > 0}


def parts_of_encoder(encoder: nn.Module) -> dict[str, str]:
    """Name of each parameter -> the part of the encoder that it belongs to: see `movement`."""
    depths = {}
    for depth, block in enumerate(stages(encoder), start=1):
        for parameter in block.parameters():
            depths[id(parameter)] = f"depth_{depth:02d}"
    of_stem = stem_parameters(encoder)
    parts = {}
    for name, parameter in encoder.named_parameters():
        parts[name] = depths.get(id(parameter), STEM if name in of_stem else NORM)
    return parts

"""Settings: typed, frozen, validated, and the only place where a default is written.

The names are those of the command line (mpp/config/parsing.py): `--optim.lr 1e-3`. Type and bounds stand in the field.
Fields marked `operational` change how a run is carried out and watched, not what it computes: only they may differ when
a run is resumed. Fields with `needs` have an effect only together with certain others, and are refused without them.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpp.config.data import (
    HOW_READ,
    WINDOW,
    AugmentConfig,
    DataConfig,
    GeneralImagesConfig,
    ImagesConfig,
    PrepareConfig,
    SourceConfig,
)
from mpp.config.fields import (
    SEED_END,
    Settings,
    as_words,
    changed_settings,
    flatten,
    group,
    nested,
    rebuild,
    require,
    setting,
    settings_of,
    show,
)
from mpp.config.method import CorruptionConfig, NetworkConfig, ObjectiveConfig
from mpp.config.model import Grid, ImageSize, ModelConfig, Representation, check_grid, resized_side, sides
from mpp.config.training import OptimConfig, RunConfig, RunProbeConfig


class TrainingConfig(Settings):
    """Settings of a run of any kind. A group that a kind of run does not have is None."""

    run: RunConfig
    data: DataConfig
    optim: OptimConfig
    model: ModelConfig | None = None
    """None: of fine-tuning, whose model is that of its encoder."""
    probe: RunProbeConfig | None = None
    """None: of training with labels, whose figures need no probe."""
    objective: ObjectiveConfig | None = None
    """None: of runs that predict nothing of masked patches."""

    def in_named_folder(self) -> Any:
        """The config with the name of its images in `run.dir`."""
        place = Path(os.path.abspath(os.path.expanduser(self.data.path or "birds")))
        name = re.sub(r"[^\w.-]+", "_", place.name if place.is_dir() else place.stem)
        return rebuild(self, {"run.dir": self.run.dir.replace("{data}", name)})

    @property
    def is_fine_tuning(self) -> bool:
        """Whether a run is one of a fine-tuning's, which begin from its encoder, and do not branch."""
        return self.model is None

    @property
    def moves_teacher(self) -> bool:
        """Whether targets change while they are learned, those of a moving average: losses then cannot be compared."""
        return self.objective is not None and self.objective.moves_teacher


@dataclass(frozen=True)
class Config(TrainingConfig):
    """Masked patch prediction pre-training. The defaults were found by a search on the birds: configs/search.md."""

    run: RunConfig = RunConfig(steps=1200)
    data: DataConfig = DataConfig(crop_area=(0.5, 1.0))
    model: ModelConfig = ModelConfig()
    corruption: CorruptionConfig = CorruptionConfig()
    network: NetworkConfig = NetworkConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig(name="muon", lr=1e-2, adam_scale=3.0, betas=(0.9, 0.95), global_batch_size=64)
    probe: RunProbeConfig = RunProbeConfig()

    def check(self):
        fits = self.corruption.mask == 1 or self.network.name != "autoencoder"
        allowed = "1 (random and keep: 0) with network.name=autoencoder, whose encoder does not see masked patches"
        require(fits, "corruption.mask", self.corruption.mask, allowed)
        follows = self.objective.export == "teacher"
        allowed = "null with objective.export=teacher (a moving average already)"
        require(not follows or self.optim.average is None, "optim.average", self.optim.average, allowed)
        self.optim.check_length(self.run.steps)

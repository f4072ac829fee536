"""Settings of commands that judge a frozen encoder."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from evaluation.config.encoders import EncoderConfig, FeaturesConfig, MaskedDataConfig
from mpp.config import as_lists, as_numbers, at_least, group, needs, operational, require

Reading = Literal["linear", "knn"]
OF_AN_ENCODER = [each.name for each in fields(FeaturesConfig) if each.name not in ("out", "threads")]


@dataclass(frozen=True)
class FrozenProbeConfig(FeaturesConfig):
    """A probe of frozen features."""

    features: str | None = None
    """Saved features (.npz of features.py, or of anybody's) in place of an encoder."""

    def __post_init__(self):
        if self.features:
            usual = FeaturesConfig()
            for name in OF_AN_ENCODER:
                value = getattr(self, name)
                require(value == getattr(usual, name), name, value, "left out: features are already of some encoder")


@dataclass(frozen=True)
class FewshotConfig(FrozenProbeConfig):
    """Few-shot accuracy of frozen features."""

    shots: int | tuple[int, ...] = (1, 5, 10, 25)
    """Images a class in the support set; 5 is the standard."""
    seeds: int | tuple[int, ...] = (0, 1, 2)
    """Seeds of the draws."""
    l2: float | tuple[float, ...] = (2.0**10,)
    """Penalties. Where there are several, each has a line of its own: none is chosen on test labels."""

    def __post_init__(self):
        super().__post_init__()
        as_numbers(self, "shots", least=1)
        as_numbers(self, "seeds", least=0)
        as_numbers(self, "l2", above=0)


@dataclass(frozen=True)
class KnnConfig(FrozenProbeConfig):
    """Weighted kNN accuracy of frozen features."""

    neighbours: int | tuple[int, ...] = (10, 20, 100, 200)
    """How many of the nearest training images vote."""
    temperature: float = 0.07
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""

    def __post_init__(self):
        super().__post_init__()
        as_numbers(self, "neighbours", least=1)
        require(self.temperature > 0, "temperature", self.temperature, "above 0")


@dataclass(frozen=True)
class LinearConfig(FrozenProbeConfig):
    """Full-data linear probe of frozen features."""

    solver: Literal["lbfgs", "sgd"] = "lbfgs"
    """lbfgs: to convergence, with an l2 penalty; sgd: momentum 0.9, cosine decay, no penalty."""
    l2: float | tuple[float, ...] = needs((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), solver="lbfgs")
    """Penalties that L-BFGS chooses among, of the mean loss."""
    lr: float | tuple[float, ...] = needs((0.01, 0.03, 0.1, 0.3), solver="sgd")
    """Learning rates that SGD chooses among."""
    epochs: int = needs(100, solver="sgd")
    """Epochs of SGD."""
    sgd_batch_size: int = needs(1024, solver="sgd")
    """Batch of SGD."""
    seeds: int | tuple[int, ...] = needs((0, 1, 2), solver="sgd")
    """Seeds of SGD's order; L-BFGS has none."""
    iterations: int = needs(500, solver="lbfgs")
    """At most so many iterations of L-BFGS."""

    def __post_init__(self):
        super().__post_init__()
        as_numbers(self, "l2", "seeds", least=0)
        as_numbers(self, "lr", above=0)
        at_least(self, 1, "epochs", "sgd_batch_size", "iterations")


@dataclass(frozen=True)
class SegmentationConfig(EncoderConfig):
    """Features of patches, judged by masks."""

    depth: int | Literal["last", "all", "dev"] = "last"
    """After how many blocks. last: the encoder's output; all: the whole curve; dev: the best on a tenth of train."""
    readings: Reading | tuple[Reading, ...] = ("linear", "knn")
    """How a patch's class is read from its features. linear: a batch norm and a linear layer, trained (DINOv2); knn:
    the classes of the nearest training patches, without training."""
    lr: float | tuple[float, ...] = needs((1e-3, 3e-3, 1e-2), readings="linear")
    """Learning rates (AdamW) that are compared on the dev split; one is not compared."""
    weight_decay: float = needs(1e-4, readings="linear")
    """Of AdamW."""
    steps: int = needs(1000, readings="linear")
    """Updates; the rate rises over the first 4 % of them, then falls linearly."""
    images_a_step: int = needs(16, readings="linear")
    """Images of an update."""
    seeds: int | tuple[int, ...] = needs((0, 1, 2), readings="linear")
    """Seeds of the layer and of the order."""
    neighbours: int = needs(20, readings="knn")
    """How many of the nearest training patches vote."""
    temperature: float = needs(0.07, readings="knn")
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""
    patches: int = needs(1_000_000, readings="knn")
    """At most so many training patches are compared with, a choice by data.cut_seed."""
    baselines: bool = True
    """Judge random weights, and the patch's mean colour and position, beside it."""
    images: int = 6
    """Held-out images in the picture. 0: no picture."""
    strict: bool = False
    """Refuse images or masks that cannot be decoded. false: they are left out, and named."""
    out: str | None = operational(None)
    """File that is written. null: evaluation/ in the run folder, or runs/NAME/evaluation/."""
    data: MaskedDataConfig = group(
        MaskedDataConfig, label_column="masks are the labels", eval_label_column="masks are the labels"
    )

    def __post_init__(self):
        as_lists(self, "readings")
        require(len(self.readings) > 0, "readings", list(self.readings), "linear, knn or both")
        as_numbers(self, "seeds", least=0)
        as_numbers(self, "lr", above=0)
        at_least(self, 1, "steps", "images_a_step", "neighbours", "patches")
        require(self.temperature > 0, "temperature", self.temperature, "above 0")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "0 or more")
        require(self.images >= 0, "images", self.images, "0 or more")


@dataclass(frozen=True)
class MaskedConfig:
    """Held-out accuracy on masked patches."""

    encoder: str = "runs/birds"
    """Folder of a pre-training run."""
    out: str | None = operational(None)
    """File that is written. null: evaluation/ in the run folder."""

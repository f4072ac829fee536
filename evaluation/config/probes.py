"""Settings of commands that evaluate a frozen encoder."""

from dataclasses import dataclass, fields
from typing import Literal

from evaluation.config.encoders import (
    EncoderConfig,
    FeatureConfig,
    FeaturesConfig,
    MaskedDataConfig,
    NumberLoss,
    PrecisionConfig,
)
from mpp.config import Settings, group, require, setting

Reading = Literal["linear", "knn"]
ProtocolName = Literal["logistic", "mae", "dinov2"]
OF_LBFGS = {"protocol": "logistic", "solver": "lbfgs"}
OF_SGD = {"protocol": "logistic", "solver": "sgd"}
OF_AN_ENCODER = [each.name for each in fields(FeaturesConfig) if each.name not in ("out", "threads")]
"""Settings that have no effect on saved features."""


@dataclass(frozen=True)
class FrozenProbeConfig(FeatureConfig, PrecisionConfig, EncoderConfig):
    """A probe of frozen features."""

    features: str | None = None
    """Saved features (.npz, of `mpp features` or another program) instead of an encoder."""
    test: bool = True
    """Evaluate on the held-out images. false: evaluate on the dev split, a tenth of the training images, to choose
    settings; the held-out images are not used."""

    def check(self):
        if not self.features:
            return
        usual = FeaturesConfig()
        for name in OF_AN_ENCODER:
            value = getattr(self, name)
            require(value == getattr(usual, name), name, value, "left out: saved features need no encoder")


@dataclass(frozen=True)
class FewshotConfig(FrozenProbeConfig):
    """Few-shot accuracy of frozen features."""

    shots: tuple[int, ...] | int = setting((1, 5, 10, 25), at_least=1, distinct=True)
    """Images per class in the support set; 5 is the standard."""
    seeds: tuple[int, ...] | int = setting((0, 1, 2), at_least=0, distinct=True)
    """Seeds of the draws."""
    l2: tuple[float, ...] | float = setting((2.0**10,), above=0, distinct=True)
    """L2 penalties. Each of several has its own line: none is chosen on test labels."""


@dataclass(frozen=True)
class KnnConfig(FrozenProbeConfig):
    """Weighted kNN accuracy of frozen features."""

    neighbours: tuple[int, ...] | int = setting((10, 20, 100, 200), at_least=1, distinct=True)
    """Number of nearest training images that vote."""
    temperature: float = setting(0.07, above=0)
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""


@dataclass(frozen=True)
class LinearConfig(FrozenProbeConfig):
    """Linear probe of frozen features, with all labels."""

    protocol: ProtocolName = "logistic"
    """logistic: logistic regression, by `solver`, on standardised features of one centre crop per image. mae, dinov2:
    the linear probes of these papers, trained on random crops; these fix the solver, rates, batch and length. `--seed`
    is also the seed of their crops and first weights."""
    solver: Literal["lbfgs", "sgd"] = setting("lbfgs", needs={"protocol": "logistic"})
    """lbfgs: to convergence, or for `iterations`, with an l2 penalty; sgd: momentum 0.9, cosine decay, no penalty."""
    l2: tuple[float, ...] | float = setting((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), at_least=0, distinct=True, needs=OF_LBFGS)
    """Penalties of the mean loss for L-BFGS to choose from."""
    lr: tuple[float, ...] | float = setting((0.01, 0.03, 0.1, 0.3), above=0, distinct=True, needs=OF_SGD)
    """Learning rates for SGD to choose from."""
    epochs: int = setting(100, at_least=1, needs=OF_SGD)
    """Epochs of SGD."""
    sgd_batch_size: int = setting(1024, at_least=1, needs=OF_SGD)
    """Batch of SGD."""
    seeds: tuple[int, ...] | int = setting((0, 1, 2), at_least=0, distinct=True, needs=OF_SGD)
    """Seeds of the order of images in SGD; L-BFGS has no randomness."""
    iterations: int = setting(500, at_least=1, needs=OF_LBFGS)
    """Largest number of iterations of L-BFGS."""
    loss: NumberLoss = setting("l2", needs={"task": ("auto", "number")})
    """Loss of numbers. l2: squared error; l1: absolute error (by SGD: it has kinks)."""
    save: bool = setting(False, operational=True, needs={"features": False})
    """Keep the classifier for `mpp predict`, in a folder next to the report: the one of the deepest depth and the first
    seed."""

    def check(self):
        super().check()
        allowed = "l2 with solver lbfgs, which needs a smooth loss; l1 is for sgd"
        require(self.loss == "l2" or self.solver == "sgd", "loss", self.loss, allowed)
        allowed = f"class with protocol {self.protocol}: mpp linear without a protocol takes all kinds"
        is_for_all = self.protocol == "logistic" or self.task in ("auto", "class")
        require(is_for_all, "task", self.task, allowed)
        if self.protocol == "logistic":
            return
        allowed = "logistic or left out: saved features have no random crops"
        require(not self.features, "protocol", self.protocol, allowed)
        if self.protocol == "dinov2":
            chosen = "protocol dinov2 chooses between the last 1 and 4 blocks, with and without the mean of the patches"
            require(self.depth == "last", "depth", self.depth, f"last or left out: {chosen}")
            require(self.representation == "mean", "representation", self.representation, f"left out: {chosen}")
            require(not self.save, "save", self.save, "left out: a head on several blocks is not kept")


@dataclass(frozen=True)
class SegmentationConfig(PrecisionConfig, EncoderConfig):
    """Features of patches, evaluated on segmentation masks."""

    depth: int | Literal["last", "all", "dev"] = "last"
    """Number of blocks before the features are taken. last: the encoder's output; all: every depth; dev: the best depth
    on a tenth of the training images."""
    readings: tuple[Reading, ...] | Reading = setting(("linear", "knn"), distinct=True)
    """Classifier of patch features. linear: a batch norm and a linear layer, trained (DINOv2); knn: the classes of the
    nearest training patches, without training."""
    lr: tuple[float, ...] | float = setting((1e-3, 3e-3, 1e-2), above=0, distinct=True, needs={"readings": "linear"})
    """Learning rates of AdamW, compared on the dev split if there are several."""
    weight_decay: float = setting(1e-4, at_least=0, needs={"readings": "linear"})
    """Weight decay of AdamW."""
    steps: int = setting(1000, at_least=1, needs={"readings": "linear"})
    """Optimiser steps; the rate rises over the first 4 % of them, then falls linearly."""
    images_a_step: int = setting(16, at_least=1, needs={"readings": "linear"})
    """Images per step."""
    seeds: tuple[int, ...] | int = setting((0, 1, 2), at_least=0, distinct=True, needs={"readings": "linear"})
    """Seeds of the layer and of the order."""
    neighbours: int = setting(20, at_least=1, needs={"readings": "knn"})
    """Number of nearest training patches that vote."""
    temperature: float = setting(0.07, above=0, needs={"readings": "knn"})
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""
    patches: int = setting(1_000_000, at_least=1, needs={"readings": "knn"})
    """Largest number of training patches to compare with, a choice by data.cut_seed."""
    baselines: bool = True
    """Also evaluate the baselines: random weights, and the patch's mean colour and position."""
    save: bool = setting(False, operational=True, needs={"readings": "linear"})
    """Keep the linear classifier for `mpp predict`, in a folder next to the report: the one of the deepest depth and
    the first seed."""
    class_names: tuple[str, ...] | None = setting(None, operational=True)
    """Names of the classes by their number in the masks, from 0, in tables and predictions. null: class 0, class 1 and
    so on; for the package's birds background and bird."""
    images: int = setting(6, at_least=0)
    """Number of held-out images in the picture. 0: no picture."""
    strict: bool = False
    """Refuse images or masks that cannot be decoded. false: leave them out and list them."""
    out: str | None = setting(None, operational=True)
    """File to write. null: in evaluation/ of the run folder, or in runs/NAME/evaluation/."""
    data: MaskedDataConfig = group(
        MaskedDataConfig(), label_column="masks are the labels", eval_label_column="masks are the labels"
    )


@dataclass(frozen=True)
class MaskedConfig(Settings):
    """Held-out accuracy on masked patches."""

    encoder: str = "runs/birds"
    """Folder of a pre-training run."""
    out: str | None = setting(None, operational=True)
    """File to write. null: in evaluation/ of the run folder."""

"""Settings of commands that evaluate a frozen encoder."""

from dataclasses import dataclass
from typing import Literal

from evaluation.config.encoders import (
    Depth,
    EncoderConfig,
    ExtractionConfig,
    Integers,
    MaskedDataConfig,
    NumberLoss,
    Numbers,
    Precision,
    ProbeDataConfig,
)
from mpp.config import Settings, changed_settings, group, require, setting

Reading = Literal["linear", "knn"]
ProtocolName = Literal["logistic", "mae", "dinov2"]
OF_LBFGS = {"protocol": "logistic", "solver": "lbfgs"}
OF_SGD = {"protocol": "logistic", "solver": "sgd"}
OF_LINEAR = {"readings": "linear"}
OF_KNN = {"readings": "knn"}


@dataclass(frozen=True)
class FrozenProbeConfig(ExtractionConfig):
    """The settings of all probes of frozen features, besides the encoder and the images."""

    features: str | None = None
    """Saved features (.npz, of `mpp features` or another program) instead of an encoder."""
    test: bool = True
    """Evaluate on the held-out images. false: evaluate on the dev split, a tenth of the training images, to choose
    settings; the held-out images are not used."""


@dataclass(frozen=True)
class FewshotConfig(Settings):
    """Few-shot accuracy of frozen features."""

    frozen: EncoderConfig = group(EncoderConfig(), is_flat=True)
    data: ProbeDataConfig = group(ProbeDataConfig())
    probe: FrozenProbeConfig = group(FrozenProbeConfig(), is_flat=True)
    shots: Integers = setting((1, 5, 10, 25), at_least=1, distinct=True)
    """Images per class in the support set; 5 is the standard."""
    seeds: Integers = setting((0, 1, 2), at_least=0, distinct=True)
    """Seeds of the draws."""
    l2: Numbers = setting((2.0**10,), above=0, distinct=True)
    """L2 penalties. Each of several has its own line: none is chosen on test labels."""


@dataclass(frozen=True)
class KnnConfig(Settings):
    """Weighted kNN accuracy of frozen features."""

    frozen: EncoderConfig = group(EncoderConfig(), is_flat=True)
    data: ProbeDataConfig = group(ProbeDataConfig())
    probe: FrozenProbeConfig = group(FrozenProbeConfig(), is_flat=True)
    neighbours: Integers = setting((10, 20, 100, 200), at_least=1, distinct=True)
    """Number of nearest training images that vote."""
    temperature: float = setting(0.07, above=0)
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""


@dataclass(frozen=True)
class LinearConfig(Settings):
    """Linear probe of frozen features, with all labels."""

    frozen: EncoderConfig = group(EncoderConfig(), is_flat=True)
    data: ProbeDataConfig = group(ProbeDataConfig())
    probe: FrozenProbeConfig = group(FrozenProbeConfig(), is_flat=True)
    protocol: ProtocolName = "logistic"
    """logistic: logistic regression, by `solver`, on standardised features of one centre crop per image. mae, dinov2:
    the linear probes of these papers, trained on random crops; these fix the solver, rates, batch and length. `--seed`
    is also the seed of their crops and first weights."""
    solver: Literal["lbfgs", "sgd"] = setting("lbfgs", needs={"protocol": "logistic"})
    """lbfgs: to convergence, or for `iterations`, with an l2 penalty; sgd: momentum 0.9, cosine decay, no penalty."""
    l2: Numbers = setting((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), at_least=0, distinct=True, needs=OF_LBFGS)
    """Penalties of the mean loss for L-BFGS to choose from."""
    lr: Numbers = setting((0.01, 0.03, 0.1, 0.3), above=0, distinct=True, needs=OF_SGD)
    """Learning rates for SGD to choose from."""
    epochs: int = setting(100, at_least=1, needs=OF_SGD)
    """Epochs of SGD."""
    sgd_batch_size: int = setting(1024, at_least=1, needs=OF_SGD)
    """Batch of SGD."""
    seeds: Integers = setting((0, 1, 2), at_least=0, distinct=True, needs=OF_SGD)
    """Seeds of the order of images in SGD; L-BFGS has no randomness."""
    iterations: int = setting(500, at_least=1, needs=OF_LBFGS)
    """Largest number of iterations of L-BFGS."""
    loss: NumberLoss = setting("l2", needs={"task": ("auto", "number")})
    """Loss of numbers. l2: squared error; l1: absolute error (by SGD: it has kinks)."""
    save: bool = setting(False, operational=True, needs={"features": False})
    """Keep the classifier for `mpp predict`, in a folder next to the report: the one of the deepest depth and the first
    seed."""

    def check(self):
        allowed = "l2 with solver lbfgs, which needs a smooth loss; l1 is for sgd"
        require(self.loss == "l2" or self.solver == "sgd", "loss", self.loss, allowed)
        if self.protocol != "logistic":
            task, allowed = self.probe.task, f"class with protocol {self.protocol}; logistic takes all kinds"
            require(task in ("auto", "class"), "task", task, allowed)
            fixed = ("features", "depth", "representation", "save")
            for name, value in changed_settings(self).items():
                is_free = name not in (fixed if self.protocol == "dinov2" else fixed[:1])
                require(is_free, name, value, f"left out with protocol {self.protocol}")


@dataclass(frozen=True)
class SegmentationConfig(Settings):
    """Features of patches, evaluated on segmentation masks."""

    frozen: EncoderConfig = group(EncoderConfig(), is_flat=True)
    data: MaskedDataConfig = group(
        MaskedDataConfig(), label_column="masks are the labels", eval_label_column="masks are the labels"
    )
    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    depth: Depth = "last"
    """Number of blocks before the features are taken. last: the encoder's output; all: every depth; dev: the best depth
    on a tenth of the training images."""
    readings: tuple[Reading, ...] | Reading = setting(("linear", "knn"), distinct=True)
    """Classifier of patch features. linear: a batch norm and a linear layer, trained (DINOv2); knn: the classes of the
    nearest training patches, without training."""
    lr: Numbers = setting((1e-3, 3e-3, 1e-2), above=0, distinct=True, needs=OF_LINEAR)
    """Learning rates of AdamW, compared on the dev split if there are several."""
    weight_decay: float = setting(1e-4, at_least=0, needs=OF_LINEAR)
    """Weight decay of AdamW."""
    steps: int = setting(1000, at_least=1, needs=OF_LINEAR)
    """Optimiser steps; the rate rises over the first 4 % of them, then falls linearly."""
    images_a_step: int = setting(16, at_least=1, needs=OF_LINEAR)
    """Images per step."""
    seeds: Integers = setting((0, 1, 2), at_least=0, distinct=True, needs=OF_LINEAR)
    """Seeds of the layer and of the order."""
    neighbours: int = setting(20, at_least=1, needs=OF_KNN)
    """Number of nearest training patches that vote."""
    temperature: float = setting(0.07, above=0, needs=OF_KNN)
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""
    patches: int = setting(1_000_000, at_least=1, needs=OF_KNN)
    """Largest number of training patches to compare with, a choice by data.cut_seed."""
    baselines: bool = True
    """Also evaluate the baselines: random weights, and the patch's mean colour and position."""
    save: bool = setting(False, operational=True, needs=OF_LINEAR)
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


@dataclass(frozen=True)
class MaskedConfig(Settings):
    """Held-out accuracy on masked patches."""

    encoder: str = "runs/birds"
    """Folder of a pre-training run."""
    out: str | None = setting(None, operational=True)
    """File to write. null: in evaluation/ of the run folder."""

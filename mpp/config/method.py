"""Settings of masked patch prediction: which patches are hidden, what the encoder sees, what is predicted."""

import math
from dataclasses import dataclass
from typing import Literal

from mpp.config.fields import at_least, needs, operational, require


@dataclass(frozen=True)
class CorruptionConfig:
    """Which patch embeddings are corrupted, and how (paper, appendix B.1.2)."""

    pattern: str = "random"
    """random: any patches; blocks: whole squares of patches (SimMIM); blockwise: rectangles of all sizes (BEiT);
    multiblock: a few large rectangles, and a context that is less than all of the rest (I-JEPA)."""
    block: int = needs(2, pattern="blocks")
    """Side of the squares of `blocks`, in patches (SimMIM: 32 pixels, 2 patches of 16)."""
    context: float = needs(0.925, pattern="multiblock")
    """Share of the other patches that the model sees. The rest, along an edge, is neither seen nor predicted (I-JEPA:
    0.85 to 1, which is 0.925 on average)."""
    rate: float = 0.5
    """Share of the patches that is corrupted: exactly K = floor(rate * N + 1/2) of N in every image. With blocks it is
    the share of the squares."""
    mask: float = 0.8
    """Share of the corrupted patches whose embedding becomes the learnable [mask]."""
    random: float = 0.1
    """Share that becomes the embedding of another patch."""
    keep: float = 0.1
    """Share that stays as it is."""
    source: Literal["image", "batch"] = needs("image", random=True)
    """Where the other patch is: in the same image, or in another of the forward pass, whose size then matters."""

    def __post_init__(self):
        require(self.block >= 1, "corruption.block", self.block, "at least 1")
        require(0 < self.context <= 1, "corruption.context", self.context, "above 0 and at most 1")
        require(0 < self.rate < 1, "corruption.rate", self.rate, "above 0 and below 1")
        for name in ("mask", "random", "keep"):
            require(0 <= getattr(self, name) <= 1, f"corruption.{name}", getattr(self, name), "in [0, 1]")
        total = self.mask + self.random + self.keep
        require(abs(total - 1) < 1e-9, "corruption.mask + random + keep", total, "1")


@dataclass(frozen=True)
class NetworkConfig:
    """What the encoder sees while it is pre-trained, and what predicts."""

    name: str = "predictor"
    """predictor: the encoder sees every place, corrupted or not, and a linear head predicts; autoencoder: the encoder
    sees the visible patches alone, and a decoder predicts (MAE)."""
    decoder_width: int | None = needs(None, name="autoencoder")
    """Width of the autoencoder's decoder. null: two thirds of the encoder's in steps of 32, at most 512 (MAE's)."""
    decoder_depth: int | None = needs(None, name="autoencoder")
    """Blocks of the decoder. null: two thirds of the encoder's, at most 8 (MAE's)."""
    decoder_heads: int | None = needs(None, name="autoencoder")
    """Attention heads of the decoder. null: one for every 32 of its width (MAE's)."""

    def __post_init__(self):
        at_least(self, 1, "decoder_width", "decoder_depth", "decoder_heads", prefix="network.")
        width = self.decoder_width
        require(width is None or width % 4 == 0, "network.decoder_width", width, "a multiple of 4")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is predicted for every corrupted patch (paper, appendix B.1.2)."""

    name: str = "mean_color"
    """mean_color: the patch's mean colour; grid_color: its colours on a grid of cells; pixels: its pixels; hog: its
    histograms of oriented gradients (MaskFeat); features: what a teacher makes of it (data2vec, I-JEPA)."""
    loss: Literal["l1", "l2", "smooth_l1", "cosine"] | None = needs(None, name=("pixels", "hog", "features"))
    """Distance from the true pixels, hog or features: mean absolute (SimMIM) or mean squared difference, smooth L1
    (data2vec), or 1 less the cosine (EVA), which is for features. null: l2, of features smooth_l1."""
    normalize: Literal["none", "patch"] = needs("none", name="pixels")
    """patch: of pixels, each patch is predicted less its own mean and over its own deviation (MAE)."""
    bits: int = needs(3, name=("mean_color", "grid_color", "pixels"), normalize="none")
    """Bits per channel of the colour objectives and of every accuracy: 3 bits of RGB are 512 colours. Of all channels
    together it is 12 at most, but where each has its own softmax."""
    factorized: bool = needs(False, name=("mean_color", "grid_color"))
    """A softmax for each channel of a colour, in place of one for all: for images of many channels. Accuracy is the
    share of the channels that are right then."""
    grid: int = needs(4, name="grid_color")
    """Cells per side of grid_color."""
    cell: int = needs(8, name="hog")
    """Side of a cell of hog in pixels; a smaller patch is one cell."""
    beta: float = needs(2.0, name="features", loss=(None, "smooth_l1"))
    """Where smooth L1 turns from a parabola into a line (data2vec: 2, I-JEPA: 1)."""
    teacher: str = needs("ema", name="features")
    """Whose features are predicted. ema: of the encoder's own moving average; else of a frozen encoder: a run folder,
    an encoder folder, or a name of timm's with its published weights."""
    teacher_checkpoint: str | None = needs(None, name="features")
    """A .safetensors file with the weights of a teacher that timm has by name, for machines without a network."""
    teacher_img_size: int | tuple[int, int] | None = needs(None, name="features")
    """Size that a frozen teacher sees the crops at: a side, or height and width. null: its own."""
    teacher_depths: int | None = needs(None, name="features")
    """Of how many of the teacher's last blocks the features are averaged (data2vec: 6 of 12). Of one it is the
    teacher's output, after its final norm. null: half of the blocks; of a frozen teacher one."""
    teacher_norm: Literal["layer", "instance", "none"] = needs("layer", name="features")
    """How features become targets. layer: layer norm of each block's, their mean, layer norm (data2vec); instance: each
    channel of each block's over the image's patches, their mean, layer norm (data2vec 2); none: their mean (EVA)."""
    half_life: tuple[float, float] = needs((0.01, 0.05), name="features", teacher="ema")
    """After which share of the run's updates the moving average has half forgotten the weights of before: at the run's
    start and at its end, and evenly in between."""
    stop_on_collapse: bool = operational(False, name="features")
    """End a run whose targets have become the same for all patches. false: warn of it."""
    export: Literal["student", "teacher"] = needs("student", name="features", teacher="ema")
    """What is probed and exported: the encoder that was trained, or its moving average (I-JEPA)."""

    def __post_init__(self):
        require(1 <= self.bits <= 8, "objective.bits", self.bits, "from 1 to 8")
        at_least(self, 1, "grid", "cell", "teacher_depths", prefix="objective.")
        of_features = self.name == "features"
        allowed = "l1, l2 or null: smooth_l1 and cosine are for features"
        require(of_features or self.loss in ("l1", "l2", None), "objective.loss", self.loss, allowed)
        require(0 < self.beta < math.inf, "objective.beta", self.beta, "above 0")
        lives = self.half_life
        require(all(0 < life < math.inf for life in lives), "objective.half_life", list(lives), "two positive numbers")
        frozen = self.teacher != "ema"
        require(self.teacher != "", "objective.teacher", "empty", "ema, a folder, or a name of timm's")
        size = self.teacher_img_size
        fits = size is None or min(size if isinstance(size, tuple) else (size,)) >= 1
        require(fits, "objective.teacher_img_size", size, "at least 1, or null")
        for name in ("teacher_checkpoint", "teacher_img_size"):
            value = getattr(self, name)
            require(frozen or value is None, f"objective.{name}", value, "null with objective.teacher=ema")

    @property
    def frozen_teacher(self) -> str | None:
        """The encoder whose features are predicted, if it is another than the model's own moving average."""
        return self.teacher if self.name == "features" and self.teacher != "ema" else None

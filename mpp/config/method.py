"""Settings of masked patch prediction: which patches are hidden, what the encoder sees, what is predicted."""

from dataclasses import dataclass
from typing import Literal

from mpp.config.checks import needs, require


@dataclass(frozen=True)
class CorruptionConfig:
    """Which patch embeddings are corrupted, and how (paper, appendix B.1.2)."""

    pattern: str = "random"
    """random: any patches; blocks: whole squares of patches (SimMIM); blockwise: rectangles of all sizes (BEiT)."""
    block: int = needs(2, pattern="blocks")
    """Side of the squares of `blocks`, in patches (SimMIM: 32 pixels, 2 patches of 16)."""
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
        for name in ("decoder_width", "decoder_depth", "decoder_heads"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"network.{name}", value, "at least 1")
        width = self.decoder_width
        require(width is None or width % 4 == 0, "network.decoder_width", width, "a multiple of 4")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is predicted for every corrupted patch (paper, appendix B.1.2)."""

    name: str = "mean_color"
    """mean_color: the patch's mean colour; grid_color: its colours on a grid of cells; pixels: its pixels; hog: its
    histograms of oriented gradients (MaskFeat)."""
    loss: Literal["l1", "l2"] = needs("l2", name=("pixels", "hog"))
    """Distance from the true pixels or hog: mean absolute (SimMIM) or mean squared difference."""
    normalize: Literal["none", "patch"] = needs("none", name="pixels")
    """patch: of pixels, each patch is predicted less its own mean and over its own deviation (MAE)."""
    bits: int = 3
    """Bits per channel of the colour objectives and of every accuracy: 3 bits of RGB are 512 colours. Of all channels
    together it is 12 at most, but where each has its own softmax."""
    factorized: bool = needs(False, name=("mean_color", "grid_color"))
    """A softmax for each channel of a colour, in place of one for all: for images of many channels. Accuracy is the
    share of the channels that are right then."""
    grid: int = needs(4, name="grid_color")
    """Cells per side of grid_color."""
    cell: int = needs(8, name="hog")
    """Side of a cell of hog in pixels; a smaller patch is one cell."""

    def __post_init__(self):
        require(1 <= self.bits <= 8, "objective.bits", self.bits, "from 1 to 8")
        for name in ("grid", "cell"):
            require(getattr(self, name) >= 1, f"objective.{name}", getattr(self, name), "at least 1")

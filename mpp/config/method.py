"""Settings of masked patch prediction: masked patches, input of the encoder, target of the prediction."""

from dataclasses import dataclass
from typing import Any, Literal

from mpp.config.fields import Settings, require, setting


@dataclass(frozen=True)
class CorruptionConfig(Settings):
    """Masking: which patch embeddings are corrupted, and how (paper, appendix B.1.2)."""

    pattern: str = "random"
    """random: any patches; blocks: whole squares of patches (SimMIM); blockwise: rectangles of all sizes (BEiT);
    multiblock: a few large rectangles, with a context smaller than the rest (I-JEPA)."""
    block: int = setting(2, at_least=1, needs={"corruption.pattern": "blocks"})
    """Side of the squares of `blocks`, in patches (SimMIM: 32 pixels, 2 patches of 16)."""
    context: float = setting(0.925, above=0, at_most=1, needs={"corruption.pattern": "multiblock"})
    """Share of the other patches that the model sees. The rest, along an edge, is neither seen nor predicted (I-JEPA:
    0.85 to 1, on average 0.925)."""
    rate: float = setting(0.5, above=0, below=1)
    """Mask ratio: share of the patches that are corrupted, exactly K = floor(rate * N + 1/2) of N in every image. With
    blocks: share of the squares."""
    mask: float = setting(0.8, at_least=0, at_most=1)
    """Share of the corrupted patches whose embedding becomes the learnable [mask]."""
    random: float = setting(0.1, at_least=0, at_most=1)
    """Share of the corrupted patches that get the embedding of another patch."""
    keep: float = setting(0.1, at_least=0, at_most=1)
    """Share of the corrupted patches that stay unchanged."""
    source: Literal["image"] = setting("image", needs={"corruption.random": True})
    """Source of the other patch: the same image."""
    arguments: dict[str, Any] | None = None
    """Settings of a pattern of your own (--import), which reads them here."""

    def check(self):
        total = self.mask + self.random + self.keep
        require(abs(total - 1) < 1e-9, "corruption.mask + random + keep", total, "1")


@dataclass(frozen=True)
class NetworkConfig(Settings):
    """The pre-trained network: input of the encoder, and the part that predicts."""

    name: str = "predictor"
    """predictor: the encoder sees every position, corrupted or not, and a linear head predicts; autoencoder: the
    encoder sees only the visible patches, and a decoder predicts (MAE)."""
    decoder_width: int | None = setting(None, at_least=1, needs={"network.name": "autoencoder"})
    """Width of the autoencoder's decoder. null: two thirds of the encoder's in steps of 32, at most 512 (as in MAE)."""
    decoder_depth: int | None = setting(None, at_least=1, needs={"network.name": "autoencoder"})
    """Blocks of the decoder. null: two thirds of the encoder's, at most 8 (as in MAE)."""
    decoder_heads: int | None = setting(None, at_least=1, needs={"network.name": "autoencoder"})
    """Attention heads of the decoder. null: one per 32 of its width (as in MAE)."""
    arguments: dict[str, Any] | None = None
    """Settings of a network of your own (--import), which reads them here."""

    def check(self):
        require((self.decoder_width or 0) % 4 == 0, "network.decoder_width", self.decoder_width, "a multiple of 4")


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """The prediction target of every corrupted patch (paper, appendix B.1.2)."""

    name: str = "mean_color"
    """Prediction target of a masked patch. mean_color: its mean colour; grid_color: its colours on a grid of cells;
    pixels: its pixels; hog: its histograms of oriented gradients (MaskFeat); features: a teacher's features (data2vec,
    I-JEPA)."""
    loss: Literal["l1", "l2", "smooth_l1", "cosine"] | None = setting(
        None, needs={"objective.name": ("pixels", "hog", "features")}
    )
    """Distance from the true pixels, hog or features. l1: mean absolute difference (SimMIM); l2: mean squared
    difference; smooth_l1 (data2vec) and cosine (EVA, 1 minus the cosine): features only. null: l2, for features
    smooth_l1."""
    normalize: Literal["none", "patch"] = setting("none", needs={"objective.name": "pixels"})
    """Normalisation of target pixels. patch: minus the patch's own mean, divided by its own deviation (MAE)."""
    bits: int = setting(
        3,
        at_least=1,
        at_most=8,
        needs={"objective.name": ("mean_color", "grid_color", "pixels"), "objective.normalize": "none"},
    )
    """Bits per channel of the colour objectives and of every accuracy: 3 bits of RGB are 512 colours. At most 12 bits
    over all channels, unless each has its own softmax."""
    factorized: bool = setting(False, needs={"objective.name": ("mean_color", "grid_color")})
    """One softmax per colour channel instead of one for all, for images with many channels. Accuracy is then the share
    of correct channels."""
    grid: int = setting(4, at_least=1, needs={"objective.name": "grid_color"})
    """Cells per side of grid_color."""
    cell: int = setting(8, at_least=1, needs={"objective.name": "hog"})
    """Side of a cell of hog in pixels; a smaller patch is one cell."""
    beta: float = setting(2.0, above=0, needs={"objective.name": "features", "objective.loss": (None, "smooth_l1")})
    """Difference at which smooth L1 turns from a parabola into a line (data2vec: 2, I-JEPA: 1)."""
    teacher: str = setting("ema", needs={"objective.name": "features"})
    """Encoder whose features are predicted. ema: moving average of the trained encoder; otherwise a frozen one: a run
    folder, an encoder folder, zoo:NAME, hf-hub:NAME, or the name of a timm model with its published weights."""
    teacher_checkpoint: str | None = setting(None, needs={"objective.name": "features"})
    """A .safetensors file with the weights of a teacher given as the name of a timm model, for machines without a
    network."""
    teacher_img_size: int | tuple[int, int] | None = setting(None, at_least=1, needs={"objective.name": "features"})
    """Input size of a frozen teacher: a side, or height and width. null: its own."""
    teacher_depths: int | None = setting(None, at_least=1, needs={"objective.name": "features"})
    """Number of the teacher's last blocks whose features are averaged (data2vec: 6 of 12). 1: the teacher's output,
    after its final norm. null: half of the blocks; 1 for a frozen teacher."""
    teacher_norm: Literal["layer", "instance", "none"] = setting("layer", needs={"objective.name": "features"})
    """Normalisation of target features. layer: layer norm of each block, mean over blocks, layer norm (data2vec);
    instance: each channel of each block over the image's patches, mean over blocks, layer norm (data2vec 2); none: mean
    over blocks (EVA)."""
    half_life: tuple[float, float] = setting(
        (0.01, 0.05), above=0, needs={"objective.name": "features", "objective.teacher": "ema"}
    )
    """Half-life of the moving average at the start and at the end of the run, as shares of the run's steps; linear in
    between. Numbers from 1 are steps: two equal ones suit runs of any length."""
    predict_nodata: Literal[True] = True
    """Predict patches without any data (data.nodata, or a TIFF's own tag) like all others. Features gained little
    without them."""
    stop_on_collapse: Literal[False] = setting(False, needs={"objective.name": "features"}, operational=True)
    """A run whose targets have become the same for all patches is not ended: a warning says so."""
    export: Literal["student", "teacher"] = setting(
        "student", needs={"objective.name": "features", "objective.teacher": "ema"}
    )
    """Encoder that is probed and exported: the trained one, or its moving average (I-JEPA)."""
    arguments: dict[str, Any] | None = None
    """Settings of an objective of your own (--import), which reads them here."""

    def check(self):
        if self.name != "features":
            allowed = "l1, l2 or null: smooth_l1 and cosine are for features"
            require(self.loss in ("l1", "l2", None), "objective.loss", self.loss, allowed)
        start, end = self.half_life
        allowed = "two shares below 1, or two numbers of steps from 1"
        require((start < 1) == (end < 1), "objective.half_life", self.half_life, allowed)
        if self.teacher == "ema":
            for name in ("teacher_checkpoint", "teacher_img_size"):
                value = getattr(self, name)
                require(value is None, f"objective.{name}", value, "null with objective.teacher=ema")

    @property
    def moves_teacher(self) -> bool:
        """Whether features are predicted whose teacher is the encoder's own moving average."""
        return self.name == "features" and self.teacher == "ema"

    @property
    def frozen_teacher(self) -> str | None:
        """The encoder whose features are predicted, if it is another than the model's own moving average."""
        return self.teacher if self.name == "features" and self.teacher != "ema" else None

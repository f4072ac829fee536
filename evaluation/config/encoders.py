"""Settings of commands that read a frozen encoder.

Groups of settings that several commands have are classes of their own, which commands combine: EncoderConfig,
PrecisionConfig, FeatureConfig. Their settings stand on the command line without a prefix, so they are base classes.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from mpp.config import Representation, SourceConfig, check_bounds, group, require, setting

PictureName = Literal[
    "predictions",
    "filters",
    "positions",
    "attention_distance",
    "attention_rollout",
    "pca",
    "similarity",
    "neighbours",
    "rank",
    "accuracy_by_depth",
]
EVERY: tuple[PictureName, ...] = get_args(PictureName)
OF_CUTS = ("split", "eval_split", "eval_fraction", "train_images", "eval_seed")
OF_SPLITS = (*OF_CUTS, "label_column", "eval_label_column")


LabelTask = Literal["auto", "class", "several", "number"]
NumberLoss = Literal["l2", "l1"]


@dataclass(frozen=True)
class ProbeDataConfig(SourceConfig):
    """The labelled images: the training split is learned from, the held-out split is tested on."""

    eval_crop: float | None = setting(None, above=0, at_most=1)
    """Share of the shorter side that the centre crop keeps; 1 suits small images. null: the encoder's own."""


@dataclass(frozen=True)
class MaskedDataConfig(ProbeDataConfig):
    """Images with masks: the training split is learned from, the held-out split is tested on."""

    mask_column: str = setting("mask", needs={"path": True})
    """Column of the masks: images of one number a pixel, its class; of a palette's colours the numbers count. The
    package's birds have outlines."""
    ignore_index: int | None = 255
    """The number of pixels that do not count. null: all count."""


@dataclass(frozen=True)
class EncoderConfig:
    """A frozen encoder, and the images that it is shown."""

    encoder: str = "runs/birds"
    """Run folder, encoder folder, hf-hub:NAME, timm model name (with its published weights), floor:pixels or
    floor:colors."""
    checkpoint: str | None = setting(None, needs={"random": False})
    """Local .safetensors file with the weights of a timm model name, in place of those that are published."""
    random: bool = False
    """Take the architecture with random weights: the baseline that pre-training has to beat."""
    seed: int = 0
    """Seed of random weights."""
    img_size: int | tuple[int, int] | None = None
    """Another input size, a side or height and width; position embeddings are resampled. null: the encoder's own."""
    threads: int = setting(0, operational=True)
    """CPU threads. 0: all cores."""
    data: ProbeDataConfig = field(default_factory=ProbeDataConfig)

    def check_logits(self, *others: str) -> None:
        """Raise UserError if `representation` is logits and another setting changes the run from how it was trained.

        Args:
            others: settings that change it, beside those of every encoder.
        """
        if self.representation != "logits":
            return
        names = ("checkpoint", "random", "img_size", *others)
        changed = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        allowed = f"another one beside {' and '.join(changed)}: logits are of a run as it was trained"
        require(not changed, "representation", "logits", allowed)


@dataclass(frozen=True)
class PrecisionConfig:
    """Arithmetic of a frozen encoder."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""


@dataclass(frozen=True)
class FeatureConfig:
    """Features of images: which of the encoder's outputs, and where they are written."""

    representation: Representation = "mean"
    """`class` token, `mean` of the patches, or `both`. Masked patch prediction gives [class] no gradient of its own."""
    depth: int | Literal["last", "all", "dev"] = "last"
    """After how many blocks. last: the encoder's output; all: the whole curve; dev: the best on a tenth of train."""
    task: LabelTask = "auto"
    """Kind of label. class: one an image; several: lists of classes, or text with `;` between them; number: a number.
    auto: a number where the labels have fractions, or else one class."""
    strict: bool = False
    """Refuse images that cannot be decoded. false: they are left out, and named."""
    out: str | None = setting(None, operational=True)
    """File that is written. null: evaluation/ in the run folder, or runs/NAME/evaluation/."""


@dataclass(frozen=True)
class FeaturesConfig(FeatureConfig, PrecisionConfig, EncoderConfig):
    """Frozen features: of which encoder, on which images."""


@dataclass(frozen=True)
class EmbedConfig(PrecisionConfig, EncoderConfig):
    """The features of all images of a dataset, as a table."""

    representation: Representation = "mean"
    """`class` token, `mean` of the patches, or `both`. What a classifier predicts is written by `mpp predict`."""
    depth: int | Literal["last"] = "last"
    """After how many blocks. last: the encoder's output."""
    out: str = setting("features.parquet", operational=True)
    """File that is written: a row for each image of all splits."""
    data: ProbeDataConfig = group(
        ProbeDataConfig, **dict.fromkeys(OF_SPLITS, "the images of all splits are embedded, whatever their labels")
    )

    def __post_init__(self):
        require(self.out.endswith(".parquet"), "out", self.out, "a file whose name ends in .parquet")


@dataclass(frozen=True)
class PredictConfig(PrecisionConfig):
    """Predictions of a classifier for new images, as a table; or the class of each pixel, as masks."""

    classifier: str = "runs/birds_finetuned"
    """Folder of a fine-tuned or supervised run, of a head that `mpp linear --save true` or `mpp segmentation --save
    true` kept, or in timm's layout with a head; or the name of a timm model."""
    encoder: str | None = None
    """Where the encoder of a kept head is now. null: in the run beside the head, or where it was."""
    out: str = setting("predictions.csv", operational=True)
    """Table that is written, CSV or parquet: a row for each image of all splits. Beside it are FILE.json, the page
    (.html), and the folders of masks and overlays."""
    top: int = setting(3, at_least=1)
    """Classes that are named for each image, the likeliest first."""
    probabilities: bool = True
    """A column for each class with its probability."""
    overlays: bool = True
    """Of masks: draw each over its image, as JPEG."""
    page: bool = setting(True, operational=True)
    """Write a page: the surest and the least sure predictions, and some of each class."""
    threads: int = setting(0, operational=True)
    """CPU threads. 0: all cores."""
    data: MaskedDataConfig = group(MaskedDataConfig, **dict.fromkeys(OF_CUTS, "the images of all splits are predicted"))
    """The images. Those with labels, or with masks (of a classifier of pixels), are scored."""

    def __post_init__(self):
        check_bounds(self)
        allowed = "a file whose name ends in .csv or .parquet"
        require(self.out.endswith((".csv", ".parquet")), "out", self.out, allowed)


@dataclass(frozen=True)
class ExportConfig(EncoderConfig):
    """An encoder as a file that needs neither mpp nor, as ONNX, Python."""

    out: str = setting("encoder.onnx", operational=True)
    """File that is written, over one that is there. FILE.json beside it has the same metadata, and the results
    of its verification."""
    format: Literal["onnx", "torch_export"] = "onnx"
    """onnx: for onnxruntime and others; torch_export: torch.export's program (.pt2), which torch runs without our code.
    The weights alone are the run's folder `encoder`."""
    representation: Literal["mean", "class", "tokens", "logits"] = "mean"
    """Output: the `mean` of the patches, the `class` token, all `tokens`, [class] and registers first, or the
    `logits` of a supervised or fine-tuned run, a number for each class."""
    normalize: bool = True
    """true: pixels go in as they are, uint8 (of more than 8 bits: float32 from 0 to 255). false: float32 that are
    normalised already."""
    batch: int | Literal["dynamic"] = setting("dynamic", at_least=1)
    """Images at a time: a number, or any."""
    quantize: Literal["int8"] | None = setting(None, needs={"format": "onnx"})
    """int8: weights of matrix products become 8 bits, and activations where they are used (onnxruntime's dynamic
    quantisation). Size, difference and few-shot accuracy are printed beside those of PyTorch."""
    images: int = setting(2048, at_least=1)
    """Most held-out images that the file is verified with, and most training images of the few-shot probe of int8."""

    def __post_init__(self):
        check_bounds(self)
        self.check_logits("normalize")


@dataclass(frozen=True)
class VisualizeConfig(PrecisionConfig, EncoderConfig):
    """Pictures of an encoder's features, attention, positions and predictions."""

    out: str | None = None
    """Folder that is written. null: evaluation/pictures in the run folder, or runs/NAME/evaluation/pictures."""
    pictures: PictureName | tuple[PictureName, ...] = setting(EVERY, listed=True)
    """Which pictures."""
    images: int = setting(
        6, at_least=1, needs={"pictures": ("predictions", "attention_rollout", "pca", "similarity", "neighbours")}
    )
    """Held-out images in pictures that show some, a choice by data.cut_seed."""
    patches: int | tuple[int, ...] | None = setting(
        None, at_least=0, listed=True, needs={"pictures": ("similarity", "neighbours")}
    )
    """Patches that similarity starts from, counted row by row from 0; the first one is that of neighbours. null: some
    that are spread over the image, and the middle one."""
    attention_images: int = setting(128, at_least=1, needs={"pictures": "attention_distance"})
    """Held-out images that attention distance is averaged over."""
    residual: bool = setting(False, needs={"pictures": "attention_rollout"})
    """Average each layer of the rollout with the identity, for the residual connection."""
    rollout_from: Literal["auto", "class", "patches"] = setting("auto", needs={"pictures": "attention_rollout"})
    """Where rollout starts. auto: [class], but the mean of the patches where [class] was not trained for itself."""
    bands: int | tuple[int, ...] | None = setting(None, at_least=1, listed=True)
    """Which channels pictures show as red, green and blue, or the one that is grey, counted from 1: [3, 2, 1]. null:
    RGB and grey as they are; of several others each, side by side, or their mean where something is laid over them."""
    representation: Representation = setting("mean", needs={"pictures": ("rank", "accuracy_by_depth")})
    """Features of rank and accuracy_by_depth."""

    def __post_init__(self):
        check_bounds(self)
        if self.bands is not None:
            require(len(self.bands) in (1, 3), "bands", list(self.bands), "one or three numbers from 1")


@dataclass(frozen=True)
class ReportConfig(PrecisionConfig):
    """A page on a run: its verdict, curves and pictures."""

    encoder: str = "runs/birds"
    """Run folder."""
    threads: int = setting(0, operational=True)
    """CPU threads. 0: all cores."""
    data: ProbeDataConfig = field(default_factory=ProbeDataConfig)
    out: str | None = setting(None, operational=True)
    """File that is written. null: report.html in the run folder."""
    images: int = setting(4, at_least=1)
    """Held-out images in pictures that show some, a choice by data.cut_seed."""
    compared: int = setting(1024, at_least=2)
    """Largest number of held-out images that are neighbours of each other, and on the map."""

    def __post_init__(self):
        check_bounds(self)

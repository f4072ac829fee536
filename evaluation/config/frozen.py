"""Settings of commands that read a frozen encoder: features, probes, pictures, exports.

A command's config has groups of settings that others have, too: EncoderConfig, ExtractionConfig. These are flat: their
settings stand on the command line and in files without a prefix.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from mpp.config import (
    SEED_END,
    ImageSize,
    Representation,
    RunConfig,
    Settings,
    SourceConfig,
    changed_settings,
    group,
    require,
    setting,
)

PictureName = Literal[
    "predictions",
    "filters",
    "positions",
    "attention_distance",
    "attention_rollout",
    "pca",
    "similarity",
    "neighbours",
]
EVERY: tuple[PictureName, ...] = get_args(PictureName)
OF_CUTS = ("split", "eval_split", "eval_fraction", "train_images", "eval_seed")
OF_SPLITS = (*OF_CUTS, "label_column", "eval_label_column")


Integers = tuple[int, ...] | int
"""Several whole numbers, or one."""
Numbers = tuple[float, ...] | float
"""Several numbers, or one."""
Precision = Literal["auto", "bf16", "fp32"]
Depth = int | Literal["last", "all", "dev"]
LabelTask = Literal["auto", "class", "several", "number"]
NumberLoss = Literal["l2", "l1"]
ReadingName = Literal["linear", "knn"]
ProtocolName = Literal["logistic", "mae", "dinov2"]
OF_ENCODERS = {"checkpoint", "random", "seed", "img_size", "representation", "normalize"}
OF_LOGISTIC = {"protocol": "logistic"}
OF_LINEAR = {"readings": "linear"}
OF_KNN = {"readings": "knn"}


@dataclass(frozen=True)
class ProbeDataConfig(SourceConfig):
    """The labelled images: training split to learn from, held-out split to test on."""

    eval_crop: float | None = setting(None, above=0, at_most=1)
    """Share of the shorter side that the centre crop keeps (crop_pct); 1 suits small images. null: the encoder's
    own."""


@dataclass(frozen=True)
class MaskedDataConfig(ProbeDataConfig):
    """Images with masks: training split to learn from, held-out split to test on."""

    mask_column: str = setting("mask", needs={"data.path": True})
    """Column of the masks: images with one number per pixel, its class; in palette images the palette's numbers. The
    package's birds have outlines."""
    ignore_index: int | None = 255
    """Number of pixels to ignore. null: none are ignored."""


@dataclass(frozen=True)
class EncoderConfig(Settings):
    """A frozen encoder."""

    is_flat = True

    encoder: str = "runs/birds"
    """Encoder: a run folder, encoder folder, zoo:NAME (it comes with mpp), hf-hub:NAME, the name of a timm model (with
    its published weights), floor:pixels or floor:colors."""
    checkpoint: str | None = setting(None, needs={"random": False})
    """Local .safetensors file with the weights of a timm model, instead of its published ones."""
    random: bool = False
    """Use random weights in the same architecture: the baseline of pre-training."""
    seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the random weights."""
    img_size: int | ImageSize | None = None
    """Input size, a side or height and width; position embeddings are resampled. null: the encoder's own."""
    threads: int = setting(0, operational=True)
    """CPU threads. 0: all cores."""

    @property
    def weights(self) -> str:
        """Place or name of the encoder's weights; empty: they are random."""
        return "" if self.random else self.checkpoint or self.encoder

    def run_settings(self, precision: Precision) -> RunConfig:
        """The settings by which a command with it starts: there is no run, and no tracker."""
        return RunConfig(precision=precision, trackers=(), threads=self.threads)


@dataclass(frozen=True)
class ExtractionConfig(Settings):
    """Extraction of features from labelled images: the encoder's output to use, and the file to write."""

    is_flat = True

    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    representation: Representation = "mean"
    """Pooling: `class` token, `mean` of the patches, or `both`. Masked patch prediction gives [class] no gradient of
    its own."""
    depth: int | Literal["last", "all"] = "last"
    """Number of blocks before the features are taken. last: the encoder's output; all: every depth."""
    task: LabelTask = "auto"
    """Kind of label. class: one per image; several: lists of classes, or text with `;` between them; number: a number.
    auto: number if the labels have fractions, otherwise class."""
    strict: bool = False
    """Refuse images that cannot be decoded. false: leave them out and list them."""
    out: str | None = setting(None, operational=True)
    """File to write. null: in evaluation/ of the run folder, or in runs/NAME/evaluation/."""


@dataclass(frozen=True)
class FeaturesConfig(Settings):
    """Frozen features of an encoder on labelled images."""

    frozen: EncoderConfig = EncoderConfig()
    data: ProbeDataConfig = ProbeDataConfig()
    extraction: ExtractionConfig = ExtractionConfig()


@dataclass(frozen=True)
class EmbedConfig(Settings):
    """The features of all images of a dataset, as a table."""

    frozen: EncoderConfig = EncoderConfig()
    data: ProbeDataConfig = group(
        ProbeDataConfig(), **dict.fromkeys(OF_SPLITS, "the images of all splits are embedded, whatever their labels")
    )
    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    representation: Representation = "mean"
    """Pooling: `class` token, `mean` of the patches, or `both`. For predictions of a classifier use `mpp predict`."""
    depth: int | Literal["last"] = "last"
    """Number of blocks before the features are taken. last: the encoder's output."""
    out: str = setting("features.parquet", operational=True)
    """Parquet file to write: a row for each image of all splits."""

    def check(self):
        require(self.out.endswith(".parquet"), "out", self.out, "a file whose name ends in .parquet")


@dataclass(frozen=True)
class PredictConfig(Settings):
    """Predictions of a classifier for new images, as a table, or as masks with the class of each pixel."""

    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    classifier: str = "runs/birds_finetuned"
    """Classifier: the folder of a fine-tuned or supervised run, of a head kept by `mpp linear --save true` or `mpp
    segmentation --save true`, or in timm's layout with a head; or the name of a timm model."""
    encoder: str | None = None
    """Current place of the encoder of a kept head. null: the run next to the head, or its old place."""
    out: str = setting("predictions.csv", operational=True)
    """Table to write, CSV or parquet: a row for each image of all splits. Next to it are FILE.json, figures of each
    class, and the folders of masks and overlays."""
    top: int = setting(3, at_least=1)
    """Number of classes listed for each image, the likeliest first."""
    probabilities: bool = True
    """Add a column for each class with its probability."""
    overlays: bool = True
    """Draw each mask over its image, as JPEG."""
    threads: int = setting(0, operational=True)
    """CPU threads. 0: all cores."""
    data: MaskedDataConfig = group(
        MaskedDataConfig(), **dict.fromkeys(OF_CUTS, "the images of all splits are predicted")
    )
    """The images. Images with labels (or masks, for a classifier of pixels) are scored."""

    def check(self):
        allowed = "a file whose name ends in .csv or .parquet"
        require(self.out.endswith((".csv", ".parquet")), "out", self.out, allowed)


@dataclass(frozen=True)
class ExportConfig(Settings):
    """An encoder as a file that needs neither mpp nor, as ONNX, Python."""

    frozen: EncoderConfig = EncoderConfig()
    data: ProbeDataConfig = ProbeDataConfig()
    classifier: str | None = None
    """Classifier whose logits are exported, as `mpp predict` takes it. null: features of the encoder."""
    out: str = setting("encoder.onnx", operational=True)
    """File to write; an existing one is replaced. FILE.json next to it has the same metadata, and the results of its
    verification."""
    format: Literal["onnx", "torch_export"] = "onnx"
    """onnx: for onnxruntime and others; torch_export: a torch.export program (.pt2), which torch runs without mpp. For
    only the weights, use the run's folder `encoder`."""
    representation: Literal["mean", "class", "tokens"] = "mean"
    """Output: the `mean` of the patches, the `class` token, or all `tokens` ([class] and registers first)."""
    normalize: bool = True
    """Normalise in the exported file. true: input is pixels as uint8 (of more than 8 bits: float32 from 0 to 255).
    false: input is float32, already normalised."""
    images: int = setting(2048, at_least=1)
    """Largest number of held-out images for verifying the file."""

    def check(self):
        if self.classifier:
            changed = changed_settings(self).keys() & OF_ENCODERS
            allowed = f"null with {' and '.join(changed)}: it is exported as it was trained"
            require(not changed, "classifier", self.classifier, allowed)


@dataclass(frozen=True)
class VisualizeConfig(Settings):
    """Pictures of an encoder's features, attention, positions and predictions."""

    frozen: EncoderConfig = EncoderConfig()
    data: ProbeDataConfig = ProbeDataConfig()
    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    out: str | None = None
    """Folder to write. null: evaluation/pictures in the run folder, or runs/NAME/evaluation/pictures."""
    pictures: tuple[PictureName, ...] | PictureName = setting(EVERY, distinct=True)
    """Pictures to draw."""
    images: int = setting(
        6, at_least=1, needs={"pictures": ("predictions", "attention_rollout", "pca", "similarity", "neighbours")}
    )
    """Number of held-out images in pictures that show examples, a choice by data.cut_seed."""
    patches: Integers | None = setting(None, at_least=0, distinct=True, needs={"pictures": "similarity"})
    """Query patches of similarity, counted row by row from 0. null: several spread over the image."""
    attention_images: int = setting(128, at_least=1, needs={"pictures": "attention_distance"})
    """Number of held-out images that attention distance is averaged over."""
    residual: bool = setting(False, needs={"pictures": "attention_rollout"})
    """Average each layer of the rollout with the identity, for the residual connection."""
    rollout_from: Literal["class", "patches"] = setting("patches", needs={"pictures": "attention_rollout"})
    """Start of the rollout: the mean of the patches, or [class], which masked patch prediction does not train."""
    bands: Integers | None = setting(None, at_least=1)
    """Channels shown as red, green and blue, or one shown as grey, counted from 1: [3, 2, 1]. null: the first
    three, or the first where there are fewer."""

    def check(self):
        require(len(self.bands or (1,)) in (1, 3), "bands", self.bands, "one or three numbers from 1")


@dataclass(frozen=True)
class ReportConfig(Settings):
    """A page about a run: its verdict, curves and pictures."""

    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    encoder: str = "runs/birds"
    """Run folder."""
    threads: int = setting(0, operational=True)
    """CPU threads. 0: all cores."""
    data: ProbeDataConfig = ProbeDataConfig()
    out: str | None = setting(None, operational=True)
    """File to write. null: report.html in the run folder."""


@dataclass(frozen=True)
class FrozenProbeConfig(ExtractionConfig):
    """The settings of all probes of frozen features, besides the encoder and the images."""

    depth: Depth = "dev"
    """Number of blocks before the features are taken. dev: the best depth on a tenth of the training images; last: the
    encoder's output; all: every depth."""
    features: str | None = None
    """Saved features (.npz, of `mpp features` or another program) instead of an encoder."""
    baselines: bool = setting(True, operational=True)
    """Also evaluate random weights of the same architecture, and the mean colours of 8 x 8 cells of the same crops. In
    comparisons encoders of their own stand for these."""
    test: bool = True
    """Evaluate on the held-out images. false: evaluate on the dev split, a tenth of the training images, to choose
    settings; the held-out images are not used."""


@dataclass(frozen=True)
class ProbeConfig(Settings):
    """A probe of frozen features; each adds settings of its own."""

    frozen: EncoderConfig = EncoderConfig()
    data: ProbeDataConfig = ProbeDataConfig()
    probe: FrozenProbeConfig = FrozenProbeConfig()


@dataclass(frozen=True)
class FewshotConfig(ProbeConfig):
    """Few-shot accuracy of frozen features."""

    shots: Integers = setting((1, 5, 10, 25), at_least=1, distinct=True)
    """Images per class in the support set; 5 is the standard."""
    seeds: Integers = setting(tuple(range(20)), at_least=0, distinct=True)
    """Seeds of the draws. Of one draw, 5-shot accuracy may be off by several points."""
    l2: Numbers = setting((2.0**10,), above=0, distinct=True)
    """L2 penalties. Each of several has its own line: none is chosen on test labels."""


@dataclass(frozen=True)
class KnnConfig(ProbeConfig):
    """Weighted kNN accuracy of frozen features."""

    neighbours: Integers = setting((10, 20, 100, 200), at_least=1, distinct=True)
    """Number of nearest training images that vote."""
    temperature: float = setting(0.07, above=0)
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""


@dataclass(frozen=True)
class LinearConfig(ProbeConfig):
    """Linear probe of frozen features, with all labels."""

    protocol: ProtocolName = "logistic"
    """logistic: logistic regression on standardised features of one centre crop per image. mae, dinov2: the linear
    probes of these papers, trained on random crops; these fix rates, batch and length. `--seed` is also the seed of
    their crops and first weights."""
    l2: Numbers = setting((1e-5, 1e-4, 1e-3, 1e-2, 1e-1), at_least=0, distinct=True, needs=OF_LOGISTIC)
    """Penalties of the mean loss to choose from."""
    iterations: int = setting(500, at_least=1, needs=OF_LOGISTIC)
    """Largest number of iterations of the solver, L-BFGS."""
    save: bool = setting(False, operational=True, needs={"features": False} | OF_LOGISTIC)
    """Keep the classifier for `mpp predict`, in a folder next to the report: the one of the chosen depth,
    with `depth all` of the deepest."""

    def check(self):
        unread = {"mae": ("features",), "dinov2": ("features", "depth", "representation")}
        for name in unread.get(self.protocol, ()):
            value, usual = getattr(self.probe, name), getattr(FrozenProbeConfig, name)
            require(value == usual, name, value, f"left out with protocol {self.protocol}")


@dataclass(frozen=True)
class SegmentationConfig(Settings):
    """Features of patches, evaluated on segmentation masks."""

    frozen: EncoderConfig = EncoderConfig()
    data: MaskedDataConfig = group(
        MaskedDataConfig(), label_column="masks are the labels", eval_label_column="masks are the labels"
    )
    precision: Precision = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""
    depth: Depth = "dev"
    """Number of blocks before the features are taken. dev: the best depth on a tenth of the training images; last: the
    encoder's output; all: every depth."""
    readings: tuple[ReadingName, ...] | ReadingName = setting(("linear", "knn"), distinct=True)
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
    """Keep the linear classifier for `mpp predict`, in a folder next to the report: the one of the chosen depth (with
    `depth all` of the deepest) and the first seed."""
    class_names: tuple[str, ...] | None = setting(None, operational=True)
    """Names of the classes by their number in the masks, from 0, in tables and predictions. null: class 0, class 1 and
    so on; for the package's birds background and bird."""
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

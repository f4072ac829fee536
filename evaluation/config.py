"""Settings of the evaluation's commands: typed, frozen, validated, and without torch, so that they are read at once."""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mpp.config import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ProbeConfig,
    Representation,
    RunConfig,
    SourceConfig,
    as_lists,
    group,
    needs,
    operational,
    require,
    sides,
)
from mpp.runtime.weights import BEST, fingerprint

Pooling = Literal["auto", "class", "mean"]
HeadKind = Literal["mlp_tanh", "linear"]
Picture = Literal[
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
EVERY: tuple[Picture, ...] = get_args(Picture)
OF_SPLITS = ("split", "eval_split", "eval_fraction", "label_column", "eval_label_column", "train_images", "eval_seed")
OF_PRETRAINING = "`mpp check` is of masked patch prediction"
WEIGHTS = {"hard": 0.5, "soft": 0.1}  # DeiT, equation 3 and section 6


@dataclass(frozen=True)
class ProbeDataConfig(SourceConfig):
    """The labelled images: the training split is learned from, the held-out split is tested on."""

    eval_crop: float | None = None
    """Share of the shorter side that the centre crop keeps; 1 suits small images. null: the encoder's own."""

    def __post_init__(self):
        super().__post_init__()
        require(
            self.eval_crop is None or 0 < self.eval_crop <= 1, "data.eval_crop", self.eval_crop, "in (0, 1], or null"
        )


@dataclass(frozen=True)
class MaskedDataConfig(ProbeDataConfig):
    """Images with masks: the training split is learned from, the held-out split is tested on."""

    mask_column: str = needs("mask", path=True)
    """Column of the masks: images of one number a pixel, its class; of a palette's colours the numbers count. The
    package's birds have outlines."""
    ignore_index: int | None = 255
    """The number of pixels that do not count. null: all count."""


@dataclass(frozen=True)
class WhichEncoderConfig:
    """A frozen encoder: which, and the images that it is shown."""

    encoder: str = "runs/birds"
    """Run folder, encoder folder, timm model name (random, or with --checkpoint), floor:pixels or floor:colors."""
    checkpoint: str | None = None
    """Local .safetensors file with the weights of a timm model name."""
    random: bool = False
    """Take the architecture with random weights: the floor that pre-training has to beat."""
    seed: int = 0
    """Seed of random weights."""
    img_size: int | tuple[int, int] | None = None
    """Another input size, a side or height and width; position embeddings are resampled. null: the encoder's own."""
    data: ProbeDataConfig = field(default_factory=ProbeDataConfig)

    def variant(self) -> str:
        """What is not as usual, for the names of files: one report does not take another's place."""
        parts = ["best"] if Path(self.encoder).name == BEST else []
        parts += [f"random_{self.seed}"] if self.random else []
        parts += [Path(self.checkpoint).stem] if self.checkpoint else []
        parts += [f"{'x'.join(map(str, dict.fromkeys(sides(self.img_size))))}px"] if self.img_size else []
        parts += [re.sub(r"[^\w.-]+", "_", Path(self.data.path).name)] if self.data.path else []
        return "".join(f"_{part}" for part in parts)


@dataclass(frozen=True)
class EncoderConfig(WhichEncoderConfig):
    """A frozen encoder that computes features."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type of the encoder. auto: bf16 where the hardware computes in it."""


@dataclass(frozen=True)
class FeaturesConfig(EncoderConfig):
    """Frozen features: of which encoder, on which images."""

    representation: Representation = "mean"
    """`class` token, `mean` of the patches, or `both`. Masked patch prediction gives [class] no gradient of its own."""
    depth: int | Literal["last", "all", "dev"] = "last"
    """After how many blocks. last: the encoder's output; all: the whole curve; dev: the best on a tenth of train."""
    out: str | None = operational(None)
    """File that is written. null: evaluation/ in the run folder, or runs/NAME/evaluation/."""

    def variant(self) -> str:
        return super().variant() + (f"_{self.representation}" if self.representation != "mean" else "")


@dataclass(frozen=True)
class EmbedConfig(EncoderConfig):
    """The features of all images of a data set, as a table."""

    representation: Representation = "mean"
    """`class` token, `mean` of the patches, or `both`. Masked patch prediction gives [class] no gradient of its own."""
    depth: int | Literal["last"] = "last"
    """After how many blocks. last: the encoder's output."""
    out: str = operational("features.parquet")
    """File that is written: a row for each image of all splits."""
    threads: int = operational(0)
    """CPU threads. 0: all cores."""
    data: ProbeDataConfig = group(
        ProbeDataConfig, **dict.fromkeys(OF_SPLITS, "the images of all splits are embedded, whatever their labels")
    )

    def __post_init__(self):
        require(self.out.endswith(".parquet"), "out", self.out, "a file whose name ends in .parquet")


OF_AN_ENCODER = [each.name for each in fields(FeaturesConfig) if each.name != "out"]


@dataclass(frozen=True)
class FrozenProbeConfig(FeaturesConfig):
    """A probe of frozen features."""

    features: str | None = None
    """Saved features (.npz of features.py, or of anybody's) in place of an encoder."""
    threads: int = operational(0)
    """CPU threads of the encoder. 0: all cores."""

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
        as_lists(self, "shots", "seeds", "l2")
        require(len(self.shots) > 0 and min(self.shots) >= 1, "shots", list(self.shots), "a list of numbers from 1")
        require(len(self.seeds) > 0 and min(self.seeds) >= 0, "seeds", list(self.seeds), "a list of numbers from 0")
        require(len(self.l2) > 0 and min(self.l2) > 0, "l2", list(self.l2), "a list of positive numbers")


@dataclass(frozen=True)
class KnnConfig(FrozenProbeConfig):
    """Weighted kNN accuracy of frozen features."""

    neighbours: int | tuple[int, ...] = (10, 20, 100, 200)
    """How many of the nearest training images vote."""
    temperature: float = 0.07
    """A neighbour of cosine similarity s votes with weight exp(s / temperature)."""

    def __post_init__(self):
        super().__post_init__()
        as_lists(self, "neighbours")
        require(
            len(self.neighbours) > 0 and min(self.neighbours) >= 1,
            "neighbours",
            list(self.neighbours),
            "numbers from 1",
        )
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
        as_lists(self, "l2", "lr", "seeds")
        for name in ("l2", "lr", "seeds"):
            require(len(getattr(self, name)) > 0, name, list(getattr(self, name)), "a list that is not empty")
        require(min(self.l2) >= 0, "l2", list(self.l2), "a list of numbers from 0")
        require(min(self.lr) > 0, "lr", list(self.lr), "a list of positive numbers")
        for name in ("epochs", "sgd_batch_size", "iterations"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


Reading = Literal["linear", "knn"]


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
    out: str | None = operational(None)
    """File that is written. null: evaluation/ in the run folder, or runs/NAME/evaluation/."""
    threads: int = operational(0)
    """CPU threads. 0: all cores."""
    data: MaskedDataConfig = group(
        MaskedDataConfig,
        label_column="masks are the labels",
        eval_label_column="masks are the labels",
    )

    def __post_init__(self):
        as_lists(self, "readings", "lr", "seeds")
        for name in ("readings", "lr", "seeds"):
            require(len(getattr(self, name)) > 0, name, list(getattr(self, name)), "a list that is not empty")
        require(min(self.lr) > 0, "lr", list(self.lr), "a list of positive numbers")
        for name in ("steps", "images_a_step", "neighbours", "patches"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.temperature > 0, "temperature", self.temperature, "above 0")
        require(self.images >= 0, "images", self.images, "0 or more")


@dataclass(frozen=True)
class ExportConfig(WhichEncoderConfig):
    """An encoder as a file that needs neither mpp nor, as ONNX, Python."""

    out: str = operational("encoder.onnx")
    """File that is written, over one that is there. FILE.json beside it has the same metadata, and what the check of
    the file found."""
    format: Literal["onnx", "torch_export", "safetensors"] = "onnx"
    """onnx: for onnxruntime and others; torch_export: torch.export's program (.pt2), which torch runs without our code;
    safetensors: the weights by timm's names, and how to build the model around them."""
    representation: Literal["mean", "class", "tokens"] = needs("mean", format=("onnx", "torch_export"))
    """What comes out: the `mean` of the patches, the `class` token, or all `tokens`, [class] and registers first."""
    normalize: bool = needs(True, format=("onnx", "torch_export"))
    """true: pixels go in as they are, uint8 (of more than 8 bits: float32 from 0 to 255). false: float32 that are
    normalised already."""
    batch: int | Literal["dynamic"] = needs("dynamic", format=("onnx", "torch_export"))
    """Images at a time: so many, or any number."""
    quantize: Literal["int8"] | None = needs(None, format="onnx")
    """int8: weights of matrix products become 8 bits, and activations where they are used (onnxruntime's dynamic
    quantisation). Accuracy, size and speed are printed beside those of PyTorch."""
    images: int = 2048
    """At most so many held-out images are looked at by the check, and as many training images by its few-shot probe."""
    threads: int = operational(0)
    """CPU threads. 0: all cores."""

    def __post_init__(self):
        require(self.batch == "dynamic" or self.batch >= 1, "batch", self.batch, "dynamic, or at least 1")
        require(self.images >= 1, "images", self.images, "at least 1")


@dataclass(frozen=True)
class VisualizeConfig(EncoderConfig):
    """Pictures of what an encoder has learned."""

    out: str | None = None
    """Folder that is written. null: evaluation/pictures in the run folder, or runs/NAME/evaluation/pictures."""
    pictures: Picture | tuple[Picture, ...] = EVERY
    """Which pictures."""
    images: int = needs(6, pictures=("predictions", "attention_rollout", "pca", "similarity", "neighbours"))
    """Held-out images in pictures that show some, a choice by data.cut_seed."""
    patches: int | tuple[int, ...] | None = needs(None, pictures=("similarity", "neighbours"))
    """Patches that similarity starts from, counted row by row from 0; the first one is that of neighbours. null: some
    that are spread over the image, and the middle one."""
    attention_images: int = needs(128, pictures="attention_distance")
    """Held-out images that attention distance is averaged over."""
    residual: bool = needs(False, pictures="attention_rollout")
    """Average each layer of the rollout with the identity, for the residual connection."""
    rollout_from: Literal["auto", "class", "patches"] = needs("auto", pictures="attention_rollout")
    """Where rollout starts. auto: [class], but the mean of the patches where [class] was not trained for itself."""
    bands: int | tuple[int, ...] | None = None
    """Which channels pictures show as red, green and blue, or the one that is grey, counted from 1: [3, 2, 1]. null:
    RGB and grey as they are; of several others each, side by side, or their mean where something is laid over them."""
    representation: Representation = needs("mean", pictures=("rank", "accuracy_by_depth"))
    """What rank and accuracy_by_depth are of."""
    threads: int = operational(0)
    """CPU threads. 0: all cores."""

    def __post_init__(self):
        as_lists(self, "pictures")
        if self.bands is not None:
            as_lists(self, "bands")
            fits = len(self.bands) in (1, 3) and min(self.bands) >= 1
            require(fits, "bands", list(self.bands), "one or three numbers from 1")
        if self.patches is not None:
            as_lists(self, "patches")
            fits = len(self.patches) > 0 and min(self.patches) >= 0
            require(fits, "patches", list(self.patches), "a list of numbers from 0")
        require(len(self.pictures) > 0, "pictures", list(self.pictures), f"a list of some of {', '.join(EVERY)}")
        for name in ("images", "attention_images"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


@dataclass(frozen=True)
class ReportConfig(EncoderConfig):
    """A page on a run: its verdict, curves and pictures."""

    out: str | None = operational(None)
    """File that is written. null: report.html in the run folder."""
    images: int = 4
    """Held-out images in pictures that show some, a choice by data.cut_seed."""
    compared: int = 1024
    """At most so many held-out images are neighbours of each other, and on the map."""
    threads: int = operational(0)
    """CPU threads. 0: all cores."""

    def __post_init__(self):
        require(self.images >= 1, "images", self.images, "at least 1")
        require(self.compared >= 2, "compared", self.compared, "at least 2")


@dataclass(frozen=True)
class MaskedConfig:
    """Held-out accuracy on masked patches."""

    encoder: str = "runs/birds"
    """Folder of a pre-training run."""
    out: str | None = operational(None)
    """File that is written. null: evaluation/ in the run folder."""


@dataclass(frozen=True)
class HeadConfig:
    """The classifier on top of the encoder, in supervised training."""

    kind: HeadKind = "mlp_tanh"
    """mlp_tanh: one tanh hidden layer as wide as the encoder (the paper's, for ViTs); linear: one layer."""
    pooling: Pooling = "auto"
    """What it is on: `class` token or `mean` over patches or places, equal once each has its own learning rate (paper,
    appendix D.3); auto: [class] where there is one."""


@dataclass(frozen=True)
class DistillConfig:
    """Learning from a teacher too, through a distillation token with a head of its own (DeiT)."""

    teacher: str | None = operational(None)  # it may move: teacher_sha256 says which it is
    """Folder of a finished supervised or fine-tuned run, or of timm's (config.json, model.safetensors) with a head.
    null: no teacher, and no such token."""
    kind: Literal["hard", "soft"] = needs("hard", teacher=True)
    """What is learned of the teacher. hard: the class that it finds likeliest; soft: its probabilities."""
    temperature: float = needs(3.0, teacher=True, kind="soft")
    """What the logits of both are divided by, of soft (DeiT: 3)."""
    weight: float | None = needs(None, teacher=True)
    """Share of the loss that is the teacher's; the rest is the labels'. null: DeiT's, 0.5 of hard and 0.1 of soft."""
    teacher_sha256: str | None = needs(None, teacher=True)
    """Of the teacher's weights: a run is not resumed with others. null: looked up when the run begins."""

    def __post_init__(self):
        require(0 < self.temperature < math.inf, "distill.temperature", self.temperature, "above 0")
        weight = self.weight
        require(weight is None or 0 <= weight <= 1, "distill.weight", weight, "from 0 to 1, or null")
        if self.teacher is not None and self.teacher_sha256 is None:
            folder, said = Path(self.teacher), " ".join(self.teacher.split())  # in one line
            require(folder.is_dir(), "distill.teacher", said, "a folder: of a finished run, or of timm's")
            object.__setattr__(self, "teacher_sha256", fingerprint(folder))

    @property
    def share(self) -> float:
        """The teacher's share of the loss."""
        return WEIGHTS[self.kind] if self.weight is None else self.weight


@dataclass(frozen=True)
class SupervisedConfig:
    """Supervised pre-training from scratch."""

    run: RunConfig = group(lambda: RunConfig(dir="runs/birds_supervised"), check=OF_PRETRAINING)
    data: DataConfig = field(default_factory=lambda: DataConfig(eval_images=1_000_000))
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3))

    def __post_init__(self):
        self.optim.check_warmup(self.run.steps)


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tune an encoder on labelled images."""

    encoder: str = "runs/birds"
    """Run folder, encoder folder, or timm model name (randomly initialised, or with --checkpoint)."""
    checkpoint: str | None = None
    """Local .safetensors file with the weights of a timm model name."""
    init: Literal["encoder", "random"] = "encoder"
    """random: the same architecture and recipe from random weights."""
    img_size: int | tuple[int, int] | None = None
    """Side of the images, or height and width; position embeddings are interpolated in 2-D (paper: 384). null: the
    encoder's own."""
    pooling: Pooling = "auto"
    """What the linear layer is on: `class` token or `mean` over patches; auto: [class] where there is one."""
    drop_path: float | None = None
    """Stochastic depth rate of the last block, rising linearly from 0. null: the encoder's own (mostly 0)."""
    activation_checkpointing: bool = operational(False)
    """Keep one activation a block and compute the rest again in the backward pass: less memory, a forward pass more."""
    lrs: float | tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)
    """Learning rates (in place of optim.lr), compared on the dev split (the paper's Table 4); one is not compared."""
    dev_fraction: float = 0.1
    """Share of train that is the dev split (the paper: 10 % Pets and Flowers, 2 % CIFAR, 1 % ImageNet)."""
    dev_steps: int | None = None
    """Updates of the runs that compare rates, each with a whole schedule. null: as many as run.steps."""
    test: bool = True
    """Train on all of train at the best rate and test. False: stop after the comparison."""
    out: str | None = operational(None)
    """JSON file of the result. null: finetune.json in run.dir."""
    run: RunConfig = group(
        lambda: RunConfig(dir="runs/birds_finetuned", steps=500, report=False),
        eval_every="each run of fine-tuning is evaluated once, at its end",
        keep_best="each run of fine-tuning is evaluated once, at its end",
        check=OF_PRETRAINING,
    )
    data: DataConfig = field(default_factory=lambda: DataConfig(eval_images=1_000_000))
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = group(
        lambda: OptimConfig(name="sgd", lr=0.01, weight_decay=0.0, warmup_steps=0, global_batch_size=64),
        lr="the rates of fine-tuning are lrs (--lrs 0.01)",
    )

    def __post_init__(self):
        as_lists(self, "lrs")
        require(len(self.lrs) > 0 and min(self.lrs) > 0, "lrs", list(self.lrs), "a list of positive numbers")
        drop_path = self.drop_path
        require(drop_path is None or 0 <= drop_path < 1, "drop_path", drop_path, "at least 0 and below 1, or null")
        require(0 < self.dev_fraction < 1, "dev_fraction", self.dev_fraction, "above 0 and below 1")
        self.optim.check_warmup(self.run.steps)
        if self.dev_steps is not None:
            require(self.dev_steps >= 1, "dev_steps", self.dev_steps, "at least 1, or null")
            self.optim.check_warmup(self.dev_steps, "dev_steps")


@dataclass(frozen=True)
class OneRunConfig(FinetuneConfig):
    """One of the runs that fine-tuning consists of: `optim.lr` is its rate."""

    on_dev: bool = False
    """Train without the dev split and evaluate on it, in place of all of train and the held-out split."""
    encoder_sha256: str = ""
    """Of the weights that it starts from: a run is not resumed, or taken for done, from others."""


@dataclass(frozen=True)
class ViewsConfig:
    """What becomes of a view beyond its crop and flip (SimCLR, appendix A; on CIFAR jitter 0.5 and no blur)."""

    jitter: float = 1.0
    """Strength s of colour jitter: brightness, contrast and saturation by up to 0.8 s, hue by up to 0.2 s."""
    jitter_probability: float = needs(0.8, jitter=True)
    """Share of the views whose colours are jittered."""
    grey: float = 0.2
    """Share of the views that become grey."""
    blur: float = 0.5
    """Share of the views that are blurred, by a Gaussian of 0.1 to 2 pixels in a window of a tenth of the side."""

    def __post_init__(self):
        require(0 <= self.jitter <= 2.5, "views.jitter", self.jitter, "from 0 to 2.5")
        for name in ("jitter_probability", "grey", "blur"):
            require(0 <= getattr(self, name) <= 1, f"views.{name}", getattr(self, name), "in [0, 1]")


@dataclass(frozen=True)
class ProjectionConfig:
    """The projection head: one hidden layer (ReLU). It is left out when the encoder is exported."""

    pooling: Literal["class", "mean"] = "mean"
    """What it is on: the `class` token, or the `mean` over patches or places."""
    hidden: int | None = None
    """Width of the hidden layer. null: the encoder's."""
    outputs: int = 128
    """Numbers that it gives a view."""

    def __post_init__(self):
        require(self.hidden is None or self.hidden >= 1, "head.hidden", self.hidden, "at least 1, or null")
        require(self.outputs >= 1, "head.outputs", self.outputs, "at least 1")


@dataclass(frozen=True)
class ContrastConfig:
    """The loss: NT-Xent. The negatives are all other views of a forward pass, whose size then matters."""

    temperature: float = 0.1
    """What similarities are divided by (SimCLR: 0.1; 0.5 on CIFAR-10)."""

    def __post_init__(self):
        require(self.temperature > 0, "contrast.temperature", self.temperature, "above 0")


@dataclass(frozen=True)
class ContrastiveConfig:
    """Contrastive pre-training (SimCLR). The paper's LARS is not there: `optim.name` is muon, adam or sgd."""

    run: RunConfig = group(lambda: RunConfig(dir="runs/birds_simclr", steps=1200), check=OF_PRETRAINING)
    data: DataConfig = field(default_factory=lambda: DataConfig(crop_area=(0.08, 1.0)))
    model: ModelConfig = field(default_factory=ModelConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    head: ProjectionConfig = field(default_factory=ProjectionConfig)
    contrast: ContrastConfig = field(default_factory=ContrastConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(name="muon", lr=1e-3, betas=(0.9, 0.95), global_batch_size=64)
    )
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self):
        self.optim.check_warmup(self.run.steps)


@dataclass(frozen=True)
class ThroughputConfig:
    """Throughput of training, against other code and the machine's limits."""

    model: str = needs("vit_tiny_patch16_224", sizes=False)
    """A timm VisionTransformer, at its own image size."""
    batch_size: int = 16
    """Images a step."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type. auto: bf16 where the hardware computes in it."""
    compile: bool = False
    """Compile all models that are trained with torch.compile."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU where there is one."""
    rounds: int = 15
    """Rounds that count, after three that do not."""
    jpeg_side: int = needs(256, sizes=False)
    """Shorter side of the files that are loaded from; mpp.prepare makes them 256."""
    workers: int = needs(2, sizes=False)
    """Loader processes of the end-to-end update."""
    memory: bool = needs(True, sizes=False)
    """Measure memory too: each peer in a process of its own."""
    sizes: tuple[str, ...] = ()
    """In place of all else: these models' update, at half the batch and at the whole one."""
    out: str | None = None
    """JSON file of all figures. null: none."""

    def __post_init__(self):
        for name in ("batch_size", "rounds", "jpeg_side"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


@dataclass(frozen=True)
class GpuReportConfig:
    """What mpp does on this machine's GPU, in one text file."""

    out: str = "gpu_report.txt"
    """The file."""
    batch_size: int = 64
    """Images a step, of throughput and memory."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu rehearses the report."""


@dataclass(frozen=True)
class CompareConfig:
    """A comparison of encoders."""

    dir: str = "runs/compare"
    """Folder of results.json, table.md, the plots, and each evaluation's report."""
    encoders: tuple[dict[str, Any], ...] = ()
    """Rows: {name, encoder, random, options, seeds, train, train_options, compute}; name and encoder are needed."""
    evaluations: tuple[dict[str, Any], ...] = ()
    """{name, command, options}: command is fewshot, knn, linear, segmentation, finetune or masked."""
    datasets: tuple[dict[str, Any], ...] = ({"name": "birds"},)
    """{name, options, group}: options have data.path and the like."""
    questions: tuple[dict[str, Any], ...] = ({"name": "comparison"},)
    """{name, title, encoders, evaluations, plot, x, lines}: a table and a plot each. Only what is asked for is done."""
    extends: str | None = None
    """The results.json of another comparison: results with the same digest are taken from there, and not done again."""
    tabulate: bool = False
    """Only write what is there already: a look at a comparison that is under way."""

    def __post_init__(self):
        for key in ("encoders", "evaluations", "datasets", "questions"):
            require(len(getattr(self, key)) > 0, key, "empty", "a list in a --config file; see configs/compare")

"""Settings: typed, frozen, validated, and the only place where a default is written.

The names are those of the command line (mpp/runtime/parsing.py): `--optim.lr 1e-3`. Fields marked `plumbing` change
how a run is carried out and watched, not what it computes: only they may differ when a run is resumed.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from mpp.errors import UserError


def plumbing(default: Any) -> Any:
    """A field whose value may change when a run is resumed: it does not enter the science."""
    return field(default=default, metadata={"plumbing": True})


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise the one-line error of a setting that is out of range."""
    if not condition:
        raise UserError(f"{key} is {value}; it must be {allowed}")


def as_lists(config: Any, *names: str) -> None:
    """Let settings that are lists be given as one value: `--shots 5` for `--shots [5]`."""
    for name in names:
        value = getattr(config, name)
        object.__setattr__(config, name, tuple(value) if isinstance(value, tuple | list) else (value,))


@dataclass(frozen=True)
class RunConfig:
    """The run: where it is written, how long it is, how it is watched."""

    dir: str = plumbing("runs/birds")
    """Run folder. The same command with the same folder resumes from its newest complete checkpoint."""
    steps: int = 1600
    """Optimiser updates."""
    seed: int = 0
    """Seed of the weights, the data order and every sample's randomness."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type. auto: the launcher's choice, else bf16 where the hardware computes in it, else fp32."""
    compile: bool = False
    """Compile the model with torch.compile (pays on a GPU)."""
    log_every: int = plumbing(20)
    """Updates between two lines of metrics."""
    eval_every: int = plumbing(400)
    """Updates between two evaluations on the held-out images."""
    checkpoint_every: int = plumbing(400)
    """Updates between two checkpoints."""
    keep_checkpoints: int = plumbing(2)
    """How many of the newest checkpoints stay on disk."""
    threads: int = plumbing(0)
    """CPU threads per process. 0: OMP_NUM_THREADS where it is above 1, else the cores shared by the local processes."""
    trackers: tuple[str, ...] = plumbing(("tensorboard",))
    """Accelerate trackers that receive the metrics (tensorboard, wandb, ...); metrics.jsonl is always written."""
    project: str = plumbing("mpp")
    """Project of wandb, in which each run folder is one run."""

    def __post_init__(self):
        for name in ("steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"):
            require(getattr(self, name) >= 1, f"run.{name}", getattr(self, name), "at least 1")
        require(0 <= self.seed < 2**63, "run.seed", self.seed, "at least 0 and below 2**63")
        require(self.threads >= 0, "run.threads", self.threads, "0 (automatic) or more")


@dataclass(frozen=True)
class ImagesConfig:
    """The images: where they are."""

    path: str | None = None
    """A hub dataset, a folder of images, a folder, file or URL of shards (parquet, arrow, tar). null: our birds."""
    name: str | None = None
    """Config name of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset. null: its main branch, as it is when the run begins."""
    image_column: str | None = None
    """Column of the images. null: the only image column."""
    label_column: str | None = None
    """Column of class labels. null: `label` where it exists. Negative or null: the image has no label."""
    max_pixels: int = 100_000_000
    """Images with more pixels are refused from their header, before they are decoded."""
    read_retries: int = plumbing(6)
    """How often a file that cannot be read is tried again, after 1, 2, 4, ... (at most 60) seconds; then a run ends."""

    def __post_init__(self):
        require(self.max_pixels >= 1, "data.max_pixels", self.max_pixels, "at least 1")
        require(0 <= self.read_retries <= 20, "data.read_retries", self.read_retries, "from 0 to 20")


@dataclass(frozen=True)
class SourceConfig(ImagesConfig):
    """The images: where they come from."""

    split: str = "train"
    """Split to train on."""
    eval_split: str | None = "auto"
    """Held-out split. auto: `validation` or `test` where there is one, else a seeded cut. null: always a seeded cut."""
    eval_fraction: float = 0.05
    """Share of the images that the seeded cut holds out."""
    cut_seed: int = 0
    """Seed of what is held out: the cut, the choice of eval_images, their corruption. Replicates share it."""
    eval_seed: int = 0
    """Seed of train_images and of fine-tuning's dev split: not the run's, so that other runs see the same images."""
    eval_label_column: str | None = None
    """Column of the held-out split's labels, where it is another; lists are several right answers (ImageNet ReaL)."""
    train_images: int | None = None
    """Train on a seeded choice of so many images (labelled ones, where labels are used; VTAB: 1000). null: all."""
    batch_size: int | None = plumbing(None)
    """Images per process and forward pass, at most. null: in training, its whole share of the global batch; else 64."""
    workers: int = plumbing(2)
    """Loader processes per training process. 0: load in the training process, as is done anyway where one or two
    threads of a CPU train on decoded images (data.cache_gb)."""

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "above 0 and below 1")
        for name in ("cut_seed", "eval_seed"):
            require(0 <= getattr(self, name) < 2**63, f"data.{name}", getattr(self, name), "at least 0 and below 2**63")
        require(
            self.train_images is None or self.train_images >= 1, "data.train_images", self.train_images, "at least 1"
        )
        require(self.batch_size is None or self.batch_size >= 1, "data.batch_size", self.batch_size, "at least 1")
        require(self.workers >= 0, "data.workers", self.workers, "0 or more")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The images: where they come from and how they are cropped."""

    crop_area: tuple[float, float] = (0.4, 1.0)
    """Range of the training crop's area, as a share of the image's (the inception crop of the paper: 0.05 to 1)."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Range of the training crop's width / height."""
    flip: bool = True
    """Flip half of the training crops left to right."""
    eval_crop: float = 0.875
    """Held-out images are resized so that a centre crop keeps this share of the shorter side (224 of 256: 0.875)."""
    eval_images: int = 2048
    """At most so many held-out images, a seeded choice, are evaluated."""
    cache_gb: float = plumbing(0.5)
    """Training images that take at most so many GB decoded are decoded once, at the start, and kept: by each process,
    whose loader processes share them (for a moment it needs twice as much). 0: none are."""
    streaming: bool = False
    """Read shards (parquet, arrow, WebDataset tar) as a stream: nothing is indexed, and nothing is downloaded but the
    images to evaluate on. Pre-training only."""
    shuffle_block: int = 512
    """Rows of a stream's shard that are held in memory and shuffled together."""

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.eval_crop <= 1, "data.eval_crop", self.eval_crop, "above 0 and at most 1")
        require(0 <= self.cache_gb < math.inf, "data.cache_gb", self.cache_gb, "0 or more")
        require(self.eval_images >= 1, "data.eval_images", self.eval_images, "at least 1")
        require(self.shuffle_block >= 1, "data.shuffle_block", self.shuffle_block, "at least 1")
        low, high = self.crop_area
        require(0 < low <= high <= 1, "data.crop_area", list(self.crop_area), "two ascending numbers in (0, 1]")
        low, high = self.crop_ratio
        require(0 < low <= high, "data.crop_ratio", list(self.crop_ratio), "two ascending positive numbers")


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation beyond crop and flip, and what goes with it: for training with labels (DeiT, BEiT, MAE)."""

    randaugment: int = 0
    """Magnitude of RandAugment, 1 to 30: two random operations an image (Cubuk et al., 2020; DeiT: 9). 0: none."""
    mixup: float = 0.0
    """Alpha of mixup: each image is blended with another of its forward pass, whose size then matters. 0: none."""
    cutmix: float = 0.0
    """Alpha of CutMix: a part of each image comes from another. With mixup too, a forward pass draws one of them."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""

    def __post_init__(self):
        require(0 <= self.randaugment <= 30, "augment.randaugment", self.randaugment, "from 1 to 30, or 0: none")
        for name in ("mixup", "cutmix"):
            require(0 <= getattr(self, name) < math.inf, f"augment.{name}", getattr(self, name), "0 (none) or more")
        smoothing = self.label_smoothing
        require(0 <= smoothing < 1, "augment.label_smoothing", smoothing, "at least 0 and below 1")


@dataclass(frozen=True)
class ModelConfig:
    """The encoder: one of timm's Vision Transformers, or a plain one by its numbers."""

    name: str | None = None
    """A timm VisionTransformer (vit_base_patch16_224, ...). null: a plain one of the five numbers below."""
    width: int | None = None
    """Width of the tokens. null: the named model's, or 128."""
    depth: int | None = None
    """Transformer blocks. null: the named model's, or 4."""
    heads: int | None = None
    """Attention heads. null: the named model's, or 4."""
    img_size: int | None = None
    """Side of the square input in pixels. null: the named model's, or 64."""
    patch_size: int | None = None
    """Side of a patch in pixels. null: the named model's, or 8."""
    position: Literal["learned", "sincos_2d"] = "learned"
    """Position embeddings. learned: timm's; sincos_2d: a fixed table of sines and cosines of row and column (MAE)."""
    dropout: float = 0.0
    """Dropout after position embeddings and every dense layer but qkv (paper, Table 3)."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block, rising linearly from 0."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """timm's attention. auto: fused on a GPU, unfused on a CPU, where it is faster."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Channel means that the input is normalised with (of pixels scaled to [0, 1])."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Channel deviations that the input is normalised with."""
    activation_checkpointing: bool = plumbing(False)
    """Keep one activation a block and compute the rest again in the backward pass: less memory, a forward pass more."""
    init_from: str | None = None
    """Run folder, encoder folder or .safetensors file to start the encoder from. null: random weights."""

    def numbers(self) -> dict[str, int | None]:
        """The five numbers; None: the named model's own."""
        plain = dict(width=128, depth=4, heads=4, img_size=64, patch_size=8) if self.name is None else {}
        given = {name: getattr(self, name) for name in ("width", "depth", "heads", "img_size", "patch_size")}
        return {name: plain.get(name) if value is None else value for name, value in given.items()}

    def __post_init__(self):
        numbers = self.numbers()
        for name, value in numbers.items():
            require(value is None or value >= 1, f"model.{name}", value, "at least 1")
        if numbers["img_size"] and numbers["patch_size"]:
            check_grid(numbers["img_size"], numbers["patch_size"])
        width, heads = numbers["width"], numbers["heads"]
        if width and heads:
            require(width % heads == 0, "model.width", width, f"a multiple of model.heads ({heads})")
        for name in ("dropout", "drop_path"):
            require(0 <= getattr(self, name) < 1, f"model.{name}", getattr(self, name), "at least 0 and below 1")
        require(all(0 < s < math.inf for s in self.std), "model.std", list(self.std), "three positive numbers")
        require(all(map(math.isfinite, self.mean)), "model.mean", list(self.mean), "three numbers")


def check_grid(img_size: int, patch_size: int, key: str = "model.img_size") -> None:
    """An image is a whole number of patches."""
    require(img_size % patch_size == 0, key, img_size, f"a multiple of the patch size ({patch_size})")


@dataclass(frozen=True)
class CorruptionConfig:
    """Which patch embeddings are corrupted, and how (paper, appendix B.1.2)."""

    pattern: str = "random"
    """random: any patches; blocks: whole squares of patches (SimMIM); blockwise: rectangles of all sizes (BEiT)."""
    block: int = 2
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
    source: Literal["image", "batch"] = "image"
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
    decoder_width: int | None = None
    """Width of the autoencoder's decoder. null: two thirds of the encoder's in steps of 32, at most 512 (MAE's)."""
    decoder_depth: int | None = None
    """Blocks of the decoder. null: two thirds of the encoder's, at most 8 (MAE's)."""
    decoder_heads: int | None = None
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
    loss: Literal["l1", "l2"] = "l2"
    """Distance from the true pixels or hog: mean absolute (SimMIM) or mean squared difference."""
    normalize: Literal["none", "patch"] = "none"
    """patch: of pixels, each patch is predicted less its own mean and over its own deviation (MAE)."""
    bits: int = 3
    """Bits per colour channel of the colour objectives and of every accuracy: 3 bits are 512 colours."""
    grid: int = 4
    """Cells per side of grid_color."""
    cell: int = 8
    """Side of a cell of hog in pixels; a smaller patch is one cell."""

    def __post_init__(self):
        require(1 <= self.bits <= 5, "objective.bits", self.bits, "from 1 to 5")
        for name in ("grid", "cell"):
            require(getattr(self, name) >= 1, f"objective.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser: warm-up, decay, clipping, averaging."""

    name: Literal["muon", "adam", "sgd"] = "adam"
    """muon: orthogonalised momentum for the blocks' matrices and Adam for all else (Jordan et al., 2024; timm's);
    adam: with decoupled weight decay, the paper's; sgd: with momentum, the paper's for fine-tuning."""
    lr: float = 3e-3
    """Base learning rate, reached after the warm-up. It never depends on the number of processes. Muon's is at Adam's
    scale (Liu et al., 2025)."""
    adam_scale: float = 1.0
    """Learning rate of Muon's Adam part, as a multiple of lr."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay to 0 over the steps after the warm-up."""
    warmup_steps: int = 100
    """Updates of linear warm-up from 0."""
    global_batch_size: int = 32
    """Images per update over all processes, which share them out; accumulation follows from data.batch_size."""
    weight_decay: float = 0.1
    """Weight decay, times the learning rate; none on biases, norms, tokens and position embeddings."""
    layer_decay: float | None = None
    """Each layer's learning rate, as a share of that of the layer above it (BEiT and MAE fine-tune with 0.65 to 0.75).
    null: one rate for all."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates, also those of muon's Adam."""
    momentum: float | None = None
    """Momentum of muon (Nesterov's; null: 0.95) or sgd (null: 0.9)."""
    clip: float | None = 1.0
    """Largest global norm of the gradient. null: no clipping."""
    average: float | None = None
    """Decay of Polyak averaging (the paper's Table 2: 0.9999): the average is evaluated and exported. null: none."""

    def __post_init__(self):
        if self.momentum is None:
            object.__setattr__(self, "momentum", 0.95 if self.name == "muon" else 0.9)
        require(0 < self.lr < math.inf, "optim.lr", self.lr, "above 0")
        require(0 < self.adam_scale < math.inf, "optim.adam_scale", self.adam_scale, "above 0")
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more")
        require(self.global_batch_size >= 1, "optim.global_batch_size", self.global_batch_size, "at least 1")
        require(0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, "0 or more")
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", list(self.betas), "two numbers in [0, 1)")
        decay = self.layer_decay
        require(decay is None or 0 < decay <= 1, "optim.layer_decay", decay, "above 0 and at most 1, or null")
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "at least 0 and below 1")
        require(self.clip is None or self.clip > 0, "optim.clip", self.clip, "above 0, or null")
        require(self.average is None or 0 < self.average < 1, "optim.average", self.average, "in (0, 1), or null")


@dataclass(frozen=True)
class ProbeConfig:
    """The frozen features while training: effective rank and, with labels, kNN accuracy. The loss shows neither."""

    every: int = plumbing(400)
    """Updates between two probes: every so many, where run.eval_every is due too. 0: never."""
    images: int = plumbing(2000)
    """At most so many labelled training images, a seeded choice, are compared with."""
    neighbours: int = plumbing(20)
    """Neighbours that vote."""

    def __post_init__(self):
        require(self.every >= 0, "probe.every", self.every, "0 (never) or more")
        require(self.images >= 1, "probe.images", self.images, "at least 1")
        require(self.neighbours >= 1, "probe.neighbours", self.neighbours, "at least 1")


@dataclass(frozen=True)
class Config:
    """Masked patch prediction pre-training. The defaults are what a search found for the birds: configs/README.md."""

    run: RunConfig = field(default_factory=lambda: RunConfig(steps=1200))
    data: DataConfig = field(default_factory=lambda: DataConfig(crop_area=(0.5, 1.0)))
    model: ModelConfig = field(default_factory=ModelConfig)
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            name="muon", lr=1e-2, adam_scale=3.0, betas=(0.9, 0.95), global_batch_size=64
        )
    )
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self):
        fits = self.corruption.mask == 1 or self.network.name != "autoencoder"
        allowed = "1 (random and keep: 0) with network.name=autoencoder, whose encoder does not see corrupted patches"
        require(fits, "corruption.mask", self.corruption.mask, allowed)

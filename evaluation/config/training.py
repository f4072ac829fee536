"""Settings of commands that train: supervised, fine-tuning, contrastive."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from evaluation.config.frozen import LabelTask, NumberLoss, Numbers
from mpp.config import (
    AugmentConfig,
    DataConfig,
    ImageSize,
    ModelConfig,
    OptimConfig,
    RunConfig,
    RunProbeConfig,
    Settings,
    TrainingConfig,
    flatten,
    group,
    require,
    setting,
)

Pooling = Literal["auto", "class", "mean"]
HeadKind = Literal["mlp_tanh", "linear"]
DEIT_WEIGHTS = {"hard": 0.5, "soft": 0.1}
"""The teacher's share of the loss by kind of distillation (DeiT, equation 3 and section 6)."""
TRAIN_WHOLE = "supervised training trains the whole encoder"
WITH_TEACHER = {"distill.teacher": True}
OF_STREAMS = dict.fromkeys(("streaming", "shuffle_block"), "only masked patch prediction reads a stream of images")


@dataclass(frozen=True)
class HeadConfig(Settings):
    """The classifier on top of the encoder, in supervised training."""

    kind: HeadKind = "mlp_tanh"
    """Head. mlp_tanh: one tanh hidden layer as wide as the encoder (the paper's, for ViTs); linear: one layer."""
    pooling: Pooling = "auto"
    """Pooling: `class` token or `mean` over patches or places, equally good at their own learning rates (paper,
    appendix D.3); auto: [class] if there is one."""


@dataclass(frozen=True)
class DistillConfig(Settings):
    """Distillation from a teacher through a distillation token with its own head (DeiT)."""

    teacher: str | None = setting(None, operational=True)  # it may move: teacher_sha256 says which it is
    """Teacher: the folder of a finished supervised or fine-tuned run, or of a timm model with a head (config.json,
    model.safetensors). null: no teacher, and no distillation token."""
    kind: Literal["hard", "soft"] = setting("hard", needs=WITH_TEACHER)
    """Target from the teacher. hard: its most likely class; soft: its probabilities."""
    temperature: float = setting(3.0, above=0, needs={"distill.teacher": True, "distill.kind": "soft"})
    """Temperature of soft distillation: divisor of both logits (DeiT: 3)."""
    weight: float | None = setting(None, at_least=0, at_most=1, needs=WITH_TEACHER)
    """Weight of the teacher's loss; the labels get the rest. null: as in DeiT, 0.5 for hard and 0.1 for soft."""
    teacher_sha256: str | None = setting(None, needs=WITH_TEACHER)
    """Checksum of the teacher's weights; a run cannot be resumed with others. null: computed when the run begins."""

    @property
    def share(self) -> float:
        """The teacher's share of the loss."""
        return DEIT_WEIGHTS[self.kind] if self.weight is None else self.weight


@dataclass(frozen=True)
class SupervisedConfig(TrainingConfig):
    """Supervised pre-training from scratch."""

    task: LabelTask = "auto"
    """Kind of label: see `mpp linear --help`. Mixup, CutMix, label smoothing and a teacher are for one class."""
    loss: NumberLoss = setting("l2", needs={"task": ("auto", "number")})
    """Loss of numbers. l2: squared error; l1: absolute error."""
    run: RunConfig = RunConfig(dir="runs/{data}_supervised")
    data: DataConfig = group(DataConfig(eval_images=1_000_000), **OF_STREAMS)
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = group(ModelConfig(), train=TRAIN_WHOLE, lora_rank=TRAIN_WHOLE)
    head: HeadConfig = HeadConfig()
    distill: DistillConfig = DistillConfig()
    optim: OptimConfig = OptimConfig(lr=1e-3)
    on_dev: ClassVar[bool] = False

    def check(self):
        self.optim.check_length(self.run.steps)
        check_colours(self, "augment.randaugment")

    @property
    def weights(self) -> str:
        """Place or name of the weights that it begins from; empty: they are random."""
        return self.model.init_from or ""


@dataclass(frozen=True)
class FinetuneConfig(TrainingConfig):
    """Fine-tune an encoder on labelled images."""

    encoder: str = "runs/birds"
    """Encoder to fine-tune: a run folder, encoder folder, zoo:NAME, hf-hub:NAME, or the name of a timm model (with its
    published weights)."""
    checkpoint: str | None = setting(None, needs={"init": "encoder"})
    """Local .safetensors file with the weights of a timm model, instead of its published ones."""
    init: Literal["encoder", "random"] = "encoder"
    """Initial weights. random: the same architecture and recipe from random weights."""
    img_size: int | ImageSize | None = None
    """Input size, a side or height and width; position embeddings are interpolated in 2-D (paper: 384). null: the
    encoder's own."""
    pooling: Pooling = "auto"
    """Pooling before the linear layer: `class` token or `mean` over patches; auto: [class] if there is one."""
    drop_path: float | None = setting(None, at_least=0, below=1)
    """Stochastic depth rate of the last block, rising linearly from 0. null: the encoder's own (mostly 0)."""
    activation_checkpointing: bool = setting(False, operational=True)
    """Keep one activation per block and recompute the rest in the backward pass: less memory, one more forward pass."""
    lrs: Numbers = setting((0.001, 0.003, 0.01, 0.03), above=0, distinct=True)
    """Learning rates (instead of optim.lr), compared on the dev split if there are several (the paper's Table 4)."""
    dev_fraction: float = setting(0.1, above=0, below=1)
    """Dev split as a share of the training images (paper: 10 % Pets and Flowers, 2 % CIFAR, 1 % ImageNet)."""
    dev_steps: int | None = setting(None, at_least=1)
    """Steps of the runs that compare rates, each with a whole schedule; at most, and with null, run.steps."""
    task: LabelTask = "auto"
    """Kind of label: see `mpp linear --help`. Mixup, CutMix, label smoothing and a teacher are for one class."""
    loss: NumberLoss = setting("l2", needs={"task": ("auto", "number")})
    """Loss of numbers. l2: squared error; l1: absolute error."""
    test: bool = True
    """Train on all training images at the best rate, then test. false: stop after the comparison."""
    out: str | None = setting(None, operational=True)
    """JSON file of the result, besides finetune.json in run.dir."""
    run: RunConfig = group(
        RunConfig(dir="runs/{data}_finetuned", steps=500, report=False),
        eval_every="each run of fine-tuning is evaluated once, at its end",
        keep_best="each run of fine-tuning is evaluated once, at its end",
        keep_at="no run branches from fine-tuning",
        branch_from="fine-tuning is several runs",
    )
    data: DataConfig = group(DataConfig(eval_images=1_000_000), **OF_STREAMS)
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = group(
        OptimConfig(name="sgd", lr=0.01, weight_decay=0.0, warmup_steps=0, global_batch_size=64),
        lr="set the learning rates of fine-tuning with lrs (--lrs 0.01)",
    )
    distill: ClassVar[DistillConfig] = DistillConfig()

    def check(self):
        self.optim.check_length(self.run.steps)
        check_colours(self, "augment.randaugment")
        require(self.test or len(self.lrs) > 1, "test", self.test, "true with one of lrs: nothing would be trained")
        if self.dev_steps is not None:
            self.optim.check_length(self.dev_steps, "dev_steps")

    @property
    def weights(self) -> str:
        """Place or name of the weights that it begins from; empty: they are random."""
        return (self.checkpoint or self.encoder) if self.init == "encoder" else ""

    @property
    def head(self) -> HeadConfig:
        """The linear layer that takes the place of the encoder's head."""
        return HeadConfig("linear", self.pooling)


@dataclass(frozen=True)
class OneRunConfig(FinetuneConfig):
    """One run of fine-tuning, at the rate `optim.lr`."""

    on_dev: bool = False
    """Train without the dev split and evaluate on it, instead of on all training images and the held-out split."""
    encoder_sha256: str = ""
    """Checksum of the initial weights; a run with others cannot be resumed, and does not count as done."""


@dataclass(frozen=True)
class ViewsConfig(Settings):
    """Distortion of a view beyond crop and flip (SimCLR, appendix A; on CIFAR jitter 0.5 and no blur)."""

    jitter: float = setting(1.0, at_least=0, at_most=2.5)
    """Strength s of colour jitter: brightness, contrast and saturation by up to 0.8 s, hue by up to 0.2 s."""
    jitter_probability: float = setting(0.8, at_least=0, at_most=1, needs={"views.jitter": True})
    """Share of the views with colour jitter."""
    grey: float = setting(0.2, at_least=0, at_most=1)
    """Share of the views converted to grey."""
    blur: float = setting(0.5, at_least=0, at_most=1)
    """Share of the views that are blurred, by a Gaussian of 0.1 to 2 pixels in a window of a tenth of the side."""


@dataclass(frozen=True)
class ProjectionConfig(Settings):
    """The projection head: one hidden layer (ReLU). It is left out when the encoder is exported."""

    pooling: Literal["class", "mean"] = "mean"
    """Pooling before the projection head: the `class` token, or the `mean` over patches or places."""
    hidden: int | None = setting(None, at_least=1)
    """Width of the hidden layer. null: the encoder's."""
    outputs: int = setting(128, at_least=1)
    """Width of its output."""


@dataclass(frozen=True)
class ContrastConfig(Settings):
    """The loss, NT-Xent. All other views of a forward pass are negatives, so its size matters."""

    temperature: float = setting(0.1, above=0)
    """Temperature: divisor of the similarities (SimCLR: 0.1; 0.5 on CIFAR-10)."""


@dataclass(frozen=True)
class ContrastiveConfig(TrainingConfig):
    """Contrastive pre-training (SimCLR). Without the paper's LARS: `optim.name` is muon, adam or sgd."""

    run: RunConfig = RunConfig(dir="runs/{data}_simclr", steps=1200)
    data: DataConfig = group(DataConfig(crop_area=(0.08, 1.0)), **OF_STREAMS)
    model: ModelConfig = ModelConfig()
    views: ViewsConfig = ViewsConfig()
    head: ProjectionConfig = ProjectionConfig()
    contrast: ContrastConfig = ContrastConfig()
    optim: OptimConfig = OptimConfig(name="muon", lr=1e-3, betas=(0.9, 0.95), global_batch_size=64)
    probe: RunProbeConfig = RunProbeConfig()

    def check(self):
        self.optim.check_length(self.run.steps)
        check_colours(self, "views.jitter", "views.grey")


def check_colours(config: TrainingConfig, *keys: str) -> None:
    """Raise UserError for augmentation of colours, by these settings, on images that are not RGB."""
    values, channels = flatten(config), config.data.channels
    for key in keys:
        allowed = f"0 with {channels} channels: it changes colours"
        require(channels == 3 or values[key] == 0, key, values[key], allowed)

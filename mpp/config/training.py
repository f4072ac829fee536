"""Settings of training: the run, the optimiser, the probes."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mpp.config.fields import at_least, needs, operational, require


@dataclass(frozen=True)
class RunConfig:
    """The run: where it is written, how long it is, how it is watched."""

    dir: str = operational("runs/birds")
    """Run folder. The same command with the same folder resumes from its newest complete checkpoint."""
    steps: int = 1600
    """Optimiser updates."""
    seed: int = 0
    """Seed of the weights, the data order and every sample's randomness."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type. auto: the launcher's choice, else bf16 where the hardware computes in it, else fp32."""
    reduction: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are averaged over several processes. bf16 halves what they send."""
    compile: bool = False
    """Compile the model with torch.compile (meant for GPUs)."""
    log_every: int = operational(20)
    """Updates between two lines of metrics."""
    eval_every: int = operational(400)
    """Updates between two evaluations on the held-out images."""
    checkpoint_every: int = operational(400)
    """Updates between two checkpoints."""
    keep_checkpoints: int = operational(2)
    """How many of the newest checkpoints stay on disk."""
    keep_best: bool = operational(False)
    """Keep the encoder whose features were best in `encoder_best`, beside the last: by kNN accuracy on the held-out
    images or, without labels, by the neighbours' agreement."""
    report: bool = operational(True)
    """Write a page on the run at its end, report.html: `mpp report`. Of fine-tuning: on each of its runs."""
    threads: int = operational(0)
    """CPU threads per process. 0: OMP_NUM_THREADS where it is above 1, else the cores shared by the local processes."""
    trackers: tuple[str, ...] = operational(("tensorboard",))
    """Accelerate trackers that receive the metrics (tensorboard, wandb, ...); metrics.jsonl is always written."""
    project: str = operational("mpp", trackers="wandb")
    """Project of wandb, in which each run folder is one run."""
    print_config: bool = operational(False)
    """Print all settings when the run begins, in place of those that are not the defaults. config.yaml has all."""

    def __post_init__(self):
        require(not self.dir.startswith("~"), "run.dir", self.dir, "a path without ~, which only a shell replaces")
        at_least(self, 1, "steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", prefix="run.")
        require(0 <= self.seed < 2**63, "run.seed", self.seed, "at least 0 and below 2**63")
        require(self.threads >= 0, "run.threads", self.threads, "0 (automatic) or more")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser: warm-up, decay, clipping, averaging."""

    name: Literal["muon", "adam", "sgd"] = "adam"
    """muon: orthogonalised momentum for the blocks' matrices (Jordan et al., 2024; timm's), and NAdamW for all else:
    Adam with Nesterov's momentum, decoupled weight decay and an eps of 1e-7; adam: with decoupled weight decay and an
    eps of 1e-8, the paper's; sgd: with momentum, the paper's for fine-tuning."""
    lr: float = 3e-3
    """Base learning rate, reached after the warm-up. It never depends on the number of processes. Muon's is at Adam's
    scale (Liu et al., 2025)."""
    adam_scale: float = needs(1.0, name="muon")
    """Learning rate of Muon's NAdamW part, as a multiple of lr."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay to 0 over the steps after the warm-up."""
    warmup_steps: int | None = None
    """Updates of linear warm-up from 0, fewer than run.steps. null: 100, or a fifth of run.steps where that is less."""
    global_batch_size: int = 32
    """Images per update over all processes, which share them out; accumulation follows from data.batch_size."""
    weight_decay: float = 0.1
    """Weight decay, times the learning rate; sgd's is L2, which momentum adds up (0.9: tenfold). None on biases, norms,
    tokens and position embeddings."""
    layer_decay: float | None = None
    """Each layer's learning rate, as a share of that of the layer above it (BEiT and MAE fine-tune with 0.65 to 0.75).
    null: one rate for all."""
    betas: tuple[float, float] = needs((0.9, 0.999), name=("muon", "adam"))
    """Adam's decay rates, also those of muon's NAdamW."""
    momentum: float | None = needs(None, name=("muon", "sgd"))
    """Momentum of muon (Nesterov's; null: 0.95) or sgd (null: 0.9)."""
    clip: float | None = 1.0
    """Largest global norm of the gradient. null: no clipping."""
    average: float | None = None
    """Decay of Polyak averaging (the paper's Table 2: 0.9999): the average is evaluated and exported. After t updates
    it is at most (1 + t) / (10 + t), so that first weights are forgotten. null: none."""

    def warmup(self, steps: int) -> int:
        """Updates of warm-up in a run of so many."""
        return min(100, steps // 5) if self.warmup_steps is None else self.warmup_steps

    def momentum_or_default(self) -> float | None:
        """The momentum, given or usual; None: adam has none."""
        return {"muon": 0.95, "sgd": 0.9}.get(self.name) if self.momentum is None else self.momentum

    def settled(self, steps: int) -> "OptimConfig":
        """The same with the numbers that a run of so many steps has in the place of null."""
        return replace(self, warmup_steps=self.warmup(steps), momentum=self.momentum_or_default())

    def check_warmup(self, steps: int, key: str = "run.steps") -> None:
        """Raise UserError where a run of so many steps, which `key` says, never leaves the warm-up."""
        warmup = self.warmup(steps)
        require(warmup < steps, "optim.warmup_steps", warmup, f"less than {key} ({steps}), or null")

    def __post_init__(self):
        require(0 < self.lr < math.inf, "optim.lr", self.lr, "above 0")
        require(0 < self.adam_scale < math.inf, "optim.adam_scale", self.adam_scale, "above 0")
        warmup, momentum = self.warmup_steps, self.momentum
        require(warmup is None or warmup >= 0, "optim.warmup_steps", warmup, "0 or more, or null")
        require(self.global_batch_size >= 1, "optim.global_batch_size", self.global_batch_size, "at least 1")
        require(0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, "0 or more")
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", list(self.betas), "two numbers in [0, 1)")
        decay = self.layer_decay
        require(decay is None or 0 < decay <= 1, "optim.layer_decay", decay, "above 0 and at most 1, or null")
        require(momentum is None or 0 <= momentum < 1, "optim.momentum", momentum, "at least 0 and below 1, or null")
        require(self.clip is None or self.clip > 0, "optim.clip", self.clip, "above 0, or null")
        require(self.average is None or 0 < self.average < 1, "optim.average", self.average, "in (0, 1), or null")


@dataclass(frozen=True)
class ProbeConfig:
    """The frozen features while training: effective rank and, with labels, kNN accuracy. The loss shows neither."""

    every: int = operational(400)
    """Updates between two probes: every so many, where run.eval_every is due too. 0: never."""
    images: int = operational(2000)
    """At most so many labelled training images, a seeded choice, are compared with."""
    neighbours: int = operational(20)
    """Neighbours that vote."""

    def __post_init__(self):
        require(self.every >= 0, "probe.every", self.every, "0 (never) or more")
        at_least(self, 1, "images", "neighbours", prefix="probe.")

"""Settings of training: the run, the optimiser, the probes."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mpp.config.checks import check_bounds, require
from mpp.config.fields import SEED_END, setting


@dataclass(frozen=True)
class RunConfig:
    """The run: where it is written, how long it is, how it is watched."""

    dir: str = setting("runs/birds", operational=True)
    """Run folder. The same command with the same folder resumes from its newest complete checkpoint."""
    steps: int = setting(1600, at_least=1)
    """Optimiser steps."""
    seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the weights, the data order and every sample's randomness."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type. auto: the launcher's choice, else bf16 where the hardware computes in it, else fp32."""
    reduction: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are averaged over several processes. bf16 halves what they send."""
    shard_over: Literal["all", "node"] = setting("all", operational=True)
    """Processes that share each tensor where the launcher shards the model. node: those of a machine, while the
    machines hold copies (HSDP): more memory, and between machines only gradients are sent."""
    sync_gradients: Literal["every_pass", "last_pass"] = setting("every_pass", operational=True)
    """Forward passes of a step after which sharded processes send their gradients. last_pass: less is sent, and each
    process holds the gradients of the whole model."""
    branch_from: str | None = setting(None, operational=True)
    """FOLDER@STEP: the run goes on from this checkpoint of another run, whose learning rate was the same up to it."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the model with torch.compile. auto: on a GPU, in runs of at least 2,000 steps; decided when a run begins,
    and kept when it is resumed. A run may be resumed with another value: results then differ by rounding."""
    log_every: int = setting(20, at_least=1, operational=True)
    """Steps between two lines of metrics."""
    eval_every: int = setting(400, at_least=0, operational=True)
    """Steps between two evaluations on the held-out images. 0: never."""
    checkpoint_every: int = setting(400, at_least=1, operational=True)
    """Steps between two checkpoints."""
    keep_checkpoints: int = setting(2, at_least=1, operational=True)
    """Number of the newest checkpoints that stay on disk."""
    keep_at: tuple[int, ...] | None = setting(None, at_least=1, listed=True, operational=True)
    """Steps after which a checkpoint is written and always stays, so that a run can branch from it: also where a later
    command does not repeat them. With optim.schedule wsd the one where the cooldown of run.steps begins stays, too."""
    keep_best: bool = setting(False, needs={"eval_every": True}, operational=True)
    """Keep the encoder whose features were best in `encoder_best`, beside the last: by kNN accuracy on the held-out
    images or, without labels, by the neighbours' agreement. Of a branch, since it began."""
    report: bool = setting(True, operational=True)
    """Write a page on the run at its end, report.html: `mpp report`. Of fine-tuning: on each of its runs."""
    threads: int = setting(0, at_least=0, operational=True)
    """CPU threads per process. 0: OMP_NUM_THREADS where it is above 1, else the cores shared by the local processes."""
    trackers: tuple[str, ...] = setting(("tensorboard",), operational=True)
    """Accelerate trackers that receive the metrics (tensorboard, wandb, ...); metrics.jsonl is always written."""
    project: str = setting("mpp", needs={"trackers": "wandb"}, operational=True)
    """Project of wandb, in which each run folder is one run."""
    print_config: bool = setting(False, operational=True)
    """Print all settings when the run begins, in place of those that are not the defaults. config.yaml has all."""

    def __post_init__(self):
        check_bounds(self, "run.")
        require(not self.dir.startswith("~"), "run.dir", self.dir, "a path without ~, which only a shell replaces")
        for step in self.keep_at or ():
            require(step <= self.steps, "run.keep_at", step, f"at most run.steps ({self.steps})")
        if self.branch_from is not None:
            folder, _, step = self.branch_from.rpartition("@")
            allowed = "FOLDER@STEP, such as runs/trunk@8000"
            require(bool(folder) and step.isdecimal(), "run.branch_from", self.branch_from, allowed)

    @property
    def encoders_on_disk(self) -> int:
        """The largest number of exported encoders that a run has at once: the last; the best, and one in its place."""
        return 3 if self.keep_best else 1


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser: warm-up, decay, clipping, averaging.

    The defaults in the fields are for Adam. `Config` overrides some of them for pre-training, with Muon.
    """

    name: Literal["muon", "adam", "sgd"] = "adam"
    """muon: orthogonalised momentum for the blocks' matrices (Jordan et al., 2024), and timm's NAdamW for all else:
    Adam with Nesterov's momentum, decoupled weight decay and an eps of 1e-7; adam: with decoupled weight decay and an
    eps of 1e-8, the paper's; sgd: with momentum, the paper's for fine-tuning."""
    lr: float = setting(3e-3, above=0)  # for Adam; pre-training has 1e-2 for Muon
    """Base learning rate, reached after the warm-up. It never depends on the number of processes. Muon's is at Adam's
    scale (Liu et al., 2025)."""
    adam_scale: float = setting(1.0, above=0, needs={"name": "muon"})
    """Learning rate of Muon's NAdamW part, as a multiple of lr."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine, linear: decay to 0 over the steps after the warm-up; constant: no decay; wsd (warm-up, stable, decay):
    no decay before the cooldown at the end, so that the run can go on from any step before it."""
    cooldown: float = setting(0.2, above=0, at_most=1, needs={"schedule": "wsd"})
    """Share of run.steps in which the rate falls to 0, as 1 - sqrt(progress) (Haegele et al., 2024)."""
    warmup_steps: int | None = setting(None, at_least=0)
    """Steps of linear warm-up from 0, fewer than run.steps. null: 100, or a fifth of run.steps where that is less."""
    global_batch_size: int = setting(32, at_least=1)
    """Images per step over all processes, which share them out; accumulation follows from data.batch_size."""
    weight_decay: float = setting(0.1, at_least=0)
    """Weight decay, times the learning rate; sgd's is L2, which momentum adds up (0.9: tenfold). None on biases, norms,
    tokens and position embeddings."""
    layer_decay: float | None = setting(None, above=0, at_most=1)
    """Each layer's learning rate, as a share of that of the layer above it (BEiT and MAE fine-tune with 0.65 to 0.75).
    null: one rate for all."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1, needs={"name": ("muon", "adam")})
    """Adam's decay rates, also those of muon's NAdamW."""
    momentum: float | None = setting(None, at_least=0, below=1, needs={"name": ("muon", "sgd")})
    """Momentum of muon (Nesterov's; null: 0.95) or sgd (null: 0.9)."""
    clip: float | None = setting(1.0, above=0, at_most=math.inf)
    """Largest global norm of the gradient. null: no clipping."""
    average: float | None = setting(None, above=0, below=1)
    """Decay of Polyak averaging (the paper's Table 2: 0.9999): the average is evaluated and exported. null: none."""
    average_warmup: bool = setting(True, needs={"average": True})
    """Whether the decay of the average is at most (1 + t) / (10 + t) after t steps, so that the first weights are soon
    forgotten. false: it is optim.average from the first step on."""

    frozen_steps: int = setting(0, at_least=0)
    """First steps in which the encoder is not trained, while what is new beside it (head, decoder, [mask]) is: for
    weights that are good already. Fewer than run.steps."""

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run."""
        return min(100, steps // 5) if self.warmup_steps is None else self.warmup_steps

    def stable_steps(self, steps: int) -> int | None:
        """Steps of a run of `steps` up to the cooldown, in which the rate does not fall. None: it always falls."""
        if self.schedule == "constant":
            return steps
        if self.schedule == "wsd":
            return steps - round(self.cooldown * steps)
        return None

    def steps_to_keep(self, run: RunConfig) -> set[int]:
        """Steps of a run whose checkpoints are written and always stay."""
        kept = set(run.keep_at or ())
        if self.schedule == "wsd":
            kept.add(self.stable_steps(run.steps))
        return kept - {0}

    def momentum_or_default(self) -> float | None:
        """The momentum, given or usual; None: adam has none."""
        return {"muon": 0.95, "sgd": 0.9}.get(self.name) if self.momentum is None else self.momentum

    def resolved(self, steps: int) -> "OptimConfig":
        """The same settings with numbers, for a run of `steps`, in place of null."""
        return replace(self, warmup_steps=self.warmup(steps), momentum=self.momentum_or_default())

    def derived(self, steps: int) -> set[str]:
        """Names of settings whose value is the one that null stands for in a run of `steps`."""
        usual = replace(self, warmup_steps=None, momentum=None).resolved(steps)
        return {name for name in ("warmup_steps", "momentum") if getattr(self, name) == getattr(usual, name)}

    def check_length(self, steps: int, key: str = "run.steps") -> None:
        """Raise UserError if a run of `steps`, the value of the setting `key`, never leaves its warm-up or start."""
        allowed = f"less than {key} ({steps}): the encoder would never be trained"
        require(self.frozen_steps < steps, "optim.frozen_steps", self.frozen_steps, allowed)
        warmup = self.warmup(steps)
        require(warmup < steps, "optim.warmup_steps", warmup, f"less than {key} ({steps}), or null")
        stable = self.stable_steps(steps)
        if stable is not None:
            allowed = f"at most {stable}, where the cooldown begins ({key} {steps}, optim.cooldown {self.cooldown:g})"
            require(warmup <= stable, "optim.warmup_steps", warmup, allowed)

    def __post_init__(self):
        check_bounds(self, "optim.")


@dataclass(frozen=True)
class ProbeConfig:
    """The frozen features while training: effective rank and, with labels, kNN accuracy. The loss shows neither."""

    every: int = setting(400, at_least=0, operational=True)
    """Steps between two probes, at steps where run.eval_every is due too. 0: never."""
    images: int = setting(2000, at_least=1, needs={"every": True}, operational=True)
    """Largest number of labelled training images, a seeded choice, that are compared with; likewise of general ones."""
    neighbours: int = setting(20, at_least=1, needs={"every": True}, operational=True)
    """Neighbours that vote."""
    path: str | None = setting(None, needs={"every": True}, operational=True)
    """A second, general set with labels, of any kind that data.path may be, such as uoft-cs/cifar10: kNN accuracy on it
    is probed, too, and nothing is trained on it. Its validation or test split is classified, else half of it."""
    image_column: str | None = setting(None, needs={"path": True}, operational=True)
    """Column of the general images. null: the only image column."""
    label_column: str | None = setting(None, needs={"path": True}, operational=True)
    """Column of the general images' class labels. null: as data.label_column null."""

    def __post_init__(self):
        check_bounds(self, "probe.")

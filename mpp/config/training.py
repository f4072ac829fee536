"""Settings of training: the run, the optimiser, the probes."""

from dataclasses import dataclass, replace
from typing import Literal

from mpp.config.fields import SEED_END, Settings, require, setting


@dataclass(frozen=True)
class RunConfig(Settings):
    """The run: folder, length, precision, evaluations and checkpoints."""

    dir: str = setting("runs/{data}", operational=True)
    """Run folder; {data} becomes the name of the images: birds, or the last part of data.path. The same command
    with the same folder resumes from its newest complete checkpoint."""
    steps: int = setting(1600, at_least=1)
    """Optimiser steps."""
    seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the weights, the order of the images, and the randomness of each sample."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type. auto: the launcher's choice, otherwise bf16 on hardware that computes in it, otherwise fp32."""
    reduction: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are averaged over several processes. bf16 halves the traffic."""
    shard_over: Literal["all"] = setting("all", operational=True)
    """Processes that share each tensor if the launcher shards the model."""
    sync_gradients: Literal["every_pass"] = setting("every_pass", operational=True)
    """Forward passes of a step after which sharded processes send their gradients."""
    branch_from: str | None = setting(None, operational=True)
    """FOLDER@STEP: continue from this checkpoint of another run, which had the same learning rate up to it."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the model with torch.compile, unless it is sharded; one that it cannot compile is trained without, with a
    warning. auto: not. A run may be resumed with another value: results then differ by rounding."""
    log_every: int = setting(20, at_least=1, operational=True)
    """Steps between two lines of metrics."""
    eval_every: int = setting(400, at_least=0, operational=True)
    """Steps between two evaluations on the held-out images. 0: never."""
    checkpoint_every: int = setting(400, at_least=1, operational=True)
    """Steps between two checkpoints."""
    keep_checkpoints: int = setting(2, at_least=1, operational=True)
    """Number of the newest checkpoints that stay on disk."""
    keep_at: tuple[int, ...] | None = setting(None, at_least=1, distinct=True, operational=True)
    """Steps with a permanent checkpoint, for branches; they stay even if a later command does not repeat them. With
    optim.schedule wsd the checkpoint at the start of the cooldown stays, too."""
    keep_best: bool = setting(False, needs={"run.eval_every": True}, operational=True)
    """Keep the encoder with the best features in `encoder_best`, next to the last one: best by kNN accuracy on the
    held-out images or, without labels, by neighbour agreement; without a probe by the score of the verdict. For a
    branch, since it began."""
    report: bool = setting(True, operational=True)
    """Write a page about the run at its end, report.html (`mpp report`); in fine-tuning about each of its runs."""
    threads: int = setting(0, at_least=0, operational=True)
    """CPU threads per process. 0: OMP_NUM_THREADS (under a launcher, which sets 1 by itself, if it is above 1),
    otherwise the cores divided by the local processes."""
    trackers: tuple[str, ...] = setting(("tensorboard",), operational=True)
    """Trackers of accelerate that receive the metrics (tensorboard, wandb, ...); metrics.jsonl is always written."""
    project: str = setting("mpp", needs={"run.trackers": "wandb"}, operational=True)
    """Project in wandb; each run folder is one run in it."""
    print_config: bool = setting(False, operational=True)
    """Print all settings when the run begins, instead of only those that differ from the defaults. config.yaml has
    all."""

    def check(self):
        is_utf8 = self.dir.encode(errors="ignore").decode() == self.dir
        require(is_utf8, "run.dir", ascii(self.dir), "a name in UTF-8, which TensorBoard's files need")
        for step in self.keep_at or ():
            require(step <= self.steps, "run.keep_at", step, f"at most run.steps ({self.steps})")


@dataclass(frozen=True)
class OptimConfig(Settings):
    """The optimiser: warm-up, decay, clipping, averaging.

    The defaults in the fields are for Adam. `Config` overrides some of them for pre-training with Muon.
    """

    name: Literal["muon", "adam", "sgd"] = "adam"
    """muon: orthogonalised momentum for the blocks' matrices (Jordan et al., 2024), and timm's NAdamW for all else:
    Adam with Nesterov's momentum, decoupled weight decay and an eps of 1e-7; adam: with decoupled weight decay and an
    eps of 1e-8, the paper's; sgd: with momentum, the paper's for fine-tuning."""
    lr: float = setting(3e-3, above=0)  # for Adam; pre-training has 1e-2 for Muon
    """Base learning rate, reached after the warm-up. It does not depend on the number of processes. Muon uses Adam's
    scale (Liu et al., 2025)."""
    adam_scale: float = setting(1.0, above=0, needs={"optim.name": "muon"})
    """Learning rate of Muon's NAdamW part, as a multiple of lr."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine, linear: decay to 0 over the steps after the warm-up; constant: no decay; wsd (warm-up, stable, decay): no
    decay before the cooldown at the end, so the run can continue from any step before it."""
    cooldown: float = setting(0.2, above=0, at_most=1, needs={"optim.schedule": "wsd"})
    """Cooldown of wsd: share of run.steps in which the rate falls to 0, as 1 - sqrt(progress) (Haegele et al.,
    2024)."""
    warmup_steps: int | None = setting(None, otherwise=100, at_least=0)
    """Steps of linear warm-up from 0, fewer than run.steps. null: 100, or a fifth of run.steps if that is less."""
    global_batch_size: int = setting(32, at_least=1)
    """Images per step, divided among all processes; accumulation follows from data.batch_size."""
    weight_decay: float = setting(0.1, at_least=0)
    """Weight decay, times the learning rate; for sgd an L2 penalty, which momentum accumulates (0.9: tenfold). None on
    biases, norms, tokens and position embeddings."""
    layer_decay: float | None = setting(None, above=0, at_most=1)
    """Layer-wise decay: each layer's learning rate as a share of the rate one layer above (BEiT and MAE fine-tune with
    0.65 to 0.75). null: one rate for all."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1, needs={"optim.name": ("muon", "adam")})
    """Adam's betas, also for the NAdamW part of muon."""
    momentum: float | None = setting(None, at_least=0, below=1, needs={"optim.name": ("muon", "sgd")})
    """Momentum of muon (Nesterov; null: 0.95) or sgd (null: 0.9)."""
    clip: float | None = setting(1.0, above=0)
    """Largest global norm of the gradient. null: no clipping."""
    average: float | None = setting(None, above=0, below=1)
    """EMA decay of the weights (Polyak averaging; the paper's Table 2: 0.9999): the average is evaluated and exported.
    null: none."""
    average_warmup: bool = setting(True, needs={"optim.average": True})
    """Limit the EMA decay to (1 + t) / (10 + t) after t steps, so the first weights are soon forgotten. false:
    optim.average from the first step on."""

    frozen_steps: int = setting(0, at_least=0)
    """First steps in which the encoder is frozen and only the new parts (head, decoder, [mask]) are trained, for
    weights that are good already. Fewer than run.steps."""

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run."""
        return min(100, steps // 5) if self.warmup_steps is None else self.warmup_steps

    def stable_steps(self, steps: int) -> int | None:
        """Steps of a run of `steps` up to the cooldown, in which the rate does not fall. None: it always falls."""
        return {"constant": steps, "wsd": steps - round(self.cooldown * steps)}.get(self.schedule)

    def momentum_or_default(self) -> float | None:
        """The momentum, given or usual; None: adam has none."""
        return {"muon": 0.95, "sgd": 0.9}.get(self.name) if self.momentum is None else self.momentum

    def resolved(self, steps: int) -> "OptimConfig":
        """The same settings for a run of `steps`, with numbers instead of null."""
        return replace(self, warmup_steps=self.warmup(steps), momentum=self.momentum_or_default())

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


@dataclass(frozen=True)
class RunProbeConfig(Settings):
    """Probes of frozen features during training: effective rank and, with labels, kNN accuracy."""

    every: int = setting(400, at_least=0, operational=True)
    """Steps between two probes; a probe needs a step where run.eval_every is due too. 0: never."""
    images: int = setting(2000, at_least=1, needs={"probe.every": True}, operational=True)
    """Largest number of labelled training images to compare with, a seeded choice; likewise of general images."""
    neighbours: int = setting(20, at_least=1, needs={"probe.every": True}, operational=True)
    """Number of neighbours that vote."""
    path: str | None = setting(None, needs={"probe.every": True}, operational=True)
    """General images with labels, such as uoft-cs/cifar10 (any kind that data.path takes), to probe kNN accuracy on;
    they are not trained on. Their validation or test split is classified, otherwise half of them."""
    image_column: str | None = setting(None, needs={"probe.path": True}, operational=True)
    """Column of the general images. null: the only image column."""
    label_column: str | None = setting(None, needs={"probe.path": True}, operational=True)
    """Column of the general images' class labels. null: as data.label_column null."""

"""Constants of a run that its warnings and its verdict need besides its history."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpp.config import ModelConfig, OptimConfig, RunConfig
from mpp.models.descriptions import MPP_TAG, folder_of_weights, saved_section
from mpp.runtime.weights import SAFETENSORS_SUFFIX, run_of
from mpp.training.checkpoint import COMPLETE_NAME
from mpp.training.run_folder import group_of, saved_settings

OF_MPP = "mpp"
OF_OTHERS = "unknown"
"""Optimisers of weights whose run is not there: of mpp's, and of published ones, which are Adam's as a rule."""


@dataclass(frozen=True)
class RunFacts:
    """Constants of a run that the warnings and the verdict need; verdict.json has them by these names."""

    steps: int
    """Steps of the whole run."""
    images: int
    """Images a step."""
    lr: float = 0.0
    """Base learning rate."""
    warmup: int = 0
    """Steps of learning-rate warm-up."""
    stable: int | None = None
    """Steps up to the cooldown, in which the rate does not fall; None: it falls all along, as with cosine."""
    clip: float | None = None
    """Largest norm of the gradient."""
    known: int = 0
    """Training images; 0: unknown."""
    held_out: int = 0
    """Held-out images of an evaluation."""
    evaluated: int = 0
    """Held-out images that kNN accuracy, or agreement, is measured on."""
    general: int = 0
    """General images that kNN accuracy is measured on; 0: there are none."""
    gpu_tflops: float = 0.0
    """TFLOP/s that the GPUs reach in large matrix products; 0: there is none."""
    width: int = 0
    """Width of the encoder's tokens; 0: it has none."""
    moving: bool = False
    """Whether targets change while they are learned, those of a moving average: losses then cannot be compared."""
    duplicates: float = 0.0
    """Share of the held-out images that are copies of a training image; only `mpp check` looks for them."""
    constant: float = 0.0
    """Share of images of one colour; only `mpp check` looks for them."""
    largest_class: float = 0.0
    """Share of the labelled images that are of one class."""
    classes: int = 0
    """Different labels among them."""
    optimizer: str = ""
    """Name of the optimiser."""
    objective: str = ""
    """Name of the objective of masked patch prediction; empty: another task."""
    weights_of: str = ""
    """Optimiser that trained the weights that the run begins from. OF_MPP: that of a run of mpp which is not there;
    OF_OTHERS: no run of mpp trained them; empty: they are random."""
    adapters: bool = False
    """Whether matrices of the encoder have low-rank changes, which are trained in their place."""
    freezes: str = ""
    """Name of a setting that keeps weights of the encoder from training, for some steps or for good; empty: none."""


def facts_of(run: RunConfig, optim: OptimConfig, of_task: dict[str, Any], gpu_tflops: float = 0.0) -> RunFacts:
    """The facts of a run.

    Args:
        of_task: the fields that its task knows.
        gpu_tflops: see `RunFacts`.
    """
    return RunFacts(
        steps=run.steps,
        images=optim.global_batch_size,
        lr=optim.lr,
        clip=optim.clip,
        warmup=optim.warmup(run.steps),
        stable=optim.stable_steps(run.steps),
        optimizer=optim.name,
        gpu_tflops=gpu_tflops,
        **of_task,
    )


def facts_of_weights(model: ModelConfig, optim: OptimConfig) -> dict[str, Any]:
    """Fields of `RunFacts` about the weights that a run begins from, and the part of them that it trains."""
    facts: dict[str, Any] = {"adapters": model.lora_rank is not None}
    if model.init_from is not None:
        facts["weights_of"] = optimizer_of_weights(model.init_from)
    freezing = {
        "model.train": model.train is not None,
        "model.lora_rank": model.lora_rank is not None,
        "optim.frozen_steps": optim.frozen_steps > 0,
    }
    facts["freezes"] = next((name for name, is_set in freezing.items() if is_set), "")
    return facts


def optimizer_of_weights(init_from: str) -> str:
    """The optimiser that trained the weights which `model.init_from` names: see `RunFacts.weights_of`.

    They may be a run's, its encoder's or one of its checkpoints', or an encoder that mpp has exported to elsewhere.
    """
    path = Path(init_from).absolute()
    folder = path.parent if path.suffix == SAFETENSORS_SUFFIX else path
    run = folder.parents[1] if COMPLETE_NAME.fullmatch(folder.name) else run_of(folder)
    settings = group_of(saved_settings(run), "optim")
    if "name" in settings:
        return settings["name"]
    exported = saved_section(folder_of_weights(init_from), "pretrained_cfg").get("tag") == MPP_TAG
    return OF_MPP if exported else OF_OTHERS

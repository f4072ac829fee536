"""Warnings about settings of runs that begin from trained weights (`model.init_from`). They use only facts.

The harm to such weights is known from others' work. evaluation/results/continuing.md has it for a small encoder: by the
rate, and by Muon. The bound of the rate was not measured.
"""

from mpp.training.facts import OF_MPP, OF_OTHERS, RunFacts
from mpp.training.history import History

USUAL_RATE = 5e-5  # for USUAL_BATCH images a step: DINOv3's own continuation ends at 1.25e-5
USUAL_BATCH = 256
FAR_ABOVE_RATE = 5
COLOURS = ("mean_color", "grid_color", "pixels")
"""Objectives that predict colours."""


def muon_after_adam(history: History, facts: RunFacts) -> str | None:
    """Muon trains weights that another optimiser trained: it degrades those of Adam (arXiv 2605.10468).

    Low-rank changes are new matrices, which Muon does not orthogonalise.
    """
    if facts.optimizer != "muon" or facts.weights_of in ("", "muon", OF_MPP) or facts.adapters:
        return None
    known = "weights that Adam trained, as published ones are"
    if facts.weights_of != OF_OTHERS:
        known = f"weights that {facts.weights_of} trained"
    return f"model.init_from has {known}, and Muon degrades these; set optim.name adam"


def high_rate_on_trained_weights(history: History, facts: RunFacts) -> str | None:
    """The rate is more than five times 5e-5 x batch / 256, and the weights are not of a run of mpp.

    DINOv2's own settings took its released weights from 80 to 10 % kNN accuracy in 20,000 images (dinov2 #204). SGD and
    LoRA have rates of another scale.
    """
    usual = USUAL_RATE * facts.images / USUAL_BATCH
    if facts.weights_of != OF_OTHERS or facts.optimizer == "sgd" or facts.adapters:
        return None
    if facts.lr <= FAR_ABOVE_RATE * usual:
        return None
    return (
        f"optim.lr {facts.lr:g} can destroy the weights of model.init_from; start with {usual:.2g} (5e-5 for "
        f"{USUAL_BATCH} images a step), and watch the probes"
    )


def no_warmup_on_trained_weights(history: History, facts: RunFacts) -> str | None:
    """A new optimiser takes its whole rate from the first step on, when it knows least of the gradients."""
    if not facts.weights_of or facts.warmup > 0:
        return None
    return (
        "optim.warmup_steps is 0: the first steps of a new optimiser are the most harmful to the weights of "
        f"model.init_from; set it to a twentieth of run.steps ({max(1, facts.steps // 20)})"
    )


def colours_on_trained_weights(history: History, facts: RunFacts) -> str | None:
    """Weights that no run of mpp trained, which encode the content of images, are to predict colours."""
    if facts.weights_of != OF_OTHERS or facts.objective not in COLOURS:
        return None
    return (
        f"objective.name {facts.objective} teaches colours to the weights of model.init_from "
        "at the cost of their content features; set objective.name features (see configs/continue.yaml)"
    )


def random_weights_stay(history: History, facts: RunFacts) -> str | None:
    """Weights are kept from training, for some steps or for good, and they are random."""
    if facts.weights_of or not facts.freezes:
        return None
    return f"{facts.freezes} freezes weights, and these are random; set model.init_from, or leave it out"

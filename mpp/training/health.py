"""Checks of a run: functions of its history and config, whose message is None where there is nothing to warn of.

Thresholds come from small runs: 18 healthy ones of 300 to 1,200 steps on birds, CIFAR-10 (5,000 images), scikit-learn's
digits and tiles of scikit-image's photographs (mean_color, grid_color, pixels, MAE, SimMIM, MaskFeat), and runs made
sick (tests/histories). Other images may need others.
"""

from collections.abc import Callable
from functools import cache
from statistics import mean, median

from mpp.config import TrainingConfig
from mpp.models.descriptions import MPP_TAG, first_weights, saved_entry
from mpp.training.checkpoint import COMPLETE_NAME
from mpp.training.history import (
    EVALUATED,
    RECENT_LINES,
    History,
    copy_baseline,
    copy_baseline_beaten_since,
    evaluations,
    has_copy_baseline,
    lines_with,
    series,
    values_by_depth,
)

FEWEST_STEPS = 100
"""Steps before which nothing is said of learning: after 75, a healthy run on pixels was below a constant answer."""
STALLED_LOSS_CHANGE = 0.001  # relative; a learning rate of 1e-9 was at 0.0001, healthy runs of MAE went by 0.01
COLLAPSED_RANK = 4.0
MIN_TARGET_SHARE = 0.01
LOSS_RISE = 0.02  # relative to the least loss; that of 64 birds, each seen 750 times, rose by 4.2 %
MAX_DATA_WAIT = 1 / 3  # of the time; healthy runs on one thread, which load the images themselves, had 8 to 21 %
USUAL_RATE = 5e-5  # for USUAL_BATCH images a step, of published weights: DINOv3's own continuation ends at 1.25e-5
USUAL_BATCH = 256
FAR_ABOVE_RATE = 5
COLOURS = ("mean_color", "grid_color", "pixels")
"""Objectives that predict colours."""


def not_learning(history: History, config: TrainingConfig) -> str | None:
    """After twice the warm-up and `FEWEST_STEPS`, the model is no better than one answer for all.

    With colours: held-out accuracy is at most that of the most frequent one. Without: all held-out losses, of three
    evaluations or more, are within 0.1 % of the first.
    """
    lines = evaluations(history)
    if not lines or lines[-1]["step"] < steps_before_checks(config):
        return None
    first_loss, last = lines[0][EVALUATED], lines[-1]
    if "heldout/most_frequent" in last:
        is_stuck = last["heldout/accuracy"] <= last["heldout/most_frequent"]
        observed = f"held-out accuracy {last['heldout/accuracy']:.1%} is at the level of the most frequent colour"
    else:
        change = max(abs(line[EVALUATED] - first_loss) for line in lines)
        is_stuck = len(lines) >= 3 and change < STALLED_LOSS_CHANGE * abs(first_loss) and not config.moves_teacher
        observed = f"the held-out loss is where it was at the first evaluation ({first_loss:.4g})"
    advice = "raise optim.lr, or lower it if the loss jumps, and look at the pictures"
    return f"{observed}; {advice}" if is_stuck else None


def below_copy_baseline(history: History, config: TrainingConfig) -> str | None:
    """After a third of the run, and `FEWEST_STEPS`, the model is no better than copying the nearest visible patches.

    The default run on the birds passes it just at a third of its steps, which therefore does not count yet.
    """
    lines = [line for line in history if has_copy_baseline(line)]
    if not lines or lines[-1]["step"] <= max(FEWEST_STEPS - 1, config.run.steps / 3):
        return None
    if copy_baseline_beaten_since(history) is not None:
        return None
    return (
        f"held-out accuracy {lines[-1]['heldout/accuracy']:.1%} is not above that of copying the nearest visible "
        f"patches ({copy_baseline(lines[-1]):.1%}); raise run.steps or optim.lr, use more images, or larger patches "
        "(model.patch_size)"
    )


def features_collapse(history: History, config: TrainingConfig) -> str | None:
    """The median effective rank over depths is below 4, and below half of an earlier probe.

    Untrained features had 2.4 to 21.5, healthy ones after twice the warm-up 3.1 to 32; a learning rate of 1 went from
    9.2 to 2.7.
    """
    if not history or history[-1]["step"] < steps_before_checks(config):
        return None
    probed = lines_with(history, "features/rank")
    ranks = [median(values_by_depth(line, "features/rank").values()) for line in probed]
    if not ranks or ranks[-1] >= min(COLLAPSED_RANK, max(ranks) / 2):
        return None
    return (
        f"the effective rank of the features has fallen from {max(ranks):.1f} to {ranks[-1]:.1f}; lower optim.lr, or "
        "change what is predicted (objective.name)"
    )


def targets_collapse(history: History, config: TrainingConfig) -> str | None:
    """Less than a hundredth of the targets' mean square differs between patches (`target_share`).

    Layer-normed targets have a mean square of 1, and the root of this share is their deviation over the patches: 0.1,
    below which data2vec's code stops too. Healthy runs had a share of 0.56 and more.
    """
    shares = series(history, "target_share")
    if not shares or shares[-1][1] >= MIN_TARGET_SHARE:
        return None
    return (
        f"{1 - shares[-1][1]:.1%} of the targets' mean square is the same for all patches; with a moving average lower "
        "optim.lr, raise objective.half_life, or set objective.teacher_norm instance; otherwise change "
        "objective.teacher, or raise objective.teacher_depths"
    )


def overfitting(history: History, config: TrainingConfig) -> str | None:
    """For two evaluations the held-out loss is above its least, now by more than 2 %, while the training loss falls."""
    held_out, losses = series(history, EVALUATED), series(history, "loss")
    if len(held_out) < 3 or config.moves_teacher:
        return None
    best_step, least = min(held_out[:-2], key=lambda pair: pair[1])
    (_, before), (_, now) = held_out[-2:]
    at_best_step = [loss for step, loss in losses if step <= best_step][-RECENT_LINES:]
    recent = [loss for _, loss in losses][-RECENT_LINES:]
    rises = before > least and now > least + LOSS_RISE * abs(least)
    if not rises or not at_best_step or mean(recent) >= mean(at_best_step):
        return None
    return (
        f"the held-out loss has risen from {least:.4g} (step {best_step}) to {now:.4g} while the training loss falls; "
        "use more images, lower run.steps, or crop harder (data.crop_area)"
    )


def data_loading_bottleneck(history: History, config: TrainingConfig) -> str | None:
    """Training waits for images a third of its time or more: without, it would be half as fast again."""
    recent = [wait for _, wait in series(history, "speed/data_wait")][-RECENT_LINES:]
    if len(recent) < RECENT_LINES or median(recent) < MAX_DATA_WAIT:
        return None
    return (
        f"training waits for images {median(recent):.0%} of the time; raise data.workers, or shrink the files once "
        "(mpp prepare)"
    )


def trained_weights_at_risk(history: History, config: TrainingConfig) -> str | None:
    """Settings that destroy published weights, which Adam trained as a rule; it follows from the config alone.

    Muon degrades weights of Adam (arXiv 2605.10468). DINOv2's own rate took its released weights from 80 to 10 % kNN
    accuracy in 20,000 images (dinov2 #204). The first steps of a new optimiser are its roughest. Colours are learned at
    the cost of content. evaluation/results/continuing.md has the first two for a small encoder. SGD and LoRA have rates
    of another scale.
    """
    model, optim, objective = config.model, config.optim, config.objective
    if objective is None or model.init_from is None or not is_published(model.init_from):
        return None
    highest_rate = FAR_ABOVE_RATE * USUAL_RATE * optim.global_batch_size / USUAL_BATCH
    changes_weights = model.lora_rank is None
    is_high = changes_weights and optim.name != "sgd" and optim.lr > highest_rate
    risks = {
        "optim.name muon": changes_weights and optim.name == "muon",
        f"optim.lr {optim.lr:g} (above {highest_rate:.2g})": is_high,
        "optim.warmup_steps 0": optim.warmup(config.run.steps) == 0,
        f"objective.name {objective.name}": objective.name in COLOURS,
    }
    named = ", ".join(name for name, is_risky in risks.items() if is_risky)
    return f"{named} can destroy the weights of model.init_from; begin with configs/continue.yaml" if named else None


def steps_before_checks(config: TrainingConfig) -> int:
    """Steps before which learning is not judged: as many again as the warm-up, in which healthy runs were below."""
    return max(FEWEST_STEPS, 2 * config.optim.warmup(config.run.steps))


@cache  # weights of the hub are looked up
def is_published(init_from: str) -> bool:
    """Whether no run of mpp trained the weights that `model.init_from` names."""
    folder = first_weights(init_from).parent
    return saved_entry(folder, "tag") != MPP_TAG and not COMPLETE_NAME.fullmatch(folder.name)


WARNINGS: dict[str, Callable[[History, TrainingConfig], str | None]] = {
    "not learning": not_learning,
    "below copy baseline": below_copy_baseline,
    "features collapse": features_collapse,
    "targets collapse": targets_collapse,
    "overfitting": overfitting,
    "data-loading bottleneck": data_loading_bottleneck,
    "trained weights at risk": trained_weights_at_risk,
}
"""Name of a warning, its row in the table of mpp/monitoring.md -> its check."""


def find_warnings(history: History, config: TrainingConfig) -> dict[str, str]:
    """All warnings about a run: name -> message, the observation and the setting to change."""
    return {name: message for name, check in WARNINGS.items() if (message := check(history, config))}

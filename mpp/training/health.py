"""Warnings about a run: functions of its history (mpp/training/history.py). Nothing here reads a file or computes.

The figures in the docstrings were measured on birds, CIFAR-10 (5,000 images), scikit-learn's digits, and tiles of
scikit-image's photographs: 18 healthy runs of 300 to 1,200 steps (mean_color, grid_color, pixels, MAE, SimMIM,
MaskFeat), and runs made sick. tests/test_verdict.py has such runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean, median
from typing import NamedTuple

from mpp.training.history import (
    EVALUATED,
    RECENT_LINES,
    History,
    after_training_began,
    best_depth,
    copy_baseline,
    copy_baseline_beaten_since,
    evaluations,
    has_copy_baseline,
    probe_lines,
    series,
    values_by_depth,
)


@dataclass(frozen=True)
class Facts:
    """Constants of a run that the warnings need."""

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


class RunWarning(NamedTuple):
    """One warning about a run."""

    name: str
    """Its heading in mpp/troubleshooting.md."""
    message: str
    """What was seen, and the setting to change."""


FEWEST_STEPS = 100
"""Steps before which nothing is said of learning: after 75, a healthy run on pixels was below a constant answer."""
STALLED_LOSS_CHANGE = 0.001  # relative
ONE_COLOR_SHARE = 0.95


def not_learning(history: History, facts: Facts) -> str | None:
    """After `FEWEST_STEPS`, the warm-up, and as many steps again, the model is no better than one answer for all.

    Of objectives with colours: held-out accuracy is at most that of the most frequent colour, which a constant reaches.
    No threshold is chosen. Of the others: the held-out loss of each of three or more evaluations is within 0.1 % of
    that of the first, and the accuracy, if there is one, has not risen. (A loss that rises is `overfitting`.) A
    learning rate of 1e-9 was 0.01 % away. Healthy runs of MAE on digits went up and down by 1 %, and by chance one came
    back to 0.4 %. As many steps again, because a healthy run on pixels was below the constant after 75 steps, 60 of
    them warm-up.
    """
    lines = evaluations(history)
    if not lines or lines[-1]["step"] < max(FEWEST_STEPS, 2 * facts.warmup):
        return None
    first, last = lines[0], lines[-1]
    advice = f"raise optim.lr ({facts.lr:g}), or lower it where the loss jumps, and look at the pictures in TensorBoard"
    if "heldout/most_frequent" in last:
        accuracy, constant = last["heldout/accuracy"], last["heldout/most_frequent"]
        if accuracy > constant:
            return None
        if constant >= ONE_COLOR_SHARE:
            advice = "nearly all patches have one colour: see data.range"
        return (
            f"held-out accuracy {accuracy:.1%} is at the level of the most frequent colour ({constant:.1%}) after the "
            f"warm-up; {advice}"
        )
    if facts.moving or len(lines) < 3:
        return None
    if last.get("heldout/accuracy", 0.0) > first.get("heldout/accuracy", 0.0):
        return None
    tolerance = STALLED_LOSS_CHANGE * abs(first[EVALUATED])
    if any(abs(line[EVALUATED] - first[EVALUATED]) >= tolerance for line in lines):
        return None
    return (
        f"the held-out loss is where it was at the first evaluation ({first[EVALUATED]:.4g}, now "
        f"{last[EVALUATED]:.4g}); {advice}"
    )


def below_copy_baseline(history: History, facts: Facts) -> str | None:
    """After a third of the run, and `FEWEST_STEPS`, the model is no better than copying the nearest visible patches.

    Digits passed this baseline within 25 % of 400 steps. The default run on the birds passes it at a third (32.5 %
    against 32.1 % after 400 of 1,200 steps): an evaluation at the third itself does not count.
    """
    lines = [line for line in history if has_copy_baseline(line)]
    if not lines or copy_baseline_beaten_since(history) is not None:
        return None
    last = lines[-1]
    if last["step"] < FEWEST_STEPS or last["step"] <= facts.steps / 3:
        return None
    return (
        f"held-out accuracy {last['heldout/accuracy']:.1%} is not above that of copying the nearest visible patches "
        f"({copy_baseline(last):.1%}) after {last['step']:.0f} of {facts.steps} steps; raise run.steps or optim.lr, or "
        "use larger patches (model.patch_size)"
    )


COLLAPSED_RANK = 4.0


def features_collapse(history: History, facts: Facts) -> str | None:
    """The effective rank has fallen to a few: to the encoder all images look alike.

    The median over the depths is below 4, and below half of what it was, before training or at any probe. Untrained
    encoders have 1.4 to 21.5. After twice the warm-up healthy runs had 4.7 to 32, but for one with 3.1, which began at
    4.4; a learning rate of 1 went from 9.2 to 2.7. (At the end of its warm-up a healthy run went from 8.4 to 2.4, and
    came back.)
    """
    if not history or history[-1]["step"] < max(FEWEST_STEPS, 2 * facts.warmup):
        return None
    ranks = []
    for line in history:
        by_depth = values_by_depth(line, "features/rank")
        if by_depth:
            ranks.append(median(by_depth.values()))
    if len(ranks) < 2 or ranks[-1] >= COLLAPSED_RANK or ranks[-1] >= max(ranks[:-1]) / 2:
        return None
    return (
        f"the effective rank of the features has fallen from {max(ranks):.1f} to {ranks[-1]:.1f}: to the encoder all "
        f"images look alike; lower optim.lr ({facts.lr:g}), or change what is predicted (objective.name)"
    )


MIN_TARGET_SHARE = 0.01


def targets_collapse(history: History, facts: Facts) -> str | None:
    """Less than a hundredth of the targets' mean square differs between patches (`target_share`).

    Layer-normed targets have a mean square of 1, and the root of this share is their deviation over the patches: 0.1,
    below which data2vec's code stops too. A student that always gave the mean would be right but for this hundredth.
    Five healthy runs on CIFAR-10 (data2vec, I-JEPA; three learning rates) had 0.56 and more, a short one on birds 0.65.
    """
    shares = [share for _, share in series(history, "target_share")]
    return describe_collapse(shares[-1], facts.lr, facts.moving) if shares else None


def describe_collapse(target_share: float, lr: float, moving: bool) -> str | None:
    """The message that targets have collapsed, with advice; None where this share of their mean square is no collapse.

    Args:
        lr, moving: see `Facts`.
    """
    if target_share >= MIN_TARGET_SHARE:
        return None
    advice = "change objective.teacher, or raise objective.teacher_depths"
    if moving:
        advice = f"lower optim.lr ({lr:g}), raise objective.half_life, or set objective.teacher_norm instance"
    return f"{1 - target_share:.1%} of the targets' mean square is the same for all patches; {advice}"


LOSS_RISE = 0.02  # relative to the least loss


def overfitting(history: History, facts: Facts) -> str | None:
    """The held-out loss rises while the training loss falls.

    For two evaluations it has been above its least value, now by more than 2 %, and the training loss is below what it
    was then. No healthy run rose at all; that of 64 birds, each seen 750 times, by 4.2 %.
    """
    held_out = series(after_training_began(history), EVALUATED)
    if len(held_out) < 3 or facts.moving:
        return None
    best_step, least = min(held_out[:-2], key=lambda pair: pair[1])
    step, loss = held_out[-1]
    if held_out[-2][1] <= least or loss <= least + LOSS_RISE * abs(least):
        return None
    losses = series(after_training_began(history), "loss")
    at_best_step = [value for at, value in losses if at <= best_step][-RECENT_LINES:]
    recent = [value for _, value in losses][-RECENT_LINES:]
    if not at_best_step or mean(recent) >= mean(at_best_step):
        return None
    seen = f", and each image was seen {step * facts.images / facts.known:.0f} times" if facts.known else ""
    return (
        f"the held-out loss has risen from {least:.4g} (step {best_step}) to {loss:.4g} while the training loss "
        f"falls{seen}; use more images, lower run.steps, or crop harder (data.crop_area)"
    )


def long_warmup(history: History, facts: Facts) -> str | None:
    """The warm-up is longer than a fifth of the run: the default is at most that, recipes have 1 to 10 %."""
    if 5 * facts.warmup <= facts.steps:
        return None
    return (
        f"the learning rate rises for {facts.warmup} of {facts.steps} steps, more than a fifth of the run; lower "
        f"optim.warmup_steps, or set it null, which is {min(100, facts.steps // 5)} here"
    )


CLIPPED_SHARE = 0.95  # of the logged steps
FAR_ABOVE_CLIP = 5.0


def gradients_almost_always_clipped(history: History, facts: Facts) -> str | None:
    """The gradient is far above `optim.clip` at nearly every logged step since the warm-up.

    Healthy runs were above the default clip, 1, in 0 to 47 % of these steps, and their largest norm was 1.8. A learning
    rate of 1 had 15 to 10**8.
    """
    norms = [norm for step, norm in series(history, "optim/grad_norm") if step > facts.warmup]
    norms = norms[-5 * RECENT_LINES :]
    if facts.clip is None or len(norms) < RECENT_LINES:
        return None
    share = sum(norm > FAR_ABOVE_CLIP * facts.clip for norm in norms) / len(norms)
    if share < CLIPPED_SHARE:
        return None
    return (
        f"the gradient's norm was above {FAR_ABOVE_CLIP:g} times optim.clip ({facts.clip:g}) in {share:.0%} of the "
        f"logged steps (its median is {median(norms):.3g}); divide optim.lr ({facts.lr:g}) by three"
    )


def features_peaked(history: History, facts: Facts) -> str | None:
    """The probe falls for two evaluations while the prediction still improves.

    It has to fall by more than chance does: of N probes that are equally good the best is sqrt(2 ln N) standard errors
    above them, and the last may be one below. The error is that of an accuracy on so many images, sqrt(p (1 - p) / n).
    One of the 18 runs peaked: grid_color on digits had 87.2 % after 200 of 400 steps and 81.8 % at its end, 2.8 errors
    with a bound of 2.7.
    """
    group, lines = probe_lines(after_training_began(history))
    if len(lines) < 3 or facts.moving:
        return None
    values = [best_depth(line, group)[1] for line in lines]
    best = max(values)
    peak = values.index(best)
    if not values[-3] > values[-2] > values[-1] or peak > len(values) - 3:
        return None
    images = max(facts.evaluated, 1)
    standard_error = sqrt(max(best * (1 - best), 1 / images) / images)
    if best - values[-1] <= standard_error * (1 + sqrt(2 * log(len(values)))):
        return None
    if lines[-1][EVALUATED] >= lines[peak][EVALUATED]:
        return None
    measure = {"knn": "kNN accuracy", "agreement": "the neighbours' agreement"}[group]
    return (
        f"{measure} was best after step {int(lines[peak]['step'])} ({best:.1%}) and has fallen to {values[-1]:.1%} "
        "while the prediction still improves; stop there (run.steps), or keep that encoder (run.keep_best true)"
    )


MAX_DATA_WAIT = 1 / 3  # of the time


def data_loading_bottleneck(history: History, facts: Facts) -> str | None:
    """Training waits for images a third of its time or more: without, it would be half as fast again.

    Healthy runs on one thread, which load the images themselves, waited for 8 to 21 %. Fewer logged steps than
    `RECENT_LINES` say nothing: on a busy machine, three of some milliseconds each can all have waited. On a GPU its own
    idle time counts: the host is ahead of it, and may wait while it computes.
    """
    waits = series(history, "speed/gpu_idle") or series(history, "speed/data_wait")
    waits = [wait for _, wait in waits][-RECENT_LINES:]
    if len(waits) < RECENT_LINES or median(waits) < MAX_DATA_WAIT:
        return None
    return (
        f"training waits for images {median(waits):.0%} of its time; raise data.workers, or shrink the files once "
        "(mpp prepare)"
    )


MIN_GPU_UTILISATION = 0.05  # of the arithmetic in large matrix products
WIDE = 768  # width of ViT-B
MIN_GPU_UTILISATION_OF_WIDE_MODELS = 0.15


def low_gpu_utilisation(history: History, facts: Facts) -> str | None:
    """The GPU does less than a twentieth of the arithmetic of its large matrix products; of a wide model, 15 %.

    Derived, not measured: the roofline of ViT-B on an H100 allows 40 to 45 % of its matrix product, and eager training
    26 to 34 % (evaluation/results/gpu.md). At widths of some hundreds, half of that is lost to small kernels.
    """
    rates = [rate for _, rate in series(history, "speed/executed_tflops")][-RECENT_LINES:]
    least = MIN_GPU_UTILISATION_OF_WIDE_MODELS if facts.width >= WIDE else MIN_GPU_UTILISATION
    if not facts.gpu_tflops or len(rates) < 3 or median(rates) >= least * facts.gpu_tflops:
        return None
    return (
        f"the GPU does {median(rates):.3g} TFLOP/s of the {facts.gpu_tflops:.0f} that its matrix products reach; raise "
        "data.batch_size or optim.global_batch_size, data.workers, or set run.compile true"
    )


MAX_UNREADABLE_SHARE = 0.01


def unreadable_images(history: History, facts: Facts) -> str | None:
    """More than one image in a hundred cannot be decoded. In all sets that were measured none was broken.

    Before all were seen, as in a stream, there have to be three standard deviations more since the first logged step:
    the run may have named some before a restart, and an evaluation names held-out ones.
    """
    counts = series(history, "unreadable")
    for step, count in counts:
        if 0 < facts.known <= step * facts.images:
            unreadable, seen = count, facts.known
            allowed = MAX_UNREADABLE_SHARE * seen
        else:
            first_step, first_count = counts[0]
            unreadable, seen = count - first_count, (step - first_step) * facts.images + facts.held_out
            allowed = MAX_UNREADABLE_SHARE * seen + 3 * (MAX_UNREADABLE_SHARE * seen) ** 0.5
        if unreadable > allowed:
            return (
                f"{unreadable:.0f} of {seen} images cannot be decoded; unreadable.txt names them: repair or remove "
                "them, or see data.channels and data.max_pixels"
            )
    return None


MAX_DUPLICATES = 0.05  # of the held-out images


def held_out_duplicates(history: History, facts: Facts) -> str | None:
    """More than 5 % of the held-out images are nearly the same as a training image: held-out figures are too good.

    See `find_copies` in mpp/data/survey.py. Measured: birds and CIFAR-10 0 %, digits at most 0.7 %, tiles of
    photographs at most 4.0 %.
    """
    if facts.duplicates <= MAX_DUPLICATES:
        return None
    return (
        f"{facts.duplicates:.0%} of the held-out images that were looked at are nearly the same as a training image, "
        "which makes held-out figures too good; remove copies, or name a split without them (data.eval_split)"
    )


def one_class_dominates(history: History, facts: Facts) -> str | None:
    """One class has more labelled images than all others together, of two classes three times as many.

    kNN accuracy is then high without knowing anything.
    """
    if facts.largest_class <= max(0.5, 1.5 / max(1, facts.classes)):
        return None
    return (
        f"{facts.largest_class:.0%} of the labelled images are of one class, which kNN accuracy is to be compared "
        "with; balance the images, or name another data.label_column"
    )


MAX_CONSTANT_SHARE = 0.25


def constant_images_dominate(history: History, facts: Facts) -> str | None:
    """More than a quarter of the images show one colour only. Measured: birds, CIFAR-10, digits 0 %, tiles 6 %."""
    if facts.constant <= MAX_CONSTANT_SHARE:
        return None
    return (
        f"{facts.constant:.0%} of the images that were looked at show one colour alone, which is predicted without "
        "knowing anything; remove them, or see data.range and data.bands"
    )


WARNINGS: dict[str, Callable[[History, Facts], str | None]] = {
    "nothing is learned": not_learning,
    "below the neighbours": below_copy_baseline,
    "features collapse": features_collapse,
    "targets collapse": targets_collapse,
    "overfitting": overfitting,
    "a long warm-up": long_warmup,
    "clipped nearly always": gradients_almost_always_clipped,
    "features have peaked": features_peaked,
    "waiting for data": data_loading_bottleneck,
    "an idle GPU": low_gpu_utilisation,
    "unreadable images": unreadable_images,
    "duplicates across the cut": held_out_duplicates,
    "one class dominates": one_class_dominates,
    "constant images dominate": constant_images_dominate,
}
"""Name of a warning -> its function, whose message is None where there is nothing to warn of."""


def find_warnings(history: History, facts: Facts) -> list[RunWarning]:
    """All warnings about a run."""
    warnings = []
    for name, message_of in WARNINGS.items():
        message = message_of(history, facts)
        if message:
            warnings.append(RunWarning(name, message))
    return warnings

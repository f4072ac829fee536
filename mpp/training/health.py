"""What is off in a run: histories of scalars in, findings out. Nothing here reads a file or computes.

A history is the lines of metrics.jsonl: dictionaries with `step`. Its line at step 0 is of the untrained encoder.

The figures in the docstrings of the checks were measured on birds, CIFAR-10 (5,000 images), scikit-learn's digits, and
tiles of scikit-image's photographs: 18 healthy runs of 300 to 1,200 updates (mean_color, grid_color, pixels, MAE,
SimMIM, MaskFeat), and runs made sick. tests/test_verdict.py has such runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean, median
from typing import NamedTuple

Line = dict[str, float]
History = Sequence[Line]

EVALUATED = "heldout/loss"  # what every evaluation has
COPYING = ("heldout/nearest", "heldout/two_nearest")
RECENT = 10  # logged updates that say how a run is doing now


@dataclass(frozen=True)
class Facts:
    """What of a run stays the same."""

    steps: int
    """Updates of the whole run."""
    images: int
    """Images an update."""
    lr: float = 0.0
    """Base learning rate."""
    warmup: int = 0
    """Updates of learning-rate warm-up."""
    clip: float | None = None
    """Largest norm of the gradient."""
    known: int = 0
    """Training images; 0: nobody knows."""
    held_out: int = 0
    """Held-out images of an evaluation."""
    judged: int = 0
    """Held-out images that kNN accuracy, or agreement, is measured on."""
    gpu_tflops: float = 0.0
    """What the GPU reaches in large matrix products; 0: there is none."""
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


class Finding(NamedTuple):
    """Something that is off."""

    check: str
    """Its name, which is its heading in mpp/troubleshooting.md too."""
    message: str
    """What was seen, and the setting to change."""


def series(history: History, name: str) -> list[tuple[int, float]]:
    """(step, value) of a scalar."""
    return [(int(line["step"]), line[name]) for line in history if name in line]


def trained(history: History) -> list[Line]:
    """The lines without the untrained encoder's."""
    return [line for line in history if line["step"] > 0]


def depths_of(line: Line, group: str) -> dict[int, float]:
    """Depth -> value of the scalars `GROUP/depth_XX`."""
    found = (name.rpartition("/depth_") for name in line)
    return {int(depth): line[f"{of}/depth_{depth}"] for of, _, depth in found if of == group and depth.isdecimal()}


def best_depth(line: Line, group: str) -> tuple[int, float] | None:
    """The depth with the largest value, and the value."""
    values = depths_of(line, group)
    return max(values.items(), key=lambda item: item[1]) if values else None


def probed(history: History) -> tuple[str, list[Line]]:
    """What says how good the features are, `knn`, or `agreement` without labels; and the lines that have it."""
    for group in ("knn", "agreement"):
        lines = [line for line in history if depths_of(line, group)]
        if lines:
            return group, lines
    return "", []


def beaten_since(history: History) -> int | None:
    """The evaluation since which the model is better than copying neighbours; None: it is not, or has no colours."""
    since = None
    for line in trained(history):
        if "heldout/accuracy" in line and COPYING[1] in line:
            above = line["heldout/accuracy"] > max(line[name] for name in COPYING)
            since = (since or int(line["step"])) if above else None
    return since


# --- checks: (history, facts) -> what was seen and what to change; None: nothing is off ---


STUCK, ONE_COLOR = 0.001, 0.95


def nothing_is_learned(history: History, facts: Facts) -> str | None:
    """After the warm-up, and as many updates again, the model is no better than one answer for all.

    Of objectives with colours: held-out accuracy is at most that of the most frequent colour, which a constant reaches.
    No threshold is chosen. Of the others: the held-out loss of each of three or more evaluations is within 0.1 % of
    that of the first, and the accuracy, if there is one, has not risen. (A loss that rises is `overfitting`.) A
    learning rate of 1e-9 was 0.01 % away. Healthy runs of MAE on digits went up and down by 1 %, and by chance one came
    back to 0.4 %. As many updates again, because a healthy run on pixels was below the constant after 75 updates, 60 of
    them warm-up.
    """
    rate = f"raise optim.lr ({facts.lr:g}), or lower it where the loss jumps, and look at the pictures in TensorBoard"
    lines = [line for line in trained(history) if EVALUATED in line]
    if not lines or lines[-1]["step"] < 2 * facts.warmup:
        return None
    last, first = lines[-1], lines[0]
    if "heldout/most_frequent" in last:
        accuracy, constant = last["heldout/accuracy"], last["heldout/most_frequent"]
        seen = f"held-out accuracy {accuracy:.1%} is at the level of the most frequent colour ({constant:.1%})"
        advice = rate if constant < ONE_COLOR else "nearly all patches have one colour: see data.range"
        return f"{seen} after the warm-up; {advice}" if accuracy <= constant else None
    risen = last.get("heldout/accuracy", 0.0) > first.get("heldout/accuracy", 0.0)
    still = all(abs(line[EVALUATED] - first[EVALUATED]) < STUCK * abs(first[EVALUATED]) for line in lines)
    if not facts.moving and len(lines) > 2 and still and not risen:
        seen = f"the held-out loss is where it was at the first evaluation ({first[EVALUATED]:.4g}"
        return f"{seen}, now {last[EVALUATED]:.4g}); {rate}"
    return None


def below_the_neighbours(history: History, facts: Facts) -> str | None:
    """After a third of the run the model is still no better than copying the nearest visible patches.

    Digits passed the neighbours within 25 % of 400 updates. The default run on the birds passes them at a third (32.5 %
    against 32.1 % after 400 of 1,200 updates): an evaluation at the third itself does not count.
    """
    last = next((line for line in reversed(history) if COPYING[1] in line), None)
    if last is None or last["step"] <= facts.steps / 3 or beaten_since(history) is not None:
        return None
    accuracy, copying = last["heldout/accuracy"], max(last[name] for name in COPYING)
    return (
        f"held-out accuracy {accuracy:.1%} is not above that of copying the nearest visible patches ({copying:.1%}) "
        "after a third of the run; raise run.steps or optim.lr, or use larger patches (model.patch_size)"
    )


COLLAPSED = 4.0


def features_collapse(history: History, facts: Facts) -> str | None:
    """The effective rank has fallen to a few: to the encoder all images look alike.

    The median over the depths is below 4, and below half of what it was, before training or at any probe. Untrained
    encoders have 1.4 to 21.5. After twice the warm-up healthy runs had 4.7 to 32, but for one with 3.1, which began at
    4.4; a learning rate of 1 went from 9.2 to 2.7. (At the end of its warm-up a healthy run went from 8.4 to 2.4, and
    came back.)
    """
    if not history or history[-1]["step"] < 2 * facts.warmup:
        return None
    ranks = [median(of.values()) for line in history if (of := depths_of(line, "features/rank"))]
    if len(ranks) < 2 or ranks[-1] >= COLLAPSED or ranks[-1] >= max(ranks[:-1]) / 2:
        return None
    return (
        f"the effective rank of the features has fallen from {max(ranks):.1f} to {ranks[-1]:.1f}: to the encoder all "
        f"images look alike; lower optim.lr ({facts.lr:g}), or change what is predicted (objective.name)"
    )


LEAST_SHARE = 0.01


def targets_collapse(history: History, facts: Facts) -> str | None:
    """Less than a hundredth of the targets' mean square differs between patches (`target_share`).

    Layer-normed targets have a mean square of 1, and the root of this share is their deviation over the patches: 0.1,
    below which data2vec's code stops too. A student that always gave the mean would be right but for this hundredth.
    Five healthy runs on CIFAR-10 (data2vec, I-JEPA; three learning rates) had 0.56 and more, a short one on birds 0.65.
    """
    shares = [share for _, share in series(history, "target_share")]
    if not shares or shares[-1] >= LEAST_SHARE:
        return None
    change = "change objective.teacher, or raise objective.teacher_depths"
    if facts.moving:
        change = f"lower optim.lr ({facts.lr:g}), raise objective.half_life, or set objective.teacher_norm instance"
    return f"{1 - shares[-1]:.1%} of the targets' mean square is the same for all patches; {change}"


RISEN = 0.02


def overfitting(history: History, facts: Facts) -> str | None:
    """The held-out loss rises while the training loss falls.

    For two evaluations it has been above its least value, now by more than 2 %, and the training loss is below what it
    was then. No healthy run rose at all; that of 64 birds, each seen 750 times, by 4.2 %.
    """
    evaluations = series(trained(history), EVALUATED)
    if len(evaluations) < 3 or facts.moving:
        return None
    best, least = min(evaluations[:-2], key=lambda pair: pair[1])
    step, now = evaluations[-1]
    losses = series(trained(history), "loss")
    around = [value for at, value in losses if at <= best][-RECENT:]
    recent = [value for _, value in losses][-RECENT:]
    risen = evaluations[-2][1] > least and now > least + RISEN * abs(least)
    if not risen or not around or mean(recent) >= mean(around):
        return None
    seen = f", and each image was seen {step * facts.images / facts.known:.0f} times" if facts.known else ""
    return (
        f"the held-out loss has risen from {least:.4g} (step {best}) to {now:.4g} while the training loss falls{seen}; "
        "use more images, lower run.steps, or crop harder (data.crop_area)"
    )


def a_long_warm_up(history: History, facts: Facts) -> str | None:
    """The warm-up is longer than a fifth of the run: the default is at most that, recipes have 1 to 10 %."""
    if 5 * facts.warmup <= facts.steps:
        return None
    return (
        f"the learning rate rises for {facts.warmup} of {facts.steps} updates, more than a fifth of the run; lower "
        f"optim.warmup_steps, or set it null, which is {min(100, facts.steps // 5)} here"
    )


CLIPPED, FAR = 0.95, 5.0


def clipped_nearly_always(history: History, facts: Facts) -> str | None:
    """The gradient is far above `optim.clip` at nearly every logged update since the warm-up.

    Healthy runs were above the default clip, 1, in 0 to 47 % of these updates, and their largest norm was 1.8. A
    learning rate of 1 had 15 to 10**8.
    """
    norms = [norm for step, norm in series(history, "optim/grad_norm") if step > facts.warmup][-5 * RECENT :]
    if facts.clip is None or len(norms) < RECENT:
        return None
    share = sum(norm > FAR * facts.clip for norm in norms) / len(norms)
    if share < CLIPPED:
        return None
    return (
        f"the gradient's norm was above {FAR:g} times optim.clip ({facts.clip:g}) in {share:.0%} of the logged updates "
        f"(its median is {median(norms):.3g}); divide optim.lr ({facts.lr:g}) by three"
    )


def features_have_peaked(history: History, facts: Facts) -> str | None:
    """The probe falls for two evaluations while the prediction still improves.

    It has to fall by more than chance does: of N probes that are equally good the best is sqrt(2 ln N) standard errors
    above them, and the last may be one below. The error is that of an accuracy on so many images, sqrt(p (1 - p) / n).
    One of the 18 runs peaked: grid_color on digits had 87.2 % after 200 of 400 updates and 81.8 % at its end, 2.8
    errors with a bound of 2.7.
    """
    group, lines = probed(trained(history))
    if len(lines) < 3 or facts.moving:
        return None
    best = [best_depth(line, group)[1] for line in lines]
    peak = best.index(max(best))
    losses = [line[EVALUATED] for line in lines]
    falling = best[-3] > best[-2] > best[-1] and peak <= len(best) - 3
    images = max(facts.judged, 1)
    error = sqrt(max(max(best) * (1 - max(best)), 1 / images) / images)
    if not falling or max(best) - best[-1] <= error * (1 + sqrt(2 * log(len(best)))) or losses[-1] >= losses[peak]:
        return None
    what = {"knn": "kNN accuracy", "agreement": "the neighbours' agreement"}[group]
    return (
        f"{what} was best after step {int(lines[peak]['step'])} ({max(best):.1%}) and has fallen to {best[-1]:.1%} "
        "while the prediction still improves; stop there (run.steps), or keep that encoder (run.keep_best true)"
    )


WAITING = 1 / 3


def waiting_for_data(history: History, facts: Facts) -> str | None:
    """Training waits for images a third of its time or more: without, it would be half as fast again.

    Healthy runs on one thread, which load the images themselves, waited for 8 to 21 %. Fewer logged updates than
    `RECENT` say nothing: on a busy machine, three of some milliseconds each can all have waited.
    """
    waits = [wait for _, wait in series(history, "speed/data_wait")][-RECENT:]
    if len(waits) < RECENT or median(waits) < WAITING:
        return None
    return (
        f"training waits for images {median(waits):.0%} of its time; raise data.workers, or shrink the files once "
        "(mpp prepare)"
    )


IDLE = 0.05


def an_idle_gpu(history: History, facts: Facts) -> str | None:
    """The GPU does less than a twentieth of the arithmetic that its large matrix products do.

    Derived, not measured (nobody has run mpp on a GPU): published ViT runs reach 30 to 60 % of it, and half of that is
    still lost to small kernels at widths of some hundreds; a twentieth means that it waits most of the time.
    """
    rates = [rate for _, rate in series(history, "speed/executed_tflops")][-RECENT:]
    if not facts.gpu_tflops or len(rates) < 3 or median(rates) >= IDLE * facts.gpu_tflops:
        return None
    return (
        f"the GPU does {median(rates):.3g} TFLOP/s of the {facts.gpu_tflops:.0f} that its matrix products reach; raise "
        "data.batch_size or optim.global_batch_size, data.workers, or set run.compile true"
    )


UNREADABLE = 0.01


def unreadable_images(history: History, facts: Facts) -> str | None:
    """More than one image in a hundred cannot be decoded. In all sets that were measured none was broken.

    Before all were seen, as in a stream, there have to be three standard deviations more since the first logged update:
    an earlier life of the run may have named some, and an evaluation names held-out ones.
    """
    counts = series(history, "unreadable")
    for step, count in counts:
        if 0 < facts.known <= step * facts.images:
            broken, seen, most = count, facts.known, UNREADABLE * facts.known
        else:
            broken, seen = count - counts[0][1], (step - counts[0][0]) * facts.images + facts.held_out
            most = UNREADABLE * seen + 3 * (UNREADABLE * seen) ** 0.5
        if broken > most:
            break
    else:
        return None
    return (
        f"{broken:.0f} of {seen} images cannot be decoded; unreadable.txt names them: repair or remove "
        "them, or see data.channels and data.max_pixels"
    )


DOUBLE = 0.05


def duplicates_across_the_cut(history: History, facts: Facts) -> str | None:
    """More than 5 % of the held-out images are nearly the same as a training image: held-out figures are too good.

    See `find_copies` in mpp/data/survey.py. Measured: birds and CIFAR-10 0 %, digits at most 0.7 %, tiles of
    photographs at most 4.0 %.
    """
    if facts.duplicates <= DOUBLE:
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


CONSTANT = 0.25


def constant_images_dominate(history: History, facts: Facts) -> str | None:
    """More than a quarter of the images show one colour alone. Measured: birds, CIFAR-10, digits 0 %, tiles 6 %."""
    if facts.constant <= CONSTANT:
        return None
    return (
        f"{facts.constant:.0%} of the images that were looked at show one colour alone, which is predicted without "
        "knowing anything; remove them, or see data.range and data.bands"
    )


CHECKS: dict[str, Callable[[History, Facts], str | None]] = {
    "nothing is learned": nothing_is_learned,
    "below the neighbours": below_the_neighbours,
    "features collapse": features_collapse,
    "targets collapse": targets_collapse,
    "overfitting": overfitting,
    "a long warm-up": a_long_warm_up,
    "clipped nearly always": clipped_nearly_always,
    "features have peaked": features_have_peaked,
    "waiting for data": waiting_for_data,
    "an idle GPU": an_idle_gpu,
    "unreadable images": unreadable_images,
    "duplicates across the cut": duplicates_across_the_cut,
    "one class dominates": one_class_dominates,
    "constant images dominate": constant_images_dominate,
}


def findings(history: History, facts: Facts) -> list[Finding]:
    """What is off."""
    found = ((name, check(history, facts)) for name, check in CHECKS.items())
    return [Finding(name, message) for name, message in found if message]

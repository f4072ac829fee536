"""Warnings about images, waiting for them, and a GPU of low utilisation: functions of a run's history and facts."""

from statistics import median

from mpp.training.facts import RunFacts
from mpp.training.history import RECENT_LINES, History, series

MAX_DATA_WAIT = 1 / 3  # of the time


def data_loading_bottleneck(history: History, facts: RunFacts) -> str | None:
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
        f"training waits for images {median(waits):.0%} of the time; raise data.workers, or shrink the files once "
        "(mpp prepare)"
    )


MIN_GPU_UTILISATION = 0.05  # of the arithmetic in large matrix products
WIDE = 768  # width of ViT-B
MIN_GPU_UTILISATION_OF_WIDE_MODELS = 0.15


def low_gpu_utilisation(history: History, facts: RunFacts) -> str | None:
    """The GPU does less than a twentieth of the arithmetic of its large matrix products; of a wide model, 15 %.

    Derived, not measured: the roofline of ViT-B on an H100 allows 40 to 45 % of its matrix product, and eager training
    26 to 34 % (evaluation/results/gpu.md). At widths of some hundreds, half of that is lost to small kernels.
    """
    rates = [rate for _, rate in series(history, "speed/executed_tflops")][-RECENT_LINES:]
    least = MIN_GPU_UTILISATION_OF_WIDE_MODELS if facts.width >= WIDE else MIN_GPU_UTILISATION
    if not facts.gpu_tflops or len(rates) < 3 or median(rates) >= least * facts.gpu_tflops:
        return None
    return (
        f"the GPU does {median(rates):.3g} TFLOP/s of the {facts.gpu_tflops:.0f} that matrix products reach; raise "
        "data.batch_size or optim.global_batch_size, data.workers, or set run.compile true"
    )


MAX_UNREADABLE_SHARE = 0.01


def unreadable_images(history: History, facts: RunFacts) -> str | None:
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
                "them, or see data.channels, data.range and data.max_pixels"
            )
    return None


MAX_DUPLICATES = 0.05  # of the held-out images


def held_out_duplicates(history: History, facts: RunFacts) -> str | None:
    """More than 5 % of the held-out images are nearly the same as a training image: held-out figures are too good.

    See `correlations` in evaluation/survey.py. Measured: birds and CIFAR-10 0 %, digits at most 0.7 %, tiles of
    photographs at most 4.0 %.
    """
    if facts.duplicates <= MAX_DUPLICATES:
        return None
    return (
        f"{facts.duplicates:.0%} of the sampled held-out images are nearly the same as a training image, so "
        "held-out figures are too good; remove copies, or name a split without them (data.eval_split)"
    )


def one_class_dominates(history: History, facts: RunFacts) -> str | None:
    """One class has more labelled images than all others together, of two classes three times as many.

    kNN accuracy is then high without knowing anything.
    """
    if facts.largest_class <= max(0.5, 1.5 / max(1, facts.classes)):
        return None
    return (
        f"{facts.largest_class:.0%} of the labelled images are of one class, the baseline of kNN accuracy; balance "
        "the images, or name another data.label_column"
    )


MAX_CONSTANT_SHARE = 0.25


def constant_images_dominate(history: History, facts: RunFacts) -> str | None:
    """More than a quarter of the images show one colour only. Measured: birds, CIFAR-10, digits 0 %, tiles 6 %."""
    if facts.constant <= MAX_CONSTANT_SHARE:
        return None
    return (
        f"{facts.constant:.0%} of the sampled images show only one "
        "colour, which is trivial to predict; remove them, or see data.range and data.bands"
    )

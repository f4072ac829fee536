"""Warnings about learning: the loss, the features, the optimiser. Functions of a run's history and facts."""

from math import log, sqrt
from statistics import mean, median

from mpp.training.facts import RunFacts
from mpp.training.history import (
    EVALUATED,
    GENERAL_KNN,
    RECENT_LINES,
    History,
    after_training_began,
    best_depth,
    copy_baseline,
    copy_baseline_beaten_since,
    evaluations,
    has_copy_baseline,
    lines_with,
    probe_lines,
    series,
    values_by_depth,
)

FEWEST_STEPS = 100
"""Steps before which nothing is said of learning: after 75, a healthy run on pixels was below a constant answer."""
STALLED_LOSS_CHANGE = 0.001  # relative
ONE_COLOR_SHARE = 0.95
BEYOND_CHANCE = 2.0  # standard errors
MEMORISED_GAP = 0.2  # in accuracy


def memorised(history: History) -> float | None:
    """Accuracy on masked patches of training images that were learned by heart; None: they were not.

    It is far above that of held-out images: by 0.29 with 64 birds, each seen 750 times. In the other runs of
    tests/histories it is at most 0.01 above.
    """
    held_out = [line["heldout/accuracy"] for line in history if "heldout/accuracy" in line]
    trained = [value for _, value in series(after_training_began(history), "accuracy")][-RECENT_LINES:]
    if not held_out or not trained or mean(trained) - held_out[-1] <= MEMORISED_GAP:
        return None
    return mean(trained)


def not_learning(history: History, facts: RunFacts) -> str | None:
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
    advice = f"raise optim.lr ({facts.lr:g}), or lower it if the loss jumps, and check the pictures in TensorBoard"
    if "heldout/most_frequent" in last:
        accuracy, constant = last["heldout/accuracy"], last["heldout/most_frequent"]
        if accuracy > constant:
            return None
        by_heart = memorised(history)
        if by_heart:
            advice = f"the training images are learned by heart ({by_heart:.1%} of their patches): use more images"
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


def below_copy_baseline(history: History, facts: RunFacts) -> str | None:
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
    advice = "raise run.steps or optim.lr, or use larger patches (model.patch_size)"
    if memorised(history):
        advice = "the training images are learned by heart: use more images, or larger patches (model.patch_size)"
    return (
        f"held-out accuracy {last['heldout/accuracy']:.1%} is not above that of copying the nearest visible patches "
        f"({copy_baseline(last):.1%}) after {last['step']:.0f} of {facts.steps} steps; {advice}"
    )


COLLAPSED_RANK = 4.0


def features_collapse(history: History, facts: RunFacts) -> str | None:
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
        f"the effective rank of the features has fallen from {max(ranks):.1f} to {ranks[-1]:.1f}: features of "
        f"different images become alike; lower optim.lr ({facts.lr:g}), or change what is predicted (objective.name)"
    )


MIN_TARGET_SHARE = 0.01


def targets_collapse(history: History, facts: RunFacts) -> str | None:
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
        lr, moving: see `RunFacts`.
    """
    if target_share >= MIN_TARGET_SHARE:
        return None
    advice = "change objective.teacher, or raise objective.teacher_depths"
    if moving:
        advice = f"lower optim.lr ({lr:g}), raise objective.half_life, or set objective.teacher_norm instance"
    return f"{1 - target_share:.1%} of the targets' mean square is the same for all patches; {advice}"


LOSS_RISE = 0.02  # relative to the least loss


def overfitting(history: History, facts: RunFacts) -> str | None:
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


def long_warmup(history: History, facts: RunFacts) -> str | None:
    """The warm-up is longer than a fifth of the run: the default is at most that, recipes have 1 to 10 %."""
    if 5 * facts.warmup <= facts.steps:
        return None
    return (
        f"the learning rate rises for {facts.warmup} of {facts.steps} steps, more than a fifth of the run; lower "
        f"optim.warmup_steps, or set it null, which is {min(100, facts.steps // 5)} here"
    )


CLIPPED_SHARE = 0.95  # of the logged steps
FAR_ABOVE_CLIP = 5.0


def gradients_almost_always_clipped(history: History, facts: RunFacts) -> str | None:
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


def features_peaked(history: History, facts: RunFacts) -> str | None:
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


def general_knn_falls(history: History, facts: RunFacts) -> str | None:
    """kNN accuracy on general images has fallen since the start of a run from weights, by more than chance does.

    Chance is two standard errors of a difference of two accuracies p and q on n images: sqrt((p (1 - p) + q (1 - q)) /
    n). Both are of the same images, so that chance does less than that; no run was needed to choose the bound. A run
    need not be long for it: weights can be lost in a few steps.
    """
    lines = lines_with(history, GENERAL_KNN)
    if not facts.weights_of or not facts.general or len(lines) < 2 or lines[0]["step"] > 0:
        return None
    _, before = best_depth(lines[0], GENERAL_KNN)
    _, now = best_depth(lines[-1], GENERAL_KNN)
    variance = before * (1 - before) + now * (1 - now)
    bound = BEYOND_CHANCE * sqrt(variance / facts.general)
    if before - now <= bound:
        return None
    fall = 100 * (before - now)
    return (
        f"kNN accuracy on general images fell by {fall:.1f} points since the start ({before:.1%}, now {now:.1%}; "
        f"chance explains up to {100 * bound:.1f}); lower optim.lr ({facts.lr:g}), raise optim.frozen_steps, train "
        "less (model.train, model.lora_rank), or use the first weights as the teacher (objective.teacher)"
    )

"""The verdict on a run: checks against histories made by hand, and against those of runs made sick and healthy ones.

The runs take minutes: what they logged is kept in histories/. `-m faults` trains some of them again. Where training or
what it logs has changed, `HISTORIES=anew pytest -m faults tests/test_verdict.py` trains them all, and keeps that.
"""

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, dataset_of, encoded, kill_at, picture, read_metrics
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation import contrastive
from evaluation.metrics.scoring import KINDS
from evaluation.survey import survey
from mpp.config import DataConfig
from mpp.data.columns import without_decoding
from mpp.data.dataset import ImageDataset
from mpp.features.probe import Probe, agreement
from mpp.pretrain import main
from mpp.training.facts import RunFacts
from mpp.training.health import WARNINGS, find_warnings
from mpp.training.log import read_history
from mpp.training.verdict import duration, has_best_features, verdict
from mpp.training.watch import read_verdict

FACTS = RunFacts(steps=1000, images=64, lr=0.01, warmup=100, clip=1.0, known=640, evaluated=400)
BEGUN = replace(FACTS, lr=1e-5, optimizer="adam", objective="features", weights_of="unknown")


def evaluation(step: int, loss: float = 2.0, accuracy: float = 0.5, knn: float = 0.4, **more: float) -> dict:
    """A line of metrics.jsonl, as an evaluation writes it."""
    line = {
        "step": step,
        "heldout/loss": loss,
        "heldout/accuracy": accuracy,
        "heldout/nearest": 0.3,
        "heldout/two_nearest": 0.32,
        "heldout/most_frequent": 0.06,
        "knn/depth_01": knn - 0.1,
        "knn/depth_02": knn,
    }
    return line | more


def logged_step(step: int, **more: float) -> dict:
    """A line of metrics.jsonl, as a logged step writes it."""
    line = {
        "step": step,
        "loss": 3 - step / 1000,
        "optim/lr": 0.01,
        "optim/grad_norm": 0.9,
        "speed/data_wait": 0.05,
        "speed/images_per_second": 128.0,
        "speed/hours": step * 0.5 / 3600,
        "unreadable": 0,
    }
    return line | more


def history(*evaluations: dict, **of_steps: float) -> list[dict]:
    """Logged steps up to the last evaluation, and the evaluations."""
    last = evaluations[-1]["step"]
    lines = [logged_step(step, **of_steps) for step in range(20, last + 1, 20)]
    return sorted([*lines, *evaluations], key=lambda line: line["step"])


def healthy() -> list[dict]:
    """History of a healthy run of 1,000 steps."""
    untrained = {"step": 0, "knn/depth_01": 0.2, "knn/depth_02": 0.21, "knn/floor_pixels": 0.25}
    rising = []
    for step in range(100, 1001, 100):
        rising.append(evaluation(step, loss=3 - step / 500, accuracy=0.3 + step / 4000, knn=0.3 + step / 9000))
    return history(untrained, *rising)


def without(line: dict, *names: str) -> dict:
    return {name: value for name, value in line.items() if not name.startswith(names)}


def test_a_probe_of_few_images_is_said_to_be_uncertain():
    few, enough = replace(FACTS, evaluated=25), replace(FACTS, evaluated=100)
    assert "kNN is of only 25 held-out images and uncertain by up to 18 points" in verdict(healthy(), few)
    assert "uncertain" not in verdict(healthy(), enough)
    assert "uncertain" not in verdict(history(evaluation(400)), replace(FACTS, evaluated=0))


def run_with_ranks(*ranks: float) -> list[dict]:
    """History with these effective ranks, one an evaluation."""
    return history(*(evaluation(100 * n, **{"features/rank/depth_01": rank}) for n, rank in enumerate(ranks, 1)))


def run_with_losses(*losses: float) -> list[dict]:
    """History with these held-out losses, one an evaluation."""
    return history(*(evaluation(100 * n, loss) for n, loss in enumerate(losses, 1)))


def run_with_probes(*accuracies: float) -> list[dict]:
    """History with these kNN accuracies, one an evaluation, and a held-out loss that falls."""
    return history(*(evaluation(100 * n, 3 - n / 10, knn=knn) for n, knn in enumerate(accuracies, 1)))


def with_general(*accuracies: float) -> list[dict]:
    """History with these kNN accuracies on general images, one a probe, from step 0 on; own images have labels."""
    start = {"step": 0, "knn/depth_01": 0.2, "knn/depth_02": 0.3, "general/knn/depth_02": accuracies[0]}
    later = [evaluation(100 * n, **{"general/knn/depth_02": each}) for n, each in enumerate(accuracies[1:], 1)]
    return history(start, *later)


SICK = {  # history, facts, part of the message
    "not learning": (history(evaluation(200, accuracy=0.06)), FACTS, "optim.lr"),
    "below copy baseline": (history(evaluation(400, accuracy=0.31)), FACTS, "run.steps"),
    "features collapse": (run_with_ranks(9.0, 12.0, 2.7), FACTS, "objective.name"),
    "targets collapse": (history(evaluation(400), target_share=0.009), FACTS, "objective.teacher_depths"),
    "overfitting": (run_with_losses(2.5, 2.0, 2.03, 2.05), FACTS, "40"),
    "long warm-up": (healthy(), replace(FACTS, warmup=201), "optim.warmup_steps"),
    "gradients almost always clipped": (history(evaluation(400), **{"optim/grad_norm": 6.0}), FACTS, "divide optim.lr"),
    "features peaked": (run_with_probes(0.4, 0.5, 0.46, 0.42), FACTS, "after step 200 (50.0%)"),
    "general kNN falls": (with_general(0.74, 0.69), replace(BEGUN, general=1000), "fell by 5.0 points since the start"),
    "data-loading bottleneck": (history(evaluation(400), **{"speed/data_wait": 0.4}), FACTS, "data.workers"),
    "low GPU utilisation": (
        history(evaluation(400), **{"speed/executed_tflops": 4.0}),
        replace(FACTS, gpu_tflops=400),
        "run.compile",
    ),
    "unreadable images": (history(evaluation(400), unreadable=7), FACTS, "unreadable.txt"),
    "train / held-out duplicates": (healthy(), replace(FACTS, duplicates=0.06), "data.eval_split"),
    "one class dominates": (healthy(), replace(FACTS, largest_class=0.51, classes=3), "data.label_column"),
    "constant images dominate": (healthy(), replace(FACTS, constant=0.3), "data.range"),
    "Muon after Adam": (healthy(), replace(FACTS, weights_of="unknown", optimizer="muon"), "optim.name adam"),
    "high learning rate on trained weights": (healthy(), replace(BEGUN, lr=1e-4), "start with 1.3e-05"),
    "no warm-up on trained weights": (healthy(), replace(BEGUN, weights_of="muon", warmup=0), "run.steps (50)"),
    "colours on trained weights": (healthy(), replace(BEGUN, objective="pixels"), "objective.name features"),
    "random weights stay": (healthy(), replace(FACTS, freezes="model.train"), "model.train freezes weights"),
}
WELL = {
    "not learning": (history(evaluation(200, accuracy=0.07)), FACTS),
    "below copy baseline": (history(evaluation(300, accuracy=0.31)), FACTS),  # not a third yet
    "features collapse": (run_with_ranks(2.4, 2.5, 2.7), FACTS),  # untrained features of digits are so
    "targets collapse": (history(evaluation(400), target_share=0.011), FACTS),
    "overfitting": (run_with_losses(2.5, 2.0, 2.03, 2.03), FACTS),
    "long warm-up": (healthy(), replace(FACTS, warmup=200)),
    "gradients almost always clipped": (history(evaluation(400), **{"optim/grad_norm": 4.9}), FACTS),
    "features peaked": (run_with_probes(0.4, 0.48, 0.45, 0.42), FACTS),  # 2.5 sqrt(0.48 * 0.52 / 400) = 6.2 %
    "general kNN falls": (
        with_general(0.74, 0.705),
        replace(BEGUN, general=1000),
    ),  # 2 sqrt(2 * .72 * .28 / 1000) = 4.0
    "general kNN falls from random weights": (with_general(0.74, 0.5), replace(FACTS, general=1000)),
    "data-loading bottleneck": (history(evaluation(400), **{"speed/data_wait": 0.3}), FACTS),
    "data-loading bottleneck while the GPU computes": (
        history(evaluation(400), **{"speed/data_wait": 0.6, "speed/gpu_idle": 0.1}),
        FACTS,
    ),
    "low GPU utilisation": (
        history(evaluation(400), **{"speed/executed_tflops": 40.0}),
        replace(FACTS, gpu_tflops=400),
    ),
    "a GPU with a wide model": (
        history(evaluation(400), **{"speed/executed_tflops": 80.0}),
        replace(FACTS, gpu_tflops=400, width=768),
    ),
    "unreadable images": (history(evaluation(400), unreadable=6), FACTS),
    "train / held-out duplicates": (healthy(), replace(FACTS, duplicates=0.05)),
    "one class dominates": (healthy(), replace(FACTS, largest_class=0.7, classes=2)),
    "constant images dominate": (healthy(), replace(FACTS, constant=0.25)),
    "Muon after Adam": (healthy(), replace(FACTS, weights_of="muon", optimizer="muon")),
    "Muon after a run that is elsewhere": (healthy(), replace(FACTS, weights_of="mpp", optimizer="muon")),
    "Muon with low-rank changes": (healthy(), replace(FACTS, weights_of="adam", optimizer="muon", adapters=True)),
    "high learning rate on trained weights": (healthy(), replace(BEGUN, lr=6e-5)),  # 5 x 5e-5 x 64 / 256 is 6.25e-5
    "a high rate on weights of a run": (healthy(), replace(BEGUN, weights_of="adam", lr=1e-2)),
    "no warm-up on trained weights": (healthy(), BEGUN),
    "colours on trained weights": (healthy(), BEGUN),
    "colours on weights of a run": (healthy(), replace(BEGUN, weights_of="adam", objective="mean_color")),
    "random weights stay": (healthy(), replace(BEGUN, freezes="model.train")),
}


@pytest.mark.faults
@pytest.mark.parametrize("probes", [10, 30, 100])
def test_a_probe_that_neither_rises_nor_falls_has_not_peaked(probes):
    """Noise of half a standard error: none of a hundred runs is said to have peaked, at any of its evaluations."""
    standard_error = (0.6 * 0.4 / 2000) ** 0.5
    noise = np.random.default_rng(0).normal(0.6, 0.5 * standard_error, (100, probes))
    facts = replace(FACTS, evaluated=2000, steps=100 * probes)
    for run in noise:
        lines = [evaluation(100 * n, 3 - n / 1000, knn=knn) for n, knn in enumerate(run, 1)]
        assert not any(WARNINGS["features peaked"](lines[: n + 1], facts) for n in range(probes))


def test_a_loss_that_rises_is_not_one_that_stays():
    risen = [evaluation(100 * n, loss, accuracy=0.3 + n / 100) for n, loss in enumerate((2.1, 2.5, 3.0), 1)]
    lines = [without(line, "heldout/most_frequent") for line in history(*risen)]
    assert WARNINGS["not learning"](lines, FACTS) is None


def test_few_logged_updates_do_not_say_that_training_waits():
    lines, facts, _ = SICK["data-loading bottleneck"]
    waited = [line for line in lines if "speed/data_wait" in line]
    assert WARNINGS["data-loading bottleneck"](waited[:10], facts)
    assert WARNINGS["data-loading bottleneck"](waited[:9], facts) is None


@pytest.mark.parametrize("known", [0, 10**6])
def test_unreadable_images_of_those_that_were_seen(known):
    """A hundredth of 400 x 64 images is 256, and three deviations of a count of so many are 48; then they recur."""
    facts = replace(FACTS, known=known, held_out=6400)

    def message(count: int) -> str | None:
        lines = [logged_step(20, unreadable=9)]
        lines += [logged_step(step, unreadable=9 + count) for step in (320, 900)]
        return WARNINGS["unreadable images"](lines, facts)

    assert message(304) is None
    assert "305 of 25600 images" in message(305)


@pytest.mark.parametrize("check", ["overfitting", "features peaked"])
def test_losses_are_not_compared_where_targets_move(check):
    lines, facts, _ = SICK[check]
    assert WARNINGS[check](lines, replace(facts, moving=True)) is None


@pytest.mark.parametrize("check", WARNINGS)
def test_each_check_tells_the_sick_from_the_healthy(check):
    lines, facts, said = SICK[check]
    assert said in WARNINGS[check](lines, facts)
    assert WARNINGS[check](*WELL[check]) is None
    assert WARNINGS[check](healthy(), FACTS) is None


def test_each_warning_has_its_row_on_the_page_about_monitoring():
    text = (ROOT / "mpp" / "monitoring.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert set(WARNINGS) <= set(rows)


def test_a_healthy_history_says_nothing_at_any_evaluation():
    lines = healthy()
    for end in range(1, len(lines) + 1):
        assert find_warnings(lines[:end], FACTS) == []


@pytest.mark.parametrize("check", ["not learning", "below copy baseline", "features collapse"])
def test_a_run_of_a_few_steps_is_not_judged(check):
    """Nor are the first steps of a longer run; the verdict on a short one says that it is too short."""
    lines = run_with_ranks(9.0, 12.0, 2.7) if check == "features collapse" else [evaluation(400, accuracy=0.01)]
    short = replace(FACTS, steps=6, warmup=1)
    assert WARNINGS[check](lines, replace(FACTS, warmup=1))
    lines = [line | {"step": min(line["step"], 6)} for line in lines]
    assert WARNINGS[check](lines, short) is None
    assert "fewer than 100 steps, too few to evaluate learning" in verdict(lines[-1:], short)
    assert "too few" not in verdict(lines[-1:], FACTS)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([], id="empty"),
        pytest.param([logged_step(20)], id="not evaluated"),
        pytest.param([{"step": 0, "knn/depth_01": 0.3}], id="not trained"),
        pytest.param([{"step": 5, "heldout/loss": 1.0}], id="loss only"),
    ],
)
def test_histories_that_lack_something_are_no_error(lines):
    assert find_warnings(lines, FACTS) == [] and verdict(lines, FACTS)


def test_without_colours_learning_is_seen_in_the_held_out_loss():
    colours = ("heldout/accuracy", "heldout/nearest", "heldout/two_nearest", "heldout/most_frequent")

    def message(*losses: float) -> str | None:
        lines = [without(evaluation(100 * n, loss), *colours) for n, loss in enumerate(losses, 2)]
        return WARNINGS["not learning"](history(*lines), FACTS)

    assert "at the first evaluation (1, now 0.9995)" in message(1.0, 1.0002, 0.9995)
    assert message(1.0, 1.0002) is None  # two may be alike by chance
    assert message(1.0, 0.98, 0.95) is None
    assert message(1.0, 1.01, 0.9995) is None  # it came back


def test_the_line_says_where_a_run_stands():
    line = verdict([*healthy()[:-1], evaluation(500, 1.0, 0.45, 0.35)], replace(FACTS, steps=1500), ["overfitting"])
    for said in (
        "masked-patch accuracy 45.0% (copy baseline 32.0%, beaten since step 100)",
        "kNN 35.0% at block 2 (random weights 21.0%, pixel colours 25.0%)",
        "warnings: overfitting",
    ):
        assert said in line
    assert "8.3 minutes left" in line  # 1,000 steps of half a second
    for accuracy, beaten in ((0.3, "not beaten"), (0.32, "matched")):
        line = verdict(history(evaluation(400, accuracy=accuracy)), FACTS)
        assert f"masked-patch accuracy {100 * accuracy:.1f}% (copy baseline 32.0%, {beaten})" in line


@pytest.mark.faults
def test_general_images_that_neither_gain_nor_lose_do_not_warn():
    """1,000 draws of independent images: a twentieth of them at most is beyond two errors, on the side that warns."""
    rng = np.random.default_rng(0)
    facts = replace(BEGUN, general=500)
    drawn = rng.binomial(500, 0.7, (1000, 2)) / 500
    warned = [WARNINGS["general kNN falls"](with_general(*each), facts) for each in drawn]
    assert 0 < sum(each is not None for each in warned) < 50


DRIFT = {"drift/weights/all": 0.021, "drift/neighbours/depth_02": 0.71}


@pytest.mark.parametrize(
    ("lacking", "more", "said"),
    [
        pytest.param(
            "-",
            DRIFT | {"drift/general_neighbours/depth_02": 0.85},
            "own images: kNN 30.0% -> 40.0% at block 2; general images: kNN 74.0% -> 73.1% at block 2; the weights "
            "moved by 2.1%, and 85.0% of the neighbours among general images are the same; masked-patch",
            id="both",
        ),
        pytest.param("knn", {}, "general images: kNN 74.0% -> 73.1% at block 2; masked-patch", id="general alone"),
        pytest.param(
            "general",
            DRIFT,
            "own images: kNN 30.0% -> 40.0% at block 2; the weights moved by 2.1%, and 71.0% of the neighbours among "
            "own images are the same; masked-patch",
            id="own alone",
        ),
        pytest.param(
            "knn",
            {"agreement/depth_01": 0.5},
            "general images: kNN 74.0% -> 73.1% at block 2; neighbour agreement 50.0% at block 1; masked-patch",
            id="agreement",
        ),
    ],
)
def test_the_line_of_a_run_from_weights_begins_with_what_it_gained_and_lost(lacking, more, said):
    lines = [without(line, lacking) for line in with_general(0.74, 0.731)]
    lines[-1] |= more
    assert verdict(lines, BEGUN).startswith(said)
    without_start = verdict(lines[1:], BEGUN)
    assert "->" not in without_start and ("40.0%" in said) == ("own images: kNN 40.0% at block 2" in without_start)


def test_general_images_of_a_run_from_random_weights_come_behind_its_own():
    line = verdict(with_general(0.3, 0.5), FACTS)
    assert line.startswith("masked-patch accuracy") and "; kNN 40.0% at block 2 (random weights 30.0%); " in line
    assert "general images: kNN 50.0% at block 2 (random weights 30.0%)" in line


def test_weights_that_stay_have_moved_by_nothing():
    """As in the frozen start: that is a measurement, and no lack of one."""
    frozen = evaluation(400) | {"drift/weights/all": 0.0}
    assert "the weights moved by 0.0%" in verdict([frozen], replace(FACTS, weights_of="adam"))
    assert "the weights moved" not in verdict([evaluation(400)], replace(FACTS, weights_of="adam"))


def test_neighbours_of_too_few_images_are_not_compared():
    """Where each image is a neighbour of all others, they agree by chance alone."""
    lines = [
        {"step": step, "heldout/loss": 2.0, "agreement/depth_01": 1.0, "agreement/chance": 1.0} for step in (0, 400)
    ]
    assert "too few held-out images to compare neighbours" in verdict(lines, FACTS)


def test_without_labels_the_line_has_rank_and_agreement():
    first = {"step": 0, "agreement/depth_01": 0.2, "agreement/floor_pixels": 0.3, "features/rank/depth_01": 5.0}
    last = without(evaluation(400), "knn") | {"agreement/depth_01": 0.5, "features/rank/depth_01": 9.0}
    assert (
        "neighbour agreement 50.0% at block 1 (random weights 20.0%, pixel colours 30.0%), effective rank 9.0 "
        "(random weights 5.0)"
    ) in verdict([first, last], FACTS)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 seconds"), (1.3, "1 second"), (89, "89 seconds"), (90, "1.5 minutes")]
)
def test_a_duration_has_its_unit_in_the_right_number(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("name", "said"), [("largest_class", "(largest class 28.0%)"), ("chance", "(chance 28.0%)")])
def test_the_line_of_another_training_has_what_is_reached_without(name, said):
    line = {"step": 9, "heldout/loss": 1.0, "heldout/accuracy": 0.5, f"heldout/{name}": 0.28}
    assert verdict([line], FACTS).startswith(f"held-out accuracy 50.0% {said}")


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ({"macro_map": 0.5, "any_order_of_the_images": 0.25}, "held-out mAP 50.0% (any order 25.0%)"),
        ({"r2": -0.0625, "mae": 3.0, "mean_of_the_test_images": 0.0}, "held-out R2 -0.062"),
    ],
)
def test_the_line_of_other_labels_has_their_score(score, said):
    line = {"step": 9, "heldout/loss": 1.0} | {f"heldout/{name}": value for name, value in score.items()}
    assert verdict([line], FACTS).split(";")[0] == said
    for name in score:
        if not name.startswith(("any", "mean")):
            assert any(name in kind.headings for kind in KINDS.values())  # as training logs it


def test_the_best_is_by_the_probe_or_by_the_accuracy():
    rising = [evaluation(100, knn=0.3), evaluation(200, knn=0.4)]
    falling = evaluation(300, accuracy=0.9, knn=0.35)
    assert has_best_features(rising[:1])
    assert has_best_features(rising)
    assert not has_best_features([*rising, falling])
    assert not has_best_features([*rising, without(falling, "knn")])  # an evaluation without a probe
    assert has_best_features([without(line, "knn") for line in [*rising, falling]])


# --- what the checks are told ---


def test_neighbours_agree_where_features_do_and_by_chance_elsewhere():
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(400, 16, generator=rng), torch.randn(400, 16, generator=rng)
    assert agreement(one, 3 * one) == 1
    assert agreement(one, other) == pytest.approx(5 / 399, abs=4 * math.sqrt(5 / 399 / 2000))
    assert agreement(one[:1], one[:1]) == 1
    pairs = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9]])
    assert agreement(pairs, pairs[[0, 2, 1, 3]], neighbours=1) == 0


def images_of(arrays, labels=None) -> ImageDataset:
    rows = without_decoding(dataset_of([encoded(array) for array in arrays]), "image")
    return ImageDataset(rows, "image", None if labels is None else np.array(labels), "train")


def test_copies_and_images_of_one_colour_are_found():
    training = [picture(n) for n in range(20)]
    grey = np.full((40, 48, 3), 90, np.uint8)
    smaller = np.asarray(Image.fromarray(picture(3)).resize((32, 26)))
    test = [picture(100), smaller, picture(7), grey, picture(9) // 2 + 40]  # the last: a copy of less contrast
    found = survey(images_of([*training, training[0], grey], [0] * 15 + [1] * 7), images_of(test), DataConfig(), 60)
    assert found.duplicate_share == pytest.approx(3 / 5) and len(found.duplicate_pairs) == 3
    assert found.one_colour_share == pytest.approx(2 / 27)
    assert found.class_shares == {"0": pytest.approx(15 / 22), "1": pytest.approx(7 / 22)}
    assert found.sizes[(40, 48)] == 26 and found.unreadable == []


def test_images_that_share_a_horizon_are_no_copies():
    """What all have in common makes them alike, and says nothing of copies. Those of less contrast are found."""
    rng, horizon = np.random.default_rng(0), np.linspace(0, 200, 40)[:, None, None]
    images = [np.clip(horizon + rng.normal(20, 9, (40, 48, 3)), 0, 255).astype(np.uint8) for _ in range(30)]
    images = [np.asarray(Image.fromarray(each).resize((48, 40), box=(0, 0, 24, 40))) for each in images]
    found = survey(images_of(images[:24]), images_of([*images[24:], images[5] // 2 + 40]), DataConfig(), 60)
    assert found.duplicate_share == pytest.approx(1 / 7)


def test_what_cannot_be_decoded_is_counted():
    rows = without_decoding(dataset_of([encoded(picture(0)), b"no image", encoded(picture(1))]), "image")
    found = survey(ImageDataset(rows, "image", None, "train"), images_of([picture(5)]), DataConfig(), 60)
    assert len(found.unreadable) == 1 and found.train_images == 2


# --- tiny runs ---

EVALUATED = ("--run.eval_every=1",)


@pytest.mark.faults
def test_a_run_says_how_it_is_and_warns_once_in_all_of_its_lives(pretrain, capsys, monkeypatch):
    arguments = (*EVALUATED, "--optim.lr=1e-9", "--probe.every=1", "--probe.images=40", "--run.checkpoint_every=1")
    monkeypatch.setattr("mpp.training.learning_warnings.FEWEST_STEPS", 0)
    with monkeypatch.context() as patch, pytest.raises(BaseException, match="killed"):
        kill_at(patch, 3)
        pretrain(*arguments)
    folder = pretrain(*arguments)
    said = capsys.readouterr()
    assert said.out.count("of 4: masked-patch accuracy ") == 4
    assert said.out.count("\nverdict: masked-patch accuracy") == 1
    for check in ("not learning", "below copy baseline"):
        assert said.err.count(f"warning: {check}: held-out accuracy") == 1
    saved = read_verdict(folder)
    assert [(each["check"], each["step"]) for each in saved["warnings"]] == [
        ("not learning", 1),
        ("below copy baseline", 2),
    ]
    assert saved["step"] == 4 and saved["line"].endswith("warnings: not learning, below copy baseline")
    assert set(read_metrics(folder, "knn/floor_pixels")) == {0}
    events = EventAccumulator(str(folder)).Reload()
    assert "verdict/text_summary" in events.Tags()["tensors"]


@pytest.mark.faults
def test_images_without_labels_are_evaluated_by_agreement(pretrain, tmp_path):
    (tmp_path / "plain").mkdir()
    for number in range(16):
        (tmp_path / "plain" / f"{number}.png").write_bytes(encoded(picture(number)))
    folder = pretrain("--probe.every=4", f"--data.path={tmp_path / 'plain'}", "--data.eval_fraction=0.5")
    assert list(read_metrics(folder, "agreement/depth_02")) == [0, 4] and not read_metrics(folder, "knn/depth_02")
    assert all(0 <= value <= 1 for value in read_metrics(folder, "agreement/depth_02").values())
    assert "neighbour agreement" in read_verdict(folder)["line"]


@pytest.mark.faults
def test_the_best_encoder_is_kept_beside_the_last(pretrain, monkeypatch):
    values, seen = iter((0.2, 0.5, 0.9, 0.6, 0.7)), []

    def scripted(probe, model, baseline=False):
        seen.append({name: weight.clone() for name, weight in model.encoder.state_dict().items()})
        return {"knn/depth_01": next(values)}

    monkeypatch.setattr(Probe, "__call__", scripted)
    folder = pretrain(*EVALUATED, "--probe.every=1", "--run.keep_best=true")
    best, last = (load_file(folder / name / "model.safetensors") for name in ("encoder_best", "encoder"))
    assert all(torch.equal(best[name], seen[2][name]) for name in best)  # before training, after 1, after 2 steps
    assert all(torch.equal(last[name], seen[4][name]) for name in last)
    assert not all(torch.equal(best[name], last[name]) for name in best)
    assert "after 2 steps" in (folder / "encoder_best" / "README.md").read_text()


@pytest.mark.faults
def test_a_best_encoder_that_was_not_kept_is_noted(pretrain, monkeypatch, capsys):
    values = iter((0.2, 0.9, 0.3, 0.4, 0.5, 0.6))
    monkeypatch.setattr(Probe, "__call__", lambda *_, **__: {"knn/depth_01": next(values)})
    options = (*EVALUATED, "--probe.every=1", "--optim.schedule=constant")
    pretrain(*options, "--run.steps=2")
    said = "note: run.keep_best: features were best after step 1, whose encoder was not kept; encoder_best is written"
    assert said not in capsys.readouterr().out
    folder = pretrain(*options, "--run.steps=3", "--run.keep_best=true")
    assert said in capsys.readouterr().out and not (folder / "encoder_best").exists()


@pytest.mark.faults
def test_a_slow_loader_is_seen(pretrain, monkeypatch):
    decode = ImageDataset.decode
    monkeypatch.setattr(ImageDataset, "decode", lambda *args: time.sleep(0.02) or decode(*args))
    folder = pretrain("--data.cache_gb=0", "--run.steps=10")
    assert "data-loading bottleneck" in read_verdict(folder)["off"]


@pytest.mark.faults
def test_a_verdict_that_fails_does_not_end_a_run(pretrain, monkeypatch, capsys):
    monkeypatch.setattr("mpp.training.watch.verdict", lambda *_: 1 / 0)
    folder = pretrain()
    assert "warning: no verdict after step 4: ZeroDivisionError: division by zero" in capsys.readouterr().err
    assert (folder / "encoder").is_dir() and read_verdict(folder) == {}


@pytest.mark.faults
def test_a_verdict_knows_the_classes_by_their_labels(pretrain):
    facts = read_verdict(pretrain())["facts"]
    assert (facts["known"], facts["duplicates"], facts["classes"]) == (633, 0, 9)
    assert 1 / 9 < facts["largest_class"] < 0.5


# --- runs that are sick on purpose, and healthy ones ---

HISTORIES = Path(__file__).parent / "histories"
ANEW = os.environ.get("HISTORIES") == "anew"
SMALL = (
    *("--run.threads=1", "--data.workers=0", "--run.report=false", "--run.log_every=10", "--run.checkpoint_every=9999"),
    *("--run.eval_every=75", "--probe.every=75", "--probe.images=500", "--data.eval_images=500"),
    *("--model.width=64", "--model.depth=3", "--model.heads=2", "--optim.global_batch_size=32", "--run.steps=300"),
)


def write_set(folder: Path, name: str, labelled: bool = True) -> str:
    """scikit-learn's digits, or tiles of scikit-image's photographs (the class: which), as images; their settings."""
    if "digits" in name:
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)
        images = [Image.fromarray((each.reshape(8, 8) * 15.9).astype(np.uint8)).resize((32, 32)) for each in values]
    else:
        from skimage import data

        names = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "hubble_deep_field", "moon", "rocket")
        images, labels = [], []
        for label, photo_name in enumerate(names):
            photo = getattr(data, photo_name)()
            for row in range(0, photo.shape[0] - 63, 64):
                for column in range(0, photo.shape[1] - 63, 64):
                    tile = photo[row : row + 64, column : column + 64]
                    images.append(Image.fromarray(tile).convert("RGB"))
                    labels.append(label)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / name / (str(label) if labelled else "") / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    return f"--data.path={folder / name}"


def settings_of(name: str, folder: Path) -> tuple[str, ...]:
    """A set's settings; it is written into the folder."""
    digits = ("--data.channels=1", "--model.img_size=32", "--model.patch_size=8", "--data.eval_fraction=0.2")
    if name == "birds":
        return ("--model.img_size=32", "--model.patch_size=8")
    if name == "tiles":
        return (write_set(folder, name), "--data.eval_fraction=0.2", "--model.patch_size=16")
    return (write_set(folder, name, labelled=name == "digits"), *digits)


SICK_RUNS = {
    "lr_1": ("birds", ("--optim.lr=1",), {"not learning", "gradients almost always clipped", "features collapse"}),
    "lr_1e-9": ("digits", ("--optim.lr=1e-9", "--run.steps=100"), {"not learning"}),
    "lr_1e-9_mae": (
        *("digits", ("--config=rivals/mae", "--optim.lr=1e-9", "--run.steps=225")),
        {"not learning"},
    ),
    "64_images": (
        *("birds", ("--data.train_images=64", "--run.steps=1200", "--run.eval_every=200", "--probe.every=0")),
        {"overfitting"},
    ),
}


ADAM = ("--optim.name=adam", "--optim.lr=2e-3", "--optim.adam_scale=3")
GREY = ("--views.jitter=0", "--views.grey=0")
HEALTHY_RUNS = {
    "default": ("digits", ()),
    "pixels": ("digits", ("--objective.name=pixels",)),
    "mae": ("digits", ("--config=rivals/mae",)),
    "adam": ("digits", (*ADAM, "--run.steps=600")),
    "wide_and_flat_linear_decay": ("digits", ("--model.width=96", "--model.depth=2", "--optim.schedule=linear")),
    "without_labels": ("plain digits", ()),
    "simclr": ("digits", (*GREY, "--model.patch_size=4")),
    "mae_photographs": ("tiles", ("--config=rivals/mae",)),
    "maskfeat_photographs": ("tiles", ("--config=rivals/maskfeat",)),
    "maskfeat_birds": ("birds", ("--config=rivals/maskfeat",)),
}


RUNS = SICK_RUNS | {name: (*run, set()) for name, run in HEALTHY_RUNS.items()}
AGAIN = ("lr_1", "lr_1e-9", "without_labels", "maskfeat_birds")


def check(name: str, warned: set[str]) -> None:
    """That it is said what is off, and of a healthy run nothing, but for what the machine decides."""
    sick = RUNS[name][2]
    assert sick <= warned if sick else warned <= {"data-loading bottleneck"}


def test_advice_to_train_longer_is_not_given_where_images_are_learned_by_heart():
    first, *lines = map(json.loads, (HISTORIES / "64_images.jsonl").read_text().splitlines())
    facts = RunFacts(**first)
    assert WARNINGS["below copy baseline"](lines, facts).endswith(
        "the training images are learned by heart: use more images, or larger patches (model.patch_size)"
    )
    on_constant = history(evaluation(200, accuracy=0.06), accuracy=0.5)
    assert "learned by heart (50.0% of their patches): use more images" in WARNINGS["not learning"](on_constant, FACTS)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_of_runs_that_were_trained(name):
    first, *lines = map(json.loads, (HISTORIES / f"{name}.jsonl").read_text().splitlines())
    facts = RunFacts(**first)
    warned = set()
    for end, line in enumerate(lines, 1):
        if line["step"] > 0 and "heldout/loss" in line:
            warned |= {warning.name for warning in find_warnings(lines[:end], facts)}
    check(name, warned)


def rounded(line: dict) -> dict:
    """What checks read of a line, to four digits."""
    return {name: float(f"{value:.4g}") for name, value in without(line, "compute/", "speed/").items()}


@pytest.mark.faults
@pytest.mark.parametrize("name", RUNS if ANEW else AGAIN)
def test_they_are_trained_again(name, tmp_path, tally):
    images, settings, sick = RUNS[name]
    arguments = list(settings_of(images, tmp_path))
    overlays = [word for word in settings if word.startswith("--config")]
    others = [word for word in settings if not word.startswith("--config")]
    train, folder = contrastive.main if name == "simclr" else main, tmp_path / "run"
    train([*overlays, *SMALL, *arguments, *others, f"--run.dir={folder}"])
    check(name, {each["check"] for each in read_verdict(folder)["warnings"]})
    tally(f"runs that are {'sick on purpose' if sick else 'healthy'}: the verdict says so", 1)
    if ANEW:
        lines = [read_verdict(folder)["facts"], *map(rounded, read_history(folder))]
        (HISTORIES / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

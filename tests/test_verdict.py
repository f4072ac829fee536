"""The verdict on a run: checks against histories made by hand, and against those of runs made sick and healthy ones.

The runs take minutes: what they logged is kept in histories/. `-m faults` trains some of them again. Where training or
what it logs has changed, `HISTORIES=anew pytest -m faults tests/test_verdict.py` trains them all, and keeps that.
"""

import json
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, encoded, kill_at, picture, read_metrics
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation import contrastive
from evaluation.metrics.scoring import KINDS
from mpp.config import Config, rebuild
from mpp.data.dataset import ImageDataset
from mpp.features.probe import Probe, agreement
from mpp.pretrain import main
from mpp.training import health
from mpp.training.health import WARNINGS, find_warnings
from mpp.training.log import read_history
from mpp.training.run_folder import saved_settings
from mpp.training.verdict import has_best_features, read_verdict, verdict


def config_of(
    steps: int = 1000,
    images: int = 64,
    lr: float = 0.01,
    warmup: int = 100,
    clip: float | None = 1.0,
    moving: bool = False,
    **more: object,
) -> Config:
    """The config of a run.

    Args:
        moving: whether a moving average teaches.
        more: settings by name.
    """
    settings = {"run.steps": steps, "optim.global_batch_size": images, "optim.lr": lr, "optim.clip": clip}
    settings |= {"optim.warmup_steps": warmup} | ({"objective.name": "features"} if moving else {}) | more
    return rebuild(Config(), settings)


def config_of_history(facts: dict) -> Config:
    """The config of a run in histories/."""
    return config_of(**{name: facts[name] for name in ("steps", "images", "lr", "warmup", "clip", "moving")})


CONFIG = config_of()
GENTLE = {"optim.name": "adam", "objective.name": "features", "model.init_from": "published"}
BEGUN = config_of(lr=1e-5, **GENTLE)


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """Without the hub: weights of this name are published ones."""
    monkeypatch.setattr(health, "is_published", lambda init_from: init_from == "published")


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


def run_with_ranks(*ranks: float) -> list[dict]:
    """History with these effective ranks, one an evaluation."""
    return history(*(evaluation(100 * n, **{"features/rank/depth_01": rank}) for n, rank in enumerate(ranks, 1)))


def run_with_losses(*losses: float) -> list[dict]:
    """History with these held-out losses, one an evaluation."""
    return history(*(evaluation(100 * n, loss) for n, loss in enumerate(losses, 1)))


def with_general(*accuracies: float) -> list[dict]:
    """History with these kNN accuracies on general images, one a probe, from step 0 on; own images have labels."""
    start = {"step": 0, "knn/depth_01": 0.2, "knn/depth_02": 0.3, "general/knn/depth_02": accuracies[0]}
    later = [evaluation(100 * n, **{"general/knn/depth_02": each}) for n, each in enumerate(accuracies[1:], 1)]
    return history(start, *later)


SICK = {  # history, config, part of the message
    "not learning": (history(evaluation(200, accuracy=0.06)), CONFIG, "optim.lr"),
    "below copy baseline": (history(evaluation(400, accuracy=0.31)), CONFIG, "run.steps"),
    "features collapse": (run_with_ranks(9.0, 12.0, 2.7), CONFIG, "objective.name"),
    "targets collapse": (history(evaluation(400), target_share=0.009), CONFIG, "objective.teacher_depths"),
    "overfitting": (run_with_losses(2.5, 2.0, 2.03, 2.05), CONFIG, "data.crop_area"),
    "data-loading bottleneck": (history(evaluation(400), **{"speed/data_wait": 0.4}), CONFIG, "data.workers"),
    "trained weights at risk": ([], config_of(**GENTLE), "optim.lr 0.01 (above 6.3e-05) can destroy"),
}
WELL = {
    "not learning": [(history(evaluation(200, accuracy=0.07)), CONFIG)],
    "below copy baseline": [(history(evaluation(300, accuracy=0.31)), CONFIG)],  # not a third yet
    "features collapse": [(run_with_ranks(2.4, 2.5, 2.7), CONFIG)],  # untrained features of digits are so
    "targets collapse": [(history(evaluation(400), target_share=0.011), CONFIG)],
    "overfitting": [(run_with_losses(2.5, 2.0, 2.03, 2.03), CONFIG)],
    "data-loading bottleneck": [(history(evaluation(400), **{"speed/data_wait": 0.3}), CONFIG)],
    "trained weights at risk": [
        ([], BEGUN),
        ([], config_of(lr=6e-5, **GENTLE)),  # 5 x 5e-5 x 64 / 256 is 6.25e-5
        ([], config_of(**GENTLE | {"model.init_from": "of a run of mpp"})),
        ([], config_of(**GENTLE | {"model.lora_rank": 4})),
    ],
}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optim.name": "muon"}, "optim.name muon"),
        ({"optim.warmup_steps": 0}, "optim.warmup_steps 0"),
        ({"objective.name": "pixels"}, "objective.name pixels"),
    ],
)
def test_settings_that_destroy_published_weights_are_named(settings, said):
    assert WARNINGS["trained weights at risk"]([], rebuild(BEGUN, settings)).startswith(f"{said} can destroy")


def test_a_loss_that_rises_is_not_one_that_stays():
    risen = [evaluation(100 * n, loss, accuracy=0.3 + n / 100) for n, loss in enumerate((2.1, 2.5, 3.0), 1)]
    lines = [without(line, "heldout/most_frequent") for line in history(*risen)]
    assert WARNINGS["not learning"](lines, CONFIG) is None


def test_few_logged_updates_do_not_say_that_training_waits():
    lines, config, _ = SICK["data-loading bottleneck"]
    waited = [line for line in lines if "speed/data_wait" in line]
    assert WARNINGS["data-loading bottleneck"](waited[:10], config)
    assert WARNINGS["data-loading bottleneck"](waited[:9], config) is None


def test_losses_are_not_compared_where_targets_move():
    lines, _, _ = SICK["overfitting"]
    assert WARNINGS["overfitting"](lines, config_of(moving=True)) is None


@pytest.mark.parametrize("check", WARNINGS)
def test_each_check_tells_the_sick_from_the_healthy(check):
    lines, config, said = SICK[check]
    assert said in WARNINGS[check](lines, config)
    assert [WARNINGS[check](*well) for well in WELL[check]] == [None] * len(WELL[check])
    assert WARNINGS[check](healthy(), CONFIG) is None


def test_each_warning_has_its_row_on_the_page_about_monitoring():
    text = (ROOT / "mpp" / "monitoring.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert set(WARNINGS) <= set(rows)


def test_a_healthy_history_says_nothing_at_any_evaluation():
    lines = healthy()
    for end in range(1, len(lines) + 1):
        assert find_warnings(lines[:end], CONFIG) == {}


@pytest.mark.parametrize("check", ["not learning", "below copy baseline", "features collapse"])
def test_a_run_of_a_few_steps_is_not_judged(check):
    """Nor are the first steps of a longer run; the verdict on a short one says that it is too short."""
    lines = run_with_ranks(9.0, 12.0, 2.7) if check == "features collapse" else [evaluation(400, accuracy=0.01)]
    short = config_of(steps=6, warmup=1)
    assert WARNINGS[check](lines, config_of(warmup=1))
    lines = [line | {"step": min(line["step"], 6)} for line in lines]
    assert WARNINGS[check](lines, short) is None
    assert "fewer than 100 steps, too few to evaluate learning" in verdict(lines[-1:], short)
    assert "too few" not in verdict(lines[-1:], CONFIG)


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
    assert find_warnings(lines, CONFIG) == {} and verdict(lines, CONFIG)


def test_without_colours_learning_is_seen_in_the_held_out_loss():
    colours = ("heldout/accuracy", "heldout/nearest", "heldout/two_nearest", "heldout/most_frequent")

    def message(*losses: float) -> str | None:
        lines = [without(evaluation(100 * n, loss), *colours) for n, loss in enumerate(losses, 2)]
        return WARNINGS["not learning"](history(*lines), CONFIG)

    assert "at the first evaluation (1)" in message(1.0, 1.0002, 0.9995)
    assert message(1.0, 1.0002) is None  # two may be alike by chance
    assert message(1.0, 0.98, 0.95) is None
    assert message(1.0, 1.01, 0.9995) is None  # it came back


def test_the_line_says_where_a_run_stands():
    line = verdict([*healthy()[:-1], evaluation(500, 1.0, 0.45, 0.35)], config_of(steps=1500), ["overfitting"])
    assert line == (
        "masked-patch accuracy 45.0% (copy baseline 32.0%, beaten since step 100); kNN 35.0% at block 2 (random "
        "weights 21.0%, pixel colours 25.0%); held-out loss still falling; warnings: overfitting"
    )
    for accuracy in (0.3, 0.32):
        line = verdict(history(evaluation(400, accuracy=accuracy)), CONFIG)
        assert f"masked-patch accuracy {100 * accuracy:.1f}% (copy baseline 32.0%, not beaten)" in line


def test_the_line_of_a_run_from_weights_has_what_it_gained_and_lost():
    lines = with_general(0.74, 0.731)
    said = "kNN 40.0% at block 2 (the start 30.0%), kNN of general images 73.1% at block 2 (the start 74.0%)"
    assert said in verdict(lines, BEGUN)
    assert "the start" not in verdict(lines[1:], BEGUN) and "random weights 30.0%" in verdict(lines, CONFIG)


def test_without_labels_the_line_has_agreement():
    first = {"step": 0, "agreement/depth_01": 0.2, "agreement/floor_pixels": 0.3}
    last = without(evaluation(400), "knn") | {"agreement/depth_01": 0.5, "agreement/chance": 0.1}
    said = "neighbour agreement 50.0% at block 1 (random weights 20.0%, pixel colours 30.0%, chance 10.0%)"
    assert said in verdict([first, last], CONFIG)


@pytest.mark.parametrize(("name", "said"), [("largest_class", "(largest class 28.0%)"), ("chance", "(chance 28.0%)")])
def test_the_line_of_another_training_has_what_is_reached_without(name, said):
    line = {"step": 9, "heldout/loss": 1.0, "heldout/accuracy": 0.5, f"heldout/{name}": 0.28}
    assert verdict([line], CONFIG).startswith(f"held-out accuracy 50.0% {said}")


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ({"macro_map": 0.5, "any_order_of_the_images": 0.25}, "held-out mAP 50.0% (any order 25.0%)"),
        ({"r2": -0.0625, "mae": 3.0, "mean_of_the_test_images": 0.0}, "held-out R2 -0.0625"),
    ],
)
def test_the_line_of_other_labels_has_their_score(score, said):
    line = {"step": 9, "heldout/loss": 1.0} | {f"heldout/{name}": value for name, value in score.items()}
    assert verdict([line], CONFIG).split(";")[0] == said
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


# --- tiny runs ---

EVALUATED = ("--run.eval_every=1",)


@pytest.mark.faults
def test_a_run_says_how_it_is_and_warns_once_in_all_of_its_lives(pretrain, capsys, monkeypatch):
    arguments = (*EVALUATED, "--optim.lr=1e-9", "--probe.every=1", "--probe.images=40", "--run.checkpoint_every=1")
    monkeypatch.setattr(health, "FEWEST_STEPS", 0)
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
@pytest.mark.faults
def test_a_slow_loader_is_seen(pretrain, monkeypatch):
    decode = ImageDataset.decode
    monkeypatch.setattr(ImageDataset, "decode", lambda *args: time.sleep(0.02) or decode(*args))
    folder = pretrain("--data.cache_gb=0", "--run.steps=10")
    assert "data-loading bottleneck" in read_verdict(folder)["off"]


@pytest.mark.faults
def test_a_verdict_that_fails_does_not_end_a_run(pretrain, monkeypatch, capsys):
    monkeypatch.setattr("mpp.training.verdict.verdict", lambda *_: 1 / 0)
    folder = pretrain()
    assert "warning: no verdict after step 4: ZeroDivisionError: division by zero" in capsys.readouterr().err
    assert (folder / "encoder").is_dir() and read_verdict(folder) == {}


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
    "lr_1": ("birds", ("--optim.lr=1",), {"not learning", "features collapse"}),
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


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_of_runs_that_were_trained(name):
    first, *lines = map(json.loads, (HISTORIES / f"{name}.jsonl").read_text().splitlines())
    config = config_of_history(first)
    warned: set[str] = set()
    for end, line in enumerate(lines, 1):
        if line["step"] > 0 and "heldout/loss" in line:
            warned |= find_warnings(lines[:end], config).keys()
    check(name, warned)


def facts_of(folder: Path) -> dict:
    """What `config_of_history` takes, of a run."""
    saved = saved_settings(folder)
    optim, objective = saved["optim"], saved["objective"]
    moving = objective["name"] == "features" and objective["teacher"] == "ema"
    names = {"images": "global_batch_size", "lr": "lr", "warmup": "warmup_steps", "clip": "clip"}
    return {"steps": saved["run"]["steps"], "moving": moving} | {name: optim[key] for name, key in names.items()}


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
        lines = [facts_of(folder), *map(rounded, read_history(folder))]
        (HISTORIES / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

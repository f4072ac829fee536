"""Sweeps: each trial once, on a dev split, by processes that may be killed; and what is printed of them."""

import errno
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
from comparisons import FAST, TINY_TRAINING, SmallComparison, noted, write_cats_and_dogs
from conftest import read_json, read_metrics, refused, wait_until, weights_of
from server import Command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_comparison_tables import ROW

from evaluation import compare, fewshot, knn, linear, sweep
from evaluation.compare import settings_to_train, step_flops
from evaluation.comparison.cases import evaluation_settings
from evaluation.comparison.digests import case_digest
from evaluation.comparison.rows import frame_of
from evaluation.comparison.tables import DIFFERENCES, write_comparison
from evaluation.config import SweepConfig
from evaluation.features import main as extract
from evaluation.frozen.features import LabelledFeatures, load_features, save_features
from evaluation.metrics.scoring import KINDS
from evaluation.sweep import advice, plan_sweep, questions_of_sweep, ranking
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.runtime.randomness import Stream, permutation

KNN = {"command": "knn", "options": FAST | {"neighbours": 3, "depth": "dev"}}
LR = "optim.lr"
BATCH = "optim.global_batch_size"
SPLIT = "data.eval_split"


class SmallSweep(SmallComparison):
    """A sweep of a tiny model on red dogs and other cats; a test changes `config` before it sweeps.

    Only the first image of the test split can be decoded: the others would be missed if they were looked at.
    """

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "sweep.yaml"
        self.out = folder / "out"
        images = folder / "images"
        for split in ("train", "test"):
            write_cats_and_dogs(images / split)
        for file in sorted((images / "test").rglob("*.png"))[1:]:
            file.write_bytes(b"broken")
        self.config = {
            "dir": str(self.out),
            "settings": TINY_TRAINING | {"data.path": str(images)},
            "vary": {LR: [0.01, 0.02]},
            "evaluate": KNN,
        }

    def plan(self):
        return plan_sweep(parse(SweepConfig, ["--config", str(self.write())]))

    def sweep(self, *words):
        sweep.main(["--config", str(self.write()), *words])
        return self.table()

    def start(self, prepare=None):
        return Command("sweep", "--config", str(self.write()), prepare=prepare or hurry)


@pytest.fixture
def small(tmp_path):
    return SmallSweep(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """The settings of each training that is begun."""
    return noted(monkeypatch, compare, "train")


# --- trials ---


def test_the_grid_and_the_points_are_trials_each_once(small, capsys):
    small.config["settings"]["model.arguments"] = {"qkv_bias": False}
    small.config["vary"] = {LR: ["1e-2", 0.01, 2.0e-2], BATCH: [8, 16]}
    small.config["points"] = [{LR: 0.04}, {"optim": {"lr": 0.01}, BATCH: 8, "run.seed": 5}, {LR: 0.010, BATCH: 16}]
    plan = small.plan()
    entries = {case.encoder.entry.name: case.encoder.entry for case in plan.cases}
    seeds = {tuple(values.values()): entries[name].seeds for name, values in plan.trials.items()}
    once = (0,)
    assert seeds == {(0.01, 8): (0, 5), (0.01, 16): once, (0.02, 8): once, (0.02, 16): once, (0.04, 8): once}
    assert len(plan.cases) == len({case_digest(case) for case in plan.cases}) == 6
    assert next(iter(plan.trials)) == f"{LR}=0.01 {BATCH}=8"
    small.config |= {"vary": {"data.batch_size": [4, 8]}, "points": []}  # images of a forward pass change no result
    (trial,) = small.plan().trials.values()
    assert trial == {"data.batch_size": 4}
    assert "note: data.batch_size=8 and data.batch_size=4 are one trial: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vary": {"optim.lrr": [1]}}, "unknown setting optim.lrr .did you mean optim.lr"),
        ({"vary": {LR: [0.01, -1]}}, "optim.lr is -1; it must be a number"),
        ({"vary": {}}, "vary is empty"),
        ({"vary": {LR: []}}, r"vary: optim.lr is \[\]; it must be a list"),
        ({"vary": {"run.seed": [1, 2]}}, "vary: run.seed is .* left out: another key decides it"),
        ({"vary": {"config": ["cifar10"]}}, r"vary: config is .* left out"),
        ({"points": [{"data.path": "b"}]}, "points: data.path is b; it must be left out"),
        ({"settings": {"run.dir": "a"}}, "settings: run.dir is a; it must be left out"),
        ({"evaluate": {"command": "masked"}}, "evaluate: command is masked; it must be one with a setting `test`"),
        ({"settings": {"run.keep_best": True}}, "run.keep_best is true; it must be false or left out"),
        ({"train": "supervised"}, "settings: data.eval_split is auto; it must be null with train supervised"),
        (
            {"settings": {SPLIT: None}, "evaluate": {"command": "knn", "options": {SPLIT: "test"}}},
            "data.eval_split is test; it must be left out",
        ),
    ],
)
def test_mistakes_are_named_before_the_first_trial(small, monkeypatch, change, message):
    monkeypatch.setattr(compare, "train", lambda *_: pytest.fail("it trains"))
    small.config |= change
    with refused(message):
        small.sweep()


def test_an_evaluation_on_images_of_its_own_leaves_their_test_images_alone(small):
    small.config["settings"][SPLIT] = None
    small.config["evaluate"] = KNN | {"options": {"data.path": "b"}}
    assert evaluation_settings(small.plan().cases[0]).data.eval_split is None


def test_equal_compute_gives_inversely_scaled_steps_and_one_warm_up(small):
    small.config["settings"] |= {"optim.name": "adam", "run.steps": 40}  # a fifth of these is the warm-up of all trials
    (case, _) = small.plan().cases
    flops = step_flops("pretrain", settings_to_train(case.encoder))  # Muon's products cost the same for any batch
    small.config |= {"vary": {BATCH: [8, 16, 32]}, "compute": 64 * flops / 1e15}
    trainings = [settings_to_train(case.encoder) for case in small.plan().cases]
    assert [(config.run.steps, config.optim.warmup_steps) for config in trainings] == [(64, 8), (32, 8), (16, 8)]


# --- dev split ---


@pytest.mark.faults
def test_no_output_has_a_figure_of_test_images_and_a_diverging_trial_is_last(small, capsys):
    small.config["vary"] = {LR: [1e30, 0.01, 0.02]}
    small.config["evaluate"] = [KNN, {"command": "linear", "options": FAST | {"l2": 0.01, "depth": "dev"}}]
    small.config["evaluate"] += [{"command": "fewshot", "options": FAST | {"shots": 1}}]
    text = small.sweep()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| optim.lr=")]
    assert sorted(rows[:2]) == ["optim.lr=0.01", "optim.lr=0.02"] and rows[2] == "optim.lr=1e+30" and "diverged" in text
    printed = capsys.readouterr()
    assert "cannot be decoded" not in printed.out + printed.err
    assert not list(small.out.rglob("unreadable.txt"))
    for file in small.out.rglob("metrics.jsonl"):
        keys = {key for line in file.read_text().splitlines() for key in json.loads(line)}
        assert "loss" in keys and not any(key.startswith(("heldout", "knn", "features", "agreement")) for key in keys)
    for folder in {file.parent for file in small.out.rglob("events.out.*")}:
        tags = EventAccumulator(str(folder)).Reload().Tags()
        assert not any(tag.startswith(("heldout", "knn", "accuracy")) for tag in tags["scalars"] + tags["images"])
    reports = [read_json(file) for file in (small.out / "reports").glob("*dev-*.json")]
    assert len(reports) == 6 and not any(report["protocol"]["test"] for report in reports)
    assert {row["kind"] for row in small.results()["results"]} == {"validation", "diverged"}


@pytest.mark.faults
def test_a_dev_split_that_is_cut_may_be_evaluated_while_training_and_by_masked_patches(small):
    small.config["settings"] |= {"data.eval_split": None, "data.eval_fraction": 0.25}
    small.config["evaluate"] = {"command": "masked"}
    small.sweep()
    results = small.results()
    for trial in results["trials"]:
        recorded = read_metrics(small.folder / trial["encoder"].format(seed=0), "heldout/accuracy")[2]
        assert results["summary"]["sweep"][trial["name"]]["masked model"]["mean"] == recorded
    assert not list(small.out.rglob("unreadable.txt"))


# --- sharing, killing, growing ---


def without_last_column(text):
    """A text without the last column of its tables: the time that trainings took, which differs each time."""
    return re.sub(r"\|[^|\n]*\|$", "|", text, flags=re.MULTILINE)


def hurry():
    compare.RETRY_S = 0.2


def hurry_and_die():
    """The process dies with its first checkpoint on disk, in the middle of a trial."""
    hurry()
    from mpp.training import loop

    save_checkpoint = loop.save_checkpoint

    def save_and_die(*args, **kwargs):
        save_checkpoint(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    loop.save_checkpoint = save_and_die


@pytest.mark.faults
def test_processes_share_a_sweep_and_one_is_killed(small):
    small.config |= {"vary": {LR: [0.01, 0.02]}, "seeds": [0, 1]}
    small.config["settings"] |= {"run.steps": 30, "run.checkpoint_every": 10}
    both = [small.start() for _ in range(2)]
    assert [command.wait() for command in both] == [[0], [0]], both[0].said + both[1].said
    folders = (small.out / "trials").iterdir()
    said = both[0].said + both[1].said
    assert [said.count(f"wrote {folder}: encoder/") for folder in folders] == [1] * 4
    whole = small.table()
    assert all(whole.strip() in command.said for command in both)

    small.out.rename(small.folder / "undisturbed")
    dying = small.start(hurry_and_die)
    wait_until(lambda: list(small.out.glob("trials/*")) or dying.ended)
    other = small.start()
    assert dying.wait() == [-signal.SIGKILL], dying.said
    assert other.wait() == [0], other.said
    killed = small.table()
    assert without_last_column(killed) == without_last_column(whole)
    again = small.start()
    assert again.wait() == [0] and "training:" not in again.said
    assert small.table() == killed


def trials_in(text):
    """The rows of the table of trials, which that of their differences follows."""
    return text.split(DIFFERENCES)[0].count("\n| optim.lr=")


@pytest.mark.faults
def test_a_sweep_that_grows_keeps_what_it_has(small, trained):
    """Trials have other names when another setting is varied; those with its default are known."""
    small.config["vary"] = {LR: [0.01]}
    small.sweep()
    small.config["vary"] |= {"optim.weight_decay": [0.1, 0.2]}
    text = small.sweep()
    assert [config.optim.weight_decay for config in trained] == [0.1, 0.2]
    assert trials_in(text) == 2
    published = str(small.out / "results.json")
    small.config["dir"] = str(small.folder / "elsewhere")
    small.out.rename(small.folder / "moved")
    assert trials_in(small.sweep("--extends", published.replace("/out/", "/moved/"))) == 2
    assert len(trained) == 2


@pytest.mark.faults
def test_a_full_disk_is_one_line_and_nothing_is_lost(small, monkeypatch, trained):
    small.config["vary"] = {LR: [0.01, 0.02, 0.03]}
    train = compare.train

    def fill(config, build_task):
        if config.optim.lr == 0.02:
            raise UserError("the checkpoint cannot be written") from OSError(errno.ENOSPC, "No space left on device")
        return train(config, build_task)

    with monkeypatch.context() as patch, refused("finished work is kept: free space"):
        patch.setattr(compare, "train", fill)
        small.sweep()
    assert len(trained) == 1  # the third one is not begun
    assert trials_in(small.sweep()) == 3
    assert [config.optim.lr for config in trained] == [0.01, 0.02, 0.03]


def test_a_look_at_a_sweep_says_how_many_trials_are_missing(small):
    text = small.sweep("--tabulate", "true")
    assert "no results yet\n\nWithout a result, " in text and "optim.lr=0.01-0-knn-dev, optim.lr=0.02-0" in text
    shutil.rmtree(small.out)


# --- words ---


def scored(accuracy, encoder, **more):
    """A row of a trial on the dev split; None: it diverged."""
    row = ROW | {"encoder": encoder, "evaluation": "knn", "dataset": "dev", "accuracy": accuracy, "kind": "validation"}
    return row | more | ({"kind": "diverged"} if accuracy is None else {})


@pytest.mark.parametrize(
    "accuracies, said, unsaid",
    [
        ({0.01: 0.5, 0.02: 0.6}, "edge of optim.lr (0.02): add values beyond it.", "diverged"),
        ({0.01: 0.5, 0.02: 0.6, 0.04: 0.4}, "The score of the best of 3 trials", "edge"),
        ({0.01: 0.5, 0.02: 0.6, 0.04: None}, "The score of the best of 2 trials", "edge"),
        ({0.01: None, 0.02: None}, "", "The best"),
        ({0.01: 0.5}, "", "winner"),
    ],
)
def test_the_advice_says_what_the_numbers_say(small, accuracies, said, unsaid):
    small.config["vary"] = {LR: list(accuracies), "model.arguments": [{"qkv_bias": False}]}
    plan = small.plan()
    text = " ".join(advice(plan, frame_of(scored(accuracies[each[LR]], name) for name, each in plan.trials.items())))
    assert said in text and unsaid not in text


def test_a_trial_without_a_score_is_last_and_no_evaluation_but_the_first_chooses(small):
    small.config["evaluate"] = [KNN, {"command": "linear", "options": FAST}]
    plan = small.plan()
    first, second = plan.trials
    of_linear = [scored(0.6, first, evaluation="linear"), scored(0.7, second, evaluation="linear")]
    frame = frame_of([scored(0.5, first), *of_linear])
    assert ranking(plan, frame) == [first, second] and "edge of optim.lr (0.01)" in advice(plan, frame)[0]
    assert advice(plan, frame_of(of_linear)) == []
    known = scored(-0.2, second, score=KINDS["number"].score_heading)
    rows = [scored(float("nan"), first), known]
    assert ranking(plan, frame_of(rows)) == [second, first]
    write_comparison(small.out, questions_of_sweep(plan, rows)[0], rows, {}, [])
    assert small.table().index(second) < small.table().index(first)


# --- probes and trainings that do not look at held-out images ---


@pytest.mark.parametrize("command, option", [(knn, "--neighbours=3"), (fewshot, "--shots=2"), (linear, "--l2=0.01")])
def test_a_probe_with_test_false_is_of_a_tenth_of_the_training_images(small, command, option):
    """It equals a probe of the features of these images; held-out ones need neither labels nor readable files."""
    images, saved = small.folder / "images", small.folder / "dev.npz"
    words = ["--encoder=floor:pixels", f"--data.path={images}", *(f"--{name}={value}" for name, value in FAST.items())]
    write_cats_and_dogs(images / "test")
    extract([*words, f"--out={saved}"])
    save_features(saved, of_the_cut(load_features(saved)))
    for file in (images / "test").rglob("*.png"):
        file.rename(images / "test" / file.name).write_bytes(b"broken")
    accuracies = []
    for source in ([*words, "--test=false"], [f"--features={saved}"]):
        words = [*source, f"--out={small.folder}/report.json", "--threads=1", option]
        accuracies.append([result["accuracy"] for result in command.main(words)["results"]])
    assert accuracies[0] == accuracies[1]


def of_the_cut(features):
    """Nine tenths of the training images, and a tenth of them in the place of the test images."""
    train, labels, *_ = features
    order = permutation(Stream.CUT, 0, 0, len(train))
    held, rest = np.sort(order[:2]), np.sort(order[2:])
    return LabelledFeatures(train[rest], labels[rest], train[held], labels[held])


def test_a_run_that_is_never_evaluated_has_the_same_weights_and_no_figures(pretrain, finished_run):
    blind = pretrain("--run.eval_every=0", "--probe.every=1")
    assert weights_of(finished_run) == weights_of(blind)
    assert read_metrics(finished_run, "heldout/loss")
    assert not read_metrics(blind, "heldout/loss") and not read_metrics(blind, "knn/depth_01")
    card, without = ((folder / "encoder" / "README.md").read_text() for folder in (finished_run, blind))
    assert "Held-out figures after 4 steps" in card and "Held-out" not in without
    assert not (blind / "verdict.json").exists()

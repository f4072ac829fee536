"""Readers of a run know its cooldown and its trunk: verdict, advice, check."""

import json
import re
import shlex
from pathlib import Path

import pytest
from test_growth import WSD, encoder_of
from test_verdict import CONFIG, config_of, evaluation

from evaluation import check
from evaluation.report import command_to_repeat, next_steps, verdict_points
from mpp.config import Config
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.training.log import read_history
from mpp.training.verdict import LOSS_FALLS, NOT_COOLED_DOWN, describe_trend, verdict

CONSTANT = ("--optim.schedule=constant",)


@pytest.mark.parametrize(
    ("stable", "step", "said"),
    [
        (None, 1000, ""),  # cosine
        (800, 800, "; not cooled down yet"),
        (800, 900, "; not cooled down yet"),
        (800, 1000, ""),
        (1000, 1000, "; not cooled down yet"),  # constant
    ],
)
def test_the_verdict_says_what_is_not_cooled_down_yet(stable, step, said):
    schedule = {None: "cosine", 800: "wsd", 1000: "constant"}[stable]
    line = verdict([evaluation(step)], config_of(**{"optim.schedule": schedule, "optim.cooldown": 0.2}))
    assert line == verdict([evaluation(step)], CONFIG) + said


@pytest.mark.parametrize(
    ("losses", "cooldown", "said"),
    [
        ([2.0, 1.9, 1.5], None, "held-out loss still falling"),
        ([2.0, 1.9, 1.5], 900, "held-out loss still falling"),  # the cooldown is still to come
        ([2.0, 2.0, 1.5], 600, "held-out loss flat before the cooldown"),
        ([2.0, 1.9, 1.9], 600, "held-out loss still falling before the cooldown"),
        ([2.0, 2.1, 1.5], 600, "held-out loss rising before the cooldown"),
        ([2.0, 1.9, 1.5], 300, ""),  # one evaluation before it shows no trend
    ],
)
def test_a_loss_that_falls_in_the_cooldown_is_no_reason_to_train_longer(losses, cooldown, said):
    history = [evaluation(300 * (number + 1), loss) for number, loss in enumerate(losses)]
    assert describe_trend(history, moving=False, stable=cooldown) == said


@pytest.fixture
def trunk_and_branch(pretrain, tmp_path):
    trunk = pretrain(*CONSTANT, "--run.eval_every=1", dir=tmp_path / "trunk")
    return trunk, pretrain(*WSD, "--run.eval_every=1", f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")


def test_the_report_says_how_the_run_ended(trunk_and_branch):
    of_trunk, of_branch = (dict(verdict_points(run, read_history(run))) for run in trunk_and_branch)
    assert "not cooled down yet" in of_trunk and "not cooled down yet" not in of_branch


def test_a_branch_is_repeated_without_its_trunk():
    config = parse(Config, [*WSD, "--run.branch_from=runs/trunk@2"])
    assert command_to_repeat(config, Path("runs/branch")) == (
        "mpp pretrain --optim.schedule=wsd --optim.cooldown=0.5 --run.precision=auto --run.dir=runs/branch_again"
    )


@pytest.mark.parametrize("kind", ["constant", "wsd"])
def test_advice_to_train_longer_is_a_command_that_works(pretrain, tmp_path, kind):
    run = pretrain(*(CONSTANT if kind == "constant" else WSD))
    advice, *_ = next_steps(run, read_history(run), [LOSS_FALLS])
    assert advice.startswith(f"train longer ({LOSS_FALLS}): ")
    options = re.search(r"--run\.branch_from .*? --run.steps \w+", advice)[0]
    words = shlex.split(options.replace("NEW", str(tmp_path / "new")).replace("steps N", "steps 8"))
    words = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    schedule = [word for word in (*WSD, *words) if kind == "wsd" or "cooldown" not in word]
    longer = pretrain(*schedule, dir=tmp_path / "new")
    steps = json.loads((longer / "encoder" / "config.json").read_text())["step"]
    whole = [word for word in schedule if not word.startswith(("--run.branch_from", "--run.dir"))]
    assert encoder_of(longer) == encoder_of(pretrain(*whole, dir=tmp_path / "whole")) and steps in (5, 8)


def test_advice_to_train_longer_of_a_cosine_run_is_another_run(trained):
    advice, *_ = next_steps(trained, read_history(trained), [LOSS_FALLS])
    assert f"begin a new run from this encoder (--model.init_from {trained})" in advice


def test_a_run_that_is_not_cooled_down_is_advised_to(pretrain):
    run = pretrain(*CONSTANT)
    advice, *_ = next_steps(run, read_history(run), [NOT_COOLED_DOWN])
    assert f"train longer ({NOT_COOLED_DOWN}): the same command with a larger run" in advice


def test_a_check_counts_the_steps_and_checkpoints_of_a_branch(pretrain, tmp_path, capsys):
    trunk = pretrain(*CONSTANT, dir=tmp_path / "trunk")
    words = ["--run.steps=4", "--optim.warmup_steps=0", *WSD, "--run.keep_at=[3]"]
    branch = parse(Config, [*words, f"--run.branch_from={trunk}@2", f"--run.dir={tmp_path / 'branch'}"])
    check.print_cost(branch, check.StepCost(1800.0, 0.0, 0, 10**9))
    printed = capsys.readouterr().out
    assert "\n2 steps of one process, without evaluations: 1 hours" in printed
    assert "at most 5 checkpoints of 1 GB" in printed  # the newest two; steps 3 and 2, where it cools down; a new one


def test_a_check_refuses_a_branch_that_cannot_begin(pretrain, tmp_path):
    trunk = pretrain(*CONSTANT, dir=tmp_path / "trunk")
    words = [f"--run.branch_from={trunk}@3", f"--run.dir={tmp_path / 'branch'}", "--run.precision=fp32"]
    with pytest.raises(UserError, match=r"a kept step of a run: 2, 4"):
        check.main(["--run.steps=8", "--run.threads=1", *words])

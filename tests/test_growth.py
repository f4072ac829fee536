"""Runs that grow and branch: the bits of an uninterrupted run, or a refusal with the command that works.

And readers of a run, who know its cooldown and its trunk: verdict, advice, check.
"""

import json
import math
import re
import shlex
import shutil
import stat
from pathlib import Path

import pytest
from conftest import TINY, interrupted_after, read_json, read_metrics, refused, same, weights_of
from test_verdict import CONFIG, config_of, evaluation

from evaluation import check
from evaluation.report import command_to_repeat, next_steps, verdict_points
from mpp.config import Config, OptimConfig
from mpp.config.parsing import parse
from mpp.pretrain import Pretraining, main
from mpp.training.checkpoint import kept_steps
from mpp.training.log import read_history
from mpp.training.optim import learning_rate
from mpp.training.run_folder import same_until
from mpp.training.verdict import LOSS_FALLS, NOT_COOLED_DOWN, describe_trend, verdict

CONSTANT = "--optim.schedule=constant"
WSD = ("--optim.schedule=wsd", "--optim.cooldown=0.5")
KINDS = {
    "polyak": ("--optim.name=adam", "--optim.lr=0.01", "--optim.average=0.9"),
    "teacher": ("--config=configs/rivals/data2vec.yaml", "--objective.half_life=[4, 4]", "--model.depth=2"),
}


def config(*options):
    return parse(Config, list(options))


def step_of(encoder):
    return read_json(encoder / "config.json")["step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A trunk of 4 steps, its branch from step 2 and the cooled run that nothing connects.

    A branch changes nothing of its trunk, which may be in use or read-only. Tests only read these runs.
    """
    folder = tmp_path_factory.mktemp("runs")
    trunk = f"--run.branch_from={folder / 'trunk'}@2"
    for name, words in {"trunk": [CONSTANT], "branch": [*WSD, trunk], "whole": WSD}.items():
        before = {path: path.stat().st_mtime_ns for path in (folder / "trunk").rglob("*")}
        main([*TINY, "--run.eval_every=1", *words, f"--run.dir={folder / name}"])
        assert not before or before == {path: path.stat().st_mtime_ns for path in (folder / "trunk").rglob("*")}
    return folder


@pytest.fixture
def trunk(runs, tmp_path):
    """A copy of the trunk."""
    return shutil.copytree(runs / "trunk", tmp_path / "trunk")


# --- up to where two runs are one ---


def test_the_rate_of_wsd_in_closed_form():
    def rates(schedule, cooldown=0.4):
        optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=2, cooldown=cooldown)
        return [learning_rate(optim, step, 10) for step in range(10)]

    assert rates("wsd") == [0.5, 1, 1, 1, 1, 1, *[1 - math.sqrt(step / 4) for step in range(4)]]
    assert rates("wsd", 0.8) == [0.5, 1, *[1 - math.sqrt(step / 8) for step in range(8)]]
    assert rates("wsd", 0.01) == [0.5, *[1] * 9]  # no step is left for it


FOR_40 = (CONSTANT, "--run.steps=40", "--optim.warmup_steps=5")
FOR_80 = ("--run.steps=80", "--optim.warmup_steps=5")


@pytest.mark.parametrize(
    "before, now, first",
    [
        (FOR_40, (*WSD, "--run.steps=60", "--optim.warmup_steps=5"), 31),  # the cooldown is from 30 on
        (FOR_40, (*FOR_80, *WSD), 40),
        ((*FOR_40, *WSD), (*FOR_40, "--optim.schedule=wsd", "--optim.cooldown=0.2"), 21),
        ((*FOR_40, "--optim.schedule=cosine"), FOR_80, 6),  # by its warm-up of 5 steps and one at the full rate
        (FOR_40, (*FOR_80, CONSTANT, "--optim.warmup_steps=4"), 0),
    ],
)
def test_one_rule_says_up_to_where_two_runs_are_one(before, now, first):
    assert same_until(config(*now), config(*before), 40) == first


@pytest.mark.parametrize("half_life, first", [("[0.1, 0.1]", 0), ("[1, 30]", 1), ("[8, 8]", 40)])
def test_a_moving_average_in_steps_suits_any_length_and_shares_do_not(half_life, first):
    options = ("--objective.name=features", f"--objective.half_life={half_life}", CONSTANT)
    assert same_until(config(*options, *FOR_80), config(*options, *FOR_40), 40) == first


# --- the bits of an uninterrupted run ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_ends_with_the_bits_of_an_uninterrupted_run(pretrain, tmp_path, kind):
    """At the last step from which it can: the third has the whole rate in both."""
    options = (*KINDS[kind], "--run.checkpoint_every=3")
    whole = pretrain(*options, *WSD, dir=tmp_path / "whole")
    trunk = pretrain(*options, CONSTANT, "--run.steps=6", "--run.keep_at=[3]", dir=tmp_path / "trunk")
    branch = pretrain(*options, *WSD, f"--run.branch_from={trunk}@3", dir=tmp_path / "branch")
    same(branch, whole, "compute/pflop", "optim/lr")
    assert weights_of(branch) != weights_of(trunk)


def test_kills_in_a_trunk_in_the_copy_and_in_the_branch_change_no_bit(runs, pretrain, stopped_at, tmp_path):
    """The command that is started again need not name the trunk; its copy of a read-only checkpoint may be written."""
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    stable = (CONSTANT, "--run.steps=2", "--run.checkpoint_every=1")
    stopped_at(1, *stable, dir=trunk)
    assert kept_steps(trunk) == [1]
    pretrain(*stable, dir=trunk)
    for path in (trunk / "checkpoints" / "step_00000002").iterdir():
        path.chmod(0o444)
    with interrupted_after(shutil, "copyfile", 4):  # in the checkpoint's files
        pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=branch)
    assert kept_steps(branch) == []
    stopped_at(3, *WSD, dir=branch)
    assert kept_steps(branch) == [2]
    assert all(path.stat().st_mode & stat.S_IWUSR for path in branch.glob("checkpoints/*/*"))
    shutil.rmtree(trunk)
    assert weights_of(pretrain(*WSD, dir=branch)) == weights_of(runs / "whole")


def test_a_run_whose_rate_was_stable_goes_on_in_its_folder(pretrain, tmp_path):
    """Killed between its last checkpoint and its encoder, too. Checkpoints that were to be kept stay."""
    stable = (CONSTANT, "--run.keep_checkpoints=1")
    whole = pretrain(*stable, "--run.steps=6", dir=tmp_path / "whole")
    grown = pretrain(*stable, "--run.keep_at=[2]", "--run.steps=4")
    with interrupted_after(Pretraining, "export", 0):
        pretrain(*stable, "--run.steps=6")
    assert kept_steps(grown) == [2, 6]
    assert step_of(grown / "encoder") == 4
    assert weights_of(pretrain(*stable, "--run.steps=6")) == weights_of(whole)
    pretrain(*stable, "--run.steps=8", "--run.keep_at=[7]")
    assert kept_steps(grown) == [2, 7, 8]


def test_a_trunk_keeps_the_warm_up_of_the_first_command_that_kept_a_step(pretrain, stopped_at, tmp_path):
    """null is a fifth of a short run, and would be another number in a longer one."""
    stable = (CONSTANT, "--optim.warmup_steps=null")
    stopped_at(1, *stable, "--run.steps=20")
    grown = pretrain(*stable, "--run.steps=5")
    pretrain(*stable, "--run.steps=10")
    assert read_metrics(grown, "optim/lr")[1] == read_metrics(grown, "optim/lr")[10]
    cooled = (*WSD, "--optim.cooldown=0.1", "--run.steps=12", f"--run.branch_from={grown}@10")
    assert "warmup_steps: 1\n" in (pretrain(*stable, *cooled, dir=tmp_path / "branch") / "config.yaml").read_text()


def test_the_best_encoder_of_a_branch_is_that_since_it_began(trunk, pretrain, tmp_path, monkeypatch):
    """The trunk's evaluations, which the branch's metrics have too, do not keep its own from being the best."""
    lines = [json.loads(line) for line in (trunk / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"heldout/accuracy": 1.0, "knn/depth_01": 1.0} if "heldout/loss" in line else {}
    (trunk / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    options = (*WSD, "--run.eval_every=1", "--run.keep_best=true")
    branch = pretrain(*options, "--run.branch_from=trunk/@02")
    assert step_of(branch / "encoder_best") in (3, 4)
    assert pretrain(*options, f"--run.branch_from={trunk}@2") == branch  # the same, spelled in another way


# --- refusals ---


@pytest.mark.parametrize(
    "words, said",
    [
        ("--run.steps=40 --optim.warmup_steps=30", r"optim.warmup_steps is 30; it must be at most 20, where the cool"),
        ("--objective.name=features --objective.half_life=[0.5,20]", "objective.half_life is .*two shares below 1"),
        ("--run.steps=4 --run.keep_at=[2,9]", r"run.keep_at is 9; it must be at most run.steps \(4\)"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, said):
    with refused(said):
        config(*WSD, *words.split())


@pytest.mark.parametrize(
    "words, said",
    [
        ("branch_from=TRUNK@3", r"a kept step of a run: 2, 4 \(run.keep_at"),
        ("branch_from=TRUNK@2 seed=1", r"trunk is a run with another config: run.seed \(0 in the run, 1 now\)"),
        ("branch_from=TRUNK@4", "step 3 would have been another"),  # the cooldown begins at 2
        ("dir=TRUNK steps=3", "run.steps is 3; it must be at least 4, the steps of .*trunk"),
        ("dir=WHOLE branch_from=TRUNK@2", "run.branch_from is .*it must be left out, as when the run in .*whole"),
        ("dir=BRANCH branch_from=TRUNK@4", "run.branch_from is .*it must be .*trunk@2, as when the run in .*branch"),
        ("dir=WHOLE steps=8", "step 3 would have been another.*--run.branch_from .*whole@2 "),
        ("dir=COSINE steps=8", "step 1 would have been another.*--model.init_from"),
    ],
)
def test_what_cannot_go_on_or_be_branched_from_is_refused_and_writes_nothing(
    runs, finished_run, pretrain, tmp_path, words, said
):
    folders = {name.upper(): str(runs / name) for name in ("trunk", "branch", "whole")} | {"COSINE": str(finished_run)}
    words = [f"--run.{re.sub('[A-Z]+', lambda name: folders[name[0]], word)}" for word in words.split()]
    with refused(said):
        pretrain(*WSD, *words, dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "spoiled, said",
    [
        ("data.json", "started with other images"),
        ("checkpoints/step_00000002/optimizer.safetensors", "all checkpoints are damaged"),
    ],
)
def test_a_trunk_that_is_spoiled_is_no_beginning(trunk, pretrain, tmp_path, spoiled, said):
    (trunk / spoiled).write_text('{"train": {}}')
    with refused(said):
        pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")


def test_a_branch_without_a_whole_checkpoint_does_not_begin_at_step_0(runs, pretrain, tmp_path):
    begun = shutil.copytree(runs / "branch", tmp_path / "branch")
    for state in begun.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    shutil.rmtree(begun / "encoder")
    with refused(r"all checkpoints are damaged; delete .*checkpoints"):
        pretrain(*WSD, "--run.eval_every=1", dir=begun)


# --- readers ---


@pytest.mark.parametrize(
    "schedule, step, said",
    [
        ("cosine", 1000, ""),
        ("wsd", 800, "; not cooled down yet"),
        ("wsd", 900, "; not cooled down yet"),
        ("wsd", 1000, ""),
        ("constant", 1000, "; not cooled down yet"),
    ],
)
def test_the_verdict_says_what_is_not_cooled_down_yet(schedule, step, said):
    line = verdict([evaluation(step)], config_of(**{"optim.schedule": schedule, "optim.cooldown": 0.2}))
    assert line == verdict([evaluation(step)], CONFIG) + said


@pytest.mark.parametrize(
    "losses, cooldown, said",
    [
        ([2.0, 1.989], None, "held-out loss still falling"),
        ([2.0, 1.991], None, "held-out loss flat"),
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


def test_the_report_says_how_a_run_ended_and_the_command_that_trains_longer(runs, finished_run, pretrain, tmp_path):
    def advice(run, reason):
        first, *_ = next_steps(run, read_history(run), [reason])
        assert first.startswith(f"train longer ({reason}): ")
        return first

    points = [dict(verdict_points(runs / name, read_history(runs / name))) for name in ("trunk", "branch")]
    assert ["not cooled down yet" in each for each in points] == [True, False]
    assert "the same command with a larger run.steps" in advice(runs / "trunk", NOT_COOLED_DOWN)
    assert f"begin a new run from this encoder (--model.init_from {finished_run} --run.dir NEW)" in advice(
        finished_run, LOSS_FALLS
    )
    of_whole = re.search(r"--run\.branch_from .*? --run.steps \w+", advice(runs / "whole", LOSS_FALLS))[0]
    words = shlex.split(of_whole.replace("NEW", str(tmp_path / "new")).replace("steps N", "steps 8"))
    words = [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    longer = pretrain(*WSD, *words, dir=tmp_path / "new")
    assert weights_of(longer) == weights_of(pretrain(*WSD, "--run.steps=8", dir=tmp_path / "alone"))


def test_a_branch_is_repeated_without_its_trunk():
    assert command_to_repeat(config(*WSD, "--run.branch_from=runs/trunk@2"), Path("runs/branch")) == (
        "mpp pretrain --config=runs/branch/config.yaml --run.dir=runs/branch_again --run.branch_from=null"
    )


def test_a_check_counts_the_steps_and_checkpoints_of_a_branch_or_refuses_it(runs, tmp_path, capsys):
    words = ["--run.steps=4", "--optim.warmup_steps=0", *WSD, "--run.keep_at=[3]", f"--run.dir={tmp_path / 'branch'}"]
    check.print_cost(config(*words, f"--run.branch_from={runs / 'trunk'}@2"), check.StepCost(1800.0, 0.0, 0, 10**9))
    printed = capsys.readouterr().out
    assert "\n2 steps of one process, without evaluations: 1 hours" in printed
    assert "at most 5 checkpoints of 1 GB" in printed  # the newest two; steps 3 and 2, where it cools down; a new one
    with refused(r"a kept step of a run: 2, 4"):
        check.main([*words, "--run.threads=1", "--run.precision=fp32", f"--run.branch_from={runs / 'trunk'}@3"])

"""Runs that grow and branch: the same bits as an uninterrupted run, or a refusal with the command that works."""

import json
import math
import shutil
import stat

import pytest
from conftest import Killed, kill_at, read_metrics

from evaluation.report import describe_growth
from mpp.config import Config, OptimConfig
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.pretrain import Pretraining
from mpp.training import run_folder
from mpp.training.checkpoint import kept_steps
from mpp.training.optim import learning_rate
from mpp.training.run_folder import same_until

WSD = ("--optim.schedule=wsd", "--optim.cooldown=0.5")
ADAM = ("--optim.name=adam", "--optim.lr=0.01")
KINDS = {
    "muon": (),
    "adam": ADAM,
    "polyak": (*ADAM, "--optim.average=0.9"),
    "autoencoder": ("--config=configs/rivals/mae.yaml", "--model.width=16", "--model.heads=2", "--model.depth=2"),
    "teacher": ("--config=configs/rivals/data2vec.yaml", "--objective.half_life=[4, 4]", "--model.depth=2"),
    "warm-up": ("--optim.warmup_steps=2",),
}


def config(*options):
    return parse(Config, list(options))


def encoder_of(folder):
    return (folder / "encoder" / "model.safetensors").read_bytes()


def rates(schedule, steps, **options):
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=2, **options)
    return [learning_rate(optim, step, steps) for step in range(steps)]


def test_the_rate_of_wsd_in_closed_form():
    cooldown = [1 - math.sqrt(step / 4) for step in range(4)]
    assert rates("wsd", 10, cooldown=0.4) == [0.5, 1, 1, 1, 1, 1, *cooldown]
    assert rates("wsd", 10, cooldown=0.8) == [0.5, 1, *[1 - math.sqrt(step / 8) for step in range(8)]]
    assert rates("wsd", 10, cooldown=0.01) == rates("constant", 10)  # no step is left for it


def test_a_cooldown_that_begins_in_the_warm_up_is_refused():
    with pytest.raises(UserError, match=r"optim.warmup_steps is 30; it must be at most 20, where the cooldown begins"):
        config("--run.steps=40", *WSD, "--optim.warmup_steps=30")


@pytest.mark.parametrize(
    ("before", "now", "first"),
    [
        (("--optim.schedule=constant", "--run.steps=40"), (*WSD, "--run.steps=60"), 31),  # the cooldown is from 30 on
        (("--optim.schedule=constant", "--run.steps=40"), (*WSD, "--run.steps=80"), 40),
        ((*WSD, "--run.steps=40"), (*WSD, "--run.steps=80"), 21),
        ((*WSD, "--run.steps=40"), ("--optim.schedule=wsd", "--optim.cooldown=0.2", "--run.steps=40"), 21),
        (("--run.steps=40",), ("--run.steps=80",), 6),  # cosine, by its warm-up of 5 steps and one at the full rate
        ((*WSD, "--run.steps=40"), (*WSD, "--run.steps=80", "--optim.warmup_steps=4"), 0),
    ],
)
def test_one_rule_says_up_to_where_two_runs_are_one(before, now, first):
    warm_up = "--optim.warmup_steps=5"
    assert same_until(config(warm_up, *now), config(warm_up, *before), 40) == first


@pytest.mark.parametrize(("half_life", "first"), [("[0.1, 0.1]", 0), ("[1, 30]", 1), ("[8, 8]", 40)])
def test_a_moving_average_in_steps_suits_any_length_and_shares_do_not(half_life, first):
    options = (
        "--objective.name=features",
        "--optim.schedule=constant",
        "--optim.warmup_steps=2",
        f"--objective.half_life={half_life}",
    )
    assert same_until(config(*options, "--run.steps=80"), config(*options, "--run.steps=40"), 40) == first


def test_half_lives_are_both_shares_or_both_steps():
    with pytest.raises(UserError, match=r"objective.half_life is .*two shares below 1, or two numbers of steps"):
        config("--objective.name=features", "--objective.half_life=[0.5, 20]")


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_ends_with_the_bits_of_an_uninterrupted_run(pretrain, tmp_path, kind):
    whole = pretrain(*KINDS[kind], *WSD, dir=tmp_path / "whole")
    trunk = pretrain(
        *KINDS[kind],
        "--optim.schedule=constant",
        "--run.keep_at=[2]",
        "--run.steps=6",
        "--run.keep_checkpoints=1",
        dir=tmp_path / "trunk",
    )
    assert kept_steps(trunk) == [2, 6]
    branch = pretrain(*KINDS[kind], *WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    assert encoder_of(branch) == encoder_of(whole) != encoder_of(trunk)
    for scalar in ("loss", "compute/pflop", "optim/lr"):
        assert read_metrics(branch, scalar) == read_metrics(whole, scalar)
    shutil.rmtree(trunk)  # a branch that is under way does not need it
    assert pretrain(*KINDS[kind], *WSD, dir=tmp_path / "branch") == branch


def test_a_run_whose_rate_was_stable_goes_on_in_its_folder(pretrain, tmp_path, capsys):
    whole = pretrain("--optim.schedule=constant", "--run.steps=8", dir=tmp_path / "whole")
    grown = pretrain("--optim.schedule=constant", "--run.steps=4")
    assert pretrain("--optim.schedule=constant", "--run.steps=8") == grown
    assert encoder_of(grown) == encoder_of(whole)


def test_a_trunk_keeps_its_warm_up(pretrain, tmp_path):
    """null is a fifth of a short run, and would be another number in a longer one."""
    stable = ("--optim.schedule=constant", "--optim.warmup_steps=null")
    grown = pretrain(*stable, "--run.steps=5")
    pretrain(*stable, "--run.steps=10")
    assert read_metrics(grown, "optim/lr")[1] == read_metrics(grown, "optim/lr")[10]
    branched = pretrain(*stable, *WSD, "--run.steps=20", f"--run.branch_from={grown}@10", dir=tmp_path / "branch")
    assert "warmup_steps: 1\n" in (branched / "config.yaml").read_text()


def test_a_cooled_down_run_names_the_command_that_goes_on(pretrain, tmp_path, capsys):
    run = pretrain(*WSD)
    advice = describe_growth(run)
    assert advice.startswith(f"--run.branch_from {run}@2 --run.dir NEW")
    with pytest.raises(UserError, match=f"step 3 would have been another.*--run.branch_from {run}@STEP"):
        pretrain(*WSD, "--run.steps=8")
    longer = pretrain(*WSD, "--run.steps=8", f"--run.branch_from={run}@2", dir=tmp_path / "longer")
    whole = pretrain(*WSD, "--run.steps=8", dir=tmp_path / "whole")
    assert encoder_of(longer) == encoder_of(whole)


def test_a_cosine_run_cannot_grow_and_says_so(pretrain, tmp_path, capsys):
    run = pretrain()
    advice = describe_growth(run)
    assert advice.startswith(f"begin a new run from this encoder (--model.init_from {run})")
    with pytest.raises(UserError, match=r"step 1 would have been another.*optim.schedule wsd"):
        pretrain("--run.steps=8")
    assert pretrain("--run.steps=8", f"--model.init_from={run}", dir=tmp_path / "new").is_dir()


def test_fewer_steps_than_are_done_are_refused(pretrain):
    run = pretrain("--optim.schedule=constant")
    with pytest.raises(UserError, match=f"run.steps is 3; it must be at least 4, the steps of {run}"):
        pretrain("--optim.schedule=constant", "--run.steps=3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--run.branch_from=TRUNK@3", r"a kept step of a run: 2, 4 \(run.keep_at"),
        ("--run.branch_from=TRUNK/no@2", "there are none"),
        ("--run.branch_from=TRUNK", "it must be FOLDER@STEP"),
        ("--run.branch_from=TRUNK@two", "it must be FOLDER@STEP"),
        (
            "--run.branch_from=TRUNK@2 --run.seed=1 --optim.lr=1",
            r"trunk is a run with another config: run.seed \(0 in the run, 1 now\), optim.lr \(0.01 in the run",
        ),
        ("--run.branch_from=TRUNK@4 --run.steps=5 --optim.cooldown=0.8", r"step 2 would have been another"),
    ],
)
def test_what_cannot_be_branched_from_is_refused_and_leaves_no_folder(pretrain, tmp_path, options, message):
    trunk = pretrain("--optim.schedule=constant", "--run.steps=4", dir=tmp_path / "trunk")
    words = options.replace("TRUNK", str(trunk)).split()
    with pytest.raises(UserError, match=message):
        pretrain("--optim.schedule=wsd", "--run.steps=8", *words, dir=tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


def test_a_branch_of_another_branch_point_is_refused(pretrain, tmp_path):
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    branched = pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    with pytest.raises(UserError, match=f"it must be {trunk}@2, as when the run in {branched}"):
        pretrain(*WSD, f"--run.branch_from={trunk}@4", dir=branched)
    with pytest.raises(UserError, match=f"it must be left out, as when the run in {trunk}"):
        pretrain("--optim.schedule=constant", f"--run.branch_from={branched}@2", dir=trunk)


def test_a_damaged_checkpoint_is_not_branched_from(pretrain, tmp_path):
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    with (trunk / "checkpoints" / "step_00000002" / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    with pytest.raises(UserError, match="all checkpoints are damaged"):
        pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")


def test_a_copy_that_is_interrupted_is_made_again(pretrain, tmp_path, monkeypatch):
    """Also where the command that is started again does not name the trunk."""
    whole = pretrain(*WSD, dir=tmp_path / "whole")
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    copyfile = shutil.copyfile

    def dies(source, target):
        copyfile(source, target)
        if target.name == "optimizer.safetensors":
            raise Killed("killed")

    monkeypatch.setattr(run_folder.shutil, "copyfile", dies)
    with pytest.raises(Killed):
        pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    monkeypatch.undo()
    assert kept_steps(tmp_path / "branch") == []
    branched = pretrain(*WSD, dir=tmp_path / "branch")
    assert encoder_of(branched) == encoder_of(whole)
    assert json.loads((branched / "data.json").read_text()) == json.loads((trunk / "data.json").read_text())


@pytest.mark.parametrize("step", [1, 3])
def test_a_branch_that_is_killed_resumes_to_the_same_bits(pretrain, tmp_path, monkeypatch, step):
    """In the trunk, and in the branch."""
    whole = pretrain(*WSD, dir=tmp_path / "whole")

    def branched():
        trunk = pretrain(
            "--optim.schedule=constant", "--run.steps=2", "--run.checkpoint_every=1", dir=tmp_path / "trunk"
        )
        return pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")

    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            branched()
    assert encoder_of(branched()) == encoder_of(whole)


def test_other_images_than_the_trunks_are_refused(pretrain, tmp_path, image_folder):
    images = f"--data.path={image_folder}"
    trunk = pretrain(images, "--data.eval_fraction=0.2", "--optim.schedule=constant", dir=tmp_path / "trunk")
    (image_folder / "cat" / "07.png").unlink()
    with pytest.raises(UserError, match="started with other images"):
        pretrain(images, "--data.eval_fraction=0.2", *WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")


def test_steps_to_keep_are_steps_of_the_run(pretrain):
    with pytest.raises(UserError, match=r"run.keep_at is 9; it must be at most run.steps \(4\)"):
        pretrain("--run.keep_at=[2, 9]")


def test_a_run_that_grew_is_finished_when_its_encoder_is_that_of_the_last_step(pretrain, tmp_path, monkeypatch):
    """Killed between its last checkpoint and its encoder: the earlier encoder does not pass for it."""
    stable = ("--optim.schedule=constant",)
    whole = pretrain(*stable, "--run.steps=6", dir=tmp_path / "whole")
    grown = pretrain(*stable, "--run.steps=4")
    assert json.loads((grown / "encoder" / "config.json").read_text())["step"] == 4
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Pretraining, "export", lambda *_: (_ for _ in ()).throw(Killed("killed")))
        pretrain(*stable, "--run.steps=6")
    assert kept_steps(grown) == [4, 6]
    pretrain(*stable, "--run.steps=6")
    assert encoder_of(grown) == encoder_of(whole)


def test_a_checkpoint_that_was_to_be_kept_stays_where_the_run_goes_on_without_saying_so_again(pretrain):
    stable = ("--optim.schedule=constant", "--run.keep_checkpoints=1")
    run = pretrain(*stable, "--run.keep_at=[2]", "--run.steps=4")
    pretrain(*stable, "--run.steps=6")
    pretrain(*stable, "--run.steps=8", "--run.keep_at=[7]")
    assert kept_steps(run) == [2, 7, 8]
    pretrain(*stable, "--run.steps=9")
    assert kept_steps(run) == [2, 7, 9]


def test_a_warm_up_is_that_of_the_first_command_once_a_step_is_kept(pretrain, monkeypatch):
    """A command that was stopped before its first checkpoint decides nothing."""
    stable = ("--optim.schedule=constant", "--optim.warmup_steps=null")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 1)
        pretrain(*stable, "--run.steps=5")
    run = pretrain(*stable, "--run.steps=10")
    assert "warmup_steps: 2\n" in (run / "config.yaml").read_text()


def test_a_branch_may_write_its_copy_of_a_read_only_checkpoint(pretrain, tmp_path):
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    source = trunk / "checkpoints" / "step_00000002"
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    branched = pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    copy = branched / "checkpoints" / "step_00000002"
    assert all(path.stat().st_mode & stat.S_IWUSR for path in (*copy.iterdir(), copy))


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_named(pretrain, tmp_path, monkeypatch):
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    source = trunk / "checkpoints" / "step_00000002"
    copyfile = shutil.copyfile

    def deletes(file, target):
        copyfile(file, target)
        if file.parent == source:
            shutil.rmtree(source)

    monkeypatch.setattr(run_folder.shutil, "copyfile", deletes)
    with pytest.raises(UserError, match="No such file"):
        pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    assert kept_steps(tmp_path / "branch") == []


def test_one_rate_that_differs_at_the_last_step_that_is_done_is_refused(pretrain):
    """s - 1 is the last step that s steps have done; of step s nothing is done."""
    warm_up = ("--optim.warmup_steps=0",)
    trunk = pretrain("--optim.schedule=constant", *warm_up, "--run.steps=8")
    with pytest.raises(
        UserError, match=r"step 7 would have been another"
    ):  # by the square root of its progress since step 6
        pretrain("--optim.schedule=wsd", "--optim.cooldown=0.4", *warm_up, "--run.steps=10")
    assert pretrain("--optim.schedule=wsd", "--optim.cooldown=0.3", *warm_up, "--run.steps=10") == trunk  # from step 7


def test_a_run_whose_teacher_follows_its_length_cannot_grow(pretrain):
    teacher = ("--config=configs/rivals/data2vec.yaml", "--model.depth=2", "--optim.schedule=constant")
    run = pretrain(*teacher)
    with pytest.raises(UserError, match=r"the decay of the teacher's average, of step \d would have been another"):
        pretrain(*teacher, "--run.steps=8")
    assert kept_steps(run) == [2, 4]


def test_the_best_encoder_of_a_branch_is_that_since_it_began(pretrain, tmp_path):
    """The trunk's evaluations, which the branch's metrics have too, do not keep its own from being the best."""
    options = ("--run.eval_every=1", "--run.keep_best=true")
    trunk = pretrain("--optim.schedule=constant", *options, dir=tmp_path / "trunk")
    lines = [json.loads(line) for line in (trunk / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"heldout/accuracy": 1.0, "knn/depth_01": 1.0} if "heldout/loss" in line else {}
    (trunk / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    branched = pretrain(*WSD, *options, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    assert json.loads((branched / "encoder_best" / "config.json").read_text())["step"] in (3, 4)


def test_a_branch_point_may_be_spelled_in_any_way(pretrain, tmp_path, monkeypatch):
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    monkeypatch.chdir(tmp_path)
    branch = pretrain(*WSD, "--run.branch_from=trunk/@02", dir=tmp_path / "branch")
    assert f"branch_from: {trunk}@2\n" in (branch / "config.yaml").read_text()
    for spelled in ("trunk/@02", f"{trunk}@2", "./trunk@2"):
        assert pretrain(*WSD, f"--run.branch_from={spelled}", dir=branch) == branch
    assert pretrain(*WSD, dir=branch) == branch


def test_a_branch_without_a_whole_checkpoint_does_not_begin_at_step_0(pretrain, tmp_path):
    trunk = pretrain("--optim.schedule=constant", dir=tmp_path / "trunk")
    begun = pretrain(*WSD, f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    for state in begun.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    shutil.rmtree(begun / "encoder")
    with pytest.raises(UserError, match=r"all checkpoints are damaged; delete .*checkpoints"):
        pretrain(*WSD, dir=begun)
    shutil.rmtree(begun / "checkpoints")
    assert read_metrics(pretrain(*WSD, dir=begun), "loss") == read_metrics(begun, "loss")


def test_a_branch_that_would_end_before_it_begins_is_refused(pretrain, tmp_path):
    trunk = pretrain("--optim.schedule=constant", "--run.steps=6", dir=tmp_path / "trunk")
    with pytest.raises(UserError, match=f"run.steps is 3; it must be at least 4, the steps of {trunk}"):
        pretrain(*WSD, "--run.steps=3", f"--run.branch_from={trunk}@4", dir=tmp_path / "branch")

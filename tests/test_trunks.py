"""Comparisons of trunks and branches: the results of separate runs, for less compute."""

import re
import shutil
from copy import copy
from pathlib import Path

import pytest
from comparisons import FAST, TINY_TRAINING, SmallComparison, cases_in, without_times
from conftest import ROOT, Killed, kill_at
from server import Command

from evaluation.comparison import run
from evaluation.comparison.cases import encoders_of, read_entries
from evaluation.comparison.digests import training_digest
from evaluation.comparison.rows import cost_with_ancestors, was_never_trained
from evaluation.config import CompareConfig
from evaluation.frozen.run_images import lineage
from mpp.config.parsing import parse
from mpp.errors import Diverged, UserError
from mpp.training.checkpoint import kept_steps
from mpp.training.history import PFLOP

STABLE = {"optim.schedule": "constant", "optim.warmup_steps": 1, "run.keep_checkpoints": 1}
COOLED = {"optim.schedule": "wsd", "optim.cooldown": 0.5}
LENGTHS = (4, 6, 8)
"""Steps of the branches: they part from their trunk after 2, 3 and 4 steps."""
WEIGHTS = Path("encoder") / "model.safetensors"


@pytest.fixture
def small(tmp_path):
    """Three branches of a trunk, by kNN on one dataset; no question is about the trunk."""
    small = SmallComparison(tmp_path)
    small.config["datasets"] = small.config["datasets"][:1]
    small.config["evaluations"] = [{"name": "kNN", "command": "knn", "options": FAST}]
    small.config["encoders"] = [*branches(tmp_path), trunk(tmp_path)]
    small.config["questions"] = [{"name": "curve", "encoders": [f"{steps} steps" for steps in LENGTHS]}]
    return small


def trunk(folder, **options):
    """The entry of a trunk of 5 steps."""
    options = TINY_TRAINING | STABLE | {"run.steps": 5} | options
    return {"name": "trunk", "encoder": f"{folder}/trunk_{{seed}}", "train": "pretrain", "train_options": options}


def branches(folder):
    """The entries of three branches."""
    entries = []
    for steps in LENGTHS:
        options = COOLED | {"run.steps": steps}
        entry = {"name": f"{steps} steps", "encoder": f"{folder}/of_{steps}_{{seed}}", "branch_of": "trunk"}
        entries.append(entry | {"train_options": options})
    return entries


def separate(small, folder):
    """The same comparison of runs that nothing connects, in another folder."""
    entries = []
    for steps in LENGTHS:
        options = TINY_TRAINING | STABLE | COOLED | {"run.steps": steps}
        entry = {"name": f"{steps} steps", "encoder": f"{folder}/alone_{steps}_{{seed}}", "train": "pretrain"}
        entries.append(entry | {"train_options": options})
    other = copy(small)
    other.file = folder / "separate.yaml"
    other.config = small.config | {"encoders": entries, "dir": str(folder / "separate")}
    return other


@pytest.mark.faults
def test_branches_have_the_rows_and_bits_of_separate_runs_and_are_found_by_their_digests(small, tmp_path):
    branched = small.compare()
    assert kept_steps(tmp_path / "trunk_0") == [2, 3, 4, 5]
    other = separate(small, tmp_path)
    alone = other.compare()
    assert without_times(branched["results"]) == without_times(alone["results"])
    assert list(branched["summary"]["curve"]) == [f"{steps} steps" for steps in LENGTHS]
    for steps in LENGTHS:
        branch = tmp_path / f"of_{steps}_0"
        assert (branch / WEIGHTS).read_bytes() == (tmp_path / f"alone_{steps}_0" / WEIGHTS).read_bytes()
        assert list(lineage(str(branch))) == [str(branch)]  # not the trunk, whose compute it has already
        assert cost_with_ancestors(branch, PFLOP) == cost_with_ancestors(tmp_path / f"alone_{steps}_0", PFLOP)


@pytest.mark.faults
def test_published_rows_are_found_under_either_way_of_making_them(small, tmp_path, monkeypatch):
    small.config["encoders"] = [branches(tmp_path)[0], trunk(tmp_path)]
    small.config["questions"] = [{"name": "curve", "encoders": ["4 steps"]}]
    rows = small.compare()["results"]
    monkeypatch.setattr(run, "train", lambda *_: pytest.fail("trained"))
    other = separate(small, tmp_path)
    other.config["encoders"] = other.config["encoders"][:1]
    other.config["extends"] = str(tmp_path / "out" / "results.json")
    assert other.compare()["results"] == rows
    small.config |= {"dir": str(tmp_path / "again"), "extends": str(tmp_path / "separate" / "results.json")}
    shutil.rmtree(tmp_path / "of_4_0")
    shutil.rmtree(tmp_path / "trunk_0")
    assert small.compare()["results"] == rows


@pytest.mark.faults
def test_a_comparison_that_is_killed_in_a_trunk_and_in_a_branch_goes_on(small, tmp_path, monkeypatch):
    ask_longest(small, tmp_path)
    for step in (3, 6):  # the trunk has 5 steps, and has kept the one at which the branch parts: 4
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, step)
            small.compare()
    shutil.rmtree(tmp_path / "trunk_0")  # a branch that has begun needs it no more
    branched = small.compare()["results"]
    assert not (tmp_path / "trunk_0" / "config.yaml").exists()
    other = separate(small, tmp_path)
    other.config["encoders"] = other.config["encoders"][-1:]
    assert without_times(branched) == without_times(other.compare()["results"])
    assert (tmp_path / "of_8_0" / WEIGHTS).read_bytes() == (tmp_path / "alone_8_0" / WEIGHTS).read_bytes()


def ask_longest(small, folder):
    """Leave one branch of the comparison."""
    small.config["encoders"] = [branches(folder)[-1], trunk(folder)]
    small.config["questions"] = [{"name": "curve", "encoders": ["8 steps"]}]


@pytest.mark.faults
def test_two_processes_share_a_trunk_and_its_branches(small, tmp_path):
    both = [Command("compare", "--config", str(small.write()), prepare=hurry) for _ in range(2)]
    assert [command.wait() for command in both] == [[0], [0]], both[0].said + both[1].said
    outputs = [command.said for command in both]
    for name in ("trunk", *(f"of_{steps}" for steps in LENGTHS)):
        assert sum(f"wrote {tmp_path}/{name}_0: encoder/" in output for output in outputs) == 1
    tables = [output[output.index("| accuracy (%)") :] for output in outputs]
    assert tables[0] == tables[1]


def hurry() -> None:
    run.RETRY_S = 0.2


def test_a_trunk_that_diverges_is_a_finding_for_the_branches_that_part_later(small, tmp_path, monkeypatch):
    """It is trained once. A branch that parted before has no part in it, as a separate run has none."""
    began = []

    def train(config, _):
        began.append(config.run.branch_from or Path(config.run.dir).name)
        folder = Path(config.run.dir)
        if folder.name == "trunk_0":
            for step in (2, 3):
                (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
            raise Diverged("the loss is nan")

    monkeypatch.setattr(run, "train", train)
    encoders = encoders_in(small)
    of_trunk = f"{tmp_path}/trunk_0"
    with pytest.raises(Diverged, match=f"^{of_trunk}, which it branches from: the loss is nan$"):
        run.train_encoder(encoders["8 steps", 0], tmp_path / "out")
    run.train_encoder(encoders["4 steps", 0], tmp_path / "out")
    run.train_encoder(encoders["6 steps", 0], tmp_path / "out")
    assert began == ["trunk_0", f"{of_trunk}@2", f"{of_trunk}@3"]
    findings = {steps: was_never_trained(encoders[f"{steps} steps", 0], tmp_path / "out") for steps in LENGTHS}
    assert findings == {4: False, 6: False, 8: True}
    with pytest.raises(Diverged, match="delete it to try again"):
        run.train_encoder(encoders["8 steps", 0], tmp_path / "out")
    assert len(began) == 3


@pytest.mark.faults
def test_the_table_says_that_a_trunk_diverged(small, tmp_path):
    ask_longest(small, tmp_path)
    for entry in small.config["encoders"]:
        entry["train_options"]["optim.lr"] = 1e30
    assert small.compare()["summary"]["curve"]["8 steps"]["kNN"] == {"diverged": 1}


@pytest.mark.parametrize(("kept", "begin"), [((2, 5), 2), ((1, 5), 1), ((3, 5), None)])
def test_a_trunk_that_was_trained_without_the_checkpoint(small, tmp_path, monkeypatch, kept, begin):
    for step in kept:
        (tmp_path / "trunk_0" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    trained = {}
    monkeypatch.setattr(run, "train", lambda config, _: trained.setdefault(Path(config.run.dir).name, config.run))
    branch = encoders_in(small)["4 steps", 0]
    where = f"step 2, where {tmp_path}/of_4_0 parts from it"
    if begin is None:
        command = f"up to {where}; rm -r {tmp_path}/trunk_0, and the same command makes it again"
        with pytest.raises(UserError, match=command):
            run.train_encoder(branch, tmp_path / "out")
        return
    run.train_encoder(branch, tmp_path / "out")
    assert trained["trunk_0"].keep_at == (2, 3, 4)
    assert trained["of_4_0"].branch_from == f"{tmp_path}/trunk_0@{begin}"


def encoders_in(small):
    """The encoders of a comparison by name of their entry and seed."""
    entries = read_entries(parse(CompareConfig, ["--config", str(small.write())]))
    return encoders_of(entries.encoders)


def test_each_seed_has_its_own_trunk_and_what_shares_its_folder_keeps_the_steps_too(small, tmp_path):
    first, *_, last = small.config["encoders"]
    first["seeds"] = last["seeds"] = [0, 1]
    small.config["encoders"] = [{"name": "architecture", "encoder": last["encoder"], "random": True}, first, last]
    encoders = encoders_in(small)
    for seed in (0, 1):
        branch = encoders["4 steps", seed]
        assert branch.trunk.path == tmp_path / f"trunk_{seed}"
        assert (branch.trunk.settings.run.seed, branch.settings.run.seed) == (seed, seed)
        assert run.settings_to_train(branch.trunk).run.keep_at == (2,)
    assert run.settings_to_train(encoders["architecture", 0]).run.keep_at == (2,)


def test_lengths_may_follow_from_compute(small):
    for entry, pflop in ((small.config["encoders"][0], 8e-6), (small.config["encoders"][-1], 5e-6)):
        del entry["train_options"]["run.steps"]
        entry["compute"] = pflop
    branch = encoders_in(small)["4 steps", 0]
    assert "run.steps" not in branch.entry.train_options  # the digest of a separate run has none either
    steps = run.settings_to_train(branch).run.steps
    of_trunk = run.settings_to_train(branch.trunk).run
    assert steps == pytest.approx(8 / 5 * of_trunk.steps, abs=1)
    assert of_trunk.keep_at == (3, 4, steps - round(steps / 2))


@pytest.mark.parametrize(
    ("entry", "change", "message"),
    [
        (0, {"branch_of": "stem"}, r"encoders: 4 steps: branch_of is stem; it must be another entry"),
        (0, {"branch_of": "4 steps"}, r"branch_of is 4 steps; it must be another entry"),
        (1, {"branch_of": "4 steps"}, r"encoders: 6 steps: branch_of is 4 steps; it must be another entry"),
        (0, {"train": "supervised"}, "encoders: 4 steps: branch_of is trunk; it must be another entry, with the same"),
        (0, {"encoder": "FOLDER/trunk_{seed}"}, "trunk_0 would be made from itself"),
        (0, {"seeds": [0, 1]}, "encoders: 4 steps: seeds is 1; it must be among the seeds of its trunk, trunk"),
        (0, {"train_options": COOLED}, "train_options is .*; it must be with run.steps, or compute"),
        (0, {"optim.lr": 0.5}, "encoders: 4 steps: optim.lr is 0.5; it must be 0.01, as in its trunk"),
        (0, {"run.seed": 7}, "encoders: 4 steps: run.seed is 7; it must be 0, as in its trunk"),
        (
            0,
            {"optim.schedule": "linear", "optim.cooldown": 0.2},
            "4 steps: run.steps is 4; it must be such that its first steps",
        ),
        (3, {"optim.schedule": "cosine"}, "run.steps is 4; it must be such that its first steps have the rates"),
        (3, {"objective.name": "features"}, "run.steps is 4; it must be such that its first steps"),
    ],
)
def test_branches_that_cannot_be_are_named_before_anything_is_done(small, tmp_path, entry, change, message):
    changed = small.config["encoders"][entry]
    for name, value in change.items():
        if "." in name:
            changed["train_options"][name] = value
        else:
            changed[name] = value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value
    with pytest.raises(UserError, match=message) as error:
        encoders_in(small)
    assert "\n" not in str(error.value)


def test_a_teacher_that_moves_by_steps_may_have_a_trunk(small):
    small.config["encoders"][-1]["train_options"] |= {"objective.name": "features", "objective.half_life": [4, 4]}
    assert encoders_in(small)["4 steps", 0].settings.objective.half_life == (4, 4)


def test_the_digest_of_a_branch_is_that_of_the_separate_run(small, tmp_path):
    for entry in small.config["encoders"]:
        entry["train_options"]["run.keep_at"] = [2]
    branched = encoders_in(small)
    alone = encoders_in(separate(small, tmp_path))
    for steps in LENGTHS:
        digests = {training_digest(encoders[f"{steps} steps", 0]) for encoders in (branched, alone)}
        assert len(digests) == 1


def test_the_example_of_the_page_is_carried_out_as_the_page_says(tmp_path):
    page = (ROOT / "evaluation" / "compare.md").read_text()
    (example,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "branch_of" in block)
    file = tmp_path / "curve.yaml"
    file.write_text(example)
    cases = cases_in(file)
    assert len(cases) == 6
    trunk = cases["8,000 steps", 2, "few-shot", "cifar10"].encoder
    assert run.settings_to_train(trunk).run.keep_at == (1600,)
    branch = cases["2,000 steps", 2, "few-shot", "cifar10"].encoder
    assert branch.trunk.path == trunk.path and run.settings_to_train(branch).run.steps == 2000

"""Comparisons of trunks and branches: the results of separate runs, for less compute."""

import re
import shutil
from copy import copy
from pathlib import Path

import pytest
from comparisons import FAST, TINY_TRAINING, SmallComparison, cases_in, without_times
from conftest import ROOT, killed_at, refused, weights_of

from evaluation import compare
from evaluation.comparison.cases import TRUNK_SETTING, encoders_of, read_entries
from evaluation.comparison.digests import training_digest
from evaluation.comparison.rows import cost_with_ancestors, was_never_trained
from evaluation.config import CompareConfig
from evaluation.frozen.known_labels import lineage
from mpp.config.parsing import parse
from mpp.errors import Diverged
from mpp.training.checkpoint import kept_steps
from mpp.training.history import PFLOP
from mpp.training.run_folder import same_until

STABLE = {"optim.schedule": "constant", "optim.warmup_steps": 1, "run.keep_checkpoints": 1}
COOLED = {"optim.schedule": "wsd", "optim.cooldown": 0.5}
LENGTHS = {4: 2, 6: 3, 8: 4}
"""Steps of each branch, and the step at which it parts from its trunk."""


@pytest.fixture
def small(tmp_path):
    """Three branches of a trunk, by kNN on one dataset; no question is about the trunk."""
    small = SmallComparison(tmp_path)
    small.config["datasets"] = small.config["datasets"][:1]
    small.config["evaluations"] = [{"name": "kNN", "command": "knn", "options": FAST}]
    small.config["encoders"] = [*branches(tmp_path), trunk(tmp_path)]
    small.config["questions"] = [{"name": "curve", "encoders": [f"{steps} steps" for steps in LENGTHS]}]
    return small


def entry(name, path, **options):
    """An entry of encoders that a comparison trains."""
    options = TINY_TRAINING | STABLE | options
    return {"name": name, "encoder": f"{path}_{{seed}}", "train": "pretrain", "train_options": options}


def trunk(folder):
    """The entry of a trunk of 5 steps."""
    return entry("trunk", f"{folder}/trunk", **{"run.steps": 5, "run.keep_at": [2, 3, 4]})


def branches(folder, of_trunk=True):
    """The entries of three branches, or of separate runs that are as long."""
    entries = []
    for steps, parting in LENGTHS.items():
        origin = {TRUNK_SETTING: f"{folder}/trunk_{{seed}}@{parting}"} if of_trunk else {}
        path = f"{folder}/{'of' if of_trunk else 'alone'}_{steps}"
        entries.append(entry(f"{steps} steps", path, **COOLED | {"run.steps": steps} | origin))
    return entries


def separate(small, folder):
    """The same comparison of runs that nothing connects, in another folder."""
    other = copy(small)
    other.file = folder / "separate.yaml"
    other.config = small.config | {"encoders": branches(folder, of_trunk=False), "dir": str(folder / "separate")}
    return other


@pytest.mark.faults
def test_branches_of_a_comparison_that_is_killed_have_the_rows_and_bits_of_separate_runs(small, tmp_path):
    """In the trunk, of 5 steps, and in the last branch, which then needs the trunk no more."""
    for step in (3, 6):
        with killed_at(step):
            small.compare()
    assert kept_steps(tmp_path / "trunk_0") == [2, 3, 4, 5]
    shutil.rmtree(tmp_path / "trunk_0")
    branched = small.compare()
    assert not (tmp_path / "trunk_0" / "config.yaml").exists()
    assert without_times(branched["results"]) == without_times(separate(small, tmp_path).compare()["results"])
    assert list(branched["summary"]["curve"]) == [f"{steps} steps" for steps in LENGTHS]
    for steps in LENGTHS:
        branch, other = tmp_path / f"of_{steps}_0", tmp_path / f"alone_{steps}_0"
        assert weights_of(branch) == weights_of(other)
        assert list(lineage(str(branch))) == [str(branch)]  # not the trunk, whose compute it has already
        assert cost_with_ancestors(branch, PFLOP) == cost_with_ancestors(other, PFLOP)


def test_a_branch_of_a_trunk_that_diverges_has_no_result(small, tmp_path, monkeypatch):
    """A separate run might not have diverged: it parts before."""
    began = []

    def train(config, _):
        began.append(Path(config.run.dir).name)
        raise Diverged("the loss is nan")

    monkeypatch.setattr(compare, "train", train)
    branch = encoders_in(small)["4 steps", 0]
    for _ in range(2):
        with pytest.raises(Diverged, match="the loss is nan"):
            compare.train_encoder(branch, tmp_path / "out")
    assert began == ["trunk_0"]
    assert was_never_trained(branch.parents[TRUNK_SETTING], tmp_path / "out")
    assert not was_never_trained(branch, tmp_path / "out")


def encoders_in(small):
    """The encoders of a comparison by name of their entry and seed."""
    entries = read_entries(parse(CompareConfig, ["--config", str(small.write())]))
    return encoders_of(entries.encoders)


def test_a_branch_of_itself_is_refused(small, tmp_path):
    small.config["encoders"] = [branches(tmp_path)[0] | {"encoder": f"{tmp_path}/trunk_{{seed}}"}]
    with refused("trunk_0 would be made from itself"):
        encoders_in(small)


def test_the_digest_of_a_branch_is_that_of_the_separate_run(small, tmp_path):
    branched, alone = encoders_in(small), encoders_in(separate(small, tmp_path))
    for name in (f"{steps} steps" for steps in LENGTHS):
        assert training_digest(branched[name, 0]) == training_digest(alone[name, 0])


def test_the_example_of_the_page_is_carried_out_as_the_page_says(tmp_path):
    page = (ROOT / "evaluation" / "compare.md").read_text()
    (example,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if TRUNK_SETTING in block)
    file = tmp_path / "curve.yaml"
    file.write_text(example)
    cases = cases_in(file)
    assert len(cases) == 6
    trunk = cases["8,000 steps", 2, "few-shot", "CIFAR-10"].encoder
    branch = cases["2,000 steps", 2, "few-shot", "CIFAR-10"].encoder
    assert branch.parents == {TRUNK_SETTING: trunk}
    parting = branch.settings.optim.stable_steps(branch.settings.run.steps)
    assert (trunk.settings.run.seed, branch.settings.run.seed) == (2, 2)
    assert trunk.settings.run.keep_at == (parting,) and branch.settings.run.branch_from.endswith(f"@{parting}")
    assert same_until(branch.settings, trunk.settings, parting) == parting

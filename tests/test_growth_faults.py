"""Runs that grow under real faults, on a stream, and on several processes. Slow: `pytest -m faults`."""

import os
import shutil
import signal
from functools import partial

import pytest
from conftest import same, wait_until, weights_of
from server import begin, die_at, fails, finish, limit_files, wait_at, was_killed

from mpp.training import run_folder
from mpp.training.checkpoint import kept_steps

pytestmark = pytest.mark.faults

TRUNK = ("--optim.schedule=constant", "--run.keep_at=[2]", "--run.keep_checkpoints=1", "--run.steps=6")
COOLED = ("--optim.schedule=wsd", "--optim.cooldown=0.5")
COPIED = 6
"""Files that a branch copies: metrics.jsonl, data.json, and four of the checkpoint."""


def branch_of(folder):
    return f"--run.branch_from={folder / 'trunk'}@2"


def whole_and_trunk(folder, *options, **how):
    """Train the uninterrupted run and the trunk; the settings of a branch."""
    finish(begin(folder / "whole", *COOLED, *options, **how))
    finish(begin(folder / "trunk", *TRUNK, *options, **how))
    return *COOLED, *options, branch_of(folder)


@pytest.mark.parametrize("kind", ["sharded", "two processes of a stream"])
def test_a_branch_ends_with_the_bits_of_an_uninterrupted_run(tmp_path, two_shards, kind):
    """A stream is read by as many processes as its trunk was."""
    how = dict(processes=2, sharded=kind == "sharded")
    images = () if how["sharded"] else (f"--data.path={two_shards}", "--data.streaming=true")
    whole, trunk, branch = (tmp_path / name for name in ("whole", "trunk", "branch"))
    words = whole_and_trunk(tmp_path, *images, **how)
    if images:
        fails(begin(branch, *words), "the number of processes is 1; it must be 2")
    finish(begin(branch, *words, **how))
    same(branch, whole, "compute/pflop", "optim/lr")
    assert weights_of(branch) != weights_of(trunk)


@pytest.mark.parametrize("processes", [1, 2])
def test_kills_in_the_trunk_and_in_the_branch(tmp_path, tally, processes):
    """Each at every step; the same command then goes on."""
    options = ("--run.checkpoint_every=1", "--run.keep_checkpoints=2")
    finish(begin(tmp_path / "whole", *COOLED, *options, processes=processes))
    trunk = (*TRUNK, *options, "--run.steps=3")
    cooled = (*COOLED, *options, branch_of(tmp_path))
    kills = 0
    for words, folder, steps in ((trunk, tmp_path / "trunk", (1, 2)), (cooled, tmp_path / "branch", (2, 3))):
        for step in steps:
            was_killed(begin(folder, *words, processes=processes, prepare=partial(die_at, step)))
            kills += 1
        finish(begin(folder, *words, processes=processes))
    same(tmp_path / "branch", tmp_path / "whole")
    tally("SIGKILL, trunk and branch", kills)


def die_in_copy(number):
    """SIGKILL when half of a file is copied: the first file of a branch is number 0."""
    copied = []

    def dies(source, target):
        content = source.read_bytes()
        if len(copied) == number:
            target.write_bytes(content[: len(content) // 2])
            os.killpg(0, signal.SIGKILL)
        target.write_bytes(content)
        copied.append(target)

    run_folder.shutil.copyfile = dies


def test_kills_while_a_branch_copies(tmp_path, tally):
    """In each file; the command that then goes on need not name the trunk."""
    words = whole_and_trunk(tmp_path)
    for number in range(COPIED):
        was_killed(begin(tmp_path / "branch", *words, prepare=partial(die_in_copy, number)))
        assert kept_steps(tmp_path / "branch") == []
    shutil.copytree(tmp_path / "branch", tmp_path / "unnamed")
    finish(begin(tmp_path / "branch", *words))
    finish(begin(tmp_path / "unnamed", *COOLED))
    for folder in (tmp_path / "branch", tmp_path / "unnamed"):
        same(folder, tmp_path / "whole")
        assert not [path for path in folder.rglob(".*") if "partial" in path.name]
    tally("SIGKILL while a branch copies its checkpoint", COPIED)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_while_a_branch_copies(tmp_path, tally, processes):
    words = whole_and_trunk(tmp_path, "--model.width=48", "--run.trackers=[]", processes=processes)
    how = dict(processes=processes, prepare=partial(limit_files, 100_000))  # the optimiser's state has more
    fails(begin(tmp_path / "branch", *words, **how), "File too large")
    assert kept_steps(tmp_path / "branch") == [] and not list((tmp_path / "branch" / "checkpoints").iterdir())
    finish(begin(tmp_path / "branch", *words, processes=processes))
    assert weights_of(tmp_path / "branch") == weights_of(tmp_path / "whole")
    tally("full disk while a branch copies its checkpoint")


def test_a_trunk_that_is_still_being_trained(tmp_path):
    finish(begin(tmp_path / "whole", *COOLED))
    finish(begin(tmp_path / "undisturbed", *TRUNK))
    trunk, go_on = tmp_path / "trunk", tmp_path / "go on"
    training = begin(trunk, *TRUNK, prepare=partial(wait_at, 5, go_on))
    wait_until(lambda: kept_steps(trunk) == [2, 4], of=training)
    finish(begin(tmp_path / "branch", *COOLED, branch_of(tmp_path)))
    assert not training.ended
    go_on.touch()
    finish(training)
    assert weights_of(tmp_path / "branch") == weights_of(tmp_path / "whole")
    assert weights_of(trunk) == weights_of(tmp_path / "undisturbed")

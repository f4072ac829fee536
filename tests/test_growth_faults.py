"""Runs that grow under real faults, on a stream, and on several processes. Slow: `pytest -m faults`."""

import os
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY, read_metrics, wait_until
from server import Command, die_at, wait_at

from mpp.training import run_folder
from mpp.training.checkpoint import kept_steps

pytestmark = pytest.mark.faults

TRUNK = (*TINY, "--optim.schedule=constant", "--run.keep_at=[2]", "--run.keep_checkpoints=1", "--run.steps=6")
COOLED = (*TINY, "--optim.schedule=wsd", "--optim.cooldown=0.5")
COPIED = 6
"""Files that a branch copies: metrics.jsonl, data.json, and four of the checkpoint."""


def encoder_of(folder: Path) -> bytes:
    return (folder / "encoder" / "model.safetensors").read_bytes()


def finish(*words: str, folder: Path, **how) -> str:
    """Pre-train to the end in a folder, and return what was printed."""
    run = Command("pretrain", *words, f"--run.dir={folder}", **how)
    assert set(run.wait()) == {0}, run.said[-3000:]
    return run.said


def branch_of(trunk: Path) -> str:
    return f"--run.branch_from={trunk}@2"


@pytest.mark.parametrize("kind", ["sharded", "two processes of a stream"])
def test_a_branch_ends_with_the_bits_of_an_uninterrupted_run(tmp_path, two_shards, kind):
    """A stream is read by as many processes as its trunk was."""
    how = dict(processes=2, sharded=kind == "sharded")
    images = () if how["sharded"] else (f"--data.path={two_shards}", "--data.streaming=true")
    whole, trunk, branch = (tmp_path / name for name in ("whole", "trunk", "branch"))
    finish(*COOLED, *images, folder=whole, **how)
    finish(*TRUNK, *images, folder=trunk, **how)
    if images:
        one = Command("pretrain", *COOLED, *images, branch_of(trunk), f"--run.dir={branch}")
        assert one.wait() == [2] and "the number of processes is 1; it must be 2" in one.said
    finish(*COOLED, *images, branch_of(trunk), folder=branch, **how)
    assert encoder_of(branch) == encoder_of(whole) != encoder_of(trunk)
    for scalar in ("loss", "compute/pflop", "optim/lr"):
        assert read_metrics(branch, scalar) == read_metrics(whole, scalar)


@pytest.mark.parametrize("processes", [1, 2])
def test_kills_in_the_trunk_and_in_the_branch(tmp_path, tally, processes):
    """Each at every step; the same command then goes on."""
    options = ("--run.checkpoint_every=1", "--run.keep_checkpoints=2")
    finish(*COOLED, *options, folder=tmp_path / "whole", processes=processes)
    trunk = (*TRUNK, *options, "--run.steps=3")
    cooled = (*COOLED, *options, branch_of(tmp_path / "trunk"))
    kills = 0
    for words, folder, steps in ((trunk, tmp_path / "trunk", (1, 2)), (cooled, tmp_path / "branch", (2, 3))):
        for step in steps:
            prepare = partial(die_at, step)
            run = Command("pretrain", *words, f"--run.dir={folder}", processes=processes, prepare=prepare)
            assert run.wait() == [-signal.SIGKILL] * processes, run.said
            kills += 1
        finish(*words, folder=folder, processes=processes)
    assert encoder_of(tmp_path / "branch") == encoder_of(tmp_path / "whole")
    assert read_metrics(tmp_path / "branch") == read_metrics(tmp_path / "whole")
    tally("SIGKILL, trunk and branch", kills)


def die_in_copy(number: int) -> None:
    """SIGKILL when half of a file is copied: the first file of a branch is number 0."""
    copied = []

    def dies(source: Path, target: Path) -> None:
        content = source.read_bytes()
        if len(copied) == number:
            target.write_bytes(content[: len(content) // 2])
            os.killpg(0, signal.SIGKILL)
        target.write_bytes(content)
        copied.append(target)

    run_folder.shutil.copyfile = dies


def test_kills_while_a_branch_copies(tmp_path, tally):
    """In each file; the command that then goes on need not name the trunk."""
    finish(*COOLED, folder=tmp_path / "whole")
    finish(*TRUNK, folder=tmp_path / "trunk")
    words = (*COOLED, f"--run.dir={tmp_path / 'branch'}")
    branch_from = branch_of(tmp_path / "trunk")
    for number in range(COPIED):
        run = Command("pretrain", *words, branch_from, prepare=partial(die_in_copy, number))
        assert run.wait() == [-signal.SIGKILL], run.said
        assert kept_steps(tmp_path / "branch") == []
    shutil.copytree(tmp_path / "branch", tmp_path / "unnamed")
    finish(*COOLED, branch_from, folder=tmp_path / "branch")
    finish(*COOLED, folder=tmp_path / "unnamed")
    for folder in (tmp_path / "branch", tmp_path / "unnamed"):
        assert encoder_of(folder) == encoder_of(tmp_path / "whole")
        assert read_metrics(folder) == read_metrics(tmp_path / "whole")
        assert not [path for path in folder.rglob(".*") if "partial" in path.name]
    tally("SIGKILL while a branch copies its checkpoint", COPIED)


def little_disk() -> None:
    """No file may have more than 100 kB: the weights fit, the optimiser's state does not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_while_a_branch_copies(tmp_path, tally, processes):
    options = ("--model.width=48", "--run.trackers=[]")
    finish(*COOLED, *options, folder=tmp_path / "whole", processes=processes)
    finish(*TRUNK, *options, folder=tmp_path / "trunk", processes=processes)
    words = (*COOLED, *options, branch_of(tmp_path / "trunk"))
    run = Command("pretrain", *words, f"--run.dir={tmp_path / 'branch'}", processes=processes, prepare=little_disk)
    assert run.wait() == [2] * processes and "File too large" in run.said and "Traceback" not in run.said
    assert kept_steps(tmp_path / "branch") == [] and not list((tmp_path / "branch" / "checkpoints").iterdir())
    finish(*words, folder=tmp_path / "branch", processes=processes)
    assert encoder_of(tmp_path / "branch") == encoder_of(tmp_path / "whole")
    tally("full disk while a branch copies its checkpoint", 1)


def test_a_trunk_that_is_still_being_trained(tmp_path):
    finish(*COOLED, folder=tmp_path / "whole")
    finish(*TRUNK, folder=tmp_path / "undisturbed")
    trunk, go_on = tmp_path / "trunk", tmp_path / "go on"
    training = Command("pretrain", *TRUNK, f"--run.dir={trunk}", prepare=partial(wait_at, 5, go_on))
    wait_until(lambda: kept_steps(trunk) == [2, 4], of=training)
    finish(*COOLED, branch_of(trunk), folder=tmp_path / "branch")
    assert not training.ended
    go_on.touch()
    assert training.wait() == [0], training.said
    assert encoder_of(tmp_path / "branch") == encoder_of(tmp_path / "whole")
    assert encoder_of(trunk) == encoder_of(tmp_path / "undisturbed")

"""Real faults: kills, signals, full disks, broken files, dying processes. Slow: `pytest -m faults`."""

import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY, read_metrics, wait_until
from server import Command

from mpp.checkpoint import newest_step
from mpp.preemption import ECHO, EXIT_CODE, MARKER

pytestmark = pytest.mark.faults

RARE = "--run.eval_every=100000"


def weights(folder: Path) -> bytes:
    return (folder / "encoder" / "model.safetensors").read_bytes()


def is_writing(folder: Path) -> bool:
    """Whether a checkpoint is being written right now."""
    return any((folder / "checkpoints").glob(".step_*"))


def finish(command: Command) -> Command:
    assert set(command.wait()) == {0}, command.said[-3000:]
    return command


def kill_and_resume(start: Callable[[], Command], folder: Path, kills: int) -> None:
    """Kill a run so many times, each time after it resumed and passed a checkpoint; then let it finish.

    Every other kill falls into the writing of a checkpoint.
    """
    rng = random.Random(kills)
    for life in range(kills + 1):  # the first has nothing to resume from: it does not count
        before = newest_step(folder)
        run = start()
        wait_until(lambda run=run, before=before: newest_step(folder) > before or run.ended)
        if life % 2:
            wait_until(lambda run=run: is_writing(folder) or run.ended, poll=0)
        else:
            time.sleep(0.3 * rng.random())
        assert not run.ended, f"it ended before kill {life}: {run.said[-2000:]}"
        run.kill()
        assert not (folder / "encoder").exists()
        assert life == 0 or f"resuming {folder} after step {before}" in run.said
    finish(start())


def test_20_kills_of_pretraining(tmp_path, tally):
    """633 images in updates of 8: the run has several ends of an epoch on its way."""
    options = [*TINY, RARE, "--run.steps=700", "--run.checkpoint_every=5", "--data.workers=1", "--model.dropout=0.1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command("pretrain", *options, f"--run.dir={whole}"))
    kill_and_resume(lambda: Command("pretrain", *options, f"--run.dir={killed}"), killed, 20)
    assert weights(whole) == weights(killed)
    assert read_metrics(whole) == read_metrics(killed)
    tally("SIGKILL, pre-training, one process", 20)


def test_5_kills_on_two_processes(tmp_path, tally):
    options = [*TINY, RARE, "--run.steps=300", "--run.checkpoint_every=5", "--data.batch_size=2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command("pretrain", *options, f"--run.dir={whole}", processes=2))
    kill_and_resume(lambda: Command("pretrain", *options, f"--run.dir={killed}", processes=2), killed, 5)
    assert weights(whole) == weights(killed)
    assert read_metrics(whole) == read_metrics(killed)
    tally("SIGKILL, pre-training, two processes", 5)


@pytest.mark.parametrize("module", ["supervised", "finetune"])
def test_3_kills_of_learning_from_labels(tmp_path, tally, module):
    sized = [word for word in TINY if not word.startswith(("--probe", *(["--model"] if module == "finetune" else [])))]
    options = [*sized, RARE, "--run.steps=200", "--run.checkpoint_every=5", "--optim.average=0.9"]
    inner = ""
    if module == "finetune":
        finish(Command("pretrain", *TINY, f"--run.dir={tmp_path / 'encoder'}"))
        options += [f"--encoder={tmp_path / 'encoder'}", "--lrs=0.1"]
        inner = "lr_0.1"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command(module, *options, f"--run.dir={whole}"))
    kill_and_resume(lambda: Command(module, *options, f"--run.dir={killed}"), killed / inner, 3)
    assert weights(whole / inner) == weights(killed / inner)
    tally(f"SIGKILL, {module}, one process", 3)


@pytest.mark.parametrize(("number", "processes"), [(15, 1), (2, 1), (15, 2), (2, 2)])
def test_preemption(tmp_path, tally, number, processes):
    options = [*TINY, RARE, "--run.steps=120", "--run.checkpoint_every=100000", "--data.workers=2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    finish(Command("pretrain", *options, f"--run.dir={whole}", processes=processes))
    run = Command("pretrain", *options, f"--run.dir={stopped}", processes=processes)
    wait_until(lambda: (stopped / "metrics.jsonl").exists() and max(read_metrics(stopped), default=0) >= 10)
    run.signal(number)
    assert run.wait() == [EXIT_CODE] * processes, run.said[-3000:]
    step = newest_step(stopped)
    assert 10 <= step < 120 and max(read_metrics(stopped)) == step
    assert (stopped / MARKER).read_text().endswith(f", after step {step}\n")
    assert f"after step {step}; a checkpoint is written" in run.said
    assert (
        f"resuming {stopped} after step {step}"
        in finish(Command("pretrain", *options, f"--run.dir={stopped}", processes=processes)).said
    )
    assert not (stopped / MARKER).exists()
    assert weights(whole) == weights(stopped)
    assert read_metrics(whole) == read_metrics(stopped)
    tally(f"SIG{'TERM' if number == 15 else 'INT'}, {processes} process{'es' * (processes > 1)}", 1)


def test_a_signal_to_one_of_two_processes_stops_both(tmp_path, tally):

    options = [*TINY, RARE, "--run.steps=100000", "--run.checkpoint_every=100000"]
    run = Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}", processes=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    os.kill(run.processes[1].pid, 15)
    assert run.wait() == [EXIT_CODE] * 2
    assert newest_step(tmp_path / "run") > 0
    tally("SIGTERM to one of two processes", 1)


def stall() -> None:
    """Checkpoints take for ever."""
    from mpp import loop

    loop.save_checkpoint = lambda *args: time.sleep(1000)


def test_a_second_signal_ends_at_once(tmp_path, tally):
    options = [*TINY, RARE, "--run.steps=100000", "--run.checkpoint_every=100000", "--data.workers=1"]
    run = Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}", prepare=stall)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    run.signal(15)
    run.signal(15)  # an echo
    time.sleep(2 * ECHO)
    assert not run.ended  # it waits for its checkpoint
    run.signal(15)
    assert run.wait(10) == [128 + 15]
    tally("a second SIGTERM", 1)


def little_disk() -> None:
    """No file may have more than 100 kB: metrics fit, the optimiser's state does not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk(tmp_path, tally, processes):
    options = [*TINY, RARE, "--model.width=48", "--run.steps=12", "--run.log_every=100", "--run.trackers=[]"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(Command("pretrain", *options, f"--run.dir={whole}", processes=processes))
    broken = [*options, f"--run.dir={cut}"]
    run = Command("pretrain", *broken, processes=processes)
    wait_until(lambda: newest_step(cut) >= 4 or run.ended)
    run.kill()
    before = newest_step(cut)
    run = Command("pretrain", *broken, processes=processes, prepare=little_disk)
    assert run.wait() == [2] * processes, run.said[-2000:]
    assert f"the checkpoint after step {before + 2} cannot be written" in run.said
    assert "File too large" in run.said and "Traceback" not in run.said
    assert f"step_{before:08d} is kept" in run.said
    assert newest_step(cut) == before and not is_writing(cut)
    finish(Command("pretrain", *broken, processes=processes))
    assert weights(whole) == weights(cut)
    tally(f"full disk, {processes} process{'es' * (processes > 1)}", 1)

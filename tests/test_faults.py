"""Real faults: kills, signals, full disks, broken files, dying processes. Slow: `pytest -m faults`."""

import contextlib
import ctypes
import dataclasses
import fcntl
import multiprocessing
import os
import pickle
import pty
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import resource_sharer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import HANGS, ROOT, TINY, encoded, picture, read_metrics, start_command, wait_until
from PIL import Image
from server import (
    Command,
    at_update,
    context,
    die_at,
    mount_apart,
    mounts_are_allowed,
    told_to_stop,
    wait_at,
    wait_for_signal_at,
)

from mpp.config import Config, ImagesConfig
from mpp.config.parsing import parse, to_yaml
from mpp.data import workers
from mpp.data.decoding.decode import decode
from mpp.errors import UnreadableImage
from mpp.runtime import signals
from mpp.runtime.processes import set_timeout
from mpp.runtime.signals import ECHO, EXIT_CODE, MARKER
from mpp.training import checkpoint
from mpp.training.checkpoint import newest_step

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """undisturbed("--run.steps=8", processes=2): the folder of such a run, which is carried out once."""
    known: dict[tuple[int | str, ...], Path] = {}

    def run(*options: str, processes: int = 1) -> Path:
        key = (processes, *options)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            finish(Command("pretrain", *options, f"--run.dir={folder}", processes=processes))
            known[key] = folder
        return known[key]

    return run


def unhurried() -> None:
    """An update takes 5 ms at least: between two checkpoints the test has time to act, on any machine."""
    at_update(None, lambda rank: time.sleep(0.005))


def kill_and_resume(start: Callable[[], Command], folder: Path, kills: int) -> int:
    """Kill a run so many times, each time after it resumed and passed a checkpoint; then let it finish.

    Every other kill is aimed at the writing of a checkpoint.

    Returns:
        How many kills left one half written.
    """
    rng, halves = random.Random(kills), 0
    for life in range(kills + 1):  # the first has nothing to resume from: it does not count
        before = newest_step(folder)
        run = start()
        wait_until(lambda run=run, before=before: newest_step(folder) > before or run.ended)
        if life % 2:
            wait_until(lambda run=run: is_writing(folder) or run.ended, poll=0)
        else:
            time.sleep(0.1 * rng.random())
        assert not run.ended, f"it ended before kill {life}: {run.said[-2000:]}"
        run.kill()
        halves += is_writing(folder) and life > 0
        assert not (folder / "encoder").exists()
        assert life == 0 or f"resuming {folder} after step {before}" in run.said
    finish(start())
    return halves


def test_20_kills_of_pretraining(tmp_path, tally):
    """633 images in updates of 8: the run has several ends of an epoch on its way."""
    options = [
        *TINY,
        RARE,
        "--run.steps=450",
        "--run.checkpoint_every=5",
        "--data.workers=1",
        "--data.cache_gb=0",
        "--model.dropout=0.1",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command("pretrain", *options, f"--run.dir={whole}"))
    start = partial(Command, "pretrain", *options, f"--run.dir={killed}", prepare=unhurried)
    halves = kill_and_resume(start, killed, 20)
    assert weights(whole) == weights(killed)
    assert read_metrics(whole) == read_metrics(killed)
    tally("SIGKILL, pre-training, one process", 20)
    assert halves
    tally("... of them while a checkpoint was written", halves)


def test_5_kills_on_two_processes(tmp_path, tally):
    options = [*TINY, RARE, "--run.steps=200", "--run.checkpoint_every=5", "--data.batch_size=2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command("pretrain", *options, f"--run.dir={whole}", processes=2))
    start = partial(Command, "pretrain", *options, f"--run.dir={killed}", processes=2, prepare=unhurried)
    kill_and_resume(start, killed, 5)
    assert weights(whole) == weights(killed)
    assert read_metrics(whole) == read_metrics(killed)
    tally("SIGKILL, pre-training, two processes", 5)


@pytest.mark.parametrize("module", ["supervised", "finetune"])
def test_3_kills_of_learning_from_labels(tmp_path, tally, module):
    sized = [word for word in TINY if not word.startswith(("--probe", *(["--model"] if module == "finetune" else [])))]
    options = [*sized, "--run.steps=150", "--run.checkpoint_every=5", "--optim.average=0.9"]
    inner = ""
    if module == "supervised":
        options.append(RARE)
    else:
        finish(Command("pretrain", *TINY, f"--run.dir={tmp_path / 'encoder'}"))
        options += [f"--encoder={tmp_path / 'encoder'}", "--lrs=0.1"]
        inner = "lr_0.1"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command(module, *options, f"--run.dir={whole}"))
    start = partial(Command, module, *options, f"--run.dir={killed}", prepare=unhurried)
    kill_and_resume(start, killed / inner, 3)
    assert weights(whole / inner) == weights(killed / inner)
    tally(f"SIGKILL, {module}, one process", 3)


@pytest.mark.parametrize(("number", "processes"), [(15, 1), (2, 1), (1, 1), (15, 2), (2, 2), (1, 2)])
def test_preemption(tmp_path, tally, number, processes, undisturbed):
    options = [*TINY, RARE, "--run.steps=40", "--run.checkpoint_every=100000", "--data.workers=2"]
    whole, stopped = undisturbed(*options, processes=processes), tmp_path / "stopped"
    waits = partial(wait_for_signal_at, 20, processes - 1)
    run = Command("pretrain", *options, f"--run.dir={stopped}", processes=processes, prepare=waits)
    wait_until(lambda: (stopped / "metrics.jsonl").exists() and max(read_metrics(stopped), default=0) >= 10, of=run)
    run.signal(number)
    assert run.wait() == [EXIT_CODE] * processes, run.said[-3000:]
    step = newest_step(stopped)
    assert 10 <= step <= 21 and max(read_metrics(stopped)) == step
    assert (stopped / MARKER).read_text().endswith(f", after step {step}; a checkpoint is written\n")
    assert f"after step {step}; a checkpoint is written" in run.said
    assert (
        f"resuming {stopped} after step {step}"
        in finish(Command("pretrain", *options, f"--run.dir={stopped}", processes=processes)).said
    )
    assert not (stopped / MARKER).exists()
    assert weights(whole) == weights(stopped)
    assert read_metrics(whole) == read_metrics(stopped)
    tally(f"{signal.Signals(number).name}, {processes} process{'es' * (processes > 1)}", 1)


def test_a_signal_to_one_of_two_processes_stops_both(tmp_path, tally, undisturbed):
    options = [*TINY, RARE, "--run.steps=40", "--run.checkpoint_every=100000", "--data.workers=2"]
    whole, stopped = undisturbed(*options, processes=2), tmp_path / "stopped"
    waits = partial(wait_for_signal_at, 20, 1)
    run = Command("pretrain", *options, f"--run.dir={stopped}", processes=2, prepare=waits)
    wait_until(lambda: (stopped / "metrics.jsonl").exists() and max(read_metrics(stopped), default=0) >= 3, of=run)
    os.kill(run.processes[1].pid, 15)
    assert run.wait() == [EXIT_CODE] * 2
    assert 0 < newest_step(stopped) <= 21
    finish(Command("pretrain", *options, f"--run.dir={stopped}", processes=2))
    assert weights(whole) == weights(stopped)
    tally("SIGTERM to one of two processes", 1)


def test_a_signal_under_the_launcher(tmp_path, tally):
    """Its agent passes the signal on to processes that have it already: no second signal."""
    options = [*TINY, RARE, f"--run.dir={tmp_path / 'run'}", "--run.steps=100000", "--run.checkpoint_every=100000"]
    launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    run, metrics = start_command(*launch, "mpp/pretrain.py", *options), tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    os.killpg(run.pid, 15)
    run.communicate(timeout=HANGS)
    step = newest_step(tmp_path / "run")
    assert run.returncode == 1 and step > 0
    assert (tmp_path / "run" / MARKER).read_text() == f"SIGTERM, after step {step}; a checkpoint is written\n"
    tally("SIGTERM to accelerate launch and its two processes", 1)


def test_a_closed_terminal_stops_a_run_that_still_writes_to_it(tmp_path, tally):
    """The progress bar is drawn on, and the checkpoint comes after."""
    options = [*TINY, RARE, f"--run.dir={tmp_path / 'run'}", "--run.steps=100000", "--run.checkpoint_every=100000"]
    terminal, inside = pty.openpty()
    os.set_blocking(terminal, False)
    words = [sys.executable, "-m", "mpp.pretrain", *options, "--data.workers=1", "--data.cache_gb=0"]
    opened = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
    streams = dict(stdin=inside, stdout=inside, stderr=inside)
    run = subprocess.Popen(words, **streams, start_new_session=True, preexec_fn=opened, cwd=ROOT)
    os.close(inside)

    def is_training() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)  # else it is full
        return (tmp_path / "run" / "metrics.jsonl").exists() and max(read_metrics(tmp_path / "run"), default=0) >= 3

    wait_until(is_training)
    os.close(terminal)
    assert run.wait(HANGS) == EXIT_CODE
    step = newest_step(tmp_path / "run")
    assert step > 0
    assert (tmp_path / "run" / MARKER).read_text() == f"SIGHUP, after step {step}; a checkpoint is written\n"
    tally("a closed terminal (SIGHUP)", 1)


def linger() -> None:
    """Evaluation says when it begins, and takes until there is a signal."""
    from evaluation.supervised import Classification

    evaluate, told = Classification.evaluate, told_to_stop()

    def slowly(self, model, step, tracker):
        (tracker.folder / "evaluating").touch()
        wait_until(told)
        return evaluate(self, model, step, tracker)

    Classification.evaluate = slowly


def test_a_signal_in_a_last_evaluation_ends_fine_tuning_after_that_run(tmp_path, tally):
    sized = [word for word in TINY if not word.startswith(("--probe", "--model"))]
    finish(Command("pretrain", *TINY, f"--run.dir={tmp_path / 'encoder'}"))
    options = [*sized, f"--encoder={tmp_path / 'encoder'}", "--lrs=[0.1,0.01]", f"--run.dir={tmp_path / 'run'}"]
    run = Command("finetune", *options, prepare=linger)
    wait_until(lambda: (tmp_path / "run" / "dev_lr_0.1" / "evaluating").exists(), of=run)
    run.signal(15)
    assert run.wait() == [EXIT_CODE], run.said[-2000:]
    first = tmp_path / "run" / "dev_lr_0.1"
    assert (first / "encoder").is_dir() and (first / MARKER).exists()
    assert not (tmp_path / "run" / "dev_lr_0.01").exists()
    finish(Command("finetune", *options))
    assert (tmp_path / "run" / "finetune.json").exists() and not (first / MARKER).exists()
    tally("SIGTERM between the runs of fine-tuning", 1)


def dawdle() -> None:
    """Building the dataset takes for ever."""
    import mpp.pretrain

    mpp.pretrain.load_image_datasets = lambda config: (print("building", flush=True), time.sleep(10 * HANGS))


def test_a_signal_before_a_runs_first_step_leaves_the_folder_usable(tmp_path, tally):
    """Its marker is all that there is: the same command begins."""
    run = Command("pretrain", *TINY, f"--run.dir={tmp_path / 'run'}", prepare=dawdle)
    wait_until(lambda: "building" in run.said, of=run)
    run.signal(15)
    assert run.wait() == [EXIT_CODE], run.said[-2000:]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [MARKER]
    finish(Command("pretrain", *TINY, f"--run.dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run" / MARKER).exists()
    tally("SIGTERM before a run has begun", 1)


def test_a_signal_before_training_ends_at_once(tmp_path, tally):
    finish(Command("pretrain", *TINY, f"--run.dir={tmp_path / 'run'}", "--run.steps=2"))
    (tmp_path / "run" / "encoder").rename(tmp_path / "moved")
    run = Command("pretrain", *TINY, f"--run.dir={tmp_path / 'run'}", "--run.steps=2", prepare=dawdle)
    wait_until(lambda: "building" in run.said, of=run)
    run.signal(15)
    assert run.wait() == [EXIT_CODE], run.said[-2000:]
    assert (tmp_path / "run" / MARKER).read_text() == "SIGTERM, between steps\n"
    assert Command("pretrain", *TINY, f"--run.dir={tmp_path / 'run'}", "--run.steps=3").wait() == [2]
    assert not (tmp_path / "run" / MARKER).exists()  # what fails is not repeated for ever
    tally("SIGTERM while the dataset is built", 1)


def stall(folder: Path) -> None:
    """Checkpoints take for ever. Each signal is noted, and what time it is then, a file says."""

    def now() -> float:
        with (folder / "signals").open("a") as file:
            file.write("heard\n")
        return 2 * ECHO * (folder / "later").exists()

    checkpoint.save_checkpoint = lambda *args: time.sleep(10 * HANGS)
    signals.time = SimpleNamespace(monotonic=now, sleep=time.sleep)


def test_a_second_signal_ends_at_once(tmp_path, tally):
    options = [
        *TINY,
        RARE,
        "--run.steps=100000",
        "--run.checkpoint_every=100000",
        "--data.workers=1",
        "--data.cache_gb=0",
    ]
    run = Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}", prepare=partial(stall, tmp_path))
    metrics, signals = tmp_path / "run" / "metrics.jsonl", tmp_path / "signals"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, of=run)
    for count in (1, 2):  # a signal and its echo
        run.signal(15)
        wait_until(lambda count=count: signals.exists() and signals.read_text().count("heard") == count, of=run)
    assert not run.ended  # it waits for its checkpoint
    (tmp_path / "later").touch()
    run.signal(15)
    assert run.wait() == [128 + 15]
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
    run = Command("pretrain", *broken, processes=processes, prepare=partial(die_at, 5))
    assert run.wait() == [-signal.SIGKILL] * processes, run.said
    before = newest_step(cut)
    run = Command("pretrain", *broken, processes=processes, prepare=little_disk)
    assert run.wait() == [2] * processes, run.said[-2000:]
    assert f"step_{before + 2:08d}: the checkpoint cannot be written" in run.said
    assert "File too large" in run.said and "Traceback" not in run.said
    assert f"{before}]" in run.said  # earlier ones are named
    assert newest_step(cut) == before and not is_writing(cut)
    finish(Command("pretrain", *broken, processes=processes))
    assert weights(whole) == weights(cut)
    tally(f"full disk, {processes} process{'es' * (processes > 1)}", 1)


def test_a_folder_that_cannot_be_written(tmp_path, tally):
    """A file where the checkpoints' folder should be: permission bits do not stop root."""
    options, folder = [*TINY, RARE, f"--run.dir={tmp_path / 'run'}"], tmp_path / "run"
    finish(Command("pretrain", *TINY, RARE, f"--run.dir={tmp_path / 'whole'}"))
    folder.mkdir()
    config = parse(Config, options)
    run = dataclasses.replace(config.run, compile=False)
    resolved = dataclasses.replace(config, run=run, optim=config.optim.resolved(config.run.steps))
    (folder / "config.yaml").write_text(to_yaml(resolved))
    (folder / "checkpoints").write_text("in the way")
    run = Command("pretrain", *options)
    assert run.wait() == [2]
    assert "step_00000002: the checkpoint cannot be written" in run.said and "of steps []" in run.said
    (folder / "checkpoints").unlink()
    finish(Command("pretrain", *options))
    assert weights(tmp_path / "whole") == weights(folder)
    assert Command("pretrain", *TINY, f"--run.dir={folder / 'config.yaml'}").wait() == [2]
    tally("a file where a folder should be", 2)


def small_disk() -> None:
    """The metrics of some 30 steps fit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))


def test_a_disk_that_is_full_of_metrics(tmp_path, tally):
    options = [*TINY, RARE, "--run.checkpoint_every=1000", "--run.steps=80", "--run.trackers=[]"]
    finish(Command("pretrain", *options, f"--run.dir={tmp_path / 'whole'}"))
    run = Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}", prepare=small_disk)
    assert run.wait() == [2] and "metrics.jsonl cannot be written: File too large" in run.said
    assert "Traceback" not in run.said
    finish(Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}"))
    assert weights(tmp_path / "whole") == weights(tmp_path / "run")
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "run")
    tally("full disk while metrics are written", 1)


@pytest.mark.parametrize("damage", ["truncated", "a bit flipped", "a pickle in its place"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint(tmp_path, tally, damage, name, undisturbed):
    options = [*TINY, RARE, "--run.steps=8"]
    whole, damaged = undisturbed(*options), tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    shutil.rmtree(damaged / "encoder")
    file = damaged / "checkpoints" / "step_00000008" / name
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "a bit flipped":
        data[len(data) // 2] ^= 1
    else:
        data = pickle.dumps(Bomb(tmp_path / "run by a pickle"))
    file.write_bytes(data)
    run = finish(Command("pretrain", *options, f"--run.dir={damaged}"))
    assert f"step_00000008 is damaged ({name}): not used" in run.said and "after step 6" in run.said
    assert weights(whole) == weights(damaged)
    assert not (tmp_path / "run by a pickle").exists()
    tally(f"a checkpoint: {damage}", 1)


class Bomb:
    """What a malicious pickle does when it is loaded."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def broken_files() -> dict[str, bytes]:
    """A file of every sort that is not as it should be; those that no reader can show begin with `bad`."""
    jpeg, png = encoded(picture(1), "JPEG"), encoded(picture(2))
    deep = Image.fromarray(picture(4)[..., 0].astype(np.uint16) * 257)
    frames = [Image.fromarray(picture(n)) for n in range(3)]
    return {
        "bad_truncated.jpg": jpeg[: len(jpeg) // 2],
        "bad_empty.png": b"",
        "bad_text.jpg": b"this is no image",
        "bad_huge.png": huge_png(),
        "bad_header.gif": b"GIF89a" + bytes(3),
        "wrong_extension.jpg": png,
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "one_pixel.png": encoded(picture(3, (1, 1))),
        "cmyk.jpg": encoded(frames[0].convert("CMYK"), "JPEG"),
        "sixteen_bits.png": encoded(deep),
    }


def huge_png(side: int = 60_000) -> bytes:
    """A whole PNG of 60,000 x 60,000 black pixels, 450 MB of them before compression, in half a megabyte."""
    packer, row = zlib.compressobj(9), bytes(1 + side // 8)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def test_one_file_in_twenty_is_broken(tmp_path, tally):
    files = broken_files()
    (tmp_path / "images").mkdir()
    for number in range(19 * len(files)):
        (tmp_path / "images" / f"{number:03d}.png").write_bytes(encoded(picture(number)))
    for name, data in files.items():
        (tmp_path / "images" / name).write_bytes(data)
    options = [*TINY, f"--data.path={tmp_path / 'images'}", "--run.steps=60", "--data.workers=2"]
    finish(Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}"))
    named = {Path(line.split(": ")[0]).name for line in (tmp_path / "run" / "unreadable.txt").read_text().splitlines()}
    assert named == {name for name in files if name.startswith("bad")}
    assert read_metrics(tmp_path / "run", "unreadable")[60] == len(named)
    tally("broken image files, 5 % of a dataset", len(files))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 12 images, for all tests of a worker."""
    folder = tmp_path_factory.mktemp("mounted") / "images"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02d}.png").write_bytes(encoded(picture(number)))
    return folder


@pytest.mark.parametrize(
    ("processes", "back", "accumulation"),
    [
        (1, True, []),
        (1, False, []),
        (2, True, []),
        (2, False, []),
        pytest.param(2, False, ["--data.batch_size=1"], id="2-False-in the middle of a step"),
    ],
)
def test_images_go_away_while_a_run_reads_them(tmp_path, images, tally, undisturbed, processes, back, accumulation):
    """A mount drops. It comes back while reads are tried again, or only after the run has ended."""
    away = images.with_name("away")
    options = [*TINY, RARE, f"--data.path={images}", "--data.cache_gb=0", "--data.workers=2", "--run.steps=60"]
    options += ["--data.eval_fraction=0.1", "--run.checkpoint_every=1000", *accumulation]
    whole, cut = undisturbed(*options, processes=processes), tmp_path / "cut"
    options.append(f"--data.read_retries={8 if back else 1}")
    prepare = partial(wait_at, 20, tmp_path / "gone")
    run = Command("pretrain", *options, f"--run.dir={cut}", processes=processes, prepare=prepare)
    wait_until(lambda: (cut / "metrics.jsonl").exists() and len(read_metrics(cut)) > 10, of=run)
    images.rename(away)
    (tmp_path / "gone").touch()
    if back:
        wait_until(lambda: "tried again for 183 s" in run.said, of=run)
        away.rename(images)
        finish(run)
    else:
        assert set(run.wait()) == {2} and not (cut / "encoder").exists()
        assert not (cut / MARKER).exists()  # no job is requeued for an error
        errors = [line for line in run.said.splitlines() if "cannot be read, tried for 1 s" in line]
        assert len(errors) == processes and all("No such file" in line for line in errors), run.said[-3000:]
        assert f"a checkpoint after step {newest_step(cut)} is written" in errors[0]
        away.rename(images)
        finish(Command("pretrain", *options, f"--run.dir={cut}", processes=processes))
    assert run.said.count("tried again for") <= processes and "Traceback" not in run.said
    assert weights(whole) == weights(cut)
    tally(f"images go away and come back, {'while they are tried again' if back else 'after the run ended'}", 1)


def refuse(data: bytes, answer) -> None:
    """Decode a bomb; send the error and by how many MB the memory's peak grew."""
    decode(encoded(picture(0)), ImagesConfig())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decode(data, ImagesConfig())
    except UnreadableImage as error:
        answer.send((str(error), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def test_a_bomb_is_refused_in_little_memory(tally):
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=refuse, args=(huge_png(), sender))
    process.start()
    sender.close()  # what is not sent is not waited for
    error, megabytes = receiver.recv()
    process.join()
    assert "pixels" in error and megabytes < 20
    tally("decompression bomb", 1)


def dies_with_its_batch(seconds: float) -> None:
    """A loader process dies while it hands over a batch: its socket is closed, and the process is not gone yet."""
    from mpp.data.decoding import decode as decoding

    decode, detach = decoding.decode, resource_sharer.DupFd.detach
    dying = context.Event()

    def decode_and_die(*given):
        if multiprocessing.current_process().name == workers.PROCESS_NAME and not dying.is_set():
            dying.set()
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return decode(*given)

    def closed(self):
        if dying.is_set():
            address, _ = self._id
            with socket.socket(socket.AF_UNIX) as leaving:  # as one that hears of the death in the handshake does
                leaving.connect(address)
            raise EOFError
        return detach(self)

    decoding.decode, resource_sharer.DupFd.detach = decode_and_die, closed


def test_a_loader_process_that_dies_with_its_batch_is_named(tmp_path, image_folder, tally):
    options = [*TINY, f"--data.path={image_folder}", "--data.workers=2", "--run.steps=50"]
    run = Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}", prepare=partial(dies_with_its_batch, 0.4))
    assert run.wait() == [2], run.said[-2000:]
    assert "a loader process died (" in run.said and "Traceback" not in run.said
    tally("a loader process dies", 1)


def deadly(data: bytes, slow: bool) -> None:
    """Decoding this image kills the process, as a fault in a decoder or a lack of memory does."""
    from mpp.data.decoding import decode as decoding
    from mpp.training.loop import TrainingStep

    decode, begin = decoding.decode, TrainingStep.begin
    decoding.decode = lambda *given: os.kill(os.getpid(), 9) if given[0] == data else decode(*given)
    if slow:  # then the main process is not waiting for data when it hears of it
        TrainingStep.begin = lambda *args, **kwargs: (time.sleep(0.3), begin(*args, **kwargs))[1]


@pytest.mark.parametrize("slow", [False, True])
def test_a_loader_process_that_dies_names_the_image(tmp_path, image_folder, tally, slow):
    data = (image_folder / "cat" / "07.png").read_bytes()
    options = [*TINY, f"--data.path={image_folder}", "--data.workers=2", "--data.eval_fraction=0.01", "--run.steps=50"]
    run = Command("pretrain", *options, f"--run.dir={tmp_path / 'run'}", prepare=partial(deadly, data, slow))
    assert run.wait() == [2], run.said[-2000:]
    assert "a loader process died (" in run.said
    assert "07.png; take this image out" in run.said and "Traceback" not in run.said
    tally("a loader process dies", 1)


def small_shared_memory() -> None:
    """This process has a /dev/shm of 64 MB, as in a container of Docker's."""
    mount_apart()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)


BATCHES_OF_20_MB = (
    *TINY,
    RARE,
    *("--model.img_size=224", "--model.patch_size=32", "--model.depth=1", "--optim.global_batch_size=128"),
    *("--run.steps=6", "--data.cache_gb=0"),
)


@pytest.mark.skipif(not mounts_are_allowed(), reason="needs mount namespaces: root on Linux")
def test_shared_memory_of_64_mb(tmp_path, tally):
    options = [*BATCHES_OF_20_MB, "--data.workers=12", f"--run.dir={tmp_path / 'run'}"]
    run = Command("pretrain", *options, prepare=small_shared_memory)
    assert run.wait() == [2], run.said[-2000:]
    assert "a loader process died" in run.said and "data.workers" in run.said, run.said[-2000:]
    tally("little shared memory", 1)


def stuck() -> None:
    """After its first batch, reading an image never returns from C; and the run fails meanwhile."""
    from itertools import count

    from mpp.data.decoding import decode as decoding
    from mpp.errors import UserError
    from mpp.training.loop import TrainingStep

    decode, calls = decoding.decode, count()
    decoding.decode = lambda *given: ctypes.CDLL(None).pause() if next(calls) >= 12 else decode(*given)

    def fail(self, step, measure):
        time.sleep(2)
        raise UserError("the run fails")

    TrainingStep.begin = fail


def test_a_loader_process_that_hangs_does_not_keep_the_run(tmp_path, tally):
    run = Command("pretrain", *TINY, "--data.workers=2", f"--run.dir={tmp_path / 'run'}", prepare=stuck)
    assert run.wait() == [2] and "the run fails" in run.said, run.said[-2000:]
    tally("a loader process hangs while the run ends", 1)


def lose_a_fork(file: Path) -> None:
    """The first loader process hangs in its fork, as one that waits for a lock which nobody will open."""
    workers.START_TIMEOUT_S = 5.0

    def hang() -> None:
        with contextlib.suppress(FileExistsError):
            file.touch(exist_ok=False)
            time.sleep(HANGS)

    os.register_at_fork(after_in_child=hang)


def test_a_loader_process_that_does_not_begin_is_started_again(tmp_path, tally):
    options = [*TINY, "--data.workers=2", f"--run.dir={tmp_path / 'run'}"]
    finish(Command("pretrain", *options, prepare=partial(lose_a_fork, tmp_path / "lost")))
    assert (tmp_path / "lost").exists()
    finish(Command("pretrain", *options[:-1], f"--run.dir={tmp_path / 'whole'}"))
    assert weights(tmp_path / "whole") == weights(tmp_path / "run")
    tally("a loader process hangs in its fork", 1)


def lack_a_batch(take_number: int) -> None:
    """On the first of two processes, images cannot be read at this take (from 1) of a batch."""
    from mpp.errors import ReadFailed
    from mpp.training.loop import Loop

    load_batch = Loop.load_batch
    taken = []

    def failing_load(self):
        taken.append(None)
        if len(taken) == take_number and os.environ["RANK"] == "0":
            return ReadFailed("images cannot be read")
        return load_batch(self)

    Loop.load_batch = failing_load


@pytest.mark.parametrize(
    "pass_number", range(4), ids=["step 0, pass 0", "step 0, pass 1", "step 1, pass 0", "step 1, pass 1"]
)
def test_a_batch_that_one_of_two_processes_lacks_ends_both(tmp_path, tally, pass_number):
    """In any pass of the first two steps: DDP communicates in the first pass of the second one, too."""
    options = [*TINY, "--data.batch_size=2", f"--run.dir={tmp_path / 'run'}"]
    run = Command("pretrain", *options, processes=2, prepare=partial(lack_a_batch, pass_number + 1))
    assert set(run.wait()) == {2}, run.said[-3000:]
    assert run.said.count("images cannot be read; ") == 2
    tally("a batch that one of two processes lacks: both end", 1)


def lack_a_held_out_image(rank: str, number: int) -> None:
    """On a process of this rank, this held-out view (from 1) since training began cannot be read."""
    from mpp.data.views import FIXED_VIEW, ViewDataset
    from mpp.errors import ReadFailed
    from mpp.training.loop import TrainingStep

    view, finish = ViewDataset.__getitem__, TrainingStep.finish
    taken = []

    def failing_view(self, key):
        if key[0] == FIXED_VIEW and failing_view.has_trained and os.environ["RANK"] == rank:
            taken.append(key)
            if len(taken) == number:
                raise ReadFailed("images cannot be read")
        return view(self, key)

    def noted(self):
        failing_view.has_trained = True
        return finish(self)

    failing_view.has_trained = False
    ViewDataset.__getitem__, TrainingStep.finish = failing_view, noted


@pytest.mark.parametrize(("rank", "number"), [("1", 2), ("0", 5)], ids=["in a loader", "for the picture"])
def test_a_held_out_image_that_one_of_two_processes_lacks_ends_both_with_a_checkpoint(tmp_path, tally, rank, number):
    """Each has four of the eight images; after them the main process reads some for a picture."""
    options = [*TINY, "--run.checkpoint_every=99", f"--run.dir={tmp_path / 'run'}"]
    run = Command("pretrain", *options, processes=2, prepare=partial(lack_a_held_out_image, rank, number))
    assert run.wait() == [2, 2], run.said[-3000:]
    assert run.said.count("images cannot be read; a checkpoint after step 4 is written") == 2
    assert newest_step(tmp_path / "run") == 4
    finish(Command("pretrain", *options, processes=2))
    assert 4 in read_metrics(tmp_path / "run", "heldout/loss")
    tally("a held-out image that one of two processes lacks: both end", 1)


def poison() -> None:
    """On the second of two processes, the gradient of step 5 is infinite."""
    from mpp.training.loop import TrainingStep

    begin = TrainingStep.begin

    def poisoned(self, step, measure):
        if step == 5 and self.layout.rank == 1:
            next(self.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
        begin(self, step, measure)

    TrainingStep.begin = poisoned


def test_what_is_not_finite_stops_every_process(tmp_path, tally, undisturbed):
    whole = undisturbed(*TINY, RARE, "--run.steps=12", processes=2)
    options = [*TINY, RARE, "--run.steps=12", f"--run.dir={tmp_path / 'run'}"]
    run = Command("pretrain", *options, processes=2, prepare=poison)
    assert run.wait() == [2, 2], run.said[-3000:]
    assert run.said.count("loss or gradient of step 5 is not finite") == 2
    assert newest_step(tmp_path / "run") == 4
    finish(Command("pretrain", *options, processes=2))
    assert weights(whole) == weights(tmp_path / "run")
    tally("a gradient that is not finite, two processes", 1)


def test_one_of_two_processes_dies(tmp_path, tally):
    """Under the real launcher: the other one does not wait for ever."""
    arguments = [*TINY, RARE, "--run.steps=100", "--run.checkpoint_every=5"]
    launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    folder, whole = tmp_path / "run", tmp_path / "whole"
    finish(Command("pretrain", *arguments, f"--run.dir={whole}", processes=2))
    run = start_command(*launch, "mpp/pretrain.py", *arguments, f"--run.dir={folder}")
    wait_until(lambda: newest_step(folder) >= 5)
    started = psutil.Process(run.pid).children(recursive=True)
    ranks = {p.environ().get("RANK"): p for p in reversed(started)}  # a process, not what it started
    wait_until(lambda: newest_step(folder) >= 10)
    ranks["1"].kill()
    out, err = run.communicate(timeout=HANGS)
    assert run.returncode != 0, out + err
    assert not any(psutil.pid_exists(ranks[rank].pid) for rank in "01")
    assert 10 <= newest_step(folder) < 100
    finish(Command("pretrain", *arguments, f"--run.dir={folder}", processes=2))
    assert weights(folder) == weights(whole)
    tally("one of two processes dies", 1)


def freeze() -> None:
    """The second of two processes stops in update 5; from then on the other waits for so many seconds, not minutes."""

    def act(rank: int) -> None:
        set_timeout(timedelta(seconds=5))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    at_update(5, act)


def test_one_of_two_processes_hangs(tmp_path, tally, undisturbed):
    """The other gives up, so that the launcher ends the job; what was trained until then is not lost."""
    options = [*TINY, RARE, "--run.steps=12", f"--run.dir={tmp_path / 'run'}"]
    run = Command("pretrain", *options, processes=2, prepare=freeze)
    run.processes[0].join(HANGS)
    ended = run.processes[0].exitcode
    run.kill()
    assert ended == 2 and "error (process 0): another process does not answer" in run.said, run.said[-3000:]
    assert newest_step(tmp_path / "run") == 4
    finish(Command("pretrain", *options, processes=2))
    assert weights(undisturbed(*options[:-1], processes=2)) == weights(tmp_path / "run")
    tally("one of two processes hangs", 1)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, tally):
    options = [
        *TINY,
        RARE,
        f"--run.dir={tmp_path / 'run'}",
        "--run.steps=100000",
        "--data.workers=1",
        "--data.cache_gb=0",
    ]
    first = Command("pretrain", *options)
    wait_until(lambda: newest_step(tmp_path / "run") >= 2, of=first)
    second = Command("pretrain", *options)
    assert second.wait() == [2] and not first.ended
    assert "which another process is writing" in second.said
    os.kill(first.processes[0].pid, 9)  # it alone: its loader processes live on for seconds, and must not hold the lock
    first.wait()
    third = Command("pretrain", *options)
    wait_until(lambda: "resuming" in third.said or third.ended)
    third.kill()
    assert "resuming" in third.said
    first.signal(9)
    tally("a second run in the same folder", 1)


def test_5000_steps_leak_nothing(tmp_path, tally, capsys):
    """Resident memory and open files; the drift of the step time is printed, not asserted."""
    folder, files = tmp_path / "run", []
    options = [
        *TINY,
        "--model.depth=1",
        "--optim.global_batch_size=2",
        "--run.steps=5000",
        "--run.log_every=50",
        "--run.eval_every=250",
        "--run.checkpoint_every=250",
    ]
    run = Command("pretrain", *options, "--data.workers=1", "--data.cache_gb=0", f"--run.dir={folder}")
    process = psutil.Process(run.processes[0].pid)
    while not run.ended:
        with contextlib.suppress(psutil.Error, OSError):
            files.append((newest_step(folder), process.num_fds()))
        time.sleep(0.1)
    finish(run)
    memory, speed = read_metrics(folder, "speed/memory_gb"), read_metrics(folder, "speed/images_per_second")
    windows = []
    for low, high in ((1000, 2000), (4000, 5000)):
        gigabytes = max(value for step, value in memory.items() if low < step <= high)
        opened = np.median([count for step, count in files if low <= step < high])  # evaluations open some for a while
        seconds = np.median([2 / value for step, value in speed.items() if low < step <= high])
        windows.append((gigabytes, opened, seconds))
    with capsys.disabled():
        for name, (gigabytes, opened, seconds) in zip(("1000 to 2000", "4000 to 5000"), windows, strict=True):
            print(
                f"\nsteps {name}: {gigabytes:.3f} GB, {opened:.0f} open files, {1000 * seconds:.1f} ms a step", end=""
            )
    (early_memory, early_files, _), (late_memory, late_files, _) = windows
    assert late_memory < early_memory + 0.01  # a page a step would be 0.012
    assert late_files <= early_files + 2  # one an evaluation would be 12
    tally("5,000 steps: memory and open files flat", 1)

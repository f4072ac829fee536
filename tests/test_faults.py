"""Real faults: kills, signals, full disks, broken files, dying processes. Slow: `pytest -m faults`."""

import contextlib
import ctypes
import fcntl
import os
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from colours import write
from conftest import (
    HANGS,
    ROOT,
    TINY,
    TINY_TUNING,
    encoded,
    picture,
    read_metrics,
    same,
    start_command,
    tiny_without,
    wait_until,
    weights_of,
    write_pictures,
)
from PIL import Image
from server import (
    Command,
    at_update,
    begin,
    context,
    die_at,
    fails,
    finish,
    limit_files,
    mount_apart,
    mounts_are_allowed,
    told_to_stop,
    wait_at,
    wait_for_signal_at,
    was_killed,
)

from mpp.config import ImagesConfig
from mpp.data import workers
from mpp.data.decoding import decode as decoding
from mpp.data.views import FIXED_VIEW, ViewDataset
from mpp.errors import ReadFailed, UnreadableImage, UserError
from mpp.runtime import signals
from mpp.runtime.processes import set_timeout
from mpp.runtime.signals import EXIT_CODE, MARKER
from mpp.training import loop
from mpp.training.checkpoint import newest_step
from mpp.training.loop import Loop, TrainingStep

pytestmark = pytest.mark.faults

SELDOM = ("--run.eval_every=100000", "--run.checkpoint_every=100000")
LONG = (*SELDOM, "--run.steps=100000", "--data.workers=1", "--data.cache_gb=0")


def last_step(folder):
    """The last step that was logged."""
    return max(read_metrics(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def is_writing(folder):
    """Whether a checkpoint is being written right now."""
    return any((folder / "checkpoints").glob(".step_*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """undisturbed("--run.steps=8", processes=2): the folder of such a run, which is carried out once."""
    known = {}

    def run(*options, **how):
        key = repr((options, how))
        if key not in known:
            known[key] = tmp_path_factory.mktemp("undisturbed") / "run"
            finish(begin(known[key], *options, **how))
        return known[key]

    return run


def unhurried():
    """An update takes 5 ms at least: between two checkpoints the test has time to act, on any machine."""
    at_update(None, lambda _: time.sleep(0.005))


def kill_and_resume(start, folder, kills):
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
            time.sleep(0.05 * rng.random())
        assert not run.ended, f"it ended before kill {life}: {run.said[-2000:]}"
        run.kill()
        halves += is_writing(folder) and life > 0
        assert not (folder / "encoder").exists()
        assert life == 0 or f"resuming {folder} after step {before}" in run.said
    finish(start())
    return halves


READ_ANEW = ("--data.workers=1", "--data.cache_gb=0", "--data.batch_size=4", "--model.dropout=0.1")
KILLS = {  # what is tallied -> kills, processes, options
    "one process": (20, 1, ("--run.steps=300", *READ_ANEW)),
    "bf16 and two threads": (3, 1, ("--run.steps=60", "--run.precision=bf16", "--run.threads=2")),
    "two processes": (5, 2, ("--run.steps=120", "--data.batch_size=2")),
}


def stopped_by(name, folder):
    """That a run has a checkpoint and the marker of a stop by this signal; the step."""
    step = newest_step(folder)
    assert step > 0
    assert (folder / MARKER).read_text() == f"{name}, after step {step}; a checkpoint is written\n"
    return step


@pytest.mark.parametrize("kind", KILLS)
def test_kills_of_pretraining(tmp_path, tally, undisturbed, kind):
    kills, processes, options = KILLS[kind]
    options += (SELDOM[0], "--run.checkpoint_every=5")
    killed = tmp_path / "killed"
    start = partial(begin, killed, *options, processes=processes, prepare=unhurried)
    halves = kill_and_resume(start, killed, kills)
    same(undisturbed(*options, processes=processes), killed)
    tally(f"SIGKILL, pre-training, {kind}", kills)
    if kind == "one process":
        assert halves
        tally("... of them while a checkpoint was written", halves)


@pytest.mark.parametrize("module", ["supervised", "finetune"])
def test_3_kills_of_learning_from_labels(tmp_path, tally, module):
    common = ("--run.steps=150", "--run.checkpoint_every=5", "--optim.average=0.9")
    if module == "supervised":
        options, inner = [*tiny_without("--probe"), *common, SELDOM[0]], ""
    else:
        finish(begin(tmp_path / "encoder"))
        options, inner = [*TINY_TUNING, *common], "lr_0.1"
        options += [f"--encoder={tmp_path / 'encoder'}", "--lrs=0.1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(Command(module, *options, f"--run.dir={whole}"))
    start = partial(Command, module, *options, f"--run.dir={killed}", prepare=unhurried)
    kill_and_resume(start, killed / inner, 3)
    assert weights_of(whole / inner) == weights_of(killed / inner)
    tally(f"SIGKILL, {module}, one process", 3)


SIGNALS = {  # what is tallied -> the signal, and how the run is started
    f"{number.name}, processes: {processes}": (number, dict(processes=processes))
    for number in signals.SIGNALS
    for processes in (1, 2)
}
SIGNALS["SIGTERM, 2 processes that share the weights"] = (signal.SIGTERM, dict(processes=2, sharded=True))
SIGNALS["SIGTERM to one of two processes"] = (signal.SIGTERM, dict(processes=2))


@pytest.mark.parametrize("kind", SIGNALS)
def test_preemption(tmp_path, tally, undisturbed, kind):
    number, how = SIGNALS[kind]
    processes = how["processes"]
    options = [*SELDOM, "--run.steps=40", "--data.workers=2"]
    whole, stopped = undisturbed(*options, **how), tmp_path / "stopped"
    run = begin(stopped, *options, **how, prepare=partial(wait_for_signal_at, 20, processes - 1))
    wait_until(lambda: last_step(stopped) >= 10, of=run)
    name = number.name
    if "one of two" in kind:
        name = "another process's signal"
        os.kill(run.processes[1].pid, number)
    else:
        run.signal(number)
    assert run.wait() == [EXIT_CODE] * processes, run.said[-3000:]
    step = stopped_by(name, stopped)
    assert 10 <= step <= 21 and last_step(stopped) == step
    assert f"after step {step}; a checkpoint is written" in run.said
    assert f"resuming {stopped} after step {step}" in finish(begin(stopped, *options, **how)).said
    assert not (stopped / MARKER).exists()
    same(whole, stopped)
    tally(kind)


def launch(folder, *options):
    """Two processes by the real launcher."""
    words = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    return start_command(*words, "mpp/pretrain.py", *TINY, *options, f"--run.dir={folder}")


def test_a_signal_under_the_launcher(tmp_path, tally):
    """Its agent passes the signal on to processes that have it already: no second signal."""
    run = launch(tmp_path / "run", *SELDOM, "--run.steps=100000")
    wait_until(lambda: last_step(tmp_path / "run") >= 3)
    os.killpg(run.pid, 15)
    run.communicate(timeout=HANGS)
    assert run.returncode == 1
    stopped_by("SIGTERM", tmp_path / "run")
    tally("SIGTERM to accelerate launch and its two processes")


def test_a_closed_terminal_stops_a_run_that_still_writes_to_it(tmp_path, tally):
    """The progress bar is drawn on, and the checkpoint comes after."""
    terminal, inside = pty.openpty()
    os.set_blocking(terminal, False)
    words = [sys.executable, "-m", "mpp.pretrain", *TINY, *LONG, f"--run.dir={tmp_path / 'run'}"]
    opened = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)
    streams = dict(stdin=inside, stdout=inside, stderr=inside)
    run = subprocess.Popen(words, **streams, start_new_session=True, preexec_fn=opened, cwd=ROOT)
    os.close(inside)

    def is_training():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)  # else it is full
        return last_step(tmp_path / "run") >= 3

    wait_until(is_training)
    os.close(terminal)
    assert run.wait(HANGS) == EXIT_CODE
    stopped_by("SIGHUP", tmp_path / "run")
    tally("a closed terminal (SIGHUP)")


def linger():
    """Evaluation says when it begins, and takes until there is a signal."""
    from evaluation.supervised import Classification

    evaluate, told = Classification.evaluate, told_to_stop()

    def slowly(self, model, step, tracker):
        (tracker.folder / "evaluating").touch()
        wait_until(told)
        return evaluate(self, model, step, tracker)

    Classification.evaluate = slowly


def test_a_signal_in_a_last_evaluation_ends_fine_tuning_after_that_run(tmp_path, tally):
    finish(begin(tmp_path / "encoder"))
    options = [f"--encoder={tmp_path / 'encoder'}", "--lrs=[0.1,0.01]", f"--run.dir={tmp_path / 'run'}"]
    start = partial(Command, "finetune", *TINY_TUNING, *options)
    run = start(prepare=linger)
    first = tmp_path / "run" / "dev_lr_0.1"
    wait_until((first / "evaluating").exists, of=run)
    run.signal(15)
    assert run.wait() == [EXIT_CODE], run.said[-2000:]
    assert (first / "encoder").is_dir() and (first / MARKER).exists()
    assert not (tmp_path / "run" / "dev_lr_0.01").exists()
    finish(start())
    assert (tmp_path / "run" / "finetune.json").exists() and not (first / MARKER).exists()
    tally("SIGTERM between the runs of fine-tuning")


def dawdle():
    """Building the dataset takes for ever."""
    import mpp.pretrain

    mpp.pretrain.load_image_datasets = lambda config: (print("building", flush=True), time.sleep(10 * HANGS))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_signal_while_the_dataset_is_built_ends_at_once(tmp_path, tally, has_begun):
    """The marker of a run that has not begun is all that there is: the same command begins."""
    folder = tmp_path / "run"
    if has_begun:
        finish(begin(folder))
        shutil.rmtree(folder / "encoder")
    run = begin(folder, prepare=dawdle)
    wait_until(lambda: "building" in run.said, of=run)
    run.signal(15)
    assert run.wait() == [EXIT_CODE] and "the same command continues" in run.said, run.said[-2000:]
    assert (folder / MARKER).read_text() == "SIGTERM, between steps\n"
    if has_begun:
        fails(begin(folder, "--run.seed=3"), "another config")
        assert not (folder / MARKER).exists()  # what fails is not repeated for ever
    else:
        assert [path.name for path in folder.iterdir()] == [MARKER]
    finish(begin(folder))
    assert not (folder / MARKER).exists()
    tally("SIGTERM while the dataset is built" if has_begun else "SIGTERM before a run has begun", 1)


def stall(file):
    """Checkpoints take for ever; a file says that one is begun. There is no echo of a signal."""
    loop.save_checkpoint = lambda *args: (file.touch(), time.sleep(10 * HANGS))
    signals.ECHO = 0.0


def test_a_second_signal_ends_at_once(tmp_path, tally):
    """The first waits for its checkpoint. Echoes: test_preemption.py."""
    run = begin(tmp_path / "run", *LONG, prepare=partial(stall, tmp_path / "stalled"))
    wait_until(lambda: last_step(tmp_path / "run") >= 3, of=run)
    run.signal(15)
    wait_until((tmp_path / "stalled").exists, of=run)
    run.signal(15)
    assert run.wait() == [128 + 15] and "a second signal ends it at once" in run.said
    tally("a second SIGTERM")


def fill_disk():
    """Metrics fit, from update 5 on the optimiser's state does not."""
    at_update(5, lambda _: limit_files(100_000))


def test_a_folder_that_cannot_be_written(tmp_path, tally, undisturbed):
    """A file where the checkpoints' folder should be: permission bits do not stop root."""
    folder = tmp_path / "run"
    was_killed(begin(folder, prepare=partial(die_at, 1)))
    in_the_way = folder / "checkpoints"
    in_the_way.touch()
    fails(begin(folder), "step_00000002: the checkpoint cannot be written", "of steps []")
    in_the_way.unlink()
    finish(begin(folder))
    same(undisturbed(), folder)
    fails(begin(folder / "config.yaml"))
    tally("a file where a folder should be", 2)


def broken_files():
    """A file of every sort that is not as it should be; those that no reader can show begin with `bad`."""
    jpeg, png = encoded(picture(1), "JPEG"), encoded(picture(2))
    deep = Image.fromarray(picture(4)[..., 0].astype(np.uint16) * 257)
    frames = [Image.fromarray(picture(n)) for n in range(3)]
    return {
        "bad_truncated.jpg": jpeg[: len(jpeg) // 2],
        "bad_empty.png": b"",
        "bad_text.jpg": b"this is no image",
        "bad_huge.ppm": b"P6\n60000 60000\n255\n",
        "bad_header.gif": b"GIF89a" + bytes(3),
        "wrong_extension.jpg": png,
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "one_pixel.png": encoded(picture(3, (1, 1))),
        "cmyk.jpg": encoded(frames[0].convert("CMYK"), "JPEG"),
        "sixteen_bits.png": encoded(deep),
    }


def test_one_file_in_twenty_is_broken(tmp_path, tally):
    files = broken_files()
    whole = {f"{number:03d}.png": encoded(picture(number)) for number in range(19 * len(files))}
    write(tmp_path / "images", files | whole)
    finish(begin(tmp_path / "run", f"--data.path={tmp_path / 'images'}", "--run.steps=60", "--data.workers=2"))
    named = {Path(line.split(": ")[0]).name for line in (tmp_path / "run" / "unreadable.txt").read_text().splitlines()}
    assert named == {name for name in files if name.startswith("bad")}
    assert read_metrics(tmp_path / "run", "unreadable")[60] == len(named)
    tally("broken image files, 5 % of a dataset", len(files))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 12 images, for all tests of a worker."""
    return write_pictures(tmp_path_factory.mktemp("mounted") / "images", 12)


@pytest.mark.parametrize(
    "processes, back, accumulation",
    [*product((1, 2), (True, False), [()]), (2, False, ("--data.batch_size=1",))],  # the last: in the middle of a step
)
def test_images_go_away_while_a_run_reads_them(tmp_path, images, tally, undisturbed, processes, back, accumulation):
    """A mount drops. It comes back while reads are tried again, or only after the run has ended."""
    away = images.with_name("away")
    options = [SELDOM[0], f"--data.path={images}", "--data.cache_gb=0", "--data.workers=2", "--run.steps=60"]
    options += ["--data.eval_fraction=0.1", "--run.checkpoint_every=1000", *accumulation]
    whole, cut = undisturbed(*options, processes=processes), tmp_path / "cut"
    options.append(f"--data.read_retries={8 if back else 1}")
    run = begin(cut, *options, processes=processes, prepare=partial(wait_at, 20, tmp_path / "gone"))
    wait_until(lambda: last_step(cut) > 10, of=run)
    images.rename(away)
    (tmp_path / "gone").touch()
    if back:
        wait_until(lambda: "tried again for 183 s" in run.said, of=run)
        away.rename(images)
        finish(run)
    else:
        fails(run)
        assert not (cut / "encoder").exists() and not (cut / MARKER).exists()  # no job is requeued for an error
        errors = [line for line in run.said.splitlines() if "cannot be read, tried for 1 s" in line]
        assert len(errors) == processes and all("No such file" in line for line in errors), run.said[-3000:]
        assert f"a checkpoint after step {newest_step(cut)} is written" in errors[0]
        away.rename(images)
        finish(begin(cut, *options, processes=processes))
    assert run.said.count("tried again for") <= processes
    same(whole, cut)
    tally(f"images go away and come back, {'while they are tried again' if back else 'after the run ended'}")


def huge_png(side=60_000):
    """A whole PNG of 60,000 x 60,000 black pixels, 450 MB of them before compression, in half a megabyte."""
    packer, row = zlib.compressobj(9), bytes(1 + side // 8)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def refuse(data, answer):
    """Decode a bomb; send the error and by how many MB the memory's peak grew."""
    decoding.decode(encoded(picture(0)), ImagesConfig())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decoding.decode(data, ImagesConfig())
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
    tally("decompression bomb")


def deadly(slow):
    """Decoding the image 07.png kills the process, as a fault in a decoder or a lack of memory does."""
    decode, data = decoding.decode, encoded(picture(7))
    decoding.decode = lambda *given: os.kill(os.getpid(), 9) if given[0] == data else decode(*given)
    if slow:  # then the main process is not waiting for data when it hears of it
        at_update(None, lambda _: time.sleep(0.3))


def small_shared_memory():
    """This process has a /dev/shm of 64 MB, as in a container of Docker's."""
    mount_apart()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)


@pytest.mark.skipif(not mounts_are_allowed(), reason="needs mount namespaces: root on Linux")
def test_shared_memory_of_64_mb(tmp_path, tally):
    """Batches have 20 MB."""
    options = ["--model.img_size=224", "--model.patch_size=32", "--model.depth=1", "--optim.global_batch_size=128"]
    options += ["--run.steps=6", "--data.cache_gb=0", "--data.workers=12"]
    fails(begin(tmp_path / "run", *options, prepare=small_shared_memory), "a loader process died", "data.workers")
    tally("little shared memory")


def stuck():
    """After its first batch, reading an image never returns from C; and the run fails meanwhile."""
    decode, calls = decoding.decode, count()
    decoding.decode = lambda *given: ctypes.CDLL(None).pause() if next(calls) >= 12 else decode(*given)

    def fail(_):
        time.sleep(2)
        raise UserError("the run fails")

    at_update(0, fail)


def lose_a_fork(file):
    """The first loader process hangs in its fork, as one that waits for a lock that is never opened."""
    workers.START_TIMEOUT_S = 5.0

    def hang():
        with contextlib.suppress(FileExistsError):
            file.touch(exist_ok=False)
            time.sleep(HANGS)

    os.register_at_fork(after_in_child=hang)


def test_a_loader_process_that_does_not_begin_is_started_again(tmp_path, tally, undisturbed):
    finish(begin(tmp_path / "run", "--data.workers=2", prepare=partial(lose_a_fork, tmp_path / "lost")))
    assert (tmp_path / "lost").exists()
    same(undisturbed(), tmp_path / "run")
    tally("a loader process hangs in its fork")


def lack_a_batch(take_number):
    """On the first of two processes, images cannot be read at this take (from 1) of a batch."""
    load_batch, takes = Loop.load_batch, count(1)

    def failing_load(self):
        if next(takes) == take_number and os.environ["RANK"] == "0":
            return ReadFailed("images cannot be read")
        return load_batch(self)

    Loop.load_batch = failing_load


def lack_a_view(rank, number):
    """On a process of this rank, this held-out view (from 1) since training began cannot be read."""
    view, finish = ViewDataset.__getitem__, TrainingStep.finish
    taken = count(1)

    def failing_view(self, key):
        counts = key[0] == FIXED_VIEW and failing_view.has_trained and os.environ["RANK"] == rank
        if counts and next(taken) == number:
            raise ReadFailed("images cannot be read")
        return view(self, key)

    def noted(self):
        failing_view.has_trained = True
        return finish(self)

    failing_view.has_trained = False
    ViewDataset.__getitem__, TrainingStep.finish = failing_view, noted


def poison():
    """On the second of two processes, the gradient of step 5 is infinite."""

    def act(update):
        if update.layout.rank == 1:
            next(update.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))

    at_update(5, act)


class Fault(NamedTuple):
    what: str
    happens: Callable[[], None]
    """In each process."""
    options: tuple[str, ...]
    said: str
    """By each process: a pattern."""
    processes: int = 1


TWELVE = (SELDOM[0], "--run.steps=12")
LITTLE = (*TWELVE, "--model.width=48", "--run.trackers=[]")
METRICS = (*SELDOM, "--run.steps=80", "--run.trackers=[]")
OWN_IMAGES = ("--data.path={images}", "--data.workers=2", "--data.eval_fraction=0.01", "--run.steps=50")
NO_ROOM = r"step_00000006: the checkpoint cannot be written \(.*File too large.*4\]"
DIED = r"a loader process died \(.*07\.png; take this image out"
LACKS = "images cannot be read; "
FAULTS = [
    Fault("full disk, 1 process", fill_disk, LITTLE, NO_ROOM),
    Fault("full disk, 2 processes", fill_disk, LITTLE, NO_ROOM, 2),
    Fault("full disk while metrics are written", partial(limit_files, 12_000), METRICS, "metrics.jsonl cannot be writ"),
    Fault("a loader process dies", partial(deadly, False), OWN_IMAGES, DIED),
    Fault("a loader process dies", partial(deadly, True), OWN_IMAGES, DIED),
    Fault("a loader process hangs while the run ends", stuck, ("--data.workers=2",), "the run fails"),
    Fault("a gradient that is not finite, two processes", poison, TWELVE, "gradient of step 5 is not finite", 2),
]
for number in range(1, 5):  # DDP communicates in the first pass of the second step, too
    what = "a batch that one of two processes lacks: both end"
    FAULTS.append(Fault(what, partial(lack_a_batch, number), ("--data.batch_size=2",), LACKS, 2))
for rank, number in (("1", 2), ("0", 5)):  # in a loader, and for a picture
    what, said = "a held-out image that one of two processes lacks: both end", f"{LACKS}a checkpoint after step 4 is"
    FAULTS.append(Fault(what, partial(lack_a_view, rank, number), SELDOM[1:], said, 2))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_all_processes_end_with_a_line_and_the_same_command_goes_on(tmp_path, tally, undisturbed, images, fault):
    options = [option.format(images=images) for option in fault.options]
    folder = tmp_path / "run"
    run = begin(folder, *options, processes=fault.processes, prepare=fault.happens)
    fails(run)
    assert len(re.findall(fault.said, run.said)) >= fault.processes, run.said[-3000:]
    assert not is_writing(folder) and not (folder / "encoder").exists()
    finish(begin(folder, *options, processes=fault.processes))
    same(undisturbed(*options, processes=fault.processes), folder)
    tally(fault.what)


def test_one_of_two_processes_dies(tmp_path, tally, undisturbed):
    """Under the real launcher: the other one does not wait for ever."""
    options = [SELDOM[0], "--run.steps=100", "--run.checkpoint_every=5"]
    folder = tmp_path / "run"
    whole = undisturbed(*options, processes=2)
    run = launch(folder, *options)
    wait_until(lambda: newest_step(folder) >= 5)
    started = psutil.Process(run.pid).children(recursive=True)
    ranks = {p.environ().get("RANK"): p for p in reversed(started)}  # a process, not what it started
    wait_until(lambda: newest_step(folder) >= 10)
    ranks["1"].kill()
    out, err = run.communicate(timeout=HANGS)
    assert run.returncode != 0, out + err
    assert not any(psutil.pid_exists(ranks[rank].pid) for rank in "01")
    assert 10 <= newest_step(folder) < 100
    finish(begin(folder, *options, processes=2))
    same(whole, folder)
    tally("one of two processes dies")


def freeze():
    """The second of two processes stops in update 5; from then on the other waits for so many seconds, not minutes."""

    def act(update):
        set_timeout(timedelta(seconds=5))
        if update.layout.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    at_update(5, act)


def test_one_of_two_processes_hangs(tmp_path, tally, undisturbed):
    """The other gives up, so that the launcher ends the job; what was trained until then is not lost."""
    run = begin(tmp_path / "run", *TWELVE, processes=2, prepare=freeze)
    run.processes[0].join(HANGS)
    ended = run.processes[0].exitcode
    run.kill()
    assert ended == 2 and "error (process 0): another process does not answer" in run.said, run.said[-3000:]
    assert newest_step(tmp_path / "run") == 4
    finish(begin(tmp_path / "run", *TWELVE, processes=2))
    same(undisturbed(*TWELVE, processes=2), tmp_path / "run")
    tally("one of two processes hangs")


def test_a_second_run_in_the_same_folder_is_refused(tmp_path, tally):
    options = [*LONG, "--run.checkpoint_every=2"]
    first = begin(tmp_path / "run", *options)
    wait_until(lambda: newest_step(tmp_path / "run") >= 2, of=first)
    fails(begin(tmp_path / "run", *options), "which another process is writing")
    assert not first.ended
    os.kill(first.processes[0].pid, 9)  # it alone: its loader processes live on for seconds, and must not hold the lock
    first.wait()
    third = begin(tmp_path / "run", *options)
    wait_until(lambda: "resuming" in third.said or third.ended)
    third.kill()
    assert "resuming" in third.said
    first.signal(9)
    tally("a second run in the same folder")


def test_5000_steps_leak_nothing(tmp_path, tally):
    """Resident memory and open files."""
    folder, files = tmp_path / "run", []
    options = ["--model.depth=1", "--optim.global_batch_size=2", "--data.workers=1", "--data.cache_gb=0"]
    options += ["--run.steps=5000", "--run.log_every=50", "--run.eval_every=250", "--run.checkpoint_every=250"]
    run = begin(folder, *options)
    process = psutil.Process(run.processes[0].pid)
    while not run.ended:
        with contextlib.suppress(psutil.Error, OSError):
            files.append((newest_step(folder), process.num_fds()))
        time.sleep(0.1)
    finish(run)

    def used(low, high):
        """Most gigabytes between two steps, and the usual number of open files: evaluations open some for a while."""
        memory = read_metrics(folder, "speed/memory_gb")
        gigabytes = max(value for step, value in memory.items() if low < step <= high)
        return gigabytes, float(np.median([count for step, count in files if low <= step < high]))

    early, late = used(1000, 2000), used(4000, 5000)
    assert late[0] < early[0] + 0.01  # a page a step would be 0.012
    assert late[1] <= early[1] + 2  # one an evaluation would be 12
    tally("5,000 steps: memory and open files flat")

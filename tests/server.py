"""A forking test server: imports once, then starts each command in a fresh process group within milliseconds.

It is multiprocessing's own fork server. Nothing is computed in it, so that every child starts as a new process would.
It cannot show how long a start takes, what an import does, or what the launcher passes on.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from random import SystemRandom

from conftest import HANGS, TINY, heed_interrupts, remember_counts, wait_until
from pytest import MonkeyPatch

from evaluation.registry import EVALUATIONS

OTHER_COMMANDS = ("supervised", "contrastive", "compare", "sweep", "predict", "features", "visualize")
MODULES = {name: f"mpp.{name}" for name in ("pretrain", "prepare")}
MODULES |= {name: evaluation.module for name, evaluation in EVALUATIONS.items()}
MODULES |= {name: f"evaluation.{name}" for name in OTHER_COMMANDS}
context = multiprocessing.get_context("forkserver")
LATER = (
    "docstring_parser",
    "scipy.io",
    "torch.utils.tensorboard",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
)
context.set_forkserver_preload([*MODULES.values(), *LATER])  # also what a run would import on its way


def act(module: str, arguments: list[str], environment: dict[str, str], group: int, log: str) -> None:
    """What a child does: be the command."""
    try:
        os.setpgid(0, group)
    except PermissionError:  # the first process has ended already, as one that refuses its settings does
        os.setpgid(0, 0)
    gc.freeze()  # what the server imported stays
    heed_interrupts()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not forked by a server
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for stream in (sys.stdout, sys.stderr):  # a line is one write, before a kill and beside another process's
        stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.update(environment)
    if name := os.environ.pop("NETWORK_NAMESPACE", ""):
        enter(name)
    from mpp.runtime.start import run_main

    remember_counts(MonkeyPatch())
    try:
        main = importlib.import_module(MODULES[module]).main
        run_main(lambda: [main([*words]) for then, words in groupby(arguments, "then".__eq__) if not then])
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def enter(name: str) -> None:
    """Be in a network namespace, which stands for a host (os.setns, which Python 3.12 has)."""
    with open(f"/var/run/netns/{name}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0


@lru_cache
def logs() -> tempfile.TemporaryDirectory:
    """A folder that goes when the tests end."""
    return tempfile.TemporaryDirectory()


class Command:
    """A command of ours as one or more processes, in one process group.

    Args:
        module: one of MODULES.
        arguments: its command line; after the word `then` that of another run, in the same processes.
        prepare: called in each process before the command, to break something. Must be picklable.
        sharded: as the launcher starts them with `distributed_type: FSDP`.
        environments: of each process, from a launcher; in place of `processes` and `sharded`. NETWORK_NAMESPACE is the
            host that it is on.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        processes: int = 1,
        prepare: Callable[[], None] | None = None,
        sharded: bool = False,
        environments: list[dict[str, str]] | None = None,
    ):
        self.log = Path(tempfile.mkstemp(suffix=".log", dir=logs().name)[1])
        self.processes = []
        for rank, own in enumerate(environments or environments_of(processes, sharded)):
            group = self.processes[0].pid if rank else 0
            start = dict(target=act, args=(module, list(arguments), own, group, str(self.log)))
            if prepare is not None:
                start = dict(target=act_prepared, args=(prepare, *start["args"]))
            self.processes.append(context.Process(**start))
            self.processes[-1].start()
            if not rank:
                wait_until(lambda: in_own_group(self.processes[0].pid) or self.ended)

    @property
    def ended(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    @property
    def said(self) -> str:
        """What it wrote to stdout and stderr."""
        return self.log.read_text()

    def signal(self, number: int) -> None:
        """Send a signal to the group, loader processes included."""
        os.killpg(self.processes[0].pid, number)

    def kill(self) -> None:
        """SIGKILL to the group, and wait until all of it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> list[int]:
        """Exit codes."""
        for process in self.processes:
            process.join(HANGS)
            if process.exitcode is None:
                for running in self.processes:  # else they would hold on to pytest's pipes
                    running.kill()
            assert process.exitcode is not None, f"still running after {HANGS} s: {self.said[-2000:]}"
        return [process.exitcode for process in self.processes]


def begin(folder: Path, *options: str, **how) -> Command:
    """A tiny run in this folder; `how`: see Command."""
    return Command("pretrain", *TINY, *options, f"--run.dir={folder}", **how)


def finish(command: Command) -> Command:
    assert set(command.wait()) == {0}, command.said[-3000:]
    return command


def was_killed(command: Command) -> None:
    """Each of its processes ends by SIGKILL."""
    assert set(command.wait()) == {-signal.SIGKILL}, command.said[-3000:]


def fails(command: Command, *said: str) -> None:
    """Each of its processes ends with an error, which says this, and with no traceback."""
    assert set(command.wait()) == {2}, command.said[-3000:]
    assert [words for words in said if words not in command.said] == [], command.said[-3000:]
    assert re.search("^error", command.said, re.MULTILINE), command.said[-3000:]  # not behind a progress bar
    assert "Traceback" not in command.said


def free_port() -> int:
    """A port below those that a system gives to whoever asks for any: before ours listens, it could give one again."""
    while True:
        port = SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def environments_of(processes: int, sharded: bool) -> list[dict[str, str]]:
    """As a launcher has them."""
    if processes == 1:
        return [{}]
    port = str(free_port())
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": port} | ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if sharded else {})
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def at_update(step: int | None, act: Callable[..., None]) -> None:
    """In each process: call `act` with a `TrainingStep` before update `step` (from 0), or before each."""
    from mpp.training.loop import TrainingStep

    begin = TrainingStep.begin

    def act_and_begin(self, number, measure):
        if step in (None, number):
            act(self)
        begin(self, number, measure)

    TrainingStep.begin = act_and_begin


def die_at(step: int) -> None:
    """SIGKILL to all of the group, loader processes included, before update `step`; what was before it is written."""
    at_update(step, lambda update: None if update.layout.rank else os.killpg(0, signal.SIGKILL))


def limit_files(size: int) -> None:
    """No file may have more bytes, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def wait_at(step: int, file: Path) -> None:
    """Wait for a file before update `step`: so the test has time to act, on any machine."""
    at_update(step, lambda _: wait_until(file.exists))


def mounts_are_allowed() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", "--mount", "true"]).returncode


def mount_apart() -> None:
    """What this process mounts from now on, it and its children alone see."""
    new_mounts = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(new_mounts):
        raise OSError("no mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def told_to_stop() -> Callable[[], bool]:
    """A function: whether a signal has reached what listens in this process."""
    from mpp.runtime.signals import Preemption

    opened, enter = [], Preemption.__enter__
    Preemption.__enter__ = lambda self: (opened.append(self), enter(self))[1]
    return lambda: bool(opened and opened[-1].asked)


def wait_for_signal_at(step: int, rank: int) -> None:
    """One process waits for its signal before update `step`, and the others with it for their gradients."""
    told = told_to_stop()
    at_update(step, lambda update: wait_until(told) if update.layout.rank == rank else None)


def act_prepared(prepare: Callable[[], None], *args) -> None:
    prepare()
    act(*args)


def in_own_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return True

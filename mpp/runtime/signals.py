"""Stopping a run from outside: a signal, all processes at the same forward pass, a checkpoint, a marker, an exit code.

accelerate and torch leave this to the training loop. A signal's handler sets a flag, and the processes agree by pass
(tests/test_faults.py breaks a run without each part):

- The agreement before each pass, in which processes wait for each other. Signals do not reach all in the same step,
  and images can be missing on only one. A process that stops by itself leaves the others waiting for its gradients.
  They agree over gloo, on the host: no step waits for a GPU.
- Before the first step there is nothing to finish: the handler ends the run where it stands. It ends a wait for images,
  too, whose server may be away for minutes.
- The marker is left at once. Many steps are compiled, checkpoints compared, datasets indexed before processes agree for
  the first time, and a launcher kills after 30 seconds.
- The echo. A launcher passes on to its processes a signal that they have had already: that is no second signal. Nor is
  SIGHUP ever: a closed terminal sends it, its shell passes it on, and it comes again when the shell ends.
- SIGHUP stays ignored where it was: that is what `nohup` is for. SIGINT does not: a shell starts `command &` so.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator

from mpp.errors import ReadFailed
from mpp.runtime.processes import maximum_of_all, no_answer, wait_for_all

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not done, try again
MARKER = "preempted"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO = 1.0  # seconds: launchers pass on a signal that their processes were also sent, and that is no second signal
T = TypeVar("T")


class CutShort(BaseException):
    """A signal ends a wait. It is no Exception: retries after errors do not catch it."""


class Preempted(SystemExit):
    """The run was asked to stop and has saved all it had: exit code 75."""


class Preemption:
    """While open, SIGTERM, SIGINT and SIGHUP stop the run: at once, or before the next pass, once it `finishes_steps`.

    A second signal ends the process at once, unless it is SIGHUP: as soon as Python's own code runs.

    Args:
        folder: the run's, where the marker is left.
    """

    def __init__(self, accelerator: Accelerator, folder: Path):
        self.accelerator, self.folder = accelerator, folder
        self.finishes_steps = False  # whether there is a step to finish, after which a signal stops the run
        self.waiting = False  # whether the step waits for its batch
        self.asked = ""  # the first signal's name
        self.asked_at = 0.0  # by time.monotonic
        self.handlers = {}  # before: signal -> its handler

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self.handlers[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        stopped = error is None or isinstance(error, Preempted | ReadFailed) or no_answer(error)  # others may go first
        if self.asked and not stopped and self.accelerator.is_main_process:  # it fails by itself: not repeated for ever
            (self.folder / MARKER).unlink(missing_ok=True)

    def handle(self, number: int, _: object) -> None:
        """Note the first signal, and end what has nothing to save; end the process at the second."""
        now = time.monotonic()
        if self.asked:
            if number != signal.SIGHUP and now - self.asked_at > ECHO:
                os._exit(128 + number)
            return
        self.asked, self.asked_at = signal.Signals(number).name, now
        with suppress(OSError):  # of a full disk: the step may still be saved
            self.mark("not stopped yet" if self.finishes_steps else "between steps")
        if not self.finishes_steps:
            self.tell(f"stopped between steps; the same command continues (exit code {EXIT_CODE})")
            raise Preempted(EXIT_CODE)
        self.tell("the run stops once its work is saved; a second signal ends it at once")
        if self.waiting:
            raise CutShort

    def tell(self, what: str) -> None:
        """Write a line on the terminal, as a signal's handler may: not through Python's buffers."""
        if self.accelerator.is_main_process:
            with suppress(OSError):  # a closed terminal
                os.write(2, f"\n{self.asked}: {what}\n".encode())

    def mark(self, where: str) -> None:
        """Leave the marker."""
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / MARKER).write_text(f"{self.asked}, {where}\n", encoding="utf-8")

    def wait_for(self, get: Callable[[], T]) -> T | None:
        """The value of `get`; None where a signal came first."""
        try:
            self.waiting = True
            got = None if self.asked else get()
            self.waiting = False  # in here, since a signal may come between any two lines
            return got
        except CutShort:
            return None

    def agreed(self, failed: bool = False) -> bool:
        """Whether to stop before this step is done, on every process: a signal came to one of them, or one failed.

        Args:
            failed: whether this process cannot do the step.
        """
        return maximum_of_all(failed or bool(self.asked)) > 0

    def leave(self, where: str) -> None:
        """Leave the marker and end the process; everything worth saving is saved."""
        if not self.asked:  # a signal that still comes is the same one
            self.asked, self.asked_at = "another process's signal", time.monotonic()
        self.mark(where)
        wait_for_all()
        self.accelerator.print(f"stopped by {self.asked} {where}; the same command continues (exit code {EXIT_CODE})")
        raise Preempted(EXIT_CODE)

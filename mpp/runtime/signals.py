"""Stopping a run from outside: a signal, the step finished on all processes, a checkpoint, a marker, an exit code.

accelerate and torch leave this to the training loop. Why each part has to be (tests/test_faults.py breaks a run
without it):

- The thread and its pipe. Python runs a signal's handler between two steps of the main thread's own code. While that
  waits in C, for a GPU or for another process, no handler runs, and a second Ctrl-C would do nothing. The interpreter
  writes the signal's number into the pipe at once, and the thread reads it there.
- The handler. Before the first step there is nothing to finish: it ends the run where it stands. Nor is there while
  images are waited for, whose server may be away for minutes: it ends the wait. It is installed where SIGINT was
  ignored too, as in a command that a script starts in the background (`command &`). SIGHUP stays ignored: that is
  what `nohup` is for.
- The echo. A launcher passes on to its processes a signal that they have had already. That is no second signal. Nor is
  SIGHUP ever: a closed terminal sends it, its shell passes it on, and it comes again when the shell ends.
- The agreement in each step, before processes wait for each other. Signals do not reach all processes in the same step,
  and images can be missing on only one. A process that stops by itself leaves the others waiting for its gradients.
  They agree over gloo, on the host: no step waits for a GPU.
- The early marker. Many steps of a GPU are compiled, checkpoints are compared, datasets are indexed before processes
  agree for the first time, and a launcher kills after 30 seconds: a run that was asked to stop has the marker at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from mpp.errors import ReadFailed
from mpp.runtime.processes import maximum_of_all, no_answer

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not done, try again
MARKER = "preempted"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
T = TypeVar("T")
ECHO = 1.0  # seconds: launchers pass on a signal that their processes were also sent, and that is no second signal


class Ending(IntEnum):
    """Why all processes stop before a step is done."""

    NONE = 0
    SIGNAL = 1
    FAILURE = 2  # of one of them to load its batch


class CutShort(BaseException):
    """A signal ends a wait. It is no Exception: retries after errors do not catch it."""


class Preempted(SystemExit):
    """The run was asked to stop and has saved all it had: exit code 75."""

    def __init__(self):
        super().__init__(EXIT_CODE)


class Preemption:
    """While open, SIGTERM, SIGINT and SIGHUP stop the run: at once, or after the step, once `finish_steps` is
    called.

    A second signal never waits, unless it is SIGHUP.

    A thread listens, so that the second signal works while the main thread waits for a GPU or for another process.

    Args:
        folder: the run's, where the marker is left.
    """

    def __init__(self, accelerator: Accelerator, folder: Path):
        self.accelerator, self.folder = accelerator, folder
        self.finishes_steps = False
        self.waiting = False  # whether the step waits for its batch
        self.asked = ""  # the first signal's name
        self.marked = False
        self.marking = threading.RLock()  # a signal may come while the marker is written

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.writer, False)
            self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
            self.handlers = {number: signal.signal(number, self.handle) for number in {*SIGNALS} - ignored}
            self.listener = threading.Thread(target=self.listen, daemon=True)
            self.listener.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        stopped = error is None or isinstance(error, Preempted | ReadFailed) or no_answer(error)  # others may go first
        if self.asked and not stopped:  # a run that fails by itself is not repeated for ever
            self.unmark()
        if hasattr(self, "listener"):
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            os.write(self.writer, bytes(1))  # the listener's last: loader processes may hold the pipe open
            self.listener.join()
            os.close(self.writer)
            os.close(self.reader)

    def finish_steps(self) -> None:
        """From now on there is a step to finish: a signal stops the run after it."""
        self.finishes_steps = True

    def handle(self, number: int, _: object) -> None:
        """End a run that has not begun its first step, or is done: there is nothing to save. Or end a wait."""
        if self.waiting:
            self.waiting = False
            raise CutShort
        if not self.finishes_steps:
            self.mark(signal.Signals(number).name, "between steps")
            raise Preempted

    def mark(self, reason: str, where: str) -> None:
        """Leave the marker."""
        with self.marking:
            self.marked = True
            if self.accelerator.is_main_process:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / MARKER).write_text(f"{reason}, {where}\n", encoding="utf-8")

    def unmark(self) -> None:
        """Take the marker away, for good."""
        with self.marking:
            self.marked = True
            if self.accelerator.is_main_process:
                (self.folder / MARKER).unlink(missing_ok=True)

    def mark_early(self) -> None:
        """Leave the marker before the run has stopped, unless it has."""
        with self.marking:
            if not self.marked:
                self.mark(self.asked, "not stopped yet")

    def listen(self) -> None:
        """Read the numbers of signals as they come; 0 is the end."""
        first = 0.0
        while number := os.read(self.reader, 1)[0]:
            if number in SIGNALS and not self.asked:
                self.asked, first = signal.Signals(number).name, time.monotonic()
                threading.Thread(target=self.mark_early, daemon=True).start()  # the disk may hang
            elif number in SIGNALS and number != signal.SIGHUP and time.monotonic() - first > ECHO:
                os._exit(128 + number)

    def wait_for(self, get: Callable[[], T]) -> T | None:
        """The value of `get`; None where a signal came first."""
        try:
            self.waiting = True
            got = None if self.asked else get()
            self.waiting = False  # in here, since a signal may come between any two lines
            return got
        except CutShort:
            while not self.asked:  # the listener is about to read it
                time.sleep(0.001)
            return None

    def agreed(self, own: Ending = Ending.NONE) -> Ending:
        """Whether to stop before this step is done, and why: the gravest reason, on every process.

        Args:
            own: why this process cannot do the step.
        """
        own = max(own, Ending.SIGNAL if self.asked else Ending.NONE)
        return Ending(int(maximum_of_all(own)))

    def asked_of_any(self) -> bool:
        """Whether any process was asked to stop, now: for places where a GPU may be waited for."""
        return any(gather_object([self.asked]))

    def leave(self, where: str) -> None:
        """Leave the marker and end the process; everything worth saving is saved."""
        reason = self.asked or "another process's signal"
        self.mark(reason, where)
        self.accelerator.wait_for_everyone()
        self.accelerator.print(f"stopped by {reason} {where}; the same command continues (exit code {EXIT_CODE})")
        raise Preempted

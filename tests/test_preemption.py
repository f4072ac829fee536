"""Signals, agreement among processes, the lock: what needs no process of its own. The rest: tests/test_faults.py."""

import errno
import fcntl
import os
import signal
import time
from contextlib import contextmanager, suppress
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from conftest import HANGS, refused, wait_until

from mpp.errors import ReadFailed, UserError
from mpp.runtime import signals
from mpp.runtime.files import Held
from mpp.runtime.signals import MARKER, Preempted, Preemption
from mpp.training.run import exclusive


@contextmanager
def training(folder):
    """A run in this folder that has a step to finish."""
    with Preemption(Accelerator(cpu=True), folder) as stop:
        stop.finishes_steps = True
        yield stop


def test_a_signal_is_remembered_while_there_is_a_step_to_finish(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with training(tmp_path) as stop:
        assert not stop.agreed()
        assert stop.agreed(failed=True)
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed()
        with pytest.raises(Preempted) as error:
            stop.leave("after step 7")
        assert error.value.code == signals.EXIT_CODE == 75
    assert (tmp_path / MARKER).read_text() == "SIGTERM, after step 7\n"
    assert signal.getsignal(signal.SIGTERM) is before


GONE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    "error, stays",
    [
        (UserError("this fails however often it is tried"), False),
        (RuntimeError(GONE), True),
        (ReadFailed("the images of an evaluation are away"), True),
    ],
    ids=["it fails", "another process was killed first", "images are away"],
)
def test_what_was_asked_to_stop_has_the_marker_before_it_stops_and_not_if_it_fails(tmp_path, error, stays):
    with pytest.raises(type(error)), training(tmp_path):
        signal.raise_signal(signal.SIGTERM)
        assert (tmp_path / MARKER).exists()
        raise error
    assert (tmp_path / MARKER).exists() == stays


@pytest.fixture
def ignored(request):
    """A signal that whoever started this process has made it ignore."""
    before = signal.signal(request.param, signal.SIG_IGN)
    yield request.param
    assert signal.getsignal(request.param) is signal.SIG_IGN
    signal.signal(request.param, before)


@pytest.mark.parametrize("ignored", [signal.SIGINT], indirect=True)
def test_an_interrupt_is_heard_in_the_background_of_a_script(tmp_path, ignored):
    """A shell starts `command &` with SIGINT ignored, and Python leaves it so: a run does not."""
    with training(tmp_path) as stop:
        signal.raise_signal(ignored)
        assert stop.asked == "SIGINT"


@pytest.fixture
def exits(monkeypatch):
    """With which codes this process would have ended at once."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_closed_terminal_is_a_request_to_stop_and_never_a_second_one(tmp_path, monkeypatch, exits):
    """Its shell passes SIGHUP on, and it comes again when the shell ends."""
    monkeypatch.setattr(signals, "ECHO", 0.0)
    with training(tmp_path) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert stop.agreed() and stop.asked == "SIGHUP"
    assert exits == [] and (tmp_path / MARKER).exists()


def test_a_second_signal_ends_at_once_and_the_echo_of_a_launcher_does_not(tmp_path, monkeypatch, exits):
    with training(tmp_path) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert exits == []
        monkeypatch.setattr(signals, "ECHO", 0.0)
        signal.raise_signal(signal.SIGINT)
    assert exits == [128 + signal.SIGINT] and stop.asked == "SIGTERM"


def test_a_marker_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "run").touch()
    with training(tmp_path / "run") as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    with refused(r"which cannot be locked \(.*No locks available") as found:
        exclusive(tmp_path, Accelerator(cpu=True)).__enter__()
    assert not isinstance(found.value, Held)  # no process is to be waited for


@pytest.mark.parametrize("ignored", [signal.SIGHUP], indirect=True)
def test_under_nohup_a_closed_terminal_stops_nothing(tmp_path, ignored):
    with training(tmp_path) as stop:
        os.kill(os.getpid(), ignored)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stop.asked)
        assert stop.asked == "SIGTERM"


def test_a_signal_ends_a_wait_for_images(tmp_path):
    """Also where what waits catches every error."""

    def away():
        with suppress(Exception):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(HANGS)

    with training(tmp_path) as stop:
        assert stop.wait_for(lambda: 1) == 1
        assert stop.wait_for(away) is None
        assert stop.wait_for(lambda: 1) is None

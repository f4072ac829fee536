"""The loop over steps: its edges, and a run that is asked to stop. Real signals and processes: tests/test_faults.py."""

import itertools
import signal
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from conftest import TINY, same

from mpp.config import Config
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout
from mpp.errors import ReadFailed
from mpp.pretrain import Pretraining
from mpp.runtime.signals import MARKER, Preempted
from mpp.training import loop
from mpp.training.loop import Loop, TrainingStep


def test_a_step_is_finished_and_saved_before_a_run_stops(pretrain, finished_run, tmp_path, monkeypatch):
    add_pass = TrainingStep.add_pass

    def asked(self, batch):
        if self.step == 2:
            signal.raise_signal(signal.SIGTERM)
        add_pass(self, batch)

    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setattr(TrainingStep, "add_pass", asked)
        pretrain()
    assert (tmp_path / "run" / MARKER).read_text() == "SIGTERM, after step 3; a checkpoint is written\n"
    same(pretrain(), finished_run)


def test_images_that_are_away_when_a_run_is_asked_to_stop_may_be_there_later(pretrain, tmp_path, monkeypatch):
    monkeypatch.setattr(Loop, "load_batch", lambda self: ReadFailed("away"))
    monkeypatch.setattr(Loop, "save", lambda self, done: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Preempted):
        pretrain()
    assert (tmp_path / "run" / MARKER).read_text() == "SIGTERM, before its first step\n"


def test_images_count_that_this_process_will_still_see(monkeypatch):
    """So many tell whether decoded images are worth their memory."""
    counts = []
    monkeypatch.setattr(loop, "in_memory", lambda views, images_left, device: counts.append(images_left) or views)
    task = Pretraining(parse(Config, [*TINY, "--run.steps=7"]), Accelerator(cpu=True), BatchLayout(8, 1, 2, 0))
    loop.training_batches(task, 2, {})
    assert counts == [20]  # half of 8, in 5 steps


def test_every_forward_pass_draws_numbers_of_its_own():
    seeds = set()
    for seed, step, number, rank in itertools.product(*[range(2)] * 3, range(3)):
        run = SimpleNamespace(run=SimpleNamespace(seed=seed))
        seeds.add(TrainingStep.seed_of(SimpleNamespace(task=run, step=step, layout=BatchLayout(6, 2, 3, rank)), number))
    assert len(seeds) == 24 and 62 < max(seeds).bit_length() <= 63

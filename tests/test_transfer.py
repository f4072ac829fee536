"""Copies of batches to the device: what waits for what, with a pretended CUDA."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mpp.training.feed import copy_stream, to_device

GPU = torch.device("cuda", 0)


@pytest.fixture
def events(monkeypatch):
    """Events on a pretended GPU, in their order; its streams are named "computing" and "copying"."""
    events = []

    def fake_stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: events.append(f"{name} waits for {other.name}"))

    streams = [fake_stream("computing")]

    @contextmanager
    def stream(new):
        streams.append(new)
        yield
        streams.pop()

    class FakeTensor:
        def __init__(self, name: str):
            self.name = name

        def to(self, device: torch.device, non_blocking: bool) -> "FakeTensor":
            assert device == GPU and non_blocking
            events.append(f"{streams[-1].name} copies {self.name}")
            return FakeTensor(f"copy of {self.name}")

        def record_stream(self, stream) -> None:
            events.append(f"{self.name} is kept for {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake_stream("copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    copy_stream.cache_clear()
    yield SimpleNamespace(seen=events, tensor=FakeTensor)
    copy_stream.cache_clear()


def test_a_gpu_copies_on_a_stream_of_its_own_and_computing_waits_for_it(events):
    copies = to_device([events.tensor("images"), events.tensor("labels")], GPU)
    assert [copy.name for copy in copies] == ["copy of images", "copy of labels"]
    assert events.seen == [
        "copying copies images",
        "copying copies labels",
        "computing waits for copying",
        "copy of images is kept for computing",
        "copy of labels is kept for computing",
    ]


def test_all_batches_are_copied_on_the_same_stream(events):
    to_device([events.tensor("images")], GPU)
    stream = copy_stream(GPU)
    to_device([events.tensor("images")], GPU)
    assert copy_stream(GPU) is stream


def test_on_a_cpu_nothing_is_copied():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    (there,) = to_device([images], torch.device("cpu"))
    assert there is images

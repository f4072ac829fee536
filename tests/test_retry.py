"""Images that cannot be read now, or not be decoded: tried again, reported, never made up."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from colours import write
from conftest import dataset_of, encoded, picture, refused, same
from image_files import unreadable

from mpp.config import DataConfig
from mpp.data import retry
from mpp.data.columns import read_cell, without_decoding
from mpp.data.dataset import ImageDataset
from mpp.data.remote import from_a_server
from mpp.data.retry import read_with_retries
from mpp.data.views import ViewDataset
from mpp.errors import ReadFailed
from mpp.training.checkpoint import kept_steps
from mpp.training.loop import Loop, refuse_undecodable


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that a read would have paused."""
    paused = []
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=paused.append))
    return paused


def test_a_read_is_tried_again_with_growing_pauses(pauses, capsys):
    read = Mock(side_effect=[OSError(5, "Input/output error")] * 8 + [b"image"])
    assert read_with_retries(read, "a.png", 8) == b"image"
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "a.png cannot be read: Input/output error" in warning and "183 s" in warning


def test_a_read_that_goes_on_failing_is_an_error(monkeypatch, pauses, tmp_path):
    """Also where a store's client raises errors of no common type, as botocore's."""
    for path in (f"{tmp_path}/gone.png", f"tar://{tmp_path}/gone/a.tar::0+9::gone.png"):
        with refused(r"gone\.png cannot be read, tried for 7 s: .*No such file", ReadFailed):
            read_cell({"bytes": None, "path": path}, 3)
    monkeypatch.setattr("mpp.data.columns.fsspec.open", Mock(side_effect=Exception("slow down")))
    with refused("slow down", ReadFailed):
        read_cell({"bytes": None, "path": "s3://bucket/1.png"}, 2)
    assert pauses == [1, 2, 4, 1, 2, 4, 1, 2]


@pytest.mark.parametrize("is_cause", [False, True])
@pytest.mark.parametrize("status", [400, 404, 416, 429, 500, 503])
def test_an_answer_that_stays_the_same_is_not_asked_for_again(status, is_cause, pauses):
    """A client's error has the answer in it, or in what caused it."""
    answer, error = Exception(), OSError("cannot be read")
    answer.response = SimpleNamespace(status_code=status)
    error.__cause__ = answer
    with refused(r"a\.png cannot be read", ReadFailed):
        read_with_retries(Mock(side_effect=error if is_cause else answer), "a.png", 2, Exception)
    assert pauses == ([1, 2] if status in (429, 500, 503) else [])


@pytest.mark.parametrize("endpoint, expected_pauses", [("https://hub.invalid", []), ("http://127.0.0.1:1", [1, 2, 4])])
def test_a_hub_whose_address_is_unknown_is_not_asked_again(endpoint, expected_pauses, pauses, monkeypatch):
    load = Mock(side_effect=ConnectionError("Couldn't reach the hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    with refused(r"server of data\.path owner/pictures \(not a file or folder .* be read.*Couldn't reach", ReadFailed):
        from_a_server(load, DataConfig(path="owner/pictures", read_retries=3))
    assert pauses == expected_pauses


def test_a_missing_file_beside_others_is_unreadable_at_once(tmp_path, pauses):
    write(tmp_path, {"data/a/1.png": 0})
    with unreadable(r"gone\.png"):
        read_cell({"bytes": None, "path": f"{tmp_path}/data/a/gone.png"}, 6)
    assert pauses == []


@pytest.mark.parametrize("linked", [False, True])
def test_a_place_that_is_away_is_waited_for(tmp_path, monkeypatch, linked):
    """The place of a disk that is not mounted is empty; it may be below `data.path`, or behind a link."""
    file = tmp_path / "data" / "a" / "1.png"
    write(tmp_path, {"data/b/1.png": 0})
    if linked:
        file.parent.symlink_to(tmp_path / "disk")
    place = "disk" if linked else "data/a"
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=lambda seconds: write(tmp_path, {f"{place}/1.png": 0})))
    assert read_cell({"bytes": None, "path": str(file)}, 6) == file.read_bytes()


def test_a_folder_that_goes_away(pretrain, tmp_path, image_folder, monkeypatch, pauses):
    """It comes back while reads are tried again: the same bits. Or it does not: a checkpoint; the same bits later.

    The evaluations of the third and the last step, which failed, are done when the run goes on.
    """
    options = [f"--data.path={image_folder}", "--data.eval_split=null", "--data.cache_gb=0", "--data.read_retries=4"]
    options += ["--run.steps=6", "--run.eval_every=3", "--run.checkpoint_every=99"]
    whole = pretrain(*options, dir=tmp_path / "whole")
    elsewhere = image_folder.with_name("elsewhere")
    next_batch = Loop.next_batch

    def goes_away(self, number):
        batch = next_batch(self, number)
        if number == step:
            image_folder.rename(elsewhere)
        return batch

    def comes_back(seconds):
        pauses.append(seconds)
        if len(pauses) == back_after:
            elsewhere.rename(image_folder)

    for step, back_after in ((2, 2), (1, None), (5, None)):
        run = tmp_path / f"step {step}"
        pauses.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Loop, "next_batch", goes_away)
            patch.setattr(retry.time, "sleep", comes_back)
            failed = refused(rf"tried for 15 s: .*a checkpoint after step {step + 1} is written", ReadFailed)
            with nullcontext() if back_after else failed:
                pretrain(*options, dir=run)
        assert pauses == [1, 2, 4, 8][:back_after]
        if back_after is None:
            assert kept_steps(run) == [step + 1]
            elsewhere.rename(image_folder)
            pretrain(*options, dir=run)
        same(run, whole, "heldout/loss", "heldout/accuracy")


def fake_batch(good, bad):
    """A batch of so many images, in which `bad` others have been replaced."""
    return SimpleNamespace(images=torch.zeros(good), unreadable=[f"{number}.png: broken" for number in range(bad)])


def test_most_of_the_latest_images_count_and_not_the_whole_life():
    next(refuse_undecodable(iter([fake_batch(16, 16)])))
    with refused("17 of the last 32 images"):
        next(refuse_undecodable(iter([fake_batch(15, 17)])))
    few = [fake_batch(0, 31), fake_batch(64, 0), *[fake_batch(51, 49)] * 50]
    assert len([*refuse_undecodable(iter(few))]) == len(few)
    batches = refuse_undecodable(itertools.chain([fake_batch(64, 0)] * 2000, itertools.repeat(fake_batch(64, 100))))
    for _ in range(2000 + 1024 // 164 - 1):
        next(batches)
    with refused(r"\d+ of the last 1024 images cannot be decoded, such as 99.png"):
        for _ in range(2):
            next(batches)


def test_nothing_is_made_up_where_no_image_can_be_decoded():
    images = [b"nothing"] * 8
    dataset = ImageDataset(without_decoding(dataset_of(images), "image"), "image", None, "train")
    views = ViewDataset(dataset, DataConfig(), 16)
    with refused(r"65 images in a row cannot be decoded, such as train\[7\]: no image file"):
        views[0, 7]
    images[5] = encoded(picture())
    dataset.rows = without_decoding(dataset_of(images), "image")
    assert int(views[0, 7].indices) == 5 and views[0, 7].unreadable

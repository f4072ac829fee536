"""Images that cannot be read now, or not be decoded: tried again, told, never made up."""

import itertools
import multiprocessing
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import encoded, picture, read_metrics

from mpp.config import DataConfig, ImagesConfig
from mpp.data import retry
from mpp.data.columns import decode_cell
from mpp.data.dataset import ImageDataset
from mpp.data.loader import held_out_batches
from mpp.data.retry import read_with_retries
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset
from mpp.data.workers import kill_workers
from mpp.errors import ReadFailed, UserError
from mpp.training.feed import MIN_IMAGES, RECENT_IMAGES, Feed
from mpp.training.step import Update


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that a read would have paused."""
    paused: list[int] = []
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=paused.append))
    return paused


def test_a_read_is_tried_again_with_growing_pauses(pauses, capsys):
    answers = iter([OSError(5, "Input/output error")] * 8 + [b"image"])

    def read():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert read_with_retries(read, "a.png", 8) == b"image"
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a.png cannot be read: [Errno 5] Input/output error" in said and "183 s" in said


def test_a_read_that_goes_on_failing_is_an_error(pauses, tmp_path):
    with pytest.raises(ReadFailed, match=r"gone\.png cannot be read, tried for 7 s: .*No such file"):
        decode_cell({"bytes": None, "path": str(tmp_path / "gone.png")}, ImagesConfig(read_retries=3))
    assert pauses == [1, 2, 4]
    with pytest.raises(ReadFailed, match="nosuch://x cannot be read"):
        decode_cell({"bytes": None, "path": "nosuch://x"}, ImagesConfig(read_retries=0))


def test_a_loader_processs_error_is_one_line(image_folder):
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None))
    image_folder.rename(image_folder.with_name("elsewhere"))
    views = ViewDataset(dataset, DataConfig(workers=1, read_retries=0), 16)
    with pytest.raises(ReadFailed, match=r"^\S*\.png cannot be read, tried for 0 s: [^\n]*$") as _:
        list(held_out_batches(views, 4))
    kill_workers()  # as at exit: pytest holds the error, and with it torch's iterator
    assert not multiprocessing.active_children()


def at_update(monkeypatch, step: int, act) -> None:
    """Call `act` just before update `step` (from 0)."""
    update = Update.__call__

    def first_act(self, number, *args, **kwargs):
        if number == step:
            act()
        return update(self, number, *args, **kwargs)

    monkeypatch.setattr(Update, "__call__", first_act)


@pytest.mark.parametrize("back_after", [2, None])
def test_a_folder_that_goes_away(pretrain, tmp_path, image_folder, monkeypatch, pauses, back_after):
    """It comes back while reads are tried again: the same bits. Or it does not: a checkpoint; the same bits later."""
    options = [f"--data.path={image_folder}", "--data.cache_gb=0", "--data.read_retries=4", "--run.checkpoint_every=99"]
    whole = pretrain(*options, "--run.steps=6", dir=tmp_path / "whole")
    elsewhere = image_folder.with_name("elsewhere")
    at_update(monkeypatch, 2, lambda: image_folder.rename(elsewhere))
    calls = itertools.count(1)
    monkeypatch.setattr(
        retry.time, "sleep", lambda seconds: elsewhere.rename(image_folder) if next(calls) == back_after else None
    )
    run = tmp_path / "run"
    if back_after is None:
        with pytest.raises(ReadFailed, match=r"cannot be read, tried for 15 s: .*a checkpoint after step 3 is written"):
            pretrain(*options, "--run.steps=6")
        assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_00000003"]
        elsewhere.rename(image_folder)
        monkeypatch.undo()
    pretrain(*options, "--run.steps=6")
    assert read_metrics(run) == read_metrics(whole)
    assert (run / "encoder" / "model.safetensors").read_bytes() == (
        whole / "encoder" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("step", [2, 5])
def test_an_evaluation_that_failed_is_done_when_the_run_goes_on(
    pretrain, tmp_path, image_folder, monkeypatch, pauses, step
):
    """One in the middle, and the last one, whose scalars are the run's."""
    options = [f"--data.path={image_folder}", "--data.eval_split=null", "--data.read_retries=0", "--run.steps=6"]
    options += ["--run.eval_every=3", "--run.checkpoint_every=99"]
    whole, run, elsewhere = pretrain(*options, dir=tmp_path / "whole"), tmp_path / "run", image_folder.with_name("gone")
    with monkeypatch.context() as patch:
        at_update(patch, step, lambda: image_folder.rename(elsewhere))  # when the update's own images are read
        with pytest.raises(ReadFailed, match=rf"cannot be read, .*a checkpoint after step {step + 1} is written"):
            pretrain(*options)
    elsewhere.rename(image_folder)
    pretrain(*options)
    for name in ("heldout/loss", "heldout/accuracy", "loss"):
        assert read_metrics(run, name) == read_metrics(whole, name)
    assert (run / "encoder" / "model.safetensors").read_bytes() == (
        whole / "encoder" / "model.safetensors"
    ).read_bytes()


def batch(good: int, bad: int) -> SimpleNamespace:
    """What a Feed looks at of a batch."""
    return SimpleNamespace(images=torch.zeros(good), unreadable=[f"{number}.png: broken" for number in range(bad)])


def test_most_of_the_latest_images_count_and_not_the_whole_life():
    feed = Feed(itertools.chain(itertools.repeat(batch(64, 0), 2000), itertools.repeat(batch(64, 100))), 1)
    for _ in range(2000):
        feed.take()
    latest = iter(range(20))
    with pytest.raises(
        UserError, match=rf"\d+ of the last {RECENT_IMAGES} images cannot be decoded, such as 99.png: broken"
    ):
        for _ in latest:
            feed.take()
    assert next(latest) * 164 <= RECENT_IMAGES + 164


def test_a_few_broken_images_end_nothing():
    feed = Feed(itertools.chain([batch(0, MIN_IMAGES - 1), batch(64, 0)], itertools.repeat(batch(51, 49), 50)), 1)
    for _ in range(30):
        feed.take()


def test_nothing_is_made_up_where_no_image_can_be_decoded(tmp_path):
    cells = [{"bytes": b"nothing", "path": f"{number}.png"} for number in range(8)]
    images = datasets.Features({"image": datasets.Image(decode=False)})
    dataset = ImageDataset(datasets.Dataset.from_dict({"image": cells}, images), "image", None, "train")
    views = ViewDataset(dataset, DataConfig(workers=0), 16)
    with pytest.raises(UserError, match=r"65 images in a row cannot be decoded, such as 7.png: no image file"):
        views[0, 7]
    cells[5]["bytes"] = encoded(picture())
    dataset.rows = datasets.Dataset.from_dict({"image": cells}, images)
    shown = [views[0, index] for index in range(3)]
    assert all(int(each.indices) == 5 and each.unreadable for each in shown)

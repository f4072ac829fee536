"""General images (`probe.path`), and the drift of a run from the weights that it began with."""

import shutil

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ADAM, CUT, TINY, put_picture, read_json, read_metrics, refused, without_times, write_classes
from safetensors.torch import load_file
from server import begin, finish
from sklearn.neighbors import NearestNeighbors
from torchvision.transforms.v2.functional import resize

from mpp.config import Config, DataConfig, RunProbeConfig
from mpp.config.parsing import parse, parse_saved
from mpp.features.drift import START_FILE, keep_start, measure_drift
from mpp.features.neighbours import find_other_neighbours
from mpp.features.probe import (
    NORTH_WEST,
    SOUTH_EAST,
    agreement,
    crop_and_enlarge,
    general_source,
    load_general_images,
    settings_of_general_images,
)
from mpp.models.networks import build_model
from mpp.pretrain import reopen
from mpp.training.log import read_history

PROBED = ("--run.eval_every=2", "--probe.every=2", "--probe.images=40", "--data.eval_images=30")


@pytest.fixture
def own(tmp_path):
    """A folder of 24 images without labels."""
    for number in range(24):
        put_picture(tmp_path / "own" / f"{number:02d}.png", 100 + number)
    return tmp_path / "own"


@pytest.fixture
def general(tmp_path):
    """A folder of 30 images with labels."""
    return write_classes(tmp_path / "general", 30)


@pytest.fixture
def settings(own, general, finished_run):
    """Of a run on its own images from the weights of another, which is probed on general ones."""
    return *PROBED, *ADAM, *CUT, f"--data.path={own}", f"--probe.path={general}", f"--model.init_from={finished_run}"


def encoder_of(*options):
    """A small encoder by these settings."""
    torch.manual_seed(0)
    model, _ = build_model(parse(Config, [*TINY, *ADAM, *options]))
    return model.encoder


# --- closed forms ---


def test_neighbours_are_those_of_sklearn_and_agree_where_angles_are_kept(rng):
    features = rng.normal(size=(300, 16))
    rows = torch.from_numpy(features)
    near = find_other_neighbours(rows, 5).index
    others = NearestNeighbors(n_neighbors=5, metric="cosine").fit(features).kneighbors(return_distance=False)
    assert torch.equal(near.sort(1).values, torch.from_numpy(others).sort(1).values)
    turn, _ = np.linalg.qr(rng.normal(size=(16, 16)))
    assert agreement(rows, torch.from_numpy(3 * features @ turn)) == 1
    assert agreement(rows[:1], rows[:1]) == 1
    line = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.9, 1.0], [0.0, 1.0]])
    assert agreement(line, line[[0, 1, 3, 2]], neighbours=1) == 0.25  # the first keeps its own


def test_two_crops_share_a_quarter_of_the_image():
    images = torch.randint(0, 256, (2, 3, 16, 24), dtype=torch.uint8)
    for part, box in ((NORTH_WEST, images[..., :12, :18]), (SOUTH_EAST, images[..., 4:, 6:])):
        assert torch.equal(crop_and_enlarge(images, part), resize(box.float(), [16, 24]).round().to(torch.uint8))


def test_weights_that_moved_by_a_known_factor(tmp_path):
    """Of low-rank changes the weights count with the change that is added to them."""
    start = tmp_path / START_FILE
    encoder = encoder_of()
    keep_start(start, encoder)
    assert set(measure_drift(start, encoder).values()) == {0.0}
    with torch.no_grad():
        encoder.patch_embed.proj.weight.mul_(1.5)
        for parameter in encoder.blocks[1].parameters():
            parameter.mul_(0.75)
    scalars = measure_drift(start, encoder)
    assert scalars["drift/weights/depth_01"] == scalars["drift/weights/norm"] == 0
    assert scalars["drift/weights/depth_02"] == pytest.approx(0.25, rel=1e-6)
    assert 0 < scalars["drift/weights/stem"] < 0.5
    assert 0 < scalars["drift/weights/all"] < max(scalars.values())
    changed = encoder_of("--model.lora_rank=2")
    keep_start(start, changed)
    changed.blocks[1].mlp.fc1.parametrizations.weight[0].up.data.normal_()
    scalars = measure_drift(start, changed)
    assert scalars["drift/weights/stem"] == scalars["drift/weights/depth_01"] == 0 < scalars["drift/weights/depth_02"]


def test_a_start_that_cannot_be_read_ends_nothing(tmp_path):
    start = tmp_path / START_FILE
    assert measure_drift(start, encoder_of()) == {}
    start.write_bytes(b"torn")
    assert measure_drift(start, encoder_of()) == {}


# --- the general images ---


def load(path):
    return load_general_images(general_source(RunProbeConfig(path=str(path)), DataConfig()))


@pytest.mark.parametrize("splits, counts", [({"train": 10, "test": 6}, [10, 6]), ({"test": 12}, [6, 6])])
def test_general_images_are_those_of_the_splits_or_halves(tmp_path, splits, counts):
    for split, count in splits.items():
        write_classes(tmp_path / "images" / split, count)
    images = load(tmp_path / "images")
    assert [len(each) for each in images[:2]] == counts
    assert all(record["labels"] for record in images.identify(0).values())  # where these change, figures do


def test_photographs_are_read_as_such_beside_images_of_measurements():
    for channels, expected in ((1, None), (2, (0, 4095)), (3, None)):
        assert settings_of_general_images(DataConfig(channels=channels, range=(0, 4095))).range == expected


@pytest.mark.parametrize(
    "path, said",
    [
        ("./nowhere", r"probe\.path is \./nowhere, which does not exist"),
        ("own", r"probe\.path is own; it must be images with one label each, in train too; probe\.label_column may"),
        ("empty", r"probe\.path is .*empty, which holds no images"),
        ("list.txt", r"probe\.path is .*list\.txt; a single file must be"),
    ],
)
def test_a_set_that_cannot_serve_is_refused_by_its_own_setting(own, tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text("")
    with refused(rf"^{said}"):
        load(path)


# --- runs ---


def test_own_images_that_are_the_general_ones_too_have_the_same_figures(pretrain, tmp_path, finished_run):
    path = tmp_path / "same"
    write_classes(path / "train", 20)
    write_classes(path / "test", 12, first=50)
    run = pretrain(*PROBED, *ADAM, f"--data.path={path}", f"--probe.path={path}", f"--model.init_from={finished_run}")
    probed = [line for line in read_history(run) if "knn/depth_01" in line]
    assert len(probed) > 1
    for line in probed:
        for depth in ("depth_01", "depth_02"):
            assert line[f"general/knn/{depth}"] == line[f"knn/{depth}"]
            assert (line[f"drift/weights/{depth}"] == 0) == (line["step"] == 0)
    assert set(read_metrics(run, "general/knn/floor_pixels")) == {0}
    start, begun = load_file(run / START_FILE), load_file(finished_run / "encoder" / "model.safetensors")
    assert all(torch.equal(start[f"drift/weights/{name}"], weight) for name, weight in begun.items())


@pytest.mark.faults
def test_a_killed_run_measures_the_same_drift_although_its_start_is_long_ago(
    pretrain, stopped_at, settings, general, tmp_path
):
    whole = pretrain(*settings, dir=tmp_path / "whole")
    stopped_at(3, *settings)
    killed = pretrain(*settings)
    assert (killed / START_FILE).read_bytes() == (whole / START_FILE).read_bytes()
    lines = without_times(killed)
    assert lines == without_times(whole)
    assert {"general/knn/depth_02", "drift/weights/all", "agreement/depth_02"} <= lines[-1].keys()
    assert "knn/depth_02" not in lines[-1]
    shutil.rmtree(general)
    config = parse_saved(Config, whole / "config.yaml")
    assert reopen(whole, config.data, 4, Accelerator(cpu=True)).probe is None  # pictures need none


def test_a_run_goes_on_with_its_general_images_or_with_none(pretrain, stopped_at, own, general):
    settings = (*PROBED, *CUT, f"--data.path={own}")
    stopped_at(2, *settings, f"--probe.path={general}")
    write_classes(general, 1, first=30)
    with refused(r"other images or weights: probe\.path: .*, held out: images was 15, is 16;"):
        pretrain(*settings, f"--probe.path={general}")
    run = pretrain(*settings)
    assert set(read_metrics(run, "general/knn/depth_01")) == {0, 2}
    assert read_json(run / "data.json")["probe.path"]["images"] == 15


def test_a_run_among_general_images_is_refused(pretrain, general):
    with refused(r"^run\.dir is .*, inside the images of .*general: its pictures would join"):
        pretrain("--probe.every=4", f"--probe.path={general}", dir=general / "run")


@pytest.mark.faults
def test_a_branch_measures_from_the_start_of_its_trunk(pretrain, general, tmp_path, finished_run):
    settings = (*PROBED, *ADAM, f"--probe.path={general}", f"--model.init_from={finished_run}")
    trunk = pretrain(*settings, "--optim.schedule=constant", "--run.keep_at=[2]", dir=tmp_path / "trunk")
    branch = pretrain(*settings, "--optim.schedule=wsd", f"--run.branch_from={trunk}@2", dir=tmp_path / "branch")
    assert (branch / START_FILE).read_bytes() == (trunk / START_FILE).read_bytes()
    moved = read_metrics(branch, "drift/weights/all")
    assert moved[2] == read_metrics(trunk, "drift/weights/all")[2] and moved[4] > 0


@pytest.mark.faults
def test_two_processes_measure_as_one_does(tmp_path, pretrain, settings):
    """In shards of the weights."""
    one = pretrain(*settings, dir=tmp_path / "one")
    finish(begin(tmp_path / "two", *settings, processes=2, sharded=True))
    for name in ("general/knn/depth_02", "drift/weights/depth_01"):
        assert read_metrics(tmp_path / "two", name) == pytest.approx(read_metrics(one, name), abs=1e-4)

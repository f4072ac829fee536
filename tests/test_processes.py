"""The README's commands, as processes: two of them at once, and one that is killed."""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
from conftest import HANGS, TINY_TUNING, close, launched, read_metrics, tiny_without, write_pictures
from safetensors.torch import load_file, save_file
from server import Command, at_update, begin, context, environments_of, fails, finish, free_port

import mpp.pretrain
from evaluation import features, supervised
from evaluation.frozen.features import load_features
from evaluation.supervised import Classification
from mpp.config import RunConfig
from mpp.runtime import start
from mpp.runtime.start import run_main
from mpp.training.checkpoint import newest_step

pytestmark = pytest.mark.faults


def same(one, other, *keys):
    """Both runs logged the same."""
    close(other, one, "accuracy", "heldout/loss", *keys, abs=1e-4)


def test_two_processes_are_one_run(tmp_path, pretrain):
    """Whole, a probe and a loader process each too; 61 held-out images, four at a time, leave an uneven last batch."""
    arguments = ("--run.steps=10", "--data.workers=1", "--probe.every=10", "--data.eval_images=61")
    pretrain(*arguments, "--data.batch_size=1", dir=tmp_path / "one")
    two = begin(tmp_path / "two", *arguments, "--data.batch_size=4", processes=2)
    assert "2 processes on cpu" in finish(two).said
    assert len(read_metrics(tmp_path / "one")) == 10
    same(tmp_path / "one", tmp_path / "two", "nearest", "most_frequent", "heldout/accuracy", "heldout/nearest")
    for depth in range(1, 3):  # each process has judged one of them
        ours, theirs = (read_metrics(tmp_path / name, f"knn/depth_{depth:02d}") for name in ("two", "one"))
        assert list(theirs) == [0, 10] and ours == pytest.approx(theirs, abs=0.02)  # of 61 one may be a tie


def own_images(folder):
    """Each process has a copy of the images, as nodes have that copied them to their own disks."""
    load = mpp.pretrain.load_image_datasets
    mpp.pretrain.load_image_datasets = lambda data: load(replace(data, path=f"{folder}/{os.environ['RANK']}/images"))


def test_nodes_that_see_other_images_are_refused(tmp_path):
    for rank, count in ((0, 20), (1, 19)):
        write_pictures(tmp_path / str(rank) / "images", count)
    nodes = [each | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"} for each in environments_of(2, sharded=False)]
    images = f"--data.path={tmp_path / '0' / 'images'}"
    two = begin(tmp_path / "run", images, environments=nodes, prepare=partial(own_images, tmp_path))
    fails(two)
    assert two.said.count("images or weights: train: images was 19, is 18;") == 2, two.said


def drift(step):
    """On the second of two processes, a weight changes its last bit before this step, as by a fault of its memory."""

    def act(update):
        if update.layout.rank == 1:
            weight = next(update.model.parameters()).detach().view(-1)[:1]
            weight.copy_(torch.nextafter(weight, torch.full((1,), torch.inf)))

    at_update(step, act)


def test_processes_whose_weights_drift_apart_save_nothing(tmp_path):
    start = partial(begin, tmp_path / "run", "--run.steps=6", processes=2)
    run = start(prepare=partial(drift, 3))
    fails(run)
    assert run.said.count("the weights of the processes differ after step 4") == 2
    assert newest_step(tmp_path / "run") == 2
    finish(start())


def test_three_processes_share_the_default_batch(tmp_path, pretrain):
    """The front page's first command on a machine of three GPUs: 64 images are 21, 21 and 22."""
    arguments = tiny_without("--optim.global_batch_size")
    finish(Command("pretrain", *arguments, f"--run.dir={tmp_path / 'three'}", processes=3))
    same(pretrain(without="--optim.global_batch_size"), tmp_path / "three", "optim/grad_norm")


def test_supervised_training_is_one_run_on_two_processes(tmp_path):
    mixed = ("--augment.mixup=0.8", "--augment.cutmix=1", "--augment.randaugment=9", "--data.batch_size=4")
    arguments = [*tiny_without("--probe"), *mixed]
    finish(Command("supervised", *arguments, f"--run.dir={tmp_path / 'two'}", processes=2))
    supervised.main([*arguments, f"--run.dir={tmp_path / 'one'}"])
    same(tmp_path / "one", tmp_path / "two", "heldout/accuracy")


@pytest.mark.parametrize("name, options", [("pretrain", ["--probe.every=1"]), ("supervised", [])])
def test_a_process_without_a_held_out_image_is_fine(tmp_path, name, options):
    arguments = [*options, "--run.steps=1", "--data.eval_images=1", f"--run.dir={tmp_path / 'run'}"]
    finish(Command(name, *tiny_without("--probe"), *arguments, processes=2))
    assert read_metrics(tmp_path / "run", "heldout/loss")[1] > 0


def note_means(folder):
    """In each process: write the running means of the model that is evaluated into a file."""
    evaluate = Classification.evaluate

    def noted(self, model, *rest):
        means = [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]
        save_file({"means": torch.cat(means)}, folder / f"{self.accelerator.process_index}.safetensors")
        return evaluate(self, model, *rest)

    Classification.evaluate = noted


def test_processes_judge_the_batch_norm_that_is_exported(tmp_path):
    """Each process has running means of its own images; those of the main process are exported."""
    options = ["--model.name=test_resnet", "--model.img_size=64", "--run.steps=2", f"--run.dir={tmp_path / 'run'}"]
    words = (*TINY_TUNING, *options)
    finish(Command("supervised", *words, processes=2, prepare=partial(note_means, tmp_path)))
    means = [load_file(tmp_path / f"{rank}.safetensors")["means"] for rank in range(2)]
    assert torch.equal(*means) and means[0].abs().sum() > 0


def test_the_config_of_two_machines_on_one_host(pretrain, tmp_path):
    """As on two nodes, with a process each in place of eight."""
    config = ("--config_file", "configs/accelerate/gpu_2x8.yaml", "--num_processes", "2")
    config += ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()))
    environments = launched(tmp_path / "launched", *((*config, "--machine_rank", str(rank)) for rank in range(2)))
    assert [each["LOCAL_RANK"] for each in environments] == ["0", "0"]
    assert "2 processes on cpu" in finish(begin(tmp_path / "two", "--run.steps=3", environments=environments)).said
    close(tmp_path / "two", pretrain("--run.steps=3"), abs=1e-4)


def test_two_processes_extract_the_same(tmp_path):
    arguments = ["--encoder=test_vit", "--random=true", "--img_size=32", "--precision=fp32"]
    arguments += ["--data.train_images=101", "--data.workers=0"]
    features.main([*arguments, f"--out={tmp_path / 'one.npz'}"])
    finish(Command("features", *arguments, f"--out={tmp_path / 'two.npz'}", processes=2))
    one, other = (load_features(tmp_path / f"{name}.npz") for name in ("one", "two"))
    for expected, found in zip(one, other, strict=True):
        if isinstance(expected, np.ndarray):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        else:  # names of classes and images, and the kind of label
            assert found == expected


def join_alone(port, said):
    """The first of two processes, of which the other ended before it joined."""
    sys.stderr = said.open("w")
    start.TRAINING_TIMEOUT = timedelta(seconds=2)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_main(lambda: start.start(RunConfig()))


def test_a_process_whose_peers_do_not_join_gives_up(tmp_path):
    process = context.Process(target=join_alone, args=(free_port(), tmp_path / "said"))
    process.start()
    process.join(HANGS)
    process.kill()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 2 and "another process does not answer" in said.splitlines()[-1], said

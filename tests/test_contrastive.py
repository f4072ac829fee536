"""Contrastive pre-training: two views, the loss against its definition, one run on any number of processes."""

from types import SimpleNamespace

import pytest
import torch
from conftest import (
    TINY,
    close,
    exported,
    killed_at,
    newton_schulz,
    read_metrics,
    refused,
    tiny_without,
    title_and_tags,
    write_pictures,
)
from model_inputs import random_images
from server import Command, fails, finish
from torchvision.transforms import v2

from evaluation import contrastive
from evaluation.config import ViewsConfig
from evaluation.contrastive import TwoViews, nt_xent
from mpp.config import DataConfig
from mpp.config.parsing import parse
from mpp.data.crops import random_crop
from mpp.data.sources import load_image_datasets
from mpp.runtime.randomness import Stream, permutation, random_words
from mpp.training.flops import executed_flops


def by_definition(views, temperature):
    """NT-Xent of (B, 2, E), pair by pair: losses and whether the positive is the nearest, (2 B,)."""
    flat = views.flatten(0, 1)
    losses, right = [], []
    for i, anchor in enumerate(flat):
        positive = i + 1 if i % 2 == 0 else i - 1
        others = [k for k in range(len(flat)) if k != i]
        shares = (flat[others] @ anchor / temperature).softmax(0)
        losses.append(-shares[others.index(positive)].log())
        right.append(others[shares.argmax()] == positive)
    return torch.stack(losses), torch.tensor(right)


def unit_vectors(images=6):
    torch.manual_seed(0)
    drawn = torch.randn(images, 2, 5, dtype=torch.double)
    drawn[:, 1] += drawn[:, 0]  # so that some views are nearest to their other one, and some are not
    return torch.nn.functional.normalize(drawn, dim=-1)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_nt_xent_and_its_gradient_are_their_definition(temperature):
    views = unit_vectors().requires_grad_()
    losses, right = nt_xent(views, views, 0, temperature)
    expected, nearest = by_definition(views, temperature)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    assert torch.equal(right, nearest) and 0 < nearest.sum() < len(nearest)
    torch.testing.assert_close(*(torch.autograd.grad(each.mean(), views)[0] for each in (losses, expected)))
    parts = [nt_xent(views[some], views, some.start, temperature)[0] for some in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(torch.cat(parts), losses)


def test_a_view_is_torchvisions_and_a_function_of_seed_epoch_index_and_view():
    data = DataConfig(crop_area=(0.08, 1.0))
    views = TwoViews(load_image_datasets(data)[0], data, 40, 5, distorted=ViewsConfig())
    transforms = v2.Compose(
        [
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(5, (0.1, 2.0))], 0.5),
        ]
    )
    different = set()
    for epoch, index in ((0, 3), (1, 3), (0, 4)):
        for number, view in enumerate(views[epoch, index].images):
            place = 2 * index + number
            crop = random_crop(views.dataset.decode(index, views.data), 40, views.data, 5, epoch, place)
            (word,) = random_words(Stream.AUGMENT, 5, epoch, place, 1)
            torch.manual_seed(int(word) >> 1)
            assert torch.equal(view, transforms(crop))
            different.add(view.numpy().tobytes())
    assert len(different) == 6


def run(folder, *arguments):
    contrastive.main([*TINY, *arguments, f"--run.dir={folder}"])
    return folder


def expected_flops_per_image():
    """Operations of the tiny ViT and its head on both views of an image, forward and backward."""
    tokens, patches, width, outputs = 17, 16, 16, 128
    block = tokens * width * 3 * width + 2 * tokens**2 * width + tokens * width**2 + 8 * tokens * width**2
    trained = 2 * block + width * width + width * outputs
    embedding = patches * 192 * width
    similarities = 2 * (2 * 8) * outputs
    return 2 * (2 * (3 * trained + 2 * embedding) + 3 * similarities)  # pixels get no gradient


@pytest.mark.faults
def test_a_run_looks_like_pre_trainings(tmp_path):
    folder = run(tmp_path / "run", "--run.eval_every=2", "--probe.every=2")
    names = exported(folder)
    assert names and not any("head" in name for name in names)  # the projection stays behind
    for key in ("heldout/loss", "heldout/accuracy", "features/rank/depth_01", "knn/depth_02"):
        assert list(read_metrics(folder, key))[-2:] == [2, 4]
    assert "self-supervised" in title_and_tags(folder / "encoder")[1]
    flops_per_step = 1e15 * read_metrics(folder, "compute/pflop")[4] / 4
    assert (flops_per_step - newton_schulz(16, 2)) / 8 == expected_flops_per_image()


def test_a_run_goes_on_with_as_many_negatives(tmp_path):
    with killed_at(1):
        run(tmp_path, "--data.batch_size=4")
    with refused("forward pass: images was 4, is 8; "):
        run(tmp_path, "--data.batch_size=8")


@pytest.mark.faults
def test_two_processes_are_one_run_gradients_included(tmp_path):
    """Both see four images a forward pass, two passes a step. Plain descent: the gradient is in the weights."""
    optimizer = ("--optim.name=sgd", "--optim.momentum=0", "--optim.clip=null", "--optim.lr=0.1")
    arguments = [*TINY, *optimizer, "--run.steps=3", "--data.eval_images=7"]
    folder = tmp_path / "two"
    finish(Command("contrastive", *arguments, "--data.batch_size=2", f"--run.dir={folder}", processes=2))
    one = run(tmp_path / "one", *arguments, "--data.batch_size=4")
    close(folder, one, "accuracy", "optim/grad_norm", "heldout/loss", "heldout/accuracy", rel=1e-4)
    torch.testing.assert_close(exported(folder), exported(one), rtol=1e-3, atol=1e-4)


@pytest.mark.faults
def test_batch_norms_of_several_processes_on_cpus_are_refused(tmp_path):
    model = ["--model.name=test_resnet", "--model.img_size=64", "--optim.name=adam", "--run.steps=1"]
    words = [*tiny_without("--model"), *model, f"--run.dir={tmp_path / 'run'}"]
    two = Command("contrastive", *words, processes=2)
    fails(two)
    assert two.said.count("model.name is test_resnet; it must be a model without batch norms on several") == 2
    assert not (tmp_path / "run").exists()


def test_batch_norms_of_several_gpus_are_synchronised():
    """Names of weights, what the encoder gives, and the operations stay as they are."""
    config = parse(contrastive.ContrastiveConfig, ["--model.name=test_resnet", "--model.img_size=64"])
    models = []
    for processes in (1, 2):
        torch.manual_seed(0)
        gpus = SimpleNamespace(num_processes=processes, device=torch.device("cuda"))
        model, _ = contrastive.Contrastive.build_model(SimpleNamespace(config=config, accelerator=gpus))
        models.append(model.eval())
    plain, several = models
    norms = [part for part in several.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
    assert list(several.state_dict()) == list(plain.state_dict())
    images = random_images(2, side=64)
    torch.testing.assert_close(several(images), plain(images))
    assert executed_flops(several, images) == executed_flops(plain, images) > 0


@pytest.mark.parametrize("images_of_a_pass, groups", [(8, [7]), (3, [4, 3])])
def test_held_out_images_are_told_from_as_many_others_as_in_training(images_of_a_pass, groups):
    config = contrastive.ContrastiveConfig()
    projected = unit_vectors(7)
    task = SimpleNamespace(data=config.data, config=config, images_of_a_pass=images_of_a_pass)
    scalars = contrastive.Contrastive.measure_held_out(task, projected)
    shuffled = projected[permutation(Stream.CUT, 0, 2, 7)]
    losses, right = zip(*(by_definition(group, 0.1) for group in shuffled.split(groups)), strict=True)
    assert scalars == {
        "heldout/loss": pytest.approx(torch.cat(losses).mean().item()),
        "heldout/accuracy": pytest.approx(torch.cat(right).double().mean().item()),
        "heldout/chance": pytest.approx(sum(count / (2 * count - 1) for count in groups) / 7),
    }


def test_images_without_labels_have_a_rank_and_no_neighbours(tmp_path):
    images = f"--data.path={write_pictures(tmp_path / 'images', 12)}"
    folder = run(tmp_path / "run", images, "--data.eval_fraction=0.3", "--probe.every=4")
    ranks = read_metrics(folder, "features/rank/depth_02")
    assert list(ranks) == [0, 4]
    assert 1 <= ranks[4] <= 4  # at most the number of images
    assert not read_metrics(folder, "knn/depth_01")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--data.streaming=true", r"data\.streaming is true; it must be false or left out"),
        ("--data.batch_size=1", r"in a forward pass is 1; it must be from 2 to \d+, all training images"),
    ],
)
def test_bad_settings_are_named(tmp_path, wrong, message):
    with refused(message):
        run(tmp_path / "run", wrong)
    assert not (tmp_path / "run").exists()


def test_the_defaults_and_the_overlay_are_the_papers():
    config = parse(contrastive.ContrastiveConfig, ["--config=cifar10", "--config=rivals/simclr_cifar10"])
    assert (config.views.jitter, config.views.blur, config.contrast.temperature) == (0.5, 0.0, 0.5)
    assert config.data.crop_area == (0.08, 1.0) and config.model.width == 96
    assert parse(contrastive.ContrastiveConfig, ["--config=rivals/simclr"]) == contrastive.ContrastiveConfig()

"""Features as targets: what teachers see and give, what the student must not see, and what a run keeps of them."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import ADAM, ONLY_MASKED, TINY, close, exported, read_json, read_metrics, refused
from model_inputs import HALVES, MASKED, draw_batch, random_images, scaled, small_vit
from safetensors.torch import load_file, save_file
from server import begin, finish

from evaluation.frozen.known_labels import lineage
from mpp.config import Config, CorruptionConfig, ModelConfig, ObjectiveConfig
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.features.metrics import add_sums, feature_spread, measure_features, summarize
from mpp.models.descriptions import learned_labels
from mpp.models.encoder import Normalize
from mpp.models.networks import build_model
from mpp.models.teachers import FeatureTeacher, moving_average_decay
from mpp.objectives import build_objective
from mpp.training.flops import executed_flops

FEATURES = ("--objective.name=features",)
SMALL = ModelConfig(width=16, depth=4, heads=2, img_size=32)
EVERYWHERE = torch.arange(16).expand(3, -1)  # positions of all patches, of three images


def features(**settings):
    return ObjectiveConfig(name="features", **settings)


MEAN = features()


def objective_of(width, **settings):
    """The objective of features of that width, for patches of 8 x 8."""
    return build_objective(features(**settings), 8, 3, width)


def standardised(values, dim):
    """Less the mean over a dimension, and divided by the deviation, as torch's norms do it."""
    deviation = (values.var(dim, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return (values - values.mean(dim, True)) / deviation


def last_weights(run):
    """All weights at the end of a run, as its checkpoint has them."""
    return load_file(run / "checkpoints" / "step_00000004" / "model.safetensors")


def model_of(model=SMALL, objective=MEAN, **corruption):
    """A network with a teacher, its objective, images and their corruption."""
    torch.manual_seed(0)
    corruption = CorruptionConfig(**MASKED | corruption)
    network, objective = build_model(Config(model=model, objective=objective, corruption=corruption))
    torch.manual_seed(0)
    return network, objective, random_images(), draw_batch(corruption)


def block_outputs(encoder, images):
    """The residual stream after each block, without the prefix tokens."""
    seen = []
    hooks = [block.register_forward_hook(lambda _, __, out: seen.append(out[:, 1:])) for block in encoder.blocks]
    with torch.no_grad():
        encoder.eval().forward_features(scaled(images))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("norm", ["layer", "instance", "none"])
def test_targets_are_those_of_data2vec(norm):
    """The norm of each of the last K blocks, their mean, layer norm; at the corrupted patches, of the whole image."""
    model, _, images, corruption = model_of(objective=features(teacher_depths=3, teacher_norm=norm))
    outputs = block_outputs(model.encoder, images)[1:]
    if norm == "none":
        expected = sum(outputs) / 3
    else:
        expected = standardised(sum(standardised(each, -1 if norm == "layer" else 1) for each in outputs) / 3, -1)
    _, targets, _ = model(images, corruption)
    for of_image, positions, whole in zip(targets, corruption.positions, expected, strict=True):
        torch.testing.assert_close(of_image, whole[positions])


@pytest.mark.parametrize("options", [{"reg_tokens": 3}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_of_one_depth_it_is_the_output_after_the_last_norm(options):
    """timm has it in fc_norm where an encoder pools first. Prefix tokens are left out."""
    teacher = frozen(32, 8, **options)
    encoder = teacher.encoder
    last = encoder.norm if "reg_tokens" in options else encoder.fc_norm
    images = random_images()
    with torch.no_grad():
        last.weight.mul_(3)
        expected = encoder.fc_norm(encoder.forward_features(scaled(images)))[:, encoder.num_prefix_tokens :]
    torch.testing.assert_close(teacher(images, EVERYWHERE)[0], expected)


def test_the_student_sees_nothing_of_what_is_hidden_and_the_teacher_gets_no_gradient():
    """The teacher sees it, but for gradients."""
    model, objective, images, corruption = model_of(pattern="multiblock", context=0.5)
    unseen = torch.cat([corruption.positions, corruption.hidden], 1)
    assert corruption.hidden.shape == (3, 4)
    assert model.teacher.depths == 2  # half of the blocks
    pixels = images.float().requires_grad_()
    predictions, targets, _ = model.eval()(pixels, corruption)
    objective.loss(predictions, targets).backward()
    assert all(parameter.grad is None for parameter in model.teacher.parameters())
    gradients = F.max_pool2d(pixels.grad.abs().amax(1), 8).flatten(1)
    assert torch.equal(gradients > 0, torch.ones(3, 16, dtype=torch.bool).scatter_(1, unseen, False))
    for row, column in (divmod(place, 4) for place in corruption.hidden[0].tolist()):
        images[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 0
    changed = model(images, corruption).targets
    assert not torch.isclose(targets[0], changed[0]).all(-1).any()


def test_targets_do_not_depend_on_the_mask_dropout_or_drop_path():
    model, _, images, _ = model_of(replace(SMALL, dropout=0.5, drop_path=0.5))
    model.train()
    assert model.student.training
    whole, shown = model.teacher(images, EVERYWHERE)
    assert torch.equal(model.teacher(images, EVERYWHERE)[0], whole)
    assert shown is whole


def test_losses_by_hand():
    def loss(name, error, **options):
        tested = objective_of(4, loss=name, **options)
        return float(tested.loss(torch.full((1, 2, 4), float(error)), torch.zeros(1, 2, 4)))

    assert loss("smooth_l1", 1) == loss(None, 1) == 0.25
    assert [loss(name, 3) for name in ("smooth_l1", "l1", "l2")] == [2, 3, 9]
    assert loss("smooth_l1", 3, beta=1.0) == 2.5
    predictions, targets = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]], [[[5.0, 0.0], [-3.0, 0.0]]]])
    assert objective_of(2, loss="cosine").loss(predictions, targets).item() == pytest.approx(0.5)  # the mean of 0 and 1


def test_half_lives_are_shares_of_the_run():
    assert moving_average_decay((0.01, 0.05), 0, 1000) ** 10 == pytest.approx(0.5)
    assert moving_average_decay((0.01, 0.05), 999, 1000) ** 50 == pytest.approx(0.5)
    assert moving_average_decay((0.02, 0.02), 77, 1000) == pytest.approx(2 ** (-1 / 20))
    assert moving_average_decay((0.5, 0.5), 0, 1) == 0.25  # of one step
    assert moving_average_decay((1, 3), 5, 11) == pytest.approx(2 ** (-1 / 2))  # from 1 on, steps


def frozen(img_size, patch_size, **options):
    """A teacher of fixed random weights, for a student with 4 x 4 patches."""
    encoder = small_vit(img_size=img_size, patch_size=patch_size, **options)
    config = features(teacher="x", teacher_norm="none")
    return FeatureTeacher(encoder, Normalize(*HALVES), (4, 4), config, (img_size, img_size))


def test_another_grid_is_resampled_and_the_crop_resized():
    """A grid twice as fine, of a larger input."""
    images = random_images()
    large = F.interpolate(images.float(), (64, 64), mode="bilinear", antialias=True)
    fine = frozen(64, 8)
    with torch.no_grad():
        maps = fine.encoder.forward_features(scaled(large))[:, 1:].mT.unflatten(-1, (8, 8))
    targets = fine(images, EVERYWHERE)[0].mT.unflatten(-1, (4, 4))
    weights = torch.tensor([1, 3, 3, 1]) / 8  # bilinear, half as many
    inner = torch.einsum("bdhw,h,w->bd", maps[..., 1:5, 3:7], weights, weights)
    torch.testing.assert_close(targets[..., 1, 2], inner)


def test_a_network_of_convolutions_can_teach():
    encoder = timm.create_model("resnet18", num_classes=0)
    teacher = FeatureTeacher(encoder, Normalize(*HALVES), (4, 4), features(teacher="resnet18"), (28, 28))
    assert teacher(random_images(), EVERYWHERE)[0].shape == (3, 16, teacher.width) == (3, 16, 512)


def test_overlapping_patches_are_taught_by_whole_ones():
    model, _, images, _ = model_of(replace(SMALL, stride=4), features(teacher_depths=1, teacher_norm="none"))
    with torch.no_grad():
        tokens = model.encoder.eval().forward_features(scaled(images))[:, 1:].unflatten(1, (7, 7))
    torch.testing.assert_close(model.teacher(images, EVERYWHERE)[0], tokens[:, ::2, ::2].flatten(1, 2))


def test_spread_is_that_of_all_patches_together():
    """Against torch over everything at once; constant features have none."""
    rows = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double) * 2 + 1
    places = torch.arange(5).expand(6, -1)
    sums = add_sums(*(measure_features(part, 0 * part + 1, places[: len(part)], 7) for part in (rows[:2], rows[2:])))
    flat = rows.flatten(0, 1)
    variance = flat.var(0, unbiased=False).mean()
    values = torch.linalg.svdvals(flat - flat.mean(0))
    entropy = torch.special.entr(values / values.sum()).sum()
    expected = {"deviation": variance.sqrt(), "share": variance / flat.square().mean(), "rank": entropy.exp()}
    spread = feature_spread(sums, "prediction")
    assert spread == pytest.approx({f"prediction_{name}": float(value) for name, value in expected.items()})
    assert set(feature_spread(sums, "target").values()) == {0}


def test_the_teachers_forward_pass_is_in_the_compute():
    model, _, images, corruption = model_of()
    alone = executed_flops(model.encoder, images.float(), backward=False)
    assert executed_flops(model, images, corruption) == executed_flops(model.student, images, corruption) + alone


EMA = (*FEATURES, *ONLY_MASKED, "--corruption.pattern=blockwise")


@pytest.mark.faults
def test_a_run_keeps_its_average_and_exports_either(tmp_path, pretrain):
    """The average is in the checkpoint."""
    whole = pretrain(*EMA, dir=tmp_path / "whole")
    one = last_weights(whole)
    decays = {step + 1: moving_average_decay((0.01, 0.05), step, 4) for step in range(4)}
    assert read_metrics(whole, "teacher/decay") == pytest.approx(decays)
    taught = pretrain(*EMA, "--objective.export=teacher", dir=tmp_path / "taught")
    weights = exported(taught)
    assert all(torch.equal(weights[name], one[f"teacher.encoder.{name}"]) for name in weights)
    assert not torch.equal(weights["norm.weight"], one["student.encoder.norm.weight"])
    for folder, encoder in ((taught, "teacher"), (whole, "student")):
        assert f"This encoder is the {encoder}" in (folder / "encoder" / "README.md").read_text()


@pytest.mark.faults
def test_a_frozen_teacher_is_no_part_of_a_checkpoint_but_another_one_is_refused(
    tmp_path, pretrain, finished_run, capsys
):
    teacher = tmp_path / "teacher"
    words = (*FEATURES, f"--objective.teacher={teacher}", "--objective.loss=cosine")
    shutil.copytree(finished_run / "encoder", teacher)
    about = teacher / "config.json"
    about.write_text(json.dumps(read_json(about) | {"data": {"range": [0, 9]}}))
    folder = pretrain(*words)
    assert "learned from images of data {'range': [0, 9]}; here they are" in capsys.readouterr().out
    assert {name.split(".")[0] for name in last_weights(folder)} == {"student"}
    assert str(teacher) in list(lineage(str(folder)))
    shutil.rmtree(folder / "encoder")
    pretrain(*words)  # goes on
    weights = load_file(teacher / "model.safetensors")
    save_file(weights | {"norm.bias": weights["norm.bias"] + 1}, teacher / "model.safetensors")
    shutil.rmtree(folder / "encoder")
    with refused(r"started with other images or weights: objective.teacher: weights changed"):
        pretrain(*words)


@pytest.mark.parametrize(
    "settings, said",
    [
        ("teacher_img_size=64", "objective.teacher_img_size is 64; it must be null with .*teacher=ema"),
        ("export=teacher --optim.average=0.9", "optim.average is 0.9; it must be null with objective.exp"),
        ("teacher=RUN --data.channels=1", "objective.teacher's input channels is 3; it must be 1"),
        ("teacher=RUN --objective.teacher_depths=9", "objective.teacher_depths is 9; it must be"),
        ("teacher=RUN --objective.teacher_img_size=36", "teacher_img_size is .* it must be a multiple of the patch"),
        ("teacher=resnet18 --objective.teacher_depths=2", "teacher_depths is 2; it must be"),  # stages differ in width
        (
            "teacher=resnet18 --objective.teacher_checkpoint=VIT",
            "teacher_checkpoint is .*must be the weights .*Missing",
        ),
    ],
)
def test_what_cannot_teach_is_named(finished_run, tmp_path, monkeypatch, settings, said):
    """timm would leave what a file of weights lacks as it is: random."""
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *_, **__: None)  # the hub's weights
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), tmp_path / "vit.safetensors")
    settings = settings.replace("RUN", str(finished_run)).replace("VIT", str(tmp_path / "vit.safetensors"))
    with pytest.raises((UserError, SystemExit), match=said):
        build_model(parse(Config, [*TINY, *FEATURES, *f"--objective.{settings}".split()]))


def test_the_share_of_targets_that_places_explain():
    """1 less the mean square within places over that around the mean: the adjusted R squared."""
    targets = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    places = torch.tensor([[0, 1], [0, 1], [0, 4], [1, 0]])  # one target is at 4, none at 2 and 3
    rows, groups = targets.flatten(0, 1), places.flatten()
    within = sum((rows[groups == each].var(0, unbiased=False) * (groups == each).sum()).sum() for each in (0, 1, 4))
    expected = 1 - within / (8 - 3) / rows.var(0).sum()
    for scale in (1, 1e-3):
        spread = summarize(measure_features(targets, targets * scale, places, 5))
        assert spread["target_place"] == pytest.approx(float(expected))
    for known in (targets[:1], 0 * targets):  # each at a place of its own; all alike
        found = summarize(measure_features(known, known, places[: len(known)], 5))
        assert "target_place" not in found
    assert found["target_share"] == 0


def test_no_norm_hides_a_collapse():
    """Features that differ by a thousandth of themselves between patches, which the norm over an image enlarges."""
    model, _, images, corruption = model_of(objective=features(teacher_depths=2, teacher_norm="instance"))
    constant = 10 * torch.randn(16, 1, 1, generator=torch.Generator().manual_seed(0))
    maps = model.teacher.encoder.forward_intermediates
    model.teacher.encoder.forward_intermediates = lambda *given, **options: [
        constant + 1e-3 * each for each in maps(*given, **options)
    ]
    _, targets, shown = model(images, corruption)
    sums = measure_features(targets, shown, corruption.positions, 16)
    assert feature_spread(sums, "target")["target_share"] < 1e-4
    assert targets.std() > 0.5


def test_the_card_names_the_weights_of_a_teacher_and_takes_no_labels_from_its_name(tmp_path, pretrain):
    """timm's own weights of that name learned labels."""
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0, img_size=32).state_dict(), file)
    words = (*FEATURES, "--objective.teacher=test_vit", "--objective.teacher_img_size=32")
    folder = pretrain(*words, f"--objective.teacher_checkpoint={file}", "--run.steps=1")
    card = (folder / "encoder" / "README.md").read_text()
    assert "the features of test_vit, a frozen encoder." in card and file.name in card
    assert learned_labels("test_vit") and not learned_labels(str(folder))
    assert list(lineage(str(folder))) == [str(folder), str(file)]


@pytest.mark.faults
def test_accumulated_checkpointed_and_shared_out_it_is_the_same_run(tmp_path, pretrain):
    """Two processes with copies or shares, two passes a step, recomputed activations: the losses of one process."""
    words = (*EMA, *ADAM, "--run.eval_every=4")  # Muon's bf16 rounds what is added in another order
    one = pretrain(*words, dir=tmp_path / "one")
    more = {"copies": "--data.batch_size=2", "shares": "--model.activation_checkpointing=true"}
    for name, option in more.items():
        other = tmp_path / name
        finish(begin(other, *words, option, processes=2, sharded=name == "shares"))
        keys = ("optim/grad_norm", "teacher/decay", "target_rank", "compute/pflop", "heldout/loss")
        close(other, one, *keys, rel=1e-4)

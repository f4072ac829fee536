"""Published linear probes: each step is held to a closed form, or to timm's own."""

import math
from dataclasses import replace

import model_inputs
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import FAST
from torch.nn.functional import batch_norm
from torch.testing import assert_close

from evaluation import features, linear
from evaluation.config import LinearConfig
from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.features import load_features, load_labelled
from evaluation.frozen.run_images import parse_and_load
from evaluation.linear import PROTOCOLS, Dinov2, Mae
from evaluation.metrics.scoring import load_outcomes
from mpp.config import DataConfig
from mpp.errors import Unavailable

IMAGENET = 1_281_167


def small_vit(**changes):
    return FrozenEncoder(model_inputs.small_vit(**{"depth": 5} | changes))


def preset(name, encoder=None, classes=3):
    """A protocol on the birds."""
    accelerator = Accelerator(cpu=True)
    encoder = encoder or small_vit()
    splits = load_labelled(DataConfig(), accelerator)
    probe = PROTOCOLS[name](encoder, LinearConfig.of(protocol=name), accelerator, splits)
    probe.classes = classes
    return probe


def test_lars_moves_weights_by_a_share_of_their_length_and_biases_as_sgd_does():
    """MAE's util/lars.py, written out: q = 0.001 |w| / |g|; v = 0.9 v + q g; w -= rate v."""
    mae = preset("mae")
    mae.batch_size = 16_384
    ((_, classify),), optimizer = mae.build([(0, 0.1)], [6])
    weight, bias = (each.detach().clone() for each in classify.parameters())
    velocity = bias_velocity = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradient, bias_gradient = (torch.randn(shape, generator=generator) for shape in ((3, 6), (3,)))
        classify.weight.grad, classify.bias.grad = gradient.clone(), bias_gradient.clone()
        optimizer.step()
        velocity = 0.9 * velocity + 0.001 * weight.norm() / gradient.norm() * gradient
        bias_velocity = 0.9 * bias_velocity + bias_gradient
        weight = weight - 6.4 * velocity
        bias = bias - 6.4 * bias_velocity
    assert_close(classify.weight.detach(), weight, rtol=1e-5, atol=1e-6)
    assert_close(classify.bias.detach(), bias)


def first_heads(name, width, classes=100):
    heads, _ = preset(name, classes=classes).build([(0, 0.1)], [width])
    return heads


def test_heads_begin_near_zero_and_maes_norms_each_feature_without_parameters():
    ((norm, classify),), ((no_norm, plain),) = first_heads("mae", 400), first_heads("dinov2", 400)
    inputs = torch.randn(32, 400) * 3 + 5
    assert_close(norm(inputs), batch_norm(inputs, None, None, training=True, eps=1e-6))
    assert_close(norm.running_mean, 0.1 * inputs.mean(0))  # of the first step
    assert not list(norm.parameters()) and torch.equal(no_norm(inputs), inputs)
    for layer in (classify, plain):
        assert layer.weight.std().item() == pytest.approx(0.01, rel=0.02) and not layer.bias.any()


def test_rates_rise_and_fall_as_published():
    mae, dinov2 = preset("mae"), preset("dinov2")
    mae.steps, dinov2.steps = 9000, 50
    for step, share in ((0, 0), (500, 0.5), (1000, 1), (5000, 0.5), (9000, 0)):
        assert mae.rate_share(step) == pytest.approx(share)
    assert mae.rate_share(3000) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    for step in range(50):
        assert dinov2.rate_share(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * step / 50)))


@pytest.mark.parametrize(
    "images, of_mae, of_dinov2",
    [
        (IMAGENET, (16_384, 7038), (1024, 12_500)),  # as published
        (50_000, (639, 7042), (128, 3903)),
        (60, (60, 1000), (60, 1250)),
    ],
)
def test_lengths_and_batches_are_scaled_to_the_data(images, of_mae, of_dinov2):
    for name, expected in (("mae", of_mae), ("dinov2", of_dinov2)):
        plan = preset(name).plan_of(images)
        assert (plan["batch"], plan["steps"]) == expected


@pytest.mark.parametrize("depth, blocks", [(5, 4), (2, 2)])
def test_dinov2_reads_normed_tokens_of_the_last_blocks_and_the_mean_of_the_last(depth, blocks):
    """timm's get_intermediate_layers, which the authors' code calls by the same name."""
    encoder = small_vit(depth=depth)
    protocol = preset("dinov2", encoder)
    images = model_inputs.random_images(2)
    pixels = encoder.normalize(images)
    layers = encoder.model.get_intermediate_layers(pixels, n=blocks, return_prefix_tokens=True, norm=True)
    classes = [prefix[:, 0] for _, prefix in layers]
    mean = layers[-1][0].mean(1)
    expected = [classes[-1:], [*classes[-1:], mean], classes, [*classes, mean]]
    assert_close([*protocol.encode(images)], [torch.cat(parts, 1) for parts in expected])
    assert [each["blocks"] for each in protocol.inputs] == [1, 1, blocks, blocks]
    assert len(protocol.candidates) == 4 * 13 and {rate for _, rate in protocol.candidates} == set(Dinov2.rates)


def test_encoders_without_a_class_token_have_no_dinov2_protocol():
    for encoder in (small_vit(class_token=False, global_pool="avg"), load_frozen_encoder("floor:pixels")):
        with pytest.raises(Unavailable):
            preset("dinov2", encoder)


@pytest.fixture
def short(monkeypatch):
    """Protocols of a few steps."""
    of_dinov2 = {"least_steps": 4, "least_batch": 64, "rates": (1e-9, 0.1)}
    for protocol, changes in ((Mae, {"least_steps": 3, "epochs": 1}), (Dinov2, of_dinov2)):
        for name, value in changes.items():
            monkeypatch.setattr(protocol, name, value)


@pytest.fixture
def report_of(trained, image_folder):
    """The report of the command on 9 images to learn from, and 3 to test on."""

    def run(*words):
        images = (f"--data.path={image_folder}", "--data.eval_fraction=0.25")
        return linear.run(parse_and_load(LinearConfig, [f"--encoder={trained}", *images, *FAST, *words])[0])

    return run


@pytest.fixture
def heads(monkeypatch):
    """All heads that are built."""
    built = []
    build = Mae.build

    def build_and_note(*arguments):
        made, optimizer = build(*arguments)
        built.extend(made)
        return made, optimizer

    monkeypatch.setattr(Mae, "build", build_and_note)
    return built


def test_one_step_of_mae_is_that_of_its_own_crops(report_of, heads, monkeypatch):
    """The head after a step, from the crops of the first step by the functions above; in several forward passes."""
    monkeypatch.setattr(Mae, "plan_of", lambda self, images: dict(images=9, batch=12, steps=1, epochs=4 / 3))
    monkeypatch.setattr(Mae, "rate_share", lambda self, step: 1.0)
    seen = []
    encode = Mae.encode
    monkeypatch.setattr(Mae, "encode", lambda *args: seen.append(encode(*args)[0]) or seen[-1:])
    report_of("--protocol=mae", "--depth=last", "--data.batch_size=5")
    assert [len(each) for each in seen[:3]] == [4, 4, 4]
    (head,) = heads
    inputs = torch.cat(seen[:3])
    assert_close(head[0].running_mean, 0.1 * inputs.mean(0))
    (fresh,) = first_heads("mae", inputs.shape[1], head[1].out_features)
    shift = (head[1].weight - fresh[1].weight).norm() / fresh[1].weight.norm()
    assert shift.item() == pytest.approx(0.1 * 12 / 256 * 0.001, rel=0.01)  # base rate x batch / 256, trust 0.001


@pytest.mark.parametrize("words", [("--protocol=mae", "--depth=dev"), ("--protocol=dinov2",)])
def test_the_choice_is_by_dev_images_alone(short, report_of, words, monkeypatch):
    """Whatever test labels say."""
    report = report_of(*words)
    load = linear.load_labelled

    def wrong(*args, **options):
        splits = load(*args, **options)
        return splits._replace(held_out=replace(splits.held_out, labels=1 - splits.held_out.labels))

    monkeypatch.setattr(linear, "load_labelled", wrong)
    of_wrong = report_of(*words)
    assert of_wrong["protocol"] == report["protocol"]
    result, other = report["results"][0], of_wrong["results"][0]
    assert other["accuracy"] != result["accuracy"]
    for key in ("depth", "blocks", "adds_mean", "base_lr", "dev_accuracy"):
        assert other.get(key) == result.get(key)


def test_mae_has_a_head_each_depth_that_is_tested_on_centre_crops(
    short, trained, report_of, heads, image_folder, tmp_path, capsys
):
    report = report_of("--protocol=mae", "--depth=all", "--seed=3")
    assert [result["depth"] for result in report["results"]] == [1, 2] == list(report["summary_by_depth"])
    assert report["protocol"]["chosen_depth"] == 2 and report["results"][0]["seed"] == 3
    assert "protocol mae: 3 steps of 9 random crops, 3 epochs" in capsys.readouterr().out
    (file,) = (trained / "evaluation").glob("linear_*.json")
    assert file.stem.endswith("_precision_fp32_depth_all_protocol_mae")
    images = (f"--data.path={image_folder}", "--data.eval_fraction=0.25")
    features.main([*images, f"--encoder={trained}", f"--out={tmp_path / 'f.npz'}", *FAST])
    of_test = load_features(tmp_path / "f.npz")
    predicted = heads[1](torch.from_numpy(of_test.test)).argmax(1).numpy()
    np.testing.assert_array_equal(load_outcomes(file, 1).predictions, predicted)
    assert report["results"][1]["accuracy"] == np.mean(predicted == of_test.test_labels)

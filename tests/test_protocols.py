"""Published protocols of linear probes: each step is held to a closed form, or to torchvision's and timm's own."""

import math
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from scipy.stats import ks_2samp
from torch import nn
from torchvision.transforms import RandomResizedCrop

from evaluation import features, linear
from evaluation.config import LinearConfig, ProbeDataConfig
from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.features import load_features
from evaluation.frozen.kept_heads import load_head, rebuild_linear
from evaluation.frozen.run_images import parse_and_load
from evaluation.metrics.scoring import load_outcomes
from evaluation.protocols import dinov2, mae, probe
from evaluation.protocols.dinov2 import Dinov2
from evaluation.protocols.mae import Mae
from evaluation.protocols.protocol import Plan
from evaluation.protocols.training import crop_settings
from mpp.data.crops import crop_box
from mpp.errors import Unavailable, UserError

FAST = ("--precision=fp32", "--data.workers=0", "--threads=1")
IMAGENET = 1_281_167


def small_vit(**changes) -> FrozenEncoder:
    torch.manual_seed(0)
    settings = dict(img_size=32, patch_size=8, embed_dim=16, depth=5, num_heads=2, num_classes=0)
    return FrozenEncoder(timm.create_model("vit_base_patch16_224", **settings | changes))


def parameters(*sizes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def test_lars_moves_weights_by_a_share_of_their_length_and_biases_as_sgd_does():
    """MAE's util/lars.py, written out: q = 0.001 |w| / |g|; v = 0.9 v + q g; w -= rate v."""
    classify = nn.Linear(6, 3)
    optimizer = Mae("mean", [1], False).build_optimizer([nn.Sequential(nn.Identity(), classify)], [6.4])
    weight, bias = classify.weight.detach().clone(), classify.bias.detach().clone()
    velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(bias)
    for step in range(3):
        gradient, bias_gradient = (each.detach() for each in parameters((3, 6), (3,)))
        classify.weight.grad, classify.bias.grad = gradient * (step + 1), bias_gradient * (step + 1)
        optimizer.step()
        direction = classify.weight.grad
        velocity = 0.9 * velocity + 0.001 * weight.norm() / direction.norm() * direction
        bias_velocity = 0.9 * bias_velocity + classify.bias.grad
        weight = weight - 6.4 * velocity
        bias = bias - 6.4 * bias_velocity
    torch.testing.assert_close(classify.weight.detach(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(classify.bias.detach(), bias)


def test_maes_head_norms_each_feature_without_parameters_and_begins_near_zero():
    head = Mae("mean", [1], False).build_head(400, 100, torch.Generator().manual_seed(0))
    norm, classify = head
    assert [name for name, _ in head.named_parameters()] == ["1.weight", "1.bias"]
    inputs = torch.randn(32, 400) * 3 + 5
    expected = (inputs - inputs.mean(0)) / (inputs.var(0, correction=0) + 1e-6).sqrt()
    torch.testing.assert_close(norm(inputs), expected)
    torch.testing.assert_close(norm.running_mean, 0.1 * inputs.mean(0))  # of the first step
    assert classify.weight.std().item() == pytest.approx(0.01, rel=0.02) and not classify.bias.any()


def test_the_rate_rises_for_ten_of_ninety_epochs_and_falls_by_half_a_cosine():
    protocol, plan = Mae("mean", [1], False), Plan(IMAGENET, 16_384, 9000)
    for step, share in ((0, 0), (500, 0.5), (1000, 1), (5000, 0.5), (9000, 0)):
        assert protocol.rate_share(step, plan) == pytest.approx(share)
    assert protocol.rate_share(3000, plan) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_dinov2s_rate_is_that_of_torchs_cosine():
    plan = Plan(1000, 128, 50)
    protocol = Dinov2(small_vit())
    optimizer = torch.optim.SGD(parameters((2,)), lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for step in range(50):
        assert protocol.rate_share(step, plan) == pytest.approx(schedule.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("images", "of_mae", "of_dinov2"),
    [
        (IMAGENET, (16_384, 7038), (1024, 12_500)),  # as published
        (2 * IMAGENET, (16_384, 14_075), (1024, 12_500)),
        (50_000, (639, 7042), (128, 3903)),
        (1000, (256, 1000), (128, 1250)),
        (60, (60, 1000), (60, 1250)),
    ],
)
def test_lengths_and_batches_are_scaled_to_the_data(images, of_mae, of_dinov2):
    assert Mae("mean", [1], False).plan(images)[1:] == of_mae
    assert Dinov2(small_vit()).plan(images)[1:] == of_dinov2


def test_crops_are_distributed_as_torchvisions():
    data = crop_settings(ProbeDataConfig(channels=3))
    assert data.flip and data.crop_area == (0.08, 1.0)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    image = torch.empty(3, 300, 200)
    ours, theirs = [], []
    for _ in range(2000):
        box = crop_box(300, 200, data, rng.random(40).tolist())
        ours.append((box.height * box.width, box.width / box.height, box.top, box.left))
        top, left, height, width = RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3))
        theirs.append((height * width, width / height, top, left))
    for mine, its in zip(np.array(ours).T, np.array(theirs).T, strict=True):
        assert ks_2samp(mine, its).pvalue > 0.01


def test_dinov2_reads_normed_tokens_of_the_last_blocks_and_the_mean_of_the_last():
    """timm's get_intermediate_layers, which the authors' code calls by the same name."""
    encoder = small_vit()
    protocol = Dinov2(encoder)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    layers = encoder.model.get_intermediate_layers(encoder.normalize(images), n=4, return_prefix_tokens=True, norm=True)
    classes = [prefix[:, 0] for _, prefix in layers]
    mean = layers[-1][0].mean(1)
    last, last_and_mean, four, four_and_mean = protocol.encode(encoder, images)
    torch.testing.assert_close(last, classes[-1])
    torch.testing.assert_close(last_and_mean, torch.cat([classes[-1], mean], 1))
    torch.testing.assert_close(four, torch.cat(classes, 1))
    torch.testing.assert_close(four_and_mean, torch.cat([*classes, mean], 1))
    assert len(protocol.candidates) == 4 * 13
    assert {candidate.base_rate for candidate in protocol.candidates} == set(dinov2.RATES)


def test_dinov2_of_other_encoders():
    shallow = small_vit(depth=2, class_token=False, global_pool="avg")
    protocol = Dinov2(shallow)
    assert [candidate.about["blocks"] for candidate in protocol.candidates[::13]] == [1, 2]
    assert not any(candidate.about["adds_mean"] for candidate in protocol.candidates)
    assert [each.shape for each in protocol.encode(shallow, torch.zeros(1, 3, 32, 32))] == [(1, 16), (1, 32)]
    with pytest.raises(Unavailable, match="encoder is floor:pixels; protocol dinov2 needs a ViT"):
        probe.open_protocol(
            LinearConfig.of(encoder="floor:pixels", protocol="dinov2"), load_frozen_encoder("floor:pixels")
        )


@pytest.fixture
def short(monkeypatch):
    """Protocols of a few steps."""
    monkeypatch.setattr(mae, "LEAST_STEPS", 3)
    monkeypatch.setattr(mae, "EPOCHS", 1)
    monkeypatch.setattr(mae, "WARMUP_EPOCHS", 0.1)
    for name, value in {"LEAST_STEPS": 4, "LEAST_BATCH": 64, "RATES": (1e-9, 0.1)}.items():
        monkeypatch.setattr(dinov2, name, value)


@pytest.fixture
def report_of(trained, image_folder):
    """The report of the command on 9 images to learn from, and 3 to test on."""

    def run(*words: str) -> dict:
        images = (f"--data.path={image_folder}", "--data.eval_fraction=0.25")
        return linear.run(parse_and_load(LinearConfig, [f"--encoder={trained}", *images, *FAST, *words])[0])

    return run


def test_one_step_of_mae_is_that_of_its_own_crops(report_of, monkeypatch):
    """The head after a step, from the crops of the first step by the functions above; in several forward passes."""
    monkeypatch.setattr(Mae, "plan", lambda self, images: Plan(images, 12, 1))
    monkeypatch.setattr(Mae, "rate_share", lambda self, step, plan: 1.0)
    seen = []
    encode = Mae.encode
    monkeypatch.setattr(Mae, "encode", lambda *args: seen.append(encode(*args)[0]) or seen[-1:])
    heads = []
    build = Mae.build_head
    monkeypatch.setattr(Mae, "build_head", lambda *args: heads.append(build(*args)) or heads[-1])
    report_of("--protocol=mae", "--data.batch_size=5")
    assert [len(each) for each in seen[:3]] == [4, 4, 4]
    (head,) = heads
    inputs = torch.cat(seen[:3])
    torch.testing.assert_close(head[0].running_mean, 0.1 * inputs.mean(0))
    fresh = build(None, inputs.shape[1], head[1].out_features, torch.Generator().manual_seed(0))
    shift = (head[1].weight - fresh[1].weight).norm() / fresh[1].weight.norm()
    assert shift.item() == pytest.approx(0.1 * 12 / 256 * 0.001, rel=0.01)  # base rate x batch / 256, trust 0.001


@pytest.mark.parametrize("words", [("--protocol=mae", "--depth=dev"), ("--protocol=dinov2",)])
def test_the_choice_is_by_dev_images_alone(short, report_of, words, monkeypatch):
    """The report's candidate is the best on the tenth of train, whatever test labels say."""
    report = report_of(*words)
    (result,) = report["results"]
    protocol = report["protocol"]
    dev = protocol.get("dev") or [
        {"depth": depth, "accuracy": value} for depth, value in protocol["dev_accuracy_by_depth"].items()
    ]
    best = max(dev, key=lambda each: each["accuracy"])
    assert result.items() >= (best | {"accuracy": result["accuracy"], "dev_accuracy": best["accuracy"]}).items()
    load = probe.load_labelled

    def wrong(*args, **options):
        splits = load(*args, **options)
        return splits._replace(held_out=replace(splits.held_out, labels=1 - splits.held_out.labels))

    monkeypatch.setattr(probe, "load_labelled", wrong)
    of_wrong = report_of(*words)
    assert of_wrong["protocol"] == protocol and of_wrong["results"][0]["accuracy"] != result["accuracy"]


def test_a_depth_each_and_a_report_of_its_own(short, trained, report_of, capsys):
    report = report_of("--protocol=mae", "--depth=all", "--seed=3")
    assert [result["depth"] for result in report["results"]] == [1, 2] == list(report["summary_by_depth"])
    assert report["protocol"]["chosen_depth"] == 2 and report["results"][0]["seed"] == 3
    assert "protocol mae, scaled to 9 training images: 3 steps of 9 random crops, 3 epochs" in capsys.readouterr().out
    (file,) = (trained / "evaluation").glob("linear_*.json")
    assert file.stem.endswith("_precision_fp32_depth_all_protocol_mae")


def test_maes_head_is_kept(short, trained, report_of, image_folder, tmp_path, monkeypatch):
    heads = []
    build = Mae.build_head
    monkeypatch.setattr(Mae, "build_head", lambda *args: heads.append(build(*args)) or heads[-1])
    report = report_of("--protocol=mae", "--save=true")
    (folder,) = (trained / "evaluation").glob("linear*_head")
    kept = load_head(folder)
    encoder = load_frozen_encoder(str(trained))
    assert kept.description.depth == report["protocol"]["chosen_depth"] == len(encoder.stages)
    images = (f"--data.path={image_folder}", "--data.eval_fraction=0.25")
    features.main([*images, f"--encoder={trained}", f"--out={tmp_path / 'f.npz'}", *FAST])
    of_test = torch.from_numpy(load_features(tmp_path / "f.npz").test)
    logits = rebuild_linear(kept)(of_test)
    torch.testing.assert_close(logits, heads[0](of_test))
    outcomes = load_outcomes(folder.with_name(folder.name.replace("_head", ".json")))
    np.testing.assert_array_equal(outcomes.predictions, logits.argmax(1))
    assert report["results"][0]["accuracy"] == np.mean(outcomes.predictions == outcomes.targets)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--protocol=mae", "--l2=1"), r"l2 is \[1.0\]; .* no effect unless protocol is logistic"),
        (("--protocol=mae", "--solver=sgd"), "solver is sgd; .* no effect unless protocol is logistic"),
        (("--protocol=dinov2", "--epochs=3"), "epochs is 3; .* no effect unless protocol is logistic"),
        (("--protocol=dinov2", "--depth=1"), "depth is 1; it must be left out with protocol dinov2"),
        (("--protocol=dinov2", "--representation=class"), "representation is class; it must be left out"),
        (("--protocol=dinov2", "--save=true"), "save is true; it must be left out"),
        (("--protocol=mae", "--features=f.npz"), "features is f.npz; it must be left out with protocol mae"),
    ],
)
def test_what_a_protocol_fixes_is_refused_beside_it(words, message):
    with pytest.raises(UserError, match=message):
        parse_and_load(LinearConfig, words)

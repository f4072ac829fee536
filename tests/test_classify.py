"""Supervised pre-training and fine-tuning: the same loop, other tasks."""

import json
import shutil

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from classified_images import OF_MODEL
from comparisons import noted
from conftest import (
    TINY,
    TINY_TUNING,
    equal_tensors,
    exported,
    killed_at,
    read_json,
    read_metrics,
    refused,
    title_and_tags,
    write_pictures,
)
from model_inputs import HALVES, by_timm, random_images, scaled
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import mpp
from evaluation import contrastive, finetune, supervised
from evaluation.config import SupervisedConfig
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.features import load_labelled
from evaluation.frozen.run_images import find_run
from evaluation.metrics.scoring import image_scores, load_outcomes
from evaluation.supervised import Classification
from evaluation.supervision.classifiers import load_classifier
from evaluation.supervision.learners import HeadedEncoder, as_timm_classifier, build_backbone
from mpp import pretrain
from mpp.config import AugmentConfig, Config, DataConfig, ModelConfig
from mpp.config.parsing import to_yaml
from mpp.data.loader import BatchLayout
from mpp.data.views import Batch
from mpp.features.frozen import features_at, stages
from mpp.models.descriptions import export_encoder, learned_labels
from mpp.models.encoder import Normalize
from mpp.models.plain import checkpoint_activations


@pytest.fixture
def encoder(finished_run):
    """The encoder folder of a tiny ViT."""
    return finished_run / "encoder"


@pytest.fixture
def finetunings(monkeypatch):
    """The tasks that fine-tuning builds, in their order."""
    return noted(monkeypatch, Classification, "__init__")


def train_supervised(folder, *arguments):
    supervised.main([*TINY_TUNING, *arguments, f"--run.dir={folder}"])
    return folder


def fine_tune(folder, encoder, *arguments):
    finetune.main([*TINY_TUNING, f"--encoder={encoder}", f"--run.dir={folder}", *arguments])


def test_supervised_run_looks_like_pre_trainings(tmp_path):
    birds = ["fowl", "owl", "parrot", "penguin", "raptor", "seabird", "songbird", "wader", "waterfowl"]
    folder = train_supervised(tmp_path / "run", *OF_MODEL)
    files = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "data.json", "metrics.jsonl", "verdict.json", "checkpoints", "encoder"} <= files
    outcomes = load_outcomes(folder / "supervised.json")
    assert outcomes.class_names == birds and len(outcomes) == 8
    assert image_scores(outcomes).mean() == pytest.approx(read_metrics(folder, "heldout/accuracy")[4])
    assert read_metrics(folder)[1] == pytest.approx(np.log(9), rel=1e-5)  # the head starts at zero: nine classes
    assert read_metrics(folder, "heldout/largest_class")[4] == 0.25  # of 8 birds
    assert "label_names" not in mpp.load_encoder(folder).pretrained_cfg  # its output is no logits
    assert learned_labels(str(folder))
    assert title_and_tags(folder / "encoder")[0] == "run: encoder trained with labels"
    assert read_json(folder / "data.json")["train"]["classes"] == birds


SOURCE = "the encoder"
JUDGED = {
    "pre-trained, with registers": (pretrain, "mean", ["--model.arguments={reg_tokens: 2}"]),
    "rotations": (supervised, "mean", ["--model.name=vit_small_patch16_dinov3", "--model.patch_size=8"]),
    "SimCLR that trains [class]": (contrastive, "class", ["--head.pooling=class"]),
    "fine-tuned": (finetune, "mean", [f"--encoder={SOURCE}", "--lrs=0.1"]),
    "distilled": (supervised, "mean", [f"--distill.teacher={SOURCE}"]),
}


@pytest.mark.parametrize("kind", JUDGED)
def test_the_card_gives_plain_timm_the_feature_that_was_judged(kind, encoder, tmp_path):
    """Exactly; and an encoder from before its pooling was exported has the same feature in mpp."""
    command, representation, options = JUDGED[kind]
    source = encoder
    if kind == "distilled":
        source = tmp_path / "teacher"
        export_encoder(mpp.load_encoder(encoder, num_classes=9), source, 32, *HALVES, 0.875)
    options = [option.replace(SOURCE, str(source)) for option in options]
    settings = {pretrain: TINY, contrastive: TINY, supervised: [*TINY_TUNING, *OF_MODEL], finetune: TINY_TUNING}[
        command
    ]
    command.main([*settings, *options, f"--run.dir={tmp_path / 'run'}"])
    folder = tmp_path / "run" / ("lr_0.1/encoder" if kind == "fine-tuned" else "encoder")
    images = torch.randn(3, 3, 32, 32)
    model = mpp.load_encoder(folder)
    with torch.no_grad():
        (expected,) = features_at(model, images, [len(stages(model))], representation)
        names = {"images": images}
        snippet = (folder / "README.md").read_text().split("```python")[1].split("```")[0]
        exec(snippet.replace("FOLDER", str(folder)), names)
        assert torch.equal(names["features"], expected)
        settings = read_json(folder / "config.json")
        for name in ("global_pool", "fc_norm", "use_fc_norm"):
            settings["model_args"].pop(name, None)
        (folder / "config.json").write_text(json.dumps(settings))
        (before,) = features_at(mpp.load_encoder(folder), images, [len(stages(model))], representation)
        assert torch.equal(before, expected)


@pytest.mark.parametrize("pooling, is_timms", [("auto", False), ("mean", True)])
def test_a_classifier_is_exported_where_timm_pools_alike(pooling, is_timms):
    encoder = timm.create_model("vit_relpos_base_patch16_clsgap_224", embed_dim=16, depth=1, num_heads=2, num_classes=0)
    model = HeadedEncoder(encoder, Normalize(*HALVES), pooling, torch.nn.Linear(16, 4)).eval()
    assert (as_timm_classifier(model, model.head, (224, 224)) is not None) == is_timms


@pytest.mark.parametrize("name", ["test_convnext", "test_mambaout", "hgnet_tiny", "test_resnet", "levit_128s"])
def test_other_models_than_vits_are_pooled_as_timm_does(name):
    """Some have their last norm, or a layer, after pooling; a parameter that is not used ends two processes."""
    encoder, (side, _) = build_backbone(ModelConfig(name=name, img_size=None if "levit" in name else 64))
    images = random_images(2, side=side)
    model = HeadedEncoder(encoder, Normalize(*HALVES), "auto", torch.nn.Identity()).eval()
    expected = encoder(scaled(images))
    assert expected.shape == (2, encoder.head_hidden_size)
    assert_close(model(images), expected)
    model(images).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", ["xcit_nano_12_p16_224", "pvt_v2_b0"])
def test_models_whose_patches_are_not_timms_take_other_sizes(name):
    assert load_frozen_encoder(name, random=True, img_size=64).img_size == (64, 64)


RESNET = ("--model.name=resnet10t", "--model.img_size=32")
SINGLE = "--data.batch_size=1"


@pytest.mark.parametrize(
    "words, said",
    [
        ((*RESNET, SINGLE), "or for a model with batch norms"),  # at 32 pixels, of one place
        ((*RESNET, "--optim.average=0.9"), r"optim\.average, optim\.frozen_steps is 0\.9, 0; it must be null"),
        ((*RESNET, "--model.depth=3"), r"model\.depth is 3; it must be left out with resnet10t"),
        ((*RESNET, "--model.arguments={chanels: [8]}"), r"model\.name is resnet10t, .*'chanels'"),
        (("--augment.mixup=0.8", SINGLE), r"is 1; it must be at least 2 .* with augment\.mixup"),
    ],
)
def test_what_cannot_be_trained_with_labels_is_refused(tmp_path, words, said):
    with refused(said):
        train_supervised(tmp_path / "run", *words)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_cannot_be_fine_tuned_is_refused(tmp_path, encoder):
    resnet = ("test_resnet", "--init=random", "--lrs=0.01")
    with refused(r"^activation_checkpointing is true; .* its batch norms would see"):
        fine_tune(tmp_path / "tuned", *resnet, "--activation_checkpointing=true")
    with refused(r"^it is true; it must be false: timm has none for this model"):
        checkpoint_activations(torch.nn.Linear(2, 2), "it")
    (tmp_path / "config.yaml").write_text(to_yaml(Config()))
    with refused(rf"run\.dir is {tmp_path}; it must be a folder of its own: this is a run's"):
        fine_tune(tmp_path, encoder)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


SHORT = ("--run.steps=1", "--data.eval_images=2")


def test_a_batch_norm_over_one_place_trains(tmp_path, capsys):
    """At 32 pixels a ResNet's last map is 1 x 1: of one image, as FLOPs may be counted of, it has no deviation."""
    run = train_supervised(tmp_path, *RESNET, *SHORT, "--run.eval_every=0")
    assert read_metrics(run, "compute/pflop")[1] > 0
    train_supervised(tmp_path, *RESNET, *SHORT)
    assert "supervised.json: the run was not evaluated" in capsys.readouterr().out


THIN = "--model.arguments={channels: [128, 128, 128, 128], stem_chs: 32}"


def test_a_resnet_of_fewer_channels_trains_and_is_loaded_by_plain_timm(tmp_path):
    words = (
        "--model.name=resnetv2_50x1_bit",
        "--model.img_size=32",
        THIN,
        "--optim.global_batch_size=2",
        "--head.kind=linear",
    )
    folder = train_supervised(tmp_path / "run", *SHORT, *words)
    encoder = by_timm(folder / "encoder")
    assert encoder.num_features == 128
    assert equal_tensors(encoder.state_dict(), exported(folder))
    classifier = by_timm(folder / "classifier")  # by a convolution
    images = torch.rand(2, 3, 32, 32)
    network = load_classifier(str(folder), 3, "classifier").network.eval()
    with torch.no_grad():
        assert_close(classifier(images * 2 - 1), network(images * 255), rtol=0, atol=1e-5)


def test_finetuning_compares_rates_on_dev_over_dev_steps_and_tests_once(tmp_path, encoder, capsys):
    default_warmup = [word for word in TINY_TUNING if "warmup" not in word]
    arguments = [*default_warmup, f"--encoder={encoder}", f"--run.dir={tmp_path}", "--lrs=[0.01,0.1]", "--dev_steps=3"]
    arguments += [f"--out={tmp_path / 'copy.json'}"]
    finetune.main(arguments)
    report = read_json(tmp_path / "finetune.json")
    (result,) = report["results"]
    best = result["lr"]
    runs = {path.name: path for path in tmp_path.glob("*lr_*")}
    tested = runs[f"lr_{best:g}"]
    assert find_run(str(tmp_path / "classifier")) == tested and {*runs} == {"dev_lr_0.01", "dev_lr_0.1", tested.name}
    dev_accuracies = {row["lr"]: row["accuracy"] for row in report["dev"]}
    assert best == max(dev_accuracies, key=dev_accuracies.get)
    for name, run in runs.items():
        assert read_metrics(run)[1] == pytest.approx(np.log(9), rel=1e-5)  # the zero-initialised layer
        assert list(read_metrics(run, "heldout/accuracy")) == [3 if "dev" in name else 4]  # evaluated once
    dev_rate, rate = (read_metrics(run, "optim/lr")[3] for run in (runs[f"dev_{tested.name}"], tested))
    assert 0 < dev_rate < rate  # a whole schedule of its own, not a part of the longer one
    assert result["accuracy"] == read_metrics(tested, "heldout/accuracy")[4]
    assert f"the best rate, {best:g}, is the smallest or largest of lrs" in capsys.readouterr().out
    before = (tmp_path / "finetune.json").read_bytes()
    finetune.main(arguments)  # finished: nothing is trained again
    assert (tmp_path / "finetune.json").read_bytes() == before
    assert f"next: mpp predict --classifier {tested} --data.path" in capsys.readouterr().out


def test_a_fine_tuning_continues_from_its_own_encoder_alone(tmp_path, encoder):
    copy = shutil.copytree(encoder, tmp_path / "encoder")
    fine_tune(tmp_path / "tuned", copy, "--lrs=0.1", "--run.steps=1")
    weights = load_file(copy / "model.safetensors")
    save_file(weights | {"norm.bias": weights["norm.bias"] + 1}, copy / "model.safetensors")
    with refused(r"another config: encoder_sha256"):
        fine_tune(tmp_path / "tuned", copy, "--lrs=0.1", "--run.steps=1")


def test_dev_runs_are_as_short_as_the_run(tmp_path, encoder):
    fine_tune(tmp_path, encoder, "--lrs=[0.1,0.2]", "--dev_steps=9", "--run.steps=1")
    assert list(read_metrics(tmp_path / "dev_lr_0.1", "heldout/accuracy")) == [1]


def test_left_out_training_images_are_evaluated_too(tmp_path, encoder, monkeypatch, finetunings):
    evaluated = noted(monkeypatch, Classification, "measure_outcomes", 2)
    options = ("--data.train_images=40", "--data.workers=1", "--data.eval_images=1000", "--run.steps=1")
    fine_tune(tmp_path, encoder, "--lrs=0.1", *options)
    (task,) = finetunings
    datasets = (task.train, *(views.dataset for views in evaluated))
    train, test, left_out = ({*images.image_names()} for images in datasets)
    assert len(train) == 40
    assert train.isdisjoint(left_out) and test.isdisjoint(train | left_out)
    assert len(train | left_out) == len(load_labelled(DataConfig(), task.accelerator).train)
    (result,) = read_json(tmp_path / "finetune.json")["results"]
    assert result["dev_accuracy"] == read_metrics(tmp_path / "lr_0.1", "dev/accuracy")[1]


def test_finetuning_starts_from_the_encoder_resampled_as_timm_does(tmp_path, encoder, finetunings):
    for init in ("encoder", "random"):
        with killed_at(0):
            fine_tune(tmp_path / init, encoder, "--img_size=48", "--lrs=0.01", "--drop_path=0.2", f"--init={init}")
    source = exported(encoder.parent)
    tuned, random = (task.model.encoder.state_dict() for task in finetunings)
    expected = timm.layers.resample_abs_pos_embed(source["pos_embed"], (6, 6), num_prefix_tokens=1)
    assert_close(tuned["pos_embed"], expected)
    weight = "blocks.0.attn.qkv.weight"
    assert torch.equal(tuned[weight], source[weight]) and not torch.equal(random[weight], source[weight])
    assert all(parameter.requires_grad for parameter in finetunings[0].model.parameters())
    assert finetunings[0].model.encoder.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)


def test_the_card_names_a_file_of_weights_and_has_no_licence_of_timms_own(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0, img_size=32).state_dict(), file)
    fine_tune(tmp_path / "run", "test_vit", f"--checkpoint={file}", "--img_size=32", "--lrs=0.1", "--run.steps=1")
    card = (tmp_path / "run" / "lr_0.1" / "encoder" / "README.md").read_text()
    assert f"Trained with labels, from {file}." in card
    assert timm.get_pretrained_cfg("test_vit").license and "license:" not in card


class OnPixels(Classification):
    """A task whose network is one linear layer on the pixels."""

    def build_network(self):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, self.classes)), (8, 8)


def classification(augment):
    """A task on the birds, and a batch."""
    task = OnPixels(SupervisedConfig(augment=augment), Accelerator(cpu=True), BatchLayout(4, 1, 1, 0))
    labels = torch.tensor([0, 3, 3, 8])
    return task, task.model, Batch(random_images(4, side=8), None, labels, torch.arange(4), [])


def test_images_that_cannot_be_decoded_are_not_tested_on(tmp_path, capsys):
    """Nor are others in their place: of the test images, one dog and four cats are left."""
    images, run = tmp_path / "images", tmp_path / "run"
    for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
        write_pictures(images / place, 4)
    for number in (0, 1, 3):
        (images / f"test/dog/0{number}.png").write_bytes(b"nothing")
    train_supervised(run, *OF_MODEL, f"--data.path={images}", "--data.batch_size=3")
    outcomes = load_outcomes(run / "heldout.json")
    assert [name.split("/test/")[-1] for name in outcomes.images] == [
        *(f"cat/0{n}.png" for n in range(4)),
        "dog/02.png",
    ]
    assert max(read_metrics(run, "heldout/largest_class").values()) == 0.8
    assert list(read_metrics(run, "heldout/accuracy").values())[-1] == pytest.approx(image_scores(outcomes).mean())
    written = read_json(run / "supervised.json")
    assert written["labels"]["images"] == 5 and written["results"][0]["left_out"] == 3
    assert "note: 3 held-out images cannot be decoded and are left out" in capsys.readouterr().out


def test_mixup_by_hand():
    task, model, batch = classification(AugmentConfig(mixup=0.8, label_smoothing=0.1))
    model[1].weight.data /= 100
    torch.manual_seed(7)
    alpha = torch.tensor([0.8])
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    images = batch.images.float()
    classes = F.one_hot(batch.labels, 9)
    mixed_images = share * images + (1 - share) * images.roll(1, 0)
    mixed_classes = share * classes + (1 - share) * classes.roll(1, 0)
    target = 0.9 * mixed_classes + 0.1 / 9
    torch.manual_seed(7)
    model.train()
    loss, sums = task.loss(model, batch, True)
    assert_close(loss, F.cross_entropy(model(mixed_images), target))
    assert sums["tested"] == 4
    plain = F.cross_entropy(model.eval()(images), batch.labels)
    evaluated, _ = task.loss(model, batch._replace(images=images), False)
    assert_close(evaluated, plain)  # without mixing and smoothing


def test_cutmix_takes_a_part_of_the_image_before():
    task, _, batch = classification(AugmentConfig(cutmix=1.0))
    for seed in range(20):
        torch.manual_seed(seed)
        images, target = task.mix(batch.images.float(), batch.labels)
        is_own = images == batch.images
        assert (is_own | (images == batch.images.roll(1, 0))).all()
        assert target[0, 0].item() == pytest.approx(is_own[0].all(0).double().mean().item(), abs=0.05)

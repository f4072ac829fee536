"""Supervised pre-training and fine-tuning: the same loop, other tasks."""

import itertools
import json

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import TINY, encoded, kill_at, picture, read_metrics, title_and_tags
from safetensors.torch import load_file

import mpp
from evaluation import finetune, supervised
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.labelled import load_labelled
from evaluation.supervision.classification import Classification, largest_class_share
from evaluation.supervision.heads import HeadedEncoder, build_backbone
from mpp.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch
from mpp.features.frozen import features_at, stages
from mpp.models.descriptions import learned_labels
from mpp.models.encoder import build_encoder
from mpp.models.exporting import export_encoder
from mpp.models.timm_models import checkpoint_activations
from mpp.training.averaging import averaged_weights
from mpp.training.checkpoint import complete_checkpoints
from mpp.training.optim import build_optimizer

BASE = tuple(argument for argument in TINY if not argument.startswith(("--probe", "--model")))
SMALL = tuple(argument for argument in TINY if argument.startswith("--model"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    torch.manual_seed(0)
    small = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    folder = tmp_path_factory.mktemp("run") / "encoder"
    export_encoder(timm.create_model("vit_base_patch16_224", **small), folder, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    return folder


def test_supervised_run_looks_like_pre_trainings(tmp_path, capsys):
    birds = ["fowl", "owl", "parrot", "penguin", "raptor", "seabird", "songbird", "wader", "waterfowl"]
    supervised.main([*BASE, *SMALL, f"--run.dir={tmp_path / 'run'}"])
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir() if "tfevents" not in path.name} == {
        *(
            "config.yaml",
            "data.json",
            "metrics.jsonl",
            "verdict.json",
            "checkpoints",
            "encoder",
            "supervised.json",
            ".lock",
        )
    }
    assert read_metrics(folder)[1] == pytest.approx(np.log(9), rel=1e-5)  # the head starts at zero: nine classes
    assert 0 <= read_metrics(folder, "heldout/accuracy")[4] <= 1
    assert read_metrics(folder, "heldout/largest_class")[4] == 0.25  # of 8 birds
    assert mpp.load_encoder(folder)(torch.zeros(1, 3, 32, 32)).shape == (1, 16)
    assert "held-out accuracy (%)" in capsys.readouterr().out
    title, tags = title_and_tags(folder / "encoder")
    assert title == "run: encoder trained with labels" and "self-supervised" not in tags
    assert json.loads((folder / "data.json").read_text())["train"]["classes"] == birds
    assert learned_labels(str(folder)) and mpp.load_encoder(folder).pretrained_cfg["label_names"] == birds


def test_the_largest_class_is_what_a_constant_gets_right():
    assert largest_class_share(np.array([2, 0, 2, 1])) == 0.5
    assert largest_class_share(np.array([[2, 0], [0, -1], [1, -1]])) == pytest.approx(2 / 3)  # any of a row is right


MIXED = ("--augment.mixup=0.8", "--augment.cutmix=1", "--augment.randaugment=9", "--augment.label_smoothing=0.1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--head.kind=linear", "--head.pooling=mean"),
        ("--optim.average=0.9", "--optim.name=muon"),
        (*MIXED, "--optim.layer_decay=0.7", "--model.drop_path=0.1"),
    ],
)
def test_supervised_goes_on_with_the_same_bits(tmp_path, monkeypatch, arguments):
    def run(name):
        supervised.main([*BASE, *SMALL, *arguments, "--model.dropout=0.1", f"--run.dir={tmp_path / name}"])
        return (tmp_path / name / "encoder" / "model.safetensors").read_bytes()

    whole = run("whole")
    with monkeypatch.context() as context, pytest.raises(BaseException, match="killed"):
        kill_at(context, 3)
        run("killed")
    assert run("killed") == whole
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")


@pytest.mark.parametrize("name", [pytest.param("resnetv2_50x1_bit", marks=pytest.mark.faults), "vit_tiny_r_s16_p8_224"])
def test_resnets_and_hybrids_train(tmp_path, name):
    arguments = [f"--model.name={name}", "--model.img_size=32", "--run.steps=1", "--optim.global_batch_size=2"]
    supervised.main([*BASE, *arguments, "--data.eval_images=2", f"--run.dir={tmp_path / 'run'}"])
    assert read_metrics(tmp_path / "run")[1] == pytest.approx(np.log(9), rel=1e-5)
    assert mpp.load_encoder(tmp_path / "run").num_features > 0


@pytest.mark.parametrize("name", ["test_convnext", "test_mambaout", "hgnet_tiny", "test_resnet", "levit_128s"])
def test_what_is_not_a_vit_is_pooled_as_timm_does(name):
    """Some have their last norm, or a layer, after pooling; a parameter that is not used ends two processes."""
    encoder, size = supervised.build_backbone(ModelConfig(name=name, img_size=None if "levit" in name else 64))
    images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    model = HeadedEncoder(encoder, torch.nn.Identity(), "auto", (0.5,) * 3, (0.5,) * 3).eval()
    expected = encoder((images / 255 - 0.5) / 0.5)
    assert expected.shape == (2, encoder.head_hidden_size)
    torch.testing.assert_close(model(images), expected)
    (found,) = features_at(encoder, model.normalize(images), [len(stages(encoder))], "mean")
    torch.testing.assert_close(found, expected)
    model(images).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_batch_norm_over_one_place_trains_and_is_not_averaged(tmp_path):
    """At 32 pixels a ResNet's last map is 1 x 1: of one image, as FLOPs may be counted of, it has no deviation."""
    arguments = [*BASE, "--model.name=resnet10t", "--model.img_size=32", "--run.steps=1", "--data.eval_images=2"]
    with pytest.raises(ValueError, match=r"optim\.average is 0\.9; for this model it must be null: the batch norms'"):
        supervised.main([*arguments, "--optim.average=0.9", f"--run.dir={tmp_path / 'averaged'}"])
    supervised.main([*arguments, f"--run.dir={tmp_path / 'run'}"])
    assert read_metrics(tmp_path / "run", "compute/pflop")[1] > 0


def test_a_resnet_has_no_depth_to_set(tmp_path):
    with pytest.raises(ValueError, match=r"model\.depth is 3; it must be null with resnetv2_50x1_bit"):
        supervised.main([*BASE, "--model.name=resnetv2_50x1_bit", "--model.depth=3", f"--run.dir={tmp_path / 'run'}"])


def test_finetuning_compares_rates_on_dev_and_tests_once(tmp_path, encoder, capsys):
    arguments = [*BASE, f"--encoder={encoder}", f"--run.dir={tmp_path / 'run'}", "--lrs=[0.01,0.1]"]
    arguments = [a for a in arguments if "global_batch" not in a and "warmup" not in a]
    finetune.main([*arguments, "--optim.global_batch_size=8"])
    runs = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    report = json.loads((tmp_path / "run" / "finetune.json").read_text())
    best = report["results"][0]["lr"]
    assert runs == ["dev_lr_0.01", "dev_lr_0.1", f"lr_{best:g}"]
    on_dev = {row["lr"]: row["accuracy"] for row in report["dev"]}
    assert best == max(on_dev, key=on_dev.get)
    for name in runs:
        losses = read_metrics(tmp_path / "run" / name)
        assert losses[1] == pytest.approx(np.log(9), rel=1e-5)  # the zero-initialised layer
        assert list(read_metrics(tmp_path / "run" / name, "heldout/accuracy")) == [4]  # looked at once
    assert report["results"][0]["accuracy"] == read_metrics(tmp_path / "run" / runs[-1], "heldout/accuracy")[4]
    assert "test accuracy (%)" in capsys.readouterr().out
    before = (tmp_path / "run" / "finetune.json").read_bytes()
    finetune.main([*arguments, "--optim.global_batch_size=8"])  # finished: nothing is trained again
    assert (tmp_path / "run" / "finetune.json").read_bytes() == before
    assert "is finished" in capsys.readouterr().out


def test_training_images_that_are_left_out_judge_too(tmp_path, encoder, monkeypatch):
    judged, judge = [], Classification.measure_views
    monkeypatch.setattr(
        Classification, "measure_views", lambda task, *a: judged.append((task, a[1].dataset)) or judge(task, *a)
    )
    options = ["--lrs=0.1", "--data.train_images=40", "--data.workers=1", "--data.eval_images=1000"]
    finetune.main([*BASE, f"--encoder={encoder}", f"--run.dir={tmp_path}", *options])
    (task, test), (_, left) = judged
    names = [{part.image_name(i) for i in range(len(part))} for part in (task.train, left, test)]
    assert len(names[0]) == 40 and not names[0] & names[1] and not (names[0] | names[1]) & names[2]
    assert len(names[0] | names[1]) == len(load_labelled(DataConfig(), task.accelerator)[0])
    found = json.loads((tmp_path / "finetune.json").read_text())["results"][0]
    assert found["dev_accuracy"] == read_metrics(tmp_path / "lr_0.1", "dev/accuracy")[4]


def test_left_out_images_of_a_class_that_nothing_else_has_are_not_judged(tmp_path, encoder):
    for number, name in enumerate("ababababababc"):
        file = tmp_path / "images" / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(number)))
    of_images = {"path": str(tmp_path / "images"), "eval_fraction": 0.2, "train_images": 4}
    of_seeds = [of_images | {"cut_seed": seed, "eval_seed": seed} for seed in range(20)]
    splits = (load_labelled(DataConfig(**chosen), Accelerator(), spare=9) for chosen in of_seeds)
    alone = (left.labels.max() > max(train.labels.max(), test.labels.max()) for train, test, left in splits)
    images = [f"--data.{key}={value}" for key, value in next(itertools.compress(of_seeds, alone)).items()]
    finetune.main([*BASE, f"--encoder={encoder}", f"--run.dir={tmp_path / 'run'}", "--lrs=0.1", *images])
    assert json.loads((tmp_path / "run" / "finetune.json").read_text())["results"][0]["dev_accuracy"] <= 1


def test_finetunings_rates_are_lrs(tmp_path, encoder):
    with pytest.raises(ValueError, match=r"optim\.lr is 0\.5; .* left out: the rates of fine-tuning are lrs"):
        finetune.main([*BASE, f"--encoder={encoder}", f"--run.dir={tmp_path}", "--optim.lr=0.5"])


def test_rates_are_compared_over_dev_steps(tmp_path, encoder):
    finetune.main([*BASE, f"--encoder={encoder}", f"--run.dir={tmp_path}", "--lrs=[0.01,0.1]", "--dev_steps=3"])
    folders = {path.name: path for path in tmp_path.iterdir() if path.is_dir()}
    for name, folder in folders.items():
        assert list(read_metrics(folder, "heldout/accuracy")) == [3 if name.startswith("dev") else 4]
    best = next(name for name in folders if name.startswith("lr"))
    short, whole = (read_metrics(folders[name], "optim/lr")[3] for name in (f"dev_{best}", best))
    assert 0 < short < whole  # a whole schedule of its own, not a part of the longer one


def test_finetuning_starts_from_the_encoder_resampled_as_timm_does(tmp_path, encoder, monkeypatch):
    kill_at(monkeypatch, 0)
    seen = []
    build = finetune.Finetuning.__init__
    monkeypatch.setattr(
        finetune.Finetuning, "__init__", lambda self, *a, **k: (build(self, *a, **k), seen.append(self))[0]
    )
    arguments = [*BASE, f"--encoder={encoder}", "--img_size=48", "--lrs=0.01"]
    for init in ("encoder", "random"):
        with pytest.raises(BaseException, match="killed"):
            finetune.main([*arguments, f"--init={init}", f"--run.dir={tmp_path / init}"])
    source = load_file(encoder / "model.safetensors")
    expected = timm.layers.resample_abs_pos_embed(source["pos_embed"], (6, 6), num_prefix_tokens=1)
    weights = seen[0].model.encoder.state_dict()
    torch.testing.assert_close(weights["pos_embed"], expected)
    assert torch.equal(weights["blocks.0.attn.qkv.weight"], source["blocks.0.attn.qkv.weight"])
    random = seen[1].model.encoder.state_dict()
    assert not torch.equal(random["blocks.0.attn.qkv.weight"], source["blocks.0.attn.qkv.weight"])
    assert all(parameter.requires_grad for parameter in seen[0].model.parameters())


@pytest.mark.parametrize("init", ["encoder", "random"])
def test_finetuning_leaves_fixed_positions_as_they_are(tmp_path, init):
    small = dict(img_size=32, patch_size=8, width=16, depth=2, heads=2)
    source = build_encoder(ModelConfig(**small, position="sincos_2d"))
    export_encoder(source, tmp_path / "encoder", 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    finetune.main([*BASE, f"--encoder={tmp_path}", f"--init={init}", "--lrs=0.1", f"--run.dir={tmp_path / 'run'}"])
    tuned, untuned = load_frozen_encoder(str(tmp_path / "run/lr_0.1")).model, source.state_dict()
    same = {name for name, tensor in tuned.state_dict().items() if torch.equal(tensor, untuned[name])}
    assert same == {"pos_embed"}
    title, tags = title_and_tags(tmp_path / "run/lr_0.1/encoder")
    how = {"encoder": "fine-tuned", "random": "trained"}[init]
    assert title == f"lr_0.1: encoder {how} with labels" and "self-supervised" not in tags


@pytest.mark.parametrize("name", [None, "test_efficientnet_gn"], ids=["vit", "convolutional"])
def test_activation_checkpointing_fine_tunes_the_same_with_less_memory(tmp_path, encoder, monkeypatch, name):
    kill_at(monkeypatch, 0)
    tasks, results, kept = [], [], []
    build = finetune.Finetuning.__init__

    def noted(task, *arguments, **keywords):
        build(task, *arguments, **keywords)
        tasks.append(task)

    monkeypatch.setattr(finetune.Finetuning, "__init__", noted)
    start = "random" if name else "encoder"  # of a name there are no weights here
    arguments = [*BASE, f"--encoder={name or encoder}", "--img_size=32", "--drop_path=0.3", "--lrs=0.01"]
    arguments += [f"--init={start}"]
    for again in ("false", "true"):
        with pytest.raises(BaseException, match="killed"):
            finetune.main([*arguments, f"--activation_checkpointing={again}", f"--run.dir={tmp_path / again}"])
        model, storages = tasks[-1].model.train(), {}
        torch.manual_seed(1)
        torch.nn.init.normal_(model.head.weight)

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32) % 256).square().mean()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept.append(sum(size for place, size in storages.items() if place not in weights))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True)) and results[0][1].any()
    assert kept[1] < 0.7 * kept[0]


def test_activation_checkpointing_is_refused_where_a_model_has_none(tmp_path):
    arguments = ["--encoder=test_resnet", "--init=random", "--activation_checkpointing=true", "--lrs=0.01"]
    with pytest.raises(ValueError, match=r"^activation_checkpointing is True; .* its batch norms would see"):
        finetune.main([*BASE, *arguments, f"--run.dir={tmp_path / 'tuned'}"])
    for settings in (dict(name="resnet10t"), dict(name="vit_small_resnet26d_224")):
        with pytest.raises(ValueError, match=r"^model\.activation_checkpointing is True; .* batch norms would see"):
            build_backbone(ModelConfig(**settings, activation_checkpointing=True))
    with pytest.raises(ValueError, match=r"^it is True; it must be false: timm has none for this model"):
        checkpoint_activations(torch.nn.Linear(2, 2), "it")


def test_finetunings_defaults_are_the_papers():
    config = finetune.FinetuneConfig()
    optim = config.optim
    assert (optim.name, optim.momentum_or_default(), optim.schedule, optim.clip) == ("sgd", 0.9, "cosine", 1.0)
    assert optim.weight_decay == 0 and config.lrs == (0.001, 0.003, 0.01, 0.03)


def test_dev_split_is_cut_from_train():
    train, test = (part.labelled() for part in load_image_datasets(DataConfig()))
    kept, dev = train.cut(0.1, 0, "dev")
    names = [{part.rows[i]["image"]["bytes"] for i in range(len(part))} for part in (kept, dev, test)]
    assert len(kept) == 387 and len(dev) == 43
    assert not names[0] & names[1] and not names[1] & names[2]


def test_a_kill_during_finetuning_loses_nothing(tmp_path, encoder, monkeypatch):
    def run(name):
        finetune.main([*BASE, f"--encoder={encoder}", "--lrs=0.1", f"--run.dir={tmp_path / name}"])
        return (tmp_path / name / "lr_0.1" / "encoder" / "model.safetensors").read_bytes()

    whole = run("whole")
    with monkeypatch.context() as context, pytest.raises(BaseException, match="killed"):
        kill_at(context, 3)
        run("killed")
    assert len(complete_checkpoints(tmp_path / "killed" / "lr_0.1")) == 1
    assert run("killed") == whole


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_polyak_average_by_hand(optimizer):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    config = OptimConfig(name=optimizer, lr=0.1, average=0.8)
    built, average = build_optimizer(model, config), None
    for step in range(1, 60):
        model(torch.randn(4, 3)).square().sum().backward()
        built.step()
        built.zero_grad()
        decay = min(0.8, (1 + step) / (10 + step))
        weight = model.weight.detach().clone()
        average = weight if average is None else decay * average + (1 - decay) * weight
    with averaged_weights(built):
        torch.testing.assert_close(model.weight.detach(), average)
    assert torch.equal(model.weight.detach(), weight)


def classification(augment, batch=4):
    """A task on the birds, whose model is one linear layer on the pixels."""
    data, run = DataConfig(), RunConfig()
    accelerator = Accelerator(cpu=True)
    task = Classification(
        accelerator, BatchLayout(batch, 1, 1, 0), run, data, augment, load_labelled(data, accelerator)
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, task.classes))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return task, model, Batch(images, None, torch.tensor([0, 3, 3, 8])[:batch], torch.arange(batch), [])


def test_mixup_by_hand():
    task, model, batch = classification(AugmentConfig(mixup=0.8, label_smoothing=0.1))
    model[1].weight.data /= 100
    torch.manual_seed(7)
    share = torch.distributions.Beta(torch.tensor([0.8]), torch.tensor([0.8])).sample().item()
    mixed = [
        share * part + (1 - share) * part.roll(1, 0) for part in (batch.images.float(), F.one_hot(batch.labels, 9))
    ]
    target = 0.9 * mixed[1] + 0.1 / 9
    torch.manual_seed(7)
    model.train()
    loss, sums = task.loss(model, batch, True)
    torch.testing.assert_close(loss, -(target * model(mixed[0]).log_softmax(-1)).sum(-1).mean())
    assert sums["images"] == 4  # what is right counts against the image's own label
    plain = F.cross_entropy(model.eval()(batch.images.float()), batch.labels)
    torch.testing.assert_close(task.loss(Scaled(model).eval(), batch, False)[0], plain)  # none of it where it is judged


class Scaled(torch.nn.Module):
    """A model that takes uint8."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images.float())


def test_cutmix_takes_a_part_of_the_image_before():
    task, _, batch = classification(AugmentConfig(cutmix=1.0))
    for seed in range(20):
        torch.manual_seed(seed)
        images, target = task.mix(batch.images.float(), batch.labels)
        own, other = (images == part for part in (batch.images, batch.images.roll(1, 0)))
        assert (own | other).all() and (target.sum(-1) - 1).abs().max() < 1e-6
        assert target[0, 0].item() == pytest.approx(own[0].all(0).double().mean().item(), abs=0.05)


def test_mixing_needs_two_images():
    with pytest.raises(ValueError, match=r"data\.batch_size is 1; it must be above 1 with augment\.mixup"):
        classification(AugmentConfig(mixup=0.8), batch=1)


def test_finetuning_takes_the_modern_recipe(tmp_path, encoder, monkeypatch):
    seen = []
    build = finetune.Finetuning.__init__
    monkeypatch.setattr(
        finetune.Finetuning, "__init__", lambda self, *a, **k: (build(self, *a, **k), seen.append(self))[0]
    )
    modern = [*MIXED, "--drop_path=0.2", "--optim.name=adam", "--optim.layer_decay=0.65", "--optim.weight_decay=0.05"]
    with pytest.raises(ValueError, match=r"optim\.layer_decay is 0\.65; it must be null with init random"):
        finetune.main([*BASE, *modern, "--init=random"])
    finetune.main([*BASE, f"--encoder={encoder}", "--lrs=0.001", *modern, f"--run.dir={tmp_path / 'run'}"])
    assert seen[0].model.encoder.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)
    assert len(read_metrics(tmp_path / "run" / "lr_0.001")) == 4


def test_labels_are_needed(tmp_path, image_folder):
    for number, file in enumerate(image_folder.rglob("*.png")):
        file.rename(image_folder / f"{number}.png")
    with pytest.raises(ValueError, match=r"no labels; name their column by data\.label_column"):
        supervised.main([*BASE, *SMALL, f"--data.path={image_folder}", f"--run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_vits_are_built_as_in_pre_training():
    encoder, size = supervised.build_backbone(ModelConfig(depth=1, img_size=32))
    assert size == (32, 32) and encoder.embed_dim == 128
    with pytest.raises(ValueError, match="vit_bose_patch16_224"):
        supervised.build_backbone(ModelConfig(name="vit_bose_patch16_224"))

"""Runs that train a part of the encoder: a frozen start, parameters by name, low-rank changes (LoRA)."""

import json
import re
import shutil
from functools import partial
from itertools import chain, product
from types import SimpleNamespace

import pytest
import timm
import torch
from conftest import ADAM, ROOT, TINY_TUNING, close, equal_tensors, exported, read_json, read_metrics, refused
from model_inputs import by_timm, draw_batch, random_images
from safetensors.torch import load_file
from server import begin, die_at, finish, was_killed

from evaluation import finetune
from evaluation.config import SupervisedConfig
from mpp.config import Config, OptimConfig
from mpp.config.parsing import parse
from mpp.models.adaptation import LowRankChange, count_parameters, merge
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid
from mpp.models.teachers import update_moving_average
from mpp.training.checkpoint import MODEL_FILE, complete_checkpoints, newest_step
from mpp.training.flops import executed_flops
from mpp.training.health import is_published
from mpp.training.loop import TrainingStep
from mpp.training.optim import averaged_weights, build_optimizer, parameter_groups
from mpp.training.parallel import Sharded

SMALL = ("--model.width=16", "--model.depth=2", "--model.heads=2", "--model.img_size=32", *ADAM)
LORA = ("--model.lora_rank=2",)
PROJECTIONS = ("--model.train=attn.proj",)
EXPLORA = ("--model.train=blocks\\.1\\.", *LORA)
WIDEST = (*EXPLORA, "--model.lora_rank=16")
FEATURES = ("--config=rivals/data2vec", "--objective.teacher_depths=1")
BLOCKS_MATRICES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def built(*options):
    """A model by these settings, and its config."""
    config = parse(Config, [*SMALL, *options])
    torch.manual_seed(0)
    model, _ = build_model(config)
    return model, config


def batch(model, config, count: int = 2):
    """Images and their corruption."""
    grid, _ = cell_grid(model.encoder)
    torch.manual_seed(0)
    return random_images(count), draw_batch(config.corruption, grid, count)


def step(model, config) -> None:
    """A first step on random numbers in place of targets."""
    outputs = model(*batch(model, config))
    predictions = outputs if torch.is_tensor(outputs) else outputs[0]
    torch.manual_seed(1)
    (predictions * torch.randn_like(predictions)).sum().backward()
    build_optimizer(model, config.optim).step()


def tokens(encoder, images):
    with torch.no_grad():
        return encoder.eval().forward_features(images)


def plain_names():
    return set(built()[0].encoder.state_dict())


@pytest.mark.parametrize("options", [LORA, WIDEST, (*LORA, "--config=rivals/mae"), (*LORA, *FEATURES)], ids=str)
def test_a_low_rank_step_moves_the_output_and_merges_to_the_bit(options):
    """Merged are the first weights and the product: under autocast, too, rounded once, as those of a plain encoder."""
    model, config = built(*options)
    images = torch.randn(2, 3, 32, 32)
    reference, _ = built(*(option for option in options if "lora" not in option and "train" not in option))
    before = tokens(model.encoder, images)
    assert torch.equal(before, tokens(reference.encoder, images))  # the change is zero at first
    step(model, config)
    after = tokens(model.encoder, images)
    merged = merge(model.encoder)
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(tokens(merged, images), after)
    assert torch.equal(tokens(model.encoder, images), after)  # merging left the running encoder alone
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tokens(model.encoder, images), tokens(merged, images))
    weights = merged.state_dict()
    assert set(weights) == plain_names()
    for name, tensor in reference.encoder.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if options == WIDEST and "blocks.1." in name:
            continue
        if kind == "weight" and layer.endswith(BLOCKS_MATRICES):
            (change,) = model.encoder.get_submodule(layer).parametrizations.weight
            product = change.up.detach().double() @ change.down.detach().double()
            torch.testing.assert_close(weights[name].double(), tensor.double() + product, atol=1e-7, rtol=1e-6)
        else:
            assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "beit_base_patch16_224"]
)
def test_attention_that_reads_its_weight_past_the_layer_is_changed_too(name, monkeypatch):
    """timm's Eva and Beit call no `qkv` layer where its biases are apart: peft changes nothing there.

    Each change is computed once, in the last block too, whose attention reads its weight in slices.
    """
    calls = []
    forward = LowRankChange.forward
    monkeypatch.setattr(LowRankChange, "forward", lambda self, weight: calls.append(self) or forward(self, weight))
    patch = 14 if "patch14" in name else 16
    torch.manual_seed(0)
    sizes = (f"--model.img_size={2 * patch}", "--model.width=32", "--model.depth=2", "--model.heads=2")
    config = parse(Config, [f"--model.name={name}", *sizes, *ADAM, *LORA])
    model, _ = build_model(config)
    changes = {path: module for path, module in model.named_modules() if isinstance(module, LowRankChange)}
    assert sum("qkv" in path for path in changes) == 2
    images, corruption = torch.randn(2, 3, 2 * patch, 2 * patch), batch(model, config)[1]
    before = tokens(model.encoder, images)
    model.train()
    calls.clear()
    outputs = model(random_images(2, side=2 * patch), corruption)
    (outputs * torch.randn_like(outputs)).sum().backward()
    assert len(calls) == len(set(calls)) == len(changes)
    assert all(change.up.grad.abs().max() > 0 for change in changes.values())
    build_optimizer(model, config.optim).step()
    after = tokens(model.encoder, images)
    assert not torch.equal(after, before)  # DINOv3's LayerScale makes it small
    assert torch.equal(tokens(merge(model.encoder), images), after)


REFUSED = {
    "--model.train=attn.porj": "model.train is attn.porj; it must be found in some names",
    "--model.train=(": "model.train is (; it must be a regular expression",
    "--model.train=.": "and not in all",
    "--model.lora_rank=17": "model.lora_rank is 17; it must be at most 16",
    "--optim.frozen_steps=1200": "optim.frozen_steps is 1200; it must be less than run.steps (1200)",
    "--model.train=weight --model.lora_rank=2": "model.lora_rank is 2; it must be at most 0",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_is_refused(options):
    with refused(re.escape(REFUSED[options])):
        built(*options.split())


def test_other_trainings_refuse_what_they_do_not_do():
    for option in ("--model.train=norm", "--model.lora_rank=2"):
        with refused("supervised training trains the whole encoder"):
            parse(SupervisedConfig, [option])
    with refused(r"optim.frozen_steps is None, 2; it must be null, 0 for this model: its batch"):
        build_optimizer(timm.create_model("resnet18", num_classes=0), OptimConfig(frozen_steps=2))
    model, config = built(*LORA)
    assert {group["lr_scale"] for group in parameter_groups(model, OptimConfig(layer_decay=0.5))} == {1, 0.5, 0.25}
    with refused(r"model\.lora_rank is set; it must be null where the launcher shards"):
        Sharded(model, SimpleNamespace(), config.optim, config.run)


def test_a_moving_average_follows_the_changed_weights():
    model, config = built(*LORA, *FEATURES)
    step(model, config)
    first = {name: tensor.clone() for name, tensor in model.teacher.encoder.state_dict().items()}
    assert first.keys() == plain_names()
    update_moving_average(model.teacher.encoder, model.encoder, 0.75)
    now = merge(model.encoder).state_dict()
    assert not torch.equal(now["blocks.0.mlp.fc1.weight"], first["blocks.0.mlp.fc1.weight"])
    for name, tensor in model.teacher.encoder.state_dict().items():
        torch.testing.assert_close(tensor, 0.75 * first[name] + 0.25 * now[name])


def test_operations_of_what_is_trained():
    """No gradient of frozen weights; products of narrow matrices, once a step, are left out."""
    whole, config = built()
    part, _ = built("--model.train=^norm")
    adapted, _ = built(*LORA)
    counted = [executed_flops(model, *batch(model, config, 1)) for model in (whole, part, adapted)]
    patches, masked, width = 16, 8, 16
    embedding = 2 * patches * 8 * 8 * 3 * width  # the gradient of its filters, which the other two lack
    assert counted[0] - counted[2] == embedding
    of_all_tokens, of_masked = 12 + 2, 1 + 1 + 8  # matrices of width x width; the last block computes little more
    products = of_all_tokens * (1 + patches) + of_masked * masked
    assert counted[0] - counted[1] == embedding + 2 * products * width**2
    assert executed_flops(adapted, *batch(adapted, config, 3)) == 3 * counted[2]
    total, trained = count_parameters(adapted.encoder)
    assert total == sum(parameter.numel() for parameter in whole.encoder.parameters())
    assert trained == 2 * 2 * (4 + 2 + 5 + 5) * width


def test_an_average_begins_when_a_weight_is_first_trained():
    """By hand: the first weights of a frozen part are not averaged with, and are there while averages are."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2), "encoder": torch.nn.Linear(2, 2)})
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, average=0.5, average_warmup=False))
    averages: dict[str, torch.Tensor] = {}
    for number in range(6):
        model["head"](model["encoder"](torch.randn(4, 2))).square().sum().backward()
        if number < 3:
            model["encoder"].zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        for name, layer in model.items():
            weight = layer.weight.detach().clone()
            if name == "head" or number >= 3:
                averages[name] = weight.lerp(averages.get(name, weight), 0.5)
            with averaged_weights(optimizer):
                torch.testing.assert_close(layer.weight.detach(), averages.get(name, weight))
            assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("frozen, optimizer", [(3, "muon"), (2, "adam"), (2, "sgd")])
def test_frozen_steps_leave_the_bits_of_the_encoder(pretrain, finished_run, monkeypatch, frozen, optimizer):
    """And train the head; the first step after them trains the encoder."""
    heads, same = [], []
    finish_step, begun = TrainingStep.finish, exported(finished_run)

    def watched(self):
        returned = finish_step(self)
        heads.append(self.model.head.weight.detach().clone())
        same.append(equal_tensors(self.model.encoder.state_dict(), begun))
        return returned

    monkeypatch.setattr(TrainingStep, "finish", watched)
    settings = (f"--model.init_from={finished_run}", f"--optim.frozen_steps={frozen}", "--optim.average=0.5")
    pretrain(f"--optim.name={optimizer}", "--optim.lr=0.01", *settings)
    assert same == [number < frozen for number in range(4)]
    assert not any(map(torch.equal, heads, heads[1:]))


def test_low_rank_changes_are_merged_for_timm(pretrain, finished_run, capfd):
    run = pretrain(*ADAM, *LORA, f"--model.init_from={finished_run}", "--model.activation_checkpointing=true")
    first, second = exported(finished_run), by_timm(run / "encoder").state_dict()
    assert second.keys() == first.keys()
    assert "M are trained" in capfd.readouterr().out
    assert "LoRA" in (run / "encoder" / "README.md").read_text()
    assert sum(not torch.equal(tensor, first[name]) for name, tensor in second.items()) == 2 * len(BLOCKS_MATRICES)


def test_fine_tuning_begins_with_the_head(finished_run, tmp_path):
    settings = (*TINY_TUNING, "--run.steps=3", "--lrs=0.5", "--optim.frozen_steps=2")
    finetune.main([f"--encoder={finished_run}", *settings, f"--run.dir={tmp_path}"])
    first, second = (load_file(path / MODEL_FILE) for path in sorted(tmp_path.glob("lr_0.5/checkpoints/*")))
    begun = exported(finished_run)["blocks.0.attn.qkv.weight"]
    assert [torch.equal(each["encoder.blocks.0.attn.qkv.weight"], begun) for each in (first, second)] == [True, False]
    assert first["head.weight"].any()


def test_the_recipe_goes_on_from_a_run(pretrain, finished_run, capfd):
    recipe = (f"--config={ROOT / 'configs' / 'continue.yaml'}", f"--model.init_from={finished_run}")
    run = pretrain(*recipe, "--run.eval_every=2", "--optim.warmup_steps=1", "--optim.frozen_steps=1")
    assert "at risk" not in capfd.readouterr().err
    assert len(read_metrics(run)) == 4


def copied_encoder(run, folder, tag):
    """A copy of a run's encoder, with another tag."""
    shutil.copytree(run / "encoder", folder)
    config = read_json(folder / "config.json")
    config["pretrained_cfg"]["tag"] = tag
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_weights_are_those_that_no_run_of_mpp_left(finished_run, tmp_path):
    (checkpoint, *_) = complete_checkpoints(finished_run)
    of_run = (finished_run, finished_run / "encoder", finished_run / "encoder" / MODEL_FILE, checkpoint / MODEL_FILE)
    ours, theirs = (copied_encoder(finished_run, tmp_path / tag, tag) for tag in ("mpp", "lvd142m"))
    assert not any(is_published(str(path)) for path in (*of_run, ours, "zoo:simclr_cifar10"))
    assert is_published(str(theirs)) and is_published(str(theirs / MODEL_FILE))


def test_settings_that_harm_are_named_before_the_first_step(pretrain, tmp_path, capfd, finished_run):
    """Also without an evaluation; and once. Those of a run's weights are none: above."""
    published = copied_encoder(finished_run, tmp_path / "published", tag="lvd142m")
    for every in (0, 1):
        words = (f"--model.init_from={published}", "--run.steps=1", f"--run.eval_every={every}")
        pretrain(*words, dir=tmp_path / f"every_{every}")
        said = capfd.readouterr().err
        assert said.count("warning: trained weights at risk: optim.name muon, optim.lr") == 1
        assert "optim.warmup_steps 0, objective.name mean_color can destroy" in said


@pytest.mark.faults
@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_train_a_part_as_one_does(tmp_path, pretrain, finished_run, sharded):
    """A frozen start and parameters by name, killed in between. LoRA: copies alone."""
    runs = {"frozen": ("--optim.frozen_steps=3",), "part": ("--model.train=attn.proj", "--optim.frozen_steps=1")}
    if not sharded:
        runs["lora"] = EXPLORA
    common = (*ADAM, f"--model.init_from={finished_run}", "--optim.average=0.9")
    begun = exported(finished_run)
    for name, options in runs.items():
        one = pretrain(*common, *options, dir=tmp_path / "one" / name)
        start = partial(begin, tmp_path / name, *common, *options, processes=2, sharded=sharded)
        was_killed(start(prepare=partial(die_at, 3)))
        assert newest_step(tmp_path / name) == 2
        if name == "frozen":
            kept = load_file(complete_checkpoints(tmp_path / name)[-1] / MODEL_FILE)
            assert all(torch.equal(kept[f"encoder.{weight}"], tensor) for weight, tensor in begun.items())
        finish(start())
        close(tmp_path / name, one, "optim/grad_norm", "compute/pflop", abs=1e-5)
        assert exported(tmp_path / name).keys() == begun.keys()


@pytest.mark.parametrize("options", [(), LORA, PROJECTIONS, EXPLORA], ids=["all", "lora", "projections", "explora"])
@pytest.mark.parametrize("network", [(), ("--config=rivals/mae",)], ids=["predictor", "autoencoder"])
def test_each_trained_parameter_is_in_one_group_and_no_frozen_one(options, network):
    model, _ = built(*options, *network)
    trained = sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    changes = {id(p) for m in model.modules() if isinstance(m, LowRankChange) for p in m.parameters()}
    for name, layer_decay in product(("adam", "muon", "sgd"), (None, 0.5)):
        config = OptimConfig(name=name, layer_decay=layer_decay)
        if name == "muon" and options == LORA and not network:
            with refused(r"optim.name is muon, and no matrix .* must be adam"):
                parameter_groups(model, config)
            continue
        groups = parameter_groups(model, config)
        members = [[id(parameter) for parameter in group["params"]] for group in groups]
        assert sorted(chain(*members)) == trained
        for group, parameters in zip(groups, members, strict=True):
            if changes.intersection(parameters):
                assert not group.get("use_muon")
                assert layer_decay is None or group["lr_scale"] < 1

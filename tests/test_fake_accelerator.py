"""The commands on a fake accelerator: no operation mixes devices, and no step waits between two logged ones."""

import json
import shutil
from functools import partial
from itertools import zip_longest
from typing import get_args, get_type_hints

import fake_accelerator
import pytest
from conftest import ONLY_MASKED, TINY, read_json, tiny_without, weights_of
from server import Command
from test_distill import save_timm

from evaluation.config import EVERY
from mpp.config import ModelConfig, OptimConfig
from mpp.corruption import PATTERNS
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not fake_accelerator.HERE, reason="this torch has no devices in Python"),
]

SIX = ("--run.steps=6", "--run.log_every=3", "--run.checkpoint_every=100", "--data.eval_images=16")
SMALL = (*TINY, *SIX)
BETWEEN = ("update", "between")  # two logged steps
LOGGED = {  # where the host waits when a step is logged
    "index by a mask in metrics.measure_predictions",  # the accuracy on corrupted patches, by what became of them
    "bincount in objectives.<listcomp>",
    "bincount in objectives.count",  # in Python 3.12 and later
}


def choices(config: type, name: str) -> list[str]:
    return list(get_args(get_type_hints(config)[name]))


def side_by_side(**choices: list[str]) -> dict[str, list[str]]:
    """Runs with a choice of each setting: as many as the longest list."""
    runs = zip_longest(*([f"--{name}={choice}" for choice in each] for name, each in choices.items()))
    return {" ".join(filter(None, run)): [word for word in run if word] for run in runs}


PRETRAIN = side_by_side(
    **{
        "objective.name": [name for name in OBJECTIVES if name != "features"],
        "corruption.pattern": [name for name in PATTERNS if name != "random"],
        "model.position": choices(ModelConfig, "position")[1:],
        "optim.name": choices(OptimConfig, "name")[1:],
    }
)
PRETRAIN |= {f"network {name}": [f"--network.name={name}", *ONLY_MASKED] for name in NETWORKS if name != "predictor"}
PRETRAIN |= {
    "bf16": ["--run.precision=bf16", "--optim.name=muon"],
    "residual in bf16": ["--run.precision=bf16", "--model.residual=bf16", *ONLY_MASKED, "--network.name=autoencoder"],
    "MAE": ["--network.name=autoencoder", "--objective.name=pixels", "--objective.normalize=patch", *ONLY_MASKED],
    "positions in every block, Polyak average": ["--model.position_at=every", "--optim.average=0.9"],
    "the same positions, accumulation": ["--model.position_at=every_shared", "--data.batch_size=3"],
    "axial, stride, recomputed": ["--model.mixing=axial", "--model.stride=4", "--model.activation_checkpointing=true"],
    "SimMIM": ["--objective.name=pixels", "--objective.loss=l1", "--corruption.pattern=blocks"],
    "a moving average as teacher, fused attention": ["--objective.name=features", "--model.attention=fused"],
    "dropout, layer decay": ["--model.dropout=0.1", "--model.drop_path=0.1", "--optim.layer_decay=0.7"],
    "float32 pixels, factorized": ["--data.range=[10,200]", "--objective.factorized=true"],
    "float32 pixels of one channel": ["--data.range=[10,200]", "--data.channels=1", "--objective.name=pixels"],
}


def on_device(module: str, folder, *arguments: str) -> dict[str, set[str]]:
    """When -> where the host waited for the device."""
    file = folder / "waits.json"
    run = Command(module, *arguments, prepare=partial(fake_accelerator.pretend, file))
    assert run.wait() == [0], run.said[-3000:]
    waits: dict[str, set[str]] = {}
    for when, place in read_json(file):
        waits.setdefault(when, set()).add(place)
    assert not waits.keys() & set(BETWEEN), waits
    return waits


@pytest.mark.parametrize("options", PRETRAIN.values(), ids=PRETRAIN)
def test_pretraining_waits_where_it_logs_and_nowhere_else(tmp_path, options, tally):
    waits = on_device("pretrain", tmp_path, *SMALL, f"--run.dir={tmp_path / 'run'}", *options)
    assert waits.get("logged update", set()) <= LOGGED and "save" in waits, waits
    tally("fake accelerator: kinds of pre-training")


def test_its_bits_are_the_cpus(tmp_path, tally):
    """Of what computes in one order: Adam. And bf16 is computed with."""
    options = (*SMALL, "--optim.name=adam", "--probe.every=0")
    on_device("pretrain", tmp_path, *options, f"--run.dir={tmp_path / 'there'}")
    Command("pretrain", *options, f"--run.dir={tmp_path / 'here'}").wait()
    on_device("pretrain", tmp_path, *options, "--run.precision=bf16", f"--run.dir={tmp_path / 'bf16'}")
    bits = {name: weights_of(tmp_path / name) for name in ("there", "here", "bf16")}
    assert bits["there"] == bits["here"] != bits["bf16"]
    tally("fake accelerator: the bits of the CPU")


def test_a_run_that_is_stopped_goes_on(tmp_path, tally):
    """With the probe and the panel that come with an evaluation."""
    options = (*SMALL, "--run.checkpoint_every=3", "--probe.every=3", f"--run.dir={tmp_path / 'run'}")
    on_device("pretrain", tmp_path, *options)
    shutil.rmtree(tmp_path / "run" / "encoder")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    kept = tmp_path / "run" / "checkpoints" / "step_00000003" / "state.json"
    written = kept.stat().st_mtime_ns
    on_device("pretrain", tmp_path, *options)
    assert kept.stat().st_mtime_ns == written and (tmp_path / "run" / "encoder").is_dir()  # it began after step 3
    tally("fake accelerator: resume, with the probe and the panel")


@pytest.mark.parametrize("command", ["supervised", "soft", "contrastive", "finetune"])
def test_other_trainings(tmp_path, trained, command, tally):
    own = {"supervised": [], "contrastive": []}
    own["soft"] = [f"--distill.teacher={save_timm(tmp_path / 'teacher', 9)}", "--distill.kind=soft"]
    own["finetune"] = [f"--encoder={trained}", "--lrs=0.1"]
    unknown = {"contrastive": [], "finetune": ["--probe", "--model"]}.get(command, ["--probe"])
    options = [*tiny_without(*unknown), *SIX, *own[command], f"--run.dir={tmp_path / 'new'}"]
    on_device("supervised" if command == "soft" else command, tmp_path, *options)
    tally("fake accelerator: supervised, from a teacher, fine-tuning, SimCLR")


@pytest.mark.parametrize("command", ["features", "fewshot", "knn", "linear", "visualize"])
def test_judging(tmp_path, trained, command, tally):
    own = {"linear": ["--l2=0.001", "--iterations=5"]}
    own["visualize"] = [f"--pictures={json.dumps(EVERY)}", "--images=2", "--attention_images=4"]
    words = (f"--encoder={trained}", f"--out={tmp_path / 'out'}", "--data.workers=0")
    on_device(command, tmp_path, *words, *own.get(command, []))
    tally("fake accelerator: features, few-shot, kNN, linear probe, pictures")

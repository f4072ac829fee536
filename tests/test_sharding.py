"""Training that is sharded over processes (FSDP2): the same losses, the same checkpoints, less memory."""

from functools import partial

import pytest
import torch
from conftest import ADAM, TINY, TINY_TUNING, close, exported, launched, read_metrics
from conftest import same as same_bits
from server import Command, begin, die_at, finish, was_killed

from mpp.training.checkpoint import newest_step

pytestmark = pytest.mark.faults

TEN = ("--model.depth=3", "--run.steps=10", "--run.checkpoint_every=5", "--run.eval_every=5")


def shard_all(folder, runs):
    """Pre-train these in the same two processes, which share the weights."""
    words = [word for name, run in runs.items() for word in (*TINY, *run, f"--run.dir={folder / name}", "then")]
    return finish(Command("pretrain", *words, processes=2, sharded=True))


def same(one, other, tolerance=1e-5):
    """Whether two runs logged the same losses, norms and evaluations."""
    close(one, other, "optim/grad_norm", "heldout/loss", "compute/pflop", abs=tolerance)
    assert len(read_metrics(one)) == 10


def test_ten_losses_are_those_of_one_process(tmp_path, pretrain):
    """Adam with accumulation, an average, a probe, and gradients that are clipped hard; Muon."""
    runs = {
        "adam": (*TEN, *ADAM, "--data.batch_size=2", "--optim.average=0.9", "--optim.clip=0.1"),
        "muon": (*TEN, "--optim.name=muon", "--optim.lr=1e-2", "--model.activation_checkpointing=true"),
    }
    runs["adam"] += ("--probe.every=5", "--probe.images=60")
    assert "sharded (FSDP2)" in shard_all(tmp_path / "shards", runs).said
    for name, options in runs.items():
        ours, theirs = tmp_path / "shards" / name, pretrain(*options, dir=tmp_path / "one" / name)
        same(ours, theirs)
        assert exported(ours).keys() == exported(theirs).keys()
    probed = [read_metrics(tmp_path / kind / "adam", "features/rank/depth_01") for kind in ("shards", "one")]
    assert len(probed[0]) == 3 and probed[0] == pytest.approx(probed[1], rel=1e-3)


def test_gradients_that_travel_in_bf16_are_close_and_not_as_close_as_float32(tmp_path, pretrain):
    """Of copies; of shards: tests/test_collectives.py."""
    finish(begin(tmp_path / "bf16", *TEN, *ADAM, "--run.reduction=bf16", processes=2))
    found, expected = (read_metrics(folder) for folder in (tmp_path / "bf16", pretrain(*TEN, *ADAM)))
    assert found == pytest.approx(expected, abs=0.02) and found != pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("options", [ADAM, ("--optim.name=muon",)], ids=["adam", "muon"])
def test_three_processes_that_are_killed_end_with_the_same_bits(tmp_path, options):
    """Ten rows on three processes are 4, 4 and 2; one row is the first one's alone."""
    words = (*TEN, *options, "--optim.average=0.9", "--model.dropout=0.1", "--model.width=10", "--model.heads=1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    how = dict(processes=3, sharded=True)
    finish(begin(whole, *words, **how))
    was_killed(begin(killed, *words, prepare=partial(die_at, 7), **how))
    assert newest_step(killed) == 5
    finish(begin(killed, *words, **how))
    same_bits(killed, whole)


def test_a_run_goes_on_in_another_layout(tmp_path, pretrain, stopped_at):
    """One process, then two with shards, then two with copies, then one: the losses of one process all the way."""
    words = ("--run.steps=10", "--run.checkpoint_every=1", "--optim.average=0.9")
    moved = tmp_path / "run"
    stopped_at(3, *words)
    for step, sharded in ((6, True), (8, False)):
        was_killed(begin(moved, *words, processes=2, sharded=sharded, prepare=partial(die_at, step)))
        assert newest_step(moved) == step
    same(pretrain(*words), pretrain(*words, dir=tmp_path / "one"))


BF16 = {
    "accumulated": ("--data.batch_size=2", "--optim.average=0.9"),
    "checkpointed": ("--model.activation_checkpointing=true", "--model.position=relative"),
    "teacher": ("--config=rivals/data2vec", "--model.depth=4"),
    "autoencoder": ("--config=rivals/mae", "--network.decoder_depth=2", "--model.residual=bf16"),
    "layer scale": ('--model.arguments={"reg_tokens": 2, "init_values": 0.1, "qk_norm": true}',),
}


@pytest.mark.parametrize("kind", BF16)
def test_bf16_shards_compute_what_copies_do(tmp_path, kind):
    """Each product is that of copies under autocast. Only gradients are added up in another order."""
    options = (*TEN, "--run.precision=bf16", *ADAM, *BF16[kind])
    shards, copies = tmp_path / "shards", tmp_path / "copies"
    for folder in (shards, copies):
        finish(begin(folder, *options, processes=2, sharded=folder == shards))
    same(shards, copies, tolerance=1e-3)  # ten of Adam's steps later
    assert read_metrics(shards)[1] == pytest.approx(read_metrics(copies)[1], abs=1e-6)


KINDS = {
    "relative, sgd": ("--model.position=relative", "--model.depth=3", "--optim.name=sgd", "--optim.lr=0.1"),
    "shared, again": ("--model.position_at=every_shared", "--model.depth=3", "--model.activation_checkpointing=true"),
    "axial": ("--model.mixing=axial", "--model.stride=4", "--model.position=learned_2d"),
    "rotations of each block": ("--model.name=vit_small_patch16_rope_mixed_ape_224", "--model.img_size=64"),
    "tables of biases": ("--model.name=beit_base_patch16_224", "--model.img_size=64", "--optim.name=adam"),
}


def test_every_kind_of_encoder_can_be_sharded(tmp_path, pretrain):
    shard_all(tmp_path / "shards", {name: ("--run.steps=2", *options) for name, options in KINDS.items()})
    for name, options in KINDS.items():
        one = pretrain("--run.steps=2", *options, dir=tmp_path / "one" / name)
        close(tmp_path / "shards" / name, one, "optim/grad_norm", "heldout/loss", abs=1e-4)


@pytest.mark.parametrize(
    "module, options",
    [
        ("supervised", ("--model.name=test_resnet", "--model.img_size=64")),
        ("contrastive", ("--model.width=16", "--model.img_size=32")),
    ],
)
def test_supervised_and_contrastive_training_too(tmp_path, module, options):
    """A ResNet has batch norms, whose means are each process's own until they are judged."""
    for kind in ("shards", "copies"):
        words = (*TINY_TUNING, *options, "--run.steps=2", f"--run.dir={tmp_path / kind}")
        finish(Command(module, *words, processes=2, sharded=kind == "shards"))
    close(tmp_path / "shards", tmp_path / "copies", "heldout/loss", "heldout/accuracy", abs=1e-4)


@pytest.mark.parametrize(
    "name, processes, says",
    [
        ("gpu_1", 1, "1 process on cpu"),
        ("cpu_2", 2, "2 processes on cpu, 1 CPU thread each, bf16 (run.precision)\n"),
        ("fsdp_cpu_2", 2, "2 processes on cpu, 1 CPU thread each, bf16 (run.precision), sharded (FSDP2)\n"),
    ],
)
def test_the_configs_of_one_machine(tmp_path, name, processes, says):
    config = ("--config_file", f"configs/accelerate/{name}.yaml", "--main_process_port", "0")
    environments = launched(tmp_path / "launched", config)
    run = finish(begin(tmp_path / "run", "--run.steps=1", "--run.precision=bf16", environments=environments))
    assert len(environments) == processes and says in run.said, run.said
    assert {tensor.dtype for tensor in exported(tmp_path / "run").values()} == {torch.float32}

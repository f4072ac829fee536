"""torch.compile together with what a cluster trains with; once by inductor, which computes on a CPU, too."""

import os
import signal
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import TINY, read_metrics, weights_of
from functorch.compile import make_boxed_func
from model_inputs import draw_batch
from server import Command, begin, fails, finish, was_killed
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from mpp.config import Config
from mpp.config.parsing import parse
from mpp.models.networks import build_model
from mpp.training.checkpoint import newest_step
from mpp.training.loop import TrainingStep

SGD = ("--optim.name=sgd", "--optim.lr=1e-2")
"""Muon would amplify the rounding in which compiled kernels differ, and by how much depends on the CPU."""
CLUSTER = ("--model.attention=fused", "--model.activation_checkpointing=true", "--model.drop_path=0.1")


def as_one_graph(folder, dies_at=None, backend="aot_eager"):
    """In each process: refuse graph breaks; note how many graphs there are after each step."""
    compiled, finish_step = torch.nn.Module.compile, TrainingStep.finish
    torch.nn.Module.compile = lambda module: compiled(module, fullgraph=True, backend=backend)

    def noted(self):
        if self.step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = finish_step(self)
        with (folder / f"{self.layout.rank}.graphs").open("a") as file:
            file.write(f"{counters['stats']['unique_graphs']}\n")
        return result

    TrainingStep.finish = noted


@pytest.mark.faults
def test_evaluations_compile_two_graphs_and_later_ones_none(tmp_path):
    """One in evaluation mode, and one for its last batch, which is shorter. Dynamo's graphs are not lowered here."""
    words = ("--run.steps=7", "--run.eval_every=2", "--data.eval_images=20", "--run.compile=true")
    finish(begin(tmp_path / "run", *words, prepare=partial(as_one_graph, tmp_path, backend="eager")))
    assert (tmp_path / "0.graphs").read_text().split() == ["1", "1", "3", "3", "3", "3", "3"]


@pytest.mark.faults
def test_vit_b_is_one_graph_forward_and_one_backward():
    """At its depth of 12, in bf16. Nothing is computed, and nothing lowered: tensors have no memory."""
    graphs = Counter()

    def counted(name, graph, inputs):
        graphs[name] += 1
        return make_boxed_func(graph)

    compilers = {f"{name}_compiler": partial(counted, name) for name in ("fw", "bw")}
    config = parse(Config, ["--model.name=vit_base_patch16_224", "--model.img_size=224", "--model.patch_size=16"])
    model = build_model(config)[0].to("meta")
    compiled = torch.compile(model, backend=aot_autograd(**compilers), fullgraph=True)  # raises where a graph breaks
    corruption = draw_batch(config.corruption, (14, 14), 2).to("meta")
    with torch.autocast("cpu", torch.bfloat16):
        predictions = compiled(torch.zeros(2, 3, 224, 224, dtype=torch.uint8, device="meta"), corruption)
    predictions.sum().backward()
    assert graphs == {"fw": 1, "bw": 1}


@pytest.mark.faults
def test_a_model_that_is_sharded_is_not_compiled(tmp_path):
    run = begin(tmp_path / "run", "--run.compile=true", processes=2, sharded=True)
    fails(run, "run.compile is true; it must be false where")


def losses_of_both(folder, words, tolerance, processes=1, backend="aot_eager"):
    """Train uncompiled, and compiled: the losses are close, and the one graph is made for the first update alone."""
    plain, compiled = (f"--run.dir={folder / name}" for name in ("plain", "compiled"))
    runs = (*words, plain, "then", *words, "--run.compile=true", compiled)
    prepare = partial(as_one_graph, folder, backend=backend)
    finish(Command("pretrain", *runs, processes=processes, prepare=prepare))
    losses = read_metrics(folder / "compiled")
    assert losses == pytest.approx(read_metrics(folder / "plain"), abs=tolerance)
    for rank in range(processes):
        graphs = list(map(int, (folder / f"{rank}.graphs").read_text().split()))
        assert graphs == [0] * len(losses) + [graphs[-1]] * len(losses) and graphs[-1] >= 1
    return losses


OF_64 = ("--model.img_size=64", *SGD)
KINDS = {
    "bf16": (5e-3, *CLUSTER, "--run.precision=bf16"),
    "residual in bf16": (5e-3, *CLUSTER, "--run.precision=bf16", "--model.residual=bf16"),
    "rotations, autoencoder": (1e-5, "--model.name=vit_small_patch16_dinov3", "--config=rivals/mae", *OF_64),
    "rotations of each block": (1e-5, "--model.name=vit_small_patch16_rope_mixed_ape_224", *CLUSTER[1:], *OF_64),
    "tables of biases": (1e-5, "--model.name=beit_base_patch16_224", *OF_64),
    "low-rank changes": (1e-5, "--model.train=blocks\\.1\\.", "--model.lora_rank=2", *SGD),
}
KINDS["rotations, autoencoder"] += ("--model.position=learned", "--network.decoder_depth=2")


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_training_is_one_graph_and_the_same(tmp_path, kind):
    tolerance, *options = KINDS[kind]
    losses_of_both(tmp_path, (*TINY, *options), tolerance)


@pytest.mark.faults
def test_the_compilers_code_computes_the_same(tmp_path):
    """Of one block, which takes it a minute."""
    losses_of_both(tmp_path, (*TINY, "--model.depth=1", *SGD), 1e-5, backend="inductor")


@pytest.mark.faults
def test_two_processes_that_compile_and_are_killed_end_with_the_same_bits(tmp_path):
    """The model has more than a megabyte of gradients: dynamo cuts its graph where they begin to travel."""
    words = (*CLUSTER, "--run.steps=6", "--model.width=192", "--model.depth=3", *SGD)
    losses = losses_of_both(tmp_path, (*TINY, *words), 1e-5, processes=2)
    start = partial(begin, tmp_path / "killed", *words, "--run.compile=true", processes=2)
    was_killed(start(prepare=partial(as_one_graph, tmp_path, dies_at=5)))
    assert newest_step(tmp_path / "killed") == 4
    finish(start(prepare=partial(as_one_graph, tmp_path)))
    assert weights_of(tmp_path / "compiled") == weights_of(tmp_path / "killed")
    assert read_metrics(tmp_path / "killed") == losses

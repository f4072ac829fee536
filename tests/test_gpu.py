"""Promises about a GPU, tested on one: `pytest -m gpu`, alone, for all other tests hide it.

`GPU_SUITE_DEVICE=cpu pytest -m gpu` rehearses on a CPU what a CPU can do.
"""

import os
from datetime import timedelta

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import TINY, killed_at, read_metrics, run_command, weights_of

from evaluation import features
from evaluation.frozen.features import ARRAY_NAMES
from mpp.errors import Diverged
from mpp.pretrain import main
from mpp.runtime.processes import set_timeout
from mpp.runtime.start import run_main
from mpp.training.loop import TrainingStep

DEVICE = os.environ.get("GPU_SUITE_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="no GPU to be seen; all but -m gpu hide it"),
]
on_cuda = pytest.mark.skipif(not CUDA, reason="is about CUDA alone")
on_two = pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="takes two GPUs")

TEN = ("--run.steps=10", "--run.checkpoint_every=5", "--data.workers=2", "--data.cache_gb=0")
FALL = 0.5  # of the loss in ten steps, at least: the losses that are compared below are far closer


@pytest.fixture
def run(pretrain, tmp_path, monkeypatch):
    """A tiny run on a device, in ten steps: run("cpu", "--optim.name=sgd") -> its folder."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the CPU's float32 is float32

    def on(device: str, *arguments: str, name: str = ""):
        with monkeypatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", str(device == "cpu"))
            return pretrain(*TEN, *arguments, dir=tmp_path / (name or device))

    return on


@pytest.fixture
def exact(monkeypatch):
    """Sums in one order, as far as torch has such kernels."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_waiting():
    """no_waiting(True): from now on it is an error that the host waits for the device; False: no longer."""
    forbid = torch.cuda.set_sync_debug_mode if CUDA else lambda mode: None
    yield lambda strict: forbid("error" if strict else "default")
    forbid("default")


@pytest.mark.parametrize("optimizer, tolerance", [("adam", 1e-3), ("muon", 5e-3)])  # Muon computes in bf16
def test_ten_losses_are_the_cpus(run, optimizer, tolerance):
    """In float32; also what is measured, on the held-out images too, and the probe. The CPU's attention is unfused."""
    options = (f"--optim.name={optimizer}", "--data.eval_images=64", "--probe.every=10", "--optim.lr=1e-2")
    here = run(DEVICE, *options, name="device")
    there = run("cpu", *options)
    losses = read_metrics(there)
    assert len(losses) == 10 and losses[1] - losses[10] > FALL
    assert read_metrics(here) == pytest.approx(losses, abs=tolerance)
    assert read_metrics(here, "heldout/loss") == pytest.approx(read_metrics(there, "heldout/loss"), abs=tolerance)
    assert read_metrics(here, "nearest") == pytest.approx(read_metrics(there, "nearest"), abs=1e-6)  # of integers
    for key in ("heldout/accuracy", "knn/depth_01", "knn/depth_02"):
        assert read_metrics(here, key) == pytest.approx(read_metrics(there, key), abs=0.05)  # of 64 images


@pytest.mark.parametrize("precision, compile", [("fp32", "true"), ("bf16", "false"), ("bf16", "true")])
def test_bf16_and_the_compiler_train_the_same(run, precision, compile):
    options = ("--optim.name=adam", "--optim.lr=1e-2")
    other = run(DEVICE, *options, f"--run.precision={precision}", f"--run.compile={compile}", name="other")
    assert f"precision: {precision}" in (other / "config.yaml").read_text()
    tolerance = 1e-3 if precision == "fp32" else 1e-2
    assert read_metrics(other) == pytest.approx(read_metrics(run(DEVICE, *options)), abs=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer, step", [("adam", 7), ("muon", 6)])
def test_a_killed_run_ends_with_the_same_bits(run, exact, precision, optimizer, step):
    """With deterministic kernels; dropout and accumulation on the way."""
    options = (f"--run.precision={precision}", f"--optim.name={optimizer}", "--model.dropout=0.1")
    options += ("--model.drop_path=0.1", "--data.batch_size=4", "--optim.average=0.9")
    whole = run(DEVICE, *options, name="whole")
    with killed_at(step):
        run(DEVICE, *options)
    killed = run(DEVICE, *options)
    assert weights_of(whole) == weights_of(killed) and read_metrics(whole) == read_metrics(killed)


@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
def test_the_host_does_not_wait_in_a_step(run, monkeypatch, no_waiting, optimizer):
    """Between two lines of metrics; the first two steps set things up."""
    strict = {"add_pass": [], "finish": []}

    def watch(name):
        method = getattr(TrainingStep, name)

        def watched(self, *given):
            strict[name].append(self.step > 1 and not self.measure)
            no_waiting(strict[name][-1])
            try:
                return method(self, *given)
            finally:
                no_waiting(False)

        monkeypatch.setattr(TrainingStep, name, watched)

    watch("add_pass")
    watch("finish")
    options = ("--optim.average=0.9", "--run.log_every=5", "--data.batch_size=4", "--run.precision=bf16")
    run(DEVICE, f"--optim.name={optimizer}", *options)
    assert strict["finish"] == [False] * 2 + [True] * 2 + [False] + [True] * 4 + [False]


@on_cuda
def test_a_wait_would_be_noticed(no_waiting):
    number = torch.ones((), device=DEVICE)
    no_waiting(True)
    with pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@on_cuda
def test_out_of_memory_is_one_line_and_leaves_nothing_behind(tmp_path, capsys):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * 2**20) / total)
    words = [*TINY, *TEN, "--optim.global_batch_size=2048", f"--run.dir={tmp_path / 'run'}"]
    try:
        with pytest.raises(SystemExit) as ended:
            run_main(lambda: main(words))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the GPU is out of memory; lower data.batch_size")
    assert torch.cuda.memory_allocated() == before
    main([*words, "--data.batch_size=64", "--run.steps=1"])  # as it advises


@on_cuda
def test_a_diverged_run_leaves_nothing_on_the_gpu(run):
    before = torch.cuda.memory_allocated()
    with pytest.raises(Diverged) as error:
        run(DEVICE, "--optim.name=adam", "--optim.lr=1e30")
    assert error and torch.cuda.memory_allocated() == before


def test_frozen_features_are_the_cpus(run, tmp_path, monkeypatch):
    folder = run("cpu")
    features_on = {}
    for place in ("cpu", DEVICE):
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(place == "cpu"))
        AcceleratorState._reset_state(reset_partial_state=True)  # it stays on the device of its first use
        out = tmp_path / f"{place}.npz"
        features.main([f"--encoder={folder}", "--precision=fp32", "--data.workers=0", f"--out={out}"])
        features_on[place] = np.load(out)
    for key in ARRAY_NAMES:
        np.testing.assert_allclose(features_on[DEVICE][key], features_on["cpu"][key], rtol=1e-3, atol=1e-3)


@on_cuda
def test_nccls_timeout_can_be_set():
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        set_timeout(timedelta(minutes=7))
        group = torch.distributed.distributed_c10d._get_default_group()
        assert group._get_backend(torch.device("cuda")).options._timeout == timedelta(minutes=7)
    finally:
        torch.distributed.destroy_process_group()


@on_two
@pytest.mark.parametrize("name", ["adam", "muon"])
@pytest.mark.parametrize("layout", ["gpu_8", "fsdp_8"])
def test_two_gpus_are_one_run(run, tmp_path, name, layout):
    optim = [f"--optim.name={name}", "--optim.lr=1e-2"]
    launch = ("accelerate", "launch", "--config_file", f"configs/accelerate/{layout}.yaml", "--num_processes", "2")
    two = run_command(*launch, "mpp/pretrain.py", *TINY, *TEN, *optim, f"--run.dir={tmp_path / 'two'}")
    assert two.returncode == 0 and "2 processes on cuda" in two.stdout, two.stderr
    one = run(DEVICE, *optim)
    assert read_metrics(tmp_path / "two") == pytest.approx(read_metrics(one), abs=1e-3)

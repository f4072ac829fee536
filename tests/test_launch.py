"""How a process starts: threads, precision, promises."""

import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from accelerate import PartialState
from conftest import read_metrics, refused

import mpp.pretrain
from mpp.config import RunConfig
from mpp.errors import Diverged, UserError
from mpp.runtime import start
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.processes import check_address, check_sharding, on_main_process
from mpp.runtime.start import choose_precision, choose_threads, run_main, user_message
from mpp.training.log import check_trackers
from mpp.training.loop import TrainingStep

MEMORY = ("data.batch_size", "model.activation_checkpointing")
GONE = ("does not answer", "run the same command to resume")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    "threads, environment, processes, expected",
    [
        (0, None, 1, CORES),
        (0, "1", 1, CORES),  # what the launcher sets by itself
        (0, "1", None, 1),
        (0, "4,2", 1, CORES),  # what is no number is no choice
        (5, "3", 1, 5),
        (0, "1", CORES, 1),
        (0, "1", 4 * CORES, 1),
    ],
)
def test_threads(monkeypatch, threads, environment, processes, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert choose_threads(RunConfig(threads=threads)) == expected


@pytest.mark.parametrize(
    "asked, launcher, native, expected, reason",
    [
        ("fp32", "bf16", True, "fp32", "the launcher's choice was bf16"),
        ("bf16", "no", False, "bf16", "run.precision"),
        ("auto", "bf16", False, "bf16", "launcher"),
        ("auto", "no", True, "bf16", "computed by this hardware"),
        ("auto", "no", False, "fp32", "no bf16 in this hardware"),
    ],
)
def test_precision_says_who_wins(monkeypatch, asked, launcher, native, expected, reason):
    monkeypatch.setattr(start, "bf16_is_native", lambda: native)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    precision, why = choose_precision(RunConfig(precision=asked))
    assert precision == expected and reason in why
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with refused("fp16; it must be bf16 or no"):
        choose_precision(RunConfig())


def test_processes_wait_long_for_images_and_not_for_a_step(pretrain, group_of_one, monkeypatch):
    """The timeout of the group, while the images are loaded and while they are trained on."""
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    seen = []

    def note(where, name):
        function = getattr(where, name)

        def noted(*args, **options):
            seen.append(backend.options._timeout)
            return function(*args, **options)

        monkeypatch.setattr(where, name, noted)

    note(mpp.pretrain, "load_image_datasets")
    note(TrainingStep, "finish")
    pretrain("--run.steps=1")
    assert seen == [timedelta(hours=6), timedelta(minutes=20)]


def test_other_parallelism_is_refused(monkeypatch):
    monkeypatch.setattr(start, "DATA_PARALLEL", ())
    with refused("distributed_type is NO; it must be MULTI_GPU, or FSDP of version 2"):
        start.start(RunConfig(trackers=()))


@pytest.mark.parametrize(
    "error, said",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), MEMORY),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1200000ms for recv"), GONE),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41000"), GONE),
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [10.0.0.2]: Software caused connection"), GONE),
    ],
)
def test_errors_of_torch_are_told_with_what_to_do(error, said):
    assert all(words in user_message(error) for words in said)


@pytest.mark.parametrize(
    "address, environment, is_refused",
    [
        ("127.0.1.1", {}, True),  # Debian's default
        ("10.0.0.2", {}, False),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, False),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "4"}, False),  # one machine
        ("127.0.1.1", {"MASTER_ADDR": "127.0.0.1"}, False),
    ],
)
def test_a_machine_that_others_cannot_reach_is_refused(monkeypatch, address, environment, is_refused):
    for name, value in ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    said = r"GLOO_SOCKET_IFNAME is not set; .* leads to 127\.0\.1\.1"
    with refused(said) if is_refused else nullcontext():
        check_address()


def test_a_bug_keeps_its_traceback():
    bug = ValueError("zip()")
    for act in (run_main, partial(on_main_process, PartialState())):
        with pytest.raises(type(bug)) as raised:
            act(Mock(side_effect=bug))
        assert raised.value is bug


@pytest.mark.parametrize("error", [UserError("data.path is x"), Diverged("not finite"), OSError(28, "No space left")])
def test_what_a_user_can_mend_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(Mock(side_effect=error))
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {error}\n"


def test_a_launcher_that_was_told_cpu_leaves_the_gpu_alone(monkeypatch):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not uses_gpu()  # hidden from tests and what they start
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert uses_gpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not uses_gpu()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(start, "uses_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with refused("LOCAL_RANK is 1; it must be below 1"):
        start.start(RunConfig())


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    start.start(RunConfig(trackers=(), threads=1))
    assert "driver may be too old" in capsys.readouterr().err


def test_processes_that_round_differently_are_refused(pretrain, monkeypatch):
    others = {"fp32": "bf16", "bf16": "fp32"}
    monkeypatch.setattr(start, "from_all", lambda own: [own, others[own]])
    with refused(r"the processes compute in fp32 and in bf16; run\.precision must name one"):
        pretrain("--optim.name=adam")


def test_accelerates_accumulation_does_not_divide_the_loss_again(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert start.start(RunConfig(trackers=(), threads=1)).gradient_accumulation_steps == 1


def test_the_launchers_compiler_does_not_rename_the_weights(pretrain, stopped_at, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    stopped_at(3)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    assert 4 in read_metrics(pretrain())  # found its weights in the checkpoint


def test_a_tracker_that_is_not_there_is_named():
    check_trackers(RunConfig())
    with refused(r"run\.trackers is nonsense; it must be installed: .*tensorboard"):
        check_trackers(RunConfig(trackers=("tensorboard", "nonsense")))


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("FSDP_VERSION", "1", r"fsdp_version is 1; it must be 2 \(--fsdp_version 2\)"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params is true; it must be false"),
    ],
)
def test_what_is_not_there_is_refused(monkeypatch, variable, value, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_sharding()
    monkeypatch.setenv(variable, value)
    with refused(message):
        check_sharding()

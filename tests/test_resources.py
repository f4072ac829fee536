"""Looks at a machine before a run: shared memory for batches, memory for decoded images, disk for checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import timm
import torch
from conftest import views_of
from torch.utils.data import Dataset

from mpp.config import Config, DataConfig, ModelConfig, RunConfig
from mpp.data import decoded_cache
from mpp.data.sources import load_image_datasets
from mpp.data.views import batch_bytes
from mpp.data.workers import WatchedLoader, deaths_explained, kill_workers
from mpp.errors import UserError
from mpp.models.attention import attention_kernel
from mpp.models.networks import build_model
from mpp.runtime import resources
from mpp.runtime.resources import (
    LoaderRoom,
    available_memory,
    disk_shortage,
    loader_bytes,
    loader_room,
    memory_cgroups,
)
from mpp.training import loop
from mpp.training.loop import Loop
from mpp.training.run import describe_attention

MB = 10**6
PAGE = 4096


@pytest.fixture
def shared_memory(monkeypatch):
    """Let /dev/shm be of other sizes: shared_memory(free=64 * MB)."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(resources.sys, "platform", "linux")
        monkeypatch.setattr(resources, "SHARED_MEMORY", SimpleNamespace(is_dir=lambda: True))
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, used=0, total=free))

    return set_free


# --- shared memory ---


@pytest.mark.parametrize(
    ("workers", "evaluation_workers", "gpu", "local_processes", "batches"),
    [
        pytest.param(0, 0, False, 8, 0, id="the training process loads"),
        pytest.param(12, 4, True, 1, 32, id="two wait for each loader process"),
        pytest.param(12, 4, True, 8, 256, id="eight GPUs"),
        pytest.param(2, 2, False, 1, 10, id="a CPU computes with one, and takes the next"),
    ],
)
def test_batches_in_shared_memory(monkeypatch, workers, evaluation_workers, gpu, local_processes, batches):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_processes))
    monkeypatch.setattr(resources, "uses_gpu", lambda: gpu)
    assert loader_bytes(workers, evaluation_workers, 20 * MB) == batches * 20 * MB


@pytest.mark.parametrize(
    ("free", "local_processes", "expected"),
    [
        pytest.param(64 * MB, 1, (1, 0), id="a container's"),
        pytest.param(39 * MB, 1, (0, 0), id="not one"),
        pytest.param(480 * MB, 1, (12, 0), id="evaluations come second"),
        pytest.param(639 * MB, 1, (12, 3), id="all but one"),
        pytest.param(640 * MB, 1, (12, 4), id="all, to the byte"),
        pytest.param(640 * MB, 8, (2, 0), id="eight processes share it"),
        pytest.param(64_000 * MB, 8, (12, 4), id="half of a machine's memory"),
    ],
)
def test_as_many_loader_processes_as_fit(monkeypatch, shared_memory, free, local_processes, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_processes))
    monkeypatch.setattr(resources, "uses_gpu", lambda: True)
    shared_memory(free)
    room = loader_room(12, 4, 20 * MB)
    assert room[:2] == expected
    assert bool(room.shortage) == (expected != (12, 4))


def test_no_look_where_batches_do_not_travel_through_dev_shm(monkeypatch, shared_memory):
    shared_memory(0)
    monkeypatch.setattr(resources.sys, "platform", "darwin")
    assert loader_room(12, 4, 20 * MB) == LoaderRoom(12, 4)


def test_the_size_of_a_batch_is_that_of_its_tensors_in_pages():
    train, _ = load_image_datasets(DataConfig())
    views = views_of(train)
    sample = views[0, 0]
    images = 100 * sample.images.nbytes
    assert images > PAGE
    assert images <= batch_bytes(views, 100) <= 1.5 * images + 16 * PAGE
    assert batch_bytes(views, 1) % PAGE == 0


@pytest.fixture
def room_for_five_batches(shared_memory) -> list[str]:
    """Options of a run, a batch of which is 8 images of 96 pages and at most 8 pages of other tensors."""
    shared_memory(5 * (96 + 8) * PAGE)
    return ["--model.img_size=128", "--run.steps=1", "--data.cache_gb=0"]


def test_fewer_loader_processes_where_their_number_is_not_given(pretrain, room_for_five_batches, capsys):
    folder = pretrain(*room_for_five_batches, without="--data.workers")
    assert (folder / "encoder").is_dir()
    printed = capsys.readouterr().out
    assert "note: 1 of 2 loader processes (data.workers), and 0 of 2 for evaluations: all need up to 4" in printed
    assert "docker run --shm-size=1g" in printed


def test_loader_processes_that_were_given_and_do_not_fit_are_refused(pretrain, room_for_five_batches):
    with pytest.raises(UserError) as refused:
        pretrain(*room_for_five_batches, "--data.workers=12", without="--data.workers")
    message = str(refused.value)
    assert message.startswith("data.workers is 12; it must be at most 1 (0: the training process loads): all need up ")
    assert "of shared memory, and " in message
    assert message.endswith(" has 2.13 MB; start the container with `docker run --shm-size=1g`")


def test_loader_processes_that_were_given_and_fit_are_kept_and_those_of_evaluations_give_way(
    pretrain, room_for_five_batches, capsys
):
    pretrain(*room_for_five_batches, "--data.workers=1", without="--data.workers")
    assert "note: 1 of 1 loader processes (data.workers), and 0 of 1 for evaluations" in capsys.readouterr().out


class NoRoom:
    """Data that cannot be moved to shared memory."""

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


class NoRoomDataset(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> NoRoom:
        return NoRoom()


def test_a_batch_without_room_in_shared_memory_is_an_error_and_not_waited_for():
    loader = WatchedLoader(NoRoomDataset(), str, batch_size=None, num_workers=1, timeout=20)
    with pytest.raises(UserError, match=r"^shared memory .* no room .* data\.workers, .*--shm-size=8g`$"):
        list(loader)
    kill_workers()


def test_a_bus_error_is_explained_by_shared_memory():
    message = "DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers are "
    with pytest.raises(UserError, match=r"died of a bus error: shared memory .*--shm-size"), deaths_explained():
        raise RuntimeError(message)


# --- memory ---


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """Let this process be in a control group: cgroup("memory.max", ...)."""
    monkeypatch.setattr(resources, "memory_cgroups", lambda: [tmp_path / "job", tmp_path])
    monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))

    def write(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, content in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(f"{content}\n")

    return write


def test_available_memory_is_the_machines_without_a_limit(cgroup):
    assert available_memory() == 10_000
    cgroup("job", memory__max="max", memory__current=9_000, memory__stat="inactive_file 0")
    assert available_memory() == 10_000


def test_available_memory_is_within_the_limits_of_all_control_groups(cgroup):
    cgroup("job", memory__max=9_000, memory__current=8_500, memory__stat="anon 8000\ninactive_file 500")
    assert available_memory() == 1_000
    cgroup(".", memory__max=20_000, memory__current=19_900, memory__stat="anon 1\ninactive_file 0")
    assert available_memory() == 100


def test_available_memory_knows_control_groups_of_version_1(cgroup):
    cgroup("job", memory__limit_in_bytes=5_000, memory__usage_in_bytes=4_000, memory__stat="total_inactive_file 200")
    assert available_memory() == 1_200


def test_control_groups_of_this_process_are_found():
    for folder in memory_cgroups():
        assert folder.is_relative_to(resources.CGROUPS)


@pytest.mark.parametrize(("available", "warned"), [(8 * 633 * 3 * 10**5, False), (10**6, True)])
def test_decoded_images_that_memory_has_no_room_for_are_warned_of(monkeypatch, capsys, available, warned):
    train, _ = load_image_datasets(DataConfig())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(decoded_cache, "available_memory", lambda: available)
    assert decoded_cache.cache_decoded(train, DataConfig(workers=0)).decoded
    printed = capsys.readouterr().err
    assert printed.count("warning: data.cache_gb is 0.5: decoded images take ") == warned
    assert ("in each of 4 processes" in printed) == warned


# --- disk ---


@pytest.fixture
def disk(monkeypatch):
    """Let the disks be of other sizes: disk(free=100)."""

    def set_free(free: int, total: int = 10**12) -> None:
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=total))

    return set_free


def test_a_disk_too_small_for_all_checkpoints_is_warned_of(disk, tmp_path):
    disk(free=3_100 * MB)
    assert disk_shortage(tmp_path / "run", 3, 1_000 * MB, 100 * MB) == ""
    disk(free=3_099 * MB)
    shortage = disk_shortage(tmp_path / "run", 3, 1_000 * MB, 100 * MB)
    assert shortage.startswith("3.1 GB are free on the disk of run.dir ")
    assert shortage.endswith("take up to 3.1 GB more; choose another run.dir, or lower run.keep_checkpoints")


def test_a_disk_too_small_for_one_checkpoint_is_refused(disk, tmp_path):
    disk(free=999 * MB)
    with pytest.raises(UserError, match=r"^999 MB are free .*, and a checkpoint takes 1 GB; choose another run\.dir"):
        disk_shortage(tmp_path, 1, 1_000 * MB, 0)


def test_a_disk_that_does_not_say_its_size_is_not_judged(disk, tmp_path):
    disk(free=0, total=0)
    assert disk_shortage(tmp_path, 1, 1_000 * MB, 0) == ""


def test_a_run_looks_at_its_disk_after_its_first_step(pretrain, disk, capsys):
    disk(free=300_000)
    pretrain()
    assert "its checkpoints and encoder take up to " in capsys.readouterr().err


def test_a_run_ends_where_its_disk_has_no_room_for_a_checkpoint(pretrain, disk):
    disk(free=10)
    with pytest.raises(UserError, match=r"free on the disk of run\.dir .*; choose another run\.dir"):
        pretrain()


def test_one_process_looks_at_the_disk_for_all(monkeypatch):
    monkeypatch.setattr(loop, "kept_steps", None)  # may not be called
    step = Mock(checkpoint_bytes=lambda: 10**18, encoder_bytes=lambda: 0)  # which all gather
    another = SimpleNamespace(is_main_process=False)
    run = SimpleNamespace(accelerator=another, run_config=RunConfig(), training_step=step, folder=Path("run"))
    Loop.look_at_disk(run)


# --- attention ---


@pytest.mark.parametrize(
    ("attention", "position", "kernel"),
    [("fused", "learned", "flash"), ("unfused", "learned", "unfused"), ("fused", "relative_bias", "math")],
)
def test_the_kernel_of_attention_is_known(attention, position, kernel):
    config = Config(model=ModelConfig(width=32, heads=2, depth=1, img_size=32, attention=attention, position=position))
    model, _ = build_model(config)
    assert attention_kernel(model, 17, torch.device("cpu"), torch.float32) == kernel


@pytest.mark.parametrize(
    ("name", "precision", "line"),
    [
        ("vit_tiny_patch16_224", "bf16", "attention: flash"),
        ("resnet18", "no", "attention: not an attention layer from timm"),
    ],
)
def test_the_line_on_attention(name, precision, line):
    encoder = timm.create_model(name)
    task = SimpleNamespace(model=SimpleNamespace(encoder=encoder))
    accelerator = SimpleNamespace(device=torch.device("cpu"), mixed_precision=precision)
    assert describe_attention(task, accelerator) == line

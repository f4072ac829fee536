"""What a machine has for a run: shared memory for batches, disk for checkpoints, a kernel for attention."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch.utils.data import Dataset

from mpp.config import Config, ModelConfig
from mpp.data.workers import WORKERS_ARE_FORKS, WatchedLoader, deaths_explained, kill_workers
from mpp.errors import UserError
from mpp.models.attention import attention_kernel
from mpp.models.networks import build_model
from mpp.training.run import describe_attention


class NoRoom(Dataset):
    """Its batches cannot be sent."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> "NoRoom":
        return self

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.skipif(not WORKERS_ARE_FORKS, reason="the dataset cannot be sent either")
def test_a_batch_that_cannot_be_sent_is_an_error_and_not_waited_for(capfd):
    loader = WatchedLoader(NoRoom(), str, batch_size=None, num_workers=1, timeout=20)
    with pytest.raises(UserError, match=r"a loader process died \(.*data.workers"), deaths_explained():
        list(loader)
    assert "No space left on device" in capfd.readouterr().err
    kill_workers()


def test_a_loader_that_has_not_begun_is_not_blamed_for_a_death():
    loader = WatchedLoader(NoRoom(), str, batch_size=None, num_workers=1)
    assert loader.unfinished_images(()) == []


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

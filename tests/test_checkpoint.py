"""Complete or absent, exact, checked."""

import errno
from unittest.mock import Mock

import pytest
import torch

from mpp.errors import UserError
from mpp.training.checkpoint import complete_checkpoints, restore, save_checkpoint, snapshot


def trained(seed, steps=3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW([dict(params=model[0].parameters()), dict(params=model[1].parameters())], fused=True)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model, optimizer):
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_is_restored_goes_on_with_the_same_bits(tmp_path):
    model, optimizer = trained(0)
    save_checkpoint(tmp_path, 3, snapshot(model, optimizer), keep=2)
    other, its_optimizer = trained(1, steps=0)
    assert restore(tmp_path, other, its_optimizer)[0] == 3
    for _ in range(3):
        train(model, optimizer)
        train(other, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "denied")])
def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(tmp_path, monkeypatch, error):
    """Else the run would begin anew, and delete it."""
    save_checkpoint(tmp_path, 1, snapshot(*trained(0)), keep=2)
    monkeypatch.setattr("mpp.training.checkpoint.sha256_of", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"step_00000001 cannot be read now \(.*\); the same command goes on"):
        restore(tmp_path, *trained(1, steps=0))


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 20):
        save_checkpoint(tmp_path, step, snapshot(*trained(0)), keep=2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000010", "step_00000020"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_00000010", "step_00000020"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "state"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys, damage, file):
    save_checkpoint(tmp_path, 1, snapshot(*trained(0, steps=1)), keep=2)
    newest = save_checkpoint(tmp_path, 2, snapshot(*trained(0, steps=2)), keep=2)
    path = newest / ("state.json" if damage == "state" else file)
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    else:
        data[-9] ^= 1
        path.write_bytes(data[: len(data) // 2] if damage in ("truncate", "state") else data)
    model, optimizer = trained(1, steps=0)
    assert restore(tmp_path, model, optimizer)[0] == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained(0, 1)[0].parameters(), strict=True))
    assert f"{newest} is damaged ({path.name})" in capsys.readouterr().err
    save_checkpoint(tmp_path, 1, snapshot(*trained(0)), keep=1)  # what is damaged does not count as kept
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_00000001"]


def test_a_checkpoint_that_is_being_written_is_not_there(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, snapshot(*trained(0)), keep=2)

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mpp.training.checkpoint.save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, snapshot(*trained(0)), keep=2)
    assert restore(tmp_path, *trained(1, steps=0))[0] == 1
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, snapshot(*trained(0)), keep=2)
    assert restore(tmp_path, *trained(1, steps=0))[0] == 2

"""Complete or absent, exact, checked."""

import errno
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from conftest import equal_tensors, interrupted_after, refused, weights_of
from model_inputs import small_vit
from test_untrusted import Payload
from torch.distributed.fsdp import fully_shard

from mpp.config import OptimConfig
from mpp.runtime.files import Held, hold
from mpp.training import checkpoint
from mpp.training.checkpoint import damaged_files, load_checkpoint, newest_whole, resume, save_checkpoint, snapshot
from mpp.training.optim import build_optimizer
from mpp.training.parallel import sharding_units


def network(seed, steps=3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW([dict(params=model[0].parameters()), dict(params=model[1].parameters())], fused=True)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def save(folder, step):
    """Save a checkpoint of a model that was trained for some steps."""
    save_checkpoint(folder, step, snapshot(*network(0)))


def restored_step(folder):
    """The step of the checkpoint that is restored."""
    return load_checkpoint(newest_whole(folder), *network(1, steps=0))


def train(model, optimizer):
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_newest_stay_and_those_that_are_to_be_kept_but_none_of_later_steps(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path, step)
    checkpoint.delete_other_checkpoints(tmp_path, 6, keep=1, always=(2, 8))
    assert checkpoint.kept_steps(tmp_path) == [2, 6]


@pytest.mark.parametrize("written, read", [([{}, {}], {}), ([{4: [3, 5]}], {4: [3, 5]}), ([{}, {0: [1]}], None)])
def test_only_a_stream_needs_as_many_processes_as_before(tmp_path, monkeypatch, written, read):
    model, optimizer = network(0)
    save_checkpoint(tmp_path, 3, snapshot(model, optimizer), written)
    with nullcontext() if read is not None else refused("number of processes"):
        assert resume(Accelerator(cpu=True), tmp_path, model, optimizer) == (3, read)
    monkeypatch.setattr(checkpoint, "newest_whole", lambda folder: folder / "of another node")
    with refused("all nodes must share it"):
        resume(Accelerator(cpu=True), tmp_path, model, optimizer)


def test_weights_that_two_layers_share_are_saved_and_restored(tmp_path):
    """A network of one's own may have them; safetensors writes no memory twice."""

    def tied(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = tied(0)
    train(model, optimizer)
    save_checkpoint(tmp_path, 3, snapshot(model, optimizer))
    other, its_optimizer = tied(1)
    load_checkpoint(newest_whole(tmp_path), other, its_optimizer)
    assert other[0].weight is other[1].weight
    assert equal_tensors(model.state_dict(), other.state_dict())


def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """Else the run would begin anew, and delete it."""
    save(tmp_path, 1)
    monkeypatch.setattr("mpp.training.checkpoint.sha256_of", Mock(side_effect=PermissionError(errno.EACCES, "denied")))
    with refused(r"step_00000001 cannot be read now \(.*\); the same command continues"):
        restored_step(tmp_path)


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


DAMAGES = {
    "a bit flipped": flipped,
    "truncated": lambda data: data[: len(data) // 2],
    "a pickle in its place": lambda data: pickle.dumps(Payload(Path("run by a pickle"))),
    "deleted": lambda data: None,
}


@pytest.mark.parametrize(
    "damage", [each if each == "a bit flipped" else pytest.param(each, marks=pytest.mark.faults) for each in DAMAGES]
)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    pretrain, trained, finished_run, tmp_path, monkeypatch, capsys, tally, damage, name
):
    """The run goes on from there, to the same bits."""
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(trained / "encoder")
    file = trained / "checkpoints" / "step_00000004" / name
    data = DAMAGES[damage](file.read_bytes())
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    pretrain()
    output = capsys.readouterr()
    assert "step_00000004 is damaged (" in output.err and "after step 2" in output.out
    assert f"({name})" in output.err or damage == "deleted" or name == "state.json"
    assert weights_of(trained) == weights_of(finished_run)
    assert not damaged_files(file.parent) and not Path("run by a pickle").exists()
    tally(f"a checkpoint: {damage}")


def test_a_checkpoint_that_is_being_written_is_not_there(tmp_path):
    save(tmp_path, 1)
    with interrupted_after(checkpoint, "save_file", 0):
        save(tmp_path, 2)
    assert restored_step(tmp_path) == 1
    save(tmp_path, 2)
    assert restored_step(tmp_path) == 2


def test_what_a_killed_run_left_half_written_is_gone_when_it_goes_on(pretrain, trained):
    """Its own files alone: the report and exported models are written by commands that do not hold the folder."""
    shutil.rmtree(trained / "encoder")
    half_written = [".encoder.partial/model.safetensors", ".encoder_best.earlier/model.safetensors"]
    half_written += ["checkpoints/.step_00000003.partial/model.safetensors", ".data.json.partial"]
    of_others = [".report.html.partial", "evaluation/.features.npz.7.partial"]
    for name in half_written + of_others:
        (trained / name).parent.mkdir(exist_ok=True)
        (trained / name).touch()
    with hold(trained, "run.dir"), pytest.raises(Held):
        pretrain()
    assert all((trained / name).exists() for name in half_written)
    pretrain()
    left = {
        path.relative_to(trained).as_posix()
        for path in trained.rglob(".*.*")
        if path.suffix in (".partial", ".earlier")
    }
    assert left == set(of_others) and (trained / "encoder").is_dir()
    assert (trained / "encoder_best" / "model.safetensors").exists()


def sharded_vit():
    model = small_vit()
    for block in sharding_units(model):
        fully_shard(block)
    return fully_shard(model)


def test_a_snapshot_is_the_same_file_sharded_or_not(group_of_one, tmp_path):
    states = {}
    for kind, build in (("shards", sharded_vit), ("copy", small_vit)):
        model = build()
        optimizer = build_optimizer(model, OptimConfig(name="adam"))
        model(torch.ones(1, 3, 32, 32))[:, 0].sum().backward()
        optimizer.step()
        states[kind] = save_checkpoint(tmp_path / kind, 1, snapshot(model, optimizer))
        assert not any(snapshot(model, optimizer, wanted_here=False).values())
        other = build()
        its = build_optimizer(other, OptimConfig(name="adam"))
        assert load_checkpoint(states[kind], other, its) == 1
        states[f"{kind} again"] = save_checkpoint(tmp_path / f"{kind}_again", 1, snapshot(other, its))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert len({(folder / file).read_bytes() for folder in states.values()}) == 1

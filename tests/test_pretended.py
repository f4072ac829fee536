"""The commands on a pretended accelerator: no operation mixes devices, and between two logged steps nobody waits."""

import json
from functools import partial

import pretended
import pytest
from conftest import TINY
from server import Command

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not pretended.HERE, reason="this torch has no devices in Python"),
]
STEPS = ("--run.steps=9", "--run.log_every=4", "--run.checkpoint_every=100", "--data.eval_images=16")
SMALL = (*(word for word in TINY if not word.startswith(("--run.steps", "--run.log", "--run.check"))), *STEPS)
LOGGED = {  # where the host may wait when an update is logged: for the verdict on it, and for its scalars
    "_local_scalar_dense in finite.check",
}
PRETRAIN = {
    "mean_color": [],
    "bf16": ["--run.precision=bf16"],
    "adam": ["--optim.name=adam"],
    "sgd": ["--optim.name=sgd"],
}


def waits(module: str, file, *arguments: str) -> dict[str, set[str]]:
    """When -> where the host waited for the device."""
    run = Command(module, *arguments, prepare=partial(pretended.pretend, file))
    assert run.wait() == [0], run.said[-3000:]
    found: dict[str, set[str]] = {}
    for when, what in json.loads(file.read_text()):
        found.setdefault(when, set()).add(what)
    return found


@pytest.mark.parametrize("options", PRETRAIN.values(), ids=PRETRAIN)
def test_pretraining_waits_for_the_device_where_it_logs_and_nowhere_else(tmp_path, options, tally):
    found = waits("pretrain", tmp_path / "waits.json", *SMALL, f"--run.dir={tmp_path / 'run'}", *options)
    print(found)
    assert not found.get("update"), found
    assert found.get("logged update", set()) <= LOGGED, found
    tally("pretended device: pre-training", 1)

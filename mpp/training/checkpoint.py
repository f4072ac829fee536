"""Checkpoints: exact, complete or absent, checked.

A checkpoint is written aside, synced to disk and renamed. Nothing is pickled. The order of the data, the schedule and
all randomness are functions of the step, so weights, optimiser state and the step are all there is to save; a stream,
whose length nobody knows, adds its cursors.
"""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from mpp.config import OptimConfig
from mpp.errors import UserError
from mpp.runtime.files import complete
from mpp.runtime.hashing import sha256_of
from mpp.runtime.processes import on_main_process
from mpp.training.optim import averages, build_optimizer, swap
from mpp.training.parallel import gathered, read_tensors

COMPLETE = re.compile(r"step_\d+")
MODEL, OPTIMIZER, CURSORS = "model.safetensors", "optimizer.safetensors", "cursors.json"
Cursors = dict[int, list[int]]
"""Lane of a stream -> how far it is read: see mpp/data/stream.py."""
Tensors = dict[str, dict[str, torch.Tensor]]
"""File of a checkpoint -> its tensors by name."""


def resume(
    accelerator: Accelerator, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, Cursors]:
    """Load the newest checkpoint that is whole, on all processes: the updates that are done, this process's cursors.

    Raises:
        UserError: the processes do not see the same folder, or a stream was read by another number of them.
    """
    start, of_all = restore(folder, model, optimizer)
    if len(set(gather_object([start]))) > 1:
        raise UserError(f"run.dir is {folder}, which not all processes see alike; all nodes must share it")
    if start:
        accelerator.print(f"resuming {folder} after step {start}")
    if not any(of_all):
        return start, {}
    if len(of_all) != accelerator.num_processes:
        raise UserError(
            f"{accelerator.num_processes} processes; a stream is resumed with as many as before ({len(of_all)})"
        )
    return start, of_all[accelerator.process_index]


def save(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cursors: Cursors,
    keep: int,
) -> None:
    """Write a checkpoint of all processes' state; UserError on every process where it cannot be written."""
    of_all = gather_object([cursors])
    tensors = snapshot(model, optimizer, wanted=accelerator.is_main_process)
    on_main_process(accelerator, lambda: save_checkpoint(folder, step, tensors, keep, of_all))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: bool = True) -> Tensors:
    """What a checkpoint holds, whole. Where the model is sharded, all processes have to ask for it together.

    Args:
        model: without wrappers.
        wanted: whether this process wants it; the others get no tensors.
    """
    return {MODEL: gathered(model.state_dict(), wanted), OPTIMIZER: gathered(flat_state(optimizer), wanted)}


def save_checkpoint(folder: Path, step: int, tensors: Tensors, keep: int, cursors: Sequence[Cursors] = ()) -> Path:
    """Write checkpoints/step_XXXXXXXX and delete all but the newest `keep`.

    Args:
        step: updates done.
        tensors: of `snapshot`.
        cursors: of each process in a stream; indexed data have none.
    Raises:
        UserError: it cannot be written; earlier checkpoints are as they were.
    """
    final = folder / "checkpoints" / f"step_{step:08d}"
    try:
        with complete(final) as partial:
            write_checkpoint(partial, tensors, cursors)
    except (OSError, SafetensorError) as error:
        earlier = [path.name for path in complete_checkpoints(folder)]
        kept = f"{earlier[-1]} is kept, and the same command goes on from it" if earlier else "there is no earlier one"
        raise UserError(
            f"{final.parent}: the checkpoint after step {step} cannot be written ({error}); {kept}"
        ) from error
    ours = [path for path in complete_checkpoints(folder) if step_of(path) <= step]
    for other in set(complete_checkpoints(folder)) - set(ours[-keep:]):
        try:
            shutil.rmtree(other)  # old, or newer and damaged: else the run would not be here
        except OSError as error:  # somebody reads it over NFS, say
            print(f"warning: {other} cannot be deleted: {error}", file=sys.stderr)
    return final


def write_checkpoint(folder: Path, tensors: Tensors, cursors: Sequence[Cursors]) -> None:
    """Write a checkpoint's files, with their checksums."""
    folder.mkdir(parents=True)
    for file, named in tensors.items():
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / file)
    (folder / CURSORS).write_text(json.dumps(list(cursors)), encoding="utf-8")
    digests = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    state = {"torch": torch.__version__, "sha256": digests}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[Cursors]]:
    """Load the newest checkpoint that is whole; the step it was taken at (0: there is none), each process's cursors.

    A checkpoint whose files are damaged is named on stderr, and the one before it is used. It does not matter how many
    processes wrote it, or whether the model was sharded: where it is, each process reads its own rows.
    """
    for checkpoint in reversed(complete_checkpoints(folder)):
        damaged = damaged_files(checkpoint)
        if damaged:
            print(f"warning: {checkpoint} is damaged ({', '.join(damaged)}): not used", file=sys.stderr)
            continue
        model.load_state_dict(read_tensors(checkpoint / MODEL, model.state_dict().get))
        load_flat_state(optimizer, checkpoint / OPTIMIZER)
        cursors = json.loads((checkpoint / CURSORS).read_text(encoding="utf-8"))
        return step_of(checkpoint), [{int(worker): cursor for worker, cursor in each.items()} for each in cursors]
    return 0, []


def restore_trained(folder: Path, model: nn.Module, config: OptimConfig) -> int:
    """Load the weights that a run evaluates at its newest whole checkpoint: averaged, where it averages.

    Args:
        model: as the run built it.
        config: of the run's optimiser.
    Returns:
        The step of the checkpoint; 0: there is none, and nothing was loaded.
    """
    optimizer = build_optimizer(model, config)
    step, _ = restore(folder, model, optimizer)
    swap(averages(optimizer) if step and config.average is not None else [])
    return step


def damaged_files(checkpoint: Path) -> list[str]:
    """Files that are not what was written.

    Raises:
        UserError: they cannot be read now, which says nothing of what they hold.
    """
    try:
        digests = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["sha256"]
        damaged = [name for name in (MODEL, OPTIMIZER, CURSORS) if sha256_of(checkpoint / name) != digests[name]]
        for name in set((MODEL, OPTIMIZER)) - set(damaged):
            safe_open(checkpoint / name, framework="pt")  # checksums are no proof against who can write them
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ["state.json"]
    except OSError as error:
        raise UserError(f"{checkpoint} cannot be read now ({error}); the same command goes on when it can") from error
    except SafetensorError:
        return [name]
    return damaged


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    place = folder / "checkpoints"
    found = place.iterdir() if place.is_dir() else ()  # not `glob`, for which a folder that cannot be read is empty
    return sorted((path for path in found if COMPLETE.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The updates that were done when it was taken, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, unchecked; 0 where there is none."""
    return max(map(step_of, complete_checkpoints(folder)), default=0)


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's tensors as {"PARAMETER NUMBER.NAME": tensor}. All else, such as rates, comes from the config."""
    state = optimizer.state_dict()["state"]
    named = ((f"{number}.{name}", value) for number, values in state.items() for name, value in values.items())
    return {name: value for name, value in named if torch.is_tensor(value)}  # SGD without momentum has None


def load_flat_state(optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Load what `flat_state` gave and a file holds."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(file, lambda key: parameters[int(key.split(".", 1)[0])]).items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

"""Checkpoints: exact, complete or absent, verified when they are read.

A checkpoint is written aside, synced to disk and renamed. Nothing is pickled. The order of the data, the schedule and
all randomness are functions of the step, so weights, optimiser state and the step are all there is to save; a stream,
whose length is unknown, adds its cursors.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from mpp.config import OptimConfig, require
from mpp.errors import UserError
from mpp.runtime.files import complete, delete, sha256_of
from mpp.runtime.messages import warn
from mpp.runtime.processes import on_main_process
from mpp.training.optim import build_optimizer, swap_averages
from mpp.training.parallel import shard_like, whole_tensor

COMPLETE_NAME = re.compile(r"step_\d{8,}")
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
CURSORS_FILE = "cursors.json"
STATE_FILE = "state.json"
Cursors = dict[int, list[int]]
"""Worker of a stream -> how far it has read: see mpp/data/stream.py."""
Tensors = dict[str, dict[str, torch.Tensor]]
"""File of a checkpoint -> its tensors by name."""


def resume(
    accelerator: Accelerator, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, Cursors]:
    """Load the newest checkpoint that is whole, on all processes: the steps that are done, this process's cursors.

    Raises:
        UserError: the processes do not see the same folder, or a stream was read by another number of them.
    """
    checkpoint = on_main_process(accelerator, lambda: newest_whole(folder))  # one process reads all of it
    if not all(gather_object([checkpoint is None or checkpoint.is_dir()])):
        raise UserError(f"run.dir is {folder}, which differs between processes; all nodes must share it")
    start = load_checkpoint(checkpoint, model, optimizer)
    if not start:
        return 0, {}
    accelerator.print(f"resuming {folder} after step {start}")
    by_process = json.loads((checkpoint / CURSORS_FILE).read_text(encoding="utf-8"))
    if not any(by_process):
        return start, {}
    before = len(by_process)
    allowed = f"{before}, as when the run stopped: it reads a stream"
    require(accelerator.num_processes == before, "the number of processes", accelerator.num_processes, allowed)
    return start, {int(worker): cursor for worker, cursor in by_process[accelerator.process_index].items()}


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, wanted_here: bool = True) -> Tensors:
    """The tensors of a checkpoint, whole. Where the model is sharded, all processes have to ask for them together.

    Args:
        model: without wrappers.
        wanted_here: whether this process wants it; the others get no tensors.
    """
    sources = {MODEL_FILE: model.state_dict(), OPTIMIZER_FILE: flatten_state(optimizer)}
    tensors: Tensors = {file: {} for file in sources}
    for file, source in sources.items():
        for name, tensor in source.items():  # one after the other: no GPU holds more than one that was sharded
            whole = whole_tensor(tensor)
            if wanted_here:
                tensors[file][name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return tensors


def save_checkpoint(folder: Path, step: int, tensors: Tensors, cursors: Sequence[Cursors] = ()) -> Path:
    """Write checkpoints/step_XXXXXXXX: its files, and their checksums.

    Args:
        tensors: of `snapshot`.
        cursors: of each process in a stream; indexed data have none.
    Raises:
        UserError: it cannot be written; earlier checkpoints are as they were.
    """
    final = checkpoint_path(folder, step)
    try:
        with complete(final) as partial:
            partial.mkdir(parents=True)
            for file, tensor_by_name in tensors.items():
                save_file(tensor_by_name, partial / file)
            (partial / CURSORS_FILE).write_text(json.dumps(list(cursors)), encoding="utf-8")
            digests = {file.name: sha256_of(file) for file in sorted(partial.iterdir())}
            state = {"torch": torch.__version__, "sha256": digests}
            (partial / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        kept = f"earlier ones are as they were, of steps {kept_steps(folder)}"
        raise UserError(f"{final}: the checkpoint cannot be written ({error}); {kept}") from error
    return final


def clear_partial_checkpoints(folder: Path) -> None:
    """Delete partial checkpoints of killed processes, each as large as a whole one. No other may train there now."""
    for leftover in (folder / "checkpoints").glob(".step_*"):
        delete(leftover)


def delete_other_checkpoints(folder: Path, step: int, keep: int, always: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`; those after it are damaged, or the run had them.

    What is left of one, after a kill or where files are in use, is damaged for all that read it, and deleted next time.

    Args:
        always: steps whose checkpoints stay.
    """
    kept = kept_steps(folder)
    newest = [each for each in kept if each <= step][-keep:]
    for each in kept:
        if each not in newest and (each not in always or each > step):
            delete(checkpoint_path(folder, each))


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint whose files are as they were written; others are named on stderr. None: there is none.

    Raises:
        UserError: all are damaged; a run that began again would be another.
    """
    checkpoints = complete_checkpoints(folder)
    for checkpoint in reversed(checkpoints):
        damaged = damaged_files(checkpoint)
        if not damaged:
            return checkpoint
        warn(f"{checkpoint} is damaged ({', '.join(damaged)}): not used")
    if checkpoints:
        raise UserError(f"all checkpoints are damaged; delete {folder / 'checkpoints'} to begin again")
    return None


def load_checkpoint(checkpoint: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, where there is one, and return its step; 0: there is none.

    It does not matter how many processes wrote it, or whether the model was sharded: where it is, each process reads
    its own rows.
    """
    if checkpoint is None:
        return 0
    model.load_state_dict(read_tensors(checkpoint / MODEL_FILE, model.state_dict().get))
    load_flat_state(optimizer, checkpoint / OPTIMIZER_FILE)
    return int(checkpoint.name.removeprefix("step_"))


def restore_trained(folder: Path, model: nn.Module, config: OptimConfig) -> int:
    """Load the weights that a run evaluates at its newest whole checkpoint: averaged, where it averages.

    Args:
        model: as the run built it.
        config: of the run's optimiser.
    Returns:
        The step of the checkpoint; 0: there is none, and nothing was loaded.
    """
    optimizer = build_optimizer(model, config)
    step = load_checkpoint(newest_whole(folder), model, optimizer)
    swap_averages(optimizer)
    return step


def damaged_files(checkpoint: Path) -> list[str]:
    """Names of the files that differ from those that were written.

    Raises:
        UserError: they cannot be read now, which says nothing of their content.
    """
    try:
        digests = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["sha256"]
        files = (MODEL_FILE, OPTIMIZER_FILE, CURSORS_FILE)
        return [name for name in files if sha256_of(checkpoint / name) != digests[name]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return [STATE_FILE]
    except OSError as error:
        raise UserError(f"{checkpoint} cannot be read now ({error}); the same command continues when it can") from error


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of a run's checkpoint after `step` steps."""
    return folder / "checkpoints" / f"step_{step:08d}"


def kept_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints a run has, in order; they may be damaged."""
    parent = folder / "checkpoints"
    if not parent.is_dir():
        return []
    names = [path.name for path in parent.iterdir()]  # not `glob`, for which a folder that cannot be read is empty
    return sorted(int(name.removeprefix("step_")) for name in names if COMPLETE_NAME.fullmatch(name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return [checkpoint_path(folder, step) for step in kept_steps(folder)]


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, which may be damaged; 0 if there is none."""
    return max(kept_steps(folder), default=0)


def flatten_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's tensors as {"PARAMETER NUMBER.NAME": tensor}. All else, such as rates, comes from the config."""
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if torch.is_tensor(value)  # SGD without momentum has None
    }


def load_flat_state(optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Load the tensors of `flatten_state` from a file."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(file, lambda key: parameters[int(key.split(".")[0])]).items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def read_tensors(file: Path, like: Callable[[str], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; of those that are sharded, this process's rows.

    Args:
        like: the present tensor of a name, which may be sharded.
    """
    with safe_open(file, framework="pt") as stored:
        return {name: shard_like(stored.get_tensor(name), like(name)) for name in list(stored.keys())}

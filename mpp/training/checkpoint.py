"""Checkpoints: exact, complete or absent, checked. And the run folder that holds them.

    config.yaml                        the resolved config
    data.json                          which images it is of (mpp/data/record.py)
    metrics.jsonl, events.out.*        scalars; pictures
    checkpoints/step_XXXXXXXX/         model.safetensors, optimizer.safetensors, places.json, state.json
    encoder/                           timm's layout, when the run is finished
    preempted                          the marker of a run that a signal stopped (mpp/runtime/preemption.py)
    .lock                              held while a process writes here (mpp/runtime/lock.py)

A checkpoint is written aside, synced to disk and renamed. Nothing is pickled. The order of the data, the schedule and
all randomness are functions of the step, so weights, optimiser state and the step are all there is to save; a stream,
whose length nobody knows, adds the places it has come to.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from mpp.config import OptimConfig
from mpp.data.record import differences, not_listed, together
from mpp.errors import UserError
from mpp.runtime import lock
from mpp.runtime.disk import put, sync
from mpp.runtime.hashing import digest
from mpp.runtime.parsing import changed_keys, read_saved, to_yaml
from mpp.runtime.preemption import MARKER
from mpp.training.optim import averages, build_optimizer, swap
from mpp.training.parallel import gathered, read_tensors

IMAGES = "data.json"
MODEL, OPTIMIZER, PLACES = "model.safetensors", "optimizer.safetensors", "places.json"
Places = dict[int, list[int]]
"""Lane of a stream -> how far it has come: see mpp/data/shards.py."""
Tensors = dict[str, dict[str, torch.Tensor]]
"""File of a checkpoint -> its tensors by name."""


def open_run(config: Any) -> Path:
    """The run folder of `config.run.dir`, new or to be resumed. Only reads: every process may call it.

    Raises:
        UserError: the folder holds something else, or a run of another config (the keys that differ are named).
    """
    folder = Path(config.run.dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.dir is {folder}, which is not a folder")
    saved = folder / "config.yaml"
    if saved.is_file():
        different = changed_keys(config, saved)
        if different:
            raise UserError(
                f"run.dir is {folder}, a run made with another config: {', '.join(different)} differ; "
                "choose another run.dir, or the same values to resume"
            )
    elif not is_ours(folder):
        raise UserError(f"run.dir is {folder}, which holds other files and no run; choose another run.dir")
    return folder


def is_ours(folder: Path) -> bool:
    """Whether a folder is a run's, or has nothing in it but what a run leaves that ended before it began."""
    if (folder / "config.yaml").is_file() or not folder.is_dir():
        return True
    return {path.name for path in folder.iterdir()} <= {*lock.FILES, MARKER}


def saved_settings(folder: Path) -> dict[str, Any]:
    """What a run folder's config.yaml says, whatever command wrote it; nothing where there is none."""
    return read_saved(folder / "config.yaml")


def write_config(config: Any, folder: Path) -> None:
    """Save the resolved config as config.yaml, before anything else is written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", to_yaml(config))


def write_whole(file: Path, text: str) -> None:
    """Write a file that is complete or absent."""
    aside = file.with_name(f".{file.name}.partial")
    aside.write_text(text)
    sync(aside)
    aside.replace(file)


def note_images(folder: Path, images: dict[str, Any]) -> str | None:
    """Save which images a run is of; what is wrong, in words, where it began with others, and nothing is saved.

    That the images of a run that goes on cannot be compared is said on stderr.
    """
    before = images_of(folder) or images
    changed = differences(before, images)
    if changed:
        return (
            f"run.dir is {folder}, a run that began otherwise: {'; '.join(changed)}; "
            "choose another run.dir, or put back what it began with"
        )
    for part in sorted(not_listed(before) | not_listed(images)) if before is not images else ():
        when = "now" if part in not_listed(images) else "when the run began"
        unknown = f"the files could not be listed {when}; whether they are those that the run began with is unknown"
        print(f"warning: {folder}: {part}: {unknown}", file=sys.stderr)
    write_whole(folder / IMAGES, json.dumps(together(before, images), indent=1))
    return None


def images_of(folder: Path) -> dict[str, Any] | None:
    """Which images a run is of; None where nothing says so (a run of an earlier release)."""
    try:
        return json.loads((folder / IMAGES).read_text())
    except (OSError, ValueError):
        return None


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, wanted: bool = True) -> Tensors:
    """What a checkpoint holds, whole. Where the model is sharded, all processes have to ask for it together.

    Args:
        model: without wrappers.
        wanted: whether this process wants it; the others get no tensors.
    """
    return {MODEL: gathered(model.state_dict(), wanted), OPTIMIZER: gathered(flat_state(optimizer), wanted)}


def save_checkpoint(folder: Path, step: int, tensors: Tensors, keep: int, places: Sequence[Places] = ()) -> Path:
    """Write checkpoints/step_XXXXXXXX and delete all but the newest `keep`.

    Args:
        step: updates done.
        tensors: of `snapshot`.
        places: how far each process is in a stream; indexed data have none.
    Raises:
        UserError: it cannot be written; earlier checkpoints are as they were.
    """
    final = folder / "checkpoints" / f"step_{step:08d}"
    aside = final.with_name(f".{final.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write_checkpoint(aside, tensors, places)
        put(aside, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        earlier = [path.name for path in complete_checkpoints(folder)]
        kept = f"{earlier[-1]} is kept, and the same command goes on from it" if earlier else "there is no earlier one"
        raise UserError(
            f"{aside.parent}: the checkpoint after step {step} cannot be written ({error}); {kept}"
        ) from error
    ours = [path for path in complete_checkpoints(folder) if step_of(path) <= step]
    for other in set(complete_checkpoints(folder)) - set(ours[-keep:]):
        try:
            shutil.rmtree(other)  # old, or newer and damaged: else the run would not be here
        except OSError as error:  # somebody reads it over NFS, say
            print(f"warning: {other} cannot be deleted: {error}", file=sys.stderr)
    return final


def write_checkpoint(folder: Path, tensors: Tensors, places: Sequence[Places]) -> None:
    """Write a checkpoint's files, with their checksums."""
    folder.mkdir(parents=True)
    for file, named in tensors.items():
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / file)
    (folder / PLACES).write_text(json.dumps(list(places)))
    digests = {file.name: digest(file) for file in sorted(folder.iterdir())}
    state = {"torch": torch.__version__, "sha256": digests}
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[Places]]:
    """Load the newest checkpoint that is whole; the step it was taken at (0: there is none), each process's places.

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
        places = json.loads((checkpoint / PLACES).read_text())
        return step_of(checkpoint), [{int(lane): place for lane, place in each.items()} for each in places]
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
    """Files that are not what was written."""
    try:
        digests = json.loads((checkpoint / "state.json").read_text())["sha256"]
        damaged = [name for name in (MODEL, OPTIMIZER, PLACES) if digest(checkpoint / name) != digests[name]]
        for name in set((MODEL, OPTIMIZER)) - set(damaged):
            safe_open(checkpoint / name, framework="pt")  # checksums are no proof against who can write them
    except (OSError, ValueError, KeyError, TypeError):
        return ["state.json"]
    except SafetensorError:
        return [name]
    return damaged


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = (folder / "checkpoints").glob("step_*")
    return sorted((path for path in found if path.name.removeprefix("step_").isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The updates that were done when it was taken, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, unchecked; 0 where there is none."""
    return max(map(step_of, complete_checkpoints(folder)), default=0)


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run of so many steps is at its end, and its encoder written."""
    return newest_step(folder) == steps and (folder / "encoder").is_dir()


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's tensors as {"PARAMETER NUMBER.NAME": tensor}. All else, such as rates, comes from the config."""
    state = optimizer.state_dict()["state"]
    named = ((f"{number}.{name}", value) for number, values in state.items() for name, value in values.items())
    return {name: value for name, value in named if torch.is_tensor(value)}  # timm's Muon notes a bool, too


def load_flat_state(optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Load what `flat_state` gave and a file holds."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(file, lambda key: parameters[int(key.split(".", 1)[0])]).items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

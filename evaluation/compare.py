"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. A result is known by a digest of its settings: finished work is not
repeated, here or, with `--extends results.json`, in another comparison; neither is a training that diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work.
"""

import json
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

import mpp
from evaluation.comparison.cases import (
    TRAININGS,
    TRUNK_SETTING,
    Case,
    Encoder,
    cases_of,
    evaluation_settings,
    read_entries,
)
from evaluation.comparison.digests import case_digest, digest_of, digests_of_images, label_task, provenance
from evaluation.comparison.rows import (
    Row,
    divergence_of,
    read_new_report,
    read_published,
    read_report,
    report_path_of_case,
    rows_of,
)
from evaluation.comparison.tables import write_comparison
from evaluation.config import CompareConfig, SweepConfig
from evaluation.config.comparing import Question
from evaluation.frozen.results import features_shared, forget_features, write_json
from evaluation.frozen.run_images import record_images, record_source
from mpp.config import TrainingConfig, flatten, rebuild, require
from mpp.config.parsing import parse, to_yaml
from mpp.data.identity import differences
from mpp.data.loader import BatchLayout
from mpp.errors import Diverged, Unavailable, UserError
from mpp.runtime.files import Held, hold
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.messages import note, shortened, tell, warn
from mpp.runtime.start import run_main, user_message
from mpp.training.checkpoint import newest_step
from mpp.training.flops import flops_of_step
from mpp.training.run import fingerprint_first_weights, train
from mpp.training.run_folder import is_finished, read_record

FULL_DISK = ("No space left", "quota exceeded")
"""Words of errors, or of those that they come from, where a disk or a user's share of it is full."""
RETRY_S = 10
"""Seconds until cases that other processes work at are tried again."""
STEP_FLOPS: dict[str, int] = {}
"""Command and settings -> FLOPs of a step, as far as they were counted."""
PETA = 1e15
Asked = tuple[list[Question], dict[str, Any], list[str]]
"""Of a comparison: its questions, further entries of results.json, sentences below the tables."""


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the encoders that are missing, evaluate all, write the results.

    Raises:
        UserError: an entry that cannot be carried out, before anything is done; failed evaluations, after all others.
    """
    entries = read_entries(config)
    cases = cases_of(entries)
    for case in cases:
        tests = flatten(evaluation_settings(case)).get("test", True)
        require(tests, f"evaluations: {case.entry.name}: test", tests, "true: `mpp sweep` compares on a dev split")
    return carry_out(cases, config, lambda rows: (entries.questions, {}, []))


def carry_out(
    cases: Sequence[Case], config: CompareConfig | SweepConfig, asked: Callable[[list[Row]], Asked]
) -> dict[str, Any]:
    """Train and evaluate everything that is not done yet, here or in the results.json `extends`; write all results.

    Args:
        asked: from all results that there are by now, those of other processes among them, to what is said of them.
    Returns:
        See `write_comparison`.
    Raises:
        UserError: a case that cannot be carried out, before anything is done; a full disk; failed evaluations, at the
            end.
    """
    if PartialState(cpu=not uses_gpu()).num_processes > 1:
        raise UserError("this command is one process; start it several times to share the work")
    folder = Path(config.dir)
    record_source.cache_clear()  # images may have changed since this process compared others
    published = read_published(config.extends)
    taken: dict[Case, list[Row]] = {}
    for case in cases:  # this parses the settings of each
        known = published.get(case_digest(case), [])
        recorded = known[0].get("image_digests", {}) if known else {}
        here = digests_of_images(case, only_here=True) if recorded else {}
        changed = [name for name, digest in here.items() if recorded.get(name, digest) != digest]
        if changed:
            note(f"{case.slug} is not taken from {config.extends}: other images by now ({', '.join(changed)})")
        elif known:
            taken[case] = [row | case.labels for row in known]
    with features_shared():
        failures = [] if config.tabulate else evaluate_cases([case for case in cases if case not in taken], folder)
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        of_cases = [(case, taken.get(case) or rows_of(case, folder)) for case in cases]
        rows = [row for _, of_case in of_cases for row in of_case]
        questions, about, sentences = asked(rows)
        lacking = [case.slug for case, of_case in of_cases if not of_case]
        if lacking:
            sentences.append(f"Without a result, since it is not there yet or does not apply: {shortened(lacking)}.")
        result = write_comparison(folder, questions, rows, {"settings": asdict(config)} | about, sentences)
    if failures:
        raise UserError(f"{len(failures)} of {len(cases)} evaluations failed, such as {failures[0]}")
    return result


# --- evaluations ---


def evaluate_cases(cases: Sequence[Case], folder: Path) -> list[str]:
    """Train and evaluate everything that is not done yet. Cases that another process works at come last.

    Returns:
        The failures, a line each with its reason.
    Raises:
        UserError: the disk is full, so that the other cases would fail, too.
    """
    failures: list[str] = []
    while cases:
        left = []
        for case in cases:
            try:
                evaluate_case(case, folder)
            except Held:
                left.append(case)
            except Diverged as error:  # a finding
                warn(f"{case.slug} diverged: {error}")
            except Exception as error:  # missing images, a bug: the other cases continue
                reason = user_message(error)
                if reason is None:
                    traceback.print_exception(error)
                    reason = f"{type(error).__name__}: {error}"
                if any(words in "".join(traceback.format_exception(error)) for words in FULL_DISK):
                    way = "finished work is kept: free space, then start the same command again"
                    raise UserError(f"{case.slug}: {reason}; {way}") from error
                failures.append(f"{case.slug}: {reason}")
                warn(failures[-1])
        if len(left) == len(cases):
            tell(f"waiting for other processes, which compute {left[0].slug} or its inputs")
            time.sleep(RETRY_S)
        cases = left
    return failures


def evaluate_case(case: Case, folder: Path) -> None:
    """Train the encoder and evaluate it, unless that is done; a note names an evaluation that does not apply to it.

    Fine-tuning has a run folder for only these images and weights: a finished run with others is not taken for it.

    Raises:
        Held: another process works at it.
        Diverged: a training did.
    """
    file = report_path_of_case(case, folder)
    with hold(file.with_suffix(""), "dir"):  # a folder next to the report: its lock marks this case as taken
        if read_report(case, folder) is not None:
            return
        train_encoder(case.encoder, folder)
        settings = evaluation_settings(case)
        places: dict[str, Any] = {"out": str(file)}
        if "baselines" in flatten(settings):  # other encoders of the comparison
            places["baselines"] = case.entry.options.get("baselines", False)
        if case.kind == "fine-tuning":
            places["run.dir"] = str(folder / "finetuned" / f"{file.stem}-{digest_of(provenance(case))}")
        try:
            case.evaluation.run(rebuild(settings, places))
            report = read_new_report(case, file)
        except Unavailable as error:
            note(f"{case.slug} is left out, it does not apply: {error}")
            return
        except Diverged as error:  # fine-tuning
            write_json(file, {"diverged": str(error), "comparison": provenance(case)})
            raise
        write_json(file, report | {"comparison": provenance(case), "mpp": code_version()})


@cache
def code_version() -> str:
    """Version and commit of mpp; without a repository its version alone."""
    root = str(Path(mpp.__file__).parents[1])  # whose repository it is, and not that of a folder around it
    command = ["git", "-C", root, "--git-dir=.git", "describe", "--always", "--dirty"]
    with suppress(OSError):  # no git
        return f"{mpp.__version__} {subprocess.run(command, capture_output=True, text=True).stdout}".strip()
    return mpp.__version__


# --- trainings ---


def train_encoder(encoder: Encoder, folder: Path) -> None:
    """Train an encoder, its parents first; a finished run is left as it is, an interrupted one continues.

    Raises:
        Held: another process trains it, or a parent.
        Diverged: the training did, now or before.
    """
    has_begun = newest_step(encoder.path) > 0  # and needs its trunk no more
    for setting, parent in encoder.parents.items():
        if setting != TRUNK_SETTING or not has_begun:
            train_encoder(parent, folder)
    if encoder.settings is None:
        return
    with hold(encoder.path, "encoder"):  # before the images are loaded, which takes a while
        pass
    config = settings_to_train(encoder)
    refuse_other_beginning(config, encoder.path)
    if not is_finished(config, Path(config.run.dir)):
        forget_features()
    divergence = divergence_of(encoder, folder)
    try:
        if divergence.is_file():
            message = json.loads(divergence.read_text(encoding="utf-8"))["diverged"]
            raise Diverged(f"{message} (recorded in {divergence}; delete it to try again)")
        train(config, TRAININGS[encoder.entry.train].build_task)
    except Diverged as error:
        if not divergence.is_file():
            write_json(divergence, {"diverged": str(error)})
        raise


@cache
def settings_to_train(encoder: Encoder) -> TrainingConfig:
    """Settings of an encoder's training, with as many steps as execute its compute: to know these, images are loaded.

    Raises:
        UserError: the compute is not enough for a step.
    """
    command, pflop = encoder.entry.train, encoder.entry.compute
    config = TRAININGS[command].resolve(encoder.settings)
    if pflop is None:
        return config
    shared = replace(config.run, dir="", seed=0, branch_from=None)  # by all seeds
    flops = step_flops(command, replace(config, run=shared))
    steps = round(PETA * pflop / flops)
    require(steps > 0, "compute", pflop, f"at least {flops / PETA:.2g}, the PFLOP of a step")
    return replace(config, run=replace(config.run, steps=steps))


def step_flops(command: str, config: TrainingConfig) -> int:
    """FLOPs that a step of this training executes: to count them, the images are loaded and the model is built."""
    key = f"{command} {to_yaml(config)}"
    if key not in STEP_FLOPS:
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=not uses_gpu())
        layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
        task = TRAININGS[command].build_task(config, accelerator, layout)
        STEP_FLOPS[key] = flops_of_step(task, layout.global_batch_size, config.optim)
    return STEP_FLOPS[key]


def refuse_other_beginning(config: TrainingConfig, folder: Path) -> None:
    """Raise UserError where a run is there, and was trained on other images or from other weights than today's."""
    before = read_record(folder)
    now = record_images(config.data, label_task(config)) or {}
    compared = fingerprint_first_weights(config)
    for split, images in now.items():
        compared[split] = {"files": images["files"]}
        recorded = before.get(split, {})
        if recorded.get("labels") and recorded["images"] == images["images"]:  # a run on some recorded these labels
            compared[split]["labels"] = images["labels"]
    changed = differences(before, compared)
    if changed:
        raise UserError(
            f"{folder} was started with other images or weights ({'; '.join(changed)}); "
            "remove this folder to train again, or restore the original ones"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments))


if __name__ == "__main__":
    run_main(main)

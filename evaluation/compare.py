"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. A result is known by a digest of its settings: finished work is not
repeated, here or, with `--extends results.json`, in another comparison; neither is a training that diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work.
"""

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from evaluation.comparison.cases import (
    TRAININGS,
    TRUNK_SETTING,
    Case,
    Encoder,
    case_digest,
    cases_of,
    code_version,
    digest_of,
    digests_of_images,
    evaluation_settings,
    label_task,
    provenance,
    read_entries,
)
from evaluation.comparison.differences import difference_table, differences_from_best
from evaluation.comparison.rows import (
    SCORES_FILE,
    Row,
    describe_missing_seeds,
    divergence_of,
    frame_of,
    read_new_report,
    read_published,
    read_report,
    report_path_of_case,
    rows_asked,
    rows_of,
    with_interval,
    write_scores,
)
from evaluation.comparison.tables import RANK, Cells, cells_by_encoder, plot_question, remarks_on, table_of
from evaluation.config import CompareConfig, SweepConfig
from evaluation.config.comparing import Question
from evaluation.figures.charts import markdown_table, write_plot
from evaluation.frozen.results import features_shared, forget_features, write_json
from evaluation.frozen.run_images import record_images, record_source
from evaluation.metrics.scoring import ONE_CLASS
from evaluation.pages.page import recorded_versions
from mpp.config import TrainingConfig, rebuild, require
from mpp.config.parsing import parse
from mpp.data.identity import differences
from mpp.data.loader import BatchLayout
from mpp.errors import Diverged, Unavailable, UserError
from mpp.runtime.files import Held, hold, write_complete
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.messages import note, tell, warn
from mpp.runtime.start import run_main, user_message
from mpp.training.checkpoint import newest_step
from mpp.training.flops import flops_of_step
from mpp.training.run import fingerprint_first_weights, train
from mpp.training.run_folder import is_finished, read_record

FULL_DISK = ("No space left", "quota exceeded")
"""Words of errors, or of those that they come from, where a disk or a user's share of it is full."""
RETRY_S = 10
"""Seconds until cases that other processes work at are tried again."""
PETA = 1e15
T = TypeVar("T")
DIFFERENCES = "Differences from the best, with 95% intervals that hold for all of the table at once:"


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the encoders that are missing, evaluate all, write the results.

    Raises:
        UserError: an entry that cannot be carried out, before anything is done; failed evaluations, after all others.
    """
    entries = read_entries(config)
    for evaluation in entries.evaluations:
        tests = evaluation.options.get("test", True)
        require(tests, f"evaluations: {evaluation.name}: test", tests, "true: `mpp sweep` compares on a dev split")
    cases = cases_of(entries)
    settings = {key: getattr(config, key) for key in ("encoders", "evaluations", "datasets", "questions")}

    def write(rows: list[Row]) -> dict[str, Any]:
        missing = describe_missing_seeds(cases, rows)
        return write_comparison(Path(config.dir), entries.questions, rows, {"settings": settings}, missing)

    return carry_out(cases, config, write)


def carry_out(cases: Sequence[Case], config: CompareConfig | SweepConfig, write: Callable[[list[Row]], T]) -> T:
    """Train and evaluate everything that is not done yet, here or in the results.json `extends`; write all results.

    Args:
        write: what to do with all results that there are by now, those of other processes among them.
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
        recorded = known[0].get("image_digests") if known else None
        here = digests_of_images(case, only_here=True) if recorded else {}
        changed = [name for name, digest in here.items() if recorded.get(name, digest) != digest]
        if changed:
            note(f"{case.slug} is not taken from {config.extends}: other images by now ({', '.join(changed)})")
        elif known:
            taken[case] = [row | case.labels for row in known]
    with features_shared():
        missing = [case for case in cases if case not in taken]
        failures = [] if config.tabulate else evaluate_cases(missing, folder)
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        of_cases = [(case, taken.get(case) or rows_of(case, folder)) for case in cases]
        rows = [with_interval(row, case) for case, of_case in of_cases for row in of_case]
        result = write(rows)
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
                reason = reason_of(error)
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


def reason_of(error: Exception) -> str:
    """An error in one line; of one that is no user's, the traceback is printed."""
    message = user_message(error)
    if message is not None:
        return message
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def evaluate_case(case: Case, folder: Path) -> None:
    """Train the encoder and evaluate it, unless that is done; a note names an evaluation that does not apply to it.

    Raises:
        Held: another process works at it.
        Diverged: a training did.
    """
    file = report_path_of_case(case, folder)
    with hold(file.with_suffix(""), "dir"):  # a folder next to the report: its lock marks this case as taken
        if read_report(case, folder) is not None:
            return
        train_encoder(case.encoder, folder)
        try:
            case.evaluation.run(settings_to_evaluate(case, folder))
            report = read_new_report(case, file)
        except Unavailable as error:
            note(f"{case.slug} is left out, it does not apply: {error}")
            return
        except Diverged as error:  # fine-tuning
            write_json(file, {"diverged": str(error), "comparison": provenance(case)})
            raise
        write_json(file, report | {"comparison": provenance(case), "mpp": code_version()})


def settings_to_evaluate(case: Case, folder: Path) -> Any:
    """Settings of a case's evaluation with the places of its results.

    Fine-tuning has a run folder for only these images and weights: a finished run with others is not taken for it.
    """
    places = {"out": str(report_path_of_case(case, folder))}
    if case.kind == "fine-tuning":
        name = f"{case.slug}-{case_digest(case)}-{digest_of(provenance(case))}"
        places["run.dir"] = str(folder / "finetuned" / name)
    return rebuild(evaluation_settings(case), places)


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
        if encoder.entry.random:  # it takes the architecture from there, but no weights
            raise UserError(f"{encoder.path} has no encoder to take the architecture from: {error}") from error
        raise


@cache
def settings_to_train(encoder: Encoder) -> TrainingConfig:
    """Settings of an encoder's training, with as many steps as its compute allows: to know these, images are loaded."""
    entry = encoder.entry
    config = TRAININGS[entry.train].resolve(encoder.settings)
    return config if entry.compute is None else with_compute(entry.train, config, entry.compute)


def with_compute(command: str, config: TrainingConfig, pflop: float) -> TrainingConfig:
    """The training with as many steps as execute this compute.

    Raises:
        UserError: it is not enough for a step.
    """
    shared = replace(config.run, dir="", seed=0, branch_from=None)  # by all seeds
    flops = step_flops(command, replace(config, run=shared))
    steps = round(PETA * pflop / flops)
    require(steps > 0, "compute", pflop, f"at least {flops / PETA:.2g}, the PFLOP of a step")
    return replace(config, run=replace(config.run, steps=steps))


@cache
def step_flops(command: str, config: TrainingConfig) -> int:
    """FLOPs that a step of this training executes: to count them, the images are loaded and the model is built."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=not uses_gpu())
    layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
    task = TRAININGS[command].build_task(config, accelerator, layout)
    return flops_of_step(task, layout.global_batch_size, config.optim)


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


# --- tables ---


def write_comparison(
    folder: Path,
    questions: Sequence[Question],
    rows: list[Row],
    about: dict[str, Any] | None = None,
    sentences: Sequence[str] = (),
) -> dict[str, Any]:
    """Write results.json, the scores of images, table.md, table.csv and the plots, and print the tables.

    Args:
        rows: all results.
        about: further entries of results.json.
        sentences: below the tables.
    Returns:
        What results.json has: `results`, the rows, `summary`: question -> encoder -> column -> numbers, and `about`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frame = frame_of(rows)
    summary: dict[str, Cells] = {}
    texts: list[str] = []
    files = ["results.json", SCORES_FILE, "table.md", "table.csv"]
    for question in questions:
        asked = rows_asked(frame, question)
        cells = summary[question.name] = cells_by_encoder(asked, question)
        texts.append(f"### {question.title or question.name}")
        if not cells:
            texts.append("no results yet")
        elif question.plot != "depth":  # of the dev split
            texts += texts_of(asked, cells, question)
        plot = plot_question(question, asked)
        if plot is not None:
            files += write_plot(plot, folder, question.name)
    write_scores(folder, rows)
    rows = [{key: value for key, value in row.items() if key != "scores"} for row in rows]
    results = {"summary": summary, "results": rows, "versions": recorded_versions()} | (about or {})
    write_json(folder / "results.json", results)
    text = "\n\n".join([*texts, *sentences])
    write_complete(folder / "table.md", f"{text}\n")
    write_complete(folder / "table.csv", cells_as_lines(summary).to_csv(index=False))
    print(f"\n{text}\nwrote {folder}: {', '.join(files)}; see reports/")
    return results


def texts_of(asked: pd.DataFrame, cells: Cells, question: Question) -> list[str]:
    """The table of a question, sentences below it, and the differences from the best."""
    differences = differences_from_best(asked)
    of_best = [DIFFERENCES, markdown_table(*difference_table(differences))] if differences else []
    return [markdown_table(*table_of(cells)), *remarks_on(asked, question), *of_best]


def cells_as_lines(summary: dict[str, Cells]) -> pd.DataFrame:
    """The numbers of all questions, a line for each cell of their tables."""
    lines = []
    for question, cells in summary.items():
        for encoder, of_encoder in cells.items():
            for column, cell in of_encoder.items():
                names = {"question": question, "encoder": encoder, "column": column}
                score = {"score": RANK if column == RANK else ONE_CLASS.score_heading}
                lines.append(names | score | cell | dict(zip(("low", "high"), cell.get("interval", ()), strict=False)))
    return pd.DataFrame(lines, dtype=object).drop(columns="interval", errors="ignore")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments))


if __name__ == "__main__":
    run_main(main)

"""Rows of results: what the reports of a comparison's cases say, here or in a published results.json.

A row has the COLUMNS that are known of it, and those of its case. Tables, differences and plots are views of a frame of
them. Kinds of rows:

test: a score on held-out images, of a case (such as 5 shots) and a draw (`seed`); validation: the same on a dev split,
of an evaluation with `test: false`; dev: a score on the dev split next to those, of a probe at a depth;
rank: the effective rank of test features at a depth; diverged: no more.

The scores of the test images travel with the rows, in a file next to results.json: other results are paired with them.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evaluation.comparison.cases import TRUNK_SETTING, Case, Encoder
from evaluation.comparison.digests import case_digest, provenance, training_digest
from evaluation.config.comparing import Question
from evaluation.frozen.known_labels import lineage
from evaluation.frozen.run_images import find_run, split_run
from evaluation.metrics.scoring import (
    KINDS,
    ONE_CLASS,
    LabelKind,
    Outcomes,
    image_scores,
    kind_of,
    kind_of_report,
    labelled_outcomes,
    load_outcomes,
    rank_of,
)
from mpp.errors import NPZ_ERRORS, UserError
from mpp.runtime.files import complete, short_digest
from mpp.training.history import DEVICE_HOURS, PFLOP
from mpp.training.log import last_scalars

Row = dict[str, Any]
COSTS = {"pflop": PFLOP, "device_hours": DEVICE_HOURS}
"""Entry of a row about fine-tuning's cost -> scalar of the cost of training an encoder (`training_pflop`)."""
OF_RESULTS = ("seed", "interval", "figures", "depth", "lr", *COSTS)
"""Entries of a report's result that its row has."""
OF_CASE = ("encoder", "encoder_seed", "evaluation", "dataset", "group")
"""Entries of a row that name its case: see `Case.labels`."""
COLUMNS = [*OF_CASE, "kind", "case", "accuracy", "score"]
COLUMNS += [*OF_RESULTS, "images", "baselines", "tested", "known_by", "scores", "rank"]
COLUMNS += [f"training_{name}" for name in COSTS]
"""encoder_seed: of the encoder's training; score: heading of the figure `accuracy` where it is another one, such as R2;
figures: the others; baselines: scores that look at no image; tested: digest of the test images and their labels;
known_by: see `LabelKind`; scores: (M,) of these images, which are in SCORES_FILE and not in results.json."""
SCORES_FILE = "scores.npz"
SCORED_KINDS = ("test", "validation")
"""Kinds of rows whose scores a table has."""
MASKED_BASELINES = ("two nearest", "nearest", "most frequent")
"""Cases of masked patches that no encoder made."""


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame with all COLUMNS. What is not known is NaN, as null is; such an accuracy has no interval."""
    frame = pd.DataFrame(list(rows), columns=COLUMNS).astype({"accuracy": float})
    return frame.assign(interval=frame.interval.where(frame.accuracy.notna()))


def rows_asked(frame: pd.DataFrame, question: Question) -> pd.DataFrame:
    """The rows that a question is about, encoders and evaluations in its order."""
    for column, names in (("evaluation", question.evaluations), ("encoder", question.encoders)):
        if names is not None:
            frame = pd.concat([frame[frame[column] == name] for name in names])
    return frame


def in_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Scores, means over groups of datasets, and what diverged, with the heading of the `column` that each is in.

    It names the dataset where an evaluation has several. Baselines of masked patches are in none: no encoder made them.
    A training that diverged is in each column of its evaluation.
    """
    scores = frame[frame.kind.isin(SCORED_KINDS) & ~frame.case.isin(MASKED_BASELINES)]
    diverged = frame[frame.kind == "diverged"].drop(columns="case")
    diverged = diverged.merge(scores[["evaluation", "case"]].drop_duplicates(), "left")
    diverged = diverged.astype({"case": object}).fillna({"case": ""})  # without scores it is a column of numbers
    parts = [part for part in (scores, means_of_groups(scores), diverged) if len(part)]
    scored = pd.concat(parts) if parts else scores
    is_one = scored.groupby("evaluation").dataset.transform("nunique") == 1
    words = zip(scored.dataset.mask(is_one, ""), scored.evaluation, scored.case, strict=True)
    return scored.assign(column=[" ".join(filter(None, each)) for each in words])


def means_of_groups(scores: pd.DataFrame) -> pd.DataFrame:
    """Means over the datasets of each group, as rows of a dataset: of the seeds that have a score on all of them.

    A group whose scores are of several kinds, such as accuracy and R2, has none.
    """
    keys = ["encoder", "encoder_seed", "seed", "evaluation", "case", "kind", "group"]
    by_seed = scores.groupby(keys, sort=False)  # without rows that are in no group
    means = by_seed.agg({"accuracy": "mean", "dataset": "nunique", "score": "first"})
    is_of_one_kind = by_seed.score.nunique(dropna=False) == 1
    means = means[is_of_one_kind].reset_index()
    is_complete = means.dataset == means.group.map(scores.groupby("group").dataset.nunique())
    means = means.assign(dataset="mean " + means.group.astype(str), group=None)
    return means[is_complete].reindex(columns=scores.columns)


def kind_of_scores(scores: Iterable[Any]) -> LabelKind:
    """The kind of label whose score has one of these headings; accuracy has none."""
    headings = {*scores}
    return next((kind for kind in KINDS.values() if kind.score_heading in headings), ONE_CLASS)


# --- reports ---


def report_path_of_case(case: Case, folder: Path) -> Path:
    """The file of a case's report: its name has the digest of the settings, so that a renamed entry is found.

    Args:
        folder: of the comparison.
    """
    reports = folder / "reports"
    end = f"-{case_digest(case)}.json"
    return min(reports.glob(f"*{end}"), default=reports / f"{case.slug}{end}")


def read_report(case: Case, folder: Path) -> dict[str, Any] | None:
    """The report of a case, if there is one of these settings, images and weights.

    Raises:
        UserError: there is one, but whether it is of these images is not known: they are not there.
    """
    try:
        report = json.loads(report_path_of_case(case, folder).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # or it was cut off
        return None
    return report if report.get("comparison") == provenance(case) else None


def read_new_report(case: Case, file: Path) -> dict[str, Any]:
    """The report that an evaluation, perhaps a user's, has just written.

    Raises:
        UserError: it is none, or has results that a table cannot tell apart: it would show their mean.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        rows = list(rows_of_report(case, report, file))
        shown = [(row["case"], row["seed"]) for row in rows if row["kind"] in SCORED_KINDS]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        form = "{results: [{accuracy, ...}], protocol: {...}}"
        raise UserError(f"{case.entry.command} has not written {form} to {file}: {error!r}") from error
    if len(set(shown)) < len(shown):
        way = "give each a `case` of its own, or register it with case_key"
        raise UserError(f"{case.entry.command} has several results of the same case and seed: {way}")
    reserved = {name for name, _ in shown if name in MASKED_BASELINES}
    if reserved and case.kind != "masked patches":
        raise UserError(f"{case.entry.command} has cases with names of baselines: {reserved}; name them otherwise")
    return report


def rows_of_report(case: Case, report: dict[str, Any], file: Path) -> Iterator[Row]:
    """The results of a report; of several depths, scores at the one that counts."""
    protocol, heading = report["protocol"], kind_of_report(report).score_heading
    about = {"seed": 0} | ({"score": heading} if heading != ONE_CLASS.score_heading else {})
    is_tested = protocol.get("test", True)
    results = report["results"]
    if not is_tested and case.kind == "fine-tuning":
        results = [max(report["dev"], key=lambda each: rank_of(each["accuracy"]))]  # of its learning rates
    chosen = protocol.get("chosen_depth")
    results = [result for result in results if chosen in (None, result.get("depth", chosen))]
    labels = {key: value for key, value in report.get("labels", {}).items() if key in ("images", "baselines") and value}
    for result in results:
        name = result.get("case", result.get(case.evaluation.case_key, ""))
        row = {"kind": "test" if is_tested else "validation", "case": str(name), "accuracy": result["accuracy"]}
        row |= {key: result[key] for key in OF_RESULTS if key in result} | labels
        outcomes = load_outcomes(file, result["outcomes"]) if "outcomes" in result else None
        yield about | row | ({} if outcomes is None else scores_of_images(outcomes))
    if is_tested:
        by_depth = protocol.get("dev_accuracy_by_depth", {})
        of_dev = [{"depth": int(depth), "accuracy": accuracy} for depth, accuracy in by_depth.items()]
        if not by_depth:
            of_dev = [{"accuracy": each["dev_accuracy"]} for each in results if each.get("dev_accuracy") is not None]
        yield from (about | {"kind": "dev"} | row for row in of_dev)
        for depth, rank in protocol.get("rank_by_depth", {}).items():
            yield {"kind": "rank", "seed": 0, "depth": int(depth), "rank": rank}


def scores_of_images(outcomes: Outcomes) -> Row:
    """Entries of a row: the scores of the labelled test images, and the digest that they are known by."""
    known = labelled_outcomes(outcomes)
    names = [outcomes.kind, *map(str, known.images)]
    return {
        "tested": short_digest([*(name.encode() for name in names), known.targets.tobytes()]),
        "known_by": kind_of(known).known_by(known.targets),
        "scores": image_scores(known),
    }


def rows_of(case: Case, folder: Path) -> list[Row]:
    """The results of a case; none where it has no report."""
    report = {"diverged": ""} if was_never_trained(case.encoder, folder) else read_report(case, folder)
    if report is None:
        return []
    about = case.labels | {"digest": case_digest(case)} | training_cost(case.encoder)
    known = {"image_digests": report.get("comparison", {}).get("images"), "mpp": report.get("mpp")}
    about |= {name: value for name, value in known.items() if value}
    if "diverged" in report:
        return [about | {"kind": "diverged"}]
    return [about | row for row in rows_of_report(case, report, report_path_of_case(case, folder))]


def divergence_of(encoder: Encoder, folder: Path) -> Path:
    """The file that exists once the encoder's training diverged: by these settings it would again, in the same step."""
    return folder / "reports" / f"training-{training_digest(encoder)}.json"


def was_never_trained(encoder: Encoder, folder: Path) -> bool:
    """Whether the training of the encoder diverged, or that of a parent."""
    parents = [parent for setting, parent in encoder.parents.items() if setting != TRUNK_SETTING]
    of_its_own = not encoder.entry.random and divergence_of(encoder, folder).is_file()
    return of_its_own or any(was_never_trained(parent, folder) for parent in parents)


def read_published(file: str | None) -> dict[str, list[Row]]:
    """The results of another comparison's or sweep's results.json, by their digests; None: there are none.

    Raises:
        UserError: the file is not a results.json, or that of the images' scores next to it is damaged.
    """
    if file is None:
        return {}
    by_case: dict[tuple[Any, ...], list[Row]] = {}
    try:
        results = json.loads(Path(file).read_text(encoding="utf-8"))["results"]
        kept = Path(file).with_name(SCORES_FILE)
        scores = dict(np.load(kept)) if kept.is_file() else {}
        for row in results:
            if name_of(row) in scores:
                row["scores"] = scores[name_of(row)].astype(float)
            by_case.setdefault((row["digest"], *map(row.get, OF_CASE)), []).append(row)
    except (*NPZ_ERRORS, TypeError):
        raise UserError(f"extends is {file}; it must be the results.json of a comparison") from None
    by_digest: dict[str, list[Row]] = {}
    for (digest, *_), of_case in by_case.items():  # a result may have two names: the first counts
        by_digest.setdefault(digest, of_case)
    return by_digest


def write_scores(folder: Path, rows: Iterable[Row]) -> None:
    """Write the scores of images of all rows that have them: whether an image is right takes about a bit."""
    scores = {name_of(row): row["scores"] for row in rows if "scores" in row}
    for name, of_row in scores.items():
        scores[name] = of_row.astype(bool if np.isin(of_row, (0, 1)).all() else np.float32)
    with complete(folder / SCORES_FILE) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **scores)


def name_of(row: Row) -> str:
    """The name of a row's scores in their file."""
    return " ".join(str(row.get(key)) for key in ("digest", "case", "seed"))


# --- cost ---


def training_cost(encoder: Encoder) -> Row:
    """PFLOP and device-hours that training an encoder and its ancestors took, as entries of a row.

    Random weights cost 0. Where a cost is not known, it is left out: without a record, or of a published model's pupil.
    """
    if encoder.entry.random:
        return {f"training_{name}": 0.0 for name in COSTS}
    costs = {}
    for name, scalar in COSTS.items():
        with suppress(UserError):
            costs[f"training_{name}"] = cost_with_ancestors(encoder.path, scalar)
    return costs


def cost_with_ancestors(encoder: Path, scalar: str) -> float:
    """The cost of a run and of all that it was made from, each once, as far as the step that is taken.

    A branch's counts from its first step on.

    Args:
        scalar: that grows with training: PFLOP or DEVICE_HOURS.
    Raises:
        UserError: one of them has no record of it, such as a published model.
    """
    costs: dict[Path, float] = {}
    for name in lineage(str(encoder)):
        run, (_, weights) = Path(find_run(name) or name).resolve(), split_run(name)
        until = int(weights.removeprefix("step_")) if weights.startswith("step_") else math.inf
        costs[run] = max(last_scalars(run, scalar, until)[scalar], costs.get(run, 0.0))
    return sum(costs.values())

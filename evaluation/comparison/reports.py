"""Reports of a comparison's cases: where they are, whether they count, and the rows of results that they give."""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluation.comparison.cases import Case
from evaluation.comparison.digests import case_digest, digests_of_images, provenance, training_digest
from evaluation.comparison.encoders import Encoder
from evaluation.comparison.trainings import cost_with_ancestors, published_ancestors
from evaluation.metrics.intervals import wilson
from evaluation.metrics.scoring import ONE_CLASS, LabelKind, kind_of_report, kind_of_score, rank_of
from mpp.errors import UserError
from mpp.training.history import DEVICE_HOURS, PFLOP

COSTS = {"pflop": PFLOP, "device_hours": DEVICE_HOURS}
"""Entry of a row about fine-tuning's cost -> scalar of the cost of training an encoder (`training_pflop`)."""
ResultRow = dict[str, Any]
"""A result: encoder, encoder_seed, evaluation, dataset, group, digest, its kind, and, where they are known,
training_pflop, training_device_hours, training_without, and image_digests, by which changed images are seen.

test: an accuracy on held-out images, of a case (such as 5 shots) and a seed, with `interval`, `images`, `figures`, the
scores of `baselines` that look at no image and the place of its `outcomes` where they are known, and `score`, its name,
where it is another figure, such as mean IoU;
validation: the same on a dev split, of an evaluation with `test: false`; dev: an accuracy on the dev split next
to those, of a probe at a depth;
rank: the effective rank of test features at a depth; diverged: no more.
"""


def report_path_of_case(case: Case, folder: Path) -> Path:
    """The file of a case's report: its name has the digest of the settings, so that a renamed entry is found.

    Args:
        folder: of the comparison.
    """
    reports = folder / "reports"
    by_digest = sorted(reports.glob(f"*-{case_digest(case)}.json"))
    return by_digest[0] if by_digest else reports / f"{case.file_name}-{case_digest(case)}.json"


def divergence_of(encoder: Encoder, folder: Path) -> Path:
    """The file that exists once the encoder's training diverged: by these settings it would again, in the same step."""
    return folder / "reports" / f"training-{training_digest(encoder)}.json"


def read_report(case: Case, folder: Path) -> dict[str, Any] | None:
    """The report of a case, if there is one of these settings, images and weights."""
    with suppress(UserError, FileNotFoundError, json.JSONDecodeError):  # no encoder, no report, or one that was cut off
        report = json.loads(report_path_of_case(case, folder).read_text(encoding="utf-8"))
        if report.get("comparison") == provenance(case):
            return report
    return None


def read_new_report(case: Case, file: Path) -> dict[str, Any]:
    """The report that an evaluation, perhaps a user's, has just written.

    Raises:
        UserError: it is none, or has results that a table cannot tell apart: it would show their mean.
    """
    shown = []
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        chosen = report["protocol"].get("chosen_depth")
        for result in report["results"]:
            if "accuracy" not in result:
                raise KeyError("accuracy")
            if result.get("depth", chosen) == chosen:
                shown.append((case_of(case, result), result.get("seed", 0)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        form = "{results: [{accuracy, ...}], protocol: {...}}"
        raise UserError(f"{case.entry.command} has not written {form} to {file}: {error!r}") from error
    if len(set(shown)) < len(shown):
        way = "give each a `case` of its own, or register it with case_key"
        raise UserError(f"{case.entry.command} has several results of the same case and seed: {way}")
    return report


def was_never_trained(encoder: Encoder, folder: Path) -> bool:
    """Whether the training of the encoder diverged, or that of a parent."""
    if any(was_never_trained(parent, folder) for parent in encoder.parents.values()):
        return True
    return not encoder.entry.random and divergence_of(encoder, folder).is_file()


def rows_of(case: Case, folder: Path) -> list[ResultRow]:
    """The results of a case; none where it has no report."""
    diverged = was_never_trained(case.encoder, folder)
    report = {"diverged": True} if diverged else read_report(case, folder)
    if report is None:
        return []
    about = case.labels | {"digest": case_digest(case)}
    about |= training_cost(case.encoder)
    of_images = digests_of_images(report.get("comparison", {}))
    if of_images:
        about["image_digests"] = of_images
    if "diverged" in report:
        return [about | {"kind": "diverged"}]
    if not report["protocol"].get("test", True):
        return [about | with_known_numbers(row) for row in validation_rows(case, report, folder)]
    rows = (*test_rows(case, report, folder), *dev_rows(case, report), *rank_rows(report))
    return [about | with_known_numbers(row) for row in rows]


def describe_missing_seeds(cases: Iterable[Case], rows: Iterable[ResultRow]) -> list[str]:
    """A sentence on the encoders that have results at some of their seeds only: the others are running, or failed.

    Args:
        cases: all that are asked for.
    """
    found: dict[tuple, set[int]] = {}
    for row in rows:
        found.setdefault((row["encoder"], row["evaluation"], row["dataset"]), set()).add(row["encoder_seed"])
    missing: dict[tuple, list[int]] = {}
    for case in cases:
        place = (case.encoder.entry.name, case.entry.name, case.dataset.name)
        if place in found and case.encoder.seed not in found[place]:
            missing.setdefault(place, []).append(case.encoder.seed)
    lacking = []
    for (encoder, evaluation, dataset), seeds in missing.items():
        lacking.append(f"{encoder} in {evaluation} on {dataset} (seed {' and '.join(map(str, seeds))})")
    return [f"Means are without the seeds that have no result yet: {'; '.join(lacking)}."] if lacking else []


def with_known_numbers(row: ResultRow) -> ResultRow:
    """A row of a file with NaN instead of null, an accuracy that the images do not have; it has no interval."""
    if "accuracy" not in row or row["accuracy"] is not None:
        return row
    return {key: value for key, value in row.items() if key != "interval"} | {"accuracy": math.nan}


def validation_rows(case: Case, report: dict[str, Any], folder: Path) -> list[ResultRow]:
    """Accuracies of an evaluation with `test: false`; of fine-tuning, at the best of its learning rates."""
    if case.evaluation.kind != "fine-tuning":
        return [row | {"kind": "validation"} for row in test_rows(case, report, folder)]
    best = max(report["dev"], key=lambda each: rank_of(each["accuracy"]))
    score = name_of_score(kind_of_report(report))
    return [{"kind": "validation", "case": name_of_figure(report), "seed": 0, **best, **score}]


def test_rows(case: Case, report: dict[str, Any], folder: Path) -> list[ResultRow]:
    """Accuracies on test images; of several depths, at the one that counts."""
    chosen_depth = report["protocol"].get("chosen_depth")
    figure = name_of_figure(report)
    rows = []
    for result in report["results"]:
        if result.get("depth", chosen_depth) != chosen_depth:
            continue
        name = " ".join(filter(None, [case_of(case, result), figure]))
        row = {"kind": "test", "case": name, "seed": result.get("seed", 0), "accuracy": result["accuracy"]}
        row |= name_of_score(kind_of_report(report))
        row |= {key: result[key] for key in ("interval", "figures", "depth", "lr", *COSTS) if key in result}
        if "labels" in report:
            row["images"] = report["labels"]["images"]
            if report["labels"]["baselines"]:
                row["baselines"] = report["labels"]["baselines"]
        if "outcomes" in result:
            row["outcomes"] = {
                "report": f"reports/{report_path_of_case(case, folder).name}",
                "number": result["outcomes"],
            }
        rows.append(row)
    return rows


def case_of(case: Case, result: dict[str, Any]) -> str:
    """The case of an evaluation that a result is of: `5` shots, say; empty: there is one."""
    return str(result.get("case", result.get(case.evaluation.case_key, "")))


def name_of_figure(report: dict[str, Any]) -> str:
    """The figure of a report, for headings, where it is none of the usual ones: accuracy or mean IoU."""
    kind = kind_of_report(report)
    return kind.score_heading if kind.name in ("several", "number") else ""


def name_of_score(kind: LabelKind) -> dict[str, str]:
    """The entry `score` of a row or a cell: the heading of its score in tables; empty where it is an accuracy."""
    heading = kind.score_heading
    return {} if heading == ONE_CLASS.score_heading else {"score": heading}


def kind_of_scores(entries: Iterable[dict[str, Any]]) -> LabelKind:
    """The kind of label whose score rows of results, or cells of a table, have: that of the first."""
    return kind_of_score(next((entry["score"] for entry in entries if "score" in entry), None))


def with_interval(row: ResultRow, case: Case) -> ResultRow:
    """A row of an accuracy without its interval, such as a published one, with Wilson's where the images are known."""
    images = case.dataset.images
    is_share = row["kind"] == "test" and case.evaluation.is_share_of_images and "score" not in row  # R2, say
    if images is None or not is_share or "interval" in row:
        return row
    return row | {"images": images, "interval": list(wilson(row["accuracy"] * images, images))}


def dev_rows(case: Case, report: dict[str, Any]) -> list[ResultRow]:
    """Accuracies on the dev split, by depth; of fine-tuning, on training images that it left out."""
    by_depth = report["protocol"].get("dev_accuracy_by_depth", {})
    on_dev = {"kind": "dev", "seed": 0} | name_of_score(kind_of_report(report))
    rows = [on_dev | {"depth": int(depth), "accuracy": each} for depth, each in by_depth.items()]
    if case.evaluation.kind == "fine-tuning":
        for result in report["results"]:
            if "dev_accuracy" in result:
                rows.append(on_dev | {"accuracy": result["dev_accuracy"]})
    return rows


def rank_rows(report: dict[str, Any]) -> list[ResultRow]:
    """Effective ranks of test features by depth."""
    by_depth = report["protocol"].get("rank_by_depth", {})
    return [{"kind": "rank", "seed": 0, "depth": int(depth), "rank": rank} for depth, rank in by_depth.items()]


def read_published(file: str | None) -> dict[str, list[ResultRow]]:
    """The results of another comparison's or sweep's results.json, by their digests; None: there are none.

    Raises:
        UserError: the file is not a results.json.
    """
    if file is None:
        return {}
    by_digest: dict[str, list[ResultRow]] = {}
    try:
        for row in json.loads(Path(file).read_text(encoding="utf-8"))["results"]:
            by_digest.setdefault(row["digest"], []).append(with_known_numbers(row))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"extends is {file}; it must be the results.json of a comparison") from None
    return by_digest


def training_cost(encoder: Encoder) -> dict[str, Any]:
    """PFLOP and device-hours that training an encoder and its ancestors took, as entries of a row.

    Random weights cost 0. Encoders without a record are left out, such as a folder from elsewhere or a timm name. Of
    published models among the ancestors, whose cost is unknown, `training_without` has the names.
    """
    costs: dict[str, Any] = {}
    for name, scalar in COSTS.items():
        if encoder.entry.random:
            costs[f"training_{name}"] = 0.0
            continue
        with suppress(UserError):
            costs[f"training_{name}"] = cost_with_ancestors(encoder.path, scalar)
    published = published_ancestors(encoder.path) if costs and not encoder.entry.random else []
    return costs | {"training_without": published} if published else costs

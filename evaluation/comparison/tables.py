"""What a comparison found: results in, a table and a plot for each question out."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from matplotlib.figure import Figure

from evaluation.figures import DPI, Curves, plot_bars, plot_depths, plot_lines
from evaluation.frozen.results import percent, table, write_json
from evaluation.pages.page import Link, Page, Section, Table, picture_of, write_page
from mpp.config import require
from mpp.runtime.files import write_complete
from mpp.training.run_folder import REPORT

Row = dict[str, Any]
"""A result: encoder, encoder_seed, evaluation, dataset, group, digest, training_pflop where it is known, and its kind.

test: an accuracy, of a case (such as 5 shots) and a seed; dev: an accuracy on the dev split, of a probe at a depth;
rank: the effective rank of test features at a depth; diverged: no more.
"""
Numbers = dict[str, dict[str, dict[str, float]]]
"""Encoder -> column -> mean, standard deviation, count; how many seeds diverged, where any did; PFLOP, where asked.

Columns are accuracies; of a single dataset also that of fine-tuning on training images that it left out, and the rank
of the deepest features where a probe measured it.
"""

RANK = "rank"

COMPUTE = {"compute": "training compute (PFLOP)", "total compute": "compute of training and fine-tuning (PFLOP)"}
"""Values of a question's `x` that are measured, and their axis."""

BASELINES = ("two nearest", "nearest", "most frequent")  # of masked patches: cases that no encoder made
LIBRARIES = ("torch", "timm", "accelerate", "datasets", "numpy")


@dataclass(frozen=True)
class Question:
    """Some of the encoders by some of the evaluations: a table and a plot."""

    name: str
    """File name of the plot."""
    title: str = ""
    """What is asked."""
    encoders: Sequence[str] | Mapping[str, float] | None = None
    """Names of rows; with numbers, the plot is against these. null: all."""
    evaluations: Sequence[str] | None = None
    """Names of evaluations. null: all."""
    plot: Literal["bars", "lines", "depth"] = "bars"
    """bars; lines: against x; depth: against the encoder's depth, on the dev split."""
    x: str = ""
    """What the numbers of `encoders` are. In place of numbers: `compute`, the PFLOP that training the encoder executed
    (random weights: 0), or `total compute`, those of its fine-tuning too; the choice of a rate is left out."""
    lines: Mapping[str, Sequence[str]] | None = None
    """Lines of the plot: name and encoders. null: a line for each case of an evaluation (5 shots, 25 shots)."""

    def __post_init__(self):
        require(self.plot in ("bars", "lines", "depth"), "questions: plot", self.plot, "bars, lines or depth")
        require(isinstance(self.title, str), "questions: title", self.title, "text (without a colon and a blank)")
        for name in ("encoders", "evaluations"):
            value = getattr(self, name)
            require(value is None or len(value) > 0, f"questions: {name}", value, "null (all), or not empty")
        numbered = isinstance(self.encoders, Mapping) or self.x in COMPUTE
        require(numbered or self.plot != "lines", "questions: encoders", self.encoders, "{name: number} to plot lines")


def chosen(rows: list[Row], question: Question) -> list[Row]:
    """Those that a question is about, encoders in its order."""
    asked = list(question.encoders) if question.encoders is not None else unique(rows, "encoder")
    evaluations = question.evaluations or unique(rows, "evaluation")
    kept = [row for row in rows if row["encoder"] in asked and row["evaluation"] in evaluations]
    return sorted(kept, key=lambda row: (asked.index(row["encoder"]), evaluations.index(row["evaluation"])))


def of_kind(rows: list[Row], kind: str) -> list[Row]:
    """The accuracies on `test` images, those on the `dev` split by depth, the `rank` by depth, or what `diverged`."""
    return [row for row in rows if row["kind"] == kind]


def place(question: Question, row: Row) -> float | None:
    """Where an accuracy lies on the question's x-axis; None: that is not known."""
    at = row.get("training_pflop") if question.x in COMPUTE else dict(question.encoders or {}).get(row["encoder"])
    more = row.get("pflop", 0) if question.x == "total compute" else 0
    return None if at is None else at + more


def unique(rows: list[Row], key: str) -> list[Any]:
    """The different values of a key, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def spread(rows: list[Row], key: str = "accuracy") -> dict[str, float]:
    """Mean and standard deviation over seeds, of the encoder and of the draws; over datasets only the mean is taken."""
    of_seeds: dict[tuple, list[float]] = {}
    for row in rows:
        of_seeds.setdefault((row["encoder_seed"], row["seed"]), []).append(row[key])
    values = [np.mean(each) for each in of_seeds.values()]
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "count": len(values)}


def columns_of(rows: list[Row]) -> dict[str, Callable[[Row], bool]]:
    """Headings and which results they are of: each dataset's cases, then the means over groups of datasets."""
    several = len(unique(rows, "dataset")) > 1
    columns: dict[str, Callable] = {}
    for kind in ("dataset", "group"):
        for place, evaluation, case in dict.fromkeys((r[kind], r["evaluation"], r["case"]) for r in rows if r[kind]):
            shown = f"mean {place}" if kind == "group" else place if several else ""
            key, name = (place, evaluation, case), " ".join(part for part in (shown, evaluation, case) if part)
            columns[name] = lambda row, kind=kind, key=key: (row[kind], row["evaluation"], row["case"]) == key
    return columns


def numbers_of(
    rows: list[Row],
    pflop: Callable[[Row], float | None] = lambda row: None,
    groups: Mapping[str | None, set[str]] | None = None,
) -> Numbers:
    """The numbers of a table, and in how many of an encoder's seeds a training `diverged` that they need.

    Args:
        pflop: what an accuracy took, where the table says it: the mean.
        groups: the datasets of each, measured or not.
    """
    measured, lost = of_kind(rows, "test"), without_a_result(rows)
    numbers: Numbers = {encoder: {} for encoder in unique([*measured, *lost], "encoder")}
    for name, belongs in columns_of([*measured, *lost]).items():
        column = [row for row in measured if belongs(row)]
        datasets, group = set(unique(column, "dataset")), column[0]["group"] if column else None
        if name.startswith(f"mean {group} "):
            datasets |= (groups or {}).get(group, set())
        for encoder, cells in numbers.items():
            own = complete([row for row in column if row["encoder"] == encoder], datasets)
            seeds = {row["encoder_seed"] for row in lost if belongs(row) and row["encoder"] == encoder}
            if own or seeds:
                cells[name] = (spread(own) if own else {}) | ({"diverged": len(seeds)} if seeds else {})
            taken = [found for found in map(pflop, own) if found is not None]
            if taken:
                cells[name]["pflop"] = float(np.mean(taken))
    if len(unique(rows, "dataset")) > 1:
        return numbers
    tuned = [row for row in of_kind(rows, "dev") if "depth" not in row]
    for encoder, evaluation in dict.fromkeys((row["encoder"], row["evaluation"]) for row in tuned):
        of_it = [row for row in (*tuned, *measured) if (row["encoder"], row["evaluation"]) == (encoder, evaluation)]
        seeds = [set(unique(of_kind(of_it, kind), "encoder_seed")) for kind in ("dev", "test")]
        if seeds[0] == seeds[1]:  # a mean over fewer would pass for one over all
            numbers[encoder][f"{evaluation}, dev"] = spread(of_kind(of_it, "dev"))
    ranked = of_kind(rows, "rank")
    for encoder in unique(ranked, "encoder"):
        own = [row for row in ranked if row["encoder"] == encoder]
        deepest = max(unique(own, "depth"))
        numbers[encoder][RANK] = spread([row for row in own if row["depth"] == deepest], "rank")
    return numbers


def without_a_result(rows: list[Row]) -> list[Row]:
    """What diverged, once for each case that its evaluation has where it does not; where it never does, for `""`."""
    cases: dict[str, list[str]] = {}
    for evaluation, case in dict.fromkeys((row["evaluation"], row["case"]) for row in of_kind(rows, "test")):
        cases.setdefault(evaluation, []).append(case)
    return [row | {"case": case} for row in of_kind(rows, "diverged") for case in cases.get(row["evaluation"], [""])]


def complete(rows: list[Row], datasets: set[str]) -> list[Row]:
    """Results of the seeds that have all of these datasets: a mean over some of them would pass for one over all."""
    have: dict[tuple, set[str]] = {}
    for row in rows:
        have.setdefault((row["encoder_seed"], row["seed"]), set()).add(row["dataset"])
    return [row for row in rows if have[row["encoder_seed"], row["seed"]] == datasets]


def table_of(numbers: Numbers) -> str:
    """The numbers as a Markdown table."""
    return table(*cells_of(numbers))


def cells_of(numbers: Numbers) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table; beside accuracies, the compute that they took, where that is known."""
    columns = list(dict.fromkeys(column for of in numbers.values() for column in sorted(of, key=RANK.__eq__)))
    shown: dict[str, Callable[[dict[str, dict[str, float]]], str]] = {}  # heading -> what stands below it
    for column in columns:
        shown[column] = lambda of, column=column: (rank_cell if column == RANK else cell)(of.get(column))
        if any("pflop" in of.get(column, {}) for of in numbers.values()):
            shown[f"{column}, PFLOP"] = lambda of, column=column: compute_cell(of.get(column))
    body = [[name, *(text(of) for text in shown.values())] for name, of in numbers.items()]
    return ["accuracy (%)", *shown], body


def cell(numbers: dict[str, float] | None) -> str:
    """A number as the table has it; a single measurement has no spread."""
    if numbers is None:
        return "-"
    if "mean" not in numbers:
        return "diverged"
    text = percent(numbers)
    return f"{text} ({numbers['diverged']} diverged)" if "diverged" in numbers else text


def rank_cell(numbers: dict[str, float] | None) -> str:
    """An effective rank as the table has it."""
    if numbers is None:
        return "-"
    return f"{numbers['mean']:.0f}" + (f" ± {numbers['std']:.0f}" if numbers["count"] > 1 else "")


def compute_cell(numbers: dict[str, float] | None) -> str:
    """The compute of a number as the table has it."""
    return f"{numbers['pflop']:.3g}" if numbers and "pflop" in numbers else "-"


def curves_of(rows: list[Row], line: str, x: Callable[[Row], float]) -> Curves:
    """Evaluation (of a dataset) -> value of `line` -> x, ascending -> mean and standard deviation."""
    several = len(unique(rows, "dataset")) > 1
    found: dict[str, dict[str, dict[float, list[Row]]]] = {}
    for row in rows:
        name = f"{row['dataset']} {row['evaluation']}" if several else row["evaluation"]
        found.setdefault(name, {}).setdefault(row[line], {}).setdefault(x(row), []).append(row)
    return {
        name: {value: {place: spread(each) for place, each in sorted(of.items())} for value, of in lines.items()}
        for name, lines in found.items()
    }


def plot_question(question: Question, rows: list[Row], numbers: Numbers) -> Figure | None:
    """The question's plot; None: there is nothing to draw yet."""
    if question.plot == "depth":
        probed = [row for row in of_kind(rows, "dev") if "depth" in row]
        curves = curves_of(probed, "encoder", lambda row: row["depth"])
        return plot_depths(curves) if curves else None
    if question.plot == "lines":
        drawn = [row for row in of_kind(rows, "test") if place(question, row) is not None]
        if question.lines is not None:
            lines = question.lines.items()  # one encoder may begin several lines
            named = [(line, row) for line, encoders in lines for row in drawn if row["encoder"] in encoders]
            drawn = [row | {"case": f"{line} {row['case']}".strip()} for line, row in named]
        curves = curves_of(drawn, "case", partial(place, question))
        return plot_lines(curves, COMPUTE.get(question.x, question.x)) if drawn else None
    tested = columns_of([*of_kind(rows, "test"), *without_a_result(rows)])
    bars = {name: {key: of[key] for key in tested if key in of} for name, of in numbers.items()}
    return plot_bars(bars) if bars else None


def write_findings(
    folder: Path,
    questions: Sequence[Question],
    rows: list[Row],
    settings: dict[str, Any],
    runs: Mapping[str, Sequence[Path]] | None = None,
) -> Row:
    """Write results.json, table.md, the plots and a page, and print the tables; the summary: question -> numbers.

    Args:
        runs: encoder -> its run folders, whose reports the page leads to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary, texts, drawn, sections = {}, [], [], []
    groups: dict[str | None, set[str]] = {}
    for each in settings.get("datasets", ()):
        groups.setdefault(each.get("group"), set()).add(each["name"])
    for question in questions:
        asked = chosen(rows, question)
        took = partial(place, question) if question.x in COMPUTE else lambda row: None
        numbers = summary[question.name] = numbers_of(asked, took, groups)
        section = Section(f"question_{len(sections)}", question.title or question.name)
        heading = f"### {question.title}\n\n" if question.title else ""
        if numbers and question.plot != "depth":  # what that draws are no test accuracies
            texts.append(heading + table_of(numbers))
            headings, cells = cells_of(numbers)
            reports = {name: reports_of(folder, (runs or {}).get(name, ())) for name in numbers}
            if any(reports.values()):
                headings, cells = [*headings, "reports"], [[*row, reports[row[0]]] for row in cells]
            section.blocks.append(Table(headings, cells))
        figure = plot_question(question, asked, numbers)
        if figure:
            drawn.append(f"{question.name}.png")
            figure.savefig(folder / drawn[-1], dpi=DPI)
            section.blocks.append(picture_of(figure, f"Plot: {section.title}"))
        sections.append(section)
    about = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    write_json(folder / "results.json", {"summary": summary, "results": rows, "versions": about, "settings": settings})
    text = "\n\n".join(texts) or "no results yet"
    write_complete(folder / "table.md", f"{text}\n")
    write_page(folder / REPORT, page_of(folder, rows, sections, about))
    print(f"\n{text}\nwrote {folder}: {', '.join(['results.json', 'table.md', REPORT, *drawn])}; see reports/")
    return {"results": rows, "summary": summary}


def reports_of(folder: Path, runs: Sequence[Path]) -> list[Link]:
    """Links from the comparison's page to the reports of runs, numbered where there are several."""
    pages = [run / REPORT for run in runs if (run / REPORT).is_file()]
    names = [page.parent.name if len(pages) > 1 else "report" for page in pages]
    return [Link(name, quote(os.path.relpath(page, folder))) for name, page in zip(names, pages, strict=True)]


def page_of(folder: Path, rows: list[Row], sections: Sequence[Section], about: dict[str, str]) -> Page:
    """The comparison as a page: what was best, then a section for each question."""
    tested, verdict = of_kind(rows, "test"), []
    for key in dict.fromkeys((row["dataset"], row["evaluation"], row["case"]) for row in tested):
        dataset, evaluation, case = key
        if case in BASELINES:
            continue
        of_it = [row for row in tested if (row["dataset"], row["evaluation"], row["case"]) == key]
        means = {name: spread([row for row in of_it if row["encoder"] == name]) for name in unique(of_it, "encoder")}
        best = max(means, key=lambda name: means[name]["mean"])
        others = [f"{name} {100 * found['mean']:.1f} %" for name, found in means.items() if name != best]
        beside = f" (beside {', '.join(others[:6])}{' ...' if len(others) > 6 else ''})" if others else ""
        said = f"{f'{evaluation} {case}'.strip()} on {dataset}: best is {best} with {cell(means[best])} %{beside}"
        verdict.append((said, Link("why", "#question_0") if sections else None))
    lost = len({(row["encoder"], row["encoder_seed"]) for row in of_kind(rows, "diverged")})
    warnings = [f"{lost} trainings diverged: see the tables"] if lost else []
    versions = Section("versions", "Versions", [Table(["", ""], [[name, each] for name, each in about.items()])])
    subtitle = f"{len(unique(rows, 'encoder'))} encoders, {len(tested)} results on test images"
    shown = [section for section in sections if section.blocks]
    missing = {section.title: "there are no results yet" for section in sections if not section.blocks}
    verdict = verdict or [("No results yet", None)]
    return Page(f"{folder}: a comparison", subtitle, verdict, warnings, [*shown, versions], missing)

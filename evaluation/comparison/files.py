"""Files of a comparison's results: results.json, table.md, table.csv, a plot for each question, and a page."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from matplotlib.figure import Figure

from evaluation.comparison.differences import (
    EncoderDifference,
    describe_difference,
    describe_not_compared,
    difference_table,
    differences_from_best,
    runners_up,
    told_apart_table,
)
from evaluation.comparison.entries import Question
from evaluation.comparison.plots import plot_question
from evaluation.comparison.remarks import label_baselines, masked_baselines, remarks_on
from evaluation.comparison.reports import ResultRow
from evaluation.comparison.rows import MASKED_BASELINES, diverged_with, grouped, of_encoder, of_kind, rows_asked, unique
from evaluation.comparison.tables import (
    COST_UNITS,
    RANK_COLUMN,
    CellsByEncoder,
    Groups,
    cell_of,
    cells_by_encoder,
    cells_of,
    mean_in_words,
    score_in_words,
)
from evaluation.comparison.trunks import Compute, describe_trunks
from evaluation.figures.markdown import markdown_table
from evaluation.figures.style import write_plot
from evaluation.frozen.results import write_json
from evaluation.metrics.scoring import ONE_CLASS, best_choice
from evaluation.pages.about import recorded_versions
from evaluation.pages.page import (
    Link,
    Missing,
    Page,
    Section,
    Table,
    Text,
    figure_as_picture,
    without_missing,
    write_page,
)
from mpp.runtime.files import complete, write_complete
from mpp.runtime.messages import counted
from mpp.training.run_folder import REPORT_PAGE

NUMBERS_FILE = "table.csv"
DIFFERENCES = "Differences from the best, with 95% intervals over test images"
TOLD_APART = "Encoders told apart from the best, by column"
WROTE_PAGE = "Process that wrote this page; results that were there already may be of other versions"
NO_DEPTHS = "there are no accuracies by depth, which evaluations with depth: dev have"
NAMED_NEXT_TO_BEST = 6
"""Encoders that the page's verdict names besides the best one, at most."""

Runs = Mapping[str, Sequence[Path]]
"""Encoder -> its run folders, one for each seed."""


class Answer(NamedTuple):
    """The numbers and the plot of a question."""

    question: Question
    numbers: CellsByEncoder
    plot: Figure | None
    differences: list[EncoderDifference]
    """Of the best encoder of each column from the others."""
    remarks: list[str]
    """Sentences below the table: baselines that are of no encoder, columns whose differences are not known."""

    @property
    def has_table(self) -> bool:
        """Whether there are numbers to show; those of curves by depth are no test accuracies."""
        return bool(self.numbers) and self.question.plot != "depth"

    @property
    def lacks_depths(self) -> bool:
        """Whether it is about curves by depth, and has other results only."""
        return bool(self.numbers) and self.question.plot == "depth" and self.plot is None


def write_comparison(
    folder: Path,
    questions: Sequence[Question],
    rows: list[ResultRow],
    settings: dict[str, Any],
    runs: Runs | None = None,
    trunks: dict[str, Compute] | None = None,
    missing: Sequence[str] = (),
) -> dict[str, Any]:
    """Write results.json, table.md, table.csv, the plots and a page, and print the tables.

    Args:
        rows: all results.
        settings: the config's entries.
        runs: run folders whose reports the page leads to.
        trunks: the compute that each trunk and its branches took.
        missing: sentences on results that the means are without.
    Returns:
        `results`, the rows, and `summary`: question -> numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = dataset_groups(settings.get("datasets", ()))
    answers = [answer_of(question, rows, groups, folder) for question in questions]
    summary = {answer.question.name: answer.numbers for answer in answers}
    results = {"summary": summary, "results": rows, "versions": recorded_versions(), "settings": settings}
    if trunks:
        results["trunks"] = trunks
    write_json(folder / "results.json", results)
    text = "\n\n".join([answers_as_text(answers), *missing, *describe_trunks(trunks or {})])
    write_complete(folder / "table.md", f"{text}\n")
    write_numbers(folder / NUMBERS_FILE, answers)
    plots = []
    for answer in answers:
        if answer.plot is not None:
            plots += write_plot(answer.plot, folder, answer.question.name)
    write_page(folder / REPORT_PAGE, page_of(folder, rows, answers, runs or {}, trunks or {}, missing))
    files = ["results.json", "table.md", NUMBERS_FILE, REPORT_PAGE, *plots]
    print(f"\n{text}\nwrote {folder}: {', '.join(files)}; see reports/")
    return {"results": rows, "summary": summary}


def dataset_groups(datasets: Sequence[dict[str, Any]]) -> Groups:
    """The datasets of each group, by the config's entries."""
    groups: dict[str | None, set[str]] = {}
    for dataset in datasets:
        groups.setdefault(dataset.get("group"), set()).add(dataset["name"])
    return groups


def answer_of(question: Question, rows: list[ResultRow], groups: Groups, folder: Path) -> Answer:
    """The numbers and the plot of a question, and the differences from its best encoders."""
    asked = rows_asked(rows, question)
    numbers = cells_by_encoder(asked, question, groups)
    differences = differences_from_best(asked, folder)
    remarks = [*remarks_on(asked, question), *describe_not_compared(asked, differences)]
    return Answer(question, numbers, plot_question(question, asked, numbers), differences, remarks)


def answers_as_text(answers: Sequence[Answer]) -> str:
    """The tables of all questions as Markdown."""
    texts = []
    for answer in answers:
        if answer.has_table:
            heading = f"### {answer.question.title}\n\n" if answer.question.title else ""
            texts.append(heading + markdown_table(*cells_of(answer.numbers)))
            texts += answer.remarks
            if answer.differences:
                texts.append(text_of_differences(answer.differences))
        elif answer.lacks_depths:
            texts.append(f"{answer.question.title or answer.question.name}: {NO_DEPTHS}.")
    return "\n\n".join(texts) or "no results yet"


def text_of_differences(differences: Sequence[EncoderDifference]) -> str:
    """The differences from the best encoder of each column: the encoders told apart, the second best in words, all."""
    lines = [f"- {each.column}: {describe_difference(each)}" for each in runners_up(differences)]
    told_apart = [f"{TOLD_APART}:", "", markdown_table(*told_apart_table(differences))]
    all_differences = markdown_table(*difference_table(differences))
    return "\n".join([*told_apart, "", f"{DIFFERENCES}:", "", *lines, "", all_differences])


def write_numbers(file: Path, answers: Sequence[Answer]) -> None:
    """Write the numbers of all questions as CSV, a line for each cell of their tables."""
    names = ["question", "encoder", "column"]
    numbers = ["score", "mean", "std", "count", "low", "high", *COST_UNITS, "diverged"]
    with complete(file) as partial, partial.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, [*names, *numbers], extrasaction="ignore")
        writer.writeheader()
        for answer in answers:
            for encoder, cells in answer.numbers.items():
                for column, cell in cells.items():
                    score = RANK_COLUMN if column == RANK_COLUMN else ONE_CLASS.score_heading
                    low, high = cell.get("interval", (None, None))
                    line = {"question": answer.question.name, "encoder": encoder, "column": column, "score": score}
                    writer.writerow(line | {"low": low, "high": high} | cell)


def page_of(
    folder: Path,
    rows: list[ResultRow],
    answers: Sequence[Answer],
    runs: Runs,
    trunks: dict[str, Compute],
    missing_results: Sequence[str],
) -> Page:
    """The comparison as a page: the best encoders, then a section for each question."""
    sections = [section_of(answer, f"question_{number}", folder, runs) for number, answer in enumerate(answers)]
    filled, missing = without_missing(sections)
    link = Link("why", "#question_0") if sections else None
    verdict = [(sentence, link) for sentence in best_encoders(rows)] or [("No results yet", None)]
    diverged = {(row["encoder"], row["encoder_seed"]) for row in of_kind(rows, "diverged")}
    warnings = [f"{counted(len(diverged), 'training')} diverged: see the tables"] if diverged else []
    warnings += missing_results
    versions = [[library, version] for library, version in recorded_versions().items()]
    filled.append(Section("versions", "Versions", [Table(["", ""], versions, WROTE_PAGE)]))
    if trunks:
        filled.append(section_of_trunks(trunks))
    subtitle = f"{len(unique(rows, 'encoder'))} encoders, {len(of_kind(rows, 'test'))} results on test images"
    return Page(f"{folder}: a comparison", subtitle, verdict, warnings, filled, missing)


def best_encoders(rows: list[ResultRow]) -> list[str]:
    """A sentence for each dataset, evaluation and case: the best encoder, the others' accuracies, and baselines."""
    sentences = []
    tested = of_kind(rows, "test")
    evaluations = grouped(tested, "dataset", "evaluation")
    for (dataset, evaluation, case), of_case in grouped(tested, "dataset", "evaluation", "case").items():
        if case in MASKED_BASELINES:
            continue
        diverged = diverged_with(rows, of_case[0])
        cells = {}
        for encoder in unique(of_case, "encoder"):
            cells[encoder] = cell_of(of_encoder(of_case, encoder), of_encoder(diverged, encoder))
        best = best_choice({encoder: cell["mean"] for encoder, cell in cells.items()})
        others = [f"{encoder} {mean_in_words(cell)}" for encoder, cell in cells.items() if encoder != best]
        more = " ..." if len(others) > NAMED_NEXT_TO_BEST else ""
        next_to_best = f" (next to {', '.join(others[:NAMED_NEXT_TO_BEST])}{more})" if others else ""
        baselines = ", ".join([*label_baselines(of_case), *masked_baselines(evaluations[dataset, evaluation])])
        without = f"; without an encoder: {baselines}" if baselines else ""
        name = f"{evaluation} {case}".strip()
        leader = f"{best} with {score_in_words(cells[best])}"
        sentences.append(f"{name} on {dataset}: best is {leader}{next_to_best}{without}")
    return sentences


def section_of(answer: Answer, name: str, folder: Path, runs: Runs) -> Section:
    """A question's table, whose rows lead to the reports of their runs, and its plot."""
    section = Section(name, answer.question.title or answer.question.name)
    if answer.has_table:
        headings, cells = cells_of(answer.numbers)
        links = [links_to_reports(folder, runs.get(encoder, ())) for encoder in answer.numbers]
        if any(links):
            headings = [*headings, "reports"]
            cells = [[*row, of_row] for row, of_row in zip(cells, links, strict=True)]
        section.blocks.append(Table(headings, cells))
        section.blocks += map(Text, answer.remarks)
        if answer.differences:
            section.blocks.append(Table(*told_apart_table(answer.differences), TOLD_APART))
            section.blocks.append(Table(*difference_table(answer.differences), DIFFERENCES, folded=True))
    if answer.plot is not None:
        section.blocks.append(figure_as_picture(answer.plot, f"Plot: {section.title}"))
    if not section.blocks:
        reason = NO_DEPTHS if answer.lacks_depths else "there are no results yet"
        section.blocks.append(Missing(section.title, reason))
    return section


def links_to_reports(folder: Path, runs: Sequence[Path]) -> list[Link]:
    """Links from the comparison's page to the reports of runs, by the runs' names where there are several."""
    pages = [run / REPORT_PAGE for run in runs if (run / REPORT_PAGE).is_file()]
    links = []
    for page in pages:
        name = page.parent.name if len(pages) > 1 else "report"
        links.append(Link(name, quote(os.path.relpath(page, folder))))
    return links


def section_of_trunks(trunks: dict[str, Compute]) -> Section:
    """The compute of each trunk and its branches, and a caution."""
    caution = "At each seed, the points of a trunk share its steps: they are correlated."
    texts = [Text(line) for line in (*describe_trunks(trunks), caution)]
    return Section("trunks", "Compute of trunks and branches", texts)

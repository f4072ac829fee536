"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. A result is known by a digest of its settings: finished work is not
repeated, here or, with `--extends results.json`, in another comparison; neither is a training that diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evaluation.comparison.cases import Case, cases_of, read_entries
from evaluation.comparison.differences import difference_table, differences_from_best
from evaluation.comparison.rows import Row, describe_missing_seeds, frame_of, rows_asked
from evaluation.comparison.run import carry_out
from evaluation.comparison.tables import Cells, cells_by_encoder, plot_question, remarks_on, table_of
from evaluation.config import CompareConfig
from evaluation.config.comparing import Question
from evaluation.figures.markdown import markdown_table
from evaluation.figures.style import write_plot
from evaluation.frozen.results import write_json
from evaluation.pages.about import recorded_versions
from evaluation.pages.page import Page, Section, Table, Text, figure_as_picture, write_page
from mpp.config import require
from mpp.config.parsing import parse
from mpp.runtime.files import complete, hold, write_complete
from mpp.runtime.start import run_main
from mpp.training.run_folder import REPORT_PAGE

DIFFERENCES = "Differences from the best, with 95% intervals that hold for all of the table at once"


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the encoders that are missing, evaluate all, write the results.

    Raises:
        UserError: an entry that cannot be carried out, before anything is done; failed evaluations, after all others.
    """
    folder = Path(config.dir)
    entries = read_entries(config)
    for evaluation in entries.evaluations:
        tests = evaluation.options.get("test", True)
        require(tests, f"evaluations: {evaluation.name}: test", tests, "true: `mpp sweep` compares on a dev split")
    cases = cases_of(entries)
    carried_out = carry_out(cases, folder, config.extends, config.tabulate)
    settings = {key: getattr(config, key) for key in ("encoders", "evaluations", "datasets", "questions")}
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        results = write_comparison(folder, entries.questions, carried_out.collect(), cases, {"settings": settings})
    carried_out.raise_failures()
    return results


def write_comparison(
    folder: Path,
    questions: Sequence[Question],
    rows: list[Row],
    cases: Sequence[Case] = (),
    about: dict[str, Any] | None = None,
    sentences: Sequence[str] = (),
) -> dict[str, Any]:
    """Write results.json, table.md, table.csv, the plots and a page, and print the tables.

    Args:
        rows: all results.
        cases: all that are asked for.
        about: further entries of results.json.
        sentences: below the tables.
    Returns:
        What results.json has: `results`, the rows, `summary`: question -> encoder -> column -> numbers, and `about`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str | None, set[str]] = {}
    for case in cases:
        groups.setdefault(case.dataset.group, set()).add(case.dataset.name)
    frame = frame_of(rows)
    summary: dict[str, Cells] = {}
    sections = []
    files = ["results.json", "table.md", "table.csv", REPORT_PAGE]
    for question in questions:
        asked = rows_asked(frame, question)
        cells = cells_by_encoder(asked, question, groups)
        blocks = [Table(*table_of(cells)), *map(Text, remarks_on(asked, question))] if cells else []
        differences = differences_from_best(asked, folder)
        if differences:
            blocks += [Text(f"{DIFFERENCES}:"), Table(*difference_table(differences))]
        section = Section(question.name, question.title or question.name, blocks or [Text("no results yet")])
        plot = plot_question(question, asked, cells)
        if plot is not None:
            files += write_plot(plot, folder, question.name)
            section.blocks.append(figure_as_picture(plot, section.title))
        summary[question.name] = cells
        sections.append(section)
    results = {"summary": summary, "results": rows, "versions": recorded_versions()} | (about or {})
    write_json(folder / "results.json", results)
    sentences = [*describe_missing_seeds(cases, rows), *sentences]
    text = "\n\n".join([*map(section_as_text, sections), *sentences])
    write_complete(folder / "table.md", f"{text}\n")
    with complete(folder / "table.csv") as partial:
        pd.DataFrame(cells_as_lines(summary)).to_csv(partial, index=False)
    page = Page(f"{folder}: a comparison", f"{len(rows)} results", [], sentences, sections)
    write_page(folder / REPORT_PAGE, page)
    print(f"\n{text}\nwrote {folder}: {', '.join(files)}; see reports/")
    return results


def section_as_text(section: Section) -> str:
    """The tables and sentences of a question as Markdown."""
    texts = [f"### {section.title}"]
    for block in section.blocks:
        if isinstance(block, Table):
            texts.append(markdown_table(block.headings, block.rows))
        elif isinstance(block, Text):
            texts.append(block.text)
    return "\n\n".join(texts)


def cells_as_lines(summary: dict[str, Cells]) -> list[Row]:
    """The numbers of all questions, a line for each cell of their tables."""
    lines = []
    for question, cells in summary.items():
        for encoder, of_encoder in cells.items():
            for column, cell in of_encoder.items():
                low, high = cell.get("interval", (None, None))
                lines.append(
                    {"question": question, "encoder": encoder, "column": column, **cell, "low": low, "high": high}
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments))


if __name__ == "__main__":
    run_main(main)

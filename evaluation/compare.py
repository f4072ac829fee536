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

from evaluation.comparison.cases import cases_of, read_entries
from evaluation.comparison.differences import difference_table, differences_from_best
from evaluation.comparison.rows import Row, describe_missing_seeds, frame_of, rows_asked
from evaluation.comparison.run import carry_out
from evaluation.comparison.tables import RANK, Cells, cells_by_encoder, plot_question, remarks_on, table_of
from evaluation.config import CompareConfig
from evaluation.config.comparing import Question
from evaluation.figures.charts import markdown_table, write_plot
from evaluation.frozen.results import write_json
from evaluation.metrics.scoring import ONE_CLASS
from evaluation.pages.page import recorded_versions
from mpp.config import require
from mpp.config.parsing import parse
from mpp.runtime.files import write_complete
from mpp.runtime.start import run_main

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


def write_comparison(
    folder: Path,
    questions: Sequence[Question],
    rows: list[Row],
    about: dict[str, Any] | None = None,
    sentences: Sequence[str] = (),
) -> dict[str, Any]:
    """Write results.json, table.md, table.csv and the plots, and print the tables.

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
    files = ["results.json", "table.md", "table.csv"]
    for question in questions:
        asked = rows_asked(frame, question)
        cells = summary[question.name] = cells_by_encoder(asked, question)
        texts.append(f"### {question.title or question.name}")
        if not cells:
            texts.append("no results yet")
        elif question.plot != "depth":  # of the dev split
            texts += texts_of(asked, cells, question, folder)
        plot = plot_question(question, asked)
        if plot is not None:
            files += write_plot(plot, folder, question.name)
    results = {"summary": summary, "results": rows, "versions": recorded_versions()} | (about or {})
    write_json(folder / "results.json", results)
    text = "\n\n".join([*texts, *sentences])
    write_complete(folder / "table.md", f"{text}\n")
    write_complete(folder / "table.csv", cells_as_lines(summary).to_csv(index=False))
    print(f"\n{text}\nwrote {folder}: {', '.join(files)}; see reports/")
    return results


def texts_of(asked: pd.DataFrame, cells: Cells, question: Question, folder: Path) -> list[str]:
    """The table of a question, sentences below it, and the differences from the best."""
    differences = differences_from_best(asked, folder)
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

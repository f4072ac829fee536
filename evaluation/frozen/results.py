"""How results are written: JSON, a table a person can paste, TensorBoard."""

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from evaluation.figures import DPI, plot_by_depth
from mpp.errors import UserError
from mpp.runtime.files import complete
from mpp.runtime.weights import encoder_folder, run_of
from mpp.training.log import event_writer


def report_path(out: str | None, encoder: str, name: str, features: str | None = None) -> Path:
    """Where a report goes: `out`, or beside what was judged: the features, the run folder, or runs/ENCODER.

    Raises:
        UserError: it cannot be written there, or the encoder is a file.
    """
    if not features and Path(encoder).is_file():
        encoder_folder(Path(encoder))  # says why a file is no encoder
    if out and Path(out).is_dir():
        raise UserError(f"out is {out}, a folder; it must be a file")
    folder = Path(encoder) if Path(encoder).exists() else Path("runs") / encoder.replace("/", "_")
    beside = features and Path(features).with_name(f"{Path(features).stem}_{name}")
    path = Path(out or beside or run_of(folder) / "evaluation" / name)
    try:
        with TemporaryFile(dir=next(each for each in path.absolute().parents if each.exists())):
            return path
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another place by --out") from error


def summarize(results: list[dict], key: str) -> dict[str, dict[str, float]]:
    """Mean and (population) standard deviation of the accuracies that share a value of `key`, or of `case`."""
    groups: dict[str, list[float]] = {}
    for result in results:
        groups.setdefault(str(result.get("case", result[key])), []).append(result["accuracy"])
    return {
        name: {"mean": float(np.mean(each)), "std": float(np.std(each)), "count": len(each)}
        for name, each in groups.items()
    }


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [headings, rule, *rows]
    return "\n".join(
        f"| {line[0].ljust(widths[0])}"
        + "".join(f" | {cell.rjust(width)}" for cell, width in zip(line[1:], widths[1:], strict=True))
        + " |"
        for line in lines
    )


def percent(summary: dict[str, float]) -> str:
    """A mean and its spread; a single measurement has none."""
    spread = f" ± {100 * summary['std']:.1f}" if summary.get("count", 2) > 1 else ""
    return f"{100 * summary['mean']:.1f}{spread}"


def write_json(path: Path, value: Any) -> None:
    """Write JSON, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path, shared=True) as partial:
        partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def events_of(path: Path) -> Path:
    """The folder of a report's TensorBoard events."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_events")


def write_report(path: Path, report: dict[str, Any], key: str) -> None:
    """Write a probe's JSON, TensorBoard scalars and, where there are several depths, the plot; print the table."""
    write_json(path, report)
    by_depth = report.get("summary_by_depth") or {report["protocol"].get("chosen_depth", 0): report["summary"]}
    names = list(report["summary"])
    rows = [
        [str(depth) if depth else "-", *(percent(of_depth[n]) for n in names)] for depth, of_depth in by_depth.items()
    ]
    print(table(["depth", *(f"{key} {name}" for name in names)], rows))
    with event_writer(events_of(path)) as writer:
        for depth, of_depth in by_depth.items():
            for name, summary in of_depth.items():
                writer.add_scalar(f"accuracy_by_depth/{key}_{name}", 100 * summary["mean"], int(depth))
        if len(by_depth) > 1:
            figure = plot_by_depth(by_depth, key)
            figure.savefig(path.with_suffix(".png"), dpi=DPI)
            writer.add_figure("accuracy_by_depth", figure)
            print(f"wrote {path.with_suffix('.png')}")
    print(f"wrote {path}")

"""A page on a run: the verdict in words, curves, pictures, and the command that repeats it.

    python evaluation/report.py --encoder runs/birds

One self-contained file, `report.html` in the run folder. It is made of metrics.jsonl, verdict.json, the evaluations'
JSON and the pictures of `mpp visualize`. Pictures that do not exist yet, or are older than the encoder, are drawn; the
page says what is missing, and why.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from evaluation.config import ReportConfig, VisualizeConfig
from evaluation.figures.charts import CLASSES_SUFFIX, CONFUSION_FILE, IN_PERCENT, plot_series
from evaluation.frozen.results import (
    describe_baselines,
    of_learned_weights,
    report_suffix,
    scores_of_random_weights,
    way_to_random_weights,
)
from evaluation.frozen.run_images import (
    REPORTS_OF_TRAINING,
    find_run,
    load_unchanged_splits,
    parse_and_load,
    reports_of_training,
    tested_encoder,
)
from evaluation.metrics.scoring import evenly_spaced, kind_of_report, summarize_accuracies
from evaluation.pages.about import begins_from_weights, machine_blocks, settings_blocks, subtitle, verdict_points
from evaluation.pages.page import (
    Block,
    Link,
    Page,
    Picture,
    Section,
    Table,
    Text,
    figure_as_picture,
    image_as_picture,
    write_page,
)
from evaluation.visualize import draw_pictures
from mpp.config import flatten, rebuild, require
from mpp.config.imports import require_imports
from mpp.errors import UserError
from mpp.features.drift import MOVEMENT
from mpp.runtime.messages import counted
from mpp.runtime.start import run_main
from mpp.runtime.weights import BEST, ENCODER, fingerprint, has_encoder
from mpp.training.history import (
    EVALUATED,
    GENERAL_KNN,
    History,
    after_training_began,
    best_depth,
    lines_with,
    series,
    values_by_depth,
)
from mpp.training.log import UNREADABLE_FILE, read_history
from mpp.training.run_folder import REPORT_PAGE
from mpp.training.verdict import ACCURACY_BASELINES, name_of_start, read_verdict

MAX_POINTS_OF_A_LINE = 200
MAX_ROWS_OF_A_TABLE = 12
MAX_UNREADABLE_LISTED = 20
CURVES = {
    "Loss": ("loss", {"training": "loss", "held out": EVALUATED}),
    "Accuracy": (
        "accuracy (%)",
        {
            "held out": "heldout/accuracy",
            "training": "accuracy",
            "two nearest": "heldout/two_nearest",
            "nearest": "heldout/nearest",
            "most frequent": "heldout/most_frequent",
        }
        | {name: scalar for scalar, name in ACCURACY_BASELINES.items()},
    ),
    "Mean average precision": ("mAP (%)", {"macro": "heldout/macro_map", "micro": "heldout/micro_map"}),
    "Explained variance": ("R2", {"held out": "heldout/r2"}),
    "Mean absolute error": ("error", {"held out": "heldout/mae"}),
    "Deviation of features over patches": (
        "deviation",
        {"targets": "target_deviation", "predictions": "prediction_deviation"},
    ),
    "Effective rank of the targets": ("effective rank", {"targets": "target_rank"}),
    "Learning rate": ("learning rate", {"learning rate": "optim/lr"}),
    "Gradient norm": ("norm, before clipping", {"gradient norm": "optim/grad_norm"}),
    "Speed": ("images/s", {"images/s": "speed/images_per_second"}),
    "Waiting for data": ("share of the time (%)", {"waiting": "speed/data_wait"}),
}
"""Title of a chart over steps -> its label, and name of a line -> name of the scalar."""
PROBES_SHOWN = {
    "knn": ("kNN accuracy", "accuracy (%)"),
    "agreement": ("Neighbour agreement between two crops", "share (%)"),
    GENERAL_KNN: ("kNN accuracy on general images", "accuracy (%)"),
    "features/rank": ("Effective rank", "effective rank"),
    MOVEMENT: ("Movement of the weights since the start", "share of their norm (%)"),
}
"""Group of scalars by depth -> title and label of its charts."""


def report(config: ReportConfig) -> Path:
    """Write the page on a run, and return its path.

    Raises:
        UserError: there is no run, or it has logged nothing.
    """
    folder = find_run(config.encoder)
    require(folder is not None, "encoder", config.encoder, "the folder of a run")
    require_imports(folder)
    history = read_history(folder)
    require(len(history) > 0, "encoder", folder, "a run with logged metrics: its metrics.jsonl is empty or missing")
    path = Path(config.out) if config.out else folder / REPORT_PAGE
    require(not path.is_dir(), "out", path, "a file")
    start = name_of_start(begins_from_weights(folder))
    sections = [
        Section("curves", "Curves", curve_blocks(history), in_columns=True),
        Section("features", "Features, by the probe", feature_blocks(history, start), in_columns=True),
        Section("evaluations", "Evaluation of the features", evaluation_blocks(folder, path.parent)),
        Section("pictures", "Pictures of held-out images, weights and features", picture_blocks(config, folder)),
        Section("images", "Unreadable images", unreadable_blocks(folder)),
        Section("settings", "Settings, and the command to repeat the run", settings_blocks(folder)),
        Section("machine", "Versions and machine", machine_blocks()),
    ]
    verdict = read_verdict(folder)
    warnings = [
        f"{each['check']} (since step {each['step']}): {each['message']}"
        for each in verdict.get("warnings", [])
        if each["check"] in verdict["off"]
    ]
    write_page(path, Page(str(folder), subtitle(folder, history), verdict_points(folder, history), warnings, sections))
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, one file")
    return path


# --- curves ---


def curve_blocks(history: History) -> list[Block]:
    """The charts of CURVES that the run has logged since training began."""
    trained = after_training_began(history)
    blocks: list[Block] = []
    for title, (label, scalars) in CURVES.items():
        blocks += chart(title, {name: dict(series(trained, scalar)) for name, scalar in scalars.items()}, label)
    return blocks


def feature_blocks(history: History, start: str) -> list[Block]:
    """Each probe over steps at some depths, and by depth with the start and pixel colours.

    Args:
        start: the name of the weights at step 0: see `name_of_start`.
    """
    blocks: list[Block] = []
    for group, (title, label) in PROBES_SHOWN.items():
        lines = lines_with(history, group)
        if not lines:
            continue
        first, last = lines[0], lines[-1]
        depths = sorted(values_by_depth(last, group))
        shown = sorted({depths[0], depths[len(depths) // 2], depths[-1], best_depth(last, group)[0]})
        over_steps = {f"depth {depth}": dict(series(history, f"{group}/depth_{depth:02d}")) for depth in shown}
        by_depth = {f"after {counted(int(last['step']), 'step')}": values_by_depth(last, group)}
        if first["step"] == 0 and len(lines) > 1:
            by_depth[start] = values_by_depth(first, group)
        if f"{group}/floor_pixels" in first:
            by_depth["pixel colours"] = dict.fromkeys(depths, first[f"{group}/floor_pixels"])
        blocks += chart(title, over_steps, label) + chart(f"{title} by depth", by_depth, label, "depth (blocks)")
    return blocks or [Text("kNN, agreement, rank: not probed (probe.every)")]


def chart(title: str, lines: dict[str, dict[int, float]], label: str, x_label: str = "steps") -> list[Picture]:
    """A chart of lines, name -> x -> y, with its numbers at some x; none without numbers."""
    numbers = pd.DataFrame({name: pd.Series(line, dtype=float) for name, line in lines.items()}).sort_index()
    numbers = numbers.where(numbers.abs() < math.inf).dropna(axis=1, how="all")
    if numbers.empty:
        return []
    drawn = {name: thinned(line.dropna(), MAX_POINTS_OF_A_LINE).to_dict() for name, line in numbers.items()}
    form = "{:.1%}" if label.endswith(IN_PERCENT) else "{:.4g}"
    listed = thinned(numbers.ffill(), MAX_ROWS_OF_A_TABLE).map(form.format).replace(form.format(math.nan), "-")
    table = Table([x_label, *numbers], listed.reset_index().astype(str).values.tolist())
    return [figure_as_picture(plot_series(drawn, label, x_label), title, table)]


def thinned(numbers: Any, count: int) -> Any:
    """At most `count` rows, evenly spaced, the first and the last among them."""
    return numbers.iloc[evenly_spaced(len(numbers), count)]


# --- results of evaluations ---


def evaluation_blocks(folder: Path, page_folder: Path) -> list[Block]:
    """A table of the results of the evaluation commands, linked from a page in `page_folder`, and their details.

    A report without a digest of its weights counts as the run's; one of other weights is not shown.
    """
    blocks: list[Block] = []
    details: list[Block] = []
    rows = []
    weights = {fingerprint(folder / name) for name in (ENCODER, BEST) if has_encoder(folder / name)}
    for file in [*reports_of_training(folder), *sorted((folder / "evaluation").glob("*.json"))]:
        if of_learned_weights(file) != file and of_learned_weights(file).is_file():
            continue  # random weights stand next to these
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            protocol = report.get("protocol") or {}
            known = None if protocol.get("checkpoint") else protocol.get("weights")
            if known and weights and known not in weights:  # the run was trained again, or longer
                blocks.append(Text(f"{file.name}: it is of other weights than those of the run now; evaluate again"))
                continue
            rows += rows_of_evaluation(file, report, page_folder)
            details += details_of_evaluation(file)
        except (UserError, OSError, ValueError, AttributeError, KeyError, TypeError):
            blocks.append(Text(f"{file.name}: it is not a report of an evaluation"))
    if not rows:
        return [*blocks, Text(f"Few-shot, linear probe: not run yet (mpp fewshot --encoder {folder})")]
    value = "value (95% interval over test images)"
    headings = ["evaluation", "case", "score", value, "without an image", "random weights"]
    return [Table(headings, rows, "Results of the evaluation commands"), *details, *blocks]


def rows_of_evaluation(file: Path, report: dict[str, Any], page_folder: Path) -> list[list[str | Link]]:
    """A row for each case of an evaluation's report."""
    link = Link(file.stem, quote(os.path.relpath(file, page_folder)))
    summary = report.get("summary") or {}
    if not summary and file.name in REPORTS_OF_TRAINING:
        summary = summarize_accuracies(report["results"], "seed")
    kind = kind_of_report(report)
    way = way_to_random_weights(file, report)
    of_random = scores_of_random_weights(file, report)
    rows: list[list[str | Link]] = []
    for case, scores in summary.items():
        random = f"not evaluated ({way})" if way else "-"
        random = kind.text_of_scores(of_random[case]) if case in of_random else random
        rows.append([link, case, kind.score_title, kind.text_of_scores(scores), describe_baselines(report), random])
    return rows


def details_of_evaluation(file: Path) -> list[Block]:
    """The table by class and the confusion matrix that the evaluation wrote next to its report, if it did."""
    blocks: list[Block] = []
    by_class, confusion = (file.with_name(file.stem + suffix) for suffix in (CLASSES_SUFFIX, CONFUSION_FILE))
    if by_class.is_file():
        cells = pd.read_csv(by_class, dtype=str, keep_default_na=False)
        blocks.append(Table([*cells], cells.values.tolist(), f"{file.stem}, by class", folded=True))
    if confusion.is_file():
        blocks.append(image_as_picture(confusion, f"Confusion matrix of {file.stem}"))
    return blocks


# --- pictures and images ---


def picture_blocks(config: ReportConfig, folder: Path) -> list[Block]:
    """The pictures of `mpp visualize`: those in the run folder that are newer than the encoder, the others drawn."""
    if not (folder / ENCODER).is_dir():
        return [Text("Pictures: there is no encoder yet; it is written when the run ends")]
    settings = rebuild(VisualizeConfig(), flatten(config) | {"encoder": str(folder), "out": None})
    kept_in = folder / "evaluation" / f"pictures{report_suffix(settings)}"
    files = {name: kept_in / f"{name}.png" for name in settings.pictures}
    written = (folder / ENCODER / "config.json").stat().st_mtime

    def is_current(name: str) -> bool:
        return files[name].is_file() and files[name].stat().st_mtime >= written

    others = tuple(name for name in files if not is_current(name))
    missing = {}
    try:
        if others:
            splits = load_unchanged_splits(folder, config.data)
            missing = draw_pictures(rebuild(settings, {"pictures": others}), splits)
    except (UserError, OSError) as error:
        missing["Pictures"] = str(error)
    shown = [image_as_picture(files[name], name.replace("_", " ")) for name in files if is_current(name)]
    return [*shown, *(Text(f"{name}: {reason}") for name, reason in missing.items())]


def unreadable_blocks(folder: Path) -> list[Block]:
    """Images that could not be decoded."""
    file = folder / UNREADABLE_FILE
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    if not lines:
        return [Text("All images were decoded.")]
    said = (
        f"{counted(len(lines), 'image')} could not be decoded; training took others instead. {UNREADABLE_FILE} has all."
    )
    return [Text(said), Text("\n".join(lines[:MAX_UNREADABLE_LISTED]), code=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a page with the settings of the command line, or of `arguments`."""
    # without its images a run still has curves, so other images than the run's are not refused here
    config, _ = parse_and_load(ReportConfig, arguments, compare=False)
    report(rebuild(config, {"encoder": tested_encoder(config)}))


if __name__ == "__main__":
    run_main(main)

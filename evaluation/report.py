"""A page on a run that people look at: the verdict in words, curves, pictures, and how to repeat it.

    python evaluation/report.py --encoder runs/birds

One self-contained file, `report.html` in the run folder. It is made of metrics.jsonl, verdict.json and the evaluation's
JSON. Pictures that are not there yet are drawn; what a run does not have is said to be missing.
"""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

from evaluation.config import ContrastiveConfig, OneRunConfig, ReportConfig, SupervisedConfig, VisualizeConfig
from evaluation.figures.charts import plot_map
from evaluation.frozen.encoder import Unavailable
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.results import format_percent, report_suffix
from evaluation.frozen.run_images import check_images_of_run, find_run
from evaluation.pages.about import Missing, available, changed, machine_blocks, settings_rows
from evaluation.pages.curves import curves_of_run, features_of_run
from evaluation.pages.page import Link, Page, Section, Table, Text, chart, picture, picture_of, write_page
from evaluation.pictures.drawings import PICTURES
from evaluation.pictures.gallery import look_at, losses_of, map_of, nearest_neighbours, predicted, sheet
from evaluation.pictures.subject import Subject, load_subject
from mpp.config import Config, require
from mpp.config.command_line import as_command_line
from mpp.config.imports import OPTION, require_imports, saved_imports
from mpp.config.saved import parse_saved
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.pretrain import is_pretraining, reopen
from mpp.runtime.command import command
from mpp.training.history import History, after_training_began, best_depth, probe_lines, series, values_by_depth
from mpp.training.log import read_history
from mpp.training.record import read_record, recorded_commit
from mpp.training.run_folder import CONFIG_FILE, REPORT_PAGE, saved_settings
from mpp.training.verdict import LOSS_FALLS, describe_features, describe_prediction, describe_trend, duration
from mpp.training.watch import read_verdict

NEIGHBOURS, QUERIES = 5, 6
EXTREMES = 4  # images that are predicted best, and worst
JUDGED = 256  # held-out images of which these are
DRAWN_TITLE = "What it predicts and how it looks"
DRAWN = {
    "predictions": "Held-out images: original, corrupted, predicted and true, and how sure each prediction is",
    "pca": "The first three principal components of the patches' features as red, green and blue, by depth",
    "positions": "How alike the encoder takes the places of any two patches to be",
    "attention_distance": "How far each attention head looks, by depth",
}


def report(config: ReportConfig) -> Path:
    """Write the page on a run; where it is.

    Raises:
        UserError: no run there.
    """
    folder = find_run(config.encoder)
    require(folder is not None, "encoder", config.encoder, "the folder of a run")
    require_imports(folder)
    history = read_history(folder)
    require(len(history) > 0, "encoder", folder, "a run that has logged something: its metrics.jsonl is empty or gone")
    missing: Missing = {}
    sections = [
        Section("curves", "Curves", curves_of_run(history, missing)),
        Section("features", "What the features know", features_blocks(config, folder, history, missing)),
        *picture_sections(config, folder, history, missing),
        Section("images", "Unreadable images", unreadable_blocks(folder)),
        Section("settings", "Settings, and how to repeat this", settings_blocks(folder)),
        Section("machine", "Versions and machine", machine_blocks()),
    ]
    said = read_verdict(folder)
    if not said:
        missing["Verdict"] = "no evaluation has said how the run is (verdict.json): what is above is from its metrics"
    warnings = [
        f"{each['check']} (since step {each['step']}): {each['message']}"
        for each in said.get("warnings", [])
        if each["check"] in said["off"]
    ]
    shown = [section for section in sections if section.blocks]
    page = Page(
        str(folder), subtitle(folder, history), verdict_points(folder, history, shown), warnings, shown, missing
    )
    path = Path(config.out) if config.out else folder / REPORT_PAGE
    require(not path.is_dir(), "out", path, "a file")
    write_page(path, page)
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, one file")
    for name, reason in missing.items():
        print(f"missing there: {name}: {reason}")
    return path


# --- words ---


def subtitle(folder: Path, history: History) -> str:
    """What was trained on what, for how long."""
    saved, known = saved_settings(folder), read_record(folder) or {}
    model, data, run = (saved.get(name) or {} for name in ("model", "data", "run"))
    what = read_verdict(folder).get("model") or model.get("name") or "a ViT"
    how = (saved.get("objective") or {}).get("name")
    trained = f"pre-trained by {how} ({(saved.get('network') or {}).get('name', 'predictor')})" if how else "trained"
    count = (known.get("train") or {}).get("images")
    images = f"{count:,} images" if isinstance(count, int) else "images"
    held_out = (known.get("held_out") or {}).get("images")
    where = data.get("path") or "mpp's birds"
    parts = [f"{what}", f"{trained} on {images} of {where}" + (f" ({held_out:,} held out)" if held_out else "")]
    done, steps = int(history[-1]["step"]), run.get("steps")
    batch = (saved.get("optim") or {}).get("global_batch_size")
    parts.append(f"{done:,} of {steps:,} updates" if isinstance(steps, int) else f"{done:,} updates")
    if batch and count:
        parts[-1] += f" of {batch}, each image seen {done * batch / count:.3g} times"
    seconds = training_seconds(history, batch or 0)
    if seconds:
        parts.append(f"{duration(seconds)} of training")
    compute = series(history, "compute/pflop")
    if compute:
        parts.append(f"{compute[-1][1]:.3g} PFLOP")
    return "; ".join(parts)


def training_seconds(history: History, batch: int) -> float:
    """What the logged updates took, evaluations left out; 0: not known."""
    speeds = [(step, speed) for step, speed in series(history, "speed/images_per_second") if speed > 0]
    before = [0, *(step for step, _ in speeds)]
    return sum((step - last) * batch / speed for (step, speed), last in zip(speeds, before, strict=False))


def verdict_points(folder: Path, history: History, shown: Sequence[Section]) -> list[tuple[str, Link | None]]:
    """The verdict in sentences, with what says so."""
    there = {section.name for section in shown}

    def evidence(name: str) -> Link | None:
        return Link("why", f"#{name}") if name in there else None

    saved = saved_settings(folder)
    steps, done = (saved.get("run") or {}).get("steps"), int(history[-1]["step"])
    points, trend = [], describe_trend(history, read_verdict(folder).get("facts", {}).get("moving", False))
    if isinstance(steps, int) and done < steps:
        points.append((f"The run is not finished: it logged {done:,} of {steps:,} updates", evidence("curves")))
    for text, where in (
        (describe_prediction(history), "curves"),
        (describe_features(history), "features"),
        (trend, "curves"),
    ):
        if text:
            sentence = text if text.startswith("kNN") else f"{text[0].upper()}{text[1:]}"
            points.append((sentence, evidence(where)))
    return [*points, *((f"Next: {text}", None) for text in next_steps(folder, history, steps, done, trend))]


def next_steps(folder: Path, history: History, steps: int | None, done: int, trend: str) -> list[str]:
    """What to try next."""
    if isinstance(steps, int) and done < steps:
        return ["the command that began the run goes on with it"]
    found, (group, lines) = [], probe_lines(history)
    judged = after_training_began(lines)
    if trend == LOSS_FALLS:
        found.append("train longer (run.steps): the held-out loss still falls")
    if judged:
        depth, value = best_depth(judged[-1], group)
        floors = [best_depth(lines[0], group)[1], lines[0].get(f"{group}/floor_pixels", 0)]
        if lines[0]["step"] == 0 and value < max(floors) + 0.03:
            found.append(
                "the features know hardly more than untrained ones or colours: more images, more updates or another "
                f"objective; they may fine-tune well all the same (mpp finetune --encoder {folder})"
            )
        last = values_by_depth(judged[-1], group)
        if value >= last[max(last)] + 0.01:
            found.append(
                f"use depth {depth}, which is better than the last (mpp fewshot --encoder {folder} --depth dev)"
            )
    return found or [f"judge the features with labels (mpp fewshot --encoder {folder}), or fine-tune (mpp finetune)"]


# --- sections ---


def features_blocks(config: ReportConfig, folder: Path, history: History, missing: Missing) -> list:
    """kNN and rank by depth, and what the evaluation commands found."""
    blocks = features_of_run(history, missing)
    rows, beside = [], Path(config.out).parent if config.out else folder
    for file in sorted((folder / "evaluation").glob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            summary = found.get("summary") or {}
            rows += [
                [Link(file.stem, quote(os.path.relpath(file, beside))), name, format_percent(each)]
                for name, each in summary.items()
            ]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            missing[file.name] = "it is no report of an evaluation"
    if rows:
        headings = ["evaluation", "case", "accuracy or mean IoU (%)"]
        blocks.append(Table(headings, rows, "What the evaluation commands found"))
    else:
        missing["Few-shot, linear probe"] = f"not asked for yet: mpp fewshot --encoder {folder}"
    return blocks


def picture_sections(config: ReportConfig, folder: Path, history: History, missing: Missing) -> list[Section]:
    """Everything that needs the encoder and the images."""
    if not (folder / "encoder").is_dir():
        missing["Pictures"] = "there is no encoder yet: it is written when the run ends"
        return []
    drawing = VisualizeConfig(
        encoder=str(folder), data=config.data, images=config.images, precision=config.precision, threads=config.threads
    )
    try:
        check_images_of_run(config)
        subject = load_subject(drawing)
    except (UserError, OSError) as error:
        missing["Pictures"] = str(error)
        kept = drawn_blocks(None, folder, drawing, {})
        return [Section("pictures", DRAWN_TITLE, kept)] if kept else []
    with deaths_explained():
        made = [
            ("pictures", DRAWN_TITLE, lambda: drawn_blocks(subject, folder, drawing, missing)),
            ("neighbours", "Nearest neighbours", lambda: neighbour_blocks(config, subject, history)),
            ("extremes", "Predicted best and worst", lambda: extreme_blocks(config, subject, folder)),
        ]
        return [Section(name, title, available(title, make, missing)) for name, title, make in made]


def drawn_blocks(subject: Subject | None, folder: Path, drawing: VisualizeConfig, missing: Missing) -> list:
    """Pictures of `mpp visualize`: those that are there and newer than the encoder; the others are drawn.

    Without the images, which are the subject's, none is drawn.
    """
    made, blocks = (folder / "encoder" / "config.json").stat().st_mtime, []
    place = folder / "evaluation" / f"pictures{report_suffix(drawing)}"
    for name, alt in DRAWN.items():
        file = place / f"{name}.png"
        if file.is_file() and file.stat().st_mtime >= made:
            with Image.open(file) as image:
                blocks.append(picture(image, alt, f"{alt}."))
            continue
        if subject is None:
            continue
        try:
            drawing = PICTURES[name](subject)
        except Unavailable as error:
            missing[name] = str(error)
            continue
        if os.access(folder, os.W_OK):  # the folder may be somebody else's
            place.mkdir(parents=True, exist_ok=True)
            drawing.write(place, name)
        blocks.append(picture_of(drawing.figure, alt, f"{alt}."))
    return blocks


def neighbour_blocks(config: ReportConfig, subject: Subject, history: History) -> list:
    """Queries with their nearest held-out images, and all of them on a map."""
    chosen = subject.held_out.choose(config.compared, config.data.cut_seed)
    if len(chosen) < 3:
        raise Unavailable(f"{len(chosen)} held-out images are too few to be neighbours")
    group, lines = probe_lines(after_training_began(history))
    depth = best_depth(lines[-1], group)[0] if lines else len(subject.encoder.stages)
    depth, read = min(depth, len(subject.encoder.stages)), "class" if subject.has_trained_class_token else "mean"
    shown = look_at(subject.encoder, chosen, config.data, subject.accelerator, depth, read)
    queries = np.linspace(0, len(chosen) - 1, min(QUERIES, len(chosen))).astype(int).tolist()
    neighbours, similarity = nearest_neighbours(shown.features, queries, NEIGHBOURS)
    rows = [[shown.pixels[q], *shown.pixels[near]] for q, near in zip(queries, neighbours, strict=True)]
    listed = [
        [shown.names[query], *(f"{shown.names[i]} ({s:.2f})" for i, s in zip(near, alike, strict=True))]
        for query, near, alike in zip(queries, neighbours, similarity, strict=True)
    ]
    caption = f"Left, a held-out image; then the {neighbours.shape[1]} most like it of {len(chosen)}, by cosine at "
    caption += f"depth {depth} ({'[class] token' if read == 'class' else 'mean of the patches'})."
    if shown.labels is not None and (shown.labels[queries] >= 0).any():
        known = (shown.labels[neighbours] >= 0) & (shown.labels[queries] >= 0)[:, None]
        alike = known & (shown.labels[neighbours] == shown.labels[queries][:, None])
        if known.any():
            caption += f" {alike.sum()} of {known.sum()} have the label of their query."
    headings = ["query", *(f"nearest {k}" for k in range(1, 1 + neighbours.shape[1]))]
    alt = "Held-out images, each beside those whose features are most like its own"
    return [
        picture(sheet(rows, apart=12), alt, caption),
        Table(headings, listed, "file names, and cosine similarity", folded=True),
        chart(
            f"Map of {len(chosen)} held-out images: principal components of their features",
            plot_map(map_of(shown.features), shown.labels),
        ),
    ]


def extreme_blocks(config: ReportConfig, subject: Subject, folder: Path) -> list:
    """The held-out images that the model predicts best and worst."""
    if not is_pretraining(folder):
        raise Unavailable("only a pre-training run predicts patches")
    task = reopen(folder, config.data, config.data.eval_crop, JUDGED, subject.accelerator)
    with subject.accelerator.autocast():
        losses = losses_of(task, subject.accelerator, JUDGED)
        order = np.argsort(losses, kind="stable").tolist()
        few = min(EXTREMES, max(1, len(order) // 2))
        chosen = {"best": order[:few], "worst": order[-few:][::-1]}
        blocks = []
        for name, indices in chosen.items():
            columns = predicted(task, indices)
            alt = f"The held-out images that are predicted {name}: original, corrupted, predicted, true"
            rows = [list(columns[:, i]) for i in range(len(indices))]
            blocks.append(
                picture(sheet(rows), alt, f"Predicted {name}, of {len(order)}: original, corrupted, predicted, true.")
            )
    listed = [[name, task.held_out.name(i), f"{losses[i]:.3f}"] for name, of in chosen.items() for i in of]
    return [*blocks, Table(["", "image", "loss"], listed, "file names and losses", folded=True)]


def unreadable_blocks(folder: Path) -> list:
    """Images that could not be decoded."""
    file = folder / "unreadable.txt"
    named = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    if not named:
        return [Text("All images that were read could be decoded.")]
    shown = "\n".join(named[:20]) + (f"\n... and {len(named) - 20} more, in unreadable.txt" if len(named) > 20 else "")
    return [Text(f"{len(named)} images could not be decoded; others took their place."), Text(shown, code=True)]


CONFIGS = (("objective", Config), ("contrast", ContrastiveConfig), ("lrs", OneRunConfig), ("head", SupervisedConfig))
COMMANDS = {Config: "pretrain", ContrastiveConfig: "contrastive", SupervisedConfig: "supervised"}


def settings_blocks(folder: Path) -> list:
    """Settings that differ from the defaults, and the command that repeats the run."""
    saved, file = saved_settings(folder), folder / CONFIG_FILE
    kind = next((each for name, each in CONFIGS if name in saved), None)
    try:
        config = parse_saved(kind, file) if kind else None
    except UserError as error:
        return [
            Text(f"config.yaml is not one of today's: {error}"),
            Text(file.read_text(encoding="utf-8", errors="replace"), code=True),
        ]
    if config is None:
        return [Text(file.read_text(encoding="utf-8", errors="replace"), code=True)] if file.is_file() else []
    blocks = settings_rows(config)
    if kind in COMMANDS:
        settings = changed(config) | {"run.precision": config.run.precision}
        if commit := recorded_commit(folder):
            settings["data.revision"] = commit
        imports = [f"{OPTION}={each.name}" for each in saved_imports(folder)]
        words = ["mpp", COMMANDS[kind], *imports, *as_command_line(settings)]
        blocks.append(Text(shlex.join([*words, f"--run.dir={folder}_again"]), code=True))
    return [*blocks, Text("config.yaml in the run folder has all settings.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Report as the command line, or `arguments`, say."""
    config = parse_with_images(ReportConfig, arguments, prog="python evaluation/report.py", refuse_changed=False)
    report(config)  # without its images a run still has curves


if __name__ == "__main__":
    command(main)

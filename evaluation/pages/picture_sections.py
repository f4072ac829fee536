"""Sections of a page on a run that need its encoder and images: drawings, neighbours, best and worst predictions."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from evaluation.config import ReportConfig, VisualizeConfig
from evaluation.figures.charts import plot_map
from evaluation.frozen.encoder import Unavailable
from evaluation.frozen.results import report_suffix
from evaluation.frozen.run_images import check_images_of_run
from evaluation.pages.about import Missing, available
from evaluation.pages.page import Section, Table, chart, picture, picture_of
from evaluation.pictures.drawings import PICTURES
from evaluation.pictures.gallery import (
    arrange_in_rows,
    extract_shown_images,
    held_out_losses,
    map_of,
    nearest_neighbours,
    predict_columns,
)
from evaluation.pictures.subject import Subject, load_subject
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.pretrain import is_pretraining, reopen
from mpp.training.history import History, after_training_began, best_depth, probe_lines

NEIGHBOURS_OF_A_QUERY = 5
QUERY_IMAGES = 6
EXTREME_IMAGES = 4  # best predicted, and worst
PREDICTED_IMAGES = 256  # held-out images among which the extremes are sought
DRAWN_TITLE = "What it predicts and how it looks"
DRAWN = {
    "predictions": "Held-out images: original, corrupted, predicted and true, and how sure each prediction is",
    "pca": "The first three principal components of the patches' features as red, green and blue, by depth",
    "positions": "How alike the encoder takes the places of any two patches to be",
    "attention_distance": "How far each attention head looks, by depth",
}


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
    shown = extract_shown_images(subject.encoder, chosen, config.data, subject.accelerator, depth, read)
    queries = np.linspace(0, len(chosen) - 1, min(QUERY_IMAGES, len(chosen))).astype(int).tolist()
    neighbours, similarity = nearest_neighbours(shown.features, queries, NEIGHBOURS_OF_A_QUERY)
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
        picture(arrange_in_rows(rows, apart=12), alt, caption),
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
    task = reopen(folder, config.data, config.data.eval_crop, PREDICTED_IMAGES, subject.accelerator)
    with subject.accelerator.autocast():
        losses = held_out_losses(task, subject.accelerator, PREDICTED_IMAGES)
        order = np.argsort(losses, kind="stable").tolist()
        few = min(EXTREME_IMAGES, max(1, len(order) // 2))
        chosen = {"best": order[:few], "worst": order[-few:][::-1]}
        blocks = []
        for name, indices in chosen.items():
            columns = predict_columns(task, indices)
            alt = f"The held-out images that are predicted {name}: original, corrupted, predicted, true"
            rows = [list(columns[:, i]) for i in range(len(indices))]
            blocks.append(
                picture(
                    arrange_in_rows(rows),
                    alt,
                    f"Predicted {name}, of {len(order)}: original, corrupted, predicted, true.",
                )
            )
    listed = [[name, task.held_out.name(i), f"{losses[i]:.3f}"] for name, of in chosen.items() for i in of]
    return [*blocks, Table(["", "image", "loss"], listed, "file names and losses", folded=True)]

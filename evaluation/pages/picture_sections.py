"""Sections of a page on a run that need its encoder and images: pictures, neighbours, best and worst predictions."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evaluation.config import ReportConfig, VisualizeConfig
from evaluation.figures.charts import plot_map
from evaluation.frozen.results import report_suffix
from evaluation.frozen.run_images import load_unchanged_splits_of
from evaluation.metrics.scoring import evenly_spaced
from evaluation.pages.page import Block, Missing, Picture, Section, Table, chart, figure_as_picture, image_as_picture
from evaluation.pictures.drawings import PICTURES
from evaluation.pictures.gallery import (
    Gallery,
    arrange_in_rows,
    extract_gallery,
    held_out_losses,
    predict_columns,
    project_to_plane,
)
from evaluation.pictures.subject import Subject, load_subject
from mpp.config import flatten, rebuild
from mpp.data.workers import deaths_explained
from mpp.errors import NPZ_ERRORS, Unavailable, UserError
from mpp.features.neighbours import Neighbours, find_other_neighbours
from mpp.pretrain import Pretraining, is_pretraining, reopen
from mpp.training.history import History, after_training_began, best_depth, probe_lines

NEIGHBOURS_OF_A_QUERY = 5
MAX_QUERIES = 6
QUERY_GAP_PX = 12  # between a query and its neighbours
MIN_IMAGES_COMPARED = 3
MAX_EXTREMES = 4  # of the best predicted images, and of the worst
MAX_IMAGES_PREDICTED = 256  # held-out images among which the extremes are sought
PICTURES_TITLE = "Predictions, features, positions and attention"
PICTURES_ON_PAGE = {
    "predictions": "Held-out images: original, corrupted, predicted and true, with the entropy of each prediction",
    "pca": "The first three principal components of the patches' features as red, green and blue, by depth",
    "positions": "Similarity of the learned position embeddings of any two patches",
    "attention_distance": "Mean attention distance of each head, by depth",
}
"""Name of a picture of `mpp visualize` -> its caption."""
IMAGES_IN = {"predictions": "original", "pca": "images"}
"""Name of a picture that shows examples -> the array of these in its .npz."""


def picture_sections(config: ReportConfig, folder: Path, history: History) -> list[Section]:
    """All sections that need the encoder and the images; without the images, the pictures that exist already."""
    pictures = Section("pictures", PICTURES_TITLE)
    neighbours = Section("neighbours", "Nearest neighbours")
    extremes = Section("extremes", "Predicted best and worst")
    if not (folder / "encoder").is_dir():
        pictures.blocks = [Missing("Pictures", "there is no encoder yet: it is written when the run ends")]
        return [pictures]
    visualize_config = rebuild(VisualizeConfig(), flatten(config) | {"encoder": str(folder), "out": None})
    pictures_folder = folder / "evaluation" / f"pictures{report_suffix(visualize_config)}"
    subject = None
    try:
        subject = load_subject(visualize_config, load_unchanged_splits_of(config.encoder, config.data))
    except (UserError, OSError) as error:
        pictures.blocks = [Missing("Pictures", str(error))]
    with deaths_explained():
        pictures.blocks += or_missing(pictures.title, partial(picture_blocks, subject, folder, pictures_folder))
        if subject is None:
            return [pictures]
        neighbours.blocks = or_missing(neighbours.title, partial(neighbour_blocks, subject, config.compared, history))
        extremes.blocks = or_missing(extremes.title, partial(extreme_blocks, subject, folder))
    return [pictures, neighbours, extremes]


def or_missing(content: str, make_blocks: Callable[[], list[Block | Missing]]) -> list[Block | Missing]:
    """The blocks of some content, or the reason why it is not available."""
    try:
        return make_blocks()
    except (UserError, OSError) as error:
        return [Missing(content, str(error))]


def picture_blocks(subject: Subject | None, folder: Path, pictures_folder: Path) -> list[Block | Missing]:
    """Pictures of `mpp visualize`: read where they are newer than the encoder, otherwise drawn.

    Those of another number of images than `images` asks for are drawn, too. Without a subject, none is drawn.
    """
    encoder_written = (folder / "encoder" / "config.json").stat().st_mtime
    blocks: list[Block | Missing] = []
    for name, alt in PICTURES_ON_PAGE.items():
        file = pictures_folder / f"{name}.png"
        blocks += or_missing(name, partial(picture_block, subject, file, alt, encoder_written))
    return blocks


def picture_block(subject: Subject | None, file: Path, alt: str, encoder_written: float) -> list[Block | Missing]:
    """The picture in a file, or drawn where it is older than the encoder: see `picture_blocks`."""
    is_current = file.is_file() and file.stat().st_mtime >= encoder_written
    if is_current and (subject is None or shows_as_asked(file, subject)):
        return [image_as_picture(Image.open(file), alt, f"{alt}.")]
    return [] if subject is None else [draw_picture(subject, file.stem, alt, file.parent)]


def shows_as_asked(file: Path, subject: Subject) -> bool:
    """Whether a picture shows as many images as the setting `images` asks for, where that is not the default."""
    asked = subject.config.images
    if asked == ReportConfig.images or file.stem not in IMAGES_IN:
        return True
    with suppress(*NPZ_ERRORS), np.load(file.with_suffix(".npz")) as numbers:
        return len(numbers[IMAGES_IN[file.stem]]) == min(asked, len(subject.held_out))
    return False


def draw_picture(subject: Subject, name: str, alt: str, pictures_folder: Path) -> Picture:
    """Draw a picture of `mpp visualize`, and write it to its folder unless the run is read-only."""
    drawing = PICTURES[name](subject)
    if os.access(subject.run, os.W_OK):
        pictures_folder.mkdir(parents=True, exist_ok=True)
        drawing.write(pictures_folder, name)
    return figure_as_picture(drawing.figure, alt, f"{alt}.")


def neighbour_blocks(subject: Subject, max_images: int, history: History) -> list[Block]:
    """Held-out images with their nearest neighbours among at most `max_images`, and all of these on a map."""
    depth = best_probed_depth(subject, history)
    representation = "class" if subject.has_trained_class_token else "mean"
    gallery = extract_gallery(subject, subject.choose(max_images), depth, representation)
    count = len(gallery.names)
    if count < MIN_IMAGES_COMPARED:
        raise Unavailable(f"{count} held-out images are too few for neighbours")
    queries = evenly_spaced(count, MAX_QUERIES).tolist()
    of_all = find_other_neighbours(gallery.features, NEIGHBOURS_OF_A_QUERY)
    neighbours = Neighbours(of_all.similarity[queries], of_all.index[queries])
    rows = []
    for query, nearest in zip(queries, neighbours.index.tolist(), strict=True):
        rows.append([gallery.pixels[query], *gallery.pixels[nearest]])
    token = "[class] token" if representation == "class" else "mean of the patches"
    caption = (
        f"Left, a held-out image; then the {neighbours.index.shape[1]} most like it of {count}, by cosine at "
        f"depth {depth} ({token}).{describe_label_agreement(gallery, queries, neighbours)}"
    )
    alt = "Held-out images, each next to its nearest neighbours"
    return [
        image_as_picture(arrange_in_rows(rows, extra_gap=QUERY_GAP_PX), alt, caption),
        table_of_neighbours(gallery, queries, neighbours),
        chart(
            f"Map of {count} held-out images: principal components of their features",
            plot_map(project_to_plane(gallery.features), gallery.labels, gallery.class_names),
        ),
    ]


def best_probed_depth(subject: Subject, history: History) -> int:
    """The depth that the last probe found best; the last depth of the encoder where training had no probe."""
    last_depth = len(subject.encoder.stages)
    group, lines = probe_lines(after_training_began(history))
    if not lines:
        return last_depth
    depth, _ = best_depth(lines[-1], group)
    return min(depth, last_depth)


def describe_label_agreement(gallery: Gallery, queries: list[int], neighbours: Neighbours) -> str:
    """Number of neighbours with the label of their query, in words; "" where there are no labels to compare."""
    query_labels = gallery.labels[queries][:, None]
    neighbour_labels = gallery.labels[neighbours.index.numpy()]
    both_known = (neighbour_labels >= 0) & (query_labels >= 0)
    if not both_known.any():
        return ""
    same = both_known & (neighbour_labels == query_labels)
    return f" {same.sum()} of {both_known.sum()} have the label of their query."


def table_of_neighbours(gallery: Gallery, queries: list[int], neighbours: Neighbours) -> Table:
    """File names of the queries and of their neighbours, with cosine similarities."""
    rows = []
    for query, indices, similarities in zip(queries, neighbours.index, neighbours.similarity, strict=True):
        row = [gallery.names[query]]
        for index, similarity in zip(indices.tolist(), similarities.tolist(), strict=True):
            row.append(f"{gallery.names[index]} ({similarity:.2f})")
        rows.append(row)
    numbered = [f"nearest {number}" for number in range(1, 1 + neighbours.index.shape[1])]
    return Table(["query", *numbered], rows, "file names, and cosine similarity", folded=True)


def extreme_blocks(subject: Subject, folder: Path) -> list[Block]:
    """The held-out images that the model predicts best and worst."""
    if not is_pretraining(folder):
        raise Unavailable("only a pre-training run predicts patches")
    task = reopen(folder, subject.config.data, MAX_IMAGES_PREDICTED, subject.accelerator)
    blocks: list[Block] = []
    rows = []
    with subject.accelerator.autocast():
        losses = held_out_losses(task, MAX_IMAGES_PREDICTED)
        count = int(np.isfinite(losses).sum())
        for name, indices in best_and_worst(losses).items():
            blocks.append(picture_of_predictions(task, name, indices, count))
            rows += [[name, task.held_out.image_name(index), f"{losses[index]:.3f}"] for index in indices]
    return [*blocks, Table(["", "image", "loss"], rows, "file names and losses", folded=True)]


def best_and_worst(losses: NDArray[np.float64]) -> dict[str, list[int]]:
    """Indices of the lowest losses, ascending, and of the highest ones, descending; without those that are NaN."""
    order = np.argsort(losses, kind="stable")[: np.isfinite(losses).sum()].tolist()  # NaN is last
    count = min(MAX_EXTREMES, max(1, len(order) // 2))
    return {"best": order[:count], "worst": order[-count:][::-1]}


def picture_of_predictions(task: Pretraining, name: str, indices: list[int], image_count: int) -> Picture:
    """Original, corrupted, predicted and true pixels of the images that are predicted best or worst."""
    columns = predict_columns(task, indices)
    rows = [list(columns[:, number]) for number in range(len(indices))]
    alt = f"Held-out images predicted {name}: original, corrupted, predicted, true"
    caption = f"Predicted {name}, of {image_count}: original, corrupted, predicted, true."
    return image_as_picture(arrange_in_rows(rows), alt, caption)

"""The page on a table of predictions: the surest, the least sure, the surest that are wrong, and some of each class.

Of masks: the share of the pixels of each class, which is also the legend, and images with their masks over them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from evaluation.config import ProbeDataConfig
from evaluation.frozen.by_class import draw_confusion
from evaluation.metrics.scoring import Outcomes, evenly_spaced, kind_of
from evaluation.pages.page import (
    Block,
    ColorKey,
    Page,
    Picture,
    PictureGrid,
    Section,
    Table,
    Text,
    figure_as_picture,
    image_as_picture,
    write_page,
)
from evaluation.predictions.masks import color_of
from evaluation.predictions.summary import (
    NO_CLASS,
    Predictions,
    count_predicted,
    describe_figures,
    describe_unreadable,
    largest_shares,
)
from mpp.data.crops import limit_aspect
from mpp.data.dataset import ImageDataset
from mpp.errors import UnreadableImage
from mpp.features.reconstructions import as_rgb, stretch
from mpp.runtime.messages import counted, printable

EXTREMES = 12  # of the surest images, of the least sure, of those that are wrong
IMAGES_OF_A_CLASS = 6
SPACED = 12  # images with their masks, evenly spaced among all
NAMED_SHARES = 5  # classes of pixels in the verdict, the largest
MAX_CLASSES = 40  # with images on the page, the most frequent
THUMBNAIL_PX = 160  # the longer side
Thumbnail = Callable[[int], Image.Image]
"""The picture of a row of the table. Raises UnreadableImage or OSError."""


class RowImages:
    """The images of a table's rows, in their order."""

    def __init__(self, splits: Sequence[ImageDataset], data: ProbeDataConfig):
        self.splits = splits
        self.data = data
        self.ends = np.cumsum([len(images) for images in splits])

    def place(self, row: int) -> tuple[ImageDataset, int]:
        """The split of a row, and the index of its image there."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        images = self.splits[number]
        return images, row - (int(self.ends[number]) - len(images))

    def name(self, row: int) -> str:
        """The image's file."""
        images, index = self.place(row)
        return printable(images.image_name(index))

    def thumbnail(self, row: int) -> Image.Image:
        """The image, small."""
        images, index = self.place(row)
        pixels = limit_aspect(images.decode(index, self.data), (1, 1))
        return Image.fromarray(as_rgb(stretch(pixels)).permute(1, 2, 0).contiguous().numpy())


def write_predictions_page(
    path: Path,
    title: str,
    subtitle: str,
    predictions: Predictions,
    outcomes: Mapping[str, Outcomes],
    images: RowImages,
    thumbnail: Thumbnail,
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        outcomes: of the splits with labels.
        thumbnail: the picture of a row.
        notes: on the figures.
    """
    sheets = Sheets(predictions, images, thumbnail)
    if predictions.shares:
        by_class = Section("classes", "Pixels by predicted class", [pixel_share_table(predictions)])
        pictures = mask_sections(predictions, sheets)
    else:
        by_class = Section("classes", "Predicted classes", [predicted_class_table(predictions)])
        pictures = image_sections(predictions, sheets)
    sections = [
        by_class,
        *label_sections(outcomes),
        *pictures,
        Section("broken", "Images that cannot be decoded", unreadable_files_blocks(predictions)),
    ]
    shown = [section for section in sections if section.blocks]
    unreadable = int((predictions.classes == NO_CLASS).sum())
    warnings = [*notes, describe_unreadable(unreadable)] if unreadable else [*notes]
    lines = [(line, None) for line in describe_predictions(predictions.summarize(outcomes), outcomes)]
    write_page(path, Page(title, subtitle, lines, warnings, shown, {}))


def image_sections(predictions: Predictions, sheets: "Sheets") -> list[Section]:
    """Images that are one class each: at the extremes of probability, and some of each class."""
    return [
        Section("surest", "Most certain", sheets.blocks(surest(predictions))),
        Section("least", "Least certain", sheets.blocks(least_sure(predictions))),
        Section("wrong", "Most certain of another class than the label", sheets.blocks(surest_wrong(predictions))),
        *class_sections(predictions, sheets),
    ]


def mask_sections(predictions: Predictions, sheets: "Sheets") -> list[Section]:
    """Images with their masks: some of all, and those at the extremes of probability that are not among the former."""
    decoded = np.flatnonzero(predictions.classes != NO_CLASS)
    some = decoded[evenly_spaced(len(decoded), SPACED)]
    most = rows_without(surest(predictions), some)
    least = rows_without(least_sure(predictions), [*some, *most])
    return [
        Section("images", "Images, evenly spaced among all", sheets.blocks(some)),
        Section("surest", "Most certain of the others", sheets.blocks(most)),
        Section("least", "Least certain of the others", sheets.blocks(least)),
    ]


class Sheets:
    """Pictures of rows with class, probability and file; of masks with the mean probability of a pixel."""

    def __init__(self, predictions: Predictions, images: RowImages, thumbnail: Thumbnail):
        self.predictions = predictions
        self.images = images
        self.thumbnail = thumbnail

    def blocks(self, rows: NDArray[np.int64]) -> list[Block]:
        """A grid of the pictures of these rows; nothing where there are none."""
        pictures = [self.picture(row) for row in rows.tolist()]
        shown = [each for each in pictures if each is not None]
        return [PictureGrid(shown)] if shown else []

    def picture(self, row: int) -> Picture | None:
        """The picture of a row; None: its file is gone."""
        try:
            image = self.thumbnail(row)
        except (UnreadableImage, OSError):
            return None
        image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
        file = self.images.name(row)
        probability = f"{self.predictions.probabilities[row]:.0%}"
        if self.predictions.shares:
            return image_as_picture(image, file, f"{probability} certain · {file.rsplit('/', 1)[-1]}")
        name = self.predictions.class_names[self.predictions.classes[row]]
        words = [f"{name} {probability}", file.rsplit("/", 1)[-1]]
        if self.predictions.right[row] == 0:
            words.insert(1, f"labelled {self.predictions.labels[row].as_py()}")
        return image_as_picture(image, f"{file}: {name}", " · ".join(words))


def known_rows(predictions: Predictions) -> NDArray[np.int64]:
    """The rows with a prediction, the surest first."""
    known = np.flatnonzero(predictions.classes != NO_CLASS)
    return known[np.argsort(-predictions.probabilities[known], kind="stable")]


def surest(predictions: Predictions) -> NDArray[np.int64]:
    """The rows with the largest probabilities, the surest first."""
    return known_rows(predictions)[:EXTREMES]


def least_sure(predictions: Predictions) -> NDArray[np.int64]:
    """The rows with the smallest probabilities, the least sure first."""
    return known_rows(predictions)[::-1][:EXTREMES]


def surest_wrong(predictions: Predictions) -> NDArray[np.int64]:
    """The surest rows whose label is another class."""
    rows = known_rows(predictions)
    return rows[predictions.right[rows] == 0][:EXTREMES]


def rows_without(rows: NDArray[np.int64], others: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that are not among the others, in their order."""
    return rows[~np.isin(rows, others)]


def class_sections(predictions: Predictions, sheets: Sheets) -> list[Section]:
    """A section for each predicted class, with images that are evenly spaced among its own."""
    counts = np.bincount(predictions.classes[predictions.classes != NO_CLASS], minlength=len(predictions.class_names))
    frequent = [number for number in np.argsort(-counts, kind="stable").tolist() if counts[number]]
    sections = []
    for number in frequent[:MAX_CLASSES]:
        rows = np.flatnonzero(predictions.classes == number)
        title = f"{predictions.class_names[number]}: {counted(int(counts[number]), 'image')}"
        some = rows[evenly_spaced(len(rows), IMAGES_OF_A_CLASS)]
        sections.append(Section(f"class{number}", title, sheets.blocks(some)))
    left_out = len(frequent) - len(sections)
    if left_out > 0:
        sections.append(Section("others", "Other classes", [Text(f"{left_out} rarer classes are in the table only.")]))
    return sections


def predicted_class_table(predictions: Predictions) -> Table:
    """Images and mean probability of each predicted class."""
    rows = []
    for name, of_class in count_predicted(predictions).items():
        rows.append([name, str(of_class["images"]), f"{of_class['probability']:.2f}"])
    return Table(["class", "images", "mean probability"], rows, folded=len(rows) > MAX_CLASSES, caption="all classes")


def pixel_share_table(predictions: Predictions) -> Table:
    """The mean share of the pixels of each class, the largest first; each class has its colour in masks."""
    colors = {}
    for name, number in zip(predictions.class_names, predictions.class_numbers, strict=True):
        colors[name] = color_of(number)
    rows = []
    for name, share in largest_shares(predictions.shares):
        rows.append([ColorKey(name, colors[name]), f"{100 * share:.1f}"])
    caption = "means over images; the colours are those of the masks"
    if 0 in predictions.class_numbers:
        unmarked = predictions.class_names[predictions.class_numbers.index(0)]
        caption += f", and {unmarked} (class 0) is not drawn"
    return Table(["class", "share of pixels (%)"], rows, caption, folded=len(rows) > MAX_CLASSES)


def unreadable_files_blocks(predictions: Predictions) -> list[Block]:
    """The images that cannot be decoded, and why."""
    rows = [list(each) for each in predictions.unreadable_files]
    return [Table(["file", "reason"], rows)] if rows else []


def label_sections(outcomes: Mapping[str, Outcomes]) -> list[Section]:
    """A section for each split with labels: its figures by class, and the confusion matrix."""
    sections = []
    for number, (split, of_split) in enumerate(outcomes.items()):
        by_class = kind_of(of_split).class_table(of_split)
        occurring = np.flatnonzero(sum(by_class.counts.values()))
        blocks: list[Block] = [Table(*by_class.select(occurring).text())]
        confusion = draw_confusion(of_split)
        if confusion is not None:
            blocks.append(figure_as_picture(confusion, f"Confusion matrix of {split}"))
        sections.append(Section(f"labels{number}", f"Compared with the labels of {split}", blocks))
    return sections


def describe_predictions(summary: Mapping[str, Any], outcomes: Mapping[str, Outcomes]) -> list[str]:
    """Number of images, of masks the largest shares of their pixels, and figures by split where there are labels."""
    images = counted(summary["images"], "image")
    if "shares" in summary:
        largest = largest_shares(summary["shares"])
        named = [f"{name} {100 * share:.1f}%" for name, share in largest[:NAMED_SHARES] if share > 0]
        more = ", ..." if len(largest) > NAMED_SHARES else ""
        first = f"{images}; pixels by predicted class: {', '.join(named) or 'none'}{more}"
    else:
        first = f"{images}, predicted to be of {counted(len(summary['predicted']), 'class', 'classes')}"
    return [first, *describe_figures(outcomes, summary)]

"""Figures that show images: one grid for all pictures."""

import math
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from evaluation.figures.charts import VALUE_COLORS, WIDTH, figure_style

MIN_HEIGHT = 2.4  # inches, for the label of a colour bar
BAR_WIDTH = 0.8  # inches, of a colour bar with its label
LETTERS_AN_INCH = 11  # of a title
MAX_COLORS_OF_CLASSES = 20


@figure_style()
def grid_of_images(
    images: Sequence[NDArray],
    columns: int,
    title: str,
    titles: Sequence[str] = (),
    bar: str = "",
    limits: tuple[float | None, float | None] = (None, None),
    side: float = 1.5,
) -> Figure:
    """Images and maps of values in rows, all as high and as wide as the first.

    Args:
        images: colours (H, W, 3), or values (h, w).
        columns: images in a row.
        titles: of the images; of the first ones, where there are fewer.
        bar: label of the bar with the colours of the values; "": there is none.
        limits: the values of the first and the last colour; None: the smallest, the largest of all.
        side: inches of an image's width, at most.
    """
    height, width = images[0].shape[:2]
    rows = math.ceil(len(images) / columns)
    side = min(side, (WIDTH - BAR_WIDTH) / columns)
    size = side * columns + BAR_WIDTH, max(MIN_HEIGHT, 0.6 + rows * (side * height / width + 0.2))
    figure = Figure(size, layout="constrained")
    figure.suptitle(textwrap.fill(title, round(LETTERS_AN_INCH * size[0])), fontsize=10)
    grid = figure.subplots(rows, columns, squeeze=False)
    colors = Normalize(*limits)
    colors.autoscale_None(np.concatenate([image[np.isfinite(image)] for image in images if image.ndim == 2] or [[]]))
    for axes, image, text in zip_longest(grid.flat, images, titles):
        axes.set_axis_off()
        axes.set_title(text or "", fontsize=8)
        if image is not None:
            axes.imshow(image, VALUE_COLORS, colors, interpolation="nearest", extent=(0, width, height, 0))
    if bar:
        figure.colorbar(ScalarMappable(colors, VALUE_COLORS), ax=grid, label=bar, shrink=min(1, 2 / rows))
    return figure


def plot_segmentation(images: NDArray[np.uint8], columns: dict[str, NDArray[np.int64]], classes: int) -> Figure:
    """A row for each image: the image, its mask, and the predicted classes.

    Args:
        images: (B, H, W, 3).
        columns: title -> (B, H, W) class of each pixel; -1: ignored.
    """
    colors = matplotlib.colormaps["tab20" if classes > 2 else "cividis"].with_extremes(bad="0.9")
    count = min(classes, MAX_COLORS_OF_CLASSES)
    shown = []
    for number, pixels in enumerate(images):
        shown.append(pixels)
        for masks in columns.values():
            known = np.ma.masked_where(masks[number] < 0, masks[number] % count)
            shown.append(colors(known / max(1, count - 1)))
    title = "classes of held-out images, from features of patches"
    return grid_of_images(shown, 1 + len(columns), title, ["original", *columns])

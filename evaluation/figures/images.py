"""Figures that show images: one grid for all pictures."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from evaluation.figures.charts import VALUE_COLORS, WIDTH, figure_style

MIN_HEIGHT = 2.4  # inches, for the label of a colour bar
BAR_WIDTH = 0.8  # inches, of a colour bar with its label


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
        bar: label of the bar with the colours of the values, if there are some; "": no bar.
        limits: the values of the first and the last colour; None: the smallest, the largest of all.
        side: inches of an image's width, at most.
    """
    height, width = images[0].shape[:2]
    rows = math.ceil(len(images) / columns)
    side = min(side, (WIDTH - BAR_WIDTH) / columns)
    size = side * columns + BAR_WIDTH, max(MIN_HEIGHT, 0.6 + rows * (side * height / width + 0.2))
    figure = Figure(size, layout="constrained")
    figure.suptitle(title, fontsize=10, wrap=True)
    grid = figure.subplots(rows, columns, squeeze=False)
    colors = Normalize(*limits)
    colors.autoscale_None(np.concatenate([image[np.isfinite(image)] for image in images if image.ndim == 2] or [[]]))
    for axes, image, text in zip_longest(grid.flat, images, titles):
        axes.set_axis_off()
        axes.set_title(text or "", fontsize=8)
        if image is not None:
            axes.imshow(image, VALUE_COLORS, colors, interpolation="nearest", extent=(0, width, height, 0))
    if bar and any(image.ndim == 2 for image in images):
        figure.colorbar(ScalarMappable(colors, VALUE_COLORS), ax=grid, label=bar, shrink=min(1, 2 / rows))
    return figure


def side_by_side(*columns: Iterable[NDArray]) -> list[NDArray]:
    """The first image of each column, then the second ones, and so on."""
    return [*chain(*zip(*columns, strict=True))]

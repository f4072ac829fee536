"""Figures that show images: predictions, filters, positions, attention, components, similar patches, segmentation.

B images, H, W pixels, h, w patches, P patch side.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from evaluation.figures.style import MIN_HEIGHT, VALUE_COLORS, WIDTH, figure_style
from mpp.features.reconstructions import COLUMNS

MAX_COLORS_OF_CLASSES = 20


@figure_style()
def plot_predictions(columns: NDArray[np.uint8], entropies: NDArray | None, target: str) -> Figure:
    """A row for each image: original, corrupted, predicted, true, and the entropy of the prediction.

    Args:
        columns: (4, B, H, W, 3).
        entropies: (B, h, w) in bits, NaN where nothing was predicted; None: no distribution is predicted.
        target: the predicted quantity, in a few words.
    """
    titles = list(COLUMNS)
    if entropies is not None:
        titles.append("entropy")
    rows, height, width = columns.shape[1:4]
    panel_width = WIDTH / len(titles)
    figure_height = 0.5 + panel_width * rows * height / width
    figure, panels = panels_of_images(rows, len(titles), WIDTH, max(MIN_HEIGHT, figure_height))
    for panels_of_column, images in zip(panels.T, columns, strict=False):
        for panel, pixels in zip(panels_of_column, images, strict=True):
            show(panel, pixels)
    if entropies is not None:
        for panel, entropy in zip(panels[:, -1], entropies, strict=True):
            last = show(panel, entropy, vmin=0, vmax=np.nanmax(entropies))
        label = "entropy of the prediction (bits)"
        figure.colorbar(last, ax=panels[:, -1], label=label, shrink=min(1, 2 / rows))
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, fontsize=10)
    heading = f"held-out images, predicted from their visible patches ({target})"
    figure.suptitle(textwrap.fill(heading, 80), fontsize=11)
    return figure


@figure_style()
def plot_filters(filters: NDArray[np.uint8], variance_shares: NDArray) -> Figure:
    """Principal components of the patch embedding's filters, each in its own range.

    Args:
        filters: (n, P, P, 3).
        variance_shares: (n,).
    """
    count = len(filters)
    across = min(7, count)
    rows = math.ceil(count / across)
    panel_width = WIDTH / across
    figure, panels = panels_of_images(rows, across, WIDTH, 0.4 + panel_width * rows * 1.12)
    for panel, pixels, share in zip(panels.flat, filters, variance_shares, strict=False):
        show(panel, pixels)
        panel.set_title(f"{100 * share:.1f}%", fontsize=8)
    hide(panels.flat[count:])
    total = 100 * variance_shares.sum()
    title = f"{count} principal components of the filters on pixels, {total:.0f}% of the variance"
    figure.suptitle(title, fontsize=11)
    return figure


@figure_style()
def plot_positions(similarity: NDArray, label: str) -> Figure:
    """Similarity of each patch's position to all positions, as a map in the place of the patch.

    Args:
        similarity: (h, w, h, w).
        label: of the colour bar.
    """
    rows, columns = similarity.shape[:2]
    gap = max(1, rows // 8)  # between two maps, in patches
    padded = np.pad(similarity, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    mosaic = rearrange(padded, "r c h w -> (r h) (c w)")[:-gap, :-gap]
    figure = Figure(figsize=(WIDTH, WIDTH * 0.86), layout="constrained")
    axes = figure.add_subplot()
    image = show(axes, mosaic, vmin=min(0, similarity.min()), vmax=similarity.max())
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        numbered = np.arange(0, count, math.ceil(count / 16))
        centres = numbered * (count + gap) + (count - 1) / 2
        axis.set_ticks(centres, numbered + 1)
    axes.set(xlabel="column of the patch", ylabel="row of the patch", title="positions, each against all")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return figure


@figure_style()
def plot_attention_distance(distances: NDArray, uniform: float, image_count: int) -> Figure:
    """Mean attention distance by depth, a dot for each head.

    Args:
        distances: (depth, heads) in pixels.
        uniform: distance of uniform attention.
        image_count: number of images in the mean.
    """
    depths = np.arange(1, len(distances) + 1)
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(depths, distances.mean(1), color=VALUE_COLORS(0.1), label="mean over the heads")
    dots = axes.plot(depths, distances, "o", color=VALUE_COLORS(0.7), mec="0.3", ms=5)
    dots[0].set_label("a head")
    axes.axhline(uniform, color="0.4", linestyle="--", label="uniform attention")
    axes.set(xlabel="depth (blocks)", xticks=depths)
    axes.set(ylabel="mean attention distance (pixels)", ylim=(0, None))
    axes.set_title(f"attention distance, over {image_count} images", fontsize=11)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


@figure_style()
def plot_rollout(images: NDArray[np.uint8], rollout: NDArray, start: str, residual: bool) -> Figure:
    """Attention rollout laid over each image.

    Args:
        images: (B, H, W, 3).
        rollout: (B, h, w), as a multiple of uniform attention.
        start: `class` or `patches`, where the rollout starts.
        residual: whether each layer was averaged with the identity.
    """
    pairs_across = min(3, len(images))
    rows = math.ceil(len(images) / pairs_across)
    height, width = images.shape[1:3]
    panel_width = (WIDTH - 0.8) / (2 * pairs_across)
    figure_height = 0.4 + panel_width * rows * height / width
    figure, panels = panels_of_images(rows, 2 * pairs_across, WIDTH, max(MIN_HEIGHT, figure_height))
    pairs = panels.reshape(-1, 2)
    style = dict(alpha=0.65, interpolation="bilinear", extent=image_extent(height, width))
    for (left, right), pixels, values in zip(pairs, images, rollout, strict=False):
        left.imshow(pixels)
        right.imshow(pixels.mean(-1), cmap="gray")
        last = show(right, values, vmin=rollout.min(), vmax=rollout.max(), **style)
    hide(pairs[len(images) :].flat)
    source = "[class]" if start == "class" else "the mean of the patches"
    detail = ", with the residual" if residual else ""
    figure.suptitle(f"attention rollout from {source}{detail}", fontsize=11)
    bar = figure.colorbar(last, ax=panels, label="multiple of uniform attention", shrink=0.9, pad=0.01)
    bar.solids.set_alpha(1)
    return figure


@figure_style()
def plot_components(
    images: NDArray[np.uint8],
    colors: NDArray,
    foreground: NDArray[np.bool_],
    variance_shares: NDArray,
    depths: Sequence[int],
) -> Figure:
    """Two rows for each image: principal components of its patch features as colours, and its foreground, by depth.

    Args:
        images: (B, H, W, 3).
        colors: (depths, B, h, w, 3) in [0, 1].
        foreground: (depths, B, h, w).
        variance_shares: (depths, 3).
    """
    across = 1 + len(depths)
    rows = 2 * len(images)
    height, width = images.shape[1:3]
    side = min(1.2, WIDTH / across)  # of a panel, in inches
    figure, panels = panels_of_images(rows, across, side * across + 0.3, side * rows * height / width + 0.9)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01)
    cover = np.full((*foreground.shape, 4), 0.5)  # grey: visible on dark and on light images
    cover[..., 3] = np.where(foreground, 0, 0.9)
    for number, pixels in enumerate(images):
        above, below = panels[2 * number : 2 * number + 2]
        show(above[0], pixels)
        hide(below[:1])
        for panel, components in zip(above[1:], colors[:, number], strict=True):
            show(panel, components)
        for panel, background in zip(below[1:], cover[:, number], strict=True):
            show(panel, pixels)
            show(panel, background, extent=image_extent(height, width))
    panels[0, 0].set_title("original", fontsize=9)
    for panel, depth, shares in zip(panels[0, 1:], depths, variance_shares, strict=True):
        panel.set_title(f"depth {depth}\n{100 * shares.sum():.0f}%", fontsize=9)
    figure.suptitle(
        "patch features: three principal components as red, green, blue (%: their share\n"
        "of the variance); below, the patches with the first one above its mean",
        fontsize=10,
    )
    return figure


@figure_style()
def plot_similarity(images: NDArray[np.uint8], similarity: NDArray, patches: Sequence[int]) -> Figure:
    """A row for each image: the image, and the similarity of its patches to the patch in the frame.

    Args:
        images: (B, H, W, 3).
        similarity: (B, queries, h, w), cosines.
        patches: (queries,), the patch of each map, counted row by row.
    """
    across = 1 + len(patches)
    rows, height, width = images.shape[:3]
    side = min(1.4, (WIDTH - 0.8) / across)
    figure_height = 0.6 + side * rows * height / width
    figure, panels = panels_of_images(rows, across, side * across + 0.8, max(MIN_HEIGHT, figure_height))
    style = dict(vmin=similarity.min(), vmax=1, extent=image_extent(height, width))
    for row, pixels, maps in zip(panels, images, similarity, strict=True):
        show(row[0], pixels)
        for panel, patch, cosines in zip(row[1:], patches, maps, strict=True):
            last = show(panel, cosines, **style)
            draw_frame(panel, patch, cosines.shape, (height, width))
    figure.colorbar(last, ax=panels, label="cosine similarity", shrink=min(1, 2 / rows))
    figure.suptitle("cosine similarity of all patches to the framed patch", fontsize=10)
    return figure


@figure_style()
def plot_neighbours(
    queries: NDArray[np.uint8],
    images: NDArray[np.uint8],
    hosts: NDArray[np.uint8],
    grid: tuple[int, int],
    patch: int,
    numbers: dict[str, NDArray],
) -> Figure:
    """Two rows for each query: the nearest images, and the images with the patches nearest to a patch of the query.

    Args:
        queries: (B, H, W, 3).
        images, hosts: (B, k, H, W, 3).
        grid: rows and columns of patches.
        patch: of the queries, counted row by row.
        numbers: `image_similarity`, `patch_similarity` and `patches`, (B, k).
    """
    rows = 2 * len(queries)
    across = 1 + images.shape[1]
    height, width = queries.shape[1:3]
    side = min(1.2, WIDTH / across)
    row_height = side * height / width + 0.18
    figure, panels = panels_of_images(rows, across, side * across + 0.3, 0.6 + rows * row_height)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01)
    for number, query in enumerate(queries):
        above, below = panels[2 * number : 2 * number + 2]
        for row, neighbours, similarity in (
            (above, images[number], numbers["image_similarity"][number]),
            (below, hosts[number], numbers["patch_similarity"][number]),
        ):
            show(row[0], query)
            for panel, pixels, cosine in zip(row[1:], neighbours, similarity, strict=True):
                show(panel, pixels)
                panel.set_title(f"{cosine:.2f}", fontsize=7, pad=2)
        framed = [patch, *numbers["patches"][number].tolist()]
        for panel, framed_patch in zip(below, framed, strict=True):
            draw_frame(panel, framed_patch, grid, (height, width))
    figure.suptitle(
        "left: a held-out image; above, the others that are nearest by cosine;\n"
        "below, those with the patches that are nearest to the patch in the frame",
        fontsize=10,
    )
    return figure


@figure_style()
def plot_segmentation(images: NDArray[np.uint8], columns: dict[str, NDArray[np.int64]], classes: int) -> Figure:
    """A row for each image: the image, its mask, and the predicted classes.

    Args:
        images: (B, H, W, 3).
        columns: title -> (B, H, W) class of each pixel; -1: ignored.
    """
    across = 1 + len(columns)
    rows, height, width = images.shape[:3]
    side = min(1.6, WIDTH / across)
    figure, panels = panels_of_images(rows, across, side * across + 0.3, 0.6 + side * rows * height / width)
    colors = matplotlib.colormaps["tab20" if classes > 2 else "cividis"].with_extremes(bad="0.9")
    color_count = min(classes, MAX_COLORS_OF_CLASSES)
    style = dict(cmap=colors, vmin=0, vmax=color_count - 1)
    for row, pixels, *maps in zip(panels, images, *columns.values(), strict=True):
        show(row[0], pixels)
        for panel, pixel_classes in zip(row[1:], maps, strict=True):
            show(panel, np.ma.masked_where(pixel_classes < 0, pixel_classes % color_count), **style)
    for panel, title in zip(panels[0], ["original", *columns], strict=True):
        panel.set_title(title, fontsize=9)
    figure.suptitle("classes of held-out images, from features of patches", fontsize=10)
    return figure


def panels_of_images(rows: int, columns: int, width: float, height: float) -> tuple[Figure, NDArray]:
    """A figure, its size in inches, and its panels (rows, columns), which have no ticks."""
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, subplot_kw=dict(xticks=[], yticks=[]))
    return figure, panels


def hide(panels: Sequence[Axes]) -> None:
    """Hide panels that have nothing to show."""
    for panel in panels:
        panel.set_visible(False)


def show(panel: Axes, image: NDArray, **style: Any) -> AxesImage:
    """Show an image (H, W, 3), or values (H, W) as colours, each in a rectangle of its own."""
    return panel.imshow(image, **dict(cmap=VALUE_COLORS, interpolation="nearest") | style)


def image_extent(height: int, width: int) -> tuple[float, float, float, float]:
    """Edges of an image (left, right, bottom, top), so that a smaller one is laid over all of it."""
    return -0.5, width - 0.5, height - 0.5, -0.5


def draw_frame(panel: Axes, patch: int, grid: Sequence[int], size: Sequence[int]) -> None:
    """Draw a frame around a patch, counted row by row, of an image of `size` (H, W) and `grid` (h, w)."""
    patch_height = size[0] / grid[0]
    patch_width = size[1] / grid[1]
    row, column = divmod(patch, grid[1])
    corner = column * patch_width - 0.5, row * patch_height - 0.5
    for color, line_width in (("black", 2.4), ("white", 1.2)):  # visible on dark and on light images
        frame = Rectangle(corner, patch_width, patch_height, fill=False, edgecolor=color, linewidth=line_width)
        panel.add_patch(frame)

"""Every figure: numbers in, matplotlib out. Readable at the width of a README, by the colour-blind too.

Colours are cividis's, and for lines that have no order those of tableau-colorblind10: who confuses red and green sees
them as others do. Nothing here computes a result.
"""

import math
import textwrap
from collections.abc import Sequence

import matplotlib
import matplotlib.style
import numpy as np
from einops import rearrange
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from mpp.features.reconstructions import COLUMNS

matplotlib.rcParams["svg.hashsalt"] = "mpp"  # the same picture is the same file
PALETTE = matplotlib.colormaps["cividis"].with_extremes(bad="0.9")  # grey: no value
LINES = [style["color"] for style in matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"]]
SERIES = ["#1b7fd6", "#e07b00", "#8c96a0", "#c2569c", "#2aa198", "#b58900", "#6c5fc7"]  # on light pages and on dark
WIDTH = 7.5  # inches
LEAST = 2.4  # inches of height, for the label of a scale
DPI = 110
MARKERS = "osD^vPX"  # lines differ in these too


def plot_predictions(columns: NDArray[np.uint8], doubts: NDArray | None, what: str) -> Figure:
    """A row for each image: original, corrupted, predicted, true and, where there is one, the entropy.

    Args:
        columns: (4, B, H, W, 3).
        doubts: (B, h, w) entropy in bits, NaN where nothing was predicted; None: no distribution is predicted.
        what: is predicted, in a few words.
    """
    titles = [*COLUMNS, *(["entropy"] if doubts is not None else [])]
    rows, across = columns.shape[1], len(titles)
    tall = columns.shape[2] / columns.shape[3]
    figure = Figure(figsize=(WIDTH, max(LEAST, 0.5 + WIDTH / across * rows * tall)), layout="constrained")
    panels = figure.subplots(rows, across, squeeze=False)
    for row, line in enumerate(panels):
        for panel, pixels in zip(line, columns[:, row], strict=False):
            panel.imshow(pixels, interpolation="nearest")
        if doubts is not None:
            shown = line[-1].imshow(doubts[row], cmap=PALETTE, vmin=0, vmax=np.nanmax(doubts), interpolation="nearest")
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, fontsize=10)
    bare(*panels.flat)
    if doubts is not None:
        figure.colorbar(shown, ax=panels[:, -1], label="entropy of the prediction (bits)", shrink=min(1, 2 / rows))
    heading = f"held-out images, predicted from what is left of them ({what})"
    figure.suptitle(textwrap.fill(heading, 80), fontsize=11)
    return figure


def plot_filters(filters: NDArray[np.uint8], shares: NDArray) -> Figure:
    """Principal components of the filters as pictures (n, P, P, 3), each in its own range, with shares of variance."""
    across = min(7, len(filters))
    rows = -(-len(filters) // across)
    figure = Figure(figsize=(WIDTH, 0.4 + WIDTH / across * rows * 1.12), layout="constrained")
    panels = figure.subplots(rows, across, squeeze=False)
    for panel, shown, share in zip(panels.flat, filters, shares, strict=False):
        panel.imshow(shown, interpolation="nearest")
        panel.set_title(f"{100 * share:.1f} %", fontsize=8)
    bare(*panels.flat)
    for panel in panels.flat[len(filters) :]:
        panel.set_visible(False)
    title = f"{len(filters)} principal components of the filters on pixels, {100 * shares.sum():.0f} % of the variance"
    figure.suptitle(title, fontsize=11)
    return figure


def plot_positions(similarity: NDArray, label: str) -> Figure:
    """How alike the place of each patch is to all, (h, w, h, w), as a map in the place of the patch.

    Args:
        label: what is shown, for the scale.
    """
    rows, columns = similarity.shape[:2]
    apart = max(1, rows // 8)  # between two maps, in patches
    padded = np.pad(similarity, ((0, 0), (0, 0), (0, apart), (0, apart)), constant_values=np.nan)
    mosaic = rearrange(padded, "r c h w -> (r h) (c w)")[:-apart, :-apart]
    figure = Figure(figsize=(WIDTH, WIDTH * 0.86), layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(
        mosaic, cmap=PALETTE, vmin=min(0, similarity.min()), vmax=similarity.max(), interpolation="nearest"
    )
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        every = -(-count // 16)
        places = np.arange(0, count, every)
        axis.set_ticks(places * (count + apart) + (count - 1) / 2, places + 1)
    axes.set(xlabel="column of the patch", ylabel="row of the patch", title="positions, each against all")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.colorbar(shown, ax=axes, label=label, shrink=0.8)
    return figure


def plot_attention_distance(distances: NDArray, uniform: float, images: int) -> Figure:
    """Mean attention distance (depth, heads) in pixels, a dot for each head; beside it what uniform attention has."""
    depth, heads = distances.shape
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(1, depth + 1)
    axes.plot(places, distances.mean(1), color=PALETTE(0.1), label="mean over the heads")
    axes.plot(np.repeat(places, heads), distances.flatten(), "o", color=PALETTE(0.7), mec="0.3", ms=5, label="a head")
    axes.axhline(uniform, color="0.4", linestyle="--", label="uniform attention")
    axes.set(xlabel="depth (blocks)", ylabel="mean attention distance (pixels)", xticks=places, ylim=(0, None))
    axes.set_title(f"how far heads look, over {images} images", fontsize=11)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def plot_rollout(images: NDArray[np.uint8], rollout: NDArray, start: str, residual: bool) -> Figure:
    """Images (B, H, W, 3), and attention rollout (B, h, w) laid over each, as a multiple of uniform attention."""
    across = min(3, len(images))
    rows = -(-len(images) // across)
    height, width = images.shape[1:3]
    tall = 0.4 + (WIDTH - 0.8) / (2 * across) * rows * height / width
    figure = Figure(figsize=(WIDTH, max(LEAST, tall)), layout="constrained")
    panels = figure.subplots(rows, 2 * across, squeeze=False)
    pairs = panels.reshape(-1, 2)
    for (left, right), pixels, flow in zip(pairs, images, rollout, strict=False):
        left.imshow(pixels)
        right.imshow(pixels.mean(-1), cmap="gray")
        over = dict(cmap=PALETTE, alpha=0.65, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="bilinear")
        shown: AxesImage = right.imshow(flow, vmin=rollout.min(), vmax=rollout.max(), **over)
    bare(*panels.flat)
    for panel in pairs[len(images) :].flat:
        panel.set_visible(False)
    origin = "[class]" if start == "class" else "the mean of the patches"
    figure.suptitle(f"attention rollout from {origin}{', with the residual' if residual else ''}", fontsize=11)
    bar = figure.colorbar(shown, ax=panels, label="multiple of uniform attention", shrink=0.9, pad=0.01)
    bar.solids.set_alpha(1)
    return figure


def plot_components(
    images: NDArray[np.uint8], colors: NDArray, foreground: NDArray[np.bool_], shares: NDArray, depths: Sequence[int]
) -> Figure:
    """Two rows for each image: principal components of its patches' features as colours, and its foreground, by depth.

    Args:
        images: (B, H, W, 3).
        colors: (depths, B, h, w, 3) in [0, 1].
        foreground: (depths, B, h, w).
        shares: (depths, 3) of the variance.
    """
    across, rows, (height, width) = 1 + len(depths), 2 * len(images), images.shape[1:3]
    panel_side = min(1.2, WIDTH / across)  # inches
    figure = Figure(figsize=(panel_side * across + 0.3, panel_side * rows * height / width + 0.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01)
    panels = figure.subplots(rows, across, squeeze=False)
    for number, pixels in enumerate(images):
        above, below = panels[2 * number], panels[2 * number + 1]
        above[0].imshow(pixels, interpolation="nearest")
        below[0].set_visible(False)
        for place in range(len(depths)):
            above[1 + place].imshow(colors[place, number], interpolation="nearest")
            veil = np.full((*foreground.shape[2:], 4), 0.5)  # grey, which is seen on dark images and on light ones
            veil[..., 3] = np.where(foreground[place, number], 0, 0.9)
            below[1 + place].imshow(pixels, interpolation="nearest")
            below[1 + place].imshow(veil, extent=(-0.5, width - 0.5, height - 0.5, -0.5), interpolation="nearest")
    panels[0, 0].set_title("original", fontsize=9)
    for panel, depth, of_depth in zip(panels[0, 1:], depths, shares, strict=True):
        panel.set_title(f"depth {depth}\n{100 * of_depth.sum():.0f} %", fontsize=9)
    bare(*panels.flat)
    figure.suptitle(
        "patch features: three principal components as red, green, blue (%: their share\n"
        "of the variance); below, the patches where the first one is above its mean",
        fontsize=10,
    )
    return figure


def plot_similarity(images: NDArray[np.uint8], similarity: NDArray, patches: Sequence[int]) -> Figure:
    """A row for each image: it, and how like each of its patches is to the one in the frame.

    Args:
        images: (B, H, W, 3).
        similarity: (B, P, h, w), cosines.
        patches: which patch each map starts from, counted row by row.
    """
    across, rows, (height, width) = 1 + len(patches), len(images), images.shape[1:3]
    side = min(1.4, (WIDTH - 0.8) / across)
    size = side * across + 0.8, max(LEAST, 0.6 + side * rows * height / width)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, across, squeeze=False)
    edges = (-0.5, width - 0.5, height - 0.5, -0.5)
    for line, pixels, maps in zip(panels, images, similarity, strict=True):
        line[0].imshow(pixels, interpolation="nearest")
        for panel, patch, cosines in zip(line[1:], patches, maps, strict=True):
            shown = panel.imshow(
                cosines, cmap=PALETTE, vmin=similarity.min(), vmax=1, extent=edges, interpolation="nearest"
            )
            frame(panel, patch, maps.shape[1:], (height, width))
    bare(*panels.flat)
    figure.colorbar(shown, ax=panels, label="cosine similarity", shrink=min(1, 2 / rows))
    figure.suptitle("features of all patches, compared with that of the patch in the frame", fontsize=10)
    return figure


def plot_neighbours(
    queries: NDArray[np.uint8],
    images: NDArray[np.uint8],
    hosts: NDArray[np.uint8],
    grid: tuple[int, int],
    patch: int,
    numbers: dict[str, NDArray],
) -> Figure:
    """Two rows for each query (B, H, W, 3): its nearest images, and those with the patches that are nearest to its own.

    Args:
        images, hosts: (B, k, H, W, 3).
        grid: rows and columns of patches.
        patch: of the queries, counted row by row.
        numbers: `image_similarity`, `patch_similarity` and `patches`, (B, k).
    """
    count, across, (height, width) = len(queries), 1 + images.shape[1], queries.shape[1:3]
    side = min(1.2, WIDTH / across)
    tall = side * height / width + 0.18
    figure = Figure(figsize=(side * across + 0.3, 0.6 + 2 * count * tall), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01)
    panels = figure.subplots(2 * count, across, squeeze=False)
    for number, pixels in enumerate(queries):
        above, below = panels[2 * number], panels[2 * number + 1]
        above[0].imshow(pixels, interpolation="nearest")
        below[0].imshow(pixels, interpolation="nearest")
        frame(below[0], patch, grid, (height, width))
        for place in range(across - 1):
            above[1 + place].imshow(images[number, place], interpolation="nearest")
            below[1 + place].imshow(hosts[number, place], interpolation="nearest")
            frame(below[1 + place], int(numbers["patches"][number, place]), grid, (height, width))
            for panel, kind in ((above[1 + place], "image"), (below[1 + place], "patch")):
                panel.set_title(f"{numbers[f'{kind}_similarity'][number, place]:.2f}", fontsize=7, pad=2)
    bare(*panels.flat)
    heading = "left: a held-out image; above, the others that are nearest by cosine;\nbelow, those with the patches "
    figure.suptitle(f"{heading}that are nearest to the patch in the frame", fontsize=10)
    return figure


def frame(panel, patch: int, grid: Sequence[int], size: Sequence[int]) -> None:
    """Draw a frame around a patch, counted row by row, of an image (H, W)."""
    tall, wide = size[0] / grid[0], size[1] / grid[1]
    corner = patch % grid[1] * wide - 0.5, patch // grid[1] * tall - 0.5
    for color, thick in (("black", 2.4), ("white", 1.2)):  # seen on dark and on light
        panel.add_patch(Rectangle(corner, wide, tall, fill=False, edgecolor=color, linewidth=thick))


def plot_segmentation(images: NDArray[np.uint8], columns: dict[str, NDArray[np.int64]], classes: int) -> Figure:
    """A row for each image (B, H, W, 3): it, its mask, and what was predicted, each (B, H, W); -1 does not count."""
    across, rows, (height, width) = 1 + len(columns), len(images), images.shape[1:3]
    side = min(1.6, WIDTH / across)
    figure = Figure(figsize=(side * across + 0.3, 0.6 + side * rows * height / width), layout="constrained")
    panels = figure.subplots(rows, across, squeeze=False)
    colors = matplotlib.colormaps["tab20" if classes > 2 else "cividis"].with_extremes(bad="0.9")
    for row, (line, pixels) in enumerate(zip(panels, images, strict=True)):
        line[0].imshow(pixels, interpolation="nearest")
        for panel, of_column in zip(line[1:], columns.values(), strict=True):
            numbers = of_column[row] if classes <= 20 else np.where(of_column[row] < 0, -1, of_column[row] % 20)
            shown = np.ma.masked_less(numbers, 0)
            panel.imshow(shown, cmap=colors, vmin=0, vmax=min(classes, 20) - 1, interpolation="nearest")
    for panel, title in zip(panels[0], ["original", *columns], strict=True):
        panel.set_title(title, fontsize=9)
    bare(*panels.flat)
    figure.suptitle("classes of held-out images, from features of patches", fontsize=10)
    return figure


def bare(*panels) -> None:
    """Pictures need no ticks."""
    for panel in panels:
        panel.set(xticks=[], yticks=[])


def plot_series(
    lines: dict[str, tuple[Sequence[float], Sequence[float]]],
    label: str,
    scale: str = "linear",
    percent: bool = False,
    across: str = "updates",
) -> Figure:
    """What a run logged: name -> (steps, values).

    Args:
        label: of the values.
        percent: the values are shares.
        across: what the steps are.
    """
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, (steps, values)) in enumerate(lines.items()):
        shown = 100 * np.asarray(values, float) if percent else values
        marker = MARKERS[number % len(MARKERS)] if len(steps) <= 30 else None
        axes.plot(steps, shown, color=SERIES[number % len(SERIES)], marker=marker, ms=3.5, lw=1.6, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set(xlabel=across, ylabel=f"{label} (%)" if percent else label, yscale=scale)
    if scale == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if len(lines) > 1:
        above = dict(loc="lower left", bbox_to_anchor=(0, 1)) if len(lines) > 4 else {}  # it would lie over lines
        axes.legend(fontsize=7.5, ncols=1 + 2 * bool(above), **above)
    return figure


def plot_map(places: NDArray, labels: NDArray | None) -> Figure:
    """Images on a plane, places (N, 2), coloured by class (N,) where there is one; -1: none."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    classes = [] if labels is None else [each for each in np.unique(labels) if each >= 0]
    others = np.ones(len(places), bool) if labels is None else labels < 0
    axes.scatter(*places[others].T, s=12, color="0.55", alpha=0.7, linewidths=0)
    colors = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, max(1, len(classes))))
    for number, each in enumerate(classes):
        chosen, marker = places[labels == each], MARKERS[number % len(MARKERS)]
        axes.scatter(*chosen.T, s=16, color=[colors[number]], marker=marker, linewidths=0, label=f"class {each}")
    axes.set(xticks=[], yticks=[], xlabel="first principal component", ylabel="second")
    axes.spines[["top", "right"]].set_visible(False)
    if 0 < len(classes) <= 24:
        axes.legend(fontsize=7, ncols=1 + len(classes) // 12, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


Curves = dict[str, dict[str, dict[float, dict[str, float]]]]
"""Panel -> line -> x -> mean and standard deviation of an accuracy."""


def plot_by_depth(by_depth: dict[int, dict[str, dict[str, float]]], key: str) -> Figure:
    """Depth -> value of `key` -> accuracy on test images (of the readings of patches: mean IoU)."""
    names = next(iter(by_depth.values()))
    lines = {f"{key} {name}": {depth: of[name] for depth, of in by_depth.items()} for name in names}
    return plot_depths({"": lines}, "test mean IoU (%)" if key == "reading" else "test accuracy (%)")


def plot_depths(curves: Curves, label: str = "accuracy on the dev split (%)") -> Figure:
    """Evaluation -> encoder -> depth -> accuracy; an encoder with one depth is a line across."""
    figure, panels = side_by_side(curves, "depth (blocks)")
    names = list(dict.fromkeys(name for encoders in curves.values() for name in encoders))
    for panel, encoders in zip(panels, curves.values(), strict=True):
        for name, of_depth in encoders.items():
            color = LINES[names.index(name) % len(LINES)]
            if len(of_depth) == 1:
                panel.axhline(100 * next(iter(of_depth.values()))["mean"], linestyle="--", color=color, label=name)
            else:
                draw_line(panel, of_depth, name, color, MARKERS[names.index(name) % len(MARKERS)])
                panel.set_xticks(list(of_depth))
    panels[0].set_ylabel(label)
    drawn = {name: line for panel in panels for line, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def plot_lines(curves: Curves, label: str) -> Figure:
    """Evaluation -> case -> x -> accuracy; the x-axis is logarithmic."""
    figure, panels = side_by_side(curves, label)
    for panel, cases in zip(panels, curves.values(), strict=True):
        for number, (name, of_place) in enumerate(cases.items()):
            color = LINES[number % len(LINES)]
            draw_line(panel, of_place, name, color, MARKERS[number % len(MARKERS)])
        panel.set_xscale("log")
        ticks = apart(sorted({place for of_place in cases.values() for place in of_place if place > 0}))
        names = [f"{place:,.0f}" if place >= 100 else f"{place:.3g}" for place in ticks]
        panel.set_xticks(ticks, names, fontsize=7)
        panel.minorticks_off()
        if any(cases):
            panel.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))  # not over the bars
    panels[0].set_ylabel("accuracy (%)")
    return figure


def apart(places: list[float]) -> list[float]:
    """Of ascending places those that a logarithmic axis has room to name: 6 % of its length from the one before."""
    kept = places[:1]
    for place in places[1:]:
        if math.log(place / kept[-1]) >= 0.06 * math.log(places[-1] / places[0]):
            kept.append(place)
    return kept


def side_by_side(curves: Curves, label: str) -> tuple[Figure, list]:
    """A figure with a panel for each key, four in a row."""
    rows = -(-len(curves) // 4)
    size = (WIDTH, 4.4) if len(curves) == 1 else (WIDTH * 1.2, 0.8 + 2.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)  # a panel's tick labels keep clear of the one before
    panels = list(figure.subplots(rows, min(4, len(curves)), squeeze=False).flat)
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    for panel, name in zip(panels, curves, strict=False):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(label, fontsize=9)
        panel.grid(alpha=0.3)
    return figure, panels[: len(curves)]


def draw_line(panel, numbers: dict[float, dict[str, float]], name: str, color, marker: str) -> None:
    """x -> mean and standard deviation, as a line and bars: a band would shrink towards what was measured once."""
    means, spreads = (np.array([100 * each[key] for each in numbers.values()]) for key in ("mean", "std"))
    panel.errorbar(list(numbers), means, spreads, marker=marker, ms=5, color=color, label=name)


def plot_bars(numbers: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """A panel for each column, a bar for each encoder with its standard deviation."""
    columns = list(dict.fromkeys(column for of in numbers.values() for column in of))
    figure = Figure(figsize=(2.2 + 2.2 * len(columns), 0.8 + 0.4 * len(numbers)), layout="constrained")
    panels = figure.subplots(1, len(columns), sharex=True, sharey=True, squeeze=False)[0]
    colors = PALETTE(np.linspace(0, 0.9, len(numbers)))
    for panel, column in zip(panels, columns, strict=True):
        cells = [{"mean": np.nan, "std": 0} | of.get(column, {}) for of in numbers.values()]
        means, spreads = ([100 * cell[key] for cell in cells] for key in ("mean", "std"))
        bars = panel.barh(list(numbers), means, xerr=spreads, color=colors)
        panel.bar_label(bars, fmt="%.1f", padding=4, fontsize=8)
        panel.set(title=textwrap.fill(column, 20), xlabel="accuracy (%)")
        panel.margins(x=0.28)
    panels[0].invert_yaxis()
    return figure

"""Tables and the picture of a segmentation report."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evaluation.config import SegmentationConfig
from evaluation.figures.images import plot_segmentation
from evaluation.figures.markdown import markdown_table
from evaluation.metrics.scoring import PIXELS, evenly_spaced, summarize_values
from evaluation.patches.extraction import masked_views
from evaluation.patches.features import PatchEncoder
from evaluation.patches.masks import MaskedImages
from mpp.features.reconstructions import as_rgb, stretch
from mpp.runtime.randomness import FIXED_VIEW


def reading_table(lines: dict[str, list[dict[str, Any]]], readings: Sequence[str]) -> str:
    """Mean IoU and pixel accuracy of each reading, a line for each encoder; the mean over seeds.

    Args:
        lines: results of each encoder or baseline, by name; the case `all` stands for all readings.
    """
    headings = [f"%{of_seeds(lines.values())}", "depth"]
    for reading in readings:
        headings += [f"{reading} mIoU", f"{reading} pixels"]
    rows = []
    for name, results in lines.items():
        cells = [name, str(results[0].get("depth", "-"))]
        for reading in readings:
            of_reading = [result for result in results if result["case"] in (reading, "all")]
            for score in ("accuracy", "pixel_accuracy"):
                values = [result[score] for result in of_reading]
                cells.append(PIXELS.text_of_scores(summarize_values(values)))
        rows.append(cells)
    return markdown_table(headings, rows)


def iou_table(results: list[dict[str, Any]], names: Sequence[str] = ()) -> str:
    """IoU of each class, of each reading; the mean over seeds; without numbers that no pixel has.

    Args:
        names: of the classes by their number in the masks, as far as they are known.
    """
    by_case: dict[str, list[list[float | None]]] = {}
    for result in results:
        by_case.setdefault(result["case"], []).append(result["iou"])
    rows = []
    for number in range(len(results[0]["iou"])):
        cells = []
        for seeds in by_case.values():
            ious = [of_seed[number] for of_seed in seeds if of_seed[number] is not None]
            cells.append(PIXELS.text_of_scores(summarize_values(ious)) if ious else "-")
        if any(cell != "-" for cell in cells):
            name = names[number] if number < len(names) else f"class {number}"
            rows.append([name, *cells])
    return markdown_table([f"IoU (%){of_seeds([results])}", *by_case], rows)


def of_seeds(lines: Iterable[list[dict[str, Any]]]) -> str:
    """The end of a heading over means of several seeds: ", means of 3 seeds"; "" of one."""
    seeds = {result["seed"] for results in lines for result in results if "seed" in result}
    return f", means of {len(seeds)} seeds" if len(seeds) > 1 else ""


def draw_predicted_masks(
    encoder: PatchEncoder,
    test: MaskedImages,
    predictions: dict[str, Tensor],
    config: SegmentationConfig,
) -> Figure:
    """Image, mask and predictions of `config.images` held-out images, evenly spaced.

    Args:
        predictions: predicted masks of all held-out images, by reading.
    """
    chosen = evenly_spaced(len(test.images), config.images)
    views = masked_views(encoder, test, config.data)
    samples = [views[FIXED_VIEW, index] for index in chosen.tolist()]
    images = torch.stack([sample.images for sample in samples])
    masks = torch.stack([sample.labels for sample in samples])
    columns = {"mask": masks.long().numpy()}
    for reading, predicted in predictions.items():
        columns[reading] = predicted[torch.from_numpy(chosen)].long().numpy()
    classes = 1 + max(int(column.max()) for column in columns.values())
    return plot_segmentation(as_rgb(stretch(images)).movedim(1, -1).numpy(), columns, classes)

"""Pictures of what an encoder has learned, each with the numbers behind it.

    python evaluation/visualize.py --encoder runs/birds

Writes PNGs, `.npz` files with their numbers, and TensorBoard events into one folder. The pictures are those
of the paper's section 4.5 and appendices D.7 and D.8, and some more. One that an encoder does not allow is left out,
and the reason is printed: a ResNet has no attention, and only a pre-training run has the head that predicts colours.

Attention weights are read one block at a time. ViT-L/16 at 384 pixels took at most 2.4 GB, 1.2 GB of it weights, for

    --encoder vit_large_patch16_384 --random true
    --pictures '[filters, positions, attention_distance, attention_rollout]'

B images, h x w patches, K corrupted patches, D width.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from einops import rearrange
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from evaluation.config import VisualizeConfig
from evaluation.figures.charts import DPI, WIDTH, figure_style, plot_series
from evaluation.figures.images import grid_of_images
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder, patch_grid
from evaluation.frozen.features import extract_split, name_unreadable, views_for
from evaluation.frozen.results import report_path, report_suffix
from evaluation.frozen.run_images import LoadedSplits, load_images_of, parse_and_load
from evaluation.metrics.scoring import evenly_spaced
from evaluation.patches.features import patch_features
from evaluation.pictures import (
    attention_distance,
    attention_rollout,
    colors_of,
    components_by_depth,
    filter_components,
    patch_distances,
    patch_similarity,
    position_similarity,
    spread_patches,
)
from mpp.config import Grid, require
from mpp.config.imports import COPIES, changed_imports, imported, require_imports
from mpp.data.dataset import ImageDataset
from mpp.data.loader import fixed_view_batches
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable, UserError
from mpp.features.neighbours import find_other_neighbours
from mpp.features.probe import MAX_IMAGES_FOR_RANK
from mpp.features.reconstructions import COLUMNS, as_rgb, prediction_columns, stretch
from mpp.pretrain import Pretraining, is_pretraining, reopen
from mpp.runtime.files import complete
from mpp.runtime.messages import counted, progress_bar, warn
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import BEST, run_of

IMAGES_PER_BATCH = 4  # attention weights of a block are (B, heads, T, T): 85 MB for ViT-L at 384 pixels
FILTERS_SHOWN = 28  # as in the paper's figure
FILTERS_IN_A_ROW = 7
ROLLOUTS_IN_A_ROW = 3
NEIGHBOURS_SHOWN = 5
MAX_DEPTHS_OF_PCA = 6  # more would be too small to see


class Subject(NamedTuple):
    """An encoder on its device, its held-out images, and the settings of the pictures."""

    config: VisualizeConfig
    accelerator: Accelerator
    encoder: FrozenEncoder | ColorBaseline
    held_out: ImageDataset

    @property
    def run(self) -> Path:
        """The run folder, also where `encoder` names the encoder/ in it."""
        return run_of(Path(self.config.frozen.encoder))

    def choose(self, count: int) -> ImageDataset:
        """A seeded choice of held-out images."""
        return self.held_out.choose(count, self.config.data.cut_seed)

    def batches(self, count: int) -> Iterator[Tensor]:
        """A seeded choice of held-out images as the encoder's input, in batches (B, C, H, W) on its device."""
        views = views_for(self.encoder, self.choose(count), self.config.data)
        for batch in fixed_view_batches(views, self.config.data.batch_size or IMAGES_PER_BATCH):
            for failure in batch.unreadable:
                tqdm.write(f"warning: unreadable image, replaced by another: {failure}")
            yield batch.images.to(self.accelerator.device)

    def examples(self, compute: Callable[[Tensor], Sequence[Tensor]]) -> tuple[NDArray[np.uint8], list[Tensor]]:
        """Pixels (B, H, W, 3) of the images that a picture shows, and the results of a function of their batches."""
        pixels, results = [], []
        for images in self.batches(self.config.images):
            with self.accelerator.autocast():
                results.append(compute(images))
            pixels.append(self.to_pixels(images))
        return np.concatenate(pixels), [torch.cat(parts) for parts in zip(*results, strict=True)]

    def to_pixels(self, images: Tensor) -> NDArray[np.uint8]:
        """Images (B, C, H, W) for display, (B, H, W, 3). Deep images are stretched: see `stretch`."""
        return as_rgb(stretch(images), self.config.bands).movedim(1, -1).cpu().numpy()


def load_subject(config: VisualizeConfig, loaded: LoadedSplits | None = None) -> Subject:
    """Load an encoder and its held-out images.

    Raises:
        UserError: there is no such encoder, or there are no such images.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "pictures are drawn")
    run = run_of(Path(config.frozen.encoder))
    require_imports(run)
    copied = imported if (run / COPIES).is_dir() else {}  # a run may use no code of the user
    for name in changed_imports(run, copied):
        warn(f"{name} is not as in {run / COPIES}: pictures come from the code of today")
    largest_band = max(config.bands or (1,))
    allowed = f"from 1 to {config.data.channels}: data.channels"
    require(largest_band <= config.data.channels, "bands", largest_band, allowed)
    encoder = open_frozen_encoder(config.frozen, config.data).to(accelerator.device)
    _, held_out = load_images_of(config.frozen.encoder, config.data, loaded)
    return Subject(config, accelerator, encoder, held_out)


Drawing = tuple[Figure, dict[str, Any]]
"""A figure, and the numbers in it, which are arrays or become some."""


# --- predictions ---


def draw_predictions(subject: Subject) -> Drawing:
    """Original, corrupted, predicted and true patches of held-out images, and the entropy of the predictions.

    Regressions have no entropy. Pixels normalised by patch are drawn with each patch's true mean and deviation, which
    the model does not predict; `hog` and `features` are grey.
    """
    task = open_pretraining(subject)
    with subject.accelerator.autocast():
        predictions, targets, images, corruption = task.predict(task.model, range(len(task.held_out)))
    columns = prediction_columns(task.objective, predictions, targets, images, corruption)
    original, seen, predicted, true = columns.movedim(2, -1).cpu().numpy()
    numbers = dict(original=original, seen=seen, predicted=predicted, true=true)
    numbers |= {name: getattr(corruption, name).cpu().numpy() for name in ("positions", "kinds")}
    titles, shown = [*COLUMNS], [*as_rgb(columns, subject.config.bands).movedim(2, -1).cpu().numpy()]
    entropy = task.objective.entropy(predictions)  # (B, K, cells)
    if entropy is not None:
        numbers["entropy"] = entropy.cpu().numpy()
        titles.append("entropy")
        shown.append(place_on_grid(entropy, corruption.positions, task.grid).cpu().numpy())
    title = f"held-out images, predicted from their visible patches ({task.objective.shown})"
    bar = "" if entropy is None else "entropy of the prediction (bits)"
    return grid_of_images(side_by_side(*shown), len(shown), title, titles, bar, (0, None)), numbers


def side_by_side(*columns: Iterable[NDArray]) -> list[NDArray]:
    """The first image of each column, then the second ones, and so on."""
    return list(chain(*zip(*columns, strict=True)))


def open_pretraining(subject: Subject) -> Pretraining:
    """The pre-training task of the subject's run, with the head that predicts, and the images to draw held out."""
    config = subject.config
    frozen = config.frozen
    has_other_weights = frozen.random or frozen.checkpoint or Path(frozen.encoder).name == BEST
    if has_other_weights or not is_pretraining(subject.run):
        raise Unavailable("only the folder of a pre-training run has the head that predicts")
    try:
        return reopen(subject.run, config.data, config.images, subject.accelerator)
    except UserError as error:  # such as missing checkpoints
        raise Unavailable(str(error)) from error


def place_on_grid(values: Tensor, positions: Tensor, grid: Grid) -> Tensor:
    """Maps of values that some patches have.

    Args:
        values: of the cells of each corrupted patch, (B, K, cells).
        positions: of these patches, (B, K).
    Returns:
        (B, h, w) in cells; NaN at the other patches.
    """
    count, _, cells = values.shape
    placed = values.new_full((count, math.prod(grid), cells), math.nan)
    placed.scatter_(1, positions[..., None].expand_as(values), values)
    return rearrange(placed, "b (r c) (y x) -> b (r y) (c x)", r=grid[0], y=round(cells**0.5))


# --- weights ---


def draw_filters(subject: Subject) -> Drawing:
    """The first principal components of the filters on pixels, each in its own range."""
    components, shares = filter_components(subject.encoder.model, FILTERS_SHOWN)
    numbers = {"components": components.astype(np.float32), "variance_share": shares.astype(np.float32)}
    largest = np.abs(components).max((1, 2, 3), keepdims=True)
    scaled = torch.from_numpy(255 * (0.5 + components / (2 * largest)))
    pixels = as_rgb(scaled, subject.config.bands).movedim(1, -1).numpy()
    title = f"{len(shares)} principal components of the filters on pixels, {100 * shares.sum():.0f}% of the variance"
    titles = [f"{100 * share:.1f}%" for share in shares]
    return grid_of_images(pixels, min(FILTERS_IN_A_ROW, len(pixels)), title, titles), numbers


def draw_positions(subject: Subject) -> Drawing:
    """Similarity of each patch's position to all positions, as a map in the place of the patch."""
    similarity = position_similarity(subject.encoder.model).numpy()  # (h, w, h, w)
    gap = (0, max(1, len(similarity) // 8))  # between two maps, in patches
    padded = np.pad(similarity, ((0, 0), (0, 0), gap, gap), constant_values=np.nan)
    mosaic = rearrange(padded, "r c h w -> (r h) (c w)")
    title = "positions: in the place of each patch, its similarity to all patches"
    limits = min(0, similarity.min()), None
    return grid_of_images([mosaic], 1, title, (), "similarity", limits, WIDTH), {"similarity": similarity}


# --- attention ---


def draw_attention_distance(subject: Subject) -> Drawing:
    """Mean attention distance of each head, by depth, without attention to [class]; and that of uniform attention."""
    encoder = subject.encoder
    count = min(subject.config.attention_images, len(subject.held_out))
    uniform = float(patch_distances(encoder).mean())
    batches = progress_bar(subject.batches(count), desc="attention", unit="batch")
    with subject.accelerator.autocast():
        distances = attention_distance(encoder, batches).numpy()  # (depth, heads)
    depths = range(1, 1 + len(distances))
    lines = {
        f"mean over the heads and {count} images": dict(zip(depths, distances.mean(1), strict=True)),
        "uniform attention": dict.fromkeys(depths, uniform),
    }
    figure = plot_series(lines, "mean attention distance (pixels)", "depth (blocks)")
    figure.axes[0].plot(depths, distances, "o", color="0.6", markersize=3, zorder=1)  # a dot for each head
    figure.axes[0].set_ylim(0, None)
    numbers = {"images": count, "uniform_attention": uniform, "distance_by_depth_and_head": distances}
    return figure, numbers


def draw_rollout(subject: Subject) -> Drawing:
    """Attention rollout: the share of each patch in the output; heads averaged, layers multiplied."""
    residual, start = subject.config.residual, subject.config.rollout_from
    pixels, (rollout,) = subject.examples(lambda images: [attention_rollout(subject.encoder, images, residual, start)])
    source = "[class]" if start == "class" else "the mean of the patches"
    title = f"attention rollout from {source}{', with the residual' if residual else ''}"
    numbers = {"images": pixels, "rollout": rollout.numpy()}
    shown = side_by_side(pixels, numbers["rollout"])
    columns = min(len(shown), 2 * ROLLOUTS_IN_A_ROW)
    return grid_of_images(shown, columns, title, (), "multiple of uniform attention"), numbers


# --- features of patches ---


def draw_pca(subject: Subject) -> Drawing:
    """Principal components of patch features as colours, by depth."""
    last_depth = len(subject.encoder.stages)
    depths = np.linspace(1, last_depth, min(MAX_DEPTHS_OF_PCA, last_depth)).round().astype(int)
    pixels, features = subject.examples(lambda images: patch_features(subject.encoder, images, depths.tolist()))
    coordinates, shares = components_by_depth(features)
    colors = colors_of(coordinates)
    titles = [f"depth {depth}: {100 * share:.0f}%" for depth, share in zip(depths, shares.sum(1), strict=True)]
    title = "patch features: three principal components as red, green, blue (%: their share of the variance)"
    figure = grid_of_images(side_by_side(pixels, *colors), 1 + len(depths), title, ["original", *titles])
    numbers = {"colors": colors, "shares": shares, "coordinates": coordinates, "images": pixels, "depths": depths}
    return figure, numbers


def draw_similarity(subject: Subject) -> Drawing:
    """Similarity of some patches (`patches`, or some over the whole image) to all patches of their image."""
    grid, last_depth = patch_grid(subject.encoder.model), len(subject.encoder.stages)
    patches = list(subject.config.patches or spread_patches(grid))
    allowed = f"below {math.prod(grid)}, the patches of an image"
    require(max(patches) < math.prod(grid), "patches", max(patches), allowed)
    pixels, (features,) = subject.examples(lambda images: patch_features(subject.encoder, images, [last_depth]))
    similarity = patch_similarity(features, patches).numpy()
    titles = ["original", *(f"row {patch // grid[1]}, column {patch % grid[1]}" for patch in patches)]
    title = "cosine similarity of all patches of an image to one of them, by its row and column from 0"
    shown = side_by_side(pixels, *similarity.swapaxes(0, 1))
    figure = grid_of_images(shown, len(titles), title, titles, "cosine similarity", (None, 1))
    return figure, {"images": pixels, "patches": np.array(patches), "similarity": similarity}


def draw_neighbours(subject: Subject) -> Drawing:
    """Held-out images with the other images whose features are nearest."""
    gallery, last_depth = subject.choose(MAX_IMAGES_FOR_RANK), len(subject.encoder.stages)
    views = views_for(subject.encoder, gallery, subject.config.data)
    with subject.accelerator.autocast():
        split = extract_split(
            views,
            lambda images: subject.encoder(images, "mean", [last_depth]),
            subject.accelerator,
            progress="neighbours",
        )
    (features,) = split.by_depth
    if len(features) < 2:
        raise Unavailable("there is one held-out image")
    if split.unreadable:
        warn(f"{counted(len(split.unreadable), 'image')} left out of neighbours: {name_unreadable(split.unreadable)}")
    nearest = find_other_neighbours(torch.from_numpy(features), NEIGHBOURS_SHOWN)
    queries = evenly_spaced(len(features), subject.config.images)
    shown = split.kept[np.column_stack([queries, nearest.index[queries]])]  # (B, 1 + k), the query first
    similarity = nearest.similarity[queries].numpy()
    pixels = subject.to_pixels(torch.stack([views[FIXED_VIEW, index].images for index in shown.flatten().tolist()]))
    titles = [text for row in similarity for text in ["", *map("{:.2f}".format, row)]]
    title = f"held-out images, and the others of {len(features)} whose features are nearest, with the cosine"
    names = np.vectorize(gallery.image_name)(shown)
    return grid_of_images(pixels, shown.shape[1], title, titles), {"names": names, "image_similarity": similarity}


PICTURES: dict[str, Callable[[Subject], Drawing]] = {
    "predictions": draw_predictions,
    "filters": draw_filters,
    "positions": draw_positions,
    "attention_distance": draw_attention_distance,
    "attention_rollout": draw_rollout,
    "pca": draw_pca,
    "similarity": draw_similarity,
    "neighbours": draw_neighbours,
}
"""All pictures by name. They raise `Unavailable` with the reason where an encoder does not allow them."""


def draw_pictures(config: VisualizeConfig, loaded: LoadedSplits | None = None) -> dict[str, str]:
    """Draw the pictures that the encoder allows into their folder; return the reasons why others are left out.

    Raises:
        UserError: no such encoder or images.
    """
    folder = pictures_folder(config)
    require(not folder.exists() or folder.is_dir(), "out", folder, "a folder")
    subject = load_subject(config, loaded)
    missing = {}
    with deaths_explained(), SummaryWriter(str(folder)) as writer:
        for name in config.pictures:
            try:
                figure, numbers = PICTURES[name](subject)
            except Unavailable as error:
                missing[name] = str(error)
                continue
            with figure_style(), complete(folder / f"{name}.png") as partial:
                figure.savefig(partial, format="png", dpi=DPI)
            np.savez_compressed(folder / f"{name}.npz", **numbers)
            writer.add_figure(name, figure)
    return missing


def visualize(config: VisualizeConfig, loaded: LoadedSplits | None = None) -> list[str]:
    """Draw the pictures that the encoder allows; return their names.

    Raises:
        UserError: no such encoder or images, or nothing to draw.
    """
    missing = draw_pictures(config, loaded)
    for name, reason in missing.items():
        print(f"no {name}: {reason}")
    drawn = [name for name in config.pictures if name not in missing]
    require(len(drawn) > 0, "pictures", ", ".join(missing), "a picture that this encoder supports")
    print(f"wrote {pictures_folder(config)}: {', '.join(f'{name}.png' for name in drawn)}, with their numbers")
    return drawn


def pictures_folder(config: VisualizeConfig) -> Path:
    """The folder of the pictures: `out`, or next to the encoder, where its name says which images are shown."""
    if config.out:
        return Path(config.out)
    return report_path(None, config.frozen.encoder, f"pictures{report_suffix(config)}")


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Draw with the settings of the command line, or of `arguments`."""
    return visualize(*parse_and_load(VisualizeConfig, arguments))


if __name__ == "__main__":
    run_main(main)

"""Pictures of what an encoder has learned, each with its numbers.

The figures are those of the paper's section 4.5 and appendices D.7 and D.8, and some more. Drawing raises `Unavailable`
with the reason where an encoder does not allow it.

B images, h x w patches, K corrupted patches.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from evaluation import fewshot
from evaluation.config import FewshotConfig
from evaluation.figures import charts
from evaluation.figures import images as image_figures
from evaluation.figures.style import DPI, figure_style
from evaluation.frozen.encoder import patch_grid
from evaluation.frozen.features import extract_labelled_features, views_for
from evaluation.frozen.probing import evaluate_by_depth
from evaluation.frozen.results import write_json
from evaluation.frozen.run_images import indices_in_split, is_stream_of_run
from evaluation.metrics.scoring import without_outcomes
from evaluation.patches.features import patch_features
from evaluation.pictures.attention import attention_distance, attention_rollout, patch_distances, patch_spacing
from evaluation.pictures.pca import components_by_depth
from evaluation.pictures.positions import filter_components, position_similarity
from evaluation.pictures.similarity import patch_similarity, search_gallery, spread_patches
from evaluation.pictures.subject import Subject, concatenate
from mpp.config import Grid, flatten, rebuild, require
from mpp.data.labels import AUTO
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset
from mpp.errors import Unavailable, UserError
from mpp.features.metrics import effective_rank
from mpp.features.probe import MAX_IMAGES_FOR_RANK
from mpp.features.reconstructions import as_rgb, prediction_columns
from mpp.pretrain import Pretraining, is_pretraining, reopen
from mpp.runtime.messages import progress_bar
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.weights import BEST

FILTERS_SHOWN = 28  # as in the paper's figure
NEIGHBOURS_SHOWN = 5
MAX_DEPTHS_OF_PCA = 6  # more would be too small to see


class Drawing(NamedTuple):
    """A figure, and the numbers in it."""

    figure: Figure
    numbers: dict[str, Any]

    @figure_style()
    def write(self, folder: Path, name: str) -> None:
        """Write NAME.png, and NAME.npz where all numbers are arrays, otherwise NAME.json."""
        self.figure.savefig(folder / f"{name}.png", dpi=DPI)
        if all(isinstance(value, np.ndarray) for value in self.numbers.values()):
            np.savez_compressed(folder / f"{name}.npz", **self.numbers)
        else:
            write_json(folder / f"{name}.json", self.numbers)


def pixels_and_results(
    subject: Subject, compute: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[NDArray[np.uint8], list[Tensor]]:
    """Pixels (B, H, W, 3) of all images to draw, and the results of a function of their batches, for all images."""
    batches = []
    for images in subject.image_batches(subject.config.images):
        with subject.accelerator.autocast():
            results = compute(images)
        batches.append((subject.to_pixels(images), *results))
    pixels, *all_results = concatenate(batches)
    return pixels.numpy(), all_results


def draw_predictions(subject: Subject) -> Drawing:
    """Original, corrupted, predicted and true patches of held-out images, and the entropy of the predictions.

    `pixels`, `hog` and `features` are regressions and have no entropy. Pixels normalised by patch are drawn with each
    patch's true mean and deviation, which the model does not predict; `hog` and `features` are grey.
    """
    task = open_pretraining(subject)
    with subject.accelerator.autocast():
        predictions, targets, images, corruption = task.predict(task.model, range(len(task.held_out)))
    columns = prediction_columns(task.objective, predictions, targets, images, corruption)
    original, seen, predicted, true = columns.movedim(2, -1).cpu().numpy()
    numbers = {
        "original": original,
        "seen": seen,
        "predicted": predicted,
        "true": true,
        "positions": corruption.positions.cpu().numpy(),
        "kinds": corruption.kinds.cpu().numpy(),
    }
    entropy_map = None
    entropy = task.objective.entropy(predictions)  # (B, K, cells)
    if entropy is not None:
        numbers["entropy"] = entropy.cpu().numpy()
        entropy_map = place_on_grid(numbers["entropy"], numbers["positions"], task.grid)
    pixels = as_rgb(columns, subject.config.bands).movedim(2, -1).cpu().numpy()
    return Drawing(image_figures.plot_predictions(pixels, entropy_map, task.objective.shown), numbers)


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


def place_on_grid(values: NDArray, positions: NDArray, grid: Grid) -> NDArray[np.float32]:
    """Maps of values that some patches have.

    Args:
        values: of the cells of each corrupted patch, (B, K, cells).
        positions: of these patches, (B, K).
    Returns:
        (B, h, w) in cells; NaN at the other patches.
    """
    count, _, cells = values.shape
    rows, columns = grid
    cells_across = round(cells**0.5)
    placed = np.full((count, rows * columns, cells), np.nan, np.float32)
    np.put_along_axis(placed, positions[..., None].repeat(cells, -1), values, axis=1)
    return rearrange(placed, "b (r c) (y x) -> b (r y) (c x)", r=rows, y=cells_across)


def draw_filters(subject: Subject) -> Drawing:
    """The first principal components of the filters on pixels."""
    components, shares = filter_components(subject.encoder.model, FILTERS_SHOWN)
    largest = components.abs().amax((1, 2, 3), keepdim=True)
    pixels = as_rgb(255 * (0.5 + components / (2 * largest)), subject.config.bands).movedim(1, -1).numpy()
    numbers = {"components": components.numpy(), "variance_share": shares.numpy()}
    return Drawing(image_figures.plot_filters(pixels, numbers["variance_share"]), numbers)


def draw_positions(subject: Subject) -> Drawing:
    """Similarity of the positions of patches, as the encoder has learned it."""
    model = subject.encoder.model
    similarity = position_similarity(model).numpy()
    has_biases = getattr(model, "position", None) == "relative_bias"
    label = "bias of the logits, mean over heads and blocks" if has_biases else "cosine similarity"
    return Drawing(image_figures.plot_positions(similarity, label), {"similarity": similarity})


def draw_attention_distance(subject: Subject) -> Drawing:
    """Mean attention distance of each head, by depth, without attention to [class]; and that of uniform attention."""
    encoder = subject.encoder
    count = min(subject.config.attention_images, len(subject.held_out))
    distances = patch_distances(patch_grid(encoder.model), patch_spacing(encoder))
    uniform = float(distances.mean())
    batches = progress_bar(subject.image_batches(count), desc="attention", unit="batch")
    with subject.accelerator.autocast():
        by_depth_and_head = attention_distance(encoder, batches)
    figure = image_figures.plot_attention_distance(by_depth_and_head.numpy(), uniform, count)
    numbers = {
        "unit": "pixels",
        "images": count,
        "uniform_attention": uniform,
        "distance_by_depth_and_head": by_depth_and_head.tolist(),
    }
    return Drawing(figure, numbers)


def draw_rollout(subject: Subject) -> Drawing:
    """Attention rollout: the share of each patch in the output; heads averaged, layers multiplied."""
    residual = subject.config.residual
    start = rollout_start(subject)
    pixels, (rollout,) = pixels_and_results(
        subject, lambda images: [attention_rollout(subject.encoder, images, residual, start)]
    )
    numbers = {"images": pixels, "rollout": rollout.numpy()}
    return Drawing(image_figures.plot_rollout(pixels, numbers["rollout"], start, residual), numbers)


def rollout_start(subject: Subject) -> Literal["class", "patches"]:
    """The token that rollout starts from: [class] is informative only where it was trained."""
    config = subject.config
    if config.rollout_from != "auto":
        return config.rollout_from
    return "class" if subject.has_trained_class_token and not config.frozen.random else "patches"


def draw_pca(subject: Subject) -> Drawing:
    """Principal components of patch features as colours, and the foreground by the first one, by depth."""
    last_depth = len(subject.encoder.stages)
    depths = np.linspace(1, last_depth, min(MAX_DEPTHS_OF_PCA, last_depth)).round().astype(int)
    pixels, features_by_depth = pixels_and_results(
        subject, lambda images: patch_features(subject.encoder, images, depths.tolist())
    )
    by_depth = components_by_depth(features_by_depth)

    def over_depths(name: str) -> NDArray:
        return torch.stack([getattr(components, name) for components in by_depth]).numpy()

    numbers = {
        "colors": over_depths("colors"),
        "foreground": over_depths("foreground"),
        "shares": over_depths("variance_shares"),
        "coordinates": over_depths("coordinates"),
        "images": pixels,
        "depths": depths,
    }
    figure = image_figures.plot_components(pixels, numbers["colors"], numbers["foreground"], numbers["shares"], depths)
    return Drawing(figure, numbers)


def query_patches(subject: Subject) -> list[int]:
    """Patches to compare others with (`patches`, or some over the whole image), counted row by row from 0."""
    grid = patch_grid(subject.encoder.model)
    if subject.config.patches is None:
        return spread_patches(grid)
    patches = list(subject.config.patches)
    patch_count = math.prod(grid)
    require(max(patches) < patch_count, "patches", max(patches), f"below {patch_count}, the patches of an image")
    return patches


def draw_similarity(subject: Subject) -> Drawing:
    """Similarity of some patches to all patches of their image."""
    patches = query_patches(subject)
    pixels, (features,) = pixels_and_results(subject, lambda images: [subject.patch_features(images)])
    similarity = patch_similarity(features, patches).numpy()
    figure = image_figures.plot_similarity(pixels, similarity, patches)
    return Drawing(figure, {"images": pixels, "patches": np.array(patches), "similarity": similarity})


def draw_neighbours(subject: Subject) -> Drawing:
    """Held-out images with the nearest other images, and with the nearest patches in other images."""
    config = subject.config
    grid = patch_grid(subject.encoder.model)
    rows, columns = grid
    middle_patch = rows // 2 * columns + columns // 2
    patch = query_patches(subject)[0] if config.patches else middle_patch
    gallery = subject.choose(MAX_IMAGES_FOR_RANK)
    if len(gallery) < 2:
        raise Unavailable("there is one held-out image")
    queries = subject.choose(config.images)
    queries_in_gallery = np.searchsorted(indices_in_split(gallery), indices_in_split(queries)).tolist()
    gallery_batches = progress_bar(subject.image_batches(len(gallery)), desc="neighbours", unit="batch")
    query_images = torch.cat(list(subject.image_batches(config.images)))
    nearest = search_gallery(
        subject.patch_features, query_images, patch, gallery_batches, queries_in_gallery, NEIGHBOURS_SHOWN
    )
    numbers = {name: values.numpy() for name, values in nearest._asdict().items()}
    numbers["names"] = np.array([gallery.image_name(index) for index in range(len(gallery))])
    views = views_for(subject.encoder, gallery, config.data)
    figure = image_figures.plot_neighbours(
        subject.to_pixels(query_images).numpy(),
        pixels_of_views(subject, views, nearest.images),
        pixels_of_views(subject, views, nearest.hosts),
        grid,
        patch,
        numbers,
    )
    return Drawing(figure, numbers)


def pixels_of_views(subject: Subject, views: ViewDataset, indices: Tensor) -> NDArray[np.uint8]:
    """Images by their indices (B, k), for display: (B, k, H, W, 3)."""
    images = torch.stack([views[FIXED_VIEW, index].images for index in indices.flatten().tolist()])
    return subject.to_pixels(images).unflatten(0, indices.shape).numpy()


def draw_rank(subject: Subject) -> Drawing:
    """Effective rank of the features of images, by depth: `features/rank` of training."""
    depths = range(1, 1 + len(subject.encoder.stages))
    count = min(MAX_IMAGES_FOR_RANK, len(subject.held_out))
    feature_batches = []
    for images in progress_bar(subject.image_batches(count), desc="features", unit="batch"):
        with subject.accelerator.autocast():
            feature_batches.append(subject.encoder(images, subject.config.representation, depths))
    by_depth = concatenate(feature_batches)
    device = subject.accelerator.device
    ranks = {depth: effective_rank(rows, device) for depth, rows in zip(depths, by_depth, strict=True)}
    figure = charts.plot_series({"rank": ranks}, f"effective rank of {count} images", x_label="depth (blocks)")
    return Drawing(figure, {"images": count, "width": by_depth[-1].shape[1], "rank_by_depth": ranks})


def draw_accuracy_by_depth(subject: Subject) -> Drawing:
    """Few-shot accuracy by depth."""
    require_classes(subject)
    config = rebuild(FewshotConfig(), flatten(subject.config) | {"depth": "all", "out": None})
    try:
        groups = config.frozen, config.data, config.probe
        by_depth = extract_labelled_features(*groups, subject.accelerator).by_depth
    except UserError as error:  # such as several labels an image
        raise Unavailable(str(error)) from error
    if len(by_depth) == 1:
        raise Unavailable("this encoder has one depth")
    report = evaluate_by_depth(config, by_depth, lambda features: fewshot.evaluate(features, config), "shots")
    numbers = report | {"results": without_outcomes(report["results"])}
    return Drawing(
        charts.plot_by_depth(report["summary_by_depth"], "shots", charts.ScoreAxis("test accuracy (%)", 100)), numbers
    )


def require_classes(subject: Subject) -> None:
    """Raise Unavailable unless there are labels to evaluate features with."""
    if is_stream_of_run(subject.config.frozen.encoder, subject.config.data):
        raise Unavailable("the images are a stream; `mpp fewshot` loads all of them")
    if subject.held_out.labelled() is None:
        raise Unavailable("the images have no labels")
    train, _ = load_image_datasets(subject.config.data, label_kind=AUTO)
    labelled = train.labelled()
    if train.label_kind != "class":
        raise Unavailable("the labels are numbers, and not classes")
    if labelled is None or len(np.unique(labelled.labels)) < 2:
        raise Unavailable("all training images are of one class, or have no labels")


PICTURES: dict[str, Callable[[Subject], Drawing]] = {
    "predictions": draw_predictions,
    "filters": draw_filters,
    "positions": draw_positions,
    "attention_distance": draw_attention_distance,
    "attention_rollout": draw_rollout,
    "pca": draw_pca,
    "similarity": draw_similarity,
    "neighbours": draw_neighbours,
    "rank": draw_rank,
    "accuracy_by_depth": draw_accuracy_by_depth,
}
"""All pictures by name."""

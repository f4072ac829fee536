"""The pictures of an encoder: its predictions, filters, positions, attention and features, each with its numbers.

B images, T tokens (N patches and a prefix such as [class]), h x w patches, K corrupted ones, P queries, D width.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from einops import rearrange
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from torch import Tensor, nn

from evaluation.config import VisualizeConfig
from evaluation.figures.charts import WIDTH, plot_series
from evaluation.figures.images import grid_of_images, side_by_side
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, patch_grid
from evaluation.frozen.features import extract_split, views_for
from evaluation.metrics.scoring import evenly_spaced
from evaluation.patches.features import patch_features
from mpp.config import Grid, require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import fixed_view_batches
from mpp.data.views import ViewDataset
from mpp.errors import Unavailable, UserError
from mpp.features.neighbours import find_other_neighbours
from mpp.features.probe import MAX_IMAGES_FOR_RANK
from mpp.features.reconstructions import COLUMNS, as_rgb, prediction_columns, stretch
from mpp.models.plain import has_class, shows_weights
from mpp.pretrain import Pretraining, is_pretraining, reopen
from mpp.runtime.messages import progress_bar, shortened, warn
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.weights import BEST

IMAGES_PER_BATCH = 4  # attention weights of a block are (B, heads, T, T): 85 MB for ViT-L at 384 pixels
FILTERS_SHOWN = 28  # as in the paper's figure
FILTERS_IN_A_ROW = 7
ROLLOUTS_IN_A_ROW = 3
NEIGHBOURS_SHOWN = 5
MAX_DEPTHS_OF_PCA = 6  # more would be too small to see
QUARTERS = ((1, 1), (1, 3), (2, 2), (3, 1), (3, 3))  # of an image, down and to the right: places of query patches
COMPONENTS_SHOWN = 3  # as red, green and blue
ROUNDING = 1e-10  # share of the variance below which a component is rounding
PERCENTILES = (2, 98)  # of the coordinates, the darkest and the brightest colour


class Subject(NamedTuple):
    """An encoder on its device, its held-out images, and the settings of the pictures."""

    config: VisualizeConfig
    run: Path
    """The run folder, also where `encoder` names the encoder/ in it."""
    accelerator: Accelerator
    encoder: FrozenEncoder | ColorBaseline
    held_out: ImageDataset

    def views(self, count: int) -> ViewDataset:
        """A seeded choice of held-out images, as the encoder takes them."""
        chosen = self.held_out.to_evaluate_on(self.config.data, count)
        return views_for(self.encoder, chosen, self.config.data)

    def batches(self, count: int) -> Iterator[Tensor]:
        """These views in batches (B, C, H, W) on the encoder's device."""
        for batch in fixed_view_batches(self.views(count), self.config.data.batch_size or IMAGES_PER_BATCH):
            for failure in batch.unreadable:
                warn(f"unreadable image, replaced by another: {failure}")
            yield batch.images.to(self.accelerator.device)

    def examples(self, compute: Callable[[Tensor], Sequence[Tensor]]) -> tuple[NDArray[np.uint8], list[Tensor]]:
        """Pixels (B, H, W, 3) of the images that a picture shows, and the results of a function of their batches."""
        batches = list(self.batches(self.config.images))
        with self.accelerator.autocast():
            results = zip(*map(compute, batches), strict=True)
        return self.to_pixels(torch.cat(batches)), [*map(torch.cat, results)]

    def to_pixels(self, images: Tensor) -> NDArray[np.uint8]:
        """Images (B, C, H, W) for display, (B, H, W, 3). Deep images are stretched: see `stretch`."""
        return as_rgb(stretch(images), self.config.bands).movedim(1, -1).cpu().numpy()


Drawing = tuple[Figure, dict[str, Any]]
"""A figure, and the numbers in it, which numpy takes."""


# --- predictions ---


def draw_predictions(subject: Subject) -> Drawing:
    """Original, corrupted, predicted and true patches of held-out images, and the entropy of the predictions.

    Regressions have no entropy. Pixels normalised by patch are drawn with each patch's true mean and deviation, which
    the model does not predict; `hog` and `features` are grey.
    """
    task = open_pretraining(subject)
    with subject.accelerator.autocast():
        predictions, targets, images, corruption = task.predict(task.model, range(len(task.held_out)))
    columns = prediction_columns(task.objective, predictions, targets, images, corruption).cpu()
    positions, kinds = corruption.positions.cpu(), corruption.kinds.cpu()
    original, seen, predicted, true = columns.movedim(2, -1)
    numbers = dict(original=original, seen=seen, predicted=predicted, true=true, positions=positions, kinds=kinds)
    shown, titles = [*as_rgb(columns, subject.config.bands).movedim(2, -1).numpy()], [*COLUMNS]
    entropy = task.objective.entropy(predictions)  # (B, K, cells)
    if entropy is not None:
        numbers["entropy"] = entropy.cpu()
        shown.append(place_on_grid(entropy.cpu(), positions, task.grid).numpy())
        titles.append("entropy")
    title = f"held-out images, predicted from their visible patches ({task.objective.shown})"
    figure = grid_of_images(
        side_by_side(*shown), len(shown), title, titles, "entropy of the prediction (bits)", (0, None)
    )
    return figure, numbers


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
    largest = components.max((1, 2, 3), keepdims=True)
    scaled = torch.from_numpy(255 * (0.5 + components / (2 * largest)))
    pixels = as_rgb(scaled, subject.config.bands).movedim(1, -1).numpy()
    title = f"{len(shares)} principal components of the filters on pixels, {shares.sum():.0%} of the variance"
    figure = grid_of_images(pixels, min(FILTERS_IN_A_ROW, len(pixels)), title, [*map("{:.1%}".format, shares)])
    return figure, {"components": np.float32(components), "variance_share": np.float32(shares)}


def filter_components(model: nn.Module, count: int) -> tuple[NDArray, NDArray]:
    """Principal components of the first filters: a ViT's patch embedding, a ResNet's stem (paper, Figure 7).

    Args:
        count: at most; there are no more components than filters, or than numbers in a filter.
    Returns:
        Components (count, C, P, P) of unit length, whose largest number in size is positive, and their shares of the
        variance (count,).
    """
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is None:
        raise Unavailable(f"{type(model).__name__} has no convolution on pixels")
    filters = convolution.weight.detach().cpu().double()  # (D, C, P, P)
    vectors = filters.flatten(1).numpy()
    pca = PCA(min(count, *vectors.shape), svd_solver="full").fit(vectors)
    return pca.components_.reshape(-1, *filters.shape[1:]), pca.explained_variance_ratio_


def draw_positions(subject: Subject) -> Drawing:
    """Similarity of each patch's position to all positions, as a map in the place of the patch."""
    similarity = position_similarity(subject.encoder.model).numpy()  # (h, w, h, w)
    gap = (0, max(1, len(similarity) // 8))  # between two maps, in patches
    padded = np.pad(similarity, ((0, 0), (0, 0), gap, gap), constant_values=np.nan)
    mosaic = rearrange(padded, "r c h w -> (r h) (c w)")
    title = "positions: in the place of each patch, its similarity to all patches"
    figure = grid_of_images([mosaic], 1, title, (), "similarity", (min(0, similarity.min()), None), WIDTH)
    return figure, {"similarity": similarity}


def position_similarity(model: nn.Module) -> Tensor:
    """Cosine similarity of the position embeddings of all pairs of patches, (h, w, h, w): query, key."""
    grid = patch_grid(model)
    patches = math.prod(grid)
    embedding = getattr(model, "pos_embed", None)
    if isinstance(getattr(model, "pos_embeds", None), nn.Module):  # one for each block, of which this is the first
        embedding = model.pos_embeds()[None]
    if not isinstance(embedding, Tensor) or embedding.ndim != 3 or embedding.shape[1] < patches:
        raise Unavailable(f"this {type(model).__name__} adds no position embedding to each patch")
    units = F.normalize(embedding.detach()[0, -patches:].double().cpu(), dim=-1)  # a prefix such as [class] comes first
    return (units @ units.T).float().view(*grid, *grid)


# --- attention ---


def draw_attention_distance(subject: Subject) -> Drawing:
    """Mean attention distance of each head, by depth, without attention to [class]; and that of uniform attention."""
    count = min(subject.config.attention_images, len(subject.held_out))
    uniform = float(patch_distances(subject.encoder).mean())
    batches = progress_bar(subject.batches(count), desc="attention", unit="batch")
    with subject.accelerator.autocast():
        distances = attention_distance(subject.encoder, batches).numpy()  # (depth, heads)
    depths = range(1, 1 + len(distances))
    mean = f"mean over the heads and {count} images"
    lines = {mean: dict(enumerate(distances.mean(1), 1)), "uniform attention": dict.fromkeys(depths, uniform)}
    figure = plot_series(lines, "mean attention distance (pixels)", "depth (blocks)")
    figure.axes[0].plot(depths, distances, "o", color="0.6", markersize=3, zorder=1)  # a dot for each head
    figure.axes[0].set_ylim(0, 1.1 * max(distances.max(), uniform))
    return figure, {"images": count, "uniform_attention": uniform, "distance_by_depth_and_head": distances}


def attention_distance(encoder: FrozenEncoder, batches: Iterable[Tensor]) -> Tensor:
    """Mean attention distance of each head (paper, Figure 7), over images in batches (B, C, H, W).

    Returns:
        (depth, heads), in pixels of the input.
    """
    distances, prefix = patch_distances(encoder), encoder.model.num_prefix_tokens

    def distance_among_patches(weights: Tensor) -> Tensor:
        return mean_distance(weights[:, :, prefix:, prefix:], distances.to(weights.device)).double().cpu()

    by_batch = [torch.stack(read_attention(encoder, images, distance_among_patches)) for images in batches]
    return torch.cat(by_batch, dim=1).mean(1)


def patch_distances(encoder: FrozenEncoder) -> Tensor:
    """Distances in pixels of the input between the centres of all pairs of patches, (N, N)."""
    rows, columns = patch_grid(encoder.model)
    spacing = encoder.model.patch_embed.feat_ratio()  # less than the side of a patch where patches overlap
    centres = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double() * spacing
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").float()


def mean_distance(weights: Tensor, distances: Tensor) -> Tensor:
    """Attention-weighted distance between query and key, averaged over the queries.

    Args:
        weights: (B, heads, N, N) among patches; rows are scaled to sum to 1, which leaves out the attention to [class].
        distances: (N, N), in pixels.
    Returns:
        (B, heads), in pixels.
    """
    weighted_distances = torch.einsum("bhqk,qk->bhq", weights, distances)
    weight_on_patches = weights.sum(-1)
    attends = weight_on_patches > 0  # false for a query that attends to [class] only
    by_query = weighted_distances / weight_on_patches.where(attends, 1)
    return by_query.sum(-1) / attends.sum(-1).clamp(min=1)


def draw_rollout(subject: Subject) -> Drawing:
    """Attention rollout: the share of each patch in the output; heads averaged, layers multiplied."""
    residual, start = subject.config.residual, subject.config.rollout_from
    pixels, (rollout,) = subject.examples(lambda images: [attention_rollout(subject.encoder, images, residual, start)])
    title = f"attention rollout from the {start}{', with the residual' if residual else ''}"
    shown = side_by_side(pixels, rollout.numpy())
    columns = min(len(shown), 2 * ROLLOUTS_IN_A_ROW)
    figure = grid_of_images(shown, columns, title, (), "multiple of uniform attention")
    return figure, {"images": pixels, "rollout": rollout}


def attention_rollout(
    encoder: FrozenEncoder, images: Tensor, residual: bool, start: Literal["class", "patches"]
) -> Tensor:
    """Rollout from the [class] token, or from the mean over the patches, to the patches (paper, Figure 6 and D.8).

    Args:
        images: (B, C, H, W).
        residual: average each layer with the identity, as Abnar and Zuidema (2020) do for the residual connection.
    Returns:
        (B, h, w), as multiples of uniform attention: 1 on average.
    """
    if start == "class" and not has_class(encoder.model):
        raise Unavailable("this encoder has no [class] token to start the rollout from; use patches")
    rollout: Tensor | None = None  # (B, T, T): the share of each input token (column) in each token so far (row)

    def add_layer(weights: Tensor) -> None:
        nonlocal rollout
        layer = weights.mean(1)
        if residual:
            layer = (layer + torch.eye(layer.shape[-1], device=layer.device)) / 2
        rollout = layer if rollout is None else layer @ rollout

    read_attention(encoder, images, add_layer)
    prefix = encoder.model.num_prefix_tokens
    on_patches = (rollout[:, 0] if start == "class" else rollout[:, prefix:].mean(1))[:, prefix:]
    relative = on_patches / on_patches.mean(1, keepdim=True)
    return relative.unflatten(1, patch_grid(encoder.model)).cpu()


def read_attention(encoder: FrozenEncoder, images: Tensor, read: Callable[[Tensor], Any]) -> list[Any]:
    """The results of `read` for the attention weights of each block, one block at a time.

    Args:
        images: (B, C, H, W).
        read: takes weights (B, heads, T, T), whose rows (queries) sum to 1.
    """
    patch_grid(encoder.model)  # Unavailable without patches
    blocks = getattr(encoder.model, "blocks", ())
    if len(blocks) == 0 or not all(shows_weights(getattr(block, "attn", None)) for block in blocks):
        raise Unavailable(f"the blocks of this {type(encoder.model).__name__} have no plain attention")
    results = []

    def read_in_float32(dropout: nn.Module, inputs: tuple[Tensor]) -> None:
        (weights,) = inputs
        with torch.autocast(weights.device.type, enabled=False):
            results.append(read(weights.float()))

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(setattr, block.attn, "fused_attn", block.attn.fused_attn)
            undo.enter_context(block.attn.attn_drop.register_forward_pre_hook(read_in_float32))
            block.attn.fused_attn = False  # the fused kernel returns no weights
        encoder.model.forward_features(encoder.normalize(images))
    return results


# --- features ---


def draw_pca(subject: Subject) -> Drawing:
    """Principal components of patch features as colours, by depth."""
    last_depth = len(subject.encoder.stages)
    depths = np.linspace(1, last_depth, min(MAX_DEPTHS_OF_PCA, last_depth)).round().astype(int)
    pixels, features = subject.examples(lambda images: patch_features(subject.encoder, images, depths.tolist()))
    coordinates, shares = components_by_depth(features)
    colors = as_colors(coordinates)
    titles = [f"depth {depth}: {share:.0%}" for depth, share in zip(depths, shares.sum(1), strict=True)]
    title = "patch features: three principal components as red, green, blue (%: their share of the variance)"
    figure = grid_of_images(side_by_side(pixels, *colors), 1 + len(depths), title, ["original", *titles])
    numbers = {"colors": colors, "shares": shares, "coordinates": coordinates, "images": pixels, "depths": depths}
    return figure, numbers


def components_by_depth(features: Sequence[Tensor]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The first three principal components of patch features, (B, h, w, D) for each depth, over all images together.

    A component has the sign by which it is more like that of the next depth, so that colours do not jump.

    Returns:
        Coordinates (depths, B, h, w, 3), 0 on average, and shares of the variance (depths, 3); 0: there is none.
    """
    pca = PCA(COMPONENTS_SHOWN, svd_solver="full")
    coordinates, shares = [], []
    for of_depth in features:
        vectors = of_depth.flatten(0, 2).double().numpy()
        if min(vectors.shape) < COMPONENTS_SHOWN:
            raise Unavailable(f"there are fewer than {COMPONENTS_SHOWN} patches or features")
        with np.errstate(invalid="ignore"):  # all patches may be alike
            coordinates.append(pca.fit_transform(vectors).reshape(*of_depth.shape[:3], COMPONENTS_SHOWN))
        shares.append(np.nan_to_num(pca.explained_variance_ratio_))
        coordinates[-1][..., shares[-1] <= ROUNDING] = 0
    for below, above in zip(coordinates[-2::-1], coordinates[:0:-1], strict=True):  # from the last depth down
        below *= np.where((below * above).sum((0, 1, 2)) < 0, -1, 1)
    return np.float32(coordinates), np.float32(shares)


def as_colors(coordinates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Coordinates (depths, B, h, w, 3) as red, green and blue in [0, 1], by their percentiles at each depth."""
    low, high = np.percentile(coordinates, PERCENTILES, axis=(1, 2, 3), keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):  # of a component without variance
        scaled = (coordinates - low) / (high - low)
    return np.nan_to_num(scaled, nan=0.5).clip(0, 1).astype(np.float32)


def draw_similarity(subject: Subject) -> Drawing:
    """Similarity of some patches (`patches`, or some over the whole image) to all patches of their image."""
    (rows, columns), last_depth = patch_grid(subject.encoder.model), len(subject.encoder.stages)
    spread = dict.fromkeys(rows * down // 4 * columns + columns * right // 4 for down, right in QUARTERS)
    patches = list(subject.config.patches or spread)
    require(max(patches) < rows * columns, "patches", max(patches), f"below {rows * columns}, the patches of an image")
    pixels, (features,) = subject.examples(lambda images: patch_features(subject.encoder, images, [last_depth]))
    similarity = patch_similarity(features, patches).numpy()
    titles = ["original", *(f"row {patch // columns}, column {patch % columns}" for patch in patches)]
    title = "cosine similarity of all patches of an image to one of them, by its row and column from 0"
    shown = side_by_side(pixels, *similarity.swapaxes(0, 1))
    figure = grid_of_images(shown, len(titles), title, titles, "cosine similarity", (None, 1))
    return figure, {"images": pixels, "patches": patches, "similarity": similarity}


def patch_similarity(features: Tensor, patches: Sequence[int]) -> Tensor:
    """Cosine similarity of some patches of an image with all its patches: (B, h, w, D) to (B, P, h, w)."""
    units = F.normalize(features, dim=-1)
    queries = units.flatten(1, 2)[:, patches]  # (B, P, D)
    return torch.einsum("bpd,bhwd->bphw", queries, units)


def draw_neighbours(subject: Subject) -> Drawing:
    """Held-out images with the other images whose features are nearest."""
    views = subject.views(MAX_IMAGES_FOR_RANK)
    encode = partial(subject.encoder, representation="mean", depths=[len(subject.encoder.stages)])
    split = extract_split(views, encode, subject.accelerator, False, "neighbours")
    (features,) = split.by_depth
    if len(features) < 2:
        raise Unavailable("there is one held-out image")
    if split.unreadable:
        warn(f"images left out of neighbours: {shortened(split.unreadable)}")
    nearest = find_other_neighbours(torch.from_numpy(features), NEIGHBOURS_SHOWN)
    queries = evenly_spaced(len(features), subject.config.images)
    shown = split.kept[np.column_stack([queries, nearest.index[queries]])]  # (B, 1 + k), the query first
    similarity = nearest.similarity[queries].numpy()
    pixels = subject.to_pixels(torch.stack([views[FIXED_VIEW, index].images for index in shown.flatten().tolist()]))
    titles = [text for row in similarity for text in ["", *map("{:.2f}".format, row)]]
    title = f"held-out images, and the others of {len(features)} whose features are nearest, with the cosine"
    names = np.array([[views.dataset.image_name(index) for index in row] for row in shown.tolist()])
    return grid_of_images(pixels, shown.shape[1], title, titles), {"names": names, "image_similarity": similarity}


PICTURES = {
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

"""Pictures of what an encoder has learned, each with the numbers behind it (paper, section 4.5, D.7, D.8).

    python evaluation/visualize.py --encoder runs/birds

Writes PNGs, `.npz` or `.json` with their numbers, and TensorBoard events into one folder. What an encoder does not have
(a ResNet has no attention; only a pre-training run has the colour head) is left out, and why is said.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from einops import rearrange
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from evaluation import fewshot
from evaluation.config import EncoderConfig, PrecisionConfig, VisualizeConfig
from evaluation.figures import charts
from evaluation.figures import images as image_figures
from evaluation.figures.style import DPI
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, Unavailable, open_frozen_encoder, patch_grid
from evaluation.frozen.extraction import extract_labelled_features, views_for
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.probing import evaluate_by_depth
from evaluation.frozen.results import report_path, report_suffix, write_json
from evaluation.frozen.run_images import indices_in_split, is_stream_of_run, load_images_of
from evaluation.patches.features import patch_features
from evaluation.pictures.attention import attention_distance, attention_rollout, distances, spacing
from evaluation.pictures.pca import components_by_depth
from evaluation.pictures.positions import filter_components, position_similarity
from evaluation.pictures.similarity import look_through, patch_similarity, spread_patches
from mpp.config import Grid, RunConfig, require
from mpp.config.imports import require_imports
from mpp.data.dataset import ImageDataset
from mpp.data.loader import held_out_batches
from mpp.data.sources import load_image_datasets
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.features.probe import MOST_RANKED
from mpp.features.ranks import effective_ranks
from mpp.features.reconstructions import as_rgb, prediction_columns
from mpp.models.timm_models import has_class
from mpp.pretrain import is_pretraining, reopen
from mpp.runtime.command import command
from mpp.runtime.progress import progress_bar
from mpp.runtime.randomness import HELD_OUT_EPOCH
from mpp.runtime.start import start_alone
from mpp.runtime.weights import BEST, run_of
from mpp.training.log import event_writer
from mpp.training.run_folder import saved_settings

Numbers = dict[str, Any]
FILTERS = 28  # as in the paper's figure
NEIGHBOURS = 5  # that are shown
DEPTHS = 6  # of pca, at most: more would be too small to see
BATCH = 4  # a block's weights are (B, heads, T, T): 85 MB for ViT-L at 384 pixels


class Subject(NamedTuple):
    """What pictures are made of."""

    config: VisualizeConfig
    accelerator: Accelerator
    encoder: FrozenEncoder | ColorBaseline
    held_out: ImageDataset

    @property
    def run(self) -> Path:
        """The run folder, whether it or its encoder/ was named."""
        return run_of(Path(self.config.encoder))

    def images(self, count: int) -> Iterator[Tensor]:
        """A seeded choice of held-out images as the encoder takes them, in batches (B, C, H, W)."""
        chosen = self.held_out.choose(count, self.config.data.cut_seed)
        views = views_for(self.encoder, chosen, self.config.data)
        for batch in held_out_batches(views, self.config.data.batch_size or BATCH):
            for failure in batch.unreadable:
                tqdm.write(f"warning: unreadable image, another takes its place: {failure}")
            yield batch.images.to(self.accelerator.device)

    def patches(self, images: Tensor) -> Tensor:
        """Features of the patches of images (B, C, H, W), at the encoder's end: (B, h, w, D)."""
        with self.accelerator.autocast():
            return patch_features(self.encoder, images, [len(self.encoder.stages)])[0]

    def ground(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) as what something is laid over, (B, H, W, 3) uint8."""
        bands = self.config.bands
        as_they_are = bands or images.shape[1] in (1, 3)
        return as_rgb(images if as_they_are else images.float().mean(1, keepdim=True), bands).movedim(1, -1).cpu()


def predictions(subject: Subject) -> tuple[Figure, Numbers]:
    """Original, corrupted, predicted and true patches of held-out images, and the entropy of what is predicted."""
    config = subject.config
    if config.random or config.checkpoint or not is_pretraining(subject.run) or Path(config.encoder).name == BEST:
        raise Unavailable("only the folder of a pre-training run has the head that predicts")
    try:
        task = reopen(subject.run, config.data, config.data.eval_crop, config.images, subject.accelerator)
    except UserError as error:  # its checkpoints are gone, say
        raise Unavailable(str(error)) from error
    with subject.accelerator.autocast():
        found = task.predict(task.model, range(len(task.held_out)))
    predicted, _, _, corruption = found
    columns = prediction_columns(task.objective, *found)
    shown = as_rgb(columns, config.bands).movedim(2, -1).cpu().numpy()
    columns = columns.movedim(2, -1).cpu().numpy()
    numbers = {name: part for name, part in zip(("original", "seen", "predicted", "true"), columns, strict=True)}
    numbers |= {"positions": corruption.positions.cpu().numpy(), "kinds": corruption.kinds.cpu().numpy()}
    entropy = task.objective.entropy(predicted)  # (B, K, cells)
    doubts = None
    if entropy is not None:
        numbers["entropy"] = entropy.cpu().numpy()
        doubts = on_grid(numbers["entropy"], numbers["positions"], task.grid)
    return image_figures.plot_predictions(shown, doubts, task.objective.shown), numbers


def on_grid(values: np.ndarray, positions: np.ndarray, grid: Grid) -> np.ndarray:
    """Values of the cells of some patches, (B, K, cells), in their places of a map (B, h, w); NaN elsewhere."""
    count, _, cells = values.shape
    (rows, columns), cell = grid, round(cells**0.5)
    whole = np.full((count, rows * columns, cells), np.nan, np.float32)
    np.put_along_axis(whole, positions[..., None].repeat(cells, -1), values, axis=1)
    return rearrange(whole, "b (r c) (y x) -> b (r y) (c x)", r=rows, y=cell)


def filters(subject: Subject) -> tuple[Figure, Numbers]:
    """The first principal components of the filters on pixels."""
    components, shares = filter_components(subject.encoder.model, FILTERS)
    scaled = 0.5 + components / (2 * components.abs().amax((1, 2, 3), keepdim=True))
    shown = as_rgb(255 * scaled, subject.config.bands).movedim(1, -1).numpy()
    numbers = {"components": components.numpy(), "variance_share": shares.numpy()}
    return image_figures.plot_filters(shown, numbers["variance_share"]), numbers


def positions(subject: Subject) -> tuple[Figure, Numbers]:
    """How alike the places of patches are to the encoder."""
    model = subject.encoder.model
    similarity = position_similarity(model).numpy()
    biases = getattr(model, "position", None) == "relative_bias"
    label = "bias of the logits, mean over heads and blocks" if biases else "cosine similarity"
    return image_figures.plot_positions(similarity, label), {"similarity": similarity}


def attention_distances(subject: Subject) -> tuple[Figure, Numbers]:
    """How far each head looks."""
    model, encoder = subject.encoder.model, subject.encoder
    count = min(subject.config.attention_images, len(subject.held_out))
    grid = patch_grid(model)
    uniform = float(distances(grid, spacing(encoder)).mean())
    batches = progress_bar(subject.images(count), desc="attention", unit="batch")
    with subject.accelerator.autocast():
        found = attention_distance(encoder, batches)
    numbers = {"unit": "pixels", "images": count, "uniform_attention": uniform}
    numbers |= {"distance_by_depth_and_head": found.tolist()}
    return image_figures.plot_attention_distance(found.numpy(), uniform, count), numbers


def rollout(subject: Subject) -> tuple[Figure, Numbers]:
    """What flows into the output, through all layers."""
    config, encoder = subject.config, subject.encoder
    begin = rollout_start(subject)
    shown, flows = [], []
    for images in subject.images(config.images):
        with subject.accelerator.autocast():
            flows.append(attention_rollout(encoder, images, config.residual, begin))
        shown.append(subject.ground(images))
    pixels, flow = torch.cat(shown).numpy(), torch.cat(flows).numpy()
    return image_figures.plot_rollout(pixels, flow, begin, config.residual), {"images": pixels, "rollout": flow}


def rollout_start(subject: Subject) -> Literal["class", "patches"]:
    """The token that rollout begins at: [class] says something only where it was trained."""
    config = subject.config
    if config.rollout_from != "auto":
        return config.rollout_from
    return "class" if trained_class(subject) and not config.random else "patches"


def trained_class(subject: Subject) -> bool:
    """Whether a head was on the [class] token when the encoder was trained."""
    ours = getattr(subject.encoder.model, "pretrained_cfg", {}).get("tag") == "mpp"  # by the hub, without its run
    saved = saved_settings(subject.run) or ({"objective": None} if ours else {})
    pooling = saved.get("pooling") or (saved.get("head") or {}).get("pooling")  # of fine-tuning, or supervised
    return has_class(subject.encoder.model) and "objective" not in saved and pooling != "mean"


def pca(subject: Subject) -> tuple[Figure, Numbers]:
    """Principal components of patch features as colours, and the foreground by the first one, by depth."""
    deepest = len(subject.encoder.stages)
    depths = np.linspace(1, deepest, min(DEPTHS, deepest)).round().astype(int)
    shown, found = [], []
    for images in subject.images(subject.config.images):
        with subject.accelerator.autocast():
            found.append(patch_features(subject.encoder, images, depths.tolist()))
        shown.append(subject.ground(images))
    by_depth = components_by_depth([torch.cat(parts) for parts in zip(*found, strict=True)])
    numbers = {
        "colors": torch.stack([each.colors for each in by_depth]).numpy(),
        "foreground": torch.stack([each.foreground for each in by_depth]).numpy(),
        "shares": torch.stack([each.variance_shares for each in by_depth]).numpy(),
        "coordinates": torch.stack([each.coordinates for each in by_depth]).numpy(),
    }
    pixels = torch.cat(shown).numpy()
    figure = image_figures.plot_components(pixels, numbers["colors"], numbers["foreground"], numbers["shares"], depths)
    return figure, numbers | {"images": pixels, "depths": depths}


def asked_patches(subject: Subject) -> list[int]:
    """The patches that pictures start from, counted row by row from 0."""
    grid, asked = patch_grid(subject.encoder.model), subject.config.patches
    patches = spread_patches(grid) if asked is None else list(asked)
    require(
        max(patches) < math.prod(grid), "patches", max(patches), f"below {math.prod(grid)}, the patches of an image"
    )
    return patches


def similarity(subject: Subject) -> tuple[Figure, Numbers]:
    """How like all patches of an image are to some of them."""
    patches, shown, maps = asked_patches(subject), [], []
    for images in subject.images(subject.config.images):
        maps.append(patch_similarity(subject.patches(images), patches))
        shown.append(subject.ground(images))
    pixels, numbers = torch.cat(shown).numpy(), torch.cat(maps).numpy()
    figure = image_figures.plot_similarity(pixels, numbers, patches)
    return figure, {"images": pixels, "patches": np.array(patches), "similarity": numbers}


def neighbours(subject: Subject) -> tuple[Figure, Numbers]:
    """The most similar of other held-out images, and patches in them."""
    config, encoder = subject.config, subject.encoder
    grid = patch_grid(encoder.model)
    patch = asked_patches(subject)[0] if config.patches else grid[0] // 2 * grid[1] + grid[1] // 2
    through, queries = (subject.held_out.choose(most, config.data.cut_seed) for most in (MOST_RANKED, config.images))
    if len(through) < 2:
        raise Unavailable("there is one held-out image")
    own = np.searchsorted(indices_in_split(through), indices_in_split(queries))
    gallery = progress_bar(subject.images(len(through)), desc="neighbours", unit="batch")
    asked = torch.cat(list(subject.images(config.images)))
    found = look_through(subject.patches, asked, patch, gallery, own.tolist(), NEIGHBOURS)
    views = views_for(encoder, through, config.data)

    def pixels(indices: Tensor) -> np.ndarray:
        images = torch.stack([views[HELD_OUT_EPOCH, index].images for index in indices.flatten().tolist()])
        return subject.ground(images).numpy().reshape(*indices.shape, *images.shape[2:], 3)

    numbers = {name: getattr(found, name).numpy() for name in found._fields}
    numbers |= {"names": np.array([through.name(index) for index in range(len(through))])}
    figure = image_figures.plot_neighbours(
        *(subject.ground(asked).numpy(), pixels(found.images), pixels(found.hosts), grid, patch, numbers)
    )
    return figure, numbers


def rank(subject: Subject) -> tuple[Figure, Numbers]:
    """In how many directions the features of images spread, by depth: as `features/rank` while training."""
    depths = range(1, 1 + len(subject.encoder.stages))
    count, found = min(MOST_RANKED, len(subject.held_out)), []
    for images in progress_bar(subject.images(count), desc="features", unit="batch"):
        with torch.no_grad(), subject.accelerator.autocast():
            found.append(subject.encoder(images, subject.config.representation, depths))
    by_depth = [torch.cat(parts).float() for parts in zip(*found, strict=True)]
    ranks = dict(zip(depths, effective_ranks(by_depth, subject.accelerator.device), strict=True))
    shown = {"rank": (list(ranks), list(ranks.values()))}
    figure = charts.plot_series(shown, f"effective rank of {count} images", x_label="depth (blocks)")
    return figure, {"images": count, "width": by_depth[-1].shape[1], "rank_by_depth": ranks}


def accuracy_by_depth(subject: Subject) -> tuple[Figure, Numbers]:
    """The few-shot curve."""
    if is_stream_of_run(subject.config):
        raise Unavailable("the images are a stream; `mpp fewshot` loads all of them")
    if subject.held_out.labelled() is None:
        raise Unavailable("the images have no labels")
    known = load_image_datasets(subject.config.data)[0].labelled()
    if known is None or len(np.unique(known.labels)) < 2:
        raise Unavailable("all training images are of one class, or have no labels")
    fields = (*dataclasses.fields(EncoderConfig), *dataclasses.fields(PrecisionConfig))
    shared = {field.name: getattr(subject.config, field.name) for field in fields}
    config = fewshot.FewshotConfig(**shared, representation=subject.config.representation, depth="all")
    by_depth = extract_labelled_features(config, subject.accelerator).by_depth
    if len(by_depth) == 1:
        raise Unavailable("this encoder has one depth")
    report = evaluate_by_depth(config, by_depth, lambda features: fewshot.evaluate(features, config), "shots")
    return charts.plot_by_depth(report["summary_by_depth"], "shots"), report


PICTURES: dict[str, Callable[[Subject], tuple[Figure, Numbers]]] = {
    "predictions": predictions,
    "filters": filters,
    "positions": positions,
    "attention_distance": attention_distances,
    "attention_rollout": rollout,
    "pca": pca,
    "similarity": similarity,
    "neighbours": neighbours,
    "rank": rank,
    "accuracy_by_depth": accuracy_by_depth,
}


def write(folder: Path, name: str, figure: Figure, numbers: Numbers) -> None:
    """NAME.png, and NAME.npz where all numbers are arrays, else NAME.json."""
    figure.savefig(folder / f"{name}.png", dpi=DPI)
    if all(isinstance(value, np.ndarray) for value in numbers.values()):
        np.savez_compressed(folder / f"{name}.npz", **numbers)
    else:
        write_json(folder / f"{name}.json", numbers)


def subject_of(config: VisualizeConfig) -> Subject:
    """What the pictures are made of, loaded.

    Raises:
        UserError: no such encoder or images.
    """
    run = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run, "pictures are drawn")
    require_imports(run_of(Path(config.encoder)))
    largest = max(config.bands or (1,))
    require(largest <= config.data.channels, "bands", largest, f"from 1 to {config.data.channels}: data.channels")
    encoder = open_frozen_encoder(config)
    return Subject(config, accelerator, encoder.to(accelerator.device), load_images_of(config)[1])


def visualize(config: VisualizeConfig) -> list[str]:
    """Draw the pictures that this encoder has something for; their names.

    Raises:
        UserError: no such encoder or images, or nothing to draw.
    """
    folder = Path(config.out) if config.out else report_path(None, config.encoder, f"pictures{report_suffix(config)}")
    require(not folder.exists() or folder.is_dir(), "out", folder, "a folder")
    subject = subject_of(config)
    drawn, missing = [], {}
    folder.mkdir(parents=True, exist_ok=True)
    with deaths_explained(), event_writer(folder) as writer:
        for name in config.pictures:
            try:
                figure, numbers = PICTURES[name](subject)
            except Unavailable as error:
                missing[name] = str(error)
                continue
            write(folder, name, figure, numbers)
            writer.add_figure(name, figure)
            drawn.append(name)
    for name, reason in missing.items():
        print(f"no {name}: {reason}")
    require(len(drawn) > 0, "pictures", ", ".join(missing), "something that this encoder has")
    print(f"wrote {folder}: {', '.join(f'{name}.png' for name in drawn)}, their numbers beside them")
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw as the command line, or `arguments`, say."""
    visualize(parse_with_images(VisualizeConfig, arguments, prog="python evaluation/visualize.py"))


if __name__ == "__main__":
    command(main)

"""Frozen features of patches, evaluated on segmentation masks: the class of each pixel.

    python evaluation/segmentation.py --encoder runs/birds
    python evaluation/segmentation.py --encoder runs/mine --data.path SET --data.mask_column mask --depth dev

Two readings: a batch norm and a linear layer on each patch, trained as DINOv2's linear segmentation is (Oquab et al.,
2023, section 7.4), and the classes of the nearest training patches, without training. Both predictions are upsampled to
the mask. The score is the mean IoU over the classes, of all held-out pixels together.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from evaluation.config import EncoderConfig, MaskedDataConfig, SegmentationConfig
from evaluation.figures.style import DPI, figure_style
from evaluation.frozen.encoder import (
    CELLS_PER_SIDE,
    ColorBaseline,
    FrozenEncoder,
    open_frozen_encoder,
    patch_grid,
    resolve_depths,
)
from evaluation.frozen.features import describe_input, describe_training_images
from evaluation.frozen.kept_heads import HeadDescription, describe_encoder, save_head
from evaluation.frozen.manifest import check_labels_unseen
from evaluation.frozen.probing import assemble_report, choose_depths, each_depth
from evaluation.frozen.results import report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits, parse_and_load
from evaluation.metrics.scoring import Outcomes, add_figures, without_outcomes
from evaluation.patches.extraction import ExtractedPatches, extract_patches, load_masked_images
from evaluation.patches.features import PatchBaseline, PatchEncoder, PatchFeatures
from evaluation.patches.masks import MaskedImages, MaskedSplits
from evaluation.patches.outlines import BIRD_CLASSES
from evaluation.patches.readings import (
    LinearReading,
    PatchScorer,
    choose_labelled_patches,
    fit_linear_reading,
    neighbour_votes,
    predict_pixels,
)
from evaluation.patches.scores import count_confusion, score_confusion, score_most_frequent
from evaluation.patches.statistics import (
    describe_masked_images,
    report_pixels,
    warn_of_turned_images,
    with_numbered_classes,
)
from evaluation.patches.tables import draw_predicted_masks, iou_table, reading_table
from mpp.config import require
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable
from mpp.runtime.hardware import device
from mpp.runtime.start import run_main, start_alone

MOST_FREQUENT = "the most frequent class"
"""Name of a baseline in reports and tables."""


class EvaluatedReadings(NamedTuple):
    """The readings of features of one depth, tested on held-out images."""

    results: list[dict[str, Any]]
    fitted: list[LinearReading]
    """The linear reading of each seed."""
    predictions: dict[str, Tensor]
    """The predicted class of each pixel (M, H, W), by reading; of several seeds the last one's."""
    class_numbers: NDArray[np.int16]
    """Numbers in the masks of all classes, (C,)."""


def run(config: SegmentationConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Evaluate patch features on masks, write the report, and return it.

    Raises:
        UserError: an encoder without patches, or images without masks.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "patches are evaluated")
    path = report_path_of_command(config, "segmentation")
    splits = load_masked_images(config.data, loaded)
    check_labels_unseen(config.frozen.weights, config.data, splits.train.images, splits.test.images)
    print(describe_masked_images(splits, config.data))
    warn_of_turned_images(splits, config.data)
    encoder = open_patch_encoder(config.frozen, config.data)
    if config.save:
        allowed = "left out: a colour baseline has no weights, so its head is not kept"
        require(isinstance(encoder, FrozenEncoder), "save", True, allowed)
    learned = describe_training_images(config.data, splits.train.images) if config.save else None
    with deaths_explained():
        report, readings, splits = evaluate_encoder(config, encoder, splits, accelerator)
        report["baselines"] = evaluate_baselines(config, encoder, splits, accelerator) | report["baselines"]
    report = write_probe_report(path, report, "reading")
    print_tables(report, config)
    if config.save:
        keep_reading(path, config, encoder, readings, report, accelerator, learned)
    if config.images:
        write_picture(path, encoder, splits.test, readings, config)
    return report


def evaluate_encoder(
    config: SegmentationConfig, encoder: PatchEncoder, splits: MaskedSplits, accelerator: Accelerator
) -> tuple[dict[str, Any], EvaluatedReadings, MaskedSplits]:
    """Evaluate an encoder.

    Returns:
        Its report with the baseline of the most frequent class, its readings at the chosen depth, and the images that
        can be decoded.
    """
    extracted = extract_asked_depths(config, encoder, splits, accelerator)
    features = next(iter(extracted.by_depth.values()))
    report_pixels(features, config.data)
    report, readings = evaluate_depths(config, extracted)
    if any(extracted.left_out.values()):
        report["left_out"] = extracted.left_out
    report["baselines"] = {MOST_FREQUENT: [score_most_frequent(features) | {"case": "all"}]}
    return report, readings, extracted.splits


def evaluate_baselines(
    config: SegmentationConfig, encoder: PatchEncoder, splits: MaskedSplits, accelerator: Accelerator
) -> dict[str, Any]:
    """The reports of an encoder's baselines, without outcomes, by name."""
    baselines = {}
    for name, baseline in open_baselines(config, encoder).items():
        extracted = extract_asked_depths(config, baseline, splits, accelerator)
        report, _ = evaluate_depths(config, extracted)
        baselines[name] = report | {"results": without_outcomes(report["results"])}
    return baselines


def evaluate_depths(
    config: SegmentationConfig, extracted: ExtractedPatches
) -> tuple[dict[str, Any], EvaluatedReadings]:
    """The report of features at each depth, and the readings at the chosen one."""
    depths = choose_depths(config, extracted.by_depth, partial(evaluate, config=config), group_by="case")
    results_by_depth = {}
    for depth, features in each_depth(depths.by_depth):
        readings = evaluate_readings(features, config)
        results_by_depth[depth] = add_figures(readings.results)
        if depth == depths.chosen:
            of_chosen = readings
    return assemble_report(results_by_depth, depths.chosen, depths.protocol, group_by="case"), of_chosen


def extract_asked_depths(
    config: SegmentationConfig,
    encoder: PatchEncoder,
    splits: MaskedSplits,
    accelerator: Accelerator,
) -> ExtractedPatches:
    """Features at the depths that `config.depth` means; a baseline has one depth."""
    deepest = len(encoder.stages)
    depths = resolve_depths(config.depth if deepest > 1 else "last", deepest)
    return extract_patches(encoder, splits, depths, config.data, accelerator, config.strict)


def evaluate(features: PatchFeatures, config: SegmentationConfig) -> list[dict]:
    """Scores of each reading; the learning rate is chosen on the dev split."""
    return evaluate_readings(features, config).results


def evaluate_readings(features: PatchFeatures, config: SegmentationConfig) -> EvaluatedReadings:
    """See `evaluate`."""
    features, numbers = with_numbered_classes(features)
    score = partial(score_reading, numbers=numbers, names=mask_class_names(config, numbers.tolist()))
    results: list[dict[str, Any]] = []
    fitted: list[LinearReading] = []
    predictions: dict[str, Tensor] = {}
    if "linear" in config.readings:
        best_lr = config.lr[0]
        dev_accuracies = {}
        if len(config.lr) > 1:
            dev = features.dev_split()
            for lr in config.lr:
                scores, _ = score(fit_linear_reading(dev, config, lr, config.seeds[0]), dev)
                dev_accuracies[lr] = scores["accuracy"]
            best_lr = max(dev_accuracies, key=dev_accuracies.get)
        dev_accuracy = dev_accuracies.get(best_lr)
        fitted = [fit_linear_reading(features, config, best_lr, seed) for seed in config.seeds]
        for seed, reading in zip(config.seeds, fitted, strict=True):
            scores, predictions["linear"] = score(reading, features)
            results.append({"case": "linear", "seed": seed, "lr": best_lr, "dev_accuracy": dev_accuracy} | scores)
    if "knn" in config.readings:
        bank, labels = choose_labelled_patches(features, config, len(numbers))
        votes = partial(neighbour_votes, bank=bank, labels=labels, classes=len(numbers), config=config)
        scores, predictions["knn"] = score(votes, features)
        results.append({"case": "knn", "seed": 0} | scores)
    return EvaluatedReadings(results, fitted, predictions, numbers)


def score_reading(
    score_patches: PatchScorer, features: PatchFeatures, numbers: NDArray[np.int16], names: Sequence[str]
) -> tuple[dict[str, Any], Tensor]:
    """The scores and outcomes of a reading, and its predicted classes (M, H, W).

    Args:
        numbers, names: of the classes, (C,).
    """
    predicted = predict_pixels(score_patches, features.test, features.test_masks.shape[1:], len(numbers))
    counts = count_confusion(torch.from_numpy(features.test_masks), predicted, len(numbers))
    outcomes = Outcomes("pixels", counts.sum(2), counts, names, features.test_images)
    return score_confusion(counts.sum(0), numbers) | {"outcomes": outcomes}, predicted


def keep_reading(
    path: Path,
    config: SegmentationConfig,
    encoder: FrozenEncoder,
    readings: EvaluatedReadings,
    report: dict[str, Any],
    accelerator: Accelerator,
    learned: dict[str, Any],
) -> None:
    """Write the linear reading of the first seed to its folder next to the report at `path`.

    Args:
        learned: the training images: see `HeadDescription`.
    """
    reading = readings.fitted[0]
    numbers = readings.class_numbers[: reading.classify.out_features].tolist()
    description = HeadDescription(
        task="pixels",
        class_names=mask_class_names(config, numbers),
        class_numbers=numbers,
        representation="patches",
        depth=report["protocol"]["chosen_depth"],
        input=describe_input(encoder, config.data, accelerator),
        **describe_encoder(config.frozen),
        learned=learned,
    )
    save_head(path.with_name(f"{path.stem}_head"), reading, description, config.seeds)


def known_names(config: SegmentationConfig) -> Sequence[str]:
    """Names of the classes by their number in the masks; empty: there are none."""
    if config.class_names is None and config.data.path is None:
        return BIRD_CLASSES
    return config.class_names or ()


def mask_class_names(config: SegmentationConfig, numbers: Sequence[int]) -> list[str]:
    """The name of each class.

    Args:
        numbers: of the classes in the files of the masks, ascending.
    Raises:
        UserError: `class_names` has no name for a class.
    """
    names = known_names(config)
    fit = len(names) > numbers[-1]
    if not names or (config.class_names is None and not fit):
        return [f"class {number}" for number in numbers]
    require(fit, "class_names", list(names), f"{numbers[-1] + 1} names, from class 0 on")
    return [names[number] for number in numbers]


def open_patch_encoder(frozen: EncoderConfig, data: MaskedDataConfig) -> PatchEncoder:
    """The encoder that the settings name; for floor:pixels, the colours and positions of patches.

    Raises:
        Unavailable: it has no patches.
    """
    encoder = open_frozen_encoder(frozen, data)
    if isinstance(encoder, ColorBaseline):
        if encoder.kind != "pixels":
            raise Unavailable(f"encoder is {frozen.encoder}; it must be floor:pixels; floor:colors has no patches")
        return PatchBaseline(encoder.img_size, encoder.crop_pct, (CELLS_PER_SIDE, CELLS_PER_SIDE))
    try:
        patch_grid(encoder.model)
    except Unavailable as error:
        raise Unavailable(f"encoder is {frozen.encoder}, which has no patches to evaluate: {error}") from None
    return encoder.to(device())


def open_baselines(config: SegmentationConfig, encoder: PatchEncoder) -> dict[str, PatchEncoder]:
    """The baselines of an encoder, with the same patches."""
    if not config.baselines or isinstance(encoder, PatchBaseline):
        return {}
    baselines: dict[str, PatchEncoder] = {}
    if not config.frozen.random:
        baselines["random weights"] = open_patch_encoder(replace(config.frozen, random=True), config.data)
    grid = patch_grid(encoder.model)
    baselines["colour and position"] = PatchBaseline(encoder.img_size, encoder.crop_pct, grid)
    return baselines


def print_tables(report: dict[str, Any], config: SegmentationConfig) -> None:
    """Print the scores of the encoder and its baselines, and the IoU of each class."""
    lines = {config.frozen.encoder: results_at_chosen_depth(report)}
    for name, baseline in report["baselines"].items():
        lines[name] = baseline if name == MOST_FREQUENT else results_at_chosen_depth(baseline)
    print(reading_table(lines, config.readings))
    print(iou_table(lines[config.frozen.encoder], known_names(config)))


def results_at_chosen_depth(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results at the depth that the report's summary is of."""
    chosen = report["protocol"]["chosen_depth"]
    return [result for result in report["results"] if result["depth"] == chosen]


@figure_style()
def write_picture(
    report: Path,
    encoder: PatchEncoder,
    test: MaskedImages,
    readings: EvaluatedReadings,
    config: SegmentationConfig,
) -> None:
    """Write the picture of some predictions next to the report."""
    path = report.with_suffix(".pictures.png")
    numbers = torch.from_numpy(readings.class_numbers)
    masks = {reading: numbers[predicted.long()] for reading, predicted in readings.predictions.items()}
    figure = draw_predicted_masks(encoder, test, masks, config)
    figure.savefig(path, dpi=DPI)
    print(f"wrote {path}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Evaluate with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(SegmentationConfig, arguments))


if __name__ == "__main__":
    run_main(main)

"""Frozen features of patches, evaluated on segmentation masks: the class of each pixel.

    python evaluation/segmentation.py --encoder runs/birds
    python evaluation/segmentation.py --encoder runs/mine --data.path SET --data.mask_column mask --depth dev

Two readings: a batch norm and a linear layer on each patch, trained as DINOv2's linear segmentation is (Oquab et al.,
2023, section 7.4), and the classes of the nearest training patches, without training. Both predictions are upsampled to
the mask. The score is the mean IoU over the classes, of all held-out pixels together.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evaluation.config import EncoderConfig, MaskedDataConfig, SegmentationConfig
from evaluation.figures.charts import DPI, figure_style, markdown_table
from evaluation.figures.images import plot_segmentation
from evaluation.frozen.encoder import CELLS_PER_SIDE, FrozenEncoder, open_frozen_encoder, patch_grid
from evaluation.frozen.features import LabelledFeatures, describe_input, describe_training_images
from evaluation.frozen.kept_heads import HeadDescription, describe_encoder, save_head
from evaluation.frozen.results import evaluate_by_depth, report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits, check_labels_unseen, parse_and_load
from evaluation.metrics.scoring import KINDS, Outcomes, best_choice, evenly_spaced, score_of, without_outcomes
from evaluation.patches.features import (
    ExtractedPatches,
    PatchBaseline,
    PatchEncoder,
    Reading,
    count_confusion,
    extract_patches,
    fit_linear,
    fit_neighbours,
    masked_views,
    predict_pixels,
)
from evaluation.patches.masks import IGNORED_CLASS, load_masked_images, warn_of_turned_images
from mpp.config import as_words, require
from mpp.data.data_path import describe_source
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable
from mpp.features.reconstructions import as_rgb, stretch
from mpp.runtime.hardware import device
from mpp.runtime.messages import counted
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.start import run_main, start_alone


class EvaluatedReading(NamedTuple):
    """A reading of features of one depth, tested on held-out images."""

    about: dict[str, Any]
    """Entries of its result."""
    reading: Reading
    predicted: Tensor
    """The class of each pixel, (M, H, W), numbered as in the features' labels."""
    outcomes: Outcomes


def run(config: SegmentationConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Evaluate patch features on masks, write the report, and return it.

    Raises:
        UserError: an encoder without patches, or images without masks.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "patches are evaluated")
    path = report_path_of_command(config, "segmentation")
    splits = train, test = load_masked_images(config.data, loaded)
    check_labels_unseen(config.frozen.weights, config.data, train.images, test.images)
    images = f"{counted(len(train.images), 'image')} with masks to learn from, {len(test.images)} to evaluate on"
    print(f"{describe_source(config.data)}: {images}")
    warn_of_turned_images(splits, config.data)
    encoder = open_patch_encoder(config.frozen, config.data)
    allowed = "left out: a colour baseline has no weights, so its head is not kept"
    require(not config.save or isinstance(encoder, FrozenEncoder), "save", True, allowed)

    with deaths_explained():
        extracted = extract_patches(encoder, splits, config, accelerator)
        print_ignored(extracted, config.data)
        report, evaluated = evaluate_depths(extracted, config)
        if any(extracted.left_out.values()):
            report["left_out"] = extracted.left_out
        extracted.by_depth.clear()  # their files, before those of a baseline are written
        report["baselines"] = {}
        for name, baseline in open_baselines(encoder, config).items():
            of_baseline, _ = evaluate_depths(extract_patches(baseline, extracted.splits, config, accelerator), config)
            report["baselines"][name] = of_baseline | {"results": without_outcomes(of_baseline["results"])}

    report = write_probe_report(path, report, "reading")
    print(table_of_encoders({config.frozen.encoder: report} | report["baselines"]))
    if config.save:
        reading = evaluated[0].reading
        outputs = reading.classify.out_features
        description = HeadDescription(
            task="pixels",
            class_names=report["labels"]["class_names"][:outputs],
            class_numbers=extracted.class_numbers[:outputs].tolist(),
            representation="patches",
            depth=report["protocol"]["chosen_depth"],
            input=describe_input(encoder, config.data, accelerator),
            **describe_encoder(config.frozen),
            learned=describe_training_images(config.data, train.images),
        )
        save_head(path.with_name(f"{path.stem}_head"), reading, description, config.seeds)
    if config.images:
        write_picture(path.with_suffix(".pictures.png"), encoder, extracted, evaluated, config)
    return report


# --- encoders ---


def open_patch_encoder(frozen: EncoderConfig, data: MaskedDataConfig) -> PatchEncoder:
    """The encoder that the settings name; for floor:pixels, the colours and positions of patches.

    Raises:
        Unavailable: it has no patches.
    """
    encoder = open_frozen_encoder(frozen, data)
    if isinstance(encoder, FrozenEncoder):
        patch_grid(encoder.model)  # says that a model has none
        return encoder.to(device())
    if encoder.kind != "pixels":
        raise Unavailable(f"encoder is {frozen.encoder}; it must be floor:pixels; floor:colors has no patches")
    return PatchBaseline(encoder.img_size, encoder.crop_pct, (CELLS_PER_SIDE, CELLS_PER_SIDE))


def open_baselines(encoder: PatchEncoder, config: SegmentationConfig) -> dict[str, PatchEncoder]:
    """The baselines of an encoder, with the same patches."""
    baselines: dict[str, PatchEncoder] = {}
    if config.baselines and isinstance(encoder, FrozenEncoder):
        if not config.frozen.random:
            baselines["random weights"] = open_patch_encoder(replace(config.frozen, random=True), config.data)
        grid = patch_grid(encoder.model)
        baselines["colour and position"] = PatchBaseline(encoder.img_size, encoder.crop_pct, grid)
    return baselines


# --- readings ---


def evaluate_depths(
    extracted: ExtractedPatches, config: SegmentationConfig
) -> tuple[dict[str, Any], list[EvaluatedReading]]:
    """The report of features at each depth, and the readings at the chosen one, which is evaluated last."""
    evaluated: list[EvaluatedReading] = []

    def evaluate(features: LabelledFeatures) -> list[dict[str, Any]]:
        evaluated[:] = evaluate_readings(features, config)
        return [each.about | {"outcomes": each.outcomes} for each in evaluated]

    return evaluate_by_depth(config, extracted.by_depth, evaluate, "case"), evaluated


def evaluate_readings(features: LabelledFeatures, config: SegmentationConfig) -> list[EvaluatedReading]:
    """Test each reading; the learning rate is chosen on the dev split."""
    evaluated = []
    if "linear" in config.readings:
        scores: dict[float, float | None] = dict.fromkeys(config.lr)
        if len(scores) > 1:
            dev = features.dev_split()
            for lr in scores:
                reading = fit_linear(dev, config, lr, config.seeds[0])
                scores[lr] = score_of(evaluate_reading({}, reading, dev).outcomes)
        lr = best_choice(scores)
        for seed in config.seeds:
            about = {"case": "linear", "seed": seed, "lr": lr, "dev_accuracy": scores[lr]}
            evaluated.append(evaluate_reading(about, fit_linear(features, config, lr, seed), features))
    if "knn" in config.readings:
        about = {"case": "knn", "seed": 0}
        evaluated.append(evaluate_reading(about, fit_neighbours(features, config), features))
    return evaluated


def evaluate_reading(about: dict[str, Any], reading: Reading, features: LabelledFeatures) -> EvaluatedReading:
    """Test a reading on the test images."""
    predicted = predict_pixels(reading, features)
    confusion = count_confusion(torch.from_numpy(features.test_labels), predicted, len(features.class_names))
    outcomes = Outcomes("pixels", confusion.sum(2), confusion, features.class_names, features.test_images)
    return EvaluatedReading(about, reading, predicted, outcomes)


# --- tables and the picture ---


def print_ignored(extracted: ExtractedPatches, data: MaskedDataConfig) -> None:
    """Print the share of the masks' pixels that is ignored."""
    features = next(iter(extracted.by_depth.values()))
    train, test = (f"{(masks == IGNORED_CLASS).mean():.1%}" for masks in (features.train_labels, features.test_labels))
    setting = f"data.ignore_index is {as_words(data.ignore_index)}"
    print(f"{train} of the pixels to learn from and {test} of those to evaluate on are ignored ({setting})")


def table_of_encoders(reports: dict[str, dict[str, Any]]) -> str:
    """Mean IoU of each reading, at the chosen depth, of the encoder and its baselines by name."""
    rows = []
    for name, report in reports.items():
        ious = [KINDS["pixels"].text_of_scores(summary) for summary in report["summary"].values()]
        rows.append([name, str(report["protocol"]["chosen_depth"]), *ious])
    readings = next(iter(reports.values()))["summary"]
    return markdown_table(["mean IoU (%)", "depth", *readings], rows)


@figure_style()
def write_picture(
    path: Path,
    encoder: PatchEncoder,
    extracted: ExtractedPatches,
    evaluated: Sequence[EvaluatedReading],
    config: SegmentationConfig,
) -> None:
    """Write image, mask and predictions of some held-out images."""
    test = extracted.splits[1]
    chosen = evenly_spaced(len(test.images), config.images)
    views = masked_views(encoder, test, config)
    samples = [views[FIXED_VIEW, index] for index in chosen.tolist()]
    images = as_rgb(stretch(torch.stack([sample.images for sample in samples]))).movedim(1, -1).numpy()
    columns = {"mask": np.stack([sample.labels.numpy() for sample in samples])}
    for each in evaluated:  # of several seeds the last
        columns[each.about["case"]] = extracted.class_numbers[each.predicted[chosen]]
    plot_segmentation(images, columns, 1 + int(extracted.class_numbers[-1])).savefig(path, dpi=DPI)
    print(f"wrote {path}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Evaluate with the settings of the command line, or of `arguments`."""
    return run(*parse_and_load(SegmentationConfig, arguments))


if __name__ == "__main__":
    run_main(main)

"""Predictions of a classifier for new images: a table with the names of classes, or masks with the class of each pixel.

    python evaluation/predict.py --classifier runs/birds_finetuned --data.path FOLDER --out predictions.csv

A row for each image: `file`, `split`, the likeliest classes by name with their probabilities, the probability of each
class, and `error`. An image that cannot be decoded has no prediction, and its error says why. After an interruption
the same command continues. The classifier is a fine-tuned or supervised run, a head that `mpp linear --save true` or
`mpp segmentation --save true` kept, or a model from timm with its head.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image

import mpp
from evaluation.config import MaskedDataConfig, PredictConfig, ProbeDataConfig
from evaluation.frozen.features import describe_precision
from evaluation.frozen.run_images import LoadedSplits, note_other_images, parse_and_load
from evaluation.metrics.scoring import Outcomes, without_nan
from evaluation.patches.masks import with_image_column
from evaluation.predictions.classes import has_known_labels, label_columns, match_labels
from evaluation.predictions.learned import (
    learned_label_column,
    tell_apart,
    with_learned_label,
)
from evaluation.predictions.mask_scores import images_with_masks, outcomes_of_masks
from evaluation.predictions.masks import write_classes
from evaluation.predictions.opening import (
    ClassifierSource,
    digest_network,
    find_classifier,
    find_named_classifier,
    open_classifier,
    open_pixel_classifier,
)
from evaluation.predictions.other_kinds import (
    ROWS,
    OtherPredictions,
    OutputRows,
    outcomes_of_splits,
    read_outputs,
)
from evaluation.predictions.page import RowImages, Thumbnail, write_predictions_page
from evaluation.predictions.pixels import PixelClassifier, PixelRows
from evaluation.predictions.summary import (
    Predictions,
    outcomes_by_split,
    print_classes,
    print_summary,
    read_predictions,
)
from evaluation.supervision.classifiers import Classifier, FrozenClassifier
from evaluation.tables.given import given_columns
from evaluation.tables.images import folder_of, identify_splits, images_of_splits, load_all_splits
from evaluation.tables.parts import IDENTITY_ENTRIES, about_file, is_begun, read_about, write_table
from mpp.config import RunConfig, changed_settings, flatten, rebuild, require
from mpp.config.parsing import read
from mpp.data.data_path import describe_source
from mpp.data.decoding.pictures import without_size_limit
from mpp.runtime.files import write_complete
from mpp.runtime.messages import note
from mpp.runtime.start import run_main, start_alone
from mpp.training.run_folder import refuse_among_images

MASKS_PER_PART = 256  # images, which take longer than those of a class each


def predict(config: PredictConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such classifier or images, or the file is another table.
    """
    accelerator = start_alone(
        RunConfig(precision=config.precision, trackers=(), threads=config.threads), "a table is written"
    )
    find_named_classifier.cache_clear()  # the classifier may be another one than at the last call of this process
    classifier_source = find_classifier(config)
    note_precision(classifier_source, accelerator)
    is_of_pixels = classifier_source.head is not None and classifier_source.head.description.task == "pixels"
    refuse_settings_of_others(config, is_of_pixels)
    predict_all = write_predicted_masks if is_of_pixels else write_predicted_classes
    return predict_all(config, classifier_source, accelerator, loaded)


def refuse_settings_of_others(config: PredictConfig, is_of_pixels: bool) -> None:
    """Raise UserError at a setting that the other kind of classifier has."""
    of_images = ("top", "probabilities")
    of_pixels = ("overlays", "data.mask_column", "data.ignore_index")
    kind = "the class of each pixel" if is_of_pixels else "a class for each image"
    for name, value in changed_settings(config).items():
        is_of_others = name in (of_images if is_of_pixels else of_pixels)
        require(not is_of_others, name, value, f"left out: {config.classifier} predicts {kind}")


def write_predicted_classes(
    config: PredictConfig, classifier_source: ClassifierSource, accelerator: Accelerator, loaded: LoadedSplits | None
) -> Path:
    """Write the table of a classifier of images: see `predict`."""
    classifier = open_classifier(classifier_source, config.data.channels)
    note_other_images(classifier_source.encoder, config.data, classifier_source.how_read)
    data = image_settings(config, classifier.crop_pct, ProbeDataConfig)
    kind = classifier.label_kind
    splits = load_all_splits(data, loaded)
    data = with_learned_label(data, classifier_source, splits)
    images = images_of_splits(data, splits, with_labels=True, label_kind=kind)
    labelled = has_known_labels(images, classifier.class_names, label_columns(data, images, splits))
    if kind != "class":
        require(config.top == PredictConfig.top, "top", config.top, f"left out: {config.classifier} predicts {kind}")
    if kind == "number":
        allowed = f"left out: {config.classifier} predicts a number, which has none"
        require(config.probabilities, "probabilities", config.probabilities, allowed)
    images, splits, note_of_images = tell_apart(images, splits, classifier_source, data)
    network = FrozenClassifier(classifier).to(accelerator.device)
    top = min(config.top, classifier.classes)
    rows = ROWS[kind](classifier, network, data, top, config.probabilities, labelled, folder_of(data), accelerator)
    about = describe_classifier(config, classifier, accelerator)
    out = Path(config.out)
    shown_as_label = {"label"} if labelled and data.label_column in (None, "label") else set()
    given = given_columns(splits, out, {each.image_column for each in images} | shown_as_label)
    identity = about | given.identity() | identify_splits(data, images, with_labels=labelled)
    write_table(out, identity, images, given.joined_to(rows.rows), "predictions")
    about |= described_note(note_of_images)
    if isinstance(rows, OutputRows):
        outputs = read_outputs(out, rows.output_columns())
        if labelled and not rows.output_columns():
            note("no figures: they need the probability of each class (--probabilities true)")
        write_summary_and_page(config, about, outputs, outcomes_of_splits(outputs, images, rows) if labelled else {})
        return out
    predictions = read_predictions(out, classifier.class_names, labelled)
    outcomes = {}
    if labelled:
        outcomes = outcomes_by_split(predictions, *match_labels(images, classifier.class_names))
    write_summary_and_page(config, about, predictions, outcomes, RowImages(images, data))
    return out


def image_settings(config: PredictConfig, crop_pct: float, settings: type[ProbeDataConfig]) -> ProbeDataConfig:
    """The settings of the images, with the crop of the classifier where there is no other.

    Args:
        settings: with masks, or without: a column `mask` of a list of images then is one as any other.
    """
    return rebuild(settings(), flatten(config.data) | {"eval_crop": config.data.eval_crop or crop_pct})


def write_predicted_masks(
    config: PredictConfig, classifier_source: ClassifierSource, accelerator: Accelerator, loaded: LoadedSplits | None
) -> Path:
    """Write the masks and the table of a classifier of pixels: see `predict`.

    Raises:
        UserError: the folder of masks or overlays may hold others, or would be among the images.
    """
    refuse_among_images("out", Path(config.out), config.data.path)
    classifier = open_pixel_classifier(classifier_source, config.data.channels)
    note_other_images(classifier_source.encoder, config.data, classifier_source.how_read)
    classifier.encoder.to(accelerator.device)
    classifier.reading.to(accelerator.device)
    data = image_settings(config, classifier.crop_pct, MaskedDataConfig)
    whole_splits = load_all_splits(data, loaded)
    data = with_image_column(data, next(iter(whole_splits.values())).features)
    images = images_of_splits(data, whole_splits)
    images, splits, note_of_images = tell_apart(images, whole_splits, classifier_source, data)
    masked = images_with_masks(images, whole_splits, data)  # before hours of predictions
    out = Path(config.out)
    masks = out.with_name(f"{out.stem}_masks")
    overlays = out.with_name(f"{out.stem}_overlays") if config.overlays else None
    was_complete = out.exists()
    rows = PixelRows(classifier, data, masks, overlays, folder_of(data), accelerator)
    about = describe_pixel_classifier(config, classifier, accelerator)
    given = given_columns(splits, out, {each.image_column for each in images} | {data.mask_column})
    identity = about | given.identity() | identify_splits(data, images)
    is_new = not (was_complete or is_begun(out, identity))
    for folder in filter(None, (masks, overlays)):
        allowed = f"another: {folder} exists, and may be of other images"
        require(not (is_new and folder.exists()), "out", out, allowed)
    write_table(out, identity, images, given.joined_to(rows.rows), "masks", MASKS_PER_PART)
    allowed = f"deleted, to predict again: its masks in {masks} are gone"
    require(masks.exists() or not was_complete, "out", out, allowed)
    write_classes(masks, classifier.class_numbers, classifier.class_names)
    outcomes = outcomes_of_masks(masked, rows, data)
    about |= described_note(note_of_images)
    row_images = RowImages(images, data)

    def overlay(row: int) -> Image.Image:
        with without_size_limit():
            return Image.open(rows.overlay_file(*row_images.place(row)))

    predictions = read_predictions(out, classifier.class_names, class_numbers=classifier.class_numbers)
    write_summary_and_page(config, about, predictions, outcomes, row_images, overlay if config.overlays else None)
    print_classes(outcomes)
    return out


def describe_pixel_classifier(
    config: PredictConfig, classifier: PixelClassifier, accelerator: Accelerator
) -> dict[str, Any]:
    """The values that a table of masks depends on, besides the images."""
    return {
        "weights": digest_network(torch.nn.ModuleList([classifier.encoder, classifier.reading])),
        "classes": classifier.class_names,
        "class_numbers": classifier.class_numbers,
        "depth": classifier.depth,
        "img_size": list(classifier.encoder.img_size),
        "precision": describe_precision(accelerator),
        "overlays": config.overlays,
    }


def describe_classifier(config: PredictConfig, classifier: Classifier, accelerator: Accelerator) -> dict[str, Any]:
    """The values that the numbers of a table depend on, besides the images."""
    kind = {} if classifier.label_kind == "class" else {"label_kind": classifier.label_kind}
    return kind | {
        "weights": digest_network(classifier.network),
        "classes": classifier.class_names,
        "img_size": list(classifier.img_size),
        "precision": describe_precision(accelerator),
        "top": min(config.top, classifier.classes),
        "probabilities": config.probabilities,
    }


def write_summary_and_page(
    config: PredictConfig,
    about: dict[str, Any],
    predictions: Predictions | OtherPredictions,
    outcomes: Mapping[str, Outcomes],
    images: RowImages | None = None,
    thumbnail: Thumbnail | None = None,
) -> None:
    """Print and keep the summary of a table, and write its page.

    Args:
        about: the values that the table depends on.
        outcomes: of each split with labels.
        images: of its rows; None: the table has no page.
        thumbnail: the picture of a row; None: its image.
    """
    out = Path(config.out)
    summary = predictions.summarize(outcomes)
    print_summary(summary, outcomes, predictions.unreadable_files)
    write_about(config, about | summary)
    written = f"{out}, {about_file(out).name}"
    if config.page and images is None:
        note("no page of predictions: it needs one class per image")
    elif config.page:
        page = out.with_suffix(".html")
        subtitle = f"{config.classifier}, {describe_source(config.data)}, {about['precision']}"
        title = f"Predictions: {out.name}"
        notes = [about["note"]] if "note" in about else []
        pictures = thumbnail or images.thumbnail
        write_predictions_page(page, title, subtitle, predictions, outcomes, images, pictures, notes)
        written += f", {page.name}"
    print(f"wrote {written}: {summary['images']} images, {summary['unreadable']} unreadable")


def write_about(config: PredictConfig, described: dict[str, Any]) -> None:
    """Add the description of a table to the JSON next to it, instead of an earlier one, whose figures may be gone."""
    out = Path(config.out)
    identity = {name: value for name, value in read_about(out).items() if name in IDENTITY_ENTRIES}
    made_by = {"mpp": mpp.__version__, "classifier": config.classifier}
    about = without_nan(identity | made_by | described)
    write_complete(about_file(out), json.dumps(about, indent=1, ensure_ascii=False))


def described_note(text: str) -> dict[str, str]:
    """The entry of a table's description for a note on its images; empty: there is none."""
    return {"note": text} if text else {}


def note_precision(classifier_source: ClassifierSource, accelerator: Accelerator) -> None:
    """Note a precision that is not the one of a kept head."""
    if classifier_source.head is not None:
        trained_in = classifier_source.head.description.input["precision"]
        precision = describe_precision(accelerator)
        if trained_in != precision:
            note(f"the head was trained on features in {trained_in}, and predicts in {precision}: see --precision")


def encoder_of(config: PredictConfig) -> str:
    """The encoder of a classifier: its run says how images are read."""
    return find_classifier(config).encoder


def how_read_of(config: PredictConfig) -> dict[str, Any]:
    """The settings by which a kept head's training images were read, which may not be those of its encoder's run."""
    return find_classifier(config).how_read


def read_settings(arguments: Sequence[str] | None) -> tuple[PredictConfig, LoadedSplits | None]:
    """The settings of the command line, and the images of the classifier's run if these are loaded already."""
    find_named_classifier.cache_clear()
    config, loaded = parse_and_load(PredictConfig, arguments, encoder_of, how_read_of)
    named = read(PredictConfig(), sys.argv[1:] if arguments is None else arguments)
    is_inherited = named.data.label_column is None and config.data.label_column is not None
    learned_column = learned_label_column(find_classifier(config))
    if is_inherited and learned_column is not None:  # which stands before the run's column
        config = rebuild(config, {"data.label_column": None})
    return config, loaded


def main(arguments: Sequence[str] | None = None) -> Path:
    """Predict with the settings of the command line, or of `arguments`."""
    return predict(*read_settings(arguments))


if __name__ == "__main__":
    run_main(main)

"""Predictions of a classifier for new images: a table with the names of classes, or masks with the class of each pixel.

    python evaluation/predict.py --classifier runs/birds_finetuned --data.path FOLDER --out predictions.csv

A row for each image: `file`, `split`, the likeliest classes by name with their probabilities, the probability of each
class, and `error`. An image that cannot be decoded has no prediction, and its error says why. After an interruption
the same command continues. The classifier is a fine-tuned or supervised run, a head that `mpp linear --save true` or
`mpp segmentation --save true` kept, or a model from timm with its head.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.config import EncoderConfig, ExportConfig, MaskedDataConfig, PredictConfig, ProbeDataConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder
from evaluation.frozen.features import describe_precision
from evaluation.frozen.kept_heads import DESCRIPTION_FILE, KeptHead, load_head, rebuild_linear
from evaluation.frozen.known_labels import LabelledImages, find_labelled_images, is_same_place, lineage
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import LoadedSplits, command_of, find_tested_run, parse_and_load, tested_encoder
from evaluation.metrics.scoring import result_entries, without_nan
from evaluation.patches.features import LinearReading, patch_features, upsample
from evaluation.predictions import ImagePredictions, MaskPredictions, Predictions
from evaluation.supervision.classifiers import Classifier, distinct_class_names, load_classifier
from evaluation.tables import Rows, identify_splits, load_all_splits, parts_folder, write_table
from mpp.config import RunConfig, changed_settings, flatten, rebuild, require, sides
from mpp.errors import UserError
from mpp.runtime.files import short_digest
from mpp.runtime.messages import note
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import BEST, fingerprint, weights_file
from mpp.training.run_folder import refuse_among_images

OF_CLASSES = {"top", "probabilities"}
OF_PIXELS = {"overlays", "data.mask_column", "data.ignore_index"}
"""Settings that have no effect on other kinds of labels."""
MAX_CLASSES_PRINTED = 20
LEARNED = "the classifier learned some of these images: figures do not apply to new images, except of its held-out ones"


def predict(config: PredictConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such classifier or images, or the file is another table.
    """
    run = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run, "a table is written")
    found = find_classifier(config)
    classifier = open_classifier(found, config.data.channels)
    kind = classifier.label_kind
    changed = changed_settings(config)
    for name in changed.keys() & {"class": OF_PIXELS, "pixels": OF_CLASSES}.get(kind, OF_CLASSES | OF_PIXELS):
        require(False, name, changed[name], f"left out: labels of {config.classifier} are of the kind {kind}")

    of_kind, usual = ImagePredictions, ProbeDataConfig()  # to which `mask` is a column as any other
    if kind == "pixels":
        of_kind, usual = MaskPredictions, MaskedDataConfig()
    data = rebuild(usual, flatten(config.data) | {"eval_crop": config.data.eval_crop or classifier.crop_pct})
    predictions = of_kind(config, classifier, data, load_all_splits(data, loaded), accelerator)
    weights = (name.encode() + each.numpy().tobytes() for name, each in classifier.network.state_dict().items())
    identity = identify_splits(data, predictions.images) | {
        "top": config.top,
        "probabilities": config.probabilities,
        "overlays": config.overlays,
        "weights": short_digest(weights),
        "label_kind": kind,
        "classes": classifier.class_names,
        "img_size": list(classifier.img_size),
        "precision": describe_precision(accelerator),
    }
    out = Path(config.out)
    refuse_among_images("out", out, data.path)
    about = {"classifier": config.classifier}
    if kind == "pixels":
        about["class_numbers"] = predictions.class_numbers
        identity["masks"] = [data.mask_column, data.ignore_index, *predictions.true_masks]
        masks = predictions.folder("mask")
        is_known = out.exists() or parts_folder(out, identity).exists() or not masks.exists()
        require(is_known, "out", out, f"another: {masks} exists, and may be of other images")
    files = {record["files"] for record in identity["images"]}
    if any(is_same_place(each.source, data) or each.record.get("files") in files for each in found.learned):
        about["note"] = LEARNED
        note(LEARNED)
    return write_table(
        out, identity, predictions.images, predictions.rows, lambda rows: about | describe(predictions, rows)
    )


def describe(predictions: Predictions, rows: Rows) -> dict[str, Any]:
    """Number of images of each predicted class, and figures of each split's labels.

    A report on each split that has labels is written next to the table.
    """
    needs_all = predictions.classifier.label_kind == "several"  # of others they may be large
    frame = rows.to_table([name for name in rows.schema.names if needs_all or name[:2] != "p_"]).to_pandas()
    about: dict[str, Any] = {}
    if "class" in frame:
        counts = frame["class"].value_counts()
        about["predicted"] = counts.to_dict()
        print(counts.head(MAX_CLASSES_PRINTED).to_string())
    for images in predictions.images:
        outcomes = predictions.outcomes(images, frame[frame.split == images.split])
        if outcomes is not None:
            entries = result_entries(outcomes)
            path = Path(predictions.config.out).with_suffix(f".{images.split}.json")
            result = {"case": images.split, "outcomes": outcomes} | entries
            print_details(path, write_report(path, {"results": [result]}))
            about.setdefault("figures", {})[images.split] = entries | {"images": len(outcomes)}
    return without_nan(about)


# --- the classifier ---


class ProbedEncoder(nn.Module):
    """A frozen encoder with a head that a probe has trained: images (B, C, H, W) from 0 to 255 to logits.

    They are (B, classes), or (B, classes, H, W) of a head of pixels. The head computes in float32, as in the probe.
    """

    def __init__(self, encoder: FrozenEncoder, head: KeptHead):
        super().__init__()
        self.encoder, self.about = encoder, head.description
        if self.about.task == "pixels":
            self.head = LinearReading(head.weights["classify.weight"].shape[1], head.weights["untaught"])
            self.head.load_state_dict(head.weights)
        else:
            self.head = rebuild_linear(head)

    def forward(self, images: Tensor) -> Tensor:
        depths, is_of_pixels = [self.about.depth], self.about.task == "pixels"
        if is_of_pixels:
            (features,) = patch_features(self.encoder, images, depths)
        else:
            (features,) = self.encoder(images, self.about.representation, depths)
        with torch.autocast(images.device.type, enabled=False):
            logits = self.head(features.to(images.device, torch.float32))
            return upsample(logits, images.shape[-2:]) if is_of_pixels else logits


@dataclass(frozen=True)
class ClassifierSource:
    """The classifier that the setting `classifier` names."""

    frozen: EncoderConfig
    """The run folder, timm folder or name of the classifier itself; or a kept head's encoder."""
    head: KeptHead | None = None
    """None: the classifier has its head by training."""

    @property
    def how_read(self) -> dict[str, Any]:
        """The settings by which a kept head's training images were read; empty: its head is none, or does not say."""
        return {} if self.head is None else self.head.description.input.get("data", {})

    @property
    def learned(self) -> list[LabelledImages]:
        """The images that it was trained on with their labels: its own, and those of the encoders it builds on."""
        found = [find_labelled_images(encoder) for encoder in lineage(self.frozen.weights)]
        return [each for each in (self.head and self.head.learned, *found) if each is not None]


def find_classifier(config: PredictConfig | ExportConfig) -> ClassifierSource:
    """Find the classifier that the settings name, and its encoder; or the encoder of an export without one.

    Raises:
        UserError: no such classifier, or the encoder of a kept head is gone or another.
    """
    if config.classifier is None:
        return ClassifierSource(replace(config.frozen, encoder=tested_encoder(config)))
    folder, named = Path(config.classifier), changed_settings(config).get("encoder")
    if (folder / DESCRIPTION_FILE).is_file():
        return find_encoder_of_head(load_head(folder), named)
    require(named is None, "encoder", named, f"null with {folder}, which has its own encoder")
    return ClassifierSource(EncoderConfig(str(find_tested_run(folder, "classifier") or folder)))


def find_encoder_of_head(head: KeptHead, named: str | None) -> ClassifierSource:
    """The encoder that a head was trained on, known by its weights: in the run that has the head, or at its old place.

    Args:
        named: the setting `encoder`.
    Raises:
        UserError: it is gone, or another one is in its place.
    """
    about = head.description
    img_size = sides(about.input["img_size"])
    frozen = EncoderConfig(about.encoder, about.checkpoint, about.random, about.seed, img_size)
    if about.weights == "":  # random, or published by timm: known by its name
        allowed = f"null or {about.encoder}, which {head.folder} was trained on"
        require(about.random or named in (None, about.encoder), "encoder", named, allowed)
        return ClassifierSource(replace(frozen, encoder=named or about.encoder), head)
    run, was = head.folder.resolve().parent.parent, about.checkpoint or about.encoder
    places = [named] if named else [str(run), str(run / BEST), was]
    for place in places:
        with suppress(UserError):  # no encoder is there
            if fingerprint(Path(place), on_hub=True) == about.weights:
                setting = "checkpoint" if about.checkpoint else "encoder"
                place = str(weights_file(Path(place), setting)) if about.checkpoint else place
                return ClassifierSource(replace(frozen, **{setting: place}), head)
    ways = f"{' or '.join(places)}: choose it with --encoder"
    raise UserError(f"the encoder that {head.folder} was trained on ({was}) is not at {ways}")


def open_classifier(found: ClassifierSource, channels: int) -> Classifier:
    """Open a classifier: of a head of pixels, `label_kind` is pixels, and the logits are those of each pixel.

    Raises:
        UserError: no classifier there, or one of other channels.
    """
    if found.head is None:
        return load_classifier(found.frozen.encoder, channels, "classifier")
    about = found.head.description
    encoder = open_frozen_encoder(found.frozen, channels)
    outputs = len(found.head.weights["classify.bias"])
    names = distinct_class_names(about.class_names, len(about.class_names))
    kind = "class" if about.task == "classes" else about.task
    network = ProbedEncoder(encoder, found.head).eval()
    return Classifier(network, encoder.img_size, outputs, about.input["crop_pct"], names, kind)


# --- the command line ---


def parse_classifier(config_class: type, arguments: Sequence[str] | None) -> tuple[Any, LoadedSplits | None]:
    """Read a config that may name a classifier: see `parse_and_load`."""

    def source_of(config: PredictConfig | ExportConfig) -> tuple[str, dict[str, Any]]:
        found = find_classifier(config)
        return found.frozen.encoder, found.how_read

    return parse_and_load(config_class, arguments, source_of)


main = command_of(predict, PredictConfig, parse_classifier)


if __name__ == "__main__":
    run_main(main)

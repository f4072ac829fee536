"""Predictions of a classifier for new images: a table with the names of classes, or masks with the class of each pixel.

    python evaluation/predict.py --classifier runs/birds_finetuned --data.path FOLDER --out predictions.csv

A row for each image: `file`, `split`, the likeliest classes by name with their probabilities, the probability of each
class, and `error`. An image that cannot be decoded has no prediction, and its error says why. After an interruption
the same command continues. The classifier is a fine-tuned or supervised run, a head that `mpp linear --save true` or
`mpp segmentation --save true` kept, or a model from timm with its head.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from evaluation.config import MaskedDataConfig, PredictConfig, ProbeDataConfig
from evaluation.figures.charts import write_details
from evaluation.frozen.features import describe_precision
from evaluation.frozen.run_images import LoadedSplits, is_same_place, note_other_images, parse_and_load
from evaluation.metrics.scoring import kind_of, result_entries, without_nan
from evaluation.predictions.classes import ImagePredictions
from evaluation.predictions.masks import MaskPredictions
from evaluation.predictions.opening import ClassifierSource, digest_network, find_classifier, open_classifier
from evaluation.tables import Rows, load_all_splits, parts_folder, write_table
from mpp.config import RunConfig, changed_settings, flatten, rebuild, require
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main, start_alone
from mpp.training.run_folder import refuse_among_images

OF_PIXELS = ("overlays", "data.mask_column", "data.ignore_index")
MAX_CLASSES_PRINTED = 20
WITHOUT_EFFECT = {
    "class": OF_PIXELS,
    "several": (*OF_PIXELS, "top", "probabilities"),
    "number": (*OF_PIXELS, "top", "probabilities"),
    "pixels": ("top", "probabilities"),
}
"""Kind of label that is predicted -> settings that have no effect on it."""
LEARNED = "the classifier learned some of these images: figures do not apply to new images, except of its held-out ones"


def predict(config: PredictConfig, loaded: LoadedSplits | None = None) -> Path:
    """Write the table, or its missing parts, and return its file.

    Raises:
        UserError: no such classifier or images, or the file is another table.
    """
    run = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run, "a table is written")
    found = find_classifier(config.classifier, config.encoder)
    classifier = open_classifier(found, config.data.channels)
    kind = classifier.label_kind
    changed = changed_settings(config)
    for name in changed.keys() & WITHOUT_EFFECT[kind]:
        require(False, name, changed[name], f"left out: labels of {config.classifier} are of the kind {kind}")
    note_other_images(found.encoder, config.data, found.how_read)

    settings = MaskedDataConfig if kind == "pixels" else ProbeDataConfig  # to which `mask` is a column as any other
    eval_crop = config.data.eval_crop or classifier.crop_pct
    data = rebuild(settings(), flatten(config.data) | {"eval_crop": eval_crop})
    splits = load_all_splits(data, loaded)
    predictions = (MaskPredictions if kind == "pixels" else ImagePredictions)(
        config, classifier, data, splits, accelerator
    )
    identity = predictions.identity() | {
        "weights": digest_network(classifier.network),
        "label_kind": kind,
        "classes": classifier.class_names,
        "img_size": list(classifier.img_size),
        "precision": describe_precision(accelerator),
    }
    out = Path(config.out)
    if kind == "pixels":
        refuse_among_images("out", out, data.path)
        masks = predictions.folder("masks")
        is_known = out.exists() or parts_folder(out, identity).exists() or not masks.exists()
        require(is_known, "out", out, f"another: {masks} exists, and may be of other images")
    about = {"classifier": config.classifier}
    files = {record["files"] for record in identity["images"]}
    if any(is_same_place(each.source, data) or each.record.get("files") in files for each in found.learned):
        about["note"] = LEARNED
        note(LEARNED)
    write_table(
        out, identity, predictions.images, predictions.rows, lambda rows: about | describe(out, predictions, rows)
    )
    return out


def describe(out: Path, predictions: ImagePredictions | MaskPredictions, rows: Rows) -> dict[str, Any]:
    """Images and mean probability of each predicted class, shares of the pixels, and figures of each split's labels.

    The figures of each class, and the confusion of classes, are written next to the table.
    """
    needs_all = predictions.classifier.label_kind == "several"
    frame = rows.to_table([name for name in rows.schema.names if needs_all or name[:2] != "p_"]).to_pandas()
    about: dict[str, Any] = {}
    if "class" in frame:
        of_classes = frame["probability"].astype(float).groupby(frame["class"])
        counts = of_classes.agg(images="size", probability="mean").sort_values("images", ascending=False)
        about["predicted"] = counts.to_dict("index")
        print(counts.head(MAX_CLASSES_PRINTED).to_string(float_format="{:.2f}".format))
    if isinstance(predictions, MaskPredictions):
        shares = frame[predictions.share_columns].astype(float).mean()
        about["shares"] = dict(zip(predictions.classifier.class_names, shares, strict=True))
    for images in predictions.images:
        outcomes = predictions.outcomes(images, frame[frame.split == images.split])
        if outcomes is None:
            continue
        entries = result_entries(outcomes) | {"images": len(outcomes)}
        about.setdefault("figures", {})[images.split] = entries
        kind = kind_of(outcomes)
        figures = {kind.score: [entries["accuracy"], *entries["interval"]]} | entries.get("figures", {})
        parts = [f"{kind.headings[name]} {kind.text(name, *numbers)}" for name, numbers in figures.items()]
        unit = f" ({kind.sign})" if kind.sign else ""
        print(f"{images.split}, {counted(len(outcomes), 'labelled image')}{unit}: {', '.join(parts)}")
        of_split = out.with_suffix(f".{images.split}{out.suffix}")
        write_details(of_split, outcomes)
    return without_nan(about)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Predict with the settings of the command line, or of `arguments`."""
    return predict(*read_settings(arguments))


def read_settings(arguments: Sequence[str] | None) -> tuple[PredictConfig, LoadedSplits | None]:
    """The settings of the command line, and the images of the classifier's run if these are loaded already.

    Images are read as a kept head's training images were, or those of the run.
    """
    find = cache(find_classifier)  # reads weights

    def found(config: PredictConfig) -> ClassifierSource:
        return find(config.classifier, config.encoder)

    return parse_and_load(
        PredictConfig, arguments, lambda config: found(config).encoder, lambda config: found(config).how_read
    )


if __name__ == "__main__":
    run_main(main)

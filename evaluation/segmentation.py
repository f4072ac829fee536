"""Frozen features of patches, evaluated on segmentation masks: the class of each pixel.

    python evaluation/segmentation.py --encoder runs/birds
    python evaluation/segmentation.py --encoder runs/mine --data.path SET --data.mask_column mask

Two readings: a batch norm and a linear layer on each patch, trained as DINOv2's linear segmentation is (Oquab et al.,
2023, section 7.4), and the classes of the nearest training patches, without training. Both predictions are upsampled to
the mask. The score is the mean IoU over the classes, of all held-out pixels together.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from evaluation.config import SegmentationConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, patch_grid, resolve_depths
from evaluation.frozen.features import LabelledFeatures, describe_input, describe_training_images, views_for
from evaluation.frozen.kept_heads import save_head
from evaluation.frozen.known_labels import check_labels_unseen
from evaluation.frozen.results import as_baseline, evaluate_by_depth, report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits, command_of
from evaluation.metrics.scoring import Outcomes, best_choice, score_of
from evaluation.patches.features import (
    Encode,
    Reading,
    color_and_position,
    count_confusion,
    extract_patches,
    fit_linear,
    fit_neighbours,
    patch_features,
    predict_pixels,
)
from evaluation.patches.masks import MaskedViews, load_masked_images
from mpp.data.data_path import describe_source
from mpp.data.workers import deaths_explained
from mpp.runtime.hardware import device
from mpp.runtime.messages import counted
from mpp.runtime.start import run_main, start_alone


def run(config: SegmentationConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Evaluate patch features on masks, write the report, and return it.

    Raises:
        UserError: an encoder without patches, or images without masks.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "patches are evaluated")
    path = report_path_of_command(config, "segmentation")
    splits = train, test = load_masked_images(config.data, loaded)
    check_labels_unseen(config.frozen.weights, config.data, train, test)
    counts = f"{counted(len(train), 'image')} with masks to learn from, {len(test)} to evaluate on"
    print(f"{describe_source(config.data)}: {counts}")
    encoder = open_frozen_encoder(config.frozen, config.data.channels).to(device())
    depths = resolve_depths(config.depth, len(encoder.stages))
    views = [MaskedViews(**vars(views_for(encoder, images, config.data))) for images in splits]

    with deaths_explained():
        encode = partial(patch_features, encoder, depths=depths)
        extracted = extract_patches(encode, depths, views, config, accelerator)
        report, head = evaluate_by_depth(config, extracted.by_depth, evaluate_readings, "case")
        if any(extracted.left_out.values()):
            report["left_out"] = extracted.left_out
        extracted.by_depth.clear()  # before those of a baseline are in memory, too
        report["baselines"] = {}
        for name, (depths_there, encode) in open_baselines(encoder, depths, config).items():
            by_depth = extract_patches(encode, depths_there, views, config, accelerator).by_depth
            report["baselines"][name] = as_baseline(evaluate_by_depth(config, by_depth, evaluate_readings, "case")[0])

    report = write_probe_report(path, report, "reading")
    if config.save:
        outputs = head.classify.out_features
        about = describe_input(encoder, config.data, accelerator)
        about["data"] |= {"ignore_index": config.data.ignore_index}
        save_head(
            path,
            head,
            config.frozen,
            task="pixels",
            class_names=report["labels"]["class_names"][:outputs],
            class_numbers=extracted.class_numbers[:outputs].tolist(),
            representation="patches",
            depth=report["protocol"]["chosen_depth"],
            input=about,
            learned=describe_training_images(config.data, train),
        )
    return report


def open_baselines(
    encoder: FrozenEncoder, depths: list[int], config: SegmentationConfig
) -> dict[str, tuple[list[int], Encode]]:
    """The baselines of an encoder by name: depths, and images to features at these."""
    baselines: dict[str, tuple[list[int], Encode]] = {}
    if config.baselines and not config.frozen.random:
        random = open_frozen_encoder(replace(config.frozen, random=True), config.data.channels).to(device())
        baselines["random weights"] = depths, partial(patch_features, random, depths=depths)
    if config.baselines:
        grid = patch_grid(encoder.model)
        baselines["colour and position"] = [1], lambda images: [color_and_position(images, grid)]
    return baselines


def evaluate_readings(features: LabelledFeatures, config: SegmentationConfig) -> list[dict[str, Any]]:
    """The result of each reading, which is its `head`; the learning rate is chosen on the dev split."""
    fitted: list[dict[str, Any]] = []
    if "linear" in config.readings:
        scores: dict[float, float | None] = dict.fromkeys(config.lr)
        if len(scores) > 1:
            dev = features.dev_split()
            for lr in scores:
                scores[lr] = score_of(outcomes_of(fit_linear(dev, config, lr, config.seeds[0]), dev))
        lr = best_choice(scores)
        for seed in config.seeds:
            result = {"case": "linear", "seed": seed, "lr": lr, "dev_accuracy": scores[lr]}
            fitted.append(result | {"head": fit_linear(features, config, lr, seed)})
    if "knn" in config.readings:
        fitted.append({"case": "knn", "seed": 0, "head": fit_neighbours(features, config)})
    return [result | {"outcomes": outcomes_of(result["head"], features)} for result in fitted]


def outcomes_of(reading: Reading, features: LabelledFeatures) -> Outcomes:
    """The outcomes of the test images: the confusion matrix of each."""
    masks, classes = features.test_labels, len(features.class_names)
    pairs = zip(masks, predict_pixels(reading, features.test, masks.shape[1:]), strict=True)
    confusion = np.stack([count_confusion(*pair, classes) for pair in pairs])
    return Outcomes("pixels", confusion.sum(2), confusion, features.class_names, features.test_images)


main = command_of(run, SegmentationConfig)


if __name__ == "__main__":
    run_main(main)

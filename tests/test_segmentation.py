"""Patches evaluated on masks: crops that agree, scores against scikit-learn, both readings against closed forms."""

import datasets
import numpy as np
import pytest
import torch
from conftest import FAST, dataset_of, encoded, picture, read_json, refused
from PIL import Image
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import normalize
from test_intervals import measure
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from evaluation import compare, segmentation
from evaluation.config import MaskedDataConfig, SegmentationConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.results import evaluate_by_depth
from evaluation.metrics.scoring import KINDS, Outcomes, score_of
from evaluation.patches.features import (
    color_and_position,
    count_confusion,
    fit_linear,
    fit_neighbours,
    label_patches,
    masked_loss,
)
from evaluation.patches.masks import (
    IGNORED_CLASS,
    OUTLINES_FILE,
    MaskedViews,
    decode_mask,
    draw_polygons,
    load_masked_images,
)
from mpp.data.columns import without_decoding
from mpp.data.dataset import ImageDataset
from mpp.data.sources import load_splits
from mpp.errors import ReadFailed, UnreadableImage
from mpp.runtime.randomness import FIXED_VIEW

QUICK = (*FAST, "--steps=20", "--lr=0.01", "--seeds=0")
GREY = 100  # between classes, in images that equal their masks


def blocks(seed, size):
    """A mask (H, W) of a few large blocks of the classes 0, 1, 2."""
    rng = np.random.default_rng(seed)
    height, width = size
    mask = np.zeros(size, np.uint8)
    for number in (1, 2):
        top = int(rng.integers(0, height // 2))
        left = int(rng.integers(0, width // 2))
        mask[top : top + height // 2, left : left + width // 2] = number
    return mask


MASK = blocks(0, (8, 9))


def in_rgb(mask):
    """An image (H, W, 3) whose three channels equal a mask."""
    return np.repeat(mask[..., None], 3, -1)


def cell(data):
    """A file as an undecoded column of images has it."""
    return {"bytes": data, "path": None}


def images_with_masks(images, masks):
    """A dataset of image files, and a column of mask files."""
    of_masks = dataset_of(masks).rename_column("image", "classes")
    return datasets.concatenate_datasets([dataset_of(images), of_masks], axis=1)


def masked_parquet(folder, broken=(), without=(), number=lambda mask: mask):
    """A folder of 16 images that equal their masks, half of them held out.

    Args:
        broken: images whose masks are no images.
        without: images that are left out.
        number: classes to the numbers in the files of the masks.
    """
    masks = [blocks(seed, (40, 48)) for seed in range(16)]
    files = [b"none" if index in broken else encoded(number(mask)) for index, mask in enumerate(masks)]
    rows = images_with_masks([encoded(in_rgb(mask * GREY)) for mask in masks], files)
    folder.mkdir()
    for split, half in (("train", range(8)), ("test", range(8, 16))):
        rows.select([index for index in half if index not in without]).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def segment(encoder, images, *options):
    """The report on patches of the images of a folder or a file."""
    return segmentation.main(
        [f"--encoder={encoder}", f"--data.path={images}", "--data.mask_column=classes", *QUICK, *options]
    )


@pytest.mark.parametrize("size, view, crop", [((37, 91), (32, 32), 0.875), ((120, 33), (24, 40), 1.0)])
def test_image_and_mask_get_the_same_crop(size, view, crop):
    """Of a mask whose classes are the numbers of its rows, or columns, and an image that equals it."""
    masks = np.indices(size).astype(np.uint8)
    cells = {"image": [cell(encoded(in_rgb(mask))) for mask in masks], "mask": [cell(encoded(mask)) for mask in masks]}
    images = ImageDataset(datasets.Dataset.from_dict(cells), "image", None, "train")
    views = MaskedViews(images, MaskedDataConfig(eval_crop=crop), view)
    for number, mask in enumerate(masks):
        sample = views[FIXED_VIEW, number]
        assert sample.labels.shape == view and {*sample.labels.flatten().tolist()} <= {*mask.flat}
        inner = (sample.images[0].float() - sample.labels)[1:-1, 1:-1]  # a crop that is one pixel off differs by 1
        assert inner.abs().max() <= 1 and inner.mean().abs() < 0.3


def test_scores_are_scikit_learns(rng):
    truth = rng.choice([0, 1, 2, 4, 5], (7, 9, 11))  # nothing is of class 3
    predicted = rng.choice([0, 1, 2, 4], (7, 9, 11))
    truth[0, :4] = IGNORED_CLASS
    confusion = np.stack([count_confusion(*pair, 6) for pair in zip(truth, predicted, strict=True)])
    outcomes = Outcomes("pixels", confusion.sum(2), confusion)
    scores = measure(outcomes)
    ious = KINDS["pixels"].class_table(outcomes)["IoU (%)"].to_numpy() / 100
    baseline = KINDS["pixels"].baselines(outcomes.targets)["most frequent class"]
    counted = truth != IGNORED_CLASS
    truth, predicted = truth[counted], predicted[counted]
    assert (confusion.sum(0) == confusion_matrix(truth, predicted, labels=range(6))).all()
    expected = jaccard_score(truth, predicted, average=None)
    assert scores["mean_iou"] == pytest.approx(expected.mean(), abs=1e-12)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(truth, predicted), abs=1e-12)
    assert ious[[0, 1, 2, 4, 5]] == pytest.approx(expected, abs=1e-12) and np.isnan(ious[3])
    constant = np.full_like(truth, np.bincount(truth).argmax())
    assert baseline == pytest.approx(jaccard_score(truth, constant, average="macro"), abs=1e-12)


def test_a_patch_is_of_its_most_frequent_class_and_without_pixels_that_count_of_none():
    mask = np.array([[[0, 0, 1, -1], [0, 2, -1, -1], [-1, -1, 2, 2], [-1, -1, 2, 0]]], np.int16)
    features = LabelledFeatures(np.zeros((1, 2, 2, 1)), mask, None, None, ["a", "b", "c"])
    assert label_patches(features).tolist() == [[[0, 1], [IGNORED_CLASS, 2]]]


def some_features(seed=0):
    """Features of 2 x 3 patches, each of one class, and their masks: 20 images to train on, 6 to test on."""
    rng = np.random.default_rng(seed)
    parts = []
    for count in (20, 6):
        classes = rng.integers(0, 3, (count, 2, 3))
        noise = rng.normal(size=(count, 2, 3, 5))
        features = noise + 3 * np.eye(5)[classes]
        masks = classes.repeat(4, 1).repeat(4, 2)
        parts += [features.astype(np.float32), masks.astype(np.int16)]
    return LabelledFeatures(*parts, [f"class {number}" for number in range(6)], kind="pixels")


def test_votes_are_those_of_scikit_learns_neighbours():
    features = some_features()
    config = SegmentationConfig(readings="knn", neighbours=5)
    known = features.train_labels[:, ::4, ::4].flatten()
    votes = fit_neighbours(features, config)(torch.from_numpy(features.test))
    classifier = KNeighborsClassifier(5, weights=lambda far: np.exp(-(far**2) / 2 / 0.07))
    train, test = (normalize(part.reshape(-1, 5)) for part in (features.train, features.test))
    expected = classifier.fit(train, known).predict_proba(test)
    np.testing.assert_allclose(votes.movedim(1, -1).flatten(0, 2)[:, :3], expected, atol=1e-5)


def test_patches_without_a_class_have_no_vote_and_few_are_a_choice():
    features = some_features()
    features.train_labels[:, :4] = IGNORED_CLASS
    patches = torch.from_numpy(features.test)
    lower_half = features._replace(train=features.train[:, 1:], train_labels=features.train_labels[:, 4:])
    votes, of_lower = (fit_neighbours(each, SegmentationConfig())(patches) for each in (features, lower_half))
    assert torch.equal(votes, of_lower)
    seven = 7 * fit_neighbours(features, SegmentationConfig(patches=7, temperature=1e6))(patches)
    assert len(seven.round().unique()) > 1 and torch.allclose(seven, seven.round(), atol=1e-3)


def test_ignored_pixels_teach_nothing():
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    masks = torch.randint(0, 3, (2, 4, 4))
    masks[0, :2] = IGNORED_CLASS
    both = masked_loss(logits, masks), cross_entropy(logits, masks, ignore_index=IGNORED_CLASS)
    assert_close(*both)
    assert_close(*(torch.autograd.grad(each, logits) for each in both))
    assert masked_loss(logits, torch.full_like(masks, IGNORED_CLASS)).item() == 0


def test_a_linear_reading_learns_linear_classes_and_its_rate_is_chosen_on_train():
    config = SegmentationConfig(steps=60, lr=(1e-5, 1e-2), seeds=(0, 1), images_a_step=4)
    features = some_features()
    results = segmentation.evaluate_readings(features, config)
    outcomes = [result.pop("outcomes") for result in results]
    assert [(result["case"], result.get("lr")) for result in results] == [("linear", 1e-2)] * 2 + [("knn", None)]
    assert score_of(outcomes[0]) != score_of(outcomes[1])
    assert min(measure(each)["pixel_accuracy"] for each in outcomes) > 0.75  # upsampled, edges of patches are blurred
    other_test = features._replace(test_labels=features.test_labels[::-1].copy())
    other, *_ = segmentation.evaluate_readings(other_test, config)
    assert other == results[0] | {name: other[name] for name in ("head", "outcomes")}  # test has no part in it


def test_the_rate_rises_over_4_percent_of_the_steps_and_falls_linearly(monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def record(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    fit_linear(some_features(), SegmentationConfig(steps=50, lr=0.1), 0.1, 0)
    assert rates == pytest.approx([0.05, 0.1, *np.arange(48, 0, -1) / 480], abs=1e-12)


@pytest.mark.parametrize("reading", ["linear", "knn"])
def test_a_class_without_a_training_pixel_is_never_predicted(reading):
    """Nor is the ignored one; a class of the test masks alone is all missed."""
    features = some_features()
    features.train_labels[features.train_labels == 1] = 3
    features.test_labels[:, :4] = 5
    for masks in (features.train_labels, features.test_labels):
        masks[masks == 0] = IGNORED_CLASS
    config = SegmentationConfig(readings=reading, steps=1, lr=1e-5, seeds=0)
    (result,) = segmentation.evaluate_readings(features, config)
    outcomes = result["outcomes"]
    assert np.flatnonzero(KINDS["pixels"].confusion(outcomes).sum(0)).tolist() == [2, 3]
    ious = KINDS["pixels"].class_table(outcomes)["IoU (%)"].to_numpy()
    assert np.isnan(ious[[0, 4]]).all() and ious[5] == 0


def test_depth_is_chosen_on_a_part_of_train():
    good, bad = some_features(), some_features(1)
    bad.train[:] = np.random.default_rng(2).normal(size=bad.train.shape)
    config = SegmentationConfig(readings="knn", depth="dev")
    report, _ = evaluate_by_depth(config, {1: good, 2: bad}, segmentation.evaluate_readings, "case")
    (chosen,) = segmentation.evaluate_readings(good, config)
    assert report["protocol"]["chosen_depth"] == 1 and [*report["summary"]] == ["knn"]
    assert report["results"][0]["accuracy"] == score_of(chosen["outcomes"])


def test_colours_and_positions_by_hand():
    image = torch.zeros(1, 3, 4, 6)
    image[0, 0, :2, :3] = 255
    features = color_and_position(image, (2, 2))
    assert features[0, 0, 0].tolist() == [0.5, -0.5, -0.5, -0.25, -0.25]
    assert features[0, 1, 1].tolist() == [-0.5, -0.5, -0.5, 0.25, 0.25]


def test_a_palettes_indices_are_classes_and_colours_and_large_numbers_are_none():
    palette = Image.fromarray(MASK, "P")
    palette.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0])
    decoded = decode_mask(cell(encoded(palette)), MaskedDataConfig())
    assert_close(decoded, torch.tensor(MASK.astype(np.int16)))
    for pixels, message in ((in_rgb(MASK), ": "), (MASK.astype(np.uint16) * 30000, " has the number 60000")):
        with refused(f"^its mask{message}", UnreadableImage):
            decode_mask(cell(encoded(pixels)), MaskedDataConfig())


def test_a_mask_that_cannot_be_read_is_not_called_broken(tmp_path):
    with pytest.raises(ReadFailed):
        decode_mask(cell(None) | {"path": str(tmp_path / "gone.png")}, MaskedDataConfig(read_retries=0))


@pytest.mark.parametrize("ignored", [-9999, 2, None])
def test_pixels_that_do_not_count_have_any_number(ignored):
    mask = np.array([[0, 1, 2], [2, 1, 0]], np.int32)
    mask[0, 0] = 0 if ignored is None else ignored
    decoded = decode_mask(mask, MaskedDataConfig(ignore_index=ignored))
    assert decoded.tolist() == np.where(mask == ignored, IGNORED_CLASS, mask).tolist()


@pytest.mark.parametrize("settings, counts", [({}, (42, 34)), ({"eval_split": None, "eval_fraction": 0.3}, (28, 14))])
def test_the_birds_outlines_are_of_their_images_and_follow_the_settings(settings, counts):
    data = MaskedDataConfig(**settings)
    outlines = read_json(OUTLINES_FILE)
    splits = load_splits(data)
    shares = []
    for images, count in zip(load_masked_images(data), counts, strict=True):
        split = images.origin.split
        rows = without_decoding(splits[split].select(images.origin.indices), "image")
        assert images.rows["image"] == rows["image"] and len(images) == count
        for name, cell_of_mask in zip(rows["id"], images.rows["mask"], strict=True):
            mask = decode_mask(cell_of_mask, data)
            assert np.array_equal(mask, draw_polygons(outlines[split][name]))
            shares.append(mask.float().mean().item())
    assert settings or np.mean(shares) == pytest.approx(0.196, abs=0.001)


def test_birds_without_outlines_are_refused():
    with refused("none of its photographs has an outline"):
        load_masked_images(MaskedDataConfig(eval_split=None, eval_fraction=0.002))


def test_images_whose_mask_cannot_be_decoded_are_left_out_and_numbers_far_apart_change_nothing(
    trained, tmp_path, capsys
):
    lost = (0, 5, 11)
    folders = [
        masked_parquet(tmp_path / "broken", broken=lost, number=lambda mask: 3 + 1000 * mask.astype(np.uint16)),
        masked_parquet(tmp_path / "without", without=lost),
    ]
    broken, without = segment(trained, folders[0]), segment(trained, folders[1], "--baselines=false")
    assert broken["left_out"] == {"train": 2, "test": 1} and "left_out" not in without
    assert broken["results"] == without["results"]
    assert broken["labels"]["class_names"] == ["class 3", "class 1003", "class 2003"]
    assert without["labels"]["class_names"] == ["class 0", "class 1", "class 2"]
    assert capsys.readouterr().err.count("left out: 3 images that cannot be decoded") == 1  # not by each baseline
    with refused(r"its mask: no image file of a known sort.*a probe needs all images"):
        segment(trained, folders[0], "--strict=true")


def test_the_command_evaluates_an_encoder_and_its_baselines(trained, tmp_path, capsys):
    out = tmp_path / "report.json"
    images = masked_parquet(tmp_path / "set")
    report = segment(trained, images, "--depth=all", "--class_names=[soil, crop, weed]", f"--out={out}")
    cases = [(result["case"], result["depth"]) for result in report["results"]]
    assert cases == [("linear", 1), ("knn", 1), ("linear", 2), ("knn", 2)]
    baselines = report["baselines"]
    assert baselines.keys() == {"random weights", "colour and position"}
    color_score = baselines["colour and position"]["summary"]["linear"]["mean"]
    assert color_score > report["labels"]["baselines"]["most frequent class"] + 0.1
    assert out.with_name("report.png").is_file()
    assert "\n| colour and position " in capsys.readouterr().out
    assert report["labels"]["class_names"][-1] == "weed"
    assert "weed," in out.with_name("report.classes.csv").read_text()


def test_no_masks_and_those_of_another_size_are_named(finished_run, tmp_path):
    rows = images_with_masks([encoded(picture())] * 4, [encoded(blocks(0, (20, 20)))] * 4)
    rows.to_parquet(images := tmp_path / "set.parquet")
    with refused(r"train\[.\]: its mask has 20 x 20 pixels, and the image 48 x 40"):
        segment(finished_run, images)
    with refused(r"data\.mask_column is masc; it must be a column of train, which has image"):
        segment(finished_run, images, "--data.mask_column=masc")


def test_a_comparison_has_it_with_its_curve_by_depth(trained, tmp_path):
    (tmp_path / "compare.yaml").write_text(
        f"""
        dir: {tmp_path / "compared"}
        encoders: [{{name: mine, encoder: {trained}}}, {{name: colours, encoder: "floor:pixels"}}]
        evaluations:
        - name: mIoU
          command: segmentation
          options: {{baselines: false, depth: dev, steps: 3, lr: 0.01, seeds: 0, precision: fp32, threads: 1}}
        datasets:
        - name: blocks
          options:
            data.path: {masked_parquet(tmp_path / "set")}
            data.mask_column: classes
            data.image_column: image
            data.workers: 0
        questions: [{{name: all}}, {{name: depth, plot: depth}}]
        """
    )
    compare.main([f"--config={tmp_path / 'compare.yaml'}"])
    results = read_json(tmp_path / "compared" / "results.json")
    assert results["summary"]["all"]["mine"].keys() == {"mIoU linear", "mIoU knn"}
    on_dev = [row for row in results["results"] if row["kind"] == "dev" and row["encoder"] == "mine"]
    assert {row["depth"] for row in on_dev} == {1, 2}
    assert (tmp_path / "compared" / "depth.png").is_file()

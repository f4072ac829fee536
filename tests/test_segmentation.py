"""Patches judged by masks: crops that agree, figures against scikit-learn, both readings against closed forms."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import dataset_of, encoded, picture
from image_files import npy, npz, tiff
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score
from sklearn.neighbors import KNeighborsClassifier

from evaluation import compare, segmentation
from evaluation.config import MaskedDataConfig, SegmentationConfig
from evaluation.frozen.probing import evaluate_by_depth
from evaluation.patches.extraction import MaskedViews, load_masked_images
from evaluation.patches.features import PatchFeatures, color_and_position
from evaluation.patches.masks import IGNORED_CLASS, MaskedImages, decode_mask
from evaluation.patches.outlines import OUTLINES_FILE, draw_mask
from evaluation.patches.readings import choose_labelled_patches, masked_loss, neighbour_votes
from evaluation.patches.scores import count_confusion, score_confusion, score_most_frequent
from evaluation.patches.statistics import class_shares, report_pixels, warn_of_turned_images
from evaluation.patches.tables import class_table
from mpp.data.columns import without_decoding
from mpp.data.dataset import ImageDataset
from mpp.data.sources import load_splits
from mpp.errors import ReadFailed, UnreadableImage, UserError
from mpp.runtime.randomness import FIXED_VIEW

FAST = ("--precision=fp32", "--data.workers=0", "--threads=1", "--steps=20", "--lr=0.01", "--seeds=0")
GREY = 100  # between classes, in images that equal their masks


def blocks(seed: int, size: tuple[int, int]) -> np.ndarray:
    """A mask (H, W) of a few large blocks of the classes 0, 1, 2."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(size, np.uint8)
    for number in (1, 2):
        top, left = (int(rng.integers(0, side // 2)) for side in size)
        mask[top : top + size[0] // 2, left : left + size[1] // 2] = number
    return mask


def masked_parquet(folder, count: int = 16, size: tuple[int, int] = (40, 48)) -> str:
    """A set of images that equal their masks."""
    masks = [blocks(seed, size) for seed in range(count)]
    cells = [{"bytes": encoded(mask), "path": None} for mask in masks]
    rows = dataset_of([encoded(np.repeat(mask[..., None] * GREY, 3, -1)) for mask in masks])
    rows = datasets.Dataset.from_dict(
        {"image": [row["image"] for row in rows.cast_column("image", datasets.Image(decode=False))], "classes": cells},
        datasets.Features({"image": datasets.Image(), "classes": datasets.Image()}),
    )
    folder.mkdir()
    rows.select(range(count // 2)).to_parquet(folder / "train-00000-of-00001.parquet")
    rows.select(range(count // 2, count)).to_parquet(folder / "test-00000-of-00001.parquet")
    return str(folder)


@pytest.mark.parametrize("along", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [(40, 48), (37, 91), (120, 33)])
@pytest.mark.parametrize("view", [(32, 32), (24, 40)])
@pytest.mark.parametrize("crop", [0.875, 1.0])
def test_image_and_mask_get_the_same_crop(along, size, view, crop):
    """Of a mask whose classes are the numbers of its rows, or columns, and an image that equals it."""
    mask = np.indices(size)[along].astype(np.uint8)
    rows = dataset_of([encoded(np.repeat(mask[..., None], 3, -1))]).cast_column("image", datasets.Image(decode=False))
    masks = datasets.Dataset.from_dict({"mask": [{"bytes": encoded(mask), "path": None}]})
    views = MaskedViews(ImageDataset(rows, "image", None, "train"), MaskedDataConfig(eval_crop=crop), view, masks=masks)
    sample = views[FIXED_VIEW, 0]
    assert sample.labels.shape == view and set(sample.labels.unique().tolist()) <= set(mask.flatten().tolist())
    apart = (sample.images[0].float() - sample.labels)[1:-1, 1:-1]  # a crop that is one pixel off is apart by 1
    assert apart.abs().max() <= 1 and apart.mean().abs() < 0.3


@pytest.mark.parametrize("ignored", [True, False])
def test_figures_are_scikit_learns(ignored):
    rng = np.random.default_rng(0)
    truth = rng.choice([0, 1, 2, 4, 5], (7, 9, 11))  # nothing is of class 3
    predicted = rng.choice([0, 1, 2, 4], (7, 9, 11))
    truth[0, :4] = IGNORED_CLASS if ignored else 5
    scores = score_confusion(count_confusion(torch.from_numpy(truth), torch.from_numpy(predicted), 6), np.arange(6))
    counted = truth != IGNORED_CLASS
    truth, predicted = truth[counted], predicted[counted]
    present = np.union1d(truth, predicted)
    mean_iou = jaccard_score(truth, predicted, average="macro", labels=present)
    assert scores["accuracy"] == pytest.approx(mean_iou, abs=1e-12)
    assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(truth, predicted), abs=1e-12)
    ious = dict(zip(present.tolist(), jaccard_score(truth, predicted, average=None, labels=present), strict=True))
    for number, iou in enumerate(scores["iou"]):
        if number in ious:
            assert iou == pytest.approx(ious[number], abs=1e-12)
        else:
            assert iou is None


def test_shares_of_patches_are_counted():
    mask = np.array([[[0, 0, 1, -1], [0, 2, -1, -1], [1, 1, 2, 2], [1, 1, 2, 0]]], np.int16)
    (shares,) = class_shares(mask, (2, 2), 3)
    expected = [[[0.75, 0, 0.25], [0, 0.25, 0]], [[0, 1, 0], [0.25, 0, 0.75]]]
    assert shares[0].tolist() == expected
    (shares,) = class_shares(mask.clip(0), (2, 2), 3)
    assert shares[0].tolist() == [[[0.75, 0, 0.25], [0.75, 0.25, 0]], *expected[1:]]


def some_features(seed: int = 0) -> PatchFeatures:
    """Features of 2 x 3 patches, each of one class, and their masks."""
    rng = np.random.default_rng(seed)
    parts = []
    for count in (20, 6):
        classes = rng.integers(0, 3, (count, 2, 3))
        features = rng.normal(size=(count, 2, 3, 5)) + 3 * np.eye(5)[classes]
        parts += [features.astype(np.float32), classes.repeat(4, 1).repeat(4, 2).astype(np.int16)]
    return PatchFeatures(*parts)


def test_votes_are_those_of_scikit_learns_neighbours():
    features = some_features()
    config = SegmentationConfig(readings="knn", neighbours=5)
    bank, labels = choose_labelled_patches(features, config, 3)
    known = features.train_masks[:, ::4, ::4].flatten()
    assert labels.tolist() == known.tolist() and bank.shape == (120, 5)
    votes = neighbour_votes(torch.from_numpy(features.test), bank, labels, 3, config)
    train, test = (part.reshape(-1, 5) for part in (features.train, features.test))
    train, test = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (train, test))
    classifier = KNeighborsClassifier(5, weights=lambda far: np.exp((1 - far**2 / 2 - 1) / 0.07))
    expected = classifier.fit(train, known).predict_proba(test).reshape(6, 2, 3, 3)
    np.testing.assert_allclose(votes.movedim(1, -1).numpy(), expected, atol=1e-5)


def test_patches_without_a_class_have_no_vote_and_few_are_a_choice():
    features = some_features()
    features.train_masks[:, :4] = IGNORED_CLASS
    bank, labels = choose_labelled_patches(features, SegmentationConfig(patches=1000), 3)
    assert len(bank) == 60 and bank.tolist() == features.train[:, 1].reshape(-1, 5).tolist()
    bank, labels = choose_labelled_patches(features, SegmentationConfig(patches=7), 3)
    assert len(bank) == len(labels) == 7


def test_what_is_ignored_teaches_nothing():
    logits, masks = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randint(0, 3, (2, 4, 4))
    masks[0, :2] = IGNORED_CLASS
    masked_loss(logits, masks).backward()
    assert logits.grad[0, :, :2].abs().max() == 0 and logits.grad[0, :, 2:].abs().min() > 0
    expected = torch.nn.functional.cross_entropy(logits.detach().movedim(1, -1)[masks >= 0], masks[masks >= 0])
    assert masked_loss(logits, masks).item() == pytest.approx(expected.item(), rel=1e-6)
    assert masked_loss(logits, torch.full_like(masks, IGNORED_CLASS)).item() == 0


def test_a_linear_reading_learns_what_is_linear_and_its_rate_is_chosen_on_train():
    config = SegmentationConfig(steps=60, lr=(1e-5, 1e-2), seeds=(0, 1), images_a_step=4, data=MaskedDataConfig())
    features = some_features()
    results = segmentation.evaluate(features, config)
    linear = [result for result in results if result["case"] == "linear"]
    assert [result["lr"] for result in linear] == [1e-2, 1e-2] and len({result["accuracy"] for result in linear}) == 2
    assert min(result["pixel_accuracy"] for result in results) > 0.75  # upsampled, edges of patches are blurred
    other = segmentation.evaluate(features._replace(test_masks=features.test_masks[::-1].copy()), config)
    assert other[0]["dev_accuracy"] == linear[0]["dev_accuracy"]  # test has no part in it


@pytest.mark.parametrize("reading", ["linear", "knn"])
def test_what_no_training_mask_shows_is_never_predicted(reading):
    """Nor is what is ignored; a class of the test masks alone is all missed."""
    features = some_features()
    features.train_masks[features.train_masks == 1] = 3
    features.test_masks[:, :4] = 5
    for masks in (features.train_masks, features.test_masks):
        masks[masks == 0] = IGNORED_CLASS
    config = SegmentationConfig(readings=reading, steps=1, lr=1e-5, seeds=0)
    predictions = {}
    (result,) = segmentation.evaluate(features, config, predictions)
    assert set(predictions[reading].unique().tolist()) == {2, 3}
    assert result["iou"][0] is None and result["iou"][4] is None and result["iou"][5] == 0


def test_depth_is_chosen_on_a_part_of_train():
    good, bad = some_features(), some_features(1)
    noise = PatchFeatures(np.random.default_rng(2).normal(size=bad.train.shape).astype(np.float32), *bad[1:])
    config = SegmentationConfig(readings="knn", depth="dev")
    report = evaluate_by_depth(
        config, {1: noise, 2: good}, lambda of_depth: segmentation.evaluate(of_depth, config), "case"
    )
    assert report["protocol"]["chosen_depth"] == 2 and list(report["summary"]) == ["knn"]


def test_colours_and_positions_by_hand():
    image = torch.zeros(1, 3, 4, 6)
    image[0, 0, :2, :3] = 255
    found = color_and_position(image, (2, 2))
    assert found[0, 0, 0].tolist() == [0.5, -0.5, -0.5, -0.25, -0.25]
    assert found[0, 1, 1].tolist() == [-0.5, -0.5, -0.5, 0.25, 0.25]


MASKS = {
    "palette": (lambda m: Image.fromarray(m, "P"), None),
    "one bit": (lambda m: Image.fromarray(m > 0), None),
    "16 bits": (lambda m: Image.fromarray(m.astype(np.uint16) * 1000), None),
    "too large": (lambda m: Image.fromarray(m.astype(np.uint16) * 30000), "numbers from 0 to 60000; classes are 0"),
    "colours": (lambda m: Image.fromarray(np.repeat(m[..., None], 3, -1)), r"has colours \(RGB\); a mask has one who"),
    "fractions": (lambda m: Image.fromarray(m.astype(np.float32)), "has floating-point numbers; a mask has one whole"),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_numbers(kind):
    made, refusal = MASKS[kind]
    mask = blocks(0, (8, 9))
    image = made(mask)
    if kind == "palette":
        image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0])
    cell = {"bytes": encoded(image, "TIFF" if kind == "fractions" else "PNG"), "path": None}
    if refusal:
        with pytest.raises(UnreadableImage, match=refusal):
            decode_mask(cell, MaskedDataConfig())
    else:
        expected = {"one bit": mask > 0, "16 bits": mask.astype(int) * 1000}.get(kind, mask)
        assert decode_mask(cell, MaskedDataConfig()).tolist() == expected.astype(int).tolist()


TURNED = Image.Exif()
TURNED[274] = 6
MASK = blocks(0, (8, 9))
PALETTE = np.arange(3 * 256, dtype=np.uint16).reshape(3, 256)
FILES = {
    "TIFF": (tiff(MASK), MASK),
    "TIFF of 16 bits": (tiff(MASK.astype(np.uint16) * 1000), MASK.astype(int) * 1000),
    "signed TIFF": (tiff(MASK.astype(np.int8)), MASK),
    "TIFF of 64 bits, LZW": (tiff(MASK.astype(np.int64), compression="lzw"), MASK),
    "TIFF with a palette": (tiff(MASK, photometric="palette", colormap=PALETTE), MASK),
    "TIFF of bits": (encoded(Image.fromarray(MASK > 0), "TIFF"), MASK > 0),
    "turned TIFF": (tiff(MASK, extratags=[(274, "H", 1, 6, True)]), np.rot90(MASK, -1)),
    "turned PNG": (encoded(MASK, exif=TURNED), np.rot90(MASK, -1)),
    "npy": (npy(MASK), MASK),
    "npz": (npz(MASK), MASK),
    "PGM": (encoded(MASK, "PPM"), MASK),
}


@pytest.mark.parametrize("kind", FILES)
def test_masks_of_any_lossless_file(kind):
    data, expected = FILES[kind]
    found = decode_mask({"bytes": data, "path": None}, MaskedDataConfig())
    assert found.dtype == torch.int16 and found.tolist() == expected.astype(int).tolist()


NO_MASKS = {
    "JPEG": (encoded(MASK, "JPEG"), "compressed as JPEG, which changes numbers; a mask must be lossless, such as PNG"),
    "TIFF with JPEG inside": (tiff(np.kron(MASK, np.ones((4, 4), np.uint8)), compression="jpeg"), "compressed as JPEG"),
    "several bands": (tiff(np.stack([MASK] * 2, -1), photometric="minisblack", planarconfig="contig"), r"\(2, 8, 9\)"),
    "fractions": (npy(MASK / 2), "floating-point numbers"),
    "text": (b"<html>", "an HTML file instead of an image"),
    "nothing": (None, "no bytes"),
}


@pytest.mark.parametrize("kind", NO_MASKS)
def test_other_files_are_no_masks(kind):
    data, message = NO_MASKS[kind]
    with pytest.raises(UnreadableImage, match=f"^its mask: .*{message}"):
        decode_mask({"bytes": data, "path": None}, MaskedDataConfig())


def test_a_mask_that_cannot_be_read_is_not_called_broken(tmp_path):
    with pytest.raises(ReadFailed):
        decode_mask({"bytes": None, "path": str(tmp_path / "gone.png")}, MaskedDataConfig(read_retries=0))


@pytest.mark.parametrize("ignored", [255, -9999, 2, None])
def test_pixels_that_do_not_count_have_any_number(ignored):
    mask = np.array([[0, 1, 2], [2, 1, 0]], np.int32)
    mask[0, 0] = 0 if ignored is None else ignored
    expected = np.where(mask == ignored, IGNORED_CLASS, mask)
    assert decode_mask(mask, MaskedDataConfig(ignore_index=ignored)).tolist() == expected.tolist()


def test_the_birds_outlines_are_of_their_images():
    train, test = load_masked_images(MaskedDataConfig())
    assert len(train.images) == len(train.masks) == 42
    assert len(test.images) == len(test.masks) == 34
    shares = []
    for images, masks in (train, test):
        for index in range(len(images)):
            mask = decode_mask(masks[index]["mask"], MaskedDataConfig())
            assert mask.shape == (120, 120) and set(mask.unique().tolist()) == {0, 1}
            shares.append(mask.float().mean().item())
    assert np.mean(shares) == pytest.approx(0.196, abs=0.001)


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"eval_split": None, "eval_fraction": 0.3}, (28, 14)),
        ({"split": "test", "eval_split": "train"}, (34, 42)),
        ({"train_images": 5}, (5, 34)),
    ],
    ids=["a cut", "the other way round", "few"],
)
def test_the_birds_outlines_follow_the_settings(settings, counts):
    data = MaskedDataConfig(**settings)
    known, splits = json.loads(OUTLINES_FILE.read_text()), load_splits(data)
    for (images, masks), count in zip(load_masked_images(data), counts, strict=True):
        of_split = known[images.origin.split]
        rows = without_decoding(splits[images.origin.split].select(images.origin.indices), "image")
        assert images.rows["image"] == rows["image"] and len(images) == count
        assert [mask["bytes"] for mask in masks["mask"]] == [draw_mask(of_split[name]) for name in rows["id"]]


def test_birds_without_outlines_are_refused():
    with pytest.raises(ValueError, match="none of its photographs has an outline"):
        load_masked_images(MaskedDataConfig(eval_split=None, eval_fraction=0.002))


def test_one_image_leaves_none_to_choose_on():
    features = PatchFeatures(*(part[:1] for part in some_features()))
    with pytest.raises(ValueError, match=r"number of training images is 1; it must be at least 2 where a depth or a r"):
        segmentation.evaluate(features, SegmentationConfig(steps=1, readings="linear"))
    assert segmentation.evaluate(features, SegmentationConfig(steps=1, readings="linear", lr=0.1, seeds=0))


def test_numbers_of_classes_that_are_far_apart_change_nothing():
    plain, config = some_features(), SegmentationConfig(steps=3, lr=0.01, seeds=0)
    most = int(max(plain.train_masks.max(), plain.test_masks.max()))
    numbers = np.r_[3 + 1000 * np.arange(most + 1), IGNORED_CLASS].astype(np.int16)  # a mask of -1 stays that
    apart = plain._replace(train_masks=numbers[plain.train_masks], test_masks=numbers[plain.test_masks])
    results = [*segmentation.evaluate(plain, config), score_most_frequent(plain)]
    results_apart = [*segmentation.evaluate(apart, config), score_most_frequent(apart)]
    for one, other in zip(results, results_apart, strict=True):
        assert one["accuracy"] == other["accuracy"] and one["pixel_accuracy"] == other["pixel_accuracy"]
        assert other["iou"][3::1000] == one["iou"]
        assert set(other["iou"]) - set(one["iou"]) == {None}


def test_images_whose_mask_cannot_be_decoded_are_left_out(trained, tmp_path, capsys):
    data, without = (Path(masked_parquet(tmp_path / name)) for name in ("all", "without"))
    for split, broken in (("train", [0, 5]), ("test", [3])):
        file = f"{split}-00000-of-00001.parquet"
        rows = datasets.Dataset.from_parquet(str(data / file)).cast_column("classes", datasets.Image(decode=False))
        kept = rows.select([index for index in range(len(rows)) if index not in broken])
        kept.cast_column("classes", datasets.Image()).to_parquet(without / file)
        cells = [{"bytes": b"none", "path": None} if i in broken else row["classes"] for i, row in enumerate(rows)]
        rows = rows.remove_columns("classes").add_column("classes", cells, feature=datasets.Image(decode=False))
        rows.cast_column("classes", datasets.Image()).to_parquet(data / file)
    reports = []
    words = [f"--encoder={trained}", "--data.mask_column=classes", "--images=3", *FAST]
    for folder in (data, without):
        segmentation.main([*words, f"--data.path={folder}", f"--out={tmp_path / 'r.json'}"])
        reports.append(json.loads((tmp_path / "r.json").read_text()))
    assert [report.get("left_out") for report in reports] == [{"train": 2, "test": 1}, None]
    assert reports[0]["results"] == reports[1]["results"]
    assert "3 images that cannot be decoded are left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"its mask: no image file of a known sort; .*a probe needs all images"):
        segmentation.main([*words, f"--data.path={data}", "--strict=true", f"--out={tmp_path / 'r.json'}"])


def test_the_command_judges_an_encoder_and_what_it_has_to_beat(trained, tmp_path, capsys):
    out = tmp_path / "report.json"
    data = masked_parquet(tmp_path / "set")
    words = [f"--data.path={data}", "--data.mask_column=classes", "--depth=all", f"--out={out}", "--images=2"]
    segmentation.main([f"--encoder={trained}", *words, *FAST])
    report = json.loads(out.read_text())
    assert [(row["case"], row["depth"]) for row in report["results"]] == [
        *(("linear", 1), ("knn", 1), ("linear", 2), ("knn", 2))
    ]
    assert set(report["baselines"]) == {"random weights", "colour and position", "the most frequent class"}
    floor, least = (report["baselines"][name] for name in ("colour and position", "the most frequent class"))
    assert floor["summary"]["linear"]["mean"] > least[0]["accuracy"] + 0.1
    assert out.with_suffix(".pictures.png").is_file() and out.with_suffix(".png").is_file()
    printed = capsys.readouterr().out
    assert "8 images with masks to learn from, 8 to judge by" in printed and "| class 2 |" in printed


def test_a_comparison_has_it_with_its_curve_by_depth(trained, tmp_path):
    data = masked_parquet(tmp_path / "set")
    options = {"data.path": data, "data.mask_column": "classes", "data.image_column": "image", "data.workers": 0}
    settings = {
        "baselines": False,
        "images": 0,
        "depth": "dev",
        "steps": 3,
        "lr": 0.01,
        "seeds": 0,
        "precision": "fp32",
        "threads": 1,
    }
    config = {
        "dir": str(tmp_path / "compared"),
        "encoders": [{"name": "mine", "encoder": str(trained)}, {"name": "colours", "encoder": "floor:pixels"}],
        "evaluations": [{"name": "mIoU", "command": "segmentation", "options": settings}],
        "datasets": [{"name": "blocks", "options": options}],
        "questions": [{"name": "all"}, {"name": "depth", "plot": "depth"}],
    }
    file = tmp_path / "compare.yaml"
    file.write_text(json.dumps(config))
    compare.main([f"--config={file}"])
    found = json.loads((tmp_path / "compared" / "results.json").read_text())
    assert set(found["summary"]["all"]["mine"]) == {"mIoU linear", "mIoU knn"}
    assert {row["depth"] for row in found["results"] if row["kind"] == "dev" and row["encoder"] == "mine"} == {1, 2}
    assert (tmp_path / "compared" / "depth.png").is_file()


REFUSED = {
    "no such column": (["--data.mask_column=mask"], r"mask_column is mask; it must be one of image, classes"),
    "no patches": (["--encoder=resnet10t", "--random=true"], "resnet10t, which has no patches to judge: ResNet"),
    "no such depth": (["--depth=3"], "depth is 3; it must be from 1 to 2, last, all or dev"),
    "another floor": (["--encoder=floor:colors"], "floor:colors; it must be floor:pixels"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_judged_is_refused(refused, finished_run, tmp_path):
    words, message = REFUSED[refused]
    data = f"--data.path={masked_parquet(tmp_path / 'set', 4)}", "--data.mask_column=classes"
    with pytest.raises(ValueError, match=message):
        segmentation.main([f"--encoder={finished_run}", *data, f"--out={tmp_path}/o.json", *FAST, *words])


def test_a_mask_of_another_size_is_named(finished_run, tmp_path):
    cells = [{"bytes": encoded(blocks(0, (20, 20))), "path": None}] * 4
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": encoded(picture(0)), "path": None}] * 4, "mask": cells},
        datasets.Features({"image": datasets.Image(), "mask": datasets.Image()}),
    )
    rows.to_parquet(tmp_path / "set.parquet")
    with pytest.raises(ValueError, match=r"train\[.\]: its mask has 20 x 20 pixels, and the image 48 x 40"):
        segmentation.main([f"--encoder={finished_run}", f"--data.path={tmp_path}/set.parquet", *FAST])


def masked_of(images: list[bytes], masks: list[bytes]) -> MaskedImages:
    """Images and their masks, as `load_masked_images` has them."""
    rows = dataset_of(images).cast_column("image", datasets.Image(decode=False))
    cells = [{"bytes": data, "path": None} for data in masks]
    return MaskedImages(ImageDataset(rows, "image", None, "train"), datasets.Dataset.from_dict({"mask": cells}))


def test_images_that_are_turned_without_their_masks_are_named_once(capsys):
    turned, plain, mask = encoded(MASK, "JPEG", exif=TURNED), encoded(MASK, "JPEG"), encoded(MASK)
    splits = masked_of([turned, plain] * 3, [mask] * 6), masked_of([turned, b"broken"], [mask, mask])
    warn_of_turned_images(splits, MaskedDataConfig())
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "warning: 4 images are turned by the orientation tag in their files" in said
    assert "such as train[0], train[2], train[4]:" in said


@pytest.mark.parametrize("image_turned", [True, False])
def test_masks_that_say_their_own_orientation_need_no_warning(image_turned, capsys):
    tag = {"exif": TURNED} if image_turned else {}
    warn_of_turned_images([masked_of([encoded(MASK, "JPEG", **tag)], [encoded(MASK, **tag)])], MaskedDataConfig())
    assert capsys.readouterr().err == ""


def pixels_of(numbers: list[int]) -> PatchFeatures:
    """Masks of 100 x 200 pixels, the first of which have these numbers, and the others 0; held out there is only 0."""
    masks = np.zeros((1, 100, 200), np.int16)
    masks.flat[: len(numbers)] = numbers
    return PatchFeatures(np.zeros((1, 1, 1, 1), np.float32), masks, np.zeros((1, 1, 1, 1), np.float32), masks * 0)


@pytest.mark.parametrize(
    ("count", "share", "warned"), [(0, "0.0%", False), (4000, "20.0%", False), (4001, "20.0%", True)]
)
def test_ignored_pixels_are_told_and_above_a_fifth_their_setting_is_named(count, share, warned, capsys):
    report_pixels(pixels_of([IGNORED_CLASS] * count), MaskedDataConfig(ignore_index=7))
    said = capsys.readouterr()
    told = f"{share} of the pixels to learn from and 0.0% of those to judge by are ignored (data.ignore_index is 7)\n"
    assert said.out == told
    assert ("are 7, which data.ignore_index leaves out" in said.err) == warned


def test_classes_of_next_to_no_pixels_are_named(capsys):
    """Of 40,000 pixels, 4 are a ten-thousandth."""
    report_pixels(pixels_of([300] * 4), MaskedDataConfig(ignore_index=None))
    said = capsys.readouterr()
    assert said.err == "" and "(data.ignore_index is null)" in said.out
    report_pixels(pixels_of([300] * 3 + [4] * 2 + [5] * 3 + [6] * 1 + [9] * 50), MaskedDataConfig())
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "warning: 4 of the masks' classes have less than 0.01% of the pixels" in said
    assert "such as class 6 (1 of 40000), class 4 (2 of 40000), class 5 (3 of 40000);" in said


def test_numbers_that_no_pixel_has_are_no_rows():
    printed = class_table([{"case": "knn", "iou": [0.5, None, 0.25]}])
    assert "class 0" in printed and "class 1" not in printed and "class 2" in printed


def test_a_column_of_jpeg_masks_is_refused(tmp_path):
    path = masked_parquet(tmp_path / "set", 4)
    rows = datasets.load_dataset(path)["train"]
    cells = [{"bytes": encoded(MASK, "JPEG"), "path": None}] * len(rows)
    rows = rows.remove_columns("classes").add_column("classes", cells, feature=datasets.Image())
    rows.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    data = MaskedDataConfig(path=path, mask_column="classes")
    with pytest.raises(
        UserError, match=r"mask_column is classes, of JPEG files; it must be a column of lossless masks"
    ):
        load_masked_images(data)

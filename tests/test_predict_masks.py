"""Predicted masks: the largest logit at an image's own size, as files, resumed to the same bytes."""

import json
import shutil

import classified_images
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from classified_images import read_csv
from colours import write
from conftest import FAST, dataset_of, encoded, interrupted_after, picture, read_json, refused
from model_inputs import by_timm
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import jaccard_score
from torchvision.transforms import v2

from evaluation import segmentation, tables
from evaluation.config import MaskedDataConfig
from evaluation.patches.masks import decode_mask
from evaluation.predictions import MaskPredictions, class_colors, draw_mask, draw_overlay

PROBE = ("--steps=20", "--lr=0.01", "--seeds=0", "--readings=linear", "--baselines=false")
SIZES = {"wide, ü.png": (50, 90), "sub/square.jpg": (64, 64), "sub/square.png": (40, 40), "tall.png": (130, 36)}


@pytest.fixture(scope="module")
def head(finished_run, tmp_path_factory):
    """The kept head of the patches of a run, for the outlined birds."""
    run = shutil.copytree(finished_run, tmp_path_factory.mktemp("probed") / "run")
    segmentation.main([f"--encoder={run}", *FAST, *PROBE, "--save=true", f"--out={run}/evaluation/s.json"])
    return run / "evaluation" / "s_head"


@pytest.fixture
def images(tmp_path):
    pictures = {name: picture(number, size) for number, (name, size) in enumerate(SIZES.items())}
    files = {name: encoded(each, "JPEG" if name.endswith("jpg") else "PNG") for name, each in pictures.items()}
    return write(tmp_path / "images", files)


def predict_to(out, head, images, *options):
    """The rows of the table by the names of files."""
    return {row["file"]: row for row in read_csv(classified_images.predict_to(out, head, images, *options))}


@torch.no_grad()
def plain_logits(model, weights, pixels):
    """Logits of a window (3, 32, 32) by plain timm and torch: (C, 32, 32)."""
    tokens = model.forward_features((pixels[None] / 255 - 0.5) / 0.5)[:, model.num_prefix_tokens :]
    scaled = (tokens - weights["norm.running_mean"]) / (weights["norm.running_var"] + 1e-5).sqrt()
    normed = scaled * weights["norm.weight"] + weights["norm.bias"]
    logits = normed @ weights["classify.weight"].T + weights["classify.bias"]
    side = round(logits.shape[1] ** 0.5)
    patches = logits[0].T.reshape(1, -1, side, side)
    return F.interpolate(patches, (32, 32), mode="bilinear")[0]


@torch.no_grad()
def plain_mask(head, image, share):
    """The mask of an image by loops over its windows, and the mean probability of its classes."""
    model = by_timm(head.parents[1] / "encoder")
    weights = load_file(head / "head.safetensors")
    whole = v2.functional.pil_to_tensor(Image.open(image).convert("RGB"))
    resized = v2.Resize(round(32 / share), antialias=True)(whole)
    height, width = resized.shape[1:]
    total, count = torch.zeros(2, height, width), torch.zeros(height, width)
    rows, columns = -(-height // 32), -(-width // 32)
    for row in range(rows):
        for column in range(columns):
            top = round(row * (height - 32) / max(1, rows - 1))
            left = round(column * (width - 32) / max(1, columns - 1))
            window = resized[:, top : top + 32, left : left + 32]
            total[:, top : top + 32, left : left + 32] += plain_logits(model, weights, window)
            count[top : top + 32, left : left + 32] += 1
    logits = F.interpolate((total / count)[None], whole.shape[1:], mode="bilinear")[0]
    return logits.argmax(0).numpy(), float(logits.softmax(0).amax(0).mean())


@pytest.mark.parametrize("share", [1.0, 0.875])
def test_a_mask_is_the_largest_logit_at_the_images_own_size(head, images, tmp_path, share):
    rows = predict_to(tmp_path / "p.csv", head, images, f"--data.eval_crop={share}")
    assert rows.keys() == SIZES.keys()
    for name, row in rows.items():
        mask = Image.open(tmp_path / row["mask"])
        numbers = np.array(mask)
        assert mask.mode == "P" and mask.getpalette()[3:6] == [128, 0, 0]
        assert numbers.shape == SIZES[name] == (int(row["height"]), int(row["width"]))
        expected, probability = plain_mask(head, images / name, share)
        assert (numbers != expected).mean() < 0.002  # ties by rounding
        assert float(row["probability"]) == pytest.approx(probability, abs=1e-5)
        assert float(row["share_bird"]) == pytest.approx(numbers.mean(), abs=1e-6)
        read = decode_mask({"bytes": None, "path": str(tmp_path / row["mask"])}, MaskedDataConfig())
        assert (read.numpy() == numbers).all()  # as `mpp segmentation` reads masks
        assert Image.open(tmp_path / row["overlay"]).size == mask.size
    assert rows["sub/square.jpg"]["mask"] == "p_masks/sub/square.jpg.png"  # beside it is a square.png
    about = read_json(tmp_path / "p.csv.json")
    assert about["classes"] == ["background", "bird"] and about["class_numbers"] == [0, 1]


def write_masked(folder, masks):
    """Masks beside the images of a folder, and the list that names them."""
    (folder / "masks").mkdir()
    lines = []
    for place, (name, numbers) in enumerate(masks.items()):
        Image.fromarray(numbers.astype(np.uint8)).save(folder / "masks" / f"{place}.png")
        lines.append(json.dumps({"file_name": name, "mask_file_name": f"masks/{place}.png", "site": f"at {place}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def test_masks_are_scored_beside_those_of_the_images(head, images, tmp_path, capsys, rng):
    """As scikit-learn's Jaccard score of all pixels that count; the classes that the head does not know are missed.

    A broken image has no score.
    """
    assert read_json(head / "head.json")["input"]["data"]["ignore_index"] == 255
    scored = {}
    for name in ("wide, ü.png", "tall.png"):
        scored[name] = rng.choice([0, 1, 7, 255], SIZES[name], p=[0.5, 0.3, 0.1, 0.1])
    others = {"sub/square.jpg": np.zeros((9, 9)), "sub/square.png": np.zeros((40, 40))}  # the first: of another size
    (images / "sub" / "square.png").write_bytes(b"no image")
    write_masked(images, scored | others)
    rows = predict_to(tmp_path / "p.csv", head, images)
    pairs = []
    for name, mask in scored.items():
        predicted = Image.open(tmp_path / rows[name]["mask"])
        pairs.append(np.array([mask, predicted])[:, mask != 255])
    true, predicted = np.concatenate(pairs, 1)
    ious = jaccard_score(true, predicted, labels=[0, 1, 7], average=None)
    figures = read_json(tmp_path / "p.csv.json")["figures"]["all"]
    assert figures["accuracy"] == pytest.approx(ious.mean()) and figures["images"] == 2
    assert figures["figures"]["pixel_accuracy"][0] == pytest.approx((true == predicted).mean())
    by_class = [(row["class"], row["IoU (%)"]) for row in read_csv(tmp_path / "p.all.classes.csv")]
    names = ("background", "bird", "other classes")
    assert by_class == [(name, f"{100 * iou:.1f}") for name, iou in zip(names, ious, strict=True)] and ious[2] == 0
    with refused(r"p\.csv"):
        predict_to(tmp_path / "p.csv", head, images, "--data.ignore_index=7")
    said = capsys.readouterr().err
    assert "its mask has 9 x 9 pixels, and the image 64" in said and "1 image cannot be decoded" in said
    assert rows["sub/square.png"]["mask"] == "" and rows["sub/square.png"]["error"]


def files_in(folder):
    """The table, masks and overlays."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*[gv]") if file.is_file()}


def test_interrupted_masks_are_finished_to_the_same_bytes_with_their_images_alone(head, images, tmp_path, monkeypatch):
    """Others are refused, also before the first part is complete, and when the table is gone: both would be mixed."""
    monkeypatch.setattr(tables, "BATCHES_PER_PART", 2)
    others = shutil.copytree(images, tmp_path / "others")
    (others / "tall.png").rename(others / "other.png")
    out, whole = tmp_path / "b" / "p.csv", tmp_path / "a"
    out.parent.mkdir()
    whole.mkdir()
    of_others = r"out is .*p\.csv; it must be another: .*p_masks exists, and may be of oth"
    for calls in (1, 2):
        with interrupted_after(MaskPredictions, "write", calls):
            predict_to(out, head, images)
        with refused(of_others):
            predict_to(out, head, others)
    for folder in (out.parent, whole):
        predict_to(folder / "p.csv", head, images)
    assert files_in(out.parent) == files_in(whole) and len(files_in(whole)) == 9
    assert not list(out.parent.glob(".*"))
    out.unlink()
    with refused(of_others):
        predict_to(out, head, images)


def test_a_long_image_has_a_mask_and_overlays_are_left_out(head, images, tmp_path):
    (images / "long.png").write_bytes(encoded(np.zeros((4, 100, 3), np.uint8)))
    rows = predict_to(tmp_path / "p.csv", head, images, "--overlays=false")
    assert Image.open(tmp_path / rows["long.png"]["mask"]).size == (100, 4)
    assert len(list((tmp_path / "p_masks").rglob("*.png"))) == 5 and not (tmp_path / "p_overlays").exists()


def test_masks_are_not_written_among_the_images(head, images, monkeypatch):
    """After an interruption they would be predicted, too."""
    monkeypatch.chdir(images)
    for path in (".", images):
        with refused(r"out is p\.csv, inside the images"):
            predict_to("p.csv", head, path)
    assert {file.name for file in images.iterdir()} == {"wide, ü.png", "tall.png", "sub"}


def test_settings_that_do_not_serve_are_refused(head, images, tmp_path):
    with refused(r"top is 2; it must be left out: .* of the kind pixels"):
        predict_to(tmp_path / "p.csv", head, images, "--top=2")
    write_masked(images, {"tall.png": np.zeros(SIZES["tall.png"])})
    with refused(r"data\.mask_column is masc; it must be a column of all"):
        predict_to(tmp_path / "r.csv", head, images, "--data.mask_column=masc", "--data.image_column=image")


def test_images_in_a_container_have_masks_by_their_number(head, tmp_path):
    rows = dataset_of([encoded(picture(number)) for number in range(2)])
    rows.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    classified_images.predict_to(tmp_path / "p.parquet", head, tmp_path / "set")
    masks = {str(file.relative_to(tmp_path)) for file in (tmp_path / "p_masks").rglob("*.png")}
    assert masks == {"p_masks/all/000000000.png", "p_masks/all/000000001.png"}


def test_colours_are_pascal_vocs_and_more_than_a_palette_has_are_grey_of_sixteen_bits(tmp_path):
    expected = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 15: (192, 128, 128), 20: (0, 64, 128)}
    expected[255] = (224, 224, 192)
    assert {number: tuple(class_colors(np.array(number)).tolist()) for number in expected} == expected
    numbers = np.array([[0, 255], [256, 32767]])
    draw_mask(numbers, 32767).save(tmp_path / "m.png")
    read = decode_mask({"bytes": None, "path": str(tmp_path / "m.png")}, MaskedDataConfig(ignore_index=None))
    assert (read.numpy() == numbers).all()


def test_an_overlay_leaves_class_0_as_it_is():
    numbers = np.zeros((32, 32), int)
    numbers[:, 16:] = 1
    drawn = np.array(draw_overlay(torch.full((3, 32, 32), 100, dtype=torch.uint8), numbers)).astype(int)
    assert (drawn[:, :16] == 100).all()
    assert np.abs(drawn[:, 16:] - (114, 50, 50)).max() <= 1

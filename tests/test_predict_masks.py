"""Predicted masks: the largest logit at an image's own size, as files, resumed to the same bytes."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import dataset_of, encoded, interrupt_after, picture
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import jaccard_score
from torchvision.transforms import v2

from evaluation import predict, segmentation
from evaluation.config import MaskedDataConfig
from evaluation.pages.page import ColorKey
from evaluation.patches.masks import decode_mask
from evaluation.predictions import pixels
from evaluation.predictions.masks import color_of, voc_palette, write_mask, write_overlay
from evaluation.predictions.page import mask_sections, pixel_share_table
from evaluation.predictions.pixels import predict_mask, resize_to_cover, upsample_rows, window_starts
from evaluation.predictions.summary import Predictions
from mpp.errors import UnreadableImage, UserError

FAST = ("--precision=fp32", "--data.workers=0", "--threads=1")
PROBE = ("--steps=20", "--lr=0.01", "--seeds=0", "--readings=linear", "--baselines=false", "--images=0")
SIZES = {"wide, ü.png": (50, 90), "sub/square.jpg": (64, 64), "sub/square.png": (40, 40), "tall.png": (130, 36)}


@pytest.fixture(scope="module")
def head(finished_run, tmp_path_factory):
    """The kept head of the patches of a run, for the outlined birds."""
    run = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("probed") / "run"))
    segmentation.main([f"--encoder={run}", *FAST, *PROBE, "--save=true", f"--out={run}/evaluation/s.json"])
    return run / "evaluation" / "s_head"


@pytest.fixture
def images(tmp_path):
    for number, (name, size) in enumerate(SIZES.items()):
        file = tmp_path / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(number, size), "JPEG" if name.endswith("jpg") else "PNG"))
    return tmp_path / "images"


def predict_to(out: Path, head: Path, images: Path, *options: str) -> dict[str, dict[str, str]]:
    """The rows of the table by the names of files."""
    predict.main([f"--classifier={head}", f"--data.path={images}", f"--out={out}", *FAST, *options])
    with out.open(encoding="utf-8", newline="") as opened:
        return {row["file"]: row for row in csv.DictReader(opened)}


@torch.no_grad()
def plain_logits(model: torch.nn.Module, weights: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """Logits of a window (3, 32, 32) by plain timm and torch: (C, 32, 32)."""
    tokens = model.forward_features((pixels[None] / 255 - 0.5) / 0.5)[:, model.num_prefix_tokens :]
    scaled = (tokens - weights["norm.running_mean"]) / (weights["norm.running_var"] + 1e-5).sqrt()
    normed = scaled * weights["norm.weight"] + weights["norm.bias"]
    logits = normed @ weights["classify.weight"].T + weights["classify.bias"]
    side = round(logits.shape[1] ** 0.5)
    patches = logits[0].T.reshape(1, -1, side, side)
    return F.interpolate(patches, (32, 32), mode="bilinear")[0]


@torch.no_grad()
def plain_mask(head: Path, image: Path, share: float) -> np.ndarray:
    """The mask of an image by loops over its windows."""
    model = timm.create_model(f"local-dir:{head.parents[1] / 'encoder'}", pretrained=True).eval()
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
    return F.interpolate((total / count)[None], whole.shape[1:], mode="bilinear")[0].argmax(0).numpy()


@pytest.mark.parametrize("share", [1.0, 0.875])
def test_a_mask_is_the_largest_logit_at_the_images_own_size(head, images, tmp_path, share):
    rows = predict_to(tmp_path / "p.csv", head, images, f"--data.eval_crop={share}")
    assert rows.keys() == SIZES.keys()
    for name, row in rows.items():
        mask = Image.open(tmp_path / row["mask"])
        numbers = np.array(mask)
        assert mask.mode == "P" and mask.getpalette()[3:6] == [128, 0, 0]
        assert numbers.shape == SIZES[name] == (int(row["height"]), int(row["width"]))
        expected = plain_mask(head, images / name, share)
        assert (numbers != expected).mean() < 0.002  # ties by rounding
        assert float(row["share_bird"]) == pytest.approx(numbers.mean(), abs=1e-6)
        read = decode_mask({"bytes": (tmp_path / row["mask"]).read_bytes(), "path": None}, MaskedDataConfig())
        assert (read.numpy() == numbers).all()  # as `mpp segmentation` reads masks
        assert Image.open(tmp_path / row["overlay"]).size == mask.size
    assert rows["sub/square.jpg"]["mask"] == "p_masks/sub/square.jpg.png"  # beside it is a square.png
    about = json.loads((tmp_path / "p.csv.json").read_text())
    mean_share = np.mean([float(row["share_bird"]) for row in rows.values()])
    assert about["shares"]["bird"] == pytest.approx(mean_share, abs=1e-6)
    classes = json.loads((tmp_path / "p_masks" / "classes.json").read_text())
    assert classes == {"0": {"name": "background", "color": "#000000"}, "1": {"name": "bird", "color": "#800000"}}
    page = (tmp_path / "p.html").read_text()
    assert "p_masks" not in page  # the page is one file
    named = [f"{name} {100 * share:.1f}%" for name, share in (("bird", mean_share), ("background", 1 - mean_share))]
    largest_first = ", ".join(named if mean_share > 0.5 else named[::-1])
    assert f"<li>4 images; pixels by predicted class: {largest_first}</li>" in page
    legend = '<span class="color" style="background: #800000"></span> bird'
    assert f"<td>{legend}</td><td>{100 * mean_share:.1f}</td>" in page and "background (class 0) is not drawn" in page
    assert page.count("<figure>") == 4 and "certain · tall.png" in page  # each image once


def test_a_page_on_many_masks_shows_some_of_all_and_the_extremes():
    """Those that are shown already are not shown again; a broken image is in none."""
    classes = np.zeros(60, np.int32)
    classes[59] = -1
    probabilities = np.linspace(0.9, 0.2, 60, dtype=np.float32)
    predictions = Predictions(
        ["soil"], classes, probabilities, np.full(60, -1), shares={"soil": 1.0}, class_numbers=[3]
    )
    shown = []
    sheets = SimpleNamespace(blocks=lambda rows: shown.append(list(map(int, rows))))
    mask_sections(predictions, sheets)
    some, most, least = shown
    assert some[0] == 0 and some[-1] == 58 and len(some) == 12
    assert most == [row for row in range(12) if row not in some]
    assert least == [row for row in range(58, 46, -1) if row not in some]
    (row,) = pixel_share_table(predictions).rows
    assert row == [ColorKey("soil", "#808000"), "100.0"] and "class 0" not in pixel_share_table(predictions).caption


def write_masked(folder: Path, names: dict[str, tuple[str, np.ndarray]]) -> None:
    """Masks beside the images of a folder, and the list that names them, with a column of a site."""
    (folder / "masks").mkdir()
    lines = []
    for name, (file, numbers) in names.items():
        Image.fromarray(numbers.astype(np.uint8)).save(folder / "masks" / file)
        lines.append({"file_name": name, "mask_file_name": f"masks/{file}", "site": f"at {file}"})
    lines += [{"file_name": name, "mask_file_name": None, "site": None} for name in SIZES if name not in names]
    (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_masks_are_scored_beside_those_of_the_images(head, images, tmp_path, capsys):
    """As scikit-learn's Jaccard score of all pixels that count; the classes that the head does not know are missed."""
    generator = np.random.default_rng(0)
    named = {}
    for name in ("wide, ü.png", "tall.png"):
        numbers = generator.choice([0, 1, 7, 255], SIZES[name], p=[0.5, 0.3, 0.1, 0.1])
        named[name] = (f"{len(named)}.png", numbers)
    named["sub/square.jpg"] = ("2.png", np.zeros((9, 9)))  # of another size
    write_masked(images, named)
    rows = predict_to(tmp_path / "p.csv", head, images)
    said = capsys.readouterr()
    true, predicted = [], []
    for name in ("wide, ü.png", "tall.png"):
        counts = named[name][1] != 255
        true.append(named[name][1][counts])
        predicted.append(np.array(Image.open(tmp_path / rows[name]["mask"]))[counts])
    true, predicted = np.concatenate(true), np.concatenate(predicted)
    ious = jaccard_score(true, predicted, labels=[0, 1, 7], average=None)
    figures = json.loads((tmp_path / "p.csv.json").read_text())["figures"]["all"]
    assert figures["accuracy"] == pytest.approx(ious.mean()) and figures["images"] == 2
    assert figures["figures"]["pixel_accuracy"][0] == pytest.approx((true == predicted).mean())
    low, high = figures["interval"]
    line = f"all, 2 labelled images (%): mean IoU {100 * ious.mean():.1f} ({100 * low:.1f} to {100 * high:.1f})"
    assert line in said.out
    (bird,) = [line for line in said.out.splitlines() if line.startswith("| bird") and line.count("|") == 5]
    cells = [cell.strip() for cell in bird.split("|")[1:-1]]
    assert cells[1:3] == [str((true == 1).sum()), str((predicted == 1).sum())]
    assert cells[3].startswith(f"{100 * ious[1]:.1f} (")
    assert "does not know the classes 7 of the masks" in said.err
    assert (
        "1 mask of all left out, the first of" in said.err and "its mask has 9 x 9 pixels, and the image 64" in said.err
    )
    assert rows["tall.png"]["site"] == "at 1.png" and rows["sub/square.png"]["site"] == ""
    assert "mask" in rows["tall.png"] and "given_mask" not in rows["tall.png"]
    page = (tmp_path / "p.html").read_text()
    assert "mean IoU" in page and "Compared with the labels of all" in page and 'alt="Confusion matrix of all"' in page


@pytest.mark.parametrize("in_container", [False, True])
def test_images_that_a_head_learned_have_scores_of_their_own(in_container, finished_run, tmp_path):
    """They are no part of those that speak of new images."""
    folder = tmp_path / "set"
    masks = [encoded(np.repeat(np.arange(2, dtype=np.uint8), 20 + number)[None].repeat(30, 0)) for number in range(8)]
    pictures = [encoded(picture(number, (30, 40 + 2 * number))) for number in range(8)]
    if in_container:
        rows = dataset_of(pictures, mask=[{"bytes": mask, "path": None} for mask in masks])
        rows.cast_column("mask", datasets.Image()).to_parquet(folder / "train-00000-of-00001.parquet")
    else:
        (folder / "masks").mkdir(parents=True)
        for number, (image, mask) in enumerate(zip(pictures, masks, strict=True)):
            (folder / f"{number}.png").write_bytes(image)
            (folder / "masks" / f"{number}.png").write_bytes(mask)
        lines = [f'{{"file_name": "{n}.png", "mask_file_name": "masks/{n}.png"}}\n' for n in range(8)]
        (folder / "metadata.jsonl").write_text("".join(lines))
    words = [f"--encoder={finished_run}", f"--data.path={folder}", "--data.eval_fraction=0.25", "--save=true"]
    segmentation.main([*words, *FAST, *PROBE, f"--out={tmp_path / 's.json'}"])
    named = [f"--classifier={tmp_path / 's_head'}", f"--encoder={finished_run}", f"--data.path={folder}"]
    predict.main([*named, f"--out={tmp_path / 'p.csv'}", *FAST])
    about = json.loads((tmp_path / "p.csv.json").read_text())
    assert {split: of["images"] for split, of in about["figures"].items()} == {"held out": 2, "learned": 6}
    assert "learned 6 of these 8 images" in about["note"]
    with (tmp_path / "p.csv").open(newline="") as opened:
        by_mask = {row["mask"]: row["split"] for row in csv.DictReader(opened)}
    places = [f"all/{n:09d}.png" if in_container else f"{n}.png.png" for n in range(8)]
    assert sorted(by_mask) == [f"p_masks/{place}" for place in places]


def test_scores_need_no_prediction_of_their_own(head, images, tmp_path, monkeypatch, capsys):
    """An interrupted table has the same figures; a broken image has none; blank masks are no masks."""
    write_masked(images, {name: (f"{n}.png", np.full(SIZES[name], n % 2)) for n, name in enumerate(SIZES)})
    (images / "tall.png").write_bytes(b"no image")
    predict_to(tmp_path / "p.csv", head, images)
    first = json.loads((tmp_path / "p.csv.json").read_text())["figures"]["all"]
    assert first["images"] == 3
    monkeypatch.setattr(pixels.PixelRows, "rows", None)  # nothing is left to predict
    predict_to(tmp_path / "p.csv", head, images)
    assert json.loads((tmp_path / "p.csv.json").read_text())["figures"]["all"] == first
    assert "| all: class" in capsys.readouterr().out


def test_masks_that_are_wrong_beside_their_images_are_named(head, images, tmp_path, capsys):
    """Half a turn keeps the size, so nothing else shows; masks of JPEG have no part in predictions."""
    names = {name: (f"{number}.png", np.zeros(size)) for number, (name, size) in enumerate(SIZES.items())}
    write_masked(images, names)
    upside_down = Image.Exif()
    upside_down[274] = 3
    Image.open(images / "tall.png").save(images / "tall.png", exif=upside_down)
    predict_to(tmp_path / "p.csv", head, images)
    said = capsys.readouterr().err
    assert "1 image turned by an orientation tag in the file, with a mask without such a tag, such as" in said
    for file in (images / "masks").iterdir():
        Image.open(file).save(file, "JPEG")
    predict_to(tmp_path / "q.csv", head, images)
    assert "no scores are computed: data.mask_column is mask, of JPEG files" in capsys.readouterr().err
    assert "figures" not in json.loads((tmp_path / "q.csv.json").read_text())
    with pytest.raises(UserError, match=r"has no column masc \(data\.mask_column\), but image, site"):
        predict_to(tmp_path / "r.csv", head, images, "--data.mask_column=masc", "--data.image_column=image")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*g") if file.is_file()}


def test_interrupted_masks_are_finished_to_the_same_bytes(head, images, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "MASKS_PER_PART", 2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    predict_to(tmp_path / "a" / "p.csv", head, images)
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        interrupt_after(context, pixels.PixelRows, "write", 3)
        predict_to(tmp_path / "b" / "p.csv", head, images)
    predict_to(tmp_path / "b" / "p.csv", head, images)
    assert (tmp_path / "b" / "p.csv").read_bytes() == (tmp_path / "a" / "p.csv").read_bytes()
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b") and len(files_in(tmp_path / "a")) == 8


def test_a_broken_and_a_long_image_have_no_mask(head, images, tmp_path, capsys):
    (images / "tall.png").write_bytes(b"no image")
    (images / "long.png").write_bytes(encoded(np.zeros((4, 100, 3), np.uint8)))
    rows = predict_to(tmp_path / "p.csv", head, images, "--overlays=false")
    assert rows["tall.png"]["mask"] == "" and rows["tall.png"]["error"]
    assert rows["long.png"]["error"] == "100 x 4 pixels are too long for a mask: cut it in parts"
    assert "2 images cannot be decoded" in capsys.readouterr().err
    assert len(list((tmp_path / "p_masks").rglob("*.png"))) == 3 and not (tmp_path / "p_overlays").exists()
    assert "overlay" not in rows["tall.png"]


def test_masks_are_not_written_among_the_images(head, images, monkeypatch):
    """After an interruption they would be predicted, too."""
    monkeypatch.chdir(images)
    for path in (".", str(images)):
        with pytest.raises(UserError, match=r"out is p\.csv, inside the images"):
            predict_to(Path("p.csv"), head, path)
    assert {file.name for file in images.iterdir()} == {"wide, ü.png", "tall.png", "sub"}


def test_masks_of_other_images_are_not_mixed_in(head, images, tmp_path):
    predict_to(tmp_path / "p.csv", head, images)
    (tmp_path / "p.csv").unlink()
    for kind in ("masks", "overlays"):
        with pytest.raises(UserError, match=rf"out is .*p\.csv; it must be another: .*p_{kind} exists"):
            predict_to(tmp_path / "p.csv", head, images)
        shutil.rmtree(tmp_path / f"p_{kind}")
    assert predict_to(tmp_path / "p.csv", head, images).keys() == SIZES.keys()


def test_masks_of_an_interrupted_command_are_continued_with_its_images_alone(head, images, tmp_path, monkeypatch):
    """Also before its first part is complete: a folder may be mistaken, and another one predicted to the same table."""
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        interrupt_after(context, pixels.PixelRows, "write", 2)
        predict_to(tmp_path / "p.csv", head, images)
    others = shutil.copytree(images, tmp_path / "others")
    (others / "tall.png").rename(others / "other.png")
    with pytest.raises(UserError, match=r"out is .*p\.csv; it must be another: .*p_masks exists, and may be of other"):
        predict_to(tmp_path / "p.csv", head, others)
    assert predict_to(tmp_path / "p.csv", head, images).keys() == SIZES.keys()
    assert not list(tmp_path.glob(".*"))


def test_masks_that_are_gone_are_not_taken_for_done(head, images, tmp_path):
    predict_to(tmp_path / "p.csv", head, images)
    shutil.rmtree(tmp_path / "p_masks")
    for _ in range(2):
        with pytest.raises(UserError, match=r"out is .*p\.csv; it must be deleted, to predict again: its masks in .*"):
            predict_to(tmp_path / "p.csv", head, images)


def test_settings_of_other_classifiers_are_refused(head, images, tmp_path, finished_run):
    with pytest.raises(UserError, match=r"top is 2; it must be left out: .* predicts the class of each pixel"):
        predict_to(tmp_path / "p.csv", head, images, "--top=2")
    words = [f"--encoder={finished_run}", *FAST, *PROBE, f"--out={tmp_path}/s.json"]
    with pytest.raises(UserError, match=r"class_names is .*bird.*; it must be 2 names, from class 0 on"):
        segmentation.main([*words, "--save=true", "--class_names=[bird]"])
    with pytest.raises(UserError, match="save is true; it must be left out: a colour baseline has no weights"):
        segmentation.main([*words[1:], "--encoder=floor:pixels", "--save=true"])


def test_images_in_a_container_have_masks_by_their_number(head, tmp_path):
    rows = dataset_of([encoded(picture(number)) for number in range(2)])
    rows.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    predict.main([f"--classifier={head}", f"--data.path={tmp_path / 'set'}", f"--out={tmp_path / 'p.parquet'}", *FAST])
    masks = {str(file.relative_to(tmp_path)) for file in (tmp_path / "p_masks").rglob("*.png")}
    assert masks == {"p_masks/all/000000000.png", "p_masks/all/000000001.png"}


@pytest.mark.parametrize("size", [(7, 9), (40, 23), (5, 64)])
def test_rows_of_a_block_are_those_of_torchs_interpolation(size):
    logits = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole = F.interpolate(logits[None], size, mode="bilinear", align_corners=False)[0]
    blocks = [upsample_rows(logits, size, first, min(first + 3, size[0])) for first in range(0, size[0], 3)]
    torch.testing.assert_close(torch.cat(blocks, 1), whole, atol=1e-5, rtol=0)


def test_large_images_are_predicted_block_by_block(monkeypatch):
    logits = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = predict_mask(logits, (50, 31))
    monkeypatch.setattr(pixels, "PIXEL_LOGITS_PER_BLOCK", 300)
    blocks = predict_mask(logits, (50, 31))
    assert (blocks.classes == whole.classes).all() and blocks.probability == pytest.approx(whole.probability)
    upsampled = F.interpolate(logits[None], (50, 31), mode="bilinear")[0]
    assert whole.probability == pytest.approx(float(upsampled.softmax(0).amax(0).mean()), abs=1e-6)


@pytest.mark.parametrize(("length", "expected"), [(32, [0]), (33, [0, 1]), (64, [0, 32]), (90, [0, 29, 58])])
def test_windows_cover_all_of_an_image(length, expected):
    assert window_starts(length, 32) == expected


def test_an_image_is_shown_whole():
    image = torch.arange(3 * 20 * 100, dtype=torch.float32).view(3, 20, 100) % 255
    resized, shown = resize_to_cover(image, (32, 32), 1.0)
    assert resized.shape == (3, 32, 160) and shown.shape == (3, 20, 100) and shown.dtype == torch.uint8
    with pytest.raises(UnreadableImage, match="1000 x 20 pixels are too long"):
        resize_to_cover(torch.zeros(3, 20, 1000), (32, 32), 1.0)
    assert resize_to_cover(torch.zeros(5, 20, 30), (32, 32), 0.875).shown.shape == (3, 20, 30)


def test_colours_are_pascal_vocs():
    expected = {
        0: (0, 0, 0),
        1: (128, 0, 0),
        2: (0, 128, 0),
        15: (192, 128, 128),
        20: (0, 64, 128),
        255: (224, 224, 192),
    }
    assert {number: tuple(voc_palette()[number].tolist()) for number in expected} == expected
    assert color_of(15) == "#c08080" and color_of(256) == "#000000"


def test_more_classes_than_a_palette_has_are_grey_of_sixteen_bits(tmp_path):
    numbers = np.array([[0, 255], [256, 32767]])
    write_mask(tmp_path / "m.png", numbers, 32767)
    read = decode_mask({"bytes": (tmp_path / "m.png").read_bytes(), "path": None}, MaskedDataConfig(ignore_index=None))
    assert (read.numpy() == numbers).all()


def test_an_overlay_leaves_class_0_as_it_is(tmp_path):
    numbers = np.zeros((32, 32), int)
    numbers[:, 16:] = 1
    write_overlay(tmp_path / "o.jpg", np.full((32, 32, 3), 100, np.uint8), numbers)
    drawn = np.array(Image.open(tmp_path / "o.jpg")).astype(int)
    assert np.abs(drawn[:, :8] - 100).max() <= 2
    assert np.abs(drawn[:, 24:] - (114, 50, 50)).max() <= 6

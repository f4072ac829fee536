"""Predictions of each kind of label: those of plain timm with the saved weights, and of the files for elsewhere."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from classified_images import OF_TRAINING, predict_to
from conftest import FAST, read_json, refused
from model_inputs import by_timm
from PIL import Image
from safetensors.torch import load_file
from test_label_kinds import colours, write_images
from torchvision.transforms import v2

from evaluation import export, finetune, linear
from evaluation.supervision.classifiers import load_classifier

NAMES = {"class": ["auk", "bee-eater", "crane"], "several": ["bright", "red"], "number": []}
MEANING = {
    "class": "logits; their softmax has the probabilities",
    "several": "the sigmoid of each is the probability of its class",
    "number": "in the unit of the labels",
}


def weight(number, red):
    """A number in a unit of thousands, with some missing."""
    return "" if number % 8 == 3 else f"{20000 + 70000 * red:.1f}"


LABELS = {"class": lambda number, red: NAMES["class"][number % 3], "several": colours, "number": weight}


@pytest.fixture(scope="module", params=LABELS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def images(kind, tmp_path_factory):
    return write_images(tmp_path_factory.mktemp(kind) / "images", LABELS[kind], count=8)


@pytest.fixture(scope="module")
def tuned(kind, images, finished_run, tmp_path_factory):
    """A fine-tuning on these images."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    words = (f"--encoder={finished_run}", f"--data.path={images}", f"--run.dir={folder}", f"--task={kind}")
    finetune.main([*OF_TRAINING, *words, "--lrs=0.1"])
    return folder


def rows_of(out, classifier, images, *options):
    rows = pq.read_table(predict_to(out, classifier, images, *options)).to_pylist()
    assert len(rows) == 16 and {row["split"] for row in rows} == {"train", "test"}
    return rows


def plain_view(image):
    """An image as plain torchvision shows it to a timm model of 32 pixels: (1, 3, 32, 32), normalised."""
    pixels = v2.functional.pil_to_tensor(Image.open(image).convert("RGB"))
    view = v2.Compose([v2.Resize(round(32 / 0.875), antialias=True), v2.CenterCrop(32)])(pixels)
    return ((view / 255 - 0.5) / 0.5)[None]


def expected_of(kind, outputs):
    """The row of an image with these outputs (1, K): of classes logits, or the number."""
    if kind == "number":
        return {"number": pytest.approx(float(outputs), rel=1e-6)}
    outputs = outputs.double()[0]
    each = (outputs.softmax(0) if kind == "class" else outputs.sigmoid()).tolist()
    pairs = [*zip(each, NAMES[kind], strict=True)]
    row = {f"p_{name}": pytest.approx(one, abs=1e-6) for one, name in pairs}
    if kind == "several":
        return row | {"classes": ";".join(name for one, name in pairs if one > 0.5)}
    for place, (one, name) in zip(("", "_2", "_3"), sorted(pairs)[::-1], strict=True):
        row |= {f"class{place}": name, f"probability{place}": pytest.approx(one, abs=1e-6)}
    return row


@torch.no_grad()
def test_a_fine_tuned_run_predicts_as_plain_timm_with_its_head(kind, tuned, images, tmp_path, capsys):
    """A linear layer on [class], and the unit of the labels. A broken image has no prediction, and is named."""
    folder = shutil.copytree(images, tmp_path / "images")
    (folder / "005.png").write_bytes(b"no image")
    rows = rows_of(tmp_path / "p.parquet", tuned, folder, "--data.batch_size=1")
    assert "1 image cannot be decoded: 005.png: " in capsys.readouterr().err
    model = by_timm(tuned / "lr_0.1" / "encoder")
    weights = load_file(next((tuned / "lr_0.1" / "checkpoints").glob("*4")) / "model.safetensors")
    first = "head.0." if kind == "number" else "head."
    for row in rows:
        about = row.pop("file"), row.pop("split"), row.pop("error")
        if about[0] == "005.png":
            assert about[2] and {*row.values()} == {None}
            continue
        token = model.forward_features(plain_view(images / about[0]))[:, 0]
        outputs = token @ weights[f"{first}weight"].T + weights[f"{first}bias"]
        if kind == "number":
            outputs = outputs * weights["head.1.std"] + weights["head.1.mean"]
        assert row == expected_of(kind, outputs) and about[2] is None
    written = read_json(tmp_path / "p.parquet.json")
    assert (written["classes"], written["precision"], written["images"]) == (NAMES[kind], "fp32", 16)


@torch.no_grad()
def test_a_kept_head_predicts_as_plain_timm_with_its_weights(kind, finished_run, images, tmp_path):
    """The mean of the patches after the first block."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    words = (f"--encoder={run}", f"--data.path={images}", "--depth=1", f"--task={kind}", "--save=true", "--l2=0.01")
    report = linear.main([*FAST, *words, "--baselines=false", f"--out={run}/l.json"])
    weights = load_file(run / "l_head" / "head.safetensors")
    model = by_timm(run / "encoder")
    rows = rows_of(tmp_path / "p.parquet", run / "l_head", images)
    for row in rows:
        (tokens,) = model.forward_intermediates(
            plain_view(images / row["file"]), indices=[0], norm=False, intermediates_only=True, output_fmt="NLC"
        )
        features = (tokens.mean(1) - weights["mean"]) / weights["std"]
        outputs = features @ weights["classify.weight"].T + weights["classify.bias"]
        assert row == expected_of(kind, outputs) | {name: row[name] for name in ("file", "split", "error")}
    if kind == "number":
        described = read_json(run / "l_head" / "head.json")
        described["input"]["crop_pct"] = 1
        (run / "l_head" / "head.json").write_text(json.dumps(described))
        about = export.main([f"--classifier={run}/l_head", f"--out={tmp_path}/l.onnx", "--data.workers=0"])["about"]
        assert about["crop_pct"] == 1
    figures = read_json(tmp_path / "p.parquet.json")["figures"]["test"]
    assert 4 < figures["images"] <= 8
    assert figures["accuracy"] == pytest.approx(report["results"][0]["accuracy"], rel=1e-4)


def test_files_for_elsewhere_predict_the_same(kind, tuned, images, tmp_path, capsys):
    """An exported one and timm's layout, in the unit of the labels; with kind and names, and without the run."""
    words = (f"--classifier={tuned}", f"--out={(file := tmp_path / 'logits.pt2')}", "--format=torch_export")
    about = export.main([*words, "--images=6", "--threads=1", "--data.workers=0"])["about"]
    assert (about["label_kind"], about["label_names"]) == (kind, NAMES[kind])
    assert about["output"].endswith(MEANING[kind])

    rows = rows_of(tmp_path / "p.parquet", tuned, shutil.copytree(images, tmp_path / "copy"))
    assert "note: the classifier learned some of these images" in capsys.readouterr().out
    assert "learned" in read_json(tmp_path / "p.parquet.json")["note"]
    views = torch.cat([plain_view(images / row["file"]) for row in rows])
    outputs = export.read_file(file)(((views * 0.5 + 0.5) * 255).round().to(torch.uint8))
    model = by_timm(tuned / "classifier")
    assert model.pretrained_cfg.get("label_names", []) == NAMES[kind]
    with torch.no_grad():
        of_timm = model(views)
    assert outputs.shape == of_timm.shape == (16, len(NAMES[kind]) or 1)
    away = rows_of(tmp_path / "q.parquet", shutil.copytree(tuned / "classifier", tmp_path / "away"), images)
    for row, again, *both in zip(rows, away, outputs[:, None], of_timm[:, None], strict=True):
        about = {name: row[name] for name in ("file", "split", "error")}
        assert [row] * 2 == [expected_of(kind, output) | about for output in both] == [again] * 2
    network = load_classifier(str(tmp_path / "away"), 3, "classifier").network
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert (network(views).dtype == torch.float32) == (kind == "number")  # bf16 has no years


def test_settings_of_other_kinds_are_refused(kind, tuned, images, tmp_path):
    of_classes = {"top": "2", "probabilities": "false"}
    for name, value in ({} if kind == "class" else of_classes | {"overlays": "false"}).items():
        with refused(rf"{name} is {value}; it must be left out: .* of the kind {kind}"):
            predict_to(tmp_path / "few.csv", tuned, images, f"--{name}={value}")
    with refused("the run folder: the head is in its newest checkpoint"):
        predict_to(tmp_path / "few.csv", next(tuned.glob("**/step_*")), images)
    if kind == "class":
        (row, *_) = rows_of(tmp_path / "few.parquet", tuned, images, "--top=2", "--probabilities=false")
        assert [*row] == ["file", "split", "class", "probability", "class_2", "probability_2", "error"]

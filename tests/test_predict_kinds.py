"""Predictions of several classes, and of numbers: those of plain timm with the saved weights, and of files of ONNX."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import timm
import torch
from classified_images import FAST, OF_TRAINING, predict_to, read_csv
from conftest import TINY
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score, r2_score
from test_label_kinds import colours, write_images
from test_predict import plain_view

from evaluation import export, finetune, linear, supervised
from evaluation.supervision.classifiers import load_classifier
from mpp.errors import UserError

NAMES = ["bright", "red"]


def weight(number, red):
    """A number in a unit of thousands, with some missing."""
    return "" if number % 8 == 3 else f"{20000 + 70000 * red:.1f}"


LABELS = {"several": colours, "number": weight}


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


def rows_of(out: Path, classifier: Path, images: Path) -> list[dict]:
    rows = pq.read_table(predict_to(out, classifier, images)).to_pylist()
    assert len(rows) == 16 and {row["split"] for row in rows} == {"train", "test"}
    return rows


def assert_predicted(kind: str, row: dict, outputs: torch.Tensor) -> None:
    """A row has these outputs (1, K): of several classes logits, or the number."""
    if kind == "number":
        assert row["number"] == pytest.approx(float(outputs), rel=1e-6)
        return
    probabilities = outputs.double().sigmoid()[0].tolist()
    assert [row[f"p_{name}"] for name in NAMES] == pytest.approx(probabilities, abs=1e-6)
    assert row["classes"] == ";".join(name for name, each in zip(NAMES, probabilities, strict=True) if each > 0.5)


@torch.no_grad()
def head_on_class(run: Path, weights: dict[str, torch.Tensor], kind: str, image: Path) -> torch.Tensor:
    """A trained run's outputs by plain timm and torch: a linear layer on [class], and the unit of the labels."""
    model = timm.create_model(f"local-dir:{run / 'encoder'}", pretrained=True).eval()
    token = model.forward_features(plain_view(image))[:, 0]
    first = "head.0." if kind == "number" else "head."
    outputs = token @ weights[f"{first}weight"].T + weights[f"{first}bias"]
    return outputs * weights["head.1.std"] + weights["head.1.mean"] if kind == "number" else outputs


def test_a_fine_tuned_run_predicts_as_plain_timm_with_its_head(kind, tuned, images, tmp_path):
    run = tuned / "lr_0.1"
    weights = load_file(next((run / "checkpoints").glob("*4")) / "model.safetensors")
    for row in rows_of(tmp_path / "p.parquet", tuned, images):
        assert_predicted(kind, row, head_on_class(run, weights, kind, images / row["file"]))


def test_a_batch_of_broken_images_alone_has_the_columns_of_others(kind, tuned, images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "images")
    broken = next(folder.rglob("*.png"))
    broken.write_bytes(b"no image")
    rows = pq.read_table(predict_to(tmp_path / "p.parquet", tuned, folder, "--data.batch_size=1")).to_pylist()
    column = "number" if kind == "number" else "classes"
    assert [row["file"] for row in rows if row[column] is None] == [str(broken.relative_to(folder))]


def test_a_supervised_run_predicts_as_plain_timm_with_its_head(kind, images, tmp_path):
    run = tmp_path / "run"
    small = [each for each in TINY if each.startswith("--model")]
    words = (f"--data.path={images}", f"--run.dir={run}", "--optim.lr=0.01", f"--task={kind}", "--head.kind=linear")
    supervised.main([*OF_TRAINING, *small, *words])
    weights = load_file(next((run / "checkpoints").glob("*4")) / "model.safetensors")
    for row in rows_of(tmp_path / "p.parquet", run, images):
        assert_predicted(kind, row, head_on_class(run, weights, kind, images / row["file"]))


def test_a_kept_head_predicts_as_plain_timm_with_its_weights(kind, finished_run, images, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    words = (f"--encoder={run}", f"--data.path={images}", "--depth=1", f"--task={kind}", "--save=true")
    linear.main([*FAST, *words, "--l2=0.01", f"--out={run}/l.json"])
    about = json.loads((run / "l_head" / "head.json").read_text())
    assert about["class_names"] == ([] if kind == "number" else NAMES) and about["task"] == kind
    weights = load_file(run / "l_head" / "head.safetensors")
    model = timm.create_model(f"local-dir:{run / 'encoder'}", pretrained=True).eval()
    for row in rows_of(tmp_path / "p.parquet", run / "l_head", images):
        with torch.no_grad():
            (tokens,) = model.forward_intermediates(
                plain_view(images / row["file"]), indices=[0], norm=False, intermediates_only=True, output_fmt="NLC"
            )
        features = (tokens.mean(1) - weights["mean"]) / weights["std"]
        assert_predicted(kind, row, features @ weights["classify.weight"].T + weights["classify.bias"])
    with pytest.raises(UserError, match=rf"probabilities is false; it must be left out: .* of the kind {kind}"):
        predict_to(tmp_path / "few.csv", run / "l_head", images, "--probabilities=false")
    figures = json.loads((tmp_path / "p.parquet.json").read_text())["figures"]["test"]
    rows = [row for row in pq.read_table(tmp_path / "p.parquet").to_pylist() if row["split"] == "test"]
    labels = [row["label"] for row in read_csv(images / "metadata.csv") if row["split"] == "test"]
    known = [(label, row) for label, row in zip(labels, rows, strict=True) if label]
    assert figures["images"] == len(known) > 4
    if kind == "number":
        assert figures["accuracy"] == pytest.approx(
            r2_score([float(label) for label, _ in known], [row["number"] for _, row in known])
        )
        return
    marks = np.array([[name in label.split(";") for name in NAMES] for label, _ in known])
    probabilities = np.array([[row[f"p_{name}"] for name in NAMES] for _, row in known])
    assert figures["accuracy"] == pytest.approx(average_precision_score(marks, probabilities, average="macro"))


def test_a_file_of_onnx_has_kind_names_and_outputs_in_their_unit(kind, tuned, images, tmp_path):
    """Numbers of tens of thousands differ by more than numbers around 1, by rounding alone."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[export]'")
    pytest.importorskip("onnxscript")
    run = tuned / "lr_0.1"
    config = json.loads((run / "encoder" / "config.json").read_text())
    assert config["label_kind"] == kind
    file = tmp_path / "logits.onnx"
    few = ("--images=6", "--threads=1", "--data.workers=0")
    export.main([f"--classifier={tuned}", f"--out={file}", *few])  # of its tested run
    session = onnxruntime.InferenceSession(str(file))
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["label_kind"] == kind and json.loads(metadata["label_names"]) == ([] if kind == "number" else NAMES)
    meaning = {"several": "the sigmoid of each is the probability of its class", "number": "in the unit of the labels"}
    assert metadata["output"].endswith(meaning[kind])

    rows = rows_of(tmp_path / "p.parquet", tuned, images)
    pixels = np.concatenate([plain_pixels(images / row["file"]) for row in rows])
    (outputs,) = session.run(["logits"], {"images": pixels})
    assert outputs.shape == (16, 1 if kind == "number" else 2)
    model = timm.create_model(f"local-dir:{tuned / 'classifier'}", pretrained=True).eval()
    assert model.pretrained_cfg.get("label_names", []) == ([] if kind == "number" else NAMES)
    with torch.no_grad():
        of_timm = torch.cat([model(plain_view(images / row["file"])) for row in rows])
    for row, *both in zip(rows, torch.from_numpy(outputs), of_timm, strict=True):
        expected = [row["number"]] if kind == "number" else [row[f"p_{name}"] for name in NAMES]
        for output in both:
            found = output if kind == "number" else output.sigmoid()
            assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    away = shutil.copytree(tuned / "classifier", tmp_path / "away")  # without its run
    assert rows_of(tmp_path / "q.parquet", away, images) == [
        {key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]


def plain_pixels(image: Path) -> np.ndarray:
    """The pixels (1, 3, 32, 32) from 0 to 255 of the view that plain torchvision has of an image."""
    return ((plain_view(image) * 0.5 + 0.5) * 255).round().to(torch.uint8).numpy()


def test_rounding_is_measured_by_the_size_of_numbers(kind, tuned):
    unit = load_classifier(str(tuned / "lr_0.1"), 3, "encoder").unit
    assert unit == pytest.approx(60000, rel=0.5) if kind == "number" else unit == 1

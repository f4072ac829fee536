"""Encoders as files for elsewhere: the same numbers as PyTorch's, for every kind, and what is refused."""

from itertools import product
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import picture, read_json, refused
from model_inputs import randomize
from PIL import Image
from test_variants import HYBRID, KINDS, PARTS, build
from torch.testing import assert_close

from evaluation import export
from evaluation.config import ExportConfig
from evaluation.frozen.encoder import load_frozen_encoder
from mpp.config import ModelConfig
from mpp.models.descriptions import EncoderFacts, export_encoder
from mpp.models.encoder import build_encoder
from mpp.models.plain import set_attention
from mpp.runtime.weights import fingerprint

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[export]'")
pytest.importorskip("onnxscript")
ENDS = {"onnx": "onnx", "torch_export": "pt2"}
FEW = ("--images=6", "--threads=1", "--data.workers=0")


def exported(encoder, folder, format, *options):
    """The file's function on images (B, C, H, W), and what the command reported."""
    file = folder / f"encoder.{ENDS[format]}"
    export.main([f"--encoder={encoder}", f"--out={file}", f"--format={format}", *FEW, *options])
    return export.read_file(file), read_json(file.with_name(f"{file.name}.json"))


def saved(folder, encoder, channels=3, **more):
    """A folder of an encoder that was built and not trained."""
    moments = (0.45,) * channels, (0.25,) * channels
    export_encoder(encoder, folder, encoder.patch_embed.img_size, *moments, crop_pct=0.875, **more)
    return folder


def test_a_file_of_onnx_says_what_it_takes_and_weights_of_a_large_encoder_are_a_second_one(
    finished_run, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 0)
    run, report = exported(finished_run, tmp_path, "onnx")
    assert {file.name for file in tmp_path.iterdir()} == {"encoder.onnx", "encoder.onnx.data", "encoder.onnx.json"}
    assert run(torch.zeros(4, 3, 32, 32, dtype=torch.uint8)).shape == (4, 16) and report["difference"] < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "encoder.onnx"))
    (images,), (features,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape[1:]) == ("images", "tensor(uint8)", [3, 32, 32])
    assert (features.name, features.shape[1:]) == ("features", [16]) and isinstance(features.shape[0], str)
    known = session.get_modelmeta().custom_metadata_map
    assert known["input"] == "images (batch, 3, 32, 32) uint8, from 0 to 255"
    assert known["normalize"] == "true" and known["output"] == "features (batch, width) float32"


def test_a_file_names_the_weights_that_it_has(finished_run):
    name, file = "vit_tiny_patch16_224", finished_run / "encoder" / "model.safetensors"
    frozen = load_frozen_encoder(str(finished_run))
    of_run = str(finished_run), None, fingerprint(finished_run)
    for encoder, checkpoint, weights in ((name, None, name), (name, str(file), fingerprint(file)), of_run):
        config = ExportConfig.of(encoder=encoder, checkpoint=checkpoint)
        assert export.describe_file(config, frozen, None, torch.zeros(0))["weights"] == weights


def test_all_tokens_of_normalized_images_of_another_size(finished_run, tmp_path):
    options = "--representation=tokens", "--normalize=false", "--img_size=[24, 40]", "--random=true", "--seed=3"
    run, report = exported(finished_run, tmp_path, "torch_export", *options)
    encoder = load_frozen_encoder(str(finished_run), img_size=(24, 40), random=True, seed=3).model
    images = torch.randn(1, 3, 24, 40)
    assert_close(run(images), encoder.forward_features(images).detach(), rtol=0, atol=1e-5)
    about = report["about"]
    assert about["input"] == "images (batch, 3, 24, 40) float32, (pixels / 255 - mean) / std"
    assert (about["grid"], about["prefix_tokens"], about["img_size"], about["mean"]) == ([3, 5], 1, [24, 40], [0.5] * 3)
    assert about["weights"] == "random, seed 3"
    file = tmp_path / "encoder.pt2"
    assert file.stat().st_mode == file.with_name("encoder.pt2.json").stat().st_mode


RESNET = ("--encoder=resnet10t", "--random=true")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--encoder=floor:pixels"], "a colour baseline has no weights"),
        ([*RESNET, "--representation=tokens"], "ResNet has no sequence of patches"),
        ([*RESNET, "--representation=class"], r"has no \[class\] token"),
        (["--classifier=runs/x", "--img_size=96"], "classifier is runs/x; it must be null with img_size"),
        (["--out=encoder.pt"], "out is encoder.pt; it must be a file whose name ends in .pt2"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_words(options, message, tmp_path):
    words = ["--encoder=vit_tiny_patch16_224", "--format=torch_export", f"--out={tmp_path}/e.pt2"]
    with refused(message):
        export.main([*words, *FEW, *options])
    assert not list(tmp_path.iterdir())


@pytest.mark.faults
def test_a_file_of_other_numbers_is_refused_and_not_left(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "read_file", lambda file: lambda images: torch.zeros(len(images), 16))
    with refused(r"output differs from PyTorch by .*; it must be another one: at most 0\.0001 is ok"):
        exported(finished_run, tmp_path, "torch_export")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits_of_first", [8, 16])
def test_images_of_8_bits_and_of_more_verify_one_file(bits_of_first, finished_run, tmp_path, monkeypatch):
    """Each a batch of its own; onnxruntime takes one type, and has no error of a line for another."""
    for number in range(8):
        grey = picture(number)[..., 0]
        deep = 257 * grey.astype(np.uint16) + number
        Image.fromarray(grey if (number < 4) == (bits_of_first == 8) else deep).save(tmp_path / f"{number}.png")
    (tmp_path / "4.png").write_bytes(b"nothing")  # does not matter
    read_file, taken = export.read_file, set()

    def recorded(file):
        compute = read_file(file)
        return lambda images: taken.add(images.dtype) or compute(images)

    monkeypatch.setattr(export, "read_file", recorded)
    words = f"--data.path={tmp_path}", "--data.eval_split=null", "--data.eval_fraction=0.8", "--data.batch_size=1"
    report = exported(finished_run, tmp_path, "torch_export", *words)[1]
    assert taken == {torch.uint8 if report["about"]["input"].count("uint8") else torch.float32}
    assert report["difference"] < 1e-5


def test_a_file_says_how_images_are_read_also_without_those_of_its_encoder(tmp_path):
    """It is verified on the package's birds then, which have 8 bits and another range."""
    encoder = build_encoder(ModelConfig(width=16, depth=1, heads=2, img_size=32, patch_size=8)).eval()
    facts = EncoderFacts(how_read={"range": [0.0, 4095.0], "nodata": 7.0})
    run, report = exported(saved(tmp_path / "encoder", encoder, facts=facts), tmp_path, "torch_export")
    about = report["about"]
    assert (about["range"], about["bands"], about["nodata"]) == ([0.0, 4095.0], None, 7.0)
    assert about["input"] == "images (batch, 3, 32, 32) float32, from 0 to 255" and report["difference"] < 1e-5
    assert run(torch.rand(2, 3, 32, 32)).shape == (2, 16)


def test_packages_that_are_missing_are_named(finished_run, tmp_path, monkeypatch, without_module):
    without_module("onnxruntime")
    monkeypatch.setattr(torch.onnx, "export", MagicMock())  # which takes seconds
    with refused(r"cannot be exported as onnx: .*onnxruntime"):
        exported(finished_run, tmp_path, "onnx")


OF_OTHER_CLASSES = {
    "vit_small_patch16_dinov3": 16,
    "eva02_tiny_patch14_224": 14,
    "vit_small_patch16_rope_mixed_ape_224": 16,
    "beit_base_patch16_224": 16,
}  # rotations and tables, and the size of their patches
ALL = ("plain", "hybrid", "four channels", *KINDS, *OF_OTHER_CLASSES)
OTHER_SIZE = {"hybrid": "[96, 64]", "learned_2d": "48", "axial, relative_bias": "32"}  # as tables of positions allow
OTHER_SIZE |= {name: f"[{3 * patch}, {5 * patch}]" for name, patch in OF_OTHER_CLASSES.items()}


@pytest.mark.faults
def test_every_kind_of_encoder(tmp_path, image_folder):
    """As PyTorch, with attention fused and not, 1 and 7 images. ONNX is made from the other format; at another size."""
    bands = tmp_path / "bands"
    bands.mkdir()
    for number in range(12):
        np.save(bands / f"{number}.npy", picture(number)[..., [0, 1, 2, 0]])
    for kind in ALL:
        channels = 4 if kind == "four channels" else 3
        folder = saved(tmp_path / kind, encoder_of_kind(kind), channels)
        images = bands if channels == 4 else image_folder
        format, size = ("torch_export", "32") if kind in PARTS else ("onnx", OTHER_SIZE.get(kind, "[48, 40]"))
        words = (f"--data.path={images}", f"--data.channels={channels}", "--data.eval_split=null", f"--img_size={size}")
        run, report = exported(folder, tmp_path, format, *words)
        frozen = load_frozen_encoder(str(folder), img_size=tuple(report["about"]["img_size"]))
        for fused, count in product((True, False), (1, 7)):
            set_attention(frozen.model, fused)
            pixels = torch.randint(0, 256, (count, channels, *frozen.img_size), dtype=torch.uint8)
            (expected,) = frozen(pixels, "mean", [len(frozen.stages)])
            assert_close(run(pixels), expected.detach(), rtol=0, atol=1e-4, msg=kind)


def encoder_of_kind(kind):
    """An encoder with random weights; of one block where positions are not in every one."""
    torch.manual_seed(0)
    if kind == "four channels":
        config = ModelConfig(width=24, depth=1, heads=3, img_size=32, patch_size=8)
        return build_encoder(config, channels=4).eval()
    if kind in OF_OTHER_CLASSES:
        numbers = dict(width=32, depth=2, heads=2, img_size=4 * OF_OTHER_CLASSES[kind])
        encoder = build_encoder(ModelConfig(name=kind, **numbers)).eval()
        randomize(encoder, std=0.2)
        return encoder
    depth = {} if "every" in kind else {"depth": 1}
    settings = HYBRID | dict(img_size=64) if kind == "hybrid" else KINDS.get(kind, {})
    return build(**depth | settings)

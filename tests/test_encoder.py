"""timm in, timm out."""

import math
import shutil
from pathlib import Path

import pytest
import timm
import torch
from conftest import interrupted_after, refused
from model_inputs import HALVES, by_timm
from timm.data import IMAGENET_DEFAULT_MEAN

import mpp
from evaluation.frozen.encoder import FrozenEncoder
from mpp.config import ModelConfig, resized_side
from mpp.models.descriptions import EncoderFacts, export_encoder, learned_labels
from mpp.models.encoder import build_encoder

RGB_MOMENTS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def export(encoder, folder, **facts):
    export_encoder(encoder, folder, encoder.patch_embed.img_size, *RGB_MOMENTS, 1.0, EncoderFacts(**facts))
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(depth=2, attention="fused")).eval()  # as timm's own default
    return encoder, export(encoder, tmp_path_factory.mktemp("run") / "encoder")


def test_export_is_the_same_bits_every_time_and_an_interrupted_one_leaves_the_last(exported, tmp_path):
    encoder, folder = exported
    first = (folder / "model.safetensors").read_bytes()
    for _ in range(3):
        again = export(encoder, tmp_path / "encoder")
        assert (again / "model.safetensors").read_bytes() == first
    with interrupted_after(Path, "write_text", 0):
        export(mpp.load_encoder(folder, pretrained=False), tmp_path / "encoder")
    assert (again / "model.safetensors").read_bytes() == first


# --- what it takes ---


def described(model):
    data_config = timm.data.resolve_model_data_config(model)
    return data_config["input_size"], tuple(data_config["mean"]), tuple(data_config["std"])


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize(
    "changes, input_size, moments",
    [
        ({}, (3, 64, 64), RGB_MOMENTS),
        ({"img_size": [48, 80]}, (3, 48, 80), RGB_MOMENTS),
        ({"in_chans": 1, "img_size": 32, "num_classes": 4}, (1, 32, 32), ((0.2,), (0.5,))),
    ],
)
def test_an_encoder_says_what_it_takes(exported, changes, input_size, moments, pretrained):
    encoder = mpp.load_encoder(exported[1], pretrained=pretrained, **changes)
    size, *described_moments = described(encoder)
    assert size == input_size
    torch.testing.assert_close(torch.tensor(described_moments), torch.tensor(moments))
    data_config = timm.data.resolve_model_data_config(encoder)
    assert (data_config["crop_pct"], data_config["interpolation"]) == (1.0, "bilinear")
    assert encoder.pretrained_cfg["num_classes"] == changes.get("num_classes", 0)
    assert encoder(torch.randn(1, *input_size)).shape == (1, changes.get("num_classes", encoder.num_features))


def test_a_changed_model_of_timms_says_what_it_takes():
    model = mpp.load_encoder("resnet18", pretrained=False, img_size=(256, 256), in_chans=2)
    assert described(model)[:2] == ((2, 256, 256), (sum(IMAGENET_DEFAULT_MEAN) / 3,) * 2)
    assert described(timm.create_model("resnet18"))[0] == (3, 224, 224)  # timm's own settings are as they were


def test_the_crop_of_published_weights_does_not_travel(tmp_path):
    """Theirs squashes the whole image; a run from them crops at the centre."""
    published = timm.create_model("eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", depth=1, img_size=28, num_classes=0)
    assert timm.data.resolve_model_data_config(published)["crop_mode"] == "squash"
    export(published, tmp_path)
    assert timm.data.resolve_model_data_config(by_timm(tmp_path))["crop_mode"] == "center"


def test_the_crop_follows_the_size(tmp_path):
    """timm's transform resizes as the fixed view at every size that the encoder is loaded for."""
    encoder = build_encoder(ModelConfig(depth=1, img_size=32, patch_size=8))
    export_encoder(encoder, tmp_path / "vit", 32, *HALVES, 0.875)
    export_encoder(timm.create_model("resnet10t", num_classes=0), tmp_path / "any size", 32, *HALVES, 0.875)
    expected = {32: 37, 48: 55, 64: 73, 96: 110}  # to the nearest; 32, 48 and 96 are not timm's
    for size, length in expected.items():
        for name in ("vit", "any size"):
            loaded = mpp.load_encoder(tmp_path / name, img_size=size)
            data_config = timm.data.resolve_model_data_config(loaded)
            resize, crop, *_ = timm.data.create_transform(**data_config, is_training=False).transforms
            assert (resize.size, crop.size) == (length, (size, size))
            assert resized_side(size, FrozenEncoder(loaded, size).crop_pct) == length  # that of evaluations


# --- labels ---

NAMES = ["heron", "NA", "None", "m\u00f6we"]


def test_names_of_classes_travel_with_an_encoder(exported, tmp_path):
    classifier = mpp.load_encoder(exported[1], num_classes=4)
    again = mpp.load_encoder(export(classifier, tmp_path / "headed", label_names=NAMES))
    assert again.pretrained_cfg["label_names"] == NAMES
    export(again, tmp_path / "again")
    export(again, tmp_path / "renamed", label_names="abcd")
    for name, names in {"headed": NAMES, "again": NAMES, "renamed": [*"abcd"]}.items():
        assert by_timm(tmp_path / name).pretrained_cfg["label_names"] == names
    for other in (0, 3):  # another head knows other classes
        assert "label_names" not in mpp.load_encoder(tmp_path / "headed", num_classes=other).pretrained_cfg


def test_transformers_knows_the_names_of_classes_and_gives_the_same_logits(tmp_path):
    transformers = pytest.importorskip("transformers")
    classifier = timm.create_model("vit_tiny_patch16_224", num_classes=4, depth=1, img_size=32).eval()
    export(classifier, tmp_path, label_names=NAMES)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert theirs.config.id2label == dict(enumerate(NAMES))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(theirs(pixel_values=images).logits, classifier(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("vit_base_patch16_224.augreg_in21k", True),
        ("vit_base_patch16_224.mae", False),
        ("vit_small_patch16_dinov3.lvd1689m", False),
        ("vit_base_patch16_siglip_224.webli", True),  # texts, and no head
        ("hf-hub:timm/vit_base_patch16_224.orig_in21k", True),  # labels, and no head
        ("eva02_tiny_patch14_224.mim_in22k", True),  # features of CLIP
        ("nothing_of_timms", False),
    ],
)
def test_timm_says_who_learned_labels(name, expected):
    assert learned_labels(name) == expected


def test_an_encoder_says_whether_it_learned_labels(exported, tmp_path):
    plain, folder = exported
    export(plain, tmp_path / "with", learned_labels=True)
    export(mpp.load_encoder(folder, num_classes=2), tmp_path / "headed")
    for source, expected in ((folder, False), (tmp_path / "with", True), (tmp_path / "headed", True)):
        assert learned_labels(str(source)) == learned_labels(str(source / "model.safetensors")) == expected


# --- fixed positions ---


def test_fixed_positions_are_waves_and_travel_as_an_ordinary_table(exported, tmp_path):
    config = ModelConfig(depth=2, position="sincos_2d", img_size=(40, 64), init_from=str(exported[1]))
    encoder = build_encoder(config)
    row, column = 3, 5
    place = 1 + row * 8 + column  # in a 5 x 8 grid, after [class]
    waves = []
    for coordinate in (row, column):
        for wave in (math.sin, math.cos):
            waves += [wave(coordinate * 10000 ** -(k / 32)) for k in range(32)]
    torch.testing.assert_close(encoder.pos_embed[0, place], torch.tensor(waves), rtol=0, atol=1e-5)
    assert not encoder.pos_embed[0, 0].any() and not encoder.pos_embed.requires_grad
    export(encoder, tmp_path)
    assert torch.equal(by_timm(tmp_path).pos_embed, encoder.pos_embed)


def test_fixed_positions_stay_fixed_however_the_encoder_is_loaded(tmp_path):
    encoder = build_encoder(ModelConfig(depth=2, position="sincos_2d"))
    positions = encoder.pos_embed
    larger_positions = build_encoder(ModelConfig(depth=2, position="sincos_2d", img_size=96)).pos_embed
    resampled = timm.layers.resample_abs_pos_embed(positions, (12, 12), num_prefix_tokens=1)
    for number in range(2):  # an encoder that was loaded is exported again
        folder = export(encoder, tmp_path / str(number) / "encoder")
        encoder = mpp.load_encoder(folder)
        for pretrained, img_size, table in [
            (True, None, positions),
            (True, 96, resampled),
            (False, None, positions),
            (False, 96, larger_positions),
        ]:
            model = mpp.load_encoder(folder, pretrained=pretrained, img_size=img_size)
            torch.testing.assert_close(model.pos_embed, table)
            trained = dict(model.requires_grad_(True).named_parameters())
            assert "pos_embed" not in trained
            assert torch.equal(trained["cls_token"], encoder.cls_token) == pretrained


# --- what is not there ---


def test_no_encoder_there(tmp_path, exported):
    (tmp_path / "half").mkdir()
    shutil.copy(exported[1] / "config.json", tmp_path / "half")
    for source in (tmp_path, tmp_path / "half", "zoo:large"):
        with refused("no encoder at"):
            mpp.load_encoder(source)
    (tmp_path / "half" / "checkpoints").mkdir()
    with refused("half, a run that is not finished"):
        mpp.load_encoder(tmp_path / "half")

"""timm in, timm out."""

import math
import os
import shutil
from pathlib import Path

import pytest
import timm
import torch
from model_inputs import HALVES
from safetensors.torch import load_file, save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

import mpp
from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from mpp.config import ModelConfig, resized_side
from mpp.errors import UserError
from mpp.models.descriptions import EncoderFacts, export_encoder, learned_labels
from mpp.models.encoder import build_encoder, moments_of_weights
from mpp.runtime.weights import fingerprint


def export(encoder, folder):
    export_encoder(encoder, folder, encoder.patch_embed.img_size[0], (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 1.0)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(depth=2, attention="fused")).eval()  # as timm's own default
    return encoder, export(encoder, tmp_path_factory.mktemp("run") / "encoder")


def test_timm_alone_gives_the_same_features(exported):
    encoder, folder = exported
    images = torch.randn(2, 3, 64, 64)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    ours = mpp.load_encoder(folder)
    for loaded in (theirs, ours, mpp.load_encoder(folder.parent)):
        torch.testing.assert_close(loaded(images), encoder(images), rtol=0, atol=1e-6)
        torch.testing.assert_close(loaded.forward_features(images), encoder.forward_features(images), rtol=0, atol=1e-6)
    assert not ours.training


@pytest.mark.faults
def test_transformers_gives_the_same_tokens(exported):
    transformers = pytest.importorskip("transformers")
    encoder, folder = exported
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    images = torch.randn(2, 3, 64, 64)
    tokens = theirs(pixel_values=images).last_hidden_state
    torch.testing.assert_close(tokens, encoder.forward_features(images), rtol=0, atol=1e-6)


def test_encoder_says_what_input_it_takes(exported):
    data_config = timm.data.resolve_model_data_config(mpp.load_encoder(exported[1]))
    assert data_config["input_size"] == (3, 64, 64)
    assert tuple(data_config["mean"]) == (0.1, 0.2, 0.3)
    assert tuple(data_config["std"]) == (0.4, 0.5, 0.6)
    assert data_config["crop_pct"] == 1.0
    assert data_config["interpolation"] == "bilinear"


def test_the_crop_of_published_weights_does_not_travel(tmp_path):
    """Theirs squashes the whole image; a run from them crops at the centre."""
    published = timm.create_model("eva02_base_patch14_448.mim_in22k_ft_in22k_in1k", depth=1, img_size=28, num_classes=0)
    assert timm.data.resolve_model_data_config(published)["crop_mode"] == "squash"
    export_encoder(published, tmp_path, 28, (0.5,) * 3, (0.5,) * 3, 1.0)
    exported = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert timm.data.resolve_model_data_config(exported)["crop_mode"] == "center"


def test_another_image_size_resamples_positions_as_timm_does(exported):
    encoder, folder = exported
    larger = mpp.load_encoder(folder, img_size=96, num_classes=7)
    expected = timm.layers.resample_abs_pos_embed(encoder.pos_embed, (12, 12), num_prefix_tokens=1)
    torch.testing.assert_close(larger.pos_embed, expected)
    assert larger(torch.randn(1, 3, 96, 96)).shape == (1, 7)


def described(model):
    data_config = timm.data.resolve_model_data_config(model)
    return data_config["input_size"], tuple(data_config["mean"]), tuple(data_config["std"])


RGB_MOMENTS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
GREY_MOMENTS = ((0.2,), (0.5,))


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize(
    ("changes", "input_size", "moments"),
    [
        ({}, (3, 64, 64), RGB_MOMENTS),
        ({"img_size": 96}, (3, 96, 96), RGB_MOMENTS),
        ({"img_size": (48, 80)}, (3, 48, 80), RGB_MOMENTS),
        ({"img_size": [48, 80]}, (3, 48, 80), RGB_MOMENTS),
        ({"in_chans": 1}, (1, 64, 64), GREY_MOMENTS),
        ({"in_chans": 1, "img_size": 32, "num_classes": 4}, (1, 32, 32), GREY_MOMENTS),
    ],
)
def test_a_changed_encoder_says_what_it_takes(exported, changes, input_size, moments, pretrained):
    encoder = mpp.load_encoder(exported[1], pretrained=pretrained, **changes)
    size, *described_moments = described(encoder)
    assert size == input_size
    torch.testing.assert_close(torch.tensor(described_moments), torch.tensor(moments))
    assert encoder.pretrained_cfg["num_classes"] == changes.get("num_classes", 0)
    assert encoder(torch.randn(1, *input_size)).shape[0] == 1


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "swin_tiny_patch4_window7_224"])
def test_a_changed_model_of_timms_says_what_it_takes(name):
    if name == "vit_tiny_patch16_224":
        size = (96, 64)
        mean = std = 0.5
    else:
        size = (256, 256)
        mean = sum(IMAGENET_DEFAULT_MEAN) / 3
        std = sum(IMAGENET_DEFAULT_STD) / 3
    model = mpp.load_encoder(name, pretrained=False, img_size=size, in_chans=2)
    assert described(model) == ((2, *size), (mean,) * 2, (std,) * 2)
    assert described(timm.create_model(name))[0] == (3, 224, 224)  # timm's own settings are as they were


def test_the_crop_follows_the_size(tmp_path):
    """timm's transform resizes as the fixed view at every size that the encoder is loaded for."""
    folder = tmp_path / "0" / "encoder"
    encoder = build_encoder(ModelConfig(depth=1, img_size=32, patch_size=8))
    export_encoder(encoder, folder, 32, *HALVES, 0.875)
    expected = {32: 37, 48: 55, 64: 73, 80: 91, 96: 110, 128: 146}  # to the nearest; 32, 48 and 96 are not timm's
    for size, length in expected.items():
        loaded = mpp.load_encoder(folder, img_size=size)
        data_config = timm.data.resolve_model_data_config(loaded)
        resize, crop, *_ = timm.data.create_transform(**data_config, is_training=False).transforms
        assert resize.size == length
        assert crop.size == (size, size)
        assert extraction_crop(loaded, size) == length
    alone = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert timm.data.resolve_model_data_config(alone)["crop_pct"] == pytest.approx(32 / 37, abs=0.01)


NAMES = ["heron", "NA", "None", "m\u00f6we"]


def test_names_of_classes_travel_with_an_encoder(tmp_path):
    plain = build_encoder(ModelConfig(depth=1, img_size=32, patch_size=8))
    input_config = (32, *HALVES, 0.875)
    export_encoder(plain, tmp_path / "plain", *input_config)
    classifier = mpp.load_encoder(tmp_path / "plain", num_classes=4)
    export_encoder(classifier, tmp_path / "headed", *input_config, EncoderFacts(label_names=NAMES))
    by_timm = timm.create_model(f"local-dir:{tmp_path / 'headed'}", pretrained=True)
    for model in (mpp.load_encoder(tmp_path / "headed"), by_timm):
        assert model.pretrained_cfg["label_names"] == NAMES
    again = mpp.load_encoder(tmp_path / "headed")
    export_encoder(again, tmp_path / "again", *input_config)
    assert mpp.load_encoder(tmp_path / "again").pretrained_cfg["label_names"] == NAMES
    export_encoder(again, tmp_path / "renamed", *input_config, EncoderFacts(label_names="abcd"))
    assert mpp.load_encoder(tmp_path / "renamed").pretrained_cfg["label_names"] == ["a", "b", "c", "d"]
    for other in (0, 3):  # another head knows other classes
        assert "label_names" not in mpp.load_encoder(tmp_path / "headed", num_classes=other).pretrained_cfg
    zoo = mpp.load_encoder("zoo:ijepa_cifar10_finetuned")  # an older export, which has names without a head
    export_encoder(zoo, tmp_path / "pretrained", *input_config)
    assert "label_names" not in mpp.load_encoder(tmp_path / "pretrained").pretrained_cfg


def test_transformers_knows_the_names_of_classes(tmp_path):
    transformers = pytest.importorskip("transformers")
    classifier = timm.create_model("vit_tiny_patch16_224", num_classes=4, depth=1, img_size=32)
    export_encoder(classifier, tmp_path, 32, *HALVES, 0.875, EncoderFacts(label_names=NAMES))
    config = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert config.id2label == dict(enumerate(NAMES))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_base_patch16_224.augreg_in21k", True),
        ("vit_base_patch16_224.mae", False),
        ("vit_small_patch16_224.dino", False),
        ("vit_small_patch16_dinov3.lvd1689m", False),
        ("hf-hub:timm/vit_small_patch14_dinov2.lvd142m", False),
        ("vit_base_patch16_clip_224.openai", True),  # texts
        ("vit_base_patch16_siglip_224.webli", True),  # texts, and no head
        ("vit_base_patch16_224.orig_in21k", True),  # labels, and no head
        ("hf-hub:timm/vit_base_patch16_224.orig_in21k", True),
        ("eva02_tiny_patch14_224.mim_in22k", True),  # features of CLIP
        ("nothing_of_timms", False),
    ],
)
def test_timm_says_who_learned_labels(name, expected):
    assert learned_labels(name) == expected


def test_an_encoder_says_whether_it_learned_labels(tmp_path):
    plain = build_encoder(ModelConfig(depth=1))
    input_config = (64, *HALVES, 0.875)
    export_encoder(plain, tmp_path / "without", *input_config)
    export_encoder(plain, tmp_path / "with", *input_config, EncoderFacts(learned_labels=True))
    export_encoder(mpp.load_encoder(tmp_path / "without", num_classes=2), tmp_path / "headed", *input_config)
    for name, expected in (("without", False), ("with", True), ("headed", True)):
        folder = tmp_path / name
        assert learned_labels(str(folder)) == learned_labels(str(folder / "model.safetensors")) == expected
    shutil.copy(tmp_path / "with" / "model.safetensors", tmp_path)
    assert not learned_labels(str(tmp_path / "model.safetensors"))


def test_a_network_for_any_size_says_the_size_that_is_asked_for(tmp_path):
    export_encoder(timm.create_model("resnet10t", num_classes=0), tmp_path, 32, *HALVES, 0.875)
    model = mpp.load_encoder(tmp_path, img_size=(48, 48))
    assert described(model)[0] == (3, 48, 48)
    assert extraction_crop(model, 48) == 55


def extraction_crop(encoder, size):
    """Length of the shorter side to which evaluations resize the images of this encoder."""
    return resized_side(size, FrozenEncoder(encoder, size).crop_pct)


def test_fixed_positions_travel_as_an_ordinary_table(exported, tmp_path):
    settings = dict(depth=2, position="sincos_2d", init_from=str(exported[1]))
    encoder = build_encoder(ModelConfig(**settings))
    row = 3
    column = 5
    place = 1 + row * 8 + column  # in an 8 x 8 grid, after [class]
    waves = []
    for coordinate in (row, column):
        for wave in (math.sin, math.cos):
            waves += [wave(coordinate * 10000 ** -(k / 32)) for k in range(32)]
    torch.testing.assert_close(encoder.pos_embed[0, place], torch.tensor(waves), rtol=0, atol=1e-5)
    assert not encoder.pos_embed[0, 0].any()
    assert not encoder.pos_embed.requires_grad
    by_timm = timm.create_model(f"local-dir:{export(encoder, tmp_path / 'encoder')}", pretrained=True)
    assert torch.equal(by_timm.pos_embed, encoder.pos_embed)


def test_fixed_positions_stay_fixed_however_the_encoder_is_loaded(tmp_path):
    encoder = build_encoder(ModelConfig(depth=2, position="sincos_2d"))
    positions = encoder.pos_embed
    larger_positions = build_encoder(ModelConfig(depth=2, position="sincos_2d", img_size=96)).pos_embed
    for number in range(2):  # an encoder that was loaded is exported again
        folder = export(encoder, tmp_path / str(number) / "encoder")
        encoder = mpp.load_encoder(folder)
        larger = mpp.load_encoder(folder, img_size=96)
        random = mpp.load_encoder(folder, pretrained=False)
        larger_random = mpp.load_encoder(folder, pretrained=False, img_size=96)
        resampled = timm.layers.resample_abs_pos_embed(positions, (12, 12), num_prefix_tokens=1)
        expected = [(encoder, positions), (larger, resampled), (random, positions), (larger_random, larger_positions)]
        for model, table in expected:
            torch.testing.assert_close(model.pos_embed, table)
            trained = dict(model.requires_grad_(True).named_parameters())
            assert "pos_embed" not in trained
            assert "cls_token" in trained
        assert not torch.equal(random.cls_token, encoder.cls_token)


def test_export_is_the_same_bits_every_time(exported, tmp_path):
    encoder, folder = exported
    first = (folder / "model.safetensors").read_bytes()
    for _ in range(5):
        again = export(encoder, tmp_path / "encoder")
        assert (again / "model.safetensors").read_bytes() == first


def test_a_named_model_with_changes_travels(tmp_path):
    config = ModelConfig(name="vit_tiny_patch16_224", depth=1, img_size=48, patch_size=12, attention="fused")
    encoder = build_encoder(config)
    loaded = mpp.load_encoder(export(encoder, tmp_path / "encoder"))
    images = torch.randn(1, 3, 48, 48)
    encoder.eval()
    torch.testing.assert_close(loaded(images), encoder(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["vit_small_patch32_224", "vit_base_patch8_224", "vit_large_patch14_224"])
def test_timms_sizes_build_by_name(name):
    encoder = build_encoder(ModelConfig(name=name, depth=1))
    assert encoder.patch_embed.patch_size[0] == int(name.split("patch")[1].split("_")[0])
    assert encoder.patch_embed.img_size == (224, 224)


def test_other_moments_than_those_of_the_weights_are_noted(exported, capsys):
    settings = dict(depth=2, init_from=str(exported[1]))
    moments_of_weights(ModelConfig(**settings, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)), 3)
    assert "note" not in capsys.readouterr().out
    moments_of_weights(ModelConfig(**settings, mean=(0.1, 0.2, 0.3)), 3)
    said = capsys.readouterr().out
    assert said.startswith("note: model.std is (0.5, 0.5, 0.5), and ")
    assert said.count("note") == 1


def test_start_from_weights_of_another_size(exported, tmp_path):
    source, folder = exported
    for path in (folder, folder.parent, folder / "model.safetensors"):
        same = build_encoder(ModelConfig(depth=2, init_from=str(path)))
        assert all(torch.equal(a, b) for a, b in zip(same.parameters(), source.parameters(), strict=True))
    larger = build_encoder(ModelConfig(depth=2, img_size=96, init_from=str(folder)))
    expected = timm.layers.resample_abs_pos_embed(source.pos_embed, (12, 12), num_prefix_tokens=1)
    torch.testing.assert_close(larger.pos_embed, expected)
    classifier = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=3)
    headed = export(classifier, tmp_path / "headed")
    assert "head.weight" in load_file(headed / "model.safetensors")
    build_encoder(ModelConfig(depth=2, init_from=str(headed)))


def watch(monkeypatch, look) -> None:
    """Call look(operation, path) after each sync, and after each renaming or removal of a file or a folder."""
    done = {name: getattr(os, name) for name in ("fsync", "replace", "rename", "unlink", "rmdir")}

    def watched(name):
        def call(target, *rest, **options):
            path = Path(os.readlink(f"/proc/self/fd/{target}") if name == "fsync" else target)
            done[name](target, *rest, **options)
            look(name, path)

        return call

    for name in done:
        monkeypatch.setattr(os, name, watched(name))


def test_an_encoder_is_on_disk_before_it_has_its_name(exported, tmp_path, monkeypatch):
    log = []
    with monkeypatch.context() as patch:
        watch(patch, lambda *entry: log.append(entry))
        folder = export(exported[0], tmp_path / "encoder")
    aside = tmp_path / ".encoder.partial"
    (named,) = [number for number, entry in enumerate(log) if entry in (("rename", aside), ("replace", aside))]
    for path in (aside, *(aside / file.name for file in folder.iterdir())):
        assert ("fsync", path) in log[:named]
    assert ("fsync", tmp_path) in log[named:]


def test_an_encoder_is_whole_or_absent_while_another_takes_its_place(exported, tmp_path, monkeypatch):
    folder = export(exported[0], tmp_path / "encoder")
    files = {file.name for file in folder.iterdir()}
    seen = []

    def look(*_):
        seen.append({file.name for file in folder.glob("*")})

    with monkeypatch.context() as patch:
        watch(patch, look)
        export(exported[0], folder)
    assert seen
    assert all(found in (files, set()) for found in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "vit_bose_patch16_224"}, ["model.name", "vit_bose_patch16_224", "vit_base_patch16_224"]),
        ({"name": "resnet18"}, ["model.name", "resnet18"]),
        ({"name": "vit_base_patch16_siglip_224"}, ["model.name", "attention"]),
        ({"name": "vit_tiny_patch16_224", "img_size": 100}, ["model.img_size", "100", "(16)"]),
        ({"name": "vit_tiny_patch16_224", "heads": 5}, ["vit_tiny_patch16_224"]),
        ({"width": 18, "heads": 2, "position": "sincos_2d"}, ["model.position is sincos_2d", "(18)"]),
        ({"depth": 3, "init_from": "EXPORTED"}, ["model.init_from", "blocks.2"]),
        ({"width": 64, "depth": 2, "init_from": "EXPORTED"}, ["model.init_from", "64"]),
        ({"init_from": "/nowhere"}, ["model.init_from", "/nowhere"]),
        ({"init_from": "/nowhere/model.safetensors"}, ["model.init_from", "/nowhere/model.safetensors"]),
    ],
)
def test_what_cannot_be_built_is_named(exported, settings, words):
    if settings.get("init_from") == "EXPORTED":
        settings = settings | {"init_from": str(exported[1])}
    with pytest.raises(ValueError) as error:
        build_encoder(ModelConfig(**settings))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_no_encoder_there(tmp_path, exported):
    with pytest.raises(ValueError, match="no encoder at"):
        mpp.load_encoder(tmp_path)
    shutil.copy(exported[1] / "config.json", tmp_path)
    with pytest.raises(ValueError, match="no encoder at"):
        mpp.load_encoder(tmp_path)


def test_an_encoder_that_comes_with_mpp_is_known_by_its_name(exported, tmp_path, monkeypatch):
    _, folder = exported
    zoo = tmp_path / "zoo"
    shutil.copytree(folder, zoo / "tiny")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, zoo / "tiny" / "model.safetensors")
    monkeypatch.setattr("mpp.runtime.weights.ZOO_FOLDER", zoo)
    encoder = mpp.load_encoder("zoo:tiny")
    images = torch.randn(2, 3, *encoder.patch_embed.img_size)
    assert torch.equal(encoder(images), mpp.load_encoder(zoo / "tiny")(images))
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    assert fingerprint(Path("zoo:tiny")) == fingerprint(zoo / "tiny") != ""
    assert learned_labels("zoo:tiny") == learned_labels(str(folder))
    frozen = load_frozen_encoder("zoo:tiny", random=True)
    assert not torch.equal(frozen.model(images), encoder(images))
    begun = build_encoder(ModelConfig(depth=2, init_from="zoo:tiny"))
    assert torch.equal(begun.cls_token, encoder.cls_token)
    with pytest.raises(UserError, match=r"no encoder at .*large"):
        mpp.load_encoder("zoo:large")

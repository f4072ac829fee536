"""Files of weights, wherever one is given: what cannot be read is named with its reason, and nothing is left random."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import mpp
from evaluation import embed, export, features, fewshot, knn, linear, segmentation
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.supervision.classifiers import load_classifier
from evaluation.supervision.learners import build_student
from mpp.config import ModelConfig
from mpp.errors import UserError
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder, load_encoder
from mpp.runtime.weights import PICKLES

SMALL = dict(img_size=32, patch_size=8, width=16, depth=2, heads=2)
NAME = "vit_tiny_patch16_224"
BUILT = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An encoder folder, which nobody may change."""
    folder = tmp_path_factory.mktemp("source") / "encoder"
    torch.manual_seed(0)
    export_encoder(build_encoder(ModelConfig(**SMALL)), folder, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(source, tmp_path / "encoder"))


def weights_in(file: Path) -> dict[str, torch.Tensor]:
    """The weights of a file that is then written anew: they are no longer mapped from it."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def of_name(folder, key="encoder"):
    return load_encoder(NAME, checkpoint=str(folder / "model.safetensors"), setting=key, num_classes=0, **BUILT)


WAYS = {  # a setting -> the encoder with the weights of a folder that it names
    "model.init_from": lambda folder: build_encoder(ModelConfig(**SMALL, init_from=str(folder))),
    "model.init_from ": lambda folder: build_encoder(ModelConfig(**SMALL, init_from=str(folder / "model.safetensors"))),
    "encoder": lambda folder: mpp.load_encoder(folder),
    "encoder ": lambda folder: load_frozen_encoder(str(folder)).model,
    "objective.teacher": lambda folder: load_encoder(str(folder), setting="objective.teacher", num_classes=0),
    "checkpoint": of_name,
    "objective.teacher_checkpoint": partial(of_name, key="objective.teacher"),
}
every_way = pytest.mark.parametrize("way", WAYS)


def refused(way, folder) -> str:
    with pytest.raises(UserError) as error:
        WAYS[way](folder)
    said = str(error.value)
    assert said.startswith(f"{way.strip()} is {folder}"), said
    return said


FAULTS = {
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[:500],
    "a byte short": lambda whole: whole[:-1],
    "a Git LFS pointer": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "an error page": lambda whole: b"<!DOCTYPE html><html>" + bytes(100),
    "a pickle": lambda whole: b"PK\x03\x04" + bytes(100),
}


@every_way
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_be_read_is_named(folder, way, fault):
    file = folder / "model.safetensors"
    file.write_bytes(FAULTS[fault](file.read_bytes()))
    said = refused(way, folder)
    assert "which cannot be read: " in said and "it must be a whole .safetensors file" in said and "\n" not in said


PICKLED_WAYS = {
    "model.init_from": lambda path: build_encoder(ModelConfig(**SMALL, init_from=path)),
    "model.init_from ": lambda path: build_student(ModelConfig(**SMALL, init_from=path)),
    "encoder": mpp.load_encoder,
    "encoder ": load_frozen_encoder,
    "objective.teacher": lambda path: load_encoder(path, setting="objective.teacher"),
    "distill.teacher": lambda path: load_classifier(path, 3, "distill.teacher"),
}


@pytest.mark.parametrize("way", PICKLED_WAYS)
@pytest.mark.parametrize("ending", PICKLES)
def test_pickles_are_refused_with_what_makes_safe_files(tmp_path, way, ending):
    file = tmp_path / f"mae{ending}"
    torch.save({"model": {}}, file)
    for path in (file, tmp_path):  # a folder that has nothing else
        with pytest.raises(UserError) as error:
            PICKLED_WAYS[way](str(path))
        assert str(error.value).startswith(
            f"{way.strip()} is {path}, which cannot be read: mpp reads no pickled weights"
        )
        assert repr(str(file)) in str(error.value)


@pytest.mark.parametrize("command", [fewshot, knn, linear, features, embed, export, segmentation])
def test_commands_say_why_a_file_is_no_encoder(tmp_path, command):
    file = tmp_path / "mae.pth"
    torch.save({}, file)
    words = [f"--encoder={file}", *(["--out=features.onnx"] if command is export else [])]
    words += [f"--out={tmp_path / 'table.parquet'}"] if command is embed else []
    with pytest.raises(UserError, match=r"mpp reads no pickled weights"):
        command.main(words)


@pytest.mark.parametrize("key", ["encoder", "objective.teacher"])
def test_a_pickled_checkpoint_is_refused(tmp_path, key):
    file = tmp_path / "vit.pth"
    torch.save({}, file)
    setting = "checkpoint" if key == "encoder" else f"{key}_checkpoint"
    with pytest.raises(
        UserError, match=rf"^{setting} is .*vit\.pth; it must be a \.safetensors file: mpp reads no pickled"
    ):
        load_encoder(NAME, checkpoint=str(file), setting=key)


@pytest.mark.parametrize("below", [None, "model", "state_dict"])
def test_the_lines_of_the_refusal_make_a_file_that_is_read(source, tmp_path, below):
    weights = weights_in(source / "model.safetensors")
    weights["pos_embed"] = weights["pos_embed"].transpose(1, 2).contiguous().transpose(1, 2)  # as slices are in pickles
    torch.save({below: weights, "epoch": 3} if below else weights, tmp_path / "mae.pth")
    with pytest.raises(UserError) as error:
        build_encoder(ModelConfig(**SMALL, init_from=str(tmp_path / "mae.pth")))
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    exec("\n".join(lines))
    found = build_encoder(ModelConfig(**SMALL, init_from=str(tmp_path / "mae.safetensors"))).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_weights_alone_are_no_encoder(folder):
    with pytest.raises(UserError, match=r"no encoder at .*; encoder must be an encoder folder .* is a checkpoint"):
        mpp.load_encoder(folder / "model.safetensors")


@every_way
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "student.backbone.", "encoder."])
def test_one_beginning_of_all_names_is_left_out_and_said(folder, way, wrapper, capsys):
    file = folder / "model.safetensors"
    weights = weights_in(file)
    save_file({f"{wrapper}{name}": tensor for name, tensor in weights.items()}, file)
    model = WAYS[way](folder)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert "state_dict" not in model.pretrained_cfg
    said = capsys.readouterr().out
    assert said.count(f"note: of the weights in {file} ") == said.count(f"`{wrapper}`") == 1


@every_way
def test_weights_that_are_missing_or_left_over_are_counted_and_named(folder, way, capsys):
    file = folder / "model.safetensors"
    weights = weights_in(file)
    for wrapper in ("", "module."):
        fewer = {f"{wrapper}{name}": each for name, each in weights.items() if not name.startswith("blocks.1.")}
        save_file(fewer, file)
        said = refused(way, folder)
        assert "Missing key" in said and "blocks.1." in said
        assert "\n" not in said and len(said) < 1000
        more = {f"{wrapper}{name}": each for name, each in weights.items()}
        save_file(more | {f"{wrapper}decoder.weight": torch.zeros(1), f"{wrapper}decoder.bias": torch.zeros(1)}, file)
        said = refused(way, folder)
        assert "Unexpected key" in said and "decoder." in said
        assert "Missing" not in said


@pytest.mark.parametrize("name", ["norm.bias", "norm.weight", "blocks.0.attn.qkv.weight", "cls_token"])
def test_no_weight_is_left_random_below_a_new_head(folder, name):
    """timm loads what there is, and leaves the rest as it is, where the number of classes differs."""
    file = folder / "model.safetensors"
    assert mpp.load_encoder(folder, num_classes=3).head.weight.shape == (3, 16)
    weights = weights_in(file)
    del weights[name]
    save_file(weights, file)
    with pytest.raises(UserError, match=rf"Missing key.*{name}"):
        mpp.load_encoder(folder, num_classes=3)
    save_file({f"what.{each}": tensor for each, tensor in enumerate(weights.values())}, file)
    with pytest.raises(UserError, match=r"Missing key|KeyError"):
        mpp.load_encoder(folder, num_classes=3)


def test_a_head_that_is_not_asked_for_is_no_weight_left_over(folder, tmp_path):
    export_encoder(mpp.load_encoder(folder, num_classes=3), tmp_path / "headed", 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    for way in WAYS:
        assert torch.equal(WAYS[way](tmp_path / "headed").norm.weight, mpp.load_encoder(folder).norm.weight)
    timms = timm.create_model("levit_128s", num_classes=5)  # its head has a batch norm beside the classifier
    export_encoder(timms, tmp_path / "levit", 224, (0.5,) * 3, (0.5,) * 3, 0.875)
    assert load_encoder(tmp_path / "levit", num_classes=0).num_classes == 0


def test_weights_of_other_shapes_are_named(folder):
    (folder / "config.json").write_text("{}")  # from which their width would be known
    for settings in (dict(width=32), dict(heads=2, width=48)):
        with pytest.raises(UserError, match=r"it must be the weights .* size mismatch for cls_token") as error:
            build_encoder(ModelConfig(**SMALL | settings, init_from=str(folder)))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 1000


def test_hybrids_are_checked_too(tmp_path):
    hybrid = build_encoder(ModelConfig(name="vit_tiny_r_s16_p8_224", depth=1, img_size=64))
    folder = tmp_path / "hybrid"
    wrapped = {}
    export_encoder(hybrid, folder, 64, (0.5,) * 3, (0.5,) * 3, 0.875)
    weights = weights_in(folder / "model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    save_file(wrapped, folder / "model.safetensors")
    assert torch.equal(mpp.load_encoder(folder, img_size=96).norm.weight, hybrid.norm.weight)
    del wrapped["module.norm.weight"]
    save_file(wrapped, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"Missing key.*norm\.weight"):
        mpp.load_encoder(folder, img_size=96)


def test_a_network_that_is_no_vit_is_no_beginning_of_one(tmp_path):
    export_encoder(timm.create_model("resnet10t", num_classes=0), tmp_path, 32, (0.5,) * 3, (0.5,) * 3, 0.875)
    with pytest.raises(UserError, match=r"model\.init_from is .*KeyError|Missing key"):
        build_encoder(ModelConfig(**SMALL, init_from=str(tmp_path)))

"""`model.init_from`: which weights it names, how much of a file has to fit, their moments and their licence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from conftest import TINY
from safetensors.torch import load_file, save_file

import mpp
from evaluation import supervised
from evaluation.supervision.learners import build_student
from mpp.config import ModelConfig
from mpp.config.parsing import read_yaml
from mpp.errors import UserError
from mpp.models.descriptions import EncoderFacts, export_encoder, licence_of
from mpp.models.encoder import build_encoder, describe_computation, moments_of_weights

SMALL = dict(img_size=32, width=32, depth=2, heads=2)
DINOV3 = "vit_small_patch16_dinov3_qkvb"
NAMES = ("vit_tiny_patch16_224", DINOV3, "beit_base_patch16_224")
MOMENTS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
every_name = pytest.mark.parametrize("name", NAMES)


def exported(name: str, folder: Path, size=32, licence=None) -> dict[str, torch.Tensor]:
    """Write an encoder; its weights, which are not mapped from the file."""
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(name=name, **SMALL | {"img_size": size}))
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    export_encoder(encoder, folder, size, *MOMENTS, 1.0, EncoderFacts(licence=licence))
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def begun(name: str, source, channels: int = 3, **changes) -> torch.nn.Module:
    return build_encoder(ModelConfig(name=name, **SMALL | changes, init_from=str(source)), channels).eval()


def holds(encoder: torch.nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    state = encoder.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)


@every_name
def test_all_or_nothing_of_a_file_is_loaded(name, tmp_path):
    weights = exported(name, tmp_path / "encoder")
    file = tmp_path / "weights.safetensors"
    for lacking in ("cls_token", "patch_embed.proj.weight", "blocks.1.attn.qkv.weight", "blocks.0.norm2.bias"):
        save_file({each: tensor for each, tensor in weights.items() if each != lacking}, file)
        with pytest.raises(UserError, match=rf"^model\.init_from is .*(Missing key.*|KeyError: '){lacking}"):
            begun(name, file)
    save_file(weights | {"blocks.2.norm1.bias": torch.zeros(32)}, file)
    with pytest.raises(UserError, match=r"Unexpected key.*blocks\.2\.norm1\.bias"):
        begun(name, file)
    save_file({each: tensor for each, tensor in weights.items() if each.startswith("blocks.")}, file)
    with pytest.raises(UserError, match=r"KeyError|Missing key"):
        begun(name, file)


LEFT_OVER = ("head.weight", "head.bias", "attn_pool.latent", "decoder_embed.weight", "decoder_blocks.0.norm1.bias")


@every_name
@pytest.mark.parametrize("wrapper", ["", "module.", "model.", "encoder."])
def test_heads_and_decoders_may_be_left_over_and_a_wrapper_is_said(name, wrapper, tmp_path, capsys):
    weights = exported(name, tmp_path / "encoder")
    file = tmp_path / "weights.safetensors"
    wrapped = {f"{wrapper}{each}": tensor for each, tensor in weights.items()}
    others = {each: torch.ones(1) for each in LEFT_OVER}
    save_file(wrapped | others, file)
    assert holds(begun(name, file), weights)
    said = capsys.readouterr().out
    if wrapper:
        assert f"begin with `{wrapper}`" in said
    save_file(wrapped | {f"{wrapper}{each}": tensor for each, tensor in others.items()}, file)
    assert holds(begun(name, file), weights)


@pytest.mark.parametrize("options", [(), ("--config=rivals/mae",), ("--config=rivals/data2vec",)], ids=str)
def test_a_runs_checkpoint_has_the_encoder_that_it_trained(pretrain, options):
    """Of a moving average's run, too, the trained one. A run that diverged has nothing else."""
    folder = pretrain(*options, "--run.steps=2", "--optim.name=adam")
    sizes = ModelConfig(width=16, depth=2, heads=2, img_size=32)
    checkpoint = folder / "checkpoints" / "step_00000002" / "model.safetensors"
    position = read_yaml(folder / "config.yaml")["model"]["position"]
    encoder = build_encoder(replace(sizes, position=position, init_from=str(checkpoint)))
    assert holds(encoder, load_file(folder / "encoder" / "model.safetensors"))


@every_name
def test_the_model_of_a_checkpoint_is_taken_without_its_mask(name, tmp_path):
    """A checkpoint of a run has `encoder.`, [mask] and a head; of a published MAE, [mask] is beside the encoder."""
    weights = exported(name, tmp_path / "encoder")
    file = tmp_path / "weights.safetensors"
    wrapped = {f"encoder.{each}": tensor for each, tensor in weights.items()}
    save_file(wrapped | {"mask_token": torch.ones(32), "head.weight": torch.ones(2, 32)}, file)
    assert holds(begun(name, file), weights)
    save_file(weights | {"mask_token": torch.ones(1, 1, 32)}, file)
    assert holds(begun(name, file), weights)


PLAIN = dict(width=32, depth=2, img_size=32, patch_size=8)


@pytest.mark.parametrize("source", ["run", "zoo:ijepa_cifar10_finetuned"])
def test_a_run_from_weights_needs_no_setting_of_their_model(source, pretrain, tmp_path):
    """Pre-training and supervised training; config.yaml then has the model's settings, and repeats the run."""
    registers = "--model.arguments={reg_tokens: 2}"
    source = str(pretrain("--model.position=relative", registers, dir=tmp_path / "run")) if source == "run" else source
    begin = f"--model.init_from={source}"
    for name, train in {"pre": pretrain, "labels": supervised.main}.items():
        folder = tmp_path / name
        words = [word for word in TINY if not word.startswith("--model.")]
        if train is pretrain:
            train(begin, dir=folder, without="--model.")
        else:
            train([word for word in words if not word.startswith("--probe.")] + [begin, f"--run.dir={folder}"])
        encoder = mpp.load_encoder(folder)
        assert describe_computation(encoder) == describe_computation(mpp.load_encoder(source))
        model = read_yaml(folder / "config.yaml")["model"]
        assert (model["width"], model["depth"]) == (encoder.embed_dim, len(encoder.blocks))
        assert model["patch_size"] == encoder.patch_embed.patch_size[0]
    pretrain(f"--config={folder.parent / 'pre' / 'config.yaml'}", dir=tmp_path / "again", without="--model.")
    assert holds(mpp.load_encoder(tmp_path / "again"), mpp.load_encoder(tmp_path / "pre").state_dict())
    with pytest.raises(UserError, match=rf"model\.width is 24; it must be {model['width']}, as in the weights of "):
        pretrain(begin, "--model.width=24", "--model.heads=2", dir=tmp_path / "other", without="--model.")
    assert not (tmp_path / "other").exists()


LEARNED_2D = dict(position="learned_2d", heads=4)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (dict(heads=8), dict(heads=4), r"model\.heads is 4; it must be 8, as in the weights of "),
        (
            dict(name="vit_tiny_patch16_224", patch_size=16),
            dict(heads=2, patch_size=16),
            r"model\.heads is 2; it must be 3, ",
        ),
        (dict(arguments={"act_layer": "silu"}), dict(arguments={"act_layer": "gelu"}), "gelu.*; it must be .*silu"),
        (dict(name="vit_base_patch32_clip_quickgelu_224"), dict(name="vit_base_patch32_clip_224"), "has .*QuickGELU"),
        (dict(position="rope"), dict(position="none"), r"model\.position is none; it must be rope, "),
        (dict(position="none", heads=4), dict(position="rope"), "rope; it must be none, "),
        (LEARNED_2D, dict(position_at="every_shared"), r"model\.position_at is every_shared; it must be stem, "),
    ],
)
@pytest.mark.parametrize("from_file", [False, True])
def test_weights_of_an_encoder_that_computes_otherwise_are_refused(theirs, ours, said, from_file, tmp_path):
    """Its weights have the same names and shapes; without settings of their own they begin a model like theirs."""
    of_name = dict(width=48, depth=1, img_size=32) if "name" in theirs else PLAIN
    first = build_encoder(ModelConfig(**of_name | theirs))
    export_encoder(first, tmp_path / "encoder", 32, *MOMENTS, 1.0)
    source = tmp_path / "encoder" / "model.safetensors" if from_file else tmp_path / "encoder"
    assert describe_computation(build_encoder(ModelConfig(init_from=str(source)))) == describe_computation(first)
    with pytest.raises(UserError, match=said):
        build_encoder(ModelConfig(**of_name | ours, init_from=str(source)))


def test_names_of_dinov3s_authors_are_timms(tmp_path):
    """Original names, a bias of all of qkv, and buffers that timm computes."""
    weights = exported(DINOV3, tmp_path / "encoder")
    original = {}
    for name, tensor in weights.items():
        if name.endswith("v_bias"):
            continue
        if name.endswith("q_bias"):
            value_bias = weights[name.replace("q_bias", "v_bias")]
            original[name.replace("q_bias", "qkv.bias")] = torch.cat([tensor, torch.zeros_like(tensor), value_bias])
            continue
        for ours, theirs in (("gamma_1", "ls1.gamma"), ("gamma_2", "ls2.gamma"), ("reg_token", "storage_tokens")):
            name = name.replace(ours, theirs)
        original[name] = tensor
    original |= {"rope_embed.periods": torch.ones(4), "mask_token": torch.ones(1, 32)}
    original |= {f"blocks.{block}.attn.qkv.bias_mask": torch.ones(96) for block in (0, 1)}
    save_file(original, tmp_path / "dinov3.safetensors")
    assert holds(begun(DINOV3, tmp_path / "dinov3.safetensors"), weights)


@every_name
def test_other_sizes_and_channels_are_timms(name, tmp_path):
    """The first convolution, positions and tables: as `timm.create_model` loads them."""
    exported(name, tmp_path / "encoder", size=64)
    for channels, size in ((5, 64), (3, 96), (1, (32, 96))):
        ours = begun(name, tmp_path / "encoder", channels, img_size=size)
        source = f"local-dir:{tmp_path / 'encoder'}"
        theirs = timm.create_model(source, pretrained=True, in_chans=channels, img_size=size)
        assert holds(ours, theirs.state_dict())


def test_tables_of_an_oblong_are_taken_for_its_own_size_alone(tmp_path):
    weights = exported("beit_base_patch16_224", tmp_path / "encoder", size=(32, 96))
    assert holds(begun("beit_base_patch16_224", tmp_path / "encoder", img_size=(32, 96)), weights)
    with pytest.raises(UserError, match=r"model\.init_from is .*\(32, 96\) pixels, which fit this size alone"):
        begun("beit_base_patch16_224", tmp_path / "encoder", img_size=(96, 32))


@pytest.mark.parametrize("build", [begun, lambda name, source: build_student(ModelConfig(init_from=source))])
def test_a_name_of_timms_means_its_weights_on_the_hub(build, tmp_path, monkeypatch):
    weights = exported("vit_tiny_patch16_224", tmp_path / "encoder")
    asked = []

    def download(name, **_):
        asked.append(name)
        return str(tmp_path / "encoder")

    monkeypatch.setattr("mpp.runtime.weights.snapshot_download", download)
    source = "vit_tiny_patch16_224.augreg_in21k"
    if build is begun:
        assert holds(build("vit_tiny_patch16_224", source), weights)
    else:
        with pytest.raises(UserError, match=r"model\.name is vit_tiny_patch16_224; it must be left out"):
            build("", source)
    assert set(asked) == {"timm/vit_tiny_patch16_224.augreg_in21k"}


def test_weights_that_are_not_there_are_never_random(monkeypatch):
    def offline(name, **_):
        raise OSError("offline")

    monkeypatch.setattr("mpp.runtime.weights.snapshot_download", offline)
    for source in (f"{DINOV3}.lvd1689m", "hf-hub:timm/nothing"):
        with pytest.raises(UserError, match=r"no encoder at hf-hub:timm/.*: offline"):
            begun(DINOV3, source)
    with pytest.raises(UserError, match=r"model\.init_from is vit_smal_patch16; it must be"):
        begun(DINOV3, "vit_smal_patch16")
    with pytest.raises(UserError, match=r"model\.init_from is vit_base_patch16_18x2_224; it must be"):
        begun(DINOV3, "vit_base_patch16_18x2_224")


def test_moments_are_those_of_the_weights(tmp_path):
    exported(DINOV3, tmp_path / "encoder")
    config = ModelConfig(name=DINOV3, mean=None, std=None, init_from=str(tmp_path / "encoder"))
    rgb = moments_of_weights(config, 3)
    assert (rgb.mean, rgb.std) == MOMENTS
    assert moments_of_weights(config, 2).mean == pytest.approx((0.2, 0.2))
    half = moments_of_weights(ModelConfig(mean=0.3, std=None, init_from=config.init_from), 3)
    assert (half.mean, half.std) == (0.3, MOMENTS[1])
    with pytest.raises(UserError, match=r"model\.mean is null; it must be numbers or auto unless model\.init_from"):
        ModelConfig(mean=None)
    save_file({"weight": torch.ones(1)}, tmp_path / "alone.safetensors")
    alone = ModelConfig(mean=None, init_from=str(tmp_path / "alone.safetensors"))
    with pytest.raises(UserError, match=r"model\.mean is null; .*no config\.json next to .*alone\.safetensors"):
        moments_of_weights(alone, 3)


def test_a_run_takes_moments_and_licence_of_its_weights(tmp_path, pretrain):
    exported("vit_tiny_patch16_224", tmp_path / "encoder", licence="dinov3-license")
    null = (f"--model.init_from={tmp_path / 'encoder'}", "--model.mean=null", "--model.std=null")
    numbers = ("--model.name=vit_tiny_patch16_224", "--model.width=32", "--model.img_size=32")
    first = pretrain(*null, *numbers, "--run.steps=1", dir=tmp_path / "first")
    assert read_yaml(first / "config.yaml")["model"]["mean"] == list(MOMENTS[0])
    pretrain(*null, *numbers, "--run.steps=1", dir=tmp_path / "first")  # finished: the same settings
    second = pretrain(f"--model.init_from={first}", *numbers, "--run.steps=1", dir=tmp_path / "second")
    for run, mean in ((first, 0.1), (second, 0.5)):
        written = json.loads((run / "encoder" / "config.json").read_text())["pretrained_cfg"]
        assert (written["license"], written["mean"][0]) == ("dinov3-license", mean)
        assert (run / "encoder" / "README.md").read_text().startswith("---\nlicense: dinov3-license\n")
        assert licence_of(str(run)) == "dinov3-license"


def test_random_weights_have_no_licence(tmp_path, pretrain):
    run = pretrain("--model.name=vit_tiny_patch16_224", "--run.steps=1")
    assert json.loads((run / "encoder" / "config.json").read_text())["pretrained_cfg"]["license"] is None
    assert (run / "encoder" / "README.md").read_text().startswith("---\nlibrary_name")

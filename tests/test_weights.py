"""Files of weights, wherever one is given, and what `model.init_from` takes of them: all that fits, or a refusal.

Nothing is left random. What cannot be read is named with its reason; moments and licence are those of the weights.
"""

import shutil
from dataclasses import replace

import pytest
import timm
import torch
from conftest import equal_tensors, exported, read_json, refused, tiny_without
from model_inputs import HALVES, by_timm, randomize
from safetensors.torch import load_file, save_file

import mpp
from evaluation import supervised
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.supervision.classifiers import load_classifier
from evaluation.supervision.learners import build_student
from mpp.config import Config, ModelConfig
from mpp.config.parsing import parse_saved, read_yaml
from mpp.errors import UserError
from mpp.models.descriptions import EncoderFacts, export_encoder, licence_of
from mpp.models.encoder import build_encoder, describe_computation, load_encoder, moments_of_weights
from mpp.runtime.weights import PICKLES

SMALL = dict(img_size=32, patch_size=8, width=16, depth=2, heads=2)
NAME = "vit_tiny_patch16_224"
BUILT = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An encoder folder; tests must not change it."""
    folder = tmp_path_factory.mktemp("source") / "encoder"
    torch.manual_seed(0)
    export_encoder(build_encoder(ModelConfig(**SMALL)), folder, 32, *HALVES, 0.875)
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """A copy of it."""
    return shutil.copytree(source, tmp_path / "encoder")


def begun_small(source):
    return build_encoder(ModelConfig(**SMALL, init_from=str(source)))


def weights_in(file):
    """The weights of a file that is then written anew: they are no longer mapped from it."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def holds(encoder, weights):
    return equal_tensors(encoder.state_dict(), weights)


def without(weights, part):
    """The weights whose names do not have this part."""
    return {name: tensor for name, tensor in weights.items() if part not in name}


def below(beginning, weights):
    """The weights with longer names."""
    return {f"{beginning}{name}": tensor for name, tensor in weights.items()}


def of_name(folder):
    return load_encoder(NAME, checkpoint=str(folder / "model.safetensors"), num_classes=0, **BUILT)


WAYS = {  # a setting -> the encoder with the weights of a folder that it names
    "model.init_from": begun_small,
    "encoder": lambda folder: mpp.load_encoder(folder),
    "checkpoint": of_name,
}
every_way = pytest.mark.parametrize("way", WAYS)


def refusal_of(way, folder):
    with refused(f"^{way} is {folder}") as error:
        WAYS[way](folder)
    said = str(error.value)
    assert len(said) < 1000
    return said


# --- files that cannot be read ---

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@every_way
def test_a_file_that_cannot_be_read_is_named(folder, way):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    long = bytes(100)
    for content in (b"", whole[:500], whole[:-1], POINTER, b"<!DOCTYPE html><html>" + long, b"PK\x03\x04" + long):
        file.write_bytes(content)
        said = refusal_of(way, folder)
        assert "which cannot be read: " in said and "it must be a whole .safetensors file" in said


PICKLED_WAYS = {
    "model.init_from": lambda path: build_student(ModelConfig(**SMALL, init_from=path)),
    "encoder": load_frozen_encoder,
    "distill.teacher": lambda path: load_classifier(path, 3, "distill.teacher"),
}


@pytest.mark.parametrize("ending", PICKLES)
def test_pickles_are_refused_with_what_makes_safe_files(tmp_path, ending):
    file = tmp_path / f"mae{ending}"
    torch.save({"model": {}}, file)
    for way, load in PICKLED_WAYS.items():
        for path in (file, tmp_path):  # a folder that has nothing else
            with pytest.raises(UserError, match=f"(?s)^{way} is {path}, which cannot be read: mpp reads no .*{file}"):
                load(str(path))
    with pytest.raises(UserError, match=rf"^checkpoint is .*mae\{ending}; it must be .* mpp reads no pickled"):
        load_encoder(NAME, checkpoint=str(file))


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_the_lines_of_the_refusal_make_a_file_that_is_read(source, tmp_path, key):
    weights = weights_in(source / "model.safetensors")
    torch.save({key: weights, "epoch": 3} if key else weights, tmp_path / "mae.pth")
    with pytest.raises(UserError) as error:
        begun_small(tmp_path / "mae.pth")
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    exec("\n".join(lines))
    assert holds(begun_small(tmp_path / "mae.safetensors"), weights)


# --- all of a file, or nothing ---


@every_way
def test_all_weights_are_taken_or_none(folder, way, capsys):
    """One beginning of all names is left out and said; those that are missing or left over are named."""
    file = folder / "model.safetensors"
    weights = weights_in(file)
    for wrapper in ("module.", "student.backbone."):
        save_file(below(wrapper, weights), file)
        assert holds(WAYS[way](folder), weights)
        said = capsys.readouterr().out
        assert said.count(f"note: of the weights in {file} ") == said.count(f"`{wrapper}`") == 1
    for beginning in ("", "student.backbone."):
        save_file(below(beginning, without(weights, "blocks.")), file)
        said = refusal_of(way, folder)
        assert "Missing key" in said and "blocks.0." in said
        save_file(below(beginning, weights | {f"decoder.{each}": torch.zeros(1) for each in ("weight", "bias")}), file)
        said = refusal_of(way, folder)
        assert "Unexpected key" in said and "decoder." in said and "Missing" not in said


def test_no_weight_is_left_random_below_a_new_head(folder):
    """timm loads what there is, and leaves the rest as it is, where the number of classes differs."""
    file = folder / "model.safetensors"
    assert mpp.load_encoder(folder, num_classes=3).head.weight.shape == (3, 16)
    weights = weights_in(file)
    for name in ("norm.bias", "blocks.0.attn.qkv.weight", "cls_token"):
        save_file(without(weights, name), file)
        with refused(rf"Missing key.*{name}"):
            mpp.load_encoder(folder, num_classes=3)


def test_a_head_that_is_not_asked_for_is_no_weight_left_over(folder, tmp_path):
    export_encoder(mpp.load_encoder(folder, num_classes=3), tmp_path / "headed", 32, *HALVES, 0.875)
    for way in WAYS.values():
        assert torch.equal(way(tmp_path / "headed").norm.weight, mpp.load_encoder(folder).norm.weight)


def test_weights_of_another_network_are_named(tmp_path):
    export_encoder(timm.create_model("resnet10t", num_classes=0), tmp_path / "resnet", 32, *HALVES, 0.875)
    with refused(r"^model\.init_from is .*; it must be the weights of the model that is built: "):
        begun_small(tmp_path / "resnet")


# --- first weights of each family of models ---

OF_FAMILIES = dict(img_size=32, width=32, depth=2, heads=2)
DINOV3 = "vit_small_patch16_dinov3_qkvb"
NAMES = (NAME, DINOV3, "beit_base_patch16_224")
MOMENTS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
every_name = pytest.mark.parametrize("name", NAMES)


def written(name, folder, size=32, licence=None):
    """Write an encoder; its weights."""
    torch.manual_seed(0)
    encoder = build_encoder(ModelConfig(name=name, **OF_FAMILIES | {"img_size": size}))
    randomize(encoder, std=0.2)
    export_encoder(encoder, folder, size, *MOMENTS, 1.0, EncoderFacts(licence=licence))
    return weights_in(folder / "model.safetensors")


def begun(name, source, channels=3, **changes):
    return build_encoder(ModelConfig(name=name, **OF_FAMILIES | changes, init_from=str(source)), channels).eval()


LEFT_OVER = ("head.weight", "head.bias", "attn_pool.latent", "decoder_embed.weight", "decoder_blocks.0.norm1.bias")


@every_name
def test_a_file_may_have_heads_decoders_and_a_mask_and_must_have_all_else(name, tmp_path):
    """[mask] is beside the encoder in checkpoints of runs, and among its weights in those of published MAEs."""
    weights = written(name, tmp_path / "encoder")
    file = tmp_path / "weights.safetensors"
    others = {each: torch.ones(1) for each in LEFT_OVER} | {"mask_token": torch.ones(1, 1, 32)}
    for wrapper, of_others in (("", ""), ("model.", ""), ("encoder.", "encoder.")):
        save_file(below(wrapper, weights) | below(of_others, others), file)
        assert holds(begun(name, file), weights)
    for lacking in ("cls_token", "patch_embed.proj.weight", "blocks.1.attn.qkv.weight", "blocks.0.norm2.bias"):
        save_file(without(weights, lacking), file)
        with refused(rf"^model\.init_from is .*(Missing key.*|KeyError: '){lacking}"):
            begun(name, file)
    save_file(weights | {"blocks.2.norm1.bias": torch.zeros(32)}, file)
    with refused(r"Unexpected key.*blocks\.2\.norm1\.bias"):
        begun(name, file)


@every_name
def test_other_sizes_and_channels_are_timms(name, tmp_path):
    """The first convolution, positions and tables: as `timm.create_model` loads them."""
    written(name, tmp_path / "encoder", size=64)
    for channels, size in ((5, 64), (3, 96), (1, (32, 96))):
        ours = begun(name, tmp_path / "encoder", channels, img_size=size)
        assert holds(ours, by_timm(tmp_path / "encoder", in_chans=channels, img_size=size).state_dict())


def test_names_of_dinov3s_authors_are_timms(tmp_path):
    """Original names, a bias of all of qkv, and buffers that timm computes."""
    weights = written(DINOV3, tmp_path / "encoder")
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


PLAIN = dict(width=32, depth=2, img_size=32, patch_size=8)


@pytest.mark.parametrize(
    "theirs, ours, said",
    [
        (dict(heads=8), dict(heads=4), r"model\.heads is 4; it must be 8, as in the weights of "),
        (dict(name=NAME, patch_size=16), dict(heads=2, patch_size=16), r"model\.heads is 2; it must be 3, "),
        (dict(arguments={"act_layer": "silu"}), dict(arguments={"act_layer": "gelu"}), "gelu.*; it must be .*silu"),
        (dict(name="vit_base_patch32_clip_quickgelu_224"), dict(name="vit_base_patch32_clip_224"), "has .*QuickGELU"),
        (dict(position="rope"), dict(position="none"), r"model\.position is none; it must be rope, "),
        (
            dict(position="learned_2d", heads=4),
            dict(position_at="every_shared"),
            r"model\.position_at is every_shared; it must be stem, ",
        ),
    ],
)
def test_weights_of_an_encoder_that_computes_otherwise_are_refused(theirs, ours, said, tmp_path):
    """Its weights have the same names and shapes; without settings of their own they begin a model like theirs."""
    of_name = dict(width=48, depth=1, img_size=32) if "name" in theirs else PLAIN
    first = build_encoder(ModelConfig(**of_name | theirs))
    export_encoder(first, tmp_path / "encoder", 32, *MOMENTS, 1.0)
    for source in (tmp_path / "encoder", tmp_path / "encoder" / "model.safetensors"):
        alike = build_encoder(ModelConfig(init_from=str(source)))
        assert describe_computation(alike) == describe_computation(first)
        with refused(said):
            build_encoder(ModelConfig(**of_name | ours, init_from=str(source)))


# --- the weights of a run, and of a name ---


def test_a_runs_checkpoint_has_the_encoder_that_it_trained(pretrain):
    """Of a moving average's run the trained one. A run that diverged has nothing else."""
    folder = pretrain("--config=rivals/data2vec", "--run.steps=2")
    checkpoint = folder / "checkpoints" / "step_00000002" / "model.safetensors"
    settings = parse_saved(Config, folder / "config.yaml").model
    assert holds(build_encoder(replace(settings, init_from=str(checkpoint))), exported(folder))


def test_a_run_from_weights_needs_no_setting_of_their_model(pretrain, tmp_path):
    """Pre-training and supervised training; config.yaml then has the model's settings, and repeats the run."""
    once, labels = "--run.steps=1", tmp_path / "labels"
    source = pretrain("--model.position=relative", "--model.arguments={reg_tokens: 2}", once)
    begin = (f"--model.init_from={source}", once)
    pre = pretrain(*begin, dir=tmp_path / "pre", without="--model.")
    supervised.main([*tiny_without("--model.", "--probe."), *begin, f"--run.dir={labels}"])
    for folder in (pre, labels):
        assert describe_computation(mpp.load_encoder(folder)) == describe_computation(mpp.load_encoder(source))
        model = read_yaml(folder / "config.yaml")["model"]
        assert (model["width"], model["depth"], model["patch_size"]) == (16, 2, 8)
    again = pretrain(f"--config={pre / 'config.yaml'}", once, dir=tmp_path / "again", without="--model.")
    assert holds(mpp.load_encoder(again), mpp.load_encoder(pre).state_dict())
    assert read_yaml(again / "config.yaml")["run"]["dir"] == str(again)
    larger = pretrain(*begin, "--model.img_size=24", "--model.stride=4", dir=tmp_path / "larger", without="--model.")
    assert read_yaml(larger / "config.yaml")["model"]["stride"] == 4
    with refused("a multiple of the patch size"):
        pretrain(*begin, "--model.img_size=28", dir=tmp_path / "other", without="--model.")
    with refused(r"model\.width is 24; it must be 16, as in the weights of "):
        pretrain(*begin, "--model.width=24", "--model.heads=2", dir=tmp_path / "other", without="--model.")
    assert not (tmp_path / "other").exists()


def test_a_name_of_timms_means_its_weights_on_the_hub(tmp_path, monkeypatch):
    weights = written(NAME, tmp_path / "encoder")
    asked = set()
    monkeypatch.setattr(
        "mpp.runtime.weights.snapshot_download", lambda name, **_: asked.add(name) or str(tmp_path / "encoder")
    )
    source = f"{NAME}.augreg_in21k"
    assert holds(begun(NAME, source), weights)
    with refused(rf"model\.name is {NAME}; it must be left out"):
        build_student(ModelConfig(init_from=source))
    assert asked == {f"timm/{source}"}


def test_weights_that_are_not_there_are_never_random(monkeypatch):
    def offline(name, **_):
        raise OSError("offline")

    monkeypatch.setattr("mpp.runtime.weights.snapshot_download", offline)
    for source in (f"{DINOV3}.lvd1689m", "hf-hub:timm/nothing"):
        with refused(r"no encoder at hf-hub:timm/.*: offline"):
            begun(DINOV3, source)
    for source in ("vit_smal_patch16", "vit_base_patch16_18x2_224"):  # no model, and one without weights
        with refused(rf"model\.init_from is {source}; it must be"):
            begun(DINOV3, source)


# --- their moments and licence ---


def test_moments_are_those_of_the_weights(tmp_path, capsys):
    written(DINOV3, tmp_path / "encoder")
    source = str(tmp_path / "encoder")
    rgb = ModelConfig(name=DINOV3, mean=None, std=None, init_from=source)
    assert moments_of_weights(rgb, 2).mean == pytest.approx((0.2, 0.2))
    half = moments_of_weights(ModelConfig(mean=MOMENTS[0], std=None, init_from=source), 3)
    assert (half.mean, half.std) == MOMENTS and "note" not in capsys.readouterr().out
    moments_of_weights(ModelConfig(init_from=source, mean=(0.1, 0.2, 0.3)), 3)
    said = capsys.readouterr().out
    assert said.startswith("note: model.std is (0.5, 0.5, 0.5), and ") and said.count("note") == 1
    save_file({"weight": torch.ones(1)}, tmp_path / "alone.safetensors")
    alone = ModelConfig(mean=None, init_from=str(tmp_path / "alone.safetensors"))
    with refused(r"model\.mean is null; .*no config\.json next to .*alone\.safetensors"):
        moments_of_weights(alone, 3)


def test_a_run_takes_moments_and_licence_of_its_weights(tmp_path, pretrain):
    written(NAME, tmp_path / "encoder", licence="dinov3-license")
    null = (f"--model.init_from={tmp_path / 'encoder'}", "--model.mean=null", "--model.std=null")
    numbers = (f"--model.name={NAME}", "--model.width=32", "--model.img_size=32", "--run.steps=1")
    first = pretrain(*null, *numbers, dir=tmp_path / "first")
    assert read_yaml(first / "config.yaml")["model"]["mean"] == list(MOMENTS[0])
    pretrain(*null, *numbers, dir=tmp_path / "first")  # finished: the same settings
    random = pretrain(f"--model.name={NAME}", "--run.steps=1", dir=tmp_path / "random")
    for run, licence, mean in ((first, "dinov3-license", 0.1), (random, None, 0.5)):
        config = read_json(run / "encoder" / "config.json")["pretrained_cfg"]
        assert (config["license"], config["mean"][0]) == (licence, mean)
        begins = f"license: {licence}" if licence else "library_name"
        assert (run / "encoder" / "README.md").read_text().startswith(f"---\n{begins}")
        assert licence_of(str(run)) == licence

"""Settings: one source of defaults, files that compose, errors of one line."""

import dataclasses
import json
import re
import string
from importlib import import_module
from pathlib import Path

import pytest
import settings_page
import yaml
from conftest import ROOT, refused, refused_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluation.cli import commands, locate_command
from evaluation.config import (
    CompareConfig,
    ContrastiveConfig,
    FewshotConfig,
    FinetuneConfig,
    ProbeDataConfig,
    SegmentationConfig,
    SupervisedConfig,
    SweepConfig,
    VisualizeConfig,
)
from mpp.config import Config, ObjectiveConfig, OptimConfig, PrepareConfig, RunConfig, flatten, settings_of
from mpp.config.parsing import NAMES_ELSEWHERE, check_given, parse, parse_saved, to_yaml
from mpp.errors import UserError


def config_of(*words):
    return parse(Config, list(words))


def test_birds_yaml_is_the_defaults_and_names_every_setting():
    assert config_of("--config=birds") == Config()
    written = yaml.safe_load((ROOT / "configs" / "birds.yaml").read_text())
    names = [f"{group}.{key}" for group in written for key in written[group]]
    assert names == [each.key for each in settings_of(Config()) if each.is_shown]


def test_the_papers_recipe():
    config = config_of("--config=imagenet_vit_b16")
    groups = {
        "run": {"steps": 1_000_000},
        "optim": {"name": "adam", "global_batch_size": 4096, "warmup_steps": 10_000, "lr": 2e-4}
        | {"schedule": "cosine", "betas": (0.9, 0.999)},
        "corruption": {"rate": 0.5, "mask": 0.8, "random": 0.1, "keep": 0.1},
        "model": {"name": "vit_base_patch16_224", "img_size": 224, "patch_size": 16},
        "data": {"crop_area": (0.05, 1.0), "flip": True},
    }
    for group, recipe in groups.items():
        assert recipe.items() <= vars(getattr(config, group)).items()


def test_files_and_overrides_compose_in_order():
    files = [f"--config={ROOT}/configs/{name}.yaml" for name in ("imagenet_vit_b16", "imagenet_vit_b16_100k")]
    config = config_of("--optim.lr=0.5", *files, "--config=corruption_15")  # wherever a file stands
    assert (config.run.steps, config.corruption.rate, config.optim.lr) == (100_000, 0.15, 0.5)
    assert config.model.name == "vit_base_patch16_224"


def test_numbers_of_a_plain_model_have_defaults_and_a_named_one_keeps_its_own():
    plain = dict(width=128, depth=4, heads=4, img_size=64, patch_size=8)
    assert config_of("--model.width=64").model.numbers() == plain | {"width": 64}
    named = ["--config=birds", "--model.name=vit_base_patch16_224", "--model.depth=2"]
    assert parse(Config, named).model.numbers() == dict.fromkeys(plain) | {"depth": 2}


MISTAKES = [  # the command, its words, and what the one line names: the setting, the value, what is meant or allowed
    (Config, "--corruption.mask_ratio=0.75", "corruption.mask_ratio | corruption.rate"),
    (Config, "--batch_size=3", "batch_size | optim.global_batch_size | data.batch_size"),
    (Config, "--run=3", "run | group | run.steps"),
    (Config, "--config cifar11", "--config | cifar11 | such as cifar10"),
    (Config, "--run.dir --data.path x", "--run.dir | no value"),
    (Config, "--run.steps", "run.steps | empty | at least 1"),
    (Config, "--run.steps=many", "run.steps | many | a whole number | at least 1"),
    (Config, "--run.dir=$SCRATCH/run", "run.dir | $SCRATCH/run | variables"),
    (Config, "--run.dir=~/here", "run.dir | ~/here | without ~"),
    (Config, "--run.dir=s3://bucket/run", "run.dir | s3://bucket/run | on this machine"),
    (Config, "--optim.betas=[0.9,1]", "optim.betas | [0.9,1] | below 1"),
    (FinetuneConfig, "--lr 0.1", "lr | lrs"),
    (Config, "--model.img_size=[16,30]", "model.img_size | [16, 30] | multiple of the patch size (8)"),
    (Config, "--model.heads=3", "model.width | multiple of model.heads (3)"),
    (Config, "--data.crop_area=[0.5,0.1]", "data.crop_area | ascending"),
    (SegmentationConfig, "--class_names=[no, yes, 1e3, 007]", "class_names | 1e3 | [text, ...] or null (quotes"),
    (FewshotConfig, "--seeds=[1,0,1]", "seeds | [1,0,1] | each once"),
]


@pytest.mark.parametrize("config_class, words, named", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_setting_the_value_and_what_is_allowed(config_class, words, named):
    words = [words] if "=" in words else words.split()
    with refused_with(named):
        parse(config_class, words)


@pytest.mark.parametrize(
    "config_class, path, expected",
    [
        (Config, None, "runs/birds"),
        (SupervisedConfig, None, "runs/birds_supervised"),
        (Config, "uoft-cs/cifar10", "runs/cifar10"),
        (FinetuneConfig, "https://host/sets/my%20parts.tar?key=1", "runs/my_20parts_finetuned"),
        (Config, "FOLDER/photos.v2/", "runs/photos.v2"),
    ],
)
def test_the_run_folder_has_the_name_of_the_images(config_class, path, expected, tmp_path):
    (tmp_path / "photos.v2").mkdir()
    words = [f"--data.path={path.replace('FOLDER', str(tmp_path))}"] if path else []
    assert parse(config_class, words).in_named_folder().run.dir == expected
    assert parse(config_class, [*words, "--run.dir=mine"]).in_named_folder().run.dir == "mine"


def test_first_steps_of_a_config_keep_their_share_of_a_shorter_run():
    """Where the run is too short for them; what is given with the length is not changed."""
    short = config_of("--config=continue", "--run.steps=400").optim
    assert (short.warmup_steps, short.frozen_steps) == (20, 200)
    assert config_of("--config=continue", "--run.steps=2000").optim.warmup_steps == 500
    with refused(r"optim\.warmup_steps is 500; it must be less than run\.steps \(400\)"):
        config_of("--config=continue", "--run.steps=400", "--optim.warmup_steps=500")


IN_FILES = [
    ("run: {stepz: 3}", "run.stepz | run.steps"),
    ("run:\n  steps:\n  seed: 3", "run.steps | null"),
    ("run: {keep_at: [1, 1:30]}", "run.keep_at | 1:30"),
    ("modle: {}", "modle | model"),
    ("run:\n  steps: 3\n  seed: a: b", "line 3"),
    ("optim: {lr: 1}\nrun: {steps: 3}\noptim: {lr: 2}", "optim occurs twice"),
    ("objective: {normalize: patch}", "objective.normalize | objective.name is pixels"),
    (f"data: {{range: {'[' * 1000}", ""),
    (b"\xff\xd8\xff\xe0", ""),
]


@pytest.mark.parametrize("text, named", IN_FILES, ids=[str(case[0])[:30] for case in IN_FILES])
def test_a_mistake_in_a_file_is_one_line_that_names_the_file(tmp_path, text, named):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused_with(f"bad.yaml | {named}"):
        config_of("--config", str(file), "--run.seed=3")


def test_a_wrong_value_is_named_in_the_file_that_has_it(tmp_path):
    """A later file with a good value does not hide it."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("optim: {lr: fast}")
    for read in (lambda: config_of(f"--config={wrong}", "--config=birds"), lambda: parse_saved(Config, wrong)):
        with refused(r"optim\.lr is fast; .*\(in .*wrong\.yaml\)$"):
            read()


TAKEN = [  # what a file says, and what is taken
    ('optim: {lr: "1e-3"}', "optim.lr", 1e-3),
    ('data: {path: x, revision: "010"}', "data.revision", "010"),
    ("data: {path: x, revision: 01234567}", "data.revision", "01234567"),
    ("run: {dir: 'a: #b'}", "run.dir", "a: #b"),
    ("run: {dir: \u00e4}", "run.dir", "\u00e4"),
    ("data: {crop_area: [0.12345678901, 1]}", "data.crop_area", (0.12345678901, 1.0)),
    ("data: {nodata: nan}", "data.nodata", "nan"),
    ("data: {channels: 1, bands: 4}", "data.bands", (4,)),
]


@pytest.mark.parametrize("text, key, value", TAKEN)
def test_words_are_numbers_where_a_setting_is_one_and_text_where_it_is_text(tmp_path, text, key, value):
    file = tmp_path / "words.yaml"
    file.write_text(text)
    config = config_of("--config", str(file))
    found = flatten(config)[key]
    assert found == value and type(found) is type(value)
    reads_back(config, tmp_path)


def test_a_config_of_python_has_the_settings_by_their_names_and_is_checked_too():
    words = ["--encoder=runs/mine", "--shots=5", "--test=false", "--data.path=images", "--data.workers=0"]
    given = {"encoder": Path("runs/mine"), "shots": 5, "test": False}  # `pretrain` returns a path
    for others in ({"data": ProbeDataConfig(path="images", workers=0)}, {"data.path": "images", "data.workers": 0}):
        assert FewshotConfig.of(**given, **others) == parse(FewshotConfig, words)
    for values, message in (
        ({"shot": 5}, r"unknown setting shot \(did you mean shots\?\)"),
        ({"depth": "first"}, "depth is first; it must be a whole number or last or all or dev"),
    ):
        with refused(message):
            FewshotConfig.of(**values)
    with refused(r"^steps is 0; "):
        RunConfig(steps=0)
    of_tuple, of_list = (ObjectiveConfig(name="mine", arguments={"scales": kind((1, 2))}) for kind in (tuple, list))
    assert of_tuple == of_list  # as config.yaml has it
    check_given(Config(optim=OptimConfig(name="adam")), Config())


def test_a_config_of_the_package_has_a_name_that_files_come_before_and_folders_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = config_of("--config", "cifar10")
    (tmp_path / "cifar10").mkdir()  # of images, say
    assert config_of("--config=cifar10") == by_name == config_of(f"--config={ROOT}/configs/cifar10.yaml")
    (tmp_path / "birds").write_text("optim: {lr: 0.5}")
    assert config_of("--config", "birds").optim.lr == 0.5


def help_of(words, capsys):
    """Lines of help, and the settings that they begin with."""
    with pytest.raises(SystemExit):
        parse(Config, words)
    lines = capsys.readouterr().out.splitlines()
    return lines, [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]


def test_help_fits_a_screen_and_is_of_a_group_or_of_all(capsys):
    lines, shown = help_of(["--run.steps=3", "--help"], capsys)
    assert len(lines) < 60 and max(map(len, lines)) <= 120 and len(shown) == 10
    _, shown = help_of(["--help", "optim"], capsys)
    assert shown == [key for key in flatten(Config()) if key.startswith("optim.")]
    lines, shown = help_of(["--help", "all"], capsys)
    assert "  --run.compile auto  (auto or true or false)" in lines
    assert "  --run.steps 1200  (a whole number, at least 1)" in lines
    assert any(line.startswith("  --model.width null: 128 ") for line in lines)
    assert "objective.predict_nodata" not in shown and "run.shard_over" not in shown  # without a choice


def test_names_elsewhere_are_of_settings_that_exist():
    assert {ours.split()[0] for ours in NAMES_ELSEWHERE.values()} <= {*flatten(Config()), *flatten(FewshotConfig())}


def test_the_page_of_settings_is_up_to_date():
    page = settings_page.PAGE.read_text(encoding="utf-8")
    assert page == settings_page.whole_page(), "python tests/settings_page.py writes it"


# --- random settings: what is valid reads back as it was, and whatever is wrong is one line, in every command ---


OF_ENTRIES = (CompareConfig, SweepConfig)
few = settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)


def words(overrides):
    """A command line that says so."""
    return [f"--{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in overrides.items()]


def reads_back(config, folder):
    file = folder / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse(type(config), ["--config", str(file)]) == config


def is_one_line_or_reads_back(config_class, arguments, folder, named=""):
    try:
        config = parse(config_class, arguments)
    except UserError as error:
        assert named in str(error) and len(str(error).splitlines()) == 1
    else:
        reads_back(config, folder)


@settings(few, max_examples=50)
@given(st.data())
def test_one_wrong_value_is_one_line_that_names_its_setting(tmp_path, data):
    key = data.draw(st.sampled_from(sorted(flatten(Config()))))
    is_one_line_or_reads_back(Config, words({key: data.draw(junk)}), tmp_path, key)


@pytest.mark.parametrize("command", commands())
@few
@given(data=st.data())
def test_commands_take_or_refuse_whatever_is_said(tmp_path, command, data):
    _, module, name = locate_command(command)
    config_class = getattr(import_module(module), name)
    keys = st.just("dir") if config_class in OF_ENTRIES else st.sampled_from(sorted(flatten(config_class())))
    overrides = data.draw(st.dictionaries(keys | st.text(string.ascii_letters + "._-", min_size=1), junk, max_size=3))
    is_one_line_or_reads_back(config_class, words(overrides), tmp_path)


@pytest.mark.parametrize("config_class", [Config, SupervisedConfig, ContrastiveConfig, FinetuneConfig])
def test_a_warm_up_ends_before_its_run(config_class):
    """A setting that is not given fits itself to the run."""
    with refused(r"optim\.warmup_steps is 50; it must be less than run\.steps \(50\), or null"):
        parse(config_class, ["--run.steps=50", "--optim.warmup_steps=50"])
    assert parse(config_class, ["--run.steps=50", "--optim.warmup_steps=49"]).optim.warmup(50) == 49
    optim = parse(config_class, ["--optim.warmup_steps=null"]).optim
    assert [optim.warmup(steps) for steps in (4, 50, 500, 1200)] == [0, 10, 100, 100]


MAE = "--network.name=autoencoder --corruption.mask=1 --corruption.random=0 --corruption.keep=0"
NEED = [  # a command, a setting, beside what it has no effect, beside what it has one (None: there is nothing)
    (Config, "objective.normalize=patch", ["", "--objective.name=hog"], "--objective.name=pixels"),
    (Config, "corruption.block=3", ["", "--corruption.pattern=blockwise"], "--corruption.pattern=blocks"),
    (Config, "model.residual=bf16", ["--run.precision=fp32"], ""),
    (Config, "network.decoder_heads=2", [""], MAE),
    (Config, "optim.adam_scale=2", ["--optim.name=adam", "--optim.name=sgd"], ""),
    (Config, "data.shuffle_block=3", [""], "--data.streaming=true"),
    (Config, "data.eval_fraction=0.5", ["--data.eval_split=test"], "--data.eval_split=null"),
    (Config, "run.project=mine", ["", "--run.trackers=[]"], '--run.trackers=["tensorboard","wandb"]'),
    (FinetuneConfig, "run.eval_every=100", [""], None),
    (ContrastiveConfig, "views.jitter_probability=0.5", ["--views.jitter=0"], ""),
    (VisualizeConfig, "residual=true", ["--pictures=filters"], '--pictures=["filters","attention_rollout"]'),
    (SegmentationConfig, "data.mask_column=m", [""], "--data.path=owner/scenes"),
    (PrepareConfig, "quality=80", ["--format=ppm"], ""),
]


@pytest.mark.parametrize("config_class, setting, without, beside", NEED)
def test_a_setting_that_has_no_effect_is_refused_with_what_it_needs(tmp_path, config_class, setting, without, beside):
    key = setting.split("=")[0]
    usual = json.dumps(flatten(config_class())[key]).strip('"')
    for others in without:
        with refused(rf"^{re.escape(key)} is .* or left out: [^\n]*$"):
            parse(config_class, [f"--{setting}", *others.split()])
        parse(config_class, [f"--{key}={usual}", *others.split()])  # as if it were left out
    if beside is not None:
        reads_back(parse(config_class, [f"--{setting}", *beside.split()]), tmp_path)


@pytest.mark.parametrize("name, momentum", [("muon", 0.95), ("sgd", 0.9), ("adam", None)])
def test_what_a_run_saves_is_taken_again(tmp_path, name, momentum):
    """Its settings are all given then, those of other optimisers too."""
    for config_class in (Config, SupervisedConfig, ContrastiveConfig, FinetuneConfig):
        config = parse(config_class, [f"--optim.name={name}"])
        saved = dataclasses.replace(config, optim=config.optim.resolved(config.run.steps))
        assert saved.optim.momentum == momentum
        reads_back(saved, tmp_path)


@few
@given(text=st.text() | junk.map(yaml.safe_dump))
def test_a_file_of_anything_is_one_line(tmp_path, text):
    file = tmp_path / "anything.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    is_one_line_or_reads_back(Config, ["--config", str(file)], tmp_path)

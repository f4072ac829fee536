"""Random settings: what is valid reads back as it was, and whatever is wrong is one line, in every command."""

import dataclasses
import json
import re
import string
from importlib import import_module

import pytest
import yaml
from conftest import refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evaluation.cli import commands, locate_command
from evaluation.config import (
    CompareConfig,
    ContrastiveConfig,
    FinetuneConfig,
    SegmentationConfig,
    SupervisedConfig,
    SweepConfig,
    VisualizeConfig,
)
from mpp.config import Config, PrepareConfig, flatten
from mpp.config.parsing import parse, to_yaml
from mpp.errors import UserError

OF_ENTRIES = (CompareConfig, SweepConfig)
few = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
many = settings(few, max_examples=25)

shares = st.floats(0.01, 0.99)
VALID = {
    "run.steps": st.integers(1, 10**7),
    "run.seed": st.integers(0, 2**63 - 1),
    "run.dir": st.text(string.ascii_letters + string.digits + "/_-. äß", min_size=1).filter(str.strip),
    "run.trackers": st.lists(st.sampled_from(["tensorboard", "wandb"]), max_size=2),
    "data.path": st.none() | st.text(string.ascii_letters, min_size=5).map("folder/".__add__),
    "data.crop_area": st.tuples(shares, shares).map(sorted),
    "model.drop_path": st.floats(0, 0.9),
    "model.mean": st.lists(shares, min_size=3, max_size=3),
    "corruption.rate": shares,
    "objective.name": st.sampled_from(["mean_color", "grid_color", "pixels", "hog"]),
    "optim.lr": st.floats(1e-12, 1e3),
    "optim.clip": st.none() | st.floats(0.001, 1e6),
    "optim.average": st.none() | shares,
}
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)


def words(overrides: dict) -> list[str]:
    """A command line that says so."""
    return [f"--{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in overrides.items()]


def reads_back(config, folder) -> None:
    file = folder / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse(type(config), ["--config", str(file)]) == config


def is_one_line_or_reads_back(config_class, arguments, folder, named: str = "") -> None:
    try:
        config = parse(config_class, arguments)
    except UserError as error:
        assert named in str(error) and len(str(error).splitlines()) == 1
    else:
        reads_back(config, folder)


@many
@example({"run.steps": 1, "run.seed": 2**63 - 1, "run.dir": "a: #b", "run.trackers": [], "data.crop_area": [1.0, 1.0]})
@given(st.fixed_dictionaries({}, optional=VALID))
def test_what_is_valid_is_taken_and_reads_back(tmp_path, overrides):
    file = tmp_path / "given.yaml"
    nested: dict = {}
    for key, value in overrides.items():
        group, name = key.split(".")
        nested.setdefault(group, {})[name] = value
    file.write_text(yaml.safe_dump(nested), encoding="utf-8")
    config = parse(Config, ["--config", str(file)])
    for key, value in overrides.items():
        taken = flatten(config)[key]
        assert (list(taken) if isinstance(taken, tuple) else taken) == value
    reads_back(config, tmp_path)


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
    """One that nobody gave fits itself to the run."""
    with refused(r"optim\.warmup_steps is 50; it must be less than run\.steps \(50\), or null"):
        parse(config_class, ["--run.steps=50", "--optim.warmup_steps=50"])
    assert parse(config_class, ["--run.steps=50", "--optim.warmup_steps=49"]).optim.warmup(50) == 49
    optim = parse(config_class, ["--run.steps=50", "--optim.warmup_steps=null"]).optim
    assert [optim.warmup(steps) for steps in (4, 50, 500, 1200)] == [0, 10, 100, 100]


MAE = ["--network.name=autoencoder", "--corruption.mask=1", "--corruption.random=0", "--corruption.keep=0"]
NEED = [  # a command, a setting, beside what it has no effect, beside what it has one (None: there is nothing)
    (Config, "objective.normalize=patch", [[], ["--objective.name=hog"]], ["--objective.name=pixels"]),
    (Config, "corruption.block=3", [[], ["--corruption.pattern=blockwise"]], ["--corruption.pattern=blocks"]),
    (Config, "model.residual=bf16", [["--run.precision=fp32"]], []),
    (Config, "network.decoder_heads=2", [[]], MAE),
    (Config, "optim.adam_scale=2", [["--optim.name=adam"], ["--optim.name=sgd"]], []),
    (Config, "data.shuffle_block=3", [[]], ["--data.streaming=true"]),
    (Config, "data.eval_fraction=0.5", [["--data.eval_split=test"]], ["--data.eval_split=null"]),
    (Config, "run.project=mine", [[], ["--run.trackers=[]"]], ['--run.trackers=["tensorboard","wandb"]']),
    (FinetuneConfig, "run.eval_every=100", [[]], None),
    (ContrastiveConfig, "views.jitter_probability=0.5", [["--views.jitter=0"]], []),
    (VisualizeConfig, "residual=true", [["--pictures=filters"]], ['--pictures=["filters","attention_rollout"]']),
    (SegmentationConfig, "data.mask_column=m", [[]], ["--data.path=somebody/scenes"]),
    (PrepareConfig, "quality=80", [["--format=ppm"]], []),
]


@pytest.mark.parametrize(("config_class", "setting", "without", "beside"), NEED, ids=[case[1] for case in NEED])
def test_a_setting_that_has_no_effect_is_refused_with_what_it_needs(tmp_path, config_class, setting, without, beside):
    for file in ("config.json", "model.safetensors"):  # as a teacher's folder has them
        (tmp_path / file).touch()
    key = setting.split("=")[0]
    usual = json.dumps(flatten(config_class())[key]).strip('"')
    for others in without:
        others = [word.format(teacher=tmp_path) for word in others]
        with refused(rf"^{re.escape(key)} is .* or left out: [^\n]*$"):
            parse(config_class, [f"--{setting}", *others])
        parse(config_class, [f"--{key}={usual}", *others])  # as if it were left out
    if beside is not None:
        beside = [word.format(teacher=tmp_path) for word in beside]
        reads_back(parse(config_class, [*beside, f"--{setting}"]), tmp_path)


@pytest.mark.parametrize(("name", "momentum"), [("muon", 0.95), ("sgd", 0.9), ("adam", None)])
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

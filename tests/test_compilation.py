"""When a run is compiled, and what it does where torch cannot compile it."""

import pytest
import torch
from conftest import read_metrics, weights_of
from torch import nn

from mpp.config import Config
from mpp.config.parsing import parse_saved
from mpp.errors import UserError
from mpp.training.parallel import or_eager


def choose(folder, compiled: str) -> None:
    """As if the run had begun with this choice."""
    config = folder / "config.yaml"
    other = {"true": "false", "false": "true"}[compiled]
    config.write_text(config.read_text().replace(f"compile: {other}", f"compile: {compiled}"))
    assert f"compile: {compiled}" in config.read_text()


def without_compiler(module, **_):
    """In place of Module.compile: a compiler with a long message."""

    def fails(graph, inputs):
        raise RuntimeError(
            "C++ compile error\n\nCommand:\ng++ main.cpp\n\nOutput:\nmain.cpp:1:10: fatal error: Python.h"
        )

    module._compiled_call_impl = torch.compile(module._call_impl, backend=fails)


def test_a_model_that_cannot_be_compiled_is_trained_without_to_the_same_bits(pretrain, tmp_path, monkeypatch, capsys):
    plain = pretrain("--run.compile=false", dir=tmp_path / "plain")
    monkeypatch.setattr(nn.Module, "compile", without_compiler)
    run = pretrain("--run.compile=true")
    assert "warning: run.compile: torch.compile fails" in capsys.readouterr().err
    assert read_metrics(run) == read_metrics(plain)
    assert weights_of(plain) == weights_of(run)
    assert parse_saved(Config, run / "config.yaml").run.compile is True


def test_a_run_without_a_checkpoint_is_not_bound_to_its_choice(pretrain, stopped_at, tmp_path):
    stopped_at(1)
    choose(tmp_path / "run", "true")
    run = pretrain("--run.compile=auto")
    assert 4 in read_metrics(run)
    assert parse_saved(Config, run / "config.yaml").run.compile is False


@pytest.mark.parametrize(
    ("given", "compiled"),
    [("auto", False), ("true", True)],
)
def test_a_run_that_began_compiled_goes_on_so_if_told(pretrain, stopped_at, tmp_path, monkeypatch, given, compiled):
    stopped_at(3)
    choose(tmp_path / "run", "true")
    compiled_models = []

    def compile_as_it_is(model):
        compiled_models.append(model)
        model._compiled_call_impl = model._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile_as_it_is)
    run = pretrain(f"--run.compile={given}")
    assert bool(compiled_models) is compiled and 4 in read_metrics(run)
    assert parse_saved(Config, run / "config.yaml").run.compile is compiled


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), UserError("data.path is x"), OSError(28, "full")])
def test_an_error_of_the_model_itself_stays(error):
    def fails(numbers):
        raise error

    with pytest.raises(type(error)) as raised:
        or_eager(torch.compile(torch.compiler.disable(fails), backend="eager"), fails)(torch.ones(3))
    assert raised.value is error

"""When a run is compiled, and what it does where torch cannot compile it."""

import pytest
import torch
from conftest import read_metrics, same
from torch import nn

from mpp.config import Config
from mpp.config.parsing import parse_saved
from mpp.errors import UserError
from mpp.training.parallel import or_eager


def without_compiler(module, **_):
    """In place of Module.compile: a compiler with a long message."""

    def fails(graph, inputs):
        raise RuntimeError("C++ compile error\n\nCommand:\ng++ main.cpp\n\nOutput:\nmain.cpp:1:10: Python.h")

    module._compiled_call_impl = torch.compile(module._call_impl, backend=fails)


def test_a_model_that_cannot_be_compiled_is_trained_to_the_same_bits(pretrain, finished_run, monkeypatch, capsys):
    monkeypatch.setattr(nn.Module, "compile", without_compiler)
    run = pretrain("--run.compile=true")
    assert "warning: run.compile: torch.compile fails" in capsys.readouterr().err
    same(run, finished_run)
    assert parse_saved(Config, run / "config.yaml").run.compile is True


@pytest.mark.parametrize("step, given", [(1, "auto"), (3, "auto"), (3, "true")])  # 1: before the first checkpoint
def test_a_run_that_began_compiled_goes_on_so_if_told(pretrain, stopped_at, tmp_path, monkeypatch, step, given):
    stopped_at(step)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("compile: false", "compile: true"))
    assert parse_saved(Config, config).run.compile
    compiled_models = []

    def compile_as_it_is(model):
        compiled_models.append(model)
        model._compiled_call_impl = model._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile_as_it_is)
    assert 4 in read_metrics(pretrain(f"--run.compile={given}"))
    assert bool(compiled_models) is parse_saved(Config, config).run.compile is (given == "true")


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), UserError("data.path is x"), OSError(28, "full")])
def test_an_error_of_the_model_itself_stays(error):
    def fails(numbers):
        raise error

    with pytest.raises(type(error)) as raised:
        or_eager(torch.compile(torch.compiler.disable(fails), backend="eager"), fails)(torch.ones(3))
    assert raised.value is error

"""When a run is compiled, what it says of that, and what it says where torch cannot compile it."""

import pytest
import torch
from conftest import Killed, kill_at, read_metrics
from torch import nn
from torch._inductor.exc import InductorError

from mpp.config import Config, RunConfig
from mpp.config.parsing import parse_saved
from mpp.errors import UserError
from mpp.runtime.start import OUT_OF_MEMORY, user_message
from mpp.training import compilation
from mpp.training.compilation import explaining_failures, is_compiled

COMPILED = RunConfig(compile=True)
AS_BEFORE = "as when the run began (run.compile auto); with --run.compile false results differ by rounding"


@pytest.mark.parametrize(
    ("settings", "device", "before", "expected"),
    [
        pytest.param({"steps": 2000}, "cuda", None, True, id="a long run on a GPU"),
        pytest.param({"steps": 1999}, "cuda", None, False, id="a short run on a GPU"),
        pytest.param({"steps": 9999}, "cpu", None, False, id="a CPU"),
        pytest.param({"steps": 1999, "compile": True}, "cpu", None, True, id="asked for"),
        pytest.param({"steps": 9999, "compile": False}, "cuda", None, False, id="refused"),
        pytest.param({"steps": 9999}, "cuda", False, False, id="a run that was short when it began"),
        pytest.param({"steps": 9999}, "cpu", True, True, id="a run that began on a GPU"),
        pytest.param({"steps": 9999, "compile": False}, "cpu", True, False, id="refused since"),
    ],
)
def test_long_runs_on_a_gpu_are_compiled(monkeypatch, settings, device, before, expected):
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)
    assert is_compiled(RunConfig(**settings), torch.device(device), before) is expected


@pytest.mark.parametrize(
    ("capability", "compiler", "expected"),
    [((9, 0), "/usr/bin/cc", True), ((6, 0), "/usr/bin/cc", False), ((9, 0), None, False)],
    ids=["an H100", "a P100", "no C compiler"],
)
def test_long_runs_are_compiled_where_triton_can(monkeypatch, capability, compiler, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(compilation.shutil, "which", lambda _: compiler)
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: name)
    assert is_compiled(RunConfig(steps=5000), torch.device("cuda"), None) is expected


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


def test_a_first_step_that_cannot_be_compiled_is_one_line(pretrain, tmp_path, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", without_compiler)
    with pytest.raises(UserError) as failed:
        pretrain("--run.compile=true")
    assert str(failed.value) == (
        "run.compile is true, and torch.compile fails (RuntimeError: C++ compile error: main.cpp:1:10: fatal error: "
        "Python.h); --run.compile false trains without it"
    )
    assert parse_saved(Config, tmp_path / "run" / "config.yaml").run.compile is True


@pytest.mark.parametrize("given", ["auto", "false"])
def test_a_run_without_a_checkpoint_is_not_bound_to_its_choice(pretrain, tmp_path, monkeypatch, capsys, given):
    with monkeypatch.context() as patch:
        kill_at(patch, 1)
        with pytest.raises(Killed):
            pretrain()
    choose(tmp_path / "run", "true")
    capsys.readouterr()
    run = pretrain(f"--run.compile={given}")
    assert 4 in read_metrics(run) and "\nnot compiled" not in capsys.readouterr().out
    assert parse_saved(Config, run / "config.yaml").run.compile is False


@pytest.mark.parametrize(
    ("given", "compiled", "said"),
    [
        pytest.param("auto", True, f"compiled, {AS_BEFORE}", id="auto"),
        pytest.param("false", False, "not compiled from here on (run.compile): results differ by rounding", id="no"),
        pytest.param("true", True, None, id="as before"),
    ],
)
def test_a_run_that_began_compiled_goes_on_so_unless_told(
    pretrain, tmp_path, monkeypatch, capsys, given, compiled, said
):
    with monkeypatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            pretrain()
    choose(tmp_path / "run", "true")
    compiled_models = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled_models.append(model))
    capsys.readouterr()
    run = pretrain(f"--run.compile={given}")
    assert bool(compiled_models) is compiled and 4 in read_metrics(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("compiled", "not compiled"))]
    assert lines == ([said] if said else [])
    assert parse_saved(Config, run / "config.yaml").run.compile is compiled


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/bin/false",))
    said = r"InvalidCxxCompiler: No working C\+\+ compiler found.*/bin/false.*compile false"
    with pytest.raises(UserError, match=said), explaining_failures(COMPILED):
        torch.compile(lambda numbers: numbers.sin() + 1)(torch.ones(3))


def test_an_error_in_the_code_of_a_compiler_is_its_own():
    namespace = {"__name__": "triton.backends.nvidia.driver"}
    exec("def launch():\n    raise RuntimeError('Triton Error [CUDA]: device kernel image is invalid')", namespace)
    said = r"torch.compile fails \(RuntimeError: Triton Error \[CUDA\]: device kernel"
    with pytest.raises(UserError, match=said), explaining_failures(COMPILED):
        namespace["launch"]()
    with pytest.raises(RuntimeError, match=r"^Triton Error"), explaining_failures(RunConfig(compile=False)):
        namespace["launch"]()


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), UserError("data.path is x"), OSError(28, "full")])
def test_other_errors_of_a_compiled_run_stay(error):
    with pytest.raises(type(error)) as raised, explaining_failures(COMPILED):
        torch.compile(lambda numbers: raises(numbers, error), backend="eager")(torch.ones(3))
    assert raised.value is error


@torch.compiler.disable
def raises(numbers, error):
    """A part of a model that runs as it is, within what is compiled."""
    raise error


def test_memory_that_is_short_while_kernels_are_tried_is_said_to_be():
    error = InductorError(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), None)
    with pytest.raises(InductorError) as raised, explaining_failures(COMPILED):
        raise error
    assert user_message(raised.value) == OUT_OF_MEMORY

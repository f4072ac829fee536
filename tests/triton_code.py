"""Inductor's code for a GPU, without one: a step's forward and backward pass as Triton kernels, compiled to cubin.

    python tests/triton_code.py '[["--objective.name=pixels"]]'    # settings of mpp pretrain, by kind

torch traces on the CPU, in bf16; the graph is moved to a pretended H100 and lowered there. Kernels become machine code
for it, and those of the first kind for an A100 too: inductor writes the same code for both. Nothing is run. In a
process of its own: what torch asks of CUDA's driver is answered for good. Attention is unfused: which fused
kernel there is, torch asks the card, and all of them are a library's and none inductor's.
"""

import importlib.util
import json
import re
import sys
import tempfile
import types
from itertools import product
from pathlib import Path

import torch
import torch.utils._triton
import triton
from torch._dynamo import device_interface
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.utils.stateless import _reparametrize_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from mpp.config import Config
from mpp.config.parsing import parse
from mpp.corruption import Corruption, draw, stack
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid

IMAGES = 8
NUMBERS = re.compile(r"(?<![A-Za-z_\d.])\d+(?:\.\d+)?(?:e[-+]?\d+)?\b|_\d+\b")
H100, A100 = 90, 80  # compute capabilities


def answer() -> None:
    """Answer the questions that torch, inductor and Triton ask the driver."""
    properties = types.SimpleNamespace(
        name="H100",
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        major=9,
        minor=0,
        warp_size=32,
        regs_per_multiprocessor=65536,
        gcnArchName="",
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        total_memory=80 << 30,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912,
        is_integrated=0,
        shared_memory_per_multiprocessor=167936,
        clock_rate=1980000,
        memory_clock_rate=2619000,
    )
    cuda = torch.cuda
    interface = device_interface.CudaInterface
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_capability = lambda *_: (properties.major, 0)
    cuda.get_device_name = lambda *_: properties.name
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.is_available = lambda: True
    cuda._lazy_init = lambda: None
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    torch._C._ensureCUDADeviceGuardSet()
    for asked in vars(torch.utils._triton).values():  # while there was no GPU
        getattr(asked, "cache_clear", list)()
    for owner in (interface, interface.Worker):
        owner.get_device_properties = staticmethod(lambda *_: properties)
        owner.current_device = staticmethod(lambda: 0)
    interface.is_available = staticmethod(lambda: True)
    interface.get_compute_capability = staticmethod(lambda *_: H100)
    target = GPUTarget("cuda", H100, 32)
    memory = dict(max_shared_mem=166912, multiprocessor_count=108, warpSize=32, max_num_regs=65536)
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            is_active=lambda: True,
            map_python_to_cpp_type=lambda each: each,
            utils=types.SimpleNamespace(get_device_properties=lambda *_: memory),
        )
    )
    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    inductor.triton.autotune_at_compile_time = False


def traced(config: Config) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A step's loss and gradients as one graph; its inputs, fake tensors of the CPU. Raises where dynamo's breaks."""
    model, objective = build_model(config)
    grid, patch_size = cell_grid(model.encoder)
    names = [name for name, _ in model.named_parameters()]
    fixed = [name for name, _ in model.named_buffers()]
    count = len(names)
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]

    def step(parameters, buffers, images, *corruption):
        parameters = [each.detach().requires_grad_() for each in parameters]
        state = dict(zip(names + fixed, [*parameters, *buffers], strict=True))
        with _reparametrize_module(model, state), torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(images, Corruption(*corruption))
            if isinstance(outputs, tuple):  # a model with a teacher computes the targets too
                predictions, targets = outputs[:2]
            else:
                predictions = outputs
                targets = objective.targets(images, corruption[0])
            loss = objective.loss(predictions.float(), targets)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # may compute activations again
        return [loss.detach(), *(each for each in gradients if each is not None)]

    drawn = stack([draw(config.corruption, grid, 0, 0, number) for number in range(IMAGES)])
    drawn = [each for each in drawn if each is not None]
    shown = torch.zeros(IMAGES, config.data.channels, *(side * patch_size for side in grid), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend="eager", fullgraph=True)(shown, Corruption(*drawn))
    torch.compiler.reset()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [mode.from_tensor(each) for each in tensors]
        images, *corruption = (mode.from_tensor(each) for each in (shown, *drawn))
        inputs = (given[:count], given[count:], images, *corruption)
        options = dict(decomposition_table=select_decomp_table(), tracing_mode="real", _allow_non_fake_inputs=True)
        graph = make_fx(step, **options)(*inputs)
    return graph, [*given, images, *corruption]


def on_cuda(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], FakeTensorMode]:
    """Move a graph that was traced on the CPU to the GPU, and its inputs."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.graph.set_codegen(torch.fx.graph.CodeGen())  # inputs and outputs are flat
    graph.recompile()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        moved = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda") for each in inputs]
        for name, buffer in list(graph._buffers.items()):  # constants
            graph._buffers[name] = torch.empty_like(buffer, device="cuda")
        for name, value in list(vars(graph).items()):
            if isinstance(value, torch.Tensor):
                setattr(graph, name, torch.empty_like(value, device="cuda"))
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
    return moved, mode


def lowered(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], mode: FakeTensorMode) -> str:
    """Inductor's code."""
    lowering = GraphLowering(graph, example_inputs=inputs)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*inputs)
        code = lowering.codegen()[0]
    return getattr(code, "value", code)


def compiled(code: str, capabilities: tuple[int, ...], known: set[tuple[int, str]]) -> tuple[int, list[str]]:
    """The number of kernels in the code, and the errors of those that do not become cubin.

    Each is compiled once; kernels that differ only in numbers count as one.
    """
    triton_helpers.set_driver_to_gpu = lambda: None
    for name in dir(triton_heuristics):  # they would be tuned on the GPU
        if name in ("pointwise", "reduction", "persistent_reduction", "template", "fixed_config", "foreach"):
            setattr(triton_heuristics, name, lambda *_, **options: lambda kernel: (kernel, options))
    kernels = re.findall(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S | re.M)
    bad = []
    for capability, (name, source) in product(capabilities, kernels):
        kind = capability, NUMBERS.sub("#", source.replace(name, ""))
        if kind in known:
            continue
        known.add(kind)
        try:
            assert cubin(name, source, capability)
        except Exception as error:
            bad.append(f"{name}: {' '.join(str(error).split())[:300]}")
    return len(kernels), bad


def cubin(name: str, source: str, capability: int) -> bytes:
    """A kernel's machine code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"  # Triton reads the file again
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel, options = getattr(module, name)
        signature = {word: options["triton_meta"]["signature"].get(word, "constexpr") for word in kernel.arg_names}
        fixed = {word: 16 if word == "YBLOCK" else 64 for word, kind in signature.items() if kind == "constexpr"}
        places = {(kernel.arg_names.index(word),): value for word, value in fixed.items()}
        made = triton.compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", capability, 32))
    return made.asm["cubin"]


def main() -> None:
    kinds = json.loads(sys.argv[1])
    graphs = [traced(parse(Config, options)) for options in kinds]
    answer()
    known: set[tuple[int, str]] = set()
    for number, (options, (graph, inputs)) in enumerate(zip(kinds, graphs, strict=True)):
        kernels, bad = compiled(lowered(graph, *on_cuda(graph, inputs)), (H100,) if number else (H100, A100), known)
        print(json.dumps({"options": options, "kernels": kernels, "failed": bad}), flush=True)
    print(json.dumps({"compiled": len(known)}))


if __name__ == "__main__":
    main()

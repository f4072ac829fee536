"""A fake accelerator: tensors say that they are on `gpu:0`, and every operation on them is done by the CPU.

What mixes devices raises, as on a GPU. What makes the host wait for a GPU is noted, with the place in our code. bf16
autocast is done, for the operations that it is about. torch has such devices in Python since 2.10; no stream, no
memory of its own and no kernel is pretended: it cannot show a GPU's rounding, speed or memory, or several GPUs.
`pretend` is for a process of its own: there is no way back.
"""

import json
import sys
import traceback
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

HERE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
DEVICE = "gpu"
HOST = torch.device("cpu")
KEY = "PrivateUse1"
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "_unique2", "unique_dim"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
MIXING = {"copy_", "_to_copy", "set_", "is_same_size", *INDEXING}  # may take tensors of both, as indices
BF16 = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention", "conv2d.default")
FP32 = (
    "layer_norm",
    "softmax.int",
    "log_softmax.int",
    "nll_loss",
    "mse_loss",
    "norm.ScalarOpt_dim",
    "cross_entropy_loss",
)
waits: set[tuple[str, str]] = set()  # when, what and where
when = ["building"]
libraries = []  # torch forgets what a library has registered when the library goes


class Pretended(Tensor):
    """On the device; `raw` has the numbers."""

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False):
        like = dict(strides=raw.stride(), dtype=raw.dtype, device=torch.device(DEVICE, 0), requires_grad=requires_grad)
        made = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **like)
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)

    def __repr__(self):
        return f"Pretended({self.raw!r})"

    def tolist(self):
        note("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


class Device(TorchDispatchMode):
    """Tensors that are made on the device are pretended too."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        pretended = of_device((kwargs or {}).get("device")) or any(issubclass(each, Pretended) for each in types)
        return compute(operation, args, kwargs or {}) if pretended else operation(*args, **kwargs or {})


def of_device(device) -> bool:
    return device is not None and torch.device(device).type == DEVICE


def note(what: str) -> None:
    """The host waits for the device."""
    own = [frame for frame in traceback.extract_stack() if f"{Path(__file__).parent.parent}/" in frame.filename]
    own = [frame for frame in own if "/tests/" not in frame.filename]
    place = f"{Path(own[-1].filename).stem}.{own[-1].name}" if own else "elsewhere"
    waits.add((when[0], f"{what} in {place}"))


def compute(operation, args, kwargs):
    """An operation with tensors of the device: on the CPU; its results are on the device, if it says no other."""
    name = operation.overloadpacket.__name__
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = {id(each.raw): each for each in tensors if isinstance(each, Pretended)}
    if there and name not in MIXING and any(each.dim() and not isinstance(each, Pretended) for each in tensors):
        raise RuntimeError(f"{operation}: tensors on {DEVICE}:0 and on the CPU")
    target = kwargs.get("device")
    stays = of_device(target) or (target is None and bool(there))
    if name == "copy_":
        stays = isinstance(args[0], Pretended)
    note_waits(name, args, kwargs, bool(there), stays)
    args, kwargs = tree_map(raw, args), tree_map(raw, dict(kwargs))
    if of_device(target):
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": HOST}
    with _disable_current_modes():
        found = operation(*args, **kwargs)
    return tree_map(lambda each: there[id(each)] if id(each) in there else placed(each), found) if stays else found


def raw(value):
    return value.raw if isinstance(value, Pretended) else value


def placed(value):
    return Pretended(value) if isinstance(value, Tensor) and not isinstance(value, Pretended) else value


def note_waits(name: str, args, kwargs, there: bool, stays: bool) -> None:
    """Note whether this operation makes the host wait."""
    if there and name in READS:
        note(name)
    if there and name in INDEXING:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                note(f"{name} by a mask")
            elif index is not None and index.dim() and not isinstance(index, Pretended):
                note(f"{name} by an index of the host")
    source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
    waiting = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    if isinstance(source, Tensor) and isinstance(source, Pretended) != stays and waiting:
        note("copy to the device" if stays else "copy to the host")


def compute_as_gpus_do() -> None:
    """Muon's products are bf16 there, whatever this CPU has."""
    from mpp.training import muon

    muon.bf16_is_native = lambda: True


def cast_automatically() -> None:
    """What autocast does on a device: bf16 for products, float32 for sums."""
    library = torch.library.Library("aten", "IMPL")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, f"Autocast{KEY}")
    libraries.extend([library, others])
    off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{KEY}"))
    for names, dtype in ((BF16, torch.bfloat16), (FP32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

            def cast(value, dtype=dtype):
                floating = isinstance(value, Pretended) and value.dtype in (torch.float32, torch.bfloat16)
                return value.to(dtype) if floating else value

            def kernel(*args, operation=operation, cast=cast, **kwargs):
                with torch._C._ExcludeDispatchKeyGuard(off):
                    return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

            library.impl(operation, kernel, f"Autocast{KEY}")


class Module(backend_registration._DummyBackendModule if HERE else object):
    """What torch asks a device's module."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def synchronize(self, device=None):
        note("synchronize")


def made_on_the_device() -> None:
    """Tensors that are made where no mode is on, as in threads."""
    library = torch.library.Library("aten", "IMPL")
    libraries.append(library)
    for operation in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):

        def make(*args, operation=operation, **kwargs):
            kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}
            return Pretended(operation(*args, **kwargs, device=HOST))

        library.impl(operation, make, KEY)


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """`module.to(device)`, in place."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and not isinstance(parameter, Pretended):
                there = Pretended(parameter.detach().clone())
                part._parameters[name] = torch.nn.Parameter(there, parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = placed(buffer)
    return module


def replace_everywhere(old, new) -> None:
    """In all modules of ours, and of timm, that took it by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] in ("mpp", "evaluation", "timm", "safetensors"):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def pretend(file: Path) -> None:
    """From now on this process has the device and nothing else; at its end `file` has the waits, as JSON."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Module())
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(x, device=...) is made on the host, and copied
    made_on_the_device()
    cast_automatically()
    compute_as_gpus_do()
    to = torch.nn.Module.to

    def to_device(self, *args, **kwargs):
        device = kwargs.get("device") or next((each for each in args if isinstance(each, str | torch.device)), None)
        return moved(self) if of_device(device) else to(self, *args, **kwargs)

    torch.nn.Module.to = to_device
    pretend_in_libraries()
    pretend_in_ours()
    Device().__enter__()
    Finalize(None, lambda: file.write_text(json.dumps(sorted(waits))), exitpriority=1)


def pretend_in_libraries() -> None:
    """Accelerate has the device; safetensors, which wants an address, gets the numbers."""
    import accelerate
    import safetensors.torch
    from accelerate.state import AcceleratorState, PartialState

    class Accelerator(accelerate.Accelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            PartialState._shared_state["device"] = AcceleratorState._shared_state["device"] = torch.device(DEVICE, 0)

    replace_everywhere(accelerate.Accelerator, Accelerator)
    for name in ("save_file", "save"):
        own = getattr(safetensors.torch, name)

        def save(tensors, *args, own=own, **kwargs):
            for each in tensors.values():
                if isinstance(each, Pretended):
                    note("copy to the host")
            return own({key: raw(value.detach()) for key, value in tensors.items()}, *args, **kwargs)

        replace_everywhere(own, save)


def pretend_in_ours() -> None:
    """The place that asks for a GPU by name; and what is under way, by the loop's own functions."""
    from mpp.runtime import hardware
    from mpp.training.loop import Loop, TrainingStep
    from mpp.training.task import ImageTask

    replace_everywhere(hardware.device, lambda: DEVICE)
    during(Loop, "__init__", lambda *_, **__: "setting up", then="between")
    for name in ("log_step", "evaluate_at_start", "evaluate", "save"):
        during(Loop, name, lambda *_, name=name, **__: name)
    during(ImageTask, "export", lambda *_, **__: "export")

    def step_of(self, *_):
        return "first updates" if self.step < 2 else "logged update" if self.measure else "update"

    for name in ("add_pass", "finish"):
        during(TrainingStep, name, step_of)


def during(owner: type, name: str, what, then: str = "") -> None:
    """While this method is called, waits are of what `what` says; and after it of `then`."""
    method = getattr(owner, name)

    def timed(*args, **kwargs):
        before, when[0] = when[0], what(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        finally:
            when[0] = then or before

    setattr(owner, name, timed)

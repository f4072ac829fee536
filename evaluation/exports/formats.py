"""File formats of exported encoders, ONNX and torch.export: how each is written and read back."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from evaluation.frozen.encoder import FrozenEncoder
from evaluation.supervision.deit import average_heads
from mpp.features.frozen import pool

METADATA_FILE = "mpp"  # among the extra files of a torch.export program
MAX_BYTES_IN_ONE_FILE = 1_800_000_000  # of an ONNX file's weights: protobuf ends at 2 GB
BatchSize = int | Literal["dynamic"]
Computation = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to features, tokens or logits."""


class ExportedModule(nn.Module):
    """The computation of a file: images (B, C, H, W) to features (B, D), tokens (B, T, D), or logits (B, classes)."""

    def __init__(
        self, encoder: FrozenEncoder, representation: str, normalize: bool, classifier: nn.Module | None = None
    ):
        super().__init__()
        self.model = classifier or encoder.model
        self.representation = representation
        self.normalize = encoder.normalize if normalize else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.representation == "logits":  # of a classifier, which normalises
            logits = self.model(images)
            two_heads = logits.ndim == 3  # of a distilled student
            return average_heads(logits) if two_heads else logits
        tokens = self.model.forward_features(self.normalize(images))
        if self.representation == "tokens":
            return tokens
        return pool(self.model, tokens, self.representation)


def write_onnx(module: ExportedModule, images: Tensor, batch: BatchSize, file: Path, metadata: dict[str, Any]) -> None:
    """Write an ONNX file by torch's exporter. Weights of more than 1.8 GB go to FILE.data next to it."""
    program = torch.onnx.export(
        module,
        (images,),
        dynamo=True,
        dynamic_shapes=dynamic_shapes(batch),
        verbose=False,
        input_names=["images"],
        output_names=["features"],
    )
    graph = program.model.graph
    graph.inputs[0].doc_string = metadata["input"]
    graph.outputs[0].doc_string = metadata["output"]
    for key, value in metadata.items():
        program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
    program.save(str(file), external_data=weight_bytes(module) > MAX_BYTES_IN_ONE_FILE)


def read_onnx(file: Path) -> Computation:
    """Open an ONNX file with onnxruntime."""
    import onnxruntime  # an optional dependency

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def compute(images: Tensor) -> Tensor:
        (features,) = session.run(["features"], {"images": images.numpy()})
        return torch.from_numpy(features)

    return compute


def write_torch_export(
    module: ExportedModule, images: Tensor, batch: BatchSize, file: Path, metadata: dict[str, Any]
) -> None:
    """Write a torch.export program; its extra file `mpp` has the metadata as JSON."""
    program = torch.export.export(module, (images,), dynamic_shapes=dynamic_shapes(batch))
    torch.export.save(program, file, extra_files={METADATA_FILE: json.dumps(metadata)})


def read_torch_export(file: Path) -> Computation:
    """Open a torch.export program."""
    return torch.export.load(file).module()


class ExportFormat(NamedTuple):
    """A file format."""

    suffix: str
    write: Callable[..., None]
    read: Callable[[Path], Computation]


FORMATS = {
    "onnx": ExportFormat(".onnx", write_onnx, read_onnx),
    "torch_export": ExportFormat(".pt2", write_torch_export, read_torch_export),
}


def dynamic_shapes(batch: BatchSize) -> tuple[dict[int, Any]] | None:
    """The sizes that torch's exporters leave open."""
    return ({0: torch.export.Dim("batch")},) if batch == "dynamic" else None


def quantize_int8(file: Path) -> Path:
    """Write a copy of an ONNX file next to it, with the weights of its matrix products in 8 bits; return its path."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # an optional dependency

    quantized = file.with_name(f"int8_{file.name}")
    quantize_dynamic(
        file, quantized, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8
    )
    return quantized


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def in_batches_of(size: BatchSize, compute: Computation) -> Computation:
    """`compute` for any number of images: where it takes only batches of `size`, the last batch is filled up."""
    if size == "dynamic":
        return compute

    def compute_in_parts(images: Tensor) -> Tensor:
        outputs = []
        for part in images.split(size):
            filling = part[-1:].expand(size - len(part), *part.shape[1:])
            outputs.append(compute(torch.cat([part, filling]))[: len(part)])
        return torch.cat(outputs)

    return compute_in_parts


@contextmanager
def without_exporter_messages() -> Iterator[None]:
    """Exporters print, warn and log, which does not concern the user; their errors are raised."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_level)

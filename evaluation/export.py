"""An encoder as a file for use elsewhere: ONNX, or a torch.export program.

    python evaluation/export.py --encoder runs/birds --out encoder.onnx
    python evaluation/export.py --encoder runs/birds --out encoder.pt2 --format torch_export --representation tokens

The file is run on held-out images, and kept if its numbers are PyTorch's.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import mpp
from evaluation.config import ExportConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, patch_grid
from evaluation.frozen.features import DEFAULT_BATCH_SIZE, views_for
from evaluation.frozen.results import write_json
from evaluation.frozen.run_images import LoadedSplits, find_run, load_images_of, parse_and_load, tested_encoder
from evaluation.supervised import card_of_file
from evaluation.supervision.classifiers import Classifier, load_classifier
from evaluation.supervision.learners import average_heads
from mpp.config import HOW_READ, rebuild, require
from mpp.data.loader import fixed_view_batches
from mpp.data.views import ViewDataset
from mpp.data.workers import deaths_explained
from mpp.errors import UserError, one_line
from mpp.features.frozen import pool
from mpp.models.descriptions import as_saved, how_read
from mpp.models.plain import set_attention
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import encoder_folder, fingerprint, zoo_folder

SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2"}
METADATA_FILE = "mpp"  # among the extra files of a torch.export program
MAX_BYTES_IN_ONE_FILE = 1_800_000_000  # of an ONNX file's weights: protobuf ends at 2 GB
MAX_ROUNDING_DIFFERENCE = 1e-4
TRACED_IMAGES = 3  # torch.export takes a batch of one for a constant
Computation = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to features, tokens or logits."""


class ExportedModule(nn.Module):
    """The computation of a file: images (B, C, H, W) to features (B, D), tokens (B, T, D), or logits (B, classes)."""

    def __init__(self, config: ExportConfig, encoder: FrozenEncoder, classifier: Classifier | None):
        super().__init__()
        self.model = classifier.network if classifier else encoder.model
        self.representation = config.representation
        self.normalize = encoder.normalize if config.normalize else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.representation == "logits":  # of a classifier, which normalises
            logits = self.model(images)
            return average_heads(logits) if logits.ndim == 3 else logits  # a distilled student has two heads
        tokens = self.model.forward_features(self.normalize(images))
        return tokens if self.representation == "tokens" else pool(self.model, tokens, self.representation)


def export(config: ExportConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Write the file; return its metadata, and its largest difference from PyTorch.

    Raises:
        UserError: an encoder that cannot be exported, packages that are missing, or a file that computes other numbers
            than PyTorch does.
    """
    out = Path(config.out)
    suffix = SUFFIXES[config.format]
    require(out.suffix == suffix and not out.is_dir(), "out", out, f"a file whose name ends in {suffix}")
    start_alone(config.frozen.run_settings("fp32"), "a file is written")
    encoder = open_frozen_encoder(config.frozen, config.data)
    classifier = None
    if config.representation == "logits":
        classifier = load_classifier(config.frozen.encoder, config.data.channels, "encoder")
    module = ExportedModule(config, encoder, classifier).eval()  # a colour baseline has no model
    if config.representation == "tokens":
        patch_grid(encoder.model)  # raises where it has none

    with deaths_explained():
        _, held_out = load_images_of(config.frozen.encoder, config.data, loaded)
        views = views_for(encoder, held_out.choose(config.images, config.data.cut_seed), config.data)
        inputs = partial(file_inputs, views, config, encoder)
        example = next(inputs(None))
        if how_read_for_file(config)["range"] != as_saved(config.data.range):  # by which values become float32
            example = example.float()
        if config.batch == "dynamic":
            example = repeated(example, TRACED_IMAGES)
        about = describe_file(config, encoder, classifier, example)
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            file = Path(folder) / out.name
            compute = write_file(config, module, example, file, about)
            with torch.no_grad():
                differences = [(compute(images) - module(images)).abs().max() for images in inputs(example.dtype)]
            difference = float(max(differences))
            largest = MAX_ROUNDING_DIFFERENCE * (classifier.unit if classifier else 1)
            value = f"{config.format}, whose output differs from PyTorch by {difference:.1e}"
            require(difference <= largest, "format", value, f"another one: at most {largest:g} is ok")
            out.with_name(f"{out.name}.data").unlink(missing_ok=True)  # of an earlier export
            for each in Path(folder).iterdir():  # a large encoder has two files
                each.replace(out.parent / each.name)
    report = {"about": about, "difference": difference}
    write_json(out.with_name(f"{out.name}.json"), report)
    print(f"wrote {out} and {out.name}.json; largest difference from PyTorch: {difference:.1e}")
    return report


def file_inputs(
    views: ViewDataset, config: ExportConfig, encoder: FrozenEncoder, dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """Images as the file takes them, in batches as it takes them.

    Args:
        dtype: of the pixels that it takes; None: that of the images.
    """
    size = config.data.batch_size or DEFAULT_BATCH_SIZE if config.batch == "dynamic" else config.batch
    for batch in fixed_view_batches(views, size):
        images = batch.images if config.normalize else encoder.normalize(batch.images)
        yield (images if config.batch == "dynamic" else repeated(images, size)).to(dtype or images.dtype)


def repeated(images: Tensor, count: int) -> Tensor:
    """`count` images (count, C, H, W), again from the first where there are fewer."""
    return images[torch.arange(count) % len(images)]


def write_file(
    config: ExportConfig, module: ExportedModule, images: Tensor, file: Path, metadata: dict[str, Any]
) -> Computation:
    """Export the module, and return what the file computes; UserError where the exporter cannot."""
    with torch.no_grad():
        module(images)  # raises where the model has no [class] token to export
    set_attention(module.model, fused=config.format == "torch_export")  # ONNX has no fused attention with biases
    shapes = ({0: torch.export.Dim("batch")},) if config.batch == "dynamic" else None
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            if config.format == "onnx":
                write_onnx(module, images, shapes, file, metadata)
            else:
                program = torch.export.export(module, (images,), dynamic_shapes=shapes)
                torch.export.save(program, file, extra_files={METADATA_FILE: json.dumps(metadata)})
        return read_file(file)
    except Exception as error:  # exporters raise errors of any class, and may not be installed
        reason = one_line(error.__cause__ or error)
        raise UserError(f"{config.frozen.encoder} cannot be exported as {config.format}: {reason}") from error


def write_onnx(module: ExportedModule, images: Tensor, shapes: Any, file: Path, metadata: dict[str, Any]) -> None:
    """Write an ONNX file by torch's exporter. Weights of more than 1.8 GB go to FILE.data next to it."""
    names = {"input_names": ["images"], "output_names": ["features"]}
    program = torch.onnx.export(module, (images,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    for key, value in metadata.items():
        program.model.metadata_props[key] = value if isinstance(value, str) else json.dumps(value)
    weight_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    program.save(str(file), external_data=weight_bytes > MAX_BYTES_IN_ONE_FILE)


def read_file(file: Path) -> Computation:
    """Open an exported file."""
    if file.suffix == SUFFIXES["torch_export"]:
        return torch.export.load(file).module()
    import onnxruntime  # an optional dependency

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])


def describe_file(
    config: ExportConfig, encoder: FrozenEncoder, classifier: Classifier | None, images: Tensor
) -> dict[str, Any]:
    """Metadata of a file: input, output, the encoder, and the model card where its weights have one.

    Args:
        classifier: whose logits are the output; None: it is no logits.
        images: some, as the file takes them.
    """
    frozen = config.frozen
    weights = f"random, seed {frozen.seed}" if frozen.random else fingerprint(Path(frozen.weights)) or frozen.weights
    kind = "from 0 to 255" if config.normalize else "(pixels / 255 - mean) / std"
    batch = "batch" if config.batch == "dynamic" else config.batch
    shape = ", ".join(map(str, (batch, *images.shape[1:])))
    outputs = {"tokens": "(batch, tokens, width)", "logits": "(batch, classes)"}
    metadata = {
        "mpp": mpp.__version__,
        "encoder": (find_run(frozen.encoder) or Path(frozen.encoder)).name,
        "weights": weights,
        "architecture": encoder.model.pretrained_cfg.get("architecture"),
        **encoder.describe_input(config.data),
        **how_read_for_file(config),
        "interpolation": "bilinear, antialiased",
        "normalize": config.normalize,
        "representation": config.representation,
        "input": f"images ({shape}) {str(images.dtype).removeprefix('torch.')}, {kind}",
        "output": f"features {outputs.get(config.representation, '(batch, width)')} float32",
    }
    del metadata["data"]  # as images are read here
    if hasattr(encoder.model, "num_prefix_tokens"):
        metadata["prefix_tokens"] = encoder.model.num_prefix_tokens
        metadata["grid"] = list(patch_grid(encoder.model))
    if classifier is not None:
        metadata["output"] += f": {classifier.meaning}"
        metadata |= {"class_names": classifier.class_names, "label_kind": classifier.label_kind}
    return metadata | {"card": read_card(config)}


def how_read_for_file(config: ExportConfig) -> dict[str, Any]:
    """The settings by which images are read for a file, which users follow.

    They are the encoder's own where it is verified on the package's birds, for want of its images.
    """
    own = how_read(config.frozen.encoder) if config.data.path is None else {}
    return {name: as_saved(own.get(name, getattr(config.data, name))) for name in HOW_READ}


def read_card(config: ExportConfig) -> str:
    """The model card of an encoder's weights; "": they have none."""
    folder = zoo_folder(Path(config.frozen.weights))
    if not (config.frozen.weights and folder.is_dir()):  # random weights, a file of weights, timm's or the hub's
        return ""
    file = encoder_folder(folder) / "README.md"
    card = file.read_text(encoding="utf-8") if file.is_file() else ""
    return card_of_file(card, has_head=config.representation == "logits")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Export as the command line, or `arguments`, say."""
    config, loaded = parse_and_load(ExportConfig, arguments, encoder_of=tested_encoder)
    return export(rebuild(config, {"encoder": tested_encoder(config)}), loaded)


if __name__ == "__main__":
    run_main(main)

"""An encoder as a file for use elsewhere: ONNX, or a torch.export program.

    python evaluation/export.py --encoder runs/birds --out encoder.onnx
    python evaluation/export.py --encoder runs/birds --out encoder.pt2 --format torch_export --representation tokens
    python evaluation/export.py --classifier runs/birds_finetuned --out classifier.onnx

The file is run on held-out images, and kept if its numbers are PyTorch's.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
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
from evaluation.frozen.run_images import LoadedSplits, command_of, find_run, load_images_of
from evaluation.predict import find_classifier, open_classifier, parse_classifier
from evaluation.supervision.classifiers import Classifier
from evaluation.supervision.learners import average_heads
from mpp.config import require
from mpp.data.loader import fixed_view_batches
from mpp.data.workers import deaths_explained
from mpp.errors import UserError, one_line
from mpp.features.frozen import pool
from mpp.models.descriptions import how_read
from mpp.models.plain import set_attention
from mpp.runtime.messages import progress_bar
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import fingerprint

SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2"}
METADATA_FILE = "mpp"  # among the extra files of a torch.export program
MAX_ROUNDING_DIFFERENCE = 1e-4
TRACED_IMAGES = 3  # torch.export takes a batch of one for a constant
Computation = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to features, tokens or logits."""


class ExportedModule(nn.Module):
    """The computation of a file: images (B, C, H, W) to features (B, D), tokens (B, T, D), or logits (B, classes)."""

    def __init__(self, config: ExportConfig, encoder: FrozenEncoder, classifier: Classifier | None):
        super().__init__()
        self.model = classifier.network if classifier else encoder.model
        self.representation = "logits" if classifier else config.representation
        self.normalize = encoder.normalize if config.normalize else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.representation == "logits":  # of a classifier, which normalises
            return average_heads(self.model(images))  # a distilled student has two heads
        tokens = self.model.forward_features(self.normalize(images))
        return tokens if self.representation == "tokens" else pool(self.model, tokens, self.representation)


def export(config: ExportConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Write the file; return its metadata, and its largest difference from PyTorch.

    Raises:
        UserError: an encoder that cannot be exported, packages that are missing, or a file that computes other numbers
            than PyTorch does.
    """
    out, suffix = Path(config.out), SUFFIXES[config.format]
    require(out.suffix == suffix, "out", out, f"a file whose name ends in {suffix}")
    start_alone(config.frozen.run_settings("fp32"), "a file is written")
    found, classifier = find_classifier(config), None
    if config.classifier:
        classifier = open_classifier(found, config.data.channels)
        allowed = "one of whole images: masks are put together of windows"
        require(classifier.label_kind != "pixels", "classifier", config.classifier, allowed)
        config = replace(config, data=replace(config.data, eval_crop=config.data.eval_crop or classifier.crop_pct))
    config = replace(config, classifier=None, frozen=found.frozen)
    encoder = open_frozen_encoder(config.frozen, config.data.channels)
    module = ExportedModule(config, encoder, classifier).eval()  # a colour baseline has no model
    if config.representation == "tokens":
        patch_grid(encoder.model)  # raises where it has none

    with deaths_explained(), torch.no_grad():
        _, held_out = load_images_of(config.frozen.encoder, config.data, loaded)
        views = views_for(encoder, held_out.to_evaluate_on(config.data, config.images), config.data)
        loader = fixed_view_batches(views, config.data.batch_size or DEFAULT_BATCH_SIZE)
        inputs = (each.images if config.normalize else encoder.normalize(each.images) for each in loader)
        first = next(inputs)
        own = {}
        if config.data.path is None:
            own = found.how_read or how_read(config.frozen.encoder)  # for want of its images: the birds
        if own.get("range"):
            first = first.float()  # as values of its own images become
        about = describe_file(config, encoder, classifier, first) | own
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            compute = write_file(config, module, first[[0] * TRACED_IMAGES], Path(folder) / out.name, about)
            bar = progress_bar(chain([first], inputs), total=len(loader), desc="comparing with PyTorch")
            batches = (images.to(first.dtype) for images in bar)
            outputs = [(compute(images), module(images)) for images in batches]
            difference = float(torch.stack([(ours - expected).abs().max() for ours, expected in outputs]).max())
            is_number = classifier is not None and classifier.label_kind == "number"
            size = max(float(expected.abs().max()) for _, expected in outputs) if is_number else 1
            largest = MAX_ROUNDING_DIFFERENCE * size
            value = f"{config.format}, whose output differs from PyTorch by {difference:.1e}"
            require(difference <= largest, "format", value, f"another one: at most {largest:g} is ok")
            for each in Path(folder).iterdir():  # a large encoder has two files
                each.replace(out.parent / each.name)
    report = {"about": about, "difference": difference}
    write_json(out.with_name(f"{out.name}.json"), report)
    print(f"wrote {out} and {out.name}.json; largest difference from PyTorch: {difference:.1e}")
    return report


def write_file(
    config: ExportConfig, module: ExportedModule, images: Tensor, file: Path, metadata: dict[str, Any]
) -> Computation:
    """Export the module, and return what the file computes.

    Args:
        images: some, as the file takes them. Of more than 1.5 GB of weights, torch writes FILE.data next to it.
    Raises:
        UserError: the model has no [class] token to export, or the exporter cannot.
    """
    set_attention(module.model, fused=config.format == "torch_export")  # ONNX has no fused attention with biases
    shapes = ({0: torch.export.Dim("batch")},)
    try:
        module(images)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if config.format == "onnx":
                program = torch.onnx.export(
                    module,
                    (images,),
                    input_names=["images"],
                    output_names=["logits" if module.representation == "logits" else "features"],
                    dynamic_shapes=shapes,
                    verbose=False,
                )
                texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in metadata.items()}
                program.model.metadata_props.update(texts)
                program.save(str(file))
            else:
                program = torch.export.export(module, (images,), dynamic_shapes=shapes)
                torch.export.save(program, file, extra_files={METADATA_FILE: json.dumps(metadata)})
        return read_file(file)
    except Exception as error:  # exporters raise errors of any class
        reason = one_line(error.__cause__ or error)
        raise UserError(f"{config.frozen.encoder} cannot be exported as {config.format}: {reason}") from error


def read_file(file: Path) -> Computation:
    """Open an exported file."""
    if file.suffix == SUFFIXES["torch_export"]:
        return torch.export.load(file).module()
    import onnxruntime  # an optional dependency

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def describe_file(
    config: ExportConfig, encoder: FrozenEncoder, classifier: Classifier | None, images: Tensor
) -> dict[str, Any]:
    """Metadata of a file: input, output, and the encoder.

    Args:
        classifier: whose logits are the output; None: it is no logits.
        images: some, as the file takes them.
    """
    frozen, model = config.frozen, encoder.model
    weights = f"random, seed {frozen.seed}" if frozen.random else fingerprint(Path(frozen.weights)) or frozen.weights
    about = encoder.describe_input(config.data)
    about |= about.pop("data")
    kind = "from 0 to 255" if config.normalize else "(pixels / 255 - mean) / std"
    shape = ", ".join(map(str, images.shape[1:]))
    representation = "logits" if classifier else config.representation
    outputs = {"tokens": "features (batch, tokens, width)", "logits": "logits (batch, classes)"}
    about |= {
        "mpp": mpp.__version__,
        "encoder": (find_run(frozen.encoder) or Path(frozen.encoder)).name,
        "weights": weights,
        "architecture": f"{type(model).__name__}, width {model.num_features}, depth {len(encoder.stages)}",
        "interpolation": "bilinear, antialiased",
        "normalize": config.normalize,
        "representation": representation,
        "input": f"images (batch, {shape}) {str(images.dtype).removeprefix('torch.')}, {kind}",
        "output": f"{outputs.get(representation, 'features (batch, width)')} float32",
    }
    if hasattr(model, "num_prefix_tokens"):
        about |= {"prefix_tokens": model.num_prefix_tokens, "grid": list(patch_grid(model))}
    if classifier is not None:
        about["output"] += f": {classifier.meaning}"
        about |= {"label_names": classifier.class_names, "label_kind": classifier.label_kind}
    return about


main = command_of(export, ExportConfig, parse_classifier)


if __name__ == "__main__":
    run_main(main)

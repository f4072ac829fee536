"""An encoder as a file for use elsewhere: ONNX, or a torch.export program.

    python evaluation/export.py --encoder runs/birds --out encoder.onnx
    python evaluation/export.py --encoder runs/birds --out encoder.pt2 --format torch_export --representation tokens

The file is run on held-out images, and kept if its numbers are PyTorch's.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpp
from evaluation.config import ExportConfig
from evaluation.exports.formats import (
    FORMATS,
    ExportedModule,
    in_batches_of,
    quantize_int8,
    weight_bytes,
    without_exporter_messages,
)
from evaluation.exports.verification import MAX_ROUNDING_DIFFERENCE, SHOTS, Verification
from evaluation.figures.markdown import markdown_table
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, patch_grid
from evaluation.frozen.results import write_json
from evaluation.frozen.run_images import LoadedSplits, find_run, load_images_of, parse_and_load, tested_encoder
from evaluation.supervision.classification import card_of_file
from evaluation.supervision.classifiers import Classifier, load_classifier
from mpp.config import rebuild, require
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable, UserError, one_line
from mpp.models.descriptions import as_saved, how_read
from mpp.models.plain import set_attention
from mpp.runtime.files import complete, partial_path
from mpp.runtime.start import run_main, start_alone
from mpp.runtime.weights import SAFETENSORS_SUFFIX, encoder_folder, fingerprint, zoo_folder

TRACED_IMAGES = 3  # torch.export takes a batch of one for a constant
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export(config: ExportConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Write the file; return its metadata, and its largest difference from PyTorch.

    Raises:
        UserError: an encoder that cannot be exported, packages that are missing, or a file that computes other numbers
            than PyTorch does.
    """
    out = Path(config.out)
    suffix = FORMATS[config.format].suffix
    allowed = f"a file whose name ends in {suffix}"
    if out.suffix == SAFETENSORS_SUFFIX:
        allowed += "; the weights are already a file: RUN/encoder/model.safetensors"
    require(out.suffix == suffix and not out.is_dir(), "out", out, allowed)
    if config.format == "onnx":
        missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
        install = f"installed first: pip install {' '.join(missing)}"
        require(not missing, "format", f"onnx without {', '.join(missing)}", install)
    accelerator = start_alone(config.frozen.run_settings("fp32"), "a file is written")
    encoder = open_frozen_encoder(config.frozen, config.data)
    classifier = None
    if config.representation == "logits":
        classifier = load_classifier(config.frozen.encoder, config.data.channels, "encoder")
    module = exported_module(config, encoder, classifier)
    with deaths_explained():
        count = config.images if config.quantize else 0
        train, held_out = load_images_of(config.frozen.encoder, config.data, loaded, count)
        verification = Verification(config, encoder, accelerator, train, held_out)
        return write_verified(config, module, verification, classifier)


def exported_module(config: ExportConfig, encoder: FrozenEncoder, classifier: Classifier | None) -> ExportedModule:
    """The module whose computation is exported; UserError where the encoder has none."""
    try:
        model = encoder.model  # a colour baseline has none
        if config.representation == "tokens":
            patch_grid(model)
    except Unavailable as error:
        raise UserError(f"encoder is {config.frozen.encoder}, which cannot be exported: {error}") from None
    network = classifier.network if classifier else None
    return ExportedModule(encoder, config.representation, config.normalize, network).eval()


def write_verified(
    config: ExportConfig, module: ExportedModule, verification: Verification, classifier: Classifier | None
) -> dict[str, Any]:
    """Write the file to a temporary folder next to `out`, verify it, and move it to `out`.

    Args:
        classifier: whose logits are the output; None: it is no logits.
    """
    out = Path(config.out)
    images = verification.example(TRACED_IMAGES if config.batch == "dynamic" else config.batch)
    if how_read_for_file(config)["range"] != as_saved(config.data.range):  # by which values become float32
        images = images.float()
    verification = verification._replace(dtype=images.dtype)
    metadata = describe_file(config, verification.encoder, images)
    if classifier is not None:
        metadata["output"] += f": {classifier.meaning}"
        metadata["class_names"] = list(classifier.class_names)
        if classifier.label_kind != "class":
            metadata["label_kind"] = classifier.label_kind
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_next_to(out) as folder:
        file = folder / out.name
        write_file(config, module, images, file, metadata)
        kept, report = verify(config, module, verification, file, classifier.unit if classifier else 1.0)
        if kept != file:
            for other in folder.iterdir():  # a large encoder has two files
                if other != kept:
                    other.unlink()
            kept.rename(file)
        size = sum(each.stat().st_size for each in folder.iterdir())
        out.with_name(f"{out.name}.data").unlink(missing_ok=True)  # of an earlier export
        for each in folder.iterdir():
            with complete(out.parent / each.name) as partial:
                each.replace(partial)
    report = {"about": metadata, **report}
    write_json(out.with_name(f"{out.name}.json"), report)
    print(f"wrote {out} ({size / 1e6:.1f} MB) and {out.name}.json")
    return report


@contextmanager
def folder_next_to(out: Path) -> Iterator[Path]:
    """A temporary empty folder next to `out`; one that a killed export has left is cleared."""
    folder = partial_path(out.with_name(f"{out.name}.export"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def write_file(
    config: ExportConfig, module: ExportedModule, images: Tensor, file: Path, metadata: dict[str, Any]
) -> None:
    """Export the module; UserError where the exporter cannot."""
    with torch.no_grad():
        module(images)  # raises where the model has no [class] token to export
    set_attention(module.model, fused=config.format == "torch_export")  # ONNX has no fused attention with biases
    try:
        with without_exporter_messages():
            FORMATS[config.format].write(module, images, config.batch, file, metadata)
    except UserError:
        raise
    except Exception as error:  # exporters raise errors of any class
        reason = one_line(error.__cause__ or error)
        raise UserError(f"{config.frozen.encoder} cannot be exported as {config.format}: {reason}") from error


def verify(
    config: ExportConfig, module: ExportedModule, verification: Verification, file: Path, unit: float
) -> tuple[Path, dict[str, Any]]:
    """Compare the file with PyTorch, and quantise it where that is asked for.

    Args:
        unit: by which differences are measured: see `Classifier`.
    Returns:
        The file that is kept; its largest `difference`, and with int8 a row of the printed table for each way to
        compute.
    Raises:
        UserError: the file, before it is quantised, computes other numbers.
    """
    compute = in_batches_of(config.batch, FORMATS[config.format].read(file))
    difference = verification.largest_difference(compute, module)
    require(
        difference <= MAX_ROUNDING_DIFFERENCE * unit,
        "format",
        f"{config.format}, whose output differs from PyTorch by {difference:.1e}",
        f"another one: at most {MAX_ROUNDING_DIFFERENCE * unit:g} is ok",
    )
    report: dict[str, Any] = {"difference": difference}
    if config.quantize:
        fp32_bytes = sum(each.stat().st_size for each in file.parent.iterdir())
        with without_exporter_messages():
            quantized = quantize_int8(file)
        compute_int8 = in_batches_of(config.batch, FORMATS[config.format].read(quantized))
        rows = []
        for name, size, function in (
            ("PyTorch fp32", weight_bytes(module), module),
            ("onnxruntime fp32", fp32_bytes, compute),
            ("onnxruntime int8", quantized.stat().st_size, compute_int8),
        ):
            difference = verification.largest_difference(function, module)
            accuracy = verification.few_shot_accuracy(function)
            rows.append({"name": name, "bytes": size, "difference": difference, "accuracy": accuracy})
        print_rows(rows)
        file = quantized
        report = {"difference": difference, "rows": rows}
    count = min(config.images, len(verification.held_out))
    print(f"largest difference from PyTorch: {difference:.1e}, over {count} held-out images")
    return file, report


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print size, difference and accuracy of each way to compute the features."""
    cells = []
    for row in rows:
        accuracy = "-" if row["accuracy"] is None else f"{100 * row['accuracy']:.2f}"
        cells.append([row["name"], f"{row['bytes'] / 1e6:.1f}", f"{row['difference']:.1e}", accuracy])
    print(markdown_table(["", "MB", "largest difference", f"{SHOTS}-shot (%)"], cells))


def describe_file(config: ExportConfig, encoder: FrozenEncoder, images: Tensor) -> dict[str, Any]:
    """Metadata of a file: input, output, the encoder, and the model card where its weights have one.

    Args:
        images: some, as the file takes them.
    """
    height, width = encoder.img_size
    path = Path(config.frozen.encoder)
    run = find_run(config.frozen.encoder) or path
    weights, card = weights_and_card(config)
    kind = "from 0 to 255" if config.normalize else "(pixels / 255 - mean) / std"
    batch = "batch" if config.batch == "dynamic" else config.batch
    dtype = str(images.dtype).removeprefix("torch.")
    outputs = {"tokens": "(batch, tokens, width)", "logits": "(batch, classes)"}
    output = outputs.get(config.representation, "(batch, width)")
    metadata = {
        "mpp": mpp.__version__,
        "encoder": run.name,
        "weights": weights,
        "architecture": encoder.model.pretrained_cfg.get("architecture"),
        "img_size": [height, width],
        "channels": encoder.channels,
        "crop_pct": config.data.eval_crop or encoder.crop_pct,
        "interpolation": "bilinear, antialiased",
        "mean": list(encoder.normalize.mean),
        "std": list(encoder.normalize.std),
        **how_read_for_file(config),
        "normalize": config.normalize,
        "representation": config.representation,
        "quantize": config.quantize,
        "input": f"images ({batch}, {encoder.channels}, {height}, {width}) {dtype}, {kind}",
        "output": f"features {output} float32",
    }
    if hasattr(encoder.model, "num_prefix_tokens"):
        metadata["prefix_tokens"] = encoder.model.num_prefix_tokens
        metadata["grid"] = list(patch_grid(encoder.model))
    metadata["card"] = card
    return metadata


def how_read_for_file(config: ExportConfig) -> dict[str, Any]:
    """The settings by which images are read for a file, which users follow.

    They are the encoder's own where it is verified on the package's birds, for want of its images.
    """
    own = how_read(config.frozen.encoder) if config.data.path is None else {}
    return {name: as_saved(own.get(name, getattr(config.data, name))) for name in ("range", "bands", "nodata")}


def weights_and_card(config: ExportConfig) -> tuple[str, str]:
    """The name or fingerprint of the weights, and their model card, or "" where they have none."""
    frozen = config.frozen
    path = zoo_folder(Path(frozen.encoder))
    if frozen.random:
        return f"random, seed {frozen.seed}", ""
    if frozen.checkpoint:
        return Path(frozen.checkpoint).name, ""
    if not path.exists():
        return frozen.encoder, ""  # timm's name, or the hub's
    file = encoder_folder(path) / "README.md"
    card = file.read_text(encoding="utf-8") if file.is_file() else ""
    return fingerprint(path), card_of_file(card, has_head=config.representation == "logits")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Export as the command line, or `arguments`, say."""
    config, loaded = parse_and_load(ExportConfig, arguments, encoder_of=tested_encoder)
    return export(rebuild(config, {"encoder": tested_encoder(config)}), loaded)


if __name__ == "__main__":
    run_main(main)

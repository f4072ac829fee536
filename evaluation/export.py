"""An encoder as a file for use elsewhere: ONNX, a torch.export program, or weights alone.

    python evaluation/export.py --encoder runs/birds --out encoder.onnx
    python evaluation/export.py --encoder runs/birds --out encoder.pt2 --format torch_export --representation tokens

The command runs what it has written on real held-out images, and keeps it if it says what PyTorch says.
"""

import json
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

import mpp
from evaluation import fewshot
from evaluation.config import ExportConfig, FewshotConfig
from evaluation.frozen.encoder import FrozenEncoder, Unavailable, open_frozen_encoder, patch_grid
from evaluation.frozen.extraction import extract_split, views_for, warn_left_out
from evaluation.frozen.labelled_features import LabelledFeatures
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.results import table, write_json
from evaluation.frozen.run_images import find_run, load_images_of
from evaluation.supervision.teachers import averaged, classifier_at
from mpp.config import RunConfig, require
from mpp.data.dataset import ImageDataset
from mpp.data.loader import held_out_batches
from mpp.data.views import Batch
from mpp.data.workers import deaths_explained
from mpp.errors import UserError, one_line
from mpp.features.frozen import pool
from mpp.models.encoder import load_encoder
from mpp.models.exporting import export_encoder
from mpp.models.timm_models import set_attention
from mpp.runtime.files import complete
from mpp.runtime.start import command, start_alone
from mpp.runtime.weights import encoder_folder, fingerprint

MOST = 1e-4  # difference from PyTorch's numbers that is rounding
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of timm's layout
KEY = "mpp"  # of the metadata; safetensors writes several keys in any order
EXAMPLE = 3  # images that are traced: torch.export takes one for a constant
AT_ONCE = 16  # images of a batch whose speed is measured
ROUNDS, WARMUP = 20, 3
SHOTS = 5
ONE_FILE = 1_800_000_000  # bytes of weights that a file of ONNX may hold; protobuf ends at 2 GB
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Run = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to features or tokens."""


class Exported(nn.Module):
    """What a file computes: images (B, C, H, W) to features (B, D), tokens (B, T, D), or logits (B, classes)."""

    def __init__(
        self, encoder: FrozenEncoder, representation: str, normalize: bool, classifier: nn.Module | None = None
    ):
        super().__init__()
        self.model, self.representation = classifier or encoder.model, representation
        self.normalize = encoder.normalize if normalize else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        if self.representation == "logits":  # of a classifier, which normalises
            logits = self.model(images)
            return averaged(logits) if logits.ndim == 3 else logits  # a distilled student has two heads
        tokens = self.model.forward_features(self.normalize(images))
        return tokens if self.representation == "tokens" else pool(self.model, tokens, self.representation)


def describe_file(config: ExportConfig, encoder: FrozenEncoder, images: Tensor) -> dict[str, Any]:
    """The metadata of a file: what goes in and comes out, and the model card.

    Args:
        images: some, as they go in.
    """
    height, width = encoder.img_size
    path = Path(config.encoder)
    run = find_run(config.encoder) or path
    card = None
    if config.random:
        weights = f"random, seed {config.seed}"
    elif config.checkpoint or not path.exists():
        weights = Path(config.checkpoint).name if config.checkpoint else config.encoder  # timm's name, or the hub's
    else:
        weights, card = fingerprint(path), encoder_folder(path) / "README.md"
    kind = "from 0 to 255" if config.normalize else "(pixels / 255 - mean) / std"
    outputs = {"tokens": "(batch, tokens, width)", "logits": "(batch, classes)"}
    out = outputs.get(config.representation, "(batch, width)")
    about = {
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
        **{name: getattr(config.data, name) for name in ("range", "bands", "nodata")},
    }
    if config.format != "safetensors":
        dtype = str(images.dtype).removeprefix("torch.")
        batch = "batch" if config.batch == "dynamic" else config.batch
        about |= {"normalize": config.normalize, "representation": config.representation, "quantize": config.quantize}
        about |= {"input": f"images ({batch}, {encoder.channels}, {height}, {width}) {dtype}, {kind}"}
        about |= {"output": f"features {out} float32"}
    if hasattr(encoder.model, "num_prefix_tokens"):
        about |= {"prefix_tokens": encoder.model.num_prefix_tokens, "grid": list(patch_grid(encoder.model))}
    return about | {"card": card.read_text(encoding="utf-8") if card and card.is_file() else ""}


def write_onnx(module: Exported, images: Tensor, config: ExportConfig, file: Path, about: dict[str, Any]) -> None:
    """A file of ONNX, by torch's exporter; what is larger than 2 GB has its weights in FILE.data."""
    sizes = ({0: torch.export.Dim("batch")},) if config.batch == "dynamic" else None
    names = dict(input_names=["images"], output_names=["features"])
    program = torch.onnx.export(module, (images,), dynamo=True, dynamic_shapes=sizes, verbose=False, **names)
    program.model.metadata_props.update({key: as_text(value) for key, value in about.items()})
    for value, key in ((program.model.graph.inputs[0], "input"), (program.model.graph.outputs[0], "output")):
        value.doc_string = about[key]
    program.save(str(file), external_data=size_of(module) > ONE_FILE)


def read_onnx(file: Path) -> Run:
    """A file of ONNX, run by onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])


def write_torch_export(
    module: Exported, images: Tensor, config: ExportConfig, file: Path, about: dict[str, Any]
) -> None:
    """A program of torch.export; its extra file `mpp` is the metadata as JSON."""
    sizes = ({0: torch.export.Dim("batch")},) if config.batch == "dynamic" else None
    program = torch.export.export(module, (images,), dynamic_shapes=sizes)
    torch.export.save(program, file, extra_files={KEY: json.dumps(about)})


def read_torch_export(file: Path) -> Run:
    """A program of torch.export."""
    return torch.export.load(file).module()


def write_safetensors(
    module: Exported, images: Tensor, config: ExportConfig, file: Path, about: dict[str, Any]
) -> None:
    """The weights by timm's names; `mpp` of its header is the metadata as JSON, of which `timm` builds the model."""
    with TemporaryDirectory() as aside:
        folder = Path(aside) / "encoder"
        moments = about["mean"], about["std"], about["crop_pct"]
        known = dict(how_read=config.data.how_read(), label_names=module.model.pretrained_cfg.get("label_names"))
        export_encoder(module.model, folder, tuple(about["img_size"]), *moments, **known)
        about["timm"] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        state = load_file(folder / WEIGHTS)
    file.write_bytes(save(state, {KEY: json.dumps(about)}))  # save_file's files are for their owner alone


def read_safetensors(file: Path) -> Run:
    """Weights in a model that is built from the file's own metadata."""
    with TemporaryDirectory() as aside, safe_open(file, framework="pt") as stored:
        about = json.loads(stored.metadata()[KEY])
        (Path(aside) / CONFIG).write_text(json.dumps(about["timm"]), encoding="utf-8")
        shutil.copy(file, Path(aside) / WEIGHTS)
        model = load_encoder(aside)
    return Exported(FrozenEncoder(model, tuple(about["img_size"])), "mean", normalize=True)


FORMATS: dict[str, tuple[str, Callable[..., None], Callable[[Path], Run]]] = {  # how a file's name ends, write, read
    "onnx": (".onnx", write_onnx, read_onnx),
    "torch_export": (".pt2", write_torch_export, read_torch_export),
    "safetensors": (".safetensors", write_safetensors, read_safetensors),
}


def as_text(value: Any) -> str:
    """A value of the metadata where all values are text."""
    return value if isinstance(value, str) else json.dumps(value)


def size_of(module: nn.Module) -> int:
    """Bytes of its weights."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def bytes_in(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def quantized(file: Path) -> Path:
    """A copy of a file of ONNX with the weights of its matrix products in 8 bits, beside it."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = file.with_name(f"int8_{file.name}")
    products = dict(op_types_to_quantize=["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8)
    quantize_dynamic(file, small, **products)
    return small


def in_batches(run: Run, size: int | Literal["dynamic"]) -> Run:
    """The same for any number of images; what takes `size` of them alone gets its last batch filled up."""
    if size == "dynamic":
        return run

    def whole(images: Tensor) -> Tensor:
        parts = images.split(size)
        filled = [torch.cat([part, part[-1:].expand(size - len(part), *part.shape[1:])]) for part in parts]
        return torch.cat([run(part)[: len(own)] for part, own in zip(filled, parts, strict=True)])

    return whole


class Check(NamedTuple):
    """Real images, by which a file is compared with PyTorch."""

    config: ExportConfig
    encoder: FrozenEncoder
    accelerator: Accelerator
    splits: tuple[ImageDataset, ImageDataset]

    def batches(self, dataset: ImageDataset) -> Iterable[Batch]:
        """Images as an encoder takes them, before its normalisation."""
        return held_out_batches(views_for(self.encoder, dataset, self.config.data), self.config.data.batch_size or 64)

    def prepared(self, images: Tensor) -> Tensor:
        """Images as the file takes them."""
        return images if self.config.normalize else self.encoder.normalize(images)

    @torch.no_grad()
    def difference(self, run: Run, reference: Run) -> float:
        """The largest difference of two ways to compute the same, over held-out images."""
        held_out = self.splits[1].choose(self.config.images, self.config.data.cut_seed)
        found = [
            (run(images) - reference(images)).abs().max()
            for images in (self.prepared(batch.images) for batch in self.batches(held_out))
        ]
        return float(torch.stack(found).max())

    def accuracy(self, run: Run) -> float | None:
        """Few-shot accuracy of these features: the mean of three draws; None: there are no labels, or no features."""
        parts = [part.labelled() for part in self.splits]
        if None in parts or parts[0].labels.ndim > 1 or self.config.representation in ("tokens", "logits"):
            return None
        data, most = self.config.data, self.config.images
        found = []
        for part, seed in zip(parts, (data.eval_seed, data.cut_seed), strict=True):
            chosen = part.choose(most, seed)
            of_split = extract_split(
                views_for(self.encoder, chosen, data),
                lambda images: [run(self.prepared(images.cpu()))],
                self.accelerator,
            )
            warn_left_out(of_split.unreadable)
            found += [*of_split.by_depth, of_split.labels]
        features = LabelledFeatures(*found).checked(self.config.encoder)
        results = fewshot.evaluate(features, FewshotConfig(shots=(SHOTS,)))
        return float(np.mean([result["accuracy"] for result in results]))

    @torch.no_grad()
    def speeds(self, ways: dict[str, Run]) -> dict[str, float]:
        """Images per second of each way in its fastest round; the ways take turns."""
        held_out = self.splits[1].choose(AT_ONCE, self.config.data.cut_seed)
        images = self.prepared(torch.cat([batch.images for batch in self.batches(held_out)]))
        images = images[torch.arange(AT_ONCE) % len(images)]
        fastest = dict.fromkeys(ways, float("inf"))
        for turn in range(WARMUP + ROUNDS):
            for name, run in ways.items():
                begun = time.perf_counter()
                run(images)
                taken = time.perf_counter() - begun
                fastest[name] = min(fastest[name], taken) if turn >= WARMUP else fastest[name]
        return {name: AT_ONCE / taken for name, taken in fastest.items()}


def autocast(run: Run) -> Run:
    """The same in bf16."""

    def in_bf16(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(images).float()

    return in_bf16


def report_of(check: Check, ways: dict[str, tuple[Run, int]], reference: Run) -> list[dict[str, Any]]:
    """Size, difference, few-shot accuracy and speed of each way to compute the features: name -> it, and its bytes."""
    speeds = check.speeds({name: run for name, (run, _) in ways.items()})
    return [
        {"name": name, "bytes": size, "difference": check.difference(run, reference), "accuracy": check.accuracy(run)}
        | {"images_per_second": speeds[name]}
        for name, (run, size) in ways.items()
    ]


def print_report(rows: Sequence[dict[str, Any]]) -> None:
    """The table of `report_of`; ratios are to its first row."""
    first = rows[0]["images_per_second"]
    cells = []
    for row in rows:
        accuracy, speed = row["accuracy"], row["images_per_second"]
        shown = "-" if accuracy is None else f"{100 * accuracy:.2f}"
        numbers = f"{row['bytes'] / 1e6:.1f}", f"{row['difference']:.1e}", shown, f"{speed:.0f}", f"{speed / first:.2f}"
        cells.append([row["name"], *numbers])
    headings = ["", "MB", "largest difference", f"{SHOTS}-shot (%)", "images/s", "ratio"]
    print(table(headings, cells))


@contextmanager
def quietly() -> Iterator[None]:
    """Exporters warn and log of what is no concern of a user; what fails is said in one line."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def export(config: ExportConfig) -> dict[str, Any]:
    """Write the file; its metadata, and what the check found.

    Raises:
        UserError: an encoder that cannot be exported, packages that are missing, or a file that computes other numbers
            than PyTorch does.
    """
    out = Path(config.out)
    end = FORMATS[config.format][0]
    require(out.suffix == end and not out.is_dir(), "out", out, f"a file whose name ends in {end}")
    missing = [name for name in PACKAGES if config.format == "onnx" and find_spec(name) is None]
    install = f"installed first: pip install {' '.join(missing)}"
    require(not missing, "format", f"onnx without {', '.join(missing)}", install)
    accelerator = start_alone(RunConfig(precision="fp32", trackers=(), threads=config.threads), "a file is written")
    encoder = open_frozen_encoder(config)
    try:
        model = encoder.model
        if config.representation == "tokens":
            patch_grid(model)
    except Unavailable as error:
        raise UserError(f"encoder is {config.encoder}, which cannot be exported: {error}") from None
    logits = config.representation == "logits"
    classifier = classifier_at(config.encoder, config.data.channels, "encoder")[0] if logits else None
    reference = Exported(encoder, config.representation, config.normalize, classifier).eval()
    with deaths_explained():
        check = Check(config, encoder, accelerator, load_images_of(config, config.images if config.quantize else 0))
        return write_checked(config, check, reference, out)


def write_checked(config: ExportConfig, check: Check, reference: Exported, out: Path) -> dict[str, Any]:
    """Write the file aside, run it, and put it in its place."""
    _, write, read = FORMATS[config.format]
    some = next(iter(check.batches(check.splits[1].choose(EXAMPLE, config.data.cut_seed)))).images
    count = EXAMPLE if config.batch == "dynamic" else config.batch
    images = check.prepared(some[torch.arange(count) % len(some)])
    about = describe_file(config, check.encoder, images)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        aside = Path(folder)
        file = aside / out.name
        with torch.no_grad():
            reference(images)  # a [class] token that there is not
        set_attention(reference.model, fused=config.format == "torch_export")  # ONNX has no fused one with biases
        try:
            with quietly():
                write(reference, images, config, file, about)
        except UserError:
            raise
        except Exception as error:  # exporters raise whatever they like
            reason = one_line(error.__cause__ or error)
            raise UserError(f"{config.encoder} cannot be exported as {config.format}: {reason}") from error
        run = in_batches(read(file), config.batch)
        found = check.difference(run, reference)
        what = f"a file whose numbers differ from PyTorch's by {found:.1e}"
        require(found <= MOST, "format", f"{config.format}, which makes {what}", f"another one: at most {MOST:g} is ok")
        report = {"about": about, "difference": found}
        size = bytes_in(aside)
        if config.quantize:
            with quietly():
                small = quantized(file)
            own = size_of(reference)
            exact = {"PyTorch fp32": (reference, own), "PyTorch bf16": (autocast(reference), own)}
            ways = exact | {"onnxruntime fp32": (run, size)}
            ways["onnxruntime int8"] = in_batches(read(small), config.batch), small.stat().st_size
            report["rows"] = report_of(check, ways, reference)
            print_report(report["rows"])
            report["difference"] = report["rows"][-1]["difference"]
            for each in set(aside.iterdir()) - {small}:  # of a large encoder there are two
                each.unlink()
            small.replace(file)
        count = min(config.images, len(check.splits[1]))
        print(f"largest difference from PyTorch: {report['difference']:.1e}, over {count} held-out images")
        size = bytes_in(aside)
        out.with_name(f"{out.name}.data").unlink(missing_ok=True)  # of an earlier export
        for each in aside.iterdir():
            with complete(out.parent / each.name) as partial:
                each.replace(partial)
    write_json(out.with_name(f"{out.name}.json"), report)
    print(f"wrote {out} ({size / 1e6:.1f} MB) and {out.name}.json")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Export as the command line, or `arguments`, say."""
    export(parse_with_images(ExportConfig, arguments, prog="python evaluation/export.py"))


if __name__ == "__main__":
    command(main)

"""Speed of training: ratios to other code and to the machine's own limits, all measured in one run.

    python evaluation/throughput.py --out throughput.json

Everything is timed in turn, round after round, so that a machine whose speed drifts slows all alike; the table shows
medians, and the median and range of the rounds' ratios. `pip install -e '.[peers]'` adds other packages to it.
"""

import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import timm
import torch

from evaluation.benchmark import peers
from evaluation.benchmark.peers import CEILINGS, FORWARD, TRAINING, Bench, Peer
from evaluation.config import ThroughputConfig
from evaluation.frozen.results import table, write_json
from mpp.config import RunConfig, require
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.runtime.command import command
from mpp.runtime.hardware import bf16_is_native
from mpp.runtime.start import start

BLOCK = 6  # updates in a row when loading is a part of it
DRAIN = 4  # before them, so that what was loaded meanwhile is used up


RATIOS = [  # what takes longer, in times of the other
    ("timm as it comes", "mpp update"),
    ("timm, attention unfused", "mpp update"),
    ("timm training step", "mpp update"),
    ("vit-pytorch MPP", "mpp update"),
    ("Hugging Face ViTForMaskedImageModeling", "mpp update"),
    ("mpp update", "mpp forward, backward, optimiser"),
    ("mpp update, Muon", "mpp update"),
    ("mpp update, Muon matrix by matrix", "mpp update, Muon"),
    ("features", "timm forward"),
    ("updates in memory", "updates from JPEG"),
    ("ImageFolder with PIL", "mpp's loading"),
    ("ImageFolder with PIL", "mpp's loading of PPM"),
]


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of a step, a GPU's work included."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def time_in_turn(steps: dict[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each step in each round."""
    times = [{name: seconds_of(step) for name, step in steps.items()} for _ in range(warmup + rounds)]
    return {name: [each[name] for each in times[warmup:]] for name in steps}


def time_loading(bench: Bench, config: ThroughputConfig) -> dict[str, list[float]]:
    """Updates from JPEG files beside updates from memory; loading alone, on one core, beside torchvision's."""
    side = config.jpeg_side
    with peers.files(side) as name, peers.files(side, pixels=True) as of_pixels:
        folder, size = Path(name), peers.build_encoder(bench.config.model).patch_embed.img_size[0]
        updates = peers.end_to_end(bench, folder, config.workers)
        in_memory = peers.mpp_update(bench).step
        alone = {
            "mpp's loading": take(peers.our_images(folder, size), 32),
            "mpp's loading of PPM": take(peers.our_images(Path(of_pixels), size), 32),
            "ImageFolder with PIL": take(peers.image_folder(folder, size), 32),
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        seconds = time_in_turn(alone, config.rounds)
        torch.set_num_threads(threads)
        drain, load_too = take(updates, DRAIN), take(updates, BLOCK)
        steps = {"updates in memory": lambda: [in_memory() for _ in range(BLOCK)], "drain": drain}
        seconds |= time_in_turn(steps | {"updates from JPEG": load_too}, max(1, config.rounds // 3), warmup=1)
        updates.close()
        del seconds["drain"]
        return seconds


def take(items: Iterator[Any], count: int) -> Callable[[], list[Any]]:
    """A step that takes so many items."""
    return lambda: list(islice(items, count))


def ratios(seconds: dict[str, list[float]], slower: str, faster: str) -> dict[str, float]:
    """Median and extremes of slower / faster, round by round."""
    each = [a / b for a, b in zip(seconds[slower], seconds[faster], strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def megabytes(config: ThroughputConfig, name: str, answer: Any) -> None:
    """Send the peak memory of two steps of a peer, without that of the libraries. In a process of its own."""
    bench = open_bench(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step = (TRAINING | FORWARD)[name](bench).step
    step(), step()
    if bench.accelerator.device.type == "cuda":
        answer.send(torch.cuda.max_memory_allocated() / 2**20)
    else:
        answer.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)


def measure_memory(config: ThroughputConfig) -> dict[str, float]:
    """Peer -> peak memory in MiB."""
    context, found = multiprocessing.get_context("spawn"), {}
    for name in TRAINING | FORWARD:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=megabytes, args=(config, name, sender))
        process.start()
        sender.close()
        try:
            found[name] = receiver.recv()
        except EOFError:
            raise UserError(f"memory of {name} cannot be measured: its process died") from None
        process.join()
    return found


def open_bench(config: ThroughputConfig, model: str | None = None, batch_size: int | None = None) -> Bench:
    """The device in its precision, and the candidates for it."""
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    accelerator = start(RunConfig(dir="unused", precision=config.precision, trackers=(), compile=config.compile))
    return Bench(model or config.model, batch_size or config.batch_size, config.compile, accelerator)


def about(config: ThroughputConfig, bench: Bench) -> dict[str, Any]:
    """Everything that the figures depend on."""
    device = bench.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    packages = {}
    for package in ("torch", "torchvision", "timm", "accelerate", "transformers", "vit-pytorch"):
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    machine = {
        "device": device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    return {"config": asdict(config), "precision": bench.accelerator.mixed_precision, "machine": machine | packages}


def measure_all(config: ThroughputConfig) -> dict[str, Any]:
    """All figures: seconds and FLOPs of each peer, ratios, memory."""
    memory = measure_memory(config) if config.memory else {}
    bench = open_bench(config)
    ceiling = CEILING_OF[bench.accelerator.mixed_precision]
    ceilings = {name: build for name, build in CEILINGS.items() if name == ceiling or bf16_is_native()}
    built: dict[str, Peer] = {name: build(bench) for name, build in (TRAINING | FORWARD | ceilings).items()}
    seconds = time_in_turn({name: peer.step for name, peer in built.items()}, config.rounds)
    flops = {name: peer.flops for name, peer in built.items()}
    del built
    bench.accelerator.free_memory()
    seconds |= time_loading(bench, config)
    best = flops[ceiling] / statistics.median(seconds[ceiling])
    return about(config, bench) | {
        "seconds": seconds,
        "flops": flops,
        "ceiling": best,
        "memory_mb": memory,
        "ratios": {
            f"{slower} / {faster}": ratios(seconds, slower, faster) for slower, faster in RATIOS if slower in seconds
        },
    }


CEILING_OF = {"bf16": "matrix product, bf16", "no": "matrix product, fp32"}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    batch, rows = result["config"]["batch_size"], []
    for name in TRAINING | FORWARD:
        median = statistics.median(result["seconds"][name])
        rate = result["flops"][name] / median
        memory = result["memory_mb"].get(name)
        row = [f"{1e3 * median:.1f}", f"{batch / median:.1f}", f"{result['flops'][name] / batch / 1e9:.2f}"]
        row += [f"{rate / 1e9:.0f}", f"{rate / result['ceiling']:.0%}", "-" if memory is None else f"{memory:.0f}"]
        rows.append([name, *row])
    print(f"\n{result['config']['model']}, batch {batch}, {result['precision']}, {result['machine']}")
    heads = ["step", "ms", "images/s", "executed GFLOP an image", "executed GFLOP/s", "of the ceiling", "MiB"]
    print(table(heads, rows))
    for name in (name for name in CEILINGS if name in result["seconds"]):
        rate = result["flops"][name] / statistics.median(result["seconds"][name])
        print(f"{name}: {rate / 1e9:.0f} GFLOP/s")
    for name in ("mpp's loading", "mpp's loading of PPM", "ImageFolder with PIL"):
        print(f"{name}: {32 / statistics.median(result['seconds'][name]):.0f} images/s a core")
    rows = [[name, f"{r['median']:.3f} ({r['min']:.3f} to {r['max']:.3f})"] for name, r in result["ratios"].items()]
    print(table(["ratio of times", "median (range)"], rows))


def measure_sizes(config: ThroughputConfig) -> dict[str, Any]:
    """Time of an update against the model's FLOPs and the images in it."""
    batches = (max(1, config.batch_size // 2), config.batch_size)
    found = []
    for model in config.sizes:
        benches = {batch: open_bench(config, model, batch) for batch in batches}
        built = {batch: peers.mpp_update(bench) for batch, bench in benches.items()}
        times = time_in_turn({str(batch): peer.step for batch, peer in built.items()}, config.rounds, warmup=2)
        for batch, peer in built.items():
            median = statistics.median(times[str(batch)])
            found.append({"model": model, "batch": batch, "flops": peer.flops / batch, "seconds": median / batch})
    rows = []
    for f in found:
        numbers = f["flops"] / 1e9, 1e3 * f["seconds"], f["flops"] / f["seconds"] / 1e9
        rows.append([f["model"], str(f["batch"]), *(f"{number:.1f}" for number in numbers)])
    print(table(["mpp update", "batch", "GFLOP an image", "ms an image", "executed GFLOP/s"], rows))
    return about(config, next(iter(benches.values()))) | {"sizes": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, as the command line, or `arguments`, say."""
    config = parse(ThroughputConfig, arguments, prog="python evaluation/throughput.py")
    for model in config.sizes or (config.model,):
        require(timm.is_model(model), "model", model, "a VisionTransformer of timm's")
    result = measure_sizes(config) if config.sizes else measure_all(config)
    if not config.sizes:
        show(result)
    if config.out:
        write_json(Path(config.out), result)
        print(f"wrote {config.out}")


if __name__ == "__main__":
    command(main)

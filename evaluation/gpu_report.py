"""What mpp does on this machine's GPU, in one text file to send: `mpp gpu-report`, some minutes, from a clone
with `pip install -e '.[test,peers]'`.

Versions and card (torch's own report), the tests of tests/test_gpu.py but those that compile, and throughput beside
other code.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.collect_env import get_pretty_env_info

from evaluation.config import GpuReportConfig
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.runtime.command import command

ROOT = Path(__file__).parent.parent
TESTS = ("pytest", "-m", "gpu", "-k", "not compiled", "-q", "-rA", "--no-header", "--tb=short", "tests/test_gpu.py")
SPEED = ("evaluation.throughput", "--rounds=5")


def report_parts(config: GpuReportConfig) -> Iterator[tuple[str, str]]:
    """Titles and texts of the report, each when it is ready."""
    yield "versions and card", get_pretty_env_info()
    if (ROOT / "tests" / "test_gpu.py").is_file() and importlib.util.find_spec("pytest"):
        yield "tests", output_of(config.device, *TESTS)
    else:
        yield "tests", "not here: they take a clone, and its extra `test`"
    device = "auto" if config.device == "cuda" else "cpu"
    settings = (f"--batch_size={config.batch_size}", f"--device={device}")
    yield "speed", output_of(device, *SPEED, *settings)


def output_of(device: str, *words: str) -> str:
    """Output of a Python module's command on a device, with its exit code and duration."""
    begin = time.monotonic()
    ended = subprocess.run(
        (sys.executable, "-m", *words),
        cwd=ROOT,
        env=os.environ | {"GPU_SUITE_DEVICE": device},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.monotonic() - begin
    return f"{ended.stdout}\nexit code {ended.returncode}, {seconds:.0f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    config = parse(GpuReportConfig, arguments, prog="python evaluation/gpu_report.py")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; --device cpu rehearses the report")
    with open(config.out, "w", encoding="utf-8") as file:
        for title, text in report_parts(config):
            print(f"== {title}\n\n{text}\n", file=file, flush=True)
            print(f"{title}: done", flush=True)
    print(f"wrote {config.out}: send this file")


if __name__ == "__main__":
    command(main)

"""The run's page, written by `mpp report` in a process of its own.

This is the one place where the package knows of the evaluation. It starts `evaluation/report.py` by its path and
imports nothing of it: the import contracts stay one-way, and whatever happens to the report, the run is done.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from mpp.config.imports import import_words
from mpp.runtime.processes import SHARDED

REPORT_TIMEOUT_S = 600  # other processes of the run wait meanwhile, for at most 20 minutes
REPORT_SCRIPT = Path(__file__).parents[2] / "evaluation" / "report.py"  # `-m` might find another `evaluation` here
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC_",
    "PMI_",
    "OMPI_",
    "MV2_",
    "ACCELERATE_MIXED",
    SHARDED,
)
"""Beginnings of the variables by which launchers tell processes that they belong together."""


def write_run_page(folder: Path) -> None:
    """Have `mpp report` write `report.html` in a run folder; a failure is a warning on stderr."""
    words = (sys.executable, str(REPORT_SCRIPT), "--encoder", str(folder), *import_words())
    try:
        ended = subprocess.run(
            words,
            env=environment_without_launcher(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=REPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        warn_of_missing_report(folder, f"it took over {REPORT_TIMEOUT_S} s")
        return
    output = ended.stderr if ended.returncode else ended.stdout
    lines = output.strip().splitlines() or [f"exit {ended.returncode}"]
    if ended.returncode:
        warn_of_missing_report(folder, lines[-1])
        return
    written = [line for line in lines if line.startswith("wrote ")]
    print(written[0] if written else lines[-1])


def environment_without_launcher() -> dict[str, str]:
    """Environment variables of this process without the launcher's: the report is one process by itself."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}


def warn_of_missing_report(folder: Path, reason: str) -> None:
    """Say on stderr why there is no report, and how to write it."""
    again = f"mpp report --encoder {shlex.quote(str(folder))}"
    print(f"warning: the report is not written ({reason}); `{again}` writes it", file=sys.stderr)

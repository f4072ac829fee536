"""Write the tables, summaries and plots of evaluation/results again, each from its results.json; nothing is trained.

python tests/published_tables.py [NAME ...]
"""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path

from comparisons import cases_in
from conftest import ROOT

from evaluation.comparison.cases import read_entries
from evaluation.comparison.rows import read_published
from evaluation.comparison.tables import write_comparison
from evaluation.config import CompareConfig
from mpp.config.parsing import parse
from mpp.runtime.files import write_complete

RESULTS = ROOT / "evaluation" / "results"
WITH_SWEEPS = "rates_cifar10"
"""Its file has the results of sweeps, too: the first table is of all encoders in it."""


def write_tables(name: str, folder: Path) -> dict:
    """Write what a comparison's results say into a folder; returns what its results.json would have."""
    config = ROOT / "configs" / "compare" / f"{name}.yaml"
    cases = {(case.entry.name, case.dataset.name) for case in cases_in(config).values()}
    first, *others = read_entries(parse(CompareConfig, ["--config", str(config)])).questions
    if name == WITH_SWEEPS:
        first = replace(first, encoders=None)
    published = chain.from_iterable(read_published(RESULTS / name / "results.json").values())
    rows = [row for row in published if (row["evaluation"], row["dataset"]) in cases]  # the others are of a sweep
    return write_comparison(folder, [first, *others], rows, {}, [])


def main() -> None:
    for name in sys.argv[1:] or sorted(path.parent.name for path in RESULTS.glob("*/results.json")):
        with tempfile.TemporaryDirectory() as folder:
            published, written = RESULTS / name, write_tables(name, Path(folder))
            results = json.loads((published / "results.json").read_text())
            results["summary"] = written["summary"]
            write_complete(published / "results.json", json.dumps(results, indent=1))
            for file in Path(folder).iterdir():
                if file.suffix in (".md", ".png") and (published / file.name).exists():
                    shutil.copyfile(file, published / file.name)


if __name__ == "__main__":
    main()

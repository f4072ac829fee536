"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. A result is known by a digest of its settings: finished work is not
repeated, here or, with `--extends results.json`, in another comparison; neither is a training that diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from evaluation.comparison.cases import cases_of, with_seed
from evaluation.comparison.digests import identity
from evaluation.comparison.entries import EncoderEntry, read_entries
from evaluation.comparison.files import write_comparison
from evaluation.comparison.reports import ResultRow, rows_of, with_interval
from evaluation.comparison.run import evaluate_cases
from evaluation.comparison.trunks import compute_of_trunks
from evaluation.config import CompareConfig
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.runtime.command import command
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.lock import hold


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the encoders that are missing, evaluate all, write the results.

    Raises:
        UserError: an entry that cannot be carried out, before anything is done; failed evaluations, after all others.
    """
    if PartialState(cpu=not uses_gpu()).num_processes > 1:
        raise UserError("a comparison is one process; start the command several times, and they share the work")
    folder = Path(config.dir)
    published = read_published(config.extends)
    entries = read_entries(config)
    cases = cases_of(entries)
    missing = [case for case in cases if identity(case) not in published]  # this parses the settings of each
    failures = [] if config.tabulate else evaluate_cases(missing, folder)
    rows: list[ResultRow] = []
    for case in cases:
        known = published.get(identity(case))
        of_case = [row | case.labels for row in known] if known else rows_of(case, folder)
        rows += [with_interval(row, case) for row in of_case]
    settings = {key: getattr(config, key) for key in ("encoders", "evaluations", "datasets", "questions")}
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        runs = run_folders(entries.encoders)
        results = write_comparison(folder, entries.questions, rows, settings, runs, compute_of_trunks(cases))
    if failures:
        raise UserError(f"{len(failures)} of {len(cases)} evaluations failed, such as {failures[0]}")
    return results


def read_published(file: str | None) -> dict[str, list[ResultRow]]:
    """The results of another comparison's results.json, by their digests; None: there are none.

    Raises:
        UserError: the file is not a results.json.
    """
    if file is None:
        return {}
    by_digest: dict[str, list[ResultRow]] = {}
    try:
        for row in json.loads(Path(file).read_text(encoding="utf-8"))["results"]:
            by_digest.setdefault(row["digest"], []).append(row)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"extends is {file}; it must be the results.json of a comparison") from None
    return by_digest


def run_folders(encoders: Sequence[EncoderEntry]) -> dict[str, list[Path]]:
    """Encoder -> its run folders: one for each seed, or one for all."""
    folders = {}
    for entry in encoders:
        names = [with_seed(entry.encoder, seed) for seed in entry.seeds]
        folders[entry.name] = list(map(Path, dict.fromkeys(names)))
    return folders


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments, prog="python evaluation/compare.py"))


if __name__ == "__main__":
    command(main)

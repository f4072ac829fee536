"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. A result is known by a digest of its settings: finished work is not
repeated, here or, with `--extends results.json`, in another comparison; neither is a training that diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation.comparison.cases import cases_of
from evaluation.comparison.encoders import with_seed
from evaluation.comparison.entries import EncoderEntry, read_entries
from evaluation.comparison.files import write_comparison
from evaluation.comparison.reports import describe_missing_seeds
from evaluation.comparison.run import carry_out
from evaluation.comparison.trunks import compute_of_trunks
from evaluation.config import CompareConfig
from mpp.config import require
from mpp.config.parsing import parse
from mpp.runtime.files import hold
from mpp.runtime.start import run_main


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train the encoders that are missing, evaluate all, write the results.

    Raises:
        UserError: an entry that cannot be carried out, before anything is done; failed evaluations, after all others.
    """
    folder = Path(config.dir)
    entries = read_entries(config)
    for evaluation in entries.evaluations:
        tests = evaluation.options.get("test", True)
        require(tests, f"evaluations: {evaluation.name}: test", tests, "true: `mpp sweep` compares on a dev split")
    cases = cases_of(entries)
    carried_out = carry_out(cases, folder, config.extends, config.tabulate)
    settings = {key: getattr(config, key) for key in ("encoders", "evaluations", "datasets", "questions")}
    settings["datasets"] = settings["datasets"] or [asdict(case.dataset) for case in cases[:1]]
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        rows = carried_out.collect()
        runs = run_folders(entries.encoders)
        missing = describe_missing_seeds(cases, rows)
        trunks = compute_of_trunks(cases)
        results = write_comparison(folder, entries.questions, rows, settings, runs, trunks, missing)
    carried_out.raise_failures()
    return results


def run_folders(encoders: Sequence[EncoderEntry]) -> dict[str, list[Path]]:
    """Encoder -> its run folders: one for each seed, or one for all."""
    folders = {}
    for entry in encoders:
        names = [with_seed(entry.encoder, seed) for seed in entry.seeds]
        folders[entry.name] = list(map(Path, dict.fromkeys(names)))
    return folders


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments))


if __name__ == "__main__":
    run_main(main)

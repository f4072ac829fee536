"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. A result is known by a digest of its settings: what is done is not
done again, here or, with `--extends results.json`, in another comparison; neither is what diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work:
none does what another is doing.
"""

import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from evaluation.comparison.cases import Case, plan
from evaluation.comparison.run import Job, jobs_of
from evaluation.comparison.tables import Row, write_findings
from evaluation.config import CompareConfig
from mpp.config.parsing import parse
from mpp.errors import Diverged, UserError
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.lock import Held, hold
from mpp.runtime.start import command, user_message

PAUSE = 10  # seconds before looking again whether others are done


def share_out(jobs: Sequence[Job]) -> list[str]:
    """Carry out all jobs; what failed, and why. Those that another process is at come last, or are waited for."""
    failures, announced = [], False
    while jobs:
        left = []
        for job in jobs:
            try:
                job.carry_out()
            except Held:
                left.append(job)
            except Diverged as error:  # a finding
                print(f"warning: {job.case.slug} diverged: {error}", file=sys.stderr)
            except Exception as error:  # a full disk, a bug: the others go on
                message = user_message(error)
                if message is None:
                    traceback.print_exc()
                failures.append(f"{job.case.slug}: {message or f'{type(error).__name__}: {error}'}")
                print(f"warning: {failures[-1]}", file=sys.stderr)
        if len(left) == len(jobs):
            if not announced:
                print(f"waiting for other processes, which do {left[0].case.slug} or what it needs", flush=True)
            announced = True
            time.sleep(PAUSE)
        jobs = left
    return failures


def runs_of(cases: Sequence[Case]) -> dict[str, list[Path]]:
    """Encoder -> its run folders, one for each seed."""
    found: dict[str, list[Path]] = {}
    for entry, seed, *_ in cases:
        folder = Path(entry.encoder.replace("{seed}", str(seed)))
        if folder not in found.setdefault(entry.name, []):
            found[entry.name].append(folder)
    return found


def published(file: str | None) -> dict[str, list[Row]]:
    """The results of another comparison's results.json, by their digests.

    Raises:
        UserError: it is none.
    """
    found: dict[str, list[Row]] = {}
    try:
        for row in json.loads(Path(file).read_text(encoding="utf-8"))["results"] if file else ():
            found.setdefault(row["digest"], []).append(row)
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"extends is {file}; it must be the results.json of a comparison") from None
    return found


def renamed(rows: list[Row], case: Case) -> list[Row]:
    """Results of another comparison by the names that this one has for them."""
    names = {"encoder": case.encoder.name, "encoder_seed": case.seed, "evaluation": case.evaluation.name}
    return [row | names | {"dataset": case.dataset.name, "group": case.dataset.group} for row in rows]


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train what is missing, evaluate everything, write the results.

    Raises:
        UserError: an entry that is none, before anything is done; an evaluation that failed, after all others.
    """
    if PartialState(cpu=not uses_gpu()).num_processes > 1:
        raise UserError("a comparison is one process; start the command several times, and they share the work")
    folder, known = Path(config.dir), published(config.extends)
    asked_for = plan(config)
    jobs = jobs_of(asked_for, folder)  # their settings are parsed below: a bad one is named at once
    missing = [job for job in jobs if job.digest not in known]
    failures = [] if config.tabulate else share_out(missing)
    rows = [row for job in jobs for row in renamed(known.get(job.digest, []), job.case) or job.rows()]
    asked = {key: getattr(config, key) for key in ("encoders", "evaluations", "datasets", "questions")}
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        found = write_findings(folder, asked_for.questions, rows, asked, runs_of(asked_for.cases))
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} evaluations failed, such as {failures[0]}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments, prog="python evaluation/compare.py"))


if __name__ == "__main__":
    command(main)

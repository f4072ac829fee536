"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. Resumable: what is done, by the same settings, is not done again.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work:
none does what another is doing.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState

from evaluation.comparison import Results, write_comparison
from evaluation.plan import EVALUATIONS, TRAININGS, Case, CompareConfig, Options, plan
from evaluation.reports import write_json
from mpp.encoder import fingerprint
from mpp.launch import command
from mpp.lock import Held, hold
from mpp.parsing import parse
from mpp.training import last_scalars

PAUSE = 10  # seconds before looking again whether others are done


def words(options: Options, seed: int) -> list[str]:
    """Settings as a command line's words; `{seed}` is filled in, several `config` files compose."""
    options = dict(options)
    files = options.pop("config", [])
    filled = {
        key: value.replace("{seed}", str(seed)) if isinstance(value, str) else value for key, value in options.items()
    }
    return [f"--config={file}" for file in ([files] if isinstance(files, str) else files)] + [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in filled.items()
    ]


class Job(NamedTuple):
    """How a case is evaluated, and what says that it was."""

    case: Case
    folder: Path

    @property
    def report(self) -> Path:
        """Where the evaluation's report is."""
        return self.folder / "reports" / f"{self.case.slug}.json"

    @property
    def note(self) -> Path:
        """Where stands of what settings and weights the report is."""
        return self.report.with_suffix(".done.json")

    def weights(self) -> Path:
        """The folder or file that is evaluated."""
        entry, seed, *_ = self.case
        return Path(str(entry.options.get("checkpoint") or entry.encoder).replace("{seed}", str(seed)))

    def arguments(self) -> list[str]:
        """The evaluation's command line."""
        entry, seed, evaluation, dataset = self.case
        if evaluation.command == "masked":  # reads a run's folder: no images, no other settings
            return words(evaluation.options | {"encoder": entry.encoder, "out": str(self.report)}, seed)
        options = dataset.options | evaluation.options | entry.options
        options |= {"encoder": entry.encoder, "out": str(self.report)}
        if evaluation.command == "finetune":
            options |= {"run.dir": str(self.folder / "finetuned" / self.case.slug), "run.seed": seed}
            options |= {"init": "random"} if entry.random else {}
        else:
            options |= {"random": entry.random, "seed": seed}
        return words(options, seed)

    def made_of(self) -> dict[str, Any]:
        """What the report depends on."""
        return {"arguments": self.arguments(), "encoder_sha256": fingerprint(self.weights())}

    def found(self) -> dict[str, Any] | None:
        """The report, if there is one of these settings and weights."""
        try:
            done = self.note.is_file() and json.loads(self.note.read_text()) == self.made_of()
        except ValueError:  # no encoder there yet
            return None
        return json.loads(self.report.read_text()) if done else None

    def prepare(self) -> None:
        """Train the encoder if the entry says how; a finished run is left as it is, a broken off one goes on."""
        entry = self.case.encoder
        if entry.train is None:
            return
        with hold(self.weights(), "encoder"):
            pass  # another process may be at it: to know that, nothing need be loaded
        config_class, train = TRAININGS[entry.train]
        options = {"run.seed": self.case.seed} | entry.train_options | {"run.dir": entry.encoder}
        train(parse(config_class, words(options, self.case.seed)))

    def carry_out(self) -> None:
        """Train and evaluate what is not done yet. Raises Held where another process is at it."""
        self.prepare()
        with hold(self.report.with_suffix(""), "dir"):
            if self.found() is None:
                config_class, run = EVALUATIONS[self.case.evaluation.command]
                run(parse(config_class, self.arguments()))
                write_json(self.note, self.made_of())


def share_out(jobs: Sequence[Job]) -> None:
    """Carry out all jobs; those that another process is at come last, or are waited for."""
    while jobs:
        left = []
        for job in jobs:
            try:
                job.carry_out()
            except Held:
                left.append(job)
        if len(left) == len(jobs):
            time.sleep(PAUSE)
        jobs = left


def collect(jobs: Sequence[Job]) -> Results:
    """What the reports that are there say; of several depths the one that counts, and the dev split's curve."""
    results, pflop = Results(), {}
    for job in jobs:
        report = job.found()
        if report is None:
            continue
        case, protocol = job.case, report["protocol"]
        about = {"encoder": case.encoder.name, "encoder_seed": case.seed, "evaluation": case.evaluation.name}
        about |= {"dataset": case.dataset.name}
        chosen = protocol.get("chosen_depth")
        key = {"fewshot": "shots", "knn": "neighbours"}.get(case.evaluation.command)
        results.rows += [
            about
            | {"group": case.dataset.group, "case": str(result.get("case", result.get(key, "")))}
            | {"seed": result.get("seed", 0), "accuracy": result["accuracy"]}
            | {name: result[name] for name in ("depth", "lr") if name in result}
            for result in report["results"]
            if result.get("depth", chosen) == chosen
        ]
        by_depth = protocol.get("dev_accuracy_by_depth", {})
        results.curves += [about | {"depth": int(depth), "accuracy": each} for depth, each in by_depth.items()]
        if case.encoder.train and not case.encoder.random:
            pflop.setdefault(case.encoder.name, last_scalars(job.weights(), "speed/pflop")["speed/pflop"])
    results.compute |= pflop
    return results


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train what is missing, evaluate everything, write the results."""
    if PartialState().num_processes > 1:
        raise ValueError(
            "a comparison is one process; start the command several times, and the processes share the work"
        )
    folder = Path(config.dir)
    questions, cases = plan(config)
    jobs = [Job(case, folder) for case in cases]
    if not config.tabulate:
        share_out(jobs)
    return write_comparison(
        folder,
        questions,
        collect(jobs),
        {"encoders": config.encoders, "evaluations": config.evaluations, "datasets": config.datasets},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments, prog="python evaluation/compare.py"))


if __name__ == "__main__":
    command(main)

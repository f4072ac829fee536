"""One comparison: encoders x evaluations x datasets, into a table and a plot for each question.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. Resumable: what is done, by the same settings, is not done again,
and neither is what diverged.
Started several times, on the GPUs of a machine or on machines that share the folder, the processes share the work:
none does what another is doing.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from evaluation import contrastive, fewshot, finetune, knn, linear, masked, supervised
from evaluation.suite.divergence import DIVERGED, once, told
from evaluation.suite.findings import COMPUTE, Results, unique, write_findings
from evaluation.suite.plan import Case, CompareConfig, Options, plan
from evaluation.suite.probing import forget_features
from evaluation.suite.provenance import completed, images_at, result_settings
from evaluation.suite.reports import write_json
from mpp.config import Config
from mpp.data.record import differences
from mpp.data.views import BatchLayout
from mpp.errors import Diverged, UserError
from mpp.models.encoder import fingerprint
from mpp.pretrain import Pretraining
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.launch import command, user_message
from mpp.runtime.lock import Held, hold
from mpp.runtime.parsing import parse, to_yaml
from mpp.training.flops import update_flops
from mpp.training.run import first_weights, train
from mpp.training.run_folder import images_of, is_finished
from mpp.training.task import ImageTask
from mpp.training.tracking import last_scalars

KNOWN_FLOPS: dict[str, int] = {}  # of an update, by command and settings
PAUSE = 10  # seconds before looking again whether others are done
TRAININGS: dict[str, tuple[type, Callable[..., ImageTask]]] = {
    "pretrain": (Config, Pretraining),
    "supervised": (supervised.SupervisedConfig, supervised.build_task),
    "contrastive": (contrastive.ContrastiveConfig, contrastive.Contrastive),
}
EVALUATIONS: dict[str, tuple[type, Callable[[Any], dict]]] = {
    "fewshot": (fewshot.FewshotConfig, fewshot.run),
    "knn": (knn.KnnConfig, knn.run),
    "linear": (linear.LinearConfig, linear.run),
    "finetune": (finetune.FinetuneConfig, finetune.run),
    "masked": (masked.MaskedConfig, masked.run),
}


def command_line(options: Options, seed: int) -> list[str]:
    """Settings as a command line; `{seed}` is filled in, several `config` files compose."""
    options = dict(options)
    files = options.pop("config", [])
    filled = {
        key: value.replace("{seed}", str(seed)) if isinstance(value, str) else value for key, value in options.items()
    }
    return [f"--config={file}" for file in ([files] if isinstance(files, str) else files)] + [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in filled.items()
    ]


def flops_of(command: str, config: Any) -> int:
    """Executed by an update of this training. Its task is built to know, once."""
    key = f"{command}\n{to_yaml(config)}"
    if key not in KNOWN_FLOPS:
        AcceleratorState._reset_state()
        layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
        task = TRAININGS[command][1](config, Accelerator(cpu=not uses_gpu()), layout)
        KNOWN_FLOPS[key] = update_flops(task, layout.images, config.optim)
    return KNOWN_FLOPS[key]


def with_compute(command: str, config: Any, pflop: float) -> Any:
    """The training with as many steps as execute so much."""
    an_update = flops_of(command, replace(config, run=replace(config.run, dir="", seed=0)))
    steps = round(1e15 * pflop / an_update)
    return replace(config, run=replace(config.run, steps=steps))


@dataclass(frozen=True)
class Job:
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

    @property
    def divergence(self) -> Path:
        """Where stands that the evaluation, a fine-tuning, diverged."""
        return self.report.with_suffix(f".{DIVERGED}")

    @property
    def weights(self) -> Path:
        """The folder or file that is evaluated."""
        entry, seed, *_ = self.case
        return Path(str(entry.options.get("checkpoint") or entry.encoder).replace("{seed}", str(seed)))

    def arguments(self) -> list[str]:
        """The evaluation's command line."""
        entry, seed, evaluation, dataset = self.case
        if evaluation.command == "masked":  # reads a run's folder: no images, no other settings
            return command_line(evaluation.options | {"encoder": entry.encoder, "out": str(self.report)}, seed)
        options = dataset.options | evaluation.options | entry.options
        options |= {"encoder": entry.encoder, "out": str(self.report)}
        if evaluation.command == "finetune":
            options |= {"run.dir": str(self.folder / "finetuned" / self.case.slug), "run.seed": seed}
            options |= {"init": "random"} if entry.random else {}
        else:
            options |= {"random": entry.random, "seed": seed}
        return command_line(options, seed)

    @cached_property
    def evaluation(self) -> Any:
        """The evaluation's config."""
        return parse(EVALUATIONS[self.case.evaluation.command][0], self.arguments())

    @cached_property
    def requested(self) -> Any:
        """The config of the encoder's training, as the comparison's says it; None: nothing says how."""
        entry = self.case.encoder
        if entry.train is None:
            return None
        options = {"run.seed": self.case.seed} | entry.train_options | {"run.dir": entry.encoder}
        return parse(TRAININGS[entry.train][0], command_line(options, self.case.seed))

    @cached_property
    def training(self) -> Any:
        """The same with the steps that its compute allows. To know these, the images are loaded."""
        entry, config = self.case.encoder, self.requested
        if config is not None and entry.compute is not None:
            config = with_compute(entry.train, config, entry.compute)
        return config and replace(config, optim=config.optim.settled(config.run.steps))

    def provenance(self) -> dict[str, Any]:
        """What the report depends on: settings, but for operational ones, and weights."""
        trained = self.training if self.training and not self.case.encoder.random else None
        return {
            "settings": result_settings(self.evaluation),
            "images": images_at(self.evaluation.data) if hasattr(self.evaluation, "data") else None,
            "trained": trained and result_settings(trained) | {"images": images_at(trained.data)},
            "encoder_sha256": fingerprint(self.weights),
        }

    def today(self, noted: dict[str, Any]) -> dict[str, Any]:
        """A noted provenance in the terms of this release."""
        of_evaluation = completed(noted.get("settings"), self.evaluation)
        return noted | {"settings": of_evaluation, "trained": completed(noted.get("trained"), self.training)}

    def training_today(self, noted: dict[str, Any]) -> dict[str, Any]:
        """Noted settings of the training in the terms of this release."""
        return completed(noted, self.training)

    def found(self) -> dict[str, Any] | None:
        """The report, if there is one of these settings and weights."""
        try:
            done = self.note.is_file() and self.today(json.loads(self.note.read_text())) == self.provenance()
            return json.loads(self.report.read_text()) if done else None
        except (UserError, FileNotFoundError, json.JSONDecodeError):  # no encoder or report there; a torn one
            return None

    def diverged(self) -> bool:
        """Whether the encoder's training or its fine-tuning is known to diverge; random weights were not trained."""
        if self.training and not self.case.encoder.random:
            note = Path(self.training.run.dir) / DIVERGED
            if told(note, result_settings(self.training), self.training_today):
                return True
        return self.divergence.is_file() and told(self.divergence, self.provenance(), self.today) is not None

    def prepare(self) -> None:
        """Train the encoder if the entry says how; a finished run is left as it is, a broken off one goes on."""
        if self.training is None:
            return
        with hold(self.weights, "encoder"):
            pass  # another process may be at it: to know that, nothing need be loaded
        self.check_beginning()
        folder, task = Path(self.training.run.dir), TRAININGS[self.case.encoder.train][1]
        if not is_finished(folder, self.training.run.steps):
            forget_features()
        settings = result_settings(self.training)
        try:
            once(folder / DIVERGED, settings, self.training_today, lambda: train(self.training, task))
        except Diverged as error:
            if self.case.encoder.random:  # it takes no weights from there, but the architecture
                raise UserError(f"{folder} has no encoder to take the architecture of: {error}") from error
            raise

    def check_beginning(self) -> None:
        """UserError where the encoder is there, and was trained on other images or from other weights than today's."""
        before, now = images_of(self.weights) or {}, images_at(self.training.data) or {}
        parts = {part: {"files": of_part["files"]} for part, of_part in now.items()} | first_weights(self.training)
        changed = differences(before, parts)
        if changed:
            raise UserError(
                f"{self.weights} began otherwise than it would now ({'; '.join(changed)}); "
                "remove this folder to train anew, or put those back"
            )

    def carry_out(self) -> None:
        """Train and evaluate what is not done yet.

        Raises:
            Held: another process is at it.
            Diverged: a training did, now or before.
        """
        with hold(self.report.with_suffix(""), "dir"):
            if self.found() is not None:
                return
            self.prepare()
            self.note.unlink(missing_ok=True)  # what it says will not be true of the next report
            evaluate = EVALUATIONS[self.case.evaluation.command][1]
            once(self.divergence, self.provenance(), self.today, lambda: evaluate(self.evaluation))
            write_json(self.note, self.provenance())


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


def collect(jobs: Sequence[Job]) -> Results:
    """What the reports that are there say."""
    results = Results()
    for job in jobs:
        report = job.found()
        about = {"encoder": job.case.encoder.name, "encoder_seed": job.case.seed}
        about |= {"evaluation": job.case.evaluation.name, "dataset": job.case.dataset.name}
        if report is None:
            with suppress(UserError):  # how it would be trained cannot be said: its images are not there
                results.diverged += [about | {"group": job.case.dataset.group}] if job.diverged() else []
            continue
        results.rows += [about | {"group": job.case.dataset.group} | row for row in rows_of(job.case, report)]
        by_depth = report["protocol"].get("dev_accuracy_by_depth", {})
        about["seed"] = 0
        results.curves += [about | {"depth": int(depth), "accuracy": each} for depth, each in by_depth.items()]
    return results


def rows_of(case: Case, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a report; of several depths the one that counts."""
    chosen = report["protocol"].get("chosen_depth")
    key = {"fewshot": "shots", "knn": "neighbours"}.get(case.evaluation.command)
    return [
        {"case": str(result.get("case", result.get(key, ""))), "seed": result.get("seed", 0)}
        | {"accuracy": result["accuracy"]}
        | {name: result[name] for name in ("depth", "lr", "pflop") if name in result}
        for result in report["results"]
        if result.get("depth", chosen) == chosen
    ]


def compute_of(jobs: Sequence[Job], encoders: Iterable[str]) -> dict[str, float]:
    """PFLOP that training these encoders executed, of those that say it; random weights cost none."""
    found: dict[str, float] = {}
    for job in jobs:
        entry = job.case.encoder
        if entry.name not in encoders or entry.name in found:  # another seed's is the same
            continue
        if entry.random:
            found[entry.name] = 0.0
        elif (job.weights / "encoder").is_dir():
            with suppress(UserError):  # a folder from elsewhere
                found[entry.name] = last_scalars(job.weights, "compute/pflop")["compute/pflop"]
    return found


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train what is missing, evaluate everything, write the results.

    Raises:
        UserError: an entry that is none, before anything is done; an evaluation that failed, after all others.
    """
    if PartialState(cpu=not uses_gpu()).num_processes > 1:
        raise UserError("a comparison is one process; start the command several times, and they share the work")
    folder = Path(config.dir)
    questions, cases = plan(config)
    jobs = [Job(case, folder) for case in cases]
    for job in jobs:
        _ = job.evaluation, job.requested  # parsed: a bad setting is named at once
    failures = [] if config.tabulate else share_out(jobs)
    results = collect(jobs)
    for question in questions:
        if question.x in COMPUTE:
            results.compute |= compute_of(jobs, question.encoders or unique(results.rows, "encoder"))
    asked = {key: getattr(config, key) for key in ("encoders", "evaluations", "datasets", "questions")}
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        found = write_findings(folder, questions, results, asked)
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} evaluations failed, such as {failures[0]}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments, prog="python evaluation/compare.py"))


if __name__ == "__main__":
    command(main)

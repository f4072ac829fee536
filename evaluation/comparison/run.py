"""A job of a comparison: one encoder, trained if it must be, under one evaluation on one dataset."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from timm import is_model

from evaluation import contrastive, supervised
from evaluation.comparison.cases import Case, Options, Plan
from evaluation.comparison.tables import Row
from evaluation.config import MaskedDataConfig
from evaluation.frozen.probing import forget_features
from evaluation.frozen.provenance import parent_encoders
from evaluation.frozen.results import write_json
from evaluation.frozen.run_images import find_run, record_images, run_image_settings
from evaluation.registry import EVALUATIONS, Evaluation
from mpp.config import HOW_READ, Config
from mpp.config.parsing import as_command_line, differing, parse, plain, settings, to_yaml
from mpp.data.identity import differences, short_digest
from mpp.data.loader import BatchLayout
from mpp.errors import Diverged, UserError
from mpp.models.descriptions import how_read
from mpp.pretrain import Pretraining
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.lock import hold
from mpp.runtime.weights import fingerprint
from mpp.training.flops import update_flops
from mpp.training.log import last_scalars
from mpp.training.run import first_weights, train
from mpp.training.run_folder import images_of, is_finished
from mpp.training.task import ImageTask

KNOWN_FLOPS: dict[str, int] = {}  # of an update, by command and settings
TRAININGS: dict[str, tuple[type, Callable[..., ImageTask]]] = {
    "pretrain": (Config, Pretraining),
    "supervised": (supervised.SupervisedConfig, supervised.build_task),
    "contrastive": (contrastive.ContrastiveConfig, contrastive.Contrastive),
}


def command_line(options: Options, seed: int) -> list[str]:
    """Settings as a command line; `{seed}` is filled in."""
    words = (
        (key, each.replace("{seed}", str(seed)) if isinstance(each, str) else each) for key, each in options.items()
    )
    return as_command_line(dict(words))


@cache
def parsed(kind: type, arguments: tuple[str, ...]) -> Any:
    """The config of a training. Each of an encoder's cases asks for it, and parsing takes a while."""
    return parse(kind, arguments)


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


def digest_of(content: dict[str, Any]) -> str:
    """Of something that JSON has, in any order."""
    return short_digest([json.dumps(content, sort_keys=True).encode()])


PATHS = ("encoder", "checkpoint", "out", "run.dir")  # of an evaluation's config: where things are, not what they are


def substance(config: Any) -> dict[str, Any]:
    """The settings that a result depends on: those that are not the defaults, not operational, and no paths.

    Who changes a default has to write the earlier one into the configs of published comparisons.
    """
    idle = {key for key, field, _ in settings(config) if field.metadata.get("operational")}
    idle -= {"data.batch_size"} if mixes_a_pass(config) else set()
    return {key: plain(value) for key, value in differing(config).items() if key not in idle | {*PATHS}}


def mixes_a_pass(config: Any) -> bool:
    """Whether it matters how many images share a forward pass: they are mixed, told apart, or lend patches."""
    augment, corruption = getattr(config, "augment", None), getattr(config, "corruption", None)
    mixed = augment and augment.mixup + augment.cutmix > 0
    return mixed or hasattr(config, "contrast") or getattr(corruption, "source", None) == "batch"


@dataclass(frozen=True)
class Job:
    """How a case is evaluated, and where its report is: under a name that says by which settings.

    The report also says of which images and weights it is. With others it does not count.
    """

    case: Case
    folder: Path
    teacher: "Job | None" = None
    """A job of the encoder whose features this one's training predicts, where the comparison has that encoder."""

    @property
    def command(self) -> Evaluation:
        """The evaluation that the registry has by this name."""
        return EVALUATIONS[self.case.evaluation.command]

    @cached_property
    def training_digest(self) -> str | None:
        """What the encoder's training is known by: its settings. None: nothing says how it is trained."""
        entry = self.case.encoder
        if self.requested is None:
            return None
        settings = substance(self.requested)
        if self.teacher is not None:
            settings["objective.teacher"] = self.teacher.training_digest
        return digest_of({"command": entry.train, "settings": settings, "compute": entry.compute})

    @cached_property
    def digest(self) -> str:
        """What a result is known by: the settings of the evaluation and of the encoder's training."""
        entry, seed, evaluation, _ = self.case
        encoder = self.training_digest or fingerprint(self.weights) or entry.encoder
        at = self.weights.name if "checkpoint" in entry.options else None
        at = f"{entry.encoder} {at}" if at and is_model(entry.encoder) else at  # timm's name says how images are scaled
        settings = substance(self.evaluation)
        return digest_of(
            {"command": evaluation.command, "settings": settings, "encoder": encoder, "at": at}
            | {"random": entry.random, "seed": seed}
        )

    @property
    def report(self) -> Path:
        """Where the evaluation's report is."""
        return self.folder / "reports" / f"{self.case.slug}-{self.digest}.json"

    @property
    def weights(self) -> Path:
        """The folder or file that is evaluated."""
        entry, seed, *_ = self.case
        return Path(str(entry.options.get("checkpoint") or entry.encoder).replace("{seed}", str(seed)))

    def arguments(self, out: Path) -> list[str]:
        """The evaluation's command line."""
        entry, seed, evaluation, dataset = self.case
        if self.command.kind == "masked patches":  # reads a run's folder: no images, no other settings
            return command_line(evaluation.options | {"encoder": entry.encoder, "out": str(out)}, seed)
        options = self.how_read() | dataset.options | evaluation.options | entry.options
        options |= {"encoder": entry.encoder, "out": str(out)}
        if self.command.kind == "fine-tuning":
            options |= {"run.dir": str(self.folder / "finetuned" / out.stem), "run.seed": seed}
            options |= {"init": "random"} if entry.random else {}
        else:
            options |= {"random": entry.random, "seed": seed}
        return command_line(options, seed)

    def how_read(self) -> Options:
        """The settings by which the files were read that the encoder learned from: others are read in the same way."""
        encoder, read = str(self.weights), {}
        run = find_run(encoder)
        if self.requested is not None:
            read = self.requested.data.how_read()
        elif run is not None:
            read = {name: value for name, value in run_image_settings(run).items() if name in HOW_READ}
        else:
            with suppress(UserError):  # there is none, which its evaluation says
                read = how_read(encoder)
        return {f"data.{name}": value for name, value in read.items()}

    @cached_property
    def evaluation(self) -> Any:
        """The evaluation's config."""
        return self.writing_to(Path(f"{self.case.slug}.json"))

    def writing_to(self, out: Path) -> Any:
        """The evaluation's config with the place of its report."""
        return parse(self.command.config_class(), self.arguments(out))

    @cached_property
    def requested(self) -> Any:
        """The config of the encoder's training, as the comparison's says it; None: nothing says how."""
        entry = self.case.encoder
        if entry.train is None:
            return None
        options = {"run.seed": self.case.seed} | entry.train_options | {"run.dir": entry.encoder}
        return parsed(TRAININGS[entry.train][0], tuple(command_line(options, self.case.seed)))

    @cached_property
    def training(self) -> Any:
        """The same with the steps that its compute allows. To know these, the images are loaded."""
        entry, config = self.case.encoder, self.requested
        if config is not None and entry.compute is not None:
            config = with_compute(entry.train, config, entry.compute)
        return config and replace(config, optim=config.optim.settled(config.run.steps))

    def looked_at(self) -> dict[str, Any]:
        """Which images and weights the report would be of, now."""
        trained = self.requested if not self.case.encoder.random else None
        data = getattr(self.evaluation, "data", None)
        masked = isinstance(data, MaskedDataConfig) and data.path is not None
        masks = {"masks": record_images(replace(data, image_column=data.mask_column))} if masked else {}
        return masks | {
            "digest": self.digest,
            "images": record_images(data) if data is not None else None,
            "trained_on": trained and record_images(trained.data),
            "weights": fingerprint(self.weights),
        }

    def found(self) -> dict[str, Any] | None:
        """The report, if there is one of these settings, images and weights."""
        with suppress(UserError, FileNotFoundError, json.JSONDecodeError):  # no encoder or report there; a torn one
            report = json.loads(self.report.read_text(encoding="utf-8"))
            return report if report.get("comparison") == self.looked_at() else None
        return None

    @property
    def divergence(self) -> Path:
        """Where stands that the encoder's training diverged: by these settings it would again, in the same update."""
        return self.folder / "reports" / f"training-{self.training_digest}.json"

    def prepare(self) -> None:
        """Train the encoder if the entry says how; a finished run is left as it is, a broken off one goes on.

        Its teacher comes first.

        Raises:
            Held: another process is at it, or at its teacher.
            Diverged: now or before.
        """
        if self.teacher is not None:
            self.teacher.prepare()
        if self.requested is None:
            return
        with hold(self.weights, "encoder"):
            pass  # another process may be at it: to know that, nothing need be loaded
        self.check_beginning()
        folder, task = Path(self.training.run.dir), TRAININGS[self.case.encoder.train][1]
        if not is_finished(folder, self.training.run.steps):
            forget_features()
        try:
            if self.divergence.is_file():
                message = json.loads(self.divergence.read_text(encoding="utf-8"))["diverged"]
                raise Diverged(f"{message} ({self.divergence} says so; delete it to try again)")
            train(self.training, task)
        except Diverged as error:
            if not self.divergence.is_file():
                write_json(self.divergence, {"diverged": str(error)})
            if self.case.encoder.random:  # it takes no weights from there, but the architecture
                raise UserError(f"{folder} has no encoder to take the architecture of: {error}") from error
            raise

    def check_beginning(self) -> None:
        """UserError where the encoder is there, and was trained on other images or from other weights than today's."""
        before, now = images_of(self.weights) or {}, record_images(self.training.data) or {}
        parts = {part: {"files": of_part["files"]} for part, of_part in now.items()} | first_weights(self.training)
        for part, of_part in now.items():
            was = before.get(part, {})
            if was.get("labels") and was.get("images") == of_part["images"]:  # all of them were learned from
                parts[part]["labels"] = of_part["labels"]
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
            Diverged: a training did.
        """
        with hold(self.report.with_suffix(""), "dir"):
            if self.found() is not None:
                return
            self.prepare()
            try:
                self.command.run(self.own(self.writing_to(self.report)))
                report = json.loads(self.report.read_text(encoding="utf-8"))
            except Diverged as error:  # fine-tuning
                write_json(self.report, {"diverged": str(error), "comparison": self.looked_at()})
                raise
            write_json(self.report, report | {"comparison": self.looked_at()})

    def own(self, config: Any) -> Any:
        """The config with a folder for these images and weights alone: a finished fine-tuning is not one of others."""
        if self.command.kind != "fine-tuning":
            return config
        folder = f"{config.run.dir}-{digest_of(self.looked_at())}"
        return replace(config, run=replace(config.run, dir=folder))

    def never_trained(self) -> bool:
        """Whether the training diverged of the encoder, or of who teaches it."""
        taught = self.teacher is not None and self.teacher.never_trained()
        return taught or (self.divergence.is_file() and not self.case.encoder.random)

    def rows(self) -> list[Row]:
        """The results that the report has; none where there is no report."""
        entry, seed, evaluation, dataset = self.case
        report = {"diverged": True} if self.never_trained() else self.found()
        if report is None:
            return []
        pflop = self.training_pflop()
        about = {"encoder": entry.name, "encoder_seed": seed, "evaluation": evaluation.name, "dataset": dataset.name}
        about |= {"group": dataset.group, "digest": self.digest} | ({} if pflop is None else {"training_pflop": pflop})
        if "diverged" in report:
            return [about | {"kind": "diverged"}]
        by_depth, ranks = (report["protocol"].get(name, {}) for name in ("dev_accuracy_by_depth", "rank_by_depth"))
        dev = [{"kind": "dev", "seed": 0, "depth": int(depth), "accuracy": each} for depth, each in by_depth.items()]
        ranks = [{"kind": "rank", "seed": 0, "depth": int(depth), "rank": each} for depth, each in ranks.items()]
        tuned = report["results"] if self.command.kind == "fine-tuning" else []
        dev += [{"kind": "dev", "seed": 0, "accuracy": of["dev_accuracy"]} for of in tuned if "dev_accuracy" in of]
        return [about | row for row in (*rows_of(self.case, report), *dev, *ranks)]

    def training_pflop(self) -> float | None:
        """PFLOP executed to train the encoder and what it stands on; 0 of random weights; None: nothing says so."""
        if self.case.encoder.random:
            return 0.0
        with suppress(UserError):  # no run: a folder from elsewhere, or timm's name
            return executed(self.weights)
        return None


def teacher_of(config: Any) -> Path | None:
    """The run folder of the frozen teacher whose features a training predicts."""
    objective = getattr(config, "objective", None)
    teacher = objective and objective.frozen_teacher and (objective.teacher_checkpoint or objective.teacher)
    return teacher and (find_run(teacher) or (None if is_model(teacher) else Path(teacher)))


def executed(run: Path) -> float:
    """PFLOP that a run, its teacher and the run that it began from executed; UserError where nothing says so."""
    own, others = last_scalars(run, "compute/pflop")["compute/pflop"], parent_encoders(run)
    if is_model(others.get("objective.teacher", "")):
        del others["objective.teacher"]  # published weights, which nobody counts
    return own + sum(executed(find_run(each) or Path(each)) for each in others.values())


def rows_of(case: Case, report: dict[str, Any]) -> list[Row]:
    """The results of a report on test images; of several depths the one that counts."""
    chosen = report["protocol"].get("chosen_depth")
    key = EVALUATIONS[case.evaluation.command].case_key
    return [
        {"kind": "test", "case": str(result.get("case", result.get(key, ""))), "seed": result.get("seed", 0)}
        | {"accuracy": result["accuracy"]}
        | {name: result[name] for name in ("depth", "lr", "pflop") if name in result}
        for result in report["results"]
        if result.get("depth", chosen) == chosen
    ]


def jobs_of(asked: Plan, folder: Path) -> list[Job]:
    """The jobs of all cases; where an encoder of the comparison teaches that of a job, the job knows which.

    Raises:
        UserError: an encoder is its own teacher.
    """
    jobs, unasked = ([Job(case, folder) for case in cases] for cases in (asked.cases, asked.unasked))
    trained = {job.weights: job for job in (*unasked, *jobs) if job.requested is not None}

    def with_teacher(job: Job, taught: tuple[Path, ...] = ()) -> Job:
        if job.weights in taught:
            raise UserError(f"{job.weights} would be taught by itself; objective.teacher must be another encoder")
        teacher = trained.get(teacher_of(job.requested))
        return replace(job, teacher=teacher and with_teacher(teacher, (*taught, job.weights)))

    return [with_teacher(job) for job in jobs]

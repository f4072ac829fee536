"""One comparison: encoders x evaluations x datasets, into one table.

    python evaluation/compare.py --config configs/compare/birds.yaml

Encoders that are not there yet are trained first. Resumable: what is done, by the same settings, is not done again.
"""

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from accelerate import PartialState

from evaluation import fewshot, finetune, knn, linear, supervised
from evaluation.figures import DPI, plot_bars
from evaluation.reports import percent, table, write_json
from mpp import pretrain
from mpp.config import Config, require
from mpp.encoder import fingerprint
from mpp.launch import command
from mpp.parsing import parse
from mpp.training import train

Options = dict[str, Any]

TRAININGS: dict[str, tuple[type, Callable]] = {
    "pretrain": (Config, lambda config: train(config, pretrain.Pretraining)),
    "supervised": (supervised.SupervisedConfig, lambda config: train(config, supervised.Supervised)),
}
EVALUATIONS: dict[str, tuple[type, Callable[[Any], dict]]] = {
    "fewshot": (fewshot.FewshotConfig, fewshot.run),
    "knn": (knn.KnnConfig, knn.run),
    "linear": (linear.LinearConfig, linear.run),
    "finetune": (finetune.FinetuneConfig, finetune.run),
}


@dataclass(frozen=True)
class EncoderEntry:
    """A row of the table."""

    name: str
    """What the table calls it."""
    encoder: str
    """Folder, timm name or floor; `{seed}` stands for the seed."""
    random: bool
    """The folder's architecture with random weights."""
    options: Options
    """Further settings of every evaluation, such as {representation: class}."""
    seeds: tuple[int, ...]
    """Encoders that differ in their seed alone: what the spread is over."""
    train: Literal["pretrain", "supervised"] | None
    """The command that makes it, where it is not there."""
    train_options: Options
    """Settings of that command."""


@dataclass(frozen=True)
class EvaluationEntry:
    """A way to judge an encoder."""

    name: str
    """What the table calls it."""
    command: Literal["fewshot", "knn", "linear", "finetune"]
    """The command that judges."""
    options: Options
    """Its settings."""


@dataclass(frozen=True)
class DatasetEntry:
    """Labelled images."""

    name: str
    """What the table calls it."""
    options: Options
    """Settings of every evaluation on it, such as {data.path: ...}."""
    group: str | None = None
    """Group whose mean is reported too (VTAB: natural, specialised, structured)."""


@dataclass(frozen=True)
class CompareConfig:
    """A comparison of encoders."""

    dir: str = "runs/compare"
    """Folder of results.json, table.md, the plot, and each evaluation's report."""
    encoders: tuple[dict[str, Any], ...] = ()
    """Rows: {name, encoder, random, options, seeds, train, train_options}; name and encoder are needed."""
    evaluations: tuple[dict[str, Any], ...] = ()
    """{name, command, options}: command is fewshot, knn, linear or finetune."""
    datasets: tuple[dict[str, Any], ...] = ({"name": "birds"},)
    """{name, options, group}: options have data.path and the like."""

    def __post_init__(self):
        for key in ("encoders", "evaluations", "datasets"):
            require(len(getattr(self, key)) > 0, key, "empty", "a list in a --config file; see configs/compare")


class Case(NamedTuple):
    """One evaluation of one encoder on one dataset."""

    encoder: EncoderEntry
    seed: int
    evaluation: EvaluationEntry
    dataset: DatasetEntry


def entries(kind: type, values: Sequence[dict[str, Any]], key: str, **defaults: Any) -> list:
    """Entries of the config as their dataclass; ValueError where they are not that."""
    made = []
    for value in values:
        try:
            made.append(kind(**copy.deepcopy(defaults) | value))
        except TypeError as error:
            raise ValueError(f"{key}: {value} is not {{{', '.join(kind.__dataclass_fields__)}}}: {error}") from None
    names = [entry.name for entry in made]
    require(len(set(names)) == len(names), f"{key}: names", names, "all different")
    return made


def words(options: Options, seed: int) -> list[str]:
    """Settings as a command line's words; `{seed}` is filled in."""
    filled = {
        key: value.replace("{seed}", str(seed)) if isinstance(value, str) else value for key, value in options.items()
    }
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in filled.items()]


def prepare(entry: EncoderEntry, seed: int) -> None:
    """Train the encoder if the entry says how; a finished run is left as it is, a broken off one goes on."""
    if entry.train is None:
        return
    config_class, run = TRAININGS[entry.train]
    options = {"run.seed": seed} | entry.train_options | {"run.dir": entry.encoder}
    run(parse(config_class, words(options, seed)))


def evaluate(case: Case, folder: Path) -> dict[str, Any]:
    """The report of one case, made now or by an earlier call with the same settings."""
    entry, seed, evaluation, dataset = case
    slug = "-".join([entry.name, str(seed), evaluation.name, dataset.name]).replace(" ", "_").replace("/", "_")
    path = folder / "reports" / f"{slug}.json"
    options = dataset.options | evaluation.options | entry.options | {"encoder": entry.encoder, "out": str(path)}
    if evaluation.command == "finetune":
        options |= {"run.dir": str(folder / "finetuned" / slug), "run.seed": seed}
        options |= {"init": "random"} if entry.random else {}
    else:
        options |= {"random": entry.random, "seed": seed}
    arguments = words(options, seed)
    weights = Path(str(options.get("checkpoint") or entry.encoder).replace("{seed}", str(seed)))
    made_of = {"arguments": arguments, "encoder_sha256": fingerprint(weights)}
    done = path.with_suffix(".done.json")
    if done.is_file() and json.loads(done.read_text()) == made_of:
        return json.loads(path.read_text())
    config_class, run = EVALUATIONS[evaluation.command]
    report = run(parse(config_class, arguments))
    write_json(done, made_of)
    return report


def rows_of(case: Case, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a report, each with what it is of; of several depths the one that counts."""
    chosen = report["protocol"].get("chosen_depth")
    about = {"encoder": case.encoder.name, "encoder_seed": case.seed, "evaluation": case.evaluation.name}
    about |= {"dataset": case.dataset.name, "group": case.dataset.group}
    key = {"fewshot": "shots", "knn": "neighbours"}.get(case.evaluation.command)
    return [
        about
        | {"case": str(result.get("case", result.get(key, ""))), "seed": result.get("seed", 0)}
        | {"accuracy": result["accuracy"]}
        for result in report["results"]
        if result.get("depth", chosen) == chosen
    ]


def spread(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and standard deviation over seeds, of the encoder and of the draws; over datasets only the mean is taken."""
    of_seeds: dict[tuple, list[float]] = {}
    for row in rows:
        of_seeds.setdefault((row["encoder_seed"], row["seed"]), []).append(row["accuracy"])
    values = [np.mean(each) for each in of_seeds.values()]
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "count": len(values)}


def columns_of(results: list[dict[str, Any]]) -> dict[str, Callable[[dict[str, Any]], bool]]:
    """Headings and which results they are of: each dataset's cases, then the means over groups of datasets."""
    several = len({row["dataset"] for row in results}) > 1
    columns: dict[str, Callable] = {}
    for dataset, evaluation, case in dict.fromkeys((r["dataset"], r["evaluation"], r["case"]) for r in results):
        name = " ".join(part for part in (dataset if several else "", evaluation, case) if part)
        key = (dataset, evaluation, case)
        columns[name] = lambda row, key=key: (row["dataset"], row["evaluation"], row["case"]) == key
    for group, evaluation, case in dict.fromkeys(
        (r["group"], r["evaluation"], r["case"]) for r in results if r["group"]
    ):
        name = " ".join(part for part in (f"mean {group}", evaluation, case) if part)
        columns[name] = lambda row, key=(group, evaluation, case): (row["group"], row["evaluation"], row["case"]) == key
    return columns


def comparison_table(results: list[dict[str, Any]]) -> tuple[str, dict[str, dict[str, dict[str, float]]]]:
    """The Markdown table and its numbers: encoder -> column -> mean, standard deviation, count."""
    columns, numbers = columns_of(results), {}
    for encoder in dict.fromkeys(row["encoder"] for row in results):
        mine = [row for row in results if row["encoder"] == encoder]
        cells = {name: [row for row in mine if belongs(row)] for name, belongs in columns.items()}
        numbers[encoder] = {name: spread(rows) for name, rows in cells.items() if rows}
    body = [[name, *(percent(of[c]) if c in of else "-" for c in columns)] for name, of in numbers.items()]
    return table(["accuracy (%)", *columns], body), numbers


def compare(config: CompareConfig) -> dict[str, Any]:
    """Train what is missing, evaluate everything, write the results."""
    if PartialState().num_processes > 1:
        raise ValueError("a comparison is one process; train its encoders with `accelerate launch` first")
    folder = Path(config.dir)
    plain = dict(random=False, options={}, seeds=(0,), train=None, train_options={})
    encoders = entries(EncoderEntry, config.encoders, "encoders", **plain)
    evaluations = entries(EvaluationEntry, config.evaluations, "evaluations", options={})
    dataset_entries = entries(DatasetEntry, config.datasets, "datasets", options={})
    for evaluation in evaluations:
        require(evaluation.command in EVALUATIONS, "evaluations: command", evaluation.command, " or ".join(EVALUATIONS))
    for entry in encoders:
        require(entry.train in (None, *TRAININGS), "encoders: train", entry.train, " or ".join(TRAININGS))
    results: list[dict[str, Any]] = []
    for entry in encoders:
        for seed in entry.seeds:
            prepare(entry, seed)
            for evaluation, dataset in itertools.product(evaluations, dataset_entries):
                if evaluation.command == "finetune" and entry.encoder.startswith("floor:"):
                    continue  # a floor has no weights
                case = Case(entry, seed, evaluation, dataset)
                results += rows_of(case, evaluate(case, folder))
    text, numbers = comparison_table(results)
    write_json(folder / "results.json", {"results": results, "summary": numbers})
    (folder / "table.md").write_text(text + "\n")
    plot_bars(numbers).savefig(folder / "comparison.png", dpi=DPI)
    print(f"\n{text}\nwrote {folder}: results.json, table.md, comparison.png, reports/")
    return {"results": results, "summary": numbers}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare as the command line, or `arguments`, say."""
    compare(parse(CompareConfig, arguments, prog="python evaluation/compare.py"))


if __name__ == "__main__":
    command(main)

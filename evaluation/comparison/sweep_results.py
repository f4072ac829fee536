"""Results of a sweep: its trials sorted by dev accuracy, a plot, and next steps."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from evaluation.comparison.encoders import with_seed
from evaluation.comparison.remarks import describe_other_tasks
from evaluation.comparison.reports import ResultRow, describe_missing_seeds, kind_of_scores, name_of_score
from evaluation.comparison.rows import MASKED_BASELINES, count_seeds, grouped, of_encoder, of_kind
from evaluation.comparison.tables import Cell, score_in_words, score_text
from evaluation.comparison.trials import SweepPlan, Trial, command_options, parsed_options
from evaluation.config import SweepConfig
from evaluation.figures.charts import Curves, ScoreAxis, plot_bars, plot_lines
from evaluation.figures.markdown import markdown_table
from evaluation.figures.style import write_plot
from evaluation.frozen.results import score_axis, write_json
from evaluation.metrics.scoring import LabelKind, rank_of, summarize_values
from evaluation.pages.about import recorded_versions
from mpp.config import as_words
from mpp.config.imports import import_words
from mpp.config.parsing import as_command_line
from mpp.errors import UserError
from mpp.runtime.files import write_complete
from mpp.training.run_folder import saved_settings

LONGER = 4
"""Length of the run that the last line proposes, in lengths of a trial."""


class TrialResult(NamedTuple):
    """A trial with its accuracies."""

    trial: Trial
    cells: dict[str, Cell]
    """Evaluation -> its accuracy: mean, std and count over seeds; `diverged`, the number of seeds that did.

    `score` is its name where it is another figure, such as R2.
    """
    pflop: float | None
    """PFLOP that its training executed; None: unknown."""
    device_hours: float | None
    """Hours times devices of its training; None: unknown."""
    steps: int | None
    """Steps of its training; None: its run is not here."""
    chosen_by: str
    """The evaluation whose accuracy chooses."""

    @property
    def cell(self) -> Cell:
        """The accuracy that chooses; empty: there is none yet, perhaps of other evaluations."""
        return self.cells.get(self.chosen_by, {})


def write_sweep(config: SweepConfig, plan: SweepPlan, rows: list[ResultRow]) -> str:
    """Write results.json, table.md and the plot, print the table and the next steps, and return that text."""
    folder = Path(config.dir)
    ranked = ranking(plan, rows)
    remarks = [*describe_missing_seeds(plan.cases, rows), *describe_other_tasks(rows)]
    lines = [trials_table(ranked), *remarks, *advice(config, plan, ranked)]
    text = "\n\n".join(lines)
    trials = []
    for result in ranked:
        entry = result.trial.entry
        about = {"name": entry.name, "settings": result.trial.values, "encoder": entry.encoder}
        trials.append(about | {"accuracies": result.cells, "steps": result.steps})
    content = {"trials": trials, "results": rows, "versions": recorded_versions(), "settings": asdict(config)}
    write_json(folder / "results.json", content)
    write_complete(folder / "table.md", f"{text}\n")
    files = ["results.json", "table.md"]
    figure = plot_sweep(ranked)
    if figure is not None:
        files += write_plot(figure, folder, "sweep")
    print(f"\n{text}\n\nwrote {folder}: {', '.join(files)}; see reports/ and trials/")
    return text


def ranking(plan: SweepPlan, rows: list[ResultRow]) -> list[TrialResult]:
    """The trials that have results, the best first; those of which a seed diverged are last."""
    results = [result_of(trial, of_encoder(rows, trial.entry.name), plan.chosen_by) for trial in plan.trials]
    present = [result for result in results if result.cells]
    return sorted(present, key=lambda result: ("diverged" in result.cell, -rank_of(result.cell.get("mean"))))


def result_of(trial: Trial, rows: list[ResultRow], chosen_by: str) -> TrialResult:
    """A trial with the accuracies that its rows have.

    Args:
        chosen_by: see `TrialResult`.
    """
    cells = {}
    for (evaluation,), of_evaluation in grouped(rows, "evaluation").items():
        scored = [row for row in of_evaluation if row["kind"] in ("validation", "test")]
        accuracies = accuracies_by_seed(scored)
        cell: Cell = summarize_values(list(accuracies.values())) if accuracies else {}
        diverged = count_seeds(of_kind(of_evaluation, "diverged"))
        if diverged:
            cell["diverged"] = diverged
        cell |= name_of_score(kind_of_scores(scored))
        if cell:
            cells[evaluation] = cell
    run = Path(with_seed(trial.entry.encoder, trial.entry.seeds[0]))
    steps = saved_settings(run)["run"].get("steps")
    costs = mean_of(rows, "training_pflop"), mean_of(rows, "training_device_hours")
    return TrialResult(trial, cells, *costs, steps, chosen_by)


def mean_of(rows: list[ResultRow], key: str) -> float | None:
    """Mean of a number that rows have; None: none has it."""
    known = [row[key] for row in rows if key in row]
    return float(np.mean(known)) if known else None


def accuracies_by_seed(rows: list[ResultRow]) -> dict[int, float]:
    """Seed of the training -> accuracy, the mean over the cases and draws of its evaluation."""
    by_seed = {}
    for (seed,), of_seed in grouped(rows, "encoder_seed").items():
        measured = [row["accuracy"] for row in of_seed if row["case"] not in MASKED_BASELINES]
        by_seed[seed] = float(np.mean(measured))
    return by_seed


def trials_table(ranked: Sequence[TrialResult]) -> str:
    """The trials as a Markdown table."""
    if not ranked:
        return "no results yet"
    keys = list(ranked[0].trial.values)
    evaluations = list(dict.fromkeys(name for result in ranked for name in result.cells))
    scores = [f"{name}, dev {kind_of_trials(ranked, name).score_title}" for name in evaluations]
    has_device_hours = any(result.device_hours is not None for result in ranked)
    headings = ["run", *keys, *scores, "steps", "PFLOP"]
    if has_device_hours:
        headings.append("device-hours")
    body = []
    for result in ranked:
        values = [as_words(result.trial.values[key]) for key in keys]
        cells = [result.cells.get(name, {}) for name in evaluations]
        accuracies = [score_text(cell) if cell else "-" for cell in cells]
        steps = "-" if result.steps is None else str(result.steps)
        line = [run_name(result.trial), *values, *accuracies, steps, cost_text(result.pflop)]
        if has_device_hours:
            line.append(cost_text(result.device_hours))
        body.append(line)
    return markdown_table(headings, body)


def cost_text(cost: float | None) -> str:
    """A cost as the table has it."""
    return "-" if cost is None else f"{cost:.3g}"


def kind_of_trials(results: Sequence[TrialResult], evaluation: str) -> LabelKind:
    """The kind of label whose score an evaluation has."""
    return kind_of_scores(result.cells.get(evaluation, {}) for result in results)


def run_name(trial: Trial) -> str:
    """The folder of a trial's run in that of the sweep; of several seeds, `{seed}` stands for them."""
    encoder, seeds = trial.entry.encoder, trial.entry.seeds
    folder = Path(with_seed(encoder, seeds[0]) if len(seeds) == 1 else encoder)
    return f"{folder.parent.name}/{folder.name}"


# --- advice ---


def advice(config: SweepConfig, plan: SweepPlan, ranked: Sequence[TrialResult]) -> list[str]:
    """Sentences below the table: limits of the choice, trials to add, and the next command."""
    evaluated = [result for result in ranked if result.cell]
    missing = len(plan.trials) - len(evaluated)
    lines = [f"{missing} of {len(plan.trials)} trials have no result yet."] if missing else []
    complete = [result for result in evaluated if "diverged" not in result.cell]
    if evaluated and not complete:
        lines.append("Every trial diverged: lower optim.lr.")
    known = [result for result in complete if not math.isnan(result.cell["mean"])]
    if not known:
        if complete:
            lines.append("No trial has a score: these images have none.")
        return lines
    best = known[0]
    lines += edges(config, plan, best)
    if len(known) > 1:
        score = kind_of_trials(known, plan.chosen_by).score_heading
        lines.append(describe_lead(best, known[1]))
        lines.append(
            f"The best of {len(known)} trials was chosen by this {score}, which is therefore too high "
            "(the winner's curse): measure the chosen settings again, with other seeds, on the test images."
        )
    lines.append(next_training(config, best))
    return lines


def edges(config: SweepConfig, plan: SweepPlan, best: TrialResult) -> Iterator[str]:
    """A sentence for each setting whose best value is the smallest or the largest that was tried."""
    for key, value in best.trial.values.items():
        tried = sorted_numbers(trial.values[key] for trial in plan.trials)
        if len(tried) < 2 or value not in (tried[0], tried[-1]):
            continue
        further = next_value(tried if value == tried[-1] else tried[::-1])
        if further is not None and is_allowed(config, best, key, further):
            yield f"The best is at the edge of {key} ({as_words(value)}): add {as_words(further)}."


def sorted_numbers(values: Iterator[Any]) -> list[float]:
    """The different values in ascending order; none where they are no numbers."""
    different = list(values)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in different):
        return []
    return sorted(set(different))


def next_value(values: Sequence[float]) -> float | None:
    """The value after the last one of a sequence, at the same ratio; with a 0 among them, at the same distance."""
    before, last = values[-2:]
    further = last * last / before if before * last > 0 else 2 * last - before
    if isinstance(before, int) and isinstance(last, int):
        whole = round(further)
        return None if whole == last else whole
    return float(f"{further:.3g}")


def is_allowed(config: SweepConfig, best: TrialResult, key: str, value: float) -> bool:
    """Whether a training takes this value instead of the best one."""
    try:
        parsed_options(config.train, best.trial.entry.train_options | {key: value})
    except UserError:
        return False
    return True


def describe_lead(best: TrialResult, second: TrialResult) -> str:
    """Lead of the best trial over the second, compared with the spread over seeds."""
    kind = kind_of_scores([best.cell])
    lead = best.cell["mean"] - second.cell["mean"]
    lead_in_words = kind.text_of_number(kind.score, lead) + (" points" if kind.sign else "")
    both = f"{best.trial.entry.name} {score_in_words(best.cell)}, {second.trial.entry.name} "
    both += score_in_words(second.cell)
    of_one_seed = [result.trial for result in (best, second) if result.cell["count"] < 2]
    if of_one_seed:
        points = ", ".join(point_with_new_seed(trial) for trial in of_one_seed if len(trial.entry.seeds) == 1)
        way = f": add `points: [{points}]`" if points else ""  # otherwise further seeds have no result yet
        return f"The best is {lead_in_words} ahead of the second ({both}). One seed gives no spread over seeds{way}."
    spread = max(best.cell["std"], second.cell["std"])
    if lead <= spread:
        return f"The best is within the spread of the second ({both}): these seeds do not tell them apart."
    return f"The best is ahead of the second by more than the spread over seeds ({both})."


def point_with_new_seed(trial: Trial) -> str:
    """A trial at one more seed, as a sweep's file has it."""
    point = {**trial.values, "run.seed": max(trial.entry.seeds) + 1}
    return "{" + ", ".join(f"{key}: {as_words(value)}" for key, value in point.items()) + "}"


def next_training(config: SweepConfig, best: TrialResult) -> str:
    """The command that trains longer with the best settings, on all training images."""
    options = command_options(config, best.trial) | {"run.dir": f"{config.dir}_best"}
    words = "next"
    if best.steps is None and config.compute is not None:  # a published result has its compute, not its steps
        words = f"next, with run.steps for {LONGER} times {config.compute:g} PFLOP"
        options.pop("run.steps", None)
    else:
        length = best.steps or parsed_options(config.train, options).run.steps
        options["run.steps"] = LONGER * length
    return f"{words}: {shlex.join(['mpp', config.train, *import_words(), *as_command_line(options)])}"


# --- plot ---


def plot_sweep(ranked: Sequence[TrialResult]) -> Figure | None:
    """Accuracy against the setting with the most values, a line for each choice of the others; None: no results.

    Bars, where no setting has several positive numbers.
    """
    scored = [result for result in ranked if any("mean" in cell for cell in result.cells.values())]
    if not scored:
        return None
    x_of_lines = most_varied_setting(scored)
    if x_of_lines is None:
        evaluations = dict.fromkeys(name for result in scored for name in result.cells)
        score_axes = {name: dev_axis(scored, name) for name in evaluations}
        return plot_bars({result.trial.entry.name: result.cells for result in scored}, score_axes)
    curves: Curves = {}
    for result in sorted(scored, key=lambda result: result.trial.values[x_of_lines]):
        others = [f"{key}={as_words(value)}" for key, value in result.trial.values.items() if key != x_of_lines]
        for evaluation, cell in result.cells.items():
            if "mean" in cell:
                line = curves.setdefault(evaluation, {}).setdefault(" ".join(others) or evaluation, {})
                line[result.trial.values[x_of_lines]] = cell
    return plot_lines(curves, x_of_lines, {name: dev_axis(scored, name) for name in curves})


def dev_axis(results: Sequence[TrialResult], evaluation: str) -> ScoreAxis:
    """The axis of an evaluation's score on the dev split."""
    return score_axis(kind_of_trials(results, evaluation), "dev {}")


def most_varied_setting(results: Sequence[TrialResult]) -> str | None:
    """The setting with the most values, all of them positive numbers; None: none has two."""
    counts = {}
    for key in results[0].trial.values:
        numbers = sorted_numbers(result.trial.values[key] for result in results)
        if len(numbers) > 1 and numbers[0] > 0:
            counts[key] = len(numbers)
    return max(counts, key=counts.get) if counts else None

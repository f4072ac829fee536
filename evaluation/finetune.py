"""Fine-tuning (paper, sections 3.2 and 4.1, Table 4): the head removed, one zero-initialised linear layer, SGD.

    accelerate launch evaluation/finetune.py --encoder runs/birds
    accelerate launch evaluation/finetune.py --encoder runs/birds --init random --run.dir runs/scratch

Learning rates are compared on a dev split held out of train; the best one is then used on all of train, and the
held-out split is used once, at the end. Each of these is a run of its own below `run.dir`, and resumes like any
other. Where `--data.train_images` leaves training images out, the last run is evaluated on up to 5,000 of these, too:
choose between fine-tunings by this dev accuracy.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator, PartialState
from torch import nn

from evaluation.config import FinetuneConfig, OneRunConfig
from evaluation.figures.markdown import markdown_table, without_empty_columns
from evaluation.frozen.encoder import FrozenEncoder, load_frozen_encoder
from evaluation.frozen.features import load_labelled
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import (
    FINETUNING_REPORT,
    LoadedSplits,
    is_colour_baseline,
    note_other_images,
    parse_and_load,
)
from evaluation.metrics.scoring import (
    KINDS,
    add_figures,
    best_choice,
    describe_labels,
    kind_of_report,
    kind_of_results,
)
from evaluation.supervision.classification import HEAD_LEFT_OUT, Classification, score_of_run
from evaluation.supervision.heads import HeadedEncoder, zero_head
from mpp.config import flatten, nested, rebuild, require
from mpp.data.loader import BatchLayout
from mpp.data.overview import FEW_TEST_IMAGES
from mpp.errors import Diverged, Unavailable
from mpp.models.plain import checkpoint_activations
from mpp.runtime.messages import counted, note
from mpp.runtime.start import run_main
from mpp.runtime.weights import fingerprint
from mpp.training.history import DEVICE_HOURS, PFLOP
from mpp.training.log import Tracker, last_scalars
from mpp.training.run import train, write_run_page
from mpp.training.run_folder import saved_settings

MAX_LEFT_OUT = 5000
"""Maximum number of left-out training images that a run is evaluated on, besides the held-out ones."""


DIVERGED = -math.inf
"""Score on the dev split of a learning rate that diverges; the report has null."""


class Finetuning(Classification):
    """The task: classify, from an encoder's weights."""

    def __init__(
        self,
        config: OneRunConfig,
        accelerator: Accelerator,
        layout: BatchLayout,
        loaded: LoadedSplits | None = None,
    ):
        left_out_images = min(MAX_LEFT_OUT, config.data.eval_images)
        train, test, left_out = load_labelled(
            config.data, accelerator, config.weights, left_out_images, loaded, task=config.task
        )
        splits = train.cut(config.dev_fraction, config.data.eval_seed, "dev") if config.on_dev else (train, test)
        super().__init__(accelerator, layout, config.run, config.data, config.augment, splits, config.loss)
        if config.init == "random":
            self.method = f"Trained with labels, from random weights; {HEAD_LEFT_OUT}"
        else:
            self.kind = "encoder fine-tuned with labels"
            weights = f" with the weights {config.checkpoint}" if config.checkpoint else ""
            self.method = f"Fine-tuned with labels, from {config.encoder}{weights}; {HEAD_LEFT_OUT}"
        frozen = self.load(config)
        if config.weights == config.encoder:  # of other weights it is unknown
            self.licence = frozen.model.pretrained_cfg.get("license")
        self.img_size = frozen.img_size
        encoder = frozen.model.requires_grad_(True)
        if config.activation_checkpointing:
            checkpoint_activations(encoder, "activation_checkpointing")
        head = self.learner.complete(zero_head(encoder.head_hidden_size, self.learner.outputs))
        self.model = HeadedEncoder(encoder, head, config.pooling, frozen.normalize.mean, frozen.normalize.std)
        self.refuse_single_images()
        self.held_out_views = self.fixed_view_loader.add(self.views(self.held_out))
        self.left_out_views = None
        left_out = left_out.select(np.flatnonzero(self.learner.knows(left_out.labels)))
        if len(left_out) > 0 and not config.on_dev:
            self.left_out_views = self.fixed_view_loader.add(self.views(left_out))

    def load(self, config: OneRunConfig) -> FrozenEncoder:
        """The encoder that training begins from, and its input."""
        allowed = "a model: a colour baseline has no weights"
        require(not is_colour_baseline(config.encoder), "encoder", config.encoder, allowed)
        frozen = load_frozen_encoder(
            config.encoder,
            config.checkpoint,
            random=config.init == "random",
            img_size=config.img_size,
            seed=config.run.seed,
            channels=config.data.channels,
            drop_path_rate=config.drop_path,
        )
        if getattr(frozen.model, "attn_pool", None) is not None:
            raise Unavailable(f"encoder is {config.encoder}, which pools by attention and cannot be fine-tuned here")
        note_other_images(config.encoder, config.data)
        return frozen

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        scalars = super().evaluate(model, step, tracker)
        if self.left_out_views is not None:
            dev_scalars, _ = self.measure_outcomes(model, self.left_out_views, tracker)
            score = KINDS[self.label_kind].score
            scalars |= {f"dev/{score}": dev_scalars[score]} if score in dev_scalars else {}
        return scalars


def finetune_once(
    config: FinetuneConfig, name: str, lr: float, on_dev: bool, loaded: LoadedSplits | None
) -> dict[str, Any]:
    """Carry out one run in the folder `name` of `run.dir`.

    Returns:
        accuracy: at the end, the only time that it is evaluated; outcomes: of the same images, if they were kept;
        pflop: executed; device_hours: hours times devices; dev_accuracy: on training images that the run left out,
        where it did.
    """
    steps = config.dev_steps if on_dev and config.dev_steps else config.run.steps
    settings = flatten(config) | {
        "lrs": (lr,),
        "dev_steps": None,
        "test": True,
        "on_dev": on_dev,
        "encoder_sha256": hash_initial_weights(config),
        "run.dir": str(Path(config.run.dir) / name),
        "run.steps": steps,
        "run.eval_every": steps,
        "optim.lr": lr,
    }
    folder = train(rebuild(OneRunConfig(), settings), partial(Finetuning, loaded=loaded), writes_page=on_dev)
    PartialState().wait_for_everyone()
    last = last_scalars(folder)
    scalars = last_scalars(folder, PFLOP)
    result = score_of_run(folder) | {"pflop": scalars[PFLOP]}
    if DEVICE_HOURS in scalars:  # a finished run of earlier code has not logged them
        result["device_hours"] = scalars[DEVICE_HOURS]
    on_dev_score = f"dev/{kind_of_results([result]).score}"
    if on_dev_score in last:
        result["dev_accuracy"] = last[on_dev_score]
    return result


def measure_on_dev(config: FinetuneConfig, lr: float, loaded: LoadedSplits | None) -> dict[str, Any]:
    """The result of a learning rate on the dev split; of one that diverges the worst score."""
    try:
        return finetune_once(config, f"dev_lr_{lr:g}", lr, True, loaded)
    except Diverged as error:
        print(f"warning: learning rate {lr:g} diverges: {error}", file=sys.stderr)
        return {"accuracy": DIVERGED}


def hash_initial_weights(config: FinetuneConfig) -> str:
    """SHA-256 of the weights that fine-tuning starts from; empty where they are random, or those of a timm name."""
    return fingerprint(Path(config.weights)) if config.weights else ""


def run(config: FinetuneConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Compare learning rates, fine-tune, test, write the report, and return it.

    Raises:
        UserError: `run.dir` is the folder of a run, and not of fine-tuning.
    """
    is_of_a_run = bool(saved_settings(Path(config.run.dir)))
    allowed = "a folder of its own: this is a run's, and fine-tuning makes one run for each learning rate"
    require(not is_of_a_run, "run.dir", config.run.dir, allowed)
    dev_results: dict[float, dict[str, Any]] = {}
    best = config.lrs[0]
    if len(config.lrs) > 1:
        dev_results = {lr: measure_on_dev(config, lr, loaded) for lr in config.lrs}
        best = best_choice({lr: result["accuracy"] for lr, result in dev_results.items()})
        note_choice(dev_results, best)
    results = []
    if config.test:
        result = {"seed": config.run.seed, "init": config.init, "lr": best}
        results.append(result | finetune_once(config, f"lr_{best:g}", best, False, loaded))
    report = {
        "results": add_figures(results),
        "dev": [{"lr": lr, "accuracy": reported(result["accuracy"])} for lr, result in dev_results.items()],
        "protocol": nested(config),
    }
    if not config.test:
        report |= labels_of_dev(list(dev_results.values()))
    if PartialState().is_main_process:
        print(table_of_rates(report))
        path = Path(config.out or Path(config.run.dir) / FINETUNING_REPORT)
        report = write_report(path, report)
        print_details(path, report)
        largest = report.get("labels", {}).get("baselines", {}).get("largest class")
        if results and largest is not None and results[0]["accuracy"] <= largest:
            note(f"the test accuracy is not above {largest:.1%}, that of always predicting the largest class")
        print(f"wrote {path}")
        if config.test:
            tested = Path(config.run.dir) / f"lr_{best:g}"
            if config.run.report:  # with the figures
                write_run_page(tested)
            classifier = tested if config.out else config.run.dir  # which has its report, by which the run is found
            print(f"next: mpp predict --classifier {classifier} --data.path NEW_IMAGES")
    return report


def note_choice(dev_results: dict[float, dict[str, Any]], best: float) -> None:
    """Note limits of the choice of a learning rate: few dev images, or a best rate that is the least or the largest.

    Args:
        dev_results: rate -> its result on the dev split.
    """
    outcomes = [result["outcomes"] for result in dev_results.values() if "outcomes" in result]
    if outcomes and len(outcomes[0]) < FEW_TEST_IMAGES:
        images = counted(len(outcomes[0]), "dev image")
        note(f"{images} (dev_fraction of the training images) choose the rate: too few to tell rates apart")
    if best in (min(dev_results), max(dev_results)):
        place, direction = ("smallest", "smaller") if best == min(dev_results) else ("largest", "larger")
        note(f"the best rate, {best:g}, is the {place} of lrs: a {direction} one may be better")


def reported(score: float) -> float:
    """A score as the report has it: of a rate that diverged it is not known."""
    return math.nan if score == DIVERGED else score


def labels_of_dev(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry `labels` of a report that has compared rates only: of the dev split."""
    outcomes = [result["outcomes"] for result in results if "outcomes" in result]
    return {"labels": describe_labels(outcomes[0])} if outcomes else {}


def table_of_rates(report: dict[str, Any]) -> str:
    """The report as a table: a row for each learning rate that was compared, and one for the test."""
    kind = kind_of_report(report) if "labels" in report else kind_of_results(report["results"])
    rows = []
    for rate in report["dev"]:
        rows.append([f"{rate['lr']:g}", kind.text(kind.score, rate["accuracy"]), "-", "-"])
    for result in report["results"]:
        left_out = kind.text(kind.score, result.get("dev_accuracy"))
        tested = kind.text(kind.score, result["accuracy"], *result.get("interval", ()))
        rows.append([f"{result['lr']:g}", "-", left_out, tested])
    title = kind.score_title
    headings = ["learning rate", f"dev {title}", f"dev {title}, left-out images", f"test {title}"]
    return markdown_table(*without_empty_columns(headings, rows))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fine-tune as the command line, or `arguments`, say."""
    return run(*parse_and_load(FinetuneConfig, arguments))


if __name__ == "__main__":
    run_main(main)

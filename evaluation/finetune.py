"""Fine-tuning (paper, sections 3.2 and 4.1, Table 4): the head removed, one zero-initialised linear layer, SGD.

    accelerate launch evaluation/finetune.py --encoder runs/birds
    accelerate launch evaluation/finetune.py --encoder runs/birds --init random --run.dir runs/scratch

Learning rates are compared on a dev split held out of train; the best one is then used on all of train, and the
held-out split is looked at once, at the end. Each of these is a run of its own below `run.dir`, and resumes like any
other. Where `--data.train_images` leaves training images out, 5,000 of these at most judge the last run too: its dev
accuracy, by which to choose between fine-tunings.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator, PartialState
from torch import nn

from evaluation.config import FinetuneConfig, OneRunConfig
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.labelled import load_labelled
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.results import table, write_json
from evaluation.supervision.classification import Classification
from evaluation.supervision.heads import HeadedEncoder, zero_head
from mpp.config import require
from mpp.data.loader import BatchLayout
from mpp.errors import Diverged, UserError
from mpp.models.timm_models import checkpoint_activations
from mpp.runtime.start import command
from mpp.runtime.weights import fingerprint
from mpp.training.log import Tracker, last_evaluation, last_scalars
from mpp.training.run import train

SPARE = 5000
"""Training images, at most, that a run judges by beside the held-out ones: of those that it leaves out."""


class Finetuning(Classification):
    """The task: classify, from an encoder's weights."""

    def __init__(self, config: OneRunConfig, accelerator: Accelerator, layout: BatchLayout):
        weights = (config.checkpoint or config.encoder) if config.init == "encoder" else ""
        train, test, spare = load_labelled(config.data, accelerator, weights, min(SPARE, config.data.eval_images))
        splits = train.cut(config.dev_fraction, config.data.eval_seed, "dev") if config.on_dev else (train, test)
        super().__init__(accelerator, layout, config.run, config.data, config.augment, splits)
        require(not config.encoder.startswith("floor:"), "encoder", config.encoder, "a model: a floor has no weights")
        random = config.init == "random"
        how = "Trained with labels, from random weights" if random else f"Fine-tuned with labels, from {config.encoder}"
        self.method = f"{how}; the classification head is left out"
        self.kind = self.kind if random else "encoder fine-tuned with labels"
        drop_path = {} if config.drop_path is None else {"drop_path_rate": config.drop_path}
        shown = (config.img_size, config.run.seed, config.data.channels)
        loaded = load_frozen_encoder(config.encoder, config.checkpoint, random, *shown, **drop_path)
        if getattr(loaded.model, "attn_pool", None) is not None:
            raise UserError(f"encoder is {config.encoder}, which pools by attention; that cannot be fine-tuned here")
        encoder, self.img_size = loaded.model.requires_grad_(True), loaded.img_size
        if config.activation_checkpointing:
            checkpoint_activations(encoder, "activation_checkpointing")
        head, normalize = zero_head(encoder.head_hidden_size, self.classes), loaded.normalize
        self.model = HeadedEncoder(encoder, head, config.pooling, normalize.mean, normalize.std)
        spare = spare.select(np.flatnonzero(spare.labels < self.classes))  # others' classes are not in the head
        self.judged = self.evaluation.add(self.views(self.held_out))
        self.spare = self.evaluation.add(self.views(spare)) if len(spare) and not config.on_dev else None

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        found = super().evaluate(model, step, tracker)
        return found | ({"dev/accuracy": self.judge(model, self.spare, tracker)["accuracy"]} if self.spare else {})


def one_run(config: FinetuneConfig, name: str, lr: float, on_dev: bool) -> dict[str, float]:
    """Carry out one run below `run.dir`; its accuracy at the end, where alone it is evaluated, and PFLOP executed."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {"lrs": (lr,), "dev_steps": None, "test": True, "on_dev": on_dev, "encoder_sha256": weights_of(config)}
    place = str(Path(config.run.dir) / name)
    steps = config.dev_steps if on_dev and config.dev_steps else config.run.steps
    values["run"] = dataclasses.replace(config.run, dir=place, steps=steps, eval_every=steps)
    values["optim"] = dataclasses.replace(config.optim, lr=lr)
    folder = train(OneRunConfig(**values), Finetuning)
    PartialState().wait_for_everyone()
    executed = last_scalars(folder, "compute/pflop")["compute/pflop"]
    found = last_evaluation(folder)
    dev = {"dev_accuracy": found["dev/accuracy"]} if "dev/accuracy" in found else {}
    return {"accuracy": found["heldout/accuracy"], "pflop": executed} | dev


def accuracy_on_dev(config: FinetuneConfig, lr: float) -> float:
    """How good a rate is; one at which training diverges is as bad as can be."""
    try:
        return one_run(config, f"dev_lr_{lr:g}", lr, on_dev=True)["accuracy"]
    except Diverged as error:
        print(f"warning: learning rate {lr:g} diverges: {error}", file=sys.stderr)
        return 0.0


def weights_of(config: FinetuneConfig) -> str:
    """SHA-256 of the weights that fine-tuning starts from; empty where they are random, or of a name of timm's."""
    return fingerprint(Path(config.checkpoint or config.encoder)) if config.init == "encoder" else ""


def run(config: FinetuneConfig) -> dict[str, Any]:
    """Compare rates, fine-tune, test, report; the report."""
    on_dev = {}
    if len(config.lrs) > 1:
        on_dev = {lr: accuracy_on_dev(config, lr) for lr in config.lrs}
    best = max(on_dev, key=on_dev.get) if on_dev else config.lrs[0]
    result = {"seed": config.run.seed, "init": config.init, "lr": best}
    result |= one_run(config, f"lr_{best:g}", best, on_dev=False) if config.test else {}
    report = {
        "results": [result] if config.test else [],
        "dev": [{"lr": lr, "accuracy": value} for lr, value in on_dev.items()],
        "protocol": dataclasses.asdict(config),
    }
    if PartialState().is_main_process:
        rows = [[f"{lr:g}", f"{100 * value:.1f}", "-", "-"] for lr, value in on_dev.items()]
        last = [f"{100 * result[key]:.1f}" if key in result else "-" for key in ("dev_accuracy", "accuracy")]
        rows += [[f"{best:g}", "-", *last]] if config.test else []
        headings = ["learning rate", "dev accuracy (%)", "dev accuracy, left-out images (%)", "test accuracy (%)"]
        print(table(headings, rows))
        path = Path(config.out or Path(config.run.dir) / "finetune.json")
        write_json(path, report)
        print(f"wrote {path}")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune as the command line, or `arguments`, say."""
    run(parse_with_images(FinetuneConfig, arguments, prog="accelerate launch evaluation/finetune.py"))


if __name__ == "__main__":
    command(main)

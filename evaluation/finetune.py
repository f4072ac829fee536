"""Fine-tuning (paper, sections 3.2 and 4.1, Table 4): the head removed, one zero-initialised linear layer, SGD.

    accelerate launch evaluation/finetune.py --encoder runs/birds
    accelerate launch evaluation/finetune.py --encoder runs/birds --init random --run.dir runs/scratch

Learning rates are compared on a dev split held out of train; the best one is then used on all of train, and the
held-out split is used once, at the end. Each of these is a run of its own below `run.dir`, and resumes like any
other. Where `--data.train_images` leaves training images out, the last run is evaluated on up to 5,000 of these, too:
choose between fine-tunings by this dev accuracy.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from evaluation.config import FinetuneConfig, OneRunConfig
from evaluation.figures.charts import markdown_table
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import FINETUNING_REPORT, LoadedSplits, command_of, run_of_rate
from evaluation.metrics.scoring import best_choice, describe_labels, kind_of_report, load_outcomes, score_of
from evaluation.supervised import LEFT_OUT_NAME, Classification, finish, result_of_run
from mpp.config import flatten, nested, rebuild, require
from mpp.data.overview import FEW_TEST_IMAGES
from mpp.errors import Diverged
from mpp.runtime.messages import counted, note, warn
from mpp.runtime.processes import wait_for_all
from mpp.runtime.start import run_main
from mpp.runtime.weights import fingerprint
from mpp.training.history import DEVICE_HOURS, PFLOP
from mpp.training.log import last_scalars
from mpp.training.run import train
from mpp.training.run_folder import saved_settings


def train_once(config: FinetuneConfig, lr: float, on_dev: bool, loaded: LoadedSplits | None) -> dict[str, Any]:
    """Carry out one run, in the folder lr_X or dev_lr_X of `run.dir`.

    Returns:
        A result: its outcomes and figures at the end, the only time that it is evaluated; pflop: executed;
        device_hours: hours times devices; dev_accuracy: on training images that the run left out, where it did.
    """
    steps = min(config.dev_steps or config.run.steps, config.run.steps) if on_dev else config.run.steps
    settings = flatten(config) | {
        "lrs": (lr,),
        "dev_steps": None,
        "test": True,
        "on_dev": on_dev,
        "encoder_sha256": fingerprint(Path(config.weights)) if config.weights else "",
        "run.dir": str(Path(config.run.dir) / f"{'dev_' if on_dev else ''}{run_of_rate(lr)}"),
        "run.steps": steps,
        "run.eval_every": steps,
        "optim.lr": lr,
    }
    folder = train(rebuild(OneRunConfig(), settings), partial(Classification, loaded=loaded), writes_page=on_dev)
    wait_for_all()
    costs = last_scalars(folder, PFLOP)
    result = {"init": config.init, "lr": lr, "pflop": costs[PFLOP], "device_hours": costs.get(DEVICE_HOURS)}
    left_out = load_outcomes(folder / LEFT_OUT_NAME)
    result |= {} if left_out is None else {"dev_accuracy": score_of(left_out)}
    return result | result_of_run(folder, config.run.seed)


def choose_rate(config: FinetuneConfig, loaded: LoadedSplits | None) -> tuple[float, dict[float, dict[str, Any]]]:
    """The best learning rate on the dev split, and the result of each; limits of the choice are noted."""
    tried: dict[float, dict[str, Any]] = {}
    for lr in config.lrs:
        try:
            tried[lr] = train_once(config, lr, True, loaded)
        except Diverged as error:
            warn(f"learning rate {lr:g} diverges: {error}")
            tried[lr] = {"accuracy": math.nan}
    best = best_choice({lr: result["accuracy"] for lr, result in tried.items()})
    images = len(tried[best].get("outcomes", ()))
    if 0 < images < FEW_TEST_IMAGES:
        few = counted(images, "dev image")
        note(f"{few} (dev_fraction of the training images) choose the rate: too few to tell rates apart")
    if best in (min(tried), max(tried)):
        note(f"the best rate, {best:g}, is the smallest or largest of lrs: one beyond them may be better")
    return best, tried


def run(config: FinetuneConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Compare learning rates, fine-tune, test, write the report, and return it.

    Raises:
        UserError: `run.dir` is the folder of a run, and not of fine-tuning.
    """
    config = config.in_named_folder()
    folder = Path(config.run.dir)
    allowed = "a folder of its own: this is a run's, and fine-tuning makes one run for each learning rate"
    require(not saved_settings(folder), "run.dir", folder, allowed)
    best, tried = choose_rate(config, loaded) if len(config.lrs) > 1 else (config.lrs[0], {})
    report: dict[str, Any] = {
        "results": [train_once(config, best, False, loaded)] if config.test else [],
        "dev": [{"lr": lr, "accuracy": result["accuracy"]} for lr, result in tried.items()],
        "protocol": nested(config),
    }
    if not config.test and "outcomes" in tried[best]:
        report["labels"] = describe_labels(tried[best]["outcomes"])
    if not PartialState().is_main_process:
        return report
    if config.out:  # by its own report the folder is known
        write_report(folder / FINETUNING_REPORT, report)
    path = Path(config.out or folder / FINETUNING_REPORT)
    report = write_report(path, report)
    kind = kind_of_report(report)
    if tried:
        rows = [[f"{rate['lr']:g}", kind.text(kind.score, rate["accuracy"])] for rate in report["dev"]]
        print(markdown_table(["learning rate", f"dev {kind.score_title}"], rows))
    print_details(path, report)
    print(f"wrote {path}")
    if config.test:
        tested = folder / run_of_rate(best)
        print(f"learning rate {best:g} was tested: {tested}")
        finish(tested, folder, config.run.report)
    return report


main = command_of(run, FinetuneConfig)


if __name__ == "__main__":
    run_main(main)

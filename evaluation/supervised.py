"""Supervised pre-training baselines, from scratch (paper, section 3.1 and Table 3), with a teacher if one is named.

    accelerate launch evaluation/supervised.py
    accelerate launch evaluation/supervised.py --config configs/supervised/imagenet_vit_b16.yaml
    accelerate launch evaluation/supervised.py --distill.teacher runs/resnet --model.init_from runs/birds

ViTs, BiT's ResNets (`--model.name resnetv2_50x1_bit`) and hybrids (`--model.name vit_base_r50_s16_224`). The run folder
and its encoder/ are as pre-training's, so that every probe takes it.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from accelerate import PartialState

from evaluation.config import SupervisedConfig
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import SUPERVISED_REPORT
from evaluation.supervision.classification import Classification, result_of_run
from evaluation.supervision.classifiers import with_teacher_digest
from mpp.config.parsing import parse
from mpp.runtime.start import run_main
from mpp.training.run import train, write_run_page

build_task = Classification


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line, or `arguments`, say."""
    config = parse(SupervisedConfig, arguments)
    folder = train(with_teacher_digest(config), build_task, writes_page=False)
    if PartialState().is_main_process:
        if config.run.eval_every > 0:
            report_results(folder, config.run.seed)
        if config.run.report:  # with the figures
            write_run_page(folder)
        run = quote(str(folder))
        print(f"next: mpp predict --classifier {run} --data.path NEW_IMAGES")
        tuned = quote(f"{folder}_finetuned")
        print(f"next: accelerate launch evaluation/finetune.py --encoder {run} --run.dir {tuned}")


def report_results(folder: Path, seed: int) -> None:
    """Write supervised.json into the run folder, and print its figures."""
    path = folder / SUPERVISED_REPORT
    print_details(path, write_report(path, {"results": [result_of_run(folder, seed)]}))
    print(f"wrote {path}")


if __name__ == "__main__":
    run_main(main)

"""Supervised pre-training baselines, from scratch (paper, section 3.1 and Table 3).

    accelerate launch evaluation/supervised.py
    accelerate launch evaluation/supervised.py --config configs/supervised/imagenet_vit_b16.yaml

ViTs, BiT's ResNets (`--model.name resnetv2_50x1_bit`) and hybrids (`--model.name vit_base_r50_s16_224`). The run folder
and its encoder/ are as pre-training's, so that every probe takes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from accelerate import Accelerator, PartialState

from evaluation.suite.classify import Classification
from evaluation.suite.labelled import load_labelled
from evaluation.suite.networks import HeadConfig, HeadedEncoder, build_backbone, build_head
from evaluation.suite.reports import table, write_json
from mpp.config import AugmentConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from mpp.data.views import BatchLayout
from mpp.runtime.launch import command
from mpp.runtime.parsing import parse
from mpp.training.task import train
from mpp.training.tracking import last_evaluation


@dataclass(frozen=True)
class SupervisedConfig:
    """Supervised pre-training from scratch."""

    run: RunConfig = field(default_factory=lambda: RunConfig(dir="runs/birds_supervised"))
    data: DataConfig = field(default_factory=lambda: DataConfig(eval_images=1_000_000))
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3))


class Supervised(Classification):
    """The task: classify, from random weights."""

    method = "Trained with labels, from random weights; the classification head is left out"

    def __init__(self, config: SupervisedConfig, accelerator: Accelerator, layout: BatchLayout):
        splits = load_labelled(config.data, accelerator)
        super().__init__(accelerator, layout, config.run, config.data, config.augment, splits)
        encoder, self.img_size = build_backbone(config.model)
        head = build_head(config.head.kind, encoder.num_features, self.classes)
        self.model = HeadedEncoder(encoder, head, config.head.pooling, config.model.mean, config.model.std)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line, or `arguments`, say."""
    config = parse(SupervisedConfig, arguments, prog="accelerate launch evaluation/supervised.py")
    folder = train(config, Supervised)
    if PartialState().is_main_process:
        accuracy = last_evaluation(folder)["heldout/accuracy"]
        write_json(folder / "supervised.json", {"results": [{"seed": config.run.seed, "accuracy": accuracy}]})
        print(table(["run", "held-out accuracy (%)"], [[folder.name, f"{100 * accuracy:.1f}"]]))
        print(f"wrote {folder / 'supervised.json'}")
        print(f"next: accelerate launch evaluation/finetune.py --encoder {folder} --run.dir {folder}_finetuned")


if __name__ == "__main__":
    command(main)

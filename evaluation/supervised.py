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

from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from evaluation.config import SupervisedConfig
from evaluation.figures.markdown import markdown_table
from evaluation.frozen.features import load_labelled
from evaluation.frozen.manifest import refuse_learned_images
from evaluation.frozen.results import print_details, write_report
from evaluation.frozen.run_images import SUPERVISED_REPORT
from evaluation.metrics.scoring import add_figures, kind_of_results
from evaluation.supervision.classification import BOTH_HEADS_LEFT_OUT, HEAD_LEFT_OUT, Classification, score_of_run
from evaluation.supervision.classifiers import load_teacher, with_teacher_digest
from evaluation.supervision.deit import DistilledEncoder, average_heads, build_student, distillation_loss
from evaluation.supervision.heads import HeadedEncoder, build_backbone, build_head
from mpp.config import ImageSize, require
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout
from mpp.data.views import collate
from mpp.models.descriptions import licence_of
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.start import run_main
from mpp.training.flops import executed_flops
from mpp.training.run import train, write_run_page


class Supervised(Classification):
    """The task: classify, from random weights or those that the model begins from."""

    def __init__(self, config: SupervisedConfig, accelerator: Accelerator, layout: BatchLayout):
        first_weights = config.model.init_from or ""
        train, held_out, _ = load_labelled(config.data, accelerator, first_weights, task=config.task)
        splits = (train, held_out)
        super().__init__(accelerator, layout, config.run, config.data, config.augment, splits, config.loss)
        self.config = config
        teacher = config.distill.teacher
        allowed = f"null with task {self.label_kind}: a teacher needs one class per image"
        require(teacher is None or self.learner.mixes, "distill.teacher", teacher, allowed)
        if teacher is not None:
            refuse_learned_images("distill.teacher", teacher, config.data, held_out)  # all, not only `eval_images`
        self.start = config.model.init_from or "random weights"
        self.licence = licence_of(config.model.init_from)
        self.model, self.img_size = self.build_model()
        self.refuse_single_images()
        self.held_out_views = self.fixed_view_loader.add(self.views(self.held_out))

    @property
    def method(self) -> str:
        """Its training in a sentence, for the model card."""
        return f"Trained with labels, from {self.start}; {HEAD_LEFT_OUT}"

    def build_model(self) -> tuple[HeadedEncoder, ImageSize]:
        """The encoder with its head; height and width of its images."""
        config = self.config
        encoder, img_size = build_backbone(config.model, config.data.channels)
        mean, std = config.model.normalization(config.data.channels)
        return HeadedEncoder(encoder, self.build_head(encoder), config.head.pooling, mean, std), img_size

    def build_head(self, encoder: nn.Module) -> nn.Module:
        """A classifier on a token of the encoder."""
        layers = build_head(self.config.head.kind, encoder.head_hidden_size, self.learner.outputs)
        return self.learner.complete(layers)


class Distilled(Supervised):
    """The task: classify, and predict a teacher's answer for the same crop.

    The teacher keeps its normalisation, gets the crop at its own size, and is not saved with the run.
    """

    kind = "encoder trained with labels and distilled from a classifier"

    def __init__(self, config: SupervisedConfig, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(config, accelerator, layout)
        self.teacher = load_teacher(config.distill, self.classes, config.data.channels).to(accelerator.device)

    @property
    def method(self) -> str:
        """Its training in a sentence, for the model card."""
        distill = self.config.distill
        return (
            f"Trained with labels, from {self.start}, and by {distill.kind} distillation from {distill.teacher} "
            "through a token (DeiT: Touvron et al., ICML 2021). The tokens begin with [class] and the distillation "
            f"token; {BOTH_HEADS_LEFT_OUT}"
        )

    def build_model(self) -> tuple[DistilledEncoder, ImageSize]:
        """The student with its two heads; height and width of its images."""
        config = self.config
        encoder = build_student(config.model, config.data.channels)
        head = self.build_head(encoder)
        distill_head = self.build_head(encoder)
        mean, std = config.model.normalization(config.data.channels)
        model = DistilledEncoder(encoder, head, distill_head, config.head.pooling, mean, std)
        return model, encoder.patch_embed.img_size

    def logits(self, outputs: Tensor) -> Tensor:
        return average_heads(outputs)

    def criterion(self, outputs: Tensor, images: Tensor, target: Tensor) -> Tensor:
        with self.accelerator.autocast():
            taught = self.teacher(images)
        return distillation_loss(outputs, target, taught, self.config.distill, self.augment.label_smoothing)

    def flops(self) -> int:
        """FLOPs executed per image, the teacher's forward pass included."""
        crop = collate([self.views(self.train)[FIXED_VIEW, 0]]).images
        return super().flops() + executed_flops(self.teacher, crop, backward=False)

    def describe_model(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.teacher.parameters())
        return f"{super().describe_model()}, a teacher of {parameters / 1e6:.1f} M"


def build_task(config: SupervisedConfig, accelerator: Accelerator, layout: BatchLayout) -> Classification:
    """The task that the config describes: with a teacher, or without."""
    if config.distill.teacher is None:
        return Supervised(config, accelerator, layout)
    return Distilled(config, accelerator, layout)


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
    """Write supervised.json into the run folder, and print the accuracy."""
    (result,) = add_figures([{"seed": seed} | score_of_run(folder)])
    path = folder / SUPERVISED_REPORT
    report = write_report(path, {"results": [result]})
    kind = kind_of_results([result])
    score = kind.text(kind.score, result["accuracy"], *result.get("interval", ()))
    print(markdown_table(["run", f"held-out {kind.score_title}"], [[folder.name, score]]))
    print_details(path, report)
    print(f"wrote {path}")


if __name__ == "__main__":
    run_main(main)

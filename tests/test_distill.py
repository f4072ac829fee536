"""Distillation through a token: the loss, the student, its teacher."""

import copy
import shutil

import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from comparisons import noted
from conftest import (
    TINY_TUNING,
    equal_tensors,
    killed_at,
    read_json,
    read_metrics,
    refused,
    tiny_without,
    title_and_tags,
    weights_of,
)
from model_inputs import HALVES, by_timm, random_images
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.models.deit import VisionTransformerDistilled
from torch import nn

from evaluation import finetune, supervised
from evaluation.comparison.cases import EncoderEntry, encoders_of
from evaluation.comparison.digests import relevant_settings
from evaluation.config import DistillConfig, SupervisedConfig, SweepConfig
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.supervised import Classification
from evaluation.supervision.classifiers import load_teacher, with_teacher_digest
from evaluation.supervision.learners import average_heads, build_student, distillation_loss
from evaluation.sweep import plan_sweep
from mpp.config import ModelConfig
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder
from mpp.runtime.files import sha256_of
from mpp.training.checkpoint import complete_checkpoints
from mpp.training.flops import executed_flops
from mpp.training.loop import training_batches

TINY = tiny_without("--probe")
NUMBERS = dict(width=16, depth=2, heads=2, img_size=32)


def save_timm(folder, classes, mean=(0.5, 0.5, 0.5)):
    """timm's folder of a small convolutional network that takes 40 pixels."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)  # else eval mode would be hard to tell
    data_config = dict(input_size=(3, 40, 40), mean=mean, std=(0.2, 0.3, 0.4))
    save_for_hf(model, str(folder), safe_serialization=True, data_config=data_config)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A classifier of the nine classes of birds."""
    return save_timm(tmp_path_factory.mktemp("teacher") / "timm", 9, mean=(0.4, 0.5, 0.6))


def train(folder, *arguments):
    supervised.main([*TINY, *arguments, f"--run.dir={folder}"])
    return weights_of(folder)


def build(*arguments):
    config = parse(supervised.SupervisedConfig, [*TINY, *arguments])
    return Classification(with_teacher_digest(config), Accelerator(cpu=True), BatchLayout(8, 1, 1, 0))


def test_the_loss_is_deits():
    """Cross-entropy with the labels, and with the teacher's decisions or at a temperature of 3 with its softmax.

    Predicted is the mean of the softmaxes of both heads.
    """
    torch.manual_seed(0)
    outputs, taught, target = torch.randn(5, 2, 7), torch.randn(5, 7), torch.randint(7, (5,))
    with_labels = F.cross_entropy(outputs[:, 0], target, label_smoothing=0.1)
    students, teachers = outputs[:, 1].div(3).log_softmax(-1), taught.div(3).log_softmax(-1)
    soft = 9 * (teachers.exp() * (teachers - students)).sum(-1).mean()
    for kind, of_teacher in (("hard", F.cross_entropy(outputs[:, 1], taught.argmax(-1))), ("soft", soft)):
        loss = distillation_loss(outputs, target, taught, DistillConfig(kind=kind, weight=0.4), label_smoothing=0.1)
        torch.testing.assert_close(loss, 0.6 * with_labels + 0.4 * of_teacher)
    torch.testing.assert_close(average_heads(outputs).exp(), outputs.softmax(-1).mean(1))


@pytest.mark.faults
def test_student_is_timms_distilled_class_is_fine_tuned_and_both_teach(tmp_path, teacher, monkeypatch):
    folder = tmp_path / "run"
    pixels = random_images(2)
    tasks = noted(monkeypatch, Classification, "flops")
    train(folder, f"--distill.teacher={teacher}", "--distill.kind=soft", "--model.mean=[0.3,0.4,0.5]")
    model = tasks[0].model.eval()
    encoder = by_timm(folder / "encoder")
    assert type(encoder) is VisionTransformerDistilled
    tokens = encoder.forward_features(model.normalize(pixels))
    assert tokens.shape == (2, 2 + 16, 16)
    both = torch.stack([model.head(tokens[:, 0]), model.distill_head(tokens[:, 1])], 1)
    torch.testing.assert_close(model(pixels), both)
    expected = torch.stack([tokens[:, 0], tokens[:, 2:].mean(1)])
    frozen = load_frozen_encoder(str(folder))
    torch.testing.assert_close(torch.stack([frozen(pixels, each, [2])[0] for each in ("class", "mean")]), expected)
    names = load_file(complete_checkpoints(folder)[-1] / "model.safetensors")
    assert {name.split(".")[0] for name in names} == {"encoder", "head", "distill_head"}
    title, tags = title_and_tags(folder / "encoder")
    assert title.endswith("trained with labels") and "self-supervised" not in tags
    torch.testing.assert_close(load_teacher(str(folder), 9)(pixels), both.softmax(-1).mean(1).log())

    tuned = tmp_path / "fine" / "lr_0.1"
    words = ("--lrs=0.1", "--img_size=48", f"--run.dir={tuned.parent}")
    finetune.main([*TINY_TUNING, f"--encoder={folder}", *words])
    weights = load_file(complete_checkpoints(tuned)[-1] / "model.safetensors")
    assert weights["encoder.pos_embed"].shape == (1, 2 + 36, 16) and "encoder.dist_token" in weights
    pixels = random_images(2, side=48)
    (features,) = load_frozen_encoder(str(tuned))(pixels, "class", [2])
    taught = load_teacher(str(tuned), 9)(pixels)
    known = parse(SupervisedConfig, [f"--distill.teacher={tuned.parent}"])
    assert with_teacher_digest(known).distill.teacher == str(tuned)
    first, *others = read_json(folder / "data.json")["train"]["classes"]
    for names in ([*others, first], [*others, "renamed"]):
        with refused("in this order"):
            load_teacher(str(tuned), 9, class_names=names)
    torch.testing.assert_close(taught, F.linear(features, weights["head.weight"], weights["head.bias"]))


@pytest.mark.faults
def test_a_run_resumes_with_a_teacher_that_moved_and_with_no_other(tmp_path, teacher):
    moved, run = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(teacher, moved)
    for folder in (teacher, moved):
        with killed_at(1):
            train(run, f"--distill.teacher={folder}")
    weights = load_file(moved / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, moved / "model.safetensors")
    for options in ([f"--distill.teacher={moved}"], []):
        with refused(r"another config: distill\.teacher_sha256 \(\w+ in the run, \w+ now\);"):
            train(run, *options)
    with refused(r"distill\.teacher_sha256 is [0-9a-f]{64}; it must be [0-9a-f]{64}"):
        supervised.main([f"--config={run / 'config.yaml'}"])


def test_the_teacher_sees_the_students_crop_and_does_not_learn_and_its_forward_pass_counts(teacher):
    task = build(f"--distill.teacher={teacher}", "--augment.mixup=0.8")
    crop = random_images(1)
    of_teacher = executed_flops(task.teacher, crop, backward=False)
    assert task.flops() == executed_flops(task.model, crop) + of_teacher > of_teacher > 0
    before = copy.deepcopy(task.teacher.state_dict())
    inputs = []
    for module in (task.model, task.teacher):
        module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    task.model.train()
    loss, _ = task.loss(task.model, next(iter(training_batches(task, 0, {}))), False)
    loss.backward()
    of_student, of_teacher = inputs
    assert torch.equal(of_student, of_teacher)
    assert of_student.is_floating_point()  # mixed
    assert equal_tensors(task.teacher.state_dict(), before)
    assert not any(parameter.requires_grad for parameter in task.teacher.parameters())
    for head in (task.model.head, task.model.distill_head):
        assert head[2].weight.grad.abs().max() > 0


def test_a_teacher_of_timms_normalises_and_resizes_for_itself(teacher):
    pixels = random_images(2)
    resized = F.interpolate(pixels.float(), (40, 40), mode="bilinear", antialias=True) / 255
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.3, 0.4]])[..., None, None]
    torch.testing.assert_close(load_teacher(str(teacher), 9)(pixels), by_timm(teacher)((resized - mean) / std))


def test_a_supervised_runs_teacher_is_the_network_that_the_run_evaluated(tmp_path):
    arguments = ("--head.kind=linear", "--head.pooling=mean", "--model.position=sincos_2d", "--optim.average=0.5")
    train(tmp_path, *arguments)
    teacher, task = load_teacher(str(tmp_path / "encoder"), 9), build(*arguments)
    (batch,) = task.fixed_view_loader.batches(task.held_out_views)
    loss = F.cross_entropy(teacher(batch.images), batch.labels).item()
    assert loss == pytest.approx(read_metrics(tmp_path, "heldout/loss")[4], rel=1e-5)


@pytest.mark.parametrize("position", ["learned", "sincos_2d"])
def test_a_student_starts_from_a_pre_training_run(finished_run, position):
    """Resampled as in pre-training."""
    config = ModelConfig(**NUMBERS | dict(img_size=48), position=position, init_from=str(finished_run))
    plain = build_encoder(config).state_dict()
    weights = build_student(config).state_dict()
    assert weights.keys() == plain.keys() | {"pos_embed", "dist_token"}
    first, token, rest = weights["pos_embed"].tensor_split([1, 2], 1)
    weights["pos_embed"] = torch.cat([first, rest], 1)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())
    assert bool((token == 0).all()) == (position == "sincos_2d")
    assert weights["dist_token"].std() == pytest.approx(0.02, rel=0.6)


def test_a_student_is_timms_class_by_the_settings(tmp_path):
    student = build_student(ModelConfig(**NUMBERS, dropout=0.1, activation_checkpointing=True))
    assert type(student) is VisionTransformerDistilled
    assert student.pos_drop.p == 0.1 and student.grad_checkpointing
    with refused(r"model\.name is vit_tiny_patch16_224; it must be left out"):
        build_student(ModelConfig(name="vit_tiny_patch16_224"))
    export_encoder(student, tmp_path / "encoder", 32, *HALVES, 1.0)
    with refused(r"model\.name is deit_base_distilled_patch16_224; it must be left out"):
        build_student(ModelConfig(**NUMBERS, init_from=str(tmp_path)))


def check_refused(folder, reason):
    with refused(reason):
        build(f"--distill.teacher={folder}")


@pytest.mark.faults
def test_a_teacher_has_a_head_of_as_many_classes(tmp_path, finished_run, teacher):
    ten = save_timm(tmp_path / "ten", 10)
    check_refused(ten, f"distill.teacher is {ten}; it must be a classifier of one class per image, of 9 as these")
    for folder in (save_timm(tmp_path / "headless", 0), finished_run):  # the run has no labels
        said = f"distill.teacher is {folder}; it must be the folder of a finished .* run, or a timm folder with"
        check_refused(folder, said)
    check_refused(tmp_path / "nowhere", "it must be a folder")
    check_refused(tmp_path, "no encoder at")
    train(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    check_refused(tmp_path / "run", "a run with its newest checkpoint intact")


def test_a_teacher_that_knows_the_test_labels_is_refused(tmp_path, image_folder):
    images = (f"--data.path={image_folder}", "--data.eval_split=null", "--data.eval_fraction=0.25")
    train(tmp_path / "teacher", *images)
    teacher = f"--distill.teacher={tmp_path / 'teacher'}"
    assert build(*images, teacher).classes == 2
    with refused(r"distill\.teacher is .*trained with the labels of \d of these 3 test images"):
        build(*images, teacher, "--data.cut_seed=1")


def test_a_comparison_knows_a_training_by_the_weights_of_its_teacher(tmp_path, teacher):
    options = {"distill.teacher": str(teacher)}
    entry = EncoderEntry("student", str(tmp_path / "run"), train="supervised", train_options=options)
    (student,) = encoders_of([entry]).values()
    digest = sha256_of(teacher / "model.safetensors")
    assert relevant_settings(student.settings)["distill.teacher_sha256"] == digest
    other = save_timm(tmp_path / "other", 10)
    vary = {"distill.teacher": [str(teacher), str(other)]}
    settings = {"data.eval_split": None}
    config = SweepConfig(train="supervised", settings=settings, vary=vary, evaluate={"command": "knn"})
    assert len(plan_sweep(config).trials) == 2

"""Distillation through a token: the loss, the student, its teacher."""

import shutil

import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import TINY, kill_at, read_metrics, title_and_tags
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.models.deit import VisionTransformerDistilled
from timm.task import TokenDistillationTask
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from evaluation import finetune, supervised
from evaluation.comparison.cases import training_settings
from evaluation.comparison.digests import relevant_settings
from evaluation.comparison.entries import EncoderEntry
from evaluation.config import DistillConfig
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.supervision.classifiers import load_teacher, with_teacher_digest
from evaluation.supervision.deit import average_heads, build_student, distillation_loss
from mpp.config import ModelConfig
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout
from mpp.errors import UserError
from mpp.models.encoder import build_encoder
from mpp.models.timm_models import set_attention
from mpp.runtime.hashing import sha256_of
from mpp.training.checkpoint import complete_checkpoints
from mpp.training.flops import executed_flops

BASE = tuple(argument for argument in TINY if not argument.startswith(("--probe", "--model")))
SMALL = tuple(argument for argument in TINY if argument.startswith("--model"))
NUMBERS = dict(width=16, depth=2, heads=2, img_size=32)


def save_timm(folder, classes, mean=(0.5, 0.5, 0.5)):
    """timm's folder of a small convolutional network that takes 40 pixels."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)  # else eval mode would be hard to tell
    data_config = dict(input_size=(3, 40, 40), mean=mean, std=(0.2, 0.3, 0.4), crop_pct=1.0, interpolation="bilinear")
    save_for_hf(model, str(folder), safe_serialization=True, data_config=data_config)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A classifier of the nine classes of birds."""
    return save_timm(tmp_path_factory.mktemp("teacher") / "timm", 9, mean=(0.4, 0.5, 0.6))


def train(folder, *arguments):
    supervised.main([*BASE, *SMALL, *arguments, f"--run.dir={folder}"])
    return (folder / "encoder" / "model.safetensors").read_bytes()


def build(*arguments):
    config = parse(supervised.SupervisedConfig, [*BASE, *SMALL, *arguments])
    return supervised.build_task(with_teacher_digest(config), Accelerator(cpu=True), BatchLayout(8, 1, 1, 0))


def test_hard_loss_by_hand():
    outputs = torch.tensor([[[3.0, 1.0], [1.0, 4.0]]]).log()  # 3/4 for class 0; 4/5 for what the teacher finds, 1
    taught = torch.tensor([[-2.0, 5.0]])
    expected = -(0.7 * torch.tensor(3 / 4).log() + 0.3 * torch.tensor(4 / 5).log())
    loss = distillation_loss(outputs, torch.tensor([0]), taught, DistillConfig(kind="hard", weight=0.3))
    torch.testing.assert_close(loss, expected)


def test_soft_loss_by_hand():
    outputs = torch.tensor([[[3.0, 1.0], [1.0, 1.0]]]).log()
    taught = torch.tensor([[1.0, 9.0]]).log()  # at temperature 2: 1/4 and 3/4
    divergence = 1 / 4 * torch.tensor(1 / 2).log() + 3 / 4 * torch.tensor(3 / 2).log()
    expected = -0.9 * torch.tensor(3 / 4).log() + 0.1 * 4 * divergence
    loss = distillation_loss(outputs, torch.tensor([0]), taught, DistillConfig(kind="soft", temperature=2.0))
    torch.testing.assert_close(loss, expected)


class Says(nn.Module):
    """A network that says what it was told to."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.num_classes, self.in_chans = answer, 7, 3
        self.pretrained_cfg = dict(mean=(0.5,) * 3, std=(0.5,) * 3)

    def forward(self, images):
        return self.answer

    def set_distilled_training(self, enable=True):
        pass


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_loss_is_timms(kind):
    torch.manual_seed(0)
    outputs, taught, target = torch.randn(5, 2, 7), torch.randn(5, 7), torch.randint(7, (5,))
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    options = dict(criterion=smoothed, distill_type=kind, task_loss_weight=0.6, temperature=3.0, verbose=False)
    reference = TokenDistillationTask(Says(outputs.unbind(1)), Says(taught), **options)
    config = DistillConfig(kind=kind, weight=0.4)
    loss = distillation_loss(outputs, target, taught, config, label_smoothing=0.1)
    torch.testing.assert_close(loss, reference(torch.zeros(5, 3, 8, 8), target)["loss"])


def test_the_softmaxes_of_both_heads_are_averaged():
    outputs = torch.randn(5, 2, 7)
    torch.testing.assert_close(average_heads(outputs).exp(), outputs.softmax(-1).mean(1))


@pytest.mark.faults
def test_student_is_timms_distilled_class_and_evaluations_take_it(tmp_path, teacher, monkeypatch):
    tasks = []
    built = supervised.Distilled.__init__
    monkeypatch.setattr(supervised.Distilled, "__init__", lambda self, *a: (built(self, *a), tasks.append(self))[0])
    folder, pixels = tmp_path / "run", torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    train(folder, f"--distill.teacher={teacher}", "--distill.kind=soft", "--model.mean=[0.3,0.4,0.5]")
    model, encoder = tasks[0].model.eval(), timm.create_model(f"local-dir:{folder / 'encoder'}", pretrained=True).eval()
    assert type(encoder) is VisionTransformerDistilled
    tokens = encoder.forward_features(model.normalize(pixels))
    torch.testing.assert_close(tokens, model.encoder.forward_features(model.normalize(pixels)))
    assert tokens.shape == (2, 2 + 16, 16)
    both = torch.stack([model.head(tokens[:, 0]), model.distill_head(tokens[:, 1])], 1)
    torch.testing.assert_close(model(pixels), both)
    frozen = load_frozen_encoder(str(folder))
    for representation, expected in (("class", tokens[:, 0]), ("mean", tokens[:, 2:].mean(1))):
        torch.testing.assert_close(frozen(pixels, representation, [2])[0], expected)
    with safe_open(complete_checkpoints(folder)[-1] / "model.safetensors", framework="pt") as file:
        names = file.keys()
    assert {name.split(".")[0] for name in names} == {"encoder", "head", "distill_head"}
    assert read_metrics(folder, "heldout/accuracy")[4] == held_out_accuracy(tasks[0])
    title, tags = title_and_tags(folder / "encoder")
    assert title.endswith("distilled from a classifier") and "self-supervised" not in tags
    assert "(B, 2 + N, D)" in (folder / "encoder" / "README.md").read_text()
    finetune.main([*BASE, f"--encoder={folder}", "--lrs=0.1", "--img_size=48", f"--run.dir={tmp_path / 'fine'}"])
    weights = load_file(tmp_path / "fine" / "lr_0.1" / "encoder" / "model.safetensors")
    assert weights["pos_embed"].shape == (1, 2 + 36, 16) and "dist_token" in weights


def held_out_accuracy(task):
    """That of the mean of the two softmaxes."""
    batches = list(task.fixed_view_loader.batches(task.held_out_views))
    answers = torch.cat([task.model(batch.images).softmax(-1).mean(1).argmax(-1) for batch in batches])
    return (answers == torch.cat([batch.labels for batch in batches])).double().mean().item()


MIXED = ("--augment.mixup=0.8", "--augment.label_smoothing=0.1", "--head.kind=linear", "--head.pooling=mean")


@pytest.mark.faults
@pytest.mark.parametrize("arguments", [MIXED, ("--distill.kind=soft", "--optim.average=0.9", "--model.drop_path=0.1")])
def test_a_killed_distillation_goes_on_with_the_same_bits(tmp_path, teacher, monkeypatch, arguments):
    arguments = (*arguments, "--model.dropout=0.1", f"--distill.teacher={teacher}")
    whole = train(tmp_path / "whole", *arguments)
    with monkeypatch.context() as context, pytest.raises(BaseException, match="killed"):
        kill_at(context, 3)
        train(tmp_path / "killed", *arguments)
    assert train(tmp_path / "killed", *arguments) == whole
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")


@pytest.mark.faults
def test_a_run_goes_on_with_a_teacher_that_moved_and_with_no_other(tmp_path, teacher, monkeypatch):
    place, run = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(teacher, place)
    kill_at(monkeypatch, 1)
    for folder in (teacher, place):
        with pytest.raises(BaseException, match="killed"):
            train(run, f"--distill.teacher={folder}")
    weights = load_file(place / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, place / "model.safetensors")
    with pytest.raises(UserError, match=r"another config: distill\.teacher_sha256 differ"):
        train(run, f"--distill.teacher={place}")
    with pytest.raises(UserError, match=r"another config: distill\.teacher_sha256 differ"):
        train(run)
    with pytest.raises(UserError, match=r"distill\.teacher_sha256 is [0-9a-f]{64}; it must be [0-9a-f]{64}"):
        supervised.main([f"--config={run / 'config.yaml'}"])


def test_the_teacher_sees_the_students_crop_and_does_not_learn(teacher):
    task = build(f"--distill.teacher={teacher}", "--augment.mixup=0.8")
    before = {name: tensor.clone() for name, tensor in task.teacher.state_dict().items()}
    seen = []
    for module in (task.model, task.teacher):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    task.model.train()
    loss, _ = task.loss(task.model, next(iter(task.batches(0, {}))), False)
    loss.backward()
    assert torch.equal(*seen) and seen[0].is_floating_point()  # mixed
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.teacher.state_dict().items())
    assert not any(parameter.requires_grad for parameter in task.teacher.parameters())
    assert all(head[2].weight.grad.abs().max() > 0 for head in (task.model.head, task.model.distill_head))


def test_a_teacher_of_timms_normalises_and_resizes_for_itself(teacher):
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    model = timm.create_model(f"local-dir:{teacher}", pretrained=True).eval()
    resized = F.interpolate(pixels.float(), (40, 40), mode="bilinear", antialias=True) / 255
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    taught = load_teacher(DistillConfig(teacher=str(teacher)), 9)(pixels)
    torch.testing.assert_close(taught, model((resized - mean) / std))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--optim.name=muon",),
        ("--head.kind=linear", "--head.pooling=mean", "--model.position=sincos_2d", "--optim.average=0.5"),
    ],
)
def test_a_supervised_runs_teacher_is_what_the_run_evaluated(tmp_path, arguments):
    folder = tmp_path / "run"
    train(folder, *arguments)
    teacher = load_teacher(DistillConfig(teacher=str(folder / "encoder")), 9)
    task = build(*arguments)
    batches = list(task.fixed_view_loader.batches(task.held_out_views))
    logits = torch.cat([teacher(batch.images) for batch in batches])
    loss = F.cross_entropy(logits, torch.cat([batch.labels for batch in batches])).item()
    assert loss == pytest.approx(read_metrics(folder, "heldout/loss")[4], rel=1e-5)


@pytest.mark.faults
def test_fine_tuned_and_distilled_runs_teach_too(tmp_path, teacher):
    train(tmp_path / "first", f"--distill.teacher={teacher}")
    finetune.main([*BASE, f"--encoder={tmp_path / 'first'}", "--lrs=0.1", f"--run.dir={tmp_path / 'fine'}"])
    for run in (tmp_path / "first", tmp_path / "fine" / "lr_0.1"):
        taught = load_teacher(DistillConfig(teacher=str(run)), 9)
        weights = load_file(complete_checkpoints(run)[-1] / "model.safetensors")
        pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
        tokens = load_frozen_encoder(str(run)).model.forward_features(taught.network.normalize(pixels))
        if run.name == "first":
            heads = []
            for number, name in enumerate(("head", "distill_head")):
                hidden = F.linear(tokens[:, number], *layer(weights, f"{name}.0")).tanh()
                heads.append(F.linear(hidden, *layer(weights, f"{name}.2")))
            expected = torch.stack(heads).softmax(-1).mean(0).log()
        else:
            expected = F.linear(tokens[:, 0], *layer(weights, "head"))
        torch.testing.assert_close(taught(pixels), expected)


def layer(weights, name):
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def test_flops_count_the_teachers_forward_pass(teacher):
    task = build(f"--distill.teacher={teacher}")
    crop = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter:
        task.teacher(crop)
    assert counter.get_total_flops() > 0
    assert task.flops() == executed_flops(task.model, crop) + counter.get_total_flops()


@pytest.mark.parametrize("position", ["learned", "sincos_2d"])
def test_a_student_starts_from_a_pre_training_run(finished_run, position):
    config = ModelConfig(**NUMBERS | dict(img_size=48, position=position, init_from=str(finished_run)))
    torch.manual_seed(1)
    plain = build_encoder(config).state_dict()  # resampled as ever
    student = build_student(config)
    weights, own = student.state_dict(), {"pos_embed", "dist_token"}
    assert weights.keys() == plain.keys() | own
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items() if name not in own)
    positions, fixed = weights["pos_embed"], position == "sincos_2d"
    assert torch.equal(torch.cat([positions[:, :1], positions[:, 2:]], 1), plain["pos_embed"])
    assert weights["dist_token"].std() == pytest.approx(0.02, rel=0.6)
    assert bool((positions[:, 1] == 0).all()) == fixed and ("pos_embed" in dict(student.named_buffers())) == fixed


def test_a_student_starts_from_a_distilled_run(tmp_path, teacher):
    train(tmp_path, f"--distill.teacher={teacher}")
    source = load_file(tmp_path / "encoder" / "model.safetensors")
    weights = build_student(ModelConfig(**NUMBERS, init_from=str(tmp_path))).state_dict()
    assert weights.keys() == source.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in source.items())


def test_a_student_is_the_named_vit_with_one_token_more():
    numbers = dict(depth=1, img_size=32)
    for name in ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"):
        config = ModelConfig(name=name, dropout=0.1, activation_checkpointing=True, **numbers)
        student = build_student(config)
        assert type(student) is VisionTransformerDistilled and student.embed_dim == 192
        assert student.pos_drop.p == 0.1 and student.grad_checkpointing
        set_attention(student, fused=False)
        assert student(torch.zeros(1, 3, 32, 32)).shape == (1, 192)


@pytest.mark.parametrize("name", ["resnetv2_50x1_bit", "vit_tiny_r_s16_p8_224", "vit_small_patch14_reg4_dinov2"])
def test_what_is_no_plain_vit_is_no_student(name):
    numbers = dict(img_size=28) if "dinov2" in name else {}
    with pytest.raises(UserError, match=f"model.name is {name}; it must be a plain ViT with distill.teacher"):
        build_student(ModelConfig(name=name, **numbers))


@pytest.mark.faults
def test_a_teacher_has_a_head_of_as_many_classes(tmp_path, finished_run, teacher):
    a_teacher = "it must be the folder of a finished supervised or fine-tuned run, or a timm folder with"
    refused = {
        save_timm(tmp_path / "ten", 10): "which knows 10 classes; these images have 9",
        save_timm(tmp_path / "headless", 0): a_teacher,
        finished_run: a_teacher,  # it has no labels
    }
    for folder, reason in refused.items():
        with pytest.raises(UserError, match=f"distill.teacher is {folder}[;,] {reason}"):
            build(f"--distill.teacher={folder}")
    for folder, reason in {tmp_path / "nowhere": "it must be a folder", tmp_path: "no encoder at"}.items():
        with pytest.raises(UserError, match=reason):
            build(f"--distill.teacher={folder}")
    train(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="a run whose newest checkpoint is there and whole"):
        build(f"--distill.teacher={tmp_path / 'run'}")


def test_a_teacher_that_knows_the_test_labels_is_refused(tmp_path, image_folder):
    images = (f"--data.path={image_folder}", "--data.eval_split=null", "--data.eval_fraction=0.25")
    train(tmp_path / "teacher", *images)
    told = f"--distill.teacher={tmp_path / 'teacher'}"
    assert build(*images, told).classes == 2
    with pytest.raises(UserError, match=r"distill\.teacher is .*trained with the labels of \d of these 3 test images"):
        build(*images, told, "--data.cut_seed=1")


def test_settings_are_read_without_a_look_at_the_teacher(tmp_path):
    config = parse(supervised.SupervisedConfig, [f"--distill.teacher={tmp_path / 'nowhere'}"])
    assert config.distill.teacher_sha256 is None
    with pytest.raises(UserError, match=r"distill\.teacher is .*nowhere; it must be a folder"):
        with_teacher_digest(config)


def test_a_comparison_knows_a_training_by_the_weights_of_its_teacher(tmp_path, teacher):
    entry = EncoderEntry(
        "student", str(tmp_path / "run"), train="supervised", train_options={"distill.teacher": str(teacher)}
    )
    config = training_settings(entry, 0)
    assert config.distill.teacher_sha256 == sha256_of(teacher / "model.safetensors")
    assert relevant_settings(config)["distill.teacher_sha256"] == config.distill.teacher_sha256

"""The main job, whole: what it writes, how it resumes, how it fails."""

import os
import stat
import time

import numpy as np
import pytest
import torch
from colours import write
from conftest import encoded, picture, read_metrics, refused, refused_with, title_and_tags, weights_of
from model_inputs import HALVES
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.testing import CompileCounterWithBackend

import mpp
from mpp.config import Config, settings_of
from mpp.config.parsing import parse_saved
from mpp.data.dataset import ImageDataset
from mpp.models.descriptions import EncoderFacts, export_encoder
from mpp.training.checkpoint import complete_checkpoints
from mpp.training.log import read_history
from mpp.training.loop import TrainingStep

PROBED = ("--run.eval_every=2", "--probe.every=2", "--probe.images=40")


def test_a_run_writes_what_it_promises(pretrain, capsys):
    """With the permissions that the umask gives, weights too, which safetensors writes for their owner only."""
    before = os.umask(0o002)
    try:
        folder = pretrain(*PROBED)
    finally:
        os.umask(before)
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (folder, *folder.rglob("*"))}
    assert modes == {(False, 0o664), (True, 0o775)}
    assert {path.name for path in folder.iterdir() if "tfevents" not in path.name} == {
        *("config.yaml", "data.json", "metrics.jsonl", "verdict.json", "checkpoints", "encoder", ".lock"),
        "heldout_patches.npz",
    }
    assert [c.name for c in complete_checkpoints(folder)] == ["step_00000002", "step_00000004"]
    assert {path.name for path in (folder / "encoder").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    card = (folder / "encoder" / "README.md").read_text()
    title, tags = title_and_tags(folder / "encoder")
    assert title == "run: encoder pre-trained without labels" and "self-supervised" in tags
    assert "birds, 633 images" in card and "  width: 16\n" in card
    first, *lines = read_history(folder)
    assert first["step"] == 0 and set(first) >= {"knn/depth_01", "knn/floor_pixels", "features/rank/depth_01"}
    assert "features/rank/floor_pixels" not in first
    trained = {"step", "loss", "accuracy", "most_frequent", "nearest", "two_nearest", "unreadable"}
    trained |= {"optim/lr", "optim/grad_norm"}
    trained |= {"speed/images_per_second", "speed/data_wait", "speed/executed_tflops", "speed/memory_gb"}
    assert list(read_metrics(folder)) == [1, 2, 3, 4] and set(lines[0]) >= trained
    seconds = 3600 * np.diff([0, *read_metrics(folder, "speed/hours").values()])
    images = seconds * [*read_metrics(folder, "speed/images_per_second_overall").values()]
    assert images == pytest.approx(8)  # of a step
    held_out = [line for line in lines if "heldout/loss" in line]
    assert [line["step"] for line in held_out] == [2, 4]
    assert f"| `heldout/accuracy` | {held_out[-1]['heldout/accuracy']:.4g} |" in card
    assert set(held_out[0]) >= {"heldout/accuracy", "heldout/nearest", "knn/depth_01", "knn/depth_02"}
    assert 1 <= held_out[0]["features/rank/depth_01"] <= 8  # as many as images
    said, shown = capsys.readouterr()
    assert "training: 100%" in shown and "8 held-out images" in said
    assert f"wrote {folder}" in said and f"next: mpp fewshot --encoder {folder}\n" in said


def logged(folder):
    """Tag -> [(step, value)], by the names of TensorBoard."""
    found = {}
    for line in read_history(folder):
        step = line.pop("step")
        for name, value in line.items():
            tag = name if "/" in name else f"train/{name}"
            found.setdefault(tag, []).append((step, pytest.approx(value, rel=1e-6)))
    return found


def test_tensorboard_shows_the_resumed_part_and_the_pictures(pretrain, stopped_at, monkeypatch):
    now = time.time()
    for start, step in enumerate((3, 5)):
        monkeypatch.setattr(time, "time", lambda start=start: now + 60 * start)  # its files are read by their time
        stopped_at(step, "--run.steps=8")
    monkeypatch.setattr(time, "time", lambda: now + 120)
    folder = pretrain("--run.steps=8")
    assert len(list(folder.glob("events.*"))) == 3
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    shown = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}
    assert [step for step, _ in logged(folder)["train/loss"]] == list(range(1, 9))
    assert shown == logged(folder)
    (panel,) = events.Images(tags["images"][0])
    assert (panel.width, panel.height) == (4 * 128, 8 * 128)
    assert {"config/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])


def test_a_card_says_that_others_learned_labels(pretrain, finished_run, tmp_path):
    """Of what it began from or was taught by, however many runs ago."""
    facts = EncoderFacts(learned_labels=True)
    export_encoder(mpp.load_encoder(finished_run), tmp_path / "with", 32, *HALVES, 0.875, facts)
    of_teacher = ("--objective.name=features", f"--objective.teacher={tmp_path / 'with'}")
    taught = pretrain(*of_teacher, "--run.steps=1", dir=tmp_path / "taught")
    for folder in (taught, pretrain(f"--model.init_from={taught}", "--run.steps=1")):
        title, tags = title_and_tags(folder / "encoder")
        assert title.endswith(": encoder pre-trained without labels, which builds on an encoder that learned labels")
        assert "self-supervised" not in tags and "mpp" in tags


def test_learning_happens(pretrain):
    losses = read_metrics(pretrain("--run.steps=60", "--optim.lr=0.01", "--run.log_every=10", "--data.flip=false"))
    assert losses[60] < losses[10] - 0.5


def test_dropout_and_seed_matter(pretrain, finished_run, tmp_path):
    options = ("--model.dropout=0.1", "--run.seed=1")
    runs = [pretrain(option, "--run.steps=1", dir=tmp_path / option) for option in options]
    assert len({read_metrics(run)[1] for run in (finished_run, *runs)}) == 3


@pytest.mark.parametrize(
    "setting", [pytest.param("--run.compile=true", marks=pytest.mark.faults), "--model.activation_checkpointing=true"]
)
def test_a_probe_while_training_changes_nothing(pretrain, tmp_path, monkeypatch, setting):
    """It looks at the blocks of the model that is trained."""
    compiled = torch.nn.Module.compile
    counted = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled(module, backend=counted))
    quiet = pretrain(setting, "--run.eval_every=2", dir=tmp_path / "quiet")
    graphs, counted.frame_count = counted.frame_count, 0
    probed = pretrain(setting, *PROBED)
    assert weights_of(probed) == weights_of(quiet) and counted.frame_count == graphs
    assert list(read_metrics(probed, "knn/depth_02")) == [0, 2, 4]  # first the untrained encoder


def test_accumulation_equals_the_big_batch(pretrain, finished_run, tmp_path):
    """8 images in passes of at most 3 are shares of 2, 3 and 3."""
    parts = pretrain("--data.batch_size=3", dir=tmp_path / "parts")
    for key in ("loss", "optim/grad_norm", "accuracy", "nearest", "most_frequent", "heldout/loss"):
        assert read_metrics(parts, key) == pytest.approx(read_metrics(finished_run, key), rel=1e-5)


def test_a_finished_run_says_so_and_changes_nothing(pretrain, trained, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    operational = ["--run.log_every=3", "--run.checkpoint_every=9", "--run.threads=2", "--probe.every=3"]
    operational += ["--data.batch_size=2", "--data.workers=7", "--data.cache_gb=9"]
    pretrain(*operational, "--model.activation_checkpointing=true")
    assert f"{trained} is finished: 4 steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_settings_that_may_differ_on_resume_are_those_of_the_page():
    """Of mpp/README.md. `run.compile` is compared in a way of its own."""
    may_differ = {each.key: each.about["operational"] for each in settings_of(Config()) if each.is_shown}
    of_run = {key for key in may_differ if key.startswith(("run.", "probe."))}
    assert {key for key in of_run if not may_differ[key]} == {
        *("run.steps", "run.seed", "run.reduction", "run.precision", "run.compile")
    }
    assert {key for key in may_differ.keys() - of_run if may_differ[key]} == {
        *("data.batch_size", "data.cache_gb", "data.read_retries", "data.workers", "model.activation_checkpointing")
    }


def test_a_short_runs_warm_up_is_noted_and_resumed(pretrain, stopped_at):
    options = ("--run.steps=10", "--run.eval_every=10", "--run.checkpoint_every=5")
    stopped_at(6, *options, without="--optim.warmup")
    folder = pretrain(*options, without="--optim.warmup")
    assert parse_saved(Config, folder / "config.yaml").optim.warmup_steps == 2
    rates = read_metrics(folder, "optim/lr")
    assert [rates[step] for step in (1, 2, 3)] == pytest.approx([0.005, 0.01, 0.01]) and rates[10] < 0.001
    with refused(r"cannot continue with this length"):
        pretrain(*options, "--run.steps=20", without="--optim.warmup")  # the warm-up would be 4 steps of these
    with refused(r"run is a run with another config: .*run\.seed"):  # and not of the warm-up
        pretrain("--run.steps=2", "--run.seed=1", without="--optim.warmup")


def test_another_config_in_the_same_folder_is_refused(pretrain, trained):
    before = (trained / "config.yaml").read_bytes()
    said = r"corruption\.rate \(0\.5 in the run, 0\.3 now\), optim\.lr \(0\.01 in the run, 0\.5 now\)"
    with refused(rf"run\.precision .*, run\.reduction .*, {said}"):
        pretrain("--optim.lr=0.5", "--corruption.rate=0.3", "--run.precision=bf16", "--run.reduction=bf16")
    assert (trained / "config.yaml").read_bytes() == before


def test_other_files_are_not_written_over(pretrain, tmp_path):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("precious")
    for folder in (tmp_path, thesis):
        with refused("holds something else"):
            pretrain(dir=folder)
    assert [*tmp_path.iterdir()] == [thesis]


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--data.path=/nowhere", "data.path | /nowhere"),
        ("--corruption.rate=0.01", "corruption.rate | of 16 patches"),
        ("--objective.grid=3", "objective.grid | unless objective.name is grid_color"),
        ("--model.name=vit_tiny_patch17_224", "model.name | vit_tiny_patch17_224"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(pretrain, tmp_path, argument, words):
    with refused_with(words):
        pretrain(argument)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def broken_folder(image_folder):
    """A folder of 12 images and three files that are none."""
    for number in range(3):
        (image_folder / "cat" / f"broken{number}.png").write_bytes(b"nothing")
    return image_folder


def test_unreadable_images_are_counted_and_named_once(pretrain, stopped_at, broken_folder, monkeypatch, capsys):
    """Also after a restart, which knows them by what it wrote, and by names that are not UTF-8."""
    name_of = ImageDataset.image_name
    is_no_utf_8 = os.fsdecode(b"caf\xe9.png")
    monkeypatch.setattr(
        ImageDataset, "image_name", lambda self, index: name_of(self, index).replace("broken2.png", is_no_utf_8)
    )
    options = (f"--data.path={broken_folder}", "--data.eval_fraction=0.01")
    stopped_at(3, *options)
    folder = pretrain(*options)
    lines = sorted(line.split("/")[-1] for line in (folder / "unreadable.txt").read_text().splitlines())
    names = ("broken0.png", "broken1.png", "caf\\udce9.png")
    assert lines == [f"{name}: no image file of a known sort" for name in names]
    assert read_metrics(folder, "unreadable")[4] == 3
    assert lines[1] in capsys.readouterr().err


def test_most_images_unreadable_is_an_error(pretrain, broken_folder):
    for number in range(3, 40):
        (broken_folder / "cat" / f"broken{number}.png").write_bytes(b"nothing")
    with refused(r"of the last \d+ images cannot be decoded, such as .*broken"):
        pretrain(f"--data.path={broken_folder}")


@pytest.mark.parametrize("kind, optimizer", [("loss", "adam"), ("gradient", "muon")])
def test_what_is_not_finite_is_named_and_saves_nothing_of_it(pretrain, tmp_path, monkeypatch, kind, optimizer):
    """It is noticed before the checkpoint after step 4, or the evaluation after step 5; the run resumes before it."""
    add_pass = TrainingStep.add_pass

    def poisoned(self, batch):
        if self.step != 2:
            return add_pass(self, batch)
        if kind == "loss":
            return add_pass(self, batch._replace(images=batch.images * float("nan")))
        hook = next(self.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
        add_pass(self, batch)
        hook.remove()

    arguments = (f"--optim.name={optimizer}", "--run.steps=6", "--run.log_every=6", "--run.eval_every=5")
    arguments += ("--objective.name=pixels",)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "add_pass", poisoned)
        for when in ("--run.checkpoint_every=2", "--run.checkpoint_every=99"):  # saved next, and evaluated next
            with pytest.raises(FloatingPointError, match=r"of step 2 is not finite .*images s\d+\.jpg, "):
                pretrain(*arguments, when)
            assert read_history(tmp_path / "run") == []
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    assert checkpoint.name == "step_00000002"
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())
    assert read_metrics(pretrain(*arguments))[6] > 0


def test_images_smaller_than_the_crop_and_one_pixel_are_fine(pretrain, tmp_path):
    sizes = enumerate([(1, 1), (3, 200), (7, 5), (64, 64)] * 3)
    images = write(tmp_path / "images", {f"{number}.png": encoded(picture(number, size)) for number, size in sizes})
    assert read_metrics(pretrain(f"--data.path={images}"), "unreadable")[4] == 0

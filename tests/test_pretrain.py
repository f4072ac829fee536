"""The main job, whole: what it writes, how it resumes, how it fails."""

import gc
import json
import os
import stat
import time
import weakref

import pytest
import torch
import yaml
from conftest import Killed, encoded, kill_at, picture, read_metrics, title_and_tags
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.testing import CompileCounterWithBackend

import mpp
from mpp.config import Config, RunConfig
from mpp.config.parsing import parse, parse_saved
from mpp.data.dataset import ImageDataset
from mpp.errors import UserError
from mpp.models.descriptions import EncoderFacts, export_encoder
from mpp.models.networks import MaskedPatchPredictor
from mpp.training import loop
from mpp.training.checkpoint import complete_checkpoints
from mpp.training.log import read_history
from mpp.training.loop import TrainingStep


def weights(folder):
    return (folder / "encoder" / "model.safetensors").read_bytes()


def test_a_run_writes_what_it_promises(pretrain, capsys):
    folder = pretrain("--probe.every=2", "--run.eval_every=2")
    assert {path.name for path in folder.iterdir() if "tfevents" not in path.name} == {
        *("config.yaml", "data.json", "metrics.jsonl", "verdict.json", "checkpoints", "encoder", ".lock"),
        "heldout_patches.npz",
    }
    assert [c.name for c in complete_checkpoints(folder)] == ["step_00000002", "step_00000004"]
    assert {path.name for path in (folder / "encoder").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    card = (folder / "encoder" / "README.md").read_text()
    title, tags = title_and_tags(folder / "encoder")
    assert title == "run: encoder pre-trained without labels" and "self-supervised" in tags
    assert "masked patch prediction" in card and "birds, 633 images" in card and "  width: 16\n" in card
    first, *lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert first["step"] == 0 and set(first) >= {"knn/depth_01", "knn/floor_pixels", "features/rank/depth_01"}
    trained = {"step", "loss", "accuracy", "most_frequent", "nearest", "two_nearest", "unreadable"}
    trained |= {"optim/lr", "optim/grad_norm"}
    speed = {"speed/images_per_second", "speed/data_wait", "speed/executed_tflops", "speed/memory_gb"}
    assert set(lines[0]) >= trained | speed
    held_out = [line for line in lines if "heldout/loss" in line]
    assert [line["step"] for line in held_out] == [2, 4]
    assert f"| `heldout/accuracy` | {held_out[-1]['heldout/accuracy']:.4g} |" in card
    assert set(held_out[0]) >= {"heldout/accuracy", "heldout/nearest", "knn/depth_01", "knn/depth_02"}
    assert 1 <= held_out[0]["features/rank/depth_01"] <= 8  # as many as images
    assert list(read_metrics(folder)) == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert (
        f"wrote {folder}" in said
        and f"next: mpp fewshot --encoder {folder}\n" in said
        and "masked-patch accuracy" in said
    )
    assert mpp.load_encoder(folder)(torch.zeros(1, 3, 32, 32)).shape == (1, 16)


def shown_by_tensorboard(folder):
    """Tag -> [(step, value)], as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def logged(folder):
    """The same of metrics.jsonl."""
    found = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        step = line.pop("step")
        for name, value in line.items():
            tag = name if "/" in name else f"train/{name}"
            found.setdefault(tag, []).append((step, pytest.approx(value, rel=1e-6)))
    return found


def test_tensorboard_shows_the_resumed_part(pretrain, monkeypatch):
    options, now = ("--run.steps=8", "--data.workers=0"), time.time()
    for start, killed_before in enumerate((3, 5, None)):
        with monkeypatch.context() as context:
            context.setattr(time, "time", lambda start=start: now + 60 * start)  # its files are read by their time
            if killed_before is None:
                folder = pretrain(*options)
            else:
                kill_at(context, killed_before)
                with pytest.raises(Killed):
                    pretrain(*options)
    assert len(list(folder.glob("events.*"))) == 3
    assert [step for step, _ in logged(folder)["train/loss"]] == list(range(1, 9))
    assert shown_by_tensorboard(folder) == logged(folder)


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775)])
def test_files_have_the_permissions_that_the_umask_gives(pretrain, umask, file_mode, folder_mode):
    """Weights too, which safetensors writes for their owner only."""
    before = os.umask(umask)
    try:
        folder = pretrain()
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_file()} == {file_mode}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {folder_mode}


def test_a_card_says_that_others_learned_labels(pretrain, finished_run, tmp_path):
    """Of what it began from or was taught by, however many runs ago."""
    plain, input_config = mpp.load_encoder(finished_run), (32, (0.5,) * 3, (0.5,) * 3, 0.875)
    export_encoder(plain, tmp_path / "with", *input_config, EncoderFacts(learned_labels=True))
    taught = ("--objective.name=features", f"--objective.teacher={tmp_path / 'with'}")
    first = pretrain(f"--model.init_from={tmp_path / 'with'}", dir=tmp_path / "first")
    runs = [first, pretrain(f"--model.init_from={first}", dir=tmp_path / "second"), pretrain(*taught)]
    for folder in runs:
        title, tags = title_and_tags(folder / "encoder")
        assert title.endswith(": encoder pre-trained without labels, which builds on an encoder that learned labels")
        assert "self-supervised" not in tags and "mpp" in tags
    from_plain = pretrain(f"--model.init_from={finished_run}", dir=tmp_path / "third")
    assert "self-supervised" in title_and_tags(from_plain / "encoder")[1]


def test_tensorboard_shows_the_same_scalars_and_pictures(trained):
    folder = trained
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    for key in ("loss", "accuracy", "heldout/accuracy", "optim/lr", "speed/images_per_second"):
        shown = {e.step: e.value for e in events.Scalars(key if "/" in key else f"train/{key}")}
        assert shown == pytest.approx(read_metrics(folder, key))
    (panel,) = events.Images(tags["images"][0])
    assert (panel.width, panel.height) == (4 * 128, 8 * 128)
    assert {"config/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])


def test_a_run_folder_is_one_run_of_wandbs(pretrain, tmp_path, monkeypatch):
    """However often it is started; in the project that is asked for, by the folder's name. Nothing is sent."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    opened, init = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: opened.append(init(**options)) or opened[-1])
    arguments = ("--run.trackers=[wandb]", "--run.project=birds")
    with monkeypatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            pretrain(*arguments)
    pretrain(*arguments)
    pretrain("--run.trackers=[wandb,tensorboard]", dir=tmp_path / "other")
    assert [(run.project, run.name) for run in opened] == [("birds", "run")] * 2 + [("mpp", "other")]
    assert opened[0].id == opened[1].id != opened[2].id
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert sorted(file.stem for file in files) == sorted(f"run-{run.id}" for run in opened)
    assert sum(b"heldout/loss" in file.read_bytes() for file in files) == 2  # the first was killed before it


def test_saved_config_repeats_the_run(pretrain, finished_run, tmp_path):
    first = finished_run
    saved = yaml.safe_load((first / "config.yaml").read_text())
    assert saved["model"]["width"] == 16 and saved["optim"]["global_batch_size"] == 8
    again = pretrain("--config", str(first / "config.yaml"), f"--run.dir={tmp_path / 'again'}", dir=tmp_path / "again")
    assert weights(first) == weights(again)
    assert parse(Config, ["--config", str(again / "config.yaml")]).run.dir == str(tmp_path / "again")


def test_learning_happens(pretrain):
    losses = read_metrics(pretrain("--run.steps=60", "--optim.lr=0.01", "--run.log_every=10", "--data.flip=false"))
    assert losses[60] < losses[10] - 0.5


HARD = (
    "--model.dropout=0.1",
    "--model.drop_path=0.1",
    "--data.batch_size=4",
    "--run.steps=6",
    "--run.checkpoint_every=2",
    "--probe.every=6",
)


@pytest.mark.parametrize(
    ("step", "optimizer", "overlay"),
    [
        (1, "muon", None),  # before the first checkpoint
        pytest.param(3, "adam", "rivals/maskfeat", marks=pytest.mark.faults),  # between two
        pytest.param(4, "adam", "rivals/simmim", marks=pytest.mark.faults),  # at one
        pytest.param(5, "muon", "rivals/mae", marks=pytest.mark.faults),  # at the end
    ],
    ids=lambda value: str(value),
)
def test_a_stopped_run_goes_on_with_the_same_bits(pretrain, tmp_path, monkeypatch, step, optimizer, overlay):
    arguments = (*HARD, f"--optim.name={optimizer}", *([f"--config={overlay}"] if overlay else []))
    whole = pretrain(*arguments, dir=tmp_path / "whole")
    with monkeypatch.context() as context:
        kill_at(context, step)
        with pytest.raises(Killed):
            pretrain(*arguments)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn by the kill
    resumed = pretrain(*arguments)
    assert weights(resumed) == weights(whole)
    for key in ("loss", "accuracy", "optim/lr", "heldout/loss"):
        assert read_metrics(resumed, key) == read_metrics(whole, key)
    steps, of_whole = (
        [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (resumed, whole)
    )
    assert steps == of_whole
    shown = EventAccumulator(str(resumed), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == list(range(1, 7))
    untrained = "features/rank/depth_01"
    assert [event.step for event in shown.Scalars(untrained)] == list(read_metrics(whole, untrained))


@pytest.mark.faults
def test_a_hybrids_patches_are_those_of_its_grid(pretrain, capsys):
    """Its patch embedding calls a place of a feature map a patch; in pixels one is 32 wide."""
    folder = pretrain("--model.name=vit_tiny_r_s16_p8_224", "--run.steps=1", "--model.img_size=64", without="--model")
    assert "4 patches of 32 x 32, 2 corrupted" in capsys.readouterr().out
    assert mpp.load_encoder(folder).forward_features(torch.zeros(1, 3, 64, 64)).shape[1] == 1 + 4
    assert 0 <= read_metrics(folder, "heldout/nearest")[1] <= 1


def test_dropout_and_seed_matter(pretrain, finished_run, tmp_path):
    runs = [
        pretrain("--model.dropout=0.1", dir=tmp_path / "a"),
        finished_run,
        pretrain("--run.seed=1", dir=tmp_path / "c"),
    ]
    assert len({weights(run) for run in runs}) == 3


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
    probed = pretrain(setting, "--run.eval_every=2", "--probe.every=2", dir=tmp_path / "probed")
    assert weights(probed) == weights(quiet) and counted.frame_count == graphs
    assert list(read_metrics(probed, "knn/depth_02")) == [0, 2, 4]  # first the untrained encoder


@pytest.mark.parametrize("size", [2, 3])
def test_accumulation_equals_the_big_batch(pretrain, finished_run, tmp_path, size):
    """8 images in passes of at most 3 are shares of 2, 3 and 3."""
    whole = finished_run
    parts = pretrain(f"--data.batch_size={size}", dir=tmp_path / "parts")
    for key in ("loss", "optim/grad_norm", "accuracy", "nearest", "most_frequent", "heldout/loss"):
        assert read_metrics(parts, key) == pytest.approx(read_metrics(whole, key), rel=1e-5)


@pytest.mark.faults
def test_images_decoded_once_train_to_the_same_bits(pretrain, tmp_path, image_folder, monkeypatch):
    built = []
    build = loop.training_loader
    monkeypatch.setattr(loop, "training_loader", lambda views, *rest: (built.append(views), build(views, *rest))[1])
    arguments = (f"--data.path={image_folder}", "--data.eval_split=null", "--data.workers=1")
    kept, read = (pretrain(*arguments, f"--data.cache_gb={gb}", dir=tmp_path / str(gb)) for gb in (0.5, 0))
    assert weights(kept) == weights(read)
    assert built[0].dataset.decoded and built[0].data.workers == 0  # one thread, which loads too
    assert not built[1].dataset.decoded and built[1].data.workers == 1


def test_a_finished_run_says_so_and_changes_nothing(pretrain, trained, capsys):
    folder = trained
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    pretrain("--run.log_every=3", "--data.batch_size=2")  # operational settings may differ
    assert f"{folder} is finished: 4 steps" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_short_runs_warm_up_is_noted_and_resumed(pretrain, monkeypatch):
    options = ("--run.steps=10", "--run.eval_every=10", "--run.checkpoint_every=5")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 6)
        pretrain(*options, without="--optim.warmup")
    folder = pretrain(*options, without="--optim.warmup")
    assert parse_saved(Config, folder / "config.yaml").optim.warmup_steps == 2
    rates = read_metrics(folder, "optim/lr")
    assert [rates[step] for step in (1, 2, 3)] == pytest.approx([0.005, 0.01, 0.01]) and rates[10] < 0.001
    longer = (*options, "--run.steps=20")  # the warm-up would be 4 steps of these, and stays that of the beginning
    with pytest.raises(UserError, match=r"cannot continue with this length"):
        pretrain(*longer, without="--optim.warmup")
    with pytest.raises(UserError, match=r"cannot continue with this length"):
        pretrain(*longer, "--optim.warmup_steps=5", without="--optim.warmup")


def test_another_config_in_the_same_folder_is_refused(pretrain, trained):
    folder = trained
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(
        ValueError, match=r"corruption\.rate \(0\.5 in the run, 0\.3 now\), optim\.lr \(0\.01 in the run, 0\.5 now\)"
    ):
        pretrain("--optim.lr=0.5", "--corruption.rate=0.3", "--run.steps=5")
    assert (folder / "config.yaml").read_bytes() == before


def test_other_files_are_not_written_over(pretrain, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds something else"):
        pretrain()
    with pytest.raises(ValueError, match="holds something else"):
        pretrain(dir=tmp_path / "run" / "thesis.tex")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--data.path=/nowhere", ["data.path", "/nowhere"]),
        ("--corruption.rate=0.01", ["corruption.rate", "of 16 patches"]),
        ("--objective.name=colour", ["objective.name", "mean_color"]),
        ("--objective.grid=3", ["objective.grid", "unless objective.name is grid_color"]),
        ("--model.name=vit_tiny_patch17_224", ["model.name", "vit_tiny_patch17_224"]),
    ],
)
def test_bad_input_is_named_before_anything_is_written(pretrain, tmp_path, argument, words):
    with pytest.raises(ValueError) as error:
        pretrain(argument)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_unreadable_images_are_counted_and_named(pretrain, image_folder, capsys):
    for number in range(3):
        (image_folder / "cat" / f"broken{number}.png").write_bytes(b"nothing")
    folder = pretrain(f"--data.path={image_folder}", "--run.steps=4", "--data.eval_fraction=0.01")
    named = (folder / "unreadable.txt").read_text()
    names = [line.split(": ")[0].split("/")[-1] for line in named.splitlines()]
    assert sorted(names) == ["broken0.png", "broken1.png", "broken2.png"]  # each once
    assert read_metrics(folder, "unreadable")[4] == 3
    assert "broken1.png: no image file of a known sort" in capsys.readouterr().err


def test_names_that_are_not_utf_8_are_listed_once(pretrain, image_folder, monkeypatch):
    """Also after a restart, which knows them by what it wrote."""
    for number in range(3):
        (image_folder / "cat" / f"broken{number}.png").write_bytes(b"nothing")
    monkeypatch.setattr(ImageDataset, "image_name", lambda self, index: os.fsdecode(b"caf\xe9.png"))
    options = (f"--data.path={image_folder}", "--data.eval_fraction=0.01")
    with monkeypatch.context() as context:
        kill_at(context, 3)
        with pytest.raises(Killed):
            pretrain(*options)
    folder = pretrain(*options)
    lines = (folder / "unreadable.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["caf\\udce9.png: no image file of a known sort"]


def test_a_run_folder_needs_a_name_in_utf_8(pretrain, tmp_path):
    assert RunConfig(dir="写真\u3000é").dir == "写真\u3000é"
    with pytest.raises(UserError, match=r"run.dir is .*caf\\udce9'; it must be a name in UTF-8"):
        pretrain(f"--run.dir={tmp_path}/caf\udce9")


def test_most_images_unreadable_is_an_error(pretrain, image_folder):
    for number in range(40):
        (image_folder / "cat" / f"broken{number}.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"of the last \d+ images cannot be decoded, such as .*broken"):
        pretrain(f"--data.path={image_folder}")


@pytest.mark.parametrize("sort", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_update(pretrain, tmp_path, monkeypatch, sort):
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * float("nan") if sort == "loss" else x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    forward, calls, models = MaskedPatchPredictor.forward, [], []

    def poisoned(self, images, corruption):
        models[:] = [weakref.ref(self)]
        calls.append(self.training and images.device.type == "cpu" and torch.is_grad_enabled())
        result = forward(self, images, corruption)
        return Poison.apply(result) if sum(calls) == 4 else result

    monkeypatch.setattr("mpp.pretrain.executed_flops", lambda *_: 1)  # it runs the model too
    monkeypatch.setattr(MaskedPatchPredictor, "forward", poisoned)
    with pytest.raises(
        FloatingPointError, match=r"of step 3 is not finite .*images s\d+\.jpg, .*checkpoint is intact: .*begin again"
    ):
        pretrain("--run.steps=6")
    gc.collect()
    assert models[0]() is None  # the next run of this process needs its memory
    (checkpoint,) = complete_checkpoints(tmp_path / "run")
    assert checkpoint.name == "step_00000002"
    assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())
    monkeypatch.undo()
    assert read_metrics(pretrain("--run.steps=6"))[6] > 0  # resumes from it


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_verdict_read_late_saves_nothing_of_it(pretrain, tmp_path, monkeypatch, optimizer):
    """The loss of step 2 is not finite, which is noticed before the checkpoint after step 4, or the evaluation."""
    add_pass = TrainingStep.add_pass

    def poisoned(self, batch):
        add_pass(self, batch._replace(images=batch.images * float("nan")) if self.step == 2 else batch)

    monkeypatch.setattr(TrainingStep, "add_pass", poisoned)
    arguments = ("--run.steps=10", "--run.log_every=10", "--run.eval_every=5", "--objective.name=pixels")
    for when in ("--run.checkpoint_every=2", "--run.checkpoint_every=99"):  # saved next, and evaluated next
        with pytest.raises(FloatingPointError, match=r"of step 2 is not finite .*images s\d+\.jpg, "):
            pretrain(*arguments, when, f"--optim.name={optimizer}")
        assert read_history(tmp_path / "run") == []
    assert [each.name for each in complete_checkpoints(tmp_path / "run")] == ["step_00000002"]


def test_images_smaller_than_the_crop_and_one_pixel_are_fine(pretrain, tmp_path):
    (tmp_path / "images").mkdir()
    for number, size in enumerate([(1, 1), (3, 200), (7, 5), (64, 64)] * 3):
        (tmp_path / "images" / f"{number}.png").write_bytes(encoded(picture(number, size)))
    assert read_metrics(pretrain(f"--data.path={tmp_path / 'images'}"), "unreadable")[4] == 0


def test_a_shorter_run_in_the_folder_of_another_is_told_of_that_one(pretrain):
    """And of no warm-up, which nobody chose."""
    folder = pretrain("--run.steps=10", "--optim.warmup_steps=null")
    with pytest.raises(UserError, match=f"{folder.name} is a run with another config: .*run.seed"):
        pretrain("--run.steps=2", "--optim.warmup_steps=null", "--run.seed=1")

"""What the tests share: a run that takes a second, and image files to feed it with."""

import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

from mpp.errors import UserError

pytest_plugins = ("classified_images",)
settings.register_profile("unhurried", deadline=None)  # a busy machine fails no test
settings.load_profile("unhurried")

ROOT = Path(__file__).parent.parent
HANGS = 15 * 60  # seconds: what takes longer hangs, on any machine
TINY = (
    "--run.report=false",
    *("--run.steps=4", "--run.log_every=1", "--run.checkpoint_every=2", "--run.precision=fp32", "--run.threads=1"),
    *("--data.workers=0", "--data.eval_images=8", "--probe.every=0"),
    *("--model.width=16", "--model.depth=2", "--model.heads=2", "--model.img_size=32"),
    *("--optim.global_batch_size=8", "--optim.warmup_steps=0"),
)


FAST = ("--precision=fp32", "--data.workers=0", "--threads=1")  # of evaluations
ONLY_MASKED = ("--corruption.mask=1", "--corruption.random=0", "--corruption.keep=0")
ADAM = ("--optim.name=adam", "--optim.lr=3e-3")


def tiny_without(*starts: str) -> list[str]:
    """TINY without the settings that begin so."""
    return [word for word in TINY if not word.startswith(starts)]


TINY_TUNING = tiny_without("--probe", "--model")
"""What a command takes that begins from an encoder."""
CUT = ("--data.eval_split=null", "--data.eval_fraction=0.25")
"""Hold a quarter of the training images out."""


OF_OTHERS = ("HF_", "ACCELERATE_", "SLURM_", "PMI_", "OMPI_", "MV2_", "TORCHELASTIC_", "WORLD_SIZE", "RANK", "LOCAL_")
OF_OTHERS += ("MASTER_", "OMP_NUM_THREADS")  # of who started the tests: a job, a launcher


def pytest_configure(config):
    """Hide GPUs, before anything loads torch: only `pytest -m gpu` is about them. And the hub, and what is cached."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who started the tests by nohup ignores it, and so would commands
    for name in [name for name in os.environ if name.startswith(OF_OTHERS) or name.lower().endswith("_proxy")]:
        del os.environ[name]
    home, tools = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    config.add_cleanup(home.cleanup)
    config.add_cleanup(tools.cleanup)
    # There is no hub but fake_hub.py, on a port that no system gives away, and nothing is kept of what is read. The
    # libraries look at this once, so that none of them is imported at the top of this file.
    os.environ |= {
        "HF_HOME": home.name,
        "HF_ENDPOINT": f"http://127.0.0.1:{20_000 + os.getpid() % 10_000}",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "TORCHINDUCTOR_CACHE_DIR": f"{home.name}/inductor",  # what compiles does compile
        "TORCH_WARM_POOL": "0",
        "COUNTED": home.name,
    }
    if compiler := shutil.which("g++"):  # what inductor writes is compiled in a third of the time
        wrapper = Path(tools.name) / "g++"
        wrapper.write_text(f'#!/bin/bash\nexec {compiler} "${{@/#-O3/-O1}}"\n')
        wrapper.chmod(0o700)
        os.environ["CXX"] = str(wrapper)


def pytest_collection_finish():
    """What was imported stays: the garbage collector, which every run calls, need not look at it again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state in the process: every test starts without, and with one thread.

    Beside another worker of pytest-xdist, two threads on two cores take longer than one.
    """
    import torch
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def uncollected(monkeypatch):
    """The end of each run collects garbage, which took half of a tiny run; Python does when there is much."""
    monkeypatch.setattr("accelerate.utils.memory.gc.collect", int)


@pytest.fixture(autouse=True)
def fresh_messages():
    """A process prints a message once, and asks the hub once: every test starts as a new process does."""
    from mpp.data.workers import allow_warning_again
    from mpp.runtime import messages, weights

    messages.tell.cache_clear()
    weights.download.cache_clear()
    allow_warning_again()


@pytest.fixture(autouse=True)
def fresh_listings():
    """A process removes its listings of images at its end, and looks through all at each start."""
    yield
    from mpp.data import caches

    for folder in [*caches.locks]:
        caches.discard(folder)


def remembered(function):
    """The same count of a model's operations, once for each kind of model: it is a third of a tiny run.

    Counts are files, so that the processes of commands have them, too.
    """
    from torch.utils._pytree import tree_map

    from mpp.runtime.files import complete, short_digest

    def counted(model, *given, **options):
        shapes = tree_map(lambda each: getattr(each, "shape", each), given)
        learned = [each.requires_grad for each in model.parameters()]
        kind = f"{function.__name__} {model} {learned} {shapes} {options}"
        file = Path(os.environ["COUNTED"], short_digest([kind.encode()]))
        if not file.exists():
            with complete(file, shared=True) as part:
                part.write_text(str(function(model, *given, **options)))
        return int(file.read_text())

    return counted


def remember_counts(patch: pytest.MonkeyPatch) -> None:
    """Have a process count operations so."""
    from mpp.training import flops

    patch.setattr(flops, "optimizer_flops", remembered(flops.optimizer_flops))
    for module in ("mpp.pretrain", "evaluation.supervised", "evaluation.contrastive"):
        patch.setattr(f"{module}.executed_flops", remembered(flops.executed_flops))


@pytest.fixture(autouse=True)
def remembered_counts(monkeypatch, request):
    """In this process; in those of commands: server.py."""
    if request.path.name != "test_flops.py":
        remember_counts(monkeypatch)


@pytest.fixture
def without_module(monkeypatch):
    """without_module(name): a decoder's module is taken for absent."""
    return lambda module: monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def pretrain(tmp_path):
    """A tiny pre-training run in this process: pretrain("--optim.lr=1", dir=...) -> its folder."""
    from accelerate.state import AcceleratorState

    from mpp.pretrain import main

    def run(*arguments: str, dir: Path = tmp_path / "run", without: str = "--none") -> Path:
        AcceleratorState._reset_state(True)
        main([*tiny_without(without), f"--run.dir={dir}", *arguments])
        return dir

    return run


@pytest.fixture
def group_of_one():
    """This process is a process group by itself."""
    from torch import distributed

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished tiny pre-training run; tests must not change it."""
    from mpp.pretrain import main

    folder = tmp_path_factory.mktemp("finished") / "run"
    main([*TINY, f"--run.dir={folder}"])
    return folder


@pytest.fixture
def trained(finished_run, tmp_path):
    """A copy of it, as if `pretrain()` had been called."""
    return shutil.copytree(finished_run, tmp_path / "run")


@contextmanager
def refused(words: str | None = None, kind: type[Exception] = UserError) -> Iterator[pytest.ExceptionInfo]:
    """What is done here ends with an error of one line, in which this pattern is found."""
    with pytest.raises(kind, match=words) as error:
        yield error
    assert "\n" not in str(error.value)


@contextmanager
def refused_with(words: str) -> Iterator[None]:
    """What is done here ends with an error of one line that has each of these words, between which ` | ` stands."""
    with refused() as error:
        yield
    assert [each for each in words.split(" | ") if each not in str(error.value)] == []


class Killed(BaseException):
    """What a test stops a run with."""


@contextmanager
def killed_at(step: int):
    """A run in this process is killed just before update `step` (from 0) is done."""
    from mpp.training.loop import TrainingStep

    begin = TrainingStep.begin

    def dies(self, number, measure):
        if number == step:
            raise Killed("killed")
        begin(self, number, measure)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(TrainingStep, "begin", dies)
        yield


@pytest.fixture
def stopped_at(pretrain):
    """stopped_at(3, "--optim.lr=1"): a tiny run as `pretrain` starts it, killed before update 3 (from 0)."""

    def run(step: int, *arguments: str, **how) -> None:
        with killed_at(step):
            pretrain(*arguments, **how)

    return run


def weights_of(folder: Path) -> bytes:
    """The exported weights of a run, to the bit."""
    return (folder / "encoder" / "model.safetensors").read_bytes()


def exported(folder: Path) -> dict:
    """The same, by name."""
    from safetensors.torch import load_file

    return load_file(folder / "encoder" / "model.safetensors")


def equal_tensors(one: dict, other: dict) -> bool:
    """Whether they have the same names and bits."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@contextmanager
def interrupted_after(owner, name: str, calls: int):
    """What is done here is interrupted in a function, after so many calls of it."""
    function = getattr(owner, name)
    left = iter(range(calls))

    def interrupted(*given, **named):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*given, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        yield


def read_json(file: Path) -> dict:
    """What a file of JSON holds."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_metrics(folder: Path, key: str = "loss") -> dict[int, float]:
    """Step -> value of a scalar in metrics.jsonl; of a run that writes, the last line may not be whole."""
    whole = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def same(one: Path, other: Path, *keys: str) -> None:
    """Two runs have the same bits, losses, and values of these scalars."""
    assert weights_of(one) == weights_of(other)
    for key in ("loss", *keys):
        assert read_metrics(one, key) == read_metrics(other, key) != {}, key


def close(one: Path, other: Path, *keys: str, **tolerance: float) -> None:
    """Two runs have logged the same losses and values of these scalars, but for rounding."""
    for key in ("loss", *keys):
        expected = read_metrics(other, key)
        assert expected and read_metrics(one, key) == pytest.approx(expected, **tolerance), key


def without_times(folder: Path) -> list[dict]:
    """The lines that a run logged, but for its speed."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "speed/" not in name} for line in lines]


def title_and_tags(encoder: Path) -> tuple[str, list[str]]:
    """What the model card of an encoder folder says that it is."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(encoder / "README.md")
    title = next(line for line in card.text.splitlines() if line.startswith("# "))
    return title.removeprefix("# "), card.data.tags


def heed_interrupts() -> None:
    """A shell starts `command &` with SIGINT ignored, and what that starts has it so: here it means what it does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_command(*words: str) -> subprocess.Popen:
    """A command of the README in a process group of its own, output captured."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=env,
        start_new_session=True,
        preexec_fn=heed_interrupts,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """The same at its end."""
    out, err = process.communicate(timeout=HANGS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_command(*words: str) -> subprocess.CompletedProcess:
    """A command of the README, to its end."""
    return finished(start_command(*words))


def launched(folder: Path, *nodes: tuple[str, ...]) -> list[dict[str, str]]:
    """What launchers, with these options on each node, put into the environment of the processes that they start.

    What torch's agent says of itself is left out: it is gone.
    """
    folder.mkdir()
    script = ("tests/environment.py", str(folder))
    for ended in map(finished, [start_command("accelerate-launch", *options, *script) for options in nodes]):
        assert ended.returncode == 0, ended.stderr
    found = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    return [
        {k: v for k, v in each.items() if os.environ.get(k) != v and not k.startswith("TORCHELASTIC")} for each in found
    ]


def wait_until(condition, poll: float = 0.02, of=None) -> None:
    """Poll until the condition holds, while the command `of` runs."""
    end = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert of is None or not of.ended, of.said[-2000:]
        time.sleep(poll)


@pytest.fixture
def tally(record_property):
    """tally(what, times): faults that were survived, for the table at the end."""
    return lambda what, times=1: record_property("survived", (what, times))


def pytest_terminal_summary(terminalreporter):
    """The reliability table, and that of rehearsals: what, how often, seconds of the tests that did it."""
    times, seconds = Counter(), Counter()
    for test in terminalreporter.stats.get("passed", ()):
        for what, count in (value for name, value in test.user_properties if name == "survived"):
            times[what] += count
            seconds[what] += test.duration
    if times:
        terminalreporter.section("faults survived")
        for what, count in times.items():
            terminalreporter.write_line(f"| {what} | {count} | {seconds[what]:.0f} |")


def picture(seed: int = 0, size: tuple[int, int] = (40, 48)) -> np.ndarray:
    """A smooth colourful image (H, W, 3) uint8, that JPEG keeps nearly as it is."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(30, 226, (3, 3, 3), dtype=np.uint8))
    return np.array(small.resize(size[::-1], Image.Resampling.BICUBIC))


def encoded(image: np.ndarray | Image.Image, format: str = "PNG", **options) -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(buffer, format, **options)
    return buffer.getvalue()


def put_picture(file: Path, seed: int = 0) -> None:
    """Write an image, and the folders that it is in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encoded(picture(seed)))


def write_pictures(folder: Path, count: int) -> Path:
    """A new folder of so many PNG images."""
    for number in range(count):
        put_picture(folder / f"{number:02d}.png", number)
    return folder


def dataset_of(images: list[bytes], **columns: list):
    """A dataset of image files, in the column `image`, and of other columns."""
    import datasets

    cells = [{"bytes": data, "path": None} for data in images]
    rows = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    for name, values in columns.items():
        rows = rows.add_column(name, values)
    return rows


def each_of(arguments: str, cases: dict):
    """Mark a test of each entry of a table, by its name."""
    return pytest.mark.parametrize(arguments, cases.values(), ids=cases)


@pytest.fixture
def rng():
    """Random numbers, the same in every run."""
    return np.random.default_rng(0)


def write_classes(folder: Path, count: int, first: int = 0) -> Path:
    """A folder of PNG images in two classes."""
    for number in range(first, first + count):
        put_picture(folder / ("cat" if number % 2 else "dog") / f"{number:02d}.png", number)
    return folder


@pytest.fixture
def image_folder(tmp_path):
    """Twelve such images."""
    return write_classes(tmp_path / "images", 12)


def newton_schulz(width: int, blocks: int) -> int:
    """Operations of Muon's step: five iterations of X X^T, its square, and the product of both with X."""
    total = 0
    for rows, columns in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
        least, most = sorted((rows, columns))
        total += 5 * 2 * (2 * least**2 * most + least**3)
    return blocks * total


def views_of(dataset, **settings):
    """Views of 32 x 32 pixels, corrupted on a grid of 4 x 4 patches. `settings` are those of `data`."""
    from mpp.config import CorruptionConfig, DataConfig
    from mpp.data.views import ViewDataset

    return ViewDataset(dataset, DataConfig(**settings), 32, 0, CorruptionConfig(), grid=(4, 4))


@pytest.fixture(scope="session")
def few_birds(tmp_path_factory):
    """A part of the photographs of birds, in files of the same names."""
    import datasets

    folder = tmp_path_factory.mktemp("birds")
    for split, count in (("train", 96), ("test", 40)):
        name = f"{split}-00000-of-00001.parquet"
        birds = datasets.load_dataset("parquet", data_files=str(ROOT / "mpp" / "birds" / name), split="train")
        birds.select(range(count)).to_parquet(folder / name)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of derived data, which is not there yet, in an empty cache of the `datasets` library."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / f"mpp_{os.getuid()}"


@pytest.fixture
def two_shards(tmp_path):
    """A folder of two shards to train on and one that is held out."""
    rows = dataset_of([encoded(picture(row)) for row in range(8)])
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        rows.to_parquet(tmp_path / "shards" / f"{name}.parquet")
    return tmp_path / "shards"

"""Datasets of the hub, from a fake one: one commit a run, faults that pass, faults that do not, signals."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pyarrow.parquet as pq
import pytest
from colours import CATS_AND_DOGS, save_classes, seen, write
from conftest import HANGS, ROOT, TINY, read_json, wait_until, weights_of
from fake_hub import ALWAYS, TOKEN, FakeHub, Fault
from server import Command, context, environments_of, fails, finish, limit_files

from mpp.data.data_path import BIRDS_FOLDER
from mpp.runtime.signals import EXIT_CODE, MARKER
from mpp.training.checkpoint import newest_step

pytestmark = pytest.mark.rehearsal
COMMITS = ("1" * 40, "2" * 40)
STREAMED = "--data.streaming=true"
HURRY = 20


def hurry() -> None:
    """Between two tries we wait a twentieth of the time, and so does the library."""
    from huggingface_hub.utils import _http

    from mpp.data import retry

    _http.time = retry.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / HURRY)})


@pytest.fixture
def fake_hub(tmp_path):
    """Two commits of the birds in four shards, of which the second has other images; `main` is at the first."""
    table = pq.read_table(BIRDS_FOLDER / "train-00000-of-00001.parquet").slice(0, 80)
    server = FakeHub(tmp_path / "hub")
    for number, commit in enumerate(COMMITS):
        folder = server.birds / commit / "data"
        folder.mkdir(parents=True)
        for shard in range(4):
            rows = table.slice(40 * number + 10 * shard, 10)
            pq.write_table(rows, folder / f"train-{shard:05d}-of-00004.parquet", row_group_size=5)
    (server.birds / "main").write_text(COMMITS[0])
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def home():
    """Where processes keep what they download: empty."""
    home = Path(os.environ["HF_HOME"])
    shutil.rmtree(home, ignore_errors=True)
    return home


@pytest.fixture
def start(fake_hub, home, tmp_path):
    """A run on a dataset of the hub that begins: start("--run.steps=4", name="run", processes=2)."""

    def start(*words, name="run", processes=1, path="owner/birds", token="", prepare=hurry):
        options = (*TINY, f"--data.path={path}", "--data.eval_split=null", f"--run.dir={tmp_path / name}")
        environments = [each | {"HF_TOKEN": token} for each in environments_of(processes, sharded=False)]
        return Command("pretrain", *options, *words, environments=environments, prepare=prepare)

    return start


@pytest.fixture
def run(start):
    """The same to its end, with this exit code (None: any but 0): its output."""

    def run(*words, code=0, **options):
        command = start(*words, **options)
        exit_code = max(command.wait())
        assert f'File "{ROOT}' not in command.said, command.said
        assert exit_code == code or (code is None and exit_code), command.said
        return command.said

    return run


AWAY = (STREAMED, "--run.steps=24", "--data.shuffle_block=5")  # of a hub that goes away: it is asked in every epoch


@pytest.fixture
def undisturbed(fake_hub, run, home, tmp_path):
    """The encoder of a run without faults, and the number of its requests for files; each kind is run once."""

    def undisturbed(processes=1, workers=0):
        if (processes, workers) not in KNOWN:
            run(*AWAY, f"--data.workers={workers}", name="undisturbed", processes=processes)
            asked = sum("resolve" in line for line in fake_hub.requests)
            KNOWN[processes, workers] = weights_of(tmp_path / "undisturbed"), asked
            shutil.rmtree(home)  # what was downloaded
        return KNOWN[processes, workers]

    return undisturbed


KNOWN: dict[tuple[int, int], tuple[bytes, int]] = {}


def commits_of(folder):
    """Split -> commit, in the data.json of a run."""
    return {part: known["revision"] for part, known in read_json(folder / "data.json").items()}


def unfinish(folder):
    """As if the run had been stopped after its first checkpoint."""
    shutil.rmtree(folder / "encoder")
    shutil.rmtree(folder / "checkpoints" / "step_00000004")


@pytest.mark.parametrize("way", [(), (STREAMED,)], ids=["indexed", "streamed"])
def test_a_run_is_of_one_commit_and_goes_on_with_it(fake_hub, run, tmp_path, way, tally):
    """Though the branch moves, and two processes ask."""
    run(*way)
    assert commits_of(tmp_path / "run") == {"train": COMMITS[0], "held_out": COMMITS[0]}
    unfinish(tmp_path / "run")
    (fake_hub.birds / "main").write_text(COMMITS[1])
    output = run(*way)
    assert "after step 2" in output, output
    assert commits_of(tmp_path / "run")["train"] == COMMITS[0]
    run(*way, name="two", processes=2)
    assert commits_of(tmp_path / "two")["train"] == COMMITS[1]
    tally("hub: its branch moves while a run is stopped, and between two processes: one commit *", 2)


def test_what_is_cached_is_of_the_runs_commit_or_refused(fake_hub, run, tmp_path, tally):
    run()
    (fake_hub.birds / "main").write_text(COMMITS[1])
    run(name="newer")
    unfinish(tmp_path / "run")
    fake_hub.faults["."] = Fault(0)
    output = run(code=2)
    assert f"the newest in its cache is not of commit {COMMITS[0]}" in output, output
    run("--data.read_retries=0", name="cached")
    assert commits_of(tmp_path / "cached") == {"train": COMMITS[1], "held_out": COMMITS[1]}
    tally("hub: away, and two commits are cached: the newer is used, and by no run of the older", 2)


@pytest.mark.parametrize("way", [(), (STREAMED,)], ids=["indexed", "streamed"])
def test_faults_that_pass_are_waited_out(fake_hub, run, home, tmp_path, way, tally):
    """A fault of the hub or the network for each of the four shards; the same bits."""
    run(*way, name="undisturbed")
    shutil.rmtree(home)
    faults = (Fault(503, 2), Fault(0, 2), Fault(200, 1, cut=True), Fault(429, 2, headers={"Retry-After": "2"}))
    fake_hub.faults = {rf"GET .*resolve/.*train-0000{shard}": fault for shard, fault in enumerate(faults)}
    fake_hub.faults["api/"] = Fault(503, 2)
    output = run(*way, f"--data.workers={len(way)}")
    assert not any(fault.times for fault in fake_hub.faults.values()), (output, fake_hub.faults)
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "undisturbed")
    tally("hub: 503, resets, an answer cut in the middle, 429: waited out, indexed and streamed *", 5)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_in_the_middle_is_not_tried_again(fake_hub, run, status, tally):
    fake_hub.faults[r"GET .*resolve/.*train-0000[12]"] = Fault(status)
    output = run(STREAMED, code=2)
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    assert str(status) in line
    assert "tried" not in output
    tally("hub: 401, 403, 404 in the middle of a stream: one line at once")


def test_access(fake_hub, run, tally):
    """Not there, not that revision, gated, disabled: one line, at once. With a token: a run."""
    for says, access, options in (
        ("data.path is owner/nothing, which cannot be loaded: 404", "", {"path": "owner/nothing"}),
        ("Access to this resource is disabled", "disabled", {}),
        ("gated", "gated", {}),
    ):
        (fake_hub.birds / "access").write_text(access)
        output = run(**options, code=2)
        assert says in output.splitlines()[-1] and "tried" not in output, output
    run(token=TOKEN)
    output = run("--data.revision=v9", name="v9", token=TOKEN, code=2)
    assert "v9" in output.splitlines()[-1] and "tried" not in output, output
    tally("hub: no such dataset or revision, gated, disabled: one line; with a token: a run", 5)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_hub_that_stays_away(fake_hub, run, undisturbed, tmp_path, processes, tally):
    """In the middle of a stream: a checkpoint, and the same bits once it is back. Before a run: one line."""
    again = (*AWAY, "--data.read_retries=1")
    bits, asked = undisturbed(processes)
    fake_hub.faults["resolve"] = Fault(503, passed=asked - 4)  # few of the last reads are left
    output = run(*again, processes=processes, code=None)
    assert "error" in output and "a checkpoint after step" in output, output
    assert 0 < newest_step(tmp_path / "run") < 24
    fake_hub.faults.clear()
    run(*again, processes=processes)
    assert weights_of(tmp_path / "run") == bits
    fake_hub.faults["."] = Fault()
    output = run(*again, name="other", processes=processes, code=None)
    lines = {line for line in output.splitlines() if line.startswith("error")}
    (line,) = (line for line in lines if "another process does not answer" not in line)
    assert "data.path is owner/birds, which cannot be loaded" in line
    tally("hub: goes away for good before a run, and in the middle of a stream (one and two processes) *", 2)


@pytest.mark.parametrize("processes, workers", [(1, 0), (1, 1), (2, 0)])
def test_a_signal_while_the_hub_is_away(fake_hub, start, run, undisturbed, tmp_path, processes, workers, tally):
    """It ends the wait with a checkpoint and the marker, within the time that a launcher leaves it."""
    options = (*AWAY, f"--data.workers={workers}")
    bits, asked = undisturbed(processes, workers)
    fake_hub.faults["resolve"] = Fault(503, passed=asked - 4)
    waiting = start(*options, processes=processes)
    wait_until(lambda: fake_hub.faults["resolve"].times < ALWAYS - 4 * processes)
    waiting.signal(signal.SIGTERM)
    assert waiting.wait() == [EXIT_CODE] * processes, waiting.said
    marker = (tmp_path / "run" / MARKER).read_text()  # of a read that gave up: "while images could not be read"
    assert marker.startswith("SIGTERM, after step") and marker.endswith("a checkpoint is written\n"), marker
    assert 0 < newest_step(tmp_path / "run") < 24
    fake_hub.faults.clear()
    run(*options, processes=processes)
    assert weights_of(tmp_path / "run") == bits
    tally("hub: SIGTERM while it is away (loaders in one and two processes, and beside them) *")


def in_a_process(look: Callable, *arguments) -> Any:
    """The result of a function in a process of its own, which uses the fake hub."""
    answers = context.Queue()
    process = context.Process(target=answer, args=(answers, look, *arguments))
    process.start()
    result = answers.get(timeout=HANGS)
    process.join(HANGS)
    assert not isinstance(result, Exception), result
    return result


def answer(answers, look: Callable, *arguments) -> None:
    hurry()
    try:
        answers.put(look(*arguments))
    except Exception as error:
        answers.put(error)


def seen_offline(path: str) -> dict:
    """The images of a dataset where only the cache is read."""
    for module in (huggingface_hub.constants, datasets.config):
        module.HF_HUB_OFFLINE = True
    return seen(path)


def fill_cache(path: str) -> None:
    """As configs/running.md says."""
    datasets.load_dataset(path)


def test_loose_pictures_are_listed_as_on_this_machine(fake_hub, home, tmp_path):
    """Classes of folders, a list for one split, a picture at the top that takes no label away."""
    folder = write(tmp_path / "here", {"train/stray.png": 3, "README.md": "My photographs"})
    for split in ("train", "test"):
        save_classes(folder / split, CATS_AND_DOGS)
    listed = [f"{name}/{number}.png,{name}\n" for name in CATS_AND_DOGS for number in range(2)]
    write(folder / "test", {"metadata.csv": "".join(["file_name,label\n", *listed])})
    shutil.copytree(folder, fake_hub.root / "owner" / "loose" / COMMITS[0])
    (fake_hub.root / "owner" / "loose" / "main").write_text(COMMITS[0])
    images = in_a_process(seen, "owner/loose")
    here = seen(folder)
    assert images == here
    in_a_process(fill_cache, "owner/loose")
    fake_hub.faults["."] = Fault(0)
    assert in_a_process(seen_offline, "owner/loose") == here  # as a node without internet has it
    classes = [(0, "cat"), (0, "cat"), (1, "dog"), (1, "dog")]
    assert sorted(images["test"].values()) == classes
    assert sorted(images["train"].values()) == [*classes, (3, None)]


def test_a_download_that_fills_the_disk(start, run, tally):
    """Files of 20 kB are full. The same command goes on where there is room."""
    full = start(prepare=partial(limit_files, 20_000))
    fails(full, "which cannot be loaded", "File too large")
    run()
    tally("hub: a download fills the disk: one line; the same command continues")


def test_prepare(fake_hub, home, run, tmp_path, tally):
    """Shards are made of a dataset of the hub, though it is away for a while, and trained on."""
    fake_hub.faults["resolve"] = Fault(503, times=3)
    made = Command("prepare", "--data.path=owner/birds", f"--out={tmp_path / 'shards'}", "--rows=10", prepare=hurry)
    finish(made)
    assert fake_hub.faults["resolve"].times == 0, made.said
    run(STREAMED, path=str(tmp_path / "shards"))
    tally("hub: mpp prepare, from a hub that is away at first")

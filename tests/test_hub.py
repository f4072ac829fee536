"""Data sets of the hub: one commit a run, and a hub that goes away."""

import json
import os
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from conftest import ROOT, TINY, encoded, picture
from hub import Hub

from mpp.data.sources import BIRDS

pytestmark = pytest.mark.faults
COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def hub(tmp_path):
    """Two commits of the birds in four shards, of which the second has other images; `main` is at the first."""
    table = pq.read_table(BIRDS / "train-00000-of-00001.parquet").slice(0, 80)
    for number, commit in enumerate(COMMITS):
        folder = tmp_path / "hub" / "somebody" / "birds" / commit / "data"
        folder.mkdir(parents=True)
        for shard in range(4):
            rows = table.slice(40 * number + 10 * shard, 10)
            pq.write_table(rows, folder / f"train-{shard:05d}-of-00004.parquet", row_group_size=5)
    (tmp_path / "hub" / "somebody" / "birds" / "main").write_text(COMMITS[0])
    hub = Hub(tmp_path / "hub")
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture
def pretrain_from(hub, tmp_path):
    """Runs on a data set of the hub: pretrain_from("--run.steps=4", name="run") -> exit code, all that was said."""

    def run(*words, name="run", processes=1, path="somebody/birds"):
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        launch = ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}"]
        launch += ["--main_process_port=0"]
        command = [sys.executable, *(launch if processes > 1 else []), "mpp/pretrain.py"]
        options = [*TINY, f"--data.path={path}", "--data.eval_split=null", f"--run.dir={tmp_path / name}", *words]
        ended = subprocess.run([*command, *options], cwd=ROOT, env=env, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    return run


def commit_of(folder):
    return {part: known["revision"] for part, known in json.loads((folder / "data.json").read_text()).items()}


@pytest.mark.parametrize("options", [(), ("--data.streaming=true",)], ids=["indexed", "streamed"])
def test_a_run_is_of_one_commit_and_goes_on_with_it(hub, pretrain_from, tmp_path, options):
    """Though the branch moves, and two processes ask."""
    code, said = pretrain_from(*options)
    assert code == 0 and commit_of(tmp_path / "run") == {"train": COMMITS[0], "held_out": COMMITS[0]}, said
    shutil.rmtree(tmp_path / "run" / "encoder")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    (hub.root / "somebody" / "birds" / "main").write_text(COMMITS[1])
    code, said = pretrain_from(*options)
    assert code == 0 and "after step 2" in said and commit_of(tmp_path / "run")["train"] == COMMITS[0], said
    code, said = pretrain_from(*options, name="two", processes=2)
    assert code == 0 and commit_of(tmp_path / "two")["train"] == COMMITS[1], said


@pytest.mark.parametrize("status", [503, 0], ids=["503", "reset"])
@pytest.mark.parametrize("options", [(), ("--data.streaming=true",)], ids=["indexed", "streamed"])
def test_a_hub_that_comes_back_is_waited_for(hub, pretrain_from, options, status):
    hub.fails[r"GET .*resolve/.*train-0000[12]"] = (3, status)
    code, said = pretrain_from(*options)
    assert code == 0 and hub.fails.popitem()[1] == (0, status), said


def test_a_hub_that_stays_away_is_one_line(hub, pretrain_from):
    """Also at resume; and what is not there is not waited for."""
    code, said = pretrain_from(path="somebody/nothing")
    assert code == 2 and "tried" not in said and "error: data.path is somebody/nothing, which cannot be loaded" in said
    assert pretrain_from("--data.streaming=true")[0] == 0
    hub.fails[r"."] = (10**6, 503)
    again = ("--data.streaming=true", "--data.read_retries=1")
    code, said = pretrain_from(*again, name="other")
    (line,) = [line for line in said.splitlines() if line.startswith("error")]
    assert code == 2 and "Traceback" not in said and "data.path is somebody/birds, which cannot be loaded" in line


def test_a_folder_of_images_is_no_stream(hub, pretrain_from):
    photos = hub.root / "somebody" / "photos"
    for number in range(16):
        file = photos / COMMITS[0] / ("train" if number % 2 else "test") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(number)))
    (photos / "main").write_text(COMMITS[0])
    options = dict(path="somebody/photos", name="photos")
    code, said = pretrain_from("--data.streaming=true", "--data.eval_split=test", **options)
    assert code == 2 and "it holds image files, no shards: leave out data.streaming" in said, said
    assert pretrain_from("--data.eval_split=test", **options)[0] == 0

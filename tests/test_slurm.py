"""The lines for Slurm of configs/running.md, read from that file, on a cluster of two virtual nodes.

They are of one machine: GPUs, a slow network, a shared file system and cgroups are not shown.
"""

import re

import pytest
import slurm
import yaml
from conftest import ROOT, TINY, finished, wait_until, weights_of
from test_faults import launch

from mpp.runtime.signals import MARKER
from mpp.training.checkpoint import newest_step

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no Slurm here: {slurm.missing()} missing (tests/rehearsals)"),
]

LONG = (*TINY, "--run.steps=400", "--run.checkpoint_every=20", "--run.log_every=20", "--run.eval_every=1000")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        cluster = slurm.Cluster(tmp_path_factory.mktemp("slurm") / "cluster").__enter__()
    except (OSError, AssertionError) as error:  # root of a container may be refused a device or a namespace
        pytest.skip(f"no cluster can be started here: {error}")
    yield cluster
    cluster.__exit__()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script of the page with other numbers: script("--requeue", "--optim.lr=1") -> the file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as the page says: the names of the nodes lead to loopback here
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def script(has: str, *options: str, name: str = "run"):
        text = (ROOT / "configs" / "running.md").read_text()
        blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.M)
        (lines,) = {block for block in blocks if has in block}
        lines = re.sub("^    ", "", lines, flags=re.M).strip()
        words = " ".join([*LONG, *options, f"--run.dir={tmp_path / name}"])
        for old, new in (
            ("RUN=runs/imagenet_vit_b16", f"RUN={tmp_path / name}"),
            (" --run.dir $RUN", ""),
            ("--num_processes 8", "--num_processes 2"),
            ("gpu_2x8.yaml", "gpu_2x8.yaml --num_processes 2"),
            ("--config configs/imagenet_vit_b16.yaml", words),
        ):
            lines = lines.replace(old, new)
        assert words in lines and "num_processes 2" in lines
        file = tmp_path / "job.sh"
        file.write_text(lines if lines.startswith("#!") else f"#!/bin/bash\n{lines}")
        return file

    return script


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The encoder of two processes that is undisturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = finished(launch(folder, *LONG))
    assert ended.returncode == 0, ended.stderr
    return weights_of(folder)


def log_of(script):
    return script.with_name(f"{script.name}.log").read_text()


def test_a_job_is_requeued_until_it_is_done(cluster, script, undisturbed, tmp_path, tally):
    """Twice the end of its time comes near."""
    file = script("--requeue")
    job = cluster.submit(file)
    for restarts in range(2):
        before = newest_step(tmp_path / "run")
        wait_until(lambda before=before: newest_step(tmp_path / "run") > before)
        cluster.signal(job)
        wait_until(lambda restarts=restarts: int(cluster.job(job)["Restarts"]) > restarts)
    job = cluster.ended(job)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(file)
    assert weights_of(tmp_path / "run") == undisturbed
    assert log_of(file).count("stopped by SIGTERM after step") == 2, "the log is cut"
    tally("Slurm: the time of a job is up, twice: checkpoint, requeue, the same command *", 2)


def test_a_job_that_fails_is_failed_and_not_requeued(cluster, script, tmp_path, tally):
    """Though an earlier one has left its marker."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / MARKER).write_text("SIGTERM, after step 7\n")
    file = script("--requeue", "--optim.lrr=1")
    job = cluster.ended(cluster.submit(file))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "1:0", "0"), log_of(file)
    assert "error (process 0): unknown setting optim.lrr" in log_of(file)
    tally("Slurm: a job with a misspelt setting, in the folder of a preempted one: FAILED, not requeued")


def test_a_more_urgent_job_takes_the_nodes(cluster, script, undisturbed, tmp_path, tally):
    file = script("--requeue")
    job = cluster.submit(file, "--exclusive", "--nodelist=n1")
    wait_until(lambda: newest_step(tmp_path / "run") > 0)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\ntrue\n")
    urgent = cluster.submit(urgent, "--partition=high", "--exclusive", "--nodelist=n1")
    assert cluster.ended(urgent)["JobState"] == "COMPLETED"
    job = cluster.ended(job)
    assert job["JobState"] == "COMPLETED" and job["Restarts"] != "0", log_of(file)  # by Slurm, by the script, or both
    assert "stopped by SIGTERM after step" in log_of(file)
    assert weights_of(tmp_path / "run") == undisturbed
    tally("Slurm: a more urgent job takes the nodes *")


def test_two_nodes(cluster, script, undisturbed, tmp_path, tally):
    file = script("gpu_2x8.yaml --machine_rank")
    job = cluster.ended(cluster.submit(file))
    assert job["JobState"] == "COMPLETED" and job["NumNodes"] == "2", log_of(file)
    assert weights_of(tmp_path / "run") == undisturbed
    tally("Slurm: a job on two nodes *")


def test_an_array_of_jobs_on_one_host(cluster, script, tmp_path, tally):
    """Four runs, each with a port of its own."""
    file = script("--requeue", "--run.steps=20", name="run_$SLURM_ARRAY_TASK_ID")
    job = cluster.submit(file, "--array=0-3", "--gpus-per-node=2", "--cpus-per-task=16", "--nodelist=n1")
    for task in range(4):
        assert cluster.ended(f"{job}_{task}")["JobState"] == "COMPLETED", log_of(file)
        assert newest_step(tmp_path / f"run_{task}") == 20
    tally("Slurm: an array of four jobs of two processes on one host", 4)


def test_a_node_dies(cluster, script, undisturbed, tmp_path, tally):
    """Slurm notices, takes the job away, and starts it again where there is a node."""
    file = script("--requeue")
    job = cluster.submit(file, "--nodelist=n2")
    wait_until(lambda: newest_step(tmp_path / "run") > 0)
    cluster.kill("n2")
    wait_until(lambda: cluster.job(job)["JobState"] == "PENDING", poll=1)
    cluster.daemon("slurmd", "-N", "n2")
    job = cluster.ended(job)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log_of(file)
    assert weights_of(tmp_path / "run") == undisturbed
    tally("Slurm: a node dies in the middle of a job *")


def test_two_jobs_share_a_comparison(cluster, script, tmp_path, tally):
    """None trains or judges what the other does, and both end with all results."""
    tiny = dict(word.removeprefix("--").split("=") for word in (*TINY, "--run.steps=100"))
    config = {
        "dir": str(tmp_path / "out"),
        "encoders": [{"name": "own", "encoder": f"{tmp_path}/encoders/{{seed}}", "seeds": [0, 1, 2, 3]}],
        "evaluations": [{"name": "few-shot", "command": "fewshot", "options": {"shots": [1], "seeds": 1}}],
        "datasets": [{"name": "birds", "options": {}}],
    }
    config["encoders"][0] |= {"train": "pretrain", "train_options": {k: yaml.safe_load(v) for k, v in tiny.items()}}
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(config))
    jobs, files = [], [tmp_path / "one.sh", tmp_path / "two.sh"]
    for file in files:
        words = f"srun python evaluation/compare.py --config {tmp_path}/compare.yaml"
        file.write_text(f"#!/bin/bash\n#SBATCH --ntasks=1 --cpus-per-task=8\n{words}\n")
        jobs.append(cluster.submit(file))
    said = []
    for job, file in zip(jobs, files, strict=True):
        assert cluster.ended(job)["JobState"] == "COMPLETED", log_of(file)
        said.append(log_of(file))
    for seed in range(4):
        assert sum(f"wrote {tmp_path}/encoders/{seed}: encoder/" in each for each in said) == 1
    tables = [each[each.index("| accuracy (%)") :] for each in said]
    assert tables[0] == tables[1]
    tally("Slurm: two jobs share a comparison")

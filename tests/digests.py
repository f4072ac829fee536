"""Digests of short runs: the same before and after a change that must not change a bit.

    python tests/digests.py > before.txt       # on the commit before; some two minutes
    python tests/digests.py > after.txt        # on the commit after
    diff before.txt after.txt                  # the runs that differ
    python tests/digests.py adam probe         # these runs and the default one, with whose encoder others begin

Each run takes 12 steps on the photographs of the package, in one thread. A line has the name of the run, and digests of
its encoder, of its optimiser's state and of its metrics without those that depend on the clock or the machine.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SHORT = ["--run.steps=12", "--run.threads=1", "--run.report=false", "--data.workers=0"]
NO_PROBE = "--probe.every=0"
PRETRAIN = ["mpp/pretrain.py", *SHORT, NO_PROBE, "--run.eval_every=12"]
SMALL_BATCH = ["--data.batch_size=32", "--optim.global_batch_size=32"]

# Run -> its command; {name} is the folder of an earlier run.
COMMANDS = {
    "default": PRETRAIN,
    "probe": [*PRETRAIN, "--probe.every=12"],
    "adam": [*PRETRAIN, "--optim.name=adam", "--optim.average=0.9"],
    "accumulation": [*PRETRAIN, "--optim.global_batch_size=24", "--data.batch_size=10"],
    "fp32": [*PRETRAIN, "--run.precision=fp32"],
    "mae_mean_color": [*PRETRAIN, "--config=rivals/mae_mean_color"],
    "mae_bf16": [*PRETRAIN, "--config=rivals/mae", "--run.precision=bf16"],
    "simmim": [*PRETRAIN, "--config=rivals/simmim"],
    "maskfeat": [*PRETRAIN, "--config=rivals/maskfeat"],
    "data2vec": [*PRETRAIN, "--config=rivals/data2vec"],
    "ijepa": [*PRETRAIN, "--config=rivals/ijepa"],
    "frozen_teacher": [*PRETRAIN, "--config=rivals/feature_distillation", "--objective.teacher={default}"],
    "supervised": ["evaluation/supervised.py", *SHORT, *SMALL_BATCH],
    "finetune": ["evaluation/finetune.py", "--encoder={default}", *SHORT, *SMALL_BATCH, "--lrs=[0.01]"],
    "simclr": ["evaluation/contrastive.py", *SHORT, NO_PROBE, "--config=rivals/simclr"],
}


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def metrics_digest(path: Path) -> str:
    """Digest of the scalars that depend on the run alone."""
    lines = map(json.loads, path.read_text().splitlines())
    kept = [{name: line[name] for name in sorted(line) if not name.startswith("speed/")} for line in lines]
    return sha256_of(json.dumps(kept).encode())


def carry_out(name: str, folder: Path) -> str:
    """Train in `folder`/`name`; return the line of digests."""
    words = [word.format(default=folder / "default") for word in COMMANDS[name]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words, f"--run.dir={folder / name}"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{name} failed: {' '.join(words)}\n{ended.stderr.strip().splitlines()[-1]}")
    (checkpoint,) = (folder / name).glob("**/step_*")
    run = checkpoint.parents[1]
    encoder = sha256_of((run / "encoder" / "model.safetensors").read_bytes())
    optimizer = sha256_of((checkpoint / "optimizer.safetensors").read_bytes())
    return f"{name} {encoder} {optimizer} {metrics_digest(run / 'metrics.jsonl')}"


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        for run_name in dict.fromkeys(["default", *(sys.argv[1:] or COMMANDS)]):
            print(carry_out(run_name, Path(scratch)), flush=True)

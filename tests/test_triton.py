"""What torch.compile writes for a GPU: one graph for each kind of model, and kernels that compile."""

import importlib.util
import json
import sys

import pytest
from conftest import run_command
from test_fake_accelerator import PRETRAIN

TINY = ("--model.width=32", "--model.depth=1", "--model.heads=2", "--model.img_size=32", "--model.patch_size=8")
# The others have the same code; random numbers of dropout come in by a pass of inductor's that is not run here.
SAME = ("bf16", "network", "SimMIM", "positions in every block", "the same positions", "a moving average", "dropout")
KINDS = [[*TINY, *options] for name, options in PRETRAIN.items() if not name.startswith(SAME)]
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch has no Triton"),
]


@pytest.mark.parametrize("third", range(3))
def test_kernels_for_a_gpu_compile(tally, third):
    """Forward and backward, by the assembler that Triton brings; those of the first kind for an A100, too."""
    asked = KINDS[third::3]
    ended = run_command(sys.executable, "tests/triton_code.py", json.dumps(asked))
    assert ended.returncode == 0, ended.stderr[-3000:]
    *kinds, total = map(json.loads, ended.stdout.splitlines())
    assert len(kinds) == len(asked) and not [kind for kind in kinds if kind["failed"]], ended.stdout
    assert all(kind["kernels"] > 10 for kind in kinds) and total["compiled"] > 20
    tally("Triton kernels, forward and backward", total["compiled"])

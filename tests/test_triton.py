"""What torch.compile writes for a GPU: one graph for each kind of model, and kernels that compile."""

import importlib.util
import json
import sys

import pytest
from conftest import run_command
from test_pretended import PRETRAIN

TINY = ("--model.width=32", "--model.depth=1", "--model.heads=2", "--model.img_size=32", "--model.patch_size=8")
# The others have the same code; random numbers of dropout come in by a pass of inductor's that is not run here.
SAME = (
    "optimiser",
    "dropout",
    "pattern",
    "bf16",
    "fused",
    "activation",
    "accumulation",
    "Polyak",
    "layer decay",
    "moving average",
    "position every",
    "network predictor",
)
KINDS = {name: [*TINY, *options] for name, options in PRETRAIN.items() if not name.startswith(SAME)}
CARDS = {80: ["objective mean_color", "MAE"], 90: KINDS}  # A100: the same code, so two kinds do; H100
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch has no Triton"),
]


@pytest.mark.parametrize("capability", CARDS)
def test_kernels_for_a_gpu_compile(capability, tally):
    """Forward and backward, by the assembler that Triton brings."""
    asked = [KINDS[name] for name in CARDS[capability]]
    ended = run_command(sys.executable, "tests/triton_code.py", str(capability), json.dumps(asked))
    assert ended.returncode == 0, ended.stderr[-3000:]
    *kinds, total = map(json.loads, ended.stdout.splitlines())
    assert len(kinds) == len(asked) and not [kind for kind in kinds if kind["failed"]], ended.stdout
    assert all(kind["kernels"] > 10 for kind in kinds) and total["compiled"] > 20
    tally(
        f"Triton kernels of {len(kinds)} kinds of models, forward and backward, for sm_{capability}", total["compiled"]
    )

"""Masked-patch accuracy of a run: a run without it is refused."""

import pytest

from evaluation import masked
from mpp.errors import Unavailable


def test_a_run_that_predicts_no_patches_has_no_masked_accuracy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "heldout/loss": 1.0, "heldout/accuracy": 0.5}\n')
    with pytest.raises(Unavailable, match="it must be a pre-training run: it has no heldout/nearest"):
        masked.main(["--encoder", str(tmp_path)])
    with pytest.raises(ValueError, match=r"no run at .*: its metrics\.jsonl is missing or has no heldout/loss"):
        masked.main(["--encoder", str(tmp_path / "none")])

"""Masked-patch accuracy of a run: a run without it is refused."""

import pytest

from evaluation import masked
from mpp.errors import Unavailable, UserError


def test_a_run_that_predicts_no_patches_has_no_masked_accuracy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "heldout/loss": 1.0, "heldout/accuracy": 0.5}\n')
    with pytest.raises(Unavailable, match="it must be a pre-training run: it has no heldout/nearest"):
        masked.main(["--encoder", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    with pytest.raises(UserError, match=r"has not been evaluated yet: its metrics\.jsonl has no heldout/loss"):
        masked.main(["--encoder", str(tmp_path)])
    with pytest.raises(UserError, match=r"none is not the folder of a run that has begun: it has no metrics\.jsonl"):
        masked.main(["--encoder", str(tmp_path / "none")])
    with pytest.raises(
        UserError, match="is floor:colors; it must be the folder of a pre-training run: a floor predicts"
    ):
        masked.main(["--encoder", "floor:colors"])

"""Masked-patch accuracy of a run, with intervals over images; a run without it is refused."""

import json

import numpy as np
import pytest
from conftest import read_json, refused

from evaluation import masked
from evaluation.config import MaskedConfig
from evaluation.metrics.scoring import KINDS, Outcomes, image_scores, load_outcomes, score_of
from mpp.errors import Unavailable
from mpp.training.log import last_scalars


def test_a_run_keeps_the_patches_of_each_image_and_its_accuracies_have_intervals(pretrain):
    run = pretrain("--objective.name=grid_color", "--run.eval_every=2")
    masked.run(MaskedConfig(str(run)))
    path = run / "evaluation" / "masked.json"
    report = read_json(path)
    logged = last_scalars(run)
    for result in report["results"][:3]:
        outcomes = load_outcomes(path, result["outcomes"])
        assert result["accuracy"] == logged[f"heldout/{masked.CASES[result['case']]}"]
        assert score_of(outcomes) == pytest.approx(result["accuracy"], abs=1e-12)
        low, high = result["interval"]
        assert low < result["accuracy"] < high
        assert len(set(outcomes.images)) == 8 and (outcomes.predictions <= outcomes.targets).all()
    assert report["labels"]["images"] == 8 and "interval" not in report["results"][3]
    model, mixed = (load_outcomes(path, number) for number in (0, 1))
    gains = image_scores(model) - image_scores(mixed)
    assert gains.mean() == pytest.approx(score_of(model) - score_of(mixed))

    (run / "metrics.jsonl").open("a").write(json.dumps(logged | {"step": 6}) + "\n")  # counts are not of this step
    masked.run(MaskedConfig(str(run)))
    assert all("interval" not in result for result in read_json(path)["results"])


def test_intervals_over_images_cover_the_truth_where_patches_of_an_image_are_alike(images=50):
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        patches = rng.integers(20, 40, images)
        right = rng.binomial(patches, rng.beta(2, 3, images))
        _, low, high = KINDS["patches"].estimates(Outcomes("patches", patches, right))["accuracy"]
        covered += low <= 0.4 <= high
    assert 0.92 <= covered / 300 <= 0.975


def test_a_run_that_predicts_no_patches_has_no_masked_accuracy(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "heldout/loss": 1.0, "heldout/accuracy": 0.5}\n')
    with pytest.raises(Unavailable, match="it must be a pre-training run: it has no heldout/nearest"):
        masked.run(MaskedConfig(str(tmp_path)))
    for other in ("vit_tiny_patch16_224", str(tmp_path / "encoder_best")):
        with pytest.raises(Unavailable, match=r"the folder of a pre-training run$"):
            masked.run(MaskedConfig(other))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    with refused(r"its metrics\.jsonl is missing or has no heldout/loss"):
        masked.run(MaskedConfig(str(tmp_path)))

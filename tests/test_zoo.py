"""The encoders that come with mpp load by their names, in mpp and in timm, and are those that their pages describe."""

import re
from pathlib import Path

import pytest
import torch
from conftest import FAST, ROOT, read_json
from model_inputs import by_timm
from safetensors.torch import load_file

import mpp
from evaluation import knn
from mpp.runtime.weights import ZOO_FOLDER, fingerprint

ENCODERS = sorted(file.parent for file in ZOO_FOLDER.glob("*/model.safetensors"))
LARGEST_MB = 3


@pytest.mark.parametrize("folder", ENCODERS, ids=lambda folder: folder.name)
def test_an_encoder_loads_by_its_name_gives_the_features_of_timm_and_is_the_one_of_its_card(folder):
    encoder = mpp.load_encoder(f"zoo:{folder.name}")
    torch.manual_seed(0)
    images = torch.randn(4, 3, *encoder.patch_embed.img_size)
    with torch.inference_mode():
        features = encoder.forward_features(images)
        torch.testing.assert_close(features, by_timm(folder).forward_features(images), rtol=1e-4, atol=1e-4)
    assert features.std() > 0.1
    weights = folder / "model.safetensors"
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    assert weights.stat().st_size < LARGEST_MB * 1e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    digest = fingerprint(Path(f"zoo:{folder.name}"))
    assert digest and digest in card
    for words in ("no formal licence", "## Command", "PFLOP", "## Limitations"):
        assert words in card


def test_an_encoder_is_evaluated_by_its_name(few_birds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"--encoder=zoo:{ENCODERS[0].name}", f"--data.path={few_birds}", *FAST, "--neighbours=5"]
    assert knn.main(words)["baselines"].keys() == {"random weights", "pixels"}
    assert list(tmp_path.glob("runs/zoo_*/**/knn*.json"))


def test_the_page_says_what_was_measured_on_these_files():
    """Figures of the page are those of a comparison whose encoder is the file itself, known by its fingerprint."""
    page = (ZOO_FOLDER / "README.md").read_text(encoding="utf-8")
    rows = read_json(ROOT / "evaluation/results/race_cifar10/results.json")["results"]
    assert ENCODERS
    for folder in ENCODERS:
        (shown,) = re.findall(rf"^\| `zoo:{folder.name}` \|(.*)\|$", page, re.MULTILINE)
        of_file = [row for row in rows if row["encoder"] == f"zoo:{folder.name}" and row["kind"] == "test"]
        measured = {f"{100 * row['accuracy']:.1f}" for row in of_file if row["evaluation"] in ("kNN", "linear")}
        assert measured and measured <= set(re.findall(r"\d\d\.\d", shown))

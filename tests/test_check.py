"""What `mpp check` says of the images. Whole checks are in test_report.py, copies in test_verdict.py."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import dataset_of, encoded, picture

from evaluation.check import print_survey
from evaluation.survey import Survey, survey
from mpp.config import DataConfig
from mpp.data.columns import without_decoding
from mpp.data.dataset import ImageDataset

FINE = Survey({"cat": 0.5, "dog": 0.5}, train_images=90, held_out_images=9, unreadable=["broken.png: no image"])


def test_classes_are_shown_by_name_largest_first(capsys):
    rows = without_decoding(dataset_of([encoded(picture(n)) for n in range(5)]), "image")
    train = ImageDataset(rows, "image", np.array([0, 1, 1, 1, 2]), "train", class_names=["cat", "dog"])
    print_survey(survey(train, train, DataConfig(), 60))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("class ")]
    assert shown == [f"class {each} of the labelled images" for each in ("dog: 60.0%", "cat: 20.0%", "2: 20.0%")]


@pytest.mark.parametrize(
    ("found", "warning"),
    [
        ({"unreadable": ["a", "b"]}, "unreadable images: 2 of 101"),
        ({"duplicate_share": 0.06}, "train / held-out duplicates: 6%"),
        ({"one_colour_share": 0.26}, "constant images dominate: 26%"),
        ({"class_shares": {"cat": 0.8, "dog": 0.2}}, "one class dominates: 80%"),
    ],
)
def test_images_that_spoil_a_run_are_warned_of(found, warning):
    assert FINE.warnings() == []
    assert (
        replace(FINE, duplicate_share=0.05, one_colour_share=0.25, class_shares={"cat": 0.75, "dog": 0.25}).warnings()
        == []
    )
    (message,) = replace(FINE, **found).warnings()
    assert message.startswith(warning)

"""What `mpp check` prints of the images. Whole checks are in test_report.py."""

from types import SimpleNamespace

import pytest

from evaluation import check
from evaluation.survey import Survey
from mpp.config import Config


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        pytest.param(["cat", "dog"], ("class dog", "class cat"), id="names"),
        pytest.param(None, ("class 1", "class 0"), id="numbers, where there are no names"),
    ],
)
def test_classes_are_shown_by_name_largest_first(names, shown, capsys):
    train = SimpleNamespace(class_names=names, describe=lambda: "4 images")
    task = SimpleNamespace(train=train, held_out=[], config=Config())
    check.print_images(task, Survey(class_shares={"1": 0.75, "0": 0.25}))
    rows = [line for line in capsys.readouterr().out.splitlines() if "class" in line]
    assert [row.split("|")[1].strip() for row in rows] == list(shown)
    assert "75.0% of the labelled images" in rows[0]

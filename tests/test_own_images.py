"""Predictions of images that a classifier has learned: told apart, and labelled by the column that it learned."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from classified_images import FAST, NAMES, predict_to, read_csv
from conftest import dataset_of, encoded, picture

from evaluation import linear, predict
from evaluation.predictions import learned
from mpp.data import identity
from mpp.data.dataset import ImageDataset, images_only
from mpp.runtime import messages


def write_sites(folder: Path, count: int = 15) -> Path:
    """Images in folders of sites, with a list of their species, of which every fifth is missing."""
    rows = []
    for number in range(count):
        name = f"site{number % 2}/{number:02d}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(picture(number)))
        rows.append([name, "" if number % 5 == 4 else NAMES[number % 3], number % 2])
    with (folder / "sites.csv").open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([["file_name", "species", "shade"], *rows])
    return folder


@pytest.fixture(scope="module")
def headed(finished_run, tmp_path_factory):
    """A folder with images of sites, and a head that learned their species."""
    folder = tmp_path_factory.mktemp("headed")
    sites = write_sites(folder / "sites")
    words = (f"--encoder={finished_run}", f"--data.path={sites}", f"--data.labels={sites}/sites.csv", "--depth=1")
    options = ("--data.label_column=species", "--data.eval_fraction=0.3", "--data.train_images=7", "--l2=0.01")
    linear.main([*FAST, *words, *options, "--save=true", f"--out={folder}/linear.json"])
    return folder


def forget_messages() -> None:
    """Of messages that are printed once."""
    messages.tell.cache_clear()


def splits_of(out: Path) -> dict[str, set[str]]:
    """Split -> its files, by a table."""
    files: dict[str, set[str]] = {}
    for row in read_csv(out):
        files.setdefault(row["split"], set()).add(row["file"])
    return files


def test_the_learned_column_is_the_label_of_other_images_too(headed, tmp_path, capsys):
    forget_messages()
    sites = write_sites(tmp_path / "new", 11)
    out = predict_to(tmp_path / "p.csv", headed / "linear_head", sites, f"--data.labels={sites}/sites.csv")
    rows = read_csv(out)
    assert [row["label"] for row in rows] == [row["species"] for row in rows]
    assert {row["label"] for row in rows} == {"", *NAMES} and {row["split"] for row in rows} == {"all"}
    said = capsys.readouterr()
    assert said.out.count("labels are read from the column species, as when the classifier was trained") == 1
    assert "no classes" not in said.err and "note" not in json.loads(out.with_name("p.csv.json").read_text())


def test_a_column_that_is_named_or_not_there_leaves_the_labels_as_they_were(headed, tmp_path, capsys):
    forget_messages()
    sites = headed / "sites"
    head = headed / "linear_head"
    words = (f"--data.labels={sites}/sites.csv", "--data.label_column=label")
    assert "right" not in read_csv(predict_to(tmp_path / "a.csv", head, sites, *words))[0]
    said = capsys.readouterr().err
    assert "the labels (site0, site1) are not classes" in said
    assert "choose another column with --data.label_column: species, shade" in said
    assert "right" not in read_csv(predict_to(tmp_path / "b.csv", head, sites))[0]  # no list, no column


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_images_that_a_head_learned_are_a_split(is_moved, headed, tmp_path):
    """Also those of a copy. Without labels, and of the training images that it left out, nothing was learned."""
    sites = headed / "sites"
    if is_moved:
        sites = shutil.copytree(sites, tmp_path / "copy")
    out = predict_to(tmp_path / "p.csv", headed / "linear_head", sites, f"--data.labels={sites}/sites.csv")
    files = splits_of(out)
    assert [*files] == ["held out", "learned"] and len(files["learned"]) == 7 and len(files["held out"]) == 8
    labelled = {row["file"] for row in read_csv(out) if row["label"]}
    assert files["learned"] <= labelled
    about = json.loads(out.with_name("p.csv.json").read_text(encoding="utf-8"))
    assert "learned 7 of these 15 images" in about["note"]
    assert about["figures"]["learned"]["images"] == 7
    assert about["figures"]["held out"]["images"] == len(labelled) - 7
    page = out.with_suffix(".html").read_text(encoding="utf-8")
    assert about["note"] in page and "held out, 5 labelled images (%): accuracy" in page


def test_the_held_out_accuracy_of_a_fine_tuned_run_is_that_of_its_report(tuned_run, class_images, tmp_path, capsys):
    forget_messages()
    out = predict_to(tmp_path / "p.csv", tuned_run, class_images)
    report = json.loads((tuned_run / "finetune.json").read_text(encoding="utf-8"))
    about = json.loads(out.with_name("p.csv.json").read_text(encoding="utf-8"))
    assert about["figures"]["held out"]["accuracy"] == pytest.approx(report["results"][0]["accuracy"])
    record = json.loads((tuned_run / "lr_0.1" / "data.json").read_text(encoding="utf-8"))
    counts = {split: len(files) for split, files in splits_of(out).items()}
    assert counts == {"held out": record["held_out"]["images"], "learned": record["train"]["images"]}
    assert "note: the classifier learned 8 of these 12 images" in capsys.readouterr().out


def test_a_cut_that_cannot_be_repeated_is_noted_everywhere(tuned_run, class_images, tmp_path, monkeypatch, capsys):
    """A record of other images, and images that were added."""
    forget_messages()
    run = Path(shutil.copytree(tuned_run, tmp_path / "run"))
    record = json.loads((run / "lr_0.1" / "data.json").read_text(encoding="utf-8"))
    record["train"]["chosen"] = "0" * 16
    (run / "lr_0.1" / "data.json").write_text(json.dumps(record))
    out = predict_to(tmp_path / "p.csv", run, class_images)
    assert [*splits_of(out)] == ["all"]
    assert f"note: {learned.UNKNOWN_NOTE}" in capsys.readouterr().out
    assert json.loads(out.with_name("p.csv.json").read_text(encoding="utf-8"))["note"] == learned.UNKNOWN_NOTE
    assert learned.UNKNOWN_NOTE in out.with_suffix(".html").read_text(encoding="utf-8")

    record["train"]["files"] = "0" * 16
    (run / "lr_0.1" / "data.json").write_text(json.dumps(record))
    out = predict_to(tmp_path / "q.csv", run, class_images)
    assert json.loads(out.with_name("q.csv.json").read_text(encoding="utf-8"))["note"] == learned.UNKNOWN_NOTE


def test_a_learned_column_stands_before_that_of_the_encoders_run(headed, monkeypatch):
    """Settings that are inherited are not given; those of the command line are."""
    config = predict.PredictConfig(data=predict.ProbeDataConfig(label_column="shade"))
    monkeypatch.setattr(predict, "parse_and_load", lambda *arguments: (config, None))
    monkeypatch.setattr(predict, "find_classifier", lambda config: None)
    monkeypatch.setattr(predict, "learned_label_column", lambda classifier_source: "species")
    assert predict.read_settings([])[0].data.label_column is None
    assert predict.read_settings(["--data.label_column=shade"])[0].data.label_column == "shade"


def test_images_without_files_keep_the_names_that_their_whole_split_gives_them():
    rows = images_only(dataset_of([encoded(picture(number)) for number in range(10)]), "image")
    whole = ImageDataset(rows, "image", None, "all")
    rest, held_out = whole.cut(0.3, 0, "held out")
    names = [part.image_name(index) for part in (rest, held_out) for index in range(len(part))]
    assert sorted(names) == [f"all[{number}]" for number in range(10)]
    assert (
        identity.digest_indices(held_out.origin.indices)
        == identity.identify_images(held_out, with_labels=False)["chosen"]
    )

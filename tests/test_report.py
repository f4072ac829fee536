"""Pages on finished, broken and hostile runs: their content, that they load nothing, and that they run no script."""

import html
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from conftest import FAST, ROOT, TINY, put_picture, refused, write_pictures
from PIL import Image

from evaluation import check, contrastive
from evaluation.config import EVERY, VisualizeConfig
from evaluation.figures.charts import figure_style, plot_confusion, write_details
from evaluation.frozen.results import write_report
from evaluation.metrics.scoring import Outcomes, add_figures, shown_result, summarize_accuracies
from evaluation.pages.page import Page, Section, Table, Text, image_as_picture, write_page
from evaluation.report import advice_on_features, evaluation_blocks
from evaluation.report import main as report
from mpp import pretrain as command

SCRIPT = "<script>alert(1)<script>"  # a name of a file may have no slash
IMAGE = '"><img src=x onerror=alert(2)>'
PICTURE_TITLES = {name.replace("_", " ") for name in EVERY}


class ParsedPage(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = Counter()
        self.attributes = []  # (name, value)
        self.text = []
        self.feed(text.replace(text[text.find("<style>") : text.find("</style>")], ""))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)

    def values(self, name):
        """The values of an attribute."""
        return [value for attribute, value in self.attributes if attribute == name]

    @property
    def words(self):
        """The text, with single spaces."""
        return " ".join("".join(self.text).split())


def read(path):
    """A page, after checks that hold for all pages."""
    text = path.read_text()
    assert len(text) < 5e6 and text.startswith("<!DOCTYPE html>")
    assert "url(" not in text and not re.search(r"https?://", text)
    page = ParsedPage(text)
    assert not set(page.tags) & {"script", "iframe", "object", "embed", "base", "form"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert all(source.startswith("data:image/") for source in page.values("src"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for link in page.values("href"):
        assert link == "data:," or re.match(r"[\w.%-]+/|\.\./", link) or link.removeprefix("#") in ids, link
    alts = page.values("alt")
    assert len(alts) == page.tags["img"] and all(alts)
    return page


def assert_has(page, *expected):
    """Assert that the words of a page include all of these."""
    assert [each for each in expected if each not in page.words] == []


def test_a_hostile_run_has_a_page_that_says_all_and_runs_nothing(tmp_path, monkeypatch):
    """A finished run with a probe, whose images, classes, folder and evaluation have names that attack a page."""
    images = tmp_path / f"images {SCRIPT}"
    folder = tmp_path / f"run {SCRIPT}"
    for number in range(24):
        put_picture(images / (SCRIPT if number % 2 else IMAGE) / f"{number:02d}{SCRIPT}{IMAGE}$x_1$.png", number)
    next(images.rglob("00*")).write_bytes(b"broken")
    settings = ("--run.eval_every=2", "--probe.every=2", "--data.eval_fraction=0.5", f"--data.path={images}")
    command.main([*TINY, *settings, f"--run.dir={folder}"])
    evaluation = {"results": [], "summary": {f"5 {SCRIPT}": {"mean": 0.5, "std": 0.1, "count": 3}}}
    write_report(folder / "evaluation" / f"few{SCRIPT}.json", evaluation)
    (folder / "evaluation" / "torn.json").write_text("{")
    unreadable = folder / "unreadable.txt"
    unreadable.write_text(2 * unreadable.read_text(encoding="utf-8"), encoding="utf-8")  # two processes saw it
    monkeypatch.setattr("evaluation.report.VisualizeConfig", lambda: VisualizeConfig(images=2))  # six take seconds
    report([f"--encoder={folder}", *FAST])
    file = folder / "report.html"
    page = read(file)
    assert_has(page, "Verdict", "masked-patch accuracy", "copy baseline", "random weights", "pixel colours")
    assert_has(page, "too few to evaluate learning", "4 of 4 steps of 8 images", "loss", "waiting for data (%)")
    assert_has(page, "kNN accuracy (%)", "effective rank", *PICTURE_TITLES, f"5 {SCRIPT}", IMAGE)
    assert_has(page, "1 image could not be decoded", "50.0 ± 10.0", "torn.json: it is not a report of an evaluation")
    assert_has(page, "mpp pretrain", "precision: fp32", "written by mpp ", "torch ")
    assert page.tags["img"] >= 15 and "svg" not in page.tags
    assert f"<title>{html.escape(str(folder))}" in file.read_text()


@pytest.mark.faults
def test_a_run_of_one_channel_without_labels_and_colours_says_what_is_missing(pretrain, tmp_path):
    images = write_pictures(tmp_path / "plain", 16)
    settings = ("--objective.name=hog", "--data.channels=1", "--probe.every=4", "--data.eval_fraction=0.5")
    run = pretrain(*settings, f"--data.path={images}", "--model.position=rope", "--run.steps=5")
    report([f"--encoder={run}/encoder", *FAST])
    page = read(run / "report.html")
    assert_has(page, "neighbour agreement (%)", "held-out loss", "hog")
    assert_has(page, "positions: this ", "Few-shot, linear probe: not run yet")

    images.rename(tmp_path / "away")
    report([f"--encoder={run}", f"--out={tmp_path / 'again.html'}", *FAST])  # with pictures that were drawn before
    assert_has(read(tmp_path / "again.html"), "Pictures: the images of", *(PICTURE_TITLES - {"positions"}))


def test_a_run_that_was_killed_or_is_old_has_a_page(trained):
    shutil.rmtree(trained / "encoder")
    metrics = trained / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 4]
    metrics.write_text("".join(lines).replace("heldout/two_nearest", "of_old") + '{"step": 4, "lo')
    (trained / "verdict.json").unlink()
    config = trained / "config.yaml"
    config.write_text(f"{config.read_text()}of_an_older_length: 1\n")
    report([f"--encoder={trained}", *FAST])
    page = read(trained / "report.html")
    assert_has(page, "the run is not finished: it logged 3 of 4 steps", "the run was not evaluated")
    assert_has(page, "the command that started the run continues it", "Pictures: there is no encoder yet;")
    assert_has(page, "of_an_older_length: 1")  # its settings, where no command has them


@pytest.mark.faults
def test_other_trainings_have_pages(tmp_path):
    run = tmp_path / "run"
    contrastive.main([*TINY, f"--run.dir={run}", "--run.steps=1"])
    report([f"--encoder={run}", *FAST])
    assert_has(read(run / "report.html"), "only the folder of a pre-training run", "mpp contrastive")


@pytest.mark.parametrize("what, said", [("metrics.jsonl", "a run with logged"), ("config.yaml", "the folder of a run")])
def test_what_is_no_run_is_one_line(what, said, trained):
    (trained / what).unlink()
    with refused(f"encoder is .*; it must be {said}"):
        report([f"--encoder={trained}", *FAST])


def test_every_part_of_a_page_is_escaped(tmp_path):
    evil = f"{SCRIPT}{IMAGE}&"
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    picture_block = image_as_picture(tmp_path / "image.png", evil)
    blocks = [Table([evil], [[evil]], evil), Text(evil), Text(evil, code=True), picture_block]
    page = Page(evil, evil, [(evil, evil)], [evil], [Section(evil, evil, blocks)])
    write_page(tmp_path / "page.html", page)
    parsed = ParsedPage((tmp_path / "page.html").read_text())
    assert parsed.tags["img"] == 1 and not parsed.tags["script"] and not parsed.values("onerror")
    assert "".join(parsed.text).count(evil) == 13


@pytest.mark.parametrize(
    "before, after, said",
    [(0.3, 0.3, "no better"), (0.3, 0.329, "hardly better"), (0.3, 0.331, None), (0.97, 1.0, "saturated")],
)
def test_advice_follows_what_the_features_gained(before, after, said, tmp_path):
    advice = advice_on_features(tmp_path, [{"step": 0, "knn/depth_01": before}, {"step": 9, "knn/depth_01": after}])
    assert [said in each for each in advice] == [True] * bool(said)


# --- around the run ---


def test_pretraining_has_the_report_written_by_a_process_that_is_alone(pretrain, monkeypatch, capsys):
    def failing_run(words, env, **options):
        assert words[1:] == (str(ROOT / "evaluation" / "report.py"), "--encoder", words[-1])
        assert "TORCHELASTIC_RUN_ID" not in env
        raise subprocess.CalledProcessError(2, words)

    monkeypatch.setattr("mpp.training.run.subprocess.run", failing_run)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    folder = pretrain("--run.report=true")
    said = f"warning: the report is not written; `mpp report --encoder {folder}` writes it"
    assert said in capsys.readouterr().err
    assert (folder / "encoder").is_dir()


def ants_and_bees(right=3):
    """A result on four test images, of which the first so many are right."""
    targets = np.array([0, 0, 1, 1])
    outcomes = Outcomes("class", targets, targets ^ (np.arange(4) >= right), ["ant", SCRIPT])
    (result,) = add_figures([{"seed": 0, "outcomes": outcomes}])
    return result


def write_finetuning(folder):
    """A fine-tuning by hand, without weights: the folder of its tested run."""
    run = folder / "lr_0.01"
    run.mkdir()
    (run / "config.yaml").write_text("lrs: [0.01]\ndata: {}\n")
    line = {"step": 2, "heldout/loss": 1, "heldout/accuracy": 0.7, "heldout/largest_class": 0.5}
    (run / "metrics.jsonl").write_text(json.dumps(line))
    write_report(folder / "finetune.json", {"results": [ants_and_bees() | {"lr": 0.01}]})
    return run


@pytest.mark.parametrize("named", [".", "lr_0.01"])
def test_the_page_of_a_finetuning_has_its_figures_whichever_folder_is_named(named, tmp_path):
    run = write_finetuning(tmp_path)
    write_details(tmp_path / "finetune.json", ants_and_bees()["outcomes"])
    report([f"--encoder={tmp_path / named}", *FAST])
    page = read(run / "report.html")
    assert_has(page, "75.0 (30.1 to 95.4)", "largest class 50.0%", "Confusion matrix of finetune")
    assert_has(page, f"mpp predict --classifier {run} --data.path")
    assert "masked-patch" not in page.words and "mpp fewshot" not in page.words


def test_random_weights_stand_beside_an_evaluation(tmp_path):
    results = [ants_and_bees(2)]
    summary = summarize_accuracies(results, "seed")
    for name in ("linear", "fewshot_random_1", "knn"):
        protocol = {"encoder": str(tmp_path), "random": "random" in name}
        baselines = {"random weights": {"summary": summary}} if name == "knn" else {}
        written = {"results": results, "summary": summary, "protocol": protocol, "baselines": baselines}
        write_report(tmp_path / "evaluation" / f"{name}.json", written)
    (table,) = evaluation_blocks(tmp_path)
    shown = {"fewshot_random_1": "-", "knn": "50.0 (15.0 to 85.0)", "linear": "not evaluated (--random true)"}
    assert {row[0]: row[-1] for row in table.rows} == shown


def test_results_of_weights_that_the_run_has_no_more_are_not_shown_as_its_own(tmp_path):
    """It has been trained longer since, as runs that grow are. Random weights stay as they are."""
    run = write_finetuning(tmp_path)
    for encoder in ("encoder", "encoder_best"):
        (run / encoder).mkdir()
        (run / encoder / "config.json").write_text("{}")
        (run / encoder / "model.safetensors").write_text(f"first {encoder}")
    protocols = {
        "knn": {"encoder": str(run), "random": False},
        "knn_best": {"encoder": str(run / "encoder_best"), "random": False},
        "linear_random_0": {"encoder": str(run), "random": True},
        "fewshot": {"encoder": "of an earlier version"},
    }
    names = {"finetune", *protocols}
    for name, protocol in protocols.items():
        content = {"results": [], "summary": {"5": {"mean": 0.5, "count": 1}}, "protocol": protocol}
        write_report(run / "evaluation" / f"{name}.json", content)
    (table,) = evaluation_blocks(run)
    assert {row[0] for row in table.rows} == names
    (run / "encoder" / "model.safetensors").write_text("longer")
    table, missing = evaluation_blocks(run)
    assert {row[0] for row in table.rows} == names - {"knn"}
    assert missing.text.startswith("knn.json: ")


@pytest.mark.faults
def test_a_check_says_what_a_run_would_be_and_the_run_begins_there(pretrain, tmp_path, capsys):
    images, folder = tmp_path / "images", tmp_path / "run"
    train, test = write_pictures(images / "train", 600), write_pictures(images / "test", 6)
    broken = [train / "broken.png", *sorted(train.iterdir())[217::300], sorted(test.iterdir())[4]]
    for file in broken:
        file.write_bytes(b"no image")
    settings = (f"--data.path={images}", "--data.label_column=null", "--optim.warmup_steps=3")
    check.main([*TINY, f"--run.dir={folder}", *settings])
    printed = capsys.readouterr().out
    assert "read 601 of 601 images of train, 6 of 6 images of test\nwarning: 4 images cannot be decoded:\n  " in printed
    for said in (*(f"{file}: no image file" for file in broken), "a step: ", "4 steps of one process", "GB are free"):
        assert said in printed
    crops_file = folder / "check_crops.png"
    assert list(folder.iterdir()) == [crops_file]
    with Image.open(crops_file) as crops:
        assert crops.size == (4 * 258 + 2, 2 * 130 + 2)  # of a batch of eight, each picture 128 pixels wide
    pretrain(*settings)
    assert (folder / "encoder").is_dir() and crops_file.is_file()


@pytest.mark.parametrize(
    "key, accuracies, shown",
    [
        ("neighbours", {10: 0.5, 20: 0.4, 200: 0.9}, 20),
        ("shots", {1: 0.5, 25: 0.4, 5: 0.9}, 25),
        ("case", {"model": 0.1, "two nearest": 0.23}, "model"),
    ],
)
def test_the_result_in_detail_is_not_chosen_by_test_images(key, accuracies, shown):
    results = [{key: name, "accuracy": accuracy, "outcomes": name} for name, accuracy in accuracies.items()]
    assert shown_result({"results": results})[key] == shown


def test_a_confusion_matrix_names_the_classes(recwarn):
    names = ["ant", "bee", "\U0010fffd"]  # no font has the last
    axes, _ = (figure := plot_confusion(np.array([[3, 1, 0], [0, 0, 0], [0, 0, 2]]), names)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert [text.get_text() for text in axes.texts] == ["75", "25", "100"]  # of each class's images
    with figure_style():
        figure.savefig(io.BytesIO())
    assert not recwarn.list

"""Pages on finished, broken and hostile runs: their content, that they load nothing, and that they run no script."""

import html
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, encoded, picture
from PIL import Image

from evaluation import check, contrastive
from evaluation.comparison.entries import Question
from evaluation.comparison.files import write_comparison
from evaluation.config import ProbeDataConfig, ReportConfig, VisualizeConfig
from evaluation.figures import style
from evaluation.figures.charts import plot_confusion, plot_map
from evaluation.frozen.by_class import describe_shown
from evaluation.frozen.random_weights import describe_random_weights
from evaluation.frozen.results import write_report
from evaluation.metrics.outcomes import Outcomes
from evaluation.metrics.scoring import add_figures
from evaluation.metrics.summaries import summarize_accuracies
from evaluation.pages import picture_sections, run_words
from evaluation.pages.page import Link, Missing, Page, Section, Table, Text, render
from evaluation.pages.page import image_as_picture as as_picture
from evaluation.pages.run_sections import (
    details_of_evaluation,
    features_blocks,
    rows_of_evaluation,
    unreadable_blocks,
)
from evaluation.pictures.gallery import extract_gallery, held_out_losses
from evaluation.pictures.subject import load_subject
from evaluation.report import main as report
from mpp import pretrain as command
from mpp.config import Config
from mpp.errors import UserError
from mpp.pretrain import reopen
from mpp.training.task import ImageTask

FAST = ("--precision=fp32", "--threads=1", "--data.workers=0", "--images=2", "--compared=12")
SCRIPT = "<script>alert(1)<script>"  # a name of a file may have no slash
IMAGE = '"><img src=x onerror=alert(2)>'
VOID = {"meta", "link", "img", "br", "input", "hr"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class ParsedPage(HTMLParser):
    """Tags, attributes and text of a page; tags closed out of order and attributes given twice are errors."""

    def __init__(self, text: str):
        super().__init__()
        self.tags = Counter()
        self.open = []  # tags
        self.attributes = []  # (tag, name, value)
        self.text = []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def values(self, name: str) -> list[str]:
        """The values of an attribute."""
        return [value for _, attribute, value in self.attributes if attribute == name]

    @property
    def words(self) -> str:
        """The text, with single spaces."""
        return " ".join("".join(self.text).split())


def read(path: Path) -> ParsedPage:
    """A page, after checks that hold for all pages."""
    text = path.read_text()
    assert len(text) < 5e6 and text.startswith("<!DOCTYPE html>")
    page = ParsedPage(text)
    assert not set(page.tags) & {"script", "iframe", "object", "embed", "base", "form"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert all(source.startswith("data:image/") for source in page.values("src"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for link in page.values("href"):
        if link.startswith("#"):
            assert link[1:] in ids, link
        else:
            assert link == "data:," or re.match(r"[\w.%-]+/|\.\./", link), link
    assert "url(" not in text
    alts = page.values("alt")
    assert len(alts) == page.tags["img"]
    assert all(alts)
    assert not re.search(r"https?://", text)
    return page


def assert_has(page: ParsedPage, *expected: str) -> None:
    """Assert that the words of a page include all of these."""
    words = page.words
    assert [each for each in expected if each not in words] == []


def write_images(folder: Path, count: int, mode: str = "RGB") -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        image = Image.fromarray(picture(number)).convert(mode)
        (folder / f"{number}.png").write_bytes(encoded(image))
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A finished run with a probe, whose images, classes, folder and evaluation have names that attack a page."""
    top = tmp_path_factory.mktemp("hostile")
    images = top / f"images {SCRIPT}"
    folder = top / f"run {SCRIPT}"
    for number in range(24):
        file = images / (SCRIPT if number % 2 else IMAGE) / f"{number:02d}{SCRIPT}{IMAGE}$x_1$.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(number)) if number else b"broken")
    settings = ("--run.eval_every=2", "--probe.every=2", "--data.eval_fraction=0.5", f"--data.path={images}")
    kept = [word for word in TINY if not word.startswith("--probe")]
    command.main([*kept, *settings, f"--run.dir={folder}"])
    evaluation = {"summary": {f"5 {SCRIPT}": {"mean": 0.5, "std": 0.1, "count": 3}}}
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / f"few{SCRIPT}.json").write_text(json.dumps(evaluation))
    (folder / "evaluation" / "torn.json").write_text("{")
    report([f"--encoder={folder}", *FAST])
    return folder


def test_a_hostile_run_has_a_page_that_says_all_and_runs_nothing(hostile):
    file = hostile / "report.html"
    page = read(file)
    assert_has(
        page,
        "Verdict",
        "Masked-patch accuracy",
        "copy baseline",
        "kNN",
        "random weights",
        "pixel colours",
        "too few to evaluate learning",
    )
    assert_has(page, "4 of 4 steps of 8 images", "Loss", "Gradient norm", "Waiting for data")
    assert_has(page, "Accuracy on masked patches", "kNN accuracy by depth", "Effective rank")
    assert_has(page, "Nearest neighbours", "Predicted best", "Predicted worst")
    assert_has(page, "1 image could not be decoded", "50.0 ± 10.0", "torn.json: it is not a report of an evaluation")
    assert_has(page, "Settings that differ", "mpp pretrain", "--run.precision=fp32", "Versions and machine")
    assert_has(page, SCRIPT, f"5 {SCRIPT}", IMAGE)
    assert "svg" not in page.tags
    assert page.tags["img"] >= 15
    assert f"<title>{html.escape(str(hostile))}" in file.read_text()


@pytest.mark.faults
def test_the_same_again_draws_nothing_anew(hostile, tmp_path, monkeypatch):
    monkeypatch.setattr("evaluation.pages.picture_sections.PICTURES", {})
    again = tmp_path / "again.html"
    report([f"--encoder={hostile}", f"--out={again}", *FAST])
    assert read(again).tags["img"] == read(hostile / "report.html").tags["img"]


@pytest.mark.faults
def test_a_run_of_one_channel_without_labels_and_colours_says_what_is_missing(pretrain, tmp_path):
    images = write_images(tmp_path / "plain", 16, mode="L")
    settings = ("--objective.name=hog", "--data.channels=1", "--probe.every=4", "--data.eval_fraction=0.5")
    run = pretrain(*settings, f"--data.path={images}", "--model.position=rope", "--run.steps=5")
    report([f"--encoder={run}/encoder", *FAST])
    page = read(run / "report.html")
    assert_has(page, "Accuracy on masked patches: this run predicts no colours")
    assert_has(page, "kNN accuracy: the images have no labels", "Neighbour agreement between two crops")
    assert_has(page, "positions: rotary positions", "Few-shot, linear probe: not run yet")
    assert_has(page, "Held-out loss", "hog")

    images.rename(tmp_path / "away")
    again = tmp_path / "again.html"
    report([f"--encoder={run}", f"--out={again}", *FAST])
    page = read(again)
    assert_has(page, "Pictures: the images of")
    assert page.tags["img"] >= 3  # pictures that were drawn before


def test_a_run_that_was_killed_or_is_old_has_a_page(finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    shutil.rmtree(run / "encoder")
    metrics = run / "metrics.jsonl"
    old = ""
    for text in metrics.read_text().splitlines():
        line = json.loads(text)
        line.pop("heldout/two_nearest", None)
        if line["step"] < 4:
            old += json.dumps(line) + "\n"
    metrics.write_text(old + '{"step": 4, "lo')
    (run / "verdict.json").unlink()
    with (run / "config.yaml").open("a") as config:
        config.write("of_an_older_length: 1\n")
    report([f"--encoder={run}", *FAST])
    page = read(run / "report.html")
    assert_has(page, "The run is not finished: it logged 3 of 4 steps")
    assert_has(page, "the command that started the run continues it")
    assert_has(page, "Pictures: there is no encoder yet", "Held-out figures: the run has not been evaluated yet")
    assert_has(page, "Verdict: the run was not evaluated", "config.yaml is from another version of mpp")


@pytest.mark.faults
def test_other_trainings_have_pages(tmp_path):
    run = tmp_path / "run"
    contrastive.main([*TINY, f"--run.dir={run}", "--run.steps=1"])
    report([f"--encoder={run}", *FAST])
    assert_has(read(run / "report.html"), "only a pre-training run predicts patches", "mpp contrastive")


@pytest.mark.parametrize("what", ["empty", "nowhere"])
def test_what_is_no_run_is_one_line(what, finished_run, tmp_path):
    run = tmp_path / "run"
    if what == "empty":
        run.mkdir()
        shutil.copy(finished_run / "config.yaml", run)
    with pytest.raises(UserError, match=r"encoder is .*; it must be (a run with logged|the folder of a run)"):
        report([f"--encoder={run}", *FAST])


@pytest.mark.parametrize(
    ("untrained", "trained", "said"),
    [(1.0, 1.0, "saturated"), (0.98, 1.0, "saturated"), (0.6, 0.61, "more images"), (0.6, 0.9, None)],
)
def test_advice_on_a_probe_that_cannot_rise_is_not_more_images(untrained, trained, said, tmp_path):
    history = [
        {"step": step, "heldout/loss": 1.0, "knn/depth_01": knn, "knn/floor_pixels": 0.5}
        for step, knn in ((0, untrained), (9, trained))
    ]
    advice = run_words.advice_on_features(tmp_path, history)
    assert [word for word in ("saturated", "more images") if word in " ".join(advice)] == ([said] if said else [])


def test_every_part_of_a_page_is_escaped():
    evil = f"{SCRIPT}{IMAGE}&"
    link = Link(SCRIPT, f"#{SCRIPT}")
    blocks = [
        Table([evil], [[evil], [link], [[link]]], evil),
        Table([evil], [[evil]], evil, folded=True),
        Text(evil),
        Text(evil, code=True),
        as_picture(Image.new("RGB", (4, 4)), evil, evil),
    ]
    page = Page(
        title=evil,
        subtitle=evil,
        verdict=[(evil, link)],
        warnings=[evil],
        sections=[Section(evil, evil, blocks)],
        missing={evil: evil},
    )
    parsed = ParsedPage(render(page))
    assert not parsed.tags["script"]
    assert parsed.tags["img"] == 1
    assert not parsed.values("onerror")
    assert "".join(parsed.text).count(evil) == 19


# --- around the run ---


def test_pretraining_has_the_report_written_by_a_process_that_is_alone(pretrain, monkeypatch, capsys):
    calls = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def failing_run(words, env, **options):
        calls.append((words, env))
        raise subprocess.CalledProcessError(2, words)

    monkeypatch.setattr("mpp.training.run.subprocess.run", failing_run)
    folder = pretrain("--run.report=true", without="--run.report")
    words, env = calls[0]
    assert words[1:] == (str(ROOT / "evaluation" / "report.py"), "--encoder", str(folder))
    assert "RANK" not in env
    printed = capsys.readouterr()
    assert f"warning: the report is not written; `mpp report --encoder {folder}` writes it" in printed.err
    assert "next: tensorboard" in printed.out
    assert (folder / "encoder").is_dir()


def write_finetuning(folder: Path) -> Path:
    """A fine-tuning by hand, without weights: the folder of its tested run."""
    run = folder / "lr_0.01"
    run.mkdir()
    (run / "config.yaml").write_text("lrs: [0.01]\ndata: {}\n")
    lines = [
        {"step": step, "heldout/loss": 1, "heldout/accuracy": 0.7, "heldout/largest_class": 0.5} for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    outcomes = Outcomes("class", np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]), ["ant", "bee"])
    (result,) = add_figures([{"seed": 0, "lr": 0.01, "outcomes": outcomes}])
    write_report(folder / "finetune.json", {"results": [result]})
    return run


@pytest.mark.parametrize("named", ["fine-tuning", "run"])
def test_the_page_of_a_finetuning_has_its_figures_whichever_folder_is_named(named, tmp_path):
    run = write_finetuning(tmp_path)
    report([f"--encoder={tmp_path if named == 'fine-tuning' else run}", *FAST])
    page = read(run / "report.html")
    assert_has(page, "75.0 (30.1 to 95.4)", "macro F1")
    assert any(alt.startswith("Confusion matrix of finetune") for alt in page.values("alt"))
    assert_has(page, f"mpp predict --classifier {run} --data.path", "largest class")
    text = "".join(page.text)
    assert "masked patches" not in text and "mpp fewshot" not in text


def test_random_weights_stand_beside_an_evaluation_and_are_none_of_their_own(tmp_path):
    run = write_finetuning(tmp_path)
    for name, right in (("knn", 3), ("knn_random_0", 2), ("linear", 3), ("fewshot_random_1", 1)):
        outcomes = Outcomes("class", np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]) ^ (np.arange(4) >= right))
        results = add_figures([{"seed": 0, "outcomes": outcomes}])
        protocol = {"encoder": str(run), "random": "random" in name}
        report_of_probe = {"results": results, "summary": summarize_accuracies(results, "seed"), "protocol": protocol}
        write_report(run / "evaluation" / f"{name}.json", report_of_probe)
    linear, neighbours, untrained = ({"mean": mean, "count": 1} for mean in (0.5, 0.4, 0.3))
    report_of_masks = {
        "protocol": {"encoder": str(run), "random": False},
        "summary": {"linear": linear, "knn": neighbours},
        "baselines": {"random weights": {"summary": {"linear": untrained}}},
    }
    of_masks = rows_of_evaluation(tmp_path / "segmentation.json", report_of_masks, tmp_path)
    assert [row[-1] for row in of_masks] == ["30.0", "not evaluated (--random true)"]  # case by case
    rows = {}
    for block in features_blocks(ReportConfig(encoder=str(run)), run, []):
        if isinstance(block, Table) and block.headings[-1] == "random weights":
            rows = {row[0].text: row[-1] for row in block.rows}
        else:
            assert "knn_random" not in getattr(block, "caption", "")
    assert rows == {
        "finetune": "-",
        "fewshot_random_1": "-",
        "knn": "50.0 (15.0 to 85.0)",
        "linear": "not evaluated (--random true)",
    }


def test_results_of_weights_that_the_run_has_no_more_are_not_shown_as_its_own(tmp_path):
    """It has been trained longer since, as runs that grow are. Random weights stay as they are."""
    run = write_finetuning(tmp_path)
    for encoder in ("encoder", "encoder_best"):
        (run / encoder).mkdir()
        (run / encoder / "config.json").write_text("{}")
        (run / encoder / "model.safetensors").write_text(f"first {encoder}")
    summary = {"5": {"mean": 0.5, "count": 1}}
    protocols = {
        "knn": {"encoder": str(run), "random": False},
        "knn_best": {"encoder": str(run / "encoder_best"), "random": False},
        "linear_random_0": {"encoder": str(run), "random": True},
        "masked": {"encoder": str(run), "step": 2},
        "fewshot": {"encoder": "of an earlier version"},
    }
    for name, protocol in protocols.items():
        content = {"results": [], "summary": summary, "protocol": protocol}
        write_report(run / "evaluation" / f"{name}.json", content)

    def shown_and_missing():
        history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        blocks = features_blocks(ReportConfig(encoder=str(run)), run, history)
        (table,) = (block for block in blocks if isinstance(block, Table) and block.headings[-1] == "random weights")
        missing = {block.content for block in blocks if isinstance(block, Missing)}
        return {row[0].text for row in table.rows} - {"finetune"}, {name for name in missing if name.endswith("json")}

    assert shown_and_missing() == (set(protocols), set())
    (run / "encoder" / "model.safetensors").write_text("longer")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('\n{"step": 3, "heldout/loss": 1}')
    assert shown_and_missing() == ({"knn_best", "linear_random_0", "fewshot"}, {"knn.json", "masked.json"})


def test_a_finetuning_without_a_tested_run_is_one_line(tmp_path):
    write_finetuning(tmp_path)
    (tmp_path / "finetune.json").write_text('{"results": []}')
    with pytest.raises(UserError, match="which only compared rates"):
        report([f"--encoder={tmp_path}", *FAST])


@pytest.mark.faults
def test_the_report_is_written_at_the_end(pretrain):
    folder = pretrain("--run.report=true", without="--run.report")
    assert_has(read(folder / "report.html"), "Verdict")


@pytest.mark.faults
def test_a_check_says_what_a_run_would_be_and_the_run_begins_there(pretrain, tmp_path, capsys):
    images = tmp_path / "images"
    train = write_images(images / "train", 20)
    write_images(images / "test", 6)
    (train / "broken.png").write_bytes(b"no image")
    folder = tmp_path / "run"
    settings = (f"--data.path={images}", "--data.label_column=null", "--optim.warmup_steps=3")
    tiny = [word for word in TINY if not word.startswith("--optim.warmup")]
    check.main([*tiny, f"--run.dir={folder}", *settings])
    printed = capsys.readouterr().out
    for expected in (
        "40 x 48 pixels: ",
        "a step: ",
        "cannot be decoded: ",
        "4 steps of one process",
        "memory on a GPU, counted (mpp memory): ",
        "GB are free",
        "nearly the same image: held-out ",
        "warning: unreadable images: 1 of 27",
    ):
        assert expected in printed, expected
    crops_file = folder / "check_crops.png"
    assert list(folder.iterdir()) == [crops_file]
    with Image.open(crops_file) as crops:
        assert crops.size == (4 * 258 + 2, 2 * 130 + 2)  # of a batch of eight, each picture 128 pixels wide
    pretrain(*settings, without="--optim.warmup")
    assert (folder / "encoder").is_dir()
    assert crops_file.is_file()


def test_a_check_warns_of_loading_that_is_slow():

    def warnings(waiting: float) -> list[str]:
        return check.warnings_of_run(Config(), check.StepCost(1.0, waiting, 1, 1))

    (warning,) = warnings(0.5)
    assert warning.startswith("data-loading bottleneck: training waits for images 50% of ")
    assert warnings(0.2) == []


def test_a_check_with_images_that_are_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is .*nowhere"):
        check.main([f"--data.path={tmp_path / 'nowhere'}", f"--run.dir={tmp_path / 'run'}", "--run.threads=1"])


def test_random_weights_are_named_case_by_case():
    """The best of 1 and 25 shots is no baseline of 1 shot."""
    of_cases = {shots: {"mean": share, "std": 0.01, "count": 3} for shots, share in (("1", 0.1), ("25", 0.2))}
    report = {"protocol": {"random": False, "encoder": "run"}, "baselines": {"random weights": {"summary": of_cases}}}
    assert describe_random_weights(Path("fewshot.json"), report) == "random weights 10.0% (1), 20.0% (25)"
    del of_cases["25"]
    assert describe_random_weights(Path("fewshot.json"), report) == "random weights 10.0 ± 1.0%"


def test_a_comparison_has_a_page_that_leads_to_the_reports(tmp_path):
    about = {"encoder_seed": 0, "seed": 0, "evaluation": "few-shot", "dataset": "birds", "group": None, "digest": "x"}
    rows = [
        about | {"encoder": SCRIPT, "kind": "test", "case": "5", "accuracy": 0.6},
        about | {"encoder": "floor", "kind": "test", "case": "5", "accuracy": 0.4},
        about | {"encoder": "wild", "kind": "diverged"},
    ]
    run = tmp_path / f"run {SCRIPT}"
    run.mkdir()
    (run / "report.html").touch()
    questions = [Question("first", title=f"Which? {SCRIPT}"), Question("empty", encoders=["nobody"])]
    questions.append(Question("by depth", plot="depth"))
    runs = {SCRIPT: [run], "floor": [Path("floor:x")]}
    write_comparison(tmp_path / "out", questions, rows, {}, runs, missing=["Without seed 2."])
    page = read(tmp_path / "out" / "report.html")
    no_depths = "there are no accuracies by depth, which evaluations with depth: dev have"
    text = (tmp_path / "out" / "table.md").read_text()
    assert "Without seed 2." in text and f"by depth: {no_depths}." in text
    assert_has(page, "Without seed 2.", no_depths)
    assert_has(page, f"few-shot 5 on birds: best is {SCRIPT} with 60.0% (next to floor 40.0%)")
    assert_has(page, "Process that wrote this page; results that were there already may be of other versions", "mpp")
    assert_has(page, "1 training diverged", "there are no results yet")
    assert page.tags["img"] == 1
    assert "../run%20%3Cscript%3Ealert%281%29%3Cscript%3E/report.html" in page.values("href")


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_loads_it_without_an_error_or_a_request(hostile, tmp_path):
    log = tmp_path / "net.json"
    command_line = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--disable-component-update",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--log-net-log={log}",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        (hostile / "report.html").as_uri(),
    ]
    ended = subprocess.run(command_line, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0
    assert 'id="verdict"' in ended.stdout
    assert "CONSOLE" not in ended.stderr
    assert "alert" not in ended.stderr
    hosts = set(re.findall(r'"url":"\w+://([^/"]+)', log.read_text()))
    browsers_own = ("google.com", "googleapis.com", "gvt1.com")  # it asks for its updates, and is not answered
    assert not [host for host in hosts if not host.endswith(browsers_own)], hosts


def test_a_page_has_the_figures_of_an_evaluation_by_class_and_its_confusion_matrix(tmp_path):
    outcomes = Outcomes("class", np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]), ["ant", SCRIPT])
    (result,) = add_figures([{"seed": 0, "outcomes": outcomes}])
    file = tmp_path / "supervised.json"
    report = write_report(file, {"results": [result]})
    (row,) = rows_of_evaluation(file, report, tmp_path)
    assert row[1:] == ["0", "accuracy (%)", "75.0 (30.1 to 95.4)", "largest class 50.0%", "-"]
    figures, by_class, confusion = details_of_evaluation(file, report)
    assert [name for name, _ in figures.rows] == ["accuracy", "mean over classes", "macro F1"]
    assert [cells[:3] for cells in by_class.rows] == [["ant", "2", "1"], [SCRIPT, "2", "3"]]
    assert confusion.alt == "Confusion matrix of supervised, seed 0"
    (tmp_path / "supervised.outcomes.npz").unlink()  # of an earlier version
    assert details_of_evaluation(file, report) == []


@pytest.mark.parametrize(
    ("key", "accuracies", "shown"),
    [
        ("neighbours", {10: 0.5, 20: 0.4, 200: 0.9}, "neighbours 20"),
        ("neighbours", {50: 0.4, 5: 0.9}, "neighbours 50"),
        ("shots", {1: 0.5, 25: 0.4, 5: 0.9}, "shots 25"),
        ("case", {"model": 0.1, "two nearest": 0.23}, "case model"),
    ],
)
def test_the_result_in_detail_is_not_chosen_by_test_images(key, accuracies, shown):
    results = []
    for number, (name, accuracy) in enumerate(accuracies.items()):
        results.append({key: name, "accuracy": accuracy, "outcomes": number})
    assert describe_shown({"results": results}) == shown


def test_names_that_no_font_has_are_numbers(monkeypatch, recwarn):
    monkeypatch.setattr(style, "drawable_letters", lambda: frozenset(range(128)))
    figure = plot_confusion(np.eye(3, dtype=int), ["cat", "\u732b", "\u732b cat"])
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["cat", "class 1", "class 2"]
    legend = plot_map(np.zeros((2, 2)), np.arange(2), ["cat", "\u732b"]).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["cat", "class 1"]
    monkeypatch.undo()
    assert style.drawable("caf\u00e9", "class 0") == "caf\u00e9"
    assert style.drawable("\U0010fffd", "class 0") == "class 0"  # for private use: no font has it
    plot_confusion(np.eye(1, dtype=int), ["\U0010fffd"]).savefig(io.BytesIO())
    assert not recwarn.list


def test_a_map_and_a_confusion_matrix_name_the_classes():
    labels = np.array([0, 1, 2, -1])
    (axes,) = plot_map(np.zeros((4, 2)), labels, ["_ant", "bee"]).axes
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_ant", "bee", "class 2"]
    axes, _ = plot_confusion(np.array([[3, 1], [0, 0]]), ["ant", "bee"]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ant", "bee"]
    assert [text.get_text() for text in axes.texts] == ["3", "1"]
    (image,) = axes.images
    assert image.get_array()[0].tolist() == [75, 25] and np.isnan(image.get_array()[1].filled(np.nan)).all()


@pytest.mark.parametrize(("asked", "drawn"), [(4, []), (2, []), (9, []), (3, ["predictions"])])
def test_a_picture_of_other_than_the_asked_number_of_images_is_drawn(asked, drawn, tmp_path, monkeypatch):
    """There is one of 2; the default, 4, takes any."""
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text("{}")
    for name in ("predictions", "positions"):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{name}.png")
    np.savez(tmp_path / "predictions.npz", original=np.zeros((2, 2, 2, 3)))
    monkeypatch.setattr(picture_sections, "PICTURES_ON_PAGE", {"predictions": "a", "positions": "b"})
    begun = []
    monkeypatch.setattr(picture_sections, "draw_picture", lambda subject, name, *rest: begun.append(name))
    subject = SimpleNamespace(config=SimpleNamespace(images=asked), held_out=range(2 if asked == 9 else 8))
    picture_sections.picture_blocks(subject, tmp_path, tmp_path)
    assert begun == drawn
    (tmp_path / "predictions.npz").write_bytes(b"")
    picture_sections.picture_blocks(subject, tmp_path, tmp_path)
    assert begun[len(drawn) :] == ([] if asked == 4 else ["predictions"])


def test_images_that_cannot_be_decoded_have_no_neighbours_and_no_loss(finished_run, tmp_path):
    """Others take their place in batches, and would be shown twice, and by their names."""
    write_images(tmp_path / "images", 12)
    for number in (3, 7):
        (tmp_path / "images" / f"{number}.png").write_bytes(b"broken")
    data = ProbeDataConfig(path=str(tmp_path / "images"), eval_split=None, eval_fraction=0.9, workers=0)
    subject = load_subject(VisualizeConfig.of(encoder=str(finished_run), data=data, precision="fp32"))
    names = extract_gallery(subject, subject.held_out, 2, "mean").names
    broken = {str(tmp_path / "images" / f"{number}.png") for number in (3, 7)}
    held_out = {subject.held_out.image_name(index) for index in range(len(subject.held_out))}
    assert sorted(names) == sorted(held_out - broken) and held_out & broken
    task = reopen(finished_run, data, 12, subject.accelerator)
    losses = held_out_losses(task, 12)
    assert {task.held_out.image_name(index) for index in np.flatnonzero(np.isnan(losses)).tolist()} == held_out & broken
    chosen = picture_sections.best_and_worst(losses)
    assert np.isfinite(losses[[*chosen["best"], *chosen["worst"]]]).all()
    assert losses[chosen["best"][0]] == np.nanmin(losses) and losses[chosen["worst"][0]] == np.nanmax(losses)


@pytest.mark.parametrize("count", [1, 2])
def test_unreadable_images_are_counted_in_words_for_any_number(tmp_path, count):
    (tmp_path / "unreadable.txt").write_text("a.png\n" * count)
    sentence = unreadable_blocks(tmp_path)[0].text
    assert sentence == f"{count} image{'s'[: count - 1]} could not be decoded; training took others instead."


@pytest.mark.parametrize(("width", "words"), [(90, "0.00819 M parameters"), (1000, "1 M parameters")])
def test_parameters_are_counted_in_millions(width, words):
    task = SimpleNamespace(model=SimpleNamespace(encoder=torch.nn.Linear(width, width)))
    assert ImageTask.describe_model(task).startswith(words)


def test_the_result_that_is_shown_has_its_shots_once():
    result = {"shots": 5, "seed": 0, "outcomes": 0}
    assert describe_shown({"results": [result | {"case": "5"}]}) == "shots 5, seed 0"
    assert describe_shown({"results": [result | {"case": "5, l2 1"}]}) == "case 5, l2 1, shots 5, seed 0"

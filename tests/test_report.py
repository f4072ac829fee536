"""Pages on finished, broken and hostile runs: their content, that they load nothing, and that they run no script."""

import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, encoded, picture
from PIL import Image

from evaluation import check, contrastive
from evaluation.comparison.entries import Question
from evaluation.comparison.files import write_comparison
from evaluation.pages.page import Link, Page, Section, Table, Text, render
from evaluation.pages.page import picture as as_picture
from evaluation.report import main as report
from mpp import pretrain as command
from mpp.config import Config
from mpp.errors import UserError

FAST = ("--precision=fp32", "--threads=1", "--data.workers=0", "--images=2", "--compared=12")
SCRIPT = "<script>alert(1)<script>"  # a name of a file may have no slash
IMAGE = '"><img src=x onerror=alert(2)>'
VOID = {"meta", "link", "img", "br", "input", "hr"}
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class ParsedPage(HTMLParser):
    """Tags, attributes and text of a page; tags closed out of order and attributes given twice are errors."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.attributes, self.text = Counter(), [], [], []
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

    def values(self, name: str, of: str | None = None) -> list[str]:
        return [value for tag, each, value in self.attributes if each == name and of in (None, tag)]


def read(path: Path) -> tuple[ParsedPage, str]:
    """A page and its words, after checks that hold for all pages."""
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
    assert len(page.values("alt", "img")) == page.tags["img"] and all(page.values("alt", "img"))
    assert not re.search(r"https?://", text)
    return page, " ".join("".join(page.text).split())


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


def test_a_hostile_run_has_a_page_that_says_all_and_runs_nothing(hostile, capsys):
    page, words = read(hostile / "report.html")
    for expected in (
        *("Verdict", "Masked-patch accuracy", "copy baseline", "kNN", "random weights", "pixel colours"),
        *("4 of 4 steps of 8 images", "Loss", "Accuracy on masked patches", "kNN accuracy by depth", "Effective rank"),
        *("Nearest neighbours", "Predicted best", "Predicted worst", "1 images could not be decoded", "50.0 ± 10.0"),
        *(
            "Settings that differ",
            "mpp pretrain",
            "--run.precision=fp32",
            "Versions and machine",
            "torn.json: it is no report of an evaluation",
        ),
        *(SCRIPT, f"5 {SCRIPT}", IMAGE, "Gradient norm", "Waiting for data"),
    ):
        assert expected in words, expected
    assert "svg" not in page.tags and page.tags["img"] >= 15
    assert "<title>" + str(hostile).replace("<", "&lt;").replace(">", "&gt;") in (hostile / "report.html").read_text()


@pytest.mark.faults
def test_the_same_again_draws_nothing_anew(hostile, tmp_path, monkeypatch):
    monkeypatch.setattr("evaluation.pages.picture_sections.PICTURES", {})
    report([f"--encoder={hostile}", f"--out={tmp_path / 'again.html'}", *FAST])
    assert read(tmp_path / "again.html")[0].tags["img"] == read(hostile / "report.html")[0].tags["img"]


@pytest.mark.faults
def test_a_run_of_one_channel_without_labels_and_colours_says_what_is_missing(pretrain, tmp_path):
    (tmp_path / "plain").mkdir()
    for number in range(16):
        (tmp_path / "plain" / f"{number}.png").write_bytes(encoded(Image.fromarray(picture(number)).convert("L")))
    settings = ("--objective.name=hog", "--data.channels=1", "--probe.every=4", "--data.eval_fraction=0.5")
    run = pretrain(*settings, f"--data.path={tmp_path / 'plain'}", "--model.position=rope", "--run.steps=5")
    report([f"--encoder={run}/encoder", *FAST])
    _, words = read(run / "report.html")
    for expected in (
        *("Accuracy on masked patches: this run predicts no colours", "kNN accuracy: the images have no labels"),
        *(
            "positions: rotary positions",
            "Neighbours that agree between two crops",
            "Few-shot, linear probe: not asked for",
        ),
        *("Held-out loss", "hog"),
    ):
        assert expected in words, expected
    (tmp_path / "plain").rename(tmp_path / "away")
    report([f"--encoder={run}", f"--out={tmp_path / 'again.html'}", *FAST])
    page, words = read(tmp_path / "again.html")
    assert "Pictures: the images of" in words and page.tags["img"] >= 3  # those that were drawn


def test_a_run_that_was_killed_or_is_old_has_a_page(finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    shutil.rmtree(run / "encoder")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    old = ""
    for line in lines:
        if line["step"] < 4:
            old += json.dumps({name: value for name, value in line.items() if "two_nearest" not in name}) + "\n"
    (run / "metrics.jsonl").write_text(old + '{"step": 4, "lo')
    (run / "verdict.json").unlink()
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "of_an_older_length: 1\n")
    report([f"--encoder={run}", *FAST])
    _, words = read(run / "report.html")
    for expected in (
        *("The run is not finished: it logged 3 of 4 steps", "Pictures: there is no encoder yet"),
        *("Held-out figures: the run has not been evaluated yet", "the command that started the run continues it"),
        *("Verdict: no evaluation has written verdict.json", "config.yaml is not one of today's", "Not evaluated yet"),
    ):
        assert expected in words, expected


@pytest.mark.faults
def test_other_trainings_have_pages(tmp_path):
    contrastive.main([*TINY, f"--run.dir={tmp_path / 'run'}", "--run.steps=1"])
    report([f"--encoder={tmp_path / 'run'}", *FAST])
    _, words = read(tmp_path / "run" / "report.html")
    assert "only a pre-training run predicts patches" in words and "mpp contrastive" in words


@pytest.mark.parametrize("what", ["empty", "nowhere"])
def test_what_is_no_run_is_one_line(what, finished_run, tmp_path):
    run = tmp_path / "run"
    if what == "empty":
        run.mkdir()
        shutil.copy(finished_run / "config.yaml", run)
    with pytest.raises(UserError, match=r"encoder is .*; it must be (a run that has logged|the folder of a run)"):
        report([f"--encoder={run}", *FAST])


def test_every_part_of_a_page_is_escaped():
    links, evil = [Link(SCRIPT, f"#{SCRIPT}")], f"{SCRIPT}{IMAGE}&"
    with_all = [
        Table([evil], [[evil], links, [links]], evil),
        Table([evil], [[evil]], evil, folded=True),
        *(Text(evil), Text(evil, code=True)),
        as_picture(Image.new("RGB", (4, 4)), evil, evil),
    ]
    page = Page(evil, evil, [(evil, links[0])], [evil], [Section(evil, evil, with_all)], {evil: evil})
    page = ParsedPage(render(page))
    assert not page.tags["script"] and page.tags["img"] == 1 and not page.values("onerror")
    assert "".join(page.text).count(evil) == 19


# --- around the run ---


def test_pretraining_has_the_report_written_by_a_process_that_is_alone(pretrain, monkeypatch, capsys):
    calls = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def fails(words, env, **options):
        calls.append((words, env))
        return subprocess.CompletedProcess(words, 2, "", "error: the disk is full\n")

    monkeypatch.setattr("mpp.training.report_process.subprocess.run", fails)
    folder = pretrain("--run.report=true", without="--run.report")
    (words, env) = calls[0]
    assert words[1:] == (str(ROOT / "evaluation" / "report.py"), "--encoder", str(folder)) and "RANK" not in env
    said = capsys.readouterr()
    assert (
        f"warning: the report is not written (error: the disk is full); `mpp report --encoder {folder}` does"
        in said.err
    )
    assert (folder / "encoder").is_dir() and "next: tensorboard" in said.out


@pytest.mark.faults
def test_the_report_is_written_at_the_end(pretrain):
    folder = pretrain("--run.report=true", without="--run.report")
    assert "Verdict" in read(folder / "report.html")[1]


@pytest.mark.faults
def test_a_check_says_what_a_run_would_be_and_the_run_begins_there(pretrain, tmp_path, capsys):
    folder = tmp_path / "run"
    for split, count in (("train", 20), ("test", 6)):
        (tmp_path / "images" / split).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "images" / split / f"{number}.png").write_bytes(encoded(picture(number)))
    (tmp_path / "images" / "train" / "broken.png").write_bytes(b"no image")
    images = (f"--data.path={tmp_path / 'images'}", "--data.label_column=null", "--optim.warmup_steps=3")
    settings = [word for word in TINY if not word.startswith("--optim.warmup")]
    check.main([*settings, f"--run.dir={folder}", *images])
    said = capsys.readouterr().out
    for words in (
        *("| of these, cannot be decoded", "| 40 x 48 pixels", "| a step ", "cannot be decoded: "),
        *("| 4 steps of one process", "GB are free", "nearly the same image: held-out "),
        *("warning: unreadable images: 1 of 27", "run.steps is 4, outside the range that was searched (400 to 8000)"),
    ):
        assert words in said, words
    assert [path.name for path in folder.iterdir()] == ["check_crops.png"]
    with Image.open(folder / "check_crops.png") as crops:
        assert crops.size == (540, 540)  # eight rows of four pairs, each picture 64 pixels wide
    pretrain(*images, without="--optim.warmup")
    assert (folder / "encoder").is_dir() and (folder / "check_crops.png").is_file()


def test_a_check_warns_of_loading_that_is_slow():
    task = SimpleNamespace(facts=lambda: {})
    for waiting, warns in ((0.5, True), (0.2, False)):
        said = check.warnings(task, Config(), None, check.Timing(1.0, waiting, 1.0, 1.0))
        assert [each[:51] for each in said] == ["waiting for data: training waits for images 50% of "] * warns


def test_a_check_with_images_that_are_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is .*nowhere"):
        check.main([f"--data.path={tmp_path / 'nowhere'}", f"--run.dir={tmp_path / 'run'}", "--run.threads=1"])


def test_a_comparison_has_a_page_that_leads_to_the_reports(tmp_path):
    about = {"encoder_seed": 0, "seed": 0, "evaluation": "few-shot", "dataset": "birds", "group": None, "digest": "x"}
    rows = [about | {"encoder": SCRIPT, "kind": "test", "case": "5", "accuracy": 0.6}]
    rows += [about | {"encoder": "floor", "kind": "test", "case": "5", "accuracy": 0.4}]
    rows += [about | {"encoder": "wild", "kind": "diverged"}]
    (tmp_path / f"run {SCRIPT}").mkdir()
    (tmp_path / f"run {SCRIPT}" / "report.html").touch()
    questions = [Question("first", title=f"Which? {SCRIPT}"), Question("empty", encoders=["nobody"])]
    write_comparison(
        tmp_path / "out", questions, rows, {}, {SCRIPT: [tmp_path / f"run {SCRIPT}"], "floor": [Path("floor:x")]}
    )
    page, words = read(tmp_path / "out" / "report.html")
    assert f"few-shot 5 on birds: best is {SCRIPT} with 60.0 % (beside floor 40.0 %)" in words
    assert "1 trainings diverged" in words and "there are no results yet" in words and page.tags["img"] == 1
    assert "../run%20%3Cscript%3Ealert%281%29%3Cscript%3E/report.html" in page.values("href")


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_loads_it_without_an_error_or_a_request(hostile, tmp_path):
    log, page = tmp_path / "net.json", (hostile / "report.html").as_uri()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    options += ("--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}")
    options += ("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    ended = subprocess.run((CHROMIUM, *options, page), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and 'id="verdict"' in ended.stdout
    assert "CONSOLE" not in ended.stderr and "alert" not in ended.stderr
    asked = set(re.findall(r'"url":"\w+://([^/"]+)', log.read_text()))
    browsers_own = ("google.com", "googleapis.com", "gvt1.com")  # it asks for its updates, and is not answered
    assert not [host for host in asked if not host.endswith(browsers_own)], asked

"""Pages of the documentation: links lead somewhere, tables are whole, and commands and examples work."""

import os
import re
import shlex
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, picture
from nbclient import NotebookClient
from PIL import Image

from evaluation.cli import commands, locate_command
from evaluation.comparison.cases import cases_of, evaluation_settings, read_entries
from evaluation.config import CompareConfig, SweepConfig
from evaluation.sweep import plan_sweep
from mpp.config import flatten
from mpp.config.parsing import parse
from mpp.errors import UserError

LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
CODE = re.compile(r"^ *`{3}.*?^ *`{3}$|(?:(?<=\n\n)|\A)(?: {4,}[^\n]*(?:\n|\Z))+|`[^`\n]*`", re.MULTILINE | re.DOTALL)
CODE_BLOCK = re.compile(r"^ *`{3}.*?^ *`{3}$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
END_OF_CELL = re.compile(r"(?<!\\)\|")
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
INLINE_CODE = re.compile(r"`([^`]+)`")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
COMMENT = re.compile(r"\s+# .*")
OF_MPP = re.compile(r"(?:mpp |accelerate launch )")
SCRIPT = re.compile(r"(?:.*/)?(?:mpp|evaluation)/(\w+)\.py")
OPTION = re.compile(r"--([\w.-]+)")
SETTING = re.compile(
    r"(?:run|data|model|corruption|network|objective|optim|probe|augment|distill)\.(?!py|json|safe)\w+"
)
OF_OTHERS = {"config", "import", "help", "num_processes", "shm-size"}
"""Options of all commands, and of other programs."""
WRITTEN_BY_PROGRAMS = ("settings.md", "table.md", "ATTRIBUTION.md")


def pages():
    """All pages."""
    folders = [ROOT / name for name in ("mpp", "configs", "evaluation", "tests", ".github")]
    return sorted([ROOT / "README.md", *(page for folder in folders for page in folder.rglob("*.md"))])


of_each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@lru_cache
def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    counts, found = {}, set()
    for heading in HEADING.findall(page.read_text()):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").replace("*", "")
        anchor = NOT_IN_ANCHORS.sub("", text.lower()).replace(" ", "-")
        number = counts.get(anchor, 0)
        counts[anchor] = number + 1
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


@of_each_page
def test_links_of_a_page_lead_to_files_and_headings(page):
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@of_each_page
def test_rows_of_a_table_have_as_many_cells_as_its_header(page):
    """GitHub cuts off further cells and leaves missing ones empty, without a word."""
    for table in TABLE.findall(page.read_text()):
        header, *rows = table.splitlines()
        cells = len(END_OF_CELL.findall(header))
        assert [row for row in rows if len(END_OF_CELL.findall(row)) != cells] == []


def test_pages_are_short_enough_to_be_read():
    lines = {page: len(page.read_text().splitlines()) for page in pages() if page.name not in WRITTEN_BY_PROGRAMS}
    assert lines[ROOT / "README.md"] <= 120 and max(lines.values()) <= 200 and sum(lines.values()) <= 3100


def commands_of(page: Path):
    """The commands of mpp on a page, in blocks and in lines, as words: the command's name first."""
    text = CODE_BLOCK.sub("", page.read_text())
    blocks = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.startswith("    ")]
    inline = [" ".join(code.split()) for code in INLINE_CODE.findall(text)]
    for line in blocks + [code for code in inline if OF_MPP.match(code)]:
        try:
            words = shlex.split(COMMENT.sub("", line).replace("$", ""))
        except ValueError:  # a line of Python or of a table
            continue
        if words[:1] == ["mpp"]:
            yield words[1:]
        for place, word in enumerate(words):
            script = SCRIPT.fullmatch(word)
            if script and "launch" in words:
                yield [script[1].replace("_", "-"), *words[place + 1 :]]


def is_whole(words: list[str]) -> bool:
    """Whether a command is not only named, and reads no file that the page has its reader write."""
    config = dict(pairwise(words)).get("--config", "birds")
    has_config = any((ROOT / "configs").rglob(f"{Path(config).stem}.yaml"))
    return len(words) > 1 and has_config and not {"--help", "--import", "..."} & {*words}


@of_each_page
def test_commands_of_a_page_have_settings_that_exist_and_fit(page, monkeypatch):
    """No command is carried out; settings that are inherited from an encoder's run are not there."""
    monkeypatch.chdir(ROOT)
    wrong = []
    for name, *words in commands_of(page):
        if not is_whole([name, *words]):
            continue
        try:
            parse(config_of(name), words)
        except UserError as error:
            wrong.append(f"{name} {shlex.join(words)}: {error}")
    assert not wrong


def config_of(command: str) -> type:
    """The settings of a command."""
    assert command in commands(), command
    _, module, name = locate_command(command)
    return getattr(import_module(module), name)


@lru_cache
def all_settings():
    """The settings of all commands."""
    return {key for name in commands() for key in flatten(config_of(name)())}


@of_each_page
def test_settings_that_a_page_names_exist(page):
    """In code in a line: `data.path`, or `--data.path FOLDER`."""
    known = all_settings() | OF_OTHERS
    wrong = []
    for code in INLINE_CODE.findall(CODE_BLOCK.sub("", page.read_text())):
        named = OPTION.findall(code) if code.startswith("--") else [code] if SETTING.fullmatch(code) else []
        wrong += [name for name in named if name not in known]
    assert not wrong


@pytest.mark.parametrize("page", ["mpp/your_images.md", "evaluation/compare.md"])
def test_the_yaml_of_a_page_is_a_comparison_or_a_sweep(page, tmp_path):
    file = tmp_path / "shown.yaml"
    words = [f"--config={file}"]
    for text in YAML.findall((ROOT / page).read_text()):
        file.write_text(text)
        if "vary:" in text:
            assert plan_sweep(parse(SweepConfig, words)).trials
            continue
        for case in cases_of(read_entries(parse(CompareConfig, words))):
            evaluation_settings(case)  # raises where one does not exist


def python_of(page: str):
    """The examples in Python on a page."""
    return PYTHON.findall((ROOT / page).read_text())


def test_the_python_of_the_front_page_works():
    (example,) = python_of("README.md")
    names = {}
    exec(example, names)
    assert names["features"].shape == (286, 128) and names["neighbours"].shape == (286, 5)


def test_the_python_of_the_page_on_encoders_works(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished_run)
    Image.fromarray(picture()).save("photo.jpg")
    of_photos, _ = python_of("mpp/use_encoder.md")
    names = {}
    exec(of_photos, names)
    width = names["encoder"].embed_dim
    assert names["features"].shape == (1, width) and names["tokens"].shape == (1, 1 + 16, width)


# --- the notebook runs from its first cell to its last, and its pictures are in it ---


TOUR = ROOT / "evaluation" / "tour.ipynb"
LIGHTER = {  # one thread beside other tests, and no report
    "(config.run, dir=": "(config.run, report=False, threads=1, dir=",
    '"--images=4"]': '"--images=4", "--threads=1"]',
    '"precision": "fp32"}': '"precision": "fp32", "threads": 1}',
}


def pictures(notebook) -> int:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return sum("image/jpeg" in output.get("data", {}) for output in outputs)


def test_the_notebook_has_its_pictures_and_no_path_of_a_machine():
    text = TOUR.read_text()
    assert pictures(nbformat.reads(text, as_version=4)) == 4 and len(text) < 1_000_000
    words = re.sub('"image/jpeg": "[^"]*"', "", text)  # whose letters may be any
    assert not re.search("/(home|root|tmp)/", words)


@pytest.mark.faults
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MPP_TOUR_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MPP_TOUR_STEPS", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type != "code" else cell.update(outputs=[])
        for there, here in LIGHTER.items():
            cell.source = cell.source.replace(there, here)
    assert all(any(here in cell.source for cell in notebook.cells) for here in LIGHTER.values())
    NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert pictures(notebook) == 4

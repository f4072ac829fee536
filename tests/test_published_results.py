"""Configs parse, published results are found by their digests, and pages say what was measured."""

import re
from collections import defaultdict

import numpy as np
import pytest
import yaml
from comparisons import cases_in
from conftest import ROOT, read_json
from published_tables import RESULTS, write_tables

from evaluation.comparison.cases import cases_of, evaluation_settings, read_entries
from evaluation.comparison.differences import differences_from_best
from evaluation.comparison.digests import case_digest
from evaluation.comparison.rows import frame_of, read_published, rows_asked
from evaluation.config import (
    CompareConfig,
    ContrastiveConfig,
    FinetuneConfig,
    SegmentationConfig,
    SupervisedConfig,
    SweepConfig,
)
from evaluation.metrics.intervals import wilson
from evaluation.registry import EVALUATIONS
from evaluation.sweep import plan_sweep
from mpp.config import Config, flatten
from mpp.config.parsing import parse

CONFIGS = sorted(file for file in (ROOT / "configs").rglob("*.yaml") if file.parent.name != "accelerate")
CONFIG_CLASSES = {
    "compare": CompareConfig,
    "sweep": SweepConfig,
    "supervised": SupervisedConfig,
    "finetune": FinetuneConfig,
    "segmentation": SegmentationConfig,
}
SWEEPS = [file for file in CONFIGS if file.parent.name == "sweep"]
COMPARISONS = [file for file in CONFIGS if file.parent.name == "compare"]
PUBLISHED = sorted(RESULTS.glob("*/results.json"))
PAGES = {
    "when_it_pays": ["cifar10"],
    "rivals": ["rivals_cifar10", "rates_cifar10"],
    "leaderboard": ["leaderboard_cifar10", "cifar10"],
    "the_paper": ["data_size_cifar10", "ablations_cifar10", "heads_cifar10", "transfer_cifar10", "scaling_cifar10"],
    "continuing": ["continue_solar"],
    "race": ["race_cifar10"],
    "other_images": ["race_solar", "race_birds", "race_speech"],
}
SYNONYMS = {"trivial": "floor", "masked": "pre", "the": "supervised"}
ACCURACY = re.compile(r"(?<![\d.,])\d\d\.\d(?!\d)(?: ± \d+\.\d)?")
TABLE = re.compile(r"^\|(.*)\|\n\|-.*\n((?:\|.*\n)+)", re.MULTILINE)
STEPS = re.compile(r"\b\d?,?\d{3}\b(?= |,)")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_config_files_parse_and_say_command_time_and_result(path):
    config_class = CONFIG_CLASSES.get(path.parent.name, Config)
    if path.stem.startswith("simclr"):
        config_class = ContrastiveConfig
    parse(config_class, ["--config", str(path)])
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert all(word in header for word in ("Command:", "Time:", "Result:", path.name))
    assert "TIME" not in header and "RESULT" not in header  # placeholders


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_every_case_of_a_comparison_file_parses(path):
    config = parse(CompareConfig, ["--config", str(path)])
    assert any(entry.get("random") for entry in config.encoders)  # always beside random weights
    frozen = [each for each in config.evaluations if EVALUATIONS[each["command"]].kind == "frozen features"]
    assert all("depth" in each["options"] for each in frozen)  # whatever the default
    assert not frozen or any(
        entry["encoder"].startswith("floor:") for entry in config.encoders
    )  # and a colour baseline
    cases = cases_of(read_entries(config))
    if (RESULTS / path.stem / "results.json").exists():
        return  # test_published_results_are_found_by_their_digests parses each case
    some = {(case.encoder.entry.name, case.entry.name): case for case in cases}
    some |= {(case.entry.name, case.dataset.name): case for case in cases}
    assert all(flatten(evaluation_settings(case))["encoder"] for case in some.values())


def test_vtab_has_its_19_tasks_in_three_groups():
    tasks = yaml.safe_load((ROOT / "configs/compare/vtab.yaml").read_text())["datasets"]
    groups = [task["group"] for task in tasks]
    assert [groups.count(group) for group in ("natural", "specialised", "structured")] == [7, 4, 8]
    assert all(task["options"]["data.train_images"] == 1000 for task in tasks)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_published_results_are_found_by_their_digests(path):
    """So `extends` computes none of them again. Those of sweeps have other names there."""
    cases = cases_in(ROOT / "configs" / "compare" / f"{path.parent.name}.yaml")
    published = read_published(str(path))
    swept = digests_of_sweeps(path.parent.name)
    digests = {named: case_digest(case) for named, case in cases.items()}
    assert {*digests.values()} | swept == set(published) and not swept & {*digests.values()}
    for rows in published.values():
        for row in rows:
            if row["digest"] not in swept:
                named = row["encoder"], row["encoder_seed"], row["evaluation"], row["dataset"]
                assert digests[named] == row["digest"]


@pytest.mark.faults
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_published_tables_come_out_of_their_results(path, tmp_path):
    """But for the last digits of differences' intervals, which other versions of the libraries draw in other ways."""
    write_tables(path.parent.name, tmp_path)
    written, published = (lines_of(folder / "table.md") for folder in (tmp_path, path.parent))
    assert written == published


def lines_of(table):
    """The lines without differences and without spaces, which are as many as these need."""
    return [re.sub("[ -]+", " ", line) for line in table.read_text().splitlines() if "told apart" not in line]


def digests_of_sweeps(name):
    """The digests of the results of a sweep's file, and of the files beside it that are overlays on it."""
    base = ROOT / "configs" / "sweep" / f"{name}.yaml"
    digests = set()
    for file in SWEEPS:
        if base in SWEEPS and file.stem.split("_")[0] == name.split("_")[0]:
            plan = plan_sweep(parse(SweepConfig, ["--config", str(base), "--config", str(file)]))
            digests |= {case_digest(case) for case in plan.cases}
    return digests


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_was_measured(page):
    """A row of its tables has an encoder's accuracies, in order; or, below learning rates, a method's."""
    published = {}
    for name in PAGES[page]:
        published |= {(name, encoder): accuracies for encoder, accuracies in published_accuracies(name).items()}
    text = (RESULTS / f"{page}.md").read_text().replace("**", "")
    tables = TABLE.findall(text)
    assert len(tables) == text.count("\n|-") > 0
    for headings, rows in tables:
        if headings.startswith((" the paper ", " published ")):
            continue  # figures of others, next to ours of other pages
        for row in rows.splitlines():
            cells = [ACCURACY.findall(cell) for cell in row.strip("|").split("|")[1:]]
            shown = [accuracy for cell in cells for accuracy in cell]
            if not shown:
                continue
            named = {key: accuracies for key, accuracies in published.items() if names_encoder(row, key[1])}
            of_an_encoder = any(are_in_order(shown, accuracies.values()) for accuracies in named.values())
            methods = {(key[0], method) for key in published if names_encoder(row, method := key[1].rsplit(", ", 1)[0])}
            assert of_an_encoder or are_of_a_method(cells, headings.split("|")[1:], published, methods), row


def test_the_leaderboard_says_which_differences_are_told_apart():
    config = parse(CompareConfig, ["--config", str(ROOT / "configs/compare/leaderboard_cifar10.yaml")])
    (question,) = (each for each in read_entries(config).questions if each.name == "methods")
    rows = read_json(RESULTS / "leaderboard_cifar10/results.json")["results"]
    images = 10_000
    known = [
        row | {"interval": wilson(row["accuracy"] * images, images), "images": images}
        for row in rows
        if row["kind"] == "test"
    ]
    by_column = {}
    for each in sorted(differences_from_best(rows_asked(frame_of(known), question)), key=lambda each: each.value):
        cells = by_column.setdefault(each.column, ([each.best], [], []))
        cells[1 + each.is_told_apart].append(each.other)
    expected = set()
    for column, cells in by_column.items():
        short = [", ".join(re.split(r"[ ,]", name)[0] for name in names) or "-" for names in cells]
        expected.add(f"| {column.replace('10 % of labels', 'fine-tuned')} | {' | '.join(short)} |")
    (shown,) = (
        rows for headings, rows in TABLE.findall((RESULTS / "leaderboard.md").read_text()) if "told" in headings
    )
    assert set(shown.splitlines()) == expected


def published_accuracies(comparison):
    """Encoder -> (evaluation, case, dataset) -> its accuracy as a page writes it, from results.json."""
    measured = defaultdict(list)
    for row in read_json(RESULTS / comparison / "results.json")["results"]:
        if row["kind"] == "test":
            measured[row["encoder"], (row["evaluation"], row["case"], row["dataset"])].append(row["accuracy"])
    written = defaultdict(dict)
    for (encoder, case), accuracies in measured.items():
        written[encoder][case] = written_accuracy(accuracies)
    return written


def written_accuracy(accuracies):
    """The mean (%) and, of several, the spread: 75.4 ± 0.7."""
    mean = f"{100 * np.mean(accuracies):.1f}"
    return mean if len(accuracies) == 1 else f"{mean} ± {100 * np.std(accuracies, ddof=1):.1f}"


def names_encoder(row, encoder):
    """Whether a row's first cell begins as the encoder's name, and has its steps and its share of the learning rate."""
    first_of_row, first_of_name = (re.search(r"\w+", text)[0] for text in (row, encoder))
    if first_of_name not in (first_of_row, SYNONYMS.get(first_of_row)):
        return False
    same_share = all((share in row) == (share in encoder) for share in ("half", "quarter"))
    return same_share and set(STEPS.findall(encoder)) <= set(STEPS.findall(row))


def are_in_order(shown, measured):
    """Whether the shown accuracies are among the measured ones, in their order."""
    remaining = iter(measured)
    return all(accuracy in remaining for accuracy in shown)


def are_of_a_method(cells, headings, published, methods):
    """Whether a row has the accuracies of one method, in each cell of the same cases, below rates, images or PFLOP.

    Args:
        cells: accuracies in each cell of the row but the first.
        headings: of the same columns.
        published: (comparison, encoder) -> case -> accuracy.
        methods: (comparison, method) that the row may be about.
    """
    at_rates = [(heading.split("(")[0].strip(), cell) for heading, cell in zip(headings, cells, strict=True) if cell]
    cases = {case for accuracies in published.values() for case in accuracies}
    for comparison, method in methods:
        of_rates = [published.get((comparison, f"{method}, {rate}"), {}) for rate, _ in at_rates]
        pairs = [(of_rate, cell) for of_rate, (_, cell) in zip(of_rates, at_rates, strict=True)]
        in_all = [case for case in cases if all(of_rate.get(case) in cell for of_rate, cell in pairs)]
        if in_all and all(set(cell) == {of_rate[case] for case in in_all} for of_rate, cell in pairs):
            return True
    return False


@pytest.mark.parametrize("page", [RESULTS / "when_it_pays.md", ROOT / "README.md"], ids=lambda page: page.stem)
def test_the_answer_in_words_says_what_was_measured(page):
    (answer,) = (paragraph for paragraph in page.read_text().split("\n\n") if paragraph.startswith("**On CIFAR-10 "))
    shown = ACCURACY.findall(answer.replace("\n", " "))
    measured = {accuracy for of_encoder in published_accuracies("cifar10").values() for accuracy in of_encoder.values()}
    assert len(shown) >= 3 and set(shown) <= measured

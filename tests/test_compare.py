"""One comparison: what is trained, what is judged, what is done again."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import yaml
from conftest import ROOT, encoded, picture, read_metrics
from safetensors.torch import save_file
from server import Command

from evaluation import compare, fewshot, finetune, knn, masked
from evaluation.comparison import run
from evaluation.comparison.cases import cases_of, evaluation_settings
from evaluation.comparison.digests import identity, relevant_settings
from evaluation.comparison.entries import Question, read_entries
from evaluation.comparison.files import write_comparison
from evaluation.comparison.plots import plot_question
from evaluation.comparison.reports import divergence_of, training_pflop
from evaluation.comparison.tables import markdown_of, numbers_of
from evaluation.comparison.trainings import TRAININGS, executed_pflop, step_flops
from evaluation.config import CompareConfig, ContrastiveConfig, FinetuneConfig, SegmentationConfig, SupervisedConfig
from evaluation.figures.charts import plot_depths, plot_lines
from evaluation.frozen import probing
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.labelled_features import LabelledFeatures
from evaluation.frozen.run_images import record_source
from evaluation.registry import EVALUATIONS, Evaluation
from mpp.config import Config, SourceConfig
from mpp.config.parsing import parse
from mpp.errors import Diverged, UserError
from mpp.runtime.lock import Held, hold

CONFIGS = sorted(file for file in (ROOT / "configs").rglob("*.yaml") if file.parent.name != "accelerate")
KINDS = {"compare": CompareConfig, "supervised": SupervisedConfig, "finetune": FinetuneConfig}
KINDS |= {"segmentation": SegmentationConfig}
COMPARISONS = [file for file in CONFIGS if file.parent.name == "compare"]
RESULTS = ROOT / "evaluation" / "results"
PAGES = {"when_it_pays": ["cifar10"], "rivals": ["rivals_cifar10", "rates_cifar10"]}
PAGES |= {"leaderboard": ["leaderboard_cifar10", "cifar10"]}
SYNONYMS = {"trivial": "floor", "masked": "pre", "the": "supervised"}
ACCURACY = re.compile(r"(?<![\d.,])\d\d\.\d(?!\d)(?: ± \d+\.\d)?")
FAST = {"data.workers": 0, "precision": "fp32", "threads": 1}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_config_files_parse_and_say_command_time_and_result(path):
    kind = ContrastiveConfig if path.stem.startswith("simclr") else KINDS.get(path.parent.name, Config)
    parse(kind, ["--config", str(path)])
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert all(word in header for word in ("Command:", "Time:", "Result:", path.name))
    assert not any(word in header for word in ("TIME", "RESULT"))  # somebody meant to say it later


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_every_case_of_a_comparison_file_parses(path):
    config = parse(CompareConfig, ["--config", str(path)])
    assert any(entry.get("random") for entry in config.encoders)  # always beside random weights
    kinds = {EVALUATIONS[entry["command"]].kind for entry in config.evaluations}
    assert "frozen features" not in kinds or any(
        entry["encoder"].startswith("floor:") for entry in config.encoders
    )  # and a floor
    cases = cases_of(read_entries(config))
    taught = {str(entry.get("train_options", {}).get("objective.teacher")) for entry in config.encoders}
    evaluated = {case.encoder.entry.encoder for case in cases}
    assert {entry["encoder"] for entry in config.encoders} - evaluated <= taught  # all but teachers
    if (RESULTS / path.stem / "results.json").exists():
        return  # test_published_results_are_found_by_their_digests parses each case
    known = set()
    for case in cases:
        entry, evaluation = case.encoder.entry, case.evaluation.name
        pairs = {(entry.name, evaluation), (evaluation, case.dataset.name)}
        if pairs <= known:
            continue
        known |= pairs
        assert evaluation_settings(case).encoder
        assert (case.encoder.training is None) == (entry.train is None)


@pytest.mark.faults
def test_a_teacher_comes_first_and_its_compute_counts(small, tmp_path):
    """A run that is taught by another of the comparison costs both; while somebody trains its teacher, it waits."""
    config = yaml.safe_load(small.read_text())
    teacher, tiny = config["encoders"][0], config["encoders"][0]["train_options"]
    taught = {"objective.name": "features", "objective.teacher": teacher["encoder"]}
    config["encoders"][1:] = [{"name": "taught", "encoder": str(tmp_path / "taught"), "train": "pretrain"}]
    config["encoders"][1]["train_options"] = tiny | taught
    config["encoders"][0]["seeds"] = [0]
    config["evaluations"], config["datasets"] = config["evaluations"][:1], config["datasets"][:1]
    config["encoders"].reverse()
    small.write_text(yaml.safe_dump(config))
    student, _ = cases_in(small).values()
    with hold(tmp_path / "encoders" / "0", "dir"), pytest.raises(Held):
        run.train_encoder(student.encoder, tmp_path / "out")
    compare.main(["--config", str(small)])
    own = {name: max(read_metrics(tmp_path / name, "compute/pflop").values()) for name in ("encoders/0", "taught")}
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    costs = {row["encoder"]: row["training_pflop"] for row in results}
    assert costs == {"pre-trained": own["encoders/0"], "taught": own["encoders/0"] + own["taught"]}
    config["encoders"][1]["train_options"]["optim.lr"] = 0.02
    small.write_text(yaml.safe_dump(config))
    taught_otherwise, _ = cases_in(small).values()
    assert identity(taught_otherwise) != identity(student)
    config["encoders"][0]["train_options"]["objective.teacher"] = str(tmp_path / "taught")
    small.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match="taught would be taught by itself"):
        compare.main(["--config", str(small)])


@pytest.mark.faults
@pytest.mark.parametrize("asked", [True, False])
def test_a_teacher_is_trained_where_its_own_results_are_published_or_not_asked_for(small, tmp_path, asked):
    """A student of it is new, and needs its weights."""
    config = yaml.safe_load(small.read_text())
    config["evaluations"], config["datasets"] = config["evaluations"][:1], config["datasets"][:1]
    config["encoders"] = config["encoders"][:1]
    config["encoders"][0]["seeds"] = [0]
    small.write_text(yaml.safe_dump(config))
    compare.main(["--config", str(small)])
    shutil.rmtree(tmp_path / "encoders")
    teacher = config["encoders"][0]
    taught = {"objective.name": "features", "objective.teacher": teacher["encoder"]}
    student = {"name": "taught", "encoder": str(tmp_path / "taught"), "train": "pretrain"}
    config["encoders"].append(student | {"train_options": teacher["train_options"] | taught})
    again = {"dir": str(tmp_path / "again"), "extends": str(tmp_path / "out" / "results.json")}
    again |= {} if asked else {"questions": [{"name": "students", "encoders": ["taught"]}]}
    small.write_text(yaml.safe_dump(config | again))
    compare.main(["--config", str(small)])
    assert (tmp_path / "taught" / "encoder").is_dir()
    assert not any((tmp_path / "again" / "reports").glob("pre-trained*"))


def test_vtab_has_its_19_tasks_in_three_groups():
    tasks = yaml.safe_load((ROOT / "configs/compare/vtab.yaml").read_text())["datasets"]
    groups = [task["group"] for task in tasks]
    assert [groups.count(group) for group in ("natural", "specialised", "structured")] == [7, 4, 8]
    assert all(task["options"]["data.train_images"] == 1000 for task in tasks)


@pytest.fixture
def small(tmp_path):
    """A comparison on two small datasets, as a config file."""
    for name in ("one", "two"):
        for number in range(24):
            file = tmp_path / name / ("cat" if number % 2 else "dog") / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image = picture(number)
            image[..., 0] = np.where(number % 2, image[..., 0] // 2, 255 - image[..., 0] // 2)  # dogs are red
            file.write_bytes(encoded(image))
    tiny = {"model.width": 16, "model.depth": 2, "model.heads": 2, "model.img_size": 32, "run.threads": 1}
    tiny |= {
        "run.report": False,
        "run.steps": 2,
        "optim.global_batch_size": 8,
        "data.workers": 0,
        "data.eval_images": 8,
    }
    trained = {"encoder": str(tmp_path / "encoders/{seed}"), "seeds": [0, 1]}
    finetuned = {
        "data.train_images": 16,
        "run.steps": 2,
        "lrs": 0.1,
        "data.workers": 0,
        "run.threads": 1,
        "optim.global_batch_size": 8,
    }
    config = {
        "dir": str(tmp_path / "out"),
        "encoders": [
            {"name": "pre-trained", **trained, "train": "pretrain", "train_options": tiny},
            {"name": "random", **trained, "random": True},
            {"name": "floor", "encoder": "floor:pixels", "options": {"img_size": 32}},
        ],
        "evaluations": [
            {"name": "few-shot", "command": "fewshot", "options": FAST | {"shots": [1, 5], "depth": "dev"}},
            {"name": "fine-tuned", "command": "finetune", "options": finetuned},
        ],
        "datasets": [
            {"name": name, "group": "all", "options": {"data.path": str(tmp_path / name), "data.eval_fraction": 0.25}}
            for name in ("one", "two")
        ],
    }
    file = tmp_path / "compare.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.faults
def test_a_comparison_trains_judges_and_does_nothing_twice(small, tmp_path, capsys, monkeypatch):
    compare.main(["--config", str(small)])
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["kind"] for row in report["results"] if row["evaluation"] == "fine-tuned"} == {"test", "dev"}
    summary = report["summary"]["comparison"]
    assert list(summary) == ["pre-trained", "random", "floor"]
    shots = [f"{place} few-shot {shots}" for place in ("one", "two", "mean all") for shots in (1, 5)]
    assert set(summary["floor"]) == set(shots)  # a floor cannot be fine-tuned
    assert set(summary["random"]) == {*shots, "one fine-tuned", "two fine-tuned", "mean all fine-tuned"}
    assert summary["pre-trained"]["one few-shot 5"]["count"] == 2 * 3  # encoders' seeds x draws
    for name, column in (("random", "one few-shot 5"), ("pre-trained", "mean all fine-tuned")):
        place, evaluation, *shots = column.removeprefix("mean ").split()
        rows = [
            row
            for row in report["results"]
            if (row["kind"], row["encoder"], row["evaluation"]) == ("test", name, evaluation)
            and row["case"] == "".join(shots)
            and place in (row["dataset"], row["group"])
        ]
        assert summary[name][column]["mean"] == pytest.approx(np.mean([row["accuracy"] for row in rows]))
        seeds = {(row["encoder_seed"], row["seed"]) for row in rows}
        each = [[r["accuracy"] for r in rows if (r["encoder_seed"], r["seed"]) == seed] for seed in seeds]
        assert summary[name][column]["std"] == pytest.approx(np.std([np.mean(of_seed) for of_seed in each]))
    assert summary["floor"]["mean all few-shot 5"]["mean"] == 1.0  # dogs are red
    text = (tmp_path / "out" / "table.md").read_text()
    assert text in capsys.readouterr().out and text.count("\n") == 5 and "\n| pre-trained " in text
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 1000
    monkeypatch.setattr(Evaluation, "run", lambda *_: pytest.fail("evaluated twice"))
    for name, training in list(TRAININGS.items()):
        refused = training._replace(build_task=lambda *_: pytest.fail("trained twice"))
        monkeypatch.setitem(TRAININGS, name, refused)
    compare.main(["--config", str(small)])
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == report
    config = yaml.safe_load(small.read_text())
    config["encoders"][0]["train_options"]["model.stride"] = None  # the default
    config["evaluations"][0]["options"]["data.cut_seed"] = 0
    small.write_text(yaml.safe_dump(config))
    compare.main(["--config", str(small)])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"] == report["results"]


def cases_in(file):
    """The cases of a comparison, by encoder, seed, evaluation and dataset."""
    by_names = {}
    for case in cases_of(read_entries(parse(CompareConfig, ["--config", str(file)]))):
        by_names[case.encoder.entry.name, case.encoder.seed, case.evaluation.name, case.dataset.name] = case
    return by_names


def accuracies(comparison):
    """Encoder -> evaluation and case -> its mean accuracy (%) as a page writes it, 75.4 ± 0.6, from results.json."""
    found = {}
    for row in json.loads((RESULTS / comparison / "results.json").read_text())["results"]:
        if row["kind"] == "test":
            of = found.setdefault(row["encoder"], {})
            of.setdefault((row["evaluation"], row["case"]), []).append(row["accuracy"])
    return {encoder: {about: written(each) for about, each in of.items()} for encoder, of in found.items()}


def written(accuracies):
    """Their mean (%), and their spread where there are several."""
    return f"{100 * np.mean(accuracies):.1f}" + f" ± {100 * np.std(accuracies):.1f}" * (len(accuracies) > 1)


def is_about(row, encoder):
    """Whether a row's first cell begins as the encoder's name, and has its steps and its share of the learning rate."""
    first, *named = (re.search(r"\w+", text)[0] for text in (row, encoder))
    steps, shares = r"\b\d?,?\d{3}\b(?= |,)", ("half", "quarter")
    alike = SYNONYMS.get(first, first) == named[0] and set(re.findall(steps, encoder)) <= set(re.findall(steps, row))
    return alike and all((share in row) == (share in encoder) for share in shares)


@pytest.mark.parametrize(("page", "comparisons"), PAGES.items(), ids=PAGES)
def test_a_page_says_what_was_measured(page, comparisons):
    """A row of its tables has an encoder's accuracies, in order; or, below learning rates, a method's."""
    known = {(name, encoder): each for name in comparisons for encoder, each in accuracies(name).items()}
    text = (RESULTS / f"{page}.md").read_text().replace("**", "")
    tables = re.findall(r"^\|(.*)\|\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(tables) == text.count("\n|-") > 0
    for heads, row in ((heads.split("|")[1:], row) for heads, rows in tables for row in rows.splitlines()):
        cells = [ACCURACY.findall(cell) for cell in row.strip("|").split("|")[1:]]
        shown = [accuracy for cell in cells for accuracy in cell]
        measured = [list(of.values()) for (_, encoder), of in known.items() if is_about(row, encoder)]
        in_order = (iter(of) for of in measured)
        if not shown or any(all(accuracy in of for accuracy in shown) for of in in_order):
            continue
        at = [(head.split()[0], cell) for head, cell in zip(heads, cells, strict=True) if cell]
        methods = {(name, encoder.rsplit(", ", 1)[0]) for name, encoder in known if is_about(row, encoder)}
        columns = [[known.get((name, f"{method}, {rate}"), {}) for rate, _ in at] for name, method in methods]
        asked = {about for of in known.values() for about in of}
        assert any(
            all(of.get(a) in cell for of, (_, cell) in zip(c, at, strict=True)) for c in columns for a in asked
        ), row


@pytest.mark.parametrize("page", [RESULTS / "when_it_pays.md", ROOT / "README.md"], ids=lambda page: page.stem)
def test_the_answer_in_words_says_what_was_measured(page):
    (answer,) = (part for part in page.read_text().split("\n\n") if part.startswith("**On CIFAR-10 "))
    said = ACCURACY.findall(answer.replace("\n", " "))
    assert len(said) >= 3 and {*said} <= {each for of in accuracies("cifar10").values() for each in of.values()}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/results.json")), ids=str)
def test_published_results_are_found_by_their_digests(path):
    """So `extends` computes none of them again."""
    cases = cases_in(ROOT / "configs" / "compare" / f"{path.parent.name}.yaml")
    published = compare.read_published(str(path))
    assert {identity(case) for case in cases.values()} == set(published)
    for rows in published.values():
        for row in rows:
            case = cases[row["encoder"], row["encoder_seed"], row["evaluation"], row["dataset"]]
            assert identity(case) == row["digest"]


@pytest.mark.faults
def test_another_comparison_goes_on_from_published_results(small, tmp_path, monkeypatch):
    """By other names, in another folder, without the encoders: what is new is done, and nothing else."""
    config = yaml.safe_load(small.read_text())
    config["evaluations"] = config["evaluations"][:1]
    config["encoders"] = [config["encoders"][0] | {"seeds": [0]}, config["encoders"][-1]]
    small.write_text(yaml.safe_dump(config))
    compare.main(["--config", str(small)])
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    shutil.rmtree(tmp_path / "encoders")
    again = {"name": "more", "command": "fewshot", "options": FAST | {"shots": [2]}}
    config["evaluations"] = [config["evaluations"][0] | {"name": "again"}, again]
    config["encoders"] = config["encoders"][-1:]
    other = config | {"dir": str(tmp_path / "other"), "extends": str(tmp_path / "out" / "results.json")}
    small.write_text(yaml.safe_dump(other))
    done, evaluate = [], fewshot.run
    monkeypatch.setattr(fewshot, "run", lambda config: (done.append(config.shots), evaluate(config))[1])
    compare.main(["--config", str(small)])
    second = json.loads((tmp_path / "other" / "results.json").read_text())
    assert done == [(2,)] * 2
    before = {name: cell for name, cell in first["summary"]["comparison"]["floor"].items()}
    after = second["summary"]["comparison"]["floor"]
    assert all(after[name.replace("few-shot", "again")] == cell for name, cell in before.items())
    small.write_text(yaml.safe_dump(other | {"extends": str(small)}))
    with pytest.raises(UserError, match=r"extends is .*compare\.yaml; it must be the results\.json of a comparison"):
        compare.main(["--config", str(small)])


@pytest.fixture
def floors(small, tmp_path):
    """Few-shot accuracy of a floor: compares within a second. floors(shots=[1]) -> the results."""
    config = yaml.safe_load(small.read_text())
    config |= {"encoders": config["encoders"][-1:], "datasets": config["datasets"][:1]}
    config["evaluations"] = config["evaluations"][:1]

    def run(encoders=(), **options):
        config["evaluations"][0]["options"] |= options
        small.write_text(yaml.safe_dump(config | {"encoders": [*config["encoders"], *encoders]}))
        compare.main(["--config", str(small)])
        rows = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
        return [row for row in rows if row["kind"] == "test"]

    return run


def test_a_report_that_was_cut_off_is_none(floors, monkeypatch, tmp_path):
    whole = floors(shots=[5])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        floors(shots=[1])  # killed between its report and the mark of which images and weights it is
    done, evaluate = [], fewshot.run
    monkeypatch.setattr(fewshot, "run", lambda config: (done.append(config.shots), evaluate(config))[1])
    assert [row["case"] for row in floors(shots=[1])] == ["1"] * 3 and done == [(1,)]
    assert floors(shots=[5]) == whole and done == [(1,)]


@pytest.mark.faults
def test_what_diverges_is_trained_once_and_the_table_says_so(small, tmp_path, monkeypatch, capsys):
    """Of two evaluations of two seeds, and of a start from new; other settings are tried."""
    config = yaml.safe_load(small.read_text())
    wild, floor = config["encoders"][0], config["encoders"][-1]
    wild |= {"name": "wild", "train_options": wild["train_options"] | {"optim.lr": 1e30}}
    config |= {"encoders": [wild, floor], "datasets": [config["datasets"][0] | {"group": None}]}
    (fewshot, finetuned), knn = config["evaluations"], {"name": "kNN", "command": "knn"}
    fewshot["options"]["shots"], knn["options"] = 1, FAST | {"neighbours": 20}
    config["evaluations"] = [fewshot, knn]
    trained, train = [], run.train
    monkeypatch.setattr(run, "train", lambda config, task: (trained.append(config.run.dir), train(config, task)))

    def compared():
        small.write_text(yaml.safe_dump(config))
        compare.main(["--config", str(small)])
        return json.loads((tmp_path / "out" / "results.json").read_text())

    first = compared()
    assert trained == [str(tmp_path / "encoders" / seed) for seed in "01"]
    assert first["summary"]["comparison"]["wild"] == {"few-shot 1": {"diverged": 2}, "kNN 20": {"diverged": 2}}
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.replace(" ", "") for line in lines if "wild" in line] == ["|wild|diverged|diverged|-|"]
    assert compared() == first and len(trained) == 2
    assert "says so; delete it to try again" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "encoders" / "1")
    config["encoders"][0]["train_options"]["optim.lr"] = 1e-3
    config["encoders"][0]["seeds"] = [1]
    config["evaluations"] = [knn, finetuned | {"options": finetuned["options"] | {"lrs": 1e30}}]
    second = compared()["summary"]["comparison"]["wild"]
    assert trained[2:] == [str(tmp_path / "encoders" / "1")] * 2  # the second time it is finished
    assert second["kNN 20"]["mean"] > 0 and second["fine-tuned"] == {"diverged": 1}
    monkeypatch.setattr(finetune, "run", lambda config: pytest.fail("again"))
    assert compared()["summary"]["comparison"]["wild"] == second


def test_random_weights_of_an_architecture_whose_training_diverged_did_not(small, tmp_path, monkeypatch):
    def diverge(*_):
        raise Diverged("the loss is nan")

    monkeypatch.setattr(run, "train", diverge)
    cases = cases_in(small)
    trained, random = (cases[name, 0, "few-shot", "one"].encoder for name in ("pre-trained", "random"))
    with pytest.raises(Diverged, match="the loss is nan"):
        run.train_encoder(trained, tmp_path)
    with pytest.raises(UserError, match=r"encoders/0 has no encoder to take the architecture of: .*nan"):
        run.train_encoder(random, tmp_path)
    assert divergence_of(trained, tmp_path).is_file()


@pytest.mark.faults
def test_probes_that_look_at_the_same_features_extract_them_once(small, monkeypatch):
    config = yaml.safe_load(small.read_text())
    fewshot = config["evaluations"][0]
    config["evaluations"] = [fewshot, {"name": "kNN", "command": "knn", "options": FAST | {"depth": "dev"}}]
    config["encoders"], config["datasets"] = config["encoders"][:1], config["datasets"][:1]
    small.write_text(yaml.safe_dump(config))
    extracted, extract = [], probing.extract_labelled_features
    monkeypatch.setattr(
        probing, "extract_labelled_features", lambda c, a: (extracted.append(c.encoder), extract(c, a))[1]
    )
    compare.main(["--config", str(small)])
    assert len(extracted) == len(set(extracted)) == 2  # of two seeds


def test_seeds_that_diverged_are_no_part_of_a_mean_and_are_counted():
    about = {"encoder": "a", "dataset": "birds", "group": None, "evaluation": "kNN"}
    test = about | {"kind": "test", "seed": 0, "case": "20", "accuracy": 0.5}
    numbers = numbers_of(
        [*(test | {"encoder_seed": seed} for seed in (0, 1)), about | {"kind": "diverged", "encoder_seed": 2}]
    )
    assert numbers["a"]["kNN 20"] == {"mean": 0.5, "std": 0, "count": 2, "diverged": 1}
    assert "50.0 ± 0.0 (1 diverged)" in markdown_of(numbers)


def test_rank_and_dev_accuracy_are_columns_but_no_bars():
    """The rank of the deepest features: of k directions that are equally strong it is k."""
    labels = np.arange(6) % 2

    def features(directions):
        return LabelledFeatures(np.eye(6), labels, np.eye(6)[np.arange(60) % directions], np.arange(60) % 2)

    ranks = probing.rank_by_depth({1: features(2), 2: features(4)})
    assert ranks == pytest.approx({1: 2, 2: 4})
    about = {"encoder": "a", "encoder_seed": 0, "dataset": "birds", "group": None, "evaluation": "kNN", "seed": 0}
    rows = [about | {"kind": "rank", "depth": depth, "rank": rank} for depth, rank in ranks.items()]
    rows += [about | {"kind": "dev", "accuracy": 0.25}, about | {"kind": "test", "case": "20", "accuracy": 0.5}]
    numbers = numbers_of(rows)
    assert numbers["a"]["rank"] == {"mean": pytest.approx(4), "std": 0, "count": 1}
    assert [heading.strip() for heading in markdown_of(numbers).splitlines()[0].split("|")[-3:-1]] == [
        "kNN, dev",
        "rank",
    ]
    assert markdown_of(numbers).splitlines()[-1].replace(" ", "") == "|a|50.0|25.0|4|"
    assert len(plot_question(Question("bars"), rows, numbers).axes) == 1


def test_a_failed_evaluation_leaves_the_others(floors, tmp_path):
    broken = [{"name": "broken", "encoder": str(tmp_path / "nowhere")}]
    gone = {"data.path": str(tmp_path / "gone")}  # how many steps this compute is, these images would say
    broken += [{"name": "lost", "encoder": str(tmp_path / "lost"), "train": "pretrain"}]
    broken[1] |= {"train_options": gone, "compute": 1e-6}
    with pytest.raises(ValueError, match="2 of 3 evaluations failed, such as broken-0-few-shot-one: encoder is"):
        floors(broken)
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(report["summary"]["comparison"]) == ["floor"]


@pytest.mark.parametrize("sort", [RuntimeError, ValueError, FloatingPointError, KeyError])
def test_an_error_that_nobody_foresaw_leaves_the_others_too(floors, tmp_path, monkeypatch, capsys, sort):
    def fail(config):
        raise sort("CUDA error: of some sort")

    monkeypatch.setattr(knn, "run", fail)
    config = yaml.safe_load((tmp_path / "compare.yaml").read_text())
    failing = {"name": "kNN", "command": "knn", "options": FAST}
    config = {key: config[key][-1:] for key in ("encoders", "datasets")} | {"dir": config["dir"]}
    config["evaluations"] = [failing, {"name": "few-shot", "command": "fewshot", "options": FAST | {"shots": [1]}}]
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"1 of 2 evaluations failed, such as floor-0-kNN-two: \w+Error: '?CUDA error"):
        compare.main(["--config", str(tmp_path / "compare.yaml")])
    assert list(json.loads((tmp_path / "out" / "results.json").read_text())["summary"]["comparison"]) == ["floor"]
    assert "Traceback" in capsys.readouterr().err  # what nobody foresaw can be looked into


def test_contrastive_encoders_are_trained_too_and_have_no_masked_patches(tmp_path):
    options = {
        "config": "rivals/simclr",
        "views.blur": 0,
        "run.report": False,
        "run.steps": 1,
        "run.threads": 1,
        "data.workers": 0,
    }
    options |= {"model.width": 16, "model.depth": 1, "model.heads": 2, "model.img_size": 16, "probe.every": 0}
    trained = {"name": "SimCLR", "encoder": str(tmp_path / "{seed}"), "train": "contrastive", "train_options": options}
    judged = [{"name": "kNN", "command": "knn"}, {"name": "masked patches", "command": "masked"}]
    (case,) = cases_of(read_entries(CompareConfig(encoders=[trained], evaluations=judged)))
    training = run.settings_to_train(case.encoder)
    assert case.evaluation.name == "kNN" and training.views.blur == 0 and training.contrast.temperature == 0.1
    run.train_encoder(case.encoder, tmp_path)
    assert load_frozen_encoder(str(tmp_path / "0")).img_size == (16, 16)


def test_what_a_result_depends_on_is_in_its_digest(tmp_path):
    """timm's name beside a file of weights; how many images share a pass, where they are mixed or told apart."""
    digests, judged = set(), [{"name": "kNN", "command": "knn"}]
    for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224"):
        file = tmp_path / "weights.safetensors"
        save_file({}, file)
        entry = {"name": name, "encoder": name, "options": {"checkpoint": str(file)}}
        (case,) = cases_of(read_entries(CompareConfig(encoders=[entry], evaluations=judged)))
        digests.add(identity(case))
        assert training_pflop(case.encoder) is None  # there is no record
    assert len(digests) == 2
    for kind, words, counts in (
        (ContrastiveConfig, [], True),
        (Config, [], False),
        (Config, ["--corruption.source=batch"], True),
        (FinetuneConfig, ["--augment.mixup=0.1"], True),
    ):
        configs = (parse(kind, [*words, *more]) for more in ([], ["--data.batch_size=8"]))
        assert len({json.dumps(relevant_settings(each)) for each in configs}) == 1 + counts


def test_images_are_read_as_the_encoders_were_unless_the_dataset_says_otherwise(tmp_path):
    read = {"data.channels": 1, "data.range": [0, 9]}
    encoder = {"name": "grey", "encoder": str(tmp_path / "run"), "train": "pretrain", "train_options": read}
    for own, expected in (({}, (0, 9)), ({"data.range": [0, 5]}, (0, 5))):
        images = {"name": "scans", "options": own | {"data.path": "scans"}}
        judged = [{"name": "kNN", "command": "knn"}]
        (case,) = cases_of(read_entries(CompareConfig(encoders=[encoder], evaluations=judged, datasets=[images])))
        data = evaluation_settings(case).data
        assert data.channels == 1 and tuple(data.range) == expected


def test_compute_is_also_that_of_what_a_run_stands_on(tmp_path):
    for name, settings in (
        ("first", {"model": {"init_from": None}}),
        ("longer", {"model": {"init_from": str(tmp_path / "first" / "encoder")}}),
        ("student", {"distill": {"teacher": str(tmp_path / "longer")}}),
        ("tuned", {"init": "encoder", "encoder": str(tmp_path / "longer")}),
    ):
        (tmp_path / name / "encoder").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"data": {}} | settings))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "compute/pflop": 1.5}\n')
    found = [executed_pflop(tmp_path / name) for name in ("first", "longer", "student", "tuned")]
    assert found == [1.5, 3.0, 4.5, 4.5]


def test_a_mean_over_data_sets_is_over_all_of_them_or_is_not():
    def row(encoder, dataset, accuracy, seed=0):
        about = {"encoder": encoder, "encoder_seed": seed, "dataset": dataset, "accuracy": accuracy}
        return about | {"kind": "test", "seed": 0, "evaluation": "kNN", "case": "", "group": "natural"}

    whole = [row("a", "easy", 0.9), row("a", "hard", 0.3), row("a", "easy", 0.5, seed=1)]
    numbers = numbers_of([*whole, row("b", "easy", 0.85)])
    assert numbers["a"]["mean natural kNN"] == {"mean": pytest.approx(0.6), "std": 0, "count": 1}
    assert numbers["a"]["easy kNN"]["count"] == 2
    assert "mean natural kNN" not in numbers["b"] and numbers["b"]["easy kNN"]["mean"] == 0.85
    unmeasured = numbers_of(whole, groups={"natural": {"easy", "hard", "gone"}})
    assert "mean natural kNN" not in unmeasured["a"] and unmeasured["a"]["hard kNN"]["mean"] == 0.3


def test_plots_show_a_panel_for_each_column_and_no_more():
    cell = {"mean": 0.5, "std": 0.1}
    figure = plot_lines({str(name): {"5": {1: cell, 2: cell}, "25": {1: cell}} for name in range(5)}, "steps")
    assert len(plot_lines({"many": {str(case): {1: cell} for case in range(9)}}, "steps").axes[0].lines) == 9
    assert sum(axes.get_visible() for axes in figure.axes) == 5
    depths = {"one": {"a": {1: cell, 2: cell}, "floor": {1: cell}}, "two": {"a": {1: cell, 2: cell}}}
    assert sum(axes.get_visible() for axes in plot_depths(depths).axes) == 2


@pytest.mark.faults
def test_processes_share_a_comparison(small, tmp_path):
    """Two at once: none trains or judges what the other does, and both end with all results."""
    config = yaml.safe_load(small.read_text())
    config["evaluations"] = config["evaluations"][:1]
    small.write_text(yaml.safe_dump(config))
    both = [Command("compare", "--config", str(small), prepare=hurry) for _ in range(2)]
    assert [command.wait() for command in both] == [[0], [0]], both[0].said + both[1].said
    said = [command.said for command in both]
    for seed in (0, 1):
        assert sum(f"wrote {tmp_path}/encoders/{seed}: encoder/" in each for each in said) == 1
    reports = list((tmp_path / "out" / "reports").glob("*.json"))
    assert len(reports) == 2 * (2 + 2 + 1)
    for report in reports:
        assert sum(each.count(f"wrote {report}\n") for each in said) == 1
    tables = [each[each.index("| accuracy (%)") :] for each in said]
    assert tables[0] == tables[1]


def hurry() -> None:
    run.RETRY_S = 0.2


@pytest.mark.faults
def test_questions_choose_rows_and_columns_and_draw_them(small, tmp_path, capsys):
    config = yaml.safe_load(small.read_text())
    (trained, random, floor), (fewshot, _) = config["encoders"], config["evaluations"]
    longer = trained | {"name": "longer", "encoder": str(tmp_path / "longer"), "seeds": [0]}
    longer |= {"train_options": trained["train_options"] | {"run.steps": 6}}
    config["encoders"] = [trained, longer, random, floor]
    config["evaluations"] = [fewshot, {"name": "hidden", "command": "masked"}]
    config["datasets"] = config["datasets"][:1]
    of_both = {"encoders": {"longer": 6, "pre-trained": 2}, "evaluations": ["hidden"], "plot": "lines"}
    config["questions"] = [
        {"name": "hidden", "title": "Hidden?", "encoders": ["pre-trained", "random"], "evaluations": ["hidden"]},
        {"name": "depth", "evaluations": ["few-shot"], "plot": "depth"},
        {"name": "length", **of_both, "x": "steps"},
        {"name": "compute", **of_both, "x": "compute"},
    ]
    small.write_text(yaml.safe_dump(config))
    compare.main(["--config", str(small), "--tabulate", "true"])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"] == []  # nothing is there
    assert "no results yet" in capsys.readouterr().out
    compare.main(["--config", str(small)])
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(report["summary"]["hidden"]) == ["pre-trained"]  # random weights have predicted nothing
    assert list(report["summary"]["length"]) == ["longer", "pre-trained"]  # in the question's order
    assert set(report["summary"]["depth"]) == {"pre-trained", "longer", "random", "floor"}
    columns = report["summary"]["length"]["longer"]
    for line, name in (("model", "accuracy"), ("two nearest", "two_nearest"), ("nearest", "nearest")):
        assert columns[f"hidden {line}"]["mean"] == read_metrics(tmp_path / "longer", f"heldout/{name}")[6]
    pflop = {row["encoder"]: row["training_pflop"] for row in report["results"] if "training_pflop" in row}
    assert pflop["longer"] == pytest.approx(3 * pflop["pre-trained"]) and pflop["random"] == 0 and "floor" not in pflop
    dev = [row for row in report["results"] if row["kind"] == "dev"]
    depths = {(row["encoder"], row["encoder_seed"], row["depth"]) for row in dev}
    assert {("pre-trained", 1, 1), ("pre-trained", 1, 2), ("random", 0, 2), ("floor", 0, 1)} <= depths
    text = (tmp_path / "out" / "table.md").read_text()
    assert text.startswith("### Hidden?\n\n| accuracy (%)") and text.count("accuracy (%)") == 3
    for question in config["questions"]:
        assert (tmp_path / "out" / f"{question['name']}.png").stat().st_size > 1000
    before = report["results"]
    compare.main(["--config", str(small), "--tabulate", "true"])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"] == before


def test_a_run_that_predicts_no_patches_has_no_masked_accuracy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "heldout/loss": 1.0, "heldout/accuracy": 0.5}\n')
    with pytest.raises(ValueError, match="it must be a pre-training run: it has no heldout/nearest"):
        masked.main(["--encoder", str(tmp_path)])
    with pytest.raises(ValueError, match=r"no run at .*: its metrics\.jsonl is missing or has no heldout/loss"):
        masked.main(["--encoder", str(tmp_path / "none")])


def test_floors_are_colour_statistics():
    import torch

    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    images[0, 0] = 255  # red
    images[1, 2, :, 32:] = 255  # right half blue
    (pixels,) = load_frozen_encoder("floor:pixels")(images, "mean", [1])
    assert pixels.shape == (2, 192) and pixels[0].view(64, 3).tolist() == [[1, 0, 0]] * 64
    (colors,) = load_frozen_encoder("floor:colors")(images, "mean", [1])
    assert colors.shape == (2, 512)
    assert colors[0].nonzero().tolist() == [[7 * 64]] and colors[0, 7 * 64] == 64
    assert (colors[1, 0], colors[1, 7]) == (32, 32)
    with pytest.raises(ValueError, match="must be floor:pixels or floor:colors"):
        load_frozen_encoder("floor:size")


TRAINED = {"name": "a", "encoder": "b", "train": "pretrain", "seeds": [0, 1]}
OTHER = {"name": "c", "encoder": "b", "train": "pretrain", "train_options": {"run.steps": 1}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoders": []}, "encoders is empty"),
        ({"encoders": [{"name": "a"}]}, "encoders: {'name': 'a'} is not {name, encoder"),
        ({"datasets": [{"name": "a"}, {"name": "a"}]}, "datasets: names is .* all different"),
        ({"evaluations": [{"name": "a", "command": "magic"}]}, "command is magic; it must be fewshot or knn"),
        ({"encoders": [{"name": 0.25, "encoder": "b"}]}, "encoders: name is 0.25; it must be text, in quotes"),
        (
            {"evaluations": [{"name": "a", "command": "knn", "options": None}]},
            "evaluations: a: options is None; it must",
        ),
        ({"questions": [{"name": "a", "encoders": ["b"]}]}, "questions: a is b; it must be one of random, floor"),
        ({"questions": [{"name": "a", "plot": "lines"}]}, "questions: encoders is None; it must be {name: number}"),
        ({"encoders": [{"name": "a", "encoder": "b", "seeds": 3}]}, "encoders: a: seeds is 3; it must be a list"),
        ({"encoders": [TRAINED]}, "encoders: a: encoder is b; it must be with {seed} in it, for several seeds"),
        ({"encoders": [TRAINED | {"seeds": [0]}, OTHER]}, "encoders: a: train_options is .* those of c, in the same"),
        ({"questions": [{"name": "a", "evaluations": []}]}, r"questions: evaluations is \[\]; it must be null"),
        ({"questions": [{"name": "a", "plot": "pie"}]}, "questions: plot is pie; it must be bars, lines or depth"),
        ({"evaluations": [{"name": "a", "command": "fewshot", "options": {"shotz": 1}}]}, "unknown setting shotz"),
    ],
)
def test_bad_comparisons_are_named(small, tmp_path, change, message):
    config = yaml.safe_load(small.read_text()) | change
    config["encoders"] = config["encoders"][-2:]
    small.write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=message) as error:
        compare.main(["--config", str(small)])
    assert "\n" not in str(error.value)


@pytest.mark.faults
def test_a_result_is_of_its_images(small, tmp_path, monkeypatch):
    """Other images are judged anew; an encoder that was trained on others is not passed off as theirs."""
    config = yaml.safe_load(small.read_text())
    config |= {"encoders": config["encoders"][-1:], "evaluations": config["evaluations"][:1]}
    judged, evaluate = [], fewshot.run
    monkeypatch.setattr(fewshot, "run", lambda settings: (judged.append(settings.data.path), evaluate(settings))[1])

    def judge():
        record_source.cache_clear()  # as in a new process
        compare.main(["--config", str(small)])

    small.write_text(yaml.safe_dump(config))
    judge()
    judge()
    assert len(judged) == 2
    (tmp_path / "one" / "cat" / "01.png").write_bytes(encoded(picture(99)))
    judge()
    assert judged[2:] == [str(tmp_path / "one")]

    tiny = {"data.path": str(tmp_path / "one"), "data.eval_split": None, "run.steps": 1, "run.report": False}
    encoder = {"name": "trained", "encoder": str(tmp_path / "encoder"), "train": "pretrain", "train_options": tiny}
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "data.json").write_text('{"train": {"files": "others"}}')
    small.write_text(yaml.safe_dump(config | {"encoders": [encoder]}))
    with pytest.raises(UserError, match=r"encoder began otherwise than it would now \(train: the files .*\)"):
        judge()
    recorded = record_source(SourceConfig(path=tiny["data.path"], eval_split=None))
    began = {part: dict(known) for part, known in recorded.items()}
    began["train"]["labels"] = "others"
    (tmp_path / "encoder" / "data.json").write_text(json.dumps(began))
    with pytest.raises(UserError, match=r"than it would now \(train: labels changed\)"):
        judge()
    tiny |= {"model.init_from": str(tmp_path / "start")}
    (tmp_path / "start").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "start" / name).write_text("weights")
    (tmp_path / "encoder" / "data.json").write_text('{"model.init_from": {"weights": "others"}}')
    small.write_text(yaml.safe_dump(config | {"encoders": [encoder | {"train_options": tiny}]}))
    with pytest.raises(UserError, match=r"than it would now \(model\.init_from: weights changed\)"):
        judge()


def test_equal_compute_gives_cheaper_models_more_steps(small, tmp_path):
    config = yaml.safe_load(small.read_text())
    options = config["encoders"][0]["train_options"] | {"data.path": str(tmp_path / "one")}
    wide = options | {"model.width": 32}
    config["encoders"] = [
        {"name": name, "encoder": str(tmp_path / name), "train": "pretrain", "train_options": of, "compute": 1e-6}
        for name, of in (("narrow", options), ("wide", wide))
    ]
    small.write_text(yaml.safe_dump(config))
    steps = {}
    for case in cases_in(small).values():
        config = run.settings_to_train(case.encoder)
        steps[case.encoder.entry.name] = config.run.steps
        assert config.run.steps == round(1e9 / step_flops("pretrain", config))
        assert case.encoder.training.run.steps == 2
    assert steps["narrow"] > 2 * steps["wide"]


def test_lines_go_through_encoders_against_all_compute(tmp_path):
    rows = [
        {"encoder": name, "encoder_seed": 0, "seed": 0, "evaluation": "tuned", "dataset": "birds", "group": None}
        | {"kind": "test", "case": "", "accuracy": accuracy, "pflop": 2.0, "training_pflop": pflop}
        for name, accuracy, pflop in (("short", 0.1, 1.0), ("long", 0.3, 4.0), ("scratch", 0.2, 0.0))
    ]
    lines = {"pre-trained": ["long", "short"], "from scratch": ["scratch"], "both": ["scratch", "short"]}
    question = Question("q", plot="lines", x="total compute", lines=lines)
    axes = plot_question(question, rows, {}).axes[0]
    drawn = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}
    assert drawn["pre-trained"] == [[3.0, pytest.approx(10)], [6.0, pytest.approx(30)]]
    assert drawn["both"] == [[2.0, pytest.approx(20)], [3.0, pytest.approx(10)]]
    assert drawn["from scratch"] == [[2.0, pytest.approx(20)]] and axes.get_xticks().tolist() == [2, 3, 6]

    write_comparison(tmp_path, [dataclasses.replace(question, encoders=["long", "scratch"])], rows, {})
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "table.md").read_text().split("\n")
    ]
    assert cells[0] == ["accuracy (%)", "tuned", "tuned, PFLOP"]
    assert ["long", "30.0", "6"] in cells and ["scratch", "20.0", "2"] in cells

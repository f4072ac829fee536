"""Comparisons that are carried out: what is trained, what is evaluated, and what is not done again."""

import csv
import json
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from comparisons import FAST, TINY_TRAINING, SmallComparison, write_cats_and_dogs
from conftest import encoded, picture, read_metrics
from server import Command

import mpp
from evaluation import compare, fewshot, finetune, knn
from evaluation.comparison.cases import TRAININGS, case_digest
from evaluation.comparison.rows import divergence_of, was_never_trained
from evaluation.frozen import results
from evaluation.frozen.run_images import record_source
from evaluation.registry import Evaluation
from mpp.config import SourceConfig
from mpp.errors import Diverged, UserError
from mpp.runtime.files import Held, hold

KNN = {"name": "kNN", "command": "knn", "options": FAST}


@pytest.fixture
def small(tmp_path):
    return SmallComparison(tmp_path)


@pytest.fixture
def floor(small):
    """Few-shot accuracy of a colour baseline on one dataset: compares within a second."""
    ask_few_shots_of_one_dataset(small)
    small.config["encoders"] = small.config["encoders"][-1:]
    return small


def ask_few_shots_of_one_dataset(small):
    """Leave fine-tuning and the second dataset out of a comparison."""
    small.config["evaluations"] = small.config["evaluations"][:1]
    small.config["datasets"] = small.config["datasets"][:1]


@pytest.fixture
def settings_of_fewshot(monkeypatch):
    """The settings of every few-shot evaluation that is carried out."""
    seen = []
    evaluate = fewshot.run

    def noted(settings):
        seen.append(settings)
        return evaluate(settings)

    monkeypatch.setattr(fewshot, "run", noted)
    return seen


@pytest.fixture
def trained_folders(monkeypatch):
    """The run folder of every training that is begun."""
    folders = []
    train = compare.train

    def noted(config, build_task):
        folders.append(config.run.dir)
        return train(config, build_task)

    monkeypatch.setattr(compare, "train", noted)
    return folders


def without_interval(cell):
    return {name: value for name, value in cell.items() if name != "interval"}


@pytest.mark.faults
def test_a_comparison_trains_evaluates_and_does_nothing_twice(small, capsys, monkeypatch):
    report = small.compare()
    rows = report["results"]
    summary = report["summary"]["comparison"]
    assert {row["kind"] for row in rows if row["evaluation"] == "fine-tuned"} == {"test", "dev"}
    assert list(summary) == ["pre-trained", "random", "floor"]
    places = ("one", "two", "mean all")
    shots = {f"{place} few-shot {shots}" for place in places for shots in (1, 5)}
    assert set(summary["floor"]) == shots  # a floor cannot be fine-tuned
    assert set(summary["random"]) == shots | {f"{place} fine-tuned" for place in places}
    assert summary["pre-trained"]["one few-shot 5"]["count"] == 2 * 20  # encoders' seeds x draws
    of_random = [row for row in rows if is_test(row, "random") and row["dataset"] == "one" and row["case"] == "5"]
    assert without_interval(summary["random"]["one few-shot 5"]) == cell_by_definition(of_random)
    tuned = [row for row in rows if row["evaluation"] == "fine-tuned" and is_test(row, "pre-trained")]
    assert without_interval(summary["pre-trained"]["mean all fine-tuned"]) == cell_by_definition(tuned)
    assert summary["floor"]["mean all few-shot 5"]["mean"] == 1.0  # dogs are red
    text = small.table()
    assert text in capsys.readouterr().out
    rows_of_table = text.split("\n\n")[1].splitlines()
    assert len(rows_of_table) == 5 and "\n| pre-trained " in text
    assert (small.folder / "out" / "comparison.png").stat().st_size > 1000
    assert (small.folder / "out" / "comparison.pdf").read_bytes().startswith(b"%PDF")
    with (small.folder / "out" / "table.csv").open(newline="", encoding="utf-8") as lines:
        in_csv = list(csv.DictReader(lines))
    for line, row in zip(in_csv, rows, strict=True):
        assert (line["encoder"], line["evaluation"], line["kind"]) == (row["encoder"], row["evaluation"], row["kind"])
        assert line["accuracy"] == str(row.get("accuracy", ""))

    monkeypatch.setattr(Evaluation, "run", lambda *_: pytest.fail("evaluated twice"))
    for name, training in list(TRAININGS.items()):
        refused = training._replace(build_task=lambda *_: pytest.fail("trained twice"))
        monkeypatch.setitem(TRAININGS, name, refused)
    assert small.compare() == report
    small.config["encoders"][0]["train_options"]["model.stride"] = None  # the default
    small.config["evaluations"][0]["options"]["data.cut_seed"] = 0
    assert small.compare()["results"] == rows


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("", "fewshot has not written {results: .*FileNotFoundError"),
        ("{", "fewshot has not written {results: .*JSONDecodeError"),
        ('{"results": []}', "fewshot has not written {results: .*KeyError.'protocol'"),
        ('{"results": [{"shots": 5}], "protocol": {}}', "fewshot has not written {results: .*KeyError.'accuracy'"),
        (
            '{"results": [{"k": 1, "accuracy": 0.5}, {"k": 5, "accuracy": 0.6}], "protocol": {}}',
            "fewshot has several results of the same case and seed: give each a `case` of its own",
        ),
    ],
)
def test_a_report_that_a_table_cannot_show_is_named(floor, monkeypatch, report, message):
    """Of an evaluation of a user's. Results that are not told apart would be one mean."""
    monkeypatch.setattr(fewshot, "run", lambda config: report and Path(config.probe.out).write_text(report))
    with pytest.raises(UserError, match=rf"1 of 1 evaluations failed, such as floor-0-few-shot-one: {message}"):
        floor.compare()
    assert floor.results()["results"] == []


def test_results_that_others_write_meanwhile_are_not_overwritten_by_earlier_ones(floor, monkeypatch):
    """Another process finishes while `--tabulate true` waits to write its tables."""
    rows = []

    @contextmanager
    def hold_later(*arguments, **settings):
        monkeypatch.setattr(compare, "hold", hold)
        rows.extend(floor.compare()["results"])
        with hold(*arguments, **settings):
            yield

    monkeypatch.setattr(compare, "hold", hold_later)
    assert floor.compare("--tabulate", "true")["results"] == rows != []


def is_test(row, encoder):
    """Whether a row is an accuracy of this encoder on test images."""
    return row["kind"] == "test" and row["encoder"] == encoder


def cell_by_definition(rows):
    """Mean and spread over the means of each seed, of the encoder and of the draws."""
    seeds = {(row["encoder_seed"], row["seed"]) for row in rows}
    means = []
    for seed in seeds:
        means.append(np.mean([row["accuracy"] for row in rows if (row["encoder_seed"], row["seed"]) == seed]))
    spread = pytest.approx(np.std(means, ddof=1))
    return {"mean": pytest.approx(np.mean([row["accuracy"] for row in rows])), "std": spread, "count": len(seeds)}


@pytest.mark.faults
@pytest.mark.parametrize("command", ["pretrain", "supervised"])
def test_a_teacher_comes_first_and_its_compute_counts(small, tmp_path, command):
    """A run that is taught by another of the comparison costs both; while its teacher is being trained, it waits."""
    teacher = small.config["encoders"][0] | {"seeds": [0], "train": command}
    write_cats_and_dogs(tmp_path / "learned", seed=100)
    teacher["train_options"] = teacher["train_options"] | {"data.path": str(tmp_path / "learned")}
    student = student_of(teacher, tmp_path / "taught")
    small.config["encoders"] = [student, teacher]
    ask_few_shots_of_one_dataset(small)
    case_of_student, _ = small.cases().values()
    with hold(tmp_path / "encoders" / "0", "dir"), pytest.raises(Held):
        compare.train_encoder(case_of_student.encoder, tmp_path / "out")
    rows = small.compare()["results"]
    pflop = {row["encoder"]: row["training_pflop"] for row in rows}
    of_teacher = executed(tmp_path / "encoders" / "0")
    of_student = executed(tmp_path / "taught")
    assert pflop == {"pre-trained": of_teacher, "taught": of_teacher + of_student}

    teacher["train_options"]["optim.lr"] = 0.02
    taught_otherwise, _ = small.cases().values()
    assert case_digest(taught_otherwise) != case_digest(case_of_student)
    student["train_options"][TEACHER_SETTINGS[command]] = str(tmp_path / "taught")
    with pytest.raises(UserError, match="taught would be made from itself"):
        small.compare()


@pytest.mark.faults
def test_first_weights_come_first_and_their_compute_counts_once(small, tmp_path):
    """Of a run that begins from another one of the comparison, which is its teacher, too."""
    start = small.config["encoders"][0] | {"seeds": [0]}
    folder = str(tmp_path / "continued")
    begins = {"model.init_from": start["encoder"], "objective.name": "features", "objective.teacher": start["encoder"]}
    continued = {"name": "continued", "encoder": folder, "train": "pretrain", "train_options": TINY_TRAINING | begins}
    small.config["encoders"] = [continued, start]
    ask_few_shots_of_one_dataset(small)
    case, _ = small.cases().values()
    assert {*case.encoder.parents} == {"model.init_from", "objective.teacher"}

    rows = small.compare()["results"]
    pflop = {row["encoder"]: row["training_pflop"] for row in rows}
    of_start = executed(tmp_path / "encoders" / "0")
    assert pflop == {"pre-trained": of_start, "continued": of_start + executed(tmp_path / "continued")}

    del continued["train_options"]["objective.teacher"]
    alone, _ = small.cases().values()
    start["train_options"] = start["train_options"] | {"optim.lr": 0.02}
    begun_otherwise, _ = small.cases().values()
    assert case_digest(begun_otherwise) != case_digest(alone)
    continued["train_options"]["model.init_from"] = folder
    with pytest.raises(UserError, match="continued would be made from itself"):
        small.cases()


TEACHER_SETTINGS = {"pretrain": "objective.teacher", "supervised": "distill.teacher"}


def student_of(teacher, folder):
    """An entry that is trained as its teacher was, to predict the teacher's features or classes."""
    command = teacher["train"]
    options = teacher["train_options"] | {TEACHER_SETTINGS[command]: teacher["encoder"].format(seed=0)}
    if command == "pretrain":
        options["objective.name"] = "features"
    return {"name": "taught", "encoder": str(folder), "train": command, "train_options": options}


def executed(folder):
    """PFLOP that a run executed."""
    return max(read_metrics(folder, "compute/pflop").values())


@pytest.mark.faults
@pytest.mark.parametrize("asked", [True, False])
def test_a_teacher_is_trained_where_its_own_results_are_published_or_not_asked_for(small, tmp_path, asked):
    """A student of it is new, and needs its weights."""
    teacher = small.config["encoders"][0] | {"seeds": [0]}
    small.config["encoders"] = [teacher]
    ask_few_shots_of_one_dataset(small)
    small.compare()
    shutil.rmtree(tmp_path / "encoders")
    small.config["encoders"] = [teacher, student_of(teacher, tmp_path / "taught")]
    small.config |= {"dir": str(tmp_path / "again"), "extends": str(tmp_path / "out" / "results.json")}
    if not asked:
        small.config["questions"] = [{"name": "students", "encoders": ["taught"]}]
    small.compare()
    assert (tmp_path / "taught" / "encoder").is_dir()
    assert not any((tmp_path / "again" / "reports").glob("pre-trained*"))


@pytest.mark.faults
def test_another_comparison_goes_on_from_published_results(small, tmp_path, settings_of_fewshot):
    """By other names, in another folder, without the encoders: what is new is done, and nothing else."""
    trained, _, floor = small.config["encoders"]
    known = small.config["evaluations"][0]
    small.config["encoders"] = [trained | {"seeds": [0]}, floor]
    small.config["evaluations"] = [known]
    before = small.compare()["summary"]["comparison"]["floor"]
    settings_of_fewshot.clear()
    shutil.rmtree(tmp_path / "encoders")
    new = {"name": "more", "command": "fewshot", "options": FAST | {"shots": [2]}}
    small.config["encoders"] = [floor]
    small.config["evaluations"] = [known | {"name": "again"}, new]
    small.config |= {"dir": str(tmp_path / "other"), "extends": str(tmp_path / "out" / "results.json")}
    after = small.compare()["summary"]["comparison"]["floor"]
    assert [settings.shots for settings in settings_of_fewshot] == [(2,)] * 2
    for column, cell in before.items():
        assert after[column.replace("few-shot", "again")] == cell
    small.config["extends"] = str(small.file)
    with pytest.raises(UserError, match=r"extends is .*compare\.yaml; it must be the results\.json of a comparison"):
        small.compare()


@pytest.mark.parametrize("change", ["an image", "nothing", "gone"])
def test_published_results_of_other_images_at_the_same_path_are_not_taken(
    floor, tmp_path, settings_of_fewshot, capsys, change
):
    """Where the images are not on this machine, they are taken: that is what publishing is for."""
    before = floor.compare()["results"]
    image = next((tmp_path / "one" / "dog").iterdir())
    if change == "an image":
        image.write_bytes(encoded(picture(1000)))
    if change == "gone":
        shutil.rmtree(tmp_path / "one")
    settings_of_fewshot.clear()
    capsys.readouterr()
    floor.config |= {"dir": str(tmp_path / "other"), "extends": str(tmp_path / "out" / "results.json")}
    after = floor.compare()["results"]
    assert len(settings_of_fewshot) == (change == "an image")
    assert (after == before) == (change != "an image")
    note = "note: floor-0-few-shot-one is not taken from "
    assert (note in capsys.readouterr().out) == (change == "an image")


def test_a_report_that_was_cut_off_is_none(floor, monkeypatch, settings_of_fewshot):
    def killed(*_):
        raise KeyboardInterrupt

    options = floor.config["evaluations"][0]["options"]
    options["shots"] = [5]
    of_five = floor.compare()["results"]
    options["shots"] = [1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compare, "write_json", killed)
        floor.compare()  # killed between its report and the mark of which images and weights it is
    settings_of_fewshot.clear()
    of_one = [row for row in floor.compare()["results"] if row["kind"] == "test"]
    assert [row["case"] for row in of_one] == ["1"] * 20
    assert [settings.shots for settings in settings_of_fewshot] == [(1,)]
    options["shots"] = [5]
    assert floor.compare()["results"] == of_five
    assert len(settings_of_fewshot) == 1


@pytest.mark.faults
def test_what_diverges_is_trained_once_and_the_table_says_so(small, tmp_path, trained_folders, monkeypatch, capsys):
    """Of two evaluations of two seeds, and of a start from new; other settings are tried."""
    wild, _, floor = small.config["encoders"]
    wild |= {"name": "wild", "train_options": wild["train_options"] | {"optim.lr": 1e30}}
    of_fewshot, finetuned = small.config["evaluations"]
    of_fewshot["options"]["shots"] = 1
    of_knn = KNN | {"options": FAST | {"neighbours": 20}}
    small.config["encoders"] = [wild, floor]
    small.config["evaluations"] = [of_fewshot, of_knn]
    small.config["datasets"] = [small.config["datasets"][0] | {"group": None}]
    first = small.compare()
    assert trained_folders == [str(tmp_path / "encoders" / seed) for seed in "01"]
    assert first["summary"]["comparison"]["wild"] == {"few-shot 1": {"diverged": 2}, "kNN 20": {"diverged": 2}}
    (line,) = (line for line in small.table().splitlines() if "wild" in line)
    assert line.replace(" ", "") == "|wild|diverged|diverged|-|"
    assert small.compare() == first and len(trained_folders) == 2
    assert "; delete it to try again" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "encoders" / "1")
    wild["train_options"]["optim.lr"] = 1e-3
    wild["seeds"] = [1]
    finetuned["options"]["lrs"] = 1e30
    small.config["evaluations"] = [of_knn, finetuned]
    second = small.compare()["summary"]["comparison"]["wild"]
    assert trained_folders[2:] == [str(tmp_path / "encoders" / "1")] * 2  # the second time it is finished
    assert second["kNN 20"]["mean"] > 0 and second["fine-tuned"] == {"diverged": 1}
    monkeypatch.setattr(finetune, "run", lambda config: pytest.fail("again"))
    assert small.compare()["summary"]["comparison"]["wild"] == second


def test_random_weights_of_an_architecture_whose_training_diverged_did_not(small, tmp_path, monkeypatch):
    def diverge(*_):
        raise Diverged("the loss is nan")

    monkeypatch.setattr(compare, "train", diverge)
    cases = small.cases()
    trained = cases["pre-trained", 0, "few-shot", "one"].encoder
    random = cases["random", 0, "few-shot", "one"].encoder
    with pytest.raises(Diverged, match="the loss is nan"):
        compare.train_encoder(trained, tmp_path)
    with pytest.raises(Diverged, match="the loss is nan"):  # it has no architecture to take
        compare.train_encoder(random, tmp_path)
    assert was_never_trained(trained, tmp_path) and not was_never_trained(random, tmp_path)
    assert divergence_of(trained, tmp_path).is_file()


@pytest.mark.faults
def test_probes_that_look_at_the_same_features_extract_them_once(small, monkeypatch):
    small.config["evaluations"][1] = KNN | {"options": FAST | {"depth": "dev"}}
    small.config["encoders"] = small.config["encoders"][:1]
    small.config["datasets"] = small.config["datasets"][:1]
    extracted = []
    extract = results.extract_labelled_features

    def noted(frozen, *groups, **options):
        extracted.append(frozen.encoder)
        return extract(frozen, *groups, **options)

    monkeypatch.setattr(results, "extract_labelled_features", noted)
    small.compare()
    assert len(extracted) == len(set(extracted)) == 2  # of two seeds


def test_a_failed_evaluation_leaves_the_others(floor, tmp_path):
    broken = {"name": "broken", "encoder": str(tmp_path / "nowhere")}
    gone = {"data.path": str(tmp_path / "gone")}  # how many steps this compute is, these images would say
    lost = {"name": "lost", "encoder": str(tmp_path / "lost"), "train": "pretrain"}
    floor.config["encoders"] += [broken, lost | {"train_options": gone, "compute": 1e-6}]
    with pytest.raises(ValueError, match="2 of 3 evaluations failed, such as broken-0-few-shot-one: encoder is"):
        floor.compare()
    assert list(floor.results()["summary"]["comparison"]) == ["floor"]


def test_an_evaluation_that_does_not_apply_is_named_and_left_out(floor, trained, capsys):
    """Masked patches of a run that predicts no colours, and a depth that an encoder does not have."""
    (trained / "metrics.jsonl").write_text('{"step": 3, "heldout/loss": 1.0}\n')
    floor.config["encoders"].append({"name": "hog", "encoder": str(trained)})
    deep = {"name": "deep", "command": "knn", "options": FAST | {"depth": 6}}
    floor.config["evaluations"] += [{"name": "masked", "command": "masked"}, deep]
    few_shot = {"name": "a", "encoders": ["floor"]}
    floor.config["questions"] = [few_shot, {"name": "b", "encoders": ["hog"], "evaluations": ["masked"]}]
    floor.compare()
    printed = capsys.readouterr().out
    assert "note: hog-0-masked-one is left out, it does not apply: encoder is" in printed
    assert "note: floor-0-deep-one is left out, it does not apply: depth is 6; it must be from 1 to 1" in printed
    assert list(floor.results()["summary"]["a"]) == ["floor"]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, FloatingPointError, KeyError])
def test_an_unforeseen_error_leaves_the_others_too(floor, monkeypatch, capsys, kind):
    def fail(config):
        raise kind("CUDA error: of some sort")

    monkeypatch.setattr(knn, "run", fail)
    floor.config["evaluations"][0]["options"] = FAST | {"shots": [1]}
    floor.config["evaluations"].insert(0, KNN)
    with pytest.raises(ValueError, match=r"1 of 2 evaluations failed, such as floor-0-kNN-one: \w+Error: '?CUDA error"):
        floor.compare()
    assert list(floor.results()["summary"]["comparison"]) == ["floor"]
    assert "Traceback" in capsys.readouterr().err


def test_the_commit_of_a_repository_around_the_package_is_not_that_of_mpp(tmp_path, monkeypatch):
    """As of a virtual environment in the user's own repository."""
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "own")
    for words in (["init", "-q"], own):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(mpp, "__file__", str(tmp_path / "site-packages" / "mpp" / "__init__.py"))
    (tmp_path / "site-packages" / "mpp").mkdir(parents=True)
    assert compare.code_version.__wrapped__() == mpp.__version__


@pytest.mark.faults
def test_processes_share_a_comparison(small, tmp_path):
    """Two at once: none trains or evaluates what the other does, and both end with all results."""
    small.config["evaluations"] = small.config["evaluations"][:1]
    both = [Command("compare", "--config", str(small.write()), prepare=hurry) for _ in range(2)]
    assert [command.wait() for command in both] == [[0], [0]], both[0].said + both[1].said
    outputs = [command.said for command in both]
    for seed in (0, 1):
        assert sum(f"wrote {tmp_path}/encoders/{seed}: encoder/" in output for output in outputs) == 1
    reports = list((tmp_path / "out" / "reports").glob("*.json"))
    assert len(reports) == 2 * (2 + 2 + 1)
    for report in reports:
        assert sum(output.count(f"wrote {report}\n") for output in outputs) == 1
    tables = [output[output.index("| accuracy (%)") :] for output in outputs]
    assert tables[0] == tables[1]


def hurry() -> None:
    compare.RETRY_S = 0.2


@pytest.mark.faults
def test_questions_choose_rows_and_columns_and_draw_them(small, tmp_path, capsys):
    trained, random, floor = small.config["encoders"]
    longer = trained | {"name": "longer", "encoder": str(tmp_path / "longer"), "seeds": [0]}
    longer["train_options"] = trained["train_options"] | {"run.steps": 6}
    small.config["encoders"] = [trained, longer, random, floor]
    small.config["evaluations"][1] = {"name": "hidden", "command": "masked"}
    small.config["datasets"] = small.config["datasets"][:1]
    of_both = {"encoders": {"longer": 6, "pre-trained": 2}, "evaluations": ["hidden"], "plot": "lines"}
    small.config["questions"] = [
        {"name": "hidden", "title": "Hidden?", "encoders": ["pre-trained", "random"], "evaluations": ["hidden"]},
        {"name": "depth", "evaluations": ["few-shot"], "plot": "depth"},
        {"name": "length", **of_both, "x": "steps"},
        {"name": "compute", **of_both, "x": "compute"},
    ]
    assert small.compare("--tabulate", "true")["results"] == []  # nothing is there
    assert "no results yet" in capsys.readouterr().out
    report = small.compare()
    rows = report["results"]
    summary = report["summary"]
    assert list(summary["hidden"]) == ["pre-trained"]  # random weights have predicted nothing
    assert list(summary["length"]) == ["longer", "pre-trained"]  # in the question's order
    assert set(summary["depth"]) == {"pre-trained", "longer", "random", "floor"}
    for line, metric in (("model", "accuracy"), ("two nearest", "two_nearest"), ("nearest", "nearest")):
        recorded = read_metrics(tmp_path / "longer", f"heldout/{metric}")[6]
        (row,) = (row for row in rows if (row["encoder"], row.get("case")) == ("longer", line))
        assert row["accuracy"] == recorded
    assert [column for column in summary["length"]["longer"] if column.startswith("hidden")] == ["hidden model"]
    pflop = {row["encoder"]: row["training_pflop"] for row in rows if "training_pflop" in row}
    assert pflop["longer"] == pytest.approx(3 * pflop["pre-trained"])
    assert pflop["random"] == 0 and "floor" not in pflop
    depths = {(row["encoder"], row["encoder_seed"], row["depth"]) for row in rows if row["kind"] == "dev"}
    assert {("pre-trained", 1, 1), ("pre-trained", 1, 2), ("random", 0, 2), ("floor", 0, 1)} <= depths
    text = small.table()
    assert text.startswith("### Hidden?\n\n| accuracy (%)") and text.count("accuracy (%)") == 3
    assert "Without an encoder: two nearest " in text
    for question in small.config["questions"]:
        assert (tmp_path / "out" / f"{question['name']}.png").stat().st_size > 1000
    assert small.compare("--tabulate", "true")["results"] == rows


@pytest.mark.faults
def test_other_images_are_evaluated_anew(small, tmp_path, settings_of_fewshot):
    small.config["encoders"] = small.config["encoders"][-1:]
    small.config["evaluations"] = small.config["evaluations"][:1]
    small.compare()
    small.compare()
    assert len(settings_of_fewshot) == 2
    (tmp_path / "one" / "cat" / "01.png").write_bytes(encoded(picture(99)))
    small.compare()
    assert [settings.data.path for settings in settings_of_fewshot[2:]] == [str(tmp_path / "one")]


def test_an_encoder_of_other_images_or_weights_is_refused(small, tmp_path):
    """It is not passed off as one that was trained on today's."""
    images = SourceConfig(path=str(tmp_path / "one"), eval_split=None)
    options = {"data.path": images.path, "data.eval_split": None, "run.steps": 1, "run.report": False}
    folder = tmp_path / "encoder"
    entry = {"name": "trained", "encoder": str(folder), "train": "pretrain", "train_options": options}
    small.config["encoders"] = [entry]
    small.config["evaluations"] = small.config["evaluations"][:1]
    folder.mkdir()
    (folder / "data.json").write_text('{"train": {"files": "others"}}')
    with pytest.raises(UserError, match=r"encoder was started with other images or weights \(train: files changed\)"):
        small.compare()
    record = {split: dict(of_split) for split, of_split in record_source(images, "class").items()}
    record["train"]["labels"] = "others"
    (folder / "data.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"images or weights \(train: labels changed\)"):
        small.compare()

    (tmp_path / "start").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "start" / name).write_text("weights")
    options["model.init_from"] = str(tmp_path / "start")
    (folder / "data.json").write_text('{"model.init_from": {"weights": "others"}}')
    with pytest.raises(UserError, match=r"images or weights \(model\.init_from: weights changed\)"):
        small.compare()

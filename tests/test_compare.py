"""Comparisons that are carried out: what is trained, what is evaluated, and what is not done again."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from classified_images import read_csv
from comparisons import FAST, SmallComparison, noted, write_cats_and_dogs
from conftest import interrupted_after, put_picture, read_metrics, refused

from evaluation import compare, fewshot, finetune, knn
from evaluation.comparison.digests import case_digest
from evaluation.comparison.rows import was_never_trained
from evaluation.frozen.run_images import record_source
from evaluation.registry import Evaluation
from mpp.config import SourceConfig
from mpp.errors import Diverged
from mpp.runtime.files import Held, hold

KNN = {"name": "kNN", "command": "knn", "options": FAST}


@pytest.fixture
def small(tmp_path):
    return SmallComparison(tmp_path)


@pytest.fixture
def floor(small):
    """Few-shot accuracy of a colour baseline on one dataset, of two draws: compares within a second."""
    ask_few_shots_of_one_dataset(small)
    small.config["evaluations"][0]["options"]["seeds"] = [0, 1]
    del small.config["encoders"][:-1]
    return small


def ask_few_shots_of_one_dataset(small):
    """Leave fine-tuning and the second dataset out of a comparison."""
    for entries in ("evaluations", "datasets"):
        del small.config[entries][1:]


@pytest.fixture
def settings_of_fewshot(monkeypatch):
    """The settings of every few-shot evaluation that is carried out."""
    return noted(monkeypatch, fewshot, "run")


@pytest.mark.faults
def test_a_comparison_trains_evaluates_and_does_nothing_twice(small, capsys, monkeypatch):
    report = small.compare()
    rows, summary = report["results"], report["summary"]["comparison"]
    assert {row["kind"] for row in rows if row["evaluation"] == "fine-tuned"} == {"test", "dev"}
    assert list(summary) == ["pre-trained", "random", "floor"]
    places = ("one", "two", "mean all")
    shots = {f"{place} few-shot {number}" for place in places for number in (1, 5)}
    assert {*summary["floor"]} == shots  # a floor cannot be fine-tuned
    assert {*summary["random"]} == shots | {f"{place} fine-tuned" for place in places}
    assert summary["pre-trained"]["one few-shot 5"]["count"] == 2 * 20  # encoders' seeds x draws
    assert summary["floor"]["mean all few-shot 5"]["mean"] == 1.0  # dogs are red
    text = small.table()
    assert text in capsys.readouterr().out and len(text.split("\n\n")[1].splitlines()) == 5
    assert (small.folder / "out" / "comparison.png").stat().st_size > 1000
    for line, row in zip(read_csv(small.folder / "out" / "table.csv"), rows, strict=True):
        assert (line["encoder"], line["accuracy"]) == (row["encoder"], str(row.get("accuracy", "")))

    monkeypatch.setattr(Evaluation, "run", lambda *_: pytest.fail("evaluated twice"))
    monkeypatch.setattr(compare, "train", lambda *_: pytest.fail("trained twice"))
    assert small.compare() == report
    small.config["encoders"][0]["train_options"]["model.stride"] = None  # the default
    small.config["evaluations"][0]["options"]["data.cut_seed"] = 0
    assert small.compare()["results"] == rows


@pytest.mark.parametrize(
    "report, message",
    [
        ("", "fewshot has not written {results: .*FileNotFoundError"),
        ('{"results": [{"shots": 5}], "protocol": {}}', "fewshot has not written {results: .*KeyError.'accuracy'"),
        (
            '{"results": [{"depth": 1, "accuracy": 0.5}, {"depth": 2, "accuracy": 0.6}], "protocol": {}}',
            "fewshot has several results of the same case and seed: give each a `case`",
        ),
    ],
)
def test_a_report_that_a_table_cannot_show_is_named(floor, monkeypatch, report, message):
    """Of an evaluation of a user's. Results that are not told apart would be one mean."""
    monkeypatch.setattr(fewshot, "run", lambda config: report and Path(config.probe.out).write_text(report))
    with refused(rf"1 of 1 evaluations failed, such as floor-0-few-shot-one: {message}"):
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


@pytest.mark.faults
@pytest.mark.parametrize("made_by", ["pretrain", "supervised", "continued"])
def test_what_an_encoder_is_made_from_comes_first_and_its_compute_counts_once(small, tmp_path, made_by):
    """A teacher, or first weights that teach, too. While another process trains it, its pupil waits."""
    command = "supervised" if made_by == "supervised" else "pretrain"
    parent = small.config["encoders"][0] | {"seeds": [0], "train": command}
    write_cats_and_dogs(tmp_path / "learned", seed=100)
    parent["train_options"] = parent["train_options"] | {"data.path": str(tmp_path / "learned")}
    teacher = setting = "distill.teacher" if command == "supervised" else "objective.teacher"
    child = pupil_of(parent, tmp_path / "child", teacher)
    if made_by == "continued":
        setting = "model.init_from"
        child["train_options"][setting] = parent["encoder"]
    small.config["encoders"] = [child, parent]
    ask_few_shots_of_one_dataset(small)
    case, _ = small.cases().values()
    assert {*case.encoder.parents} == {setting, teacher}
    small.config["questions"] = [{"name": "children", "encoders": ["child"]}]  # the parent is trained for it alone
    with hold(tmp_path / "encoders" / "0", "dir"), pytest.raises(Held):
        compare.train_encoder(case.encoder, tmp_path / "out")

    def pflop():
        return {row["encoder"]: row["training_pflop"] for row in small.compare()["results"]}

    before = pflop()
    of_parent, of_child = (
        max(read_metrics(tmp_path / folder, "compute/pflop").values()) for folder in ("encoders/0", "child")
    )
    assert before == {"child": of_parent + of_child}
    del small.config["questions"]
    assert pflop() == {"pre-trained": of_parent, "child": of_parent + of_child}

    if made_by == "continued":
        del child["train_options"]["objective.teacher"], child["train_options"]["objective.name"]
    alone, _ = small.cases().values()
    parent["train_options"]["optim.lr"] = 0.02
    otherwise, _ = small.cases().values()
    assert case_digest(otherwise) != case_digest(alone)
    child["train_options"][setting] = child["encoder"]
    with refused("child would be made from itself"):
        small.compare()


def pupil_of(teacher, folder, setting):
    """An entry that is trained as its teacher was, to predict the teacher's features or classes."""
    options = teacher["train_options"] | {setting: teacher["encoder"].format(seed=0)}
    if teacher["train"] == "pretrain":
        options["objective.name"] = "features"
    return {"name": folder.name, "encoder": str(folder), "train": teacher["train"], "train_options": options}


@pytest.mark.faults
def test_another_comparison_goes_on_from_published_results(floor, tmp_path, settings_of_fewshot):
    """By other names, in another folder: what is new is done, and nothing else."""
    known = floor.config["evaluations"][0]
    before = floor.compare()["summary"]["comparison"]["floor"]
    settings_of_fewshot.clear()
    new = {"name": "more", "command": "fewshot", "options": FAST | {"shots": [2]}}
    floor.config["evaluations"] = [known | {"name": "again"}, new]
    floor.config |= {"dir": str(tmp_path / "other"), "extends": str(tmp_path / "out" / "results.json")}
    after = floor.compare()["summary"]["comparison"]["floor"]
    assert [settings.shots for settings in settings_of_fewshot] == [(2,)]
    assert {column: after[column.replace("few-shot", "again")] for column in before} == before
    floor.config["extends"] = str(floor.file)
    with refused(r"extends is .*compare\.yaml; it must be the results\.json of a comparison"):
        floor.compare()


def test_results_of_other_images_at_the_same_path_are_not_taken(floor, tmp_path, settings_of_fewshot, capsys):
    """Where the images are not on this machine, published ones are taken: that is what publishing is for."""
    before = floor.compare()["results"]
    floor.config["extends"] = str(tmp_path / "out" / "results.json")
    images = tmp_path / "one"

    def takes_results(place):
        settings_of_fewshot.clear()
        floor.config["dir"] = str(tmp_path / place)
        is_same = floor.compare()["results"] == before
        assert len(settings_of_fewshot) == (not is_same)
        return is_same

    note = "note: floor-0-few-shot-one is not taken from "
    assert takes_results("same")
    away = images.rename(tmp_path / "away")
    assert takes_results("gone") and note not in capsys.readouterr().out
    floor.config["dir"] = str(tmp_path / "out")
    with refused("data.path"):
        floor.compare("--extends=null")
    assert floor.results()["results"] == before
    away.rename(images)
    put_picture(next((images / "dog").iterdir()), 1000)
    assert not takes_results("other") and note in capsys.readouterr().out
    assert not takes_results("out")


def test_a_report_that_was_cut_off_is_none(floor, settings_of_fewshot):
    options = floor.config["evaluations"][0]["options"]
    options["shots"] = [5]
    of_five = floor.compare()["results"]
    options["shots"] = [1]
    with interrupted_after(compare, "write_json", 0):
        floor.compare()  # killed between its report and the mark of which images and weights it is
    settings_of_fewshot.clear()
    assert [row["case"] for row in floor.compare()["results"] if row["kind"] == "test"] == ["1", "1"]
    options["shots"] = [5]
    assert floor.compare()["results"] == of_five
    assert [settings.shots for settings in settings_of_fewshot] == [(1,)]


@pytest.mark.faults
def test_what_diverges_is_trained_once_and_the_table_says_so(small, tmp_path, monkeypatch, capsys):
    """Of two evaluations of two seeds; other settings are tried."""
    trained = noted(monkeypatch, compare, "train")
    wild, _, floor = small.config["encoders"]
    wild |= {"name": "wild", "train_options": wild["train_options"] | {"optim.lr": 1e30}}
    of_fewshot, finetuned = small.config["evaluations"]
    of_fewshot["options"]["shots"] = 1
    of_knn = KNN | {"options": FAST | {"neighbours": 20}}
    small.config |= {"encoders": [wild, floor], "evaluations": [of_fewshot, of_knn]}
    small.config["datasets"] = [small.config["datasets"][0] | {"group": None}]
    first = small.compare()
    assert [config.run.dir for config in trained] == [f"{tmp_path}/encoders/{seed}" for seed in (0, 1)]
    assert first["summary"]["comparison"]["wild"] == {"few-shot 1": {"diverged": 2}, "kNN 20": {"diverged": 2}}
    assert "|wild|diverged|diverged|-|" in small.table().replace(" ", "")
    assert small.compare() == first and len(trained) == 2
    assert "; delete it to try again" in capsys.readouterr().err

    wild["train_options"] = wild["train_options"] | {"optim.lr": 1e-3}
    finetuned["options"]["lrs"] = 1e30
    small.config["evaluations"] = [finetuned]
    small.config["encoders"] = [wild | {"seeds": [1], "encoder": str(tmp_path / "tame/{seed}")}]
    second = small.compare()["summary"]["comparison"]
    assert second == {"wild": {"fine-tuned": {"diverged": 1}}}
    monkeypatch.setattr(finetune, "run", lambda config: pytest.fail("again"))
    assert small.compare()["summary"]["comparison"] == second


def test_random_weights_of_an_architecture_whose_training_diverged_did_not(small, tmp_path, monkeypatch):
    def diverge(*_):
        raise Diverged("the loss is nan")

    monkeypatch.setattr(compare, "train", diverge)
    trained, random = (small.cases()[name, 0, "few-shot", "one"].encoder for name in ("pre-trained", "random"))
    for encoder in (trained, random):  # which has no architecture to take
        with pytest.raises(Diverged, match="the loss is nan"):
            compare.train_encoder(encoder, tmp_path)
    assert was_never_trained(trained, tmp_path) and not was_never_trained(random, tmp_path)


def test_a_failed_evaluation_leaves_the_others(floor, tmp_path, monkeypatch, capsys):
    """An encoder that is not there; images that its compute would be counted on; a bug."""
    monkeypatch.setattr(knn, "run", lambda config: {}["CUDA error"])
    broken = {"name": "broken", "encoder": str(tmp_path / "nowhere")}
    gone = {"data.path": str(tmp_path / "gone")}
    lost = {"name": "lost", "encoder": str(tmp_path / "lost"), "train": "pretrain"}
    floor.config["encoders"] += [broken, lost | {"train_options": gone, "compute": 1e-6}]
    floor.config["evaluations"].insert(0, KNN)
    with refused(r"5 of 6 evaluations failed, such as floor-0-kNN-one: KeyError: 'CUDA error"):
        floor.compare()
    assert list(floor.results()["summary"]["comparison"]) == ["floor"]
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "broken-0-few-shot-one: encoder is" in printed


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
    for case in ("hog-0-masked-one", "floor-0-deep-one"):
        assert f"note: {case} is left out, it does not apply: " in printed
    assert list(floor.results()["summary"]["a"]) == ["floor"]


def test_an_encoder_of_other_images_or_weights_is_refused(small, tmp_path):
    """It is not passed off as one that was trained on today's."""
    images = SourceConfig(path=str(tmp_path / "one"), eval_split=None)
    options = {"data.path": images.path, "data.eval_split": None, "run.steps": 1, "run.report": False}
    folder, start = tmp_path / "encoder", tmp_path / "start"
    entry = {"name": "trained", "encoder": str(folder), "train": "pretrain"}
    small.config["encoders"] = [entry]
    ask_few_shots_of_one_dataset(small)
    for each in (folder, start):
        each.mkdir()
    for name in ("config.json", "model.safetensors"):
        (start / name).write_text("weights")
    other_labels = record_source(images, "class")
    other_labels["train"] = other_labels["train"] | {"labels": "others"}
    for record, more, said in (
        ({"train": {"files": "others"}}, {}, "train: files"),
        (other_labels, {}, "train: labels"),
        ({"model.init_from": {"weights": "others"}}, {"model.init_from": str(start)}, r"model\.init_from: weights"),
    ):
        (folder / "data.json").write_text(json.dumps(record))
        entry["train_options"] = options | more
        with refused(rf"encoder was started with other images or weights \({said} changed\)"):
            small.compare()

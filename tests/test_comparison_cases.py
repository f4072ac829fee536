"""The cases of a comparison: bad entries, digests, how images are read, and what a training computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from colours import write
from comparisons import SmallComparison
from conftest import put_picture, refused
from safetensors.torch import save_file

from evaluation.compare import settings_to_train
from evaluation.comparison.cases import TRAININGS, cases_of, evaluation_settings, read_entries
from evaluation.comparison.digests import case_digest, digests_of_images, relevant_settings, training_digest
from evaluation.comparison.rows import report_path_of_case, rows_of_report, training_cost
from evaluation.config import (
    CompareConfig,
    ContrastiveConfig,
    FewshotConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    SegmentationConfig,
)
from evaluation.registry import EVALUATIONS
from mpp.config import Config
from mpp.config.parsing import parse

KNN, MASKED, TUNED = ({"name": command, "command": command} for command in ("knn", "masked", "finetune"))
TRAINED = {"name": "a", "encoder": "b", "train": "pretrain", "seeds": [0, 1]}
SAME_SEED = TRAINED | {"encoder": "b_{seed}", "train_options": {"run.seed": 5}}
FLOOR = {"name": "floor", "encoder": "floor:pixels"}


@pytest.fixture
def small(tmp_path):
    return SmallComparison(tmp_path)


@pytest.mark.parametrize(
    "key, entry, message",
    [
        ("encoders", {"name": "a"}, "encoders: a: encoder is empty"),
        ("datasets", {"name": "two"}, "datasets: names is .* all different"),
        ("evaluations", {"name": "a", "command": "magic"}, "command is magic; it must be fewshot or knn"),
        ("evaluations", KNN | {"options": {"test": False}}, "evaluations: knn: test is false; it must be true"),
        ("datasets", {"name": "three", "options": {"test": False}}, "evaluations: few-shot: test is false"),
        ("encoders", FLOOR | {"nmae": "a"}, "encoders: floor: unknown setting nmae .did you mean name"),
        ("questions", {"name": "a", "plot": "lines"}, "questions: a: encoders is null; it must be {name: number}"),
        ("questions", {"name": "by/depth"}, "name is by/depth; it must be a name of a file, without /"),
        ("questions", {"name": "a", "lines": {"l": ["radnom"]}}, "lines: l is radnom; it must be one of random"),
        ("encoders", TRAINED, "encoders: a: encoder is b; it must be with {seed} in it, for several seeds"),
        ("encoders", SAME_SEED, "encoders: a: run.seed is 5; it must be left out: seeds has several"),
        ("encoders", FLOOR | {"compute": 1}, "encoders: floor: compute is 1; it must be null, or next to train"),
        # learned weights would stand in the table as random ones
        ("encoders", FLOOR | {"options": {"random": True}}, "floor: options: random is true; .* left out"),
        ("evaluations", TUNED | {"options": {"run": {"seed": 5}}}, "finetune: options: run.seed is 5; .* left out"),
    ],
)
def test_bad_comparisons_are_named(small, key, entry, message):
    del small.config["encoders"][::2]
    small.config.setdefault(key, []).append(entry)
    with refused(message):
        small.compare()


def test_a_raised_revision_takes_no_old_row(monkeypatch):
    """Of a training or of an evaluation; 0 is left out, so that results of before are found."""

    def digest():
        return case_digest(only_case(TRAINED | {"seeds": [0]}))

    digests = [digest()]
    monkeypatch.setitem(TRAININGS, "pretrain", TRAININGS["pretrain"]._replace(revision=1))
    digests.append(digest())
    monkeypatch.setitem(EVALUATIONS, "knn", replace(EVALUATIONS["knn"], revision=1))
    assert len({*digests, digest()}) == 3


def test_an_evaluation_on_images_of_its_own_is_one_of_these_and_of_no_other_dataset():
    """Masked patches are of the run's own."""
    masks = {"name": "masks", "command": "segmentation", "options": {"data": {"path": "sets/streets"}}}
    of_both = dict(group="both", options={"data.train_images": 9})
    cases = cases_with([TRAINED | {"seeds": [0]}], [KNN, masks, MASKED], ("one", "two"), **of_both)
    assert [(case.entry.name, case.dataset.name, case.labels["group"]) for case in cases] == [
        ("knn", "one", "both"),
        ("knn", "two", "both"),
        ("masks", "streets", None),
        ("masked", "one", None),
    ]
    assert [evaluation_settings(case).data.train_images for case in cases[:3]] == [9, 9, None]
    assert evaluation_settings(cases[2]).data.path == "sets/streets"


@pytest.mark.parametrize("path, column", [("mine", None), ("uoft-cs/cifar10", "label"), (None, None)])
def test_the_recipe_of_an_evaluation_brings_settings_of_its_own_images_alone(path, column):
    tuned = TUNED | {"options": {"config": "finetune/cifar10_small"}}
    (case,) = cases_with([TRAINED | {"seeds": [0]}], [tuned], options={"data.path": path})
    data = evaluation_settings(case).data
    assert (data.path, data.label_column) == (path, column)
    (unnamed,) = cases_with([TRAINED | {"seeds": [0]}], [tuned])
    with refused("datasets: d: data.path is missing; it must be there: finetune/cifar10_small has uoft-cs/cifar10"):
        evaluation_settings(unnamed)


def test_masks_that_a_list_names_have_a_digest(tmp_path):
    lines = ["file_name,mask_file_name"]
    for place in range(4):
        for folder in ("images", "masks"):
            put_picture(tmp_path / folder / f"{place}.png", place)
        lines.append(f"images/{place}.png,masks/{place}.png")
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    masks = {"name": "masks", "command": "segmentation", "options": {"data.image_column": "image"}}
    (case,) = cases_with([FLOOR], [masks], options={"data.path": str(tmp_path)})
    assert {*digests_of_images(case)} == {"images", "masks"}


def cases_with(encoders, evaluations=(KNN,), datasets=("d",), **of_dataset):
    """The cases of a comparison."""
    datasets = [{"name": name} | of_dataset for name in datasets]
    return cases_of(read_entries(CompareConfig(encoders=encoders, evaluations=evaluations, datasets=datasets)))


def only_case(encoder, **of_dataset):
    """The case of a comparison that has one."""
    (case,) = cases_with([encoder], **of_dataset)
    return case


def test_a_dev_score_is_at_the_chosen_depth():
    results = [{"depth": depth, "accuracy": depth / 4, "dev_accuracy": depth / 8} for depth in (1, 2)]
    report = {"results": results, "protocol": {"chosen_depth": 2}}
    rows = rows_of_report(only_case(FLOOR), report, Path())
    assert [(row["kind"], row["accuracy"]) for row in rows] == [("test", 0.5), ("dev", 0.25)]


def test_long_names_are_cut_in_names_of_files(tmp_path):
    """As those of trials with many settings: a file's name has 255 bytes at most."""
    case = only_case(FLOOR | {"name": "é" * 200})
    report = report_path_of_case(case, tmp_path)
    assert report.stem.endswith(case_digest(case)) and len(f"{report.stem}.outcomes.npz.12345.partial".encode()) < 255


EACH = {("knn", 0), ("knn", 1), ("finetune", 0), ("finetune", 1)}


@pytest.mark.parametrize(
    "change, seeds",
    [
        ({}, {("knn", 0), ("finetune", 0), ("finetune", 1)}),
        ({"encoder": "floor:pixels"}, {("knn", 0)}),
        ({"encoder": "b_{seed}"}, EACH),
        ({"random": True}, EACH),
    ],
)
def test_one_encoder_is_not_several_seeds_of_a_probe(change, seeds, capsys):
    """Its probes would be one result, counted several times, with a spread of 0."""
    encoder = {"name": "ours", "encoder": "vit_tiny_patch16_224", "seeds": [0, 1]} | change
    assert {(case.entry.name, case.encoder.seed) for case in cases_with([encoder], [KNN, TUNED])} == seeds
    once = "note: ours (seed 1) is left out of knn: "
    assert (once in capsys.readouterr().out) == (("knn", 1) not in seeds)


def test_pairs_that_do_not_apply_are_named(capsys):
    random = {"name": "noise", "encoder": "vit_tiny_patch16_224", "random": True}
    simclr = {"name": "SimCLR", "encoder": "b", "train": "contrastive"}
    cases = cases_with([FLOOR, random, simclr], [KNN, MASKED, TUNED])
    assert len(cases) == 5
    left_out = [("floor", "masked"), ("floor", "finetune"), ("noise", "masked"), ("SimCLR", "masked")]
    for said, (encoder, evaluation) in zip(capsys.readouterr().out.splitlines(), left_out, strict=True):
        assert said.startswith(f"note: {encoder} (seed 0) is left out of {evaluation}: ")


def test_the_digest_has_timms_name_beside_a_file_of_weights(tmp_path):
    """By the name, images are scaled."""
    file = tmp_path / "weights.safetensors"
    save_file({}, file)
    digests = set()
    for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224"):
        case = only_case({"name": "a", "encoder": name, "options": {"checkpoint": str(file)}})
        digests.add(case_digest(case))
        assert training_cost(case.encoder) == {}  # there is no record
    assert len(digests) == 2


@pytest.mark.parametrize(
    "config_class, words, counts",
    [(ContrastiveConfig, [], True), (Config, [], False), (FinetuneConfig, ["--augment.mixup=0.1"], True)],
)
def test_the_images_of_a_pass_are_in_the_digest_where_they_are_mixed_or_told_apart(config_class, words, counts):
    of_null = relevant_settings(parse(config_class, words))
    of_eight = relevant_settings(parse(config_class, [*words, "--data.batch_size=8"]))
    assert (json.dumps(of_null) != json.dumps(of_eight)) == counts


@pytest.mark.parametrize("config_class", [KnnConfig, LinearConfig, FewshotConfig, SegmentationConfig])
def test_probes_choose_their_depth_and_earlier_results_at_the_last_one_are_known_by_its_name(config_class):
    assert relevant_settings(parse(config_class, [])) == relevant_settings(parse(config_class, ["--depth=dev"]))
    assert "depth" in relevant_settings(config_class())
    assert "depth" not in relevant_settings(parse(config_class, ["--depth=last"]))


@pytest.mark.parametrize("options, expected", [({}, (0, 9)), ({"data.range": [0, 5]}, (0, 5))])
def test_images_are_read_as_the_encoders_were_unless_the_dataset_says_otherwise(options, expected):
    reading = {"data.channels": 1, "data.range": [0, 9]}
    case = only_case(TRAINED | {"seeds": [0], "train_options": reading}, options=options | {"data.path": "scans"})
    data = evaluation_settings(case).data
    (tuned,) = cases_with([TRAINED | {"seeds": [0], "train_options": {"data.flip": False}}], [TUNED])
    assert not evaluation_settings(tuned).data.flip
    assert data.channels == 1 and tuple(data.range) == expected


def test_which_weights_of_a_parent_a_training_begins_from_is_in_its_digest():
    """Known by their path alone: the parent may not be trained yet."""
    parent, digests = TRAINED | {"name": "parent", "encoder": "runs/parent", "seeds": [0]}, set()
    for weights in ("", "/encoder_best", "/checkpoints/step_00000002/model.safetensors"):
        child = TRAINED | {"seeds": [0], "train_options": {"model.init_from": f"runs/parent{weights}"}}
        itself = {"name": "itself", "encoder": f"runs/parent{weights}"}
        case, _, of_itself = cases_with([child, parent, itself])
        assert {*case.encoder.parents} == {"model.init_from"}
        digests |= {training_digest(each.encoder) for each in (case, of_itself)}
    assert len(digests) == 6


def test_compute_is_also_that_of_what_a_run_stands_on(tmp_path):
    """Where that is published, it is unknown: a run of an hour from a model of weeks would pass for an hour's."""
    runs = {
        "first": {"model": {"init_from": None}},
        "longer": {"model": {"init_from": f"{tmp_path}/first/encoder"}},
        "student": {"distill": {"teacher": f"{tmp_path}/longer"}},
        "tuned": {"init": "encoder", "encoder": f"{tmp_path}/longer"},
        "of a hub": {"model": {"init_from": "hf-hub:timm/vit"}},
        "second": {"model": {"init_from": f"{tmp_path}/of a hub"}},
        "early": {"model": {"init_from": f"{tmp_path}/first/checkpoints/step_00000002/model.safetensors"}},
    }
    pflop = {}
    for name, settings in runs.items():
        lines = [{"step": step, "compute/pflop": step / 2, "speed/device_hours": 2 * step / 3} for step in (1, 3)]
        metrics = "\n".join(map(json.dumps, lines))
        write(tmp_path / name, {"config.yaml": yaml.safe_dump({"data": {}} | settings), "metrics.jsonl": metrics})
        cost = training_cost(only_case({"name": name, "encoder": str(tmp_path / name)}).encoder)
        assert cost.get("training_device_hours", 0) == cost.get("training_pflop", 0) * 2 / 1.5
        pflop[name] = cost.get("training_pflop")
    own = {"first": 1.5, "longer": 3, "student": 4.5, "tuned": 4.5, "early": 2}
    assert pflop == own | {"of a hub": None, "second": None}


def test_compute_is_that_of_a_step_at_least(small, tmp_path):
    options = small.config["encoders"][0]["train_options"] | {"data.path": str(tmp_path / "one")}
    case = only_case({"name": "a", "encoder": "b", "train": "pretrain", "compute": 1e-12, "train_options": options})
    with refused(r"^compute is 1e-12; it must be at least [0-9.e-]+, the PFLOP of a st"):
        settings_to_train(case.encoder)

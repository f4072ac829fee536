"""The cases of a comparison: bad entries, digests, how images are read, and what a training computes."""

import json
from dataclasses import replace

import pytest
import yaml
from comparisons import TINY_TRAINING, SmallComparison
from safetensors.torch import save_file

from evaluation import compare
from evaluation.compare import settings_to_train, step_flops
from evaluation.comparison.cases import (
    TRAININGS,
    Encoder,
    case_digest,
    cases_of,
    evaluation_settings,
    read_entries,
    relevant_settings,
)
from evaluation.comparison.rows import cost_with_ancestors, report_path_of_case, training_cost
from evaluation.config import (
    CompareConfig,
    ContrastiveConfig,
    FewshotConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    SegmentationConfig,
)
from evaluation.config.comparing import EncoderEntry
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.registry import EVALUATIONS
from mpp.config import Config
from mpp.config.parsing import as_command_line, parse
from mpp.errors import UserError
from mpp.training.history import DEVICE_HOURS, PFLOP

KNN = {"name": "kNN", "command": "knn"}
TRAINED = {"name": "a", "encoder": "b", "train": "pretrain", "seeds": [0, 1]}
SAME_SEED = TRAINED | {"encoder": "b_{seed}", "train_options": {"run.seed": 5}}
FLOOR = {"name": "floor", "encoder": "floor:pixels"}
OTHER = {"name": "c", "encoder": "b", "train": "pretrain", "train_options": {"run.steps": 1}}


@pytest.fixture
def small(tmp_path):
    return SmallComparison(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoders": []}, "encoders is empty"),
        ({"datasets": []}, "datasets is empty"),
        ({"encoders": [{"name": "a"}]}, "encoders: a: encoder is empty"),
        ({"datasets": [{"name": "a"}, {"name": "a"}]}, "datasets: names is .* all different"),
        ({"evaluations": [{"name": "a", "command": "magic"}]}, "command is magic; it must be fewshot or knn"),
        ({"encoders": [{"name": 0.25, "encoder": "b"}]}, "encoders: 0.25: name is 0.25; it must be text"),
        ({"encoders": [FLOOR | {"nmae": "a"}]}, "encoders: floor: unknown setting nmae .did you mean name"),
        ({"evaluations": [KNN | {"options": None}]}, "evaluations: kNN: options is null; it must be"),
        ({"questions": [{"name": "a", "encoders": ["b"]}]}, "questions: a is b; it must be one of random, floor"),
        ({"questions": [{"name": "a", "plot": "lines"}]}, "questions: a: encoders is null; it must be {name: number}"),
        ({"questions": [{"name": "a", "encoders": "floor"}]}, "questions: a: encoders is floor; it must be"),
        ({"questions": [{"name": "a", "encoders": {"floor": "x"}}]}, "encoders is .*x.*; it must be {name: number}"),
        ({"questions": [{"name": "by/depth"}]}, "name is by/depth; it must be a name of a file, without /"),
        ({"questions": [{"name": "a", "evaluations": []}]}, r"evaluations is \[\]; it must be null"),
        ({"questions": [{"name": "a", "lines": {"l": ["flor"]}}]}, "lines: l is flor; it must be one of random, floor"),
        (
            {"questions": [{"name": "a", "encoders": ["floor"], "lines": {"l": ["random"]}}]},
            "a: lines: l is random; it must be one of floor",
        ),
        ({"encoders": [TRAINED | {"seeds": [0, 0]}]}, "encoders: a: seeds is .0, 0.; it must be .* each once"),
        ({"encoders": [TRAINED]}, "encoders: a: encoder is b; it must be with {seed} in it, for several seeds"),
        ({"encoders": [SAME_SEED]}, "encoders: a: run.seed is 5; it must be left out: seeds has several"),
        ({"encoders": [FLOOR | {"compute": 1}]}, "encoders: floor: compute is 1; it must be null, or next to train"),
        (
            {"encoders": [TRAINED | {"train": "magic"}]},
            "encoders: a: train is magic; it must be pretrain or supervised",
        ),
        ({"evaluations": [{"name": "a", "command": "fewshot", "options": {"shotz": 1}}]}, "unknown setting shotz"),
    ],
)
def test_bad_comparisons_are_named(small, change, message):
    small.config |= change
    small.config["encoders"] = small.config["encoders"][-2:]
    with pytest.raises(ValueError, match=message) as error:
        compare.main(["--config", str(small.write())])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("evaluations", {"random": True}),
        ("evaluations", {"run.seed": 3}),
        ("evaluations", {"checkpoint": "c"}),
        ("datasets", {"out": "a.json"}),
        ("encoders", {"random": True}),
    ],
)
def test_options_that_a_comparison_decides_are_refused(key, options):
    """Among the options `random` had no effect: learned weights stood in the table as random ones."""
    entries = {"encoders": [FLOOR], "evaluations": [KNN], "datasets": [{"name": "mine"}]}
    (entry,) = entries[key]
    entries[key] = [entry | {"options": options}]
    with pytest.raises(UserError, match=f"{entry['name']}: options: {next(iter(options))} is .* left out"):
        read_entries(CompareConfig(**entries))


def test_a_raised_revision_takes_no_old_row(monkeypatch):
    """Of a training or of an evaluation; 0 is left out, so that results of before are found."""
    own = {"name": "a", "encoder": "b", "train": "pretrain"}

    def digest():
        return case_digest(only_case(own, datasets=[{"name": "d"}]))

    before = digest()
    with monkeypatch.context() as patch:
        patch.setitem(TRAININGS, "pretrain", TRAININGS["pretrain"]._replace(revision=1))
        of_training = digest()
    with monkeypatch.context() as patch:
        patch.setitem(EVALUATIONS, "knn", replace(EVALUATIONS["knn"], revision=1))
        of_evaluation = digest()
    assert len({before, of_training, of_evaluation}) == 3 and digest() == before


def test_an_evaluation_on_images_of_its_own_is_one_of_these_and_of_no_other_dataset():
    masks = {"name": "masks", "command": "segmentation", "options": {"data.path": "sets/streets"}}
    datasets = [{"name": name, "group": "both", "options": {"data.path": name}} for name in ("one", "two")]
    cases = cases_of(read_entries(CompareConfig(encoders=[FLOOR], evaluations=[KNN, masks], datasets=datasets)))
    named = [(case.entry.name, case.dataset.name, case.labels["group"]) for case in cases]
    assert named == [("kNN", "one", "both"), ("kNN", "two", "both"), ("masks", "streets", None)]
    assert [evaluation_settings(case).data.path for case in cases] == ["one", "two", "sets/streets"]


def only_case(encoder, evaluations=(KNN,), datasets=({"name": "d"},)):
    """The case of a comparison that has one."""
    (case,) = cases_of(read_entries(CompareConfig(encoders=[encoder], evaluations=evaluations, datasets=datasets)))
    return case


def test_compute_that_is_less_than_a_step_is_named():
    config = parse(Config, as_command_line(TINY_TRAINING))
    with pytest.raises(UserError, match=r"^compute is 1e-12; it must be at least [0-9.e-]+, the PFLOP of a step$"):
        settings_to_train(Encoder(EncoderEntry(train="pretrain", compute=1e-12), 0, config))


def test_masked_patches_are_evaluated_once_for_all_datasets():
    """They are of the run's own images."""
    pretrained = {"name": "a", "encoder": "b", "train": "pretrain"}
    masked = {"name": "masked patches", "command": "masked"}
    datasets = [{"name": name, "group": "both"} for name in ("one", "two")]
    cases = cases_of(read_entries(CompareConfig(encoders=[pretrained], evaluations=[KNN, masked], datasets=datasets)))
    named = [(case.entry.name, case.dataset.name, case.labels["group"]) for case in cases]
    assert named == [("kNN", "one", "both"), ("kNN", "two", "both"), ("masked patches", "one", None)]


@pytest.mark.parametrize("name", ["é" * 200, " ".join(f"optim.setting_{number}=0.01" for number in range(12))])
def test_long_names_are_cut_in_names_of_files(name, tmp_path):
    """As those of trials with many settings: a file's name has 255 bytes at most."""
    case = only_case({"name": name, "encoder": "floor:pixels"}, datasets=[{"name": "d"}])
    report = report_path_of_case(case, tmp_path)
    assert report.stem.endswith(case_digest(case)) and len(f"{report.stem}.outcomes.npz.12345.partial".encode()) < 255
    short = only_case(FLOOR, datasets=[{"name": "d"}])
    assert report_path_of_case(short, tmp_path).name == f"floor-0-kNN-d-{case_digest(short)}.json"


@pytest.mark.parametrize(
    ("change", "seeds"),
    [
        ({}, {"kNN": [0], "tuned": [0, 1]}),
        ({"encoder": "floor:pixels"}, {"kNN": [0]}),
        ({"encoder": "b_{seed}"}, {"kNN": [0, 1], "tuned": [0, 1]}),
        ({"random": True}, {"kNN": [0, 1], "tuned": [0, 1]}),
        ({"options": {"checkpoint": "b_{seed}.safetensors"}}, {"kNN": [0, 1], "tuned": [0, 1]}),
    ],
)
def test_one_encoder_is_not_several_seeds_of_a_probe(change, seeds, capsys):
    """Its probes would be one result, counted several times, with a spread of 0."""
    encoder = {"name": "ours", "encoder": "vit_tiny_patch16_224", "seeds": [0, 1]} | change
    evaluations = [KNN, {"name": "tuned", "command": "finetune"}]
    config = CompareConfig(encoders=[encoder], evaluations=evaluations, datasets=[{"name": "birds"}])
    found = {}
    for case in cases_of(read_entries(config)):
        found.setdefault(case.entry.name, []).append(case.encoder.seed)
    assert found == seeds
    once = "note: ours (seed 1) is left out of kNN: "
    assert (once in capsys.readouterr().out) == (seeds["kNN"] == [0])


def test_pairs_that_do_not_apply_are_named(capsys):
    floor = {"name": "floor", "encoder": "floor:pixels"}
    random = {"name": "noise", "encoder": "vit_tiny_patch16_224", "random": True}
    masked = {"name": "masked patches", "command": "masked"}
    tuned = {"name": "tuned", "command": "finetune"}
    datasets = [{"name": "birds"}]
    config = CompareConfig(encoders=[floor, random], evaluations=[KNN, masked, tuned], datasets=datasets)
    cases = cases_of(read_entries(config))
    assert {(case.encoder.entry.name, case.entry.name) for case in cases} == {
        ("floor", "kNN"),
        ("noise", "kNN"),
        ("noise", "tuned"),
    }
    printed = capsys.readouterr()
    assert (printed.out + printed.err).splitlines() == [
        "note: floor (seed 0) is left out of masked patches: a colour baseline has no weights",
        "note: floor (seed 0) is left out of tuned: a colour baseline has no weights",
        "note: noise (seed 0) is left out of masked patches: this encoder has predicted no patches",
    ]


def test_contrastive_encoders_are_trained_too_and_have_no_masked_patches(tmp_path):
    options = {
        "config": "rivals/simclr",
        "views.blur": 0,
        "run.report": False,
        "run.steps": 1,
        "run.threads": 1,
        "data.workers": 0,
        "model.width": 16,
        "model.depth": 1,
        "model.heads": 2,
        "model.img_size": 16,
        "probe.every": 0,
    }
    entry = {"name": "SimCLR", "encoder": str(tmp_path / "{seed}"), "train": "contrastive", "train_options": options}
    case = only_case(entry, evaluations=[KNN, {"name": "masked patches", "command": "masked"}])
    assert case.entry.name == "kNN"
    training = compare.settings_to_train(case.encoder)
    assert training.views.blur == 0 and training.contrast.temperature == 0.1
    compare.train_encoder(case.encoder, tmp_path)
    assert load_frozen_encoder(str(tmp_path / "0")).img_size == (16, 16)


def test_the_digest_has_timms_name_beside_a_file_of_weights(tmp_path):
    """By the name, images are scaled."""
    file = tmp_path / "weights.safetensors"
    save_file({}, file)
    digests = set()
    for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224"):
        case = only_case({"name": name, "encoder": name, "options": {"checkpoint": str(file)}})
        digests.add(case_digest(case))
        assert training_cost(case.encoder) == {}  # there is no record
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("config_class", "words", "counts"),
    [
        (ContrastiveConfig, [], True),
        (Config, [], False),
        (FinetuneConfig, ["--augment.mixup=0.1"], True),
    ],
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


@pytest.mark.parametrize(("options", "expected"), [({}, (0, 9)), ({"data.range": [0, 5]}, (0, 5))])
def test_images_are_read_as_the_encoders_were_unless_the_dataset_says_otherwise(tmp_path, options, expected):
    reading = {"data.channels": 1, "data.range": [0, 9]}
    encoder = {"name": "grey", "encoder": str(tmp_path / "run"), "train": "pretrain", "train_options": reading}
    case = only_case(encoder, datasets=[{"name": "scans", "options": options | {"data.path": "scans"}}])
    data = evaluation_settings(case).data
    assert data.channels == 1 and tuple(data.range) == expected


def test_compute_is_also_that_of_what_a_run_stands_on(tmp_path):
    runs = {
        "first": {"model": {"init_from": None}},
        "longer": {"model": {"init_from": str(tmp_path / "first" / "encoder")}},
        "student": {"distill": {"teacher": str(tmp_path / "longer")}},
        "tuned": {"init": "encoder", "encoder": str(tmp_path / "longer")},
    }
    for name, settings in runs.items():
        (tmp_path / name / "encoder").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"data": {}} | settings))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "compute/pflop": 1.5, "speed/device_hours": 2}\n')
    pflop = {name: cost_with_ancestors(tmp_path / name, PFLOP) for name in runs}
    assert pflop == {"first": 1.5, "longer": 3.0, "student": 4.5, "tuned": 4.5}
    assert cost_with_ancestors(tmp_path / "student", DEVICE_HOURS) == 6


def test_the_cost_of_a_run_that_builds_on_a_published_model_is_unknown(tmp_path):
    """A run of an hour from a model of weeks would pass for an hour's."""
    parents = {"first": "hf-hub:timm/vit", "second": str(tmp_path / "first"), "third": None}
    costs = []
    for name, parent in parents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"data": {}, "model": {"init_from": parent}}))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "compute/pflop": 1.5}\n')
        case = only_case({"name": name, "encoder": str(tmp_path / name)}, datasets=[{"name": "birds"}])
        costs.append(training_cost(case.encoder))
    assert costs == [{}, {}, {"training_pflop": 1.5}]


def test_equal_compute_gives_cheaper_models_more_steps(small, tmp_path):
    options = small.config["encoders"][0]["train_options"] | {"data.path": str(tmp_path / "one")}
    entry = {"train": "pretrain", "compute": 1e-6}
    small.config["encoders"] = [
        entry | {"name": "narrow", "encoder": str(tmp_path / "narrow"), "train_options": options},
        entry | {"name": "wide", "encoder": str(tmp_path / "wide"), "train_options": options | {"model.width": 32}},
    ]
    steps = {}
    for case in small.cases().values():
        config = compare.settings_to_train(case.encoder)
        steps[case.encoder.entry.name] = config.run.steps
        assert config.run.steps == round(1e9 / step_flops("pretrain", config))
        assert case.encoder.settings.run.steps == 2
    assert steps["narrow"] > 2 * steps["wide"]

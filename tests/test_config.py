"""Settings: one source of defaults, files that compose, errors of one line."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import settings_page
import yaml
from conftest import ROOT

from evaluation.config import (
    EmbedConfig,
    ExportConfig,
    FeaturesConfig,
    FewshotConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    MaskedConfig,
    PredictConfig,
    ProbeDataConfig,
    ReportConfig,
    SegmentationConfig,
    SupervisedConfig,
    VisualizeConfig,
)
from mpp.config import Config, ModelConfig, RunConfig, Settings, as_words, flatten, setting, settings_of
from mpp.config.parsing import NAMES_ELSEWHERE, Loader, parse, parse_saved, to_yaml
from mpp.errors import UserError
from mpp.training.run_folder import changes, describe_changes


def test_birds_yaml_is_the_defaults():
    assert parse(Config, ["--config", str(ROOT / "configs/birds.yaml")]) == Config()


def test_birds_yaml_names_every_setting():
    written = yaml.safe_load((ROOT / "configs/birds.yaml").read_text())
    names = [f"{group}.{key}" for group in written for key in written[group]]
    assert names == [each.key for each in settings_of(Config()) if each.is_shown]


def test_the_papers_recipe():
    config = parse(Config, ["--config", str(ROOT / "configs/imagenet_vit_b16.yaml")])
    assert (config.run.steps, config.optim.global_batch_size, config.optim.warmup_steps) == (1_000_000, 4096, 10_000)
    assert (config.optim.name, config.optim.lr) == ("adam", 2e-4)
    assert (config.optim.schedule, config.optim.betas) == ("cosine", (0.9, 0.999))
    corruption = config.corruption
    assert (corruption.rate, corruption.mask, corruption.random, corruption.keep) == (0.5, 0.8, 0.1, 0.1)
    assert (config.model.name, config.model.img_size, config.model.patch_size) == ("vit_base_patch16_224", 224, 16)
    assert (config.data.crop_area, config.data.flip) == ((0.05, 1.0), True)


def test_files_and_overrides_compose_in_order():
    files = [f"--config={ROOT}/configs/{name}.yaml" for name in ("imagenet_vit_b16", "imagenet_vit_b16_100k")]
    config = parse(Config, [*files, f"--config={ROOT}/configs/corruption_15.yaml", "--optim.lr=0.5"])
    assert (config.run.steps, config.corruption.rate, config.optim.lr) == (100_000, 0.15, 0.5)
    assert config.model.name == "vit_base_patch16_224"
    assert parse(Config, ["--run.steps=700", "--config", "cifar10"]).run.steps == 700  # wherever the file stands


def test_numbers_of_a_plain_model_have_defaults_and_a_named_one_keeps_its_own():
    plain = dict(width=128, depth=4, heads=4, img_size=64, patch_size=8)
    assert Config().model.numbers() == plain
    assert parse(Config, ["--model.width=64"]).model.numbers() == plain | {"width": 64}
    named = ["--config", str(ROOT / "configs/birds.yaml"), "--model.name=vit_base_patch16_224", "--model.depth=2"]
    assert parse(Config, named).model.numbers() == dict.fromkeys(plain) | {"depth": 2}


def test_only_plumbing_may_change(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(Config()))
    operational = ["--data.workers=7", "--run.log_every=3", "--data.batch_size=2", "--run.checkpoint_every=9"]
    assert changes(parse_saved(Config, saved), parse(Config, operational)) == {}
    science = ["--optim.lr=0.5", "--run.seed=1", "--corruption.rate=0.3"]
    different = changes(parse_saved(Config, saved), parse(Config, science))
    assert different == {"run.seed": (0, 1), "corruption.rate": (0.5, 0.3), "optim.lr": (0.01, 0.5)}
    assert describe_changes(different, "the run").endswith("optim.lr (0.01 in the run, 0.5 now)")


MISTAKES = [  # the command, its words, and what the one line names: the setting, the value, what is meant or allowed
    (Config, "--run.stepz=3", ["run.stepz", "run.steps"]),
    (Config, "--optim.learning_rate=3", ["optim.learning_rate", "optim.lr"]),
    (Config, "--corruption.mask_ratio=0.75", ["corruption.mask_ratio", "corruption.rate"]),
    (Config, "--data.batch_siz=1", ["data.batch_siz", "data.batch_size"]),
    (Config, "--batch_size=3", ["batch_size", "optim.global_batch_size", "data.batch_size"]),
    (PredictConfig, "--optim.batch_size=3", ["optim.batch_size", "data.batch_size"]),
    (Config, "--epochs=3", ["epochs", "run.steps", "images / optim.global_batch_size"]),
    (Config, "--nonsense=3", ["nonsense", "corruption"]),
    (Config, "--run=3", ["run", "group", "run.steps"]),
    (Config, "stray", ["stray", "--NAME VALUE"]),
    (Config, "--model.img_size 128 1024", ["1024", "[a, b]"]),
    (Config, "--help optm", ["--help", "optm", "optim"]),
    (Config, "--config cifar11", ["--config", "cifar11", "such as cifar10"]),
    (Config, "--config maee", ["maee", "rivals/mae"]),
    (Config, "--config nowhere.yaml", ["--config", "nowhere.yaml"]),
    (Config, "--run.steps=5 --config", ["--config", "empty"]),
    (Config, "--run.steps", ["run.steps", "empty", "at least 1"]),
    (Config, "--run.dir --data.path x", ["--run.dir", "no value"]),
    (Config, "--lr 3", ["lr", "optim.lr"]),
    (Config, "--run.steps=many", ["run.steps", "many", "a whole number", "at least 1"]),
    (Config, "--run.steps=1e3", ["run.steps", "1e3", "a whole number"]),
    (Config, "--run.steps=0", ["run.steps", "0", "at least 1"]),
    (Config, "--run.seed=-1", ["run.seed", "-1", "at least 0"]),
    (Config, "--data.path=", ["data.path", "empty"]),
    (Config, "--run.dir=~/here", ["run.dir", "~/here", "without ~"]),
    (Config, "--run.dir=$SCRATCH/run", ["run.dir", "$SCRATCH/run", "variables"]),
    (Config, "--run.dir=s3://bucket/run", ["run.dir", "s3://bucket/run", "on this machine"]),
    (Config, "--run.precision=fp17", ["run.precision", "fp17", "bf16", "fp32"]),
    (Config, "--optim.name=adamw", ["optim.name", "adamw", "muon or adam or sgd"]),
    (Config, "--run.compile=maybe", ["run.compile", "maybe", "auto or true or false"]),
    (Config, "--optim.lr=0,01", ["optim.lr", "0,01", "a number", "above 0"]),
    (Config, "--optim.lr=.nan", ["optim.lr"]),
    (Config, "--optim.clip=0", ["optim.clip", "0", "above 0"]),
    (Config, "--optim.betas=[0.9,1]", ["optim.betas", "[0.9,1]", "below 1"]),
    (Config, "--optim={lr: null}", ["optim.lr", "null", "a number"]),
    (Config, "--corruption.rate=1", ["corruption.rate", "1", "below 1"]),
    (Config, "--corruption.mask=0.5", ["corruption.mask + random + keep", "1"]),
    (Config, "--objective.bits=9", ["objective.bits", "9", "at most 8"]),
    (Config, "--model.img_size=65", ["model.img_size", "65", "multiple of the patch size (8)"]),
    (Config, "--model.img_size=[0,8]", ["model.img_size", "[0,8]", "at least 1"]),
    (Config, "--model.heads=3", ["model.width", "multiple of model.heads (3)"]),
    (Config, "--model.mean=x", ["model.mean", "x", "a number", "auto"]),
    (Config, "--data.crop_area=[0.5,0.1]", ["data.crop_area", "ascending"]),
    (Config, "--data.crop_area=[a, 1]", ["data.crop_area", "[a, 1]", "[a number, a number]"]),
    (Config, "--data.bands=4,3,2", ["data.bands", "4,3,2", "[a whole number, ...]"]),
    (Config, "--data.flip=1", ["data.flip", "1", "true or false"]),
    (Config, "--run.trackers=wandb", ["run.trackers", "wandb", "[text, ...]"]),
    (SegmentationConfig, "--class_names=[no, yes, 1e3, 007]", ["class_names", "1e3", "[text, ...] or null (quotes"]),
    (FewshotConfig, "--l2=[1,0]", ["l2", "[1,0]", "above 0"]),
    (FewshotConfig, "--shots=[]", ["shots", "[]", "a whole number"]),
    (FewshotConfig, "--seeds=[1,0,1]", ["seeds", "[1,0,1]", "each once"]),
    (KnnConfig, "--neighbours=[5,5]", ["neighbours", "[5,5]", "each once"]),
    (SegmentationConfig, "--readings=[knn,knn]", ["readings", "linear or knn", "each once"]),
    (ExportConfig, "--images=0", ["images", "0", "at least 1"]),
    (FinetuneConfig, "--optim.lr=0.5", ["optim.lr", "0.5", "lrs"]),
]


@pytest.mark.parametrize(("config_class", "words", "named"), MISTAKES, ids=[case[1] for case in MISTAKES])
def test_a_mistake_is_one_line_that_names_the_setting_the_value_and_what_is_allowed(config_class, words, named):
    words = [words] if "=" in words and "--config" not in words else words.split()
    with pytest.raises(UserError) as error:
        parse(config_class, words)
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize(
    ("config_class", "path", "expected"),
    [
        (Config, None, "runs/birds"),
        (SupervisedConfig, None, "runs/birds_supervised"),
        (Config, "uoft-cs/cifar10", "runs/cifar10"),
        (FinetuneConfig, "https://host/sets/my%20parts.tar?key=1", "runs/my_20parts_finetuned"),
        (Config, "FOLDER/photos.v2/", "runs/photos.v2"),
    ],
)
def test_the_run_folder_has_the_name_of_the_images(config_class, path, expected, tmp_path):
    (tmp_path / "photos.v2").mkdir()
    words = [f"--data.path={path.replace('FOLDER', str(tmp_path))}"] if path else []
    config = parse(config_class, words)
    assert config.in_named_folder().run.dir == expected
    assert parse(config_class, [*words, "--run.dir=mine"]).in_named_folder().run.dir == "mine"


def test_first_steps_of_a_config_keep_their_share_of_a_shorter_run():
    """Where the run is too short for them; what is given with the length is not changed."""
    short = parse(Config, ["--config=continue", "--run.steps=400"]).optim
    assert (short.warmup_steps, short.frozen_steps) == (20, 200)
    assert parse(Config, ["--config=continue", "--run.steps=2000"]).optim.warmup_steps == 500
    assert parse(Config, ["--run.steps=1"]).optim.frozen_steps == 0
    with pytest.raises(UserError, match=r"optim\.warmup_steps is 500; it must be less than run\.steps \(400\)"):
        parse(Config, ["--config=continue", "--run.steps=400", "--optim.warmup_steps=500"])


def test_help_has_the_numbers_of_null_and_no_setting_without_a_choice(capsys):
    with pytest.raises(SystemExit):
        parse(Config, ["--help", "all"])
    shown = capsys.readouterr().out
    assert "--model.width null: 128 " in shown
    assert "predict_nodata" not in shown and "shard_over" not in shown
    assert not parse(
        Config, ["--objective.name=features", "--objective.stop_on_collapse=false"]
    ).objective.stop_on_collapse


IN_FILES = [
    ("run: {stepz: 3}", ["run.stepz", "run.steps", "bad.yaml"]),
    ("run: {steps: many}", ["run.steps", "many", "at least 1", "bad.yaml"]),
    ("run: {steps: 2020-01-01}", ["run.steps", "2020-01-01", "bad.yaml"]),
    ("run:\n  steps:\n  seed: 3", ["run.steps", "null", "bad.yaml"]),
    ("run: {keep_at: [1, 1:30]}", ["run.keep_at", "1:30"]),
    ("modle: {width: 3}", ["modle", "model", "bad.yaml"]),
    ("modle: {}", ["modle", "bad.yaml"]),
    ("model.widht: 3", ["model.widht", "model.width", "bad.yaml"]),
    ("model: {arguments: 3}", ["model.arguments", "3", "{name: value}"]),
    ("run: [", ["bad.yaml, line 1"]),
    ("run:\n  steps: 3\n  seed: a: b", ["bad.yaml, line 3"]),
    ("# all defaults", ["bad.yaml", "settings"]),
    ("- 1", ["bad.yaml", "settings"]),
    ("run:\n", ["run", "group", "bad.yaml"]),
    ("optim: {lr: 1}\nrun: {steps: 3}\noptim: {lr: 2}", ["optim occurs twice", "bad.yaml"]),
    ("run: {steps: 3, steps: 4}", ["steps occurs twice", "bad.yaml"]),
    ("_base_: [a.yaml]", ["_base_", "bad.yaml"]),
    ("data: {revision: 1e5}", ["data.revision", "text or null (quotes", "bad.yaml"]),
    ("my-key: 1", ["my-key", "bad.yaml"]),
    ("objective: {normalize: patch}", ["objective.normalize", "objective.name is pixels", "bad.yaml"]),
    ("run: {dir: ~/x}", ["run.dir", "without ~", "bad.yaml"]),
    (f"data: {{range: {'[' * 3000}", ["bad.yaml"]),
    ("model: {width: 100, heads: 3}", ["model.width", "multiple of model.heads (3)", "bad.yaml"]),
    (b"\xff\xd8\xff\xe0", ["bad.yaml"]),
]


@pytest.mark.parametrize(("text", "named"), IN_FILES, ids=[str(case[0])[:30] for case in IN_FILES])
def test_a_mistake_in_a_file_is_one_line_that_names_the_file(tmp_path, text, named):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        parse(Config, ["--config", str(file), "--run.seed=3"])
    assert "\n" not in str(error.value)
    assert [part for part in named if part not in str(error.value)] == []


def test_an_error_names_the_file_of_the_wrong_key_and_not_that_of_another(tmp_path):
    (tmp_path / "other.yaml").write_text("encoder: x")
    (tmp_path / "wrong.yaml").write_text("my-key: 1")
    with pytest.raises(UserError, match=r"^unknown setting my-key; .*encoder.*\(in .*wrong\.yaml\)$"):
        parse(KnnConfig, [f"--config={tmp_path / name}.yaml" for name in ("other", "wrong")])


def test_numbers_in_quotes_are_numbers_where_no_text_is_allowed(tmp_path):
    file = tmp_path / "quoted.yaml"
    file.write_text('optim: {lr: "1e-3"}\ndata: {flip: "false", revision: "010", path: x}')
    config = parse(Config, ["--config", str(file)])
    assert (config.optim.lr, config.data.flip, config.data.revision) == (1e-3, False, "010")


def test_what_earlier_versions_saved_as_nan_is_text():
    assert yaml.load("{nodata: nan, label: nan, number: .nan}", Loader)["nodata"] == "nan"


def test_annotations_may_be_text():
    """As `from __future__ import annotations` makes them."""

    @dataclasses.dataclass(frozen=True)
    class OwnConfig(Settings):
        """Settings of a user."""

        power: "float" = setting(1.0, above=0)

    assert parse(OwnConfig, ["--power=2"]).power == 2.0
    with pytest.raises(UserError, match=r"^power is 0; it must be a number, above 0$"):
        parse(OwnConfig, ["--power=0"])


def test_words_that_yaml_takes_for_something_else_are_text(tmp_path):
    file = tmp_path / "words.yaml"
    file.write_text("data: {path: x, revision: 01234567, label_column: no, name: 2020-01-01}")
    data = parse(Config, ["--config", str(file)]).data
    assert (data.revision, data.label_column, data.name) == ("01234567", "no", "2020-01-01")
    assert parse(Config, ["--data.path=x", "--data.revision=1e5"]).data.revision == "1e5"
    file.write_text(to_yaml(parse(Config, ["--data.label_column=null_", "--run.dir=1e-3", "--data.path=true"])))
    saved = parse(Config, ["--config", str(file)])
    assert (saved.run.dir, saved.data.path) == ("1e-3", "true")


def test_negative_numbers_and_numbers_that_are_not_finite():
    for word in ("-3.4028235e+38", "-9999", "-.5"):
        assert parse(Config, ["--data.nodata", word]).data.nodata == float(word)
    assert parse(Config, [f"--data.nodata={as_words(float('nan'))}"]).data.nodata == "nan"
    assert parse(Config, [f"--data.nodata={as_words(float('-inf'))}"]).data.nodata == "nan"
    assert parse(Config, ["--optim.clip=.inf"]).optim.clip == float("inf")


def test_a_list_may_be_one_value():
    assert parse(FewshotConfig, ["--shots=5"]).shots == (5,) == FewshotConfig(shots=5).shots
    assert parse(Config, ["--data.channels=1", "--data.bands=4"]).data.bands == (4,)


def test_settings_of_python_are_checked_too():
    with pytest.raises(UserError, match=r"^steps is 0; "):
        RunConfig(steps=0)
    with pytest.raises(UserError, match=r"^name is adamw; "):
        Config(optim=type(Config().optim)(name="adamw"))


def test_a_config_of_the_package_has_a_name_that_files_come_before_and_folders_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = parse(Config, ["--config", "cifar10"])
    (tmp_path / "cifar10").mkdir()  # of images, say
    assert parse(Config, ["--config=cifar10"]) == by_name == parse(Config, [f"--config={ROOT}/configs/cifar10.yaml"])
    (tmp_path / "birds").write_text("optim: {lr: 0.5}")
    assert parse(Config, ["--config", "birds"]).optim.lr == 0.5


def test_a_mistake_ends_the_command_with_one_line_and_no_traceback(monkeypatch, capsys):
    """The script as `python mpp/pretrain.py` runs it."""
    monkeypatch.setattr("sys.argv", ["mpp/pretrain.py", "--run.stepz", "3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "mpp" / "pretrain.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: unknown setting run.stepz")


@pytest.mark.parametrize(
    ("config_class", "setting"),
    [
        *((each, "encoder") for each in (EmbedConfig, ExportConfig, FeaturesConfig, FewshotConfig, FinetuneConfig)),
        *(
            (each, "encoder")
            for each in (LinearConfig, MaskedConfig, ReportConfig, SegmentationConfig, VisualizeConfig)
        ),
        (PredictConfig, "classifier"),
        (EmbedConfig, "out"),
        (ProbeDataConfig, "path"),
        (RunConfig, "dir"),
        (ModelConfig, "init_from"),
    ],
)
def test_a_path_of_python_is_text(config_class, setting):
    """As `pretrain` returns one; reports hold settings as JSON."""
    value = Path("runs") / "mine.parquet"
    assert flatten(config_class.of(**{setting: value}))[setting] == "runs/mine.parquet"


def test_a_config_of_python_has_the_settings_by_their_names():
    others = ProbeDataConfig(path="images", workers=0)
    words = ["--encoder=runs/mine", "--shots=5", "--test=false", "--data.path=images", "--data.workers=0"]
    given = {"encoder": "runs/mine", "shots": 5, "test": False}
    assert FewshotConfig.of(**given, data=others) == parse(FewshotConfig, words)
    assert FewshotConfig.of(**given, **{"data.path": "images", "data.workers": 0}) == parse(FewshotConfig, words)
    for values, message in (
        ({"shot": 5}, r"unknown setting shot \(did you mean shots\?\)"),
        ({"depth": "first"}, "depth is first; it must be a whole number or last or all or dev"),
    ):
        with pytest.raises(UserError, match=message):
            FewshotConfig.of(**values)


def help_of(config_class, words, capsys):
    with pytest.raises(SystemExit):
        parse(config_class, words)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("config_class", [PredictConfig, EmbedConfig, SegmentationConfig])
def test_help_leaves_out_settings_without_effect(config_class, capsys):
    shown = {
        line.split()[0].removeprefix("--") for line in help_of(config_class, ["--help", "all"], capsys) if "--" in line
    }
    unused = {each.key for each in settings_of(config_class()) if each.unused}
    assert unused and shown.isdisjoint(unused) and "data.path" in shown


def test_help_has_default_and_allowed_values(capsys):
    lines = help_of(Config, ["--help", "all"], capsys)
    assert "  --run.compile auto  (auto or true or false)" in lines
    assert "  --run.steps 1200  (a whole number, at least 1)" in lines


def test_help_of_a_group_has_its_settings_alone(capsys):
    lines = help_of(Config, ["--help", "optim"], capsys)
    shown = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    assert shown == [key for key in flatten(Config()) if key.startswith("optim.")]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--help", "--run.steps=3"], ["--run.steps=3", "--help"]])
def test_help_fits_a_screen(words, capsys):
    lines = help_of(Config, words, capsys)
    assert len(lines) < 60 and max(map(len, lines)) <= 120
    assert sum(line.startswith("  --") for line in lines) == 10


def test_names_elsewhere_are_of_settings_that_exist():
    assert {ours.split()[0] for ours in NAMES_ELSEWHERE.values()} <= {*flatten(Config()), *flatten(FewshotConfig())}


def test_the_page_of_settings_is_up_to_date():
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.whole_page(), (
        "python tests/settings_page.py writes it"
    )


def test_a_wrong_value_is_named_in_the_file_that_has_it(tmp_path):
    """A later file with a good value does not hide it."""
    for name, rate in (("wrong", "fast"), ("right", "0.5")):
        (tmp_path / f"{name}.yaml").write_text(f"optim: {{lr: {rate}}}")
    files = [f"--config={tmp_path / 'wrong.yaml'}", f"--config={tmp_path / 'right.yaml'}"]
    with pytest.raises(UserError, match=r"optim\.lr is fast; .*\(in .*wrong\.yaml\)$"):
        parse(Config, files)
    with pytest.raises(UserError, match=r"optim\.lr is fast; .*\(in .*wrong\.yaml\)$"):
        parse_saved(Config, tmp_path / "wrong.yaml")

"""Settings: one source of defaults, files that compose, errors of one line."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import settings_page
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
    VisualizeConfig,
)
from mpp.config import Config, ModelConfig, RunConfig
from mpp.config.command_line import as_words
from mpp.config.help import about_group
from mpp.config.keys import flatten, known_keys
from mpp.config.parsing import parse
from mpp.config.saved import changes_since, describe_changes, to_yaml
from mpp.config.terms import NAMES_ELSEWHERE, REMARKS
from mpp.errors import UserError


def test_birds_yaml_is_the_defaults():
    assert parse(Config, ["--config", str(ROOT / "configs/birds.yaml")]) == Config()


def test_birds_yaml_names_every_setting():
    import yaml

    written = yaml.safe_load((ROOT / "configs/birds.yaml").read_text())
    assert [f"{group}.{key}" for group in written for key in written[group]] == list(flatten(Config()))


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
    assert changes_since(parse(Config, operational), saved) == {}
    science = ["--optim.lr=0.5", "--run.seed=1", "--corruption.rate=0.3"]
    changes = changes_since(parse(Config, science), saved)
    assert changes == {"run.seed": (0, 1), "corruption.rate": (0.5, 0.3), "optim.lr": (0.01, 0.5)}
    assert describe_changes(changes, "the run").endswith("optim.lr (0.01 in the run, 0.5 now)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run.stepz=3"], ["run.stepz", "run.steps"]),
        (["--optim.learning_rate=3"], ["optim.learning_rate", "optim.lr"]),
        (["--nonsense=3"], ["nonsense", "corruption"]),
        (["stray"], ["unknown word stray: settings are --NAME VALUE, and a list is '[a, b]'"]),
        (["--model.img_size", "128", "1024"], ["unknown word 1024"]),
        (["--data.path="], ["data.path is empty; leave it out"]),
        (["--model.init_from="], ["model.init_from is empty"]),
        (["--run.step=3"], ["unknown setting run.step: did you mean run.steps?"]),
        (["--data.crop_ratio=[0.75,.inf]"], ["data.crop_ratio"]),
        (["--run.steps=many"], ["run.steps is many; it must be a whole number of at least 1"]),
        (["--run.steps=0"], ["run.steps", "at least 1"]),
        (["--run.dir=~/here"], ["run.dir is ~/here", "without ~"]),
        (["--run.dir=$SCRATCH/run"], ["run.dir is $SCRATCH/run", "a path without variables"]),
        (["--run.dir=runs/${USER}"], ["run.dir is runs/${USER}", "a path without variables"]),
        (["--run.dir=s3://bucket/run"], ["run.dir is s3://bucket/run", "a path on this machine, not a URL"]),
        (["--run.precision=fp17"], ["run.precision", "bf16", "fp32"]),
        (["--corruption.rate=1.5"], ["corruption.rate", "1.5", "below 1"]),
        (["--corruption.mask=0.5"], ["corruption.mask + random + keep", "must be 1"]),
        (["--model.img_size=65"], ["model.img_size", "65", "multiple of the patch size (8)"]),
        (["--model.heads=3"], ["model.width", "multiple of model.heads (3)"]),
        (["--data.crop_area=[0.5,0.1]"], ["data.crop_area"]),
        (["--config=nowhere.yaml"], ["nowhere.yaml"]),
        (["--run.steps=5", "--config"], ["--config has no value; it must be a YAML file"]),
        (["--optim={lr: null}"], ["optim.lr is null; it must be a number above 0"]),
        (["--run.steps"], ["--run.steps has no value; it must be a whole number of at least 1"]),
        (["--run=3"], ["run is 3; it is a group of settings: give --run.NAME VALUE"]),
    ],
)
def test_errors_are_one_line_that_names_the_culprit(arguments, words):
    with pytest.raises(ValueError) as error:
        parse(Config, arguments)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: {stepz: 3}", r"unknown setting run\.stepz: .* \(in .*bad\.yaml\)"),
        ("run: {steps: many}", r"run\.steps is many; .* of at least 1 \(in .*bad\.yaml\)"),
        ("nonsense: {a: 1}", "nonsense"),
        ("run: {steps: 2020-01-01}", r"run\.steps is \"2020-01-01\"; it must be a whole number"),
        ("model: {arguments: 3}", r"model\.arguments is 3; it must be settings such as '{name: value}', or null \("),
        ("run: [", r"bad\.yaml, line 1, column 7 is not YAML: expected the node content"),
        ("run:\n  steps: 3\n  seed: a: b", r"bad\.yaml, line 3, column 10 is not YAML: mapping values are not allowed"),
        ("# all defaults", r"bad\.yaml, without settings"),
        ("- 1", r"bad\.yaml, without settings"),
        ("run:\n", r"bad\.yaml: run is null; it must have settings below it, or be left out"),
        ("run: 3", "run is 3"),
        ("optim: {lr: 1}\nrun: {steps: 3}\noptim: {lr: 2}", "optim occurs twice"),
        ("run: {steps: 3, steps: 4}", "steps occurs twice"),
        ("optim.lr: 1\noptim: {weight_decay: 0}", r"bad\.yaml: optim\.lr occurs next to optim; write it below optim"),
        ("run: {steps: 3}\nrun.seed: 2", r"run\.seed occurs next to run"),
        ("run:\n  steps: 010", r"bad\.yaml, line 2: 010 is 8 in YAML; write 8, or text in quotes"),
        ("run: {keep_at: [1, 1:30]}", r"1:30 is 90 in YAML; write 90"),
        ("data: {revision: 01234567}", r"01234567 is 342391 in YAML; write 342391, or text in quotes"),
        (
            "_base_: [a.yaml]",
            r"unknown setting _base_ \(in .*bad\.yaml\): files compose .*: --config OTHER --config .*bad",
        ),
        ("defaults: {a: 1}\nrun: {steps: 3}", "unknown setting defaults .* files compose on the command line"),
        ("config: a.yaml", "unknown setting config .* files compose"),
        (
            "run:\n  steps:\n  seed: 3",
            r"run\.steps is null; it must be a whole number of at least 1 \(in .*bad\.yaml\)",
        ),
        ("objective: {name: null}", r"objective\.name is null; it must be text \(in"),
        ("run: {dir: ~}", r"run\.dir is null; it must be text \(in"),
        ("data: {crop_area: }", r"data\.crop_area is null; it must be two numbers"),
        ("optim: {clip: inf}", r"optim\.clip is inf; .* \(did you mean \.inf\?\)"),
        ("data: {revision: 1e5}", r"data\.revision is 1e5; it must be text or null \(in quotes, any word is text\) \("),
        ("data: {label_column: no}", r"data\.label_column is false; .* \(in quotes, any word is text\) \(in .*bad"),
        ("data: {path: [a, b]}", r"data\.path is \[\"a\", \"b\"\]; it must be text or null \(in .*bad"),
    ],
)
def test_errors_in_files_are_one_line(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=words) as error:
        parse(Config, ["--config", str(file), "--run.seed=3"])
    assert "\n" not in str(error.value)


def test_numbers_that_a_parser_takes_for_options_or_text():
    for word in ("-3.4028235e+38", "-9999", "-.5"):
        assert parse(Config, ["--data.nodata", word]).data.nodata == float(word)
    assert parse(Config, [f"--data.nodata={as_words(float('nan'))}"]).data.nodata == "nan"
    assert as_words(float("-inf")) == "-.inf"


@pytest.mark.parametrize("text", ["modle: {}", "modle: {width: 3}", "modle: 3", "model: {widht: 3}", "model.widht: 3"])
def test_a_key_that_nothing_has_is_named_with_what_was_meant(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(
            ValueError, match=r"unknown setting model?.*: did you mean model|unknown setting modle: did you"
        ):
            parse(Config, arguments)


def test_a_config_of_the_package_has_a_name_that_files_come_before_and_folders_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = parse(Config, ["--config", "cifar10"])
    (tmp_path / "cifar10").mkdir()  # of images, say
    assert parse(Config, ["--config=cifar10"]) == by_name == parse(Config, [f"--config={ROOT}/configs/cifar10.yaml"])
    (tmp_path / "birds").write_text("optim: {lr: 0.5}")
    assert parse(Config, ["--config", "birds"]).optim.lr == 0.5
    with pytest.raises(
        ValueError,
        match=r"is cifar11, which does not exist; did you mean cifar10\? Configs by name are birds,",
    ):
        parse(Config, ["--config", "cifar11"])


@pytest.mark.parametrize(
    ("name", "meant"), [("cifar100", "cifar10"), ("finetune/cifar", "finetune/cifar10"), ("maee", "rivals/mae")]
)
def test_a_misspelled_config_is_pointed_to_the_nearest(name, meant):
    with pytest.raises(UserError, match=rf"--config is {name}, which does not exist; did you mean {meant}\?"):
        parse(Config, ["--config", name])


def test_a_config_that_is_no_text_is_named(tmp_path):
    (tmp_path / "photo.yaml").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ValueError) as error:
        parse(Config, [f"--config={tmp_path / 'photo.yaml'}"])
    assert "\n" not in str(error.value) and "photo.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--corruption.mask_ratio=0.75", "unknown setting corruption.mask_ratio: did you mean corruption.rate?"),
        ("--optim.learning_rat=1", r"unknown setting optim\.learning_rat: did you mean optim\.lr\?"),
        ("--data.batch_siz=1", r"did you mean data\.batch_size\?"),
        ("--epochs=3", r"did you mean run\.steps \(steps = epochs x images / optim\.global_batch_size\)\?"),
        (
            "--batch_size=3",
            r"did you mean optim\.global_batch_size \(images per step .*; data\.batch_size is the micro-batch",
        ),
        ("data.path=here", "unknown word data.path=here: did you mean --data.path=here?"),
        ("--data.bands=4,3,2", r"\(did you mean '\[4, 3, 2\]'\?\)$"),
        ("--optim.name=adamw", r"optim\.name is adamw; it must be one of muon, adam, sgd \(did you mean adam\?\)$"),
        ("--run.compile=maybe", r"run\.compile is maybe; it must be auto, true or false$"),
        ("--run.compile=True,", r"did you mean true\?"),
        ("--data.flip=n", r"data\.flip is n; it must be true or false \(did you mean false\?\)$"),
        ("--data.flip=1", r"did you mean true\?"),
        ("--optim.clip=None", r"optim\.clip is None; it must be a number above 0, or null \(did you mean null\?\)$"),
        ("--optim.lr=0,01", r"optim\.lr is 0,01; it must be a number above 0 \(did you mean 0\.01\?\)$"),
        ("--run.steps=1e3", r"run\.steps is 1e3; .* \(did you mean 1000\?\)$"),
        ("--run.trackers=wandb", r"it must be a list of words \(did you mean '\[wandb\]'\?\)$"),
        ("--data.crop_area=[a, 1]", r"data\.crop_area is \[a, 1\]; it must be two numbers above 0 and at most 1$"),
        ("--optim={lr: x}", r"optim\.lr is x; it must be a number above 0$"),
        ("--model.mean=x", r"it must be a number, a list of them, auto, or null \(a list is written"),
    ],
)
def test_names_and_spellings_of_other_tools_are_explained(word, said):
    with pytest.raises(UserError, match=said):
        parse(Config, [word])


def test_a_mistake_ends_the_command_with_one_line_and_no_traceback(monkeypatch, capsys):
    """The script as `python mpp/pretrain.py` runs it."""
    monkeypatch.setattr("sys.argv", ["mpp/pretrain.py", "--run.stepz", "3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "mpp" / "pretrain.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: unknown setting run.stepz: did you mean run.steps?")


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
    assert getattr(config_class(**{setting: value}), setting) == "runs/mine.parquet"


@pytest.mark.parametrize(
    ("config_class", "word", "allowed"),
    [
        (Config, "--corruption.rate=1", "corruption.rate is 1.0; it must be a number above 0 and below 1"),
        (Config, "--objective.bits=9", "objective.bits is 9; it must be a whole number from 1 to 8"),
        (
            Config,
            "--optim.weight_decay=.inf",
            "optim.weight_decay is inf; it must be a number of at least 0, and finite",
        ),
        (Config, "--optim.lr=.nan", "optim.lr is nan; it must be a number above 0"),
        (Config, "--optim.clip=0", "optim.clip is 0.0; it must be a number above 0, or null"),
        (
            Config,
            "--optim.betas=[0.9,1]",
            "optim.betas is [0.9, 1.0]; it must be two numbers of at least 0 and below 1",
        ),
        (Config, "--run.seed=-1", "run.seed is -1; it must be a whole number of at least 0 and below 2**63"),
        (
            Config,
            "--model.img_size=[0,8]",
            "model.img_size is [0, 8]; it must be a whole number of at least 1, two of them, or null",
        ),
        (FewshotConfig, "--l2=[1,0]", "l2 is [1.0, 0.0]; it must be a number above 0, or a list of them"),
        (FewshotConfig, "--shots=[]", "shots is []; it must be a whole number of at least 1, or a list of them"),
        (ExportConfig, "--batch=0", "batch is 0; it must be a whole number of at least 1, or dynamic"),
        (
            FewshotConfig,
            "--seeds=[1,0,1]",
            "seeds is [1, 0, 1]; it must be a whole number of at least 0, or a list of them, each once",
        ),
        (
            KnnConfig,
            "--neighbours=[5,5]",
            "neighbours is [5, 5]; it must be a whole number of at least 1, or a list of them, each once",
        ),
        (
            SegmentationConfig,
            "--readings=[knn,knn]",
            "readings is ['knn', 'knn']; it must be linear, knn, or a list of them, each once",
        ),
        (SegmentationConfig, "--readings=[]", "readings is []; it must be linear, knn, or a list of them"),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_bounds(config_class, word, allowed):
    with pytest.raises(UserError) as error:
        parse(config_class, [word])
    assert str(error.value) == allowed


def test_a_clip_may_be_infinite_and_a_list_may_be_one_value():
    assert parse(Config, ["--optim.clip=.inf"]).optim.clip == float("inf")
    assert parse(FewshotConfig, ["--shots=5"]).shots == (5,)


@pytest.mark.parametrize("config_class", [PredictConfig, EmbedConfig, SegmentationConfig])
def test_help_leaves_out_settings_without_effect(config_class, capsys):
    with pytest.raises(SystemExit):
        parse(config_class, ["--help", "all"])
    printed = capsys.readouterr().out
    (images,) = (each for each in dataclasses.fields(config_class) if each.name == "data")
    assert images.metadata["unused"] and "--data.path " in printed
    for name in images.metadata["unused"]:
        assert f"--data.{name} " not in printed


def test_help_has_the_allowed_values_of_every_setting(capsys):
    with pytest.raises(SystemExit):
        parse(Config, ["--help", "all"])
    text = capsys.readouterr().out
    for line in (
        "--run.compile auto  (auto, true or false)",
        "--run.steps 1200  (a whole number of at least 1)",
        "--optim.name muon  (one of muon, adam, sgd; elsewhere: opt)",
        "--data.nodata null  (a number, nan, or null)",
        "--model.mean 0.5  (a number, a list of them, auto, or null)",
    ):
        assert f"  {line}\n" in text


def help_of_words(config_class, words, capsys):
    with pytest.raises(SystemExit):
        parse(config_class, words)
    return capsys.readouterr().out.splitlines()


def test_help_of_another_group_names_those_there_are():
    with pytest.raises(UserError, match=r"^--help is optm; it must be all, or a group of settings: run, data, model,"):
        parse(Config, ["--help", "optm"])


def test_a_remark_on_a_name_elsewhere_is_of_that_setting():
    with pytest.raises(UserError, match=r"did you mean data\.batch_size\?"):
        parse(PredictConfig, ["--optim.batch_size=3"])  # which has no optim.global_batch_size


def test_help_of_a_group_has_its_settings_alone(capsys):
    lines = help_of_words(Config, ["--help", "optim"], capsys)
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert shown == [f"--optim.{each.name}" for each in dataclasses.fields(Config().optim)]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--help", "--run.steps=3"], ["--run.steps=3", "--help"]])
def test_help_fits_a_screen_and_counts_the_rest(words, capsys):
    lines = help_of_words(Config, words, capsys)
    assert len(lines) < 45 and max(map(len, lines)) <= 120
    counts = {line.split()[0]: int(line.split()[1]) for line in lines if re.match(r"  \w+ +\d+  ", line)}
    assert sum(counts.values()) == len(known_keys(Config))
    assert counts["optim"] == len(dataclasses.fields(Config().optim))


def test_names_elsewhere_are_of_settings_that_exist():
    known = {*known_keys(Config), *known_keys(FewshotConfig)}
    assert set(NAMES_ELSEWHERE.values()) <= known and set(REMARKS) <= set(NAMES_ELSEWHERE)


def test_the_subject_of_a_group_is_a_whole_sentence():
    groups = {key.split(".")[0] for key in known_keys(Config)}
    assert all(about_group(name, Config).endswith(".") for name in groups)


def test_the_page_of_settings_is_up_to_date():
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), (
        "python tests/settings_page.py writes it"
    )


def test_a_wrong_value_is_named_in_the_file_that_has_it(tmp_path):
    """A later file with a good value does not hide it."""
    for name, rate in (("wrong", "fast"), ("right", "0.5")):
        (tmp_path / f"{name}.yaml").write_text(f"optim: {{lr: {rate}}}")
    files = [f"--config={tmp_path / 'wrong.yaml'}", f"--config={tmp_path / 'right.yaml'}"]
    with pytest.raises(UserError, match=r"optim\.lr is fast; it must be a number above 0 \(in .*wrong\.yaml\)$"):
        parse(Config, files)
    with pytest.raises(UserError, match=r"wrong\.yaml is not a config of this command \(optim\.lr is fast; it must be"):
        changes_since(Config(), tmp_path / "wrong.yaml")

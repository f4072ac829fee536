"""Code of the user: `--import mine.py` registers it for every command, and a run folder never runs it."""

import builtins
import dataclasses
import multiprocessing
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from colours import write
from comparisons import write_cats_and_dogs
from conftest import ROOT, read_json, refused, run_command, tiny_without
from timm.models import _registry as timm_registry

import mpp
from evaluation import cli, compare, registry, report, visualize
from evaluation.comparison.cases import EncoderEntry, cases_of, read_entries, training_settings
from evaluation.comparison.digests import case_digest
from evaluation.config import CompareConfig
from evaluation.frozen.features import LabelledFeatures
from evaluation.frozen.results import write_json
from evaluation.metrics.scoring import load_outcomes
from evaluation.registry import EVALUATIONS, Evaluation
from mpp.config import Config, imports
from mpp.config.imports import import_words, imported, take_imports
from mpp.config.parsing import parse, read_yaml
from mpp.corruption import PATTERNS
from mpp.data.workers import start_worker
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES


@pytest.fixture(autouse=True)
def no_imports(monkeypatch):
    """Every test begins like a new process, without imports, and leaves nothing registered."""
    monkeypatch.setattr(imports, "_modules", {})
    imported.clear()
    with patch.dict(OBJECTIVES), patch.dict(PATTERNS), patch.dict(NETWORKS), patch.dict(EVALUATIONS):
        yield
    imported.clear()
    for name in ("brightness", "mine", "second", "nearest_centroid"):
        sys.modules.pop(name, None)


def start_a_new_process(changed=None):
    """Forget the imports, as a new process does that has not yet read its command line. A file may have changed."""
    if changed:
        changed.write_text(changed.read_text() + "\n# changed\n")
    imports._modules.clear()
    imported.clear()
    for name in ("brightness", "mine"):
        sys.modules.pop(name, None)
        OBJECTIVES.pop(name, None)


@pytest.fixture
def brightness(tmp_path):
    """The file that mpp/README.md shows."""
    page = (ROOT / "mpp" / "README.md").read_text()
    example = page[page.index("import torch.nn.functional as F\nfrom torch import Tensor") :]
    file = tmp_path / "brightness.py"
    file.write_text(example[: example.index("```")])
    return file


def trains_with(file):
    """The words of a run that trains with it."""
    return f"--import={file}", "--objective.name=brightness", "--run.steps=1"


PLACES = """
import numpy as np
from mpp.corruption import PATTERNS
from mpp.models.networks import NETWORKS
from mpp.objectives import OBJECTIVES, MeanColor

SEEN = []


def of_settings(config):
    SEEN.append(config.arguments)


class Mine(MeanColor):
    def __init__(self, config, patch_size, channels):
        super().__init__(config, patch_size, channels)
        of_settings(config)


def pattern(config, grid, draw_uniform):
    of_settings(config)
    return np.arange(config.arguments["patches"])


def network(encoder, outputs, mean, std, config):
    of_settings(config)
    return NETWORKS["predictor"](encoder, outputs, mean, std, config=config)


OBJECTIVES["mine"], PATTERNS["mine"], NETWORKS["mine"] = Mine, pattern, network
"""


def test_code_of_the_user_has_settings_of_its_own(pretrain, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLACES)
    words = ["--objective.name=mine", "--corruption.pattern=mine", "--network.name=mine", f"--import={file}"]
    words += ["--objective.arguments={levels: 8}", "--network.arguments={deep: true}", "--run.steps=1"]
    folder = pretrain(*words, "--corruption.arguments={patches: 3}")
    seen = sys.modules["mine"].SEEN
    assert all(given in seen for given in ({"levels": 8}, {"patches": 3}, {"deep": True}))
    assert read_yaml(folder / "config.yaml")["objective"]["arguments"] == {"levels": 8}
    with refused(r"another config: .*corruption\.arguments"):
        pretrain(*words, "--corruption.arguments={patches: 4}")


@pytest.mark.parametrize("group", ["objective", "corruption", "network"])
def test_mpps_own_parts_take_no_arguments(pretrain, group):
    with refused(rf"{group}\.arguments is .*levels.* it must be null or left out: {group}\.\w+ \w+ takes none"):
        pretrain(f"--{group}.arguments={{levels: 8}}")


def test_a_run_goes_on_with_the_same_file_in_any_folder_and_with_no_other(pretrain, brightness, tmp_path, capsys):
    """The page's example. Its predictions are drawn; pictures by another come with a warning."""
    copy = tmp_path / "run" / "imports" / "brightness.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("half")  # of a process that was killed before the run began
    folder = pretrain(*trains_with(brightness))
    assert copy.read_bytes() == brightness.read_bytes()
    start_a_new_process()
    with refused(r"run uses custom code: add --import brightness\.py "):
        pretrain(*trains_with(brightness)[1:])
    assert "brightness" not in sys.modules
    (tmp_path / "elsewhere").mkdir()
    brightness = brightness.rename(tmp_path / "elsewhere" / "brightness.py")
    assert pretrain(*trains_with(brightness)) == folder
    words = [f"--import={brightness}", f"--encoder={folder}", "--precision=fp32"]
    visualize.main([*words, "--pictures=[predictions]", "--images=2"])
    assert "predictions.png" in capsys.readouterr().out
    start_a_new_process(brightness)
    with refused(r"run is a run with another config: --import brightness\.py"):
        pretrain(*trains_with(brightness))
    visualize.main([*words, "--pictures=[filters]"])
    printed = capsys.readouterr()
    assert f"brightness.py is not as in {copy.parent}" in printed.out + printed.err


def test_all_imports_of_a_run_count(pretrain, brightness, tmp_path):
    """A base class in a file of its own, say: none may be changed, missing or additional."""
    (tmp_path / "mine.py").write_text(
        "from brightness import Brightness\nfrom mpp.objectives import OBJECTIVES\n\n\n"
        "class Mine(Brightness):\n    pass\n\n\nOBJECTIVES['mine'] = Mine\n"
    )
    (tmp_path / "second.py").write_text("")
    words = [f"--import={brightness}", f"--import={tmp_path / 'mine.py'}", "--run.steps=1"]
    folder = pretrain(*words)
    assert not (folder / "imports").exists()  # of a run that uses none
    folder = pretrain(*words, "--objective.name=mine", dir=tmp_path / "own")
    assert sorted(path.name for path in (folder / "imports").iterdir()) == ["brightness.py", "mine.py"]
    with refused(r"--import second\.py"):
        pretrain(*words, "--objective.name=mine", f"--import={tmp_path / 'second.py'}", dir=folder)
    start_a_new_process()
    with refused(r"add --import mine\.py"):
        pretrain(*trains_with(brightness), dir=folder)
    pretrain("--run.steps=1")


def test_a_branch_has_the_code_of_its_trunk(pretrain, brightness, tmp_path):
    words = [*trains_with(brightness), "--run.steps=2"]
    trunk = pretrain(*words, "--run.keep_at=[1]", dir=tmp_path / "trunk")
    branch = pretrain(*words, f"--run.branch_from={trunk}@1", dir=tmp_path / "branch")
    assert (branch / "imports" / "brightness.py").read_bytes() == brightness.read_bytes()
    start_a_new_process(brightness)
    with refused(r"trunk is a run with another config: --import brightness\.py"):
        pretrain(*words, f"--run.branch_from={trunk}@1", dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_saved_code_is_never_run(finished_run, tmp_path):
    """The code in the run folder of a stranger is not executed."""
    run = tmp_path / "run"
    (run / "imports").mkdir(parents=True)
    (run / "imports" / "mine.py").write_text(f"open({str(tmp_path / 'struck')!r}, 'w')\n")
    (run / "config.yaml").write_bytes((finished_run / "config.yaml").read_bytes())
    for command in (visualize, report):
        with refused(r"uses custom code: add --import mine\.py"):
            command.main([f"--encoder={run}"])
    assert not (tmp_path / "struck").exists()


@pytest.mark.parametrize("words", ["missing.py", "sys", "", "--run.steps=3"])
def test_what_cannot_be_imported_is_named(words):
    with refused(rf"--import.*{words} failed"):
        parse(Config, ["--import", *words.split()])


@pytest.mark.parametrize("name", ["json", "datasets"])
def test_a_file_that_hides_another_module_is_refused(tmp_path, name):
    """Also one that mpp imports later, as datasets."""
    file = tmp_path / f"{name}.py"
    file.write_text("")
    with refused(rf"{name}\.py failed: .*rename the file"):
        take_imports([f"--import={file}"])
    assert not imported and not import_words()


def test_a_file_that_fails_is_named_and_may_be_mended_in_the_same_process(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("1 / 0\n")
    with refused(r"mine\.py failed: .*division by zero"):
        take_imports([f"--import={file}"])
    assert not imported and not import_words() and "mine" not in sys.modules
    file.write_text("import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\n")
    words = ["--run.steps=3", "--import", str(file), "--config", "birds", f"--import={file}"]
    assert take_imports(words) == ["--run.steps=3", "--config", "birds"]  # imported once
    assert vars(builtins).pop("times") == 1


@pytest.mark.faults
def test_several_processes_and_the_runs_own_report_know_the_code(brightness, tmp_path):
    words = (*trains_with(brightness), *tiny_without("--run.report"), f"--run.dir={tmp_path / 'run'}")
    ended = run_command("torchrun", "--standalone", "--nproc_per_node=2", "mpp/pretrain.py", *words)
    assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"--import={brightness.name}" in page and str(brightness) not in page


def test_a_comparison_tells_results_of_changed_code_apart(brightness, tmp_path):
    """A case's digest depends on the code that the case uses, and on no other."""
    (tmp_path / "compare.yaml").write_text(f"""
        dir: {tmp_path}/compared
        encoders:
        - {{name: own, encoder: {tmp_path}/own, train: pretrain, train_options: {{objective.name: brightness}}}}
        - {{name: colours, encoder: {tmp_path}/colours, train: pretrain}}
        evaluations: [{{name: few-shot, command: fewshot}}]
        datasets: [{{name: birds}}]
        """)

    def digests():
        case_digest.cache_clear()
        config = parse(CompareConfig, [f"--import={brightness}", "--config", str(tmp_path / "compare.yaml")])
        return {case.encoder.entry.name: case_digest(case) for case in cases_of(read_entries(config))}

    before = digests()
    start_a_new_process(brightness)
    after = digests()
    assert before["own"] != after["own"] and before["colours"] == after["colours"]


@pytest.mark.parametrize("setting", ["objective.name", "corruption.pattern", "network.name", "model.name"])
def test_a_plan_that_is_read_without_its_code_is_refused(setting):
    """Its finished trainings would be taken for others, and its tables be written without them."""
    entry = EncoderEntry("own", "runs/own", train="pretrain", train_options={setting: "mine"})
    with refused(rf"{setting} is mine; it must be .* registered by --import"):
        training_settings(entry, 0)


def test_loader_processes_have_the_code_and_a_file_that_changes_is_not_taken_for_the_new_one(brightness):
    """A fork has the code of its parent: to edit a file does not end the run that trains with it. Others import it."""

    def has_code(is_fork):
        def begin():
            if not is_fork:  # as on macOS: it begins without the imports of its parent
                start_a_new_process()
            start_worker(torch.zeros(2, 2, dtype=torch.int64), words, 0)
            sys.exit("brightness" not in OBJECTIVES)

        process = multiprocessing.get_context("fork").Process(target=begin)
        process.start()
        process.join()
        return process.exitcode == 0

    take_imports([f"--import={brightness}"])
    words = import_words()
    assert has_code(is_fork=False)
    brightness.write_text("1 / 0\n")
    with refused(r"brightness\.py has changed since this process imported it"):
        take_imports(words)
    assert has_code(is_fork=True)


def test_a_package_is_known_by_all_its_python_files(pretrain, tmp_path, monkeypatch):
    package = tmp_path / "mypackage"
    patterns = "from mpp.corruption import PATTERNS, random_patches\nPATTERNS['mine'] = lambda *a: random_patches(*a)\n"
    files = {"__init__.py": "import mypackage.deep.patterns\n", "deep/patterns.py": patterns, "deep/helpers.py": ""}
    write(package, files)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--import=mypackage", "--corruption.pattern=mine", "--run.steps=1"]
    folder = pretrain(*words)
    copies = {path.relative_to(folder / "imports").as_posix() for path in (folder / "imports").rglob("*.py")}
    assert copies == {f"mypackage/{name}.py" for name in ("__init__", "deep/patterns", "deep/helpers")}
    start_a_new_process(package / "deep" / "helpers.py")
    with refused(r"--import mypackage/deep/helpers\.py"):
        pretrain(*words)


REGRESSION = """
import torch
import torch.nn.functional as F
from torch import nn
from mpp.corruption import PATTERNS, random_patches
from mpp.models.networks import NETWORKS, MaskedPatchPredictor
from mpp.objectives import OBJECTIVES, Objective, patches_at
from mpp.objectives import Palette


class Mine(Objective):
    outputs = 3
    reduction = "mean"
    detach = False

    def targets(self, images, positions):
        return patches_at(images, positions, self.patch_size).float().mean((-2, -1)) / 255

    def loss(self, predictions, targets):
        loss = F.mse_loss(predictions, targets, reduction=self.reduction)
        return loss.detach() if self.detach else loss


class Network(MaskedPatchPredictor):
    def __init__(self, encoder, outputs, mean, std, config):
        super().__init__(encoder, outputs, mean, std)


OBJECTIVES["mine"] = Mine
NETWORKS["mine"] = Network
"""
"""An objective and a network that train."""


def test_mistakes_are_mended_and_the_same_command_begins_anew(pretrain, tmp_path):
    """Nothing is lost before the first checkpoint: from then on, copies of the code are compared."""
    file = tmp_path / "mine.py"
    words = (f"--import={file}", "--objective.name=mine", "--run.steps=1")
    for mistake in ("del Mine.outputs", "Mine.detach = True", "Mine.paint = None"):  # the last one ends an evaluation
        file.write_text(f"{REGRESSION}\n{mistake}\n")
        with pytest.raises((AttributeError, NotImplementedError, RuntimeError, TypeError)):
            pretrain(*words)
        start_a_new_process()
    file.write_text(REGRESSION)
    folder = pretrain(*words)
    assert (folder / "imports" / "mine.py").read_text() == REGRESSION
    start_a_new_process(file)
    with refused(r"another config: --import mine\.py"):
        pretrain(*words)


WRONG_NETWORKS = {
    "no text": ("Network.on_top = property(lambda self: self.missing)", r"mine; it must be a module with .*on_top"),
    "all patches": (
        "Network.forward = lambda self, images, _: self.head(self.encoder.forward_features(self.normalize(images)))",
        r"shape of the network's predictions is .*8, 17, 3.*; it must be \(8, 8, 3\)",
    ),
}


@pytest.mark.parametrize("kind", WRONG_NETWORKS)
def test_a_network_that_cannot_train_or_be_exported_is_refused(pretrain, tmp_path, kind):
    change, message = WRONG_NETWORKS[kind]
    (tmp_path / "mine.py").write_text(f"{REGRESSION}\n{change}\n")
    with refused(message):
        pretrain(f"--import={tmp_path / 'mine.py'}", "--objective.name=mine", "--network.name=mine")


@pytest.mark.parametrize("name", ["mine", "pixels"])
def test_a_name_that_is_taken_is_refused(tmp_path, name):
    (tmp_path / "mine.py").write_text(REGRESSION)
    (tmp_path / "second.py").write_text(f"{REGRESSION.partition('OBJECTIVES[')[0]}\nOBJECTIVES['{name}'] = Mine\n")
    with refused(rf"second\.py failed: .*\.\w+ {name} is already that of m"):
        take_imports([f"--import={tmp_path / 'mine.py'}", f"--import={tmp_path / 'second.py'}"])


def test_a_definition_that_is_run_again_keeps_its_name():
    """As a cell of a notebook does."""
    for _ in range(2):
        exec(REGRESSION, {"__name__": "mine"})
    assert OBJECTIVES["mine"] and NETWORKS["mine"]


ENCODERS = """
from timm.models import build_model_with_cfg, register_model
from timm.models.vision_transformer import VisionTransformer

NUMBERS = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2)


@register_model
def mine_squares(pretrained=False, **settings):
    return build_model_with_cfg(VisionTransformer, "mine_squares", pretrained, **NUMBERS | settings)


@register_model
def mine_oblong(pretrained=False, **settings):
    return mine_squares(pretrained, patch_size=(8, 4), **settings)


class Own(VisionTransformer):
    def forward_features(self, images):
        return super().forward_features(images)


@register_model
def mine_own(pretrained=False, **settings):
    return build_model_with_cfg(Own, "mine_own", pretrained, **NUMBERS | settings)


@register_model
def mine_bare(pretrained=False, **settings):
    return VisionTransformer(**NUMBERS, num_classes=0)
"""


def test_an_encoder_of_an_import_is_loaded_with_it_and_refused_without(pretrain, monkeypatch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ENCODERS)
    monkeypatch.setattr(timm_registry, "_model_entrypoints", dict(timm_registry._model_entrypoints))
    folder = pretrain(f"--import={file}", "--model.name=mine_squares", "--run.steps=1", without="--model")
    assert len(mpp.load_encoder(folder).blocks) == 1
    for name, message in (
        ("oblong", "8 x 4 pixels; it must be a square"),
        ("own", "it must be one with timm's forward_features"),
        ("bare", "it must be .*build_model_with_cfg"),
    ):
        with refused(message):
            pretrain(f"--model.name=mine_{name}", dir=tmp_path / name, without="--model")

    start_a_new_process()
    timm_registry._model_entrypoints.pop("mine_squares")
    for source in (folder, folder / "encoder"):
        with refused(f"{folder} uses custom code: add --import mine.py "):
            mpp.load_encoder(source)
    with refused("mine_squares"):
        mpp.load_encoder((folder / "encoder").rename(tmp_path / "published"))


# --- the registry of evaluations: what it names exists, and a file of a user adds another evaluation ---


def test_a_name_is_given_once(monkeypatch):
    """And again by its own module, as a cell of a notebook does."""
    monkeypatch.setitem(registry.EVALUATIONS, "knn", registry.EVALUATIONS["knn"])
    registry.register(dataclasses.replace(registry.EVALUATIONS["knn"], help="other"))
    assert registry.EVALUATIONS["knn"].help == "other"
    other = Evaluation("knn", "elsewhere", "elsewhere.Config", "frozen features", "another kNN")
    with refused(r"evaluation knn is already that of evaluation\.knn; choose another name"):
        registry.register(other)


NEAREST_CENTROID = ROOT / "tests" / "nearest_centroid.py"
"""The example of evaluation/README.md."""


def test_the_page_shows_the_example():
    _, _, shown = NEAREST_CENTROID.read_text().partition("def evaluate")
    assert shown in (ROOT / "evaluation" / "README.md").read_text()


def test_the_example_of_an_evaluation_is_a_command(tmp_path, monkeypatch, capsys):
    write_cats_and_dogs(tmp_path / "images")
    words = ["--encoder=floor:pixels", "--img_size=32", f"--data.path={tmp_path}/images", "--data.eval_fraction=0.25"]
    words += [f"--import={NEAREST_CENTROID}", "--threads=1", f"--out={tmp_path}/report.json"]
    monkeypatch.setattr(sys, "argv", ["mpp", "centroid", *words])
    cli.main()
    (result,) = read_json(tmp_path / "report.json")["results"]
    assert (result["order"], result["accuracy"], result["depth"], result["outcomes"]) == (2, 1.0, 1, 0)
    assert load_outcomes(tmp_path / "report.json").class_names == ["cat", "dog"]
    monkeypatch.setattr(sys, "argv", ["mpp", "--help", f"--import={NEAREST_CENTROID}"])
    cli.main()
    assert "  centroid     nearest-centroid accuracy\n" in capsys.readouterr().out


def test_the_example_of_an_evaluation_is_compared(tmp_path):
    write_cats_and_dogs(tmp_path / "images")
    (tmp_path / "compare.yaml").write_text(
        f"""
        dir: {tmp_path / "compared"}
        encoders: [{{name: colours, encoder: floor:pixels, options: {{img_size: 32}}}}]
        evaluations: [{{name: nearest centroid, command: centroid, options: {{threads: 1}}}}]
        datasets: [{{name: pets, options: {{data.path: {tmp_path}/images, data.eval_fraction: 0.25}}}}]
        """
    )
    compare.main([f"--import={NEAREST_CENTROID}", "--config", str(tmp_path / "compare.yaml")])
    summary = read_json(tmp_path / "compared/results.json")["summary"]
    cell = summary["comparison"]["colours"]["nearest centroid 2"]
    assert (cell["mean"], cell["std"], cell["count"]) == (1.0, 0.0, 1) and cell["interval"][1] == 1.0


LABELS = np.array([0, 2, 4, 2])
FEATURES = LabelledFeatures(np.zeros((4, 3)), LABELS, np.zeros((4, 3)), LABELS)


@pytest.mark.parametrize(
    "predicted, given",
    [
        (np.int64(2), r"int64 of shape \(\); it must be one for each of 4 test images"),
        (LABELS + 0.3, r"float64 of shape \(4,\); it must be \(4,\) whole numbers, each a class of the labels"),
        (np.array([0, 9, 4, 2]), r"int64 of shape \(4,\); it must be \(4,\) whole numbers, each a class of the labels"),
    ],
)
def test_predictions_that_are_no_classes_are_refused(predicted, given):
    """Each would count as the next class: 1.3 and 1 as class 2."""
    with refused(f"^the array of an evaluation's predictions is {given}"):
        FEATURES.outcomes(predicted)


def test_predicted_numbers_have_the_shape_of_the_labels():
    with refused(r"of shape \(4, 1\); it must be numbers of shape \(4,\)"):
        FEATURES._replace(kind="number").outcomes(LABELS[:, None] + 0.5)


def test_an_accuracy_of_numpy_is_written(tmp_path):
    results = [{"accuracy": np.float32(0.5), "shots": np.int64(5)}, {"accuracy": np.float32("nan")}]
    write_json(tmp_path / "mine.json", {"results": results})
    assert read_json(tmp_path / "mine.json") == {"results": [{"accuracy": 0.5, "shots": 5}, {"accuracy": None}]}

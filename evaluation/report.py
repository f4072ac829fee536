"""A page on a run: the verdict in words, curves, pictures, and the command that repeats it.

    python evaluation/report.py --encoder runs/birds

One self-contained file, `report.html` in the run folder. It is made of metrics.jsonl, verdict.json, the evaluations'
JSON and the pictures of `mpp visualize`. Pictures that do not exist yet, or are older than the encoder, are drawn; the
page says what is missing, and why.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evaluation.config import ContrastiveConfig, ReportConfig, SupervisedConfig, VisualizeConfig
from evaluation.figures.charts import CONFUSION_FILE, plot_series
from evaluation.frozen.results import describe_baselines, way_to_random_weights
from evaluation.frozen.run_images import (
    CLASSIFIERS,
    config_class_of,
    find_run,
    load_unchanged_splits,
    parse_and_load,
    reports_of_training,
)
from evaluation.metrics.scoring import evenly_spaced, kind_of_report, summarize_accuracies
from evaluation.pages.page import (
    Block,
    Page,
    Picture,
    Section,
    Table,
    Text,
    figure_as_picture,
    image_as_picture,
    recorded_versions,
    write_page,
)
from evaluation.visualize import pictures_folder, visualize
from mpp.config import Config, TrainingConfig, flatten, rebuild, require
from mpp.config.imports import COPIES, OPTION, files_in, name_of_import, require_imports
from mpp.config.parsing import as_command_line, parse_saved
from mpp.errors import UserError
from mpp.features.drift import MOVEMENT
from mpp.features.probe import GENERAL_KNN, PIXEL_COLOURS
from mpp.runtime.messages import counted, shortened
from mpp.runtime.start import run_main
from mpp.runtime.weights import BEST, CONFIG, ENCODER, fingerprint, has_encoder
from mpp.training.checkpoint import kept_steps
from mpp.training.history import (
    EVALUATED,
    History,
    after_training_began,
    best_depth,
    last_logged_step,
    last_value,
    lines_with,
    probe_lines,
    series,
    values_by_depth,
)
from mpp.training.log import UNREADABLE_FILE, read_history
from mpp.training.run_folder import CONFIG_FILE, REPORT_PAGE, recorded_commit, saved_settings
from mpp.training.verdict import (
    ACCURACY_BASELINES,
    BETWEEN_PARTS,
    LOSS_FALLS,
    NOT_COOLED_DOWN,
    PROBES,
    name_of_start,
    read_verdict,
)

MAX_POINTS_OF_A_LINE = 200
MAX_STEPS_OF_A_PROBE = 5
MIN_GAIN_OVER_BASELINES = 0.03  # in accuracy
COMMANDS = {Config: "pretrain", ContrastiveConfig: "contrastive", SupervisedConfig: "supervised"}
CURVES = {
    "loss": ("loss", EVALUATED),
    "accuracy (%)": (
        *("accuracy", "heldout/accuracy", "heldout/two_nearest", "heldout/nearest", "heldout/most_frequent"),
        *ACCURACY_BASELINES,
    ),
    "mean average precision (%)": ("heldout/macro_map",),
    "explained variance (R2)": ("heldout/r2",),
    "deviation over patches": ("target_deviation", "prediction_deviation"),
    "rank of the targets": ("target_rank",),
    "learning rate": ("optim/lr",),
    "gradient norm": ("optim/grad_norm",),
    "images/s": ("speed/images_per_second",),
    "waiting for data (%)": ("speed/data_wait",),
}
"""Label of a chart over steps -> names of its scalars."""
PROBES_SHOWN = {
    "knn": "kNN accuracy (%)",
    "agreement": "neighbour agreement (%)",
    GENERAL_KNN: "kNN of general images (%)",
    "features/rank": "effective rank",
    MOVEMENT: "movement of weights (%)",
}
"""Group of scalars by depth -> label of its chart."""


def report(config: ReportConfig) -> Path:
    """Write the page on a run, and return its path.

    Raises:
        UserError: there is no run, or it has logged nothing.
    """
    folder = find_run(config.encoder)
    require(folder is not None, "encoder", config.encoder, "the folder of a run")
    require_imports(folder)
    history = read_history(folder)
    require(len(history) > 0, "encoder", folder, "a run with logged metrics: its metrics.jsonl is empty or missing")
    path = Path(config.out or folder / REPORT_PAGE)
    require(not path.is_dir(), "out", path, "a file")
    start = name_of_start(saved_settings(folder)["model"].get("init_from"))
    sections = [
        Section("curves", "Curves", curve_blocks(history), in_columns=True),
        Section("features", "Features, by the probe", feature_blocks(history, start), in_columns=True),
        Section("evaluations", "Evaluation of the features", evaluation_blocks(folder)),
        Section("pictures", "Pictures of held-out images, weights and features", picture_blocks(config, folder)),
        Section("settings", "Settings, and versions", settings_blocks(folder)),
    ]
    points = verdict_points(folder, history)
    write_page(path, Page(str(folder), describe_run(folder, history), points, warnings_of(folder), sections))
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, one file")
    return path


# --- the head of the page ---


def describe_run(folder: Path, history: History) -> str:
    """The model, its training, its images, and how long it was trained."""
    settings, verdict = saved_settings(folder), read_verdict(folder)
    objective = settings["objective"].get("name")
    method = f"pre-trained by {objective} ({settings['network'].get('name', 'predictor')})" if objective else "trained"
    hours = last_value(history, "speed/hours")
    parts = [
        verdict.get("model") or settings["model"].get("name"),
        f"{method} on {settings['data'].get('path') or 'the birds of mpp'}",
        verdict.get("images"),
        f"{last_logged_step(history):,} of {settings['run'].get('steps', 0):,} steps "
        f"of {settings['optim'].get('global_batch_size', '?')} images",
        hours and f"{hours:.3g} hours of training, with its evaluations",
    ]
    return "; ".join(map(str, filter(None, parts)))


def verdict_points(folder: Path, history: History) -> list[tuple[str, str]]:
    """Sentences of the verdict, each with the section of the page that shows it, and next steps, which have none."""
    line = read_verdict(folder).get("line", "the run was not evaluated, or verdict.json is gone")
    parts = [part for part in line.split(BETWEEN_PARTS) if not part.startswith("warnings")]  # they have their own place
    done, steps = last_logged_step(history), saved_settings(folder)["run"].get("steps", 0)
    if done < steps:
        parts.insert(0, f"the run is not finished: it logged {done:,} of {steps:,} steps")
        advice = ["the command that started the run continues it"]
    else:
        advice = next_steps(folder, history, parts)
    points = [(part, "features" if part.startswith(tuple(PROBES.values())) else "curves") for part in parts]
    return points + [(f"Next: {each}", "") for each in advice]


def warnings_of(folder: Path) -> list[str]:
    """The warnings of the last verdict, and images that could not be decoded."""
    warnings = [
        f"{each['check']} (since step {each['step']}): {each['message']}"
        for each in read_verdict(folder).get("warnings", [])
    ]
    file = folder / UNREADABLE_FILE
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    unreadable = list(dict.fromkeys(lines))  # processes may name the same
    if unreadable:
        several = counted(len(unreadable), "image")
        warnings.append(f"{several} could not be decoded, others were taken instead: {shortened(unreadable)}")
    return warnings


# --- next steps ---


def next_steps(folder: Path, history: History, parts: Sequence[str]) -> list[str]:
    """Advice on how to continue after a finished run.

    Args:
        parts: of the verdict.
    """
    reasons = [part for part in parts if part.startswith((LOSS_FALLS, NOT_COOLED_DOWN))]
    advice = [f"train longer ({', '.join(reasons)}): {describe_growth(folder)}"] if reasons else []
    if config_class_of(saved_settings(folder)) in CLASSIFIERS:
        return [*advice, f"predict new images: mpp predict --classifier {folder} --data.path NEW_IMAGES"]
    advice += advice_on_features(folder, history)
    return advice or [
        f"evaluate the features with labels (mpp fewshot --encoder {folder}), or fine-tune (mpp finetune)"
    ]


def describe_growth(folder: Path) -> str:
    """The way to continue a finished run, by its schedule."""
    config = read_settings(folder)
    if config is None or config.is_fine_tuning:
        return "the same command with a larger run.steps and another run.dir"
    steps = config.run.steps
    stable = config.optim.stable_steps(steps)
    if stable not in kept_steps(folder):
        start = shlex.quote(str(folder))
        begin = f"begin a new run from this encoder (--model.init_from {start} --run.dir NEW)"
        return f"{begin}; only optim.schedule wsd continues"
    trunk = shlex.quote(f"{folder}@{stable}")
    branch = f"--run.branch_from {trunk} --run.dir NEW --optim.schedule wsd --run.steps N"
    return f"the same command with a larger run.steps; cooled down: {branch}" if stable == steps else branch


def advice_on_features(folder: Path, history: History) -> list[str]:
    """Advice drawn from the probe, where the features are hardly above their baselines."""
    group, lines = probe_lines(history)
    if not after_training_began(lines) or lines[0]["step"] > 0:
        return []
    baseline = max(best_depth(lines[0], group)[1], lines[0].get(f"{group}/{PIXEL_COLOURS}", 0))
    if baseline + MIN_GAIN_OVER_BASELINES >= 1:
        return [
            f"the probe is saturated: the start or pixel colours already reach {baseline:.1%}, so it cannot tell "
            "features apart; evaluate with harder labels (--data.path, --data.label_column)"
        ]
    gain = best_depth(lines[-1], group)[1] - baseline
    if gain < MIN_GAIN_OVER_BASELINES:
        better = "hardly better" if gain > 0 else "no better"
        return [
            f"the features are {better} than the start or pixel colours: more images, more steps or another "
            f"objective; they may still fine-tune well (mpp finetune --encoder {folder})"
        ]
    return []


# --- curves ---


def curve_blocks(history: History) -> list[Block]:
    """The charts of CURVES that the run has logged since training began."""
    trained = after_training_began(history)
    blocks: list[Block] = []
    for label, scalars in CURVES.items():
        lines = {}
        for name in scalars:
            points = series(trained, name)
            lines[name] = dict(points[place] for place in evenly_spaced(len(points), MAX_POINTS_OF_A_LINE))
        blocks += chart(label, lines)
    return blocks


def feature_blocks(history: History, start: str) -> list[Block]:
    """Each probe by depth: before training, at some steps and at the last, and of pixel colours.

    Args:
        start: the name of the weights at step 0: see `name_of_start`.
    """
    blocks: list[Block] = []
    for group, label in PROBES_SHOWN.items():
        probed = lines_with(history, group)
        by_depth = {}
        for place in evenly_spaced(len(probed), MAX_STEPS_OF_A_PROBE):
            step = int(probed[place]["step"])
            by_depth[f"after {counted(step, 'step')}" if step else start] = values_by_depth(probed[place], group)
        if probed and f"{group}/{PIXEL_COLOURS}" in probed[0]:
            floor = probed[0][f"{group}/{PIXEL_COLOURS}"]
            by_depth["pixel colours"] = dict.fromkeys(values_by_depth(probed[0], group), floor)
        blocks += chart(label, by_depth, "depth (blocks)")
    return blocks or [Text("kNN, agreement, rank: not probed (probe.every)")]


def chart(label: str, lines: dict[str, dict[int, float]], x_label: str = "steps") -> list[Picture]:
    """A chart of lines, name -> x -> y; none where no line has a point."""
    drawn = {name: line for name, line in lines.items() if line}
    return [figure_as_picture(plot_series(drawn, label, x_label), label)] if drawn else []


# --- results of evaluations ---


def evaluation_blocks(folder: Path) -> list[Block]:
    """A table of the results of the evaluation commands, and their confusion matrices.

    A report without a digest of its weights counts as the run's; one of other weights is not shown.
    """
    rows, matrices, problems = [], [], []
    weights = {fingerprint(folder / name) for name in (ENCODER, BEST) if has_encoder(folder / name)}
    for file in [*reports_of_training(folder), *sorted((folder / "evaluation").glob("*.json"))]:
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            protocol = report.get("protocol") or {}
            known = None if protocol.get("checkpoint") else protocol.get("weights")
            if known and weights and known not in weights:  # the run was trained again, or longer
                problems.append(Text(f"{file.name}: it is of other weights than those of the run now; evaluate again"))
                continue
            rows += rows_of_evaluation(file, report)
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            problems.append(Text(f"{file.name}: it is not a report of an evaluation"))
            continue
        confusion = file.with_name(file.stem + CONFUSION_FILE)
        if confusion.is_file():
            matrices.append(image_as_picture(confusion, f"Confusion matrix of {file.stem}"))
    if not rows:
        return [*problems, Text(f"Few-shot, linear probe: not run yet (mpp fewshot --encoder {folder})")]
    value = "value (95% interval over images)"
    headings = ["evaluation", "case", "score", value, "without an image", "random weights"]
    return [Table(headings, rows, "Results of the evaluation commands"), *matrices, *problems]


def rows_of_evaluation(file: Path, report: dict[str, Any]) -> list[list[str]]:
    """A row for each case of an evaluation's report."""
    seeded = [result for result in report["results"] if "seed" in result]
    kind, way = kind_of_report(report), way_to_random_weights(report)
    of_random = report.get("baselines", {}).get("random weights", {}).get("summary", {})
    not_evaluated = f"not evaluated ({way})" if way else "-"
    rows = []
    for case, scores in (report.get("summary") or summarize_accuracies(seeded, "seed")).items():
        random = kind.text_of_scores(of_random[case]) if case in of_random else not_evaluated
        value, baselines = kind.text_of_scores(scores), describe_baselines(report)
        name = file.stem if report.get("protocol", {}).get("test", True) else f"{file.stem} (training images)"
        rows.append([name, case, kind.score_title, value, baselines, random])
    return rows


# --- pictures ---


def picture_blocks(config: ReportConfig, folder: Path) -> list[Block]:
    """The pictures of `mpp visualize`: those in the run folder that are newer than the encoder, the others drawn."""
    encoder = folder / ENCODER / CONFIG
    if not encoder.is_file():
        return [Text("Pictures: there is no encoder yet; it is written when the run ends")]
    settings = rebuild(VisualizeConfig(), flatten(config) | {"encoder": str(folder), "out": None})
    files = {name: pictures_folder(settings) / f"{name}.png" for name in settings.pictures}

    def is_current(name: str) -> bool:
        return files[name].is_file() and files[name].stat().st_mtime >= encoder.stat().st_mtime

    others = tuple(name for name in files if not is_current(name))
    missing = {}
    try:
        if others:
            splits = load_unchanged_splits(folder, config.data)
            missing = visualize(rebuild(settings, {"pictures": others}), splits)
    except (UserError, OSError) as error:
        missing["Pictures"] = str(error)
    shown = [image_as_picture(files[name], name.replace("_", " ")) for name in files if is_current(name)]
    return [*shown, *(Text(f"{name}: {reason}") for name, reason in missing.items())]


# --- settings ---


def settings_blocks(folder: Path) -> list[Block]:
    """The command that repeats the run, where one does; all settings; and the versions of this process."""
    config = read_settings(folder)
    versions = ", ".join(f"{name} {version}" for name, version in recorded_versions().items())
    return [
        *([Text(command_to_repeat(config, folder), code=True)] if type(config) in COMMANDS else []),
        Text(f"{CONFIG_FILE} in the run folder. This page was written by {versions}."),
        Text((folder / CONFIG_FILE).read_text(encoding="utf-8", errors="replace"), code=True),
    ]


def read_settings(folder: Path) -> TrainingConfig | None:
    """The settings of a run. None: they are of another version of mpp."""
    config_class = config_class_of(saved_settings(folder))
    with suppress(UserError):
        return config_class and parse_saved(config_class, folder / CONFIG_FILE)
    return None


def command_to_repeat(config: TrainingConfig, folder: Path) -> str:
    """The command that repeats a run by its config.yaml, in a folder next to its own.

    A branch is repeated from its first step: the bits are the same, and its trunk may be gone.
    """
    changes: dict[str, Any] = {"run.dir": f"{folder}_again"}
    if config.run.branch_from is not None:
        changes["run.branch_from"] = None
    if recorded_commit(folder) is not None:
        changes["data.revision"] = recorded_commit(folder)
    imports = dict.fromkeys(f"{OPTION}={name_of_import(file)}" for file in files_in(folder / COPIES))
    words = [*imports, f"--config={folder / CONFIG_FILE}", *as_command_line(changes)]
    return shlex.join(["mpp", COMMANDS[type(config)], *words])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a page with the settings of the command line, or of `arguments`."""
    # without its images a run still has curves, so other images than the run's are not refused here
    config, _ = parse_and_load(ReportConfig, arguments, compare=False)
    report(config)


if __name__ == "__main__":
    run_main(main)

"""Settings of commands that compare: encoders with each other, mpp with other code."""

from dataclasses import dataclass, field
from typing import Any, Literal

from evaluation.config.frozen import Integers, Precision
from mpp.config import Settings, require, setting

Options = dict[str, Any]
"""Settings of a command by dotted name."""
TrainingCommand = Literal["pretrain", "supervised", "contrastive"]
MEASURED_AXES = {"compute": "training compute (PFLOP)", "total compute": "compute of training and fine-tuning (PFLOP)"}
"""Values of a question's `x` that are measured, and the labels of their axes."""


@dataclass(frozen=True)
class ThroughputConfig(Settings):
    """Throughput of training, compared with other code and the limits of the machine."""

    model: str = "vit_tiny_patch16_224"
    """Name of a timm VisionTransformer."""
    img_size: int | None = setting(None, at_least=1)
    """Side of its images, a multiple of its patch size. null: its own."""
    batch_size: int = setting(16, at_least=1)
    """Images per step."""
    precision: Precision = "auto"
    """Compute type. auto: bf16 where the hardware computes in it."""
    compile: bool = False
    """Compile all models that are trained with torch.compile."""
    rounds: int = setting(15, at_least=1)
    """Measured rounds, after three warm-up rounds."""
    jpeg_side: int = setting(256, at_least=1)
    """Shorter side of the loaded files; `mpp prepare` makes them 256."""
    out: str | None = None
    """JSON file for all figures. null: none."""


@dataclass(frozen=True)
class GpuReportConfig(Settings):
    """Speed and tests of mpp on this machine's GPU in one text file, with recommended settings."""

    out: str = "gpu_report.txt"
    """Text file to write."""
    batch_size: int | None = setting(None, at_least=1)
    """Images per step. null: for each model as many as fit into half of the GPU's free memory."""
    minutes: float = setting(10.0, above=0)
    """Time limit of the whole report in minutes. Parts that do not fit are left out and listed."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device. cpu rehearses the report with tiny models."""


# --- entries of comparisons ---


@dataclass(frozen=True)
class EncoderEntry(Settings):
    """A row of the table."""

    name: str = ""
    """Its name in the table."""
    encoder: str = ""
    """Folder, timm name or baseline; `{seed}` stands for the seed."""
    random: bool = False
    """Take the folder's architecture with random weights."""
    options: Options = field(default_factory=dict)
    """Further settings of every evaluation, which must have them, such as {representation: class} of probes."""
    seeds: tuple[int, ...] = setting((0,), distinct=True)
    """Seeds of encoders that differ in nothing else: the spread is over them."""
    train: TrainingCommand | None = None
    """Command that trains the encoder if it is missing."""
    train_options: Options = field(default_factory=dict)
    """Settings of that command. Encoders of the comparison that it begins from (model.init_from), continues
    (run.branch_from) or learns from are trained first."""
    compute: int | float | None = setting(None, above=0)  # digests have it as it is written
    """PFLOP that the training executes; the number of steps follows. null: as many steps as its settings say."""


@dataclass(frozen=True)
class EvaluationEntry(Settings):
    """A way to evaluate encoders."""

    name: str = ""
    """Its name in the table."""
    command: str = ""
    """Name of a registered evaluation."""
    options: Options = field(default_factory=dict)
    """Its settings. With data.path it is on these images, once, whatever the datasets. Of a `config` for images of
    another path, the settings of images are left out."""


@dataclass(frozen=True)
class DatasetEntry(Settings):
    """Labelled images."""

    name: str = ""
    """Their name in the table."""
    options: Options = field(default_factory=dict)
    """Settings of every evaluation on them, such as {data.path: ...}."""
    group: str | None = None
    """Group whose mean is reported too (VTAB: natural, specialised, structured)."""


@dataclass(frozen=True)
class Question(Settings):
    """Some of the encoders by some of the evaluations: a table and a plot."""

    name: str = ""
    """File name of the plot."""
    title: str = ""
    """The question in words."""
    encoders: tuple[str, ...] | dict[str, float] | None = None
    """Names of rows; with numbers, the plot is against these. null: all."""
    evaluations: tuple[str, ...] | None = None
    """Names of evaluations. null: all."""
    plot: Literal["bars", "lines", "depth"] = "bars"
    """bars; lines: against x; depth: against the encoder's depth, on the dev split."""
    x: str = ""
    """Meaning of the numbers of `encoders`. Instead of numbers: `compute`, the PFLOP that training the encoder executed
    (random weights: 0), or `total compute`, those of its fine-tuning too; the choice of a rate is left out."""
    lines: dict[str, Any] | None = None
    """Lines of the plot: name and encoders. Encoders without compute, such as baselines, are horizontal lines. null: a
    line for each case of an evaluation (5 shots, 25 shots)."""

    def check(self):
        require("/" not in self.name, "name", self.name, "a name of a file, without /")
        for name in ("encoders", "evaluations"):
            require(getattr(self, name) not in ((), {}), name, (), "null (all), or not empty")
        places = list(self.encoders.values()) if isinstance(self.encoders, dict) else []
        are_numbers = all(type(place) in (int, float) for place in places)
        require(are_numbers, "encoders", self.encoders, "{name: number}, places on the x-axis")
        has_places = bool(places) or self.x in MEASURED_AXES
        require(self.plot != "lines" or has_places, "encoders", self.encoders, "{name: number} to plot lines")


@dataclass(frozen=True)
class CompareConfig(Settings):
    """A comparison of encoders."""

    dir: str = "runs/compare"
    """Folder for results.json, table.md, table.csv, the plots, and each evaluation's report."""
    encoders: tuple[dict[str, Any], ...] = ()
    """Rows: {name, encoder, random, options, seeds, train, train_options, compute}; name and encoder are needed.
    train is pretrain, supervised or contrastive."""
    evaluations: tuple[dict[str, Any], ...] = ()
    """Evaluations: {name, command, options}; command is fewshot, knn, linear, segmentation, finetune, masked, or your
    own."""
    datasets: tuple[dict[str, Any], ...] = ()
    """Datasets: {name, options, group}; options are data.path and other data settings (none: the package's birds).
    Files are read like the encoder's own training images, with its channels and range, unless options set these."""
    questions: tuple[dict[str, Any], ...] = ({"name": "comparison"},)
    """Questions: {name, title, encoders, evaluations, plot, x, lines}; each gets a table and a plot. plot is bars,
    lines or depth; x is compute, or total compute (with fine-tuning's). Only the evaluations they need are computed."""
    extends: str | None = None
    """results.json of another comparison: results with the same digest are taken from there instead of computed
    again."""
    tabulate: bool = False
    """Only write the results so far, of a comparison that is still running."""


@dataclass(frozen=True)
class SweepConfig(Settings):
    """Trials of a training, each evaluated on a dev split, to choose the best settings. Test images are not used."""

    dir: str = "runs/sweep"
    """Folder for results.json, table.md, the plot, and each trial's run and reports."""
    train: TrainingCommand = "pretrain"
    """Command that trains."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that command in all trials; `config` is a file, or several. With data.eval_split null the held-out
    images are the dev split, a part of the training images. Otherwise trials are not evaluated while they train."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """Settings and their values: {optim.lr: [5.0e-3, 1.0e-2]}. Each combination is a trial."""
    points: tuple[dict[str, Any], ...] = ()
    """Further trials, each a mapping of settings. With run.seed, a point is one more seed of that trial."""
    compute: float | None = setting(None, above=0)
    """Compute of each trial in PFLOP; its number of steps follows. null: run.steps of settings."""
    seeds: Integers = setting((0,), at_least=0, distinct=True)
    """Seeds of each trial of the grid, and of points without run.seed: the spread is over them."""
    evaluate: dict[str, Any] | tuple[dict[str, Any], ...] = field(default_factory=lambda: {"command": "linear"})
    """Evaluation that ranks the trials: {command, options}, or several, of which the first one ranks. It needs a
    setting `test`, which is false here; with data.eval_split null any evaluation is allowed, on the held-out images."""
    extends: str | None = None
    """results.json of a comparison or sweep: results with the same digest are taken from there."""
    tabulate: bool = False
    """Only write the results so far, of a sweep that is still running."""

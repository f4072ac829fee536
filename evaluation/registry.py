"""Evaluations by name: the console and comparisons find them here.

One file and one line add an evaluation; see evaluation/README.md, and tests/nearest_centroid.py for an example.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from mpp.errors import UserError

EvaluationKind = Literal["frozen features", "fine-tuning", "masked patches"]
"""An evaluation's way of using an encoder. The kind decides which settings its config has besides `encoder` and `out`:

- frozen features: evaluates any encoder, and baselines (floor:NAME); has `random`, `seed` and `data`.
- fine-tuning: trains any encoder that has weights; has `init`, `data` and `run`, with `run.seed`.
- masked patches: evaluates a pre-training run, whose folder has all settings; has none. For comparisons: no command.
"""


@dataclass(frozen=True)
class Evaluation:
    """A command that evaluates an encoder. Modules are given as strings, so that `mpp --help` imports none."""

    name: str
    """Name of the command, and of `command` in a comparison's evaluations."""
    module: str
    """Module with `main(arguments)`, which reads the command line, and `run(config)`, which evaluates.

    `run` writes a report to `config.out` as JSON and returns it: {results: [{accuracy, ...}], protocol: {...}}. A
    result may have `seed` and `depth`, and `case`, which a comparison shows as a column of its own.
    """
    config: str
    """Dataclass of its settings, as MODULE.NAME."""
    kind: EvaluationKind
    help: str
    """One line for `mpp --help`."""
    case_key: str = "case"
    """Key of a result that a comparison shows as its case if the result has no `case`: fewshot's is `shots`."""
    revision: int = 0
    """Raised, with the reason next to it, when the same settings give other figures: digests have it where it is not
    0, so that a comparison takes no earlier result."""

    def config_class(self) -> type:
        """The dataclass of its settings."""
        module, _, name = self.config.rpartition(".")
        return getattr(import_module(module), name)

    def run(self, config: Any) -> dict[str, Any]:
        """Evaluate, write the report to `config.out`, and return it."""
        return import_module(self.module).run(config)


INCLUDED = (
    Evaluation(
        "fewshot",
        "evaluation.fewshot",
        "evaluation.config.FewshotConfig",
        "frozen features",
        "few-shot accuracy of frozen features",
        case_key="shots",
    ),
    Evaluation(
        "knn",
        "evaluation.knn",
        "evaluation.config.KnnConfig",
        "frozen features",
        "kNN accuracy of frozen features",
        case_key="neighbours",
    ),
    Evaluation(
        "linear",
        "evaluation.linear",
        "evaluation.config.LinearConfig",
        "frozen features",
        "linear probe of frozen features",
    ),
    Evaluation(
        "finetune",
        "evaluation.finetune",
        "evaluation.config.FinetuneConfig",
        "fine-tuning",
        "fine-tune on labelled images",
    ),
    Evaluation(
        "masked",
        "evaluation.masked",
        "evaluation.config.MaskedConfig",
        "masked patches",
        "accuracy on masked patches, next to trivial baselines",
    ),
    Evaluation(
        "segmentation",
        "evaluation.segmentation",
        "evaluation.config.SegmentationConfig",
        "frozen features",
        "evaluate patch features on segmentation masks",
    ),
)
EVALUATIONS: dict[str, Evaluation] = {evaluation.name: evaluation for evaluation in INCLUDED}
"""All evaluations by name, in the order of `mpp --help`."""


def register(evaluation: Evaluation) -> None:
    """Add an evaluation.

    Raises:
        UserError: another evaluation has its name.
    """
    known = EVALUATIONS.get(evaluation.name, evaluation)
    if (known.module, known.config) != (evaluation.module, evaluation.config):  # else a notebook's cell ran again
        raise UserError(f"evaluation {evaluation.name} is already that of {known.module}; choose another name")
    EVALUATIONS[evaluation.name] = evaluation


def register_probe(
    name: str,
    module: str,
    config_class: type,
    evaluate: Callable[[Any, Any], list[dict]],
    help: str,
    group_by: str,
    kinds: Sequence[str] = ("class",),
) -> tuple[Callable, Callable]:
    """Add a probe of frozen features, and return what its module needs: `run` and `main`.

    Args:
        module: `__name__` of the file that has the config class.
        config_class: a `ProbeConfig`.
        evaluate: features and settings to results; it, `group_by` and `kinds` are as of `run_probe`.
        help: one line for `mpp --help`.
    """

    def commands() -> tuple[Callable, Callable]:
        results = import_module("evaluation.frozen.results")  # with torch
        return results.commands_of_probe(name, config_class, evaluate, group_by, kinds)

    config = f"{module}.{config_class.__name__}"
    register(Evaluation(name, module, config, "frozen features", help, case_key=group_by))
    return lambda *arguments: commands()[0](*arguments), lambda *arguments: commands()[1](*arguments)

"""Evaluations by name: the console and comparisons find them here.

One file and one line add an evaluation; see evaluation/README.md for an example.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from mpp.errors import UserError

EvaluationKind = Literal["frozen features", "fine-tuning", "masked patches"]
"""How an evaluation sees an encoder, and so the settings that its config has beside `encoder` and `out`.

frozen features: any encoder, floors too; `random`, `seed`, `data`. fine-tuning: any encoder with weights; `init`,
`data`, `run` and its seed. masked patches: a pre-training run, whose folder says all.
"""


@dataclass(frozen=True)
class Evaluation:
    """A command that evaluates an encoder. Modules stand here by name: a command is imported when it is used."""

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
    """Entry of a result that is its case where it has no `case`, such as the number of shots."""

    def config_class(self) -> type:
        """The dataclass of its settings."""
        module, _, name = self.config.rpartition(".")
        return getattr(import_module(module), name)

    def run(self, config: Any) -> dict[str, Any]:
        """Evaluate; the report, which is also written to `config.out`."""
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
        "accuracy on masked patches, beside trivial baselines",
    ),
    Evaluation(
        "segmentation",
        "evaluation.segmentation",
        "evaluation.config.SegmentationConfig",
        "frozen features",
        "judge features of patches by masks",
    ),
)
EVALUATIONS: dict[str, Evaluation] = {evaluation.name: evaluation for evaluation in INCLUDED}
"""All evaluations by name, in the order of `mpp --help`."""


def register(evaluation: Evaluation) -> None:
    """Add an evaluation.

    Raises:
        UserError: another evaluation has its name.
    """
    known = EVALUATIONS.setdefault(evaluation.name, evaluation)
    if known != evaluation:
        raise UserError(f"evaluation {evaluation.name} is already that of {known.module}; choose another name")

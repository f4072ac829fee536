"""Sentences below the table of a question: what ± is over, baselines that are of no encoder, what is left out."""

from evaluation.comparison.entries import MEASURED_AXES, Question
from evaluation.comparison.reports import ResultRow, kind_of_scores
from evaluation.comparison.rows import MASKED_BASELINES, count_seeds, grouped, of_kind, unique
from evaluation.comparison.tables import x_of

SAME_TASK = 1e-6
"""Largest difference of a baseline's accuracies on the same masked patches."""


def remarks_on(rows: list[ResultRow], question: Question) -> list[str]:
    """All sentences on the rows of a question."""
    return [
        *describe_spread(rows),
        *describe_label_baselines(rows),
        *describe_masked_baselines(rows),
        *describe_other_tasks(rows),
        *describe_uncounted(rows, question),
        *describe_not_plotted(rows, question),
    ]


def describe_spread(rows: list[ResultRow]) -> list[str]:
    """A sentence on what ± is over, where an encoder has several results: seeds, draws, or both together."""
    tested = of_kind(rows, "test")
    has_seeds = any(count_seeds(same) > 1 for same in grouped(tested, "encoder").values())
    drawn = []
    for (evaluation, *_), same in grouped(tested, "evaluation", "encoder", "encoder_seed").items():
        if len(unique(same, "seed")) > 1:
            drawn.append(evaluation)
    names = ", ".join(dict.fromkeys(drawn))
    over = ["over seeds"] if has_seeds else []
    if drawn:
        over.append(f"over {'seeds and draws' if has_seeds else 'draws'} in {names}")
    return [f"± is the standard deviation {', '.join(over)}."] if over else []


def describe_label_baselines(rows: list[ResultRow]) -> list[str]:
    """A sentence for each dataset whose rows have baselines: published rows of earlier versions have none."""
    sentences = []
    for (dataset,), of_dataset in grouped(of_kind(rows, "test"), "dataset").items():
        reached = ", ".join(label_baselines(of_dataset))
        if reached:
            sentences.append(f"Baselines on {dataset}, which use no image: {reached}.")
    return sentences


def label_baselines(rows: list[ResultRow]) -> list[str]:
    """The score of each baseline of the rows, in words: `largest class 25.3%`."""
    described = []
    for row in rows:
        kind = kind_of_scores([row])
        described += [kind.describe_baseline(name, value) for name, value in row.get("baselines", {}).items()]
    return list(dict.fromkeys(described))


def describe_masked_baselines(rows: list[ResultRow]) -> list[str]:
    """A sentence for each evaluation of masked patches: the accuracies of its baselines, over all encoders' masks."""
    baselines = [row for row in of_kind(rows, "test") if row["case"] in MASKED_BASELINES]
    sentences = []
    for (evaluation,), of_evaluation in grouped(baselines, "evaluation").items():
        reached = ", ".join(masked_baselines(of_evaluation))
        sentences.append(f"Baselines of {evaluation}, which need no encoder: {reached}.")
    return sentences


def describe_other_tasks(rows: list[ResultRow]) -> list[str]:
    """A sentence for each evaluation of masked patches whose encoders have different ones: its baselines differ."""
    sentences = []
    for (evaluation,), of_evaluation in grouped(of_kind(rows, "test"), "evaluation").items():
        by_case = grouped([row for row in of_evaluation if row["case"] in MASKED_BASELINES], "case")
        accuracies = [[row["accuracy"] for row in of_case] for of_case in by_case.values()]
        if any(max(of_case) - min(of_case) > SAME_TASK for of_case in accuracies):
            reached = ", ".join(masked_baselines(of_evaluation))
            sentences.append(
                f"Accuracies of {evaluation} are not comparable: masks, images or colours differ between these "
                f"encoders, so the same prediction scores differently ({reached})."
            )
    return sentences


def masked_baselines(rows: list[ResultRow]) -> list[str]:
    """The accuracy of each baseline of masked patches among the rows, in words."""
    baselines = [row for row in rows if row["case"] in MASKED_BASELINES]
    return [f"{case} {share_range(of_case)}" for (case,), of_case in grouped(baselines, "case").items()]


def share_range(rows: list[ResultRow]) -> str:
    """The accuracies in percent, from the lowest to the highest."""
    accuracies = [row["accuracy"] for row in rows]
    low = f"{100 * min(accuracies):.1f}"
    high = f"{100 * max(accuracies):.1f}"
    return f"{low}%" if low == high else f"{low} to {high}%"


def describe_not_plotted(rows: list[ResultRow], question: Question) -> list[str]:
    """A sentence on the encoders of the table that a plot of lines leaves out: without compute, or on none of them."""
    if question.plot != "lines":
        return []
    tested = of_kind(rows, "test")
    if question.lines is None:
        drawn = {row["encoder"] for row in tested if x_of(row, question) is not None}
        reason = "their compute is unknown"
    else:
        drawn = {encoder for encoders in question.lines.values() for encoder in encoders}
        reason = "they are on none of its lines"
    left_out = [encoder for encoder in unique(tested, "encoder") if encoder not in drawn]
    return [f"Not in the plot, since {reason}: {', '.join(left_out)}."] if left_out else []


def describe_uncounted(rows: list[ResultRow], question: Question) -> list[str]:
    """A sentence on the published models whose training no compute has, where the question plots against compute."""
    began = {row["encoder"]: row["training_without"] for row in rows if row.get("training_without")}
    if question.x not in MEASURED_AXES or not began:
        return []
    named = "; ".join(f"{encoder} ({', '.join(models)})" for encoder, models in began.items())
    return [f"Compute is without that of the published models that an encoder builds on: {named}."]

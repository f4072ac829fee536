"""Histories of a run: the lines of its metrics.jsonl, as the warnings, the verdict and the report read them.

A line is a dictionary of scalars with `step`. The line of step 0 is of the untrained encoder.
"""

from collections.abc import Sequence

Line = dict[str, float]
History = Sequence[Line]

EVALUATED = "heldout/loss"  # every evaluation has it
COPY_BASELINES = ("heldout/nearest", "heldout/two_nearest")
PFLOP = "compute/pflop"
"""Scalar of the operations that training executed so far, in 10^15."""
DEVICE_HOURS = "speed/device_hours"
"""Scalar of the hours that a run has trained, with its evaluations, times its devices: one for each process."""
HOUR = 3600.0  # seconds
RECENT_LINES = 10  # logged steps that show how a run is doing now


def series(history: History, name: str) -> list[tuple[int, float]]:
    """(step, value) of a scalar."""
    return [(int(line["step"]), line[name]) for line in history if name in line]


def last_value(history: History, name: str) -> float:
    """The latest value of a scalar; 0 where it was not logged."""
    values = series(history, name)
    return values[-1][1] if values else 0.0


def last_logged_step(history: History) -> int:
    """The step of the last line; 0 where there is none."""
    return int(history[-1]["step"]) if history else 0


def after_training_began(history: History) -> list[Line]:
    """The lines without the untrained encoder's."""
    return [line for line in history if line["step"] > 0]


def evaluations(history: History) -> list[Line]:
    """The lines of evaluations on the held-out images, which begin after training."""
    return [line for line in history if EVALUATED in line]


def values_by_depth(line: Line, group: str) -> dict[int, float]:
    """Depth -> value of the scalars `GROUP/depth_XX`."""
    prefix = f"{group}/depth_"
    return {int(name.removeprefix(prefix)): value for name, value in line.items() if name.startswith(prefix)}


def best_depth(line: Line, group: str) -> tuple[int, float]:
    """The depth with the largest value, and the value, of a line that has the group: see `lines_with`."""
    return max(values_by_depth(line, group).items(), key=lambda item: item[1])


def probe_lines(history: History) -> tuple[str, list[Line]]:
    """The group of scalars that measures features (`knn`, or `agreement` without labels), and the lines that have it.

    ("", []) where nothing was probed.
    """
    for group in ("knn", "agreement"):
        lines = lines_with(history, group)
        if lines:
            return group, lines
    return "", []


def lines_with(history: History, group: str) -> list[Line]:
    """The lines that have scalars by depth of a group."""
    return [line for line in history if values_by_depth(line, group)]


def has_copy_baseline(line: Line) -> bool:
    """Whether a line has the accuracy of copying neighbours; targets without colours have none."""
    return COPY_BASELINES[1] in line


def copy_baseline(line: Line) -> float:
    """Accuracy of copying the nearest visible patches: the better of the two ways."""
    return max(line[name] for name in COPY_BASELINES)


def copy_baseline_beaten_since(history: History) -> int | None:
    """The step since which every evaluation is above the copy baseline; None: the last one is not, or has none."""
    since = None
    for line in history:
        if has_copy_baseline(line):
            is_above = line["heldout/accuracy"] > copy_baseline(line)
            since = (since or int(line["step"])) if is_above else None
    return since

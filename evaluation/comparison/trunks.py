"""The compute that trunks save: of their branches as separate runs, and as executed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.comparison.cases import Case
from evaluation.comparison.trainings import pflop_without_trunk
from mpp.errors import UserError
from mpp.training.history import PFLOP
from mpp.training.log import last_scalars

Compute = dict[str, float]
"""points, the number of encoders that are evaluated; separate_pflop, the compute of training each separately;
executed_pflop, the compute that was executed."""


@dataclass
class Family:
    """The runs of a trunk's entry and of its branches, over all seeds."""

    trunks: set[Path] = field(default_factory=set)
    points: set[Path] = field(default_factory=set)
    """Runs whose encoders are evaluated; trunks may be among them."""

    def compute(self) -> Compute:
        """The compute of all runs. Points are those that are finished."""
        separate = []
        for run in self.points:
            if (run / "encoder").is_dir():
                with suppress(UserError):  # its metrics are gone
                    separate.append(last_scalars(run, PFLOP)[PFLOP])
        executed = 0.0
        for run in self.trunks | self.points:
            with suppress(UserError):  # it has not begun, or its results are published
                executed += pflop_without_trunk(run)
        return {"points": len(separate), "separate_pflop": sum(separate), "executed_pflop": executed}


def compute_of_trunks(cases: Sequence[Case]) -> dict[str, Compute]:
    """The compute of each trunk with its branches, by the name of its entry; of those that have points."""
    families: dict[str, Family] = {}
    for case in cases:
        encoder = case.encoder
        if encoder.entry.random or not (encoder.trunk or encoder.branches):
            continue
        branch, trunk = (encoder, encoder.trunk) if encoder.trunk else (encoder.branches[0], encoder)
        family = families.setdefault(branch.entry.branch_of, Family())
        family.trunks.add(Path(trunk.settings.run.dir))
        family.points.add(Path(encoder.settings.run.dir))
    computed = {name: family.compute() for name, family in families.items()}
    return {name: compute for name, compute in computed.items() if compute["points"]}


def describe_trunks(trunks: dict[str, Compute]) -> list[str]:
    """A line for each trunk: "trunk, 4 points: 1.9 PFLOP as separate runs, 1.2 executed"."""
    lines = []
    for name, compute in trunks.items():
        separate, executed = (f"{compute[key]:.3g}" for key in ("separate_pflop", "executed_pflop"))
        lines.append(f"{name}, {compute['points']} points: {separate} PFLOP as separate runs, {executed} executed")
    return lines

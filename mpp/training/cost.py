"""The cost of a run so far: the operations that it executed, and the time of its devices."""

from mpp.training.history import History, series

PFLOP = "compute/pflop"
"""Scalar of the operations that training executed so far, in 10^15."""
DEVICE_HOURS = "speed/device_hours"
"""Scalar of the hours that a run has trained, with its evaluations, times its devices: one for each process."""


def describe_cost(history: History) -> str:
    """PFLOP and device-hours of a run so far, such as "0.12 PFLOP, 1.5 device-hours"; "" where neither was logged."""
    parts = []
    for name, unit in ((PFLOP, "PFLOP"), (DEVICE_HOURS, "device-hours")):
        values = series(history, name)
        if values:
            _, latest = values[-1]
            parts.append(f"{latest:.3g} {unit}")
    return ", ".join(parts)

"""What diverged is not tried again: a note in a comparison's folders says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluation.suite.reports import write_json
from mpp.errors import Diverged

DIVERGED = "diverged.json"  # in the folder of a run: by which settings, and how


Known = Callable[[dict[str, Any]], dict[str, Any]]
"""What a note says it is about, in the terms of today's release."""


def told(note: Path, about: dict[str, Any], today: Known) -> str | None:
    """How a training with these settings diverged, as a note has it; None: nothing is known of it."""
    try:
        known = json.loads(note.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return known["diverged"] if today(known["settings"]) == about else None


def once(note: Path, about: dict[str, Any], today: Known, training: Callable[[], Any]) -> None:
    """Train, unless that diverged before: with the same settings it would again, in the same update.

    Raises:
        Diverged: now or then.
    """
    message = told(note, about, today)
    if message is not None:
        raise Diverged(f"{message} ({note} says so; delete it to try again)")
    try:
        training()
    except Diverged as error:
        write_json(note, {"settings": about, "diverged": str(error)})
        raise

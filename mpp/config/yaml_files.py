"""YAML files of settings, as text and as content; a broken file gives a one-line error with line and column."""

from pathlib import Path
from typing import Any

import yaml

from mpp.errors import UserError


def read_yaml(file: Path) -> tuple[str, Any]:
    """Text and content of a YAML file.

    Raises:
        UserError: it is no text, or no YAML; with the file, the line and the problem.
    """
    try:
        text = file.read_text(encoding="utf-8")
        return text, yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file}{describe_problem(error)}") from None


def describe_problem(error: yaml.YAMLError) -> str:
    """Line, column and problem of a YAML error, to follow the file's name."""
    mark = getattr(error, "problem_mark", None)
    place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{place} is not YAML: {problem}"

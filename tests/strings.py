"""Lists the strings that a user sees in `mpp` and `evaluation`: help, errors, warnings, printed lines, pages, plots.

python tests/strings.py [FOLDER]...
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("mpp", "evaluation")
SETTINGS = ("mpp/config", "evaluation/config")
"""Folders where the docstring of a class or an attribute is help."""
SEVERAL_WORDS = re.compile(r"[A-Za-z].*\s.*[A-Za-z]", re.DOTALL)


class ShownString(NamedTuple):
    """A string of the code."""

    place: str
    """FILE:LINE."""
    text: str
    """The string in one line; what an f-string fills in stands in braces."""


def text_of(node: ast.AST) -> str | None:
    """The text of a string or an f-string; None for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
        )
    return None


def docstrings(tree: ast.Module) -> tuple[set[ast.AST], set[ast.AST]]:
    """Strings that are statements: all of them, and those of classes and of their attributes."""
    bare = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and text_of(node.value) is not None}
    of_classes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            of_classes |= {line.value for line in node.body if isinstance(line, ast.Expr)} & bare
    return bare, of_classes


def strings_of(path: Path) -> Iterator[ShownString]:
    """Strings of several words in a file, and docstrings that are help; strings of one word are names."""
    name = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare, of_classes = docstrings(tree)
    left_out = bare - of_classes if name.startswith(SETTINGS) else bare
    inner = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        text = text_of(node)
        if text and node not in left_out and node not in inner and SEVERAL_WORDS.search(text):
            found.append((node.lineno, " ".join(text.split())))
    for line, text in sorted(found):
        yield ShownString(f"{name}:{line}", text)


def shown_strings(folders: Sequence[str] = PACKAGES) -> list[ShownString]:
    """All strings in the files of these folders."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [each for path in files for each in strings_of(path)]


def remarks() -> Iterator[ShownString]:
    """Docstrings and comments of the packages."""
    for path in (path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))):
        found = [(node.lineno, text_of(node)) for node in docstrings(ast.parse(path.read_text(encoding="utf-8")))[0]]
        with tokenize.open(path) as file:
            tokens = list(tokenize.generate_tokens(file.readline))
        found += [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
        for line, text in sorted(found):
            yield ShownString(f"{path.relative_to(ROOT).as_posix()}:{line}", " ".join(text.split()))


if __name__ == "__main__":
    for place, text in shown_strings(sys.argv[1:] or PACKAGES):
        print(f"{place}: {text}")

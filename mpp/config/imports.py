"""Python files of the user: `--import mine.py` registers objectives, patterns, networks and evaluations.

A file is imported once in each process, before settings are read. A run that uses code of the user has copies of all
imported files in `imports/`. They are compared when the run is resumed, and never executed.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import getsourcefile
from pathlib import Path
from types import ModuleType
from typing import Any

from mpp.errors import UserError, one_line

OPTION = "--import"
COPIES = "imports"
"""Folder of a run with copies of the imported files."""
imported: dict[str, bytes] = {}
"""Content of the files that this process imported, when it did: MODULE.py, or PACKAGE/FILE.py for each of a package."""
_modules: dict[str, ModuleType] = {}
"""The modules that this process imported, by the value of the option that imports them in any folder."""


class Registry(dict[str, Any]):
    """Functions and classes by the name that a setting gives them. A name that another module has taken is refused.

    The same module may define it again, as a notebook's cell does.
    """

    def __init__(self, setting: str, parts: dict[str, Any]):
        super().__init__(parts)
        self.setting = setting

    def __missing__(self, name: str) -> Any:
        known = ", ".join(self)
        raise UserError(f"{self.setting} is {name}; it must be one of {known}, or registered by {OPTION} FILE")

    def __setitem__(self, name: str, part: Any) -> None:
        known = self.get(name)
        if known and known.__module__ != part.__module__:
            owner = known.__module__
            raise UserError(f"{self.setting} {name} is already that of {owner}; register yours by another name")
        super().__setitem__(name, part)


def import_words() -> list[str]:
    """The words of a command line that repeat the imports of this process, in any folder."""
    return [f"{OPTION}={name}" for name in _modules]


def take_imports(arguments: Sequence[str]) -> list[str]:
    """Carry out the imports of a command line, and return its other words.

    Raises:
        UserError: a file that is missing or fails.
    """
    others = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option == OPTION:
            import_code(name if equals else next(words, ""))
        else:
            others.append(word)
    return others


def import_code(name: str) -> None:
    """Import a file (`mine.py`, `folder/mine.py`) or a module by its dotted name (`mine`, `package.targets`).

    Raises:
        UserError: a file that is missing or fails, whose name is that of another module, or that has changed since.
    """
    is_file = name.endswith(".py")
    if is_file:
        name = str(Path(name).resolve())
    try:
        if name not in _modules:
            _modules[name] = import_file(Path(name)) if is_file else import_module(name)
        files = files_of(_modules[name])
    except Exception as error:
        raise UserError(f"{OPTION} {name} failed: {type(error).__name__}: {one_line(error)}") from error
    if files | imported != imported | files:
        raise UserError(f"{name} has changed since this process imported it; start the process again")
    imported.update(files)


def import_file(path: Path) -> ModuleType:
    """Import a file as a module of its name, so that its classes can be found and pickled by name."""
    name = path.stem
    spec = spec_from_file_location(name, path)
    known = find_spec(name) or spec
    if Path(known.origin or path).resolve() != path:
        raise UserError(f"{name} is the name of another module, {known.origin}; rename the file")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def files_of(module: ModuleType) -> dict[str, bytes]:
    """Content of a module's Python file, or of all of a package."""
    file = Path(getsourcefile(module))
    if file.name != "__init__.py":
        return {f"{module.__name__}.py": file.read_bytes()}
    return {f"{module.__name__}/{name}": content for name, content in files_in(file.parent).items()}


def files_in(folder: Path) -> dict[str, bytes]:
    """Content of the Python files in a folder, by their places in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}


def require_imports(folder: Path) -> None:
    """Refuse to read a run that was started with code of the user, unless files of the same name are imported here.

    Raises:
        UserError: the option to add.
    """
    for name in files_in(folder / COPIES):
        if name not in imported:
            raise UserError(
                f"{folder} uses custom code: add {OPTION} {name_of_import(name)} (copies are never executed)"
            )


def name_of_import(copy: str) -> str:
    """The value of the option that imports a copied file, without its folder: mine.py, package, package.module."""
    name = copy.partition("/")[0]
    return name.removesuffix(".py") if name.count(".") > 1 else name


def changed_imports(folder: Path, files: dict[str, bytes]) -> list[str]:
    """Names of files that are others than those that a run was started with, are missing, or are additional."""
    copies = files_in(folder / COPIES)
    return [name for name in copies | files if copies.get(name) != files.get(name)]

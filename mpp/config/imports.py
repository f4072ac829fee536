"""Python files of the user: `--import mine.py` registers objectives, patterns, networks and evaluations.

A file is imported once in each process, before settings are read. Runs save its name and digest (`imports.json`), and
never the code: the content of a run folder is compared, not executed.
"""

import hashlib
import importlib
import importlib.util
import json
import site
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from mpp.errors import UserError, one_line

PartT = TypeVar("PartT")

OPTION = "--import"
IMPORTS_FILE = "imports.json"


class UserImport(NamedTuple):
    """A file or package that the user imported."""

    name: str
    """As on the command line: a file or the dotted name of a module."""
    sha256: str
    """Digest of the file; of a package, of all its Python files."""


class Registry(dict[str, PartT]):
    """Functions and classes by the name that a setting gives them. A name that is taken is refused.

    The same definition may come again, as from a notebook's cell.

    Args:
        setting: that names one of them.
        reserved: further names that are taken.
    """

    def __init__(self, setting: str, parts: Mapping[str, PartT], reserved: Sequence[str] = ()):
        super().__init__(parts)
        self.setting = setting
        self.reserved = reserved

    def __setitem__(self, name: str, part: PartT) -> None:
        known = self.get(name)
        is_taken = name in self.reserved or (known is not None and place_of(known) != place_of(part))
        if is_taken:
            owner = "mpp" if known is None else place_of(known)[0]
            raise UserError(f"{self.setting} {name} is already that of {owner}; register yours by another name")
        super().__setitem__(name, part)


def place_of(part: Any) -> tuple[str, str]:
    """Module and name of a function or class; those of its class, where it has none."""
    named = part if hasattr(part, "__qualname__") else type(part)
    return named.__module__, named.__qualname__


_imports: dict[str, UserImport] = {}


def user_imports() -> list[UserImport]:
    """The imports of this process, in their order."""
    return list(_imports.values())


def import_words() -> list[str]:
    """The words of a command line that repeat the imports of this process, in any folder."""
    return [f"{OPTION}={key}" for key in _imports]


def take_imports(arguments: Sequence[str]) -> list[str]:
    """Carry out the imports of a command line, and return its other words.

    Raises:
        UserError: a file that is missing or fails.
    """
    others = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != OPTION:
            others.append(word)
            continue
        if not equals:
            name = next(words, "")
        import_code(name)
    return others


def import_code(name: str) -> None:
    """Import a file (`mine.py`, `folder/mine.py`) or a module by its dotted name (`mine`, `package.targets`).

    Raises:
        UserError: a file that is missing or fails, or whose name is that of another module.
    """
    if not name or name.startswith("-"):
        raise UserError(f"{OPTION} needs a Python file or the name of a module")
    key = str(Path(name).resolve()) if name.endswith(".py") else name
    try:
        module = import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{OPTION} {name} failed: {type(error).__name__}: {one_line(error)}") from error
    digest = module_digest(module)
    if not digest:
        raise UserError(f"{OPTION} is {name}, a module without a Python file")
    if key in _imports and _imports[key].sha256 != digest:
        raise UserError(f"{name} has changed since this process imported it; start the process again")
    _imports.setdefault(key, UserImport(name, digest))


def import_file(path: Path) -> ModuleType:
    """Import a file as a module of its name, so that its classes can be found and pickled by name."""
    if not path.is_file():
        raise UserError(f"{OPTION} is {path}, which is not a file")
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
        return known
    if known is not None or path.stem in sys.stdlib_module_names or is_installed(path.stem):
        raise UserError(f"{OPTION} is {path}, but {path.stem} is the name of another module; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def is_installed(name: str) -> bool:
    """Whether a package of this name is installed: mpp may import it later, and would get the user's file."""
    return PathFinder.find_spec(name, [*site.getsitepackages(), site.getusersitepackages()]) is not None


def module_digest(module: ModuleType) -> str:
    """SHA-256 of a module's file, or of all Python files of a package in the order of their names; empty: none."""
    file = getattr(module, "__file__", None)
    if hasattr(module, "__path__"):
        files = sorted(path for folder in module.__path__ for path in Path(folder).rglob("*.py"))
    else:
        files = [Path(file)] if file else []
    if not files:
        return ""
    total = hashlib.sha256()
    for each in files:
        total.update(each.read_bytes())
    return total.hexdigest()


def imports_as_json(imports: Iterable[UserImport]) -> str:
    """The content of a run's `imports.json`."""
    return json.dumps([each._asdict() for each in imports], indent=2) + "\n"


def saved_imports(folder: Path) -> list[UserImport]:
    """The imports with which a run was started; none where its folder names none."""
    try:
        entries = json.loads((folder / IMPORTS_FILE).read_text(encoding="utf-8"))
        return [UserImport(str(entry["name"]), str(entry["sha256"])) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / IMPORTS_FILE} is damaged: {one_line(error)}") from None


def require_imports(folder: Path) -> None:
    """Refuse to read a run that was started with code of the user, unless files of the same name are imported here.

    Raises:
        UserError: the option to add.
    """
    given = [module_name(each) for each in user_imports()]
    missing = [each.name for each in saved_imports(folder) if module_name(each) not in given]
    if missing:
        words = " ".join(f"{OPTION} {name}" for name in missing)
        raise UserError(f"{folder} uses custom code: add {words} (runs record such files, and never execute them)")


def changed_imports(folder: Path) -> list[str]:
    """Names of the files imported here that a run was started with, and that have changed since."""
    digests = {module_name(each): each.sha256 for each in user_imports()}
    return [each.name for each in saved_imports(folder) if digests.get(module_name(each), each.sha256) != each.sha256]


def refuse_other_code(folder: Path, imports: Iterable[UserImport]) -> None:
    """Refuse to resume a run with other code than it was started with.

    Args:
        folder: of the run.
        imports: the code that the run would use now.
    Raises:
        UserError: the file that changed, or that the run was started without.
    """
    digests = {module_name(each): each.sha256 for each in saved_imports(folder)}
    for each in imports:
        digest = digests.get(module_name(each))
        if digest is None:
            raise UserError(f"{folder} was started without {OPTION} {each.name}; choose another run.dir")
        if digest != each.sha256:
            raise UserError(
                f"{each.name} has changed since {folder} was started with it (sha256 {digest[:12]}, now "
                f"{each.sha256[:12]}); restore it, or choose another run.dir"
            )


def module_name(code: UserImport) -> str:
    """The name by which an import is found again from another folder."""
    return Path(code.name).stem if code.name.endswith(".py") else code.name

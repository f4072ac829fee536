"""Files that are left out of a dataset, and the reasons."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mpp.data.decoding.formats import OPTIONAL_EXTENSIONS, how_to_install, is_picture, missing_package, optional_format
from mpp.data.listing.formats import LIST_EXTENSIONS, extension_of

NAMES_PER_REASON = 3
IN_NO_SPLIT = "images in no split's folder"


@dataclass
class LeftOutFiles:
    """Files that are not used, by reason: how many, and the names of the first."""

    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    about_images: set[str] = field(default_factory=set)
    """Reasons of files that look like images: warnings."""

    def add(self, reason: str, name: str, count: int = 1, about_images: bool = True) -> None:
        """Add `count` files for a reason.

        Args:
            name: one of them, seen from the top of the dataset.
            about_images: whether they look like images.
        """
        self.counts[reason] += count
        if about_images:
            self.about_images.add(reason)
        names = self.names.setdefault(reason, [])
        if len(names) < NAMES_PER_REASON or name < names[-1]:
            self.names[reason] = sorted([*names, name])[:NAMES_PER_REASON]

    def forget(self, reason: str, name: str) -> None:
        """Take back one file, which is used after all."""
        if self.counts[reason] > 0:
            self.counts[reason] -= 1
            self.names[reason] = [other for other in self.names[reason] if other != name]

    def lines(self, about_images: bool) -> list[str]:
        """One line for each reason that is, or is not, about images: "left out: .txt files (2: a.txt, b.txt)"."""
        lines = []
        for reason, count in self.counts.items():
            if count > 0 and (reason in self.about_images) == about_images:
                names = ", ".join(self.names[reason])
                more = ", ..." if count > len(self.names[reason]) else ""
                lines.append(f"left out: {reason} ({count}: {names}{more})")
        return lines


def without_decoder(name: str, read_head: Callable[[], bytes]) -> str | None:
    """The reason why a picture is left out: its decoder is not installed; None: it is.

    Args:
        name: of its file. Files whose extension says that their decoder is there are not read.
        read_head: returns its first bytes, which count where they are a picture's; else its extension does.
    """
    extension = extension_of(name)
    named = OPTIONAL_EXTENSIONS.get(extension)
    if extension and (named is None or missing_package(named) is None):
        return None
    head = read_head()
    form = optional_format(head) if is_picture(head) else named
    if form is None or missing_package(form) is None:
        return None
    files = f"{extension} files" if extension else f"{form.name} files without an ending"
    return f"{files}, which {how_to_install(form)}"


def other_files(name: str) -> str:
    """The reason why a file that is no image is left out, by its extension."""
    extension = extension_of(name)
    if not extension:
        return "files without an ending"
    hint = "; data.labels names a list of images" if extension in LIST_EXTENSIONS else ""
    return f"{extension} files{hint}"

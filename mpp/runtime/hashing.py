"""Checksums of files."""

import hashlib
from pathlib import Path


def sha256_of(file: Path) -> str:
    """SHA-256 of a file as hexadecimal digits; empty where the file is missing."""
    if not file.is_file():
        return ""
    total = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            total.update(block)
    return total.hexdigest()

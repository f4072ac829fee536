"""Image files and tar shards that tests write, in formats beyond those of `encoded`, and their decoding."""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from torch import Tensor

from mpp.config import ImagesConfig
from mpp.data.decoding.decode import decode


def decode_with(image: bytes | np.ndarray, **settings) -> Tensor:
    """An image as pixels (C, H, W); `settings` are those of `data`."""
    return decode(image, ImagesConfig(**settings))


def tiff(pixels: np.ndarray, **options) -> bytes:
    """A TIFF; options of `tifffile.imwrite`. Libraries of Python 3.10 do not write bits that are packed."""
    file = io.BytesIO()
    try:
        tifffile.imwrite(file, pixels, **options)
    except NotImplementedError as error:
        pytest.skip(f"imagecodecs: {error}")
    return file.getvalue()


def npy(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()


def npz(*arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, *arrays)
    return file.getvalue()


def tar(members: Iterable[tuple[str, bytes]], **options) -> bytes:
    """A tar file of members (name, content); options of `tarfile.open`."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_tar(file: Path | str, members: Iterable[tuple[str, bytes]], **options) -> None:
    """Write a tar file, and the folders that it is in."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    Path(file).write_bytes(tar(members, **options))

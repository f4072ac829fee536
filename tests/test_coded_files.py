"""HEIC, AVIF, JPEG XL and JPEG 2000: the pixels that other programs read, upright, and broken files that are named.

The files in `coded/` are of Debian's heif-enc, avifenc, cjxl and opj_compress, and the PNG files beside them of
heif-convert, avifdec, djxl and opj_decompress. The HEIC files that are turned are of pillow-heif: as a phone's, they
have a property that turns them, EXIF that says the same, and a place. The name has the bits of the values.
"""

import re
import struct
from pathlib import Path

import datasets
import imagecodecs
import numpy as np
import pytest
import torch
from conftest import encoded, picture
from image_files import decode_with, write_tar

from mpp.config import DataConfig, ImagesConfig
from mpp.config import PrepareConfig as Prepare
from mpp.data.sources import load_image_datasets
from mpp.errors import UnreadableImage
from mpp.prepare import prepare_image

CODED = Path(__file__).parent / "coded"
RGB = picture(0)  # 40 x 48
OPACITY = np.concatenate([RGB, RGB[..., :1]], -1)
DEEP = np.random.default_rng(0).integers(0, 1024, (40, 48, 3), dtype=np.uint16)
TOOLS_DIFFER = {".heic": 1, ".jxl": 1, ".jp2": 0, ".j2k": 0, ".avif": 0}
"""Largest difference of 8-bit values between releases of a library."""


def read(name: str) -> bytes:
    return (CODED / name).read_bytes()


def heic(bits: int = 8) -> bytes:
    return read(f"rgb_{bits}.heic")


def avif(pixels: np.ndarray, **options) -> bytes:
    return imagecodecs.avif_encode(pixels, level=100, pixelformat="444", **options)


def jxl(pixels: np.ndarray, **options) -> bytes:
    return imagecodecs.jpegxl_encode(pixels, lossless=True, **options)


def jp2(pixels: np.ndarray, **options) -> bytes:
    return imagecodecs.jpeg2k_encode(pixels, level=0, **options)


LOSSLESS = {"AVIF": avif, "JPEG XL": jxl, "JPEG 2000": jp2}
REFERENCES = sorted(path.stem for path in CODED.glob("*.png"))


@pytest.mark.parametrize("name", REFERENCES)
def test_values_are_those_of_the_formats_own_program(name):
    reference = imagecodecs.png_decode(read(f"{name}.png"))
    if reference.ndim == 2:
        reference = reference[..., None]
    if name.startswith("grey"):
        reference = reference[..., :1]
    bands = tuple(range(1, reference.shape[2] + 1))
    decoded = decode_with(read(name), channels=len(bands), bands=bands).permute(1, 2, 0).numpy()
    assert decoded.dtype == (np.float32 if "_16." in name or name == "grey_10.heic" else np.uint8)
    if reference.dtype == np.uint8:
        assert np.abs(decoded.astype(int) - reference).max() <= TOOLS_DIFFER[Path(name).suffix]
    else:  # 10 and 12 bits of HEIC and AVIF are given as 8
        assert np.abs(decoded - reference / 257).max() <= (3.2 if name.endswith(("heic", "avif")) else 255 / 65535)


@pytest.mark.parametrize("orientation", [5, 6])
@pytest.mark.parametrize("end", ["heic", "avif", "jxl"])
def test_files_are_turned_once(end, orientation):
    """Their EXIF has the orientation, too."""
    data = read(f"turned_{orientation}.{end}")
    assert b"Exif" in data
    upright = decode_with(read("turned_6.jpg")).int()  # 45 x 37
    if orientation == 5:
        upright = upright.flip(2)
    decoded = decode_with(data).int()
    assert decoded.shape == upright.shape
    assert (decoded - upright).abs().float().mean() < 3
    assert (decoded.flip(1) - upright).abs().float().mean() > 50


def test_an_orientation_in_xmp_does_not_turn_avif():
    options = {"quality": 100, "subsampling": "4:4:4"}
    file = encoded(RGB, "AVIF", xmp=b'<x tiff:Orientation="3"/>', **options)
    assert torch.equal(decode_with(file), decode_with(encoded(RGB, "AVIF", **options)))


def test_of_an_animation_the_first_frame_counts():
    frames = np.stack([RGB, 255 - RGB])
    assert np.array_equal(decode_with(jxl(frames)).permute(1, 2, 0), RGB)
    assert np.array_equal(decode_with(avif(frames)).permute(1, 2, 0), decode_with(avif(RGB)).permute(1, 2, 0))


# headers that lie, and files that end early ---------------------------------------------------------------------------


def with_sides(data: bytes, width: int, height: int) -> bytes:
    """A file of the HEIF family that announces other sides."""
    parts = data.split(b"ispe\0\0\0\0")
    assert len(parts) > 1
    return parts[0] + b"".join(b"ispe\0\0\0\0" + struct.pack(">II", width, height) + part[8:] for part in parts[1:])


def with_jp2_sides(data: bytes, width: int, height: int) -> bytes:
    """A JPEG 2000 file whose codestream announces other sides; its outer header stays."""
    start = data.index(b"\xff\x4f\xff\x51") + 8
    return data[:start] + struct.pack(">II", width, height) + data[start + 8 :]


BOMBS = {
    "AVIF": with_sides(read("rgb_8.avif"), 15_000, 15_000),
    "JPEG 2000": with_jp2_sides(jp2(RGB), 2**31, 2**31),
    "JPEG 2000, bare": with_jp2_sides(read("rgb_8.j2k"), 60_000, 60_000),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_images_that_are_too_large_are_refused_by_their_header(kind):
    with pytest.raises(UnreadableImage, match=r"more than data.max_pixels|cannot be read"):
        decode_with(BOMBS[kind])


WHOLE = ["rgb_8.heic", "rgb_8.avif", "rgb_10.avif", "rgb_8.jxl", "turned_6.jxl", "rgb_8.jp2", "rgb_8.j2k"]


@pytest.mark.parametrize("name", WHOLE)
def test_the_largest_number_of_pixels_is_that_of_the_setting(name):
    with pytest.raises(UnreadableImage, match=r"pixels are more than data.max_pixels \(1000\)"):
        decode_with(read(name), max_pixels=1000)


@pytest.mark.parametrize("name", WHOLE)
def test_files_that_end_early_are_named(name):
    data = read(name)
    for length in (13, 40, len(data) // 2, len(data) - 30):
        with pytest.raises(UnreadableImage) as error:
            decode_with(data[:length])
        assert re.search(r"^an? (HEIC|AVIF|JPEG XL|JPEG 2000|MP4)|^no image file of a known", str(error.value))


# folders, shards, and decoders that are not there ---------------------------------------------------------------------


@pytest.fixture
def without_pi_heif(without_module):
    """As if pi-heif were not installed."""
    without_module("pi_heif")


def save_phone(folder: Path) -> None:
    """As a phone exports pictures: HEIC, and beside it films and edits."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (folder / f"IMG_{number}.HEIC").write_bytes(read("turned_6.heic"))
        (folder / f"IMG_{number}.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
        (folder / f"IMG_{number}.AAE").write_bytes(b"<?xml version='1.0'?>")


def load(path: Path, **settings):
    return load_image_datasets(DataConfig(path=str(path), eval_split=None, eval_fraction=0.25, **settings))


def test_a_folder_as_a_phone_exports_it(tmp_path, capsys):
    save_phone(tmp_path)
    train, held_out = load(tmp_path)
    assert (len(train), len(held_out)) == (3, 1)
    assert train.decode(0, DataConfig()).shape == (3, 45, 37)
    said = capsys.readouterr().err
    assert "left out: .mov files (4: IMG_0.MOV, IMG_1.MOV, IMG_2.MOV and 1 more)" in said
    assert "left out: .aae files (4: " in said


def test_files_whose_decoder_is_absent_are_unreadable_with_the_line_that_installs_it(tmp_path, without_pi_heif):
    save_phone(tmp_path)
    train, held_out = load(tmp_path)
    assert (len(train), len(held_out)) == (3, 1)
    with pytest.raises(UnreadableImage, match="HEIC files need pi-heif: pip install pi-heif"):
        train.decode(0, DataConfig())


def test_content_decides_in_a_shard_where_the_decoder_of_an_ending_is_absent(tmp_path, without_pi_heif):
    """Some programs convert a phone's pictures, and keep their names."""
    write_tar(tmp_path / "train.tar", [(f"{number}.heic", encoded(picture(number))) for number in range(4)])
    train, held_out = load(tmp_path)
    assert (len(train), len(held_out)) == (3, 1)


def test_images_of_a_table_whose_decoder_is_absent_name_it(tmp_path, without_pi_heif):
    cells = [{"bytes": data, "path": None} for data in [heic(), encoded(RGB)] * 6]
    table = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    table.to_parquet(tmp_path / "train.parquet")
    unreadable = 0
    for images in load(tmp_path):
        for index in range(len(images)):
            try:
                images.decode(index, DataConfig())
            except UnreadableImage as error:
                assert "pip install pi-heif" in str(error)
                unreadable += 1
    assert unreadable == 6


def test_too_large_jpeg_xl_is_not_decoded(monkeypatch):
    monkeypatch.setattr("imagecodecs.jpegxl_decode", None)
    for height, width in ((40, 48), (40, 64), (300, 40), (30, 45)):
        with pytest.raises(UnreadableImage, match=f"{height} x {width} pixels are more than data.max_pixels"):
            decode_with(jxl(np.zeros((height, width, 3), np.uint8)), max_pixels=1000)
    with pytest.raises(UnreadableImage, match="pixels are more than"):
        decode_with(read("turned_6.jxl"), max_pixels=1000)


def test_opacity_of_10_bits_in_jpeg_xl_is_refused():
    opaque = np.concatenate([DEEP, np.full_like(DEEP[..., :1], 1023)], -1)
    with pytest.raises(UnreadableImage, match="opacity"):
        decode_with(jxl(opaque), range=(0, 1023))
    decoded = decode_with(jxl(opaque), range=(0, 1023), bands=(1, 2, 3))
    np.testing.assert_allclose(decoded.permute(1, 2, 0), DEEP * (255 / 1023), rtol=1e-5)


def test_the_primary_image_of_a_heic_is_read():
    data = bytearray(read("rgba_8.heic").replace(b"auxl", b"cdsc"))
    primary = data.index(b"pitm") + 8
    first = decode_with(bytes(data))
    for item in range(1, 9):
        data[primary : primary + 2] = item.to_bytes(2, "big")
        try:
            other = decode_with(bytes(data))
        except UnreadableImage:
            continue
        if not torch.equal(other, first):
            return
    pytest.fail("the first image is read, whichever is the primary one")


ALL_KINDS = {"png": encoded, "avif": avif, "jxl": jxl, "jp2": jp2, "tif": lambda pixels: encoded(pixels, "TIFF")}


def save_kinds(folder: Path, kinds: list[str]) -> None:
    """Twelve images of these kinds in turn, of two classes."""
    for number in range(12):
        kind = kinds[number % len(kinds)]
        file = folder / "ab"[number % 2] / f"{number:02d}.{kind}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(ALL_KINDS[kind](picture(number)))


def test_a_folder_of_all_kinds_trains_as_the_same_images_in_png(pretrain, tmp_path):
    save_kinds(tmp_path / "png", ["png"])
    save_kinds(tmp_path / "kinds", list(ALL_KINDS))
    runs = []
    for name in ("png", "kinds"):
        runs.append(pretrain(f"--data.path={tmp_path / name}", "--run.steps=4", dir=tmp_path / "runs" / name))
    first, second = [(run / "encoder" / "model.safetensors").read_bytes() for run in runs]
    assert first == second


def test_content_decides_in_tables_and_tars(tmp_path):
    names = ["x.jpg", "y", "z.bin"]
    cells = [{"bytes": jxl(RGB), "path": name} for name in names]
    table = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    table.to_parquet(tmp_path / "train.parquet")
    train, _ = load(tmp_path)
    assert np.array_equal(train.decode(0, DataConfig()).permute(1, 2, 0), RGB)
    members = [("0", heic()), ("1", avif(RGB)), ("2.jxl", jxl(RGB)), ("3.JP2", jp2(RGB))]
    write_tar(tmp_path / "tars" / "train.tar", members)
    train, held_out = load(tmp_path / "tars")
    assert len(train) + len(held_out) == 4


@pytest.mark.parametrize("format", ["jpeg", "ppm"])
def test_prepared_shards_have_upright_pixels_alone(format):
    phone = read("turned_6.heic")
    prepared = prepare_image(phone, Prepare(out="x", format=format, data=ImagesConfig()))
    assert torch.equal(decode_with(prepared), decode_with(phone))
    assert not {b"Exif", b"heic"} & {prepared[at : at + 4] for at in range(len(prepared))}

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
from mpp.data.decoding import optional
from mpp.data.decoding.decode import decode, read_mask, read_values, stored_orientation
from mpp.data.decoding.jpegxl import read_header
from mpp.data.decoding.kinds import is_picture
from mpp.data.prepared_image import prepare_image
from mpp.data.sources import load_image_datasets
from mpp.data.survey import survey
from mpp.errors import MissingDecoder, UnreadableImage, UserError

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
    if reference.dtype == np.uint8:
        assert decoded.dtype == np.uint8
        difference = np.abs(decoded.astype(int) - reference).max()
        assert difference <= TOOLS_DIFFER[Path(name).suffix]
    else:
        assert decoded.dtype == np.float32
        shifted = 255 / 1000 if "_10." in name else 255 / 4000  # these programs write 1023 as 1023 * 64, not as 65535
        assert np.abs(decoded - reference / 257).max() < shifted


@pytest.mark.parametrize("name", REFERENCES)
def test_pictures_are_rgb_whatever_the_file_has(name):
    data = read(name)
    assert is_picture(data[:18])
    decoded = decode_with(data)
    assert decoded.shape == ((3, 40, 48) if name.startswith("chroma") else (3, 37, 45))
    assert decoded.dtype == (torch.uint8 if "_8." in name else torch.float32)
    assert decode_with(data, channels=1).shape[0] == 1
    if name.startswith("grey"):
        assert (decoded == decoded[:1]).all()


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("bands", [1, 3, 4])
def test_lossless_files_of_8_bits_are_the_png_of_the_same_pixels(kind, bands):
    """Grey, and opacity that is laid on white, too."""
    pixels = OPACITY[..., 0] if bands == 1 else np.ascontiguousarray(OPACITY[..., :bands])
    data = jp2_with_opacity(pixels) if (kind, bands) == ("JPEG 2000", 4) else LOSSLESS[kind](pixels)
    for channels in (1, 3):
        decoded = decode_with(data, channels=channels)
        assert decoded.dtype == torch.uint8
        assert torch.equal(decoded, decode_with(encoded(pixels), channels=channels))


def jp2_with_opacity(pixels: np.ndarray) -> bytes:
    """PIL declares the fourth band as opacity, imagecodecs does not."""
    return encoded(pixels, "JPEG2000")


@pytest.mark.parametrize("opacity", range(4))
def test_opacity_of_jpeg_2000_is_laid_on_white_whichever_channel_has_it(opacity):
    """OpenJPEG brings the colours to the front by the definitions of channels."""
    data = jp2_with_opacity(OPACITY)
    at = data.index(b"cdef") + 6
    colours = [channel for channel in range(4) if channel != opacity]
    definitions = [struct.pack(">HHH", opacity, 1, 0)]
    definitions += [struct.pack(">HHH", channel, 0, colour) for colour, channel in enumerate(colours, start=1)]
    data = data[:at] + b"".join(sorted(definitions)) + data[at + 24 :]
    assert torch.equal(decode_with(data), decode_with(encoded(OPACITY[..., [*colours, opacity]])))


def test_a_fourth_band_that_is_not_declared_as_opacity_is_a_band():
    with pytest.raises(UnreadableImage, match=r"4 bands; data.channels is 3, and data.bands can choose 3"):
        decode_with(jp2(OPACITY))
    chosen = decode_with(jp2(OPACITY), bands=(4, 2, 1))
    assert np.array_equal(chosen.permute(1, 2, 0), OPACITY[..., [3, 1, 0]])


DEPTHS = [(kind, bits) for kind in LOSSLESS for bits in (10, 12, 16) if (kind, bits) != ("AVIF", 16)]


@pytest.mark.parametrize("kind, bits", DEPTHS)
def test_deep_values_run_from_0_to_255(kind, bits):
    pixels = DEEP << (bits - 10)
    data = LOSSLESS[kind](pixels, bitspersample=bits)
    most = 2**bits - 1
    decoded = decode_with(data)
    assert decoded.dtype == torch.float32
    expected = torch.from_numpy(pixels.astype(np.float64) * 255 / most).permute(2, 0, 1)
    assert (decoded - expected).abs().max() < 255 / 65535
    ranged = decode_with(data, range=(100.0, 900.0))  # of the numbers in the file
    clipped = np.clip((pixels.astype(np.float64) - 100) * 255 / 800, 0, 255)
    torch.testing.assert_close(ranged.double(), torch.from_numpy(clipped).permute(2, 0, 1), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("name", ["rgb_10.heic", "rgb_10.avif", "rgb_10.jxl", "rgb_10.jp2", "rgb_8.jp2"])
def test_no_window_is_made_up_of_bits(name):
    """Only DICOM files have one."""
    data = read(name) if (CODED / name).exists() else jp2(DEEP, bitspersample=10)
    for use in (decode, read_values):
        with pytest.raises(UnreadableImage, match=r"^no window in the file, which data\.range window asks for$"):
            use(data, ImagesConfig(range="window"))


def test_shards_of_deep_images_keep_their_numbers():
    data = jp2(DEEP, bitspersample=10)
    assert np.array_equal(read_values(data, ImagesConfig()), DEEP.transpose(2, 0, 1))
    shard_image = prepare_image(data, Prepare(out="x", format="npy", data=ImagesConfig()))
    assert torch.equal(decode_with(shard_image, range=(0.0, 1023.0)), decode_with(data))
    with pytest.raises(UserError, match="format is jpeg, which holds 8 bits; it must be npy"):
        prepare_image(data, Prepare(out="x", data=ImagesConfig()))


def test_bands_signed_numbers_and_masks_of_jpeg_2000():
    five = np.random.default_rng(1).integers(0, 4096, (40, 48, 5), dtype=np.uint16)
    chosen = decode_with(jp2(five, bitspersample=12), bands=(5, 1), channels=2, range=(0.0, 4095.0))
    assert np.allclose(chosen.permute(1, 2, 0), five[..., [4, 0]] * (255 / 4095), atol=1e-4)
    numbers = np.arange(40 * 48, dtype=np.uint16).reshape(40, 48)
    assert np.array_equal(read_mask(jp2(numbers), ImagesConfig()), numbers)
    with pytest.raises(UnreadableImage, match="with losses, which may change numbers; a mask must"):
        read_mask(imagecodecs.jpeg2k_encode(numbers, level=40, reversible=False), ImagesConfig())


@pytest.mark.parametrize("data", [heic(), avif(RGB), jxl(RGB)], ids=["HEIC", "AVIF", "JPEG XL"])
def test_masks_are_no_files_that_may_change_numbers(data):
    with pytest.raises(UnreadableImage, match="may change numbers; a mask must be"):
        read_mask(data, ImagesConfig())


@pytest.mark.parametrize("orientation", [5, 6])
@pytest.mark.parametrize("end", ["heic", "avif", "jxl"])
def test_files_are_turned_once(end, orientation):
    """Their EXIF has the orientation, too."""
    data = read(f"turned_{orientation}.{end}")
    assert stored_orientation(data) == orientation
    assert stored_orientation(read(f"rgb_8.{end}")) == 1
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


def test_the_bits_of_avif_are_those_of_its_boxes():
    options = {"quality": 100, "subsampling": "4:4:4"}
    file = encoded(RGB, "AVIF", xmp=b"<x>av1C\x81\0\x60</x>", **options)
    assert torch.equal(decode_with(file), decode_with(encoded(RGB, "AVIF", **options)))
    assert decode_with(avif(np.stack([DEEP, DEEP]), bitspersample=10)).dtype == torch.float32  # an animation


def test_the_colours_of_a_palette_count_before_they_are_made():
    data = jp2(RGB[..., 0].copy())
    place = data.index(b"jp2h") - 4
    size = int.from_bytes(data[place : place + 4], "big")
    palette = struct.pack(">I4sHB", 11, b"pclr", 2, 200)
    longer = struct.pack(">I", size + 11) + data[place + 4 : place + size] + palette
    with pytest.raises(UnreadableImage, match=r"40 x 48 x 200 pixels are more than data\.max_pixels"):
        decode_with(data[:place] + longer + data[place + size :], max_pixels=2 * 40 * 48)


def test_of_an_animation_the_first_frame_counts():
    frames = np.stack([RGB, 255 - RGB])
    assert np.array_equal(decode_with(jxl(frames)).permute(1, 2, 0), RGB)
    assert np.array_equal(decode_with(avif(frames)).permute(1, 2, 0), decode_with(avif(RGB)).permute(1, 2, 0))


# headers that lie, and files that end early ---------------------------------------------------------------------------


class BitWriter:
    """Numbers bit by bit, the lowest first, as in the header of JPEG XL."""

    def __init__(self):
        self.number = self.count = 0

    def put(self, value: int, count: int) -> "BitWriter":
        self.number |= value << self.count
        self.count += count
        return self

    def file(self) -> bytes:
        return b"\xff\x0a" + self.number.to_bytes(40, "little")


def huge_jxl(side: int) -> bytes:
    """The header of a JPEG XL file that announces a square image."""
    bits = BitWriter().put(0, 1).put(3, 2).put(side - 1, 30).put(1, 3)
    return bits.put(1, 1).file()


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
    "AVIF of 10 bits": with_sides(read("rgb_10.avif"), 15_000, 15_000),
    "JPEG XL": huge_jxl(2**30),
    "JPEG 2000": with_jp2_sides(jp2(RGB), 2**31, 2**31),
    "JPEG 2000, bare": with_jp2_sides(read("rgb_8.j2k"), 60_000, 60_000),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_images_that_are_too_large_are_refused_by_their_header(kind):
    with pytest.raises(UnreadableImage, match=r"more than data.max_pixels|cannot be read"):
        decode_with(BOMBS[kind])


@pytest.mark.parametrize("sides", [(10, 10), (46, 37), (0, 0), (20_000, 20_000), (60_000, 60_000)])
def test_heic_whose_sides_are_others_is_named_or_has_the_sides_of_its_pixels(sides):
    """By the release of libheif."""
    try:
        decoded = decode_with(with_sides(read("turned_6.heic"), *sides))
    except UnreadableImage as error:
        assert str(error).startswith("a HEIC file that cannot be decoded")
    else:
        assert torch.equal(decoded, decode_with(read("turned_6.heic")))


def test_heic_with_fewer_bits_than_it_announces_is_named():
    """pi-heif 1.4 would write beyond the image's memory."""
    data = bytearray(read("grey_8.heic"))
    bits = data.index(b"hvcC") + 4 + 17  # of grey, with five bits before it that are set
    data[bits] = data[bits] & 0xF8 | 4
    with pytest.raises(UnreadableImage, match="header does not fit its pixels"):
        decode_with(bytes(data))


def test_heic_whose_metadata_has_no_proper_kind_is_read():
    """pi-heif 1.4 would end the process."""
    data = read("turned_6.heic").replace(b"\0Exif\0", b"\0\xf0xif\0")
    assert torch.equal(decode_with(data), decode_with(read("turned_6.heic")))


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
        assert re.search(r"^an? (HEIC|AVIF|JPEG XL|JPEG 2000) file |^no image file of a known", str(error.value))
        assert not re.search(r"video|Error|\n", str(error.value))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_of_other_kinds_that_end_early_are_named_in_plain_words(form, channels):
    data = encoded(picture(0).repeat(4, 0), form)
    with pytest.raises(UnreadableImage) as error:
        decode_with(data[: len(data) // 2], channels=channels)
    kind = {"WEBP": "WebP"}.get(form, form)
    assert str(error.value) == f"a {kind} file that cannot be decoded: it may be damaged, or end early"


def test_the_header_of_jpeg_xl_has_the_sides_and_bits_of_the_file():
    rng = np.random.default_rng(0)
    for height, width in [(8, 8), (37, 45), (256, 256), (30, 40), (1, 9000), (48, 40), (60, 50)]:
        for bits in (8, 10, 16):
            pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint16 if bits > 8 else np.uint8)
            header = read_header(jxl(pixels, bitspersample=bits, usecontainer=bits == 10))
            assert (header.height, header.width, header.bits, header.extra_channels) == (height, width, bits, 1)
    header = read_header(jxl(np.stack([RGB, RGB])))  # an animation
    assert (header.height, header.width, header.bits, header.extra_channels) == (40, 48, 8, 0)


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
    said = capsys.readouterr().out
    assert "left out: .mov files (4: IMG_0.MOV, IMG_1.MOV, IMG_2.MOV, ...)" in said
    assert "left out: .aae files (4: " in said


def test_files_whose_decoder_is_absent_are_counted_with_the_line_that_installs_it(tmp_path, capsys, without_pi_heif):
    save_phone(tmp_path)
    line = ".heic files, which need pi-heif: pip install pi-heif (4: IMG_0.HEIC, IMG_1.HEIC, IMG_2.HEIC, ...)"
    with pytest.raises(UserError, match="holds no images") as error:
        load(tmp_path)
    assert line in str(error.value)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
    train, held_out = load(tmp_path)
    assert (len(train), len(held_out)) == (3, 1)
    assert line in capsys.readouterr().err
    (tmp_path / "metadata.csv").write_text("file_name\n0.png\nIMG_1.HEIC\n")
    with pytest.raises(UserError, match=r"IMG_1.HEIC \(.heic files, which need pi-heif: pip install pi-heif\)"):
        load(tmp_path)


def test_content_decides_where_the_decoder_of_an_ending_is_absent(tmp_path, without_pi_heif):
    """Some programs convert a phone's pictures, and keep their names."""
    for number in range(4):
        (tmp_path / "files" / f"IMG_{number}.HEIC").parent.mkdir(exist_ok=True)
        (tmp_path / "files" / f"IMG_{number}.HEIC").write_bytes(encoded(picture(number)))
    write_tar(tmp_path / "tars" / "train.tar", [(f"{number}.heic", encoded(picture(number))) for number in range(4)])
    for folder in ("files", "tars"):
        train, held_out = load(tmp_path / folder)
        assert (len(train), len(held_out)) == (3, 1)


def test_a_listed_file_without_an_ending_names_its_decoder(tmp_path, without_pi_heif):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "picture").write_bytes(heic())
    images = tmp_path / "images"
    images.mkdir()
    (images / "0.png").write_bytes(encoded(RGB))
    (images / "metadata.csv").write_text("file_name\n0.png\n../elsewhere/picture\n")
    with pytest.raises(UserError, match=r"picture \(HEIC files without an ending, which need pi-heif: pip install pi-"):
        load(images)


def test_a_shard_whose_decoder_is_absent_says_so(tmp_path, without_pi_heif):
    write_tar(tmp_path / "train.tar", [(f"{number}.heic", heic()) for number in range(4)])
    with pytest.raises(UserError, match=r"hold no images; left out: .heic files, which need pi-heif"):
        load(tmp_path)


def test_a_table_whose_decoder_is_absent_is_surveyed(tmp_path, without_pi_heif):
    cells = [{"bytes": data, "path": None} for data in [heic(), encoded(RGB)] * 6]
    table = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    table.to_parquet(tmp_path / "train.parquet")
    surveyed = survey(*load(tmp_path), DataConfig(), seconds=20)
    assert len(surveyed.unreadable) == 6 and all("pip install pi-heif" in each for each in surveyed.unreadable)
    with pytest.raises(MissingDecoder):
        decode(heic(), ImagesConfig())


def test_the_line_that_installs_a_newer_pillow_is_quoted(without_module):
    without_module("PIL._avif")
    assert optional.how_to_install(optional.AVIF) == 'need pillow>=11.3: pip install "pillow>=11.3"'


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

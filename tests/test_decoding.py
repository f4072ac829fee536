"""Files and arrays of any bands and depth become the same channels, from every source; what cannot is named."""

import io
import shutil

import datasets
import numpy as np
import pytest
import torch
from colours import load, write
from conftest import each_of, encoded, picture, read_metrics, weights_of
from image_files import decode_with, npy, npz, packed_tiff, tar, tiff, unreadable
from imagecodecs import png_encode
from numpy.testing import assert_array_equal
from PIL import Image

from mpp.config import ImagesConfig
from mpp.data.decoding.decode import read_mask, read_values
from mpp.prepare import main as prepare

RGB = picture(0)  # 40 x 48
DEEP = np.random.default_rng(0).integers(0, 65536, (40, 48, 5), dtype=np.uint16)
BANDS_FIRST = DEEP.transpose(2, 0, 1)
HALF = DEEP.astype(np.float32) / 65535
GREY = dict(photometric="minisblack")
WHITE_IS_ZERO = dict(photometric="miniswhite")


def in_16_bits(pixels: np.ndarray) -> np.ndarray:
    """Values of 8 bits as those of 16 bits that show the same."""
    return pixels.astype(np.uint16) * 257


def scaled(pixels: np.ndarray, low: float = 0, high: float = 65535) -> torch.Tensor:
    """Values (H, W, C) from `low` to `high` as the expected pixels (C, H, W)."""
    values = (pixels.astype(np.float64) - low) * 255 / (high - low)
    return torch.from_numpy(np.clip(values, 0, 255)).permute(2, 0, 1)


def assert_close(decoded: torch.Tensor, expected: torch.Tensor, atol: float = 2e-5) -> None:
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded.double(), expected, rtol=1e-6, atol=atol)


@pytest.fixture
def folder(tmp_path):
    """An empty folder of images."""
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


# --- bands ---

FIVE = {
    "samples one after the other": tiff(BANDS_FIRST, planarconfig="separate", **GREY),
    "pages": tiff(BANDS_FIRST, **GREY),
    "channels of ImageJ": tiff(BANDS_FIRST[None], imagej=True, metadata={"axes": "ZCYX"}),
    "channels of several stacks of OME": tiff(np.stack([BANDS_FIRST] * 2), ome=True, metadata={"axes": "ZCYX"}, **GREY),
    "npy, Fortran's order": npy(np.asfortranarray(DEEP)),
}


@each_of("data", FIVE)
def test_five_bands_of_16_bits(data):
    decoded = decode_with(data, channels=5)
    assert_close(decoded, scaled(DEEP))
    assert torch.equal(decode_with(data, bands=(5, 1, 2)), decoded[[4, 0, 1]])
    with unreadable(r"5 bands; data\.channels is 4"):
        decode_with(data, channels=4)
    with unreadable(r"5 bands; data\.bands asks for 6"):
        decode_with(data, bands=(6, 1, 2))


def test_channels_of_a_microscope_are_no_frames():
    for bits in (np.uint8, np.uint16):
        planes = DEEP[..., :3].astype(bits)
        data = tiff(planes.transpose(2, 0, 1), imagej=True, metadata={"axes": "CYX"})
        assert torch.equal(decode_with(data), decode_with(npy(planes)))
    for axes in (dict(imagej=True), dict(ome=True, **GREY)):
        two = tiff(BANDS_FIRST[:2], metadata={"axes": "CYX"}, **axes)
        with unreadable(r"2 bands; data\.channels is 3"):
            decode_with(two)
        assert torch.equal(decode_with(two, channels=2), decode_with(npy(DEEP[..., :2]), channels=2))


def test_bands_of_arrays_are_what_a_square_leaves():
    cube = DEEP[:32, :32, [0] * 60 + [1, 2, 3, 4]]
    expected = scaled(DEEP[:32, :32, [4, 2, 1]])
    for array in (cube, cube.transpose(2, 0, 1)):
        assert_close(decode_with(npy(array), bands=(64, 62, 61)), expected)
    assert decode_with(npy(DEEP[:3, :, :3])).shape == (3, 3, 48)  # the last side, where the first is as many
    assert decode_with(npy(DEEP[:5]), bands=(5, 2, 1)).shape == (3, 5, 48)
    pixels = 2 * 40 * 48  # four bands count as one
    assert len(decode_with(npy(DEEP), channels=5, max_pixels=pixels)) == 5
    with unreadable(r"more than data\.max_pixels"):
        decode_with(npy(DEEP), channels=5, max_pixels=pixels - 1)


def test_compressions_that_pil_does_not_know():
    for compression in ("jpeg2000", "zstd", "png"):
        decoded = decode_with(tiff(RGB, compression=compression, photometric="rgb")).permute(1, 2, 0)
        assert decoded.dtype == torch.uint8
        assert abs(decoded.numpy() - RGB.astype(int)).max() <= 8


def test_pils_own_limit_on_pixels_does_not_hold(monkeypatch):
    """TIFF is checked once more when its pixels are read; data.max_pixels decides instead."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for data in (encoded(RGB, "TIFF"), encoded(RGB)):
        assert decode_with(data).shape == (3, 40, 48)
        assert Image.MAX_IMAGE_PIXELS == 10


# --- depth ---


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, np.float32])
def test_a_range_is_for_all_channels_or_each(dtype):
    """Values beyond it are cut off, such as those of more than 12 bits in 16."""
    pixels = (DEEP[..., :2] // (257 if dtype == np.uint8 else 1)).astype(dtype)
    for pairs in (((0, 100), (50, 200)), ((-1000, 65535), (3, 30000))):
        expected = torch.cat([scaled(pixels[..., [band]], *pair) for band, pair in enumerate(pairs)])
        assert_close(decode_with(npy(pixels), channels=2, range=pairs), expected)
    assert_close(decode_with(npy(pixels), channels=2, range=(10, 4095)), scaled(pixels, 10, 4095))


def test_grey_and_rgb_become_each_other():
    grey = np.array(Image.fromarray(RGB).convert("L"))
    for file_of in (encoded, tiff, npy):
        decoded = decode_with(file_of(RGB), channels=1)
        assert abs(decoded.numpy().astype(int) - grey[None]).max() <= 1
        assert (decode_with(file_of(grey)).numpy() == np.stack([grey] * 3)).all()
    assert (decode_with(npy(grey > 100), channels=1)[0].numpy() == np.where(grey > 100, 255, 0)).all()
    signed = grey.view(np.int8)  # PIL takes it for unsigned
    degrees = dict(channels=1, range=(-40.0, 40.0))
    assert torch.equal(decode_with(tiff(signed), **degrees), decode_with(npy(signed), **degrees))
    stack = tiff(BANDS_FIRST, **GREY)  # a picture is its first frame
    assert_close(decode_with(stack, channels=1), scaled(DEEP[..., :1]))


@pytest.mark.parametrize("bits", [4, 10, 12, 14])
def test_the_largest_number_of_the_bits_that_a_tiff_declares_is_white(bits):
    """They are packed; 12 bits that are stored as 16 are in no header."""
    dtype = np.uint8 if bits < 8 else np.uint16
    numbers = np.linspace(0, 2**bits - 1, 40 * 48).round().astype(dtype).reshape(40, 48)
    data = packed_tiff(numbers, bits)
    inverted = packed_tiff(numbers, bits, **WHITE_IS_ZERO)
    expected = torch.from_numpy(numbers * (255 / (2**bits - 1)))
    two = {"channels": 2, "bands": (1, 1)}
    for settings in ({}, {"channels": 1}, two):
        assert (decode_with(data, **settings) - expected).abs().max() < 1e-4
        if settings is not two:
            assert (decode_with(inverted, **settings) + expected - 255).abs().max() < 1e-4
    ranged = decode_with(data, range=(0.0, 5.0), **two)  # of the numbers in the file
    assert_array_equal(ranged[0], numbers.clip(max=5) * 51)


def test_white_may_be_zero():
    grey = RGB[..., 0]
    inverted = decode_with(tiff(grey, **WHITE_IS_ZERO))
    assert torch.equal(inverted[0], 255 - torch.from_numpy(grey))
    scan = tiff(grey.astype(np.uint16) * 16, **WHITE_IS_ZERO)  # 12 bits in 16
    limits = (0.0, 4080.0)
    assert torch.equal(decode_with(scan, range=limits), inverted.float())
    nodata = next(value for value in grey.flat if 255 - value in grey)  # the stored value is meant, not its opposite
    is_missing = grey == nodata
    filled = decode_with(scan, channels=1, range=limits, nodata=float(nodata) * 16)[0]
    assert len(filled[is_missing].unique()) == 1
    assert torch.equal(filled[~is_missing], inverted[0][~is_missing].float())


@pytest.mark.parametrize(
    "most, dtype, settings, named",
    [
        (20, np.uint8, {"range": (0, 256)}, "reach 255, and 256 becomes white"),
        (20, np.uint8, {}, ""),
        (8191, np.uint16, {}, "reach 8191, and 65535 becomes white"),  # an eighth of it
        (8192, np.uint16, {}, ""),
        (4095, np.uint16, {"range": (0, 1023)}, "reach 4095, and 1023 becomes white"),  # twice that is their median
        (4095, np.uint16, {"range": (0, 1024)}, ""),
    ],
)
def test_images_of_another_depth_are_named(tmp_path, capsys, most, dtype, settings, named):
    for number in range(3):
        values = np.linspace(0, most, 480).astype(dtype).reshape(20, 24)
        Image.fromarray(np.roll(values, number)).save(tmp_path / f"{number}.png")
    load(tmp_path, **settings)
    printed = capsys.readouterr().err
    assert (named in printed) if named else "white" not in printed


# --- opacity ---

STRAIGHT = dict(photometric="rgb", extrasamples=["unassalpha"])
PREMULTIPLIED = dict(photometric="rgb", extrasamples=["assocalpha"])


def test_opacity_of_16_bits_is_laid_on_white():
    """As that of 8 bits is; of floating-point values it is refused."""
    opacity = np.linspace(0, 255, 40 * 48).reshape(40, 48).astype(np.uint8)
    translucent = np.dstack([RGB, opacity])
    premultiplied = np.dstack([np.rint(RGB * (opacity / 255)[..., None]), opacity])
    expected = decode_with(encoded(translucent))
    for data in (tiff(in_16_bits(premultiplied), **PREMULTIPLIED), png_encode(in_16_bits(translucent))):
        decoded = decode_with(data)
        assert decoded.dtype == torch.float32
        assert (decoded - expected).abs().max() <= 1
        assert decode_with(data, channels=4).shape == (4, 40, 48)
    with unreadable(r"opacity of floating-point pixels .*; data\.bands chooses"):
        decode_with(tiff(translucent.astype(np.float32), **STRAIGHT), range=(0.0, 255.0))


CLEAR = np.dstack([RGB, np.zeros((40, 48), np.uint8)])  # an opacity of 0 everywhere
LUMINANCE = np.array(Image.fromarray(RGB).convert("L"))
CLEAR_GREY = np.dstack([LUMINANCE, CLEAR[..., 3]])
PALETTE = Image.fromarray(RGB).quantize(16)
WITHOUT_OPACITY = {
    "PNG": (encoded(CLEAR), RGB),
    "PNG, 16 bits": (png_encode(in_16_bits(CLEAR)), RGB),
    "PNG, grey of 16 bits": (png_encode(in_16_bits(CLEAR_GREY)), LUMINANCE[..., None]),
    "PNG, palette": (encoded(PALETTE, transparency=bytes(16)), np.array(PALETTE.convert("RGB"))),
    "TIFF": (tiff(CLEAR, **STRAIGHT), RGB),
    "TIFF, premultiplied": (tiff(CLEAR, **PREMULTIPLIED), RGB),
}


@each_of("data, expected", WITHOUT_OPACITY)
def test_an_opacity_of_0_everywhere_is_none(data, expected):
    assert_array_equal(decode_with(data), np.broadcast_to(expected, RGB.shape).transpose(2, 0, 1))


# --- pixels without a value ---

NODATA_TAG = 42113  # GDAL_NODATA


def with_nodata_tag(pixels: np.ndarray, text: str, **options) -> bytes:
    """A TIFF that names its value of pixels without a value."""
    return tiff(pixels, extratags=[(NODATA_TAG, "s", 0, text, True)], **options)


@pytest.mark.parametrize("nodata", [-9999.0, float("nan")])
def test_what_has_no_value_gets_the_mean_of_its_channel(nodata):
    """By the setting, in one channel; also before it becomes grey."""
    holes = HALF[..., :3].copy()
    holes[3:9, 4:20, 1] = nodata
    filled = HALF[..., :3].astype(np.float64)
    is_missing = holes != HALF[..., :3]
    filled[is_missing] = filled[..., 1][~is_missing[..., 1]].mean()
    settings = dict(range=(0.0, 1.0), nodata=nodata)
    assert_close(decode_with(npy(holes), **settings), scaled(filled, 0, 1), atol=1e-3)
    grey = decode_with(npy(filled), channels=1, range=(0.0, 1.0)).double()
    assert_close(decode_with(npy(holes), channels=1, **settings), grey, atol=1e-3)
    assert ImagesConfig(**settings) == ImagesConfig(**settings)  # a run can be resumed
    with unreadable("a channel without any value"):
        decode_with(npy(np.full_like(holes, nodata)), **settings)


@pytest.mark.parametrize("text, value", [("nan", np.nan), ("-9999.0 ", -9999)])
def test_a_tiffs_own_tag_of_nodata(text, value):
    holes = HALF[..., :2].copy()
    holes[:5] = value
    expected = scaled(HALF[..., :2], 0, 1)
    expected[:, :5] = expected[:, 5:].mean((1, 2))[:, None, None]
    data = with_nodata_tag(holes, text, planarconfig="contig", **GREY)
    assert_close(decode_with(data, channels=2, range=(0.0, 1.0)), expected, atol=1e-3)


def test_a_border_of_a_colour_tiff_is_nodata_and_a_single_colour_of_that_value_is_not():
    for dtype in (np.uint8, np.uint16):
        tile = picture(3).astype(dtype)
        tile[:4] = 0
        tile[10:20, :, 2] = 0
        values = read_values(with_nodata_tag(tile, "0", photometric="rgb"), ImagesConfig())
        assert_array_equal(values[:, 4:], tile[4:].transpose(2, 0, 1))
        assert_array_equal(values[:, 0, 0], np.rint(tile[4:].mean((0, 1))))


@pytest.mark.parametrize("by_setting", [False, True])
def test_colours_are_nodata_before_they_become_grey(by_setting):
    """Grey of 100, too, is made of other colours."""
    pixels = np.full((40, 48, 3), 100, np.uint8)
    pixels[:20] = 120, 92, 90
    pixels[30:] = 10
    plain = tiff(pixels, photometric="rgb")
    data = plain if by_setting else with_nodata_tag(pixels, "100", photometric="rgb")
    values = read_values(data, ImagesConfig(channels=1, nodata=100 if by_setting else None))[0]
    assert (values[:20] == 100).all() and (values[30:] == 10).all()
    assert (values[20:30] == np.rint((20 * 100 + 10 * 10) / 30)).all()


def test_the_setting_wins_over_the_tag_and_the_tag_is_not_about_palettes_or_masks():
    tile = picture(3)[..., 0].astype(np.uint16)
    tile[:4], tile[4:8] = 7, 9
    data = with_nodata_tag(tile, "7", **GREY)
    values = read_values(data, ImagesConfig(channels=1, nodata=9))[0]
    assert (values[:4] == 7).all() and (values[4:8] != 9).all()
    assert_array_equal(read_mask(data, ImagesConfig()), tile)
    assert_array_equal(read_values(with_nodata_tag(tile, "none", **GREY), ImagesConfig(channels=1))[0], tile)
    indices = np.zeros((40, 48), np.uint8)
    indices[5:] = 200
    palette = dict(photometric="palette", colormap=np.arange(768, dtype=np.uint16).reshape(3, 256))
    assert torch.equal(decode_with(with_nodata_tag(indices, "0", **palette)), decode_with(tiff(indices, **palette)))


# --- sources ---

FOUR = [DEEP[..., :4] // (1 + number % 3) for number in range(16)]


def write_folder(folder, kind, end):
    splits = ("train", "test")
    places = [f"{splits[number % 2]}/{number // 8}/{number:02d}.{end}" for number in range(16)]
    return write(folder, dict(zip(places, map(kind, FOUR), strict=True)))


def write_shards(folder, kind, end):
    for first, split in enumerate(("train", "test")):
        members = []
        for number, pixels in enumerate(FOUR[first::2]):
            members += [(f"{number}.{end}", kind(pixels)), (f"{number}.cls", b"01"[number // 4 :])]
        write(folder, {f"{split}.tar": tar(members)})
    return folder


def write_columns(folder, feature, change):
    features = datasets.Features({"image": feature, "label": datasets.Value("int64")})
    for first, split in enumerate(("train", "test")):
        images = [change(pixels) for pixels in FOUR[first::2]]
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 4}, features)
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


def contiguous(pixels: np.ndarray) -> bytes:
    return tiff(pixels, planarconfig="contig", **GREY)


LISTS = datasets.Sequence(datasets.Sequence(datasets.Sequence(datasets.Value("uint16"))))
SOURCES = {
    "folder of tiff": lambda folder: write_folder(folder, contiguous, "tif"),
    "folder of npz": lambda folder: write_folder(folder, npz, "npz"),
    "tar of npy": lambda folder: write_shards(folder, npy, "npy"),
    "Array3D": lambda folder: write_columns(folder, datasets.Array3D((40, 48, 4), "uint16"), np.asarray),
    "lists": lambda folder: write_columns(folder, LISTS, np.ndarray.tolist),
}


@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_hold_the_same_images(folder, source):
    config = ImagesConfig(channels=4)
    for start, dataset in enumerate(load(SOURCES[source](folder), channels=4)):
        first_pixels = {tuple(dataset.decode(index, config)[:, 0, 0].tolist()) for index in range(8)}
        assert first_pixels == {tuple(scaled(pixels)[:, 0, 0].float().tolist()) for pixels in FOUR[start::2]}
        assert len(dataset) == 8
        assert len({*dataset.labels}) == 2


@pytest.mark.faults
@pytest.mark.parametrize("source", ["tar of npy", "lists"])
def test_they_are_streamed_and_resumed(pretrain, folder, source):
    options = [f"--data.path={SOURCES[source](folder)}", "--data.streaming=true", "--data.channels=4"]
    options += ["--model.img_size=[16,32]", "--model.mean=auto", "--model.std=auto"]
    run = pretrain(*options)
    first = read_metrics(run), weights_of(run)
    shutil.rmtree(run / "encoder")
    (run / "checkpoints" / "step_00000004" / "state.json").unlink()
    pretrain(*options)
    assert (read_metrics(run), weights_of(run)) == first


def test_8_and_16_bits_in_one_set(pretrain, folder, tmp_path):
    """A batch of both is float32; crops of 8 bits are rounded, as ever, whether images are held in memory or not."""
    for number in range(6):
        pixels = picture(number)
        write(folder, {f"{number}.png": encoded(pixels), f"{number}.tif": tiff(in_16_bits(pixels))})
    runs = [pretrain(f"--data.path={folder}", f"--data.cache_gb={size}", dir=tmp_path / str(size)) for size in (0, 1)]
    losses, others = map(read_metrics, runs)
    assert losses == others and len(losses) == 4


def test_prepared_arrays_keep_bands_and_depth(folder, tmp_path, capsys):
    words = [f"--data.path={SOURCES['folder of tiff'](folder)}", "--workers=1"]
    words += ["--data.channels=2", "--data.bands=[4,2]", "--format=npy"]
    stored = {}
    for name, side in (("small", 20), ("whole", 256)):
        out = tmp_path / name
        prepare([*words, f"--out={out}", f"--short_side={side}"])
        assert f"--data.path {out} --data.channels 2" in capsys.readouterr().out
        train, _ = load(out, channels=2)
        assert train.labels is not None
        stored[name] = [np.load(io.BytesIO(row["image"]["bytes"])) for row in train.rows]
    assert [(array.dtype, array.shape) for array in stored["small"]] == 8 * [(np.uint16, (20, 24, 2))]
    expected = {pixels[..., [3, 1]].tobytes() for pixels in FOUR[::2]}
    assert {array.tobytes() for array in stored["whole"]} == expected


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_lists_with_holes_are_named_as_broken_files_are(pretrain, folder, streaming):
    """Indexed and streamed alike; those of other bands, too."""
    lists = [pixels.tolist() for pixels in FOUR]
    lists[0] = None
    lists[2] = [[[1, 2, 3, 4], [1]]]
    lists[4] = [[[1, None, 3, 4]] * 8] * 8
    lists[6] = FOUR[0][..., :3].tolist()
    features = datasets.Features({"image": LISTS})
    for split, rows in {"train": lists, "test": lists[8:]}.items():
        datasets.Dataset.from_dict({"image": rows}, features).to_parquet(folder / f"{split}.parquet")
    words = [f"--data.path={folder}", "--data.channels=4", f"--data.streaming={streaming}", "--run.steps=6"]
    named = (pretrain(*words) / "unreadable.txt").read_text()
    for reason in ("no bytes", "lists of several lengths", "object values", "3 bands; data.channels is 4"):
        assert reason in named

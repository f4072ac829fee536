"""Files and arrays of any bands and depth become the same pixels; broken files and lying headers are named."""

import io
import shutil
import zipfile

import datasets
import numpy as np
import pytest
import tifffile
import torch
from conftest import encoded, picture, read_metrics
from image_files import decode_with, npy, npz, packed_tiff, tar, tiff
from imagecodecs import png_encode
from PIL import Image

from mpp.config import DataConfig, ImagesConfig, PrepareConfig, SourceConfig
from mpp.data.decoding.decode import read_mask, read_values
from mpp.data.loader import cache_decoded
from mpp.data.sources import load_image_datasets
from mpp.errors import UnreadableImage, UserError
from mpp.prepare import main as prepare
from mpp.prepare import prepare_image

RGB = picture(0)  # 40 x 48
DEEP = np.random.default_rng(0).integers(0, 65536, (40, 48, 5), dtype=np.uint16)
HALF = DEEP.astype(np.float32) / 65535


def in_16_bits(pixels: np.ndarray) -> np.ndarray:
    """Values of 8 bits as those of 16 bits that show the same."""
    return pixels.astype(np.uint16) * 257


def decoded_pixels(data: bytes, **settings) -> np.ndarray:
    """A decoded image as (H, W, C)."""
    return decode_with(data, **settings).permute(1, 2, 0).numpy()


def scaled(pixels: np.ndarray, low: float = 0, high: float = 65535) -> torch.Tensor:
    """Values (H, W, C) from `low` to `high` as the expected pixels (C, H, W)."""
    values = (pixels.astype(np.float64) - low) * 255 / (high - low)
    return torch.from_numpy(np.clip(values, 0, 255)).permute(2, 0, 1)


@pytest.fixture
def folder(tmp_path):
    """An empty folder of images."""
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


GREY = dict(photometric="minisblack")
FIVE = {
    "samples side by side": tiff(DEEP, planarconfig="contig", **GREY),
    "samples one after the other": tiff(DEEP.transpose(2, 0, 1), planarconfig="separate", **GREY),
    "pages": tiff(DEEP.transpose(2, 0, 1), **GREY),
    "tiles, LZW": tiff(DEEP, planarconfig="contig", tile=(16, 16), compression="lzw", predictor=True, **GREY),
    "big-endian BigTIFF": tiff(DEEP, planarconfig="contig", bigtiff=True, byteorder=">", **GREY),
    "channels of ImageJ": tiff(DEEP.transpose(2, 0, 1)[None], imagej=True, metadata={"axes": "ZCYX"}),
    "channels of OME, of which there are several stacks": tiff(
        np.stack([DEEP.transpose(2, 0, 1)] * 2), ome=True, metadata={"axes": "ZCYX"}, **GREY
    ),
    "npy": npy(DEEP),
    "npy, bands first": npy(DEEP.transpose(2, 0, 1)),
    "npy, Fortran's order": npy(np.asfortranarray(DEEP)),
    "npz": npz(DEEP),
}


@pytest.mark.parametrize("data", FIVE.values(), ids=FIVE)
def test_five_bands_of_16_bits(data):
    decoded = decode_with(data, channels=5)
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded.double(), scaled(DEEP), rtol=1e-6, atol=1e-5)
    chosen = decode_with(data, bands=(5, 1, 2))
    assert torch.equal(chosen, decoded[[4, 0, 1]])


@pytest.mark.parametrize(
    ("pixels", "low", "high"),
    [
        pytest.param(DEEP, 0.0, 4095.0, id="12 bits in 16: higher values are cut off"),
        pytest.param(DEEP.astype(np.uint32), 100.0, 60000.0, id="32 bits"),
        pytest.param(DEEP.astype(np.int64), 0.0, 65535.0, id="64 bits"),
        pytest.param(HALF, 0.25, 0.75, id="float"),
        pytest.param((DEEP >> 8).astype(np.uint8), 10.0, 200.0, id="8 bits"),
    ],
)
def test_range(pixels, low, high):
    assert_scaled(decode_with(npy(pixels), channels=5, range=(low, high)), pixels, low, high)


def assert_scaled(decoded: torch.Tensor, pixels: np.ndarray, low: float, high: float) -> None:
    """The range from `low` to `high` became that from 0 to 255."""
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded.double(), scaled(pixels, low, high), rtol=1e-6, atol=2e-5)


def test_range_of_each_channel():
    pairs = ((0.0, 1000.0), (500.0, 65535.0))
    decoded = decode_with(npy(DEEP[..., :2]), channels=2, range=pairs).double()
    for number, pair in enumerate(pairs):
        expected = scaled(DEEP[..., number : number + 1], *pair)[0]
        torch.testing.assert_close(decoded[number], expected, rtol=1e-6, atol=2e-5)
    photograph = decode_with(encoded(RGB), range=(0.0, 255.0))
    assert (photograph.numpy() == RGB.transpose(2, 0, 1)).all()


def test_grey_and_rgb_become_each_other():
    grey = np.array(Image.fromarray(RGB).convert("L"))
    for data in (encoded(RGB), tiff(RGB), npy(RGB)):
        decoded = decode_with(data, channels=1)
        assert decoded.shape == (1, 40, 48)
        assert abs(decoded[0].numpy().astype(int) - grey).max() <= 1
    assert decode_with(encoded(RGB, "JPEG"), channels=1).shape == (1, 40, 48)
    for data in (encoded(grey), tiff(grey), npy(grey)):
        assert (decode_with(data).numpy() == grey).all()
    deep = decode_with(tiff(DEEP[..., :3]), channels=1)[0]
    expected = scaled(DEEP[..., :3] @ np.array([0.299, 0.587, 0.114])[:, None])[0]
    torch.testing.assert_close(deep.double(), expected, rtol=1e-5, atol=0.003)
    signed = grey.view(np.int8)  # PIL takes it for unsigned
    degrees = dict(channels=1, range=(-40.0, 40.0))
    assert torch.equal(decode_with(tiff(signed), **degrees), decode_with(npy(signed), **degrees))
    stack = tiff(DEEP.transpose(2, 0, 1), **GREY)  # a picture is its first frame
    assert torch.equal(decode_with(stack), decode_with(tiff(DEEP[..., 0])))


# --- photographs of 16 bits show the same as those of 8 ---

UNPREMULTIPLIED = dict(photometric="rgb", extrasamples=["unassalpha"])
WHITE_IS_ZERO = dict(photometric="miniswhite")


@pytest.fixture
def translucent():
    """An image (H, W, 4) whose opacity rises from 0 to 255."""
    height, width, _ = RGB.shape
    opacity = np.linspace(0, 255, height * width).reshape(height, width).astype(np.uint8)
    return np.dstack([RGB, opacity])


def test_opacity_of_16_bits_is_laid_on_white(translucent):
    expected = decode_with(encoded(translucent))
    opacity = translucent[..., 3]
    premultiplied = np.dstack([np.rint(RGB * (opacity / 255)[..., None]), opacity])
    files = [
        tiff(in_16_bits(premultiplied), photometric="rgb", extrasamples=["assocalpha"]),
        tiff(in_16_bits(translucent), **UNPREMULTIPLIED),
        png_encode(in_16_bits(translucent)),
    ]
    for data in files:
        decoded = decode_with(data)
        assert decoded.dtype == torch.float32
        assert (decoded - expected).abs().max() <= 1
        assert decode_with(data, channels=4).shape == (4, 40, 48)


def test_opacity_of_floats_is_refused(translucent):
    data = tiff(translucent.astype(np.float32), **UNPREMULTIPLIED)
    with pytest.raises(UnreadableImage, match=r"opacity of floating-point pixels .*; data\.bands chooses"):
        decode_with(data, range=(0.0, 255.0))


def test_white_may_be_zero():
    grey = RGB[..., 0]
    inverted = decode_with(tiff(grey, **WHITE_IS_ZERO))
    assert torch.equal(decode_with(tiff(in_16_bits(grey), **WHITE_IS_ZERO)), inverted.float())
    with_range = decode_with(tiff(grey, **WHITE_IS_ZERO), channels=1, range=(0.0, 255.0))[0]
    assert torch.equal(with_range, 255 - torch.from_numpy(grey).float())


def test_white_may_be_zero_with_12_bits_in_16():
    grey = RGB[..., 0]
    scan = tiff(grey.astype(np.uint16) * 16, **WHITE_IS_ZERO)
    limits = (0.0, 4080.0)
    decoded = decode_with(scan, range=limits)
    assert torch.equal(decoded, decode_with(tiff(grey, **WHITE_IS_ZERO)).float())
    nodata = next(value for value in grey.flat if 255 - value in grey)  # the stored value is meant, not its opposite
    is_missing = grey == nodata
    filled = decode_with(scan, channels=1, range=limits, nodata=float(nodata) * 16)[0]
    assert len(filled[is_missing].unique()) == 1
    assert torch.equal(filled[~is_missing], decoded[0][~is_missing])


def numbers_of(bits: int) -> np.ndarray:
    """All numbers of so many bits, or some of them, from 0 to the largest (40, 48)."""
    dtype = np.uint8 if bits < 8 else np.uint16
    return np.linspace(0, 2**bits - 1, 40 * 48).round().astype(dtype).reshape(40, 48)


@pytest.mark.parametrize("bits", [4, 10, 12, 14])
@pytest.mark.parametrize("settings", [{}, {"channels": 1}, {"channels": 2, "bands": (1, 1)}], ids=["RGB", "grey", "2"])
def test_the_largest_number_of_the_bits_that_a_tiff_declares_is_white(bits, settings):
    """They are packed; 12 bits that are stored as 16 are in no header."""
    data = packed_tiff(numbers_of(bits), bits)
    expected = torch.from_numpy(numbers_of(bits) * (255 / (2**bits - 1)))
    assert (decode_with(data, **settings) - expected).abs().max() < 1e-4
    if "bands" in settings:
        ranged = decode_with(data, range=(0.0, 5.0), **settings)  # of the numbers in the file
        assert np.array_equal(ranged[0], numbers_of(bits).clip(max=5).astype(np.float32) * 51)
    else:
        inverted = decode_with(packed_tiff(numbers_of(bits), bits, **WHITE_IS_ZERO), **settings)
        assert (inverted + expected - 255).abs().max() < 1e-4


def test_shards_of_a_tiff_of_12_bits_keep_its_numbers():
    data = packed_tiff(numbers_of(12), 12)
    grey = ImagesConfig(channels=1)
    shard_image = prepare_image(data, PrepareConfig(format="npy", data=grey))
    assert torch.equal(decode_with(shard_image, channels=1, range=(0.0, 4095.0)), decode_with(data, channels=1))
    with pytest.raises(UserError, match="format is jpeg, which holds 8 bits; it must be npy"):  # which says no bits
        prepare_image(data, PrepareConfig(data=grey))


def test_compressions_that_pil_does_not_know():
    for compression in ("jpeg2000", "zstd", "png"):
        decoded = decoded_pixels(tiff(RGB, compression=compression, photometric="rgb"))
        assert decoded.dtype == np.uint8
        assert abs(decoded - RGB.astype(int)).max() <= 8
    three = tiff(RGB, planarconfig="contig", **GREY)
    assert np.array_equal(decoded_pixels(three), RGB)


def test_channels_of_a_microscope_are_no_frames():
    for bits in (np.uint8, np.uint16):
        planes = DEEP[..., :3].astype(bits)
        data = tiff(planes.transpose(2, 0, 1), imagej=True, metadata={"axes": "CYX"})
        decoded = decode_with(data)
        assert torch.equal(decoded, decode_with(npy(planes)))
    for axes in (dict(imagej=True), dict(ome=True, **GREY)):
        two = tiff(DEEP[..., :2].transpose(2, 0, 1), metadata={"axes": "CYX"}, **axes)
        with pytest.raises(UnreadableImage, match=r"2 bands; data\.channels is 3"):
            decode_with(two)
        chosen = decode_with(two, channels=2)
        assert torch.equal(chosen, decode_with(npy(DEEP[..., :2]), channels=2))


def test_bands_of_arrays_are_what_a_square_leaves():
    cube = DEEP[:32, :32, [0] * 60 + [1, 2, 3, 4]]
    decoded = decode_with(npy(cube), bands=(64, 62, 61), range=(0.0, 65535.0))
    expected = scaled(DEEP[:32, :32, [4, 2, 1]]).float()
    torch.testing.assert_close(decoded, expected)
    first = decode_with(npy(cube.transpose(2, 0, 1)), bands=(64, 62, 61))
    torch.testing.assert_close(first, expected)
    assert ImagesConfig(channels=1, bands=2) == ImagesConfig(channels=1, bands=(2,))


def test_a_hole_in_one_band_is_filled_before_it_becomes_grey():
    holes = HALF[..., :3].copy()
    holes[0, 0, 0] = -1
    decoded = decode_with(npy(holes), channels=1, range=(0.0, 1.0), nodata=-1.0)
    filled = holes.copy()
    filled[0, 0, 0] = HALF[..., 0].ravel()[1:].mean()
    expected = decode_with(npy(filled), channels=1, range=(0.0, 1.0))
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("nodata", [-9999.0, float("nan")])
def test_what_has_no_value_gets_the_mean_of_its_channel(nodata):
    holes = HALF[..., :2].copy()
    holes[3:9, 4:20, 1] = nodata
    settings = dict(channels=2, range=(0.0, 1.0), nodata=nodata)
    decoded = decode_with(npy(holes), **settings).double()
    whole = scaled(HALF[..., :2], 0, 1)
    valid = torch.ones(40, 48, dtype=torch.bool)
    valid[3:9, 4:20] = False
    torch.testing.assert_close(decoded[0], whole[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(decoded[1][valid], whole[1][valid], rtol=1e-5, atol=1e-4)
    assert (decoded[1][~valid] - whole[1][valid].mean()).abs().max() < 1e-3
    assert ImagesConfig(**settings) == ImagesConfig(**settings)  # a run can be resumed


NODATA_TAG = 42113  # GDAL_NODATA


def with_nodata_tag(pixels: np.ndarray, text: str, **options) -> bytes:
    """A TIFF that names its value of pixels without a value."""
    return tiff(pixels, extratags=[(NODATA_TAG, "s", 0, text, True)], **options)


@pytest.mark.parametrize("text, value", [("-9999", -9999), ("nan", np.nan), ("-9999.0 ", -9999)])
def test_a_tiffs_own_tag_of_nodata(text, value):
    holes = HALF[..., :2].copy()
    holes[:5] = value
    settings = dict(channels=2, range=(0.0, 1.0))
    decoded = decode_with(
        with_nodata_tag(holes, text, photometric="minisblack", planarconfig="contig"), **settings
    ).double()
    whole = scaled(HALF[..., :2], 0, 1)
    torch.testing.assert_close(decoded[:, 5:], whole[:, 5:], rtol=1e-5, atol=1e-4)
    means = whole[:, 5:].mean((1, 2))[:, None, None]
    torch.testing.assert_close(decoded[:, :5], means.expand(2, 5, 48), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_border_of_a_colour_tiff_is_nodata_and_a_single_colour_of_that_value_is_not(dtype):
    tile = picture(3).astype(dtype)
    tile[:4] = 0
    tile[10:20, :, 2] = 0
    values = read_values(with_nodata_tag(tile, "0", photometric="rgb"), ImagesConfig())
    np.testing.assert_array_equal(values[:, 4:], tile[4:].transpose(2, 0, 1))
    np.testing.assert_array_equal(values[:, 0, 0], np.rint(tile[4:].mean((0, 1))))


def test_the_setting_wins_over_the_tag_and_the_tag_is_not_about_palettes_or_masks():
    tile = picture(3)[..., 0].astype(np.uint16)
    tile[:4], tile[4:8] = 7, 9
    data = with_nodata_tag(tile, "7", photometric="minisblack")
    values = read_values(data, ImagesConfig(channels=1, nodata=9))[0]
    assert (values[:4] == 7).all() and (values[4:8] != 9).all()
    np.testing.assert_array_equal(read_mask(data, ImagesConfig()), tile)
    np.testing.assert_array_equal(
        read_values(with_nodata_tag(tile, "none", photometric="minisblack"), ImagesConfig(channels=1))[0], tile
    )
    indices = np.zeros((40, 48), np.uint8)
    colours = np.arange(768, dtype=np.uint16).reshape(3, 256)
    indices[5:] = 200
    plain = tiff(indices, photometric="palette", colormap=colours)
    tagged = with_nodata_tag(indices, "0", photometric="palette", colormap=colours)
    assert torch.equal(decode_with(tagged), decode_with(plain))


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


HEADER = b"{'descr': '<u2', 'fortran_order': False, 'shape': (5000, 5000, 5)}"
HUGE = b"\x93NUMPY\x01\0v\0" + HEADER.ljust(117) + b"\n"


@pytest.mark.parametrize(
    ("options", "sides"),
    [({}, ("ImageWidth", "ImageLength")), (dict(tile=(16, 16), compression="zlib"), ("TileWidth", "TileLength"))],
)
def test_a_tiff_whose_header_lies_takes_no_memory(options, sides):
    data = bytearray(tiff(DEEP, planarconfig="contig", **options, **GREY))
    with tifffile.TiffFile(io.BytesIO(bytes(data))) as file:
        places = [file.pages[0].tags[name].valueoffset for name in sides]
    for place in places:
        data[place : place + 4] = (60_000).to_bytes(4, "little")
    with pytest.raises(UnreadableImage, match="60000 x 60000 x 5 pixels are more"):
        decode_with(bytes(data), channels=5)


def test_an_npz_whose_header_lies_takes_no_memory():
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", HUGE + bytes(10**7))
    with pytest.raises(UnreadableImage, match="cannot be decoded"):
        decode_with(bomb.getvalue(), channels=5)


@pytest.mark.parametrize("form", ["TIFF", "PNG", "JPEG"])
def test_pils_own_limit_on_pixels_does_not_hold(monkeypatch, form):
    """TIFF is checked once more when its pixels are read; data.max_pixels decides instead."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    stored = io.BytesIO()
    Image.new("RGB", (30, 20), (9, 8, 7)).save(stored, form)
    assert decode_with(stored.getvalue()).shape[-2:] == (20, 30)
    assert Image.MAX_IMAGE_PIXELS == 10


FOUR = [DEEP[..., :4] // (1 + number % 3) for number in range(16)]


def write_folder(folder, kind, end):
    for number, pixels in enumerate(FOUR):
        split = ("train", "test")[number % 2]
        name = ("a", "b")[number // 2 % 2]
        file = folder / split / name / f"{number:02d}.{end}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(kind(pixels))
    return str(folder)


def write_shards(folder, kind, end):
    for first, split in enumerate(("train", "test")):
        members = []
        for number in range(first, len(FOUR), 2):
            members.append((f"{number:02d}.{end}", kind(FOUR[number])))
            members.append((f"{number:02d}.cls", str(number // 8).encode()))
        (folder / f"{split}.tar").write_bytes(tar(members))
    return str(folder)


def write_columns(folder, feature, change):
    features = datasets.Features({"image": feature, "label": datasets.Value("int64")})
    for first, split in enumerate(("train", "test")):
        images = [change(pixels) for pixels in FOUR[first::2]]
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 4}, features=features)
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def contiguous(pixels: np.ndarray) -> bytes:
    return tiff(pixels, planarconfig="contig", **GREY)


LISTS = datasets.Sequence(datasets.Sequence(datasets.Sequence(datasets.Value("uint16"))))
SOURCES = {
    "folder of tiff": lambda folder: write_folder(folder, contiguous, "tif"),
    "folder of npy": lambda folder: write_folder(folder, npy, "npy"),
    "folder of npz": lambda folder: write_folder(folder, npz, "npz"),
    "tar of tiff": lambda folder: write_shards(folder, contiguous, "tif"),
    "tar of npy": lambda folder: write_shards(folder, npy, "npy"),
    "tar of npz": lambda folder: write_shards(folder, npz, "npz"),
    "Array3D": lambda folder: write_columns(folder, datasets.Array3D((40, 48, 4), "uint16"), np.asarray),
    "lists": lambda folder: write_columns(folder, LISTS, np.ndarray.tolist),
}


@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_hold_the_same_images(folder, source):
    column = "cls" if "tar" in source else "label"
    path = SOURCES[source](folder)
    source_config = SourceConfig(path=path, channels=4, label_column=column, eval_split="test")
    for start, dataset in enumerate(load_image_datasets(source_config)):
        config = ImagesConfig(channels=4)
        first_pixels = {tuple(dataset.decode(index, config)[:, 0, 0].tolist()) for index in range(len(dataset))}
        expected = {tuple(scaled(pixels)[:, 0, 0].float().tolist()) for pixels in FOUR[start::2]}
        assert len(dataset) == 8
        assert first_pixels == expected
        assert dataset.labels is not None
        held = cache_decoded(dataset, DataConfig(channels=4, workers=0))
        assert sum(image.nbytes for image in held.decoded) == 8 * 40 * 48 * 4 * 4  # four bytes for each value
        assert torch.equal(held.decode(3, config), dataset.decode(3, config))


@pytest.mark.faults
@pytest.mark.parametrize("source", ["tar of npz", "Array3D", "lists"])
def test_they_are_streamed_and_resumed(pretrain, folder, source):
    options = [f"--data.path={SOURCES[source](folder)}", "--data.streaming=true", "--data.channels=4"]
    options += ["--data.eval_split=test", "--data.eval_images=8"]
    options += ["--model.img_size=[16,32]", "--model.mean=auto", "--model.std=auto"]
    run = pretrain(*options)
    first = read_metrics(run)
    shutil.rmtree(run / "encoder")
    (run / "checkpoints" / "step_00000004" / "state.json").unlink()
    pretrain(*options)
    assert read_metrics(run) == first


@pytest.mark.parametrize(
    "most, dtype, settings, named",
    [
        (255, np.uint8, {"range": (0, 4095)}, "reach 255, and 4095 becomes white"),
        (255, np.uint8, {"range": (0, 1023)}, "reach 255, and 1023 becomes white"),
        (4095, np.uint16, {}, "reach 4095, and 65535 becomes white"),
        (4095, np.uint16, {"range": (0, 255)}, "reach 4095, and 255 becomes white"),
        (4095, np.uint16, {"range": (0, 4095)}, ""),
        (1000, np.uint16, {"range": (0, 4095)}, ""),
        (65535, np.uint16, {}, ""),
        (255, np.uint8, {"range": (10, 200)}, ""),
        (20, np.uint8, {}, ""),
    ],
)
def test_images_of_another_depth_are_named(tmp_path, capsys, most, dtype, settings, named):
    for number in range(3):
        values = np.linspace(0, most, 20 * 24).reshape(20, 24).astype(dtype)
        Image.fromarray(np.roll(values, number)).save(tmp_path / f"{number}.png")
    load_image_datasets(SourceConfig(path=str(tmp_path), **settings))
    printed = capsys.readouterr().err
    assert (named in printed) if named else "white" not in printed


def test_8_and_16_bits_in_one_set(pretrain, folder, tmp_path):
    """A batch of both is float32; crops of 8 bits are rounded, as ever, whether images are held in memory or not."""
    for number in range(12):
        pixels = picture(number)
        data = encoded(pixels) if number % 2 else tiff(in_16_bits(pixels))
        (folder / f"{number:02d}.{'png' if number % 2 else 'tif'}").write_bytes(data)
    losses = []
    for size in (0, 1):
        run = pretrain(f"--data.path={folder}", f"--data.cache_gb={size}", dir=tmp_path / f"run_{size}")
        losses.append(read_metrics(run))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_prepared_arrays_keep_bands_and_depth(folder, tmp_path, capsys):
    path = SOURCES["folder of tiff"](folder)
    words = [f"--data.path={path}", "--workers=1", "--data.channels=2", "--data.bands=[4,2]", "--format=npy"]
    prepare([*words, f"--out={tmp_path / 'out'}", "--short_side=20"])
    assert f"--data.path {tmp_path / 'out'} --data.channels 2" in capsys.readouterr().out
    source = SourceConfig(path=str(tmp_path / "out"), channels=2, eval_split="test")
    train, _ = load_image_datasets(source)
    assert len(train) == 8
    assert train.labels is not None
    for index in range(8):
        stored = np.load(io.BytesIO(train.rows[index]["image"]["bytes"]))
        assert stored.dtype == np.uint16
        assert stored.shape == (20, 24, 2)
    prepare([*words, f"--out={tmp_path / 'whole'}"])
    train, _ = load_image_datasets(SourceConfig(path=str(tmp_path / "whole"), channels=2, eval_split="test"))
    stored = {np.load(io.BytesIO(row["image"]["bytes"])).tobytes() for row in train.rows}
    assert stored == {np.ascontiguousarray(pixels[..., [3, 1]]).tobytes() for pixels in FOUR[::2]}


def test_broken_files_of_a_set_are_named(pretrain, folder):
    SOURCES["folder of npy"](folder)
    broken = folder / "train" / "a" / "00.npy"
    broken.write_bytes(npy(FOUR[0][..., :3]))
    run = pretrain(f"--data.path={folder}", "--data.channels=4", "--data.eval_split=test")
    assert "00.npy: 3 bands; data.channels is 4" in (run / "unreadable.txt").read_text()


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_lists_with_holes_are_named_as_broken_files_are(pretrain, folder, streaming):
    """Indexed and streamed alike."""
    lists = [pixels.tolist() for pixels in FOUR]
    lists[0] = None
    lists[2] = [[[1, 2, 3, 4], [1]]]
    lists[4] = [[[1, None, 3, 4]] * 8] * 8
    features = datasets.Features({"image": LISTS})
    for split in ("train", "test"):
        rows = lists if split == "train" else lists[8:]
        datasets.Dataset.from_dict({"image": rows}, features=features).to_parquet(folder / f"{split}.parquet")
    words = ["--data.channels=4", f"--data.streaming={streaming}", "--data.eval_split=test", "--run.steps=6"]
    run = pretrain(f"--data.path={folder}", *words)
    named = (run / "unreadable.txt").read_text()
    assert "no bytes" in named
    assert "lists of several lengths" in named
    assert "object values" in named


def test_a_column_of_words_is_no_image(tmp_path):
    features = datasets.Features({"words": datasets.Sequence(datasets.Sequence(datasets.Value("string")))})
    datasets.Dataset.from_dict({"words": [[["a"]]] * 4}, features=features).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match="a column of images"):
        load_image_datasets(SourceConfig(path=str(tmp_path), image_column="words"))


CLEAR = np.concatenate([RGB, np.zeros((40, 48, 1), np.uint8)], -1)  # an opacity of 0 everywhere
CLEAR_DEEP = in_16_bits(CLEAR)
LUMINANCE = np.array(Image.fromarray(RGB).convert("L"))
CLEAR_GREY = Image.fromarray(np.stack([LUMINANCE, np.zeros_like(LUMINANCE)], -1), "LA")
PALETTE = Image.fromarray(RGB).quantize(16)
WITHOUT_OPACITY = {
    "PNG": (encoded(CLEAR), RGB),
    "PNG, 16 bits": (png_encode(CLEAR_DEEP), RGB),
    "PNG, grey": (encoded(CLEAR_GREY), LUMINANCE),
    "PNG, grey of 16 bits": (png_encode(np.array(CLEAR_GREY).astype(np.uint16) * 257), LUMINANCE),
    "PNG, palette": (encoded(PALETTE, transparency=bytes(16)), np.array(PALETTE.convert("RGB"))),
    "PNG, one colour": (encoded(np.full((4, 5, 3), (9, 8, 7), np.uint8), transparency=(9, 8, 7)), np.array([9, 8, 7])),
    "WebP": (encoded(CLEAR, "WEBP", lossless=True, exact=True), RGB),
    "TIFF": (tiff(CLEAR, photometric="rgb", extrasamples=["unassalpha"]), RGB),
    "TIFF, premultiplied": (tiff(CLEAR, photometric="rgb", extrasamples=["assocalpha"]), RGB),
    "TIFF, 16 bits": (tiff(CLEAR_DEEP, photometric="rgb", extrasamples=["unassalpha"]), RGB),
    "TIFF, premultiplied, 16 bits": (tiff(CLEAR_DEEP, photometric="rgb", extrasamples=["assocalpha"]), RGB),
}


@pytest.mark.parametrize("kind", WITHOUT_OPACITY)
def test_an_opacity_of_0_everywhere_is_none(kind):
    data, expected = WITHOUT_OPACITY[kind]
    decoded = decoded_pixels(data)
    if expected.ndim == 2:
        expected = expected[..., None]
    assert np.array_equal(decoded, np.broadcast_to(expected, decoded.shape))

"""DICOM files: their pixels against pydicom's own functions and known arrays; broken ones; and the privacy of tags."""

import io
import warnings
import zlib

import imagecodecs
import numpy as np
import pytest
import torch
from conftest import encoded, picture
from dicom_files import SECRETS, described, dicom, file_of
from image_files import decode_with, npy
from pydicom import Dataset, Sequence, dcmread
from pydicom.data import get_testdata_file
from pydicom.pixels import apply_modality_lut, apply_windowing, pixel_array
from pydicom.uid import (
    JPEG2000,
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
)

from mpp.config import ImagesConfig
from mpp.data.decoding import dicom as module
from mpp.data.decoding.decode import read_mask, read_values
from mpp.data.decoding.kinds import is_picture, kind_of_file
from mpp.data.folder import walk
from mpp.errors import UnreadableImage

GREY_8 = picture(0)[..., 0].copy()
RGB = picture(1)
GREY_12 = (np.arange(40 * 48).reshape(40, 48) * 2 % 4096).astype(np.uint16)
SIGNED = np.linspace(-1000, 1000, 40 * 48).reshape(40, 48).astype(np.int16)


def pydicoms(name: str) -> bytes:
    """A file of pydicom's tests."""
    with open(get_testdata_file(f"{name}.dcm", download=False), "rb") as file:
        return file.read()


def changed(name: str, **tags) -> bytes:
    """The same with other values of tags."""
    dataset = dcmread(io.BytesIO(pydicoms(name)))
    for tag, value in tags.items():
        setattr(dataset, tag, value)
    file = io.BytesIO()
    dataset.save_as(file)
    return file.getvalue()


def values_of(data: bytes, **settings) -> np.ndarray:
    """The values (C, H, W) of a file in its own units."""
    return read_values(data, ImagesConfig(**settings))


# --- pixels ---

READ_BY_PYDICOM = {
    "CT_small": "",  # the plugin of pydicom that decodes; none: it is not compressed
    "ExplVR_BigEnd": "",
    "MR_small_bigendian": "",
    "MR_small_padded": "",
    "SC_rgb_small_odd": "",
    "SC_ybr_full_422_uncompressed": "",
    "image_dfl": "",
    "liver_1frame": "",
    "rtdose_1frame": "",
    "MR_small_RLE": "pydicom",
    "SC_rgb_rle": "pydicom",
    "SC_rgb_rle_16bit": "pydicom",
    "SC_rgb_rle_32bit": "pydicom",
    "SC_rgb_gdcm_KY": "pillow",
    "SC_rgb_jpeg": "pillow",
    "SC_rgb_jpeg_dcmtk": "pillow",
    "693_J2KI": "pillow",
    "J2K_pixelrep_mismatch": "pillow",
    "JPEG2000": "pillow",
}


@pytest.mark.parametrize("name", READ_BY_PYDICOM)
def test_pydicoms_files_as_pydicom_reads_them(name):
    data = pydicoms(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = dcmread(io.BytesIO(data))
        expected = apply_modality_lut(pixel_array(dataset, decoding_plugin=READ_BY_PYDICOM[name]), dataset)
    has_colours = expected.ndim == 3
    expected = expected.transpose(2, 0, 1) if has_colours else expected[None]
    np.testing.assert_array_equal(values_of(data, channels=len(expected)), expected)


def test_a_palette_is_colours():
    table = np.random.default_rng(0).integers(0, 65536, (3, 256), dtype=np.uint16)
    tags = {"PhotometricInterpretation": "PALETTE COLOR"}
    for colour, entries in zip(("Red", "Green", "Blue"), table, strict=True):
        tags[f"{colour}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        tags[f"{colour}PaletteColorLookupTableData"] = entries.tobytes()
    data = dicom(GREY_8, **tags)
    np.testing.assert_array_equal(values_of(data), table[:, GREY_8])
    np.testing.assert_array_equal(read_mask(data, ImagesConfig()), GREY_8)  # its indices


@pytest.mark.parametrize("name", ["MR_small_RLE", "MR_small_jpeg_ls_lossless", "MR_small_jp2klossless"])
def test_one_scan_in_all_its_compressions(name):
    original = pixel_array(io.BytesIO(pydicoms("MR_small")))
    np.testing.assert_array_equal(values_of(pydicoms(name), channels=1)[0], original)


def jpeg_2000(pixels: np.ndarray) -> bytes:
    return imagecodecs.jpeg2k_encode(pixels, codecformat="j2k", reversible=True)


LOSSLESS = {
    "JPEG Lossless": (JPEGLosslessSV1, lambda pixels: imagecodecs.jpeg8_encode(pixels, lossless=True)),
    "JPEG-LS": (JPEGLSLossless, imagecodecs.jpegls_encode),
    "JPEG 2000": (
        JPEG2000Lossless,
        jpeg_2000,
    ),
}


@pytest.mark.parametrize("pixels", [GREY_8, GREY_12, RGB], ids=["8 bits", "12 bits", "RGB"])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_compressions_without_losses(kind, pixels):
    syntax, encode = LOSSLESS[kind]
    data = dicom(pixels, [encode(pixels)], syntax)
    expected = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    np.testing.assert_array_equal(values_of(data, channels=len(expected)), expected)


@pytest.mark.parametrize(
    "syntax, encode", [(JPEGLossless, imagecodecs.ljpeg_encode), (JPEGLSLossless, imagecodecs.jpegls_encode)]
)
def test_signed_numbers_that_are_compressed_as_if_unsigned(syntax, encode):
    data = dicom(SIGNED, [encode(SIGNED.view(np.uint16))], syntax)
    np.testing.assert_array_equal(values_of(data, channels=1)[0], SIGNED)


def test_jpeg_of_12_bits():
    smooth = np.tile(np.linspace(0, 4095, 48), (40, 1)).astype(np.uint16)
    frame = imagecodecs.jpeg8_encode(smooth, level=99, bitspersample=12)
    decoded = values_of(dicom(smooth, [frame], JPEGExtended12Bit, BitsStored=12, HighBit=11), channels=1)[0]
    assert np.abs(decoded.astype(int) - smooth).max() < 10


def test_8_bits_are_pixels_as_they_are_and_colours_become_grey():
    decoded = decode_with(dicom(RGB))
    assert decoded.dtype == torch.uint8
    np.testing.assert_array_equal(decoded.permute(1, 2, 0), RGB)
    assert decode_with(dicom(RGB), channels=1).shape == (1, 40, 48)
    assert decode_with(dicom(GREY_8)).shape == (3, 40, 48)
    assert (decode_with(dicom(RGB), channels=2, bands=(3, 1))[0].numpy() == RGB[..., 2]).all()


# --- units ---


def test_without_a_range_all_that_the_bits_hold_rescaled():
    data = dicom(GREY_12, BitsStored=12, HighBit=11, RescaleSlope=1, RescaleIntercept=-1024)
    assert values_of(data, channels=1).dtype == np.int16
    decoded = decode_with(data, channels=1)[0].numpy()
    np.testing.assert_allclose(decoded, GREY_12 * (255 / 4095), rtol=1e-5)


def test_the_range_is_in_rescaled_units():
    data = dicom(GREY_12, RescaleSlope=1, RescaleIntercept=-1024)
    decoded = decode_with(data, channels=1, range=(-160.0, 240.0))[0].numpy()
    hounsfield = GREY_12.astype(float) - 1024
    np.testing.assert_allclose(decoded, np.clip((hounsfield + 160) * 255 / 400, 0, 255), rtol=1e-5)


def test_fractions_need_a_range():
    data = dicom(GREY_12, RescaleSlope="0.37", RescaleIntercept="1.5")
    np.testing.assert_allclose(values_of(data, channels=1)[0], GREY_12 * 0.37 + 1.5, rtol=1e-6)
    with pytest.raises(UnreadableImage, match=r"no agreed range; data\.range says which"):
        decode_with(data, channels=1)
    decoded = decode_with(data, channels=1, range=(0.0, 2000.0))[0].numpy()
    np.testing.assert_allclose(decoded, (GREY_12 * 0.37 + 1.5) * 255 / 2000, rtol=1e-5)


def test_floating_point_pixels():
    fractions = np.linspace(-2, 3, 40 * 48, dtype=np.float32).reshape(40, 48)
    dataset = dcmread(io.BytesIO(dicom(GREY_12)))
    for name in ("PixelData", "BitsStored", "HighBit", "PixelRepresentation"):
        del dataset[name]
    dataset.BitsAllocated, dataset.FloatPixelData = 32, fractions.tobytes()
    file = io.BytesIO()
    dataset.save_as(file)
    np.testing.assert_array_equal(values_of(file.getvalue(), channels=1)[0], fractions)
    with pytest.raises(UnreadableImage, match=r"no agreed range; data\.range says which"):
        decode_with(file.getvalue(), channels=1)
    dataset.PhotometricInterpretation = "MONOCHROME1"
    file = io.BytesIO()
    dataset.save_as(file)
    turned = decode_with(file.getvalue(), channels=1, range=(-2.0, 3.0))[0]
    np.testing.assert_allclose(turned, (3 - fractions) * 51, atol=1e-3)
    with pytest.raises(UnreadableImage, match="no agreed range"):
        values_of(file.getvalue(), channels=1)


def test_a_table_of_units():
    table = Dataset()
    table.LUTDescriptor = [4096, 0, 16]
    table.LUTData = [(number * 7) % 65536 for number in range(4096)]
    table["LUTData"].VR = "US"
    data = dicom(GREY_12, ModalityLUTSequence=Sequence([table]))
    np.testing.assert_array_equal(values_of(data, channels=1)[0], GREY_12.astype(int) * 7 % 65536)


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT"])
def test_the_files_own_window(function):
    tags = dict(RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=[40, 500], WindowWidth=[400, 1000])
    data = dicom(GREY_12, VOILUTFunction=function, BitsStored=12, HighBit=11, **tags)
    dataset = dcmread(io.BytesIO(data))
    windowed = apply_windowing(apply_modality_lut(dataset.pixel_array, dataset), dataset)
    darkest, brightest = -1024, 3071
    expected = (windowed - darkest) * 255 / (brightest - darkest)
    decoded = decode_with(data, channels=1, range="window")[0].numpy()
    np.testing.assert_allclose(decoded, expected, atol=1e-3)


@pytest.mark.parametrize(
    "tags", [{}, dict(WindowCenter=40, WindowWidth=1), dict(WindowCenter=40, WindowWidth=9, VOILUTFunction="SIGMOID")]
)
def test_no_usable_window(tags):
    with pytest.raises(UnreadableImage, match=r"window, which data\.range window asks for$"):
        decode_with(dicom(GREY_12, **tags), channels=1, range="window")


def test_other_formats_have_no_window():
    with pytest.raises(UnreadableImage, match=r"^no window in the file, which data\.range window asks for$"):
        decode_with(RGB, range="window")


@pytest.mark.parametrize("settings", [{}, dict(range=(100.0, 3000.0)), dict(range="window")])
def test_where_0_is_white_grey_is_turned_round(settings):
    tags = dict(BitsStored=12, HighBit=11, WindowCenter=2000, WindowWidth=1000, VOILUTFunction="LINEAR_EXACT")
    plain = decode_with(dicom(GREY_12, **tags), channels=1, **settings)
    turned = decode_with(dicom(GREY_12, PhotometricInterpretation="MONOCHROME1", **tags), channels=1, **settings)
    torch.testing.assert_close(turned, 255 - plain, rtol=0, atol=1e-3)


@pytest.mark.parametrize("window", [(-50.0, 150.0), (10.0, 300.0), (20.0, 200.5)])
def test_where_0_is_white_limits_may_lie_beyond_the_numbers_type(window):
    low, high = window
    expected = np.clip((high - GREY_8.astype(float)) * 255 / (high - low), 0, 255)
    tags = dict(WindowCenter=(low + high) / 2, WindowWidth=high - low, VOILUTFunction="LINEAR_EXACT")
    data = dicom(GREY_8, PhotometricInterpretation="MONOCHROME1", **tags)
    for limits in (window, "window"):
        np.testing.assert_allclose(decode_with(data, channels=1, range=limits)[0], expected, atol=1e-3)
        shard = npy(values_of(data, channels=1, range=limits)[0])
        np.testing.assert_allclose(decode_with(shard, channels=1, range=window)[0], expected, atol=1e-3)


def test_where_0_is_white_bands_stay_as_they_are():
    data = dicom(GREY_12, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(values_of(data, channels=1, bands=(1,))[0], GREY_12)


def test_nodata_is_in_rescaled_units():
    holes = GREY_12.copy()
    holes[:5] = 0
    data = dicom(holes, RescaleSlope=1, RescaleIntercept=-1024)
    filled = values_of(data, channels=1, nodata=-1024.0)[0]
    assert (filled[:5] == np.rint(holes[5:].mean() - 1024)).all()


# --- frames ---

FRAMES = np.stack([GREY_12, GREY_12 // 2, GREY_12 // 3, GREY_12 // 4])


def test_frames_are_bands():
    data = dicom(FRAMES)
    np.testing.assert_array_equal(values_of(data, channels=4), FRAMES)
    np.testing.assert_array_equal(values_of(data, channels=1, bands=(3,)), FRAMES[2:3])
    np.testing.assert_array_equal(values_of(dicom(FRAMES[:3])), FRAMES[:3])
    compressed = dicom(FRAMES, [imagecodecs.jpegls_encode(frame) for frame in FRAMES], JPEGLSLossless)
    np.testing.assert_array_equal(values_of(compressed, channels=4), FRAMES)


@pytest.mark.parametrize("channels", [1, 3])
def test_frames_are_no_picture(channels):
    with pytest.raises(UnreadableImage, match=rf"of 4 frames; data\.channels is {channels}, and data\.bands chooses"):
        decode_with(dicom(FRAMES), channels=channels)


def test_frames_in_colour_are_refused():
    with pytest.raises(UnreadableImage, match=r"of 2 frames in colour; mpp reads one$"):
        decode_with(dicom(RGB, NumberOfFrames=2, PixelData=2 * RGB.tobytes()))


@pytest.mark.parametrize("shared", [True, False])
def test_scales_of_frames_in_groups(shared):
    groups = []
    for number in range(1 if shared else 4):
        scale, group = Dataset(), Dataset()
        scale.RescaleSlope, scale.RescaleIntercept = number + 1, -100 * number
        group.PixelValueTransformationSequence = Sequence([scale])
        groups.append(group)
    name = "SharedFunctionalGroupsSequence" if shared else "PerFrameFunctionalGroupsSequence"
    slopes = np.arange(1, 2 if shared else 5)[:, None, None]
    values = values_of(dicom(FRAMES, **{name: Sequence(groups)}), channels=4)
    np.testing.assert_array_equal(values, FRAMES * slopes - 100 * (slopes - 1))


# --- masks ---


def test_a_mask_has_the_numbers_that_are_stored():
    numbers = np.arange(40 * 48, dtype=np.uint16).reshape(40, 48) % 7
    data = dicom(numbers, RescaleSlope=3, RescaleIntercept=-5, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(read_mask(data, ImagesConfig()), numbers)
    for refused in (dicom(numbers, LossyImageCompression="01"), dicom(RGB), dicom(FRAMES)):
        with pytest.raises(UnreadableImage):
            read_mask(refused, ImagesConfig())


# --- broken and malicious files ---

JPEG_FRAME = imagecodecs.jpeg8_encode(GREY_8)
BROKEN = {
    "a report": (file_of(described((4, 4))), "without pixels, such as a report"),
    "no rows": (dicom(GREY_8, Rows=0), "no pixels"),
    "too large": (dicom(GREY_8, Rows=60000, Columns=60000), r"data\.max_pixels"),
    "too many frames": (dicom(GREY_8, NumberOfFrames=2000000), r"data\.max_pixels"),
    "fewer pixels": (dicom(GREY_8, Rows=41), "fewer pixels than its header announces"),
    "fewer frames": (dicom(FRAMES, NumberOfFrames=5), "fewer pixels"),
    "large JPEG": (dicom(GREY_8[:10], [JPEG_FRAME], JPEGBaseline8Bit), "frame of 40 x 48 x 1 .* announces 10 x 48 x 1"),
    "large J2K": (dicom(GREY_8[:10], [jpeg_2000(GREY_8)], JPEG2000), "a frame of 40 x 48 x 1 in a DICOM file"),
    "large JPEG-LS": (
        dicom(GREY_8[:10], [imagecodecs.jpegls_encode(GREY_8)], JPEGLSLossless),
        "a frame of 40 x 48 x 1 in a DICOM file",
    ),
    "many samples": (dicom(GREY_8, [imagecodecs.jpeg8_encode(RGB)], JPEGBaseline8Bit), "a frame of 40 x 48 x 3"),
    "no JPEG": (dicom(GREY_8, [b"\xff\xd8 no frame"], JPEGLSLossless), "a frame without a size"),
    "fill bytes": (dicom(GREY_8, [b"\xff\xd8\xff\xff" + JPEG_FRAME[2:]], JPEGBaseline8Bit), "a frame without a size"),
    "RLE of fewer rows": (changed("MR_small_RLE", Rows=65), "cannot be decoded"),
    "RLE of more rows": (changed("MR_small_RLE", Rows=9), "cannot be decoded"),
    "a scale of 0": (dicom(GREY_8, RescaleSlope=0, RescaleIntercept=3), "a slope of 0"),
    "high bits": (dicom(GREY_12, BitsStored=12, HighBit=15), "bits do not begin with the lowest"),
    "no scale": (dicom(GREY_8, RescaleSlope=2), "slope or intercept"),
    "absent syntax": (dicom(GREY_8).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0"), "cannot be decoded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(kind):
    data, reason = BROKEN[kind]
    with pytest.raises(UnreadableImage, match=reason) as error:
        decode_with(data, bands=(1,), channels=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["CT_small", "MR_small_jpeg_ls_lossless", "SC_rgb_jpeg_dcmtk", "MR_small_RLE"])
def test_no_file_that_was_cut_off_ends_a_run(name):
    whole = pydicoms(name)
    for size in np.linspace(132, len(whole) - 3000 if name == "CT_small" else len(whole) // 2, 40).astype(int):
        with pytest.raises(UnreadableImage):
            decode_with(whole[:size])


def test_noise_in_a_file_ends_no_run():
    whole = np.frombuffer(pydicoms("SC_rgb_rle"), np.uint8)
    for seed in range(60):
        noisy = whole.copy()
        rng = np.random.default_rng(seed)
        noisy[rng.integers(132, len(whole), 20)] = rng.integers(0, 256, 20)
        try:
            decode_with(noisy.tobytes())
        except UnreadableImage as error:
            assert "\n" not in str(error)


def test_what_inflates_beyond_all_pixels_is_refused_before():
    whole = dicom(GREY_8, syntax=DeflatedExplicitVRLittleEndian)
    assert decode_with(whole, channels=1).shape == (1, 40, 48)
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    meta = whole[: whole.index(b"1.2.840.10008.1.2.1.99") + 200]
    dataset = dcmread(io.BytesIO(whole))
    length = 132 + 12 + dataset.file_meta.FileMetaInformationGroupLength
    bomb = meta[:length] + deflater.compress(bytes(2**25)) + deflater.flush()
    assert len(bomb) < 2**16
    with pytest.raises(UnreadableImage, match=r"more than 4000000 bytes \(four for each of data\.max_pixels\)"):
        decode_with(bomb, max_pixels=1_000_000)


# --- privacy ---


def test_no_tag_is_quoted(capsys, recwarn, caplog):
    data = dicom(GREY_12, RescaleSlope="1.5", RescaleIntercept="4.5").replace(b"1.5 ", b"Erik")
    with pytest.raises(ValueError, match="Erik"):  # as pydicom says it
        float(dcmread(io.BytesIO(data)).RescaleSlope)
    recwarn.clear()
    caplog.clear()
    capsys.readouterr()
    with pytest.raises(UnreadableImage, match=r"^a DICOM file that cannot be decoded \(ValueError\)$"):
        decode_with(data, channels=1, range=(0.0, 1.0))
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert not recwarn.list and not caplog.records


def test_only_numbers_about_pixels_are_read():
    dataset = module.read_tags(dicom(GREY_8), ImagesConfig())
    assert not any(secret in str(dataset) for secret in SECRETS)


# --- which files ---


def test_dicom_is_known_by_its_preamble():
    data = dicom(GREY_8)
    assert is_picture(data[:256])
    assert kind_of_file(data) == "a DICOM file"
    assert kind_of_file(pydicoms("MR_small")) == "a DICOM file"  # whose preamble is the beginning of a TIFF
    contents = pydicoms("dicomdirtests/DICOMDIR-empty")
    assert not is_picture(contents[:256])
    assert kind_of_file(contents) == "a table of contents (DICOMDIR)"


def test_files_without_an_ending_are_left_out_where_pydicom_is_missing(tmp_path, without_module):
    for number in range(3):
        (tmp_path / f"IM{number}").write_bytes(dicom(GREY_8))
        (tmp_path / f"{number}.dcm").write_bytes(dicom(GREY_8))
    (tmp_path / "photo").write_bytes(encoded(RGB))
    (tmp_path / "DICOMDIR").write_bytes(pydicoms("dicomdirtests/DICOMDIR-empty"))
    assert len(walk(str(tmp_path)).paths()) == 7
    without_module("pydicom")
    tree = walk(str(tmp_path))
    assert tree.images == {"": ["photo"]}
    assert sorted(map(len, tree.left_out.values())) == [1, 3, 3]
    assert "pip install pydicom" in tree.lines()[0]


def test_without_pydicom_the_reason_says_what_to_install(without_module):
    without_module("pydicom")
    with pytest.raises(UnreadableImage, match=r"^DICOM files need pydicom: pip install pydicom$"):
        decode_with(dicom(GREY_8))

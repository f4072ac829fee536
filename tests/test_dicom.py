"""DICOM files: their pixels against pydicom's own functions and known arrays; and the privacy of tags."""

import io
import warnings
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import torch
from colours import write
from conftest import FAST, TINY, picture
from dicom_files import SECRETS, dicom
from image_files import decode_with, unreadable
from numpy.testing import assert_allclose, assert_array_equal
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.pixels import apply_modality_lut, apply_windowing, pixel_array
from pydicom.uid import JPEGExtended12Bit, JPEGLossless, JPEGLosslessSV1, JPEGLSLossless

from evaluation import check, export, knn, linear, report, visualize
from mpp import prepare
from mpp.config import ImagesConfig
from mpp.data.decoding.decode import read_values
from mpp.data.decoding.formats import is_image, what_is
from mpp.data.folder import walk
from mpp.errors import UnreadableImage

GREY_8 = picture(0)[..., 0].copy()
GREY_12 = (np.arange(40 * 48).reshape(40, 48) * 2 % 4096).astype(np.uint16)
SIGNED = np.linspace(-1000, 1000, 40 * 48).reshape(40, 48).astype(np.int16)


def pydicoms(name: str) -> bytes:
    """A file of pydicom's tests."""
    return Path(get_testdata_file(f"{name}.dcm", download=False)).read_bytes()


def values_of(data: bytes, **settings) -> np.ndarray:
    """The values (C, H, W) of a file in its own units."""
    return read_values(data, ImagesConfig(**settings))


# --- pixels ---

READ_BY_PYDICOM = {  # the plugin of pydicom that decodes; none: they are not compressed
    "": "CT_small ExplVR_BigEnd MR_small_bigendian MR_small_padded SC_rgb_small_odd SC_ybr_full_422_uncompressed "
    "liver_1frame rtdose_1frame",
    "pydicom": "MR_small_RLE SC_rgb_rle SC_rgb_rle_16bit SC_rgb_rle_32bit",
    "pillow": "SC_rgb_gdcm_KY SC_rgb_jpeg SC_rgb_jpeg_dcmtk 693_J2KI J2K_pixelrep_mismatch JPEG2000",
}


@pytest.mark.parametrize(
    "plugin, name", [(plugin, name) for plugin, names in READ_BY_PYDICOM.items() for name in names.split()]
)
def test_pydicoms_files_as_pydicom_reads_them(plugin, name):
    data = pydicoms(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = dcmread(io.BytesIO(data))
        expected = apply_modality_lut(pixel_array(dataset, decoding_plugin=plugin), dataset)
    expected = np.atleast_3d(expected).transpose(2, 0, 1)
    assert_array_equal(values_of(data, channels=len(expected)), expected)


TABLE = np.random.default_rng(0).integers(0, 65536, (3, 256), dtype=np.uint16)
PALETTE = {"PhotometricInterpretation": "PALETTE COLOR"}
for colour, entries in zip(("Red", "Green", "Blue"), TABLE, strict=True):
    PALETTE[f"{colour}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
    PALETTE[f"{colour}PaletteColorLookupTableData"] = entries.tobytes()


def test_a_palette_is_colours():
    assert_array_equal(values_of(dicom(GREY_8, **PALETTE)), TABLE[:, GREY_8])


def test_numbers_of_16_bits_are_compressed_without_losses():
    unsigned = SIGNED.view(np.uint16)
    for pixels, syntax, frame in (
        (GREY_12, JPEGLosslessSV1, imagecodecs.jpeg8_encode(GREY_12, lossless=True)),
        (SIGNED, JPEGLossless, imagecodecs.ljpeg_encode(unsigned)),
        (SIGNED, JPEGLSLossless, imagecodecs.jpegls_encode(unsigned)),
    ):
        assert_array_equal(values_of(dicom(pixels, [frame], syntax), channels=1)[0], pixels)


def test_jpeg_of_12_bits():
    smooth = np.tile(np.linspace(0, 4095, 48), (40, 1)).astype(np.uint16)
    frame = imagecodecs.jpeg8_encode(smooth, level=99, bitspersample=12)
    decoded = values_of(dicom(smooth, [frame], JPEGExtended12Bit, BitsStored=12, HighBit=11), channels=1)[0]
    assert np.abs(decoded.astype(int) - smooth).max() < 10


def test_frames_are_bands():
    frames = np.stack([GREY_12, GREY_12 // 2, GREY_12 // 3, GREY_12 // 4])
    data = dicom(frames)
    assert_array_equal(values_of(data, channels=4), frames)
    assert_array_equal(values_of(data, channels=1, bands=(3,)), frames[2:3])
    assert_array_equal(values_of(dicom(frames[:3])), frames[:3])
    compressed = dicom(frames, [imagecodecs.jpegls_encode(frame) for frame in frames], JPEGLSLossless)
    assert_array_equal(values_of(compressed, channels=4), frames)
    with unreadable("of 4 frames; they must be 1 in grey"):
        decode_with(data, channels=1)


# --- units ---


def test_fractions_need_a_range():
    data = dicom(GREY_12, RescaleSlope="0.37", RescaleIntercept="1.5")
    assert_allclose(values_of(data, channels=1)[0], GREY_12 * 0.37 + 1.5, rtol=1e-6)
    with unreadable(r"no agreed range; data\.range says which"):
        decode_with(data, channels=1)
    decoded = decode_with(data, channels=1, range=(0.0, 2000.0))[0]
    assert_allclose(decoded, (GREY_12 * 0.37 + 1.5) * 255 / 2000, rtol=1e-5)


@pytest.mark.parametrize(
    "tags",
    [
        dict(WindowCenter=[40, 500], WindowWidth=[400, 1000], VOILUTFunction="LINEAR"),
        dict(WindowCenter=[40, 500], WindowWidth=[400, 1000], VOILUTFunction="LINEAR_EXACT"),
        dict(WindowCenter=0, WindowWidth=401),
    ],
)
def test_the_files_own_window_is_pydicoms(tags):
    darkest, brightest = -1024, 3071
    data = dicom(GREY_12, RescaleSlope=1, RescaleIntercept=darkest, BitsStored=12, HighBit=11, **tags)
    dataset = dcmread(io.BytesIO(data))
    windowed = apply_windowing(apply_modality_lut(dataset.pixel_array, dataset), dataset)
    expected = (windowed - darkest) * 255 / (brightest - darkest)
    assert_allclose(decode_with(data, channels=1, range="window")[0], expected, atol=1e-3)


@pytest.mark.parametrize(
    "tags",
    [
        dict(WindowWidth=400),
        dict(WindowCenter=0, WindowWidth=1),
        dict(WindowCenter=0, WindowWidth=400, VOILUTFunction="SIGMOID"),
        dict(WindowCenter=0, WindowWidth=400, **PALETTE),
    ],
)
def test_a_file_without_a_linear_window_of_grey_is_refused(tags):
    with pytest.raises(UnreadableImage, match="without a linear window"):
        decode_with(dicom(GREY_8, **tags), channels=1, range="window")


@pytest.mark.parametrize(
    "intercept, dtype",
    [
        (None, np.uint16),
        (-1, np.int32),
        (0, np.uint16),
        (-(2**15), np.int16),
        (-(2**15) - 1, np.int32),
        (0.5, np.float32),
    ],
)
def test_whole_numbers_stay_whole_in_the_shortest_type_that_holds_them(intercept, dtype):
    """Blank units are none."""
    slope = None if intercept is None else 1
    values = values_of(dicom(GREY_12, RescaleSlope=slope, RescaleIntercept=intercept), channels=1)[0]
    assert values.dtype == dtype
    assert_array_equal(values, GREY_12.astype(float) + (intercept or 0))


@pytest.mark.parametrize("window", [(-50.0, 150.0), (10.0, 300.0), (20.0, 200.5)])
def test_where_0_is_white_grey_is_turned_round(window):
    """Limits may lie beyond the numbers' type; bands stay as they are."""
    low, high = window
    tags = dict(WindowCenter=(low + high) / 2, WindowWidth=high - low, VOILUTFunction="LINEAR_EXACT")
    data = dicom(GREY_8, PhotometricInterpretation="MONOCHROME1", **tags)
    expected = np.clip((high - GREY_8.astype(float)) * 255 / (high - low), 0, 255)
    for limits in (window, "window"):
        assert_allclose(decode_with(data, channels=1, range=limits)[0], expected, atol=1e-3)
    assert torch.equal(decode_with(data, channels=1)[0], torch.from_numpy(255 - GREY_8))
    assert_array_equal(values_of(data, channels=1, bands=(1,))[0], GREY_8)


def test_nodata_is_in_rescaled_units():
    holes = GREY_12.copy()
    holes[:5] = 0
    data = dicom(holes, RescaleSlope=1, RescaleIntercept=-1024)
    filled = values_of(data, channels=1, nodata=-1024.0)[0]
    assert (filled[:5] == np.rint(holes[5:].mean() - 1024)).all()


# --- privacy, and which files ---


def test_no_tag_is_quoted(capsys, recwarn, caplog):
    data = dicom(GREY_12, RescaleSlope="1.5", RescaleIntercept="4.5").replace(b"1.5 ", b"Erik")
    recwarn.clear()
    caplog.clear()
    capsys.readouterr()
    with unreadable(r"^a DICOM file that cannot be decoded: ValueError$"):
        decode_with(data, channels=1, range=(0.0, 1.0))
    assert "".join(capsys.readouterr()) == ""
    assert not recwarn.list and not caplog.records


def test_files_are_known_by_their_preamble_without_an_ending(tmp_path):
    assert what_is(pydicoms("MR_small")) == "a DICOM file"  # whose preamble is the beginning of a TIFF
    contents = pydicoms("dicomdirtests/DICOMDIR-empty")
    assert not is_image(contents[:256])
    assert what_is(contents) == "a table of contents (DICOMDIR)"
    write(tmp_path, {"DICOMDIR": contents, "IM0": dicom(GREY_8), "2.dcm": dicom(GREY_8)})
    assert walk(str(tmp_path)).images == ["2.dcm", "IM0"]


# --- a folder of scans through all commands of a user; no tag of a file is in anything that they write or print ---


HOUNSFIELD = dict(RescaleSlope=1, RescaleIntercept=-1024, BitsStored=12, HighBit=11)
SETTINGS = ("--data.channels=1", "--data.range=[-1024,1000]")
ENCODED = [secret.encode(encoding) for secret in SECRETS for encoding in ("utf-8", "utf-16-le")]


def write_scans(folder: Path, count: int) -> None:
    """Slices in two folders of classes, some compressed, some without an ending; and one that was cut off."""
    for number in range(count):
        pixels = picture(number, (40, 36))[..., 0].astype(np.uint16) * (8 if number % 2 else 12)
        compressed = [] if number % 3 else [[imagecodecs.jpegls_encode(pixels)], JPEGLSLossless]
        name = f"{'healthy' if number % 2 else 'ill'}/IM{number:04d}" + (".dcm" if number % 5 else "")
        write(folder, {name: dicom(pixels, *compressed, **HOUNSFIELD)})
    write(folder, {"ill/cut.dcm": dicom(pixels)[:1400]})


def assert_no_secret(*folders: Path) -> None:
    """No value of a tag is in any file."""
    files = [file for folder in folders for file in [folder, *folder.rglob("*")] if file.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        assert not [secret for secret in ENCODED if secret in content], file


@pytest.mark.faults
def test_scans_train_and_are_probed_reported_and_exported(pretrain, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scans(tmp_path / "scans", 24)
    source = ["--data.path=scans", *SETTINGS]
    run = pretrain(*source, "--model.mean=auto", "--model.std=auto")
    check.main([*TINY, *source, "--run.dir=checked"])
    knn.main([*FAST, f"--encoder={run}", f"--out={run}/knn.json"])
    linear.main([*FAST, f"--encoder={run}", f"--out={run}/linear.json"])
    report.main([*FAST, f"--encoder={run}"])
    visualize.main([*FAST, f"--encoder={run}", "--out=pictures"])
    words = ["--format=torch_export", "--images=6", "--threads=1", "--data.workers=0"]
    export.main([f"--encoder={run}", "--out=encoder.pt2", *words])
    prepare.main(["--data.path=scans", "--out=prepared", "--data.channels=1", "--format=npy", "--workers=1"])
    printed = "".join(capfd.readouterr())
    assert "cut.dcm: a DICOM file that cannot be decoded" in printed
    assert not [secret for secret in SECRETS if secret in printed]
    assert_no_secret(run, *map(Path, ("checked", "pictures", "prepared", "encoder.pt2")))

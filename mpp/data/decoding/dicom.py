"""DICOM files by pydicom: pixels in the units that the file says. Of its tags, nothing leaves this module.

Messages are of this module: pydicom's may quote a patient's name.
"""

import io
import logging
import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpp.config import WINDOW, ImagesConfig
from mpp.data.decoding.channels import Limits, Stored, bands_to_front, check_size, is_picture, limits_of_bits
from mpp.data.decoding.coded import jpeg2000_header
from mpp.errors import UnreadableImage

if TYPE_CHECKING:
    from pydicom import Dataset
    from pydicom.pixels.decoders.base import DecodeRunner

FRAME_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
READ_TAGS = [
    *("PixelData", "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PlanarConfiguration"),
    *("ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
    *("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("ModalityLUTSequence", *FRAME_GROUPS),
    *(f"{name}PaletteColorLookupTable{part}" for name in ("Red", "Green", "Blue") for part in ("Descriptor", "Data")),
]
"""All tags that are read: pixels, and numbers about them."""
DEFLATED = b"1.2.840.10008.1.2.1.99"  # a transfer syntax, as are the next
DECODERS = {
    **dict.fromkeys([f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70)], "jpeg8_decode"),
    **dict.fromkeys([f"1.2.840.10008.1.2.4.{number}" for number in (80, 81)], "jpegls_decode"),
    **dict.fromkeys([f"1.2.840.10008.1.2.4.{number}" for number in (90, 91, 201, 202, 203)], "jpeg2k_decode"),
}
"""Transfer syntax -> the function of imagecodecs that decodes its frames."""
DECODER_DEPENDENCIES = dict.fromkeys(DECODERS, ("imagecodecs",))  # pydicom reads it, and calls the next
is_available = DECODERS.__contains__
PLUGIN = "imagecodecs"


def read_dicom(data: bytes, config: ImagesConfig) -> Stored:
    """The pixels of a DICOM file, rescaled; or the frames, as bands, where there are several.

    Of a picture, several frames have to be as many as the channels.

    Raises:
        UnreadableImage: with a reason in which no value of a tag occurs but sizes and numbers of bits.
    """
    import pydicom  # takes a quarter of a second
    from pydicom.pixels import apply_color_lut

    if DEFLATED in data:  # of any size once it is inflated
        raise UnreadableImage("a deflated DICOM file, which mpp does not read; inflate it, such as by dcmconv +te")
    pydicom.config.convert_wrong_length_to_UN = True  # instead of an exception of its own
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = pydicom.dcmread(io.BytesIO(data), specific_tags=READ_TAGS)
        check_header(dataset, config)
        stored = decode_frames(dataset)
        if dataset.PhotometricInterpretation == "PALETTE COLOR":
            values, limits = bands_to_front(apply_color_lut(stored[0], dataset)), None
        else:
            values, limits = rescale(stored, dataset)
        if config.range == WINDOW:
            limits = read_window(dataset)
        is_inverted = dataset.PhotometricInterpretation == "MONOCHROME1" and is_picture(config)
        return Stored(values, limits, is_inverted=is_inverted)


def check_header(dataset: "Dataset", config: ImagesConfig) -> None:
    """Refuse, before pixels are decoded, files without pixels, too large ones, and frames that are no image."""
    if "PixelData" not in dataset:
        raise UnreadableImage("a DICOM file without whole-number pixels, such as a report")
    groups = [group for name in FRAME_GROUPS for group in dataset.get(name) or []]
    if dataset.get("ModalityLUTSequence") or any("PixelValueTransformationSequence" in group for group in groups):
        raise UnreadableImage("a DICOM file with units in a table or of frames; store each frame as a plain file")
    frames = int(dataset.get("NumberOfFrames") or 1)
    check_size((frames * dataset.SamplesPerPixel, dataset.Rows, dataset.Columns), config)
    is_plain = not dataset.file_meta.TransferSyntaxUID.is_compressed
    if is_plain and dataset.get("HighBit", dataset.BitsStored - 1) != dataset.BitsStored - 1:
        raise UnreadableImage("a DICOM file whose bits do not begin with the lowest")
    has_colours = not dataset.PhotometricInterpretation.startswith("MONOCHROME")
    if frames > 1 and (has_colours or (is_picture(config) and frames != config.channels)):
        allowed = f"{config.channels} in grey, as data.channels, or chosen by data.bands"
        raise UnreadableImage(f"a DICOM file of {frames} frames; they must be {allowed}")


def decode_frames(dataset: "Dataset") -> NDArray:
    """The stored numbers (n, H, W) of all frames, or of the samples of one frame: RGB or indices of a palette."""
    from pydicom.pixels import get_decoder

    syntax = dataset.file_meta.TransferSyntaxUID
    decoder = get_decoder(syntax)
    plugin = PLUGIN if syntax in DECODERS else ""
    if plugin and plugin not in decoder.available_plugins:
        decoder.add_plugin(plugin, (__name__, decode_frame.__name__))
    pixels, _ = decoder.as_array(dataset, decoding_plugin=plugin, allow_excess_frames=False)
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    return bands_to_front(pixels) if pixels.ndim == 2 or dataset.SamplesPerPixel > 1 else pixels


def decode_frame(frame: bytes, runner: "DecodeRunner") -> bytes:
    """The values of a compressed frame, as pydicom wants them."""
    import imagecodecs

    name = DECODERS[runner.transfer_syntax]
    options = {}
    has_colours = runner.samples_per_pixel == 3
    # A frame of another size than its file announces is refused.
    if name == "jpeg2k_decode":
        sides, _ = jpeg2000_header(frame)
        if sides[:2] != (runner.rows, runner.columns):
            raise UnreadableImage("a DICOM file of a frame with other sides")
    else:
        sides = (runner.rows, runner.columns, 3) if has_colours else (runner.rows, runner.columns)
        options["out"] = np.empty(sides, np.uint8 if runner.bits_stored <= 8 else np.uint16)
    if name == "jpeg8_decode" and has_colours:  # pydicom converts colours itself
        options |= {"colorspace": "RGB", "outcolorspace": "RGB"}
    values = getattr(imagecodecs, name)(frame, **options)
    runner.set_option("bits_allocated", 8 * values.itemsize)
    runner.set_option("planar_configuration", 0)
    if runner.photometric_interpretation in ("YBR_ICT", "YBR_RCT"):  # JPEG 2000's own, which its decoder undoes
        runner.set_option("photometric_interpretation", "RGB")
    return values.tobytes()


def rescale(stored: NDArray, dataset: "Dataset") -> tuple[NDArray, Limits | None]:
    """Stored numbers (n, H, W) in the units of the file, and the limits of all that their bits hold.

    Whole numbers stay whole where the rescaling is whole, in the shortest type that holds the limits. Fractions, and
    more than 16 bits, have no agreed limits.
    """
    low, high = limits_of_bits(dataset.BitsStored, dataset.PixelRepresentation)
    dtype = stored.dtype
    slope, intercept = number_of(dataset, "RescaleSlope"), number_of(dataset, "RescaleIntercept")
    if not (math.isnan(slope) and math.isnan(intercept)):
        if slope == 0 or not math.isfinite(slope * intercept):
            raise UnreadableImage("a DICOM file whose rescale slope is 0, or no finite number")
        stored = stored * slope + intercept
        low, high = sorted((low * slope + intercept, high * slope + intercept))
        is_whole = slope % 1 == intercept % 1 == 0
        types = [dtype, np.int16, np.int32] if is_whole else []
        fitting = (each for each in types if np.iinfo(each).min <= low and high <= np.iinfo(each).max)
        dtype = np.dtype(next(fitting, np.float32))
    has_limits = dtype.kind != "f" and dataset.BitsStored <= 16
    return stored.astype(dtype, copy=False), (low, high) if has_limits else None


def read_window(dataset: "Dataset") -> Limits:
    """The values that are black and white in the first window of a file."""
    center, width = number_of(dataset, "WindowCenter"), number_of(dataset, "WindowWidth")
    shape = dataset.get("VOILUTFunction", "LINEAR")
    if shape == "LINEAR":  # in pixels' whole steps, by the standard
        center, width = center - 0.5, width - 1
    is_grey = dataset.PhotometricInterpretation.startswith("MONOCHROME")
    if not is_grey or shape not in ("LINEAR", "LINEAR_EXACT") or not width > 0 or not math.isfinite(center + width):
        raise UnreadableImage("a DICOM file without a linear window, which data.range window asks for")
    return center - width / 2, center + width / 2


def number_of(dataset: "Dataset", tag: str) -> float:
    """The first number of a tag; NaN: it has none."""
    value = dataset.get(tag)
    return math.nan if value in (None, "") else float(np.ravel(value)[0])

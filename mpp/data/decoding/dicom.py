"""DICOM files by pydicom: pixels in the units that the file says. Of its tags, nothing leaves this module.

Messages are of this module: pydicom's may quote a patient's name.
"""

import contextlib
import io
import logging
import warnings
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpp.config import WINDOW, ImagesConfig
from mpp.data.decoding.channels import bands_to_front
from mpp.data.decoding.checks import BANDS_PER_PIXEL, check_size, refuse_lossy_mask
from mpp.data.decoding.wanted import Limits, StoredPixels, Wanted
from mpp.errors import UnreadableImage

if TYPE_CHECKING:
    from pydicom import Dataset

PIXEL_TAGS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
READ_TAGS = (
    *(*PIXEL_TAGS, "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PlanarConfiguration"),
    *("ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "LossyImageCompression"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    *(
        f"{colour}PaletteColorLookupTable{part}"
        for colour in ("Red", "Green", "Blue")
        for part in ("Descriptor", "Data")
    ),
)
"""All tags that are read: pixels, and numbers about them."""
INFLATED_AT_ONCE = 2**24  # bytes
LARGEST_EXACT = 2**31  # of rescaled whole numbers, which stay whole
GREY_INTERPRETATIONS = ("MONOCHROME1", "MONOCHROME2")


class Rescaling(NamedTuple):
    """Factors and summands that turn stored numbers into the units of the file."""

    slopes: NDArray[np.float64]
    """(1, 1, 1), or (n, 1, 1) for n frames."""
    intercepts: NDArray[np.float64]

    def limits(self, low: float, high: float) -> Limits:
        """The smallest and the largest value that stored numbers from `low` to `high` become."""
        ends = np.stack([low * self.slopes, high * self.slopes]) + self.intercepts
        return float(ends.min()), float(ends.max())


def read_dicom(data: bytes, wanted: Wanted, config: ImagesConfig) -> StoredPixels:
    """The pixels of a DICOM file, rescaled; or the frames, as bands, where there are several.

    Of a picture, several frames have to be as many as the channels. A mask has the numbers that are stored.

    Raises:
        UnreadableImage: with a reason in which no value of a tag occurs but sizes and numbers of bits.
    """
    with quoting_no_tags():
        dataset = read_tags(data, config)
        check_header(dataset, wanted, config)
        pixels, colours = decode_frames(dataset)
        if wanted is Wanted.MASK:
            return StoredPixels(pixels[0] if len(pixels) == 1 else pixels)
        if colours == "PALETTE COLOR":
            return StoredPixels(apply_palette(pixels, dataset))
        pixels, limits = rescale(pixels, dataset)
        of_window = window(dataset) if config.range == WINDOW else None
        is_inverted = wanted is Wanted.PICTURE and colours == "MONOCHROME1"
        if is_inverted and not (np.isfinite(limits).all() or of_window or config.limits()):
            raise UnreadableImage("floating-point numbers where 0 is white have no agreed range; data.range says which")
        has_agreed_range = pixels.dtype.kind != "f" and dataset.BitsStored <= 16
        return StoredPixels(
            pixels, limits if is_inverted else None, limits if has_agreed_range else None, window=of_window
        )


@contextlib.contextmanager
def quoting_no_tags() -> Iterator[None]:
    """Silence pydicom, and raise its errors as UnreadableImage without their words, which may quote tags."""
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except UnreadableImage:
            raise
        except Exception as error:
            raise UnreadableImage(f"a DICOM file that cannot be decoded ({type(error).__name__})") from None


def read_tags(data: bytes, config: ImagesConfig) -> "Dataset":
    """The tags of READ_TAGS; pixels may be fewer than they say.

    Floating-point pixels have no BitsStored and PixelRepresentation, which pydicom 3.0.0 asks for: they get them.
    """
    from pydicom import dcmread  # takes a quarter of a second
    from pydicom.filereader import read_dataset, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    file = io.BytesIO(data)
    read_preamble(file, force=False)
    first_group = read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag.group != 2)
    if first_group.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        check_inflated_size(file.read(), config)
    file.seek(0)
    dataset = dcmread(file, specific_tags=list(READ_TAGS))
    if "PixelData" not in dataset:
        dataset.BitsStored, dataset.PixelRepresentation = dataset.get("BitsAllocated"), 0
    return dataset


def check_inflated_size(deflated: bytes, config: ImagesConfig) -> None:
    """Refuse a deflated file whose content has more bytes than the allowed pixels."""
    allowed = BANDS_PER_PIXEL * config.max_pixels
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    size = 0
    while deflated and size <= allowed:
        size += len(inflater.decompress(deflated, INFLATED_AT_ONCE))
        deflated = inflater.unconsumed_tail
    if size > allowed:
        raise UnreadableImage(f"a deflated DICOM file of more than {allowed} bytes (four for each of data.max_pixels)")


def check_header(dataset: "Dataset", wanted: Wanted, config: ImagesConfig) -> None:
    """Refuse, before pixels are decoded, files without pixels, too large ones, and frames that are no image."""
    if not any(tag in dataset for tag in PIXEL_TAGS):
        raise UnreadableImage("a DICOM file without pixels, such as a report")
    frames, samples = frame_count(dataset), dataset.SamplesPerPixel
    check_size((frames * samples, dataset.Rows, dataset.Columns), config)
    is_grey = dataset.PhotometricInterpretation in GREY_INTERPRETATIONS
    if is_uncompressed(dataset):
        values = frames * samples * dataset.Rows * dataset.Columns
        if len(dataset.PixelData) < values * dataset.BitsAllocated // 8:
            raise UnreadableImage("a DICOM file of fewer pixels than its header announces")
        if dataset.get("HighBit", dataset.BitsStored - 1) != dataset.BitsStored - 1:
            raise UnreadableImage("a DICOM file whose bits do not begin with the lowest")
    if frames > 1 and not is_grey:
        raise UnreadableImage(f"a DICOM file of {frames} frames in colour; mpp reads one")
    if frames > 1 and wanted is Wanted.PICTURE and frames != config.channels:
        choice = "data.bands chooses those that are the channels"
        raise UnreadableImage(f"a DICOM file of {frames} frames; data.channels is {config.channels}, and {choice}")
    if wanted is Wanted.MASK and dataset.get("LossyImageCompression") == "01":
        refuse_lossy_mask("compressed with losses")


def is_uncompressed(dataset: "Dataset") -> bool:
    """Whether pixels are whole numbers one after another: neither compressed nor shortened."""
    is_shortened = dataset.PhotometricInterpretation == "YBR_FULL_422"
    return "PixelData" in dataset and not dataset.file_meta.TransferSyntaxUID.is_compressed and not is_shortened


def frame_count(dataset: "Dataset") -> int:
    """The number of frames."""
    return int(dataset.get("NumberOfFrames") or 1)


def decode_frames(dataset: "Dataset") -> tuple[NDArray, str]:
    """The stored numbers (n, H, W) of all frames, or of the samples of one frame; and their photometric interpretation.

    Colours are RGB or indices of a palette.
    """
    from pydicom.encaps import generate_frames
    from pydicom.pixels import get_decoder

    from mpp.data.decoding.dicom_frames import RLE, check_frame, plugin_for

    syntax = dataset.file_meta.TransferSyntaxUID
    plugin = plugin_for(syntax, dataset.BitsStored)
    frames = frame_count(dataset)
    if plugin and syntax != RLE:
        offsets = dataset.get("ExtendedOffsetTable"), dataset.get("ExtendedOffsetTableLengths")
        extended = offsets if all(offsets) else None
        for frame in generate_frames(dataset.PixelData, number_of_frames=frames, extended_offsets=extended):
            check_frame(frame, (dataset.Rows, dataset.Columns, dataset.SamplesPerPixel))
    pixels, about = get_decoder(syntax).as_array(dataset, decoding_plugin=plugin, allow_excess_frames=False)
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    if frames == 1:
        pixels = bands_to_front(pixels)
    return pixels, about["photometric_interpretation"]


def apply_palette(indices: NDArray, dataset: "Dataset") -> NDArray:
    """RGB (3, H, W) of indices (1, H, W) of the file's palette."""
    from pydicom.pixels import apply_color_lut

    return apply_color_lut(indices[0], dataset).transpose(2, 0, 1)


def rescale(pixels: NDArray, dataset: "Dataset") -> tuple[NDArray, Limits]:
    """Stored numbers (n, H, W) in the units of the file, and the limits of all that their bits hold.

    Whole numbers stay whole where the rescaling is whole, in the shortest type that holds the limits.
    """
    if pixels.dtype.kind == "f":
        low, high = -np.inf, np.inf
    elif dataset.PixelRepresentation:
        low, high = -(2 ** (dataset.BitsStored - 1)), 2 ** (dataset.BitsStored - 1) - 1
    else:
        low, high = 0, 2**dataset.BitsStored - 1
    if dataset.get("ModalityLUTSequence"):
        return apply_table(pixels, dataset)
    rescaling = read_rescaling(dataset, len(pixels))
    if rescaling is None:
        return pixels, (low, high)
    limits = rescaling.limits(low, high)
    is_whole = not (rescaling.slopes % 1).any() and not (rescaling.intercepts % 1).any()
    if pixels.dtype.kind == "f" or not is_whole or max(map(abs, limits)) >= LARGEST_EXACT:
        exact = pixels.astype(np.float64) * rescaling.slopes + rescaling.intercepts
        return exact.astype(np.float32), limits
    types = pixels.dtype, np.dtype(np.int16), np.dtype(np.int32)
    shortest = next(dtype for dtype in types if np.iinfo(dtype).min <= limits[0] and limits[1] <= np.iinfo(dtype).max)
    rescaled = pixels * rescaling.slopes.astype(np.int64) + rescaling.intercepts.astype(np.int64)
    return rescaled.astype(shortest), limits


def apply_table(pixels: NDArray, dataset: "Dataset") -> tuple[NDArray, Limits]:
    """Stored numbers in the units of the file, by its table (modality LUT), and the limits of the table's bits."""
    from pydicom.pixels import apply_modality_lut

    bits = dataset.ModalityLUTSequence[0].LUTDescriptor[2]
    return apply_modality_lut(pixels, dataset), (0, 2**bits - 1)


def read_rescaling(dataset: "Dataset", frames: int) -> Rescaling | None:
    """The rescaling of a file, or of each of its frames; None: numbers are stored as they are."""
    groups = describing_frames(dataset, "PixelValueTransformationSequence")
    slopes = [group.get("RescaleSlope") for group in groups]
    intercepts = [group.get("RescaleIntercept") for group in groups]
    if set(slopes) | set(intercepts) <= {None}:
        return None
    rescaling = Rescaling(*(np.array(numbers, np.float64)[:, None, None] for numbers in (slopes, intercepts)))
    if len(groups) not in (1, frames) or not np.isfinite(rescaling).all() or not rescaling.slopes.all():
        raise UnreadableImage("a DICOM file whose rescale slope or intercept is absent, no number or a slope of 0")
    return rescaling


def window(dataset: "Dataset") -> Limits:
    """The values that are black and white in the first window of a file; of several frames, in that of the first."""
    group = describing_frames(dataset, "FrameVOILUTSequence")[0]
    center, width = (first_number(group.get(f"Window{part}")) for part in ("Center", "Width"))
    shape = group.get("VOILUTFunction", "LINEAR")
    if center is None or width is None or shape not in ("LINEAR", "LINEAR_EXACT"):
        raise UnreadableImage("a DICOM file without a linear window, which data.range window asks for")
    if shape == "LINEAR":  # in pixels' whole steps, by the standard
        center, width = center - 0.5, width - 1
    if not (width > 0 and np.isfinite([center, width]).all()):
        raise UnreadableImage("a DICOM file with an empty window, which data.range window asks for")
    return center - width / 2, center + width / 2


def first_number(value: Any) -> float | None:
    """A number, or the first of several; None: there is none."""
    if value is None or value == "":
        return None
    numbers = np.atleast_1d(np.array(value, np.float64))
    return float(numbers[0]) if len(numbers) else None


def describing_frames(dataset: "Dataset", sequence: str) -> "list[Dataset]":
    """Tags about the frames: one set for all, or one for each. Newer kinds of files have them in groups."""
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    by_frame = dataset.get("PerFrameFunctionalGroupsSequence") or []
    groups = [group[sequence][0] for group in shared if sequence in group]
    groups = groups or [group[sequence][0] for group in by_frame if sequence in group]
    return groups or [dataset]

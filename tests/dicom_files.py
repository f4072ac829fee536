"""DICOM files that tests write, with tags that name a patient."""

import io

import numpy as np
import pytest

pytest.importorskip("pydicom", reason="pip install -e '.[dicom]'")

from pydicom import Dataset, Sequence
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

PATIENT = "Mustermann^Erika"
SECRETS = (
    PATIENT,
    "Mustermann",
    "KV-4711-0815",
    "19580229",
    "Waldklinik",
    "Dr^Sauerbruch",
    "1.2.826.0.1.3680043.77.4711",
)
"""Values of tags that name a patient, a physician, a hospital or a study."""


def dicom(pixels: np.ndarray, frames: list[bytes] | None = None, syntax=ExplicitVRLittleEndian, **tags) -> bytes:
    """A DICOM file of pixels (H, W), (H, W, 3) or (n, H, W), of all bits of their type.

    Args:
        frames: the pixels compressed, a frame each.
        syntax: their transfer syntax.
        tags: other tags, or other values.
    """
    has_colours = pixels.shape[-1] == 3
    dataset = described(pixels.shape[:2] if has_colours else pixels.shape[-2:])
    dataset.SamplesPerPixel = 3 if has_colours else 1
    dataset.PhotometricInterpretation = "RGB" if has_colours else "MONOCHROME2"
    if has_colours:
        dataset.PlanarConfiguration = 0
    elif pixels.ndim == 3:
        dataset.NumberOfFrames = len(pixels)
    dataset.BitsAllocated = 8 * pixels.itemsize
    dataset.BitsStored = 8 * pixels.itemsize
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = encapsulate(frames) if frames else pixels.tobytes() + bytes(pixels.nbytes % 2)
    dataset["PixelData"].VR = "OB" if frames or pixels.itemsize == 1 else "OW"
    for name, value in tags.items():
        setattr(dataset, name, value)
    return file_of(dataset, syntax)


def described(size: tuple[int, int]) -> Dataset:
    """Tags without pixels."""
    dataset = Dataset()
    dataset.SOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = generate_uid()
    dataset.PatientName, dataset.PatientID, dataset.PatientBirthDate = SECRETS[0], SECRETS[2], SECRETS[3]
    dataset.InstitutionName, dataset.ReferringPhysicianName, dataset.StudyInstanceUID = SECRETS[4:]
    dataset.Rows, dataset.Columns = size
    return dataset


def file_of(dataset: Dataset, syntax=ExplicitVRLittleEndian) -> bytes:
    """A DICOM file."""
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()


def in_groups(**tags) -> Sequence:
    """A sequence of one group of tags."""
    group = Dataset()
    for name, value in tags.items():
        setattr(group, name, value)
    return Sequence([group])

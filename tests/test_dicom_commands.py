"""A folder of scans through all commands of a user; no tag of a file is in anything that they write or print."""

from pathlib import Path

import imagecodecs
import numpy as np
import pytest
from classified_images import FAST
from conftest import TINY, picture
from dicom_files import SECRETS, dicom
from pydicom.uid import JPEGLosslessSV1, JPEGLSLossless

from evaluation import check, export, knn, linear, report, visualize
from mpp import prepare

HOUNSFIELD = dict(RescaleSlope=1, RescaleIntercept=-1024, BitsStored=12, HighBit=11)
SETTINGS = ("--data.channels=1", "--data.range=[-1024,1000]")
IN_UTF_16 = [secret.encode("utf-16-le") for secret in SECRETS]


def write_scans(folder: Path, count: int) -> None:
    """Slices in two folders of classes, some compressed, some without an ending; and one that was cut off."""
    for number in range(count):
        pixels = picture(number, (40, 36))[..., 0].astype(np.uint16) * (8 if number % 2 else 12)
        compressed = {
            0: dict(frames=[imagecodecs.jpegls_encode(pixels)], syntax=JPEGLSLossless),
            1: dict(frames=[imagecodecs.ljpeg_encode(pixels)], syntax=JPEGLosslessSV1),
        }
        name = f"{'healthy' if number % 2 else 'ill'}/IM{number:04d}" + (".dcm" if number % 3 else "")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(dicom(pixels, **compressed.get(number % 5, {}), **HOUNSFIELD))
    (folder / "ill" / "cut.dcm").write_bytes(dicom(pixels)[:1400])


def assert_no_secret(*folders: Path) -> None:
    """No value of a tag is in any file."""
    files = [file for folder in folders for file in [folder, *folder.rglob("*")] if file.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        for secret in [*map(str.encode, SECRETS), *IN_UTF_16]:
            assert secret not in content, file


@pytest.mark.faults
def test_scans_train_and_are_probed_reported_and_exported(pretrain, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scans = tmp_path / "scans"
    write_scans(scans, 60)
    source = [f"--data.path={scans}", *SETTINGS]
    run = pretrain(*source, "--model.mean=auto", "--model.std=auto")
    check.main([*TINY, *source, f"--run.dir={tmp_path}/checked"])
    knn.main([*FAST, f"--encoder={run}", f"--out={run}/knn.json"])
    linear.main([*FAST, f"--encoder={run}", f"--out={run}/linear.json"])
    report.main([*FAST, f"--encoder={run}"])
    visualize.main([*FAST, f"--encoder={run}", f"--out={tmp_path}/pictures"])
    words = ["--format=torch_export", "--images=6", "--threads=1", "--data.workers=0"]
    export.main([f"--encoder={run}", f"--out={tmp_path}/encoder.pt2", *words])
    words = ["--data.channels=1", "--format=npy", "--workers=1"]
    prepare.main([f"--data.path={scans}", f"--out={tmp_path}/prepared", *words])
    printed = capfd.readouterr()
    assert "cut.dcm: a DICOM file that cannot be decoded" in printed.out
    for secret in SECRETS:
        assert secret not in printed.out + printed.err
    assert_no_secret(run, tmp_path / "checked", tmp_path / "pictures", tmp_path / "prepared", tmp_path / "encoder.pt2")

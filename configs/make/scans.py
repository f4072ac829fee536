"""Makes the folder `scans` of 16-bit tiles of six medical images: pip install pydicom pydicom-data.

The left half of each is for training, the right half is held out.
"""

from pathlib import Path

import numpy as np
import tifffile
from pydicom import dcmread
from pydicom.data import get_testdata_file

SCANS = {
    "chest": "RG1_UNCR",
    "tibia": "RG3_UNCR",
    "shoulder": "MR2_UNCR",
    "head": "693_UNCR",
    "pancreas": "explicit_VR-UN",
    "abdomen": "MR-SIEMENS-DICOM-WithOverlays",
}
for name, file in SCANS.items():
    values = dcmread(get_testdata_file(f"{file}.dcm")).pixel_array.astype(np.float64)
    values = np.clip((values - values.min()) / (np.quantile(values, 0.999) - values.min()), 0, 1)  # each its own scale
    values = np.rint(65535 * values).astype(np.uint16)
    middle = values.shape[1] // 64 * 32  # learn from the left half, test on the right one
    for top in range(0, values.shape[0] - 63, 32):
        for left in [*range(0, middle - 63, 32), *range(middle, values.shape[1] - 63, 32)]:
            tile = values[top : top + 64, left : left + 64]
            if tile.std() > 1000:  # not the background
                out = Path("scans") / ("train" if left < middle else "test") / name / f"{top:04d}_{left:04d}.tif"
                out.parent.mkdir(parents=True, exist_ok=True)
                tifffile.imwrite(out, tile)

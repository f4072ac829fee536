"""Makes the folder `solar` of 2,362 grey images of solar cells: pip install elpv-dataset==1.0.0.post1 (91 MB).

A cell is defective where the experts' probability is above 0.5 (two thirds, or 1). Cells of one solar module are
neighbours in the numbering, so the test images are ranges of numbers, TEST: of the functional cells there every second,
as many as are defective (245).
"""

import csv
import shutil
from pathlib import Path

import elpv_dataset

TEST = [(121, 180), (301, 360), (481, 540), (661, 720), (841, 900), (1381, 1614), (1975, 2144), (2397, 2444)]
source = Path(elpv_dataset.__file__).parent / "data"
shutil.copytree(source / "images", "solar/images")
rows = []
for number, line in enumerate((source / "labels.csv").read_text().splitlines(), start=1):
    file, probability, _ = line.split()
    is_test = any(first <= number <= last for first, last in TEST)
    rows.append([file, "defective" if float(probability) > 0.5 else "functional", "test" if is_test else "train"])
defective = [row for row in rows if row[1:] == ["defective", "test"]]
functional = [row for row in rows if row[1:] == ["functional", "test"]]
for row in functional:
    row[2] = "unused"
for row in functional[::2][: len(defective)]:
    row[2] = "test"
with open("solar/metadata.csv", "w", newline="") as file:
    csv.writer(file).writerows([("file_name", "label", "split"), *rows])

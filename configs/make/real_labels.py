"""Writes `real.jsonl`: the ReaL labels of ImageNet's validation images, all classes that are right for each.

timm has the list, by the numbers of the files. Images without a right class have an empty list.
"""

import json
import pkgutil

from timm.data import ImageNetInfo

classes = ImageNetInfo().label_names()
answers = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))
with open("real.jsonl", "w") as file:
    for number, right in enumerate(answers, 1):
        row = {"file_name": f"ILSVRC2012_val_{number:08d}.JPEG", "real_label": [classes[each] for each in right]}
        file.write(json.dumps(row) + "\n")

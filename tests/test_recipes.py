"""Recipes of published datasets, each for some steps on toy images in the layout of the dataset."""

import csv
import json
import pkgutil
import re
import runpy

import datasets
import pytest
from conftest import ROOT, TINY_TUNING, encoded, picture, put_picture, read_json, write_pictures
from model_inputs import HALVES, small_vit
from timm.data import ImageNetInfo

from evaluation import finetune, predict
from evaluation.config import FinetuneConfig
from mpp.config.parsing import parse
from mpp.models.descriptions import export_encoder

CONFIGS = ROOT / "configs"
FEW = (*TINY_TUNING, "--run.steps=1", "--lrs=0.01", "--data.eval_images=6")


LAYOUTS = {  # splits, column of images, and columns of classes with their number, as a dataset is published
    "cifar100": (("train", "test"), "img", {"fine_label": 100, "coarse_label": 20}),
    "pets": (("train", "test"), "image", {"label": 37, "label_cat_dog": 2}),
    "imagenet": (("train", "validation", "test"), "image", {"label": 1000}),
}
RATES = (0.001, 0.003, 0.01, 0.03)
TABLE_4 = {  # steps, dev split, learning rates, pixels
    "cifar10": (10_000, 0.02, RATES, None),
    "cifar100": (10_000, 0.02, RATES, None),
    "pets": (500, 0.1, RATES, 384),
    "flowers": (500, 0.1, RATES, 384),
    "imagenet": (20_000, 0.01, (0.003, 0.01, 0.03, 0.06), 384),
}


def write_dataset(folder, splits, image, columns):
    """Write a dataset of the hub as it is downloaded: parquet files with declared classes; a test split of ImageNet
    has none, which is -1."""
    kinds = {image: datasets.Image()} | {name: datasets.ClassLabel(classes) for name, classes in columns.items()}
    for position, split in enumerate(splits):
        rows = []
        for number in range(12):
            row = {image: {"bytes": encoded(picture(100 * position + number)), "path": None}}
            for name, classes in columns.items():
                row[name] = -number % classes  # the last class, too
            if split == "test" and "validation" in splits:
                row["label"] = -1
            rows.append(row)
        table = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def tiny_encoder(folder, patch, side):
    """The encoder folder of an untrained ViT with patches of a published one's size."""
    export_encoder(small_vit(img_size=side, patch_size=patch, depth=1), folder, side, *HALVES, 0.875)
    return folder


@pytest.mark.parametrize("name", TABLE_4)
def test_recipes_are_those_of_the_papers_table_4(name):
    config = parse(FinetuneConfig, [f"--config=finetune/{name}"])
    assert (config.run.steps, config.dev_fraction, config.lrs, config.img_size) == TABLE_4[name]
    optim = config.optim
    assert (optim.name, optim.momentum_or_default(), optim.global_batch_size) == ("sgd", 0.9, 512)
    assert (optim.schedule, optim.weight_decay, optim.clip, optim.warmup_steps) == ("cosine", 0, 1, 0)


@pytest.mark.parametrize(
    "recipe, patch, options, side",
    [("cifar100", 16, (), 32), ("pets", 16, (), 384), ("imagenet imagenet_512", 14, ("--img_size=518",), 518)],
)
def test_fine_tuning_on_the_layout_of_a_published_dataset(tmp_path, recipe, patch, options, side):
    names = recipe.split()
    splits, image, columns = LAYOUTS[names[0]]
    write_dataset(tmp_path / "images", splits, image, columns)
    encoder = tiny_encoder(tmp_path / "encoder", patch, 2 * patch)
    configs = [f"--config=finetune/{name}" for name in names]
    places = (f"--data.path={tmp_path / 'images'}", f"--encoder={encoder}", f"--run.dir={tmp_path / 'run'}")
    finetune.main([*configs, *places, *FEW, *options])
    (run,) = (tmp_path / "run").glob("lr_*")
    settings = read_json(run / "classifier" / "config.json")
    assert settings["pretrained_cfg"]["input_size"] == [3, side, side]
    assert len(settings["label_names"]) == next(iter(columns.values()))
    report = read_json(tmp_path / "run" / "finetune.json")
    assert report["labels"]["images"] == 6
    averages = [report["protocol"]["optim"][key] for key in ("average", "average_warmup")]
    assert averages == ([0.9999, False] if "imagenet_512" in names else [None, True])


def test_real_labels_count_any_right_class_of_the_published_list(tmp_path, monkeypatch):
    """By the script and the command of configs/datasets.md, which name files of ImageNet that are not here."""
    section = (CONFIGS / "datasets.md").read_text().split("## ImageNet's ReaL labels")[1].split("\n## ")[0]
    (command,) = re.findall(r"^    mpp predict (.*?)\n\n", section, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(CONFIGS / "make" / "real_labels.py"))
    answers = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))
    names = ImageNetInfo().label_names()
    numbers = [1, 2, 3, 4]  # the first has no right class
    for kind in sorted({names[each] for number in numbers for each in answers[number - 1]}):
        write_pictures(tmp_path / "imagenet" / "train" / kind, 4)
    for number in numbers:
        put_picture(tmp_path / "imagenet" / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    encoder = tiny_encoder(tmp_path / "encoder", 16, 32)
    own = ("--data.eval_split=null", "--data.eval_fraction=0.25", "--data.path=imagenet")
    finetune.main([f"--encoder={encoder}", *own, "--run.dir=runs/imagenet_finetuned", *FEW])
    predict.main([*command.replace("\\\n", "").split(), "--data.missing=skip", "--threads=1"])
    with open("real.csv", newline="") as file:
        found = [is_right(row, answers, names) for row in csv.DictReader(file)]
    assert found.count(None) == 1
    figures = read_json(tmp_path / "real.csv.json")["figures"]["all"]
    assert figures["images"] == 3 and figures["accuracy"] == pytest.approx(found.count(True) / 3)


def is_right(row, answers, names):
    """What ReaL's own evaluation says of a predicted image; None: it is left out."""
    number = int(row["file"].split("_")[-1].removesuffix(".JPEG"))
    right = [names[each] for each in answers[number - 1]]
    return row["class"] in right if right else None

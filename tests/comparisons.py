"""A small comparison for tests, and the cases of a comparison's file."""

from pathlib import Path
from typing import Any

import yaml
from colours import write
from conftest import encoded, picture, read_json

from evaluation import compare
from evaluation.comparison.cases import Case, cases_of, read_entries
from evaluation.config import CompareConfig
from mpp.config.parsing import parse

FAST = {"data.workers": 0, "precision": "fp32", "threads": 1}
"""Settings of an evaluation of frozen features."""
TINY_TRAINING = {
    "model.width": 16,
    "model.depth": 2,
    "model.heads": 2,
    "model.img_size": 32,
    "run.threads": 1,
    "run.report": False,
    "run.steps": 2,
    "optim.global_batch_size": 8,
    "data.workers": 0,
    "data.eval_images": 8,
}
TINY_FINETUNING = {
    "data.train_images": 16,
    "run.steps": 2,
    "lrs": 0.1,
    "data.workers": 0,
    "run.threads": 1,
    "optim.global_batch_size": 8,
}


class SmallComparison:
    """A pre-trained encoder, random weights and a colour baseline on two small datasets of red dogs and other cats.

    A test changes `config` before it compares.

    Args:
        folder: has the images, the config file, the encoders, and the results in out/.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.file = folder / "compare.yaml"
        for name in ("one", "two"):
            write_cats_and_dogs(folder / name)
        encoders = {"encoder": str(folder / "encoders/{seed}"), "seeds": [0, 1]}
        self.config = {
            "dir": str(folder / "out"),
            "encoders": [
                {"name": "pre-trained", **encoders, "train": "pretrain", "train_options": dict(TINY_TRAINING)},
                {"name": "random", **encoders, "random": True},
                {"name": "floor", "encoder": "floor:pixels", "options": {"img_size": 32}},
            ],
            "evaluations": [
                {"name": "few-shot", "command": "fewshot", "options": FAST | {"shots": [1, 5], "depth": "dev"}},
                {"name": "fine-tuned", "command": "finetune", "options": dict(TINY_FINETUNING)},
            ],
            "datasets": [
                {"name": name, "group": "all", "options": {"data.path": str(folder / name), "data.eval_fraction": 0.25}}
                for name in ("one", "two")
            ],
        }

    def write(self) -> Path:
        """Write the config's file."""
        self.file.write_text(yaml.safe_dump(self.config, sort_keys=False))
        return self.file

    def compare(self, *words: str) -> dict:
        """Carry the comparison out; what results.json has."""
        compare.main(["--config", str(self.write()), *words])
        return self.results()

    def results(self) -> dict:
        """What results.json has."""
        return read_json(Path(self.config["dir"]) / "results.json")

    def table(self) -> str:
        """The tables as Markdown."""
        return (Path(self.config["dir"]) / "table.md").read_text()

    def cases(self) -> dict[tuple, Case]:
        """The cases: see `cases_in`."""
        return cases_in(self.write())


def write_cats_and_dogs(folder: Path, seed: int = 0) -> None:
    """Write 24 images of two classes, by folder: dogs are red."""
    for number in range(24):
        kind = "cat" if number % 2 else "dog"
        image = picture(seed + number)
        red = image[..., 0] // 2
        image[..., 0] = red if kind == "cat" else 255 - red
        write(folder, {f"{kind}/{number:02d}.png": encoded(image)})


def without_times(rows: list[dict]) -> list[dict]:
    """Rows of results without the time that they took, which differs each time."""
    return [{key: value for key, value in row.items() if not key.endswith("device_hours")} for row in rows]


def noted(monkeypatch, owner: Any, name: str, place: int = 0) -> list:
    """An argument of each call of a function that there will be, which does what it did."""
    arguments = []
    function = getattr(owner, name)

    def noting(*given, **named):
        arguments.append(given[place])
        return function(*given, **named)

    monkeypatch.setattr(owner, name, noting)
    return arguments


def cases_in(file: Path) -> dict[tuple, Case]:
    """The cases of a comparison's file, by encoder, seed, evaluation and dataset."""
    cases = cases_of(read_entries(parse(CompareConfig, ["--config", str(file)])))
    return {(case.encoder.entry.name, case.encoder.seed, case.entry.name, case.dataset.name): case for case in cases}

"""Sentences of a page on a run: what was trained, the verdict, and next steps."""

from collections.abc import Sequence
from pathlib import Path

from evaluation.pages.page import Link, Section
from mpp.training.history import History, after_training_began, best_depth, probe_lines, series, values_by_depth
from mpp.training.record import read_record
from mpp.training.run_folder import saved_settings
from mpp.training.verdict import LOSS_FALLS, describe_features, describe_prediction, describe_trend, duration
from mpp.training.watch import read_verdict


def subtitle(folder: Path, history: History) -> str:
    """What was trained on what, for how long."""
    saved, known = saved_settings(folder), read_record(folder) or {}
    model, data, run = (saved.get(name) or {} for name in ("model", "data", "run"))
    what = read_verdict(folder).get("model") or model.get("name") or "a ViT"
    how = (saved.get("objective") or {}).get("name")
    trained = f"pre-trained by {how} ({(saved.get('network') or {}).get('name', 'predictor')})" if how else "trained"
    count = (known.get("train") or {}).get("images")
    images = f"{count:,} images" if isinstance(count, int) else "images"
    held_out = (known.get("held_out") or {}).get("images")
    where = data.get("path") or "mpp's birds"
    parts = [f"{what}", f"{trained} on {images} of {where}" + (f" ({held_out:,} held out)" if held_out else "")]
    done, steps = int(history[-1]["step"]), run.get("steps")
    batch = (saved.get("optim") or {}).get("global_batch_size")
    parts.append(f"{done:,} of {steps:,} updates" if isinstance(steps, int) else f"{done:,} updates")
    if batch and count:
        parts[-1] += f" of {batch}, each image seen {done * batch / count:.3g} times"
    seconds = training_seconds(history, batch or 0)
    if seconds:
        parts.append(f"{duration(seconds)} of training")
    compute = series(history, "compute/pflop")
    if compute:
        parts.append(f"{compute[-1][1]:.3g} PFLOP")
    return "; ".join(parts)


def training_seconds(history: History, batch: int) -> float:
    """What the logged updates took, evaluations left out; 0: not known."""
    speeds = [(step, speed) for step, speed in series(history, "speed/images_per_second") if speed > 0]
    before = [0, *(step for step, _ in speeds)]
    return sum((step - last) * batch / speed for (step, speed), last in zip(speeds, before, strict=False))


def verdict_points(folder: Path, history: History, shown: Sequence[Section]) -> list[tuple[str, Link | None]]:
    """The verdict in sentences, with what says so."""
    there = {section.name for section in shown}

    def evidence(name: str) -> Link | None:
        return Link("why", f"#{name}") if name in there else None

    saved = saved_settings(folder)
    steps, done = (saved.get("run") or {}).get("steps"), int(history[-1]["step"])
    points, trend = [], describe_trend(history, read_verdict(folder).get("facts", {}).get("moving", False))
    if isinstance(steps, int) and done < steps:
        points.append((f"The run is not finished: it logged {done:,} of {steps:,} updates", evidence("curves")))
    for text, where in (
        (describe_prediction(history), "curves"),
        (describe_features(history), "features"),
        (trend, "curves"),
    ):
        if text:
            sentence = text if text.startswith("kNN") else f"{text[0].upper()}{text[1:]}"
            points.append((sentence, evidence(where)))
    return [*points, *((f"Next: {text}", None) for text in next_steps(folder, history, steps, done, trend))]


def next_steps(folder: Path, history: History, steps: int | None, done: int, trend: str) -> list[str]:
    """What to try next."""
    if isinstance(steps, int) and done < steps:
        return ["the command that began the run goes on with it"]
    found, (group, lines) = [], probe_lines(history)
    judged = after_training_began(lines)
    if trend == LOSS_FALLS:
        found.append("train longer (run.steps): the held-out loss still falls")
    if judged:
        depth, value = best_depth(judged[-1], group)
        floors = [best_depth(lines[0], group)[1], lines[0].get(f"{group}/floor_pixels", 0)]
        if lines[0]["step"] == 0 and value < max(floors) + 0.03:
            found.append(
                "the features know hardly more than untrained ones or colours: more images, more updates or another "
                f"objective; they may fine-tune well all the same (mpp finetune --encoder {folder})"
            )
        last = values_by_depth(judged[-1], group)
        if value >= last[max(last)] + 0.01:
            found.append(
                f"use depth {depth}, which is better than the last (mpp fewshot --encoder {folder} --depth dev)"
            )
    return found or [f"judge the features with labels (mpp fewshot --encoder {folder}), or fine-tune (mpp finetune)"]

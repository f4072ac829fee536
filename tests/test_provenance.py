"""Labels that an encoder has learned: test images with such labels are refused, wherever they are."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import CUT, dataset_of, encoded, picture, refused, tiny_without, write_classes
from test_run_images import ONE_SHOT

from evaluation import fewshot, supervised
from evaluation.frozen.known_labels import check_labels_unseen
from mpp.config import SourceConfig
from mpp.data.sources import load_image_datasets

ONE_STEP = (*tiny_without("--probe"), "--run.steps=1")


@pytest.fixture
def supervised_run(image_folder, tmp_path):
    """A run that learned the labels of nine of the twelve images."""
    folder = tmp_path / "labelled"
    supervised.main([*ONE_STEP, f"--data.path={image_folder}", *CUT, f"--run.dir={folder}"])
    return folder


def evaluated_on(run, path, **settings):
    """The arguments of `check_labels_unseen` for the images at a path."""
    settings = {"eval_split": None, "eval_fraction": 0.25} | settings
    source = SourceConfig(path=str(path), **settings)
    return str(run), source, *load_image_datasets(source)


def test_labels_of_copies_are_known_also_where_the_original_is_gone(supervised_run, image_folder, tmp_path):
    """In another container, or a folder of another name."""
    _, _, train, _ = evaluated_on(supervised_run, image_folder)
    learned_names = {Path(name).name for name in train.image_names()}
    files = sorted(image_folder.rglob("*.png"), key=lambda file: file.name)  # in another order
    for learned in (False, True):
        images = [file.read_bytes() for file in files if (file.name in learned_names) == learned]
        packed = tmp_path / f"{learned}.parquet"
        dataset_of(images, label=[number % 2 for number in range(len(images))]).to_parquet(packed)
        with refused(r"labels of 2 of these 2 test images") if learned else nullcontext():
            check_labels_unseen(*evaluated_on(supervised_run, packed))
    copy = image_folder.rename(tmp_path / "copy")
    check_labels_unseen(*evaluated_on(supervised_run, copy))  # the same held-out images
    with refused(rf"labels of [123] of these 3 test images; .*--data\.path {copy}"):
        check_labels_unseen(*evaluated_on(supervised_run, copy, cut_seed=1))


def test_images_of_another_list_are_known_by_their_bytes(image_folder, tmp_path):
    """The same index is another image there."""
    files = sorted(str(file.relative_to(image_folder)) for file in image_folder.rglob("*.png"))
    late, every = str(tmp_path / "late.csv"), str(tmp_path / "all.csv")
    for name, listed in ((late, files[6:]), (every, files)):
        rows = [f"{file},{number % 2}" for number, file in enumerate(listed)]
        Path(name).write_text("\n".join(["file,label", *rows]))
    run = tmp_path / "labelled"
    supervised.main([*ONE_STEP, f"--data.path={image_folder}", f"--data.labels={late}", *CUT, f"--run.dir={run}"])
    _, _, train, _ = evaluated_on(run, image_folder, labels=late)
    learned = {train.image_name(index) for index in range(len(train))}
    numbers = set()
    for cut_seed in range(6):
        arguments = evaluated_on(run, image_folder, labels=every, cut_seed=cut_seed)
        test = arguments[-1]
        known = sum(test.image_name(index) in learned for index in range(len(test)))
        with refused(f"labels of {known} of these 3 test images") if known else nullcontext():
            check_labels_unseen(*arguments)
        numbers.add(known)
    assert len(numbers) > 1


def test_where_images_have_changed_since_what_was_learned_is_unknown(supervised_run, image_folder, capsys):
    """The cut of more images is another one: it says nothing of those that were learned."""
    check_labels_unseen(*evaluated_on(supervised_run, image_folder))
    assert "is unknown" not in capsys.readouterr().err
    write_classes(image_folder, 12, first=12)
    check_labels_unseen(*evaluated_on(supervised_run, image_folder))
    said = capsys.readouterr().err
    assert f"warning: {supervised_run} was trained with labels of images at data.path {image_folder}" in said
    assert "have changed since: whether these 6 test images are among them is unknown" in said


def test_a_few_duplicates_are_no_reason_to_refuse(supervised_run, image_folder, tmp_path, capsys):
    _, _, train, _ = evaluated_on(supervised_run, image_folder)
    images = [encoded(picture(100 + number)) for number in range(99)]
    for split, of_split in (("train", images), ("test", [*images, Path(train.image_name(0)).read_bytes()])):
        labels = [number % 2 for number in range(len(of_split))]
        dataset_of(of_split, label=labels).to_parquet(tmp_path / "set" / f"{split}.parquet")
    check_labels_unseen(*evaluated_on(supervised_run, tmp_path / "set", eval_split="test"))
    assert "was trained with the labels of 1 of these 100 test images: duplicates" in capsys.readouterr().out


def test_test_images_whose_labels_were_learned_are_refused(supervised_run, image_folder, tmp_path, capsys, pretrain):
    fewshot.main([f"--encoder={supervised_run}", *ONE_SHOT])
    assert "was trained with labels of these training images" in capsys.readouterr().out
    with refused(r"training images; for test false, train it with --data\.eval_split null"):
        fewshot.main([f"--encoder={supervised_run}", *ONE_SHOT, "--test=false"])

    other_cut = [f"--data.path={image_folder}", *CUT, "--data.cut_seed=1"]
    learned = rf"trained with the labels of [123] of these 3 test images; .*{image_folder}"
    with refused(learned):
        fewshot.main([f"--encoder={supervised_run}", *other_cut, *ONE_SHOT])
    fewshot.main([f"--encoder={supervised_run}", *other_cut, *ONE_SHOT, "--random=true"])
    weights = supervised_run / "encoder" / "model.safetensors"
    with refused(f"was {learned}"):  # as --checkpoint has it
        check_labels_unseen(*evaluated_on(weights, image_folder, cut_seed=1))
    assert check_labels_unseen("floor:pixels", SourceConfig(), None, None) is None

    continued = [*ONE_STEP, *other_cut, f"--run.dir={tmp_path / 'second'}", f"--model.init_from={supervised_run}"]
    with refused(rf"encoder is {supervised_run}.*was {learned}"):
        supervised.main(continued)
    built_on = pretrain(*other_cut, f"--model.init_from={weights}", "--run.steps=1")
    with refused(rf"encoder is {built_on}, which builds on {weights}, which was {learned}"):
        fewshot.main([f"--encoder={built_on}", *ONE_SHOT])

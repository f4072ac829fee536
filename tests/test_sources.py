"""From data.path to images: layouts on disk, splits, labels, and the files that are left out."""

import collections
from pathlib import Path

import datasets
import pytest
from conftest import dataset_of, encoded, picture, views_of

from mpp.config import DataConfig, ImagesConfig
from mpp.data.hub import announce_hub_lookup
from mpp.data.sources import load_image_datasets, load_splits
from mpp.errors import UserError
from mpp.runtime.randomness import FIXED


def rows(count=12, column="image", **more) -> datasets.Dataset:
    images = [encoded(picture(number)) for number in range(count)]
    return dataset_of(images, **more).rename_columns({"image": column})


def test_birds_are_the_default():
    train, test = load_image_datasets(DataConfig())
    assert (len(train), len(test)) == (633, 286)
    assert (train.labels >= 0).sum() == 430 and (test.labels >= 0).all()
    assert train.decode(0, ImagesConfig()).shape == (3, 120, 120)
    assert len(train.labelled()) == 430


LISTED = b'file_name,mask_file_name\nb.png,"masks/b2, left.png"\n'
LISTED_HERE = b"file_name\nb.png\n"


@pytest.mark.parametrize(
    ("names", "used", "said"),
    [
        (
            ["car/0.png", "plane/0.png", "train/0.png"],
            1,
            "images in no split's folder (2: car/0.png, plane/0.png)",
        ),
        (["spring.png", "steam train.png", "train.png"], 3, ""),
        (["a.png", "b.npy", "c.npy"], 1, "arrays next to pictures (2: b.npy, ...)"),
        (["a.png", "b.png", "c.png", "labels.csv"], 1, "files that no list names (2: a.png, c.png)"),
        (["b.png", "masks/b2, left.png", "metadata.csv"], 1, ""),
        (["a/b.png", "c/b.png", "a/labels.csv"], 2, ""),
        (["a.png", "test.png", "c.parquet", "metadata.json"], 2, "tables without images (1: c.parquet)"),
        (["a.png", "b.png", "old.tar"], 2, "tars next to images (1: old.tar)"),
        (
            ["a.png", "b.png", "old.zip"],
            2,
            "archives next to images, or in one; unpack them or move them away (1: old.zip)",
        ),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], 2, ""),
        (["a/0.png", "b/0.png", ".hidden/0.png", "__MACOSX/a.png"], 2, ""),
    ],
)
def test_what_is_left_out_is_counted_and_named(tmp_path, capsys, names, used, said):
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        lists = {"metadata.csv": LISTED, "labels.csv": LISTED_HERE}
        file.write_bytes(lists.get(file.name, encoded(picture(1))))
    assert len(load_splits(DataConfig(path=str(tmp_path)))["train"]) == used
    warned = capsys.readouterr().err
    assert said in warned and ("warning" in warned) == bool(said)


def test_folder_of_images_is_cut_by_a_seed(image_folder):
    config = DataConfig(path=str(image_folder), eval_fraction=0.25)
    train, held_out = load_image_datasets(config)
    names = [[p.name(i) for i in range(len(p))] for p in (train, held_out)]
    assert [len(n) for n in names] == [9, 3] and not set(names[0]) & set(names[1])
    assert sorted(train.labels.tolist() + held_out.labels.tolist()) == [0] * 6 + [1] * 6
    again = load_image_datasets(config)[1]
    assert [again.name(i) for i in range(3)] == names[1]
    other = load_image_datasets(DataConfig(path=str(image_folder), eval_fraction=0.25, cut_seed=1))[1]
    assert [other.name(i) for i in range(3)] != names[1]
    assert (train.decode(0, ImagesConfig()).shape) == (3, 40, 48)


@pytest.mark.parametrize("kind", ["parquet file", "parquet folder", "arrow file", "saved", "saved with splits"])
def test_other_layouts_on_disk(tmp_path, kind):
    table, path = rows(), tmp_path / "data"
    if kind == "parquet file":
        path = path.with_suffix(".parquet")
        table.to_parquet(path)
    elif kind == "parquet folder":
        path.mkdir()
        table.to_parquet(path / "train-00000-of-00001.parquet")
        rows(4).to_parquet(path / "validation-00000-of-00001.parquet")
    elif kind == "arrow file":
        table.save_to_disk(path)
        path = next(path.glob("*.arrow"))
    elif kind == "saved":
        table.save_to_disk(path)
    else:
        datasets.DatasetDict(train=table, test=rows(4)).save_to_disk(path)
    train, held_out = load_image_datasets(DataConfig(path=str(path)))
    named_split = kind in ("parquet folder", "saved with splits")
    assert (len(train), len(held_out)) == ((12, 4) if named_split else (11, 1))
    assert train.decode(0, ImagesConfig()).shape == (3, 40, 48)


def test_columns_of_other_names_and_text_labels(tmp_path):
    kinds = ["owl", "cat", None, "owl"] * 3
    rows(column="photo", species=kinds).to_parquet(tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    train, _ = load_image_datasets(DataConfig(path=path, eval_fraction=0.1))
    assert train.labels is None
    train, held_out = load_image_datasets(DataConfig(path=path, image_column="photo", label_column="species"))
    assert collections.Counter([*train.labels, *held_out.labels]) == {1: 6, 0: 3, -1: 3}


def test_several_labels_may_be_right_on_the_held_out_split(tmp_path):
    for split, labels in (("train", [[0], [1], [2]] * 4), ("test", [[0, 2], [], [1]] * 4)):
        single = [label[0] for label in labels] if split == "train" else [-1] * 12
        table = rows().add_column("label", single).add_column("real", labels)
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    train, test = load_image_datasets(DataConfig(path=str(tmp_path), eval_label_column="real"))
    assert train.labels.tolist() == [0, 1, 2] * 4
    assert test.labels.tolist() == [[0, 2], [-1, -1], [1, -1]] * 4
    assert test.labelled().labels.tolist() == [[0, 2], [1, -1]] * 4
    assert views_of(test)[FIXED, 0].labels.tolist() == [0, 2]
    for settings, words in (
        (dict(eval_label_column="rael"), r"data\.eval_label_column is rael; .* has image, label, real"),
        (dict(eval_label_column="real", eval_split=None), r"data\.eval_label_column is real; it must be left out"),
        (dict(revision="v2"), r"data\.revision is v2; it must be left out: .* is no dataset of the hub"),
    ):
        with pytest.raises(UserError, match=words):
            load_image_datasets(DataConfig(path=str(tmp_path), **settings))


def test_something_else_called_label_is_no_label_unless_asked_for(tmp_path):
    rows().add_column("label", [0.5] * 12).to_parquet(tmp_path / "a.parquet")
    assert load_image_datasets(DataConfig(path=str(tmp_path / "a.parquet")))[0].labels is None
    with pytest.raises(ValueError, match=r"data\.label_column is label, which holds no classes"):
        load_image_datasets(DataConfig(path=str(tmp_path / "a.parquet"), label_column="label"))


def test_what_lies_beside_pictures_is_none(tmp_path, capsys):
    """Texts beside them, sidecars and overviews. Links to folders are followed, but not into the same tree."""
    for number in range(8):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        for name, data in (
            (file, encoded(picture(number))),
            (f"{file}.ovr", encoded(picture(1))),
            (f"{file}.xmp", b"x"),
        ):
            Path(name).write_bytes(data)
        file.with_suffix(".txt").write_text("0 0.5 0.5 1 1")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "8.png").write_bytes(encoded(picture(8)))
    (tmp_path / "images" / "c").symlink_to(tmp_path / "c")
    (tmp_path / "images" / "b" / "up").symlink_to(tmp_path / "images")
    (tmp_path / "c" / "again").symlink_to(tmp_path / "c")
    train, held_out = load_image_datasets(DataConfig(path=str(tmp_path / "images"), eval_fraction=0.25))
    names = [Path(part.name(index)).name for part in (train, held_out) for index in range(len(part))]
    assert sorted(names) == [f"{number}.png" for number in range(9)] and train.names == ["a", "b", "c"]
    assert "links to folders of the same tree (2: b/up, c/again)" in capsys.readouterr().err


def test_videos_are_no_images_and_pictures_that_nobody_reads_are_counted(tmp_path, capsys):
    """As a phone's folder has them; its README.md is no dataset card."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
        for end in ("mov", "heic"):
            (tmp_path / f"{number}.{end}").write_bytes(b"x")
    (tmp_path / "README.md").write_text("My photographs")
    assert load_splits(DataConfig(path=str(tmp_path)))["train"].num_rows == 3
    assert (
        ".heic files, which mpp does not read; convert them to JPEG, PNG or TIFF (3: 0.heic, 1.heic, 2.heic)"
        in capsys.readouterr().err
    )
    for file in tmp_path.glob("*.mov"):
        file.with_suffix(".txt").write_text("x")
        file.unlink()
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: mine\n    path: '*.png'\n---\n"
    (tmp_path / "README.md").write_text(card)
    assert load_splits(DataConfig(path=str(tmp_path)))["mine"].num_rows == 3


def test_pictures_of_several_lists_are_in_the_order_of_their_names(tmp_path):
    for part in "dbca":
        (tmp_path / part).mkdir()
        for number in range(3):
            (tmp_path / part / f"{number}.png").write_bytes(encoded(picture(number)))
        (tmp_path / part / "metadata.csv").write_text("file_name\n2.png\n0.png\n1.png\n")
    splits = load_splits(DataConfig(path=str(tmp_path)))
    rows = splits["train"].cast_column("image", datasets.Image(decode=False))
    assert [row["image"]["path"] for row in rows] == [f"{tmp_path}/{p}/{n}.png" for p in "abcd" for n in range(3)]


def test_a_seeded_choice_of_training_images(image_folder):
    config = DataConfig(path=str(image_folder), eval_fraction=0.25)
    train, _ = load_image_datasets(config)
    names = [[chosen.name(i) for i in range(len(chosen))] for chosen in (train.choose(4, seed) for seed in (0, 0, 1))]
    assert len(names[0]) == 4 and names[0] == names[1] != names[2]
    assert len({name.split("/")[-2] for name in names[0]}) == 2  # not the first of files that come sorted by class
    assert train.choose(None, 0) is train


def test_a_share_to_hold_out_is_refused_where_a_split_is_held_out():
    with pytest.raises(ValueError, match=r"data\.eval_fraction is 0\.5; it must be left out, because test is held out"):
        load_image_datasets(DataConfig(eval_fraction=0.5))
    _, held_out = load_image_datasets(DataConfig(eval_fraction=0.5, eval_split=None))
    assert len(held_out) == 316  # of 633


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "/nowhere/at/all"}, ["data.path", "/nowhere/at/all", "does not exist"]),
        ({"path": "{file}", "image_column": "photo"}, ["data.image_column", "photo", "image, id"]),
        ({"path": "{file}", "image_column": "id"}, ["data.image_column", "id", "no images"]),
        ({"path": "{file}", "label_column": "kind"}, ["data.label_column", "kind", "image, id"]),
        ({"path": "{file}", "split": "dev"}, ["data.split", "dev", "train"]),
        ({"path": "{file}", "eval_split": "dev"}, ["data.eval_split", "dev", "train"]),
        ({"path": "{text}"}, ["data.path", "parquet"]),
        ({"path": "{empty}"}, ["data.path", "empty"]),
    ],
)
def test_bad_sources_are_named(tmp_path, settings, words):
    table = rows(4).add_column("id", [1, 2, 3, 4])
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "text.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    places = {"file": tmp_path / "a.parquet", "text": tmp_path / "text.txt", "empty": tmp_path / "empty"}
    settings["path"] = settings["path"].format(**places)
    with pytest.raises(ValueError) as error:
        load_image_datasets(DataConfig(**settings))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_split_without_images_is_named(tmp_path, empty):
    for name in ("train", "test"):
        rows(0 if name == empty else 1).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=rf"{tmp_path}.*{empty}"):
        load_image_datasets(DataConfig(path=str(tmp_path)))


def test_offline_nothing_is_waited_for(monkeypatch):
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mpp.data.retry.time.sleep", None)
    with pytest.raises(UserError, match=r"data.path is nobody/nothing, which cannot be loaded"):
        load_image_datasets(DataConfig(path="nobody/nothing"))


def test_shards_have_the_split_of_their_name(tmp_path):
    """One that is no word of ours, too, and not the training images."""
    sizes = {"train": 5, "test": 4, "extra": 3, "train_extra": 2}
    (tmp_path / "data").mkdir()
    for name, size in sizes.items():
        rows(size).to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    assert {name: len(part) for name, part in load_splits(DataConfig(path=str(tmp_path))).items()} == sizes


def test_a_card_says_what_the_splits_are(tmp_path):
    for name in ("alpha", "beta"):
        rows(4).to_parquet(tmp_path / f"{name}.parquet")
    files = "{split: train, path: alpha.parquet}, {split: test, path: beta.parquet}"
    configs = f"configs:\n- {{config_name: default, data_files: [{files}]}}"
    (tmp_path / "README.md").write_text(f"---\n{configs}\n---\n")
    assert {name: len(part) for name, part in load_splits(DataConfig(path=str(tmp_path))).items()} == dict(
        train=4, test=4
    )
    (tmp_path / "README.md").unlink()
    with pytest.raises(UserError, match=r"data\.name is b; it must be left out: .* has no README\.md with configs"):
        load_splits(DataConfig(path=str(tmp_path), name="b"))


@pytest.mark.parametrize("where", ["another split", "the same split"])
def test_classes_that_tables_declare_in_another_order_keep_their_names(tmp_path, where):
    """The library takes the first file's for all."""
    for number, names in enumerate((["owl", "cat"], ["cat", "owl"])):
        labels = [names.index("owl"), names.index("cat")] * 2
        part = rows(4).add_column("label", labels).cast_column("label", datasets.ClassLabel(names=names))
        split = ("train", "test")[number] if where == "another split" else "train"
        part.to_parquet(tmp_path / f"{split}-{number}.parquet")
    if where == "the same split":
        with pytest.raises(
            UserError, match=r"train-1\.parquet declares other classes in label than .*train-0\.parquet"
        ):
            load_image_datasets(DataConfig(path=str(tmp_path)))
    else:
        for part in load_image_datasets(DataConfig(path=str(tmp_path))):
            assert [part.names[number] for number in part.labels] == ["owl", "cat"] * 2


def test_a_name_of_the_hub_is_said_at_once_and_what_is_none_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    announce_hub_lookup(ImagesConfig(path="photo"))
    assert "the hub is asked for it; did you mean photos?" in capsys.readouterr().out
    for path in ("my photos", "photos/a b", "x" * 200):
        with pytest.raises(UserError, match=r"does not exist: there is no such file or folder in"):
            announce_hub_lookup(ImagesConfig(path=path))

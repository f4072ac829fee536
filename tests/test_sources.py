"""From data.path to images: layouts on disk, splits, labels, and the files that are left out."""

import collections
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import dataset_of, encoded, picture, views_of
from image_files import write_tar

from mpp.config import DataConfig, ImagesConfig
from mpp.data.dataset import ImageDataset
from mpp.data.remote import announce_hub_lookup, from_a_server
from mpp.data.sources import load_image_datasets, load_splits
from mpp.errors import UserError
from mpp.runtime.randomness import FIXED_VIEW


def rows(count: int = 12, column: str = "image", **more: list) -> datasets.Dataset:
    """Images of 40 x 48 pixels, and other columns."""
    images = [encoded(picture(number)) for number in range(count)]
    return dataset_of(images, **more).rename_columns({"image": column})


def names_of(dataset: ImageDataset) -> list[str]:
    return [dataset.image_name(index) for index in range(len(dataset))]


def sizes_of_splits(folder: Path) -> dict[str, int]:
    return {name: len(split) for name, split in load_splits(DataConfig(path=str(folder))).items()}


def test_birds_are_the_default():
    train, test = load_image_datasets(DataConfig())
    assert (len(train), len(test)) == (633, 286)
    assert (train.labels >= 0).sum() == 430
    assert (test.labels >= 0).all()
    assert train.decode(0, ImagesConfig()).shape == (3, 120, 120)
    assert len(train.labelled()) == 430


LISTED = b'file_name,mask_file_name\nb.png,"masks/b2, left.png"\n'
LISTED_HERE = b"file_name\nb.png\n"


@pytest.mark.parametrize(
    ("names", "used", "warning"),
    [
        (
            ["car/0.png", "plane/0.png", "train/0.png"],
            1,
            "images in no split's folder (2: car/0.png, plane/0.png)",
        ),
        (["spring.png", "steam train.png", "train.png"], 3, ""),
        (["a.png", "b.npy", "c.npy"], 1, "(2: b.npy, c.npy)"),
        (["a.png", "b.png", "c.png", "labels.csv"], 1, "(2: a.png, c.png)"),
        (["b.png", "masks/b2, left.png", "metadata.csv"], 1, ""),
        (["a/b.png", "c/b.png", "a/labels.csv"], 2, ""),
        (
            ["a.png", "test.png", "c.parquet", "metadata.json"],
            2,
            "tables without images; data.labels names a list (1: c.parquet)",
        ),
        (["0.tar", "0.parquet", "0_stats.json"], 1, "tables without images; data.labels names a list (1: 0.parquet)"),
        (["a.png", "b.png", "old.zip"], 2, "archives: unpack them (1: old.zip)"),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], 2, ""),
        (["a/0.png", "b/0.png", ".hidden/0.png", "__MACOSX/a.png"], 2, ""),
        (["a/0.png", "b/0.png", "$RECYCLE.BIN/S-1/$R0.png", "a/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg"], 2, ""),
    ],
)
def test_what_is_left_out_is_counted_and_named(tmp_path, capsys, names, used, warning):
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        lists = {"metadata.csv": LISTED, "labels.csv": LISTED_HERE}
        file.write_bytes(lists.get(file.name, encoded(picture(1))))
        if file.suffix == ".parquet":
            pq.write_table(pa.table({"url": ["https://x"]}), file)
        elif file.suffix == ".tar":
            write_tar(file, [("0.png", encoded(picture(1)))])
    assert len(load_splits(DataConfig(path=str(tmp_path)))["train"]) == used
    printed = capsys.readouterr().err
    assert warning in printed
    assert ("warning" in printed) == bool(warning)


def test_folder_of_images_is_cut_by_a_seed(image_folder):
    config = DataConfig(path=str(image_folder), eval_fraction=0.25)
    train, held_out = load_image_datasets(config)
    assert (len(train), len(held_out)) == (9, 3)
    assert not set(names_of(train)) & set(names_of(held_out))
    assert sorted([*train.labels, *held_out.labels]) == [0] * 6 + [1] * 6
    assert train.decode(0, ImagesConfig()).shape == (3, 40, 48)
    _, again = load_image_datasets(config)
    assert names_of(again) == names_of(held_out)
    _, other = load_image_datasets(replace(config, cut_seed=1))
    assert names_of(other) != names_of(held_out)


def write_parquet_file(path: Path) -> Path:
    rows().to_parquet(path / "a.parquet")
    return path / "a.parquet"


def write_parquet_folder(path: Path) -> Path:
    rows().to_parquet(path / "train-00000-of-00001.parquet")
    rows(4).to_parquet(path / "validation-00000-of-00001.parquet")
    return path


def write_arrow_file(path: Path) -> Path:
    rows().save_to_disk(path)
    return next(path.glob("*.arrow"))


def write_saved(path: Path) -> Path:
    rows().save_to_disk(path)
    return path


def write_saved_with_a_format(path: Path) -> Path:
    """Which shows labels only, as arrays."""
    rows(label=[0, 1] * 6).with_format("numpy", columns=["label"]).save_to_disk(path)
    return path


def write_saved_with_splits(path: Path) -> Path:
    datasets.DatasetDict(train=rows(), test=rows(4)).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("write", "sizes"),
    [
        (write_parquet_file, (11, 1)),
        (write_parquet_folder, (12, 4)),
        (write_arrow_file, (11, 1)),
        (write_saved, (11, 1)),
        (write_saved_with_a_format, (11, 1)),
        (write_saved_with_splits, (12, 4)),
    ],
)
def test_other_layouts_on_disk(tmp_path, write, sizes):
    (tmp_path / "data").mkdir()
    train, held_out = load_image_datasets(DataConfig(path=str(write(tmp_path / "data"))))
    assert (len(train), len(held_out)) == sizes
    assert train.decode(0, ImagesConfig()).shape == (3, 40, 48)


def test_columns_of_other_names_and_text_labels(tmp_path):
    path = str(tmp_path / "a.parquet")
    rows(column="photo", species=["owl", "cat", None, "owl"] * 3).to_parquet(path)
    train, _ = load_image_datasets(DataConfig(path=path, eval_fraction=0.1))
    assert train.labels is None
    train, held_out = load_image_datasets(DataConfig(path=path, image_column="photo", label_column="species"))
    assert collections.Counter([*train.labels, *held_out.labels]) == {1: 6, 0: 3, -1: 3}


def test_several_labels_may_be_right_on_the_held_out_split(tmp_path):
    train_rows = rows(label=[0, 1, 2] * 4, real=[[0], [1], [2]] * 4)
    train_rows.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    test_rows = rows(label=[-1] * 12, real=[[0, 2], [], [1]] * 4)
    test_rows.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    train, test = load_image_datasets(DataConfig(path=str(tmp_path), eval_label_column="real"))
    assert train.labels.tolist() == [0, 1, 2] * 4
    assert test.labels.tolist() == [[0, 2], [-1, -1], [1, -1]] * 4
    assert test.labelled().labels.tolist() == [[0, 2], [1, -1]] * 4
    assert views_of(test)[FIXED_VIEW, 0].labels.tolist() == [0, 2]
    for settings, words in (
        (dict(eval_label_column="rael"), r"data\.eval_label_column is rael; .* has image, label, real"),
        (dict(eval_label_column="real", eval_split=None), r"data\.eval_label_column is real; it must be left out"),
        (dict(revision="v2"), r"data\.revision is v2; it must be left out: .* is not a dataset of the hub"),
    ):
        with pytest.raises(UserError, match=words):
            load_image_datasets(DataConfig(path=str(tmp_path), **settings))


def test_something_else_called_label_is_no_label_unless_asked_for(tmp_path):
    path = str(tmp_path / "a.parquet")
    rows(label=[0.5] * 12).to_parquet(path)
    train, _ = load_image_datasets(DataConfig(path=path))
    assert train.labels is None
    with pytest.raises(ValueError, match=r"data\.label_column is label, which holds numbers"):
        load_image_datasets(DataConfig(path=path, label_column="label"))


def test_files_beside_pictures_are_no_images(tmp_path, capsys):
    """Texts beside them, sidecars and overviews. Links to folders are followed, but not into the same tree."""
    images = tmp_path / "images"
    for folder in (images / "a", images / "b", tmp_path / "c"):
        folder.mkdir(parents=True)
    for number in range(8):
        file = images / ("b" if number % 2 else "a") / f"{number}.png"
        file.write_bytes(encoded(picture(number)))
        file.with_name(f"{number}.png.ovr").write_bytes(encoded(picture(1)))
        file.with_name(f"{number}.png.xmp").write_bytes(b"x")
        file.with_name(f"{number}.txt").write_text("0 0.5 0.5 1 1")
    (tmp_path / "c" / "8.png").write_bytes(encoded(picture(8)))
    (images / "c").symlink_to(tmp_path / "c")
    (images / "b" / "up").symlink_to(images)
    (tmp_path / "c" / "again").symlink_to(tmp_path / "c")
    train, held_out = load_image_datasets(DataConfig(path=str(images), eval_fraction=0.25))
    names = [Path(name).name for name in (*names_of(train), *names_of(held_out))]
    assert sorted(names) == [f"{number}.png" for number in range(9)]
    assert train.class_names == ["a", "b", "c"]
    assert "links to folders of the same tree (2: b/up, c/again)" in capsys.readouterr().err


def test_videos_are_no_images_and_pictures_of_other_formats_are_counted(tmp_path, capsys):
    """As a phone's folder has them; its README.md is no dataset card."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
        for end in ("mov", "dng"):
            (tmp_path / f"{number}.{end}").write_bytes(b"x")
    (tmp_path / "README.md").write_text("My photographs")
    assert load_splits(DataConfig(path=str(tmp_path)))["train"].num_rows == 3
    assert "(3: 0.dng, 1.dng, 2.dng)" in capsys.readouterr().err
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
    files = splits["train"].cast_column("image", datasets.Image(decode=False))
    expected = [f"{tmp_path}/{part}/{number}.png" for part in "abcd" for number in range(3)]
    assert [row["image"]["path"] for row in files] == expected


def test_a_seeded_choice_of_training_images(image_folder):
    config = DataConfig(path=str(image_folder), eval_fraction=0.25)
    train, _ = load_image_datasets(config)
    chosen = names_of(train.choose(4, seed=0))
    assert len(chosen) == 4
    assert names_of(train.choose(4, seed=0)) == chosen
    assert names_of(train.choose(4, seed=1)) != chosen
    assert len({Path(name).parent for name in chosen}) == 2  # not the first of files that come sorted by class
    assert train.choose(None, seed=0) is train


def test_a_share_to_hold_out_is_refused_where_a_split_is_held_out():
    with pytest.raises(ValueError, match=r"data\.eval_fraction is 0\.5; it must be left out, because test is held out"):
        load_image_datasets(DataConfig(eval_fraction=0.5))
    _, held_out = load_image_datasets(DataConfig(eval_fraction=0.5, eval_split=None))
    assert len(held_out) == 316  # of 633


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        (["train", "test", "valid"], "valid"),
        (["train", "test", "dev", "validation"], "validation"),
        (["train", "Testing"], "Testing"),
        (["train", "extra"], "held out"),
        (["train", "valves"], "held out"),
    ],
)
def test_a_split_is_held_out_by_any_word_for_it(tmp_path, names, held_out):
    """As datasets of the hub have it. A test split would be tuned on."""
    datasets.DatasetDict({name: rows(4) for name in names}).save_to_disk(tmp_path / "saved")
    assert [split.split for split in load_image_datasets(DataConfig(path=str(tmp_path / "saved")))] == [
        "train",
        held_out,
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "/nowhere/at/all"}, ["data.path", "/nowhere/at/all", "does not exist"]),
        ({"path": "{file}", "image_column": "photo"}, ["data.image_column", "photo", "image, id"]),
        ({"path": "{file}", "image_column": "id"}, ["data.image_column", "id", "a column of images"]),
        ({"path": "{file}", "label_column": "kind"}, ["data.label_column", "kind", "image, id"]),
        ({"path": "{file}", "split": "dev"}, ["data.split", "dev", "train"]),
        ({"path": "{file}", "eval_split": "dev"}, ["data.eval_split", "dev", "train"]),
        ({"path": "{text}"}, ["data.path", "parquet"]),
        ({"path": "{list}"}, ["data.path", "parquet", "data.labels names a list of images"]),
        ({"path": "{pointer}"}, ["pointer.parquet cannot be read: a Git LFS pointer"]),
        ({"path": "{pointers}"}, ["0.tar cannot be read"]),
        ({"path": "{carded}"}, ["carded, which cannot be loaded", "Parquet magic bytes"]),
        ({"path": "{empty}"}, ["data.path", "empty"]),
    ],
)
def test_bad_sources_are_named(tmp_path, settings, words):
    rows(4, id=[1, 2, 3, 4]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "text.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.csv").write_text("file,label\n")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345678\n"
    for name in ("pointer.parquet", "pointers/0.tar", "carded/a.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(pointer)
    (tmp_path / "carded" / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: a.parquet}]\n---\n")
    names = {"file": "a.parquet", "text": "text.txt", "list": "list.csv", "pointer": "pointer.parquet"}
    folders = {name: tmp_path / name for name in ("empty", "pointers", "carded")}
    path = settings["path"].format(**{name: tmp_path / file for name, file in names.items()}, **folders)
    with pytest.raises(ValueError) as error:
        load_image_datasets(DataConfig(**settings | {"path": path}))
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_split_without_images_is_named(tmp_path, empty):
    for name in ("train", "test"):
        rows(0 if name == empty else 1).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=rf"{tmp_path}.*{empty}"):
        load_image_datasets(DataConfig(path=str(tmp_path)))


def write_table(file: Path, table: datasets.Dataset) -> None:
    """Write a table as arrow or parquet, also without rows: with a group of rows that has none."""
    if file.suffix == ".parquet":
        pq.write_table(table.with_format("arrow")[:], file)
        return
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.features.arrow_schema) as stream:
        stream.write_table(table.with_format("arrow")[:])


def test_offline_nothing_is_waited_for(monkeypatch):
    for name in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mpp.data.retry.time.sleep", None)
    with pytest.raises(UserError, match=r"data.path owner/nothing .* cannot be read"):
        load_image_datasets(DataConfig(path="owner/nothing"))


def test_shards_have_the_split_of_their_name(tmp_path):
    """Also a split whose name has no meaning for mpp; its images are not trained on."""
    sizes = {"train": 5, "test": 4, "extra": 3, "train_extra": 2}
    (tmp_path / "data").mkdir()
    for name, size in sizes.items():
        rows(size).to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    assert sizes_of_splits(tmp_path) == sizes


@pytest.mark.parametrize("name", ["", "photos"])
def test_datasets_that_were_saved_to_folders_of_splits_are_these_splits(tmp_path, capsys, name):
    """The library calls all of their shards `data`, and keeps what it made of them beside them."""
    for split, size in {"train": 5, "test": 4}.items():
        rows(size).save_to_disk(tmp_path / name / split)
    datasets.load_from_disk(tmp_path / name / "train").map(lambda row: row | {"more": 1})
    assert sizes_of_splits(tmp_path) == {"train": 5, "test": 4}
    assert "left out: cached results of datasets (1: " in capsys.readouterr().err


def test_numbered_shards_have_the_split_of_their_folder(tmp_path):
    for split, size in {"train": 5, "val": 4, "other": 3}.items():
        (tmp_path / split).mkdir()
        rows(size).to_parquet(tmp_path / split / "photos-00000-of-00001.parquet")
    assert sizes_of_splits(tmp_path) == {"train": 5, "validation": 4, "photos": 3}


@pytest.mark.parametrize("path", ["{}", "file://{}", "file://{}/**/*.parquet"], ids=["folder", "URL", "URLs"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train-00000-of-00003", "train-00002-of-00003", "test-00000-of-00001"], "2 of 3 shards are there of train:"),
        (["train/x-1-of-2", "train/x-2-of-2", "test/x-1-of-2"], "1 of 2 shards are there of x:"),
        (
            ["train-0-of-1", "train-00000-of-00002", "train-00001-of-00002"],
            "1 of 1 shards are there of train:",
        ),
        (["a-train-0-of-1", "b-train-0-of-1", "train-7", "test-1-of-1"], None),
    ],
)
def test_sets_of_shards_that_are_not_whole_are_named(tmp_path, capsys, names, said, streaming, path):
    """As where a download, or mpp prepare, was broken off. A shard that is named by itself is no set."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows(4).to_parquet(tmp_path / f"{name}.parquet")
    path = path.format(tmp_path)
    load_splits(DataConfig(path=path), streaming)
    errors = capsys.readouterr().err
    assert (f"warning: data.path {path}: {said}" in errors) if said else ("shards" not in errors)
    load_splits(DataConfig(path=f"file://{tmp_path}/{names[0]}.parquet"), streaming)
    assert "shards" not in capsys.readouterr().err


def test_a_card_says_what_the_splits_are(tmp_path):
    for name in ("alpha", "beta"):
        rows(4).to_parquet(tmp_path / f"{name}.parquet")
    files = "{split: train, path: alpha.parquet}, {split: test, path: beta.parquet}"
    configs = f"configs:\n- {{config_name: default, data_files: [{files}]}}"
    (tmp_path / "README.md").write_text(f"---\n{configs}\n---\n")
    assert sizes_of_splits(tmp_path) == {"train": 4, "test": 4}
    with pytest.raises(UserError, match=r"data\.labels is a\.csv; it must be left out"):
        load_splits(DataConfig(path=str(tmp_path), labels="a.csv"))
    (tmp_path / "README.md").unlink()
    with pytest.raises(UserError, match=r"data\.name is b; it must be left out: no README\.md has configs"):
        load_splits(DataConfig(path=str(tmp_path), name="b"))


def test_a_stream_of_image_files_that_a_card_declares_is_refused(image_folder):
    files = "{split: train, path: 'cat/*'}, {split: test, path: 'dog/*'}"
    configs = f"configs:\n- {{config_name: default, data_files: [{files}]}}"
    (image_folder / "README.md").write_text(f"---\n{configs}\n---\n")
    assert sizes_of_splits(image_folder) == {"train": 6, "test": 6}
    with pytest.raises(UserError, match=r"data\.path holds image files, no shards: leave out data\.streaming"):
        load_splits(DataConfig(path=str(image_folder)), streaming=True)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("where", ["another split", "the same split"])
def test_classes_that_tables_declare_in_another_order_keep_their_names(tmp_path, where, ending):
    """The library takes the first file's for all."""
    other_split = "test" if where == "another split" else "train"
    write_owls_and_cats(tmp_path / f"train-0.{ending}", ["owl", "cat"])
    write_owls_and_cats(tmp_path / f"{other_split}-1.{ending}", ["cat", "owl"])
    if where == "the same split":
        refused = rf"train-1\.{ending} has label otherwise than .*train-0\.{ending}"
        for streaming in (False, True):
            with pytest.raises(UserError, match=refused):
                load_splits(DataConfig(path=str(tmp_path)), streaming)
    else:
        for dataset in load_image_datasets(DataConfig(path=str(tmp_path))):
            assert [dataset.class_names[number] for number in dataset.labels] == ["owl", "cat"] * 2


def write_owls_and_cats(file: Path, names: list[str]) -> None:
    """Write four images, owls and cats in turn, with classes that are declared in this order."""
    labels = [names.index("owl"), names.index("cat")] * 2
    write_table(file, rows(4, label=labels).cast_column("label", datasets.ClassLabel(names=names)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_table_with_more_columns_than_the_first_is_named(tmp_path, streaming):
    """Of one with fewer, the values are missing."""
    rows(4, label=[0, 1, 0, 1]).to_parquet(tmp_path / "train-0.parquet")
    rows(4).to_parquet(tmp_path / "train-1.parquet")
    load_splits(DataConfig(path=str(tmp_path)), streaming)
    rows(4, label=[0, 1, 0, 1], site=[1, 2, 1, 2]).to_parquet(tmp_path / "train-2.parquet")
    problem = rf"^{tmp_path}/train-2\.parquet has site otherwise than {tmp_path}/train-0\.parquet"
    with pytest.raises(UserError, match=problem):
        load_splits(DataConfig(path=str(tmp_path)), streaming)


def test_arrow_in_its_format_of_files_is_read(tmp_path):
    table = rows(4)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.features.arrow_schema) as file:
        file.write_table(table.with_format("arrow")[:])
    assert sizes_of_splits(tmp_path) == {"train": 4}


def test_a_name_of_the_hub_is_announced_at_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    announce_hub_lookup(ImagesConfig(path="photo"))
    assert "looking for it on the hub" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"cannot be loaded: .* \(and .* has no such folder or file\)"):
        load_splits(DataConfig(path="my photos"))


def test_the_error_of_the_hub_names_the_folder_that_was_meant(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpp.data.remote.finds_host", lambda url: False)
    config = DataConfig(path="photo", read_retries=0)
    words = rf"data\.path photo \(not a file or folder in {tmp_path}\) cannot be read"
    with pytest.raises(UserError, match=words):
        from_a_server(raise_connection_error, config)
    with pytest.raises(UserError, match=rf"{tmp_path}/photo, which does not exist"):
        load_image_datasets(DataConfig(path=f"{tmp_path}/photo"))


def raise_connection_error():
    raise ConnectionError("no route to the hub")

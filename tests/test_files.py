"""mpp/runtime/files.py: files and folders that are complete or absent."""

import os
from pathlib import Path

import pytest

from mpp.runtime.files import clear_leftovers, complete


def synced_paths(monkeypatch):
    """The paths that are synced to disk from now on, in order."""
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return synced


def test_a_file_has_its_name_when_it_is_complete_and_synced(tmp_path, monkeypatch):
    file = tmp_path / "notes.json"
    file.write_text("before")
    synced = synced_paths(monkeypatch)
    with complete(file) as partial:
        partial.write_text("after")
        assert file.read_text() == "before" and synced == []
    assert file.read_text() == "after"
    assert synced == [partial, tmp_path] and list(tmp_path.iterdir()) == [file]


def test_a_file_that_could_not_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "notes.json"
    file.write_text("before")
    with pytest.raises(OSError, match="full"), complete(file) as partial:
        partial.write_text("half")
        raise OSError("disk is full")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_folder_takes_the_place_of_another_with_all_its_files(tmp_path):
    folder, left_over = tmp_path / "encoder", tmp_path / ".encoder.partial" / "half"
    left_over.parent.mkdir()
    left_over.touch()  # by a process that was killed
    for names in (["a", "b"], ["c"]):
        with complete(folder) as partial:
            partial.mkdir()
            for name in names:
                (partial / name).touch(mode=0o600)
    assert [path.name for path in folder.iterdir()] == ["c"] and list(tmp_path.iterdir()) == [folder]
    usual = tmp_path / "usual"
    usual.touch()
    assert (folder / "c").stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("replaced", [True, False], ids=["after its successor came", "before"])
def test_a_folder_that_was_moved_aside_is_there_again(tmp_path, replaced):
    earlier, folder = tmp_path / ".encoder.earlier", tmp_path / "encoder"
    for path in [tmp_path / ".encoder.partial", earlier, *([folder] if replaced else [])]:
        path.mkdir()
        (path / path.name).touch()
    clear_leftovers(folder)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / (folder.name if replaced else earlier.name)).is_file()


def test_a_file_never_replaces_a_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(OSError), complete(tmp_path / "out") as partial:
        partial.touch()
    assert (tmp_path / "out" / "precious").is_file()

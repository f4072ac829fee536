"""mpp/runtime/files.py: files and folders that are complete or absent."""

import os
from pathlib import Path

import pytest

from mpp.runtime.files import clear_leftovers, complete


def synced_paths(monkeypatch) -> list[Path]:
    """The paths that are synced to disk from now on, in order."""
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return synced


def test_a_file_has_its_name_when_it_is_complete_and_synced(tmp_path, monkeypatch):
    file = tmp_path / "notes.json"
    file.write_text("before", encoding="utf-8")
    synced = synced_paths(monkeypatch)
    with complete(file) as partial:
        partial.write_text("after", encoding="utf-8")
        assert file.read_text(encoding="utf-8") == "before" and synced == []
    assert file.read_text(encoding="utf-8") == "after"
    assert synced == [partial, tmp_path] and list(tmp_path.iterdir()) == [file]


def test_a_file_that_could_not_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "notes.json"
    file.write_text("before", encoding="utf-8")
    with pytest.raises(OSError, match="full"), complete(file) as partial:
        partial.write_text("half", encoding="utf-8")
        raise OSError("disk is full")
    assert file.read_text(encoding="utf-8") == "before" and list(tmp_path.iterdir()) == [file]


def test_a_folder_takes_the_place_of_another_with_all_its_files(tmp_path):
    folder = tmp_path / "encoder"
    for names in (["a", "b"], ["c"]):
        with complete(folder) as partial:
            partial.mkdir()
            for name in names:
                (partial / name).touch(mode=0o600)
    assert [path.name for path in folder.iterdir()] == ["c"] and list(tmp_path.iterdir()) == [folder]
    usual = tmp_path / "usual"
    usual.touch()
    assert (folder / "c").stat().st_mode == usual.stat().st_mode


def test_what_a_killed_process_left_is_written_over(tmp_path):
    for left_over in (tmp_path / ".file.partial", tmp_path / ".folder.partial" / "half"):
        left_over.parent.mkdir(exist_ok=True)
        left_over.touch()
    with complete(tmp_path / "file") as partial:
        partial.touch()
    with complete(tmp_path / "folder") as partial:
        partial.mkdir()
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}


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


def test_processes_that_write_the_same_file_do_not_share_a_temporary_path(tmp_path):
    with complete(tmp_path / "file", shared=True) as partial:
        assert str(os.getpid()) in partial.name
        partial.touch()

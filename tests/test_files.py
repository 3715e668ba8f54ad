"""All or nothing, whatever goes wrong in between."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from confide import files
from confide.errors import ReleaseError
from confide.files import destroy, new_folder, sweep, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "out") as side:
        (side / "a.txt").write_text("a")
        (side / "sub").mkdir()
        (side / "sub" / "b.txt").write_text("b")
        assert not (tmp_path / "deep" / "out").exists()
    assert names(tmp_path / "deep") == ["out"]
    assert (tmp_path / "deep" / "out" / "sub" / "b.txt").read_text() == "b"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ValueError("no"), MemoryError()])
def test_nothing_appears_otherwise(tmp_path: Path, error: BaseException) -> None:
    def half() -> None:
        with new_folder(tmp_path / "out") as side:
            (side / "half.txt").write_text("ha")
            raise error

    with pytest.raises(type(error)):
        half()
    assert names(tmp_path) == []


def test_a_full_disk_is_one_message(tmp_path: Path) -> None:
    with (
        pytest.raises(ReleaseError, match=r"can't write .*out: No space left on device"),
        new_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReleaseError, match="No space left"), new_folder(tmp_path / "out") as side:
        (side / "a").touch()
    with pytest.raises(ReleaseError, match="No space left"):
        write_text(tmp_path / "note.txt", "text")
    assert names(tmp_path) == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with pytest.raises(ReleaseError, match="exists already"), new_folder(tmp_path / "out"):
        raise AssertionError("the block must not run")
    assert names(tmp_path / "out") == ["old"]


def test_overwriting_swaps(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with new_folder(tmp_path / "out", overwrite=True) as side:
        (side / "new").touch()
        assert names(tmp_path / "out") == ["old"]
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_a_swap_that_fails_half_way_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise error
        return plain(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((KeyboardInterrupt, ReleaseError)), new_folder(tmp_path / "out", overwrite=True):
        pass
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["old"]


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReleaseError, match="Not a directory"), new_folder(tmp_path / "file" / "out"):
        pass
    with pytest.raises(ReleaseError, match="can't write"):
        write_text(tmp_path / "file" / "note.txt", "text")
    with pytest.raises(ReleaseError, match="Is a directory"):
        write_text(tmp_path, "text")
    assert names(tmp_path) == ["file"]


def test_text_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "sub" / "note.txt"
    write_text(note, "old ε")
    write_text(note, "new ε")
    assert note.read_text(encoding="utf-8") == "new ε"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(note, "newest")
    assert note.read_text(encoding="utf-8") == "new ε"
    assert names(note.parent) == ["note.txt"]


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": "ε"})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "b": 1,\n  "a": "ε"\n}\n'
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            files.write_json(tmp_path / "b.json", {"x": bad})
    assert names(tmp_path) == ["a.json"]


LIVING = """
import sys, time
from pathlib import Path
from confide.files import new_folder
with new_folder(Path(sys.argv[1])) as side:
    (side / "half").touch()
    print("building", flush=True)
    time.sleep(600)
"""


def test_what_killed_processes_left_is_removed_and_what_living_ones_build_is_not(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", LIVING, str(tmp_path / name)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        return process

    killed, living = start("out"), start("out")
    try:
        assert len(names(tmp_path)) == 2
        killed.kill()
        killed.wait()
        with new_folder(tmp_path / "out"):
            pass
        (left,) = [name for name in names(tmp_path) if name.endswith(".partial")]
        assert names(tmp_path / left / "new") == ["half"]
        (tmp_path / ".mine.partial").mkdir()
        (tmp_path / ".mine.0123abcd.partial").touch()
    finally:
        living.kill()
        living.wait()
    write_text(tmp_path / "note.txt", "text")
    assert names(tmp_path) == [".mine.0123abcd.partial", ".mine.partial", "note.txt", "out"]


def test_a_swap_that_was_killed_half_way_is_undone(tmp_path: Path) -> None:
    side = tmp_path / ".out.0123abcd.partial"
    for name in ("old", "new"):
        (side / name).mkdir(parents=True)
        (side / name / name).touch()
    sweep(tmp_path)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["old"]


def test_destroy_overwrites(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"secret" * 100)
    os.link(tmp_path / "key", tmp_path / "same")
    destroy(tmp_path / "key")
    assert names(tmp_path) == ["same"]
    left = (tmp_path / "same").read_bytes()
    assert len(left) == 600
    assert b"secret" not in left


def test_private_files_are_their_owners(tmp_path: Path) -> None:
    write_json(tmp_path / "key.json", {}, private=True)
    assert (tmp_path / "key.json").stat().st_mode & 0o777 == 0o600


def test_a_new_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.bin"
    with pytest.raises(KeyboardInterrupt), files.new_file(path) as side:
        _half(side)
    assert not list(path.parent.iterdir())
    with files.new_file(path) as side:
        side.write_bytes(b"whole")
        assert not path.exists()
    assert [file.name for file in path.parent.iterdir()] == ["a.bin"]
    with pytest.raises(ReleaseError, match="exists already"), files.new_file(path):
        pass
    assert path.read_bytes() == b"whole"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReleaseError, match="can't write"), files.new_file(tmp_path / "file" / "b"):
        pass


def _half(side: Path) -> None:
    side.write_bytes(b"half")
    raise KeyboardInterrupt

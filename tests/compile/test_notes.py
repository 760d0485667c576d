from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgen.compile import notes


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))


def test_a_damaged_or_exchanged_note_is_not_believed(tmp_path: Path) -> None:
    notes.remember("kind", "name", "condition", "text of two\nlines")
    note = tmp_path / "cache" / "kind" / "name"
    whole = note.read_bytes()
    assert notes.recall("kind", "name", "condition") == "text of two\nlines"
    for damaged in (b"", whole[:-1], whole[:40], whole.replace(b"two", b"one"), b"\xff" * 100, whole + b" "):
        note.write_bytes(damaged)
        assert notes.recall("kind", "name", "condition") is None
    note.write_bytes(whole)
    note.rename(note.with_name("another"))
    assert notes.recall("kind", "another", "condition") is None


def test_a_note_that_others_could_write_is_not_believed(tmp_path: Path) -> None:
    notes.remember("kind", "name", "condition", "text")
    note = tmp_path / "cache" / "kind" / "name"
    assert notes.recall("kind", "name", "condition") == "text"
    assert notes.recall("kind", "name", "other condition") is None
    note.chmod(0o666)
    assert notes.recall("kind", "name", "condition") is None
    note.chmod(0o600)
    note.rename(tmp_path / "elsewhere")
    note.symlink_to(tmp_path / "elsewhere")
    assert notes.recall("kind", "name", "condition") is None


def test_directories_are_private_and_notes_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_KEPT", 3)
    old = os.umask(0)
    try:
        for number in range(6):
            notes.remember("kind", f"name{number}", "condition", "text")
            os.utime(tmp_path / "cache" / "kind" / f"name{number}", (number, number))
    finally:
        os.umask(old)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "kind").stat().st_mode & 0o777 == 0o700
    assert len(list((tmp_path / "cache" / "kind").iterdir())) == 3
    assert notes.recall("kind", "name5", "condition") == "text"


def test_a_disk_that_cannot_be_written_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("a file where a directory should be")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    notes.remember("kind", "name", "condition", "text")
    assert notes.recall("kind", "name", "condition") is None

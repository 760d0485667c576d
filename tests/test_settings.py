from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashgen import settings
from flashgen.errors import SpecError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/caches")
    assert settings.cache_dir() == Path("/x/caches/flashgen")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.cache_dir() == Path.home() / ".cache" / "flashgen"
    assert settings.cache_size() == 2**30
    assert settings.cache_shared() is False
    assert settings.lock_timeout() == 600
    assert settings.dump_dir() is settings.override_dir() is settings.cxx() is None


def test_values_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("FLASHGEN_DUMP_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHGEN_CXX", "clang++-18")
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "yes")
    monkeypatch.setenv("FLASHGEN_LOCK_TIMEOUT", "2.5")
    assert settings.cache_dir() == Path.home() / "kernels"
    assert settings.dump_dir() == tmp_path / "new"
    assert settings.override_dir() == tmp_path
    assert settings.cxx() == "clang++-18"
    assert settings.cache_shared() is True
    assert settings.lock_timeout() == 2.5


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("2G", 2**31), ("1GiB", 2**30), ("512 m", 2**29), ("7b", 7)]
)
def test_sizes_may_have_units(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", text)
    assert settings.cache_size() == size


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("FLASHGEN_CACHE_SIZE", "much", settings.cache_size),
        ("FLASHGEN_CACHE_SIZE", "-1", settings.cache_size),
        ("FLASHGEN_CACHE_SIZE", "1.5G", settings.cache_size),
        ("FLASHGEN_CACHE_SIZE", "GiB", settings.cache_size),
        ("FLASHGEN_CACHE_SIZE", "1GiGi", settings.cache_size),
        ("FLASHGEN_CACHE_SIZE", "²", settings.cache_size),
        ("FLASHGEN_LOCK_TIMEOUT", "soon", settings.lock_timeout),
        ("FLASHGEN_LOCK_TIMEOUT", "-1", settings.lock_timeout),
        ("FLASHGEN_LOCK_TIMEOUT", "nan", settings.lock_timeout),
        ("FLASHGEN_LOCK_TIMEOUT", "inf", settings.lock_timeout),
        ("FLASHGEN_SPIN_LIMIT", "-1", settings.spin_limit),
        ("FLASHGEN_CACHE_SHARED", "maybe", settings.cache_shared),
        ("FLASHGEN_CACHE_DIR", "/dev/null", settings.cache_dir),
        ("FLASHGEN_DUMP_DIR", "/dev/null", settings.dump_dir),
        ("FLASHGEN_CACHE_DIR", "~nobody-of-that-name/x", settings.cache_dir),
        ("FLASHGEN_OVERRIDE_DIR", "/does/not/exist", settings.override_dir),
    ],
)
def test_bad_values_are_sentences_with_name_and_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError) as error:
        read()
    assert str(error.value).startswith(f"{name}={value!r} is not usable; set it to ")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("FLASHGEN_CACHE_SIZE", settings.cache_size),
        ("FLASHGEN_CACHE_SHARED", settings.cache_shared),
        ("FLASHGEN_CACHE_DIR", settings.cache_dir),
        ("FLASHGEN_OVERRIDE_DIR", settings.override_dir),
    ],
)
def test_a_long_value_leaves_room_for_the_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, "x" * 5000)
    with pytest.raises(SpecError, match=f"^{name}='xxx.*xxx' is not usable; set it to .") as error:
        read()
    assert len(str(error.value)) < 600


def test_every_variable_is_listed_for_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(settings.__file__).read_text()
    read = {word.strip('"') for word in source.split('"') if word.startswith("FLASHGEN_")}
    assert read == set(settings.VARIABLES)
    monkeypatch.setenv("FLASHGEN_CXX", "g++")
    assert settings.VARIABLES["FLASHGEN_CXX"].value == "g++"
    assert settings.VARIABLES["FLASHGEN_DUMP_DIR"].value is None

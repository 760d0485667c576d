from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashgen as package
from flashgen.cli.exits import Exit, UsageError, exit_code
from flashgen.errors import (
    LONGEST_MESSAGE,
    ArgumentError,
    CacheError,
    CompileError,
    EmulationError,
    FlashgenError,
    LaunchError,
    NoGpuError,
    PlanError,
    SpecError,
)

ESCAPE = "\x1b["


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("x"), 2),
        (PlanError("x"), 2),
        (UsageError("x"), 2),
        (NoGpuError("x"), 3),
        (CompileError("x"), 4),
        (LaunchError("x"), 1),
        (CacheError("x"), 5),
        (ArgumentError("x"), 2),
        (EmulationError("x"), 1),
        (FlashgenError("x"), 5),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: FlashgenError, code: int) -> None:
    assert exit_code(error) == code


def failing(error: BaseException) -> Any:
    def command(*_: Any) -> None:
        raise error

    return command


def test_an_error_is_one_message_without_a_traceback(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHGEN_DEBUG", raising=False)
    monkeypatch.setattr("flashgen.cli.commands.build.plan_all", failing(NoGpuError("no GPU; plug one in")))
    result = flashgen("build", "--head-dim", "64")
    assert (result.code, result.out, result.err) == (3, "", "error: no GPU; plug one in\n")


def test_debug_shows_the_traceback(flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_DEBUG", "1")
    monkeypatch.setattr("flashgen.cli.commands.build.plan_all", failing(NoGpuError("no GPU")))
    with pytest.raises(NoGpuError):
        flashgen("build", "--head-dim", "64")


def test_ctrl_c_ends_quietly(flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.cli.commands.build.plan_all", failing(KeyboardInterrupt()))
    result = flashgen("build", "--head-dim", "64")
    assert result.code == Exit.INTERRUPTED
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--no-such-option"),
        ("build", "--head-dim", "many"),
        ("build",),
        ("show", "--head-dim", "64", "--what", "poem"),
        ("no-such-command",),
        ("cache", "no-such-command"),
    ],
)
def test_usage_errors_end_with_2_on_stderr(flashgen: Any, arguments: tuple[str, ...]) -> None:
    result = flashgen(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err


LONG_WORD = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        (LONG_WORD,),
        ("--" + LONG_WORD,),
        ("cache", LONG_WORD),
        ("list", LONG_WORD),
        ("build", "--head-dim", LONG_WORD),
        ("build", "--head-dim", "64", "--head" + LONG_WORD),
        ("show", "--head-dim", "64", "--what", LONG_WORD),
        ("show", "--head-dim", "64", "--", *["another"] * 2000),
    ],
)
def test_usage_errors_are_short_whatever_was_typed(flashgen: Any, arguments: tuple[str, ...]) -> None:
    result = flashgen(*arguments)
    assert result.code == 2
    assert len(result.err) <= LONGEST_MESSAGE


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("build", "--head-dim", "64", "--out", "/" + LONG_WORD), "name a directory that can"),
        (("build", "--head-dim", "64", "--captured", LONG_WORD), "is not NAME=VALUE; write one such as"),
        (("build", "--head-dim", "64", *["--captured", f"{LONG_WORD}=1"] * 2), "leave one out"),
        (("build", "--head-dim", "64", "--window", LONG_WORD), "is not LEFT,RIGHT; write two whole numbers"),
        (("build", "--head-dim", "64", "--registers", LONG_WORD), "write two whole numbers such as 24,240"),
        (("build", "--spec", f"{LONG_WORD}.yaml"), "a spec file's name ends in .toml or .json"),
        (("build", "--spec", f"{LONG_WORD}.toml"), "cannot be read"),
        (("show", "--head-dim", "64", "--kernel", LONG_WORD), "is no kernel of this spec; its kernels are forward"),
        (("check", "--head-dim", "64", "--case", LONG_WORD), "write words such as"),
        (("check", "--head-dim", "64", "--case", f"Sq=1 Sk=1 {LONG_WORD}=1"), "it knows Sq"),
        (("check", "--head-dim", "64", "--case", f"Sq={LONG_WORD} Sk=1"), "which is not a whole number"),
    ],
)
def test_a_long_value_leaves_room_for_the_remedy(
    flashgen: Any, machine: list[Any], arguments: tuple[str, ...], remedy: str
) -> None:
    result = flashgen(*arguments)
    assert result.code == 2
    assert remedy in result.err
    assert len(result.err) <= LONGEST_MESSAGE


def test_help_and_version_go_to_stdout(flashgen: Any) -> None:
    result = flashgen("--version")
    assert (result.code, result.out, result.err) == (0, f"{package.__version__}\n", "")
    result = flashgen("build", "--help")
    assert result.code == 0
    for option in ("--head-dim", "--warp-partition", "--deterministic", "--json", "--spec", "--arch"):
        assert option in result.out


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from flashgen.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_no_color_holds_even_where_color_is_forced() -> None:
    arguments = ("build", "--head-dim", "0")
    colored = command(*arguments, FORCE_COLOR="1", NO_COLOR="")
    plain = command(*arguments, FORCE_COLOR="1", NO_COLOR="1")
    assert ESCAPE in colored.stderr
    assert "\x1b[31m" not in plain.stderr
    assert "--head-dim 0 is out of range" in plain.stderr


def test_a_reader_that_stops_reading_causes_no_traceback() -> None:
    code = "import sys; from flashgen.cli.main import main; main()"
    arguments = ["show", "--head-dim", "64", "--arch", "sm_80", "--what", "source"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_warnings_of_the_cache_reach_the_person(flashgen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    flashgen("--version")
    logging.getLogger("flashgen.cache").warning("the disk is full")
    assert capsys.readouterr().err == "warning: the disk is full\n"


HELP = [
    (),
    *[(name,) for name in ("build", "check", "show", "explain", "list", "doctor", "cache")],
    *[("cache", name) for name in ("info", "verify", "clear")],
]


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_names_no_type_of_flags_and_loses_no_brackets(flashgen: Any, arguments: tuple[str, ...]) -> None:
    shown = flashgen(*arguments, "--help").out
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "\\[" not in shown
    if arguments == ("build",):
        words = re.sub(r"[\s│]+", " ", shown)
        assert "'k < n[b]'" in words
        assert "'logits[h]'" in words


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("--help",), ("--version",)], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(own_cache: Path, arguments: tuple[str, ...]) -> None:
    if arguments[0] == "list":
        built = command("build", "--head-dim", "16", "--forward-only", "--no-verify", "--arch", "sm_80")
        assert built.returncode == 0, built.stderr
    with open("/dev/full", "w") as full:
        code = "from flashgen.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (5, "error: the output cannot be written (No space left on device)\n")


ROOT = Path(__file__).resolve().parents[2]


def test_every_variable_and_exit_code_is_documented() -> None:
    documented = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "flashgen").rglob("*.py")]
    # Macros of kernels and of the emulator are no variables.
    used = {name for text in texts for name in re.findall(r"\bFLASHGEN_[A-Z_]*[A-Z]\b", text)}
    used -= {name for name in used if name.startswith(("FLASHGEN_EMU", "FLASHGEN_KERNEL", "FLASHGEN_DEVICE"))}
    rows = set(re.findall(r"^\| `(FLASHGEN_[A-Z_]+)` \|", documented, flags=re.MULTILINE))
    assert {"FLASHGEN_CACHE_DIR", "FLASHGEN_DEBUG"} <= used == rows
    codes = set(re.findall(r"^\| (\d+) \|", documented, flags=re.MULTILINE))
    assert codes == {str(int(code)) for code in Exit}

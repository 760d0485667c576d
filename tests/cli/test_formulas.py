"""Named masks and scores as texts: the error gives options that work as they stand."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flashgen import spec as names
from flashgen.cli.options import kernel_options
from flashgen.errors import SpecError
from flashgen.spec.formulas import BANDS, formula
from flashgen.spec.text.files import load_spec

MASKS, SCORES = (
    [
        name
        for name in names.__all__
        if inspect.isfunction(value := getattr(names, name)) and inspect.signature(value).return_annotation == kind
    ]
    for kind in ("Mask", "Score")
)
#: What the message says where no text is needed at all.
OPTIONS = {"causal": "--causal", "window": "--window 512,0", "sliding_window": "--window 512,0"}


def written_out(flashgen: Any, option: str, text: str) -> str:
    """The remedy in the error for a text, as the command line prints it."""
    result = flashgen("show", "--head-dim", "64", option, text)
    assert (result.code, result.out) == (2, "")
    (found,) = re.findall(r"; (?:.* )?write (--.*)$", result.err, flags=re.MULTILINE)
    return str(found)


def test_the_names_are_those_that_flashgen_exports() -> None:
    assert {"causal", "document", "prefix_lm"} <= set(MASKS)
    assert {"softcap", "alibi", "sink"} <= set(SCORES)


@pytest.mark.parametrize("name", sorted({*MASKS, *SCORES} - {"full"}))
def test_the_error_for_a_named_function_gives_options_that_work(flashgen: Any, name: str) -> None:
    option = "--mask" if name in MASKS else "--score"
    remedies = {written_out(flashgen, option, text) for text in (name, f"{name}(30)", f"fg.{name}(x=1)")}
    (remedy,) = remedies
    assert remedy == OPTIONS.get(name, remedy)
    assert flashgen("show", "--head-dim", "64", *shlex.split(remedy)).code == 0


def test_the_mask_of_all_pairs_is_no_option_at_all(flashgen: Any) -> None:
    result = flashgen("show", "--head-dim", "64", "--mask", "full")
    assert "leave the mask out" in result.err


def test_softcap_is_answered_with_its_formula(flashgen: Any) -> None:
    for text in ("softcap", "softcap(30)", "softcap(30) >> alibi(slopes)"):
        remedy = written_out(flashgen, "--score", text)
        assert remedy == "--score 'tanh(s / limit) * limit' --captured limit=30.0"
        words = iter(shlex.split(remedy))
        options = dict(zip(words, words, strict=True))
        request = kernel_options(head_dim=64, score=options["--score"], captured=[options["--captured"]])
        assert request.spec == names.AttentionSpec(64, score=names.softcap(30.0))


def test_a_captured_name_hides_the_function_of_that_name() -> None:
    request = kernel_options(head_dim=64, score="s + bias[h]", captured=["bias=float32[1]"])
    assert request.spec.score is not None
    with pytest.raises(SpecError, match="bias is a tensor of 1 dimensions and has to be indexed"):
        kernel_options(head_dim=64, score="s + bias", captured=["bias=float32[1]"])


def test_a_spec_file_is_answered_with_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "kernel.toml"
    path.write_text('head_dim = 64\nscore = "alibi"\n')
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    lines = str(caught.value).rpartition(" write ")[2].replace(" and ", "\n")
    assert lines == "score='s - slopes[h] * abs(q + (k_len - q_len) - k)'\ncaptured.slopes='float32[1]'"
    path.write_text(f"head_dim = 64\n{lines}\n")
    assert load_spec(path)[0].score is not None


def test_the_page_on_expressions_has_every_formula() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "expressions.md").read_text(encoding="utf-8")
    page = page.replace("\\|", "|")
    for name in {*MASKS, *SCORES} - set(BANDS):
        found = formula(name)
        assert found is not None, name
        assert f"`{name}(" in page, name
        assert found.text in page, name


def test_the_page_on_expressions_shows_commands_that_work(flashgen: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "expressions.md").read_text(encoding="utf-8")
    commands = re.findall(r"^flashgen (.*)$", page, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert flashgen(*shlex.split(command)).code == 0, command

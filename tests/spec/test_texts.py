"""Masks and scores as texts: files and commands that give the same spec again."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec, Mask
from flashgen.spec.text.command import rebuild_command
from flashgen.spec.text.declared import Declared
from flashgen.spec.text.files import dump_spec, load_spec, spec_from_json, spec_from_toml, spec_to_json, spec_to_toml
from flashgen.spec.text.reading import spec_from_dict
from tests.spec.test_command import parse

IDS = np.zeros((2, 8), np.int32)
SLOPES = np.ones(4, np.float32)
PATTERN = np.ones((2, 2), bool)
limit, cap, keep = 512, 30.0, True


def softcapped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.tanh(s / cap) * cap


MASKS = {
    "none": fg.full(),
    "document": fg.document(IDS),
    "causal document": fg.causal() & fg.document(IDS),
    "window beside an expression": fg.window(5, 3) & fg.window(7, 0, align="top-left") & fg.prefix_lm(3),
    "a function": Mask.of(lambda b, h, q, k: (q >= k) & (q - k < limit)),
    "a flag": Mask.of(lambda b, h, q, k: keep | (q >= k)),
    "blocks": fg.block_sparse(PATTERN, 16),
    "either": fg.window(4, 4) | fg.global_tokens(2),
    "not": ~fg.document(IDS),
}
SCORES = {
    "none": None,
    "softcap": fg.softcap(30.0),
    "a function": fg.Score.of(softcapped),
    "both": fg.softcap(3.0) >> fg.alibi(SLOPES) >> fg.sink(SLOPES),
    "sink": fg.sink(SLOPES),
    "identity": fg.Score.of(lambda s, b, h, q, k: s),
    "the mask's tensor": fg.Score.of(lambda s, b, h, q, k: s + 0.5 * IDS[b, k]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_files_and_the_command_give_the_same_spec_again(mask: str, score: str, tmp_path: Any) -> None:
    spec = AttentionSpec(64, mask=MASKS[mask], score=SCORES[score])
    for write, read in ((spec_to_json, spec_from_json), (spec_to_toml, spec_from_toml)):
        again = read(write(spec))
        assert again == spec
        assert write(again) == write(spec)
        assert {name: type(value) for name, value in again.scalars.items()} == {
            name: type(value) for name, value in spec.scalars.items()
        }
        assert all(isinstance(value, Declared) for value in again.tensors.values())
    dump_spec(spec, None, tmp_path / "spec.toml")
    assert load_spec(tmp_path / "spec.toml")[0] == spec
    command = rebuild_command(spec)
    assert parse(command).spec == spec
    assert shlex.join(shlex.split(command)) == command


def test_the_written_form_reads_well() -> None:
    spec = AttentionSpec(
        64, mask=fg.causal() & fg.document(IDS), score=fg.Score.of(softcapped) >> fg.sink(SLOPES), direction="forward"
    )
    text = (
        'head_dim = 64\nhead_dim_v = 64\ndtype = "bf16"\nmask = ["causal", {where = "ids[b, q] == ids[b, k]"}]\n'
        'score = "tanh(s / cap) * cap"\nsink = "logits[h]"\n'
        'captured = {cap = 30.0, ids = "int32[2]", logits = "float32[1]"}\n'
        'direction = "forward"\ndeterministic = false\n'
    )
    assert spec_to_toml(spec) == text
    assert rebuild_command(spec) == (
        "flashgen build --head-dim 64 --dtype bf16 --causal --mask 'ids[b, q] == ids[b, k]' "
        "--score 'tanh(s / cap) * cap' --sink 'logits[h]' --captured cap=30.0 --captured 'ids=int32[2]' "
        "--captured 'logits=float32[1]' --forward-only"
    )


@settings(deadline=None)
@given(st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.floats(allow_nan=False))
def test_captured_numbers_keep_their_value_and_type(value: float) -> None:
    text = "where(x, s, 0.0)" if isinstance(value, bool) else "s * x"
    spec = spec_from_dict({"head_dim": 16, "score": text, "captured": {"x": value}})
    again = (spec_from_json(spec_to_json(spec)), spec_from_toml(spec_to_toml(spec)), parse(rebuild_command(spec)).spec)
    for found in (spec.scalars["x"], *(each.scalars["x"] for each in again)):
        assert (type(found), found, math.copysign(1, found)) == (type(value), value, math.copysign(1, value))


def test_tensors_of_one_name_are_one_tensor() -> None:
    spec = spec_from_dict(
        {"head_dim": 16, "mask": {"where": "a[k] > 0"}, "score": "s + a[q]", "captured": {"a": "float32[1]"}}
    )
    assert list(spec.tensors) == ["a"]
    two = {"head_dim": 16, "mask": {"where": "a[k] > b2[k]"}, "captured": {"a": "float32[1]", "b2": "float32[1]"}}
    assert list(spec_from_dict(two).tensors) == ["a", "b2"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mask": {"where": "q >= window"}}, "mask.where: in 'q >= window': window is not a known name; known are b"),
        ({"mask": {"where": "q - k"}}, "mask.where='q - k' is a number; write a condition"),
        ({"mask": {"where": "__import__('os')"}}, "calls __import__, which is not in the language"),
        ({"mask": {"where": 3}}, "mask.where=3 is not a text"),
        ({"mask": ["causal", {"where": "q and k"}]}, "mask[1].where: in 'q and k'"),
        ({"mask": {"where": "q > k", "left": 2}}, "mask.left=2 is not a field"),
        ({"score": "s > 0"}, "score='s > 0' is a condition; write a number"),
        ({"score": True}, "score=True is not a text"),
        ({"sink": "s * 2"}, "sink: in 's * 2': s is not a known name"),
        ({"sink": "q * 2.0"}, "sink='q * 2.0' depends on q; a row has one sink"),
        ({"captured": {"x": 1}}, "captured.x is used by neither mask, score nor sink; leave it out"),
        ({"captured": {"x": "int4[2]"}}, "captured.x='int4[2]' has elements of type 'int4'; use one of bool, uint8"),
        ({"captured": {"x": "int32[99]"}}, "has 99 dimensions; use at most 8"),
        ({"captured": {"x": "int32"}}, "captured.x='int32' is neither a number nor a tensor"),
        ({"captured": {"x": 2**40}}, "captured.x=1099511627776 does not fit 32 bits"),
        ({"captured": {"x": [1]}}, "captured.x=[1] is not a captured value"),
        ({"captured": {"for": 1}}, "captured.for is not a name that a kernel can use; write captured_for instead"),
        ({"captured": {"q": 1}}, "captured.q is not a name that a kernel can use"),
        ({"captured": 3}, "captured=3 is not a table; write captured = {"),
        ({"mask": {"where": "(" * 300 + "q" + ")" * 300}}, "mask.where: "),
        ({"mask": {"where": " & ".join(f"(q > {i})" for i in range(150))}}, "at most 256"),
    ],
)
def test_what_is_wrong_is_named(fields: Any, words: str) -> None:
    with pytest.raises(SpecError) as error:
        spec_from_dict({"head_dim": 16, **fields})
    assert words in str(error.value)
    assert all("; " in violation for violation in error.value.violations)


def test_every_violation_is_listed() -> None:
    values = {
        "head_dim": 0,
        "mask": ["causal", {"where": "q >= missing"}, {"where": "q + k"}],
        "score": "s +",
        "sink": "q",
    }
    with pytest.raises(SpecError) as error:
        spec_from_json(json.dumps(values))
    assert len(error.value.violations) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--captured", "x"], "--captured 'x' is not NAME=VALUE"),
        (["--captured", "x=1", "--captured", "x=2", "--mask", "q > x"], "--captured x is given twice"),
        (["--captured", "x=1+1", "--mask", "q > x"], "captured.x='1+1' is neither a number nor a tensor"),
        (["--mask", "q > x"], "x is not a known name"),
    ],
)
def test_options_are_read_as_strictly(words: list[str], message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(shlex.join(["flashgen", "build", "--head-dim", "16", *words]))
    assert message in str(error.value)

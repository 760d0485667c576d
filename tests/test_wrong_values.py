"""Whatever is passed where it does not belong, the error is a FlashgenError: a short sentence, at once."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest

import flashgen as fg
from flashgen.common.show import LONGEST, show
from flashgen.errors import LONGEST_MESSAGE, FlashgenError

SECONDS = 1.0


class Hostile:
    """Raises whatever is asked of it."""

    def _refuse(self, *arguments: object) -> NoReturn:
        raise RuntimeError("no answer")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __repr__ = __str__ = __hash__ = _refuse  # type: ignore[assignment]
    __len__ = __iter__ = __getitem__ = __index__ = __int__ = __float__ = __contains__ = __fspath__ = _refuse


class HostileText(str):
    """A str that is equal to everything, and has no repr."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        raise RuntimeError("no answer")


class HostileNumber(int):
    """An int that is larger and smaller than everything."""

    def __lt__(self, other: object) -> bool:
        return True

    __le__ = __gt__ = __ge__ = __lt__

    def __repr__(self) -> str:
        raise RuntimeError("no answer")


def endless() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def deep() -> list[Any]:
    items: list[Any] = []
    for _ in range(5000):
        items = [items]
    return items


ZOO: Mapping[str, Any] = {
    "None": None,
    "int array": np.arange(3),
    "float matrix": np.zeros((2, 3)),
    "empty array": np.zeros(0, np.float32),
    "array without dimensions": np.array(1.5),
    "object array": np.array([None, "x"], object),
    "large array": np.zeros((1000, 1000)),
    "text array": np.array(["forward", "both"]),
    "big-endian array": np.zeros(3, ">f4"),
    "NumPy int": np.int64(64),
    "NumPy float": np.float32(1.5),
    "True": True,
    "zero": 0,
    "minus one": -1,
    "huge": 10**400,
    "huge negative": -(10**400),
    "too long to print": 1 << 100_000,
    "huge fraction": Fraction(10**400),
    "decimal": Decimal("1.5"),
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "float": 1.5,
    "complex": 1j,
    "text": "flashgen",
    "long text": "x" * 1_000_000,
    "lines": "a\nb\n" * 1000,
    "surrogate": "\ud800",
    "null": "\0",
    "bytes": b"x" * 1_000_000,
    "list": [1, 2],
    "long list": [10**400] * 100_000,
    "endless list": endless(),
    "deep list": deep(),
    "tuple": (1, 2),
    "three": (1, 2, 3),
    "dict": {"a": 1},
    "wide dict": {"x" * 1000 + str(i): 10**400 for i in range(1000)},
    "dict of numbers": {1: 2, None: 3},
    "set": {1},
    "generator": (i for i in range(3)),
    "ellipsis": ...,
    "type": int,
    "function": lambda: 0,
    "builtin": len,
    "module": time,
    "object": object(),
    "hostile": Hostile(),
    "hostile text": HostileText("forward"),
    "hostile number": HostileNumber(16),
    "mask": fg.causal(),
    "score": fg.softcap(30.0),
    "spec": fg.AttentionSpec(64),
    "schedule": fg.Schedule(),
}
NUMBERS = ("NumPy float", "float", "huge", "NumPy int")
IDS, BIAS = np.zeros((2, 8), np.int32), np.zeros((4, 8, 8), np.float32)
TUNED = {"spec": fg.AttentionSpec(64), **dict.fromkeys("qkv", np.zeros((1, 8, 1, 64), np.float16))}
Pass = Callable[[Any], Any]


def option(function: Callable[..., Any], name: str, *arguments: Any, **others: Any) -> Pass:
    """A call with one argument left to be given."""
    return lambda value: function(*arguments, **{**others, name: value})


def fields(function: Callable[..., Any], names: str, *arguments: Any, **others: Any) -> dict[str, Pass]:
    label = getattr(function, "__name__", "call")
    return {f"{label} {name}": option(function, name, *arguments, **others) for name in names.split()}


def accepting(calls: dict[str, Pass], accepted: str = "") -> dict[str, tuple[Pass, set[str]]]:
    """Calls, and the names of values that are right there."""
    return {name: (call, {x.strip() for x in accepted.split(",") if x.strip()}) for name, call in calls.items()}


LENGTH_ONE = "True, NumPy int"
CALLS: dict[str, tuple[Pass, set[str]]] = {
    # Where all else is right, q is refused: it lies in host memory.
    **accepting(fields(fg.tune, "spec q budget", **TUNED)),
    **accepting(fields(fg.lab.cases, "lengths head_dims", lengths=(8,), head_dims=(8,)), "tuple, list, three"),
    **accepting(fields(fg.lab.cases, "dtype masks passes", (8,), (8,))),
    **accepting(fields(fg.lab.cases, "batch heads", (8,), (8,)), "None, hostile number"),
    **accepting(fields(fg.AttentionSpec, "head_dim"), "hostile number"),
    **accepting(fields(fg.AttentionSpec, "head_dim_v", 64), "zero, hostile number"),
    **accepting(fields(fg.AttentionSpec, "dtype", 64)),
    **accepting(fields(fg.AttentionSpec, "direction", 64), "hostile text"),
    **accepting(fields(fg.AttentionSpec, "deterministic dropout varlen", 64), "True"),
    **accepting(fields(fg.AttentionSpec, "cache", 64, direction="forward"), "None"),
    **accepting(fields(fg.AttentionSpec, "mask", 64), "mask"),
    **accepting(fields(fg.AttentionSpec, "score", 64), "None, score"),
    **accepting(fields(fg.Schedule, "tile_q tile_kv"), "None, hostile number"),
    **accepting(fields(fg.Schedule, "stages warps algorithm softmax registers"), "None"),
    **accepting(fields(fg.Schedule, "backward")),
    **accepting(fields(fg.BackwardSchedule, "tile_q tile_kv"), "None, hostile number"),
    **accepting(fields(fg.BackwardSchedule, "stages warps"), "None"),
    **accepting(fields(fg.WarpPartition, "kind", count=4)),
    **accepting(fields(fg.WarpPartition, "count", "split_q"), "None"),
    **accepting(fields(fg.WarpPartition, "producers consumers", "split_q", count=4), "None"),
    **accepting(fields(fg.WarpPartition, "producers", "specialized", consumers=2), "None"),
    **accepting({"specialized consumers": option(fg.WarpPartition, "consumers", "specialized")}, "None"),
    **accepting({"specialized count": option(fg.WarpPartition, "count", "specialized", consumers=2)}, "None"),
    **accepting(fields(fg.causal, "align")),
    **accepting(fields(fg.window, "left right"), "None, minus one, zero, hostile number"),
    **accepting(fields(fg.window, "align", 1)),
    **accepting(fields(fg.sliding_window, "left"), "None, minus one, zero, hostile number"),
    **accepting(fields(fg.prefix_lm, "n"), "zero, int array, empty array, hostile number"),
    **accepting(fields(fg.document, "ids"), "float matrix, large array"),
    **accepting(fields(fg.document, "ids_kv", IDS), "None, float matrix, large array"),
    **accepting(fields(fg.dilated, "stride"), "hostile number"),
    **accepting(fields(fg.global_tokens, "n"), "zero, hostile number"),
    **accepting(fields(fg.chunked, "n"), "hostile number"),
    **accepting(fields(fg.block_sparse, "pattern"), "float matrix, large array"),
    **accepting(fields(fg.block_sparse, "block", IDS), "tuple, hostile number"),
    **accepting(fields(fg.key_padding, "lengths"), "int array, empty array"),
    **accepting(fields(fg.softcap, "cap"), "float, NumPy float, NumPy int, hostile number"),
    **accepting(fields(fg.alibi, "slopes"), "int array, float matrix, empty array, large array"),
    **accepting(fields(fg.bias, "tensor"), "int array, float matrix, empty array, large array"),
    **accepting(fields(fg.relative_bias, "table"), "int array, float matrix"),
    **accepting(fields(fg.sink, "logits"), "int array, empty array"),
    **accepting({"Mask.of": fg.Mask.of}, "mask"),
    **accepting({"Score.of": fg.Score.of}, "score"),
    **accepting({"mask &": lambda x: fg.causal() & x, "mask |": lambda x: fg.causal() | x}, "mask"),
    **accepting({"score >>": lambda x: fg.softcap(2.0) >> x}, "score"),
    **accepting(fields(fg.Dropout, "p"), "zero"),
    **accepting(fields(fg.Dropout, "seed offset", 0.5), "zero, hostile number"),
    **accepting(fields(fg.KVCache, "appended", IDS[0]), "zero, hostile number"),
    **accepting({"KVCache appended alone": option(fg.KVCache, "appended")}, "zero"),
    **accepting(fields(fg.KVCache, "num_splits"), "zero, hostile number"),
    **accepting(fields(fg.KVCache, "max_seqlen_q"), "zero"),
    **accepting(fields(fg.Sequences, "max_seqlen_q", IDS[0], IDS[0], max_seqlen_k=8), "zero, hostile number"),
    **accepting(fields(fg.build, "spec", arch="sm_80"), "spec"),
    **accepting(fields(fg.build, "schedule", fg.AttentionSpec(64), arch="sm_80"), "None, schedule"),
    **accepting(fields(fg.build, "arch", fg.AttentionSpec(64), target="emulator"), "None"),
    **accepting(fields(fg.build, "target", fg.AttentionSpec(64))),
    **accepting(fields(fg.explain, "spec"), "mask, spec"),
    **accepting(fields(fg.explain, "len_q len_kv", fg.causal()), "None, zero, hostile number"),
    **accepting(fields(fg.explain, "batch head", fg.causal()), "zero, hostile number"),
    **accepting(fields(fg.explain, "tile", fg.causal(), len_q=8), "None, tuple"),
    **accepting(fields(fg.explain, "captured", fg.document(IDS)), "None"),
    **accepting(fields(fg.explain, "width", fg.causal())),
    **accepting(fields(fg.explain, "arch", fg.AttentionSpec(64)), "None"),
    **accepting(fields(fg.explain, "schedule", fg.AttentionSpec(64)), "None, schedule"),
    **accepting(fields(fg.lab.estimate, "len_q", len_kv=8, tile_q=8, tile_kv=8), "None, zero, hostile number"),
    **accepting(fields(fg.lab.estimate, "len_kv", 8, tile_q=8, tile_kv=8), "None, zero, hostile number"),
    **accepting(fields(fg.lab.estimate, "tile_q", 8, tile_kv=8), "hostile number"),
    **accepting(fields(fg.lab.estimate, "tile_kv", 8, tile_q=8), "hostile number"),
    **accepting(fields(fg.lab.estimate, "mask", 8), "None, mask"),
    **accepting(fields(fg.lab.estimate, "head_dim", 8, tile_q=8, tile_kv=8), "hostile number"),
    **accepting(fields(fg.lab.estimate, "dtype", 8)),
    **accepting(fields(fg.lab.estimate, "arch", 8), "None"),
    **accepting(fields(fg.lab.html_page, "explanation")),
    **accepting(fields(fg.lab.html_page, "bench roofline", fg.explain(fg.causal(), 8)), "None"),
    **accepting(fields(fg.lab.read_bench, "path")),
    **accepting(fields(fg.lab.read_roofline, "path")),
}
for _name in ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "sigmoid", "abs"):
    _right = "NumPy int, NumPy float, True, zero, float, hostile number"
    _right += "" if _name in ("sin", "cos", "tan") else ", infinity"
    _right += "" if _name in ("log", "sqrt") else ", minus one"
    _right += "" if _name in ("log", "sqrt", "sin", "cos", "tan") else ", minus infinity"
    CALLS |= accepting({f"fg.{_name}": getattr(fg, _name)}, _right)


def outcome(call: Pass, value: Any) -> str | None:
    """What is wrong with how a call takes a value; "accepted" where it does, None where it refuses it well."""
    start = time.perf_counter()
    try:
        call(value)
    except FlashgenError as error:
        message = str(error)
        if len(message) > LONGEST_MESSAGE:
            return f"{len(message)} characters"
        spent = time.perf_counter() - start
        return None if message and spent < SECONDS else f"after {spent:.1f} s: {message!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted"


def check(call: Pass, accepted: set[str]) -> None:
    assert accepted <= set(ZOO)
    call_all = {name: outcome(call, value) for name, value in ZOO.items()}
    wrong = {name: found for name, found in call_all.items() if found != ("accepted" if name in accepted else None)}
    assert not wrong


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_refused_in_a_sentence(name: str) -> None:
    check(*CALLS[name])


# ---- Kernels, on the emulator

HEADS, LENGTH, DIM = 4, 8, 16
STARTS = np.array([0, 3, 8], np.int32)
E4M3 = fg.AttentionSpec(DIM, dtype="e4m3", direction="forward").element.numpy()
#: What a scale may be.
NUMBERS = "None, NumPy float, NumPy int, float, hostile number"


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def built(**options: Any) -> fg.Kernel:
    return fg.build(fg.AttentionSpec(DIM, dtype="fp16", **options), target="emulator")


def kernel_calls() -> dict[str, tuple[Pass, set[str]]]:
    q, k, v, do = (normal(2, LENGTH, HEADS, DIM) for _ in range(4))
    plain, biased = built(mask=fg.causal()), built(mask=fg.document(IDS), score=fg.bias(BIAS))
    out, lse = biased(q, k, v)
    storing = fg.build(plain.spec, fg.Schedule(algorithm="standard"), target="emulator")
    packed, paged = built(varlen=True, dropout=True), built(cache="paged", direction="forward")
    rows = [x.reshape(-1, HEADS, DIM) for x in (q[:1], k[:1], v[:1])]
    pages = normal(4, 16, HEADS, DIM)
    table, seqlens = np.zeros((2, 1), np.int32), np.full(2, 4, np.int32)

    def with_sequences(name: str) -> Pass:
        given = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "seqused_q": None, "seqused_k": None}
        return lambda x: packed(
            *rows,
            dropout=fg.Dropout(0.1),
            sequences=fg.Sequences(**{**given, name: x}, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH),  # type: ignore[arg-type]
        )

    angles = normal(32, DIM // 2)

    def with_rotary(name: str) -> Pass:
        given: dict[str, Any] = {"cos": angles, "sin": angles}
        return lambda x: append(q=q[:, :1], cache=places, rotary=fg.Rotary(**{**given, name: x}))

    def with_cache(name: str) -> Pass:
        given = {"seqlens": seqlens, "block_table": table, "batch_idx": None, "leftpad": None}
        return lambda x: paged(q[:, :1], pages, pages, cache=fg.KVCache(**{**given, name: x}))  # type: ignore[arg-type]

    backward = partial(biased.backward, do, q, k, v, out, lse)
    places = fg.KVCache(seqlens, block_table=table)
    rotary = fg.Rotary(angles, angles)
    codes = np.zeros((2, LENGTH, HEADS, DIM), E4M3)
    eight_bits = fg.build(fg.AttentionSpec(DIM, dtype="e4m3", direction="forward"), target="emulator")
    quantizing = fg.build(
        fg.AttentionSpec(DIM, dtype="e4m3", out_dtype="fp16", scale_block=64, direction="forward"), target="emulator"
    )
    append = partial(paged.append, pages, pages, k[:, :1], v[:, :1])
    return {
        **accepting({"kernel q": lambda x: plain(x, k, v), "kernel k": lambda x: plain(q, x, v)}),
        **accepting(
            {"kernel v": lambda x: plain(q, k, x), "kernel out": lambda x: biased.backward(do, q, k, v, x, lse)}
        ),
        **accepting({"kernel do": lambda x: biased.backward(x, q, k, v, out, lse)}),
        **accepting({"kernel lse": lambda x: biased.backward(do, q, k, v, out, x)}),
        **accepting(
            {"kernel scale": option(plain, "scale", q, k, v)}, "None, NumPy float, NumPy int, float, hostile number"
        ),
        **accepting({"quantize q": lambda x: quantizing.quantize(x, k, v)}),
        **accepting({"quantize k": lambda x: quantizing.quantize(q, x, v)}),
        **accepting({"quantize rotate": option(quantizing.quantize, "rotate", q, k, v)}, "True"),
        **accepting({"quantize sequences": option(quantizing.quantize, "sequences", q, k, v)}, "None"),
        **accepting({f"fp8 {x}": option(fg.fp8_attention, x, **{"q": q, "k": k, "v": v}) for x in "qkv"}),
        **accepting(fields(fg.fp8_attention, "rotate return_lse", q, k, v), "True"),
        **accepting(fields(fg.fp8_attention, "block sequences", q, k, v), "None"),
        **accepting(fields(fg.fp8_attention, "score", q, k, v), "None, score"),
        **accepting(fields(fg.fp8_attention, "layout", q, k, v)),
        **accepting({"kernel dropout": option(plain, "dropout", q, k, v)}, "None"),
        **accepting(
            {"8-bit q": lambda x: eight_bits(x, codes, codes), "8-bit v": lambda x: eight_bits(codes, codes, x)}
        ),
        **accepting({f"{x}_scale": option(eight_bits, f"{x}_scale", codes, codes, codes) for x in "qkv"}, NUMBERS),
        **accepting({"q_scale of 16 bits": option(plain, "q_scale", q, k, v)}, "None"),
        **accepting({"kernel sequences": option(plain, "sequences", q, k, v)}, "None"),
        **accepting({"kernel cache": option(plain, "cache", q, k, v)}, "None"),
        **accepting({"kernel captured": option(biased, "captured", q, k, v)}, "None"),
        **accepting({"kernel captured ids": lambda x: biased(q, k, v, captured={"ids": x})}),
        **accepting({"kernel captured tensor": lambda x: biased(q, k, v, captured={"tensor": x})}),
        **accepting({"nothing captured": option(plain, "captured", q, k, v)}, "None"),
        **accepting({"backward captured": option(backward, "captured")}, "None"),
        **accepting({"backward dlse": option(backward, "dlse")}, "None"),
        **accepting({"kernel return_p": option(storing, "return_p", q, k, v)}, "False, True"),
        **accepting({"backward p": option(partial(storing.backward, do, q, k, v, *storing(q, k, v)), "p")}, "None"),
        **accepting(
            {"backward scale": option(backward, "scale")}, "None, NumPy float, NumPy int, float, hostile number"
        ),
        **accepting(
            {"packed dropout": lambda x: packed(*rows, dropout=x, sequences=fg.Sequences(STARTS, STARTS, 8, 8))}
        ),
        **accepting({"packed sequences": lambda x: packed(*rows, dropout=fg.Dropout(0.1), sequences=x)}),
        **accepting({f"sequences {x}": with_sequences(x) for x in ("cu_seqlens_q", "cu_seqlens_k")}),
        **accepting({f"sequences {x}": with_sequences(x) for x in ("seqused_q", "seqused_k")}, "None"),
        **accepting({"cache": lambda x: paged(q[:, :1], pages, pages, cache=x)}),
        **accepting({f"cache {x}": with_cache(x) for x in ("seqlens", "batch_idx", "leftpad")}, "None"),
        **accepting({"cache block_table": with_cache("block_table")}),
        **accepting({"append cache": option(append, "cache")}),
        **accepting({"append rotary": option(append, "rotary", cache=places)}, "None"),
        **accepting({"append q": option(append, "q", cache=places, rotary=rotary)}, "None"),
        **accepting({f"rotary {x}": with_rotary(x) for x in ("cos", "sin")}),
        **accepting({"rotary positions": with_rotary("positions")}, "None"),
        **accepting({f"rotary {x}": with_rotary(x) for x in ("interleaved", "one_position")}, "True"),
        **accepting({"warmup access_bytes": option(plain.warmup, "access_bytes")}, "None, empty array, hostile number"),
    }


def test_a_wrong_value_in_a_call_of_a_kernel_is_refused_in_a_sentence() -> None:
    calls = kernel_calls()
    for call, _ in calls.values():
        outcome(call, None)  # compiles what there is to compile
    wrong = {}
    for name, (call, accepted) in calls.items():
        found = {label: outcome(call, value) for label, value in ZOO.items()}
        wrong |= {(name, x): y for x, y in found.items() if y != ("accepted" if x in accepted else None)}
    assert not wrong


# ---- What keeps messages short


@pytest.mark.parametrize("name", ZOO)
def test_any_value_is_shown_in_one_short_line(name: str) -> None:
    text = show(ZOO[name])
    assert text
    assert len(text) <= LONGEST
    assert "\n" not in text


def test_values_are_shown_as_they_are_if_they_are_short() -> None:
    assert [show(x) for x in (None, 3, 1.5, "x", (1, 2), [1])] == ["None", "3", "1.5", "'x'", "(1, 2)", "[1]"]
    assert show(np.zeros((2, 3), np.float32)) == "<ndarray (2, 3) of float32>"
    assert show(10**400) == "<an integer of 1329 bits>"
    assert show("x" * 1000).endswith("x'")


def test_a_message_is_cut_and_its_parts_are_kept() -> None:
    violations = [f"violation {number}" for number in range(1000)]
    error = fg.SpecError(*violations)
    assert len(str(error)) <= LONGEST_MESSAGE
    assert str(error).startswith("violation 0\nviolation 1\n")
    assert str(error).endswith("more characters")
    assert error.violations == tuple(violations)
    log = "x" * 10_000
    assert fg.CompileError("it failed", log).log == log
    assert len(str(fg.CompileError("it failed", log))) <= LONGEST_MESSAGE


@pytest.mark.parametrize("error", [fg.SpecError("a", "b"), fg.CompileError("a", "b"), fg.ArgumentError("a")])
def test_errors_survive_pickling(error: FlashgenError) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

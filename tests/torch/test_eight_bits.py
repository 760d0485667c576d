"""float8 queries, keys and values with scales: ``fg.attention``, flash_attn_interface and torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn")
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

from flashgen.torch.program import Program  # noqa: E402
from flashgen.torch.tracing.compiled import text_of  # noqa: E402
from tests.torch.test_decode_choice import launched  # noqa: E402, F401

#: What P rounded to e4m3 does to averages of normal numbers, with room to spare.
TOLERANCE = 0.08


class Float8Inputs:
    """Two sequences, four heads of queries and two of keys, with scales of each sequence and head."""

    def __init__(self, len_q: int = 9, len_kv: int = 20) -> None:
        random = np.random.default_rng(0)

        def normal(length: int, heads: int) -> Any:
            x = torch.from_numpy(random.standard_normal((2, length, heads, 32)).astype(np.float32))
            return x.to(torch.float8_e4m3fn)

        def scales(heads: int) -> Any:
            return torch.from_numpy(random.uniform(0.5, 1.5, (2, heads)).astype(np.float32))

        self.q, self.k, self.v = normal(len_q, 4), normal(len_kv, 2), normal(len_kv, 2)
        self.q_scale, self.k_scale, self.v_scale = scales(4), scales(2), scales(2)

    @property
    def scales(self) -> dict[str, Any]:
        return {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def wide(self, scales: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """The numbers that these stand for."""
        given = self.scales if scales is None else scales
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        return tuple(
            x.double() * (given[f"{name}_scale"] if f"{name}_scale" in given else torch.ones(1))[..., None, :, None]
            for name, x in arrays.items()
        )


def causal(len_q: int, len_kv: int) -> Any:
    return torch.arange(len_kv)[None, :] <= torch.arange(len_q)[:, None] + len_kv - len_q


def assert_close(found: tuple[Any, Any], exact: tuple[Any, Any]) -> None:
    out, lse = found
    assert torch.allclose(out.double(), exact[0], atol=TOLERANCE)
    assert torch.allclose(lse.double(), exact[1], atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_multiply_what_is_attended_to(emulated: Any, reference: Any, compiled: bool) -> None:
    at = Float8Inputs()

    def attend(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return fg.attention(q, k, v, mask=fg.causal(), return_lse=True, **scales)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    for factor in (1.0, 1.0, 0.5):  # prepared, replayed, and with other scales
        at.k_scale, at.v_scale = at.k_scale * factor, at.v_scale * factor
        found = call(at.q, at.k, at.v, *at.scales.values())
        assert found[0].dtype == torch.bfloat16
        assert_close(found, reference(*at.wide(), mask=causal(9, 20)))


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_may_be_numbers_or_missing(emulated: Any, reference: Any, compiled: bool) -> None:
    at = Float8Inputs()

    def attend(q: Any, k: Any, v: Any, number: float) -> Any:
        return fg.attention(q, k, v, q_scale=number, v_scale=3.0, return_lse=True, out_dtype=torch.float16)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    for number in (0.5, 0.5, 2.0):
        out, lse = call(at.q, at.k, at.v, number)
        exact = reference(*at.wide({"q_scale": torch.tensor([number])}))
        assert out.dtype == torch.float16
        assert_close((out / 3.0, lse), exact)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "numbers", "missing"])
def test_few_queries_and_many_keys_use_the_decode_kernel(
    launched: list[str],  # noqa: F811
    reference: Any,
    kind: str,
    compiled: bool,
) -> None:
    at = Float8Inputs(3, 300)
    numbers = {"q_scale": 0.5, "k_scale": 2.0, "v_scale": 0.25}
    scales = {"tensors": at.scales, "numbers": numbers, "missing": {}}[kind]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), return_lse=True, **scales)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    exact = reference(
        *at.wide({name: torch.as_tensor(x) * torch.ones(1) for name, x in scales.items()}), mask=causal(3, 300)
    )
    for _ in range(2):  # found out, and replayed
        out, lse = call(at.q, at.k, at.v)
        assert out.dtype == torch.bfloat16
        # P is not rounded to e4m3, as it is by the other kernel.
        assert torch.allclose(out.double(), exact[0], atol=5e-3)
        assert torch.allclose(lse.double(), exact[1], atol=1e-4)
    assert launched == ["decode"] * 2


@pytest.mark.parametrize("why", ["many queries", "few keys", "blocks", "packed"])
def test_other_float8_calls_keep_their_kernel(launched: list[str], why: str) -> None:  # noqa: F811
    at = Float8Inputs(17 if why == "many queries" else 1, 255 if why == "few keys" else 256)
    q, k, v = at.q, at.k, at.v
    options: dict[str, Any] = {}
    if why == "blocks":
        options = {"scale_block": 64}
    if why == "packed":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        starts = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (1, 256))
        options = {"sequences": fg.Sequences(*starts, 1, 256)}
    fg.attention(q, k, v, **options)
    assert "forward" in launched
    assert "decode" not in launched


def test_scores_capture_tensors_and_heads_may_come_first(emulated: Any, reference: Any) -> None:
    at, bias = Float8Inputs(), torch.rand(4)
    heads_first = (x.transpose(1, 2).contiguous() for x in (at.q, at.k, at.v))
    for x in (torch.zeros(4), bias):
        exact, _ = reference(*at.wide())
        score = fg.Score.of(lambda s, b, h, q, k, x=x: s + x[h])
        out = fg.attention(*heads_first, score=score, layout="bhsd", **at.scales)
        assert torch.allclose(out.transpose(1, 2).double(), exact, atol=TOLERANCE)
        heads_first = (x.transpose(1, 2).contiguous() for x in (at.q, at.k, at.v))


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences_may_have_a_scale_for_each_block(emulated: Any, reference: Any, compiled: bool) -> None:
    random, lengths = np.random.default_rng(1), (70, 100)
    at = Float8Inputs(170, 170)
    q, k, v = (x[0] for x in (at.q, at.k, at.v))
    starts = torch.tensor([0, 70, 170], dtype=torch.int32)
    # Sequence 1 begins at row 70, so its blocks are 70 // 64 + 1 = 2 and the next one.
    scales = [torch.from_numpy(random.uniform(0.5, 1.5, (h, 170 // 64 + 2)).astype(np.float32)) for h in (4, 2, 2)]

    def attend(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        packed = fg.Sequences(starts, starts, 100, 100)
        more = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "scale_block": 64}
        return fg.attention(q, k, v, sequences=packed, return_lse=True, **more)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    out, lse = call(q, k, v, *scales)
    for first, length, block in ((0, lengths[0], 0), (70, lengths[1], 2)):
        rows = slice(first, first + length)
        wide = []
        for x, scale in zip((q, k, v), scales, strict=True):
            of_rows = scale[:, block : block + 2].repeat_interleave(64, 1)[:, :length].T
            wide.append((x[rows].double() * of_rows[..., None])[None])
        exact, exact_lse = reference(*wide)
        assert_close((out[rows], lse[:, rows]), (exact[0], exact_lse[0]))


def test_flash_attn_interface_takes_descales_of_key_heads(emulated: Any, reference: Any) -> None:
    at = Float8Inputs()
    descales = {name: torch.rand(2, 2) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    out, lse = fa3.flash_attn_func(at.q, at.k, at.v, causal=True, return_attn_probs=True, **descales)
    scales = {name.replace("descale", "scale"): x for name, x in descales.items()}
    scales["q_scale"] = scales["q_scale"].repeat_interleave(2, 1)
    assert out.dtype == torch.bfloat16
    assert_close((out, lse), reference(*at.wide(scales), mask=causal(9, 20)))
    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (9, 20))
    packed = (x.flatten(0, 1) for x in (at.q, at.k, at.v))
    varlen = fa3.flash_attn_varlen_func(*packed, starts_q, starts_k, 9, 20, causal=True, **descales)
    assert torch.equal(varlen.view(2, 9, 4, 32), out)


def test_flash_attn_takes_float8_without_scales(emulated: Any, reference: Any) -> None:
    at = Float8Inputs()
    out = fa2.flash_attn_func(at.q, at.k, at.v)
    assert torch.allclose(out.double(), reference(*at.wide({}))[0], atol=TOLERANCE)


def test_flop_counter_and_opcheck_see_one_operator(emulated: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    at = Float8Inputs()
    with FlopCounterMode(display=False) as counter:
        fg.attention(at.q, at.k, at.v, **at.scales)
    assert counter.get_total_flops() == 2 * 2 * 4 * 9 * 20 * 64
    text = text_of(Program((None, None, None, None)))
    arguments = (at.q, at.k, at.v, *at.scales.values(), [], text, torch.bfloat16)
    # torch's other checks multiply float8 tensors, which it cannot on a CPU.
    torch.library.opcheck(torch.ops.flashgen.eight_bit_forward.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_scale": torch.ones(3)}, r"q_scale is fp32 of shape \(3,\); pass float32 of shape \(\) or \(1,\) or"),
        ({"v_scale": torch.ones(2, 2).double()}, "v_scale is fp64|v_scale is torch.float64"),
        ({"q_scale": -1.0}, "q_scale=-1.0 must be an array or a finite number above 0"),
        ({"q_scale": "half"}, "q_scale='half' is not a number"),
        ({"scale_block": 32}, "scale_block=32 is not supported; use 64 or 128"),
        ({"scale_block": 64, "k_scale": torch.ones(2, 2)}, r"k_scale is fp32 of shape \(2, 2\); pass .*\(2, 2, 1\)"),
        ({"out_dtype": torch.float32}, "out_dtype=torch.float32 is not supported"),
        ({"dropout_p": 0.5}, "dropout_p=0.5 does not go with 8-bit q, k and v"),
        (
            {"cache": fg.KVCache(), "k_scale": 0.5},
            r"k_scale=0.5 does not go with cache; pass cache=flashgen.KVCache\(k_",
        ),
        (
            {"cache": fg.KVCache(), "scale_block": 64},
            "scale_block=64 does not go with cache; each page may have a scale",
        ),
        ({"cache": fg.KVCache(), "q_scale": -1.0}, "q_scale=-1.0 must be an array or a finite number above 0"),
        ({"cache": fg.KVCache(), "q_scale": "half"}, "q_scale='half' is not a number"),
        ({"cache": fg.KVCache(), "out_dtype": torch.float32}, "out_dtype=torch.float32 is not supported"),
    ],
)
def test_what_does_not_go_with_float8_is_refused(emulated: Any, change: Any, words: str) -> None:
    at = Float8Inputs()
    with pytest.raises(fg.FlashgenError, match=words):
        fg.attention(at.q, at.k, at.v, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_scale": torch.ones(3)}, r"^q_scale is fp32 of shape \(3,\); pass float32 of one of"),
        ({"k_scale": torch.ones(3)}, r"^k_scale is fp32 of shape \(3,\); pass float32 of one of"),
        ({"k_scale": -1.0}, "k_scale=-1.0 must be an array or a finite number above 0"),
        ({"q_scale": 1e-30, "k_scale": 1e-30}, "q_scale=1e-30 times k_scale=1e-30 must be a number above 0"),
    ],
)
def test_scales_for_the_decode_kernel_are_refused_by_the_names_of_arguments(
    emulated: Any, change: Any, words: str
) -> None:
    at = Float8Inputs(1, 300)
    with pytest.raises(fg.ArgumentError, match=words):
        fg.attention(at.q, at.k, at.v, **change)


def test_scales_of_other_dtypes_are_refused(emulated: Any) -> None:
    at = Float8Inputs()
    wide = [x.half() for x in (at.q, at.k, at.v)]
    with pytest.raises(fg.ArgumentError, match=r"k_scale is for q, k and v of torch\.float8_e4m3fn, and q is"):
        fg.attention(*wide, k_scale=1.0)
    with pytest.raises(fg.ArgumentError, match="v_descale is for q, k and v of"):
        fa3.flash_attn_func(*wide, v_descale=at.v_scale)
    with pytest.raises(fg.ArgumentError, match="q_descale is a float"):
        fa3.flash_attn_func(at.q, at.k, at.v, q_descale=1.0)
    with pytest.raises(fg.ArgumentError, match="k is fp16, but this kernel was built for e4m3"):
        fg.attention(at.q, *wide[1:])
    with pytest.raises(fg.ArgumentError, match="has no gradients"):
        fg.attention(at.q, at.k, at.v, v_scale=at.v_scale.requires_grad_())


def test_autocast_leaves_float8_alone(emulated: Any) -> None:
    at = Float8Inputs()
    plain = fg.attention(at.q, at.k, at.v, **at.scales)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fg.attention(at.q, at.k, at.v, **at.scales), plain)

"""torch's own attention function with masks, dropout and tensors that torch's flash attention does not take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import flashgen as fg
from flashgen.launch.call.prepared import Call

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
if torch and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
    pytest.skip("this torch cannot take an implementation back", allow_module_level=True)

from tests.torch.sdpa_math import assert_close, exact, normal, run, sdpa  # noqa: E402

SIZES = {"b": 2, "h": 4, "q": 9, "k": 12, "1": 1}
PATTERNS = ["bhqk", "b1qk", "11qk", "1h1k", "b11k", "bhq1", "b111", "hqk", "qk", "1k", "k", ""]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture
def launches(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """What flashgen ran, with its attention in torch's place."""
    seen: list[Call] = []
    call = Call.run

    def counted(self: Call, *arguments: Any) -> Any:
        seen.append(self)
        return call(self, *arguments)

    monkeypatch.setattr(Call, "run", counted)
    torch.manual_seed(0)
    with fg.torch.enable_sdpa():
        yield seen


def tensors(dtype: Any = torch.float32, heads_kv: int = 4) -> tuple[Any, Any, Any]:
    return (
        normal(2, 4, 9, 16, dtype=dtype),
        normal(2, heads_kv, 12, 16, dtype=dtype),
        normal(2, heads_kv, 12, 24, dtype=dtype),
    )


def mask_of(kind: str, pattern: str, dtype: Any) -> Any:
    values = normal(*(SIZES[axis] for axis in pattern)).detach()
    if kind == "bool":
        return values > -0.7
    return values.to(dtype if kind == "own" else torch.float32).requires_grad_()


@pytest.mark.in_turns(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
def test_masks_are_those_of_torchs_math(launches: Any, kind: str, pattern: str, dtype: Any) -> None:
    q, k, v = tensors(dtype, heads_kv=2)
    mask = mask_of(kind, pattern, dtype)
    found, expected = run(partial(sdpa, enable_gqa=True), q, k, v, mask), exact(q, k, v, mask, enable_gqa=True)
    # The gradient of a mask that is the same for all keys is 0: what remains is the rounding of many pairs.
    assert_close(found, expected, dtype, least=1.0 if "k" in pattern else 8.0)
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float32"])
def test_dropout_is_that_of_torchs_generator(launches: Any, kind: str, dtype: Any) -> None:
    from flashgen.compat.probabilities import kept_pairs

    p, q, k, v = 0.3, *tensors(dtype)
    mask = None if kind in ("none", "causal") else mask_of(kind, "b1qk", dtype)
    options = {"dropout_p": p, "is_causal": kind == "causal"}
    torch.manual_seed(5)
    found = run(partial(sdpa, **options), q, k, v, mask)
    torch.manual_seed(5)
    kept = kept_pairs(fg.Dropout(p, state=torch.randint(2**62, (2,))), 2, 4, 9, 12)
    assert_close(found, exact(q, k, v, mask, kept=kept, **options), dtype)
    assert len(launches) == 2
    torch.manual_seed(5)
    again = run(partial(sdpa, **options), q, k, v, mask)
    assert all(map(torch.equal, found, again))
    assert not torch.equal(sdpa(q, k, v, mask, **options), found[0])


def test_a_checkpoint_drops_the_same_pairs_again(launches: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    given, call = (*tensors(), mask_of("bool", "b1qk", None)), partial(sdpa, dropout_p=0.3)
    torch.manual_seed(5)
    expected = run(call, *given)
    torch.manual_seed(5)
    found = run(lambda *x: checkpoint(call, *x, use_reentrant=False), *given)
    assert all(map(torch.equal, found, expected))
    assert len(launches) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_without_keys_is_zero_and_so_are_its_gradients(launches: Any, dtype: Any) -> None:
    q, k, v = tensors(dtype)
    allowed = mask_of("bool", "bhqk", dtype)
    allowed[:, :, 3] = False
    added = torch.zeros(2, 4, 9, 12, dtype=dtype).masked_fill(~allowed, -torch.inf).requires_grad_()
    for mask in (allowed, added):
        out, dq, *rest = found = run(sdpa, q, k, v, mask)
        assert not out[:, :, 3].any()
        assert not dq[:, :, 3].any()
        assert mask is allowed or not rest[-1][:, :, 3].any()
        assert_close(found, exact(q, k, v, mask), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["own", "float32"])
def test_the_lowest_number_leaves_out_a_key_unless_there_is_no_other(launches: Any, kind: str, dtype: Any) -> None:
    q, k, v = tensors(dtype)
    mask = mask_of(kind, "bhqk", dtype).detach()
    lowest = torch.finfo(mask.dtype).min
    mask[:, :, 0, :5] = lowest
    mask[:, :, 1, :11] = lowest
    mask[:, :, 2, 1:] = lowest / 2
    mask.requires_grad_()
    assert_close(run(sdpa, q, k, v, mask), exact(q, k, v, mask), dtype)
    mask = mask.detach()
    mask[:, :, 3] = lowest
    mask[:, :, 4] = lowest
    mask[:, :, 4, 3:] = -torch.inf
    found = sdpa(q, k, v, mask)
    assert_close([found], exact(q.detach(), k.detach(), v.detach(), mask), dtype)
    if lowest < -1e6:
        mean = v.detach().double().mean(2)
        assert_close([found[:, :, 3]], [mean], dtype)


@pytest.mark.parametrize("lowest", [-1e4, -1e9, -1e10, -1e30, -1e38])
def test_no_mask_is_too_low_for_a_whole_tile(launches: Any, lowest: float) -> None:
    q, k, v = (normal(1, 1, n, 16, dtype=torch.bfloat16) for n in (9, 300, 300))
    mask = torch.zeros(300)
    mask[:200] = lowest
    assert_close(run(sdpa, q, k, v, mask), exact(q, k, v, mask), torch.bfloat16)


@pytest.mark.parametrize("sizes", [(9, 9), (9, 12), (12, 9)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_masks_start_at_the_first_key(launches: Any, sizes: tuple[int, int], dtype: Any) -> None:
    q, k, v = (normal(2, 4, n, 16, dtype=dtype) for n in (*sizes, sizes[1]))
    found = run(partial(sdpa, is_causal=True, scale=0.3), q, k, v)
    assert_close(found, exact(q, k, v, is_causal=True, scale=0.3), dtype)
    assert len(launches) == 2


def offset(x: Any) -> Any:
    """The same numbers, one element further on."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape).requires_grad_()


def odd_rows(x: Any) -> Any:
    """The same numbers in rows of an odd number of elements."""
    return torch.nn.functional.pad(x.detach(), (0, 1))[..., :-1].requires_grad_()


def columns(x: Any) -> Any:
    """The same numbers, whose last dimension is not the contiguous one."""
    return x.detach().mT.contiguous().mT.requires_grad_()


def spread(x: Any) -> Any:
    """The same numbers, of which every second element is another."""
    return torch.stack([x.detach()] * 2, -1).flatten(-2)[..., ::2].requires_grad_()


@pytest.mark.parametrize("layout", [offset, odd_rows, columns, spread])
@pytest.mark.parametrize("kind", ["none", "bool", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_that_torch_refuses_are_taken(launches: Any, layout: Any, kind: str, dtype: Any) -> None:
    given = *map(layout, tensors(dtype)), None if kind == "none" else layout(mask_of("float32", "b1qk", dtype))
    if kind == "bool":
        given = *given[:3], given[3] > 0
    assert_close(run(sdpa, *given), exact(*given), dtype)
    assert len(launches) == 2


@pytest.mark.parametrize(
    ("shapes", "mask"),
    [
        (((9, 16), (12, 16), (12, 8)), (9, 12)),
        (((6, 9, 16), (6, 12, 16), (6, 12, 8)), (6, 9, 12)),
        (((6, 9, 16), (1, 12, 16), (1, 12, 8)), (1, 9, 12)),
        (((2, 3, 4, 9, 16), (2, 3, 4, 12, 16), (2, 3, 4, 12, 8)), (2, 3, 1, 9, 12)),
        (((2, 3, 4, 9, 16), (1, 3, 1, 12, 16), (2, 1, 1, 12, 8)), (1, 1, 4, 9, 12)),
        (((2, 4, 9, 16), (1, 4, 12, 16), (1, 4, 12, 8)), (2, 1, 1, 12)),
        (((1, 1, 9, 16), (2, 4, 12, 16), (2, 4, 12, 8)), (2, 4, 9, 12)),
        (((2, 4, 9, 16), (2, 1, 12, 16), (2, 4, 12, 8)), (9, 12)),
    ],
)
def test_dimensions_in_front_are_broadcast(launches: Any, shapes: Any, mask: Any) -> None:
    given = *(normal(*shape) for shape in shapes), normal(*mask)
    assert_close(run(sdpa, *given), exact(*given), torch.float32)
    assert len(launches) == 2


def test_values_and_sizes_of_masks_make_no_kernels(launches: Any, emulated: Any) -> None:
    def call(length: int, mask: Any) -> None:
        q, k, v = (normal(2, 4, n, 16).detach() for n in (9, length, length))
        sdpa(q, k, v, mask)

    call(12, torch.rand(2, 1, 9, 12) > 0.5)
    built = len(emulated)
    for length in (12, 13, 40):
        call(length, torch.rand(2, 1, 9, length) > 0.2)
        call(length, (torch.rand(2, 1, 1, length) > 0.2).expand(2, 1, 9, length)[:, :, :, :].contiguous())
        call(length, (torch.rand(2, 1, 9, length) > 0.2).expand(2, 4, 9, length))
    assert len(emulated) == built


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_expanded_masks_stay_as_they_are(launches: Any, monkeypatch: pytest.MonkeyPatch, wants_gradients: bool) -> None:
    from flashgen.torch.sdpa import function as sdpa_function

    seen, attend = [], sdpa_function.attend

    def watched(q: Any, k: Any, v: Any, program: Any, captured: Any, *options: Any) -> Any:
        seen.extend(captured)
        return attend(q, k, v, program, captured, *options)

    monkeypatch.setattr(sdpa_function, "attend", watched)
    leaf = normal(2, 1, 1, 12).detach().requires_grad_(wants_gradients)
    given = *tensors(), leaf.expand(2, 4, 9, 12)
    assert_close(run(sdpa, *given), exact(*given), torch.float32)
    assert [x.untyped_storage().data_ptr() for x in seen] == [leaf.untyped_storage().data_ptr()]


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.ones(9, 12, dtype=torch.bool), "is_causal": True},
        {"attn_mask": torch.ones(9, 11, dtype=torch.bool)},
        {"attn_mask": torch.ones(1, 2, 4, 9, 12)},
        {"attn_mask": torch.ones(9, 12, dtype=torch.int32)},
        {"attn_mask": torch.ones(9, 12, dtype=torch.float64)},
        {"enable_gqa": True, "heads_kv": 3},
        {"heads_kv": 2},
    ],
    ids=lambda options: ", ".join(options),
)
def test_mistakes_have_torchs_errors(launches: Any, options: Any) -> None:
    q, k, v = tensors(heads_kv=options.pop("heads_kv", 4))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), pytest.raises(RuntimeError) as expected:
        sdpa(q, k, v, **options)
    with pytest.raises(RuntimeError) as found:
        sdpa(q, k, v, **options)
    assert str(found.value) == str(expected.value)
    assert not launches


def subclassed(x: Any) -> Any:
    class Subclass(torch.Tensor):  # type: ignore[misc]
        pass

    return x.as_subclass(Subclass)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v, m: sdpa(q.double(), k.double(), v.double(), m),
        lambda q, k, v, m: sdpa(*(x.repeat_interleave(20, -1) for x in (q, k, v)), m),
        lambda q, k, v, m: sdpa(*(x[:, None].expand(2, 3, *x.shape[1:]) for x in (q, k, v)), m[:, None]),
        lambda q, k, v, m: sdpa(q[:, :, :0], k, v, m[:, :, :0]),
        lambda q, k, v, m: sdpa(q, k[:, :, :0], v[:, :, :0]),
        lambda q, k, v, m: sdpa(subclassed(q), k, v, m).as_subclass(torch.Tensor),
        lambda q, k, v, m: torch.func.vmap(sdpa)(q[None], k[None], v[None], m[None]),
        lambda q, k, v, m: torch.func.grad(lambda q: sdpa(q, k, v, m).square().sum())(q),
        lambda q, k, v, m: torch.func.jvp(lambda q: sdpa(q, k, v, m), (q,), (q,))[1],
        lambda q, k, v, m: torch.func.vmap(torch.func.grad(lambda q: sdpa(q, k, v, m).sum()))(q[None]),
    ],
    ids=[
        *("float64", "head dim", "batch broadcast in part", "no queries", "no keys"),
        *("subclass", "vmap", "grad", "jvp", "vmap of grad"),
    ],
)
def test_what_it_does_not_do_stays_with_torch(launches: Any, call: Any) -> None:
    given = *(x.detach() for x in tensors()), mask_of("bool", "b1qk", None)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = call(*given)
    assert torch.allclose(call(*given), expected, atol=1e-5, rtol=1e-5)
    assert not launches


def test_nested_tensors_stay_with_torch(launches: Any) -> None:
    rows = [normal(n, 4, 16).detach() for n in (5, 9)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = sdpa(nested, nested, nested)
    found = sdpa(nested, nested, nested)
    assert all(map(torch.allclose, found.unbind(), expected.unbind()))


def test_a_backend_that_was_chosen_is_used(launches: Any) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        run(partial(sdpa, dropout_p=0.5), *tensors(), mask_of("bool", "qk", None))
    assert not launches


def test_autocast_comes_first(launches: Any) -> None:
    q, k, v = tensors()
    mask = mask_of("float32", "b1qk", None)
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(q, k, v, mask)
    assert out.dtype == torch.bfloat16
    assert_close([out], exact(q, k, v, mask)[:1], torch.bfloat16)
    assert len(launches) == 1


@pytest.mark.parametrize("kind", ["bool", "float32"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_compiled_functions_use_it(launches: Any, kind: str, dropout_p: float) -> None:
    given = *tensors(), mask_of(kind, "b1qk", None)
    call = partial(sdpa, dropout_p=dropout_p)
    torch.manual_seed(5)
    expected = run(call, *given)
    compiled = torch.compile(lambda *x: call(*x), fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    found = run(compiled, *given)
    assert all(map(torch.equal, found, expected))
    assert len(launches) == 4
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(compiled(*given), expected[0])


def test_compiled_functions_take_other_lengths(launches: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: sdpa(*x), fullgraph=True, backend=counter, dynamic=True)
    for length in (12, 15, 31):
        q, k, v = (normal(2, 4, n, 16) for n in (9, length, length))
        mask = normal(2, 1, 9, length)
        assert_close(run(compiled, q, k, v, mask), exact(q, k, v, mask), torch.float32)
    assert counter.frame_count == 1


def test_exported_programs_call_torchs_function(launches: Any) -> None:
    class Attention(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
            return sdpa(q, k, v, mask)

    given = *(x.detach() for x in tensors()), mask_of("bool", "b1qk", None)
    program = torch.export.export(Attention(), given)
    assert torch.ops.aten.scaled_dot_product_attention.default in [node.target for node in program.graph.nodes]
    assert_close([program.module()(*given)], exact(*given), torch.float32)
    assert len(launches) == 1


def test_what_was_compiled_with_it_is_kept_apart(emulated: Any) -> None:
    tag = torch.compiler.config.cache_key_tag
    with fg.torch.enable_sdpa():
        assert torch.compiler.config.cache_key_tag != tag
    assert torch.compiler.config.cache_key_tag == tag


def test_without_it_everything_is_torchs_again(emulated: Any) -> None:
    given = *(x.detach() for x in tensors()), mask_of("bool", "b1qk", None)
    expected = sdpa(*given)
    with fg.torch.enable_sdpa():
        assert not torch.equal(sdpa(*given), expected)
    assert torch.equal(sdpa(*given), expected)

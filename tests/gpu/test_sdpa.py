"""torch's own attention function on a GPU, with masks, dropout and tensors that torch's kernels refuse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import flashgen as fg
from flashgen.launch.call.prepared import Call

torch = pytest.importorskip("torch")
pytest.importorskip("flashgen.torch")  # registers the operators
pytestmark = [pytest.mark.gpu, pytest.mark.torch]
if torch and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
    pytest.skip("this torch cannot take an implementation back", allow_module_level=True)

from tests.torch.sdpa_math import assert_close, exact, normal, run, sdpa  # noqa: E402

SIZES = {"b": 2, "h": 4, "q": 200, "k": 330, "1": 1}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
P = 0.3


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
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


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gradients are the same bits each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(*shape: int, dtype: Any = torch.float32) -> Any:
    return normal(*shape, dtype=dtype, device="cuda")


def tensors(dtype: Any, dim: int = 64, heads_kv: int = 4) -> tuple[Any, Any, Any]:
    kv = (2, heads_kv, SIZES["k"], dim)
    return on_gpu(2, 4, SIZES["q"], dim, dtype=dtype), on_gpu(*kv, dtype=dtype), on_gpu(*kv, dtype=dtype)


def mask_of(kind: str, pattern: str, dtype: Any) -> Any:
    values = on_gpu(*(SIZES[axis] for axis in pattern)).detach()
    if kind == "bool":
        return values > -0.7
    return values.to(dtype if kind == "own" else torch.float32).requires_grad_()


@pytest.mark.parametrize(("dim", "pattern"), [(64, "b1qk"), (64, "k"), (128, "bhqk")])
@pytest.mark.parametrize(
    ("kind", "dtype"), [*(("bool", x) for x in DTYPES), *(("own", x) for x in DTYPES), ("float32", torch.bfloat16)]
)
def test_masks_are_those_of_torchs_math(launches: Any, kind: str, dtype: Any, dim: int, pattern: str) -> None:
    q, k, v = tensors(dtype, dim, heads_kv=2)
    mask = mask_of(kind, pattern, dtype)
    found = run(partial(sdpa, enable_gqa=True), q, k, v, mask)
    # The gradient of a mask of few elements sums rounding errors of many pairs.
    assert_close(found, exact(q, k, v, mask, enable_gqa=True), dtype, least=1.0 if "q" in pattern else 8.0)
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", ["causal", "bool", "float32"])
def test_dropout_is_that_of_torchs_generator(launches: Any, kind: str, dtype: Any) -> None:
    from flashgen.compat.probabilities import kept_pairs

    q, k, v = tensors(dtype)
    mask = None if kind == "causal" else mask_of(kind, "b1qk", dtype)
    options = {"dropout_p": P, "is_causal": kind == "causal"}
    torch.manual_seed(5)
    found = run(partial(sdpa, **options), q, k, v, mask)
    torch.manual_seed(5)
    state = torch.randint(2**62, (2,), device="cuda")
    kept = kept_pairs(fg.Dropout(P, state=state), 2, 4, SIZES["q"], SIZES["k"])
    assert_close(found, exact(q, k, v, mask, kept=kept, **options), dtype)
    assert len(launches) == 2
    torch.manual_seed(5)
    assert torch.equal(sdpa(q, k, v, mask, **options), found[0])
    assert not torch.equal(sdpa(q, k, v, mask, **options), found[0])


def test_each_replay_of_a_graph_drops_what_the_generator_says(plain_outputs: None, launches: Any) -> None:
    q, k, v = (x.detach() for x in tensors(torch.bfloat16))
    call = partial(sdpa, q, k, v, mask_of("bool", "b1qk", None), dropout_p=P)
    call()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    torch.manual_seed(5)
    expected = [call() for _ in range(3)]
    assert not torch.equal(expected[0], expected[1])
    torch.manual_seed(5)
    for eager in expected:
        graph.replay()
        assert torch.equal(out, eager)


def test_a_checkpoint_drops_the_same_pairs_again(deterministic: None, launches: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    given, call = (*tensors(torch.bfloat16), mask_of("bool", "b1qk", None)), partial(sdpa, dropout_p=P)
    torch.manual_seed(5)
    expected = run(call, *given)
    torch.manual_seed(5)
    found = run(lambda *x: checkpoint(call, *x, use_reentrant=False), *given)
    assert all(map(torch.equal, found, expected))


def offset(x: Any) -> Any:
    """The same numbers, one element further on."""
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape).requires_grad_()


def odd_rows(x: Any) -> Any:
    """The same numbers in rows of an odd number of elements."""
    return torch.nn.functional.pad(x.detach(), (0, 1))[..., :-1].requires_grad_()


def columns(x: Any) -> Any:
    """The same numbers, whose last dimension is not the contiguous one."""
    return x.detach().mT.contiguous().mT.requires_grad_()


@pytest.mark.parametrize("layout", [offset, odd_rows, columns])
@pytest.mark.parametrize("kind", ["none", "causal", "float32"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_layouts_that_torch_refuses_are_taken(launches: Any, layout: Any, kind: str, dtype: Any) -> None:
    q, k, v = map(layout, tensors(dtype))
    mask = layout(mask_of(kind, "b1qk", dtype)) if kind == "float32" else None
    options = {"is_causal": kind == "causal"}
    assert_close(run(partial(sdpa, **options), q, k, v, mask), exact(q, k, v, mask, **options), dtype)
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_without_keys_is_zero_and_so_are_its_gradients(launches: Any, dtype: Any) -> None:
    q, k, v = tensors(dtype)
    allowed = mask_of("bool", "bhqk", dtype)
    allowed[:, :, 100:140] = False
    added = torch.zeros(allowed.shape, dtype=dtype, device="cuda").masked_fill(~allowed, -torch.inf).requires_grad_()
    for mask in (allowed, added):
        out, dq, *rest = found = run(sdpa, q, k, v, mask)
        assert not out[:, :, 100:140].any()
        assert not dq[:, :, 100:140].any()
        assert mask is allowed or not rest[-1][:, :, 100:140].any()
        assert_close(found, exact(q, k, v, mask), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("lowest", [-1e4, -1e9, -1e30, torch.finfo(torch.float32).min])
def test_low_numbers_leave_out_keys_unless_there_are_no_others(launches: Any, lowest: float, dtype: Any) -> None:
    q, k, v = tensors(dtype)
    mask = torch.zeros(2, 1, SIZES["q"], SIZES["k"], device="cuda")
    mask[..., :200] = lowest
    assert_close(run(sdpa, q, k, v, mask), exact(q, k, v, mask), dtype)
    mask[:, :, 7] = lowest
    q, k, v = (x.detach() for x in (q, k, v))
    found = sdpa(q, k, v, mask)
    if lowest < -1e29:
        assert_close([found[:, :, 7]], [v.double().mean(2)], dtype)


@pytest.mark.parametrize(
    ("shapes", "mask"),
    [
        (((6, 90, 64), (1, 120, 64), (1, 120, 64)), (6, 90, 120)),
        (((2, 3, 4, 90, 64), (1, 3, 1, 120, 64), (2, 1, 1, 120, 64)), (1, 1, 4, 90, 120)),
        (((2, 4, 90, 64), (1, 4, 120, 64), (1, 4, 120, 64)), (2, 1, 1, 120)),
    ],
)
def test_dimensions_in_front_are_broadcast(launches: Any, shapes: Any, mask: Any) -> None:
    given = *(on_gpu(*shape, dtype=torch.bfloat16) for shape in shapes), on_gpu(*mask)
    assert_close(run(sdpa, *given), exact(*given), torch.bfloat16, least=8.0)
    assert len(launches) == 2


def test_values_and_sizes_of_masks_make_no_kernels(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.torch import kernels

    def call(length: int) -> None:
        q, k, v = (on_gpu(2, 4, n, 64, dtype=torch.bfloat16).detach() for n in (100, length, length))
        sdpa(q, k, v, (torch.rand(2, 1, 100, length, device="cuda") > 0.3).expand(2, 4, 100, length))

    call(128)
    monkeypatch.setattr(kernels, "build", None)
    for length in (64, 129, 500):
        call(length)


def test_expanded_masks_take_no_memory(plain_outputs: None, launches: Any) -> None:
    q, k, v = (on_gpu(8, 16, 2048, 64, dtype=torch.bfloat16) for _ in range(3))
    for mask in (torch.ones(8, 1, 1, 2048, dtype=torch.bool, device="cuda"), on_gpu(8, 1, 1, 2048).detach()):
        run(sdpa, q, k, v, mask.expand(8, 16, 2048, 2048))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        run(sdpa, q, k, v, mask.expand(8, 16, 2048, 2048))
        taken = torch.cuda.max_memory_allocated() - before
        assert taken < 2**29, f"{taken} bytes, and the expanded mask has 2**29 elements"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dropout_p", [0.0, P])
def test_compiled_functions_use_it(launches: Any, backend: str, dropout_p: float) -> None:
    if backend == "inductor":
        pytest.importorskip("triton", reason="Triton is not installed; torch's inductor needs it")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("no C compiler is installed (cc, gcc or clang); Triton needs one")
    given = *tensors(torch.bfloat16), mask_of("float32", "b1qk", None)
    compiled = torch.compile(lambda *x: sdpa(*x, dropout_p=dropout_p), fullgraph=True, backend=backend)
    found = run(compiled, *given)
    assert len(launches) == 2
    if dropout_p == 0.0:
        assert_close(found, exact(*given), torch.bfloat16)
    elif backend == "aot_eager":
        torch.manual_seed(5)
        first = compiled(*given)
        torch.manual_seed(5)
        assert torch.equal(first, sdpa(*given, dropout_p=dropout_p))


def test_a_backend_that_was_chosen_is_used(launches: Any) -> None:
    given = *tensors(torch.bfloat16), mask_of("bool", "qk", None)
    for backend in (torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        with torch.nn.attention.sdpa_kernel(backend):
            sdpa(*given)
    assert not launches

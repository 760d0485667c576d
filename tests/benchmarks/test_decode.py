"""What the benchmark of decoding times is attention to the cache: on the emulator, or with a stand-in for a peer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: batch, heads, heads_kv, head_dim, keys, page
SIZES = (2, 4, 2, 64, 40, 8)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode

    monkeypatch.setattr(decode, "DEVICE", "cpu")
    monkeypatch.setattr(fg, "build", partial(fg.build, target="emulator"))
    torch.manual_seed(0)
    return decode


class Recorded:
    """Everything that a kind draws: the tensors of its cache, and its scales in order."""

    def __init__(self, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scales: list[Any] = []
        self.pages: Any = None
        pages_of, scales = decode.pages_of, decode.scales

        def record_pages(*arguments: Any) -> Any:
            self.pages = pages_of(*arguments)
            return self.pages

        def record_scales(*shape: int) -> Any:
            self.scales.append(scales(*shape))
            return self.scales[-1]

        monkeypatch.setattr(decode, "pages_of", record_pages)
        monkeypatch.setattr(decode, "scales", record_scales)


@pytest.fixture
def recorded(decode: Any, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(decode, monkeypatch)


def attention(q: Any, k: Any, v: Any, allowed: Any) -> Any:
    """(new, heads, dim) of one sequence, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def expected(problem: Any, pages: Any, seen: Any, of_keys: Any = 1.0, of_values: Any = 1.0) -> list[Any]:
    """Attention of each sequence to the keys that the table names; scales are of pages."""
    q, k, v, table, lengths = pages
    k, v = k.double() * of_keys, v.double() * of_values
    outputs = []
    for i, length in enumerate(lengths.tolist()):
        names = table[i, : -(-length // problem.page)].long()
        rows = [x[names].flatten(0, 1)[:length] for x in (k, v)]
        allowed = torch.ones(problem.new, length, dtype=torch.bool)
        allowed[:, length - problem.new :] = seen
        outputs.append(attention(q[i], *rows, allowed))
    return outputs


def of_pages(problem: Any, pages: Any, scale: Any) -> Any:
    """Scales of sequences as those of the pages that they own."""
    *_, table, lengths = pages
    found = torch.ones(pages[1].shape[0], 1, problem.heads_kv, 1)
    for i, length in enumerate(lengths.tolist()):
        found[table[i, : -(-length // problem.page)].long(), 0, :, 0] = scale[i]
    return found


@pytest.mark.parametrize("kind", ["paged", "portable"])
@pytest.mark.parametrize("tree", [False, True])
def test_kernels_over_pages_attend_to_the_cache_and_to_new_tokens(
    decode: Any, recorded: Recorded, kind: str, tree: bool
) -> None:
    problem = decode.Problem(*SIZES, shortest=10, new=8, tree=tree)
    call, size = decode.KINDS[kind](problem)
    seen = torch.from_numpy(decode.ancestors(8) if tree else np.tril(np.ones((8, 8), bool)))
    out, _ = call()
    for got, exact in zip(out, expected(problem, recorded.pages, seen), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)
    assert size == 2


def test_the_portable_kind_is_the_kernel_for_all_gpus(decode: Any) -> None:
    spec = decode.spec_of(decode.Problem(*SIZES))
    (kernel,) = (k for k in fg.build(spec, arch=decode.PORTABLE).plan.kernels if k.role == "decode")
    (portable,) = (k for k in fg.build(spec, arch="sm_80").plan.kernels if k.role == "decode")
    (hopper,) = (k for k in fg.build(spec, arch="sm_90a").plan.kernels if k.role == "decode")
    assert kernel.template == portable.template != hopper.template


@pytest.mark.parametrize("page", [1, 8])
@pytest.mark.parametrize("kind", ["e4m3", "e4m3-pages", "e4m3-queries"])
def test_kernels_over_8_bit_caches_multiply_by_scales(decode: Any, recorded: Recorded, kind: str, page: int) -> None:
    problem = decode.Problem(*SIZES[:-1], page, shortest=10)
    call, size = decode.KINDS[kind](problem)
    of_keys, of_values, *of_queries = recorded.scales
    q, k, v, *places = recorded.pages
    if kind == "e4m3-pages":
        of_keys, of_values = (x[:, None, :, None] for x in (of_keys, of_values))
    else:
        of_keys, of_values = (of_pages(problem, recorded.pages, x) for x in (of_keys, of_values))
    if of_queries:
        q = q.to(torch.float8_e4m3fn).double() * of_queries[0].repeat_interleave(2, 1)[:, None, :, None]
    out, _ = call()
    exact = expected(problem, (q, k, v, *places), True, of_keys, of_values)
    for got, wanted in zip(out, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)
    assert (size, k.dtype) == (1, torch.float8_e4m3fn)


def test_values_of_latent_attention_are_the_first_columns_of_the_keys(decode: Any, recorded: Recorded) -> None:
    problem = decode.Problem(2, 4, 1, 64, 40, 8, shortest=10, new=2, latent=128)
    call, size = decode.KINDS["latent"](problem)
    q, vectors, _, *places = recorded.pages
    assert vectors.shape[-1] == 64 + 128
    out, _ = call()
    seen = torch.tensor([[True, False], [True, True]])
    for got, exact in zip(out, expected(problem, (q, vectors, vectors[..., :128], *places), seen), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)
    assert size == 2


def test_flashattention_3_gets_both_parts_of_latent_queries(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(decode, "vllm_fa3", lambda *rows, **more: given.update(more, rows=rows))
    call, _ = decode.KINDS["latent-fa3"](decode.Problem(2, 4, 1, 64, 40, 8, new=2, latent=128))
    call()
    assert [x.shape[-1] for x in given["rows"]] == [64, 64, 128]
    assert given["qv"].shape == (4, 4, 128)
    assert given["table"].shape == (2, 5)


@pytest.mark.parametrize("kind", ["fa3", "fa3-e4m3"])
def test_flashattention_3_gets_the_same_problem(decode: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(decode, "vllm_fa3", lambda *rows, **more: given.update(more, rows=rows))
    problem = decode.Problem(*SIZES, shortest=10, new=4)
    call, size = decode.KINDS[kind](problem)
    call()
    q, k, v = given["rows"]
    assert q.shape == (8, 4, 64)
    assert q.dtype == k.dtype == v.dtype == (torch.bfloat16 if kind == "fa3" else torch.float8_e4m3fn)
    assert (size, given["longest"], given["causal"]) == (q.dtype.itemsize, (4, 40), True)
    assert (given["starts_q"].tolist(), given["lengths_k"].tolist()) == ([0, 4, 8], [10, 40])
    assert [tuple(x.shape) for x in given.get("descales", ())] == ([] if kind == "fa3" else [(2, 2)] * 3)


@pytest.mark.parametrize("kind", ["fa3", "fa3-e4m3", "cudnn"])
def test_peers_refuse_trees(decode: Any, kind: str) -> None:
    with pytest.raises(ValueError, match="it has"):
        decode.KINDS[kind](decode.Problem(*SIZES, new=4, tree=True))

"""flash-attn's published matrix of tests for ``flash_attn_with_kvcache``: shapes, options, and its rule for errors.

The rule: the largest error against attention in float32 is at most three times, with ALiBi five times, that of the same
formula computed in the inputs' dtype, and 1e-5. Which options meet which shapes is drawn: there are a million
combinations. DRAWN_CASES=nightly takes every mask with every dim, dtype and size of pages, and draws several times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify.cases.cached import Filling

torch = pytest.importorskip("torch")

from tests.gpu.flash_attn_matrix import HEADS, WHOLE, band, distances, reference, turned  # noqa: E402
from tests.torch.results import Recorder  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DIMS = (32, 59, 64, 80, 128, 256)
LENGTHS = (
    *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20_000), (1, 128 * 1024)),
    *((16, 128 * 1024), (128, 128)),
)
PAGES = (None, 256, 1, 100, *((4, 128) if WHOLE else ()))
#: Causal, a window, ALiBi: each is a kernel of its own. In turns, or each with all lengths.
KINDS = (((False, False, False), (True, False, True), (False, True, False)),)
DTYPES: tuple[str | None, ...] = (None,)
DRAWS = 1
if WHOLE:
    KINDS = tuple((kind,) for kind in product((False, True), repeat=3))
    DTYPES, DRAWS = ("float16", "bfloat16"), 4
BATCH = 2


@dataclass
class Problem:
    """A cache, and what comes into it."""

    random: Random
    dim: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    page_size: int | None
    causal: bool
    local: bool
    alibi: bool
    #: By the size of pages, if it is not said.
    dtype_name: str | None = None

    def __post_init__(self) -> None:
        draw, (len_q, room), (heads, heads_kv) = self.random, self.lengths, self.heads
        by_pages = "float16" if self.page_size in (None, 100) else "bfloat16"
        self.dtype = getattr(torch, self.dtype_name or by_pages)
        self.q = self.normal(BATCH, len_q, heads, self.dim)
        self.new = 0 if len_q > room or draw.random() < 0.3 else draw.choice((len_q, draw.randint(1, len_q)))
        self.k, self.v = (self.normal(BATCH, self.new, heads_kv, self.dim) for _ in range(2))
        # All queries have a position, so that there is an angle for each.
        most = room - (len_q if self.new else 0)
        self.seqlens = [draw.randint(0 if self.new else 1, most) for _ in range(BATCH)]
        self.leftpad = [draw.randint(0, length - 1) if length else 0 for length in self.seqlens]
        self.window = (draw.randint(0, room), draw.randint(0, room)) if self.local else (-1, -1)
        self.slopes = torch.rand(BATCH, heads, device="cuda") * 0.3 if self.alibi else None
        size = self.page_size or room
        each = -(-room // size)
        self.table = torch.randperm(2 * BATCH * each, device="cuda", dtype=torch.int32)[: BATCH * each].view(BATCH, -1)
        self.k_cache, self.v_cache = (self.normal(2 * BATCH * each, size, heads_kv, self.dim) for _ in range(2))
        rotary_dim = int(draw.choice((0.0, 0.5, 1.0)) * self.dim) // 16 * 16 if self.new else 0
        angles = torch.rand(each * size, rotary_dim // 2, device="cuda") * 2 * torch.pi
        self.angles = (angles.cos().to(self.dtype), angles.sin().to(self.dtype)) if rotary_dim else (None, None)
        self.interleaved = draw.random() < 0.5

    def normal(self, *shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=self.dtype)

    def call(self, num_splits: int) -> Any:
        """The function under test."""
        ints = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (self.seqlens, self.leftpad)]
        new = (self.k, self.v) if self.new else (None, None)
        places = {"cache_batch_idx": self.table[:, 0]} if self.page_size is None else {"block_table": self.table}
        return fg.flash_attn_with_kvcache(
            *(self.q, self.k_cache, self.v_cache, *new, *self.angles, ints[0]),
            cache_leftpad=ints[1],
            causal=self.causal,
            window_size=self.window,
            rotary_interleaved=self.interleaved,
            alibi_slopes=self.slopes,
            num_splits=num_splits,
            **places,
        )

    def turned(self, x: Any, b: int, *, one_position: bool = False) -> Any:
        """Rows of sequence b, turned by their positions."""
        if self.angles[0] is None:
            return x
        steps = torch.zeros(len(x)).long() if one_position else torch.arange(len(x))
        return turned(x, self.angles, self.seqlens[b] + steps, interleaved=self.interleaved)

    def rows(self, cache: Any) -> Any:
        """Keys or values of each sequence, (batch, room, heads, dim)."""
        return cache[self.table.long()].flatten(1, 2)

    def expected(self) -> tuple[Any, Any, Any, Any]:
        """What is in the cache afterwards, and attention to it in float32 and in the inputs' dtype."""
        keys, values = self.rows(self.k_cache).clone(), self.rows(self.v_cache).clone()
        exact, rounded = [], []
        for b, length in enumerate(self.seqlens):
            end = length + self.new
            keys[b, length:end], values[b, length:end] = self.turned(self.k[b], b), self.v[b]
            q = self.turned(self.q[b], b, one_position=not (self.causal or self.local))[None]
            k, v = (x[b : b + 1, self.leftpad[b] : end] for x in (keys, values))
            distance = distances(q.shape[1], k.shape[1])
            slopes = None if self.slopes is None else self.slopes[b : b + 1]
            rules = band(distance, self.causal, self.window), distance.abs(), 0.0, slopes
            exact.append(reference(q, k, v, rules, None, exact=True))
            rounded.append(reference(q, k, v, rules, None, exact=False))
        return keys, values, torch.cat(exact).float(), torch.cat(rounded).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dim", DIMS)
def test_new_keys_are_put_into_the_cache_and_attended_to(
    plain_outputs: None, dim: int, page_size: int | None, kinds: Any, dtype: str | None
) -> None:
    torch.manual_seed(0)
    random = Random(f"{dim} {page_size}" if dtype is None else f"{dim} {page_size} {kinds} {dtype}")
    for number, lengths in enumerate(LENGTHS * DRAWS):
        causal, local, alibi = kinds[number % len(kinds)]
        # The longest caches of six heads each would not leave room for those of other tests.
        heads = HEADS["gqa"] if lengths[1] > 100_000 else random.choice(list(HEADS.values()))
        problem = Problem(random, dim, lengths, heads, page_size, causal, local, alibi, dtype)
        keys, values, exact, rounded = problem.expected()
        out = problem.call(random.choice((0, 0, 1, 3)))
        torch.testing.assert_close(problem.rows(problem.k_cache), keys, rtol=1e-3, atol=1e-3)
        assert torch.equal(problem.rows(problem.v_cache), values)
        limit = (5 if alibi else 3) * (rounded - exact).abs().max() + 1e-5
        error = (out.float() - exact).abs().max()
        assert error <= limit, f"{lengths}: error {error:.3g}, limit {limit:.3g}"


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_results_are_within_their_bounds_and_nothing_beside_them_is_written(cache: Any, dtype: str) -> None:
    mask, random = fg.window(300, 0), np.random.default_rng(0)
    spec = fg.AttentionSpec(64, dtype=dtype, mask=mask, direction="forward", cache=cache)
    kernel, element = fg.build(spec), spec.element.numpy()
    for number, (len_q, len_kv) in enumerate(((1, 1000), (70, 300), (5, 64), (3, 0))):
        q, k, v = (random.standard_normal((3, n, h, 64)).astype(element) for n, h in ((len_q, 4), *[(len_kv, 2)] * 2))
        filling = Filling.drawn(cache, number, 3, len_q, len_kv)
        given = filling.cache()
        given_arrays = {n: getattr(given, n) for n in ("seqlens", "batch_idx", "leftpad", "block_table")}
        on_device = {n: torch.from_numpy(x).cuda() for n, x in given_arrays.items() if x is not None}
        arrays = [on_gpu(x) for x in (q, filling.fill(k), filling.fill(v))]
        o, lse = kernel(*arrays, cache=replace(given, **on_device))
        exact = oracle.forward(spec, q, k, v, lengths=filling.used)
        bounds = oracle.bounds(spec, q, k, v, None, spec.default_scale, exact=exact, lengths=filling.used)
        for name, found, right in (("o", o, exact[0]), ("lse", lse, exact[1])):
            host = found.float().cpu().numpy()
            verdict = oracle.check(host, right, getattr(bounds, name), exact_infinity=name == "lse")
            assert verdict.ok, f"{name} of {len_q} x {len_kv}: {verdict}"


def on_gpu(x: Any) -> Any:
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[x.dtype.name]
    return torch.from_numpy(x.astype(np.float32)).to("cuda", dtype)


def test_a_captured_step_of_decoding_goes_on_at_each_replay(plain_outputs: None) -> None:
    """One token after another: lengths are counted on the device, and nothing waits for it."""
    torch.manual_seed(0)
    steps, q, k, v = 5, *(torch.randn(2, 1, heads, 64, device="cuda", dtype=torch.float16) for heads in (8, 2, 2))
    angles = torch.rand(200, 32, device="cuda")
    tables = angles.cos().half(), angles.sin().half()
    first = [torch.randn(2, 200, 2, 64, device="cuda", dtype=torch.float16) for _ in range(2)]
    caches, lengths = [x.clone() for x in first], torch.tensor([3, 150], dtype=torch.int32, device="cuda")

    def step() -> Any:
        out = fg.flash_attn_with_kvcache(q, *caches, k, v, *tables, lengths, causal=True, num_splits=3)
        lengths.add_(1)
        return out

    def start() -> None:
        for cache, x in zip(caches, first, strict=True):
            cache.copy_(x)
        lengths.copy_(torch.tensor([3, 150], dtype=torch.int32))

    expected = [step() for _ in range(steps)]
    after = [x.clone() for x in caches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    start()
    for right in expected:
        graph.replay()
        assert torch.equal(out, right)
    assert all(torch.equal(a, b) for a, b in zip(caches, after, strict=True))


@pytest.mark.parametrize("page_size", [None, 16])
def test_steps_like_one_before_give_the_bits_of_the_operators(plain_outputs: None, page_size: int | None) -> None:
    """What is found out for the first step alone, against what operators find out each time."""
    torch.manual_seed(0)
    steps = torch.randn(5, 3, 2, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(192, 32, device="cuda")
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    shape = (2, 192, 2, 64) if page_size is None else (30, page_size, 2, 64)
    table = None if page_size is None else torch.randperm(30, device="cuda")[:24].view(2, 12).int()

    def decode() -> Any:
        caches = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        lengths, found = torch.tensor([3, 150], dtype=torch.int32, device="cuda"), []
        for q, k, v in steps.unbind():
            options = {"block_table": table, "causal": True, "num_splits": 3, "return_softmax_lse": True}
            found += fg.flash_attn_with_kvcache(q, *caches, k, v, *tables, lengths, **options)
            lengths.add_(1)
        return [*found, *caches]

    plain = decode()
    with Recorder():
        watched = decode()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_a_step_like_one_before_goes_to_the_current_stream(plain_outputs: None) -> None:
    q, caches = torch.randn(2, 1, 8, 64, device="cuda").half(), torch.randn(2, 2, 4096, 2, 64, device="cuda").half()
    lengths = torch.tensor([4000, 9], dtype=torch.int32, device="cuda")

    def step() -> Any:
        return fg.flash_attn_with_kvcache(q, *caches.unbind(), cache_seqlens=lengths)

    step()
    lengths.copy_(torch.tensor([30, 40], dtype=torch.int32))
    expected = step()
    lengths.copy_(torch.tensor([4000, 9], dtype=torch.int32))
    torch.cuda.synchronize()
    later = torch.tensor([30, 40], dtype=torch.int32, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        lengths.copy_(later)
        found = step()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_packed_queries_are_those_of_each_sequence(plain_outputs: None) -> None:
    from flashgen.compat.flash_attn_interface import flash_attn_with_kvcache

    problem = Problem(Random(3), 128, (70, 900), (8, 2), 16, True, False, False)
    lengths, table = torch.tensor(problem.seqlens, dtype=torch.int32, device="cuda"), problem.table
    options = {"cache_seqlens": lengths, "page_table": table, "causal": True, "num_splits": 3}
    caches = problem.k_cache, problem.v_cache
    alone = flash_attn_with_kvcache(problem.q, *caches, **options)
    starts = torch.tensor([0, 70, 73], dtype=torch.int32, device="cuda")
    # Of the second sequence the last queries alone, which see what they saw before.
    packed = torch.cat([problem.q[0], problem.q[1, -3:]])
    found = flash_attn_with_kvcache(packed, *caches, cu_seqlens_q=starts, max_seqlen_q=70, **options)
    torch.testing.assert_close(found, torch.cat([alone[0], alone[1, -3:]]), atol=2e-3, rtol=1e-2)


def test_the_same_bits_in_250_runs(plain_outputs: None) -> None:
    problem = Problem(Random(1), 128, (3, 5000), (8, 2), 100, True, False, False)
    first = problem.call(0)
    for _ in range(250):
        assert torch.equal(problem.call(0), first)

"""Steps of an engine on the emulator: what ``flashgen.serving`` writes and attends to is what the oracle says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
serving = pytest.importorskip("flashgen.serving")

HEADS, HEADS_KV, DIM, PAGE, PAGES = 4, 2, 16, 8, 40


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A GPU, or the emulator in its place."""
    with fg.torch.emulate_cpu(), torch.device(request.param):
        yield request.param


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run."""
    from flashgen.launch.call.prepared import Call

    found: list[str] = []
    run = Call.run

    def noted(self: Call, *arguments: Any) -> Any:
        found.extend(step.kernel.plan.role for step in self.steps)
        return run(self, *arguments)

    monkeypatch.setattr(Call, "run", noted)
    return found


class Engine:
    """Pages, and sequences that own some of them: so many keys before the step, and so many new ones."""

    def __init__(self, before: list[int], new: list[int], *, layout: str = "NHD", padding: int = 0) -> None:
        generator = torch.Generator("cpu").manual_seed(sum(before) + 7 * len(new))

        def normal(*shape: int) -> Any:
            made = torch.randn(shape, generator=generator, device="cpu").half()
            return made.to(torch.get_default_device())

        self.before, self.new, self.tokens = before, new, sum(new)
        shape = (PAGES, PAGE, HEADS_KV, DIM) if layout == "NHD" else (PAGES, HEADS_KV, PAGE, DIM)
        caches = (normal(*shape), normal(*shape))
        self.k_cache, self.v_cache = caches if layout == "NHD" else (x.transpose(1, 2) for x in caches)
        rows = self.tokens + padding
        self.q, self.k, self.v = normal(rows, HEADS, DIM), normal(rows, HEADS_KV, DIM), normal(rows, HEADS_KV, DIM)
        self.starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
        self.lengths = torch.tensor([a + b for a, b in zip(before, new, strict=True)], dtype=torch.int32)
        each = -(-int(self.lengths.max()) // PAGE)
        pages = torch.randperm(PAGES, generator=generator, device="cpu")[: len(new) * each]
        self.table = pages.view(len(new), each).int().to(torch.get_default_device())
        slots = [
            int(self.table[i, j // PAGE]) * PAGE + j % PAGE
            for i, (start, count) in enumerate(zip(before, new, strict=True))
            for j in range(start, start + count)
        ]
        self.slots = torch.tensor(slots + [-1] * padding)

    def plan(self, **options: Any) -> Any:
        given = {"num_tokens": self.tokens, "max_query_len": max(self.new), "page_size": PAGE}
        return serving.plan(self.starts, self.lengths, self.table, self.slots, **{**given, **options})

    def sequences(self, cache: Any) -> list[Any]:
        """The keys or values of each sequence, as the cache has them."""
        return [
            cache[row.long()].flatten(0, 1)[:length]
            for row, length in zip(self.table, self.lengths.tolist(), strict=True)
        ]

    def check(self, out: Any, lse: Any, **spec: Any) -> None:
        """Compares with the oracle's attention to what is in the pages."""
        given = {"dtype": "fp16", "mask": fg.causal(), "direction": "forward", **spec}
        bare = fg.AttentionSpec(DIM, **given)
        keys, values, starts = self.sequences(self.k_cache), self.sequences(self.v_cache), self.starts.tolist()
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            if first == last:
                continue
            arrays = [x.cpu().numpy()[None] for x in (self.q[first:last], keys[i], values[i])]
            exact = fg.oracle.forward(bare, *arrays)
            bounds = fg.oracle.bounds(bare, *arrays, exact=exact)
            assert fg.oracle.check(out[first:last].cpu().numpy()[None], exact[0], bounds.o).ok
            assert fg.oracle.check(lse[:, first:last].cpu().numpy()[None], exact[1], bounds.lse).ok


STEPS: dict[str, tuple[list[int], list[int], dict[str, Any], list[str]]] = {
    "decode": ([9, 30, 0], [1, 1, 1], {}, ["append", "decode"]),
    "guesses": ([9, 30, 3], [4, 4, 4], {"num_decodes": 3, "decode_query_len": 4}, ["append", "decode"]),
    "guesses in one call": ([9, 30, 3], [4, 4, 4], {}, ["append", "decode", "clear_gaps"]),
    "ragged": ([9, 30, 3], [1, 4, 2], {}, ["append", "decode", "clear_gaps"]),
    "prefill": ([0, 0], [70, 3], {}, ["append", "forward", "clear_gaps"]),
    "chunked prefill": ([20, 16], [70, 3], {}, ["append", "forward", "clear_gaps"]),
    "mixed": ([9, 30, 12, 0], [1, 1, 65, 7], {"num_decodes": 2}, ["append", "decode", "forward", "clear_gaps"]),
    "guesses and prefill": (
        [9, 30, 12],
        [3, 3, 65],
        {"num_decodes": 2, "decode_query_len": 3},
        ["append", "decode", "forward", "clear_gaps"],
    ),
    "reproducible": ([9, 30, 12, 0], [1, 1, 65, 7], {"batch_invariant": True}, ["append", "decode", "clear_gaps"]),
    "an empty sequence": ([9, 5], [2, 0], {}, ["append", "decode", "clear_gaps"]),
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_appends_and_attends(device: str, roles: list[str], name: str, layout: str) -> None:
    before, new, options, expected = STEPS[name]
    engine = Engine(before, new, layout=layout, padding=3)
    step = engine.plan(**options)
    untouched = [x.clone() for x in (engine.k_cache, engine.v_cache)]
    for _ in range(2):  # found out, and replayed
        serving.append(step, engine.k, engine.v, engine.k_cache, engine.v_cache)
        out, lse = serving.run(step, engine.q, engine.k_cache, engine.v_cache, return_lse=True)
        assert out.shape == (engine.tokens, HEADS, DIM)
        engine.check(out, lse)
    # Hopper has a kernel of its own for prompts.
    assert [role.replace("prefill", "forward") for role in roles if role != "combine"] == expected * 2
    for cache, old, rows in zip((engine.k_cache, engine.v_cache), untouched, (engine.k, engine.v), strict=True):
        slots = engine.slots[: engine.tokens]
        old[slots // PAGE, slots % PAGE] = rows[: engine.tokens]
        assert torch.equal(cache, old)


def test_masks_scores_and_scales_are_those_of_attention() -> None:
    engine = Engine([9, 30, 12], [1, 1, 20])
    step = engine.plan(num_decodes=2)
    serving.append(step, engine.k, engine.v, engine.k_cache, engine.v_cache)
    spec = {"mask": fg.window(7, 0), "score": fg.softcap(2.0)}
    out, lse = serving.run(step, engine.q, engine.k_cache, engine.v_cache, **spec, return_lse=True)
    engine.check(out, lse, **spec)
    one = serving.run(step, engine.q, engine.k_cache, engine.v_cache, scale=0.5)
    other = serving.run(step, engine.q * 2, engine.k_cache, engine.v_cache)
    assert torch.allclose(one.float(), other.float(), atol=2e-3)


def test_results_go_where_the_engine_wants_them() -> None:
    engine = Engine([9, 30, 12], [1, 1, 20], padding=2)
    step = engine.plan(num_decodes=2)
    buffer = torch.full((engine.tokens + 2, HEADS, DIM), 7.0).half()
    found = serving.run(step, engine.q, engine.k_cache, engine.v_cache, out=buffer)
    assert found.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[: engine.tokens], serving.run(step, engine.q, engine.k_cache, engine.v_cache))
    assert buffer[engine.tokens :].eq(7.0).all()


def test_rows_of_one_table_serve_all_requests() -> None:
    """As in SGLang: keys have pages of their own, and a table for all requests, of which the batch names some."""
    engine = Engine([9, 30], [1, 1])
    expected = serving.run(engine.plan(), engine.q, engine.k_cache, engine.v_cache)
    tokens = (engine.table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    pool = torch.full((5, tokens.shape[1]), 10**6, dtype=torch.int32)
    requests = torch.tensor([3, 1])
    pool[requests] = tokens
    k_cache, v_cache = (x.flatten(0, 1)[:, None] for x in (engine.k_cache, engine.v_cache))
    step = serving.plan(
        *(engine.starts, engine.lengths.long(), pool),
        num_tokens=2,
        max_query_len=1,
        table_rows=requests,
    )
    assert torch.equal(serving.run(step, engine.q, k_cache, v_cache), expected)


@pytest.mark.parametrize("options", [{}, {"num_decodes": 2}])
def test_a_captured_step_is_written_anew(options: dict[str, Any]) -> None:
    first, second = Engine([9, 30, 3], [1, 1, 4]), Engine([8, 25, 1], [1, 1, 4])
    captured = first.plan(**options)
    arrays = [group.cache.seqlens for group in captured.groups]
    found = second.plan(**options, into=captured)
    assert found is captured
    assert all(a is group.cache.seqlens for a, group in zip(arrays, captured.groups, strict=True))
    serving.append(captured, second.k, second.v, second.k_cache, second.v_cache)
    second.check(*serving.run(captured, second.q, second.k_cache, second.v_cache, return_lse=True))


def test_a_captured_step_takes_shorter_queries_but_no_longer_ones() -> None:
    # Kernels of a graph were launched for queries of the captured lengths.
    short, long = Engine([9, 25], [2, 4]), Engine([8, 24], [1, 5])
    with pytest.raises(fg.ArgumentError, match="max_query_len=5 is above the 4 that into was planned with"):
        long.plan(into=short.plan())
    captured = long.plan()
    short.plan(into=captured)
    short.check(*serving.run(captured, short.q, short.k_cache, short.v_cache, return_lse=True))


def test_a_captured_step_for_any_lengths_takes_one_token_of_each_sequence() -> None:
    ragged, single = Engine([9, 25], [2, 0]), Engine([8, 24], [1, 1])
    captured = ragged.plan()
    single.plan(into=captured)
    serving.append(captured, single.k, single.v, single.k_cache, single.v_cache)
    single.check(*serving.run(captured, single.q, single.k_cache, single.v_cache, return_lse=True))


def test_a_captured_step_is_as_independent_of_the_batch_as_the_next_one_must_be() -> None:
    engine = Engine([9, 30, 3], [1, 1, 4])
    for before, after in ((False, True), (True, False)):
        captured = engine.plan(num_decodes=2, batch_invariant=before)
        words = f"batch_invariant={after} differs from that of into, which is {before}"
        with pytest.raises(fg.ArgumentError, match=words):
            engine.plan(num_decodes=2, batch_invariant=after, into=captured)


def test_a_step_that_does_not_fit_leaves_the_captured_one_as_it_was() -> None:
    first, second = Engine([9, 30], [1, 1]), Engine([20, 60], [1, 1])
    captured = first.plan()
    with pytest.raises(fg.ArgumentError, match=r"block_table has shape \(2, 8\), and that of into is \(2, 4\)"):
        second.plan(into=captured)
    serving.append(captured, first.k, first.v, first.k_cache, first.v_cache)
    first.check(*serving.run(captured, first.q, first.k_cache, first.v_cache, return_lse=True))


@pytest.mark.parametrize(
    ("new", "options"), [([1, 1], {}), ([3, 3], {"decode_query_len": 3}), ([1, 1], {"batch_invariant": True})]
)
def test_rows_of_no_sequence_are_zeros(new: list[int], options: dict[str, Any]) -> None:
    """As where an engine pads the tokens of a batch, for a CUDA graph, but not its sequences."""
    engine = Engine([9, 30], new, padding=2)
    for num_decodes in (0, 2):
        step = engine.plan(num_tokens=engine.tokens + 2, num_decodes=num_decodes, **options)
        serving.append(step, engine.k, engine.v, engine.k_cache, engine.v_cache)
        buffer = torch.full(engine.q.shape, 7.0).half()
        out, lse = serving.run(step, engine.q, engine.k_cache, engine.v_cache, out=buffer, return_lse=True)
        assert out.shape == (engine.tokens + 2, HEADS, DIM)
        assert out[engine.tokens :].eq(0).all()
        assert lse[:, engine.tokens :].eq(-torch.inf).all()
        engine.check(out[: engine.tokens], lse[:, : engine.tokens])


def test_a_step_of_padding_alone_is_zeros() -> None:
    engine = Engine([9], [4])
    none = torch.zeros(0).int()
    step = serving.plan(torch.zeros(1).int(), none, engine.table[:0], num_tokens=4, max_query_len=1)
    out, lse = serving.run(step, engine.q, engine.k_cache, engine.v_cache, return_lse=True)
    assert (out.shape, lse.shape) == ((4, HEADS, DIM), (HEADS, 4))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_the_functions_compile_in_one_graph() -> None:
    engine, other = Engine([9, 30, 12], [1, 1, 20]), Engine([9, 30, 12], [1, 1, 20])

    def layer(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, starts: Any, lengths: Any, slots: Any) -> Any:
        step = serving.plan(
            *(starts, lengths, engine.table, slots),
            num_tokens=22,
            max_query_len=20,
            page_size=PAGE,
            num_decodes=2,
        )
        serving.append(step, k, v, k_cache, v_cache)
        return serving.run(step, q, k_cache, v_cache)

    def arguments(x: Engine) -> Any:
        return x.q, x.k, x.v, x.k_cache, x.v_cache, x.starts, x.lengths, x.slots

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments(other)), layer(*arguments(engine)))
    assert torch.equal(other.k_cache, engine.k_cache)


def test_a_step_without_tokens_is_nothing() -> None:
    engine = Engine([9], [1])
    step = serving.plan(torch.zeros(1).int(), torch.zeros(0).int(), engine.table[:0], num_tokens=0, max_query_len=0)
    out, lse = serving.run(step, engine.q, engine.k_cache, engine.v_cache, return_lse=True)
    assert (out.shape, lse.shape) == ((0, HEADS, DIM), (HEADS, 0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_tokens": -1}, "num_tokens=-1 is out of range"),
        ({"num_tokens": 2.0}, r"num_tokens=2\.0 is out of range"),
        ({"num_decodes": 3}, "num_decodes=3 and decode_query_len=1 do not go with 2 sequences"),
        ({"decode_query_len": 0, "num_decodes": 1}, "decode_query_len=0"),
        ({"max_query_len": 0}, "max_query_len=0 is below 1; pass how many new tokens a sequence has at most"),
        (
            {"max_query_len": 1, "num_decodes": 1, "decode_query_len": 2},
            "max_query_len=1 is below decode_query_len=2; pass how many new tokens a sequence has at most",
        ),
        ({"page_size": 0}, "slot_mapping needs page_size"),
        ({"table_rows": torch.zeros(3).int()}, r"table_rows has shape \(3,\); it must have rank 1 and 2 rows"),
        ({"seq_lens": [1, 2]}, r"seq_lens is a list; pass a torch\.Tensor"),
        (
            {"query_start_loc": torch.zeros(2).int()},
            r"query_start_loc has shape \(2,\); it must have rank 1 and 3 rows",
        ),
        ({"block_table": torch.zeros(1, 2).int()}, r"block_table has shape \(1, 2\); it must have rank 2 and 2 rows"),
        ({"slot_mapping": torch.zeros(1)}, r"slot_mapping has shape \(1,\); it must have rank 1 and at least 2 rows"),
        ({"into": "an earlier step"}, "into was planned for other numbers of sequences, decodes or tokens"),
        ({"into": 3}, "into=3 is not a step; pass one that plan has returned"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    engine = Engine([9, 30], [1, 1])
    if options.get("into") == "an earlier step":
        options = {"into": Engine([9], [1]).plan()}
    given = {
        "query_start_loc": engine.starts,
        "seq_lens": engine.lengths,
        "block_table": engine.table,
        "slot_mapping": engine.slots,
        "num_tokens": 2,
        "max_query_len": 1,
        "page_size": PAGE,
    }
    with pytest.raises(fg.ArgumentError, match=words):
        serving.plan(**{**given, **options})


def test_append_and_run_name_what_they_lack() -> None:
    engine = Engine([9, 30], [1, 1])
    step = serving.plan(engine.starts, engine.lengths, engine.table, num_tokens=2, max_query_len=1)
    with pytest.raises(fg.ArgumentError, match="planned without slot_mapping"):
        serving.append(step, engine.k, engine.v, engine.k_cache, engine.v_cache)
    with pytest.raises(fg.ArgumentError, match=r"q has shape \(1, 4, 16\); it must have rank 3 and at least 2 rows"):
        serving.run(step, engine.q[:1], engine.k_cache, engine.v_cache)
    with pytest.raises(fg.ArgumentError, match=r"k_cache has shape \(40, 8, 2\); it must have rank 4"):
        serving.run(step, engine.q, engine.k_cache[..., 0], engine.v_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", ["decode", "guesses", "mixed", "chunked prefill"])
def test_a_graph_of_a_layer_is_replayed_for_other_steps(name: str) -> None:
    before, new, options, _ = STEPS[name]
    first, second = Engine(before, new), Engine([n + 1 if n else 0 for n in before], new)
    step = first.plan(**options)
    arrays = first.q, first.k, first.v, first.k_cache, first.v_cache

    def layer() -> Any:
        serving.append(step, first.k, first.v, first.k_cache, first.v_cache)
        return serving.run(step, first.q, first.k_cache, first.v_cache, return_lse=True)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer()
    second.plan(**options, into=step)
    for place, array in zip(arrays, (second.q, second.k, second.v, second.k_cache, second.v_cache), strict=True):
        place.copy_(array)
    graph.replay()
    second.k_cache, second.v_cache = first.k_cache, first.v_cache
    second.check(out, lse)
    slots = second.slots[: second.tokens]
    assert torch.equal(first.k_cache[slots // PAGE, slots % PAGE], second.k[: second.tokens])

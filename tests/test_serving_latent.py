"""Steps of an engine whose caches hold latent vectors: values are part of the keys, and queries for them are ``qv``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
serving = pytest.importorskip("flashgen.serving")

from tests.test_serving import HEADS, PAGE, PAGES, STEPS, Engine, device, roles  # noqa: E402, F401

DIM, DIM_V = 16, 64


class LatentEngine(Engine):
    """An ``Engine`` whose pages have one vector for a token: first the values, then the rest of the key."""

    def __init__(self, *lists: Any, padding: int = 0) -> None:
        super().__init__(*lists, padding=padding)
        generator = torch.Generator("cpu").manual_seed(self.tokens)

        def normal(*shape: int) -> Any:
            made = torch.randn(shape, generator=generator, device="cpu").half()
            return made.to(torch.get_default_device())

        rows = self.tokens + padding
        self.pages, self.latents = normal(PAGES, PAGE, 1, DIM_V + DIM), normal(rows, 1, DIM_V + DIM)
        self.v_cache, self.k_cache = self.pages.split([DIM_V, DIM], -1)
        self.v, self.k = self.latents.split([DIM_V, DIM], -1)
        self.q, self.qv = normal(rows, HEADS, DIM), normal(rows, HEADS, DIM_V)

    def append(self, step: Any) -> None:
        serving.append(step, self.k, self.v, self.k_cache, self.v_cache)

    def run(self, step: Any, **options: Any) -> Any:
        return serving.run(step, self.q, self.k_cache, self.v_cache, qv=self.qv, **options)

    def check(self, out: Any, lse: Any, scale: float | None = None, **spec: Any) -> None:
        given = {"dtype": "fp16", "mask": fg.causal(), "direction": "forward", **spec}
        bare = fg.AttentionSpec(DIM, head_dim_v=DIM_V, qv=True, cache="paged", **given)
        keys, values = self.sequences(self.k_cache), self.sequences(self.v_cache)
        for i, (first, last) in enumerate(itertools.pairwise(self.starts.tolist())):
            if first == last:
                continue
            *arrays, qv = (x.cpu().numpy()[None] for x in (self.q[first:last], keys[i], values[i], self.qv[first:last]))
            exact = fg.oracle.forward(bare, *arrays, qv=qv, scale=scale)
            bounds = fg.oracle.bounds(bare, *arrays, qv=qv, scale=scale, exact=exact)
            assert fg.oracle.check(out[first:last].cpu().numpy()[None], exact[0], bounds.o).ok
            assert fg.oracle.check(lse[:, first:last].cpu().numpy()[None], exact[1], bounds.lse).ok


@pytest.mark.parametrize("name", ["decode", "guesses", "ragged", "mixed", "reproducible", "an empty sequence"])
def test_a_step_appends_and_attends(roles: list[str], name: str) -> None:  # noqa: F811
    before, new, options, expected = STEPS[name]
    engine = LatentEngine(before, new, padding=3)
    step = engine.plan(**options)
    held = engine.pages.clone()
    for _ in range(2):  # found out, and replayed
        engine.append(step)
        out, lse = engine.run(step, return_lse=True)
        engine.check(out, lse)
    # Prompts use the decode kernel, too.
    assert [role for role in roles if role != "combine"] == [role.replace("forward", "decode") for role in expected] * 2
    slots = engine.slots[: engine.tokens]
    held[slots // PAGE, slots % PAGE] = engine.latents[: engine.tokens]
    assert torch.equal(engine.pages, held)


def test_masks_scores_scales_and_places_of_results_are_those_of_other_steps() -> None:
    engine = LatentEngine([9, 30, 12], [1, 1, 20], padding=2)
    step = engine.plan(num_decodes=2)
    engine.append(step)
    spec = {"mask": fg.window(7, 0), "score": fg.softcap(2.0)}
    buffer = torch.full((engine.tokens + 2, HEADS, DIM_V), 7.0).half()
    out, lse = engine.run(step, **spec, scale=0.3, out=buffer, return_lse=True)
    engine.check(out, lse, scale=0.3, **spec)
    assert out.data_ptr() == buffer.data_ptr()
    assert buffer[engine.tokens :].eq(7.0).all()


def test_the_functions_compile_in_one_graph() -> None:
    engine, other = (LatentEngine([9, 30, 12], [1, 1, 20]) for _ in range(2))
    step = engine.plan(num_decodes=2)

    def layer(q: Any, qv: Any, latents: Any, pages: Any) -> Any:
        (v, k), (v_cache, k_cache) = (x.split([DIM_V, DIM], -1) for x in (latents, pages))
        serving.append(step, k, v, k_cache, v_cache)
        return serving.run(step, q, k_cache, v_cache, qv=qv)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(engine.q, engine.qv, engine.latents, engine.pages)
    assert torch.equal(out, layer(engine.q, engine.qv, engine.latents, other.pages))
    assert torch.equal(engine.pages, other.pages)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda qv: [1], r"qv is a list; pass a torch\.Tensor"),
        (lambda qv: qv[None], r"qv has shape \(1, 2, 4, 64\); it must have rank 3 and at least 2 rows"),
        (lambda qv: qv[:1], r"qv has shape \(1, 4, 64\); it must have rank 3 and at least 2 rows"),
        (lambda qv: qv[..., :32], r"qv has shape \(2, 1, 4, 32\); with this q it must be \(2, 1, 4, 64\)"),
    ],
)
def test_other_queries_for_values_are_refused_by_name(change: Any, words: str) -> None:
    engine = LatentEngine([9, 30], [1, 1])
    step = engine.plan()
    engine.qv = change(engine.qv)
    with pytest.raises(fg.ArgumentError, match=words):
        engine.run(step)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_a_graph_of_a_layer_is_replayed_for_other_steps(name: str) -> None:
    before, new, options, _ = STEPS[name]
    first, second = LatentEngine(before, new), LatentEngine([n + 1 if n else 0 for n in before], new)
    step = first.plan(**options)

    def layer() -> Any:
        first.append(step)
        return first.run(step, return_lse=True)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer()
    second.plan(**options, into=step)
    for array in ("q", "qv", "latents", "pages"):
        getattr(first, array).copy_(getattr(second, array))
    graph.replay()
    second.k_cache, second.v_cache = first.k_cache, first.v_cache
    second.check(out, lse)

"""Steps of an engine whose pages are in float8: each layer has its own scales."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
serving = pytest.importorskip("flashgen.serving")

from tests.test_serving import HEADS, HEADS_KV, PAGE, PAGES, STEPS, Engine, device, roles  # noqa: E402, F401

SHAPES: dict[str, Any] = {
    "one": (),
    "one in a row": (1,),
    "heads": (HEADS_KV,),
    "pages": (PAGES,),
    "pages and heads": (PAGES, HEADS_KV),
}


class Float8Engine(Engine):
    """An ``Engine`` with 8-bit pages, and scales that are powers of two, by which numbers in 16 bits stay exact."""

    def __init__(self, *lists: Any, shape: str = "one", dtype: Any = torch.float8_e4m3fn, **options: Any) -> None:
        super().__init__(*lists, **options)
        self.k_cache, self.v_cache = self.k_cache.to(dtype), self.v_cache.to(dtype)
        generator = torch.Generator("cpu").manual_seed(len(shape))
        place = torch.get_default_device()
        self.k_scale, self.v_scale = (
            torch.exp2(torch.randint(-2, 2, SHAPES[shape], generator=generator, device="cpu").float()).to(place)
            for _ in "kv"
        )
        self.scales = {"k_scale": self.k_scale, "v_scale": self.v_scale, "page_scales": "pages" in shape}

    def scale_of(self, cache: Any) -> Any:
        """The scale of each page and head, ``(pages, 1, heads, 1)``."""
        scale = self.k_scale if cache is self.k_cache else self.v_scale
        if self.scales["page_scales"]:
            scale = scale.view(PAGES, -1)
        return scale.expand(PAGES, HEADS_KV)[:, None, :, None]

    def sequences(self, cache: Any) -> list[Any]:
        """What the keys or values of each sequence mean."""
        meant = (cache.float() * self.scale_of(cache)).half()
        return super().sequences(meant)

    def run(self, step: Any, **options: Any) -> Any:
        return serving.run(step, self.q, self.k_cache, self.v_cache, **self.scales, **options)

    def append(self, step: Any) -> None:
        serving.append(step, self.k, self.v, self.k_cache, self.v_cache, **self.scales)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("decode", "one"),
        ("decode", "pages"),
        ("guesses", "one in a row"),
        ("mixed", "heads"),
        ("mixed", "pages and heads"),
        ("reproducible", "heads"),
        ("ragged", "one"),
        ("prefill", "one"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_step_appends_and_attends(roles: list[str], name: str, shape: str, dtype: Any) -> None:  # noqa: F811
    before, new, options, expected = STEPS[name]
    engine = Float8Engine(before, new, shape=shape, dtype=dtype, padding=3)
    step = engine.plan(**options)
    held = [x.clone() for x in (engine.k_cache, engine.v_cache)]
    for _ in range(2):  # found out, and replayed
        engine.append(step)
        out, lse = engine.run(step, return_lse=True)
        engine.check(out, lse)
    # No other kernel reads 8-bit keys.
    assert [role for role in roles if role != "combine"] == [role.replace("forward", "decode") for role in expected] * 2
    slots = engine.slots[: engine.tokens]
    for cache, old, rows in zip((engine.k_cache, engine.v_cache), held, (engine.k, engine.v), strict=True):
        # torch divides and rounds as the kernel does.
        scale = engine.scale_of(cache).expand(PAGES, PAGE, HEADS_KV, 1)[slots // PAGE, slots % PAGE]
        old[slots // PAGE, slots % PAGE] = (rows[: engine.tokens].float() / scale).to(dtype)
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))


def test_layers_with_other_scales_share_a_step() -> None:
    engine = Float8Engine([9, 30, 12], [1, 1, 20], shape="heads")
    step = engine.plan(num_decodes=2)
    engine.append(step)
    first = engine.run(step)
    engine.scales["v_scale"] = engine.v_scale * 2
    assert torch.equal(engine.run(step), first * 2)
    engine.scales["v_scale"] = None
    ones = torch.ones(HEADS_KV)
    without = engine.run(step)
    engine.scales["v_scale"] = ones
    assert torch.equal(engine.run(step), without)


def test_the_functions_compile_in_one_graph() -> None:
    engine, other = (Float8Engine([9, 30, 0], [1, 1, 1], shape="pages") for _ in range(2))
    step = engine.plan()

    def layer(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, scales: Any) -> Any:
        serving.append(step, k, v, k_cache, v_cache, **scales)
        return serving.run(step, q, k_cache, v_cache, **scales)

    given = engine.q, engine.k, engine.v
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(*given, engine.k_cache, engine.v_cache, engine.scales)
    assert torch.equal(out, layer(*given, other.k_cache, other.v_cache, engine.scales))
    assert torch.equal(engine.k_cache.view(torch.uint8), other.k_cache.view(torch.uint8))


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"k_scale": 0.5}, "k_scale is a float; pass a float32"),
        ({"v_scale": torch.ones(3, HEADS_KV)}, r"v_scale has shape \(3, 2\); pass one number or one for each head"),
        ({"k_scale": torch.ones(HEADS)}, r"cache\.k_scale is fp32 of shape \(4,\)"),
        ({"page_scales": 1}, "page_scales=1 is not a bool"),
    ],
)
def test_other_scales_are_refused_by_name(scales: dict[str, Any], words: str) -> None:
    engine = Float8Engine([9, 30, 0], [1, 1, 1])
    step = engine.plan()
    scales = {name: x.to(engine.q.device) if isinstance(x, torch.Tensor) else x for name, x in scales.items()}
    with pytest.raises(fg.ArgumentError, match=words):
        serving.append(step, engine.k, engine.v, engine.k_cache, engine.v_cache, **scales)
    with pytest.raises(fg.ArgumentError, match=words):
        serving.run(step, engine.q, engine.k_cache, engine.v_cache, **scales)


@pytest.mark.parametrize("count", [0, 3])
def test_another_dtype_of_results_is_refused_for_any_number_of_tokens(count: int) -> None:
    engine = Float8Engine([9, 30, 0][:count] or [9], [1, 1, 1][:count] or [1])
    step = serving.plan(
        *(engine.starts[: count + 1], engine.lengths[:count], engine.table[:count]),
        num_tokens=count,
        max_query_len=1,
    )
    codes = engine.q.to(torch.float8_e4m3fn)
    with pytest.raises(fg.ArgumentError, match=r"out_dtype=torch\.float32 is not supported"):
        serving.run(step, codes, engine.k_cache, engine.v_cache, out_dtype=torch.float32)

"""The page as text: it holds all it needs, and whatever it is given stays text."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import pipeline
from flashgen.arch import get_arch
from flashgen.cache import default_cache
from flashgen.compile import Binary, Resources

pytestmark = pytest.mark.usefixtures("own_cache")

HOSTILE = "</script><script>alert(1)</script>'\"><img src=x onerror=alert(1)>{{7*7}}<!--"
BENCH = {
    "schema": 1,
    "device": "a device",
    "rows": [
        {
            "algorithm": name, "pass": "forward", "dtype": "bf16", "head_dim": 64, "causal": True, "len": length,
            "batch": 1, "heads": 8, "ms": length / 1000, "tflops": 100.0 + length, "bytes": 2**20, "peer": peer,
        }
        for name, peer in (("fa2", False), ("another library", True))
        for length in (512, 1024)
    ],
}  # fmt: skip
ROOFLINE = {
    "schema": 1,
    "device": "a device",
    "ceilings": {"copy_gbps": 4000, "matrix_tflops": 800, "exp_gops": 3900},
    "kernels": [{"name": "fa2", "intensity": 100, "tflops": 90.5, "bound": "exp"}],
}


class Page(HTMLParser):
    """The elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def explained(**options: Any) -> fg.Explanation:
    return fg.explain(fg.AttentionSpec(64, mask=fg.causal()), 512, arch="sm_80", **options)


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_the_page_loads_nothing() -> None:
    page = Page(explained().html())
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "action", "data"}
    assert not any(name.startswith("on") for name in names)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in page.text
    assert "url(" not in page.text
    (policy,) = (value for name, value in page.attributes if name == "content" and "default-src" in str(value))
    assert str(policy).startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


def test_the_page_names_the_spec_the_kernels_and_their_reasons() -> None:
    text = Page(fg.explain(fg.AttentionSpec(128, mask=fg.causal()), 512, arch="sm_90a").html()).text
    for wanted in (
        "head_dim 128, bf16, causal", "forward_d128_causal_sm90a", "backward_main_d128_causal_sm90a",
        "because: the widest tile of keys", "What did not fit", "tile 128 x 64, stages 1",
        "Not compiled: forward, prepare, main, repair.",
        "flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_90a",
    ):  # fmt: skip
        assert wanted in text


def test_a_page_of_a_mask_alone_has_no_kernels() -> None:
    text = Page(fg.explain(lambda b, h, q, k: q >= k, 256).html()).text
    assert "mask q >= k" in text
    assert "Shared memory" not in text
    assert "flashgen build" not in text


def test_lengths_of_zero_make_a_page() -> None:
    assert "There is no tile: a length is 0." in Page(fg.explain(fg.causal(), 0, 64).html()).text


@pytest.mark.parametrize("len_q", [1, 100])
def test_a_page_of_an_8_bit_cache_is_of_the_kernel_that_the_call_runs(len_q: int) -> None:
    spec = fg.AttentionSpec(64, dtype="e4m3", mask=fg.causal(), direction="forward", cache="paged")
    texts = Page(fg.explain(spec, len_q, 600, arch="sm_90a").html()).texts
    facts = texts[texts.index("forward algorithm") :]
    assert ("Flash-Decoding" if len_q == 1 else "FA-3") in facts[:3]


def test_a_spec_whose_backward_pass_cannot_be_planned_has_a_page() -> None:
    text = Page(fg.explain(fg.AttentionSpec(256, dtype="fp32"), 256, arch="sm_75").html()).text
    assert "forward_d256" in text
    assert "backward" not in text


def test_registers_are_those_of_the_cache_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Any) -> Any:
        raise AssertionError("the page compiles")

    monkeypatch.setattr("flashgen.compile.compile_source", refuse)
    monkeypatch.setattr("flashgen.compile.compiler_build_id", lambda: "pretended")
    found = explained()
    assert "Not compiled: forward, prepare, main, finish." in Page(found.html()).text
    (plan,) = pipeline.plans(found.spec, None, [get_arch("sm_80")])
    forward = pipeline.sources(plan)["forward"]
    default_cache().get_or_compile(
        forward, lambda source: Binary(source.name, "sm_80", b"cubin", Resources(123, 8, 0, 0), 0.1, "")
    )
    page = found.html()
    assert '<td class="number">123</td><td class="number">8</td>' in page
    assert "Not compiled: prepare, main, finish." in Page(page).text


@pytest.mark.parametrize("name", ["mask", "score", "key_begin", "key_end", "query_begin", "query_end", "algorithm"])
def test_texts_of_an_explanation_stay_text(name: str) -> None:
    plain, hostile = explained(), dataclasses.replace(explained(), **{name: HOSTILE})
    for draw in (fg.Explanation.html, fg.Explanation._repr_html_):
        page = Page(draw(hostile))
        assert page.tags == Page(draw(plain)).tags
        assert page.attributes == Page(draw(plain)).attributes
    if name not in ("score", "algorithm"):
        assert HOSTILE in Page(hostile.html()).text


def test_texts_of_measurements_stay_text(tmp_path: Path) -> None:
    rows = [{**row, "algorithm": HOSTILE + row["algorithm"], "dtype": HOSTILE} for row in BENCH["rows"]]
    roofline = {**ROOFLINE, "device": HOSTILE, "kernels": [{**ROOFLINE["kernels"][0], "name": HOSTILE}]}

    def page(bench: Any, roofline: Any) -> Page:
        return Page(
            fg.lab.html_page(
                explained(),
                bench=fg.lab.read_bench(written(tmp_path / "bench.json", bench)),
                roofline=fg.lab.read_roofline(written(tmp_path / "roofline.json", roofline)),
            )
        )

    plain, hostile = page(BENCH, ROOFLINE), page({**BENCH, "device": HOSTILE, "rows": rows}, roofline)
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert hostile.text.count(HOSTILE) >= 8
    assert "fa2 reaches 90.5 TFLOP/s at 100 FLOP per byte; exponentials bind it." in plain.text
    assert "forward, bf16, head dimension 64, causal" in plain.text


def test_large_maps_are_binned_and_the_page_stays_small() -> None:
    blocks = np.random.default_rng(0).integers(0, 2, (256, 256)).astype(bool)
    found = fg.explain(fg.AttentionSpec(64, mask=fg.block_sparse(blocks, 64)), 256 * 64, arch="sm_80", tile=(64, 64))
    page = found.html()
    assert len(page.encode()) < 2**20
    assert "A cell is 4 x 4 tiles of 64 queries by 64 keys" in Page(page).text
    worst = np.indices((64, 64)).sum(axis=0) % 2 == 0
    checkered = fg.explain(fg.AttentionSpec(64, mask=fg.block_sparse(worst, 64)), 64 * 64, arch="sm_80", tile=(64, 64))
    assert checkered.empty == 2048
    assert len(checkered.html().encode()) < 2**20
    assert len(checkered._repr_html_().encode()) < 2**20


def test_the_traffic_table_is_that_of_the_io_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def _repr_html_(self) -> str:
            return "<table><tr><td>bytes moved</td></tr></table>"

    asked: list[Any] = []

    def io_model(spec: Any, len_q: int, len_kv: int, **options: Any) -> Found:
        asked.append((spec.head_dim, len_q, len_kv, options["arch"].name))
        return Found()

    monkeypatch.setattr("flashgen.lab.page.mechanics.io_model", io_model)
    page = explained().html()
    assert asked == [(64, 512, 512, "sm_80")]
    assert "<tr><td>bytes moved</td></tr>" in page
    assert "Traffic to device memory" in page


def test_a_spec_that_the_io_model_refuses_has_a_page_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def io_model(*sizes: Any, **options: Any) -> Any:
        raise fg.ArgumentError(f"{HOSTILE} has no model")

    monkeypatch.setattr("flashgen.lab.page.mechanics.io_model", io_model)
    assert f"Not modelled: {HOSTILE} has no model." in Page(explained().html()).text


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(fg.ArgumentError, match=r"explanation=3 is no Explanation; pass what fg\.explain returns"):
        fg.lab.html_page(3)  # type: ignore[arg-type]
    with pytest.raises(fg.ArgumentError, match=r"bench='x' is no Bench; pass what fg\.lab\.read_bench returns"):
        fg.lab.html_page(explained(), bench="x")  # type: ignore[arg-type]

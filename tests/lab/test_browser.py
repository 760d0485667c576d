"""The page in a real browser: opened from disk, without a network."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import flashgen as fg
from tests.lab.browser import Browser
from tests.lab.test_page import BENCH, HOSTILE, ROOFLINE, explained, written

pytestmark = pytest.mark.usefixtures("own_cache")

MASKS = {
    "full": fg.full(),
    "causal": fg.causal(),
    "causal from the top left": fg.causal("top-left"),
    "window": fg.window(300, 40),
    "both alignments": fg.window(500, 0) & fg.window(None, 64, align="top-left"),
    "an empty window": fg.window(0, 0) & fg.window(0, 0, align="top-left"),
}
RESULTS = ("processed", "naive_scores", "tile_scores", "relative_work", "flops", "workspace_saved", "tile_bytes")


def opened(browser: Browser, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    browser.open(path)


def type_into(browser: Browser, **values: int | str) -> None:
    """Set inputs of the estimator, and let it hear of them once."""
    browser.evaluate(f"""(() => {{
        const form = document.getElementById("estimator-inputs");
        for (const [name, value] of Object.entries({json.dumps(values)})) form.elements[name].value = value;
        form.dispatchEvent(new Event("input", {{ bubbles: true }}));
    }})()""")


def results(browser: Browser) -> dict[str, float]:
    values = browser.evaluate(f"""Object.fromEntries({json.dumps(RESULTS)}.map(
        (name) => [name, Number(document.getElementById("out-" + name).dataset.value)]))""")
    kinds = ("full", "partial")
    found = {
        kind: browser.evaluate(f"Number(document.querySelector('#tile-bar .{kind}').dataset.value)") for kind in kinds
    }
    return {**values, **found}


def test_the_page_opens_from_disk_without_complaint_or_request(browser: Browser, tmp_path: Path) -> None:
    bench = fg.lab.read_bench(written(tmp_path / "bench.json", BENCH))
    roofline = fg.lab.read_roofline(written(tmp_path / "roofline.json", ROOFLINE))
    opened(browser, tmp_path / "page.html", fg.lab.html_page(explained(), bench=bench, roofline=roofline))
    assert browser.evaluate("document.title") == "head_dim 64, bf16, causal"
    assert browser.requests == [(tmp_path / "page.html").as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_the_window_in_light_and_dark(browser: Browser, tmp_path: Path, width: int) -> None:
    colors = []
    for dark in (False, True):
        browser.look(width=width, dark=dark)
        opened(browser, tmp_path / "page.html", explained().html())
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        colors.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors[0] != colors[1]


def test_every_input_has_a_label_and_every_drawing_a_name(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", explained().html())
    assert browser.evaluate("[...document.querySelectorAll('input, select')].every((x) => x.labels.length === 1)")
    assert browser.evaluate("[...document.querySelectorAll('svg')].every((x) => x.getAttribute('aria-label'))")


@pytest.mark.parametrize("name", MASKS)
def test_the_estimator_computes_what_python_does(browser: Browser, tmp_path: Path, name: str) -> None:
    mask, drawn = MASKS[name], random.Random(name)
    opened(browser, tmp_path / "page.html", fg.explain(fg.AttentionSpec(64, mask=mask), 512, arch="sm_80").html())
    for _ in range(25):
        lengths = [drawn.choice([1, 2, drawn.randint(1, 300), drawn.randint(1, 5000)]) for _ in range(2)]
        tile = [drawn.choice([1, 16, 64, 128, drawn.randint(1, 300)]) for _ in range(2)]
        tile = [max(size, length // 256 + 1) for size, length in zip(tile, lengths, strict=True)]
        dim, dtype = drawn.randint(1, 256), drawn.choice(["bf16", "fp32"])
        names = ("len_q", "len_kv", "tile_q", "tile_kv", "head_dim", "head_dim_v")
        values = dict(zip(names, (*lengths, *tile, dim, dim), strict=True))
        type_into(browser, **values, dtype=dtype)
        expected = fg.lab.estimate(*lengths, *tile, mask=mask, head_dim=dim, dtype=dtype)
        assert results(browser) == {key: getattr(expected, key) for key in (*RESULTS, "full", "partial")}, values
    assert browser.complaints == []


def test_other_masks_keep_the_shares_of_the_map(browser: Browser, tmp_path: Path) -> None:
    found = fg.explain(fg.AttentionSpec(64, mask=fg.chunked(100)), 600, arch="sm_80", tile=(32, 32))
    opened(browser, tmp_path / "page.html", found.html())
    assert results(browser)["processed"] == found.partial + found.full
    type_into(browser, len_q=1200, len_kv=1200)
    share = (found.partial + found.full) / found.tiles
    assert results(browser)["processed"] / 38**2 == pytest.approx(share, abs=0.01)
    assert "shares of empty and partial tiles stay those of the map" in browser.evaluate("document.body.innerText")


def test_results_change_with_each_key_and_wrong_input_is_named(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", explained().html())
    browser.evaluate("(() => { const x = document.querySelector('[name=len_q]'); x.focus(); x.select(); })()")
    seen = []
    for digit in "1024":
        browser.call("Input.insertText", text=digit)
        seen.append(results(browser)["naive_scores"])
    assert seen == [512, 10 * 512, 102 * 512, 1024 * 512]
    browser.call("Input.insertText", text="99999")
    assert results(browser)["naive_scores"] == 1024 * 512
    error = browser.evaluate("document.getElementById('estimator-error').textContent")
    assert error == "queries: give a whole number from 1 to 1,048,576."
    assert browser.evaluate("document.querySelector('[name=len_q]').getAttribute('aria-invalid')") == "true"
    type_into(browser, len_q=2)
    assert browser.evaluate("document.getElementById('estimator-error').textContent") == ""


def readout(browser: Browser) -> list[str]:
    lines: list[str] = browser.evaluate("[...document.getElementById('readout').children].map((x) => x.textContent)")
    return lines


def test_the_pointer_shows_a_tiles_range_and_state(browser: Browser, tmp_path: Path) -> None:
    found = fg.explain(fg.AttentionSpec(64, mask=fg.window(200, 0)), 1000, arch="sm_80", tile=(64, 32))
    browser.look(width=1200, dark=False)
    opened(browser, tmp_path / "page.html", found.html())
    x, y, width, height = browser.evaluate("""(() => {
        const box = document.querySelector(".fg-cells").getBoundingClientRect();
        return [box.x, box.y, box.width, box.height];
    })()""")
    states = ("empty: skipped", "partial: pairs are tested", "full: no pair is tested")
    for q, k in ((0, 0), (500, 400), (999, 10), (999, 999), (700, 690)):
        browser.point(x + (k + 0.5) / 1000 * width, y + (q + 0.5) / 1000 * height)
        row, column = q // 64, k // 32
        assert readout(browser) == [
            f"queries {row * 64} to {min(row * 64 + 64, 1000) - 1}",
            f"keys {column * 32} to {min(column * 32 + 32, 1000) - 1}",
            states[found.kinds[row, column]],
        ]


def test_the_arrow_keys_move_over_the_map(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", explained(tile=(128, 64)).html())
    browser.evaluate("document.getElementById('tile-map').focus()")
    assert readout(browser)[:2] == ["queries 0 to 127", "keys 0 to 63"]
    for key in ("ArrowUp", "ArrowDown", "ArrowRight", "ArrowRight"):
        browser.press(key)
    assert readout(browser) == ["queries 128 to 255", "keys 128 to 191", "partial: pairs are tested"]
    browser.press("End")
    assert readout(browser) == ["queries 128 to 255", "keys 448 to 511", "empty: skipped"]


def test_a_cell_of_several_tiles_says_so(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", fg.explain(fg.causal(), 2**14, tile=(64, 64)).html())
    browser.evaluate("document.getElementById('tile-map').focus()")
    assert readout(browser) == ["queries 0 to 255", "keys 0 to 255", "partial, or a mixture of tiles", "4 × 4 tiles"]


def test_no_script_but_the_pages_own_runs(browser: Browser, tmp_path: Path) -> None:
    # Were some text not escaped, the page's policy would still keep a script from running.
    page = explained().html().replace("<main>", "<script>document.title = 'foreign'</script><main>")
    opened(browser, tmp_path / "page.html", page)
    assert browser.evaluate("document.title") == "head_dim 64, bf16, causal"
    assert any("Content Security Policy" in text for text in browser.complaints)


def test_hostile_names_are_shown_as_they_are(browser: Browser, tmp_path: Path) -> None:
    bench = written(tmp_path / "bench.json", {**BENCH, "device": HOSTILE})
    opened(browser, tmp_path / "page.html", fg.lab.html_page(explained(), bench=fg.lab.read_bench(bench)))
    assert f"Measured on {HOSTILE}." in browser.evaluate("document.body.innerText")
    assert browser.complaints == []

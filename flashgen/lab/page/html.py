"""``html_page(...)``: the page of an explanation as text."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flashgen.common.show import show
from flashgen.common.version import __version__
from flashgen.errors import ArgumentError
from flashgen.explanation import Explanation
from flashgen.lab.page.figures import bench_section, roofline_section
from flashgen.lab.page.measurements import Bench, Roofline
from flashgen.lab.page.mechanics import plan_section, traffic, whole_plan
from flashgen.lab.page.tiles import estimator_section, map_section

_HERE = Path(__file__).parent
_SCRIPTS = ("map.js", "estimator.js")


def html_page(explanation: Explanation, *, bench: Bench | None = None, roofline: Roofline | None = None) -> str:
    """One page of HTML for a spec: it needs no other file and no network, and it lets nothing be loaded.

    ``bench`` and ``roofline`` add plots of measurements that ``read_bench`` and ``read_roofline`` return.
    """
    for name, value, kind in (
        ("explanation", explanation, Explanation), ("bench", bench, Bench), ("roofline", roofline, Roofline),
    ):  # fmt: skip
        if not isinstance(value, kind) and (value is not None or name == "explanation"):
            source = "fg.explain" if kind is Explanation else f"fg.lab.read_{name}"
            raise ArgumentError(f"{name}={show(value)} is no {kind.__name__}; pass what {source} returns")
    plan = whole_plan(explanation)
    tiles, estimator = map_section(explanation), estimator_section(explanation)
    data = {"map": tiles.pop("data"), "estimator": estimator.pop("data")}
    script = "".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return _environment().get_template("page.html.j2").render(
        title=explanation.spec.describe() if plan else f"mask {explanation.mask}",
        target=f"{plan.arch.name} ({plan.arch.example})" if plan else "",
        version=__version__,
        style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        # Our own files, and the only script that the page's policy lets run.
        script=Markup(script),
        script_hash=_hash(script),
        data=data,
        **tiles,
        **estimator,
        plan=plan_section(plan) if plan else None,
        io=traffic(explanation) if plan else None,
        bench=bench_section(bench) if bench else None,
        roofline=roofline_section(roofline) if roofline else None,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode(), usedforsecurity=True).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

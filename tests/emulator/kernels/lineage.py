"""``check_lineage``: whole passes of the algorithms before FlashAttention-2, by kernels with or without bugs."""

from __future__ import annotations

from typing import Any

from flashgen import oracle
from tests.emulator.kernels.cached import Edits, edited

#: Algorithms whose kernels run through the launcher, which chooses among them.
WHOLE_PASSES = ("naive", "fa1", "grid1d", "grid2d")


def check_lineage(case: Any, edits: Edits, want: Any, *, at: str = "end", **options: Any) -> list[str]:
    """What is wrong after the passes of a case, as they are edited; ``want`` is what the oracle expects."""
    kernel = edited(case, edits)
    kernel.target.options = {**options, "guard": at}  # type: ignore[attr-defined]
    q, k, v, do = (want.inputs[name] for name in ("q", "k", "v", "dout"))
    given: dict[str, Any] = {"scale": want.scale} | ({"dropout": case.dropout} if case.dropout else {})
    results = kernel(q, k, v, **given)
    if case.spec.needs_backward:
        results += kernel.backward(do, q, k, v, *results, **given)
    found = []
    for name, result in zip(("o", "lse", "dq", "dk", "dv"), results, strict=False):
        bound = getattr(want.bounds, name)
        verdict = oracle.check(result, want.exact[name], bound, exact_infinity=name == "lse")
        if not verdict.ok:
            found.append(f"{name}: error {verdict.max_error:.3g}, bound {verdict.bound:.3g} {verdict.note}")
    return found

"""How a kernel computes its score: over logits or products, with which loads ahead, and with what kept in registers."""

from __future__ import annotations

from flashgen.plan.cache import PREFILL
from flashgen.plan.captured.prefetch import MAX_PREFETCH_BYTES_BACKWARD, prefetched_loads_of
from flashgen.plan.model.expressions import Expressions, ScoreForm
from flashgen.plan.model.plans import KernelPlan


def score_form(kernel: KernelPlan, expressions: Expressions) -> ScoreForm | None:
    """The form of the score in this kernel; None without a score."""
    if expressions.score is None:
        return None
    if kernel.algorithm == "FlashAttention-3" and kernel.role in ("forward", PREFILL):
        return _of_products(expressions)
    prefetches = "loads_ahead" in kernel.switches
    ahead = prefetched_loads_of(expressions, MAX_PREFETCH_BYTES_BACKWARD) if prefetches else ()
    return ScoreForm(expressions.score, expressions.slope, ahead=ahead)


def _of_products(expressions: Expressions) -> ScoreForm:
    """The form for products, which are logits before they are multiplied by the scale.

    Other kernels have no registers for constants, nor for two ways to compute a score.
    """
    from flashgen.expr import in_products, of_product

    score = expressions.score
    assert score is not None, "only a score has a form"
    ahead = prefetched_loads_of(expressions)
    value = in_products(score)
    if value is None:
        return ScoreForm(of_product(score), None, ahead, has_spare_registers=True)
    return ScoreForm(value, None, ahead, has_spare_registers=True, in_products=True)

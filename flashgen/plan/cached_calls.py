"""Which kernel of a plan a call with a cache runs. Launches and explanations both ask here."""

from __future__ import annotations

from typing import NamedTuple

from flashgen.plan.cache import DECODE, PREFILL
from flashgen.plan.decode.parts import PROMPT_QUERIES, prefers_decode
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Problem

#: No page boundary cuts a box of so many rows, which the prefill kernel copies.
_BOX_ROWS = 8


class CachedCall(NamedTuple):
    """What else decides, besides sizes."""

    #: Keys of a page; None: the cache is contiguous.
    page_size: int | None = None
    has_leftpad: bool = False
    #: Splits that the call asks for; 0: any number.
    splits: int = 0
    batch_invariant: bool = False

    @property
    def cuts_boxes(self) -> bool:
        """Whether a box of TMA that begins at some key may reach into another page."""
        return self.page_size is not None and self.has_leftpad


def attending_kernel(attention: AttentionPlan, problem: Problem, call: CachedCall) -> KernelPlan:
    """The kernel that reads the cache."""
    if attention.has("forward") and attention.has(DECODE):
        decode = attention.kernel(DECODE)
        if prefers_decode(decode, problem, batch_invariant=call.batch_invariant):
            return decode
    if attention.has(PREFILL) and _suits_prefill(problem, call):
        return attention.kernel(PREFILL)
    return attention.forward


def suits_boxes(kernel: KernelPlan, call: CachedCall) -> bool:
    """Whether this decode kernel suits the call. Else the plan for less aligned arguments has a kernel without boxes.

    A kernel that copies in boxes of TMA does not suit it if a page boundary may cut a box, or if a box holds a single
    key: an H200 reads pages of one key at 1.8 TB/s in boxes, and at 4.4 TB/s without.
    """
    return not (kernel.boxes and (call.cuts_boxes or call.page_size == 1))


def _suits_prefill(problem: Problem, call: CachedCall) -> bool:
    in_boxes = (call.page_size or 0) % _BOX_ROWS == 0 and not call.cuts_boxes
    return problem.len_q >= PROMPT_QUERIES and call.splits <= 1 and not call.batch_invariant and in_boxes

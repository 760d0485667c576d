"""What the score means for the backward kernels for Hopper."""

from __future__ import annotations

from flashgen.plan.captured.prefetch import MAX_PREFETCH_BYTES_BACKWARD, prefetched_loads_of
from flashgen.plan.expressions import expressions_of
from flashgen.plan.hopper.forward_traits import changes_scores
from flashgen.plan.hopper.units import is_block_sparse
from flashgen.spec import AttentionSpec


def has_slope(spec: AttentionSpec) -> bool:
    """Whether the score has slopes other than 1, which dS has for a factor and dV has not."""
    return changes_scores(spec) and spec.score is not None and not spec.score.only_adds


def loads_ahead(spec: AttentionSpec) -> bool:
    """Whether what the score loads for each pair comes while S is multiplied.

    By two neighboring keys in one load, rather than an element a load when the scores are there: at head_dim 64 17.2
    ms rather than 26.6, and at 128 13.0 rather than 17.4 (H200, 16,384 tokens). Block-sparse masks need the registers.
    """
    if is_block_sparse(spec) or not changes_scores(spec) or spec.score is None or not spec.score.traced.tensors:
        return False
    return bool(prefetched_loads_of(expressions_of(spec), MAX_PREFETCH_BYTES_BACKWARD))

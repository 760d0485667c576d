"""Cases for the decode kernel: few new tokens, many query heads for each head of keys, and lengths of any kind."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from flashgen.spec import AttentionSpec
from flashgen.verify.cases.case import Case
from flashgen.verify.cases.drawn import MOST_PAIRS, Tiles, draw

#: New tokens of most cases: one, guesses of a draft model, and the most that speculation has.
_TOKENS = (1, 1, 1, 2, 3, 4, 5, 8, 16)
#: Query heads for each head of keys: rows that fill a tile in part, a whole one, and more.
_GROUPS = (1, 1, 3, 4, 8, 16, 40)


def decode_cases_for(spec: AttentionSpec) -> tuple[Case, ...]:
    """The standard cases: edges of tiles of 16, 32 and 64 rows or keys, and heads whose keys several blocks share."""
    cases = [
        Case("one token", 1, 1),
        Case("a tile and a key", 1, 65, heads=4),
        Case("one key head for all", 1, 700, heads=40),
        Case("shared keys", 1, 1000, batch=2, heads=8, heads_kv=2, scale=0.3),
        Case("guesses", 4, 333, batch=3, heads=12, heads_kv=3),
        Case("sixteen tokens", 16, 150, heads=8, heads_kv=2),
        Case("more tokens than keys", 16, 5, heads=2, heads_kv=2),
        Case("no keys", 2, 0, batch=2, heads=2, heads_kv=2),
        Case("no tokens", 0, 20, heads=2, heads_kv=2),
        Case("large logits", 1, 200, heads=4, fill="large_logits"),
        Case("many sequences", 1, 70, batch=9, heads=2, heads_kv=1),
        Case("many keys", 1, 64 * 33 + 1, heads=2),
        Case("huge strides", 2, 90, batch=3, heads=4, heads_kv=2, layouts=("huge-batch-stride",) * 4),
    ]
    if not spec.mask.is_full:
        cases.append(Case("NaN where it must not reach", 7, 140, heads=4, fill="hidden_nan"))
    return tuple(cases)


def draw_decode(spec: AttentionSpec, tiles: Tiles, seed: int, index: int) -> Case:
    """Case number ``index`` of a seed: one of those for all kernels, with few new tokens."""
    case = draw(spec, tiles, seed, index)
    random = Random(f"decode {seed} {index}")
    tokens, group = random.choice(_TOKENS), random.choice(_GROUPS)
    keys = max(case.len_kv, random.choice((0, 0, 300, 700)))
    pairs = max(1, tokens * keys * case.heads_kv * group)
    batch = min(case.batch, max(1, MOST_PAIRS // pairs))
    if pairs > MOST_PAIRS:
        group = 1
    return replace(case, len_q=tokens, len_kv=keys, batch=batch, heads=case.heads_kv * group)

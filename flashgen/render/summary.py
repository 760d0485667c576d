"""What the comment at the top of a generated source says: the spec, the command for it, the plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from flashgen.plan.algorithm import why_not_fa3
from flashgen.plan.cache import PREFILL
from flashgen.plan.model.plans import KernelPlan, Role
from flashgen.render.amalgamation.amalgamate import COLUMN_LIMIT
from flashgen.spec.text.command import rebuild_command

_ROLES: dict[Role, str] = {
    "forward": "forward pass: O and the log-sum-exp of each row",
    "prefill": "forward pass of many new queries: O and the log-sum-exp of each row",
    "decode": "forward pass of few new queries: O and the log-sum-exp of each row",
    "scores": "forward pass, first: S = scale * Q K^T of all pairs",
    "softmax": "forward pass, second: P = softmax(S) and the log-sum-exp of each row",
    "ds": "backward pass: dS = P * (dO V^T - D)",
    "dv": "backward pass: dV = P^T dO",
    "dq": "backward pass: dQ = scale * dS K",
    "dk": "backward pass: dK = scale * dS^T Q",
    "prepare": "backward pass, first: D = rowsum(dO * O)",
    "main": "backward pass: dK and dV, and dQ where it is summed with atomics",
    "query": "backward pass: dQ, without atomics",
    "repair": "backward pass, last: tiles of gradients that NaN or infinity reached, pair by pair",
    "finish": "backward pass, last: dQ from the workspace",
    "captured_clear": "backward pass: what gradients of captured tensors are added to starts at zero",
    "captured_pairs": "backward pass: sums for the gradients of captured tensors, over all pairs",
    "captured_tile": "backward pass: the gradient of a captured tensor with an element for every pair",
    "captured_sink": "backward pass: sums for the gradients of captured tensors, over the sinks of all rows",
    "captured_store": "backward pass, last: gradients of captured tensors from their sums",
    "survey": "before either pass: the extremes of captured tensors",
    "append": "before a forward pass: new keys and values into the cache, turned by their positions, and so queries",
    "quantize": "before a forward pass: 16-bit queries, keys and values to e4m3, with a scale for each block of rows",
    "combine": "after a forward pass: O and the log-sum-exp of each row from those of its splits",
    "grid_maxima": "forward pass in three launches, first: the largest score of each row and tile of keys",
    "grid_products": "forward pass in three launches, second: P V and its row sums of each tile of keys",
    "grid_merge": "forward pass in three launches, last: O and the log-sum-exp of each row from all tiles of keys",
    "clear_gaps": "after either pass: zeros in rows of packed arrays that belong to no sequence",
}
#: Config members that the line about tiles names first.
_TILES = ("tile_q", "tile_kv", "stages", "q_stages", "k_stages", "v_stages", "do_stages", "warps")
_LABEL = 9


def summary(plan: KernelPlan) -> list[str]:
    """The lines of the comment, without the slashes."""
    # Roles of which there may be several are numbered.
    finishes = plan.role == "main" and (plan.sums is not None or plan.adds_in_order)
    what = "backward pass: dK, dV and dQ" if finishes else _ROLES[plan.role.rstrip("0123456789")]
    if plan.role == "forward" and "lse" not in plan.params.names:
        what = "forward pass, last: O = P V"
    title = f"{plan.name}: {plan.algorithm}, {what}."
    return [*_wrap(title), "", *_facts(plan)]


def header(plan: KernelPlan) -> str:
    """The comment itself, as the templates write it."""
    return "".join(f"// {line}".rstrip() + "\n" for line in summary(plan))


def _facts(plan: KernelPlan) -> Iterator[str]:
    # Imported on use: the module that reads and writes spec files brings msgspec with it.
    from flashgen.spec.text.files import spec_to_json

    # These two are to be copied, so they are never broken into lines.
    yield _labelled("spec", spec_to_json(plan.spec))
    yield _labelled("rebuild", rebuild_command(plan.spec, plan.schedule, plan.arch.name))
    yield from _paragraphs("for", [f"{plan.arch.name} ({plan.arch.example})"])
    yield from _paragraphs("plan", [_tiles(plan)])
    yield from _paragraphs("roles", list(_roles(plan)))
    yield from _paragraphs("grid", [_grid(plan)])
    yield from _shared_memory(plan)
    yield from _paragraphs("because", list(_reasons(plan)))


def _tiles(plan: KernelPlan) -> str:
    values = {c.name: c.value for c in plan.config}
    parts = [f"{name} {values[name]}" for name in _TILES if name in values]
    parts.append(f"{plan.threads} threads")
    if plan.min_blocks > 1:
        parts.append(f"registers for {plan.min_blocks} blocks per multiprocessor")
    return ", ".join(parts)


def _roles(plan: KernelPlan) -> Iterator[str]:
    """The roles of warpgroups, if they differ."""
    values = {c.name: c.value for c in plan.config}
    if not values.get("producer_registers"):
        return
    owned = "64 keys each" if plan.role == "main" else "64 queries each"
    if "p_stages" in values:
        owned = "dV and dK of the same 64 keys"
    if plan.role == "decode":
        copy = f"{values['producers']} warps copy tiles ({values['producer_registers']} registers a thread)"
        yield f"of 1 warpgroup {copy}; 2 compute, in turns ({values['consumer_registers']})"
        return
    consumers = int(values.get("consumers", 0)) or int(values["warps"]) // 4
    verb = "computes" if consumers == 1 else "compute"
    others, registers = _other_warps(plan), values["producer_registers"]
    yield (
        f"of 1 warpgroup one warp brings tiles{others} ({registers} registers a thread); "
        f"{consumers} {verb}, {owned} ({values['consumer_registers']})"
    )


def _other_warps(plan: KernelPlan) -> str:
    """What the other warps of the producer's warpgroup do."""
    if plan.role in ("forward", PREFILL):
        if plan.spec.element.is_eight_bit:
            return ", one chooses which ones, and two transpose V"
        if plan.spec.cache == "paged":
            return " of Q and K, one brings those of V, and one chooses which ones"
        return " and one chooses which ones"
    if plan.sums:
        return ", and three finish dQ"
    return ", two add dQ to its sum in order, and one finishes it" if plan.adds_in_order else ""


def _reasons(plan: KernelPlan) -> Iterator[str]:
    yield from plan.reasons
    if (reason := why_not_fa3(plan)) is not None:
        yield f"not FlashAttention-3: {reason}"


def _grid(plan: KernelPlan) -> str:
    if plan.fixed_blocks is not None:
        return f"{plan.fixed_blocks} blocks"
    if plan.grid_over == "flags":
        return f"one block for every {plan.grid_tile} tiles"
    if plan.grid_over in ("pairs", "scores"):
        heads = " of every head" if plan.grid_heads == "q" else ""
        sequences = " of every batch entry" if plan.grid_batch == "each" else ""
        together = "; all run at the same time" if plan.is_cooperative else ""
        return f"one block for every tile of pairs{heads}{sequences}{together}"
    if plan.grid_over == "heads":
        return f"one block for every {'query' if plan.grid_heads == 'q' else 'key/value'} head and batch entry"
    if plan.grid_heads == "all":
        return f"one block for every {plan.grid_tile} rows of every head of queries, keys and values, and batch entry"
    if plan.grid_heads == "one":
        return f"one block for every {plan.grid_tile} rows of all heads"
    rows = {"q": "query", "kv": "key"}[plan.grid_over]
    heads = {"q": "query", "kv": "key/value"}[plan.grid_heads]
    if plan.is_persistent:
        early = "; they start while the grid before them ends, and wait for it" if plan.overlaps_predecessor else ""
        return (
            f"no more blocks than run at once, {plan.min_blocks} on each multiprocessor; they take one tile after "
            f"another: {plan.grid_tile} {rows} rows of a {heads} head and batch entry{early}"
        )
    splits = ", for each split of the keys" if plan.grid_splits else ""
    rows = f"{rows} row" if plan.grid_tile == 1 else f"{plan.grid_tile} {rows} rows"
    return f"one block for every {rows} of every {heads} head and batch entry{splits}"


def _shared_memory(plan: KernelPlan) -> Iterator[str]:
    if plan.smem.regions:
        yield _labelled("smem", f"{plan.smem.bytes} bytes")


def _paragraphs(label: str, texts: tuple[str, ...] | list[str]) -> Iterator[str]:
    for text in texts:
        for line in _wrap(text, _LABEL):
            yield _labelled(label, line)
            label = ""


def _labelled(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _wrap(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, COLUMN_LIMIT - len("// ") - indent, break_long_words=False)

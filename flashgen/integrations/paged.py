"""transformers' continuous batching: layers attend to the pages of its cache.

transformers describes the keys of a step in one of two ways. If every sequence decodes one token, there is a table of
pages. Otherwise there is the index of each key in the cache, and the first key of each page gives the table. Layers
that keep a ring of keys for a sliding window have no pages, so transformers gathers their keys.
"""

from __future__ import annotations

import weakref
from importlib import import_module
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching import PagedAttentionCache

from flashgen import serving
from flashgen.spec import Sequences
from flashgen.torch.entry import attend
from flashgen.torch.options import Options
from flashgen.torch.program import Program

#: Options that only the cache reads.
OPTIONS = frozenset(
    [
        *("cache", "read_index", "write_index", "block_table", "k_cache", "v_cache"),
        *("logits_indices", "logits_processor_args"),
    ]
)
#: The names that flashgen is registered under.
_names: set[str] = set()
#: The step of each kind of layer. The first layer of a kind plans it, so that a CUDA graph also captures the planning.
_steps: weakref.WeakKeyDictionary[Any, dict[int, serving.Step]] = weakref.WeakKeyDictionary()


class PagedCall(NamedTuple):
    """The scale, mask and score of a layer."""

    scale: float | None
    program: Program
    captured: tuple[Any, ...]


def is_paged(options: dict[str, Any]) -> bool:
    """Whether continuous batching called the layer. From transformers 5.24 on, layers keep the cache to themselves."""
    return isinstance(options.get("cache"), PagedAttentionCache) or _has_updated(options)


def _has_updated(options: dict[str, Any]) -> bool:
    return "cache" not in options and options.get("write_index") is not None


@torch.compiler.disable
def attend_to_pages(module: Any, query: Any, key: Any, value: Any, options: dict[str, Any], call: PagedCall) -> Any:
    """The output ``(1, tokens, heads, head_dim)``. Also writes new keys and values into the cache."""
    if _has_updated(options):
        return _attend_after_update(query, key, value, options, call)
    allocator = options["cache"].layer_to_allocator[module.layer_idx]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if not allocator.supports_block_table:
        gathered = dict(options)
        key, value = options["cache"].update(key, value, module.layer_idx, gathered)
        return _packed(q, key[0].transpose(0, 1), value[0].transpose(0, 1), gathered, call)[None]
    step = _step(allocator, module.layer_idx, q.shape[0], options)
    k_pages, v_pages = allocator.get_cache_for_block_table(module.layer_idx)
    serving.append(step, k, v, k_pages, v_pages)
    if options["block_table"] is None and options["read_index"][allocator.index].numel() == 0:
        # No sequence has earlier keys: all are whole prompts, so k and v are complete.
        kind = allocator.layer_type
        lengths = {"cu_seq_lens_k": options["cu_seq_lens_k"][kind], "max_length_k": options["max_length_k"][kind]}
        return _packed(q, k, v, {**options, **lengths}, call)[None]
    return serving.attend_step(step, q, k_pages, v_pages, call.program, call.captured, call.scale)[None]


def _attend_after_update(query: Any, key: Any, value: Any, options: dict[str, Any], call: PagedCall) -> Any:
    """The same where the layer has called ``cache.update``.

    If there is a table of pages, ``update`` has only added the pages to the options, and this appends the new keys.
    Otherwise key and value are all keys and values of the requests.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    table = options.get("block_table")
    if table is None:
        return _packed(q, k, v, options, call)[None]
    k_pages, v_pages = options["k_cache"], options["v_cache"]
    step = _planned_tokens(table, options["cu_seq_lens_q"], options["cu_seq_lens_k"], q.shape[0], k_pages.shape[1])
    serving.append(step, k, v, k_pages, v_pages)
    return serving.attend_step(step, q, k_pages, v_pages, call.program, call.captured, call.scale)[None]


def _with_names(asks: Any) -> Any:
    """``is_flash_attention_requested``, which also returns True for the registered names."""

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        asked = requested_attention_implementation if config is None else config._attn_implementation
        return asked in _names or bool(asks(config, requested_attention_implementation, version))

    is_flash_attention_requested.replaced = asks  # type: ignore[attr-defined]
    return is_flash_attention_requested


def _with_functions(loads: Any) -> Any:
    """``lazy_import_flash_attention``, which for a registered name only returns a function for caches."""

    def lazy_import_flash_attention(implementation: str | None, *others: Any, **options: Any) -> Any:
        if implementation in _names:
            return (None, None, attend_to_pages, None, None), (dict, dict)
        return loads(implementation, *others, **options)

    lazy_import_flash_attention.replaced = loads  # type: ignore[attr-defined]
    return lazy_import_flash_attention


_REPLACED = {"is_flash_attention_requested": _with_names, "lazy_import_flash_attention": _with_functions}


def accept(name: str) -> None:
    """Makes continuous batching treat ``attn_implementation=name`` as flash attention.

    It accepts a fixed list of names and has no registry. So this replaces the functions by which it checks for flash
    attention, in the modules that call them. Releases without these functions are left unchanged.
    """
    _names.add(name)
    for importer in ("continuous_api", "initialization", "cache"):
        try:
            module = import_module(f"transformers.generation.continuous_batching.{importer}")
        except ImportError:
            continue
        for function, replace in _REPLACED.items():
            present = getattr(module, function, None)
            if present is not None and not hasattr(present, "replaced"):
                setattr(module, function, replace(present))


def _step(allocator: Any, layer_idx: int, tokens: int, options: dict[str, Any]) -> serving.Step:
    steps = _steps.setdefault(options["cache"], {})
    if layer_idx == allocator.layer_indices[0]:
        steps[allocator.index] = _planned(allocator, tokens, options)
    return steps[allocator.index]


def _planned(allocator: Any, tokens: int, options: dict[str, Any]) -> serving.Step:
    starts_q, starts_k = options["cu_seq_lens_q"], options["cu_seq_lens_k"][allocator.layer_type]
    size = allocator.tokens_per_page
    if options["block_table"] is not None:
        return _planned_tokens(options["block_table"][allocator.index], starts_q, starts_k, tokens, size)
    places, slots = options["read_index"][allocator.index], options["write_index"][allocator.index]
    columns = -(-int(options["max_length_k"][allocator.layer_type]) // size)
    first = starts_k[:-1, None] + torch.arange(0, columns * size, size, device=starts_k.device)
    sizes = {"num_tokens": tokens, "max_query_len": options["max_length_q"], "page_size": size}
    return serving.plan(starts_q, starts_k.diff(), _pages(places, first, size), slots, **sizes)


def _planned_tokens(table: Any, starts_q: Any, starts_k: Any, tokens: int, size: int) -> serving.Step:
    """The step of one new token for each sequence."""
    # Sequences that pad the batch have no keys, and pages that do not exist.
    lengths = starts_k.diff()
    last = (lengths - 1).clamp(min=0)
    page = table.gather(1, (last // size)[:, None].long())[:, 0]
    slots = torch.where(lengths > 0, page * size + last % size, -1)
    return serving.plan(starts_q, lengths, table, slots, num_tokens=tokens, max_query_len=1, page_size=size)


def _pages(places: Any, first: Any, size: int) -> Any:
    """The page of the key at each index in ``first``. Entries beyond a sequence are never read."""
    if not places.numel():
        return torch.zeros_like(first)
    return places[first.clamp(max=places.shape[0] - 1)] // size


def _packed(q: Any, k: Any, v: Any, options: dict[str, Any], call: PagedCall) -> Any:
    """Attention to packed keys."""
    longest = int(options["max_length_q"]), int(options["max_length_k"])
    sequences = Sequences(options["cu_seq_lens_q"].int(), options["cu_seq_lens_k"].int(), *longest)
    out, _ = attend(q, k, v, call.program, call.captured, Options(call.scale, None, 0.0, sequences))
    return out

"""The options that describe a kernel: declared once, taken by every command that needs a kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Option

from flashgen.cli.request import Request, make_request

SPEC = "Spec: what to compute"
SCHEDULE = "Schedule: how (what is left out is chosen)"


def _option(panel: str, name: str, help: str, metavar: str | None = None) -> Any:
    return Option(name, help=help, metavar=metavar, rich_help_panel=panel)


def kernel_options(
    head_dim: Annotated[int | None, _option(SPEC, "--head-dim", "Length of query and key vectors, 1 to 256.")] = None,
    head_dim_v: Annotated[int | None, _option(SPEC, "--head-dim-v", "Length of value vectors, if different.")] = None,
    dtype: Annotated[str | None, _option(SPEC, "--dtype", "bf16 (default), fp16, fp32 or e4m3.", "NAME")] = None,
    causal: Annotated[bool, _option(SPEC, "--causal", "No query attends to a later key (bottom-right).")] = False,
    window: Annotated[
        list[str] | None,
        _option(
            SPEC,
            "--window",
            "Keys before and after a query's own; -1 is no limit. ALIGN: bottom-right (default) or top-left. "
            "Repeatable; masks intersect.",
            "LEFT,RIGHT[,ALIGN]",
        ),
    ] = None,
    mask: Annotated[
        str | None, _option(SPEC, "--mask", "A condition of b, h, q, k and captured names: 'k < n\\[b]'.", "TEXT")
    ] = None,
    score: Annotated[
        str | None, _option(SPEC, "--score", "What the softmax takes for a logit s: 'tanh(s / cap) * cap'.", "TEXT")
    ] = None,
    sink: Annotated[
        str | None, _option(SPEC, "--sink", "A logit in every row's softmax, without a value: 'logits\\[h]'.", "TEXT")
    ] = None,
    captured: Annotated[
        list[str] | None,
        _option(
            SPEC,
            "--captured",
            "A number, or a tensor's element type and rank, that the texts use. Repeatable.",
            "NAME=VALUE|TYPE[RANK]",
        ),
    ] = None,
    forward_only: Annotated[bool, _option(SPEC, "--forward-only", "Leave the backward pass out.")] = False,
    deterministic: Annotated[bool, _option(SPEC, "--deterministic", "Make the backward pass reproducible.")] = False,
    dropout: Annotated[bool, _option(SPEC, "--dropout", "Drop pairs; each call sets the probability.")] = False,
    varlen: Annotated[bool, _option(SPEC, "--varlen", "Packed sequences of different lengths.")] = False,
    cache: Annotated[
        str | None, _option(SPEC, "--cache", "Keys and values lie in a cache; forward only.", "contiguous|paged")
    ] = None,
    cache_dtype: Annotated[
        str | None, _option(SPEC, "--cache-dtype", "8-bit keys and values in the cache.", "e4m3|e5m2")
    ] = None,
    page_scales: Annotated[bool, _option(SPEC, "--page-scales", "Each page of the cache has a scale.")] = False,
    qv: Annotated[
        bool, _option(SPEC, "--qv", "Values are part of the keys: latent attention to a cache, --head-dim-v to 512.")
    ] = False,
    out_dtype: Annotated[str | None, _option(SPEC, "--out-dtype", "Dtype of O for --dtype e4m3.", "bf16|fp16")] = None,
    scale_block: Annotated[
        int | None, _option(SPEC, "--scale-block", "Rows that share a scale, for --dtype e4m3.", "64|128")
    ] = None,
    decode: Annotated[
        bool,
        _option(SPEC, "--decode", "Steps of few new tokens, by the decode kernel; --cache is paged if it is left out."),
    ] = False,
    spec: Annotated[Path | None, _option(SPEC, "--spec", "Read the spec from a file instead.", "FILE.toml")] = None,
    tile_q: Annotated[int | None, _option(SCHEDULE, "--tile-q", "Query rows per block.")] = None,
    tile_kv: Annotated[int | None, _option(SCHEDULE, "--tile-kv", "Keys per step.")] = None,
    stages: Annotated[int | None, _option(SCHEDULE, "--stages", "Depth of the key/value ring, 1 to 4.")] = None,
    warps: Annotated[int | None, _option(SCHEDULE, "--warps", "Warps per block: 1, 2, 4, 8 or 16.")] = None,
    warp_partition: Annotated[
        str | None,
        _option(
            SCHEDULE,
            "--warp-partition",
            "Warps own query rows or key columns, or some copy and others compute (fa3).",
            "split-q|split-k|specialized",
        ),
    ] = None,
    consumers: Annotated[int | None, _option(SCHEDULE, "--consumers", "Warpgroups that compute, 1 to 3 (fa3).")] = None,
    algorithm: Annotated[
        str | None,
        _option(
            SCHEDULE,
            "--algorithm",
            "fa2 in both passes (all GPUs), fa3 forward (sm_90a), or one to compare with.",
            "standard|naive|fa1|grid1d|grid2d|fa2|fa3",
        ),
    ] = None,
    softmax: Annotated[
        str | None,
        _option(SCHEDULE, "--softmax", "What exponentials are relative to (fa3).", "reference-max|running-max"),
    ] = None,
    registers: Annotated[
        str | None,
        _option(SCHEDULE, "--registers", "Registers per thread, multiples of 8 (fa3).", "PRODUCERS,CONSUMERS"),
    ] = None,
    backward_tile_q: Annotated[
        int | None, _option(SCHEDULE, "--backward-tile-q", "As --tile-q, in the backward pass.")
    ] = None,
    backward_tile_kv: Annotated[
        int | None, _option(SCHEDULE, "--backward-tile-kv", "As --tile-kv, in the backward pass.")
    ] = None,
    backward_stages: Annotated[
        int | None, _option(SCHEDULE, "--backward-stages", "As --stages, in the backward pass.")
    ] = None,
    backward_warps: Annotated[
        int | None, _option(SCHEDULE, "--backward-warps", "As --warps, in the backward pass.")
    ] = None,
    arch: Annotated[
        list[str] | None,
        _option(
            SCHEDULE,
            "--arch",
            "GPU generation; repeatable. Default: the GPU found, else sm_80, sm_90a.",
            "NAME",
        ),
    ] = None,
) -> Request:
    """The request that these options make."""
    return make_request(
        spec_options={
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "dtype": dtype,
            "causal": causal,
            "window": window or [],
            "mask": mask,
            "score": score,
            "sink": sink,
            "captured": captured or [],
            "forward_only": forward_only,
            "deterministic": deterministic,
            "dropout": dropout,
            "varlen": varlen,
            "cache": cache,
            "cache_dtype": cache_dtype,
            "page_scales": page_scales,
            "qv": qv,
            "out_dtype": out_dtype,
            "scale_block": scale_block,
        },
        spec_file=spec,
        forward={
            "tile_q": tile_q,
            "tile_kv": tile_kv,
            "stages": stages,
            "warps": warps,
            "warp_partition": warp_partition,
            "consumers": consumers,
            "algorithm": algorithm,
            "softmax": softmax,
            "registers": registers,
        },
        backward={
            "tile_q": backward_tile_q,
            "tile_kv": backward_tile_kv,
            "stages": backward_stages,
            "warps": backward_warps,
        },
        arch_names=arch or [],
        decode=decode,
    )


def with_kernel_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is a Request, as one that takes the kernel options in its place."""
    shared = inspect.signature(kernel_options).parameters
    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(kernel_options, include_extras=True) | get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        request = kernel_options(**{name: values.pop(name) for name in shared})
        command(request, **values)

    # typer reads both; positions do not matter, since it passes every value by name.
    parameters = [*shared.values(), *own]
    wrapper.__annotations__ = {p.name: hints[p.name] for p in parameters} | {"return": None}
    wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    return wrapper

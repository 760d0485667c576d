"""``flashgen bench``: times on this machine's GPU, beside other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit as Leave
from typer import Option

from flashgen.cli.exits import Exit, UsageError
from flashgen.cli.option_names import arguments_are_options
from flashgen.cli.output import talk

if TYPE_CHECKING:
    from flashgen.spec.schedule import Algorithm

WHAT = "What to time"
HOW = "How to time"
OUTPUT = "Output"


def bench(
    algorithms: Annotated[
        str | None,
        Option(
            "--algorithms",
            help="flashgen's algorithms: standard, naive, fa1, grid1d, grid2d, fa2, fa3; default all.",
            metavar="LIST",
            rich_help_panel=WHAT,
        ),
    ] = None,
    peers: Annotated[
        str,
        Option(
            "--peers",
            help="Other libraries: torch-math, torch-efficient, torch-cudnn, torch-flash, flex, flash-attn, "
            "flash-attn-3, flash-attn-4, numpy; default auto, all that are installed.",
            metavar="auto|none|LIST",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    lengths: Annotated[
        str, Option("--lengths", help="Sequence lengths; default 512,1k,2k,4k.", metavar="LIST", rich_help_panel=WHAT)
    ] = "512,1k,2k,4k",
    head_dims: Annotated[
        str, Option("--head-dims", help="Head dimensions; default 64,128.", metavar="LIST", rich_help_panel=WHAT)
    ] = "64,128",
    dtype: Annotated[
        str, Option("--dtype", help="bf16, fp16 or fp32; default bf16.", metavar="NAME", rich_help_panel=WHAT)
    ] = "bf16",
    masks: Annotated[
        str, Option("--masks", help="full, causal; default both.", metavar="LIST", rich_help_panel=WHAT)
    ] = "full,causal",
    decode: Annotated[
        bool,
        Option("--decode", help="Time steps of few new tokens and a cache of --lengths keys.", rich_help_panel=WHAT),
    ] = False,
    new_tokens: Annotated[int, Option("--new-tokens", help="With --decode; default 1.", rich_help_panel=WHAT)] = 1,
    heads_kv: Annotated[
        int | None,
        Option("--heads-kv", help="With --decode: heads of keys; default --heads / 4.", rich_help_panel=WHAT),
    ] = None,
    cache_dtype: Annotated[
        str | None,
        Option(
            "--cache-dtype",
            help="With --decode: flashgen's cache is in 8 bits.",
            metavar="e4m3|e5m2",
            rich_help_panel=WHAT,
        ),
    ] = None,
    page_size: Annotated[
        int | None, Option("--page-size", help="With --decode: keys of a page; default 64.", rich_help_panel=WHAT)
    ] = None,
    page_scales: Annotated[
        bool, Option("--page-scales", help="With --cache-dtype: each page has scales.", rich_help_panel=WHAT)
    ] = False,
    window: Annotated[
        int | None,
        Option(
            "--window",
            help="With --decode: keys before its own position that a token attends to; default all.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    ragged: Annotated[
        bool,
        Option("--ragged", help="With --decode: caches are full up to even shares of a length.", rich_help_panel=WHAT),
    ] = False,
    backward: Annotated[bool, Option("--backward", help="Time the backward pass, too.", rich_help_panel=WHAT)] = False,
    batch: Annotated[
        int | None,
        Option("--batch", help="Batch size; default --tokens / length, or 64 with --decode.", rich_help_panel=WHAT),
    ] = None,
    heads: Annotated[
        int | None,
        Option("--heads", help="Heads; default 2048 / head dimension, or 32 with --decode.", rich_help_panel=WHAT),
    ] = None,
    tokens: Annotated[int, Option("--tokens", help="Tokens in a batch; default 16384.", rich_help_panel=WHAT)] = 16384,
    rounds: Annotated[
        int, Option("--rounds", help="Rounds of timing for each case; default 5.", rich_help_panel=HOW)
    ] = 5,
    milliseconds: Annotated[
        int, Option("--milliseconds", help="GPU time of each candidate in a round; default 25.", rich_help_panel=HOW)
    ] = 25,
    json: Annotated[
        Path | None,
        Option("--json", help="Write all measurements to this file.", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    plots: Annotated[
        Path | None,
        Option("--plots", help="Draw plots into this directory, as SVG.", metavar="DIR", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Time attention on this GPU: flashgen's algorithms and other libraries, interleaved in one run."""
    from flashgen.lab.bench.grid import cases, decode_cases, parse_lengths, parse_numbers
    from flashgen.lab.bench.on_gpu import first_gpu, time_algorithms
    from flashgen.lab.bench.run import Effort
    from flashgen.lab.bench.timings import write_json
    from flashgen.lab.plotting import require_matplotlib

    if not 1 <= rounds <= 1000 or not 1 <= milliseconds <= 10**6:
        raise UsageError("--rounds takes 1 to 1000, and --milliseconds 1 to 1000000")
    if decode and (backward or algorithms is not None):
        raise UsageError("--decode does not go with --backward and --algorithms; leave these out")
    of_steps = {
        "--heads-kv": heads_kv is not None,
        "--new-tokens": new_tokens != 1,
        "--cache-dtype": cache_dtype is not None,
        "--page-size": page_size is not None,
        "--page-scales": page_scales,
        "--window": window is not None,
        "--ragged": ragged,
    }
    if not decode and any(of_steps.values()):
        name = next(name for name, given in of_steps.items() if given)
        raise UsageError(f"{name} is for --decode; add it, or leave it out")
    if page_scales and cache_dtype is None:
        raise UsageError("--page-scales needs an 8-bit cache; add --cache-dtype e4m3")
    with arguments_are_options():
        sizes = parse_lengths(lengths), parse_numbers("head_dims", head_dims)
        how: dict[str, Any] = {"dtype": dtype, "batch": batch, "heads": heads}
        if decode:
            how |= {"new_tokens": new_tokens, "heads_kv": heads_kv, "cache_dtype": cache_dtype, "window": window}
            how |= {"page_size": 64 if page_size is None else page_size, "page_scales": page_scales, "ragged": ragged}
            wanted = decode_cases(*sizes, **how)
        else:
            how["masks"] = [word.strip() for word in masks.split(",")]
            wanted = cases(*sizes, **how, passes=("forward", "backward") if backward else ("forward",), tokens=tokens)
        ours, others = parse_algorithms(algorithms), _peers(peers)
    if plots is not None:
        require_matplotlib()
    gpu = first_gpu()
    with talk.progress(f"timing on {gpu.name}", len(wanted)) as update:
        timings = time_algorithms(
            wanted,
            ours,
            others,
            effort=Effort(rounds, float(milliseconds)),
            progress=update,
            finished=lambda found: write_json(found.as_dict(), json) if json else None,
        )
    talk.print_text(str(timings))
    if plots is not None:
        from flashgen.lab.bench.plots import draw

        for path in draw(timings, plots):
            talk.say(f"drawn: {path}")
    if timings.wrong:
        talk.fail(f"{len(timings.wrong)} results are wrong, and were not timed")
        raise Leave(Exit.CHECK_FAILED)


def parse_algorithms(text: str | None) -> tuple[Algorithm, ...]:
    """The algorithms of a list; all if there is none."""
    from flashgen.spec.schedule import ALGORITHMS

    if text is None:
        return ALGORITHMS
    names = dict.fromkeys(word.strip() for word in text.split(","))
    for name in names:
        if name not in ALGORITHMS:
            raise UsageError(f"--algorithms {name} is unknown; use some of {','.join(ALGORITHMS)}")
    return tuple(name for name in ALGORITHMS if name in names)


def _peers(text: str) -> tuple[str, ...]:
    from flashgen.lab.bench.peers import check_peers, installed

    if text == "none":
        return ()
    return installed() if text == "auto" else check_peers(word.strip() for word in text.split(","))

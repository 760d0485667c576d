"""``flashgen bench``: times on this machine's GPU, beside other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit as Leave
from typer import Option

from flashgen.cli.exits import Exit, UsageError
from flashgen.cli.gpu.arrays import Gpu, find_gpus
from flashgen.cli.option_names import arguments_are_options
from flashgen.cli.output import talk
from flashgen.errors import NoGpuError

if TYPE_CHECKING:
    from flashgen.lab.bench.candidate import Candidate
    from flashgen.lab.bench.case import Case
    from flashgen.lab.timing.device import Device
    from flashgen.spec.schedule import Algorithm

WHAT = "What to time"
HOW = "How"
OUTPUT = "Output"
DEFAULT_LENGTHS = "512,1k,2k,4k"


def bench(
    algorithms: Annotated[
        str | None,
        Option(
            "--algorithms",
            help="flashgen's, in a list: standard,naive,fa1,grid1d,grid2d,fa2,fa3. Default: all.",
            metavar="LIST",
            rich_help_panel=WHAT,
        ),
    ] = None,
    peers: Annotated[
        str,
        Option(
            "--peers",
            help="Other libraries: all that are installed (auto), none, or a list: torch-math, torch-efficient, "
            "torch-cudnn, torch-flash, flex, flash-attn, flash-attn-3, flash-attn-4, numpy.",
            metavar="auto|none|LIST",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    lengths: Annotated[
        str, Option("--lengths", help="Sequence lengths; k is 1024.", metavar="LIST", rich_help_panel=WHAT)
    ] = DEFAULT_LENGTHS,
    head_dims: Annotated[
        str, Option("--head-dims", help="Head dims.", metavar="LIST", rich_help_panel=WHAT)
    ] = "64,128",
    dtype: Annotated[
        str, Option("--dtype", help="bf16 (default), fp16 or fp32.", metavar="NAME", rich_help_panel=WHAT)
    ] = "bf16",
    masks: Annotated[
        str, Option("--masks", help="full, causal, or both in a list.", metavar="LIST", rich_help_panel=WHAT)
    ] = "full,causal",
    backward: Annotated[bool, Option("--backward", help="The backward pass, too.", rich_help_panel=WHAT)] = False,
    batch: Annotated[
        int | None, Option("--batch", help="Sequences; default --tokens / length.", rich_help_panel=WHAT)
    ] = None,
    heads: Annotated[
        int | None, Option("--heads", help="Heads; default 2048 / head dim.", rich_help_panel=WHAT)
    ] = None,
    tokens: Annotated[int, Option("--tokens", help="Tokens of a batch; default 16384.", rich_help_panel=WHAT)] = 16384,
    rounds: Annotated[int, Option("--rounds", help="Rounds of each case; default 5.", rich_help_panel=HOW)] = 5,
    milliseconds: Annotated[
        int, Option("--milliseconds", help="Of each candidate in a round; default 25.", rich_help_panel=HOW)
    ] = 25,
    json: Annotated[
        Path | None, Option("--json", help="Write every figure here.", metavar="FILE", rich_help_panel=OUTPUT)
    ] = None,
    plots: Annotated[
        Path | None, Option("--plots", help="Draw plots here (SVG).", metavar="DIR", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Time attention on this GPU: flashgen's algorithms and other libraries, interleaved in one run."""
    from flashgen.lab.bench.grid import cases, parse_lengths, parse_numbers
    from flashgen.lab.bench.run import Plan, time_attention
    from flashgen.lab.bench.timings import write_json
    from flashgen.lab.plotting import require_matplotlib

    if not 1 <= rounds <= 1000 or not 1 <= milliseconds <= 10**6:
        raise UsageError("--rounds takes 1 to 1000, and --milliseconds 1 to 1000000")
    with arguments_are_options():
        wanted = cases(
            parse_lengths(lengths),
            parse_numbers("head_dims", head_dims),
            dtype=dtype,
            masks=masks.split(","),
            passes=("forward", "backward") if backward else ("forward",),
            batch=batch,
            heads=heads,
            tokens=tokens,
        )
        ours, others = parse_algorithms(algorithms), _peers(peers)
    if plots is not None:
        require_matplotlib()
    gpu = gpu_or_advice(wanted[0])
    device, others = _with_peers(gpu, others)
    with talk.progress(f"timing on {gpu.name}", len(wanted)) as update:
        timings = time_attention(
            wanted,
            _candidates(ours, others, gpu),
            device,
            plan=Plan(rounds, float(milliseconds)),
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


def gpu_or_advice(case: Case) -> Gpu:
    """The first GPU; a NoGpuError that says what can be done without one."""
    gpus = find_gpus()
    if not gpus:
        raise NoGpuError(
            "there is no GPU here to time on; the emulator counts bytes instead: "
            f"flashgen io --count --len {min(case.len, 512)} --head-dim {case.head_dim}"
        )
    return gpus[0]


def _with_peers(gpu: Gpu, others: tuple[Candidate, ...]) -> tuple[Device, tuple[Candidate, ...]]:
    """The GPU, with torch's tensors if torch runs there; and the peers that can use them."""
    from flashgen.lab.timing.device import GpuDevice

    on_gpu = [candidate.name for candidate in others if candidate.device is None]
    if on_gpu:
        from flashgen.lab.timing.torch_device import TorchDevice, sees_gpus

        if sees_gpus():
            return TorchDevice(gpu), others
        talk.warn(f"the installed torch runs on no GPU, so {', '.join(on_gpu)} are left out")
    return GpuDevice(gpu), tuple(candidate for candidate in others if candidate.device is not None)


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


def _peers(text: str) -> tuple[Candidate, ...]:
    from flashgen.lab.bench.peers import installed, peers

    if text == "none":
        return ()
    return peers(installed() if text == "auto" else [word.strip() for word in text.split(",")])


def _candidates(ours: tuple[Any, ...], others: tuple[Candidate, ...], gpu: Gpu) -> tuple[Candidate, ...]:
    from flashgen.arch import arch_for_capability
    from flashgen.lab.bench.ours import algorithms

    return (*algorithms(ours, arch_for_capability(gpu.capability)), *others)

"""``flashgen io``: bytes to and from device memory, modeled and counted."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from flashgen.cli.commands.builder import check_decode, plan_all
from flashgen.cli.exits import UsageError
from flashgen.cli.gpu.arrays import archs_to_build, find_gpus
from flashgen.cli.options import with_kernel_options
from flashgen.cli.output import talk
from flashgen.cli.request import Request, decode_lengths
from flashgen.errors import ArgumentError

CALL = "Call"
VIEW = "View"


@with_kernel_options
def io(
    request: Request,
    len_q: Annotated[
        int | None,
        Option("--len", "--len-q", help="Queries; default 1024, or 1 with --decode.", rich_help_panel=CALL),
    ] = None,
    len_kv: Annotated[
        int | None,
        Option("--len-kv", help="Keys; default --len, or 4096 with --decode.", rich_help_panel=CALL),
    ] = None,
    batch: Annotated[int, Option("--batch", help="Sequences; default 1.", rich_help_panel=CALL)] = 1,
    heads: Annotated[int, Option("--heads", help="Heads of queries; default 1.", rich_help_panel=CALL)] = 1,
    heads_kv: Annotated[
        int | None, Option("--heads-kv", help="Heads of keys; default --heads.", rich_help_panel=CALL)
    ] = None,
    backward: Annotated[bool, Option("--backward", help="The backward pass.", rich_help_panel=CALL)] = False,
    multiprocessors: Annotated[
        int,
        Option("--multiprocessors", help="Of the GPU; the decode kernel splits keys by them.", rich_help_panel=CALL),
    ] = 132,
    sram: Annotated[
        str | None,
        Option(
            "--sram",
            help="On-chip memory of a block, as 192KiB; default the most that the GPU gives one.",
            metavar="SIZE",
            rich_help_panel=CALL,
        ),
    ] = None,
    count: Annotated[
        bool, Option("--count", help="Run the kernels on the emulator and count, too.", rich_help_panel=VIEW)
    ] = False,
    json: Annotated[bool, Option("--json", help="Print one JSON object on stdout.", rich_help_panel=VIEW)] = False,
) -> None:
    """Say how many bytes each algorithm moves to and from device memory."""
    from flashgen.lab import count_io, io_model, memory

    if backward and not request.spec.needs_backward:
        raise UsageError("--backward needs kernels of the backward pass; leave --forward-only out")
    arch = archs_to_build(request.archs, find_gpus() if not request.archs else (), request.spec)[0]
    check_decode(request, plan_all(request.spec, request.schedule, [arch]))
    len_q, len_kv = decode_lengths(request, len_q, len_kv)
    call: dict[str, Any] = {"batch": batch, "heads": heads, "heads_kv": heads_kv}
    call |= {"arch": arch, "schedule": request.schedule}
    pass_: Any = "backward" if backward else "forward"
    spec = request.spec
    model = io_model(spec, len_q, len_kv, **call, sram=_bytes(sram), pass_=pass_, multiprocessors=multiprocessors)
    counted = count_io(spec, len_q, len_kv, **call, pass_=pass_) if count else None
    needed = None if spec.tensors or spec.cache else memory(spec, len_q, len_kv, **call)
    if json:
        found: dict[str, Any] = {"schema": 1, **model.as_dict()}
        found |= {} if needed is None else {"memory": needed.as_dict()}
        talk.print_json(found | ({} if counted is None else {"count": counted.as_dict()}))
        return
    parts = (model, needed, counted)
    talk.print_text("\n\n".join(str(part) for part in parts if part is not None))


def _bytes(text: str | None) -> int | None:
    from flashgen.lab.text import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ArgumentError as error:
        raise UsageError(f"--sram {error}") from None

"""``flashgen doctor``: is everything here that flashgen needs, and what to do if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from flashgen.cli.commands.finding import Finding
from flashgen.cli.exits import Exit
from flashgen.cli.output import talk

STYLES = {"missing": "yellow", "broken": "red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check this machine; exit code 1 if something that building needs is broken."""
    findings = list(examine())
    ok = all(finding.status != "broken" for finding in findings)
    if json:
        talk.print_json({"schema": 1, "ok": ok, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    if not ok:
        raise typer.Exit(Exit.CHECK_FAILED)


def _print(findings: list[Finding]) -> None:
    rows = [(f.subject, f.status, "\n".join([f.detail, *([f"-> {f.remedy}"] if f.remedy else [])])) for f in findings]
    talk.print_rows(rows, styles=STYLES)


def examine() -> Iterator[Finding]:
    """Every check in turn; one that fails in an unforeseen way is a finding too."""
    from flashgen.cli.commands.checkup import CHECKS

    for subject, check in CHECKS.items():
        yield _examined(subject, check)


def _examined(subject: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a diagnosis that dies of the disease helps nobody
        return Finding(subject, "broken", f"{type(error).__name__}: {error}", "see the message")

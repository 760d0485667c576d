"""Ask the GPU: ``python tests/device/record.py [--out DIRECTORY] [--only TEXT]``.

Writes one file per family with the answers, as far as there are any, and ends with 1 when a kernel did not compile,
failed or hung. Without ``--out`` the files go where the tests read them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# From a checkout without an installation, too.
sys.path[:0] = [str(_HERE), str(_HERE.parents[1])]

from conformance.case import Case  # noqa: E402
from conformance.cases import FAMILIES  # noqa: E402
from conformance.records import RECORD, save  # noqa: E402
from conformance.supervisor import ask  # noqa: E402
from conformance.units import Unit, compile_unit, units_of  # noqa: E402

from flashgen.compile import compiler_build_id  # noqa: E402

Compiled = list[tuple[Unit, "bytes | str"]]


def compile_all(cases: list[Case], processes: int) -> tuple[Compiled, str]:
    """A cubin, or what the compiler said, for every unit, and which compiler that is.

    A unit is split into its variants where one of them fails.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        compiler = pool.submit(compiler_build_id)
        done = list(pool.map(try_to_compile, units_of(cases)))
        split = [part for unit, image in done if isinstance(image, str) for part in unit.split()]
        whole = [pair for pair in done if isinstance(pair[1], bytes)]
        return whole + list(pool.map(try_to_compile, split)), compiler.result()


def try_to_compile(unit: Unit) -> tuple[Unit, bytes | str]:
    try:
        return unit, compile_unit(unit)
    except Exception as error:
        return unit, f"{type(error).__name__}: {error}"[:2000]


def write_cubins(compiled: Compiled, directory: Path) -> set[tuple[str, str]]:
    """What workers read; returns the kernels and variants that there is a cubin for."""
    table, ready = [], set()
    for number, (unit, image) in enumerate(compiled):
        if isinstance(image, bytes):
            (directory / f"{number}.cubin").write_bytes(image)
            table.append({"kernel": unit.kernel, "variants": unit.variants, "file": f"{number}.cubin"})
            ready |= {(unit.kernel, variant) for variant in unit.variants}
    (directory / "units.json").write_text(json.dumps(table))
    return ready


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD, help="where to write the files (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds that one kernel may take (default: 5)")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="for compiling")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    families = {f: [c for c in cases if options.only in c.name] for f, cases in FAMILIES.items()}
    families = {family: cases for family, cases in families.items() if cases}

    started = time.monotonic()
    compiled, compiler = compile_all([case for cases in families.values() for case in cases], options.processes)
    print(f"compiled {len(compiled)} units in {time.monotonic() - started:.1f} s", flush=True)
    failures = {f"{u.kernel} {v}": image for u, image in compiled if isinstance(image, str) for v in u.variants}

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(families)) as threads:
        ready = write_cubins(compiled, Path(directory))
        jobs = {
            family: threads.submit(
                ask, [c.name for c in cases if (c.kernel, c.variant) in ready], Path(directory), options.patience
            )
            for family, cases in families.items()
        }
        answers = {family: job.result() for family, job in jobs.items()}

    for family, answer in answers.items():
        failures.update(answer.errors)
        if answer.cases:
            save(options.out / f"{family}.json", {**answer.device, "compiler": compiler}, answer.cases)
        print(f"{family:8} {len(answer.cases):4} of {len(families[family])} cases answered")
    for name, why in failures.items():
        print(f"FAILED {name}: {why}")
    print(f"{len(failures)} failures, {time.monotonic() - started:.1f} s, files in {options.out}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

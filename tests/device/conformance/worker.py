"""Runs cases on the GPU and prints each answer as a line of JSON: ``python -m conformance.worker DIRECTORY``.

The directory holds the cubins and ``units.json``; standard input, the names of the cases. Whatever a kernel does to
the GPU ends with this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conformance.cases import CASES
from conformance.digest import digest
from conformance.gpu import Gpu
from conformance.records import encode
from conformance.units import Unit


def main() -> None:
    """Stops at the first failure, for the context may be lost; the parent starts another one."""
    directory = Path(sys.argv[1])
    table = json.loads((directory / "units.json").read_text())
    units = [(Unit(u["kernel"], tuple(u["variants"])), directory / u["file"]) for u in table]
    gpu = Gpu()
    _say({"device": gpu.describe()})
    for name in json.load(sys.stdin):
        _say({"start": name})
        case = CASES[name]
        unit, path = next((u, p) for u, p in units if u.kernel == case.kernel and case.variant in u.variants)
        try:
            outputs = gpu.run(case, unit, path.read_bytes())
        except Exception as error:
            _say({"name": name, "error": f"{type(error).__name__}: {error}"})
            sys.exit(1)
        _say({"name": name, "answer": {"digest": digest(case), "outputs": encode(outputs)}})


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

from __future__ import annotations

import re

from flashgen.render.paths import include_dir

FUNCTION = re.compile(r"FLASHGEN_DEVICE\s+\w+\s+(\w+)\(([^{]*?)\)\s*\{")
HIDDEN = "FLASHGEN_EMU_SITE"


def signatures(text: str) -> set[tuple[str, tuple[str, ...]]]:
    found = set()
    for name, parameters in FUNCTION.findall(text):
        kinds = []
        for parameter in filter(None, (p.strip() for p in parameters.split(","))):
            if parameter != HIDDEN:
                kinds.append(re.sub(r"\b\w+$", "", re.sub(r"\(&\w+\)", "(&)", parameter)).strip() or parameter)
        found.add((name, tuple(kinds)))
    return found


def test_every_device_primitive_has_a_host_meaning_with_the_same_signature() -> None:
    include = include_dir() / "flashgen"
    device = set().union(*(signatures(p.read_text()) for p in sorted((include / "ptx").glob("*.cuh"))))
    host = set().union(*(signatures(p.read_text()) for p in sorted((include / "emu").glob("*.h"))))
    assert len(device) > 25
    assert device - host == set()


def test_every_device_macro_has_a_host_meaning() -> None:
    include = include_dir() / "flashgen"
    macro = re.compile(r"#define (FLASHGEN_\w+)")
    device = set().union(*(macro.findall(p.read_text()) for p in (include / "ptx").glob("*.cuh")))
    assert device
    assert device <= set(macro.findall((include / "emu" / "primitives.h").read_text()))

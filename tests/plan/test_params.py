"""The parameter struct: what Python packs is what C++ reads."""

from __future__ import annotations

import ctypes
import struct

import pytest

import flashgen as fg
from flashgen.emulator.toolchain import find_toolchain
from flashgen.plan import plan
from flashgen.plan.model.plans import ParamTable

PRELUDE = """
typedef int i32;
typedef long long i64;
struct element_t { unsigned short bits; };
template <class T> i64 number(T* x) { return reinterpret_cast<i64>(x); }
template <class T> i64 number(T x) { return static_cast<i64>(x); }
"""


def tables() -> dict[str, ParamTable]:
    """The table of every kernel there is."""
    found = {}
    for deterministic in (False, True):
        spec = fg.AttentionSpec(64, mask=fg.causal(), deterministic=deterministic)
        for kernel in plan(spec, None, "sm_80").kernels:
            found[f"{kernel.role}{'_deterministic' if deterministic else ''}"] = kernel.params
    return found


TABLES = tables()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """For every table a function that reads a struct's fields into an array and returns the struct's size."""
    text = [PRELUDE]
    for name, table in TABLES.items():
        fields = " ".join(f"{p.declared} {p.name};" for p in table.params)
        reads = " ".join(f"fields[{i}] = number(p.{q.name});" for i, q in enumerate(table.params))
        text.append(f"struct {name}_params {{ {fields} }};")
        text.append(
            f'extern "C" __attribute__((visibility("default"))) i32 read_{name}'
            f"(const {name}_params& p, i64* fields) {{ {reads} return sizeof p; }}"
        )
    directory = tmp_path_factory.mktemp("params")
    (directory / "read.cpp").write_text("\n".join(text))
    options = ("-shared", "-fPIC", str(directory / "read.cpp"))
    find_toolchain().run(options, directory / "read.so", "the parameter reader")
    return ctypes.CDLL(str(directory / "read.so"))


def values(table: ParamTable) -> list[int]:
    """Numbers that fit every field's type and tell fields and their halves apart."""
    wide = {"void*": 2**40, "int64": -(2**40), "int32": -(2**20), "float": 0}
    return [wide[p.kind] + 1 + i for i, p in enumerate(table.params)]


@pytest.mark.parametrize("name", TABLES)
def test_cpp_reads_back_what_python_packs(reader: ctypes.CDLL, name: str) -> None:
    table = TABLES[name]
    row = values(table)
    packed = struct.pack(table.format, *row).ljust(table.bytes, b"\0")
    fields = (ctypes.c_longlong * len(row))()
    size = getattr(reader, f"read_{name}")(packed, fields)
    assert (size, list(fields)) == (table.bytes, row)


@pytest.mark.parametrize("name", TABLES)
def test_fields_have_names_of_their_own_and_no_holes(name: str) -> None:
    table = TABLES[name]
    assert len(set(table.names)) == len(table.params)
    assert all(field.isidentifier() for field in table.names)
    sizes = {"void*": 8, "int64": 8, "int32": 4, "float": 4}
    assert struct.calcsize(table.format) == sum(sizes[p.kind] for p in table.params)
    assert table.bytes % 8 == 0
    assert table.bytes - struct.calcsize(table.format) < 8
    assert table.bytes <= 4096


@pytest.mark.parametrize("name", TABLES)
def test_every_tensor_comes_with_its_strides(name: str) -> None:
    names = TABLES[name].names
    for tensor in {"q", "k", "v", "o", "dout", "dq", "dk", "dv"} & set(names):
        assert {f"{tensor}_batch", f"{tensor}_row", f"{tensor}_head"} <= set(names)


def test_only_reads_are_const() -> None:
    written = {"forward": {"o", "lse"}, "main": {"dk", "dv", "dq_accum"}, "query_deterministic": {"dq"}}
    for name, outputs in written.items():
        pointers = [p for p in TABLES[name].params if p.kind == "void*"]
        assert {p.name for p in pointers if not p.declared.startswith("const ")} == outputs

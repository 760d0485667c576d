"""What a backward call hands to the driver."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.launch.call.prepared import BACKWARD_ROLES
from flashgen.plan import workspaces


def arguments(array: Any, len_q: int = 70, len_kv: int = 90, batch: int = 2) -> tuple[Any, ...]:
    q, k = array(batch, len_q, 4, 64), array(batch, len_kv, 2, 64)
    return (
        array(batch, len_q, 4, 64),
        q,
        k,
        k,
        array(batch, len_q, 4, 64),
        array(batch, 4, len_q, dtype="<f4"),
    )


def roles(bench: Any) -> list[str]:
    return [bench.driver.plans[launch.name].role for launch in bench.driver.launches]


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_run_in_order_with_one_set_of_addresses(bench: Any, array: Any, deterministic: bool) -> None:
    b = bench(64, deterministic=deterministic)
    do, q, k, v, out, lse = arguments(array)
    dq, dk, dv = b.executor.backward(do, q, k, v, out, lse)
    assert roles(b) == [role for role in BACKWARD_ROLES if role in {p.role for p in b.driver.plans.values()}]
    assert ("query" in roles(b)) == deterministic
    known = {"q": q, "k": k, "v": v, "dout": do, "o": out, "lse": lse}
    assert [x.values["dlse"] for x in b.driver.launches if "dlse" in x.values] == [0]
    want = {name: a.pointer for name, a in known.items()}
    want |= {"dq": dq.info.pointer, "dk": dk.info.pointer, "dv": dv.info.pointer}
    for launch in b.driver.launches:
        assert {n: x for n, x in launch.values.items() if n in want} == {
            n: x for n, x in want.items() if n in launch.values
        }


def test_the_gradient_of_the_lse_is_read_where_there_is_one(bench: Any, array: Any) -> None:
    b = bench(64)
    dlse = array(2, 4, 70, dtype="<f4")
    b.executor.backward(*arguments(array), dlse=dlse)
    b.executor.backward(*arguments(array))
    assert [x.values["dlse"] for x in b.driver.launches if "dlse" in x.values] == [dlse.pointer, 0]


def test_workspaces_are_shared_by_the_kernels_and_freed_after_the_call(bench: Any, array: Any) -> None:
    b = bench(64)
    kept = b.executor.backward(*arguments(array))
    found = {(n, x.values[n]) for x in b.driver.launches for n in ("dsum", "dq_accum") if n in x.values}
    assert sorted(name for name, _ in found) == ["dq_accum", "dsum"]
    assert not {a.info.pointer for a in kept} & {pointer for pointer, _ in b.driver.freed}
    assert len(b.driver.freed) == 1


def test_workspaces_lie_apart_in_one_allocation(bench: Any, array: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(64)
    allocated: dict[int, int] = {}

    def allocate(nbytes: int, stream: int) -> int:
        address = type(b.driver).allocate(b.driver, nbytes, stream)
        allocated[address] = nbytes
        return address

    monkeypatch.setattr(b.driver, "allocate", allocate)
    kept = b.executor.backward(*arguments(array))
    plan = b.executor.variants.plan(16)
    from flashgen.plan.model.plans import Problem

    sizes = {"dsum": 4 * 2 * 4 * 70, "dq_accum": 4 * workspaces(plan, Problem(2, 4, 2, 70, 90))["dq_accum"]}
    at = {name: x.values[name] for x in b.driver.launches for name in sizes if name in x.values}
    [(base, _)] = b.driver.freed
    first, second = sorted(at, key=lambda name: at[name])
    assert at[first] == base
    assert at[second] % 256 == 0
    assert at[first] + sizes[first] + 256 <= at[second]
    assert at[second] + sizes[second] <= base + allocated[base]
    assert base not in {a.info.pointer for a in kept}


def test_gradients_have_the_shapes_of_their_inputs(bench: Any, array: Any) -> None:
    b = bench(64)
    dq, dk, dv = b.executor.backward(*arguments(array))
    assert (dq.shape, dk.shape, dv.shape) == ((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))


def test_without_queries_the_gradients_of_keys_are_still_written(bench: Any, array: Any) -> None:
    b = bench(64)
    b.executor.backward(*arguments(array, len_q=0))
    assert roles(b) == ["main"]


def test_without_keys_the_gradient_of_queries_is_still_written(bench: Any, array: Any) -> None:
    b = bench(64)
    b.executor.backward(*arguments(array, len_kv=0))
    assert roles(b) == ["prepare", "finish"]


def test_an_empty_batch_launches_nothing(bench: Any, array: Any) -> None:
    b = bench(64)
    b.executor.backward(*arguments(array, batch=0))
    assert b.driver.launches == []

"""torch's own attention function, computed by flashgen: on the CPU, by the emulator."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
if torch and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
    pytest.skip("this torch cannot take an implementation back", allow_module_level=True)

sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def calls(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kernels were asked for, call by call."""
    seen: list[str] = []
    for name in ("__call__", "backward"):
        method = getattr(fg.Kernel, name)

        def counted(self: Any, *arguments: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            seen.append(_name)
            return _method(self, *arguments, **options)

        monkeypatch.setattr(fg.Kernel, name, counted)
    return seen


def heads_first(inputs: Any, **sizes: Any) -> tuple[Any, ...]:
    return tuple(x.detach().transpose(1, 2).requires_grad_() for x in inputs(**{"heads_kv": 4, **sizes}))


def forward_and_backward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
    out = sdpa(q, k, v, **options)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v)))


def close(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a.float(), b.float(), atol=1e-2, rtol=1e-2))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.4}])
@pytest.mark.parametrize("contiguous", [False, True])
def test_it_is_what_torch_computes(calls: Any, inputs: Any, options: Any, contiguous: bool) -> None:
    arguments = heads_first(inputs)
    if contiguous:
        arguments = tuple(x.detach().contiguous().requires_grad_() for x in arguments)
    expected = forward_and_backward(*arguments, **options)
    assert calls == []
    with fg.torch.enable_sdpa():
        found = forward_and_backward(*arguments, **options)
    assert calls == ["__call__", "backward"]
    for a, b in zip(found, expected, strict=True):
        assert close(a, b)
        assert a.stride() == b.stride()


def test_it_goes_as_it_came_a_hundred_times(calls: Any, inputs: Any) -> None:
    attention = torch.nn.attention
    arguments = tuple(x.detach() for x in heads_first(inputs))
    plain = sdpa(*arguments)
    before = attention._cur_sdpa_kernel_backends(with_priority=True)

    def objects() -> int:
        gc.collect()
        return sum(isinstance(x, torch.library.Library) for x in gc.get_objects())

    libraries = objects()
    for i in range(100):
        switch = fg.torch.enable_sdpa()
        assert attention.current_flash_attention_impl() == "flashgen"
        sdpa(*arguments)
        assert len(calls) == i + 1
        switch.remove()
        switch.remove()
        assert attention.current_flash_attention_impl() is None
        assert torch.equal(sdpa(*arguments), plain)
        assert len(calls) == i + 1
    assert objects() == libraries
    assert attention._cur_sdpa_kernel_backends(with_priority=True) == before


def test_within_itself_it_lasts_as_long_as_the_outer_one(calls: Any, inputs: Any) -> None:
    arguments = tuple(x.detach() for x in heads_first(inputs))
    with fg.torch.enable_sdpa():
        with fg.torch.enable_sdpa():
            sdpa(*arguments)
        sdpa(*arguments)
    sdpa(*arguments)
    assert len(calls) == 2


def test_double_precision_stays_with_torch(calls: Any) -> None:
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    with fg.torch.enable_sdpa():
        assert torch.equal(sdpa(q, q, q), sdpa(q, q, q))
    assert calls == []


def test_without_a_kernel_of_torchs_own_a_refusal_says_so(calls: Any) -> None:
    q = torch.randn(1, 2, 5, 16)
    with fg.torch.enable_sdpa(), pytest.raises(fg.ArgumentError, match="leave out dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)


def test_compiled_functions_use_it(calls: Any, inputs: Any) -> None:
    arguments = heads_first(inputs)
    expected = forward_and_backward(*arguments, is_causal=True)
    with fg.torch.enable_sdpa():
        compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
        out = compiled(*arguments, is_causal=True)
        found = (out, *torch.autograd.grad(out.float().square().sum(), arguments))
    assert calls == ["__call__", "backward"]
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck_finds_nothing_wrong_with_strides(calls: Any, inputs: Any) -> None:
    with fg.torch.enable_sdpa():
        for arguments in (heads_first(inputs), [x.contiguous() for x in heads_first(inputs)]):
            for op in ("", "_for_cpu"):
                torch.library.opcheck(
                    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{op}").default,
                    tuple(x.detach() for x in arguments),
                    test_utils=("test_schema", "test_faketensor"),
                )
    assert calls

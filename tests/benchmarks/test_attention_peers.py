"""What benchmarks pass to vLLM's build of FlashAttention-3, without that build and without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
#: The arguments of torch.ops._vllm_fa3_C.fwd in vLLM 0.33.0, in the order of its schema.
SCHEMA = (
    "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
    "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
    "v_descale softmax_scale is_causal window_size_left window_size_right softcap is_rotary_interleaved "
    "scheduler_metadata num_splits pack_gqa sm_margin s_aux cp_world_size cp_rank cp_tot_seqused_k"
)
#: What a call passes for arguments that benchmarks do not use.
UNUSED = {"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that calls ``vllm_fa3`` and returns the arguments of the build by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_peers

    def by_name(*tensors: Any, **more: Any) -> dict[str, Any]:
        received: list[Any] = []

        def build(*arguments: Any) -> tuple[Any]:
            received[:] = arguments
            return (tensors[0],)

        monkeypatch.setattr(attention_peers, "_vllm", lambda: build)
        attention_peers.vllm_fa3(*tensors, **more)
        return dict(zip(SCHEMA.split(), received, strict=True))

    return by_name


def test_the_build_decides_how_many_parts_keys_have(called: Any) -> None:
    q, k, v, starts = (torch.zeros(1) for _ in range(4))
    packed = called(q, k, v, starts, starts, longest=(3, 5), causal=True)
    paged = called(q, k, v, starts, longest=(1, 5), causal=True, lengths_k=starts, table=starts, qv=torch.zeros(7))
    # 1 is no choice: keys then stay in one part, and few sequences leave most of a GPU idle.
    assert packed["num_splits"] == paged["num_splits"] == 0


def test_every_argument_has_its_place(called: Any) -> None:
    q, k, v, starts, lengths, table, *descales = (torch.zeros(2) for _ in range(9))
    qv = torch.zeros(14)
    given = called(
        q, k, v, starts, longest=(3, 5), causal=True, lengths_k=lengths, table=table, window=(7, 0), softcap=2.0,
        qv=qv, descales=tuple(descales),
    )  # fmt: skip
    expected = {
        "q": q, "k": k, "v": v, "q_v": qv, "cu_seqlens_q": starts, "seqused_k": lengths, "page_table": table,
        "q_descale": descales[0], "k_descale": descales[1], "v_descale": descales[2], "max_seqlen_q": 3,
        "max_seqlen_k": 5, "softmax_scale": 0.25, "is_causal": True, "window_size_left": 7, "window_size_right": 0,
        "softcap": 2.0, "num_splits": 0, **UNUSED,
    }  # fmt: skip
    for name, value in given.items():
        other = expected.get(name)
        assert value is other if isinstance(other, torch.Tensor) else value == other, name

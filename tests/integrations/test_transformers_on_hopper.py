"""Training a model of transformers on a Hopper GPU: kernels for Hopper run padded and packed batches."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[transformers]')"
)
pytestmark = pytest.mark.torch

fgen = pytest.importorskip("flashgen.integrations.transformers")

from tests.integrations.test_transformers import LENGTH, MODELS, tokens  # noqa: E402
from tests.torch.test_hopper_kernels import ran  # noqa: E402, F401

PADDED = torch.ones(2, LENGTH, dtype=torch.long)
PADDED[1, -3:] = 0
STARTS = torch.tensor([0, 6, LENGTH], dtype=torch.int32)
BATCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "padded": (2, {"attention_mask": PADDED}),
    "packed": (1, {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])}),
    "packed, with lengths": (
        1,
        {
            "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]]),
            **{"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 6, "max_length_k": 6},
        },
    ),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_hoppers_kernels_run_both_passes(ran: list[str], batch: str) -> None:  # noqa: F811
    fgen.register()
    torch.manual_seed(0)
    model = MODELS["llama"](transformers).bfloat16().train()
    model.set_attn_implementation("fgen")
    count, options = BATCHES[batch]
    ids = tokens("cpu", count)
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    layers = model.config.num_hidden_layers
    assert ran == ["hopper/forward.cu.j2"] * layers + ["hopper/backward_main.cu.j2"] * layers

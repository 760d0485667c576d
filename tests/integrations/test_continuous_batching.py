"""Continuous batching by flashgen: each sequence has the tokens that eager attention generates for it alone."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

import flashgen as fg
from flashgen.launch.call.prepared import Call

torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[transformers]')"
)
batching = pytest.importorskip("transformers.generation.continuous_batching.initialization")
pytestmark = pytest.mark.torch

fgen = pytest.importorskip("flashgen.integrations.transformers")
paged = pytest.importorskip("flashgen.integrations.paged")

from tests.integrations.test_transformers import MODELS  # noqa: E402

PAGE, NEW = 8, 6
#: Whether layers write their keys into the cache, so that only steps with a table of pages leave that to flashgen.
LAYERS_UPDATE = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3, 1] * 10, [11] * 8]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    fgen.register()


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run."""
    found: list[str] = []
    run = Call.run

    def noted(self: Call, *arguments: Any) -> Any:
        found.extend(step.kernel.plan.role for step in self.steps)
        return run(self, *arguments)

    monkeypatch.setattr(Call, "run", noted)
    return found


def made(name: str, device: str, dtype: Any = None) -> Any:
    torch.manual_seed(0)
    model = MODELS[name](transformers).to(device).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model if dtype is None else model.to(dtype)


def alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What eager attention generates for one prompt after the other."""
    model.set_attn_implementation("eager")
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        each = [model.generate(torch.tensor([p], device=model.device), **options)[0, len(p) :] for p in prompts]
    return [tokens.tolist() for tokens in each]


def batched(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """What continuous batching generates for all of them."""
    model.set_attn_implementation("fgen")
    generation = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 32, **options}
    config = transformers.ContinuousBatchingConfig(**sizes)
    # torch aborts where the memory pool of an earlier manager is collected while another pool is in use.
    gc.collect()
    outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
    assert model.config._attn_implementation == "fgen"
    return [outputs[f"req_{i}"].generated_tokens for i in range(len(prompts))]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_eager_attention(device: str, roles: list[str], name: str) -> None:
    """Prompts are read in chunks, beside sequences that generate; windows are shorter than the prompts."""
    model = made(name, device)
    expected = alone(model, PROMPTS)
    # Graphs cannot capture how torch multiplies by experts as small as these.
    options = {"use_cuda_graph": False} if name == "gpt-oss" else {}
    assert batched(model, PROMPTS, **options) == expected
    assert ("forward" if LAYERS_UPDATE else "append") in roles


@pytest.mark.parametrize("name", ["llama"])
def test_steps_that_generate_read_a_table_of_pages(
    device: str, roles: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On GPUs; on the CPU only if its manager is told so."""
    if device == "cpu":
        monkeypatch.setattr(batching, "ensure_decode_fast_path_is_available", lambda *_: None)
    planned, packed, tables = paged._planned_tokens, paged._packed, []

    def with_table(*arguments: Any) -> Any:
        tables.append(True)
        return planned(*arguments)

    def without_table(*arguments: Any) -> Any:
        tables.append(False)
        return packed(*arguments)

    monkeypatch.setattr(paged, "_planned_tokens", with_table)
    monkeypatch.setattr(paged, "_packed", without_table)
    model = made(name, device, torch.float16)
    expected = alone(model, PROMPTS)
    assert batched(model, PROMPTS, max_blocks_per_request=8) == expected
    assert True in tables
    assert False in tables
    assert "decode" in roles


def test_sequences_that_pad_a_batch_have_no_keys_and_no_pages() -> None:
    """As in CUDA graphs, which transformers captures for a few sizes of batches."""
    allocator = SimpleNamespace(layer_type="full", tokens_per_page=PAGE, index=0)
    options = {
        "cu_seq_lens_q": torch.tensor([0, 1, 2, 2, 2]).int(),
        "cu_seq_lens_k": {"full": torch.tensor([0, 9, 25, 25, 25]).int()},
        "block_table": torch.tensor([[[4, 2, -1, -1], [6, 0, 5, 1], [-1] * 4, [-1] * 4]]).int(),
        "max_length_q": 1,
        "max_length_k": {"full": 1},
    }
    step = paged._planned(allocator, 4, options)
    pages = torch.randn(2, 8, PAGE, 2, 16).half()
    before, (q, k, v) = pages.clone(), (torch.randn(4, heads, 16).half() for heads in (4, 2, 2))
    with fg.torch.emulate_cpu():
        fg.serving.append(step, k, v, *pages)
        out = fg.serving.run(step, q, *pages)
    for which, new in ((0, k), (1, v)):
        before[which, 2, 0], before[which, 0, 7] = new[0], new[1]
    assert torch.equal(pages, before)
    assert out[2:].eq(0).all()
    assert out[:2].ne(0).all()


def test_other_implementations_are_treated_as_before() -> None:
    asked = batching.is_flash_attention_requested
    assert asked(requested_attention_implementation="fgen")
    assert asked(requested_attention_implementation="flash_attention_2", version=2)
    assert not asked(requested_attention_implementation="flash_attention_2", version=3)
    assert not asked(requested_attention_implementation="sdpa")
    with pytest.raises(ValueError, match="ambiguous"):
        asked(SimpleNamespace(_attn_implementation="eager"), "eager")
    fgen.register("fgen")
    assert not hasattr(batching.is_flash_attention_requested.replaced, "replaced")


def test_an_unknown_option_is_refused(device: str) -> None:
    cache = object.__new__(transformers.generation.continuous_batching.PagedAttentionCache)
    q = torch.zeros(1, 2, 5, 16, device=device)
    with pytest.raises(fg.ArgumentError, match="unheard_of=3 is not supported"):
        fgen.attention(SimpleNamespace(is_causal=True), q, q, q, None, cache=cache, unheard_of=3)

"""Models of transformers, tiny and random: their logits by flashgen are those by eager attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import flashgen as fg
from flashgen.launch.call.prepared import Call

torch = pytest.importorskip("torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install '.[transformers]')"
)
pytestmark = pytest.mark.torch

fgen = pytest.importorskip("flashgen.integrations.transformers")

LENGTH, WINDOW = 9, 4
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MODELS: dict[str, Any] = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**_SIZES)),
    "gemma2": lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**_SIZES, **_LAYERS, attn_logit_softcapping=2.0)),
    "gemma3": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**_SIZES, **_LAYERS)),
    "gpt-oss": lambda t: t.GptOssForCausalLM(
        t.GptOssConfig(**_SIZES, **_LAYERS, num_local_experts=2, num_experts_per_tok=1)
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    fgen.register()


@pytest.fixture
def model(request: pytest.FixtureRequest, device: str) -> Any:
    """A model with random weights; sinks too, which begin at nothing in particular."""
    torch.manual_seed(0)
    made = MODELS[request.param](transformers).to(device).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return made


def both(model: Any, call: Any) -> tuple[Any, Any]:
    """What the call gives by flashgen, and by eager attention; and that kernels ran."""
    run, calls = Call.run, []

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(self)
        return run(self, *arguments)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "run", counted)
        model.set_attn_implementation("eager")
        expected = call()
        assert not calls
        model.set_attn_implementation("fgen")
        found = call()
    assert calls
    return found, expected


def close(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a, b, atol=2e-5, rtol=2e-4))


def tokens(device: str, batch: int = 2) -> Any:
    return torch.randint(1, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_are_those_of_eager_attention(model: Any, device: str, padding: str) -> None:
    ids, mask = tokens(device), torch.ones(2, LENGTH, dtype=torch.long, device=device)
    if padding == "left":
        mask[1, :3] = 0
    elif padding == "right":
        mask[1, -3:] = 0
    found, expected = both(model, lambda: model(ids, attention_mask=mask).logits)
    assert close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_packed_documents_do_not_see_each_other(model: Any, device: str) -> None:
    ids = tokens(device, 1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]], device=device)
    found, expected = both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    assert close(found, expected)
    if not isinstance(model, transformers.GptOssForCausalLM):  # which makes its masks without a look at positions
        alone, _ = both(model, lambda: model(ids[:, 6:], use_cache=False).logits)
        assert close(found[:, 6:], alone)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_model_hands_lengths_of_documents_on(model: Any, device: str) -> None:
    """What DataCollatorWithFlattening makes: eager attention looks at the positions alone."""
    ids, positions = tokens(device, 1), torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]], device=device)
    starts = torch.tensor([0, 6, 9], dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    found, expected = both(model, lambda: model(ids, position_ids=positions, use_cache=False, **lengths).logits)
    assert close(found, expected)


@pytest.mark.parametrize("model", MODELS, indirect=True)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_that_of_eager_attention(model: Any, device: str, cache: str) -> None:
    """Beyond the window, with one row padded on the left."""
    ids, mask = tokens(device), torch.ones(2, LENGTH, dtype=torch.long, device=device)
    mask[1, :2] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found, expected = both(model, lambda: model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert close(a, b)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_reads_many_keys_by_the_decode_kernel(
    model: Any, device: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles: list[str] = []
    run = Call.run

    def noted(self: Any, *arguments: Any) -> Any:
        roles.extend(step.kernel.plan.role for step in self.steps)
        return run(self, *arguments)

    model = model.half()
    model.config.max_position_embeddings = 512
    ids = torch.randint(1, 64, (2, 260), generator=torch.Generator().manual_seed(1)).to(device)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    options["attention_mask"][1, :5] = 0
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found, expected = both(model, lambda: model.generate(ids, **options))
    assert torch.equal(found, expected)
    monkeypatch.setattr(Call, "run", noted)
    with torch.no_grad():
        model.generate(ids, **options)
    layers = model.config.num_hidden_layers
    # The first token comes from the prompt.
    assert [role for role in roles if role == "decode"] == ["decode"] * 2 * layers


@pytest.mark.parametrize("model", ["gpt-oss"], indirect=True)
def test_gradients_are_those_of_eager_attention(model: Any, device: str) -> None:
    ids, mask = tokens(device), torch.ones(2, LENGTH, dtype=torch.long, device=device)
    mask[1, -3:] = 0
    gradients = []
    for implementation in ("eager", "fgen"):
        model.set_attn_implementation(implementation)
        loss = model(ids, attention_mask=mask).logits[mask.bool()].square().sum()
        gradients.append(
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        )
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-4, rtol=1e-3)


def mask_of(function: Any, **options: Any) -> Any:
    sizes = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "device": "cpu", "dtype": torch.float32}
    return fgen.make_mask(**{**sizes, "mask_function": function, **options})


def packed_mask(inner: Any, positions: Any, documents: Any) -> Any:
    """A mask within documents, as transformers combines it. 5.24 has no function for that any more."""
    m = transformers.masking_utils
    combined = getattr(m, "packed_sequence_compatibility_function", None)
    if combined is not None:
        return combined(inner, positions, documents)
    within = m.remap_positions_for_packed_sequence(inner, positions)
    return m.and_masks(within, m.packed_sequence_mask_function(documents))


def test_masks_are_no_larger_than_they_must_be() -> None:
    m = transformers.masking_utils
    causal, sliding = m.causal_mask_function, m.sliding_window_causal_mask_function(WINDOW)
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    assert mask_of(causal) is None
    assert mask_of(causal, attention_mask=padding) is None
    assert mask_of(sliding, local_size=WINDOW) is None
    assert mask_of(causal, q_length=1, q_offset=LENGTH - 1) is None
    padding[0, :2] = False
    assert torch.equal(mask_of(causal, attention_mask=padding), padding)
    assert mask_of(m.bidirectional_mask_function, attention_mask=padding).shape == (2, 1, 1, LENGTH)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]).expand(2, -1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    assert torch.equal(mask_of(packed_mask(sliding, positions, documents), local_size=WINDOW), documents)
    for whole in (
        mask_of(sliding),  # the layer is not said to have a window
        mask_of(causal, q_offset=torch.tensor(0), attention_mask=padding),
        mask_of(causal, kv_length=LENGTH + 3),
        mask_of(m.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int)), local_size=3),
        mask_of(m.or_masks(causal, m.blockwise_overlay(documents))),
    ):
        assert whole.shape[:3] == (2, 1, LENGTH)
        assert whole.dtype == torch.bool


def attended(mask: Any = None, is_causal: bool = True, **options: Any) -> Any:
    """The function on random inputs beside eager attention with a mask of all pairs."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, LENGTH, 16, generator=generator) for heads in (4, 2, 2))
    with fg.torch.emulate_cpu():
        found, weights = fgen.attention(SimpleNamespace(is_causal=is_causal), q, k, v, mask, **options)
    assert weights is None
    return found, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


def plain(q: Any, k: Any, v: Any, allowed: Any, bias: Any = 0.0) -> Any:
    scores = (q @ k.mT * 0.25 + bias).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_masks_of_caches_of_fixed_size_are_lengths() -> None:
    m = transformers.masking_utils
    causal, sliding = m.causal_mask_function, m.sliding_window_causal_mask_function(WINDOW)
    place = {"q_length": 2, "kv_length": 20, "q_offset": torch.tensor(7)}
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, :3] = False
    with torch.no_grad():
        assert mask_of(causal, **place).tolist() == [[[[9, 9], [0, 0]]]]
        assert mask_of(causal, **place, attention_mask=padding).tolist() == [[[[9, 9], [0, 3]]]]
        padding[1, 5] = False
        for whole in (mask_of(causal, **place, attention_mask=padding), mask_of(sliding, **place)):
            assert (whole.shape, whole.dtype) == ((2, 1, 2, 20), torch.bool)
    assert mask_of(causal, **place).shape == (2, 1, 2, 20)  # a cache has no gradients


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "s_aux": torch.randn(4)}, {"position_bias": None}])
def test_lengths_in_a_cache_of_fixed_size_are_a_mask(options: dict[str, Any]) -> None:
    if "position_bias" in options:
        options = {"position_bias": torch.randn(1, 4, 2, 20)}
    q, k, v = torch.randn(2, 4, 2, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)
    lengths = torch.tensor([[[[9, 17], [0, 3]]]], dtype=torch.int32)
    whole = torch.zeros(2, 1, 2, 20, dtype=torch.bool)
    for b, (end, left) in enumerate(((9, 0), (17, 3))):
        for i in range(2):
            whole[b, 0, i, left : end - 1 + i] = True
    layer = SimpleNamespace(is_causal=True)
    with fg.torch.emulate_cpu(), torch.no_grad():
        found, expected = (fgen.attention(layer, q, k, v, mask, **options)[0] for mask in (lengths, whole))
    assert close(found, expected)


CAUSAL = torch.ones(LENGTH, LENGTH).tril().bool() if torch else None


@pytest.mark.parametrize("documents", [False, True])
def test_lengths_of_documents_are_documents(documents: bool) -> None:
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    ids = (torch.arange(LENGTH) >= 4).int()
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    found, *inputs = attended(ids[None] if documents else None, **lengths)
    assert close(found, plain(*inputs, CAUSAL & (ids[:, None] == ids)))


def test_lengths_of_documents_go_with_windows_caps_and_sinks() -> None:
    starts_q, starts_k, sinks = torch.tensor([0, 3, 9]), torch.tensor([0, 4, 9]), torch.randn(4)
    options = {"sliding_window": 3, "softcap": 2.0, "s_aux": sinks, "max_length_q": 6, "max_length_k": 5}
    found, q, k, v = attended(cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k, **options)
    for (first, last), (of_k, to_k) in (((0, 3), (0, 4)), ((3, 9), (4, 9))):
        distance = torch.arange(to_k - of_k) - torch.arange(last - first)[:, None] - (to_k - of_k - last + first)
        scores = 2.0 * (q[:, :, first:last] @ k[:, :, of_k:to_k].mT * 0.25 / 2.0).tanh()
        scores = scores.masked_fill((distance > 0) | (distance <= -3), float("-inf"))
        with_sinks = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, last - first, 1)], -1)
        weights = with_sinks.softmax(-1)[..., :-1]
        assert close(found[:, first:last], (weights @ v[:, :, of_k:to_k]).transpose(1, 2))


def test_a_mask_of_numbers_and_a_position_bias_are_added() -> None:
    bias = torch.randn(1, 4, LENGTH, LENGTH)
    added = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    found, *inputs = attended(added, position_bias=bias)
    assert close(found, plain(*inputs, CAUSAL, bias))
    found, *inputs = attended(is_causal=False, position_bias=bias[:, :, :1])
    assert close(found, plain(*inputs, torch.ones_like(CAUSAL), bias[:, :, :1]))


LENGTHS: dict[str, Any] = dict.fromkeys(("max_length_q", "max_length_k"), 5)
LENGTHS |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 1.5}, "dropout_p=1.5 is no probability"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"cache": object()}, "cache=<object"),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.bool)}, "attention_mask has 4 keys and key has 5"),
        ({"sliding_window": 2, "is_causal": False}, "sliding_window=2 without a causal mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k go"),
        ({**LENGTHS, "attention_mask": torch.ones(1, 5, dtype=torch.bool)}, "go together, with a batch of 1"),
        ({**LENGTHS, "position_bias": torch.ones(1, 2, 5, 5)}, "position_bias is not supported with cu_seq_lens_q"),
    ],
)
def test_what_is_not_done_is_refused_by_name(options: Any, words: str) -> None:
    q = torch.zeros(1, 2, 5, 16)
    with pytest.raises(fg.ArgumentError) as error:
        fgen.attention(SimpleNamespace(is_causal=True), q, q, q, **{"attention_mask": None, **options})
    assert words in str(error.value)


def test_a_name_that_transformers_reserves_is_refused() -> None:
    with pytest.raises(fg.ArgumentError, match="holds 'flash'"):
        fgen.register("flashgen")


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_model_compiles_in_one_graph(model: Any, device: str) -> None:
    ids, mask = tokens(device), torch.ones(2, LENGTH, dtype=torch.long, device=device)
    mask[1, :3] = 0
    model.set_attn_implementation("fgen")
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            found, expected = (call(ids, use_cache=False, **options)[0] for call in (compiled, model.model))
            assert torch.equal(found, expected)


@pytest.mark.parametrize("model", ["gpt-oss"], indirect=True)
def test_steps_with_a_cache_of_fixed_size_are_one_graph(model: Any, device: str) -> None:
    """Windows, sinks, and a cache of which the positions beyond the last token are not there yet."""
    ids = tokens(device)
    compiled, logits = torch.compile(model, fullgraph=True, backend="aot_eager"), []
    for implementation, step in (("eager", model), ("fgen", compiled)):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 3)
        with torch.no_grad():
            model(ids[:, :-3], past_key_values=cache, cache_position=torch.arange(LENGTH - 3, device=device))
            for i in range(LENGTH - 3, LENGTH):
                place = torch.tensor([i], device=device)
                logits.append(step(ids[:, i : i + 1], past_key_values=cache, cache_position=place).logits)
    assert close(torch.cat(logits[3:]), torch.cat(logits[:3]))


@pytest.mark.parametrize("model", ["gpt-oss"], indirect=True)
def test_a_layer_with_window_and_sinks_compiles_in_one_graph(model: Any, device: str) -> None:
    model.set_attn_implementation("fgen")
    layer, hidden = model.model.layers[0].self_attn, torch.randn(2, LENGTH, 32, device=device)
    places = model.model.rotary_emb(hidden, torch.arange(LENGTH, device=device)[None])
    padding = torch.arange(LENGTH, device=device) >= torch.tensor([[0], [3]], device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = (call(hidden, places, padding)[0] for call in (compiled, layer))
    assert torch.equal(found, expected)

"""The backends of docs/how-to/serving.md fit stubs of the engines' interfaces, and run behind these on the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from operator import rshift
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import flashgen as fg
from tests.docs.pages import ROOT, blocks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

STUBS = Path(__file__).parent / "engines"
PAGE = 16
#: Types of torch are its own, and take a while.
CONFIG = "[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n"


def code_for(engine: str) -> str:
    (found,) = [b.text for b in blocks(ROOT / "docs/how-to/serving.md") if b.mark == f"not run: needs {engine}"]
    return str(found)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a backend's code with the stubs in the engine's place."""
    monkeypatch.syspath_prepend(str(STUBS))

    def run(engine: str) -> ModuleType:
        module = ModuleType(f"backend_of_{engine.lower()}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code_for(engine), module.__name__, "exec"), vars(module))
        return module

    with fg.torch.emulate_cpu():
        yield run
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_backends_have_the_types_of_the_interfaces(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    files = []
    for engine in ("vLLM", "SGLang"):
        files.append(f"backend_of_{engine.lower()}.py")
        (tmp_path / files[-1]).write_text(code_for(engine))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    assert pytestconfig.cache is not None
    environment = os.environ | {
        "MYPYPATH": str(STUBS),
        "PYTHONPATH": str(ROOT),
        "MYPY_CACHE_DIR": str(pytestconfig.cache.mkdir("mypy-of-an-engine")),
    }
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *files]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def halves(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def expected(q: Any, keys: Any, values: Any, left: int | None, cap: float | None, score: Any = None) -> Any:
    """Attention of the last queries of one sequence."""
    mask = fg.causal() if left is None else fg.window(left, 0)
    scores = [x for x in (fg.softcap(cap) if cap else None, score) if x is not None]
    both = reduce(rshift, scores) if scores else None
    return fg.attention(q[None], keys[None], values[None], mask=mask, score=both, scale=0.3)[0]


class Steps:
    """Steps of vLLM of two sequences, and the cache of a layer."""

    def __init__(self, module: Any, new: list[int]) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.lengths, self.new, self.tokens = [20, 9], new, sum(new)
        self.kv_cache = halves(*module.Backend.get_kv_cache_shape(6, PAGE, 2, 16))
        self.table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
        rows = [(i, j) for i, (n, count) in enumerate(zip(self.lengths, new, strict=True)) for j in range(n - count, n)]
        slots = torch.tensor([int(self.table[i, j // PAGE]) * PAGE + j % PAGE for i, j in rows])
        starts = torch.tensor([0, new[0], self.tokens], dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            *(starts, starts, torch.tensor(self.lengths, dtype=torch.int32)),
            *(2, self.tokens, max(new), 20, self.table, slots),
        )
        spec = SimpleNamespace(block_size=PAGE)
        self.builder = module.Backend.get_builder_cls()(spec, [], None, torch.device("cpu"))
        self.q = halves(self.tokens, 4, 16, seed=1)
        self.k, self.v = halves(self.tokens, 2, 16, seed=2), halves(self.tokens, 2, 16, seed=3)

    def check(self, out: Any, cache: Any, left: int | None, cap: float | None, score: Any = None) -> None:
        """Compares with attention to the numbers in a cache."""
        for i, (first, last) in enumerate(((0, self.new[0]), (self.new[0], self.tokens))):
            keys, values = (cache[self.table[i].long(), which].flatten(0, 1)[: self.lengths[i]] for which in (0, 1))
            assert torch.equal(keys[-self.new[i] :], self.k[first:last])
            exact = expected(self.q[first:last], keys, values, left, cap, score)
            assert torch.allclose(out[first:last].float(), exact.float(), atol=3e-3)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (6, 2.0)])
@pytest.mark.parametrize("new", [[1, 1], [1, 7]])
def test_the_backend_for_vllm_attends(load: Any, new: list[int], window: int | None, cap: float | None) -> None:
    module = load("vLLM")
    at = Steps(module, new)
    # As vLLM calls them: one by places, the other by names.
    impl = module.Backend.get_impl_cls()(4, 16, 0.3, 2, None, window, "auto", cap, "decoder", None)
    named: dict[str, Any] = {"common_prefix_len": 0, "common_attn_metadata": at.common}
    steps = at.builder.build(**named), at.builder.build_for_cudagraph_capture(at.common), at.builder.build(**named)
    for metadata in steps:
        out = impl.forward(None, at.q, at.k, at.v, at.kv_cache, metadata, torch.empty(at.tokens, 4, 16).half())
        at.check(out, at.kv_cache, None if window is None else window - 1, cap)
    assert impl.forward(None, at.q, at.k, at.v, at.kv_cache, None, torch.ones(at.tokens, 4, 16)).eq(0).all()


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_backend_for_vllm_has_alibi_and_sinks(load: Any, cap: float | None) -> None:
    module = load("vLLM")
    assert module.Backend.supports_sink()
    at = Steps(module, [1, 7])
    slopes, sinks = [0.5, 0.25, 0.125, 0.0625], torch.nn.Parameter(halves(4, seed=6), requires_grad=False)
    impl = module.Backend.get_impl_cls()(4, 16, 0.3, 2, slopes, None, "auto", cap, "decoder", None, sinks=sinks)
    # Weights come after layers are made.
    sinks.copy_(halves(4, seed=7))
    step = at.builder.build(0, at.common)
    out = impl.forward(None, at.q, at.k, at.v, at.kv_cache, step, torch.empty(at.tokens, 4, 16).half())
    at.check(out, at.kv_cache, None, cap, fg.alibi(torch.tensor(slopes)) >> fg.sink(halves(4, seed=7)))


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "e4m3fn"), ("fp8_e4m3", "e4m3fn"), ("fp8_e5m2", "e5m2")])
def test_the_backend_for_vllm_has_caches_in_float8(load: Any, name: str, dtype: str) -> None:
    module, dtype = load("vLLM"), getattr(torch, f"float8_{dtype}")
    assert name in module.Backend.supported_kv_cache_dtypes
    at = Steps(module, [1, 7])
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    scales = torch.tensor([0.5, 2.0]).view(2, 1, 1, 1)
    # Numbers that float8 has, with these scales.
    at.k, at.v = (x.to(dtype).half() for x in (at.k, at.v))
    codes = (at.kv_cache / scales).to(dtype)
    impl = module.Backend.get_impl_cls()(4, 16, 0.3, 2, None, None, name, None, "decoder", None)
    step = at.builder.build(0, at.common)
    stored = codes.view(torch.uint8)
    out = impl.forward(layer, at.q, at.k, at.v, stored, step, torch.empty(at.tokens, 4, 16).half())
    at.check(out, (codes.float() * scales).half(), None, None)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype=int8 is not supported"):
        module.Backend.get_impl_cls()(4, 16, 0.3, kv_cache_dtype="int8")


class Pool:
    """Slots for keys and values of one layer."""

    def __init__(self) -> None:
        self.keys, self.values = halves(64, 2, 16, seed=4), halves(64, 2, 16, seed=5)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.values

    def set_kv_buffer(self, layer: Any, loc: Any, cache_k: Any, cache_v: Any) -> None:
        self.keys[loc], self.values[loc] = cache_k, cache_v


@pytest.mark.parametrize(("window", "cap"), [(-1, 0.0), (6, 2.0)])
@pytest.mark.parametrize("mode", ["decode", "extend", "replayed"])
@pytest.mark.parametrize("page", [1, 8])
def test_the_backend_for_sglang_attends(load: Any, page: int, mode: str, window: int, cap: float) -> None:
    module = load("SGLang")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner, ReqToTokenPool

    lengths, new = [20, 9], [1, 1] if mode != "extend" else [5, 9]
    table = torch.full((4, 24), 10**6, dtype=torch.int32)
    # Slots of a page are consecutive.
    pages = torch.randperm(64 // page, generator=torch.Generator().manual_seed(0)).int()
    slots = (pages[:, None] * page + torch.arange(page)).flatten().int()
    requests = torch.tensor([3, 1])
    table[3, :20], table[1, :9] = slots[:20], slots[24:33]
    written = torch.cat([table[r, n - c : n] for r, n, c in zip(requests, lengths, new, strict=True)]).long()
    pool, layer = Pool(), RadixAttention(0, 4, 2, 16, 16, 0.3, cap, window)
    batch = ForwardBatch(
        ForwardMode.EXTEND if mode == "extend" else ForwardMode.DECODE,
        *(2, requests, torch.tensor(lengths), written, pool),
        *(sum(new), torch.tensor(new), new),
    )
    backend = ATTENTION_BACKENDS["flashgen"](ModelRunner(ReqToTokenPool(table), page))
    if mode == "replayed":
        backend.init_cuda_graph_state(2, 2)
        others = torch.tensor([1, 3]), torch.ones(2).long()
        backend.init_forward_metadata_capture_cuda_graph(2, 2, *others, None, ForwardMode.DECODE, None)
        replay = requests, batch.seq_lens, sum(lengths), None, ForwardMode.DECODE, None, None
        backend.init_forward_metadata_replay_cuda_graph(2, *replay)
    else:
        backend.init_forward_metadata(batch)
    tokens = sum(new)
    q, k, v = halves(tokens, 64, seed=1), halves(tokens, 2, 16, seed=2), halves(tokens, 2, 16, seed=3)
    out = backend.forward(q, k, v, layer, batch).view(-1, 4, 16)
    assert [group.cache.block_table.shape[1] for group in backend.step.groups] == [24 // page]
    for i, (first, last) in enumerate(((0, new[0]), (new[0], tokens))):
        own = table[requests[i], : lengths[i]].long()
        assert torch.equal(pool.keys[own][-new[i] :], k[first:last])
        exact = expected(
            q.view(-1, 4, 16)[first:last], pool.keys[own], pool.values[own], None if window < 0 else window, cap
        )
        assert torch.allclose(out[first:last].float(), exact.float(), atol=3e-3)
    assert module.FlashgenBackend(ModelRunner(ReqToTokenPool(table), page)).get_cuda_graph_seq_len_fill_value() == 1

"""The backends of docs/how-to/serving.md fit stubs of the engines' interfaces, and run behind these on the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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


def expected(q: Any, keys: Any, values: Any, left: int | None, cap: float | None) -> Any:
    """Attention of the last queries of one sequence."""
    options = {"causal": True, "window_size": (-1 if left is None else left, 0), "softcap": cap or 0.0}
    return fg.flash_attn_func(q[None], keys[None], values[None], softmax_scale=0.3, **options)[0]


@pytest.mark.parametrize(("window", "cap"), [(None, None), (6, 2.0)])
@pytest.mark.parametrize("new", [[1, 1], [1, 7]])
def test_the_backend_for_vllm_attends(load: Any, new: list[int], window: int | None, cap: float | None) -> None:
    module = load("vLLM")
    lengths, tokens = [20, 9], sum(new)
    kv_cache = halves(*module.Backend.get_kv_cache_shape(6, PAGE, 2, 16))
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    rows = [(i, j) for i, (n, count) in enumerate(zip(lengths, new, strict=True)) for j in range(n - count, n)]
    slots = torch.tensor([int(table[i, j // PAGE]) * PAGE + j % PAGE for i, j in rows])
    starts = torch.tensor([0, new[0], tokens], dtype=torch.int32)
    from vllm.v1.attention.backend import CommonAttentionMetadata

    common = CommonAttentionMetadata(
        *(starts, starts, torch.tensor(lengths, dtype=torch.int32)),
        *(2, tokens, max(new), 20, table, slots),
    )
    builder = module.Backend.get_builder_cls()(SimpleNamespace(block_size=PAGE), [], None, torch.device("cpu"))
    # As vLLM calls them: one by places, the other by names.
    impl = module.Backend.get_impl_cls()(4, 16, 0.3, 2, None, window, "auto", cap, "decoder", None)
    q, k, v = halves(tokens, 4, 16, seed=1), halves(tokens, 2, 16, seed=2), halves(tokens, 2, 16, seed=3)
    named: dict[str, Any] = {"common_prefix_len": 0, "common_attn_metadata": common}
    for metadata in (builder.build(**named), builder.build_for_cudagraph_capture(common), builder.build(**named)):
        out = impl.forward(None, q, k, v, kv_cache, metadata, torch.empty(tokens, 4, 16).half())
        for i, (first, last) in enumerate(((0, new[0]), (new[0], tokens))):
            keys, values = (kv_cache[table[i].long(), which].flatten(0, 1)[: lengths[i]] for which in (0, 1))
            assert torch.equal(keys[-new[i] :], k[first:last])
            exact = expected(q[first:last], keys, values, None if window is None else window - 1, cap)
            assert torch.allclose(out[first:last].float(), exact.float(), atol=3e-3)
    assert impl.forward(None, q, k, v, kv_cache, None, torch.ones(tokens, 4, 16)).eq(0).all()


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
def test_the_backend_for_sglang_attends(load: Any, mode: str, window: int, cap: float) -> None:
    module = load("SGLang")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner, ReqToTokenPool

    lengths, new = [20, 9], [1, 1] if mode != "extend" else [5, 9]
    table = torch.full((4, 24), 10**6, dtype=torch.int32)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    requests = torch.tensor([3, 1])
    table[3, :20], table[1, :9] = slots[:20], slots[20:29]
    written = torch.cat([table[r, n - c : n] for r, n, c in zip(requests, lengths, new, strict=True)]).long()
    pool, layer = Pool(), RadixAttention(0, 4, 2, 16, 16, 0.3, cap, window)
    batch = ForwardBatch(
        ForwardMode.EXTEND if mode == "extend" else ForwardMode.DECODE,
        *(2, requests, torch.tensor(lengths), written, pool),
        *(sum(new), torch.tensor(new), new),
    )
    backend = ATTENTION_BACKENDS["flashgen"](ModelRunner(ReqToTokenPool(table)))
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
    for i, (first, last) in enumerate(((0, new[0]), (new[0], tokens))):
        own = table[requests[i], : lengths[i]].long()
        assert torch.equal(pool.keys[own][-new[i] :], k[first:last])
        exact = expected(
            q.view(-1, 4, 16)[first:last], pool.keys[own], pool.values[own], None if window < 0 else window, cap
        )
        assert torch.allclose(out[first:last].float(), exact.float(), atol=3e-3)
    assert module.FlashgenBackend(ModelRunner(ReqToTokenPool(table))).get_cuda_graph_seq_len_fill_value() == 1

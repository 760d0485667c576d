"""Masks and scores that are expressions, to what looks at operators: compilers, export and opcheck."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
pytest.importorskip("flashgen.torch")

from tests.torch.programs import IDS  # noqa: E402
from tests.torch.results import forward_and_backward, same  # noqa: E402


def call(q: Any, k: Any, v: Any) -> Any:
    return fg.attention(q, k, v, mask=MASK, score=SCORE)


MASK = fg.causal() & fg.document(IDS)
SCORE = fg.softcap(2.0) >> fg.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(emulated: Any, inputs: Any, dynamic: bool) -> None:
    q, k, v = inputs(len_q=12)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert same(forward_and_backward(compiled, q, k, v), forward_and_backward(call, q, k, v))


def test_a_compiled_function_follows_its_mask(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))
    compiled = torch.compile(lambda q, k, v, m: fg.attention(q, k, v, mask=m), fullgraph=True, backend="aot_eager")
    other = IDS.flip(1).contiguous()
    for mask in (fg.document(IDS), fg.document(other), fg.prefix_lm(3), fg.prefix_lm(7)):
        assert torch.equal(compiled(q, k, v, mask), fg.attention(q, k, v, mask=mask))
    changed = fg.document(IDS.clone())
    compiled(q, k, v, changed)
    changed.rest.tensors["ids"].copy_(other)  # in place: the tensor is an input of the graph, not a constant
    assert torch.equal(compiled(q, k, v, changed), fg.attention(q, k, v, mask=fg.document(other)))


def test_new_tensors_for_the_same_code_are_not_compiled_again(emulated: Any, inputs: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    q, k, v = (x.detach() for x in inputs(len_q=12))
    compiled = torch.compile(
        lambda q, k, v, m, s: fg.attention(q, k, v, mask=m, score=s), fullgraph=True, backend=backend
    )
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 3, (2, 12), dtype=torch.int32, generator=generator)
        mask, score = (
            fg.causal() & fg.document(ids),
            fg.alibi(torch.rand(4, generator=generator)) >> fg.sink(torch.rand(4)),
        )
        assert torch.equal(compiled(q, k, v, mask, score), fg.attention(q, k, v, mask=mask, score=score))
    assert len(graphs) == 1
    other = fg.causal() & fg.document(torch.zeros(2, 12, dtype=torch.int64))
    assert torch.equal(compiled(q, k, v, other, score), fg.attention(q, k, v, mask=other, score=score))
    assert len(graphs) == 2


def test_a_band_may_be_made_inside_of_a_compiled_function(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), score=SCORE)

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v))


def test_one_tensor_in_mask_score_and_sink_compiles(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))
    weights = torch.rand(12)
    mask = fg.Mask.of(lambda b, h, q, k: weights[k] > 0.2)
    score = fg.Score.of(lambda s, b, h, q, k: s + weights[q]) >> fg.sink(weights)
    attend = torch.compile(
        lambda q, k, v: fg.attention(q, k, v, mask=mask, score=score), fullgraph=True, backend="eager"
    )
    assert torch.equal(attend(q, k, v), fg.attention(q, k, v, mask=mask, score=score))


def test_operator_and_function_agree_bit_for_bit(emulated: Any, inputs: Any) -> None:
    from flashgen.torch.program import written_program

    program, captured = written_program(MASK, SCORE)
    q, k, v = inputs(len_q=12)
    through = forward_and_backward(
        lambda q, k, v: torch.ops.flashgen.program_forward(q, k, v, list(captured), program.rule)[0], q, k, v
    )
    assert same(through, forward_and_backward(call, q, k, v))


def test_opcheck_finds_nothing(emulated: Any, inputs: Any) -> None:
    from flashgen.torch.program import written_program

    program, captured = written_program(MASK, SCORE)
    arguments = (*inputs(len_q=12), list(captured), program.rule)
    torch.library.opcheck(torch.ops.flashgen.program_forward.default, arguments)


def test_export_keeps_the_operator_and_needs_no_registry(
    emulated: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.torch import program as programs

    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return call(q, k, v)

    arguments = tuple(x.detach() for x in inputs(len_q=12))
    program = torch.export.export(Module(), arguments)
    assert "flashgen.program_forward" in program.graph_module.code
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(programs, "_specs", {})
    assert torch.equal(program.module()(*arguments), call(*arguments))

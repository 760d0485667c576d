"""Masks and scores as one language: a Python function becomes a tree, and the tree has five readings.

    traced = trace_mask(lambda b, h, q, k: (q >= k) & (q - k < window))
    traced.root                     the tree: text(root) reads (q >= k) & (q - k < window)
    traced.scalars, traced.tensors  captured values by name; renamed where two traces combine (&, |, ~, then)

``nodes``
    The classes. Equal trees are one object: ``is``, hashing and use in dictionaries are cheap, ``a == b`` builds a
    comparison, and outside of tracing its truth is whether both are one node, so specs that hold trees compare.
    ``node.type`` is bool, int or float; ``node.uses & USES["q"]`` tells what a value depends on.
``functions``
    ``where minimum maximum abs exp log sqrt sin cos tan tanh sigmoid q_len k_len``, exported to users.
``trace``
    ``trace_mask(fn)``, ``trace_score(fn)`` -> ``Traced``; TraceError shows the user's line.
``numpy``
    ``evaluate(node, env)``: env by name, ``b h q k s q_len k_len``, captured values, ``q_lo q_hi k_lo k_hi``; arrays
    broadcast. An index outside of its tensor is an ArgumentError.
``cuda``
    ``print_cuda({"mask": root}, {"b": "batch", "window": "params.window", "ids": "params.ids"})`` -> ``statements`` and
    ``expressions``; names that are missing stay as they are. Kernels include ``flashgen/expression.cuh``: a tensor
    is a ``Captured<T, rank>{pointer, strides (i64, in elements), sizes (i32)}``, bools are u8. Empty tensors (a size
    of 0) are to be refused at the call.
``tiles``
    ``tile_rule(mask)`` -> ``TileRule``: trees over the rectangle ``q_lo <= q <= q_hi``, ``k_lo <= k <= k_hi``,
    inclusive, not empty, within the sequences. ``bounds.MAX_LENGTH`` (2**30) is the longest sequence for which they
    hold. A ``Range`` node with ``whole`` may be answered by a table: give ``names[range_name(node)]`` to
    ``print_cuda``, the name of a function of the indices that do not vary; and a ``Search`` by another, under
    ``search_name(node)``.
``derivative``
    ``derivative(node, wrt)``; ``captured_gradients(score)``: what each captured float adds to the gradient.
``sides``
    ``split(roots, {"query": [...], "key": [...]})``: what each of two sides brings to the trees by itself.
``orders``
    ``orders(mask)``: its comparisons of the key, which give the bits of many keys at once, and the rest.
``starts``
    ``with_starts(roots)``: scores whose whole numbers are turned into floats at one pair, for those near it.
``constants``
    ``with_constants(roots)``: scores with what is the same for all pairs apart.
``products``
    ``in_products(score)``: a score that adds to its logit, counted in logits not yet multiplied by the scale.
    ``of_product(score)``: a score of such, counted in logits.
``caps``
    ``is_softcap(score)``: whether it is the tangent of its logit, up to factors that are the same for all pairs.
``text``, ``parse``
    ``text(node)`` and ``parse(source, {"window": Scalar("window", "int")})``, which give the same tree back.
"""

from __future__ import annotations

from flashgen.expr.analysis.float_starts import with_starts
from flashgen.expr.analysis.hoisting import Split, split
from flashgen.expr.analysis.key_orders import orders
from flashgen.expr.analysis.softcaps import is_softcap
from flashgen.expr.analysis.tile_constants import with_constants
from flashgen.expr.analysis.unscaled_logits import in_products, of_product
from flashgen.expr.readings.cuda import CudaText, print_cuda, range_name, search_name
from flashgen.expr.readings.derivative import captured_gradients, derivative
from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.readings.tiles import Band, TileRule, tile_rule
from flashgen.expr.trace.capture import element_type, is_masked, is_tensor
from flashgen.expr.trace.parse import parse
from flashgen.expr.trace.traced import Traced
from flashgen.expr.trace.tracer import trace_mask, trace_score
from flashgen.expr.tree.functions import (
    cos,
    exp,
    k_len,
    log,
    maximum,
    minimum,
    q_len,
    sigmoid,
    sin,
    sqrt,
    tan,
    tanh,
    where,
)
from flashgen.expr.tree.nodes import Const, Index, Length, Load, Node, Scalar, Score, Tensor
from flashgen.expr.tree.text import text
from flashgen.expr.tree.tile_nodes import Range, Search, TileVar
from flashgen.expr.tree.visit import postorder

__all__ = [
    "Band",
    "Const",
    "CudaText",
    "Index",
    "Length",
    "Load",
    "Node",
    "Range",
    "Scalar",
    "Score",
    "Search",
    "Split",
    "Tensor",
    "TileRule",
    "TileVar",
    "Traced",
    "captured_gradients",
    "cos",
    "derivative",
    "element_type",
    "evaluate",
    "evaluate_all",
    "exp",
    "in_products",
    "is_masked",
    "is_softcap",
    "is_tensor",
    "k_len",
    "log",
    "maximum",
    "minimum",
    "of_product",
    "orders",
    "parse",
    "postorder",
    "print_cuda",
    "q_len",
    "range_name",
    "search_name",
    "sigmoid",
    "sin",
    "split",
    "sqrt",
    "tan",
    "tanh",
    "text",
    "tile_rule",
    "trace_mask",
    "trace_score",
    "where",
    "with_constants",
    "with_starts",
]

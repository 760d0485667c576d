"""The C++ of a plan's mask and score: the bodies of the functions that templates declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.common import identifiers
from flashgen.plan.model.expressions import CapturedTensor, Expressions, ScoreForm, Table
from flashgen.plan.model.plans import KernelPlan

if TYPE_CHECKING:
    from flashgen.expr import Load, Node, Split, TileRule
    from flashgen.expr.analysis.key_orders import Orders


@dataclass(frozen=True, slots=True)
class Body:
    """Statements, and the expressions that use their results, by name."""

    statements: tuple[str, ...]
    results: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fact:
    """The terms that depend only on the query or only on the key of a pair, or of a tile."""

    name: str
    type: str
    value: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """An element of a captured tensor that is prefetched before the score of its pair."""

    name: str
    tensor: CapturedTensor
    #: The load in full, and the indices before the last one.
    load: str
    row: Body


@dataclass(frozen=True, slots=True)
class Survey:
    """A table of extremes, and its C++ type."""

    table: Table
    tensor: CapturedTensor
    type: str


@dataclass(frozen=True, slots=True)
class Code:
    """What templates print of a plan's expressions."""

    mask_text: str
    score_text: str
    sink_text: str
    #: Whether there are sines, cosines or tangents.
    has_angles: bool
    tensors: tuple[CapturedTensor, ...]
    surveys: tuple[Survey, ...]
    #: Whether a tile between the first and the last one may have no allowed pair.
    has_holes: bool
    #: Whether the mask is more than comparisons of the key.
    has_rest: bool
    #: Whether that rest is short enough to unroll over the pairs of a lane.
    is_light: bool
    #: Whether it has no slow operations, such as divisions and loads.
    is_quick: bool
    bodies: Mapping[str, Body]
    #: Elements of captured tensors that the score of a pair may be given.
    ahead: tuple[Ahead, ...]
    #: By side: a query, a key, the queries and the keys of a rectangle.
    facts: Mapping[str, tuple[Fact, ...]]


def expression_code(plan: KernelPlan) -> Code:
    """The mask's and the score's functions; the filter ``expression_code``."""
    from flashgen.expr import Const, orders, text
    from flashgen.expr.analysis.hoisting import is_light as is_light_tree
    from flashgen.expr.analysis.hoisting import is_quick as is_quick_tree
    from flashgen.expr.analysis.hoisting import with_keys_apart
    from flashgen.expr.readings.cuda import C_TYPES

    e = plan.expressions
    assert e is not None, "the template asks only where the plan has expressions"
    names = names_of(plan)
    bodies: dict[str, Body] = {}
    facts: dict[str, tuple[Fact, ...]] = {}
    is_light = is_quick = True
    has_rest = False
    if e.mask is not None and e.rule is not None:
        mask = with_keys_apart(e.mask)
        by_order = orders(mask)
        pairs, tiles = _pairs(mask, by_order), _tiles(e.rule)
        for sides, places in ((pairs, _OF_PAIR), (tiles, _OF_TILE)):
            for side, found in sides.facts.items():
                bodies[side] = body_of(found, names)
                facts[side] = tuple(Fact(n, C_TYPES[found[n].type], x) for n, x in bodies[side].results.items())
            for name, root in sides.roots.items():
                bodies[name] = body_of({name: root}, names | places)
        bodies["ordered"] = _ordered_keys(by_order.ordered, pairs, names | _OF_PAIR)
        rest = pairs.roots["rest"]
        has_rest, is_light, is_quick = rest is not Const(True), is_light_tree(rest), is_quick_tree(rest)
        bodies["whole_may"] = body_of({"may": e.rule.may}, names)
        bodies["whole_full"] = body_of({"full": e.rule.full}, names)
        bodies["key_tiles"] = body_of({"begin": e.rule.key_begin, "end": e.rule.key_end}, names)
        bodies["query_tiles"] = body_of({"begin": e.rule.query_begin, "end": e.rule.query_end}, names)
    ahead: dict[Load, Ahead] = {}
    if plan.score is not None:
        ahead = _ahead(plan.score.ahead, e, names)
        of_score = _score(plan.score, ahead, names)
        bodies |= of_score
        facts["first"] = tuple(Fact(name, "float", x) for name, x in of_score["first"].results.items())
    if e.sink is not None:
        bodies["sink"] = body_of({"value": e.sink}, names)
    return Code(
        mask_text="" if e.mask is None else text(e.mask),
        score_text="" if e.score is None else text(e.score),
        sink_text="" if e.sink is None else text(e.sink),
        has_angles=any(_has_angles(root) for root in (e.mask, e.score, e.sink) if root is not None),
        tensors=e.tensors,
        surveys=tuple(_survey(table, e) for table in e.tables),
        has_holes=e.rule is not None and not e.rule.hull_exact,
        has_rest=has_rest,
        is_light=is_light,
        is_quick=is_quick,
        bodies=bodies,
        ahead=tuple(ahead.values()),
        facts=facts,
    )


def _has_angles(root: Node) -> bool:
    from flashgen.expr import postorder

    return any(getattr(node, "op", "") in ("sin", "cos", "tan") for node in postorder(root))


def _survey(table: Table, e: Expressions) -> Survey:
    tensor = next(t for t in e.tensors if t.name == table.tensor)
    return Survey(table, tensor, f"Survey<{tensor.element}, {tensor.rank}, {table.axis}, {e.stretch}>")


def _ahead(loads: tuple[Load, ...], e: Expressions, names: Mapping[str, str]) -> dict[Load, Ahead]:
    """What is fetched ahead, by load."""
    tensors = {tensor.name: tensor for tensor in e.tensors}
    found: dict[Load, Ahead] = {}
    for load in loads:
        name = load.tensor.name
        number = sum(other.tensor is tensors[name] for other in found.values())
        row = body_of({f"{axis:02}": index for axis, index in enumerate(load.indices[:-1])}, names)
        whole = body_of({"value": load}, names)
        found[load] = Ahead(identifiers.captured(name, number + 1), tensors[name], whole.results["value"], row)
    return found


#: How scores spell a pair that is some rows and columns from the first one.
_NEAR_FIRST = {"q": "(first.q + row)", "k": "(first.k + column)", "step.q": "row", "step.k": "column"}
#: The functions of scores for which it may be known that what they are given is near zero.
_NEAR_ZERO = {"tanh": "hyperbolic_tangent<is_near_zero>"}


def _score(form: ScoreForm, ahead: Mapping[Load, Ahead], names: dict[str, str]) -> dict[str, Body]:
    """The bodies of the score's functions, in terms of the first of some pairs."""
    from flashgen.expr import Scalar
    from flashgen.expr.readings.cuda import arguments_near_zero
    from flashgen.expr.tree.rebuild import substitute

    given: dict[Node, Node] = {load: Scalar(f"pair.{found.name}", load.type) for load, found in ahead.items()}
    roots, starts = _from_first_pair(form)
    near = names | _NEAR_FIRST
    bodies = {"first": body_of(starts, names)}
    value = substitute(roots["value"], given)
    found = arguments_near_zero(value) if form.has_spare_registers else ()
    arguments = {str(number): x for number, x in enumerate(found)}
    bodies["score"] = body_of({"value": value}, near | (_NEAR_ZERO if arguments else {}))
    if arguments:
        bodies["near"] = body_of(arguments, near)
    if "slope" in roots:
        bodies["score_and_slope"] = body_of(roots, near)
        if ahead:
            both = {name: substitute(root, given) for name, root in roots.items()}
            bodies["score_and_slope_ahead"] = body_of(both, near)
    return bodies


def _from_first_pair(form: ScoreForm) -> tuple[Mapping[str, Node], dict[str, Node]]:
    """The score of a pair, and its slope if needed, in terms of the first pair; and what is found out at that one."""
    from flashgen.expr import with_constants, with_starts

    roots: Mapping[str, Node] = {"value": form.value}
    if form.slope is not None:
        roots = {**roots, "slope": form.slope}
    constants: Mapping[str, Node] = {}
    if form.has_spare_registers:
        apart = with_constants(roots)
        roots, constants = apart.roots, apart.constants
    started = with_starts(roots)
    found = {**started.starts, **constants}
    return started.roots, {name.removeprefix("first."): node for name, node in found.items()}


#: How kernels spell the bounds of what they ask about.
_OF_PAIR = {"q": "query.q", "k": "key.k"}
_OF_TILE = {"q_lo": "queries.lo", "q_hi": "queries.hi", "k_lo": "keys.lo", "k_hi": "keys.hi"}


def _pairs(mask: Node, by_order: Orders) -> Split:
    """The mask of a pair, and its terms that depend only on the query or only on the key."""
    from flashgen.expr import Index, split
    from flashgen.expr.analysis.key_orders import leaves

    roots = {"allows": mask, "rest": by_order.rest}
    roots |= {f"of_row{number}": leaf for number, leaf in enumerate(leaves(by_order.ordered).values())}
    return split(roots, {"query": [Index("q")], "key": [Index("k")]}, ("q", "k", "lane"))


def _ordered_keys(ordered: Node, pairs: Split, names: Mapping[str, str]) -> Body:
    """The comparisons of keys as bit masks: a word with a bit for each key."""
    from flashgen.expr.analysis.key_orders import leaves

    rows = body_of({name: root for name, root in pairs.roots.items() if name.startswith("of_row")}, names)
    values = dict(zip(leaves(ordered), rows.results.values(), strict=True))
    return Body(rows.statements, {"word": _word(ordered, values)})


def _word(ordered: Node, values: Mapping[Node, str]) -> str:
    """The C++ of a condition for many keys at once, as a word."""
    from flashgen.expr.analysis.key_orders import is_comparison_of_key
    from flashgen.expr.tree.nodes import Binary

    if ordered not in values:
        words = [_word(child, values) for child in ordered.children]
        return f"({words[0]} {ordered.op} {words[1]})" if isinstance(ordered, Binary) else f"~{words[0]}"
    if not is_comparison_of_key(ordered):
        return f"every_bit({values[ordered]})"
    assert isinstance(ordered, Binary), "comparisons have two sides"
    first = values[ordered] if ordered.op in ("<", ">=") else f"after({values[ordered]})"
    return f"{'~' if ordered.op in ('<', '<=') else ''}from({first})"


def _tiles(rule: TileRule) -> Split:
    """The same of a rectangle's queries and keys."""
    from flashgen.expr import TileVar, split

    sides = {"queries": [TileVar("q_lo"), TileVar("q_hi")], "keys": [TileVar("k_lo"), TileVar("k_hi")]}
    return split({"may": rule.may, "full": rule.full}, sides, ("lo", "hi", "whole", "lane"))


def names_of(plan: KernelPlan) -> dict[str, str]:
    """The C++ spelling of b, h, q, k and captured values."""
    e = plan.expressions
    assert e is not None
    of_call = "" if plan.spec.has_own_lengths else "p."
    names = {"q_len": f"{of_call}len_q", "k_len": f"{of_call}len_kv", "products.of_logit": "reciprocal_approx(p.scale)"}
    names["logits.of_product"] = "p.scale"
    names |= {
        name: f"p.{identifiers.captured(name)}" if kind != "bool" else f"(p.{identifiers.captured(name)} != 0)"
        for name, kind in e.scalars
    }
    for table in e.tables:
        survey = f"{table.parameter}(p)"
        names |= {f"range {table.tensor} {side}": f"{survey}.between" for side in table.sides}
        if table.is_searched:
            names |= {f"{kind} {table.tensor} {table.axis}": f"{survey}.{kind}" for kind in ("first", "last")}
    return names | {t.name: f"{t.identifier}(p)" for t in e.tensors}


def body_of(roots: Mapping[str, Node], names: Mapping[str, str]) -> Body:
    """The C++ of some trees."""
    from flashgen.expr import print_cuda

    printed = print_cuda(roots, names)
    return Body(tuple(map(str, printed.statements)), printed.expressions)

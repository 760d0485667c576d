"""``AttentionSpec``: what a kernel computes, with no word about hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from flashgen.common.checks import is_one_of, is_whole
from flashgen.common.show import show
from flashgen.dtypes import ALIASES, CACHE_DTYPES, EIGHT_BIT_OUTPUTS, INPUTS, DType
from flashgen.errors import SpecError
from flashgen.spec.masks.mask import Mask, full

if TYPE_CHECKING:
    from flashgen.expr import Traced
    from flashgen.spec.score import Score

MAX_HEAD_DIM = 256
#: With ``qv`` keys have so many columns at most beside those that they share with values, and values so many. Both
#: come in steps of the tensor cores, times the warps that share the columns of values.
MAX_QV_HEAD_DIM, MAX_QV_HEAD_DIM_V = 64, 512
_QV_STEPS = {"head_dim": 16, "head_dim_v": 64}
#: Kernels copy rows of an 8-bit cache in steps of so many elements.
CACHE_STEP = 4
#: Heads of e4m3 are whole 16-byte chunks.
EIGHT_BIT_STEP = 16
#: Rows that may share a scale, for kernels whose tiles then have one scale for each warp.
SCALE_BLOCKS = (64, 128)
Direction = Literal["forward", "both"]
CacheKind = Literal["contiguous", "paged"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What to compute: softmax attention with given head dimensions, dtype, mask and score.

    ``mask`` is a Mask, a function ``(b, h, q, k) -> condition`` or an array of bools, ``score`` a Score or a function
    ``(s, b, h, q, k) -> number`` of the scaled logit s.

    ``head_dim_v`` defaults to ``head_dim``. ``direction="forward"`` leaves the backward pass out.
    ``deterministic=True`` makes the backward pass bitwise reproducible (the forward always is).
    ``dropout=True`` builds kernels that drop pairs; each call sets the probability (``Dropout``).
    ``varlen=True`` builds kernels for packed sequences (``Sequences``).
    ``cache="contiguous"`` or ``"paged"`` builds forward kernels for keys and values in a cache (``KVCache``).
    ``cache_dtype="e4m3"`` or ``"e5m2"`` is for a cache of 8-bit keys and values; queries and outputs have ``dtype``. A
    call's scales are per tensor, per head or per sequence and head, or with ``page_scales=True`` per page.
    ``qv=True`` builds a kernel for a cache whose values are part of the keys (multi-head latent attention): calls bring
    a second query ``qv`` of ``head_dim_v`` columns, and the scores are ``Q K^T + Qv V^T``.

    ``dtype="e4m3"`` is for 8-bit queries, keys and values, forward only. ``out_dtype`` is then the dtype of O, "bf16"
    (the default) or "fp16". A call's scales are per tensor, per head or per sequence and head. With ``scale_block=64``
    or ``128``, that many neighboring rows of a head share a scale. With a cache, ``cache_dtype`` defaults to "e4m3".
    """

    head_dim: int
    head_dim_v: int = field(default=0, kw_only=True)
    dtype: str = field(default="bf16", kw_only=True)
    mask: Mask = field(default_factory=full, kw_only=True)
    score: Score | None = field(default=None, kw_only=True)
    direction: Direction = field(default="both", kw_only=True)
    deterministic: bool = field(default=False, kw_only=True)
    dropout: bool = field(default=False, kw_only=True)
    varlen: bool = field(default=False, kw_only=True)
    cache: CacheKind | None = field(default=None, kw_only=True)
    cache_dtype: str | None = field(default=None, kw_only=True)
    page_scales: bool = field(default=False, kw_only=True)
    qv: bool = field(default=False, kw_only=True)
    out_dtype: str | None = field(default=None, kw_only=True)
    scale_block: int | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:
        # Functions are accepted too, and the fields hold what became of them.
        def __init__(
            self,
            head_dim: int,
            *,
            head_dim_v: int = 0,
            dtype: str = "bf16",
            mask: Mask | Callable[..., Any] = ...,
            score: Score | Callable[..., Any] | None = None,
            direction: Direction = "both",
            deterministic: bool = False,
            dropout: bool = False,
            varlen: bool = False,
            cache: CacheKind | None = None,
            cache_dtype: str | None = None,
            page_scales: bool = False,
            qv: bool = False,
            out_dtype: str | None = None,
            scale_block: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if type(self.head_dim_v) is int and self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("dtype", "cache_dtype", "out_dtype"):
            value = getattr(self, name)
            if isinstance(value, str) and value.lower() in ALIASES:
                object.__setattr__(self, name, ALIASES[value.lower()].name)
        if self._is_eight_bit and self.out_dtype is None:
            object.__setattr__(self, "out_dtype", next(iter(EIGHT_BIT_OUTPUTS)))
        if self._is_eight_bit and self.cache is not None and self.cache_dtype is None and self.qv is not True:
            object.__setattr__(self, "cache_dtype", self.dtype)
        if (callable(self.mask) and not isinstance(self.mask, type)) or _is_array(self.mask):
            object.__setattr__(self, "mask", Mask.of(self.mask))
        if self.score is not None:
            self._read_score()
        problems = list(self._violations())
        if problems:
            raise SpecError(*problems)

    def _read_score(self) -> None:
        from flashgen.spec.score import Score

        if callable(self.score) and not isinstance(self.score, type):
            object.__setattr__(self, "score", Score.of(self.score))
        if isinstance(self.score, Score) and isinstance(self.mask, Mask):
            # One kernel takes what both captured, so names must differ.
            object.__setattr__(self, "score", self.score.apart_from(self.mask))

    @property
    def scalars(self) -> Mapping[str, int | float]:
        """Captured numbers of the mask and the score, by name."""
        return {name: value for part in self._parts() for name, value in part.scalars.items()}

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Captured tensors of the mask and the score, by name."""
        return {name: value for part in self._parts() for name, value in part.tensors.items()}

    def with_tensors(self, values: Mapping[str, Any]) -> AttentionSpec:
        """The same spec with the captured tensors that ``values`` names replaced."""
        mask, score = self.mask, self.score
        if mask.rest is not None:
            mask = replace(mask, rest=_filled(mask.rest, values))
        if score is not None:
            score = replace(
                score,
                traced=_filled(score.traced, values),
                sink=None if score.sink is None else _filled(score.sink, values),
            )
        return replace(self, mask=mask, score=score)

    def declared(self) -> AttentionSpec:
        """The same spec with types in place of its captured tensors, so that it keeps no memory alive."""
        from flashgen.expr import element_type
        from flashgen.spec.text.declared import Declared

        return self.with_tensors({n: Declared(element_type(t), len(t.shape)) for n, t in self.tensors.items()})

    def _parts(self) -> Iterator[Traced]:
        if self.mask.rest is not None:
            yield self.mask.traced
        if self.score is not None:
            yield self.score.traced
            if self.score.sink is not None:
                yield self.score.sink

    def _violations(self) -> Iterator[str]:
        for name in self._given_dims if self.qv is not True else ():
            value = getattr(self, name)
            if not is_whole(value, 1, MAX_HEAD_DIM):
                yield f"{name}={show(value)} is out of range; use a whole number from 1 to {MAX_HEAD_DIM}"
        if not is_one_of(self.dtype, INPUTS):
            yield f"dtype={show(self.dtype)} is unknown; use one of {', '.join(INPUTS)}"
        if not isinstance(self.mask, Mask):
            yield (
                f"mask={show(self.mask)} is not a mask; "
                "use flashgen.causal(), flashgen.window(left, right) or flashgen.full()"
            )
        if self.score is not None:
            from flashgen.spec.score import Score

            if not isinstance(self.score, Score):
                yield (
                    f"score={show(self.score)} is not a score; "
                    "use flashgen.softcap(cap), flashgen.alibi(slopes) or a function of s, b, h, q and k"
                )
        if not is_one_of(self.direction, ("forward", "both")):
            yield f"direction={show(self.direction)} is unknown; use 'forward' or 'both'"
        for name in ("deterministic", "dropout", "varlen", "page_scales", "qv"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                yield f"{name}={show(value)} is not a bool; use True or False"
        if self.cache is not None and not is_one_of(self.cache, ("contiguous", "paged")):
            yield f"cache={show(self.cache)} is unknown; use 'contiguous', 'paged' or None"
        elif self.cache is not None:
            if is_one_of(self.direction, ("both",)):
                yield f"cache={self.cache!r} has no backward pass; use direction='forward'"
            for name in ("dropout", "varlen"):
                if getattr(self, name) is True:
                    yield f"{name}=True and cache={self.cache!r} do not go together; leave one of them out"
        yield from self._cache_violations()
        if self.qv is True:
            yield from self._qv_violations()
        yield from self._eight_bit_violations()

    @property
    def _given_dims(self) -> tuple[str, ...]:
        """The head dims; only one where the other was left out, so that one sentence says what is wrong with both."""
        return ("head_dim",) if self.head_dim_v is self.head_dim else ("head_dim", "head_dim_v")

    def _qv_violations(self) -> Iterator[str]:
        for name, most in (("head_dim", MAX_QV_HEAD_DIM), ("head_dim_v", MAX_QV_HEAD_DIM_V)):
            value, step = getattr(self, name), _QV_STEPS[name]
            if not is_whole(value, 1, most) or value % step:
                yield f"{name}={show(value)} and qv=True do not go together; use a multiple of {step} up to {most}"
        if self.cache is None:
            yield "qv=True is for a cache; add cache='paged' or cache='contiguous', and direction='forward'"
        if self.cache_dtype is not None:
            yield f"cache_dtype={show(self.cache_dtype)} and qv=True do not go together; use a 16-bit cache"
        if is_one_of(self.dtype, ("fp32", "e4m3")):
            yield f"dtype={self.dtype!r} and qv=True do not go together; use dtype='bf16' or 'fp16'"

    def _cache_violations(self) -> Iterator[str]:
        dtype = self.cache_dtype
        if self.page_scales is True and (dtype is None or not is_one_of(self.cache, ("paged",))):
            yield "page_scales=True is for 8-bit keys in pages; add cache='paged' and cache_dtype='e4m3' or 'e5m2'"
        if dtype is None:
            return
        if not is_one_of(dtype, CACHE_DTYPES):
            yield f"cache_dtype={show(dtype)} is unknown; use {' or '.join(map(repr, CACHE_DTYPES))}, or leave it out"
            return
        if self.cache is None:
            yield f"cache_dtype={dtype!r} is the dtype of a cache; add cache='paged' or cache='contiguous'"
        if is_one_of(self.dtype, ("fp32",)):
            yield f"cache_dtype={dtype!r} needs queries of 16 or 8 bits; use dtype='bf16', 'fp16' or 'e4m3'"
        for name in self._given_dims:
            value = getattr(self, name)
            if is_whole(value, 1, MAX_HEAD_DIM) and value % CACHE_STEP:
                yield f"{name}={value} and cache_dtype={dtype!r} need a multiple of {CACHE_STEP}; pad the heads"

    def _eight_bit_violations(self) -> Iterator[str]:
        """What does not go with 8-bit queries, keys and values, or needs them."""
        if not self._is_eight_bit:
            for name in ("out_dtype", "scale_block"):
                if (value := getattr(self, name)) is not None:
                    yield f"{name}={show(value)} is for dtype='e4m3'; leave it out"
            return
        if is_one_of(self.direction, ("both",)):
            yield "dtype='e4m3' has no backward pass; use direction='forward'"
        if self.dropout is True:
            yield "dropout=True and dtype='e4m3' do not go together; leave one of them out"
        if self.cache is not None and self.scale_block is not None:
            yield (
                f"scale_block={show(self.scale_block)} and cache={show(self.cache)} do not go together; "
                "leave scale_block out, and give each page a scale with page_scales=True"
            )
        for name in self._given_dims if self.cache is None else ():
            value = getattr(self, name)
            if is_whole(value, 1, MAX_HEAD_DIM) and value % EIGHT_BIT_STEP:
                yield f"{name}={value} and dtype='e4m3' need a multiple of {EIGHT_BIT_STEP}; pad the heads"
        if not is_one_of(self.out_dtype, EIGHT_BIT_OUTPUTS):
            yield f"out_dtype={show(self.out_dtype)} is unknown; use {' or '.join(map(repr, EIGHT_BIT_OUTPUTS))}"
        if self.scale_block is not None and (
            not is_whole(self.scale_block, 1, MAX_HEAD_DIM) or self.scale_block not in SCALE_BLOCKS
        ):
            yield (
                f"scale_block={show(self.scale_block)} is not supported; use {' or '.join(map(str, SCALE_BLOCKS))}, or "
                "None for scales of whole heads"
            )

    @property
    def _is_eight_bit(self) -> bool:
        return is_one_of(self.dtype, ("e4m3",))

    @property
    def multiplies_eight_bits(self) -> bool:
        """Whether every kernel multiplies 8-bit numbers. With a cache, the decode kernel converts them to fp16."""
        return self._is_eight_bit and self.cache is None

    @property
    def element(self) -> DType:
        """The row of the dtype table for queries, keys and values."""
        return INPUTS[self.dtype]

    @property
    def out_element(self) -> DType:
        """The row of the dtype table for O."""
        return self.element if self.out_dtype is None else INPUTS[self.out_dtype]

    @property
    def cache_element(self) -> DType:
        """The row of the dtype table for keys and values."""
        return self.element if self.cache_dtype is None else CACHE_DTYPES[self.cache_dtype]

    @property
    def default_scale(self) -> float:
        """1 / sqrt(columns of a product), the factor on scores when a call names none."""
        return 1.0 / math.sqrt(self.score_dim)

    @property
    def score_dim(self) -> int:
        """Columns of the products that scores are made of."""
        return self.head_dim + self.head_dim_v if self.qv else self.head_dim

    @property
    def needs_backward(self) -> bool:
        """Whether the backward pass is part of the spec."""
        return self.direction == "both"

    @property
    def has_own_lengths(self) -> bool:
        """Whether each sequence of a call has a length of its own, which kernels learn where they run."""
        return self.varlen or self.cache is not None

    def describe(self) -> str:
        """One line for people."""
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        extras = [] if self.needs_backward else ["forward only"]
        extras += ["deterministic"] if self.deterministic else []
        extras += [name for name in ("dropout", "varlen") if getattr(self, name)]
        of_dtype = f" of {self.cache_dtype}" if self.cache_dtype else ""
        extras += [f"{self.cache} cache{of_dtype}"] if self.cache else []
        extras += ["a scale for each page"] if self.page_scales else []
        extras += ["values as keys (qv)"] if self.qv else []
        extras += [f"a scale for each {self.scale_block} rows"] if self.scale_block else []
        score = [] if self.score is None else [f"score {self.score.describe()}"]
        dtype = self.dtype if self.out_dtype is None else f"{self.dtype} to {self.out_dtype}"
        return ", ".join([f"head_dim {dims}", dtype, self.mask.describe(), *score, *extras])


def _is_array(value: object) -> bool:
    if value is None or isinstance(value, Mask):
        return False
    from flashgen.expr import is_tensor

    return is_tensor(value)


def _filled(traced: Traced, values: Mapping[str, Any]) -> Traced:
    return replace(traced, tensors={name: values.get(name, tensor) for name, tensor in traced.tensors.items()})

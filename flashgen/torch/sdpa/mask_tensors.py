"""Masks that are tensors, as torch's own attention function takes them."""

from __future__ import annotations

import json
from functools import lru_cache

import torch

from flashgen.torch.program import Program, program_named

#: The name under which kernels take the tensor.
_NAME = "attn_mask"
#: The lowest finite float32. Everything below it is -inf, which excludes the key: the row may have no other key.
_LOWEST = torch.finfo(torch.float32).min
#: Lower logits count as this one. The output is the same without it: a row that has nothing but finfo.min averages its
#: values, as in torch. Gradients need it: below about -1e6, the float32 log-sum-exp of a row is too coarse to count the
#: row's keys.
_FLOOR = -float(2**20)


@lru_cache(maxsize=256)
def mask_program(dtype: torch.dtype, axes: str) -> Program:
    """The program of a bool mask (True: may attend) or of a float mask (added to the scaled logit).

    ``axes`` has one letter for each of the tensor's four dimensions: its index out of ``bhqk``, or ``0`` where the
    tensor has one element for all. Values and sizes do not matter.
    """
    element = f"{_NAME}[{', '.join(axes)}]"
    fields: dict[str, object] = {"captured": {_NAME: f"{str(dtype).removeprefix('torch.')}[{len(axes)}]"}}
    if dtype == torch.bool:
        fields["mask"] = {"where": element}
    else:
        fields["mask"] = {"where": f"{element} >= {_LOWEST!r}"}
        fields["score"] = f"maximum(s + {element}, {_FLOOR!r})"
    return program_named(json.dumps(fields))

"""GPUs by the names that people call them, and the architecture to build for."""

from __future__ import annotations

import re

#: Architecture -> its GPUs, in lower case and without blanks and punctuation.
_PRODUCTS = {
    "sm_75": "t4 quadrortx4000 quadrortx5000 quadrortx6000 quadrortx8000 titanrtx",
    "sm_80": "a30 a100 a800",
    "sm_86": "a2 a10 a10g a16 a40 rtxa2000 rtxa4000 rtxa4500 rtxa5000 rtxa6000 a6000",
    "sm_87": "orin jetsonorin agxorin orinnx orinnano",
    "sm_89": "l4 l20 l40 l40s rtx6000ada ada6000",
    "sm_90a": "h20 h100 h200 h800 gh200",
    "sm_100": "b100 b200 gb200",
    "sm_103": "b300 gb300",
    "sm_120": "rtxpro6000",
}
_ARCHS = {product: arch for arch, products in _PRODUCTS.items() for product in products.split()}
#: Generations: the two digits of GeForce names, and names that NVIDIA gives them.
_GEFORCE = {"20": "sm_75", "16": "sm_75", "30": "sm_86", "40": "sm_89", "50": "sm_120"}
_GENERATIONS = {"turing": "sm_75", "ampere": "sm_80", "ada": "sm_89", "hopper": "sm_90a", "blackwell": "sm_100"}
_GEFORCE_NAME = re.compile(r"(?:rtx|gtx)?(16|20|30|40|50)[5-9]0(?:ti|super|tisuper|d)?")
#: Words of a GPU's full name that do not tell generations apart.
_NOISE = re.compile(r"nvidia|geforce|tesla|tensor|core|gpu|laptop|pcie|nvl|sxm\d?|hbm\d?e?|\d+gb")


def arch_of_product(name: str) -> str | None:
    """The architecture for a name such as ``h100``, ``RTX 4090`` or ``A100-SXM4-80GB``; None for an unknown one."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    text = "".join(word for word in words if not _NOISE.fullmatch(word))
    if match := _GEFORCE_NAME.fullmatch(text):
        return _GEFORCE[match[1]]
    return _ARCHS.get(text) or _GENERATIONS.get(text)

"""The pages of reference leave nothing out: public names, fields of spec files, and GPUs."""

from __future__ import annotations

import re

import flashgen as fg
from flashgen.arch import ARCHS
from flashgen.spec.text import reading
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


def text(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def entries() -> list[str]:
    """What the pages on Python take from docstrings."""
    pages = sorted(REFERENCE.glob("python*.md"))
    return [name for page in pages for name in re.findall(r"^::: flashgen\.(\S+)$", text(page.name), flags=re.M)]


def test_every_public_name_has_an_entry_and_only_one() -> None:
    assert sorted(entries()) == sorted(fg.__all__)


def test_every_name_of_the_laboratory_has_an_entry_and_only_one() -> None:
    found = re.findall(r"^::: flashgen\.lab\.\S*\.(\w+)$", text("laboratory.md"), flags=re.M)
    assert sorted(found) == sorted(fg.lab.__all__)


def test_every_field_of_a_spec_file_is_in_a_table() -> None:
    spec, schedule = text("spec-files.md").split("## Fields of a schedule")
    for fields, page in (
        (reading.SPEC_FIELDS + reading.MASK_FIELDS + reading.CONDITION_FIELDS, spec),
        (reading.SCHEDULE_FIELDS + reading.WARP_FIELDS + reading.BACKWARD_FIELDS, schedule),
    ):
        rows = "\n".join(line for line in page.splitlines() if line.startswith("| "))
        assert not [field for field in fields if not re.search(rf"\b{field}\b", rows)]


def test_every_gpu_is_in_the_table_of_what_is_supported() -> None:
    (section,) = re.findall(r"^## GPUs\n(.*?)^## ", text("supported.md"), flags=re.M | re.S)
    assert set(re.findall(r"\bsm_\w+", section)) == set(ARCHS)


def test_every_named_mask_and_score_is_in_the_tables() -> None:
    page = text("masks.md")
    names = re.findall(r"^::: flashgen\.([a-z]\w*)$", text("python-masks.md"), flags=re.M)
    missing = [name for name in names if not re.search(rf"\b{name}\b", page)]
    assert missing == []

"""Does a kernel compute what its spec says? Small problems, and the error beside its bound."""

from flashgen.verify.cases import Case, Inputs, cases_for
from flashgen.verify.verification import CaseResult, Run, Verification, verify

__all__ = ["Case", "CaseResult", "Inputs", "Run", "Verification", "cases_for", "verify"]

"""Checks kernels against the oracle: small problems, and the error beside its bound."""

from flashgen.verify.cases.case import Case, Inputs, cases_for
from flashgen.verify.cases.decoding import decode_cases_for, draw_decode
from flashgen.verify.cases.drawn import Tiles, draw
from flashgen.verify.expectation import CaseResult, Expectation, expect
from flashgen.verify.shrink import shrunk
from flashgen.verify.tally import OutputReport, Tally
from flashgen.verify.trial import Mode, Trial, modes
from flashgen.verify.trial_text import parse_trial, trial_text
from flashgen.verify.verification import Run, Verification, run_case, verify

__all__ = [
    "Case",
    "CaseResult",
    "Expectation",
    "Inputs",
    "Mode",
    "OutputReport",
    "Run",
    "Tally",
    "Tiles",
    "Trial",
    "Verification",
    "cases_for",
    "decode_cases_for",
    "draw",
    "draw_decode",
    "expect",
    "modes",
    "parse_trial",
    "run_case",
    "shrunk",
    "trial_text",
    "verify",
]

"""Inputs, the float64 oracle and error budgets, shared by the tests, the benchmarks and doctor."""

from flaop.testing.budget import chunk_budget_reference
from flaop.testing.cases import pairwise
from flaop.testing.inputs import kda_inputs
from flaop.testing.oracle import kda_oracle
from flaop.testing.tolerances import assert_within_budget, relative_error, worst_error

__all__ = [
    "assert_within_budget",
    "chunk_budget_reference",
    "kda_inputs",
    "kda_oracle",
    "pairwise",
    "relative_error",
    "worst_error",
]

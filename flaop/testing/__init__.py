"""Inputs, the float64 oracle and error budgets, shared by the tests, the benchmarks and doctor."""

from flaop.testing.budget import chunk_budget_reference
from flaop.testing.cases import pairwise
from flaop.testing.decay_budget import decay_budget_reference
from flaop.testing.decay_inputs import gla_inputs, simple_gla_inputs
from flaop.testing.decay_oracle import (
    gla_oracle,
    linear_attn_oracle,
    mamba2_oracle,
    simple_gla_oracle,
)
from flaop.testing.delta_stage_oracles import (
    chunk_delta_fwd_h_oracle,
    recompute_w_u_oracle,
    solve_tril_oracle,
)
from flaop.testing.gdn_budget import gdn_budget_reference
from flaop.testing.gdn_inputs import gdn_inputs
from flaop.testing.gdn_oracle import gdn_oracle
from flaop.testing.inputs import kda_inputs
from flaop.testing.oracle import kda_oracle
from flaop.testing.stage_oracles import (
    chunk_fwd_h_oracle,
    chunk_fwd_o_oracle,
    chunk_local_cumsum_oracle,
)
from flaop.testing.step_inputs import (
    STEP_FAMILIES,
    STEP_VARIANTS,
    packed_projection,
    slot_indices,
    step_arguments,
    step_pool,
    step_tokens,
)
from flaop.testing.step_oracle import step_oracle
from flaop.testing.tolerances import assert_within_budget, relative_error, worst_error

__all__ = [
    "STEP_FAMILIES",
    "STEP_VARIANTS",
    "assert_within_budget",
    "chunk_budget_reference",
    "chunk_delta_fwd_h_oracle",
    "chunk_fwd_h_oracle",
    "chunk_fwd_o_oracle",
    "chunk_local_cumsum_oracle",
    "decay_budget_reference",
    "gdn_budget_reference",
    "gdn_inputs",
    "gdn_oracle",
    "gla_inputs",
    "gla_oracle",
    "kda_inputs",
    "kda_oracle",
    "linear_attn_oracle",
    "mamba2_oracle",
    "packed_projection",
    "pairwise",
    "recompute_w_u_oracle",
    "relative_error",
    "simple_gla_inputs",
    "simple_gla_oracle",
    "slot_indices",
    "solve_tril_oracle",
    "step_arguments",
    "step_oracle",
    "step_pool",
    "step_tokens",
    "worst_error",
]

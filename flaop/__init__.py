"""Linear attention as first-class PyTorch operators.

Importing flaop registers `torch.ops.flaop.*`. It needs no GPU, opens no CUDA context and imports
no triton: the kernels are loaded when a CUDA op first runs.
"""

from flaop import _extension  # noqa: F401  (registers the schemas; must come first)
from flaop._paths import Explanation, backend, explain, supports, warmup
from flaop._version import __version__
from flaop.functional import chunk_kda, flash_kda_fwd, fused_recurrent_kda, kda
from flaop.functional_decay import (
    chunk_gla,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
    gla,
    simple_gla,
)
from flaop.functional_decay_steps import (
    chunk_gla_pool_,
    chunk_simple_gla_pool_,
    gla_commit_,
    gla_step_,
    gla_verify,
    simple_gla_commit_,
    simple_gla_step_,
    simple_gla_verify,
)
from flaop.functional_delta_rule import (
    chunk_delta_rule,
    delta_rule,
    fused_recurrent_delta_rule,
)
from flaop.functional_delta_stages import chunk_delta_fwd_h, recompute_w_u, solve_tril
from flaop.functional_gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule,
    gdn,
)
from flaop.functional_gated_delta_rule_steps import (
    chunk_gated_delta_rule_pool_,
    gated_delta_rule_commit_,
    gated_delta_rule_step_,
    gated_delta_rule_verify,
)
from flaop.functional_linear import chunk_linear_attn, fused_recurrent_linear_attn, linear_attn
from flaop.functional_mamba2 import mamba2_ssd
from flaop.functional_retention import (
    chunk_lightning_attn,
    chunk_retention,
    fused_recurrent_lightning_attn,
    fused_recurrent_retention,
    lightning_attn,
    retention,
)
from flaop.functional_stages import chunk_fwd_h, chunk_fwd_o, chunk_local_cumsum
from flaop.functional_steps import chunk_kda_pool_, kda_commit_, kda_step_, kda_verify
from flaop.ops import delta_stages as _delta_stage_kernels  # noqa: F401
from flaop.ops import gated_delta_rule as _gated_delta_rule_kernels  # noqa: F401
from flaop.ops import gla as _gla_kernels  # noqa: F401  (register kernels and fakes)
from flaop.ops import kda as _kda_kernels  # noqa: F401
from flaop.ops import simple_gla as _simple_gla_kernels  # noqa: F401
from flaop.ops import stages as _stage_kernels  # noqa: F401
from flaop.ops import steps as _step_kernels  # noqa: F401
from flaop.ops import summaries as _summary_kernels  # noqa: F401

__all__ = [
    "Explanation",
    "__version__",
    "backend",
    "chunk_delta_fwd_h",
    "chunk_delta_rule",
    "chunk_fwd_h",
    "chunk_fwd_o",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_pool_",
    "chunk_gla",
    "chunk_gla_pool_",
    "chunk_kda",
    "chunk_kda_pool_",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_local_cumsum",
    "chunk_retention",
    "chunk_simple_gla",
    "chunk_simple_gla_pool_",
    "delta_rule",
    "explain",
    "flash_kda_fwd",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "gated_delta_rule",
    "gated_delta_rule_commit_",
    "gated_delta_rule_step_",
    "gated_delta_rule_verify",
    "gdn",
    "gla",
    "gla_commit_",
    "gla_step_",
    "gla_verify",
    "kda",
    "kda_commit_",
    "kda_step_",
    "kda_verify",
    "lightning_attn",
    "linear_attn",
    "mamba2_ssd",
    "recompute_w_u",
    "retention",
    "simple_gla",
    "simple_gla_commit_",
    "simple_gla_step_",
    "simple_gla_verify",
    "solve_tril",
    "supports",
    "warmup",
]

"""The Gated DeltaNet layer (GDN, arXiv:2412.06464)."""

import torch
from torch import nn

from flaop.nn.deltanet import DeltaRuleLayer, shared_arguments
from flaop.nn.recurrent import check_dt_range, draw_softplus_gate


class GatedDeltaNet(DeltaRuleLayer):
    """Projections, short convolutions, the gated delta rule, gated output norm, projection.

    The L2 norm of q and k, the decay gate and the sigmoid of beta run inside the operator; the
    log decay per token is -exp(A_log) softplus(a_proj(x) + dt_bias), one per value head. Parameter
    names follow the layer of this name in flash-linear-attention.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K (the paper: 2 K).
        conv_size: window of the short convolutions, in tokens; 0: none, silu alone.
        use_gate: whether silu of a projection of x multiplies the normed output.
        dt_range: smallest and largest initial dt; the log decay per token starts between
            -dt and -16 dt, so smaller values mean a longer memory.
        allow_neg_eigval: whether beta reaches 2 instead of 1, so that the state's transition
            may have negative eigenvalues (arXiv:2411.12537).
        norm_eps: epsilon of the output norm.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of flaop.gated_delta_rule; None follows flaop.backend.
        context_parallel: ranks that hold shards of the sequences, see set_context_parallel.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        use_gate: bool = True,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        state_v_first: bool = False,
        backend: str | None = None,
        context_parallel=None,
    ):
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size),
            *(use_gate, allow_neg_eigval, norm_eps, state_v_first, backend),
        )
        self.dt_range = check_dt_range(dt_range)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        self.reset_gate()
        self.set_context_parallel(context_parallel)

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "GatedDeltaNet":
        return cls(**shared_arguments(config), dt_range=config.dt_range)

    def reset_gate(self) -> None:
        """Draws A_log and dt_bias."""
        draw_softplus_gate(self.A_log, self.dt_bias, self.dt_range)

    def gate(self, x):
        options = {"A_log": self.A_log, "dt_bias": self.dt_bias, "use_gate_in_kernel": True}
        return self.a_proj(x), options

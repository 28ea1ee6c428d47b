"""The Kimi Delta Attention layer (Kimi Linear, arXiv:2510.26692)."""

import torch
from torch import Tensor, nn

from flaop.nn.norm import GatedRMSNorm
from flaop.nn.recurrent import (
    LinearAttentionLayer,
    LinearAttentionState,
    StateCache,
    check_dt_range,
    draw_rates,
    draw_softplus_gate,
)

GATES = ("softplus", "bounded")

KimiDeltaAttentionState = LinearAttentionState
KimiDeltaAttentionCache = StateCache


class KimiDeltaAttention(LinearAttentionLayer):
    """Projections, short convolutions, the KDA operator, gated output norm, output projection.

    The L2 norm of q and k, the decay gate and the sigmoid of beta run inside the operator.
    Parameter names follow the published Kimi Linear checkpoints.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head, also the rank of the two gate projections.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K.
        conv_size: window of the short convolutions, in tokens; 0: none.
        gate: "softplus": log decay -exp(A_log) softplus(f(x) + dt_bias), or
            "bounded": lower_bound * sigmoid(exp(A_log) (f(x) + dt_bias)).
        lower_bound: smallest log decay per token of the bounded gate, in [-5, 0).
        dt_range: smallest and largest initial dt; the log decay per token starts between
            -dt and -16 dt, so smaller values mean a longer memory.
        allow_neg_eigval: whether beta reaches 2 instead of 1, so that the state's transition
            may have negative eigenvalues.
        norm_eps: epsilon of the output norm.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of flaop.kda; None follows flaop.backend.
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
        gate: str = "softplus",
        lower_bound: float = -5.0,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        state_v_first: bool = False,
        backend: str | None = None,
        context_parallel=None,
    ):
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size),
            *(state_v_first, backend),
        )
        if gate not in GATES:
            raise ValueError(f"gate must be one of {GATES}, got {gate!r}")
        if not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0), got {lower_bound}")
        self.dt_range = check_dt_range(dt_range)
        self.lower_bound = lower_bound if gate == "bounded" else None
        self.allow_neg_eigval = allow_neg_eigval
        HV, V = self.num_v_heads, self.head_v_dim
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, HV * head_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, HV, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV))
        self.dt_bias = nn.Parameter(torch.empty(HV * head_dim))
        self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.g_b_proj = nn.Linear(head_dim, self.value_size, bias=False)
        self.o_norm = GatedRMSNorm(V, norm_eps)
        self.o_proj = nn.Linear(self.value_size, hidden_size, bias=False)
        self.reset_gate()
        self.set_context_parallel(context_parallel)

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "KimiDeltaAttention":
        return cls(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            num_v_heads=config.num_v_heads,
            head_v_dim=config.head_v_dim,
            conv_size=config.conv_size,
            gate=config.gate,
            lower_bound=config.lower_bound,
            dt_range=config.dt_range,
            allow_neg_eigval=config.allow_neg_eigval,
            norm_eps=config.norm_eps,
            state_v_first=config.state_v_first,
            backend=config.backend,
        )

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Draws A_log and dt_bias so that both gates start with the same decay rates A * dt."""
        if self.lower_bound is None:
            draw_softplus_gate(self.A_log, self.dt_bias, self.dt_range)
            return
        A, dt = draw_rates(self.A_log, self.dt_bias, self.dt_range)
        rate = dt * A.repeat_interleave(self.head_dim)
        self.A_log.zero_()
        self.dt_bias.copy_(torch.logit((rate / -self.lower_bound).clamp(max=0.9)))

    def forward(
        self,
        x: Tensor,  # [B, T, hidden_size]
        state: KimiDeltaAttentionState | None = None,
        cu_seqlens: Tensor | None = None,  # [N + 1]
        output_state: bool = False,
    ) -> tuple[Tensor, KimiDeltaAttentionState | None]:
        """Runs the layer over a piece of each sequence; gradients flow through both states.

        Args:
            x: [B, T, hidden_size]; B = 1 with cu_seqlens.
            state: the state before the piece; None is zeros.
            cu_seqlens: [N + 1] int32 or int64 on x's device, bounds of packed sequences.
            output_state: whether to return the state after the piece.

        Returns:
            y [B, T, hidden_size], and the state or None.
        """
        (q, k, v), convs = self.project(x, state, cu_seqlens, output_state)
        g = self.f_b_proj(self.f_a_proj(x))
        g = g.unflatten(-1, (self.num_v_heads, self.head_dim))
        options = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "safe_gate": self.lower_bound is not None,
            "lower_bound": self.lower_bound,
            "state_v_first": self.state_v_first,
        }
        inputs = (q, k, v, g, self.b_proj(x))
        o, recurrent = self.operate("kda", inputs, options, state, cu_seqlens, output_state)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        y = self.o_proj(self.o_norm(o, gate).flatten(2))
        if not output_state:
            return y, None
        return y, LinearAttentionState(*convs, recurrent)

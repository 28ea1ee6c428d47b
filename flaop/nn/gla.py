"""The gated linear attention layer (GLA, arXiv:2312.06635)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.nn.norm import GatedRMSNorm
from flaop.nn.recurrent import LinearAttentionLayer, LinearAttentionState


class GatedLinearAttention(LinearAttentionLayer):
    """Projections, a low-rank gate per key channel, the GLA operator, gated output norm.

    The log decay per token is logsigmoid(low-rank projection of x) / gate_logit_normalizer.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K (the paper: 2 K).
        conv_size: window of short convolutions after q, k and v, in tokens; 0: none, as in the
            paper.
        gate_low_rank_dim: rank of the gate's projection.
        gate_logit_normalizer: divisor of the log decay; larger values mean a longer memory.
        norm_eps: epsilon of the output norm.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of flaop.gla; None follows flaop.backend.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 0,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        state_v_first: bool = False,
        backend: str | None = None,
    ):
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size),
            *(state_v_first, backend),
        )
        if not gate_logit_normalizer > 0:
            raise ValueError(f"gate_logit_normalizer must be positive, got {gate_logit_normalizer}")
        self.gate_logit_normalizer = gate_logit_normalizer
        self.gk_a_proj = nn.Linear(hidden_size, gate_low_rank_dim, bias=False)
        self.gk_b_proj = nn.Linear(gate_low_rank_dim, self.num_v_heads * head_dim)
        self.g_proj = nn.Linear(hidden_size, self.value_size, bias=False)
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, activation="silu")
        self.o_proj = nn.Linear(self.value_size, hidden_size, bias=False)

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "GatedLinearAttention":
        return cls(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            num_v_heads=config.num_v_heads,
            head_v_dim=config.head_v_dim,
            conv_size=config.conv_size,
            gate_low_rank_dim=config.gate_low_rank_dim,
            gate_logit_normalizer=config.gate_logit_normalizer,
            norm_eps=config.norm_eps,
            state_v_first=config.state_v_first,
            backend=config.backend,
        )

    def forward(
        self,
        x: Tensor,  # [B, T, hidden_size]
        state: LinearAttentionState | None = None,
        cu_seqlens: Tensor | None = None,  # [N + 1]
        output_state: bool = False,
    ) -> tuple[Tensor, LinearAttentionState | None]:
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
        inputs = (q, k, v, self._log_decay(x))
        options = {"state_v_first": self.state_v_first}
        o, recurrent = self.operate("gla", inputs, options, state, cu_seqlens, output_state)
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        y = self.o_proj(self.o_norm(o, gate).flatten(2))
        return y, LinearAttentionState(*convs, recurrent) if output_state else None

    def _log_decay(self, x: Tensor) -> Tensor:
        """[B, T, HV, K] in the dtype of the projection, computed in float32."""
        logits = self.gk_b_proj(self.gk_a_proj(x))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        g = (F.logsigmoid(wide) / self.gate_logit_normalizer).to(logits.dtype)
        return g.unflatten(-1, (self.num_v_heads, self.head_dim))

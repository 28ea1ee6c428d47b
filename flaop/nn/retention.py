"""Layers with a constant decay per head: retention (RetNet) and lightning attention."""

import torch
from torch import Tensor, nn

from flaop.nn.norm import GatedRMSNorm
from flaop.nn.recurrent import LinearAttentionLayer, LinearAttentionState


class _ConstantDecayAttention(LinearAttentionLayer):
    """Projections, flaop.simple_gla with the buffer g_gamma, gated output norm and projection.

    Args:
        g_gamma: [HV], log decay per token of each value head: a buffer, not in the state_dict.
        norm_heads: whether the output norm is over each head, else over all of them together.
        gate_activation: "sigmoid" or "silu", of the output gate.

    The others are those of LinearAttentionLayer.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_v_heads: int | None,
        head_v_dim: int | None,
        conv_size: int,
        norm_eps: float,
        state_v_first: bool,
        backend: str | None,
        *,
        g_gamma: Tensor,
        norm_heads: bool,
        gate_activation: str,
        activation: str | None,
    ):
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size),
            *(state_v_first, backend, activation),
        )
        self.norm_heads = norm_heads
        self.register_buffer("g_gamma", g_gamma, persistent=False)
        self.g_proj = nn.Linear(hidden_size, self.value_size, bias=False)
        norm_size = self.head_v_dim if norm_heads else self.value_size
        self.o_norm = GatedRMSNorm(norm_size, norm_eps, activation=gate_activation)
        self.o_proj = nn.Linear(self.value_size, hidden_size, bias=False)

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
        inputs = (q, k, v, None, self.g_gamma)
        options = {"state_v_first": self.state_v_first}
        o, recurrent = self.operate("simple_gla", inputs, options, state, cu_seqlens, output_state)
        gate = self.g_proj(x)
        if self.norm_heads:
            y = self.o_norm(o, gate.unflatten(-1, (self.num_v_heads, self.head_v_dim))).flatten(2)
        else:
            y = self.o_norm(o.flatten(2), gate)
        y = self.o_proj(y)
        return y, LinearAttentionState(*convs, recurrent) if output_state else None


class MultiScaleRetention(_ConstantDecayAttention):
    """Retention with its swish output gate and a norm over each head (RetNet, arXiv:2307.08621).

    Value head h decays by 1 - 2^(-5 - h) a token. There are no rotary positions: the decay, and
    the convolutions where there are any, tell tokens apart, and a state needs no position.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K (the paper: 2 K).
        conv_size: window of short convolutions after q, k and v, in tokens; 0: none, as in the
            paper.
        norm_eps: epsilon of the output norm.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of flaop.simple_gla; None follows flaop.backend.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 0,
        norm_eps: float = 1e-5,
        state_v_first: bool = False,
        backend: str | None = None,
    ):
        head = torch.arange(num_heads if num_v_heads is None else num_v_heads, dtype=torch.float32)
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size, norm_eps),
            *(state_v_first, backend),
            g_gamma=torch.log1p(-torch.exp2(-5 - head)),
            norm_heads=True,
            gate_activation="silu",
            activation=None,
        )

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "MultiScaleRetention":
        return cls(*_shared(config))


class LightningAttention(_ConstantDecayAttention):
    """Lightning attention as in MiniMax-01 (arXiv:2401.04658, arXiv:2501.08313).

    Value head h of layer i decays by exp(-(8 / HV) (1 - i / num_layers) h) a token: later layers
    remember longer. q, k and v pass a silu, the output a norm over all heads and a sigmoid gate.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        layer_idx: index of this layer, from 0.
        num_layers: number of layers of the model.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K.
        conv_size: window of short convolutions after q, k and v, in tokens; 0: none, as in the
            paper.
        norm_eps: epsilon of the output norm.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of flaop.simple_gla; None follows flaop.backend.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        layer_idx: int,
        num_layers: int,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 0,
        norm_eps: float = 1e-5,
        state_v_first: bool = False,
        backend: str | None = None,
    ):
        if not 0 <= layer_idx < num_layers:
            raise ValueError(
                f"layer_idx must be in [0, num_layers), got {layer_idx} of {num_layers} layers"
            )
        heads = num_heads if num_v_heads is None else num_v_heads
        head = torch.arange(heads, dtype=torch.float32)
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size, norm_eps),
            *(state_v_first, backend),
            g_gamma=-(8 / heads) * (1 - layer_idx / num_layers) * head,
            norm_heads=False,
            gate_activation="sigmoid",
            activation="silu",
        )

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "LightningAttention":
        hidden_size, num_heads, head_dim, *others = _shared(config)
        names = ("num_v_heads", "head_v_dim", "conv_size", "norm_eps", "state_v_first", "backend")
        return cls(
            *(hidden_size, num_heads, head_dim),
            layer_idx=layer_idx,
            num_layers=config.num_layers,
            **dict(zip(names, others, strict=True)),
        )


def _shared(config) -> tuple:
    """The arguments of MultiScaleRetention, in order."""
    return (
        *(config.hidden_size, config.num_heads, config.head_dim, config.num_v_heads),
        *(config.head_v_dim, config.conv_size, config.norm_eps, config.state_v_first),
        config.backend,
    )

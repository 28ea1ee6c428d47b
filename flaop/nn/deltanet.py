"""The DeltaNet layer (arXiv:2406.06484), and what it shares with its gated form."""

from torch import Tensor, nn

from flaop.nn.norm import GatedRMSNorm, RMSNorm
from flaop.nn.recurrent import LinearAttentionLayer, LinearAttentionState


class DeltaRuleLayer(LinearAttentionLayer):
    """Projections, short convolutions, a delta rule, output norm with or without gate, projection.

    Args:
        use_gate: whether silu of a projection of x multiplies the normed output.
        allow_neg_eigval: whether beta reaches 2 instead of 1.
        norm_eps: epsilon of the output norm.

    The others are those of LinearAttentionLayer. A layer with a decay defines gate.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_v_heads: int | None,
        head_v_dim: int | None,
        conv_size: int,
        use_gate: bool,
        allow_neg_eigval: bool,
        norm_eps: float,
        state_v_first: bool,
        backend: str | None,
    ):
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size),
            *(state_v_first, backend),
            activation="silu",
        )
        self.allow_neg_eigval = allow_neg_eigval
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_size, bias=False)
            self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, activation="silu")
        else:
            self.g_proj = None
            self.o_norm = RMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = nn.Linear(self.value_size, hidden_size, bias=False)

    def gate(self, x: Tensor) -> tuple[Tensor | None, dict]:
        """g [B, T, HV] or None, and the operator's options that go with it."""
        return None, {}

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
        qkv, convs = self.project(x, state, cu_seqlens, output_state)
        g, options = self.gate(x)
        inputs = (*qkv, g, self.b_proj(x))
        options |= {
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": self.state_v_first,
        }
        o, recurrent = self.operate(
            *("gated_delta_rule", inputs, options, state, cu_seqlens, output_state)
        )
        if self.g_proj is None:
            o = self.o_norm(o)
        else:
            o = self.o_norm(o, self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim)))
        y = self.o_proj(o.flatten(2))
        return y, LinearAttentionState(*convs, recurrent) if output_state else None


class DeltaNet(DeltaRuleLayer):
    """Projections, short convolutions, the delta rule, output norm, output projection.

    The L2 norm of q and k and the sigmoid of beta run inside the operator. Parameter names follow
    the layer of this name in flash-linear-attention.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K, as in the paper.
        conv_size: window of the short convolutions, in tokens; 0: none, silu alone.
        use_gate: whether silu of a projection of x multiplies the normed output; the paper has
            no gate.
        allow_neg_eigval: whether beta reaches 2 instead of 1, so that the state's transition
            may have negative eigenvalues (arXiv:2411.12537).
        norm_eps: epsilon of the output norm.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of flaop.gated_delta_rule; None follows flaop.backend.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        use_gate: bool = False,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        state_v_first: bool = False,
        backend: str | None = None,
    ):
        super().__init__(
            *(hidden_size, num_heads, head_dim, num_v_heads, head_v_dim, conv_size),
            *(use_gate, allow_neg_eigval, norm_eps, state_v_first, backend),
        )

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "DeltaNet":
        return cls(**shared_arguments(config))


def shared_arguments(config) -> dict:
    """The arguments of both layers that a configuration has, by name."""
    names = (
        *("hidden_size", "num_heads", "head_dim", "num_v_heads", "head_v_dim", "conv_size"),
        *("allow_neg_eigval", "norm_eps", "state_v_first", "backend"),
    )
    return {name: getattr(config, name) for name in names}

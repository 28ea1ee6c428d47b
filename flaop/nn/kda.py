"""The Kimi Delta Attention layer (Kimi Linear, arXiv:2510.26692)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flaop.functional import kda
from flaop.nn.conv import ShortConvolution
from flaop.nn.norm import GatedRMSNorm

GATES = ("softplus", "bounded")

# Where the initial decay rates A * dt start, as in Mamba-2 (arXiv:2405.21060).
_A_RANGE = (1.0, 16.0)


class KimiDeltaAttentionState(NamedTuple):
    """What a layer carries from one piece of a sequence to the next."""

    q_conv: Tensor  # [N, W - 1, H * K]
    k_conv: Tensor  # [N, W - 1, H * K]
    v_conv: Tensor  # [N, W - 1, HV * V]
    recurrent: Tensor  # [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32


class KimiDeltaAttentionCache(nn.Module):
    """A state in static buffers, updated in place: what a captured decode step reads and writes."""

    def __init__(self, state: KimiDeltaAttentionState):
        super().__init__()
        for name, tensor in state._asdict().items():
            self.register_buffer(name, tensor)

    def state(self) -> KimiDeltaAttentionState:
        return KimiDeltaAttentionState(self.q_conv, self.k_conv, self.v_conv, self.recurrent)

    @torch.no_grad()
    def update(self, state: KimiDeltaAttentionState) -> None:
        for buffer, value in zip(self.state(), state, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


class KimiDeltaAttention(nn.Module):
    """Projections, short convolutions, the KDA operator, gated output norm, output projection.

    The L2 norm of q and k, the decay gate and the sigmoid of beta run inside the operator.
    Parameter names follow the published Kimi Linear checkpoints.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head, also the rank of the two gate projections.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K.
        conv_size: window of the short convolutions, in tokens.
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
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        if num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads, got {num_v_heads} and {num_heads}"
            )
        if gate not in GATES:
            raise ValueError(f"gate must be one of {GATES}, got {gate!r}")
        if not -5.0 <= lower_bound < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0), got {lower_bound}")
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_dim, self.head_v_dim = head_dim, head_v_dim
        if not 0.0 < dt_range[0] <= dt_range[1]:
            raise ValueError(f"dt_range must be positive and ordered, got {dt_range}")
        self.dt_range = tuple(dt_range)
        self.lower_bound = lower_bound if gate == "bounded" else None
        self.allow_neg_eigval = allow_neg_eigval
        self.state_v_first = state_v_first
        self.backend = backend

        key_size, value_size = num_heads * head_dim, num_v_heads * head_v_dim
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.q_conv1d = ShortConvolution(key_size, conv_size)
        self.k_conv1d = ShortConvolution(key_size, conv_size)
        self.v_conv1d = ShortConvolution(value_size, conv_size)
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, num_v_heads * head_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads * head_dim))
        self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.g_b_proj = nn.Linear(head_dim, value_size, bias=False)
        self.o_norm = GatedRMSNorm(head_v_dim, norm_eps)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.reset_gate()

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
        A = torch.empty_like(self.A_log).uniform_(*_A_RANGE)
        dt = torch.empty_like(self.dt_bias).uniform_(*map(math.log, self.dt_range)).exp()
        if self.lower_bound is None:
            self.A_log.copy_(A.log())
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
            return
        rate = dt * A.repeat_interleave(self.head_dim)
        self.A_log.zero_()
        self.dt_bias.copy_(torch.logit((rate / -self.lower_bound).clamp(max=0.9)))

    def initial_state(self, batch_size: int) -> KimiDeltaAttentionState:
        """A state of zeros, in the parameters' dtype (the recurrent part in float32)."""
        weight, carried = self.q_proj.weight, self.q_conv1d.kernel_size - 1
        wide = torch.promote_types(weight.dtype, torch.float32)
        sizes = (self.head_dim, self.head_v_dim)
        matrix = sizes[::-1] if self.state_v_first else sizes
        return KimiDeltaAttentionState(
            *(
                weight.new_zeros(batch_size, carried, conv.hidden_size)
                for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            ),
            weight.new_zeros(batch_size, self.num_v_heads, *matrix, dtype=wide),
        )

    def make_cache(self, batch_size: int, max_length: int) -> KimiDeltaAttentionCache:
        """A cache for batch_size sequences; its size does not depend on max_length."""
        return KimiDeltaAttentionCache(self.initial_state(batch_size))

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
        q_conv, k_conv, v_conv, recurrent = (None,) * 4 if state is None else state
        q, q_conv = self.q_conv1d(self.q_proj(x), q_conv, cu_seqlens, output_state)
        k, k_conv = self.k_conv1d(self.k_proj(x), k_conv, cu_seqlens, output_state)
        v, v_conv = self.v_conv1d(self.v_proj(x), v_conv, cu_seqlens, output_state)
        g = self.f_b_proj(self.f_a_proj(x))
        o, recurrent = kda(
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            g.unflatten(-1, (self.num_v_heads, self.head_dim)),
            self.b_proj(x),
            initial_state=recurrent,
            output_final_state=output_state,
            cu_seqlens=cu_seqlens,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            safe_gate=self.lower_bound is not None,
            lower_bound=self.lower_bound,
            state_v_first=self.state_v_first,
            backend=self.backend,
        )
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        y = self.o_proj(self.o_norm(o, gate).flatten(2))
        if not output_state:
            return y, None
        return y, KimiDeltaAttentionState(q_conv, k_conv, v_conv, recurrent)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: KimiDeltaAttentionCache) -> Tensor:
        """Runs x [B, T, hidden_size] from the cache's state and writes the new state into it."""
        y, state = self(x, cache.state(), output_state=True)
        cache.update(state)
        return y

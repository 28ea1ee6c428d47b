"""What the recurrent layers share: projections with convolutions, states, caches, decay rates."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.nn.conv import ShortConvolution

# Where the initial decay rates A * dt start, as in Mamba-2 (arXiv:2405.21060).
_A_RANGE = (1.0, 16.0)


class LinearAttentionState(NamedTuple):
    """What a layer carries from one piece of a sequence to the next."""

    q_conv: Tensor  # [N, W - 1, H * K]; W - 1 is 0 without convolutions
    k_conv: Tensor  # [N, W - 1, H * K]
    v_conv: Tensor  # [N, W - 1, HV * V]
    recurrent: Tensor  # [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32


class StateCache(nn.Module):
    """A state in static buffers, updated in place: what a captured decode step reads and writes."""

    def __init__(self, state: tuple):
        super().__init__()
        self.state_type = type(state)
        for name, tensor in state._asdict().items():
            self.register_buffer(name, tensor)

    def state(self) -> tuple:
        return self.state_type(*(getattr(self, name) for name in self.state_type._fields))

    @torch.no_grad()
    def update(self, state: tuple) -> None:
        for buffer, value in zip(self.state(), state, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


class RecurrentLayer(nn.Module):
    """A layer with initial_state(batch_size) and forward(x, state, cu_seqlens, output_state)."""

    def make_cache(self, batch_size: int, max_length: int) -> StateCache:
        """A cache for batch_size sequences; its size does not depend on max_length."""
        return StateCache(self.initial_state(batch_size))

    @torch.no_grad()
    def extend(self, x: Tensor, cache: StateCache) -> Tensor:
        """Runs x [B, T, hidden_size] from the cache's state and writes the new state into it."""
        y, state = self(x, cache.state(), output_state=True)
        cache.update(state)
        return y


class LinearAttentionLayer(RecurrentLayer):
    """Projections of q, k and v, each through a short convolution with silu.

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of query/key heads H.
        head_dim: key size K of a head.
        num_v_heads: number of value heads HV, a multiple of H; None is H.
        head_v_dim: value size V of a head; None is K.
        conv_size: window of the short convolutions, in tokens; 0: none.
        state_v_first: whether the recurrent state is [N, HV, V, K].
        backend: the path of the operator; None follows flaop.backend.
        activation: "silu" or None, of q, k and v where there are no convolutions.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        num_v_heads: int | None,
        head_v_dim: int | None,
        conv_size: int,
        state_v_first: bool,
        backend: str | None,
        activation: str | None = None,
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        if num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_heads, got {num_v_heads} and {num_heads}"
            )
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_dim, self.head_v_dim = head_dim, head_v_dim
        self.key_size, self.value_size = num_heads * head_dim, num_v_heads * head_v_dim
        self.conv_size = conv_size
        self.state_v_first = state_v_first
        self.backend = backend
        self.activation = activation
        self.q_proj = nn.Linear(hidden_size, self.key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_size, bias=False)
        if conv_size:
            self.q_conv1d = ShortConvolution(self.key_size, conv_size)
            self.k_conv1d = ShortConvolution(self.key_size, conv_size)
            self.v_conv1d = ShortConvolution(self.value_size, conv_size)

    def initial_state(self, batch_size: int) -> LinearAttentionState:
        """A state of zeros, in the parameters' dtype (the recurrent part in float32)."""
        weight, carried = self.q_proj.weight, max(self.conv_size - 1, 0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        sizes = (self.head_dim, self.head_v_dim)
        matrix = sizes[::-1] if self.state_v_first else sizes
        return LinearAttentionState(
            *(
                weight.new_zeros(batch_size, carried, size)
                for size in (self.key_size, self.key_size, self.value_size)
            ),
            weight.new_zeros(batch_size, self.num_v_heads, *matrix, dtype=wide),
        )

    def project(
        self,
        x: Tensor,  # [B, T, hidden_size]
        state: LinearAttentionState | None,
        cu_seqlens: Tensor | None,  # [N + 1]
        output_state: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple]:
        """q, k [B, T, H, K], v [B, T, HV, V], and the states of the convolutions or Nones."""
        tensors = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_size:
            carried = (None,) * 3 if state is None else state[:3]
            convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            pairs = [
                conv(y, s, cu_seqlens, output_state)
                for conv, y, s in zip(convs, tensors, carried, strict=True)
            ]
            tensors, states = zip(*pairs, strict=True)
        else:
            if self.activation == "silu":
                tensors = tuple(F.silu(y) for y in tensors)
            states = (None,) * 3
            if output_state:
                N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                states = tuple(y.new_zeros(N, 0, y.shape[-1]) for y in tensors)
        q, k, v = tensors
        return (
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
        ), states


def check_dt_range(dt_range: tuple[float, float]) -> tuple[float, float]:
    """The range as a tuple; raises ValueError."""
    if not 0.0 < dt_range[0] <= dt_range[1]:
        raise ValueError(f"dt_range must be positive and ordered, got {dt_range}")
    return tuple(dt_range)


def draw_rates(
    A_log: Tensor, dt_bias: Tensor, dt_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """A uniform in [1, 16] and dt log-uniform in dt_range, shaped as the two parameters."""
    A = torch.empty_like(A_log).uniform_(*_A_RANGE)
    return A, torch.empty_like(dt_bias).uniform_(*map(math.log, dt_range)).exp()


@torch.no_grad()
def draw_softplus_gate(A_log: Tensor, dt_bias: Tensor, dt_range: tuple[float, float]) -> None:
    """Draws both so that -exp(A_log) softplus(dt_bias) is -A * dt."""
    A, dt = draw_rates(A_log, dt_bias, dt_range)
    A_log.copy_(A.log())
    dt_bias.copy_(inverse_softplus(dt))


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))

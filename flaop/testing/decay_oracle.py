"""The float64 token loops that the decay families are measured against.

    S <- Diag(exp(g_t)) S Diag(exp(gv_t))       decay first
    S <- S + k_t v_t^T                          write
    o_t = scale * S^T q_t                       read, after the write

Plain autograd differentiates them. Always both o and the final state are returned, on the CPU.
Hints (output_final_state, chunk_size, split_size, backend) change nothing.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flaop.testing.oracle import token_loop

# Added to the normaliser of linear attention.
NORMALIZER_EPS = 1e-10


def simple_gla_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Takes the arguments of ``flaop.simple_gla``, and the dtype to compute in."""
    gate = torch.zeros(v.shape[:3], dtype=dtype)
    for part in (g, g_gamma):
        if part is not None:
            gate = gate + part.cpu().to(dtype)
    decays = [gate.exp().unsqueeze(-1)]
    return _recurrence(q, k, v, decays, scale, initial_state, cu_seqlens, state_v_first, dtype)


def gla_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
    gv: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Takes the arguments of ``flaop.gla``, and the dtype to compute in."""
    decays = [x.cpu().to(dtype).exp() for x in (g, gv) if x is not None]
    return _recurrence(q, k, v, decays, scale, initial_state, cu_seqlens, state_v_first, dtype)


def linear_attn_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Takes the arguments of ``flaop.linear_attn``.

    With normalize the state is ``[N, HV, K, V + 1]``, its last column the running sum z of k.
    """
    if not normalize:
        return simple_gla_oracle(q, k, v, None, None, scale, initial_state,
                                 cu_seqlens=cu_seqlens, state_v_first=state_v_first)  # fmt: skip
    S = z = None
    if initial_state is not None:
        state = initial_state.mT if state_v_first else initial_state
        S, z = state[..., :-1], state[..., -1:]
    o, S = simple_gla_oracle(q, k, v, None, None, scale, S, cu_seqlens=cu_seqlens)
    one = torch.ones_like(v[..., :1])
    normalizer, z = simple_gla_oracle(q, k, one, None, None, scale, z, cu_seqlens=cu_seqlens)
    state = torch.cat((S, z), dim=-1)
    return o / (normalizer + NORMALIZER_EPS), state.mT if state_v_first else state


def mamba2_oracle(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 64,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Takes the arguments of ``flaop.mamba2_ssd``; the recurrence of Mamba-2 as it is written.

    S <- exp(dt A) S + dt x B^T,  y = S C + D x, times silu(z);  S is ``[headdim, dstate]``.

    Args:
        x, z: ``[batch, T, heads, headdim]``.
        dt: ``[batch, T, heads]``; A, dt_bias: ``[heads]``; D: ``[heads]`` or ``[heads, headdim]``.
        B, C: ``[batch, T, groups, dstate]``.
        initial_states: ``[N, heads, headdim, dstate]``.
    """
    x, dt, A, B, C, D, z, dt_bias = (
        None if y is None else y.cpu().double() for y in (x, dt, A, B, C, D, z, dt_bias)
    )
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], dim=2) for y in (B, C))
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)

    def step(S, C_t, B_t, x_t, dt_t):
        dt_t = dt_t.unsqueeze(-1)
        S = (dt_t * A.view(-1, 1, 1)).exp() * S + dt_t * B_t.unsqueeze(-1) * x_t.unsqueeze(-2)
        return S, (S * C_t.unsqueeze(-1)).sum(-2)

    y, states = token_loop(step, [C, B, x, dt.unsqueeze(-1)], initial_states, cu_seqlens, True)
    if D is not None:
        y = y + x * (D if D.ndim == 2 else D.unsqueeze(-1))
    if z is not None:
        y = y * F.silu(z)
    return y, states


def _recurrence(q, k, v, decays, scale, initial_state, cu_seqlens, state_v_first, dtype):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v = (x.cpu().to(dtype) for x in (q, k, v))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))

    def step(S, q_t, k_t, v_t, decay, decay_v=None):
        S = S * decay.unsqueeze(-1)
        if decay_v is not None:
            S = S * decay_v.unsqueeze(-2)
        S = S + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        return S, torch.einsum("nhkv,nhk->nhv", S, q_t)

    tokens = [q * scale, k, v, *decays]
    return token_loop(step, tokens, initial_state, cu_seqlens, state_v_first)

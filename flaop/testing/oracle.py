"""The float64 token loop that every kernel of flaop is measured against.

    S <- Diag(exp(g_t)) S                       decay first
    u_t = beta_t (v_t - S^T k_t)                delta correction
    S <- S + k_t u_t^T                          write
    o_t = scale * S^T q_t                       read, after the write

Plain autograd differentiates it. Heads and sequences are vectorised, tokens are not.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Softplus of an infinite raw gate is cut here, so that its zero gradient never meets inf.
_SOFTPLUS_MAX = 1e30


def kda_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention token by token in float64 on the CPU.

    Takes the arguments of ``flaop.kda``. Hints (output_final_state, safe_gate, chunk_size,
    split_size, disable_recompute, backend) change nothing.

    Returns:
        o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` (``[N, HV, V, K]`` with
        ``state_v_first``), always both, float64 on the CPU.
    """
    H, K = q.shape[2:]
    HV = v.shape[2]
    scale = K**-0.5 if scale is None else scale
    q, k, g, beta = activated_inputs(
        *(q, k, g, beta, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, lower_bound, torch.float64),
    )
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    v = v.cpu().double()

    def step(S, q_t, k_t, v_t, decay, beta_t):
        S = S * decay.unsqueeze(-1)
        u = beta_t * (v_t - torch.einsum("nhkv,nhk->nhv", S, k_t))
        S = S + k_t.unsqueeze(-1) * u.unsqueeze(-2)
        return S, torch.einsum("nhkv,nhk->nhv", S, q_t)

    tokens = [q * scale, k, v, g.exp(), beta.unsqueeze(-1)]
    return token_loop(step, tokens, initial_state, cu_seqlens, state_v_first)


def token_loop(
    step: Callable[..., tuple[Tensor, Tensor]],
    tokens: list[Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Runs ``step(S, *tokens_t) -> (S, o_t)`` along all sequences.

    Args:
        tokens: ``[B, T, HV, D]`` each; of the first three k is the second and v the third.

    Returns:
        o like v, and the final state.
    """
    k, v = tokens[1:3]
    B, T, HV, V = v.shape
    if cu_seqlens is None:
        bounds = torch.arange(B + 1) * T
    else:
        bounds = cu_seqlens.cpu().long().clamp(0, T).cummax(0).values
    order, alive, index = _schedule(bounds)

    if initial_state is None:
        S = v.new_zeros(len(order), HV, k.shape[3], V)
    else:
        S = initial_state.cpu().to(v.dtype)
        S = (S.mT if state_v_first else S)[order]

    steps = [x.flatten(0, 1)[index].split(alive) for x in tokens]
    outputs, finished = [], []
    for tokens_t in zip(*steps, strict=True):
        n = len(tokens_t[0])
        if n < len(S):
            finished.append(S[n:])
            S = S[:n]
        S, o_t = step(S, *tokens_t)
        outputs.append(o_t)

    S = torch.cat([S, *reversed(finished)])
    final_state = torch.zeros_like(S).index_copy(0, order, S)
    o = v.new_zeros(B * T, HV, V)
    if outputs:
        o = o.index_copy(0, index, torch.cat(outputs))
    return o.view_as(v), final_state.mT if state_v_first else final_state


def activated_inputs(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    l2norm: bool,
    gate: bool,
    beta_sigmoid: bool,
    neg_eigval: bool,
    lower_bound: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, g and beta as they enter the recurrence, in ``dtype`` on the CPU."""
    q, k, g, beta = (x.cpu().to(dtype) for x in (q, k, g, beta))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if gate:
        if dt_bias is not None:
            g = g + dt_bias.cpu().to(dtype).view(g.shape[2:])
        rate = 1.0 if A_log is None else A_log.cpu().to(dtype).exp().unsqueeze(-1)
        if lower_bound is None:
            g = -rate * F.softplus(g).clamp(max=_SOFTPLUS_MAX)
        else:
            g = lower_bound * torch.sigmoid(rate * g)
    if beta_sigmoid:
        beta = (2 if neg_eigval else 1) * beta.sigmoid()
    return q, k, g, beta


def _schedule(bounds: Tensor) -> tuple[Tensor, list[int], Tensor]:
    """Orders the tokens of all sequences by (position, sequence), longest sequence first.

    Returns the order of the sequences, how many are alive at each position, and the token indices.
    """
    lengths = bounds.diff()
    order = lengths.argsort(descending=True, stable=True)
    longest = int(lengths.max()) if len(lengths) else 0
    position = torch.arange(longest)
    alive = len(lengths) - torch.searchsorted(lengths.sort().values, position, right=True)
    starts = bounds[:-1][order]
    tokens = [starts[:n] + t for t, n in enumerate(alive.tolist())]
    return order, alive.tolist(), torch.cat(tokens) if tokens else position

"""The CPU kernels of the stage ops. Gates are natural logs; g, gk and gv of the states and outputs
are sums within chunks, as chunk_local_cumsum gives, and G_i is all of them up to token i.

    h = S, the state that enters the chunk
    S <- e^(G_C) S + (k e^(G_C - G))^T v                      the leaving state
    o = scale (q e^G h + A v),   A_ij = q_i . k_j e^(G_i - G_j)  for j <= i

Sums of -inf have no differences: they are cut, and what follows in the chunk is not decayed.
"""

import torch
from torch import Tensor

from flaop.reference.kernel import as_kernel
from flaop.reference.packing import Packing, Slab

_LEAST_SUM = -1e30


@as_kernel
def local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``scale`` times the sums of ``g [B, T, HV]`` or ``[B, T, HV, K]`` within chunks, fp32.

    From the start of the chunk, or from its end with reverse; both with the token itself.
    """
    packing = Packing(cu_seqlens, *g.shape[:3], chunk_size)
    slab = packing.whole()
    tokens = packing.gather((g if g.ndim == 4 else g.unsqueeze(-1)).to(wide_dtype(g)), slab)
    if reverse:
        sums = tokens.flip(1).cumsum(1).flip(1)
    else:
        sums = tokens.cumsum(1)
    out = packing.zeros(tokens.shape[-1], torch.float32)
    packing.scatter(scale * sums, slab, out)
    return out.view(g.shape)


@as_kernel
def fwd_h(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    split_size: int = 0,
    states_in_fp32: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The states that enter the chunks, or the splits, and the final state.

    Rows of h: chunk by chunk, in each all of the batch; packed, sequence by sequence.
    """
    dtype = wide_dtype(k)
    B, T, HV, V = v.shape
    packing = Packing(cu_seqlens, B, T, HV, chunk_size)
    slab = packing.whole()
    keys, values = (packing.gather(x.to(dtype), slab) for x in (k, v))
    G = head_gates(packing, slab, g, g_gamma, dtype)
    if gk is not None:
        G = G + gate_sums(packing, slab, gk, dtype)
    last = last_sums(packing, G)
    keys *= (last - G).exp()
    last = last.exp().mT
    if gv is not None:
        G = gate_sums(packing, slab, gv, dtype)
        last_v = last_sums(packing, G)
        values *= (last_v - G).exp()
        last = last * last_v.exp()

    if initial_state is None:
        S = torch.zeros(len(packing.order) * HV, k.shape[3], V, dtype=dtype)
    else:
        S = packing.gather_state((initial_state.mT if state_v_first else initial_state).to(dtype))
    rows, slots = state_rows(packing, B, T, cu_seqlens is not None, chunk_size, split_size)
    narrow = k.dtype == torch.bfloat16 and not states_in_fp32
    h = torch.zeros(rows, HV, k.shape[3], V, dtype=torch.bfloat16 if narrow else dtype)
    for chunk, states in slab.steps:
        state = S[states]
        # Store before update: h is the state that enters.
        of_chunk = slots[chunk.start // HV : chunk.stop // HV]
        entering = state.unflatten(0, (-1, HV))
        h[of_chunk[of_chunk >= 0]] = entering[of_chunk >= 0].to(h.dtype)
        state.mul_(last[chunk]).baddbmm_(keys[chunk].mT, values[chunk])

    final_state = packing.scatter_state(S) if output_final_state else S.new_empty(0)
    if state_v_first:
        h = h.mT.contiguous()
        final_state = final_state.mT.contiguous() if output_final_state else final_state
    return h, final_state


@as_kernel
def fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> Tensor:
    """The outputs in v's dtype, from the state ``h`` that enters each chunk."""
    dtype = wide_dtype(q)
    B, T, HV, V = v.shape
    scale = q.shape[3] ** -0.5 if scale is None else scale
    packing = Packing(cu_seqlens, B, T, HV, chunk_size)
    slab = packing.whole()
    queries, keys, values = (packing.gather(x.to(dtype), slab) for x in (q, k, v))
    G = head_gates(packing, slab, g, g_gamma, dtype)
    _, slots = state_rows(packing, B, T, cu_seqlens is not None, chunk_size, 0)
    states = (h.mT if state_v_first else h)[slots].flatten(0, 1).to(dtype)
    later = torch.ones(packing.width, packing.width, dtype=torch.bool).triu(1)
    A = (G - G.mT).masked_fill_(later, -torch.inf).exp_() * (queries @ keys.mT)
    o = packing.zeros(V, v.dtype)
    packing.scatter(scale * torch.baddbmm(A @ values, queries * G.exp(), states), slab, o)
    return o


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gate_sums(packing: Packing, slab: Slab, g: Tensor, dtype: torch.dtype) -> Tensor:
    return packing.gather(g.to(dtype), slab).clamp_min_(_LEAST_SUM)


def head_gates(
    packing: Packing, slab: Slab, g: Tensor | None, g_gamma: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums ``[M, width, 1]`` of the gates of each head from the start of the chunk."""
    G = torch.zeros(packing.rows * packing.heads, packing.width, 1, dtype=dtype)
    if g is not None:
        G += gate_sums(packing, slab, g.unsqueeze(-1), dtype)
    if g_gamma is not None:
        tokens = torch.arange(1, packing.width + 1, dtype=dtype)
        G += g_gamma.to(dtype).repeat(packing.rows).view(-1, 1, 1) * tokens.unsqueeze(-1)
    return G


def last_sums(packing: Packing, G: Tensor) -> Tensor:
    """``[M, 1, D]``: the sums at the last token of each chunk."""
    lengths, position, sequence = packing.pieces
    filled = (lengths[sequence] - position * packing.width).clamp_max(packing.width)
    last = (filled - 1).repeat_interleave(packing.heads).view(-1, 1, 1)
    return G.gather(1, last.expand(-1, 1, G.shape[-1]))


def state_rows(
    packing: Packing, B: int, T: int, packed: bool, chunk_size: int, split_size: int
) -> tuple[int, Tensor]:
    """Rows of h, and which of them each chunk's entering state takes; -1 where it is not stored."""
    size = split_size or chunk_size
    lengths, position, sequence = packing.pieces
    rows = -(-T // size)
    if packed:
        rows = max(rows + len(lengths) - 1, 0)
        pieces = (lengths + size - 1) // size
        slots = (pieces.cumsum(0) - pieces)[sequence] + position * chunk_size // size
    else:
        rows *= B
        slots = position * chunk_size // size * B + sequence
    return rows, slots.where(position * chunk_size % size == 0, -1)

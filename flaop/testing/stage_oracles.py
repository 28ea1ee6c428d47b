"""Float64 oracles of the stage ops: chunk by chunk, and token by token within them."""

from collections.abc import Iterator

import torch
from torch import Tensor


def chunk_local_cumsum_oracle(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Takes the arguments of ``flaop.chunk_local_cumsum``, and is differentiable."""
    g = g.cpu().double()
    out = torch.zeros_like(g)
    for _, _, b, chunk in chunks(g.shape[0], g.shape[1], cu_seqlens, chunk_size):
        x = g[b, chunk]
        sums = x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0)
        out = torch.index_put(out, (torch.tensor(b), torch.arange(chunk.start, chunk.stop)), sums)
    return scale * out


def chunk_fwd_h_oracle(
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
    """Takes the arguments of ``flaop.chunk_fwd_h``; h and always the final state."""
    B, T, HV, V = v.shape
    k, v = (x.cpu().double() for x in (k, v))
    k = k.repeat_interleave(HV // k.shape[2], dim=2)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        S = v.new_zeros(N, HV, k.shape[3], V)
    else:
        S = (initial_state.mT if state_v_first else initial_state).cpu().double().clone()
    size = split_size or chunk_size
    pieces = -(-T // size)
    rows = B * pieces if cu_seqlens is None else max(pieces + N - 1, 0)
    h = v.new_zeros(rows, *S.shape[1:])
    row_of = {(n, position * size): row for row, n, position in state_rows(B, T, cu_seqlens, size)}
    for n, start, b, chunk in chunks(B, T, cu_seqlens, chunk_size):
        if (n, start) in row_of:
            h[row_of[n, start]] = S[n]
        gates = token_gates(b, chunk, (g, gk, gv), g_gamma, HV)
        for i, t in enumerate(range(chunk.start, chunk.stop)):
            S[n] *= gates[0][i][..., None] * gates[1][i][..., None] * gates[2][i].unsqueeze(-2)
            S[n] += k[b, t].unsqueeze(-1) * v[b, t].unsqueeze(-2)
    return (h.mT, S.mT) if state_v_first else (h, S)


def chunk_fwd_o_oracle(
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
    """Takes the arguments of ``flaop.chunk_fwd_o``."""
    B, T, HV, V = v.shape
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v, h = (x.cpu().double() for x in (q, k, v, h))
    q, k = (x.repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k))
    h = h.mT if state_v_first else h
    o = torch.zeros_like(v)
    row_of = {
        (n, position * chunk_size): row
        for row, n, position in state_rows(B, T, cu_seqlens, chunk_size)
    }
    for n, start, b, chunk in chunks(B, T, cu_seqlens, chunk_size):
        S = h[row_of[n, start]].clone()
        decay = token_gates(b, chunk, (g, None, None), g_gamma, HV)[0]
        for i, t in enumerate(range(chunk.start, chunk.stop)):
            S = S * decay[i][..., None] + k[b, t].unsqueeze(-1) * v[b, t].unsqueeze(-2)
            o[b, t] = scale * torch.einsum("hkv,hk->hv", S, q[b, t])
    return o


def _sequences(B: int, T: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(member of the batch, first token, end) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    bounds = cu_seqlens.cpu().long().clamp(0, T).cummax(0).values.tolist()
    return [(0, start, end) for start, end in zip(bounds, bounds[1:])]


def chunks(
    B: int, T: int, cu_seqlens: Tensor | None, size: int
) -> Iterator[tuple[int, int, int, slice]]:
    """(sequence, first token in it, member of the batch, tokens) of each chunk, in order."""
    for n, (b, first, end) in enumerate(_sequences(B, T, cu_seqlens)):
        for start in range(first, end, size):
            yield n, start - first, b, slice(start, min(start + size, end))


def state_rows(
    B: int, T: int, cu_seqlens: Tensor | None, size: int
) -> Iterator[tuple[int, int, int]]:
    """(row, sequence, piece): pieces over batches; packed sequences one after the other."""
    if cu_seqlens is None:
        pairs = [(b, piece) for piece in range(-(-T // size)) for b in range(B)]
    else:
        pairs = [
            (n, piece)
            for n, (_, first, end) in enumerate(_sequences(B, T, cu_seqlens))
            for piece in range(-(-(end - first) // size))
        ]
    for row, (n, piece) in enumerate(pairs):
        yield row, n, piece


def token_gates(
    b: int,
    chunk: slice,
    sums: tuple[Tensor | None, ...],
    g_gamma: Tensor | None,
    HV: int,
) -> list[Tensor]:
    """Decays ``[C, HV, 1 or D]`` of the chunk's tokens, from sums of gates within the chunk."""
    decays = []
    for x in sums:
        if x is None:
            decays.append(torch.ones(chunk.stop - chunk.start, HV, 1, dtype=torch.float64))
        else:
            x = x.cpu().double()[b, chunk]
            x = x.unsqueeze(-1) if x.ndim == 2 else x
            decays.append(x.diff(dim=0, prepend=torch.zeros_like(x[:1])).exp())
    if g_gamma is not None:
        decays[0] = decays[0] * g_gamma.cpu().double().exp().unsqueeze(-1)
    return decays

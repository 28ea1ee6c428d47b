"""Float64 oracles of the stage ops of the delta families: chunk by chunk, and token by token."""

import torch
from torch import Tensor

from flaop.testing.stage_oracles import chunks, state_rows, token_gates


def solve_tril_oracle(L: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Takes the arguments of ``flaop.solve_tril``, and is differentiable."""
    L = L.cpu().double()
    B, T, H, BT = L.shape
    out = torch.zeros_like(L)
    for _, _, b, chunk in chunks(B, T, cu_seqlens, BT):
        size = chunk.stop - chunk.start
        matrix = L[b, chunk, :, :size].transpose(0, 1).tril(-1)
        eye = torch.eye(size, dtype=L.dtype)
        X = torch.linalg.solve_triangular(eye + matrix, eye.expand_as(matrix), upper=False)
        rows = torch.nn.functional.pad(X, (0, BT - size)).transpose(0, 1)
        out = torch.index_put(out, (torch.tensor(b), torch.arange(chunk.start, chunk.stop)), rows)
    return out


def recompute_w_u_oracle(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Takes the arguments of ``flaop.recompute_w_u``."""
    B, T, HV, BT = A.shape
    k, v, beta, A = (x.cpu().double() for x in (k, v, beta, A))
    k = beta.unsqueeze(-1) * k.repeat_interleave(HV // k.shape[2], dim=2)
    for gates in (g, gk):
        if gates is not None:
            gates = gates.cpu().double()
            k = k * (gates.unsqueeze(-1) if gates.ndim == 3 else gates).exp()
    v = beta.unsqueeze(-1) * v
    w, u = torch.zeros_like(k), torch.zeros_like(v)
    for _, _, b, chunk in chunks(B, T, cu_seqlens, BT):
        matrix = A[b, chunk, :, : chunk.stop - chunk.start]
        w[b, chunk] = torch.einsum("ihj,jhk->ihk", matrix, k[b, chunk])
        u[b, chunk] = torch.einsum("ihj,jhv->ihv", matrix, v[b, chunk])
    return w, u


def chunk_delta_fwd_h_oracle(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the arguments of ``flaop.chunk_delta_fwd_h``; h, V' and always the final state."""
    B, T, HV, V = u.shape
    k, w, u = (x.cpu().double() for x in (k, w, u))
    k = k.repeat_interleave(HV // k.shape[2], dim=2)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        S = u.new_zeros(N, HV, k.shape[3], V)
    else:
        S = (initial_state.mT if state_v_first else initial_state).cpu().double().clone()
    pieces = -(-T // chunk_size)
    rows = B * pieces if cu_seqlens is None else max(pieces + N - 1, 0)
    h, v_new = u.new_zeros(rows, *S.shape[1:]), torch.zeros_like(u)
    row_of = {(n, i * chunk_size): row for row, n, i in state_rows(B, T, cu_seqlens, chunk_size)}
    for n, start, b, chunk in chunks(B, T, cu_seqlens, chunk_size):
        h[row_of[n, start]] = S[n]
        v_new[b, chunk] = u[b, chunk] - torch.einsum("thk,hkv->thv", w[b, chunk], S[n])
        decays = token_gates(b, chunk, (g, gk), None, HV)
        for i, t in enumerate(range(chunk.start, chunk.stop)):
            S[n] *= decays[0][i][..., None] * decays[1][i][..., None]
            S[n] += k[b, t].unsqueeze(-1) * v_new[b, t].unsqueeze(-2)
    return (h.mT, v_new, S.mT) if state_v_first else (h, v_new, S)

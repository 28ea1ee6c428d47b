"""The CPU kernels of the stage ops of the delta families. Gates are natural logs, summed within
chunks as chunk_local_cumsum gives them; G_i is all of them up to token i.

    X = (I + L)^-1
    W = A (beta e^G k),   U = A (beta v)
    V' = U - W S                                              S enters the chunk
    S <- e^(G_C) S + (k e^(G_C - G))^T V'                     the leaving state
"""

import torch
from torch import Tensor

from flaop.reference.kernel import as_kernel
from flaop.reference.packing import Packing, Slab
from flaop.reference.pairs import unit_lower_inverse
from flaop.reference.stages import (
    gate_sums,
    head_gates,
    last_sums,
    state_rows,
    wide_dtype,
)


@as_kernel
def solve_tril(L: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The inverse ``[B, T, H, BT]``, each token its row; zero for tokens of no sequence."""
    packing = Packing(cu_seqlens, *L.shape)
    slab = packing.whole()
    out = packing.zeros(L.shape[3], L.dtype)
    X = unit_lower_inverse(_matrices(packing, slab, L).tril_(-1))
    packing.scatter(X, slab, out[..., : packing.width])
    return out


@as_kernel
def solve_tril_backward(d_X: Tensor, X: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The gradient of L, strictly lower."""
    packing = Packing(cu_seqlens, *X.shape)
    slab = packing.whole()
    out = packing.zeros(X.shape[3], X.dtype)
    d_X, X = (_matrices(packing, slab, x) for x in (d_X, X))
    packing.scatter((-X.mT @ d_X @ X.mT).tril_(-1), slab, out[..., : packing.width])
    return out


@as_kernel
def recompute_w_u(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``w [B, T, HV, K]`` and ``u [B, T, HV, V]`` in the dtype of k."""
    dtype = wide_dtype(k)
    packing = Packing(cu_seqlens, *v.shape[:3], A.shape[3])
    slab = packing.whole()
    keys, values, beta = (packing.gather(x.to(dtype), slab) for x in (k, v, beta.unsqueeze(-1)))
    A = _matrices(packing, slab, A).to(dtype)
    G = _gates(packing, slab, g, gk, dtype)
    w, u = packing.zeros(k.shape[3], k.dtype), packing.zeros(v.shape[3], v.dtype)
    packing.scatter(A @ (keys * beta * G.exp()), slab, w)
    packing.scatter(A @ (values * beta), slab, u)
    return w, u


@as_kernel
def delta_fwd_h(
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
    """The states that enter the chunks, V' in the dtype of u, and the final state.

    Rows of h: chunk by chunk, in each all of the batch; packed, sequence by sequence.
    """
    dtype = wide_dtype(k)
    B, T, HV, V = u.shape
    packing = Packing(cu_seqlens, B, T, HV, chunk_size)
    slab = packing.whole()
    keys, erase, values = (packing.gather(x.to(dtype), slab) for x in (k, w, u))
    G = _gates(packing, slab, g, gk, dtype)
    last = last_sums(packing, G)
    keys *= (last - G).exp()
    last = last.exp().mT

    if initial_state is None:
        S = torch.zeros(len(packing.order) * HV, k.shape[3], V, dtype=dtype)
    else:
        S = packing.gather_state((initial_state.mT if state_v_first else initial_state).to(dtype))
    rows, slots = state_rows(packing, B, T, cu_seqlens is not None, chunk_size, 0)
    narrow = k.dtype == torch.bfloat16
    h = torch.zeros(rows, HV, k.shape[3], V, dtype=torch.bfloat16 if narrow else dtype)
    for chunk, states in slab.steps:
        state = S[states]
        # Store before update: h is the state that enters.
        h[slots[chunk.start // HV : chunk.stop // HV]] = state.unflatten(0, (-1, HV)).to(h.dtype)
        v_new = values[chunk].baddbmm_(erase[chunk], state, alpha=-1)
        state.mul_(last[chunk]).baddbmm_(keys[chunk].mT, v_new)

    v_new = packing.zeros(V, u.dtype)
    packing.scatter(values, slab, v_new)
    final_state = packing.scatter_state(S) if output_final_state else S.new_empty(0)
    if state_v_first:
        h = h.mT.contiguous()
        final_state = final_state.mT.contiguous() if output_final_state else final_state
    return h, v_new, final_state


def _matrices(packing: Packing, slab: Slab, x: Tensor) -> Tensor:
    """``[B, T, heads, BT]``, each token its row, to ``[M, width, width]``."""
    return packing.gather(x[..., : packing.width].to(wide_dtype(x)), slab)


def _gates(
    packing: Packing, slab: Slab, g: Tensor | None, gk: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Sums ``[M, width, 1 or K]`` of all gates from the start of the chunk."""
    G = head_gates(packing, slab, g, None, dtype)
    return G if gk is None else G + gate_sums(packing, slab, gk, dtype)

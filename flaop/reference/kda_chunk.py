"""KDA and the gated delta rule chunk by chunk. In a chunk with tokens 1..C, entering state S and
G_i = g_1 + ... + g_i:

    L_ij = beta_i k_i . (k_j e^(G_i - G_j))  for j < i        what i erases of what j wrote
    A = (I + L)^-1
    W = A (beta k e^G),   U = A (beta v)
    V' = U - W S                                              what the tokens write
    A_qk_ij = scale q_i . (k_j e^(G_i - G_j))  for j <= i
    o = scale (q e^G) S + A_qk V'
    S <- e^(G_C) S + (k e^(G_C - G))^T V'                     the leaving state

Everything but V' and S is computed for a slab of chunks at once; a scan over its chunks carries S.
A gate is one per channel (D = K) or one per head (D = 1).
The delta rule with channel-wise decay of Kimi Linear, arXiv 2510.26692; gated delta networks, arXiv
2412.06464.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flaop.reference.activation import Activated, activate, activate_backward, compute_dtype
from flaop.reference.packing import Packing, Slab
from flaop.reference.pairs import (
    along_gate,
    decay_through,
    flush,
    kept_levels,
    pair_products,
    pair_products_backward,
    token_decay,
    total_decay,
    unit_lower_inverse,
)
from flaop.reference.states import (
    final_state,
    final_state_gradient,
    initial_state,
    initial_state_gradient,
)

CHUNK = 64
# Elements of a tensor of one slab: a few of them stay in the cache.
_SLAB = 2**17


class _Chunks(NamedTuple):
    """The inputs of a slab's chunks, M = chunks * HV."""

    q: Tensor  # [M, C, K], scaled
    k: Tensor  # [M, C, K]
    v: Tensor  # [M, C, V]
    decay: Tensor  # [M, C, D], e^g
    beta: Tensor  # [M, C, 1]
    erase: Tensor  # [M, C, K], beta k, what the token erases with
    write: Tensor  # [M, C, V], beta v


def forward(call, residuals: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    packing = _packing(call)
    active = activate(call)
    S = initial_state(call, packing)
    o = packing.zeros(call.V, call.v.dtype)
    A_out = A_qk_out = None
    if residuals:
        A_out, A_qk_out = (packing.zeros(CHUNK, call.q.dtype) for _ in range(2))
    for slab in _slabs(call, packing):
        x = _chunks(call, active, packing, slab)
        rows, kg = _rows(x), x.k.clone()
        A_qk, L = pair_products(rows, kg, x.decay)
        A_qk.diagonal(dim1=1, dim2=2).copy_((x.q * x.k).sum(-1))
        A = unit_lower_inverse(L)
        qg, erase = rows.unbind(2)
        h, v_new = _scan(slab, flush(A @ erase), A @ x.write, kg, total_decay(x.decay), S)
        packing.scatter(torch.baddbmm(A_qk @ v_new, qg, h), slab, o)
        if residuals:
            packing.scatter(A, slab, A_out[..., : packing.width])
            packing.scatter(A_qk, slab, A_qk_out[..., : packing.width])
    return o, final_state(call, packing, S), A_out, A_qk_out


def backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    A: Tensor,
    A_qk: Tensor,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    dtype = compute_dtype(call)
    packing = _packing(call)
    active = activate(call)
    slabs = _slabs(call, packing)
    A, A_qk = (y[..., : packing.width] for y in (A, A_qk))

    # The forward again, for the states that enter the slabs.
    S = initial_state(call, packing)
    entering = []
    for slab in slabs:
        entering.append(S[slab.states].clone())
        x = _chunks(call, active, packing, slab)
        rows, kg = _rows(x), x.k.clone()
        decay_through(rows, kg, x.decay)
        A_slab = packing.gather(A, slab).to(dtype)
        _scan(slab, flush(A_slab @ rows[:, :, 1]), A_slab @ x.write, kg, total_decay(x.decay), S)

    dS = final_state_gradient(call, packing, d_final_state)
    sizes = Activated(call.K, call.K, call.V, active.g.shape[-1], 1)
    grads = Activated(*(packing.zeros(size, dtype) for size in sizes))
    for slab in reversed(slabs):
        S[slab.states] = entering.pop()
        x = _chunks(call, active, packing, slab)
        if d_o is None:
            do = torch.zeros_like(x.v)
        else:
            do = packing.gather(d_o, slab).to(dtype)
        matrices = [packing.gather(y, slab).to(dtype) for y in (A, A_qk)]
        of_slab = _slab_backward(slab, x, do, *matrices, S, dS)
        for grad, out in zip(of_slab, grads, strict=True):
            packing.scatter(grad, slab, out)

    grads = grads._replace(q=grads.q.mul_(call.scale), beta=grads.beta.squeeze(-1))
    grads = activate_backward(call, active, grads, grad_mask[:7])
    return *grads, initial_state_gradient(call, packing, dS) if grad_mask[7] else None


def _slab_backward(
    slab: Slab, x: _Chunks, do: Tensor, A: Tensor, A_qk: Tensor, S: Tensor, dS: Tensor
) -> Activated:
    """Gradients of the slab's inputs.

    Args:
        S: the states that enter the slab; overwritten.
        dS: the gradient of the states that leave it; becomes that of those that enter it.
    """
    rows, kg, last = _rows(x), x.k.clone(), total_decay(x.decay)
    kept = kept_levels(rows, kg, x.decay)
    qg, erase = rows.unbind(2)
    w = flush(A @ erase)
    h, v_new = _scan(slab, w, A @ x.write, kg, last, S)
    dh, dv_new = _reverse_scan(slab, A_qk.mT @ do, w, kg, last, qg.mT @ do, dS)

    # V' = U - W S, U = A (beta v), W = A (beta k e^G).
    dw = -dv_new @ h.mT
    d_write, d_erase = A.mT @ dv_new, A.mT @ dw
    dA = dv_new @ x.write.mT + dw @ erase.mT
    dL = -A.mT @ dA @ A.mT

    dA_qk = do @ v_new.mT
    d_rows, dk = torch.stack((do @ h.mT, d_erase), dim=2), v_new @ dh.mT
    D = last.shape[-1]
    d_last = last * along_gate((h * dh).sum(-1).unsqueeze(1), D)
    dg = pair_products_backward(torch.stack((dA_qk, dL)), d_rows, dk, d_last, kept)

    # The rows start as q and beta k, each decayed by its own token.
    dg += x.decay * along_gate((d_rows * torch.stack((x.q, x.erase), dim=2)).sum(2), D)
    dq, d_erase = (d_rows * x.decay.unsqueeze(2)).unbind(2)
    diagonal = dA_qk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq = dq + diagonal * x.k
    dk += diagonal * x.q + x.beta * d_erase
    dbeta = (x.k * d_erase).sum(-1, keepdim=True) + (x.v * d_write).sum(-1, keepdim=True)
    return Activated(dq, dk, x.beta * d_write, dg, dbeta)


def summary(call) -> tuple[Tensor, Tensor]:
    """The recurrence on the columns [0 | I]: the state from a zero start, and the transfer."""
    packing = _packing(call)
    active = activate(call)
    columns = _summary_columns(call, packing)
    for slab in _slabs(call, packing):
        x = _chunks(call, active, packing, slab)
        rows, kg = (x.erase * x.decay).unsqueeze(2), x.k.clone()
        A = unit_lower_inverse(pair_products(rows, kg, x.decay)[0])
        u = F.pad(A @ x.write, (0, call.K))
        _scan(slab, flush(A @ rows.squeeze(2)), u, kg, total_decay(x.decay), columns)
    return _summary_of(call, packing, columns)


def summary_forward(call) -> tuple[Tensor, ...]:
    """The forward on the values [v | 0] and the states [0 | I]: o, read, state, transfer, A, A_qk.
    """
    columns = _summary_columns(call, _packing(call)).unflatten(0, (-1, call.HV))
    extended = call._replace(
        v=F.pad(call.v, (0, call.K)), V=call.V + call.K, initial_state=columns, state_v_first=False
    )
    o, states, A, A_qk = forward(extended, residuals=True)
    sizes = (call.V, call.K)
    return *(x.contiguous() for y in (o, states) for x in y.split(sizes, dim=-1)), A, A_qk


def summary_backward(call, A: Tensor | None, A_qk: Tensor | None) -> tuple[Tensor, Tensor]:
    """The reverse recurrence on the columns [0 | I], with d_o in the place of v."""
    packing = _packing(call)
    active = activate(call)
    columns = _summary_columns(call, packing)
    for slab in reversed(_slabs(call, packing)):
        x = _chunks(call, active, packing, slab)
        rows, kg = _rows(x), x.k.clone()
        if A is None:
            pairs, L = pair_products(rows, kg, x.decay)
            pairs.diagonal(dim1=1, dim2=2).copy_((x.q * x.k).sum(-1))
            inverse = unit_lower_inverse(L)
        else:
            decay_through(rows, kg, x.decay)
            kept = (packing.gather(y[..., : packing.width], slab) for y in (A, A_qk))
            inverse, pairs = (y.to(x.v.dtype) for y in kept)
        qg, erase = rows.unbind(2)
        w = flush(inverse @ erase)
        dv, d_read = (F.pad(y.mT @ x.v, (0, call.K)) for y in (pairs, qg))
        _reverse_scan(slab, dv, w, kg, total_decay(x.decay), d_read, columns)
    return _summary_of(call, packing, columns)


def _summary_columns(call, packing: Packing) -> Tensor:
    """``[N * HV, K, V + K]``: zeros, then the identity."""
    dtype = compute_dtype(call)
    zeros = torch.zeros(len(packing.order) * call.HV, call.K, call.V, dtype=dtype)
    eye = torch.eye(call.K, dtype=dtype).expand(len(zeros), -1, -1)
    return torch.cat((zeros, eye), dim=-1)


def _summary_of(call, packing: Packing, columns: Tensor) -> tuple[Tensor, Tensor]:
    state, transfer = packing.scatter_state(columns).split((call.V, call.K), dim=-1)
    return state.contiguous(), transfer.contiguous()


def _packing(call) -> Packing:
    return Packing(call.cu_seqlens, call.B, call.T, call.HV, CHUNK)


def _slabs(call, packing: Packing) -> list[Slab]:
    row = call.HV * packing.width * max(call.K, call.V)
    return packing.slabs(max(_SLAB // row, 1))


def _chunks(call, active: Activated, packing: Packing, slab: Slab) -> _Chunks:
    q, k, v, g = (packing.gather(y, slab) for y in active[:4])
    beta = packing.gather(active.beta.unsqueeze(-1), slab)
    return _Chunks(q * call.scale, k, v, token_decay(g), beta, beta * k, beta * v)


def _rows(x: _Chunks) -> Tensor:
    """Queries and erase keys ``[M, C, 2, K]``, each decayed by its own token."""
    rows = torch.stack((x.q, x.erase), dim=2)
    return rows.mul_(x.decay.unsqueeze(2))


def _scan(
    slab: Slab, w: Tensor, u: Tensor, kg: Tensor, last: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """The states ``[M, K, V]`` that enter the chunks, and V' ``[M, C, V]``.

    ``u`` becomes V', and ``S`` the states that leave the slab.
    """
    h = u.new_empty(len(u), *S.shape[1:])
    last = last.mT
    for chunk, states in slab.steps:
        state = S[states]
        # Store before update: h is the state that enters.
        h[chunk] = state
        v_new = u[chunk].baddbmm_(w[chunk], state, alpha=-1)
        state.mul_(last[chunk]).baddbmm_(kg[chunk].mT, v_new)
    return h, u


def _reverse_scan(
    slab: Slab, dv: Tensor, w: Tensor, kg: Tensor, last: Tensor, d_read: Tensor, dS: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the states that leave the chunks ``[M, K, V]`` and of V' ``[M, C, V]``.

    ``dv`` holds what reaches V' from its own chunk and becomes all of it. ``d_read [M, K, V]`` is
    what reaches the entering states from their chunk's outputs.
    """
    dh = dv.new_empty(len(dv), *dS.shape[1:])
    last = last.mT
    for chunk, states in reversed(slab.steps):
        state = dS[states]
        dh[chunk] = state
        dv_new = dv[chunk].baddbmm_(kg[chunk], state)
        state.mul_(last[chunk]).add_(d_read[chunk]).baddbmm_(w[chunk].mT, dv_new, alpha=-1)
    return dh, dv

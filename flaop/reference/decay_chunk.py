"""simple_gla and gla chunk by chunk. In a chunk with tokens 1..C, entering state S and
G_i = g_1 + ... + g_i:

    A_ij = scale q_i . (k_j e^(G_i - G_j))  for j <= i
    o = scale (q e^G) S + A v
    S <- e^(G_C) S + (k e^(G_C - G))^T v                      the leaving state

Everything but S is computed for a slab of chunks at once; a scan over its chunks carries S. With a
gate per head e^(G_i - G_j) is a matrix of the chunk: the pair products of ones.
Gated linear attention, arXiv 2312.06635; Mamba-2, arXiv 2405.21060.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flaop.reference.activation import compute_dtype
from flaop.reference.decay_inputs import Inputs, input_gradients, inputs
from flaop.reference.packing import Packing, Slab
from flaop.reference.pairs import (
    Level,
    decay_through,
    kept_levels,
    level_products,
    pair_products,
    pair_products_backward,
    token_decay,
    total_decay,
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
    decay: Tensor  # [M, C, K] or [M, C, 1], e^g
    channel: bool  # the decay is one per channel


def forward(call) -> tuple[Tensor, Tensor, Tensor | None]:
    packing = _packing(call)
    tokens = inputs(call)
    S = initial_state(call, packing)
    o = packing.zeros(call.V, call.v.dtype)
    A_out = packing.zeros(CHUNK, call.q.dtype) if call.channel else None
    for slab in _slabs(call, packing):
        x = _chunks(call, tokens, packing, slab)
        rows, columns = _starts(x)
        products = pair_products(rows, columns, x.decay)[0]
        A = _with_diagonal(x, products)
        qg, kg = _decayed(x, rows, columns)
        h = _scan(slab, kg, x.v, total_decay(x.decay), S)
        packing.scatter(torch.baddbmm(A @ x.v, qg, h), slab, o)
        if call.channel:
            packing.scatter(A, slab, A_out[..., : packing.width])
    return o, final_state(call, packing, S), A_out


def backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    A: Tensor | None,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    dtype = compute_dtype(call)
    packing = _packing(call)
    tokens = inputs(call)
    slabs = _slabs(call, packing)

    # The forward again, for the states that enter the slabs.
    S = initial_state(call, packing)
    entering = []
    for slab in slabs:
        entering.append(S[slab.states].clone())
        x = _chunks(call, tokens, packing, slab)
        rows, columns = _starts(x)
        decay_through(rows, columns, x.decay)
        _scan(slab, _decayed(x, rows, columns)[1], x.v, total_decay(x.decay), S)

    dS = final_state_gradient(call, packing, d_final_state)
    sizes = (call.K, call.K, call.V, tokens.g.shape[-1])
    grads = Inputs(*(packing.zeros(size, dtype) for size in sizes))
    for slab in reversed(slabs):
        S[slab.states] = entering.pop()
        x = _chunks(call, tokens, packing, slab)
        if d_o is None:
            do = torch.zeros_like(x.v)
        else:
            do = packing.gather(d_o, slab).to(dtype)
        if A is None:
            A_slab = None
        else:
            A_slab = packing.gather(A[..., : packing.width], slab).to(dtype)
        of_slab = _slab_backward(slab, x, do, A_slab, S, dS)
        for grad, out in zip(of_slab, grads[:4], strict=True):
            packing.scatter(grad, slab, out)

    grads.q.mul_(call.scale)
    if call.channel:
        names = ("q", "k", "v", "g", "initial_state")
    else:
        names = ("q", "k", "v", "g", "g_gamma", "initial_state")
    d_initial_state = initial_state_gradient(call, packing, dS)
    return input_gradients(call, tokens, grads, d_initial_state, names, grad_mask)


def summary(call) -> tuple[Tensor, Tensor]:
    """The state from a zero start, and the decay over all tokens."""
    return _summary(call, _scan, _slabs)


def summary_backward(call) -> tuple[Tensor, Tensor]:
    """The same in reverse: the gradient of the entering state, with d_o in the place of v."""
    return _summary(call, _reverse_scan, lambda *args: reversed(_slabs(*args)))


def _summary(call, scan: Callable, slabs: Callable) -> tuple[Tensor, Tensor]:
    packing = _packing(call)
    tokens = inputs(call)
    S = final_state_gradient(call, packing, None)
    transfer = torch.ones(len(S), tokens.g.shape[-1], dtype=S.dtype)
    for slab in slabs(call, packing):
        x = _chunks(call, tokens, packing, slab)
        rows, columns = _starts(x)
        decay_through(rows, columns, x.decay)
        last = total_decay(x.decay)
        qg, kg = _decayed(x, rows, columns)
        scan(slab, kg if scan is _scan else qg, x.v, last, S)
        for chunk, states in slab.steps:
            transfer[states] *= last[chunk].squeeze(1)
    return packing.scatter_state(S), packing.scatter_state(transfer)


def _slab_backward(
    slab: Slab, x: _Chunks, do: Tensor, A: Tensor | None, S: Tensor, dS: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the slab's scaled q, its k, v and g.

    Args:
        A: of a gate per channel; ``None`` computes it.
        S: the states that enter the slab; overwritten.
        dS: the gradient of the states that leave it; becomes that of those that enter it.
    """
    rows, columns = _starts(x)
    kept = kept_levels(rows, columns, x.decay)
    qg, kg = _decayed(x, rows, columns)
    last = total_decay(x.decay)
    h = _scan(slab, kg, x.v, last, S)
    dh = _reverse_scan(slab, qg, do, last, dS)

    dA = do @ x.v.mT
    dqg, dkg = do @ h.mT, x.v @ dh.mT
    d_last = last * (h * dh).sum(-1).unsqueeze(1)
    if x.channel:
        dq, dk, dg = _channel_backward(x, dA, dqg, dkg, d_last, kept)
    else:
        ratios = level_products(kept, rows)[0]
        A = _with_diagonal(x, ratios)
        d_last = d_last.sum(-1, keepdim=True)
        dq, dk, dg = _head_backward(x, ratios, dA, dqg, dkg, d_last, rows, columns, kept)
    return dq, dk, torch.baddbmm(A.mT @ do, kg, dh), dg


def _channel_backward(
    x: _Chunks, dA: Tensor, dqg: Tensor, dkg: Tensor, d_last: Tensor, kept: list[Level]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, g; those of the rows and columns are overwritten."""
    d_rows, dk = dqg.unsqueeze(2), dkg
    dg = pair_products_backward(dA.unsqueeze(0), d_rows, dk, d_last, kept)
    # The rows start as q decayed by its own token.
    dq = d_rows.squeeze(2) * x.decay
    dg = dg + dq * x.q
    diagonal = dA.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    return dq + diagonal * x.k, dk + diagonal * x.q, dg


def _head_backward(
    x: _Chunks,
    ratios: Tensor,
    dA: Tensor,
    dqg: Tensor,
    dkg: Tensor,
    d_last: Tensor,
    rows: Tensor,
    columns: Tensor,
    kept: list[Level],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, g, from those of A and of q and k decayed by rows and columns."""
    d_ratios = dA * (x.q @ x.k.mT)
    dqk = dA * ratios
    dq = torch.baddbmm(dqg * rows.squeeze(2), dqk, x.k)
    dk = torch.baddbmm(dkg * columns, dqk.mT, x.q)
    d_rows = (dqg * x.q).sum(-1)[..., None, None]
    d_columns = (dkg * x.k).sum(-1, keepdim=True)
    dg = pair_products_backward(d_ratios.unsqueeze(0), d_rows, d_columns, d_last, kept)
    # The rows start as one decayed by its own token.
    return dq, dk, dg + x.decay * d_rows.squeeze(2)


def _packing(call) -> Packing:
    return Packing(call.cu_seqlens, call.B, call.T, call.HV, CHUNK)


def _slabs(call, packing: Packing) -> list[Slab]:
    row = call.HV * packing.width * max(call.K, call.V)
    return packing.slabs(max(_SLAB // row, 1))


def _chunks(call, tokens: Inputs, packing: Packing, slab: Slab) -> _Chunks:
    q, k, v, g = (packing.gather(y, slab) for y in tokens[:4])
    return _Chunks(q * call.scale, k, v, token_decay(g), call.channel)


def _starts(x: _Chunks) -> tuple[Tensor, Tensor]:
    """What is decayed level by level: rows, by their own token, and columns."""
    if x.channel:
        return (x.q * x.decay).unsqueeze(2), x.k.clone()
    return x.decay.unsqueeze(2).clone(), torch.ones_like(x.decay)


def _decayed(x: _Chunks, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """q decayed from the start of the chunk and k decayed to its end."""
    rows = rows.squeeze(2)
    return (rows, columns) if x.channel else (x.q * rows, x.k * columns)


def _with_diagonal(x: _Chunks, products: Tensor) -> Tensor:
    """A from the pair products; for a gate per head these become the decays, 1 on the diagonal."""
    diagonal = products.diagonal(dim1=1, dim2=2)
    if x.channel:
        diagonal.copy_((x.q * x.k).sum(-1))
        return products
    diagonal.fill_(1)
    return products * (x.q @ x.k.mT)


def _scan(slab: Slab, kg: Tensor, v: Tensor, last: Tensor, S: Tensor) -> Tensor:
    """The states ``[M, K, V]`` that enter the chunks; ``S`` becomes the states that leave."""
    h = v.new_empty(len(v), *S.shape[1:])
    last = last.mT
    for chunk, states in slab.steps:
        state = S[states]
        # Store before update: h is the state that enters.
        h[chunk] = state
        state.mul_(last[chunk]).baddbmm_(kg[chunk].mT, v[chunk])
    return h


def _reverse_scan(slab: Slab, qg: Tensor, do: Tensor, last: Tensor, dS: Tensor) -> Tensor:
    """Gradients ``[M, K, V]`` of the states that leave the chunks."""
    dh = do.new_empty(len(do), *dS.shape[1:])
    last = last.mT
    for chunk, states in reversed(slab.steps):
        state = dS[states]
        dh[chunk] = state
        state.mul_(last[chunk]).baddbmm_(qg[chunk].mT, do[chunk])
    return dh

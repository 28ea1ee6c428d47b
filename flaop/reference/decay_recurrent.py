"""simple_gla and gla token by token.

    S' = Diag(e^g) S Diag(e^gv)          decay first
    S <- S' + k v^T                      write
    o = scale S^T q                      read, after the write

The gradient of a gate is <S', D> along its channel, D the gradient of the state after the token:
the backward needs both at the same token. Neither can be run against its direction, since undoing
a decay divides by e^-1000. The forward is run twice: once for the states that enter pieces of about
sqrt(T) tokens, and piece by piece, last first, for the states in between.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flaop.reference.decay_inputs import Inputs, input_gradients, inputs
from flaop.reference.packing import Packing, Slab
from flaop.reference.pairs import token_decay
from flaop.reference.states import (
    final_state,
    final_state_gradient,
    initial_state,
    initial_state_gradient,
)


def forward(call) -> tuple[Tensor, Tensor]:
    packing = _packing(call)
    slab = packing.whole()
    x = _tokens(call, inputs(call), packing, slab)
    S = initial_state(call, packing)
    o = torch.empty_like(x.v)
    for token, states in slab.steps:
        state = _decay(S[states], x, token)
        state.baddbmm_(x.k[token].mT, x.v[token])
        o[token] = torch.bmm(x.q[token], state)
    o_out = packing.zeros(call.V, call.v.dtype)
    packing.scatter(o, slab, o_out)
    return o_out, final_state(call, packing, S)


def backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    packing = _packing(call)
    tokens = inputs(call)
    pieces = packing.slabs(len(packing.order) * (math.isqrt(call.T) + 1))

    S = initial_state(call, packing)
    entering = []
    for piece in pieces:
        entering.append(S[piece.states].clone())
        x = _tokens(call, tokens, packing, piece)
        for token, states in piece.steps:
            _decay(S[states], x, token).baddbmm_(x.k[token].mT, x.v[token])

    D = final_state_gradient(call, packing, d_final_state)
    grads = Inputs(*(None if y is None else packing.zeros(y.shape[-1], y.dtype) for y in tokens))
    for piece in reversed(pieces):
        S[piece.states] = entering.pop()
        x = _tokens(call, tokens, packing, piece)
        if d_o is None:
            do = torch.zeros_like(x.v)
        else:
            do = packing.gather(d_o, piece).to(x.v.dtype)
        for grad, out in zip(_piece_backward(piece, x, do, S, D), grads, strict=True):
            if out is not None:
                packing.scatter(grad, piece, out)

    grads.q.mul_(call.scale)
    if call.channel:
        names = ("q", "k", "v", "g", "initial_state", "gv")
    else:
        names = ("q", "k", "v", "g", "g_gamma", "initial_state")
    d_initial_state = initial_state_gradient(call, packing, D)
    return input_gradients(call, tokens, grads, d_initial_state, names, grad_mask)


def _piece_backward(piece: Slab, x: Inputs, do: Tensor, S: Tensor, D: Tensor) -> Inputs:
    """Gradients of the piece's scaled q, its k, v, g, gv.

    Args:
        S: the states that enter the piece; overwritten.
        D: the gradient of the states that leave it; becomes that of those that enter it.
    """
    decayed = x.v.new_empty(len(x.v), *S.shape[1:])
    dq, dk, dv, dg, dgv = (None if y is None else torch.empty_like(y) for y in x)
    for token, states in piece.steps:
        state = _decay(S[states], x, token)
        decayed[token] = state
        state.baddbmm_(x.k[token].mT, x.v[token])
        dq[token] = torch.bmm(do[token], state.mT)
    for token, states in reversed(piece.steps):
        state = D[states].baddbmm_(x.q[token].mT, do[token])
        dk[token] = torch.bmm(x.v[token], state.mT)
        dv[token] = torch.bmm(x.k[token], state)
        along = decayed[token].mul_(state)
        d_rows = along.sum(-1).unsqueeze(1)
        dg[token] = d_rows if dg.shape[-1] > 1 else d_rows.sum(-1, keepdim=True)
        if dgv is not None:
            dgv[token] = along.sum(1, keepdim=True)
        _decay(state, x, token)
    return Inputs(dq, dk, dv, dg, dgv)


def _packing(call) -> Packing:
    return Packing(call.cu_seqlens, call.B, call.T, call.HV, 1)


def _tokens(call, tokens: Inputs, packing: Packing, slab: Slab) -> Inputs:
    """Scaled q, k, v, and the decays e^g and e^gv, as ``[M, 1, D]``, M = tokens * HV."""
    q, k, v, g = (packing.gather(x, slab) for x in tokens[:4])
    gv = None if tokens.gv is None else token_decay(packing.gather(tokens.gv, slab))
    return Inputs(q * call.scale, k, v, token_decay(g), gv)


def _decay(state: Tensor, x: Inputs, token: slice) -> Tensor:
    state.mul_(x.g[token].mT)
    return state if x.gv is None else state.mul_(x.gv[token])

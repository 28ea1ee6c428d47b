"""KDA and the gated delta rule token by token; a gate is one per channel (D = K) or head (D = 1).

    S' = Diag(e^g) S                     decay first
    u = beta (v - S'^T k)                delta correction
    S <- S' + k u^T                      write
    o = scale S^T q                      read, after the write

The backward needs the state and its gradient at the same token. Neither can be run against its
direction, since undoing a decay divides by e^-1000. The forward keeps u: enough to run the state
again, after the reverse pass has stored what each token's gradients need of D.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flaop.reference.activation import Activated, activate, activate_backward
from flaop.reference.packing import Packing, Slab
from flaop.reference.pairs import along_gate
from flaop.reference.states import (
    final_state,
    final_state_gradient,
    initial_state,
    initial_state_gradient,
)


def forward(call) -> tuple[Tensor, Tensor, Tensor]:
    packing = _packing(call)
    slab = packing.whole()
    q, k, v, g, beta = _tokens(call, activate(call), packing, slab)
    S = initial_state(call, packing)
    decay = g.exp().mT
    o, u = torch.empty_like(v), torch.empty_like(v)
    for token, states in slab.steps:
        state = S[states].mul_(decay[token])
        u[token] = beta[token] * torch.baddbmm(v[token], k[token], state, alpha=-1)
        state.baddbmm_(k[token].mT, u[token])
        o[token] = torch.bmm(q[token], state)
    o_out, u_out = packing.zeros(call.V, call.v.dtype), packing.zeros(call.V, u.dtype)
    packing.scatter(o, slab, o_out)
    packing.scatter(u, slab, u_out)
    return o_out, final_state(call, packing, S), u_out


def backward(
    call,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    u: Tensor,
    grad_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    packing = _packing(call)
    slab = packing.whole()
    active = activate(call)
    # In float64: the gate's gradient below is a running difference of large terms.
    q, k, v, g, beta = (x.double() for x in _tokens(call, active, packing, slab))
    u = packing.gather(u, slab).double()
    do = torch.zeros_like(v) if d_o is None else packing.gather(d_o, slab).double()
    decay = g.exp().mT

    # In reverse, with D the gradient of the state after the token.
    D = final_state_gradient(call, packing, d_final_state).double()
    dk_write, du = torch.empty_like(k), torch.empty_like(v)
    for token, states in reversed(slab.steps):
        state = D[states].baddbmm_(q[token].mT, do[token])
        dk_write[token] = torch.bmm(u[token], state.mT)
        du[token] = torch.bmm(k[token], state)
        state.baddbmm_(k[token].mT, beta[token] * du[token], alpha=-1).mul_(decay[token])

    # Forward again, with the state S' that the token reads and D' its gradient. The gradient of g
    # is <S', D'> row by row: <S, D> of the initial state for the first token, and from token to
    # token it changes by what is written and read.
    S = initial_state(call, packing).double()
    d_log = along_gate((S * D).sum(-1).unsqueeze(-2), g.shape[-1])
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    for token, states in slab.steps:
        state = S[states].mul_(decay[token])
        dg[token] = d_log[states]
        dk_erase = -beta[token] * torch.bmm(du[token], state.mT)
        error = torch.baddbmm(v[token], k[token], state, alpha=-1)
        dbeta[token] = (du[token] * error).sum(-1, keepdim=True)
        state.baddbmm_(k[token].mT, u[token])
        dq[token] = torch.bmm(do[token], state.mT)
        dk[token] = dk_write[token] + dk_erase
        change = k[token] * (dk_write[token] - dk_erase) - q[token] * dq[token]
        d_log[states] += along_gate(change, g.shape[-1])

    grads = []
    for grad in (dq * call.scale, dk, beta * du, dg, dbeta):
        grads.append(packing.zeros(grad.shape[-1], active.q.dtype))
        packing.scatter(grad, slab, grads[-1])
    grads[4] = grads[4].squeeze(-1)
    grads = activate_backward(call, active, Activated(*grads), grad_mask[:7])
    return *grads, initial_state_gradient(call, packing, D) if grad_mask[7] else None


def _packing(call) -> Packing:
    return Packing(call.cu_seqlens, call.B, call.T, call.HV, 1)


def _tokens(call, active: Activated, packing: Packing, slab: Slab) -> tuple[Tensor, ...]:
    """Scaled q, k, v, g, beta as ``[M, 1, D]``, M = tokens * HV."""
    q, k, v, g = (packing.gather(x, slab) for x in active[:4])
    return q * call.scale, k, v, g, packing.gather(active.beta.unsqueeze(-1), slab)

"""What the delta families apply to their inputs before the recurrence (L2 norm, gate, beta), and
its backward.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

L2NORM_EPS = 1e-6
# exp of smaller log gates is zero anyway, and a gradient times -inf would be NaN.
LEAST_GATE = {torch.float32: -150 * math.log(2), torch.float64: -1100 * math.log(2)}


class Activated(NamedTuple):
    """Inputs of the recurrence in the dtype it is computed in."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K], or [B, T, HV, 1] for a gate per head: natural log of the decay
    beta: Tensor  # [B, T, HV]


def compute_dtype(call) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def activate(call) -> Activated:
    dtype = compute_dtype(call)
    q, k, v, beta = (x.to(dtype) for x in (call.q, call.k, call.v, call.beta))
    if call.use_qk_l2norm_in_kernel:
        q, k = q * _inverse_norm(q), k * _inverse_norm(k)
    if call.use_gate_in_kernel:
        x, rate = _gate_inputs(call, dtype)
        if call.lower_bound is None:
            g = -rate * F.softplus(x)
        else:
            g = call.lower_bound * torch.sigmoid(rate * x)
    elif call.g is None:
        g = v.new_zeros(*v.shape[:3], 1)
    else:
        g = _with_channels(call.g).to(dtype)
    if call.use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta)
        if call.allow_neg_eigval:
            beta = 2 * beta
    return Activated(q, k, v, g.clamp_min(LEAST_GATE[dtype]), beta)


def activate_backward(call, active: Activated, grads: Activated, mask: list[bool]) -> tuple:
    """Gradients of q, k, v, g, beta, A_log, dt_bias.

    Args:
        grads: gradients of ``active``; of q and k for each value head, ``[B, T, HV, K]``.
        mask: which of the seven are wanted; the others are ``None``, as is that of an absent input.
    """
    dq, dk, dv, dg, dbeta = grads
    dq = _norm_backward(call, call.q, active.q, dq) if mask[0] else None
    dk = _norm_backward(call, call.k, active.k, dk) if mask[1] else None
    dA_log = ddt_bias = None
    # a gate at its floor has no slope; what is left of dg there is rounding of its neighbours
    dg = dg.masked_fill(active.g <= LEAST_GATE[active.g.dtype], 0)
    if call.use_gate_in_kernel and (mask[3] or mask[5] or mask[6]):
        dg, dA_log, ddt_bias = _gate_backward(call, active.g, dg)
    if call.use_beta_sigmoid_in_kernel:
        top = 2 if call.allow_neg_eigval else 1
        dbeta = dbeta * active.beta * (1 - active.beta / top)
    inputs = (call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias)
    results = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias)
    return tuple(
        grad.to(x.dtype).reshape(x.shape) if wanted and x is not None and grad is not None else None
        for x, grad, wanted in zip(inputs, results, mask, strict=True)
    )


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def _norm_backward(call, x: Tensor, normed: Tensor, grad: Tensor) -> Tensor:
    grad = grad.unflatten(2, (x.shape[2], -1)).sum(3)
    if not call.use_qk_l2norm_in_kernel:
        return grad
    along = (grad * normed).sum(-1, keepdim=True)
    return (grad - normed * along) * _inverse_norm(x.to(grad.dtype))


def _with_channels(g: Tensor) -> Tensor:
    return g if g.ndim == 4 else g.unsqueeze(-1)


def _gate_inputs(call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The biased raw gate ``[B, T, HV, K or 1]`` and the rate exp(A_log) ``[HV, 1]``."""
    x = _with_channels(call.g).to(dtype)
    HV, D = x.shape[2:]
    if call.dt_bias is not None:
        x = x + call.dt_bias.to(dtype).view(HV, D)
    if call.A_log is None:
        return x, torch.ones(HV, 1, dtype=dtype)
    return x, call.A_log.to(dtype).exp().unsqueeze(-1)


def _gate_backward(call, g: Tensor, dg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, rate = _gate_inputs(call, g.dtype)
    if call.lower_bound is None:
        drate = dg * g
        dx = _times(-dg * torch.sigmoid(x), rate)
    else:
        z = rate * x
        s = torch.sigmoid(z)
        dz = dg * call.lower_bound * s * (1 - s)
        drate = _times(dz, z)
        dx = _times(dz, rate)
    return dx, drate.sum((0, 1, 3)), dx.sum((0, 1))


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """A zero gradient stays zero, also where a saturated gate makes ``factor`` infinite."""
    return torch.where(grad == 0, 0, grad * factor)

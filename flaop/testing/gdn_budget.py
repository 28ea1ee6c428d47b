"""The chunkwise formula of the gated delta rule, rounded as :mod:`flaop.testing.budget` says: the
operands of products of rows, A, what it is multiplied with and the gradient of that, V' and the
states. Gates of a head are applied in float32 behind the products.
"""

import functools

import torch
from torch import Tensor

from flaop.testing.budget import (
    CHUNK,
    LEAST_GATE,
    RCP_LN2,
    decayed,
    entering_state,
    over_sequences,
    product,
    rounded,
    store,
)
from flaop.testing.gdn_oracle import one_channel
from flaop.testing.oracle import activated_inputs


def gdn_budget_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule on the CPU, rounded as a kernel for these inputs may round.

    Takes the arguments of ``flaop.gated_delta_rule``, with hints ignored, and is differentiable.

    Returns:
        o in v's dtype and the final state (float32, float64 for float64 inputs), always both.
    """
    H, K = q.shape[2:]
    HV = v.shape[2]
    scale = K**-0.5 if scale is None else scale
    dtype, compute = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, g, beta = activated_inputs(
        *(q, k, one_channel(g, v), beta, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, None, compute),
    )
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = (g * RCP_LN2).clamp_min(LEAST_GATE[compute])
    tokens = [x.transpose(1, 2) for x in (q, k, v.cpu().to(compute), g, beta.unsqueeze(-1))]

    state = entering_state(tokens, initial_state, cu_seqlens, state_v_first)
    run = functools.partial(_sequence, scale=scale, dtype=dtype)
    o, state = over_sequences(run, tokens, state, cu_seqlens)
    return o.transpose(1, 2).to(v.dtype), state.mT if state_v_first else state


def _sequence(
    tokens: list[Tensor], state: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One batch of sequences of one length; tokens ``[B, HV, T, D]``, state ``[B, HV, K, V]``."""
    T = tokens[0].shape[2]
    if T == 0:
        return tokens[2], state
    padded = [torch.nn.functional.pad(x, (0, 0, 0, -T % CHUNK)) for x in tokens]
    q, k, v, g, beta = (x.unflatten(2, (-1, CHUNK)) for x in padded)
    G = g.cumsum(3)
    last = G[:, :, :, -1:]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    ratios = (G - G.mT).masked_fill(later, -torch.inf).exp2()

    A_qk = product(q, k.mT, dtype) * ratios * scale
    L = (beta * product(k, k.mT, dtype) * ratios).tril(-1)
    eye = torch.eye(CHUNK, dtype=L.dtype)
    A = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False)
    before, after, through = G.exp2(), (last - G).exp2(), last.exp2()

    outputs = []
    for i in range(q.shape[2]):
        erased = before[:, :, i] * product(k[:, :, i], state, dtype)
        residual = _with_stored_gradient(v[:, :, i] - erased, beta[:, :, i], dtype)
        v_new = store(product(A[:, :, i], residual, dtype), dtype)
        read = scale * before[:, :, i] * product(q[:, :, i], state, dtype)
        outputs.append(read + product(A_qk[:, :, i], v_new, dtype))
        written = product(k[:, :, i].mT, after[:, :, i] * v_new, dtype)
        state = decayed(through[:, :, i], state, dtype) + written
    return torch.cat(outputs, dim=2)[:, :, :T], state


class _WithStoredGradient(torch.autograd.Function):
    """beta x; the backward reads the product's gradient as it is stored."""

    @staticmethod
    def forward(ctx, x: Tensor, beta: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, beta)
        ctx.dtype = dtype
        return beta * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, beta = ctx.saved_tensors
        grad = rounded(grad, ctx.dtype)
        return beta * grad, (x * grad).sum(-1, keepdim=True), None


_with_stored_gradient = _WithStoredGradient.apply

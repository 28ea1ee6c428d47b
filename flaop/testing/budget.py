"""The chunkwise formula with the roundings a kernel is allowed, to measure what they cost.

16-bit inputs: the operands of all matrix products are rounded to the input dtype, and so are W, U,
V' and the inverse A; states to bfloat16 for bfloat16, and to the mantissa of float16 with the range
of float32 for float16. Products accumulate in float32, and everything else (gates, norms, decays,
the inverse itself, sums of partial gradients) stays in float32. The
backward is the forward's by autograd, with the same rounding of the operands of its products. It
reads the states and their gradients where they are stored, once a chunk: in bfloat16 for bfloat16
inputs, also for the gradient of the decay between chunks.
float32 and float64 inputs are rounded nowhere.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flaop.testing.oracle import activated_inputs

CHUNK = 64
BLOCK = 16
RCP_LN2 = 1.4426950408889634
# A token's pair with itself has decayed operands too, whose decays cancel: any factor will do.
FACTOR = 1.37
# exp2 of it is zero; a gate of -inf would give inf - inf in differences of sums.
LEAST_GATE = {torch.float32: -150.0, torch.float64: -1100.0}


def chunk_budget_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
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
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    disable_recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention on the CPU, rounded as a kernel for these inputs may round.

    Takes the arguments of ``flaop.kda``, with hints ignored, and is differentiable.

    Returns:
        o in v's dtype and the final state (float32, float64 for float64 inputs), always both.
    """
    H, K = q.shape[2:]
    HV = v.shape[2]
    scale = K**-0.5 if scale is None else scale
    dtype, compute = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, g, beta = activated_inputs(
        *(q, k, g, beta, A_log, dt_bias),
        *(use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel),
        *(allow_neg_eigval, lower_bound, compute),
    )
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = (g * RCP_LN2).clamp_min(LEAST_GATE[compute])
    tokens = [x.transpose(1, 2) for x in (q, k, v.cpu().to(compute), g, beta.unsqueeze(-1))]

    state = entering_state(tokens, initial_state, cu_seqlens, state_v_first)
    run = functools.partial(_sequence, scale=scale, dtype=dtype)
    o, state = over_sequences(run, tokens, state, cu_seqlens)
    return o.transpose(1, 2).to(v.dtype), state.mT if state_v_first else state


def entering_state(
    tokens: list[Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> Tensor:
    """``[N, HV, K, V]`` in the dtype of the tokens, of which k is the second and v the third."""
    k, v = tokens[1:3]
    if initial_state is None:
        N = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        return v.new_zeros(N, v.shape[1], k.shape[3], v.shape[3])
    state = initial_state.cpu().to(v.dtype)
    return state.mT if state_v_first else state


def over_sequences(
    run: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]],
    tokens: list[Tensor],
    state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``run(tokens, state) -> (o, state)`` of the batch, or of each packed sequence.

    Tokens and o are ``[B, HV, T, D]``; v is the third of the tokens.
    """
    if cu_seqlens is None:
        return run(tokens, state)
    # Tokens before the first and after the last sequence are zeros.
    T = tokens[2].shape[2]
    bounds = cu_seqlens.cpu().long().clamp(0, T).cummax(0).values
    sizes = torch.cat((bounds[:1], bounds.diff(), T - bounds[-1:])).tolist()
    parts = list(zip(*(x.split(sizes, dim=2) for x in tokens), strict=True))
    results = [run(part, state[n : n + 1]) for n, part in enumerate(parts[1:-1])]
    outputs = [parts[0][2] * 0, *(o for o, _ in results), parts[-1][2] * 0]
    return torch.cat(outputs, dim=2), torch.cat([s for _, s in results])


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

    A_qk = pairs(q * scale, k, G, dtype)
    own = store(q * FACTOR, dtype) * store(k / FACTOR, dtype)
    A_qk = A_qk + torch.diag_embed(own.sum(-1) * scale)
    L = pairs(beta * k, k, G, dtype)
    eye = torch.eye(CHUNK, dtype=L.dtype)
    A = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False)
    w = product(A, beta * k * G.exp2(), dtype)
    u = store(product(A, beta * v, dtype), dtype)
    qg, kg, decay = q * scale * G.exp2(), k * (last - G).exp2(), last.exp2().mT

    outputs = []
    for i in range(q.shape[2]):
        v_new = u[:, :, i] - product(w[:, :, i], state, dtype)
        o = product(qg[:, :, i], state, dtype) + product(A_qk[:, :, i], v_new, dtype)
        state = decayed(decay[:, :, i], state, dtype) + product(kg[:, :, i].mT, v_new, dtype)
        outputs.append(o)
    return torch.cat(outputs, dim=2)[:, :, :T], state


def pairs(x: Tensor, y: Tensor, G: Tensor, dtype: torch.dtype) -> Tensor:
    """Strictly lower triangular ``[..., 64, 64]`` of x_i . (y_j exp2(G_i - G_j)).

    Blocks of 16 on the diagonal by exact differences, blocks below it through their first row; the
    operands are rounded in both.
    """
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril(-1).unsqueeze(-1)
    rows = []
    for start in range(0, CHUNK, BLOCK):
        block = slice(start, start + BLOCK)
        x_block, y_block, G_block = x[..., block, :], y[..., block, :], G[..., block, :]
        difference = G_block.unsqueeze(-2) - G_block.unsqueeze(-3)
        decay = difference.where(later, -torch.inf).exp2()
        scaled = store(x_block.unsqueeze(-2) * decay, dtype)
        diagonal = (scaled * store(y_block.unsqueeze(-3), dtype)).sum(-1)
        first = G_block[..., :1, :]
        before = product(
            x_block * (G_block - first).exp2(),
            (y[..., :start, :] * (first - G[..., :start, :]).exp2()).mT,
            dtype,
        )
        row = torch.cat((before, diagonal), dim=-1)
        rows.append(torch.nn.functional.pad(row, (0, CHUNK - row.shape[-1])))
    return torch.cat(rows, dim=-2)


class _Product(torch.autograd.Function):
    """A matrix product of rounded operands, in the backward too.

    x, which decays make small, has float16's smallest numbers too; y may be a state.
    """

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        x, y = rounded(x, dtype, small=True), rounded(y, dtype)
        ctx.save_for_backward(x, y)
        ctx.dtype = dtype
        return x @ y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        grad = rounded(grad, ctx.dtype)
        return grad @ y.mT, x.mT @ grad, None


product = _Product.apply


class _Decayed(torch.autograd.Function):
    """decay * state in float32; the gradient of the decay reads both states as they are stored."""

    @staticmethod
    def forward(ctx, decay: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(decay, state)
        ctx.dtype = dtype if dtype == torch.bfloat16 else state.dtype
        return decay * state

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        decay, state = ctx.saved_tensors
        stored = rounded(state, ctx.dtype) * rounded(grad, ctx.dtype)
        return stored.sum(-1, keepdim=True), decay * grad, None


decayed = _Decayed.apply


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded in the forward, untouched in the backward."""
    return x + (rounded(x, dtype) - x).detach()


def rounded(x: Tensor, dtype: torch.dtype, small: bool = False) -> Tensor:
    nearest = _nearest(x, dtype, small)
    if _factor == 1.0:
        return nearest
    return torch.where(nearest == x, x, _nearest(x * _factor, dtype, small) / _factor)


def _nearest(x: Tensor, dtype: torch.dtype, small: bool) -> Tensor:
    if dtype == torch.bfloat16:
        return x.to(dtype).to(x.dtype)
    if dtype == torch.float16:
        # float16 keeps 10 of float32's 23 mantissa bits. Its range is left out: states exceed it.
        x = ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        if small:
            x = torch.where(x.abs() < 2.0**-14, (x * 2.0**24).round() * 2.0**-24, x)
    return x


# What is rounded is multiplied by it, and divided by it afterwards.
_factor = 1.0


@contextlib.contextmanager
def other_roundings(factor: float) -> Iterator[None]:
    """Within, the references round to another grid, as fine as that of the dtype.

    Numbers of the dtype stay as they are. Many factors tell how large an error is that a few
    roundings decide.
    """
    global _factor
    before, _factor = _factor, factor
    try:
        yield
    finally:
        _factor = before

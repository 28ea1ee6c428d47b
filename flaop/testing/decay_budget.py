"""The chunkwise formula of the decay families, rounded as :mod:`flaop.testing.budget` says: A, the
decayed operands, and the states where products read them.

A gate per value channel is served token by token, where nothing but o is rounded.
"""

import functools

import torch
from torch import Tensor

from flaop.testing.budget import (
    CHUNK,
    FACTOR,
    LEAST_GATE,
    RCP_LN2,
    decayed,
    entering_state,
    over_sequences,
    pairs,
    product,
    store,
)
from flaop.testing.decay_oracle import gla_oracle


def decay_budget_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    split_size: int = 0,
    backend: str | None = None,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """simple_gla and gla on the CPU, rounded as a kernel for these inputs may round.

    Takes the arguments of ``flaop.simple_gla`` and ``flaop.gla``, with hints ignored; the rank of g
    tells which. Differentiable.

    Returns:
        o in v's dtype and the final state (float32, float64 for float64 inputs), always both.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    if gv is not None:
        o, state = gla_oracle(
            *(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first),
            gv=gv,
            dtype=compute,
        )
        return o.to(v.dtype), state
    scale = q.shape[3] ** -0.5 if scale is None else scale
    gate = torch.zeros(*v.shape[:3], 1, dtype=compute)
    if g is not None:
        gate = gate + g.cpu().to(compute).reshape(*v.shape[:3], -1)
    if g_gamma is not None:
        gate = gate + g_gamma.cpu().to(compute).unsqueeze(-1)
    gate = (gate * RCP_LN2).clamp_min(LEAST_GATE[compute])
    heads = v.shape[2] // q.shape[2]
    queries, keys = (x.cpu().to(compute).repeat_interleave(heads, dim=2) for x in (q, k))
    tokens = [x.transpose(1, 2) for x in (queries, keys, v.cpu().to(compute), gate)]
    state = entering_state(tokens, initial_state, cu_seqlens, state_v_first)
    channel = g is not None and g.ndim == 4
    run = functools.partial(_sequence, scale=scale, dtype=q.dtype, channel=channel)
    o, state = over_sequences(run, tokens, state, cu_seqlens)
    return o.transpose(1, 2).to(v.dtype), state.mT if state_v_first else state


def _sequence(
    tokens: list[Tensor], state: Tensor, scale: float, dtype: torch.dtype, channel: bool
) -> tuple[Tensor, Tensor]:
    """One batch of sequences of one length; tokens ``[B, HV, T, D]``, state ``[B, HV, K, V]``."""
    T = tokens[0].shape[2]
    if T == 0:
        return tokens[2], state
    padded = [torch.nn.functional.pad(x, (0, 0, 0, -T % CHUNK)) for x in tokens]
    q, k, v, g = (x.unflatten(2, (-1, CHUNK)) for x in padded)
    G = g.cumsum(3)
    last = G[:, :, :, -1:]
    if channel:
        A = pairs(q * scale, k, G, dtype)
        own = store(q * FACTOR, dtype) * store(k / FACTOR, dtype)
        A = A + torch.diag_embed(own.sum(-1) * scale)
        queries, after = q * scale * G.exp2(), torch.ones_like(last[..., :1])
    else:
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
        ratios = (G - G.mT).masked_fill(later, -torch.inf).exp2()
        A = product(q, k.mT, dtype) * ratios * scale
        # A gate per head is applied after the product with the state.
        queries, after = q, scale * G.exp2()
    o = product(A, v, dtype)
    keys = (k * (last - G).exp2()).mT
    decay = last.exp2().mT

    outputs = []
    for i in range(q.shape[2]):
        outputs.append(o[:, :, i] + after[:, :, i] * product(queries[:, :, i], state, dtype))
        state = decayed(decay[:, :, i], state, dtype) + product(keys[:, :, i], v[:, :, i], dtype)
    return torch.cat(outputs, dim=2)[:, :, :T], state

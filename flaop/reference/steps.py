"""The CPU kernels of the decode ops: token by token on states taken from slots of a pool.

    S' = Diag(e^g) S                     decay first
    u = beta (v - S'^T k)                delta correction (delta families; otherwise u = v)
    S <- S' + k u^T                      write
    o = scale S^T q                      read, after the write
    S <- round(S)                        to the dtype of the pool

Each token is computed on its own, from contiguous copies, so that a call of several tokens and
several calls agree bitwise. A `call` is a checked call of `flaop.validation.steps`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flaop.reference import decay_chunk, kda_chunk
from flaop.reference.activation import Activated, activate, compute_dtype
from flaop.reference.decay_inputs import inputs
from flaop.reference.kernel import as_kernel


@as_kernel
def step(call) -> Tensor:
    """o ``[B, T, HV, V]``; the pool holds the states after the tokens."""
    return _run(call, keep=False)[0]


@as_kernel
def verify(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, and what :func:`commit` takes: k, u and g, which is empty without a gate."""
    return _run(call, keep=True)


@as_kernel
def commit(call) -> None:
    """Writes the accepted tokens."""
    rows = _Rows.of(call)
    accepted = rows.length.clamp(max=call.num_accepted_tokens)
    slots = call.state_indices
    S, padding = _read(call, slots, call.k.dtype)
    for t in range(_longest(call, rows)):
        k, u = (rows.token(x, t).to(S.dtype) for x in (call.k, call.u))
        g = None if call.g is None else _with_channels(rows.token(call.g, t)).to(S.dtype)
        new = _update(S, k.repeat_interleave(call.HV // call.H, 1), u, g)
        S = torch.where(_wide(t < accepted, S), _rounded(call, new), S)
    _write(call, slots, S, ~padding)


@as_kernel
def chunk_pool(call) -> Tensor:
    """o ``[B, T, HV, V]`` by the chunk path, from checkpoint to checkpoint."""
    step = call.step
    rows = _Rows.of(step)
    dtype = compute_dtype(step)
    S, padding = _read(step, step.state_indices, dtype)
    o = step.v.new_zeros(step.B * step.T, step.HV, step.V)
    interval = call.checkpoint_interval or max(step.T, 1)
    for first in range(0, _longest(step, rows), interval):
        length = (rows.length - first).clamp(0, interval)
        tokens, cu_seqlens = _pack(rows.start + first, length)
        packed = {
            name: None if x is None else x.flatten(0, 1)[tokens].unsqueeze(0)
            for name, x in step._asdict().items()
            if name in ("q", "k", "v", "g", "beta")
        }
        segment = step._replace(
            **packed, cu_seqlens=cu_seqlens, B=1, T=len(tokens), state_v_first=False
        )
        chunk = call._replace(step=segment).chunk_call(S)
        if step.delta:
            o_segment, S, *_ = kda_chunk.forward(chunk, residuals=False)
        else:
            o_segment, S, *_ = decay_chunk.forward(chunk)
        o[tokens] = o_segment[0]
        if call.checkpoint_interval:
            slots = call.checkpoint_indices[:, first // interval : first // interval + 1]
            if slots.shape[1]:
                _write(step, slots[:, 0], S, ~padding & (length == interval))
    _write(step, _targets(step), S, ~padding)
    o[rows.tokens_of(padding)] = 0
    return o.view(step.B, step.T, step.HV, step.V)


def _run(call, keep: bool) -> tuple[Tensor, ...]:
    """o, and with `keep` k, u and g, for which the pool stays as it is."""
    rows = _Rows.of(call)
    dtype = compute_dtype(call)
    per_token = call.state_indices.dim() == 2
    S, padding = _read(call, _sources(call), dtype)
    heads = call.HV // call.H
    o = call.v.new_zeros(call.B * call.T, call.HV, call.V)
    kept = _new_kept(call, dtype) if keep else ()
    longest = _longest(call, rows)
    if per_token:
        longest = min(longest, call.state_indices.shape[1])
    for t in range(longest):
        q, k, v, g, beta = _activated(call, rows, t)
        wide = k.repeat_interleave(heads, 1)
        new = S if g is None else S * g.exp().unsqueeze(-1)
        u = v
        if beta is not None:
            u = beta.unsqueeze(-1) * (v - (wide.unsqueeze(2) @ new).squeeze(2))
        new = new + wide.unsqueeze(-1) * u.unsqueeze(-2)
        o_t = call.scale * (q.repeat_interleave(heads, 1).unsqueeze(2) @ new).squeeze(2)
        taken = (t < rows.length) & ~padding
        S = torch.where(_wide(taken, S), _rounded(call, new), S)
        places = (rows.start + t)[taken]
        o[places] = o_t[taken].to(o.dtype)
        for out, x in zip(kept, (k, u, g), strict=False):
            if x is not None:
                out.view(call.B * call.T, *out.shape[2:])[places] = x[taken].view(
                    -1, *out.shape[2:]
                )
        if per_token:
            _write(call, _targets(call)[:, t], S, taken)
    if not keep and not per_token:
        _write(call, _targets(call), S, ~padding)
    return o.view(call.B, call.T, call.HV, call.V), *kept


class _Rows(NamedTuple):
    """Where the tokens of the sequences lie among all, cut to those that exist."""

    start: Tensor  # [N]
    length: Tensor  # [N]

    @classmethod
    def of(cls, call) -> "_Rows":
        if call.cu_seqlens is None:
            start = torch.arange(call.N) * call.T
            return cls(start, torch.full((call.N,), call.T))
        bounds = call.cu_seqlens.long().clamp(0, call.T).cummax(0).values
        return cls(bounds[:-1], bounds.diff())

    def token(self, x: Tensor, t: int) -> Tensor:
        """Token t of each sequence ``[N, ...]``; of one that has ended, some token."""
        x = x.flatten(0, 1)
        return x.index_select(0, (self.start + t).clamp(max=len(x) - 1))

    def tokens_of(self, chosen: Tensor) -> Tensor:
        """The tokens of the chosen sequences."""
        return _pack(self.start[chosen], self.length[chosen])[0]


def _pack(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of spans one after the other, and the offsets of the spans."""
    cu_seqlens = torch.nn.functional.pad(length.cumsum(0), (1, 0))
    shift = (start - cu_seqlens[:-1]).repeat_interleave(length)
    return torch.arange(len(shift)) + shift, cu_seqlens


def _longest(call, rows: _Rows) -> int:
    return int(rows.length.max()) if call.N else 0


def _activated(call, rows: _Rows, t: int) -> tuple[Tensor | None, ...]:
    """q, k, v, g, beta of token t ``[N, heads, D]`` in the dtype they are computed in."""
    names = ("q", "k", "v", "g", "beta")
    token = {n: x if (x := getattr(call, n)) is None else rows.token(x, t) for n in names}
    one = call._replace(**{n: x if x is None else x.unsqueeze(1) for n, x in token.items()})
    if call.delta:
        active = activate(one)
    else:
        active = Activated(*inputs(one)[:4], None)
    q, k, v, g, beta = (x if x is None else x.squeeze(1) for x in active)
    return q, k, v, g if call.gated else None, beta


def _with_channels(g: Tensor) -> Tensor:
    return g if g.dim() == 3 else g.unsqueeze(-1)


def _update(S: Tensor, k: Tensor, u: Tensor, g: Tensor | None) -> Tensor:
    if g is not None:
        S = S * g.exp().unsqueeze(-1)
    return S + k.unsqueeze(-1) * u.unsqueeze(-2)


def _wide(rows: Tensor, S: Tensor) -> Tensor:
    """Rows ``[N]`` beside states."""
    return rows.view(-1, *[1] * (S.dim() - 1))


def _rounded(call, S: Tensor) -> Tensor:
    return S.to(call.state.dtype).to(S.dtype)


def _sources(call) -> Tensor:
    """The slot that each sequence reads; -1 if there is none."""
    slots = call.state_indices
    if slots.dim() == 1:
        return slots
    if call.num_accepted_tokens is None:
        return slots[:, 0]
    column = call.num_accepted_tokens.long().clamp(min=1) - 1
    S = slots.shape[1]
    slot = slots.gather(1, column.clamp(max=S - 1).unsqueeze(1)).squeeze(1)
    return torch.where(column < S, slot, -1)


def _targets(call) -> Tensor:
    return call.state_indices if call.write_indices is None else call.write_indices


def _in_pool(call, slots: Tensor) -> Tensor:
    return (slots >= 0) & (slots < len(call.state))


def _read(call, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The states ``[N, HV, K, V]`` that enter, and which rows are padding; zeros for these."""
    padding = ~_in_pool(call, slots)
    S = torch.zeros(call.N, call.HV, call.K, call.V, dtype=dtype)
    taken = ~padding
    if call.has_initial_state is not None:
        taken = taken & call.has_initial_state
    state = call.state[slots[taken].long()].to(dtype)
    S[taken] = state.mT if call.state_v_first else state
    return S, padding


def _write(call, slots: Tensor, S: Tensor, rows: Tensor) -> None:
    """The states of some rows into their slots; a slot outside the pool is not written."""
    rows = rows & _in_pool(call, slots)
    state = S[rows].mT if call.state_v_first else S[rows]
    call.state[slots[rows].long()] = state.to(call.state.dtype)


def _new_kept(call, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """k, u and g of verify."""
    tokens = (call.B, call.T)
    gate = (0,)
    if call.gated:
        gate = (*tokens, call.HV, call.K) if call.channel else (*tokens, call.HV)
    shapes = ((*tokens, call.H, call.K), (*tokens, call.HV, call.V), gate)
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)

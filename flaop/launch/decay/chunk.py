"""Chunk-parallel simple_gla and gla on the GPU: forward, backward, summaries.

Every function takes the checked call (flaop.validation.decay.DecayCall) with at least one token and
sequence.
"""

import torch

from flaop._extension import bindings

from ..kernel import prepare, scratch
from ..table import zero_outside
from . import channel
from .kernels import (
    Decayed,
    fits_scan,
    qk_backward,
    qk_slabs,
    run_outputs,
    run_v_backward,
    scan,
    states,
    states_backward,
    sum_heads,
)
from .problem import CHUNK, problem

# bytes of per-chunk tensors that one pass over the sequences may take
WORKSPACE = 320 << 20  # operands of channel gates in the forward
BACKWARD_WORKSPACE = 4 << 30  # with the states and their gradients


def _segments(p, row_bytes, limit, split=False):
    """Ranges of rows that are worked on one after the other, so that the workspace stays bounded.

    split: they also keep to the call's split_size, times the number of sequences.
    """
    call = p.call
    step = max(limit // row_bytes, 1)
    if split and call.split_size:
        step = min(step, call.split_size // CHUNK * call.N)
    count = max(-(-p.rows // step), 1)
    step = min(step, -(-p.rows // count))
    if p.table is None:
        step = -(-step // call.B) * call.B  # all sequences advance together
    return [(start, min(start + step, p.rows)) for start in range(0, p.rows, step)]


def _row_bytes(p, states):
    """Bytes that a row takes in a segment's workspace, with so many states."""
    call = p.call
    size = states * call.K * call.V * p.stored_state.itemsize
    if p.channel:
        size += 2 * CHUNK * call.K * p.q.element_size() + 4 * call.K
    return call.HV * size


def _decayed(p, rows):
    """Room for the operands of channel gates; None for scalar gates."""
    if not p.channel:
        return None
    HV, K = p.call.HV, p.call.K
    qg, kg = (scratch(p.q.new_empty(rows, HV, CHUNK, K)) for _ in range(2))
    return Decayed(qg, kg, scratch(p.q.new_empty(rows, HV, K, dtype=torch.float32)))


def _states(p, rows):
    call = p.call
    return scratch(p.v.new_empty(rows, call.HV, call.K, call.V, dtype=p.stored_state))


def _carries(p, count):
    """Room for `count` sets of the states that a boundary between segments cuts."""
    call = p.call
    cut = call.B if p.table is None else 1
    size = cut * call.HV * call.K * call.V
    # each starts at a multiple of 16 bytes
    shape = (max(count, 1), -(-size // 4) * 4)
    return scratch(p.v.new_empty(shape, dtype=torch.float32)).unbind(0)


def _between(carries, i):
    """(what segment i reads, what it writes); ends that no segment reads or writes are any."""
    return carries[max(i - 1, 0)], carries[min(i, len(carries) - 1)]


def _zeroed(p, *shape, dtype):
    """[B, T, ...], zero where no sequence lies."""
    x = p.q.new_empty(p.call.B, p.call.T, *shape, dtype=dtype)
    zero_outside(x, p.table)
    return x


def forward(call, visit=None, remember=False):
    """(o, final_state or None). Workspace: at most WORKSPACE bytes, gla's A beside it.

    visit(p, h, row0, row1) is called after each segment with the states [rows', HV, K, V] fp32 that
    enter its chunks.
    remember: later calls that differ in addresses alone may go without Python (docs/launch.md).
    """
    o, final_state, *A = forward_residuals(call, visit)
    for x in A:
        scratch(x)
    if remember:
        bindings.complete()
    return o, final_state


def forward_residuals(call, visit=None):
    """(o, final_state or None), and A [B, T, HV, 64] with channel gates."""
    p = problem(call)
    if visit is not None:
        p = p._replace(stored_state=torch.float32)
    o = _zeroed(p, call.HV, call.V, dtype=p.v.dtype)
    A = _zeroed(p, call.HV, CHUNK, dtype=p.q.dtype) if p.channel else None
    # always there: whether it is asked for, or carries the state between segments, compiles nothing
    ht = o.new_empty(p.state_shape, dtype=torch.float32)
    if not call.output_final_state:
        scratch(ht)
    # the fused scan keeps no states
    fits = visit is None and fits_scan(p)
    row_bytes = _row_bytes(p, 0 if fits else 1)
    segments = _segments(p, row_bytes, WORKSPACE) if row_bytes else [(0, p.rows)]
    work = _decayed(p, segments[0][1])
    if not fits:
        h, carries = _states(p, segments[0][1]), _carries(p, len(segments) - 1)
    run = scan(p, o, ht, work, A) if fits else states(p, h, work, ht)
    for i, (row0, row1) in enumerate(segments):
        if p.channel:
            channel.run_intra(p, A, *work, row0, row1)
        if fits:
            run(row0, row1)
        else:
            run(*_between(carries, i), row0, row1)
            run_outputs(p, h, o, row0, row1, work, A)
        if visit is not None:
            visit(p, h, row0, row1)
    final_state = ht if call.output_final_state else None
    return (o, final_state, A) if p.channel else (o, final_state)


def _checkpoints(p, segments, work):
    """The states at the boundaries between segments, by a pass that keeps nothing else."""
    carries = _carries(p, len(segments) - 1)
    run = states(p, None, work)
    for i, (row0, row1) in enumerate(segments[:-1]):
        if p.channel:
            channel.run_intra(p, None, *work, row0, row1)
        run(*_between(carries, i), row0, row1)
    return carries


def backward(call, d_o, d_final_state, A, grad_mask):
    """Gradients in the order of the family's backward op, None where not asked for.

    With scalar gates: dq, dk, dv, dg, dg_gamma, dh0. With channel gates: dq, dk, dv, dg, dh0, from
    the residual A. Workspace: two states a chunk, or with split_size two for every chunk of a split
    and one a split.
    """
    p = problem(call)
    do, dht = prepare(d_o), prepare(d_final_state)
    segments = _segments(p, _row_bytes(p, 2), BACKWARD_WORKSPACE, split=True)
    rows = segments[0][1]
    work = _decayed(p, rows)
    carries = _checkpoints(p, segments, work)
    h, dh = _states(p, rows), _states(p, rows)
    # a segment's gradient leaves in one and enters the next segment from it
    dcarries = _carries(p, 2)
    dh0 = torch.empty_like(p.h0) if p.h0 is not None and grad_mask[-1] else None

    head_dtype = p.q.dtype if call.HV == call.H else torch.float32
    dq, dk = (_zeroed(p, call.HV, call.K, dtype=head_dtype) for _ in range(2))
    dv = _zeroed(p, call.HV, call.V, dtype=p.v.dtype)
    dg = dg_gamma = None
    if p.channel:
        dg = _zeroed(p, call.HV, call.K, dtype=p.g.dtype)
    else:
        slabs = qk_slabs(p)
        if p.g is not None and grad_mask[3]:
            part_dtype = p.g.dtype if slabs == 1 else torch.float32
            dg = p.g.new_empty(slabs, *p.g.shape, dtype=part_dtype)
        if p.g_gamma is not None and grad_mask[4]:
            dg_gamma = p.q.new_empty(p.rows, call.HV, slabs, dtype=torch.float32)

    run, run_back = states(p, h, work), states_backward(p, do, dh, dht, dh0, work)
    if not p.channel:
        dv_there = dv if slabs == 1 else None
        run_qk_back = qk_backward(p, do, h, dh, dq, dk, dv_there, dg, dg_gamma)
    for i in reversed(range(len(segments))):
        row0, row1 = segments[i]
        if p.channel:
            channel.run_intra(p, None, *work, row0, row1)
        run(*_between(carries, i), row0, row1)
        run_back(dcarries[i % 2], dcarries[1 - i % 2], row0, row1)
        if p.channel:
            channel.run_channel_backward(p, A, h, dh, do, row0, row1, dq, dk, dg)
            run_v_backward(p, do, dh, dv, row0, row1, work, A)
            continue
        run_qk_back(row0, row1)
        if slabs > 1:
            run_v_backward(p, do, dh, dv, row0, row1)

    if call.HV != call.H:
        dq, dk = sum_heads(dq, p.q), sum_heads(dk, p.k)
    if p.channel:
        grads = (dq, dk, dv, dg, dh0)
    else:
        if dg is not None:
            dg = dg[0] if slabs == 1 else dg.sum(0).to(p.g.dtype)
            zero_outside(dg, p.table)
        if dg_gamma is not None:
            dg_gamma = dg_gamma.sum((0, 2)).to(p.g_gamma.dtype)
        grads = (dq, dk, dv, dg, dg_gamma, dh0)
    return tuple(x if wanted else None for x, wanted in zip(grads, grad_mask, strict=True))


def summary(call):
    """(state [N, HV, K, V], decay over all tokens [N, HV, K or 1]) of a call whose q is not read.

    The decay is a product of numbers that the kernels leave per chunk, or a sum of scalar gates.
    """
    p = problem(call)
    segments, work = _summary_parts(p, 0, WORKSPACE)
    carries = _carries(p, len(segments) - 1)
    state = p.v.new_empty(p.state_shape, dtype=torch.float32)
    run = states(p, None, work, state)
    transfer = None if p.channel else _total_decay(p)
    for i, (row0, row1) in enumerate(segments):
        if p.channel:
            channel.run_intra(p, None, *work, row0, row1)
            transfer = _times_decay(p, work.decay, row0, row1, transfer)
        run(*_between(carries, i), row0, row1)
    return state, transfer


def summary_backward(call):
    """(gradient of the entering state, decay over all tokens) of a call whose v is d_o."""
    p = problem(call)
    segments, work = _summary_parts(p, 1, BACKWARD_WORKSPACE)
    dcarries, dh = _carries(p, 2), _states(p, segments[0][1])
    d_state = p.v.new_empty(p.state_shape, dtype=torch.float32)
    run = states_backward(p, p.v, dh, None, d_state, work)
    transfer = None if p.channel else _total_decay(p)
    for i in reversed(range(len(segments))):
        row0, row1 = segments[i]
        if p.channel:
            channel.run_intra(p, None, *work, row0, row1)
            transfer = _times_decay(p, work.decay, row0, row1, transfer)
        run(dcarries[i % 2], dcarries[1 - i % 2], row0, row1)
    return d_state, transfer


def _summary_parts(p, states, limit):
    """The segments of a summary that keeps so many states a row, and room for its operands."""
    row_bytes = _row_bytes(p, states)
    segments = _segments(p, row_bytes, limit) if row_bytes else [(0, p.rows)]
    return segments, _decayed(p, segments[0][1])


def _times_decay(p, decay, row0, row1, transfer):
    """The product of the decays [rows', HV, K] of the rows [row0, row1), times transfer."""
    decay = decay[: row1 - row0]
    if p.table is None:
        product = decay.unflatten(0, (-1, p.call.B)).prod(0)
    else:
        # rows past the sequence's last chunk hold anything
        inside = torch.arange(row0, row1, device=decay.device) < p.offsets[-1]
        product = torch.where(inside.view(-1, 1, 1), decay, 1.0).prod(0, keepdim=True)
    return product if transfer is None else transfer * product


def _total_decay(p):
    """Of scalar gates over all tokens of each sequence, [N, HV, 1] fp32."""
    call = p.call
    gate = p.v.new_zeros(call.B, call.T, call.HV, dtype=torch.float64)
    if p.g is not None:
        gate = gate + p.g
    if p.g_gamma is not None:
        gate = gate + p.g_gamma
    if p.table is not None:
        token = torch.arange(call.T, device=gate.device)
        inside = (token >= p.bounds[0]) & (token < p.bounds[-1])
        gate = torch.where(inside[:, None], gate, 0.0)
    return gate.sum(1).exp().float().unsqueeze(-1)

"""Chunk-parallel KDA on the GPU: forward with and without residuals, backward, summaries.

Every function takes the checked call (flaop.validation.kda.KdaCall) with at least one token and
sequence.
"""

import torch

from flaop._extension import bindings

from ..kernel import prepare, scratch
from ..table import zero_outside, zero_unused
from .problem import CHUNK, problem
from .stages import (
    Workspace,
    intra,
    new_states,
    new_summary,
    run_intra_backward,
    run_scan_backward,
    run_summary,
    run_summary_backward,
    scan,
)

WORKSPACE = 320 << 20  # bytes of per-chunk operands that one pass over the sequences may take


def _workspace(p, rows):
    HV, K = p.call.HV, p.call.K
    w, qg, kg = (p.q.new_empty(rows, HV, CHUNK, K) for _ in range(3))
    return Workspace(w, qg, kg, p.q.new_empty(rows, HV, K, dtype=torch.float32))


def _final_state(p, segments):
    """Room for the state that leaves, or None: it also carries the state between segments."""
    if len(segments) == 1 and not p.call.output_final_state:
        return None
    ht = p.q.new_empty(p.state_shape, dtype=torch.float32)
    return ht if p.call.output_final_state else scratch(ht)


def _segments(p, states=False):
    """Ranges of rows that are worked on one after the other, so that the workspace stays bounded,
    with a state for each row or without.
    """
    call = p.call
    row_bytes = 3 * call.HV * CHUNK * call.K * p.q.element_size()
    if states:
        row_bytes += call.HV * call.K * call.V * p.stored_state.itemsize
    count = max(1, -(-p.rows * row_bytes // WORKSPACE))
    step = -(-p.rows // count)
    if p.table is None:
        step = -(-step // p.call.B) * p.call.B  # all sequences advance together
    return [(start, min(start + step, p.rows)) for start in range(0, p.rows, step)]


def _token_matrix(p):
    """[B, T, HV, BT] in the input dtype; zero where no sequence lies."""
    x = p.q.new_empty(p.call.B, p.call.T, p.call.HV, CHUNK)
    zero_outside(x, p.table)
    return x


def _outputs(p):
    o = torch.empty_like(p.v)
    zero_outside(o, p.table)
    return o


def forward(call, visit=None, remember=False):
    """(o, final_state or None), keeping nothing.

    visit(p, h, row0, row1) is called after each segment with the states [rows', HV, K, V] fp32 that
    enter its chunks. Workspace: A_qk, A where a kernel of its own reads it, and at most WORKSPACE
    bytes.
    remember: later calls that differ in addresses alone may go without Python (docs/launch.md).
    """
    p = problem(call)
    h = None
    if visit is not None:
        p = p._replace(stored_state=torch.float32)
    o = _outputs(p)
    segments = _segments(p, visit is not None)
    A_qk = scratch(p.q.new_empty(call.B, call.T, call.HV, CHUNK))
    A = None if p.cuda else scratch(torch.empty_like(A_qk))
    work = _workspace(p, segments[0][1])
    for x in work:
        scratch(x)
    if visit is not None:
        h = new_states(p, segments[0][1])
    ht = _final_state(p, segments)
    # U waits in the place of o: each tile is read before it is written
    run_intra = intra(p, A, A_qk, o, work)
    run_scan = scan(p, o, work, A_qk=A_qk, o=o, h=h, ht=ht)
    for rows in segments:
        run_intra(*rows)
        run_scan(*rows)
        if visit is not None:
            visit(p, h, *rows)
    if remember:
        bindings.complete()
    return o, ht if call.output_final_state else None


def forward_residuals(call):
    """(o, final_state or None, A, A_qk, w, qg, kg, decay, v_new, h); the last six None unless
    `disable_recompute` keeps them."""
    p = problem(call)
    o = _outputs(p)
    A, A_qk = _token_matrix(p), _token_matrix(p)
    keep = call.disable_recompute
    segments = [(0, p.rows)] if keep else _segments(p)
    ht = _final_state(p, segments)
    v_new = h = None
    if keep:
        v_new = _outputs(p)
        h = new_states(p)
    work = _workspace(p, segments[0][1])
    if keep:
        for x in (*work, h):
            zero_unused(x, p.table)
    run_intra = intra(p, A, A_qk, o, work)
    run_scan = scan(p, o, work, A_qk=A_qk, o=o, v_new=v_new, h=h, ht=ht)
    for rows in segments:
        run_intra(*rows)
        run_scan(*rows)
    kept = (*work, v_new, h) if keep else (None,) * 6
    return o, ht if call.output_final_state else None, A, A_qk, *kept


def recompute(call, A):
    """What `disable_recompute` keeps of a batched call, from A: w, qg, kg, decay, v_new, h."""
    work, v_new, h = _recompute(problem(call), prepare(A))
    return *work, v_new, h


def _recompute(p, A):
    """The scan operands, corrected values and states again, from A alone."""
    v_new, h = torch.empty_like(p.v), new_states(p)
    work = _workspace(p, p.rows)
    intra(p, A, None, v_new, work, load_A=True)(0, p.rows)
    scan(p, v_new, work, v_new=v_new, h=h)(0, p.rows)
    return work, v_new, h


def backward(call, d_o, d_final_state, residuals, grad_mask):
    """(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0), None where not asked for.

    residuals: A, A_qk, w, qg, kg, decay, v_new, h; the last six are recomputed if empty.
    """
    p = problem(call)
    do, dht = prepare(d_o), prepare(d_final_state)
    A, A_qk, *kept = residuals
    if kept[-1].numel() > 0:
        work, v_new, h = Workspace(*kept[:4]), *kept[4:]
    else:
        work, v_new, h = _recompute(p, A)
    want_dh0 = p.h0 is not None and grad_mask[7]
    dv_new, dh, dh0 = run_scan_backward(p, work, A_qk, do, dht, want_dh0)
    del work
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias = run_intra_backward(
        p, A, v_new, h, do, dv_new, dh
    )
    if dA_log is not None:
        dA_log = dA_log.sum((0, 2)).to(p.A_log.dtype)
    if ddt_bias is not None:
        ddt_bias = ddt_bias.sum(0).to(p.dt_bias.dtype).view(p.dt_bias.shape)
    grads = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)
    return tuple(x if wanted else None for x, wanted in zip(grads, grad_mask, strict=True))


def summary(call):
    """(state [N, HV, K, V], transfer matrix [N, HV, K, K]) of a call whose q is not read."""
    p, run_intra, u, _, work, segments = _summary_parts(call)
    state, transfer = new_summary(p)
    for rows in segments:
        run_intra(*rows)
        run_summary(p, u, work, state, transfer, *rows)
    return state, transfer


def summary_forward(call):
    """(o from a state of zeros, read, state, transfer matrix, A, A_qk) of a batched call: from an
    entering state S the outputs are o + read S."""
    p = problem(call)
    o, read = _outputs(p), p.q.new_empty(call.B, call.T, call.HV, call.K)
    A, A_qk = _token_matrix(p), _token_matrix(p)
    state, transfer = new_summary(p)
    segments = _segments(p)
    work = _workspace(p, segments[0][1])
    # U waits in the place of o: each tile is read before it is written
    run_intra = intra(p, A, A_qk, o, work)
    for rows in segments:
        run_intra(*rows)
        run_summary(p, o, work, state, transfer, *rows, A_qk=A_qk, o=o, read=read)
    return o, read, state, transfer, A, A_qk


def summary_backward(call, A, A_qk, *operands):
    """(gradient of the entering state, its transfer matrix) of a call whose v is d_o.

    A, A_qk: residuals of the forward, or None. operands: w, qg, kg and decay of a batched call
    (recompute), empty, None, or left out.
    """
    if operands and operands[0] is not None and operands[0].dim() == 4:
        p = problem(call)
        d_state, transfer = new_summary(p)
        work = Workspace(*map(prepare, operands))
        run_summary_backward(p, work, prepare(A_qk), p.v, d_state, transfer, 0, p.rows)
        return d_state, transfer
    p, run_intra, _, A_qk, work, segments = _summary_parts(call, A, A_qk)
    d_state, transfer = new_summary(p)
    for rows in reversed(segments):
        run_intra(*rows)
        run_summary_backward(p, work, A_qk, p.v, d_state, transfer, *rows)
    return d_state, transfer


def _summary_parts(call, A=None, A_qk=None):
    """The Problem, its within-chunk stages, what they write, and the segments."""
    p = problem(call)
    segments, u = _segments(p), torch.empty_like(p.v)
    work = _workspace(p, segments[0][1])
    if A is not None:
        A, A_qk = prepare(A), prepare(A_qk)
        return p, intra(p, A, None, u, work, load_A=True), u, A_qk, work, segments
    A_qk = p.q.new_empty(call.B, call.T, call.HV, CHUNK)
    A = None if p.cuda else torch.empty_like(A_qk)
    return p, intra(p, A, A_qk, u, work), u, A_qk, work, segments

"""Chunk-parallel KDA on the GPU: forward with and without residuals, backward.

Every function takes the checked call (flaop.validation.kda.KdaCall) with at least one token and
sequence.
"""

import torch

from ..kernel import prepare
from ..table import zero_outside, zero_unused
from .problem import CHUNK, problem
from .stages import (
    Workspace,
    intra,
    new_states,
    run_intra_backward,
    run_scan_backward,
    scan,
)

WORKSPACE = 320 << 20  # bytes of per-chunk operands that one pass over the sequences may take


def _workspace(p, rows, apart=False):
    """apart: tensors of their own, as an op may return them; else in one allocation."""
    HV, K = p.call.HV, p.call.K
    shape = (rows, HV, CHUNK, K)
    if apart:
        w, qg, kg = (p.q.new_empty(shape) for _ in range(3))
    else:
        w, qg, kg = p.q.new_empty(3, *shape).unbind(0)
    return Workspace(w, qg, kg, p.q.new_empty(rows, HV, K, dtype=torch.float32))


def _matrix_and_workspace(p, rows):
    """(A_qk, Workspace), flat, in one allocation: one takes the host longer than a launch."""
    HV, K, itemsize = p.call.HV, p.call.K, p.q.element_size()
    operand = rows * HV * CHUNK * K
    decay = rows * HV * K * torch.float32.itemsize // itemsize
    sizes = (p.call.B * p.call.T * HV * CHUNK, operand, operand, operand, decay)
    A_qk, w, qg, kg, decay = p.q.new_empty(sum(sizes)).split(sizes)
    return A_qk, Workspace(w, qg, kg, decay.view(torch.float32))


def _final_state(p, segments):
    """Room for the state that leaves, or None: it also carries the state between segments."""
    if len(segments) == 1 and not p.call.output_final_state:
        return None
    return p.q.new_empty(p.state_shape, dtype=torch.float32)


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


def forward(call, visit=None):
    """(o, final_state or None), keeping nothing.

    visit(p, h, row0, row1) is called after each segment with the states [rows', HV, K, V] fp32 that
    enter its chunks. Workspace: A_qk, A where a kernel of its own reads it, and at most WORKSPACE
    bytes.
    """
    p = problem(call)
    h = None
    if visit is not None:
        p = p._replace(stored_state=torch.float32)
    o = _outputs(p)
    segments = _segments(p, visit is not None)
    A_qk, work = _matrix_and_workspace(p, segments[0][1])
    A = None if p.cuda else torch.empty_like(A_qk)
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
    work = _workspace(p, segments[0][1], apart=keep)
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

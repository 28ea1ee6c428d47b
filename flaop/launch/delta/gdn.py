"""Chunk-parallel gated delta rule on the GPU: forward with and without residuals, backward,
summaries.

Every function takes the checked call (flaop.validation.gated_delta_rule.GdnCall) with at least one
token and sequence.
"""

import torch

from flaop._extension import bindings

from ..kernel import prepare, scratch
from ..table import zero_outside, zero_unused
from .gdn_stages import (
    run_intra_backward,
    run_pairs,
    run_scan,
    run_scan_backward,
    run_summary,
    run_summary_backward,
)
from .problem import CHUNK, scalar_problem
from .stages import new_states, new_summary


def _pair_matrices(p):
    """Room for A and A_qk, [B, T, HV, BT] in the input dtype."""
    shape = (p.call.B, p.call.T, p.call.HV, CHUNK)
    return p.q.new_empty(shape), p.q.new_empty(shape)


def _values(p):
    """[B, T, HV, V] in the input dtype; zero where no sequence lies."""
    x = torch.empty_like(p.v)
    zero_outside(x, p.table)
    return x


def _final_state(p):
    # always there: whether it is asked for compiles nothing
    return p.v.new_empty(p.state_shape, dtype=torch.float32)


def forward(call, visit=None, remember=False):
    """(o, final_state or None), keeping nothing.

    visit(p, h, 0, rows) is called with the states [rows, HV, K, V] fp32 that enter the chunks.
    Workspace: A, A_qk and nine fp32 numbers a token and value head, and those states.
    remember: later calls that differ in addresses alone may go without Python (docs/launch.md).
    """
    p = scalar_problem(call)
    h = None
    if visit is not None:
        p = p._replace(stored_state=torch.float32)
        h = new_states(p)
    A, A_qk = _pair_matrices(p)
    o, ht = _values(p), _final_state(p)
    factors = run_pairs(p, A, A_qk)
    for x in (A, A_qk, *factors) if call.output_final_state else (A, A_qk, *factors, ht):
        scratch(x)
    run_scan(p, factors, A, A_qk, o=o, h=h, ht=ht)
    if visit is not None:
        visit(p, h, 0, p.rows)
    if remember:
        bindings.complete()
    return o, ht if call.output_final_state else None


def forward_residuals(call):
    """(o, final_state or None, A, A_qk, v_new, h); the last two None unless `disable_recompute`
    keeps them."""
    p = scalar_problem(call)
    A, A_qk = _pair_matrices(p)
    for x in (A, A_qk):
        zero_outside(x, p.table)
    o, ht = _values(p), _final_state(p)
    v_new = h = None
    if call.disable_recompute:
        v_new, h = _values(p), new_states(p)
        zero_unused(h, p.table)
    factors = run_pairs(p, A, A_qk)
    run_scan(p, factors, A, A_qk, o=o, v_new=v_new, h=h, ht=ht)
    return o, ht if call.output_final_state else None, A, A_qk, v_new, h


def backward(call, d_o, d_final_state, residuals, grad_mask):
    """(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0), None where not asked for.

    residuals: A, A_qk, v_new, h; the last two are recomputed if empty.
    """
    p = scalar_problem(call)
    do, dht = prepare(d_o), prepare(d_final_state)
    A, A_qk, v_new, h = residuals
    factors = run_pairs(p)
    if h.numel() == 0:
        v_new, h = torch.empty_like(p.v), new_states(p)
        run_scan(p, factors, A, v_new=v_new, h=h)
    want_dh0 = p.h0 is not None and grad_mask[7]
    dR, dh, dh0 = run_scan_backward(p, factors, A, A_qk, do, dht, want_dh0)
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias = run_intra_backward(p, factors, v_new, h, do, dR, dh)
    if dA_log is not None:
        dA_log = dA_log.sum((0, 1)).to(p.A_log.dtype)
    if ddt_bias is not None:
        ddt_bias = ddt_bias.sum((0, 1)).to(p.dt_bias.dtype)
    grads = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)
    return tuple(x if wanted else None for x, wanted in zip(grads, grad_mask, strict=True))


def summary(call):
    """(state [N, HV, K, V], transfer matrix [N, HV, K, K]) of a call whose q is not read."""
    p = scalar_problem(call)
    A, A_qk = _pair_matrices(p)
    factors = run_pairs(p, A, A_qk)
    state, transfer = new_summary(p)
    run_summary(p, factors, A, state, transfer)
    return state, transfer


def summary_forward(call):
    """(o from a state of zeros, read, state, transfer matrix, A, A_qk) of a batched call: from an
    entering state S the outputs are o + read S."""
    p = scalar_problem(call)
    A, A_qk = _pair_matrices(p)
    o, read = _values(p), p.q.new_empty(call.B, call.T, call.HV, call.K)
    factors = run_pairs(p, A, A_qk)
    state, transfer = new_summary(p)
    run_summary(p, factors, A, state, transfer, A_qk, o, read)
    return o, read, state, transfer, A, A_qk


def summary_backward(call, A, A_qk):
    """(gradient of the entering state, its transfer matrix) of a call whose v is d_o.

    A, A_qk: residuals of the forward, or None.
    """
    p = scalar_problem(call)
    if A is None:
        A, A_qk = _pair_matrices(p)
        factors = run_pairs(p, A, A_qk)
    else:
        A, A_qk = prepare(A), prepare(A_qk)
        factors = run_pairs(p)
    d_state, transfer = new_summary(p)
    run_summary_backward(p, factors, A, A_qk, p.v, d_state, transfer)
    return d_state, transfer

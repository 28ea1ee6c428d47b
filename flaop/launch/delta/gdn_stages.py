"""Launchers of the chunk stages with a scalar gate or none, one function per kernel."""

from typing import NamedTuple

import torch

from flaop.triton_kernels.configs import gdn as configs

from ..kernel import Kernel, or_absent, processors
from ..table import zero_outside
from .problem import CHUNK
from .stages import new_states, run_qk_backward

_gates = Kernel("delta.scalar", "chunk_gdn_fwd_kernel_gates")
_pairs = Kernel("delta.gdn_intra", "chunk_gdn_fwd_kernel_pairs")
_scan = Kernel("delta.gdn_scan", "chunk_gdn_fwd_kernel_scan")
_scan_backward = Kernel("delta.gdn_scan", "chunk_gdn_bwd_kernel_scan")
_values_backward = Kernel("delta.gdn_bwd", "chunk_gdn_bwd_kernel_values")
_intra_backward = Kernel("delta.gdn_bwd", "chunk_gdn_bwd_kernel_intra")
_gates_backward = Kernel("delta.scalar", "chunk_gdn_bwd_kernel_gates")


HEADS = 16  # value heads of a program of the gate kernels


class Factors(NamedTuple):
    """Gates, norms and what the scans multiply rows of products by."""

    tokens: torch.Tensor  # [1, rows, HV, PARTS, BT] fp32
    decay: torch.Tensor  # [1, rows, HV] fp32, over whole chunks


def _per_row(p, *shape, sets=1):
    return p.q.new_empty(sets, p.rows, p.call.HV, *shape, dtype=torch.float32)


def _flags(p, *names):
    return {name: p.gate[name] for name in names}


def _gate_flags(p):
    return _flags(p, "USE_G", "USE_GATE", "HAS_BIAS", "BETA_SIGMOID", "NEG_EIGVAL")


def run_pairs(p, A=None, A_qk=None):
    """The Factors; with A and A_qk also the pair matrices and the inverse.

    Grids: (row, block of value heads), then (row, value head).
    """
    call = p.call
    factors = Factors(_per_row(p, configs.PARTS, CHUNK), _per_row(p))
    _gates(
        (p.rows * -(-call.HV // HEADS),),
        (
            p.g, p.beta, p.A_log, p.dt_bias, *factors, p.bounds, p.table_rows,
            call.T, p.B, call.HV,
        ),
        {"BT": CHUNK, "BH": HEADS} | _gate_flags(p),
        num_warps=4,
    )  # fmt: skip
    tiles, options = p.config(configs.pairs)
    _pairs(
        (p.rows * call.HV,),
        (
            p.q, p.k, A, A_qk, factors.tokens, p.bounds, p.table_rows,
            call.scale, call.T, p.B, call.H, call.HV,
        ),
        {name: tiles[name] for name in ("K", "BT", "BK")} | {"PAIRS": A is not None}
        | _flags(p, "USE_G", "USE_L2NORM")
        | {"PRECISION": p.precision, "INVERSE_DTYPE": p.inverse_dtype},
        **options,
    )  # fmt: skip
    return factors


def _scan_configs(p, function, flags):
    """(constexprs, options) of a scan for this call, and those for other numbers of sequences."""
    call = p.call
    wide, narrow = (p.config(function, x) for x in (False, True))
    if wide == narrow:
        return wide, ()
    programs = call.N * call.HV * -(-call.V // narrow[0]["BV"])
    chosen, other = (narrow, wide) if programs <= processors(p.q.device) else (wide, narrow)
    return chosen, ((other[0] | flags, other[1]),)


def run_scan(p, factors, A, A_qk=None, o=None, v_new=None, h=None, ht=None):
    """States, with outputs o or corrected values v_new. Grid: V tile, head, sequence."""
    call = p.call
    flags = {
        "OUTPUT": o is not None, "STORE_V": v_new is not None, "STORE_H": h is not None,
        "STORE_FINAL": ht is not None, "V_FIRST": call.state_v_first,
        "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
    }  # fmt: skip
    (tiles, options), siblings = _scan_configs(p, configs.scan, flags)
    _scan(
        (-(-call.V // tiles["BV"]) * call.N * call.HV,),
        (
            p.q, p.k, p.v, A, A_qk, *factors, o, v_new, h, or_absent(p.h0), ht,
            p.bounds, p.offsets, call.T, p.B, call.H, call.HV, p.rows, int(p.h0 is not None),
        ),
        tiles | flags,
        siblings,
        **options,
    )  # fmt: skip


def run_scan_backward(p, factors, A, A_qk, do, dht, want_dh0):
    """(dR, gradient of each leaving state, gradient of h0 or None).

    Grid: V tile, head, sequence.
    """
    call = p.call
    dR = torch.empty_like(p.v)
    dh = new_states(p)
    dh0 = torch.empty_like(p.h0) if want_dh0 else None
    flags = {
        "HAS_DO": do is not None, "V_FIRST": call.state_v_first,
        "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
    }  # fmt: skip
    (tiles, options), siblings = _scan_configs(p, configs.scan_backward, flags)
    _scan_backward(
        (-(-call.V // tiles["BV"]) * call.N * call.HV,),
        (
            p.q, p.k, A, A_qk, *factors, do, dR, dh, or_absent(dht), or_absent(dh0),
            p.bounds, p.offsets, call.T, p.B, call.H, call.HV, p.rows,
            int(want_dh0), int(dht is not None),
        ),
        tiles | flags,
        siblings,
        **options,
    )  # fmt: skip
    return dR, dh, dh0


def run_intra_backward(p, factors, v_new, h, do, dR, dh):
    """(dq, dk, dv, dg, dbeta, dA_log, ddt_bias), the last two [1, rows, HV] fp32: sums over the
    chunks. None for what the call has not.

    Grids: (row, value head), (row, value head, slab of K), (row, block of value heads), then rows
    of q and of k.
    """
    call = p.call
    complete = call.HV == call.H and not call.use_qk_l2norm_in_kernel
    shape = (call.B, call.T, call.HV, call.K)
    dq, dk = (
        p.q.new_empty(shape, dtype=p.q.dtype if complete else torch.float32) for _ in range(2)
    )
    dv, dbeta = torch.empty_like(p.v), torch.empty_like(p.beta)
    dg = None if p.g is None else torch.empty_like(p.g)
    for x in (dq, dk, dv, dbeta, dg):
        if x is not None:
            zero_outside(x, p.table)
    tiles, options = p.config(configs.bwd_intra)
    slabs = -(-call.K // tiles["BK"])
    d_tokens = _per_row(p, configs.D_PARTS, CHUNK, sets=slabs + 1)
    d_states = _per_row(p, sets=slabs)
    M_kk = p.q.new_empty(call.B, call.T, call.HV, CHUNK)
    M_qk = None if do is None else torch.empty_like(M_kk)
    values_tiles, values_options = p.config(configs.bwd_values)
    _values_backward(
        (p.rows * call.HV,),
        (
            p.v, factors.tokens, v_new, do, dR, dv, M_qk, M_kk, d_tokens,
            p.bounds, p.table_rows, call.scale, call.T, p.B, call.HV, p.rows,
        ),
        {name: values_tiles[name] for name in ("V", "BT", "BV")}
        | {"NK": slabs, "HAS_DO": do is not None} | _flags(p, "USE_G")
        | {"PRECISION": p.precision},
        **values_options,
    )  # fmt: skip
    _intra_backward(
        (p.rows * call.HV * slabs,),
        (
            p.q, p.k, factors.tokens, v_new, h, do, dR, dh, M_qk, M_kk, dq, dk, d_tokens, d_states,
            p.bounds, p.table_rows, call.scale, call.T, p.B, call.H, call.HV, p.rows,
        ),
        tiles | {"HAS_DO": do is not None} | _flags(p, "USE_G", "USE_L2NORM")
        | {"PRECISION": p.precision, "STATE_DTYPE": p.state_dtype},
        **options,
    )  # fmt: skip
    dA_log = _per_row(p) if p.gate["USE_GATE"] else None
    ddt_bias = _per_row(p) if p.gate["HAS_BIAS"] else None
    _gates_backward(
        (p.rows * -(-call.HV // HEADS),),
        (
            p.g, p.beta, p.A_log, p.dt_bias, factors.decay, d_tokens, d_states,
            dg, dbeta, dA_log, ddt_bias, p.bounds, p.table_rows, call.T, p.B, call.HV, p.rows,
        ),
        {"BT": CHUNK, "BH": HEADS, "NK": slabs} | _gate_flags(p),
        num_warps=4,
    )  # fmt: skip
    if not complete:
        dq, dk = run_qk_backward(p, p.q, dq), run_qk_backward(p, p.k, dk)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias

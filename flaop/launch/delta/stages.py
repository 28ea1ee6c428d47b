"""Launchers of the chunk stages of KDA, one function per kernel.

Where the CUDA C++ kernels serve a call, one of them does the within-chunk work of several Triton
kernels.
"""

from typing import NamedTuple

import torch

from flaop.triton_kernels.configs import delta as configs

from .. import cuda
from ..kernel import Kernel, not_warmed, or_absent
from ..table import zero_outside
from .problem import CHUNK

_pairs = Kernel("delta.intra", "chunk_kda_fwd_kernel_pairs")
_wy = Kernel("delta.intra", "chunk_kda_fwd_kernel_wy")
_scan = Kernel("delta.scan", "chunk_delta_fwd_kernel_scan")
_scan_backward = Kernel("delta.scan", "chunk_delta_bwd_kernel_scan")
_values_backward = Kernel("delta.bwd", "chunk_kda_bwd_kernel_values")
_intra_backward = Kernel("delta.bwd", "chunk_kda_bwd_kernel_intra")
_beta_backward = Kernel("delta.bwd", "kda_bwd_kernel_beta")
_qk_backward = Kernel("delta.bwd", "kda_bwd_kernel_qk")

_gate_sums = {}


def gate_sums(q):
    """The 0/1 matrices [9, BT, BT] of pairs.sum_gates on q's device: made once, then only read."""
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
    key = (q.device, dtype)
    if key not in _gate_sums:
        on_gpu = q.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise not_warmed("gate_sums")
        i = torch.arange(CHUNK, device=q.device)[:, None]
        j = i.T
        matrices = []
        for level in (32, 16, 8, 4, 2, 1):
            upper = i // level % 2 == 1
            matrices.append((i // level == j // level) & torch.where(upper, j <= i, j > i))
        matrices.append((i // 16 == j // 16) & (j <= i) & (j % 16 > 0))
        matrices += [j <= i, j > i]
        sums = torch.stack(matrices).to(dtype)
        if on_gpu:
            # any stream may read them from now on
            torch.cuda.current_stream(q.device).synchronize()
        _gate_sums[key] = sums
    return _gate_sums[key]


class Workspace(NamedTuple):
    """Per-chunk operands of the scans, rows of one segment."""

    w: torch.Tensor  # [rows', HV, BT, K]
    qg: torch.Tensor  # [rows', HV, BT, K]
    kg: torch.Tensor  # [rows', HV, BT, K]
    decay: torch.Tensor  # [rows', HV, K] fp32


def intra(p, A, A_qk, u, work, load_A=False):
    """A function of (row0, row1) that launches the within-chunk stages of these rows: pair matrices
    and inverse unless A is given, W, U."""
    if p.cuda:
        return cuda.kda_intra(p, A, A_qk, u, work, load_A)

    def launch(row0, row1):
        if not load_A:
            run_pairs(p, A, A_qk, row0, row1)
        run_wy(p, A, u, work, row0, row1)

    return launch


def run_pairs(p, A, A_qk, row0, row1):
    """The pair matrices and the inverse of rows [row0, row1). Grid: (row, value head)."""
    call = p.call
    tiles, options = p.config(configs.pairs)
    _pairs(
        ((row1 - row0) * call.HV,),
        (
            p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, gate_sums(p.q), A, A_qk,
            p.bounds, p.table_rows,
            call.scale, call.lower_bound or 0.0, call.T, p.B, call.H, call.HV, row0,
        ),
        {name: tiles[name] for name in ("K", "BT", "BK")} | p.gate | {
            "SPLIT": p.split, "PRECISION": p.precision, "INVERSE_DTYPE": p.inverse_dtype,
        },
        **options,
    )  # fmt: skip


def run_wy(p, A, u, work, row0, row1):
    """W, U, qg, kg of rows [row0, row1). Grid: (row, value head, slab of K or V)."""
    call = p.call
    tiles, options = p.config(configs.wy)
    slabs = -(-call.K // tiles["BK"]) + -(-call.V // tiles["BV"])
    _wy(
        ((row1 - row0) * call.HV * slabs,),
        (
            p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, gate_sums(p.q), A,
            work.w, u, work.qg, work.kg, work.decay, p.bounds, p.table_rows,
            call.scale, call.lower_bound or 0.0, call.T, p.B, call.H, call.HV, row0,
        ),
        tiles | _without_bounded(p.gate) | {"SPLIT": p.split, "PRECISION": p.precision},
        **options,
    )  # fmt: skip


def _without_bounded(flags):
    """For kernels that form no pairs, and must not be compiled twice for a flag they ignore."""
    return {name: flag for name, flag in flags.items() if name != "BOUNDED"}


def scan(p, u, work, A_qk=None, o=None, v_new=None, h=None, ht=None):
    """A function of (row0, row1) that launches the scan over these rows: states, with outputs o or
    corrected values v_new. Grid: V tile, head, sequence."""
    call = p.call
    tiles, options = p.config(configs.scan)
    grid = (-(-call.V // tiles["BV"]) * call.N * call.HV,)
    args = (
        work.w, u, work.qg, work.kg, work.decay, A_qk, o, v_new, h, or_absent(p.h0), or_absent(ht),
        p.bounds, p.offsets, call.T, p.B, call.HV,
    )  # fmt: skip
    constants = tiles | {
        "OUTPUT": o is not None, "STORE_V": v_new is not None, "STORE_H": h is not None,
        "V_FIRST": call.state_v_first,
        "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
    }  # fmt: skip
    states = int(p.h0 is not None), int(ht is not None)
    return lambda row0, row1: _scan(grid, (*args, row0, row1, *states), constants, **options)


def new_states(p, rows=None):
    """Room for a state per row (or for so many rows), [rows, HV, K, V]."""
    call = p.call
    rows = p.rows if rows is None else rows
    return p.v.new_empty(rows, call.HV, call.K, call.V, dtype=p.stored_state)


def run_scan_backward(p, work, A_qk, do, dht, want_dh0):
    """(dV', gradient of each leaving state, gradient of h0 or None).

    Grid: V tile, head, sequence.
    """
    call = p.call
    dv_new = torch.empty_like(p.v)
    dh = new_states(p)
    dh0 = torch.empty_like(p.h0) if want_dh0 else None
    tiles, options = p.config(configs.scan_backward)
    _scan_backward(
        (-(-call.V // tiles["BV"]) * call.N * call.HV,),
        (
            work.w, work.qg, work.kg, work.decay, A_qk, do, dv_new, dh,
            or_absent(dht), or_absent(dh0), p.bounds, p.offsets,
            call.T, p.B, call.HV, p.rows, int(want_dh0), int(dht is not None),
        ),
        tiles | {
            "HAS_DO": do is not None, "V_FIRST": call.state_v_first,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip
    return dv_new, dh, dh0


class Gradients(NamedTuple):
    """What the within-chunk backward makes. dA_log and ddt_bias are sums per row, or None."""

    dq: torch.Tensor  # [B, T, HV, K], or [B, T, H, K] where heads and norms are done with
    dk: torch.Tensor
    dv: torch.Tensor  # [B, T, HV, V]
    dg: torch.Tensor  # [B, T, HV, K]
    dbeta: torch.Tensor  # [B, T, HV]
    dA_log: torch.Tensor | None  # [rows, HV, slabs] fp32
    ddt_bias: torch.Tensor | None  # [rows, HV, K] fp32


def _new_gradients(p, slabs, complete):
    """Room for the gradients.

    `complete`: dq and dk are those of q and k, not of normalised rows.
    """
    call, device = p.call, p.q.device
    fp32 = {"dtype": torch.float32, "device": device}
    dq, dk = (
        torch.empty(p.g.shape, dtype=p.q.dtype if complete else torch.float32, device=device)
        for _ in range(2)
    )
    dv, dg, dbeta = torch.empty_like(p.v), torch.empty_like(p.g), torch.empty_like(p.beta)
    for x in (dq, dk, dv, dg, dbeta):
        zero_outside(x, p.table)
    dA_log = torch.empty(p.rows, call.HV, slabs, **fp32) if p.gate["HAS_A_LOG"] else None
    ddt_bias = torch.empty(p.rows, call.HV, call.K, **fp32) if p.gate["HAS_BIAS"] else None
    return Gradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias)


def run_intra_backward(p, A, v_new, h, do, dv_new, dh):
    """Gradients within the chunks, with dq and dk of the inputs q and k."""
    call = p.call
    # with bounded gates, where pairs are cheap, the Triton kernels are faster (docs/measured.md)
    if p.cuda and not p.gate["BOUNDED"]:
        complete = call.HV == call.H
        grads = _new_gradients(p, 1, complete)
        cuda.kda_backward(p, A, v_new, h, do, dv_new, dh, *grads)
    else:
        complete = call.HV == call.H and not call.use_qk_l2norm_in_kernel
        grads = _run_intra_backward(p, A, v_new, h, do, dv_new, dh, complete)
    if complete:
        return grads
    return grads._replace(
        dq=run_qk_backward(p, p.q, grads.dq), dk=run_qk_backward(p, p.k, grads.dk)
    )


def _run_intra_backward(p, A, v_new, h, do, dv_new, dh, complete):
    """The same by Triton.

    Grids: (row, value head), then (row, value head, slab of K), then tokens.
    """
    call = p.call
    flags = p.gate | {
        "HAS_DO": do is not None, "SPLIT": p.split,
        "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
    }  # fmt: skip
    tiles, options = p.config(configs.bwd_intra, p.gate["BOUNDED"])
    slabs = -(-call.K // tiles["BK"])
    grads = _new_gradients(p, slabs, complete)
    dA_qk = torch.empty_like(A) if do is not None else None
    dL = torch.empty_like(A)
    dbeta_parts = torch.empty(
        slabs + 1, *p.beta.shape, dtype=torch.float32, device=p.q.device
    )
    values_tiles, values_options = p.config(configs.bwd_values)
    # dR takes the place of dV': each tile is read before it is written
    _values_backward(
        (p.rows * call.HV,),
        (
            p.v, p.beta, A, v_new, do, dv_new, dv_new, grads.dv, dA_qk, dL, dbeta_parts,
            p.bounds, p.table_rows, call.scale, call.T, p.B, call.HV, slabs,
        ),
        {name: values_tiles[name] for name in ("V", "BT", "BV")} | {
            name: flags[name]
            for name in ("HAS_DO", "BETA_SIGMOID", "NEG_EIGVAL", "PRECISION")
        },
        **values_options,
    )  # fmt: skip
    _intra_backward(
        (p.rows * call.HV * slabs,),
        (
            p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, gate_sums(p.q), v_new, h, do, dv_new, dh,
            dA_qk, dL, grads.dq, grads.dk, grads.dg, dbeta_parts, grads.dA_log, grads.ddt_bias,
            p.bounds, p.table_rows, call.scale, call.lower_bound or 0.0,
            call.T, p.B, call.H, call.HV,
        ),
        tiles | flags,
        **options,
    )  # fmt: skip
    _beta_backward(
        (-(-p.beta.numel() // 1024),),
        (p.beta, dbeta_parts, grads.dbeta, p.beta.numel()),
        {
            "PARTS": slabs + 1, "BN": 1024,
            "BETA_SIGMOID": flags["BETA_SIGMOID"], "NEG_EIGVAL": flags["NEG_EIGVAL"],
        },
    )  # fmt: skip
    # the sums above also ran over rows of no sequence
    zero_outside(grads.dbeta, p.table)
    return grads


def run_qk_backward(p, x, dy):
    """Gradient of q or k from that of its normalised rows per value head. Grid: rows."""
    call = p.call
    dx = torch.empty_like(x)
    tiles, options = p.config(configs.bwd_qk)
    tokens = call.B * call.T
    _qk_backward(
        (-(-tokens * call.H // tiles["BN"]),),
        (x, dy, dx, tokens, call.H, call.HV),
        {name: tiles[name] for name in ("K", "BN", "BK")}
        | {"USE_L2NORM": call.use_qk_l2norm_in_kernel},
        **options,
    )
    return dx

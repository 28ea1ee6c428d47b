"""Chunk-parallel KDA on the GPU: forward with and without residuals, backward.

Every function takes the checked call (flaop.validation.kda.KdaCall) with at least one token and sequence.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from flaop.triton_kernels.configs import delta as configs
from flaop.triton_kernels.delta.bwd import (
    chunk_kda_bwd_kernel_intra,
    chunk_kda_bwd_kernel_inverse,
    kda_bwd_kernel_beta,
    kda_bwd_kernel_qk,
)
from flaop.triton_kernels.delta.intra import (
    chunk_kda_fwd_kernel_pairs,
    chunk_kda_fwd_kernel_wy,
)
from flaop.triton_kernels.delta.scan import (
    chunk_delta_bwd_kernel_scan,
    chunk_delta_fwd_kernel_scan,
)

from ..kernel import Kernel, arch, prepare
from ..table import chunk_table, zero_outside

CHUNK = 64
SAFE_BOUND = -5.0  # gates in [SAFE_BOUND, 0] may be factored within blocks of 16 tokens
WORKSPACE = 320 << 20  # bytes of per-chunk workspace that one pass over the sequence may take

_pairs = Kernel(chunk_kda_fwd_kernel_pairs)
_wy = Kernel(chunk_kda_fwd_kernel_wy)
_scan = Kernel(chunk_delta_fwd_kernel_scan)
_scan_backward = Kernel(chunk_delta_bwd_kernel_scan)
_inverse_backward = Kernel(chunk_kda_bwd_kernel_inverse)
_intra_backward = Kernel(chunk_kda_bwd_kernel_intra)
_beta_backward = Kernel(kda_bwd_kernel_beta)
_qk_backward = Kernel(kda_bwd_kernel_qk)

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


_gate_sums = {}


def gate_sums(q):
    """The 0/1 matrices [9, BT, BT] of pairs.sum_gates on q's device: made once, then only read."""
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
    key = (q.device, dtype)
    if key not in _gate_sums:
        i = torch.arange(CHUNK, device=q.device)[:, None]
        j = i.T
        matrices = []
        for level in (32, 16, 8, 4, 2, 1):
            upper = i // level % 2 == 1
            matrices.append((i // level == j // level) & torch.where(upper, j <= i, j > i))
        matrices.append((i // 16 == j // 16) & (j <= i) & (j % 16 > 0))
        matrices += [j <= i, j > i]
        _gate_sums[key] = torch.stack(matrices).to(dtype)
    return _gate_sums[key]


class Problem(NamedTuple):
    """One call as the launchers see it: aligned contiguous tensors, sizes, flags."""

    call: object
    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor  # [B, T, H, K]
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor  # [B, T, HV, K]
    beta: torch.Tensor  # [B, T, HV]
    A_log: torch.Tensor | None  # [HV]
    dt_bias: torch.Tensor | None  # [HV, K] or [HV * K]
    h0: torch.Tensor | None  # [N, HV, K, V] or [N, HV, V, K]
    table: object  # ChunkTable or None
    rows: int  # (sequence, chunk) rows of the grid
    gate: dict  # constexprs of the in-kernel options
    precision: str  # of products of the input dtype
    split: bool  # sums of gates from two fp16 terms
    inverse_dtype: tl.dtype  # operand dtype of the triangular inverse
    state_dtype: tl.dtype  # operand dtype of products with the state
    stored_state: torch.dtype  # of states kept per chunk

    def config(self, function):
        """(constexpr tiles, launch options) of a configuration function for this call."""
        call = self.call
        chosen = function(arch(self.q.device), call.K, call.V, DTYPE_NAMES[self.q.dtype])
        tiles = {"K": call.K, "V": call.V, "BT": CHUNK}
        for name in ("BK", "BV", "BN"):
            if name in chosen:
                tiles[name] = chosen.pop(name)
        return tiles, chosen

    @property
    def state_shape(self):
        call = self.call
        last = (call.V, call.K) if call.state_v_first else (call.K, call.V)
        return (call.N, call.HV, *last)

    @property
    def bounds(self):
        return self.table.bounds if self.table else None

    @property
    def offsets(self):
        return self.table.offsets if self.table else None

    @property
    def table_rows(self):
        return self.table.rows if self.table else None


def _problem(call):
    B, T, N = call.B, call.T, call.N
    packed = call.cu_seqlens is not None
    rows = max(-(-T // CHUNK) + N - 1, 0) if packed else B * -(-T // CHUNK)
    dtype = call.q.dtype
    if call.use_gate_in_kernel:
        bounded = call.lower_bound is not None and call.lower_bound >= SAFE_BOUND
    else:
        bounded = call.safe_gate
    gate = {
        "USE_GATE": call.use_gate_in_kernel,
        "HAS_A_LOG": call.use_gate_in_kernel and call.A_log is not None,
        "HAS_BIAS": call.use_gate_in_kernel and call.dt_bias is not None,
        "HAS_BOUND": call.use_gate_in_kernel and call.lower_bound is not None,
        "USE_L2NORM": call.use_qk_l2norm_in_kernel,
        "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": call.allow_neg_eigval,
        # the centred factors of bounded gates leave the range of fp16
        "BOUNDED": bounded and dtype != torch.float16,
        "IS_VARLEN": packed,
    }
    return Problem(
        call,
        *(prepare(x) for x in (call.q, call.k, call.v, call.g, call.beta)),
        *(prepare(x) for x in (call.A_log, call.dt_bias, call.initial_state)),
        table=chunk_table(call.cu_seqlens, T, rows, CHUNK),
        rows=rows,
        gate=gate,
        precision="tf32x3" if dtype == torch.float32 else "tf32",
        split=dtype != torch.float32,
        inverse_dtype=tl.float32 if dtype == torch.float32 else tl.float16,
        # 65504 is less than a sum of values may reach
        state_dtype=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        stored_state=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )


class Workspace(NamedTuple):
    """Per-chunk operands of the scans, rows of one segment."""

    w: torch.Tensor  # [rows', HV, BT, K]
    qg: torch.Tensor  # [rows', HV, BT, K]
    kg: torch.Tensor  # [rows', HV, BT, K]
    decay: torch.Tensor  # [rows', HV, K] fp32


def _workspace(p, rows):
    HV, K = p.call.HV, p.call.K
    w, qg, kg = (p.q.new_empty(rows, HV, CHUNK, K) for _ in range(3))
    return Workspace(w, qg, kg, p.q.new_empty(rows, HV, K, dtype=torch.float32))


def _segments(p):
    """Ranges of rows that are worked on one after the other, so that the workspace stays bounded."""
    row_bytes = 3 * p.call.HV * CHUNK * p.call.K * p.q.element_size()
    count = max(1, -(-p.rows * row_bytes // WORKSPACE))
    step = -(-p.rows // count)
    if p.table is None:
        step = -(-step // p.call.B) * p.call.B  # all sequences advance together
    return [(start, min(start + step, p.rows)) for start in range(0, p.rows, step)]


def _run_pairs(p, A, A_qk, row0, row1):
    """The pair matrices and the inverse of rows [row0, row1). Grid: (row, value head)."""
    call = p.call
    tiles, options = p.config(configs.pairs)
    _pairs(
        ((row1 - row0) * call.HV,),
        (
            p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, gate_sums(p.q), A, A_qk,
            p.bounds, p.table_rows,
            call.scale, call.lower_bound or 0.0, call.T, call.B, call.H, call.HV, row0,
        ),
        {name: tiles[name] for name in ("K", "BT", "BK")} | p.gate | {
            "SPLIT": p.split, "PRECISION": p.precision, "INVERSE_DTYPE": p.inverse_dtype,
        },
        **options,
    )  # fmt: skip


def _run_wy(p, A, u, work, row0, row1):
    """W, U, qg, kg of rows [row0, row1). Grid: (row, value head, slab of K or V)."""
    call = p.call
    tiles, options = p.config(configs.wy)
    slabs = -(-call.K // tiles["BK"]) + -(-call.V // tiles["BV"])
    _wy(
        ((row1 - row0) * call.HV * slabs,),
        (
            p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, gate_sums(p.q), A,
            work.w, u, work.qg, work.kg, work.decay, p.bounds, p.table_rows,
            call.scale, call.lower_bound or 0.0, call.T, call.B, call.H, call.HV, row0,
        ),
        tiles | _without_bounded(p.gate) | {"SPLIT": p.split, "PRECISION": p.precision},
        **options,
    )  # fmt: skip


def _without_bounded(flags):
    """For kernels that form no pairs, and must not be compiled twice for a flag they ignore."""
    return {name: flag for name, flag in flags.items() if name != "BOUNDED"}


def _run_scan(p, u, work, row0, row1, A_qk=None, o=None, v_new=None, h=None, ht=None):
    """States of rows [row0, row1), with outputs o or corrected values v_new. Grid: V tile, head, sequence."""
    call = p.call
    tiles, options = p.config(configs.scan)
    _scan(
        (-(-call.V // tiles["BV"]) * call.N * call.HV,),
        (
            work.w, u, work.qg, work.kg, work.decay, A_qk, o, v_new, h, p.h0, ht,
            p.bounds, p.offsets, call.T, call.B, call.HV, row0, row1,
        ),
        tiles | {
            "OUTPUT": o is not None, "STORE_V": v_new is not None, "STORE_H": h is not None,
            "HAS_H0": p.h0 is not None, "STORE_FINAL": ht is not None,
            "V_FIRST": call.state_v_first, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip


def _token_matrix(p):
    """[B, T, HV, BT] in the input dtype; zero where no sequence lies."""
    x = p.q.new_empty(p.call.B, p.call.T, p.call.HV, CHUNK)
    zero_outside(x, p.table)
    return x


def _outputs(p):
    o = torch.empty_like(p.v)
    zero_outside(o, p.table)
    return o


def forward(call):
    """(o, final_state or None), keeping nothing. Workspace: A_qk and at most WORKSPACE bytes."""
    p = _problem(call)
    o = _outputs(p)
    A, A_qk = (p.q.new_empty(call.B, call.T, call.HV, CHUNK) for _ in range(2))
    _run_pairs(p, A, A_qk, 0, p.rows)
    segments = _segments(p)
    ht = None
    if call.output_final_state or len(segments) > 1:
        ht = o.new_empty(p.state_shape, dtype=torch.float32)
    work = _workspace(p, segments[0][1])
    for row0, row1 in segments:
        # U waits in the place of o: each tile is read before it is written
        _run_wy(p, A, o, work, row0, row1)
        _run_scan(p, o, work, row0, row1, A_qk=A_qk, o=o, ht=ht)
    return o, ht if call.output_final_state else None


def forward_residuals(call):
    """(o, final_state or None, A, A_qk, w, qg, kg, decay, v_new, h); the last six None unless
    `disable_recompute` keeps them."""
    p = _problem(call)
    o = _outputs(p)
    A, A_qk = _token_matrix(p), _token_matrix(p)
    _run_pairs(p, A, A_qk, 0, p.rows)
    keep = call.disable_recompute
    segments = [(0, p.rows)] if keep else _segments(p)
    ht = None
    if call.output_final_state or len(segments) > 1:
        ht = o.new_empty(p.state_shape, dtype=torch.float32)
    v_new = h = None
    if keep:
        v_new = _outputs(p)
        h = _states(p)
    work = _workspace(p, segments[0][1])
    for row0, row1 in segments:
        _run_wy(p, A, o, work, row0, row1)
        _run_scan(p, o, work, row0, row1, A_qk=A_qk, o=o, v_new=v_new, h=h, ht=ht)
    kept = (*work, v_new, h) if keep else (None,) * 6
    return o, ht if call.output_final_state else None, A, A_qk, *kept


def _states(p):
    call = p.call
    return p.v.new_empty(p.rows, call.HV, call.K, call.V, dtype=p.stored_state)


def _recompute(p, A):
    """The scan operands, corrected values and states again, from A alone."""
    v_new, h = torch.empty_like(p.v), _states(p)
    work = _workspace(p, p.rows)
    _run_wy(p, A, v_new, work, 0, p.rows)
    _run_scan(p, v_new, work, 0, p.rows, v_new=v_new, h=h)
    return work, v_new, h


def _run_scan_backward(p, work, A_qk, do, dht, want_dh0):
    """(dV', gradient of each leaving state, gradient of h0 or None). Grid: V tile, head, sequence."""
    call = p.call
    dv_new = torch.empty_like(p.v)
    dh = _states(p)
    dh0 = torch.empty_like(p.h0) if want_dh0 else None
    tiles, options = p.config(configs.scan_backward)
    _scan_backward(
        (-(-call.V // tiles["BV"]) * call.N * call.HV,),
        (
            work.w, work.qg, work.kg, work.decay, A_qk, do, dv_new, dh, dht, dh0,
            p.bounds, p.offsets, call.T, call.B, call.HV, p.rows,
        ),
        tiles | {
            "HAS_DO": do is not None, "HAS_DHT": dht is not None, "STORE_DH0": want_dh0,
            "V_FIRST": call.state_v_first, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip
    return dv_new, dh, dh0


def _run_qk_backward(p, x, dy):
    """Gradient of q or k from that of its normalised rows per value head. Grid: rows."""
    call = p.call
    if dy.dtype == x.dtype and call.HV == call.H and not call.use_qk_l2norm_in_kernel:
        return dy
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


def backward(call, d_o, d_final_state, residuals, grad_mask):
    """(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0), None where not asked for.

    residuals: A, A_qk, w, qg, kg, decay, v_new, h; the last six are recomputed if empty.
    """
    p = _problem(call)
    do, dht = prepare(d_o), prepare(d_final_state)
    A, A_qk, *kept = residuals
    if kept[-1].numel() > 0:
        work, v_new, h = Workspace(*kept[:4]), *kept[4:]
    else:
        work, v_new, h = _recompute(p, A)
    want_dh0 = p.h0 is not None and grad_mask[7]
    dv_new, dh, dh0 = _run_scan_backward(p, work, A_qk, do, dht, want_dh0)
    del work

    scalars = (call.scale, call.lower_bound or 0.0, call.T, call.B, call.H, call.HV)
    parameters = (p.beta, p.A_log, p.dt_bias, gate_sums(p.q))
    flags = p.gate | {
        "HAS_DO": do is not None, "SPLIT": p.split,
        "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
    }  # fmt: skip
    fp32 = {"dtype": torch.float32, "device": p.q.device}

    dv = torch.empty_like(p.v)
    dA_qk = torch.empty_like(A) if do is not None else None
    dL = torch.empty_like(A)
    tiles, options = p.config(configs.bwd_intra)
    slabs = -(-call.K // tiles["BK"])
    dbeta_parts = torch.empty(slabs + 1, *p.beta.shape, **fp32)
    inverse_tiles, inverse_options = p.config(configs.bwd_inverse)
    _inverse_backward(
        (p.rows * call.HV,),
        (
            p.k, p.v, p.g, *parameters, A, v_new, h, do, dv_new, dv, dA_qk, dL,
            dbeta_parts[slabs], p.bounds, p.table_rows, *scalars,
        ),
        inverse_tiles | _without_bounded(flags),
        **inverse_options,
    )  # fmt: skip

    plain = call.HV == call.H and not call.use_qk_l2norm_in_kernel
    dq, dk = (
        torch.empty(p.g.shape, dtype=p.q.dtype if plain else torch.float32, device=p.q.device)
        for _ in range(2)
    )
    dg, dbeta = torch.empty_like(p.g), torch.empty_like(p.beta)
    dA_log = torch.empty(p.rows, call.HV, slabs, **fp32) if flags["HAS_A_LOG"] else None
    ddt_bias = torch.empty(p.rows, call.HV, call.K, **fp32) if flags["HAS_BIAS"] else None
    _intra_backward(
        (p.rows * call.HV * slabs,),
        (
            p.q, p.k, p.g, *parameters, A, v_new, h, do, dv_new, dh, dA_qk, dL,
            dq, dk, dg, dbeta_parts, dA_log, ddt_bias, p.bounds, p.table_rows, *scalars,
        ),
        tiles | flags,
        **options,
    )  # fmt: skip
    del h, dh, v_new, dv_new, dA_qk, dL
    _beta_backward(
        (-(-dbeta.numel() // 1024),),
        (p.beta, dbeta_parts, dbeta, dbeta.numel()),
        {
            "PARTS": slabs + 1, "BN": 1024,
            "BETA_SIGMOID": flags["BETA_SIGMOID"], "NEG_EIGVAL": flags["NEG_EIGVAL"],
        },
    )  # fmt: skip
    for x in (dq, dk, dv, dg, dbeta):
        zero_outside(x, p.table)
    dq, dk = _run_qk_backward(p, p.q, dq), _run_qk_backward(p, p.k, dk)
    if dA_log is not None:
        dA_log = dA_log.sum((0, 2)).to(p.A_log.dtype)
    if ddt_bias is not None:
        ddt_bias = ddt_bias.sum(0).to(p.dt_bias.dtype).view(p.dt_bias.shape)
    grads = (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)
    return tuple(x if wanted else None for x, wanted in zip(grads, grad_mask, strict=True))

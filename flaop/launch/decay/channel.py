"""Launchers of the stages within a chunk for channel gates (gla), one function per kernel."""

from flaop.triton_kernels.configs import decay_channel as configs

from .. import cuda
from ..kernel import Kernel
from .problem import CHUNK

_intra = Kernel("decay.intra", "chunk_gla_fwd_kernel_intra")
_pairs_backward = Kernel("decay.bwd_channel", "chunk_gla_bwd_kernel_pairs")
_intra_backward = Kernel("decay.bwd_channel", "chunk_gla_bwd_kernel_intra")


def run_intra(p, A, qg, kg, decay, row0, row1):
    """Decayed queries (times scale) and keys and the decay of rows [row0, row1); A unless None.

    A [B, T, HV, BT]; qg, kg [rows', HV, BT, K]; decay [rows', HV, K] fp32. Grid: (row, value head).
    """
    call = p.call
    if cuda.serves_gla(call):
        cuda.gla_intra(p, A, qg, kg, decay, row0, row1)
        return
    tiles, options = p.config(configs.intra)
    options = dict(options)
    passes = [(True, False), (False, True)] if options.pop("split") else [(True, True)]
    for store_A, store_decayed in passes if A is not None else [(False, True)]:
        _intra(
            ((row1 - row0) * call.HV,),
            (
                p.q, p.k, p.g, A if store_A else None,
                *((qg, kg, decay) if store_decayed else (None, None, None)),
                p.bounds, p.table_rows, call.scale, call.T, call.B, call.H, call.HV, row0,
            ),
            {name: tiles[name] for name in ("K", "BT", "BK")} | {
                "STORE_A": store_A, "STORE_DECAYED": store_decayed,
                "IS_VARLEN": p.table is not None, "PRECISION": p.precision,
            },
            **options,
        )  # fmt: skip


def run_pairs_backward(p, do, row0, row1):
    """Gradient of the token pairs of rows [row0, row1), [rows', HV, BT, BT] in q's dtype.

    Grid: (row, value head).
    """
    call = p.call
    dA = p.q.new_empty(row1 - row0, call.HV, CHUNK, CHUNK)
    tiles, options = p.config(configs.bwd_pairs)
    _pairs_backward(
        ((row1 - row0) * call.HV,),
        (p.v, do, dA, p.bounds, p.table_rows, call.scale, call.T, call.B, call.HV, row0),
        {name: tiles[name] for name in ("V", "BT", "BV")} | {
            "IS_VARLEN": p.table is not None, "PRECISION": p.precision,
        },
        **options,
    )  # fmt: skip
    return dA


def run_channel_backward(p, A, h, dh, do, row0, row1, dq, dk, dg):
    """dq, dk, dg [B, T, HV, K] of rows [row0, row1); dq is 0 without do.

    h, dh [rows', HV, K, V]: states that enter the chunks, gradients of those that leave them.
    Grid: (row, value head, slab of K).
    """
    call = p.call
    dA = None if do is None else run_pairs_backward(p, do, row0, row1)
    tiles, options = p.config(configs.bwd_intra)
    slabs = -(-call.K // tiles["BK"])
    _intra_backward(
        ((row1 - row0) * call.HV * slabs,),
        (
            p.q, p.k, p.v, p.g, do, dA, h, dh, dq, dk, dg, p.bounds, p.table_rows,
            call.scale, call.T, call.B, call.H, call.HV, row0,
        ),
        tiles | {
            "HAS_DO": do is not None, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip

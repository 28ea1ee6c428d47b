"""Launchers of the chunk kernels of the decay families, one function per kernel.

`decayed` stands for the operands of channel gates (launch/decay/channel.py): queries and keys that
carry their decays. With it the kernels read those instead of q, k and scalar gates.
"""

from typing import NamedTuple

import torch

from flaop.triton_kernels.configs import decay as configs

from ..kernel import Kernel, arch
from .problem import DTYPE_NAMES

_states = Kernel("decay.states", "chunk_fwd_kernel_h")
_states_backward = Kernel("decay.states", "chunk_bwd_kernel_dh")
_scan = Kernel("decay.scan", "chunk_fwd_kernel_scan")
_outputs = Kernel("decay.outputs", "chunk_fwd_kernel_o")
_qk_backward = Kernel("decay.bwd", "chunk_bwd_kernel_qk")
_v_backward = Kernel("decay.bwd", "chunk_bwd_kernel_v")
_sum_heads = Kernel("decay.bwd", "sum_heads_kernel")


class Decayed(NamedTuple):
    """Operands of channel gates, rows of one segment."""

    qg: torch.Tensor  # [rows', HV, BT, K]: scaled queries decayed from the chunk's start
    kg: torch.Tensor  # [rows', HV, BT, K]: keys decayed to the chunk's end
    decay: torch.Tensor  # [rows', HV, K] fp32: decay over the chunk


def _flags(p, decayed):
    """(scalar gate tensors, constexprs) of a launch."""
    if decayed is not None:
        none = {"USE_G": False, "USE_G_GAMMA": False}
        return (None, None), p.gate | none | {"DECAYED": True}
    return (p.g, p.g_gamma), p.gate | {"DECAYED": False}


def fits_scan(p):
    """Whether one program holds all channels of the state, so that run_scan serves the call."""
    call = p.call
    return configs.scan(arch(p.q.device), call.K, call.V, DTYPE_NAMES[p.q.dtype]) is not None


def scan(p, o, ht, decayed=None, A=None):
    """A function of (row0, row1): outputs of these rows; ht carries the states.

    Grid: V tile, head, sequence.
    """
    call = p.call
    gates, flags = _flags(p, decayed)
    q, k, decay = decayed or (p.q, p.k, None)
    tiles, options = p.config(configs.scan)
    grid = (-(-call.V // tiles["BV"]) * call.N * call.HV,)
    launch = _scan.bound(
        (
            q, k, p.v, *gates, decay, A, o, p.h0, ht, p.bounds, p.offsets,
            call.scale, call.T, call.B, call.H, call.HV, 0, 0,
        ),
        tiles | flags | {
            "HAS_H0": p.h0 is not None, "V_FIRST": call.state_v_first,
            "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip
    return lambda row0, row1: launch(grid, row0=row0, row1=row1)


def _tile_grid(call, tiles):
    return (-(-call.K // tiles["BK"]) * -(-call.V // tiles["BV"]) * call.N * call.HV,)


def states(p, h, decayed=None, ht=None):
    """A function of (carry_in, carry_out, row0, row1): states that enter the chunks of these rows,
    into h unless that is None.

    carry_in, carry_out: states [B, HV, K, V] (packed: [1, ...]) of the sequences that row0 and row1
    cut. Grid: tile of the state, head, sequence.
    """
    call = p.call
    gates, flags = _flags(p, decayed)
    _, k, decay = decayed or (None, p.k, None)
    tiles, options = p.config(configs.states)
    launch = _states.bound(
        (
            k, p.v, *gates, None, None, decay, h, p.h0, ht, None, None,
            p.bounds, p.offsets, None, call.T, call.B, call.H, call.HV, 0, 0, 1,
        ),
        tiles | flags | {
            "USE_GK": False, "USE_GV": False, "CUMULATIVE": False,
            "STORE_H": h is not None, "SPLIT": False, "STORE_FINAL": ht is not None,
            "HAS_H0": p.h0 is not None, "V_FIRST": call.state_v_first, "H_V_FIRST": False,
            "IS_VARLEN": p.table is not None, "PRECISION": p.precision,
        },
        **options,
    )  # fmt: skip
    return _with_carries(launch, _tile_grid(call, tiles))


def _with_carries(launch, grid):
    def run(carry_in, carry_out, row0, row1):
        launch(grid, carry_in=carry_in, carry_out=carry_out, row0=row0, row1=row1)

    return run


def states_backward(p, do, dh, dht, dh0, decayed=None):
    """As states, backwards: gradients of the states that leave the chunks, into dh.

    dh0 is written if not None.
    """
    call = p.call
    gates, flags = _flags(p, decayed)
    q, _, decay = decayed or (p.q, None, None)
    tiles, options = p.config(configs.states)
    launch = _states_backward.bound(
        (
            q, do, *gates, decay, dh, dht, dh0, None, None, p.bounds, p.offsets,
            call.scale, call.T, call.B, call.H, call.HV, 0, 0,
        ),
        tiles | flags | {
            "HAS_DO": do is not None, "HAS_DHT": dht is not None, "STORE_DH0": dh0 is not None,
            "V_FIRST": call.state_v_first, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision,
        },
        **options,
    )  # fmt: skip
    return _with_carries(launch, _tile_grid(call, tiles))


def run_outputs(p, h, o, row0, row1, decayed=None, A=None):
    """Outputs of rows [row0, row1) from their states. Grid: V tile, head, row."""
    call = p.call
    gates, flags = _flags(p, decayed)
    q, k = (p.q, p.k) if decayed is None else (decayed.qg, None)
    tiles, options = p.config(configs.outputs)
    _outputs(
        ((row1 - row0) * call.HV * -(-call.V // tiles["BV"]),),
        (
            q, k, p.v, h, *gates, A, o, p.bounds, p.table_rows,
            call.scale, call.T, call.B, call.H, call.HV, row0,
        ),
        tiles | flags | {
            "CUMULATIVE": False, "V_FIRST": False, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip


def qk_slabs(p):
    """Programs that share the channels of a row in run_qk_backward; one of them makes dv, too."""
    tiles, _ = p.config(configs.bwd_qk)
    return -(-p.call.K // tiles["BK"])


def qk_backward(p, do, h, dh, dq, dk, dv, dg, dg_gamma):
    """A function of (row0, row1): dq and dk of these rows with scalar gates; dv, dg, dg_gamma
    unless None.

    dq, dk: [B, T, HV, K]. dg [slabs, B, T, HV] and dg_gamma [rows, HV, slabs] are in parts.
    Grid: slab of K, head, row.
    """
    call = p.call
    tiles, options = p.config(configs.bwd_qk)
    programs = call.HV * -(-call.K // tiles["BK"])
    launch = _qk_backward.bound(
        (
            p.q, p.k, p.v, do, h, dh, p.g, p.g_gamma, dq, dk, dv, dg, dg_gamma,
            p.bounds, p.table_rows, call.scale, call.T, call.B, call.H, call.HV, 0,
        ),
        tiles | p.gate | {
            "HAS_DO": do is not None, "STORE_DV": dv is not None, "STORE_DG": dg is not None,
            "STORE_DG_GAMMA": dg_gamma is not None, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip
    return lambda row0, row1: launch(((row1 - row0) * programs,), row0=row0)


def run_v_backward(p, do, dh, dv, row0, row1, decayed=None, A=None):
    """dv of rows [row0, row1). Grid: V tile, head, row."""
    call = p.call
    gates, flags = _flags(p, decayed)
    k, q = (p.k, p.q) if decayed is None else (decayed.kg, None)
    tiles, options = p.config(configs.outputs)
    _v_backward(
        ((row1 - row0) * call.HV * -(-call.V // tiles["BV"]),),
        (
            k, q, do, dh, *gates, A, dv, p.bounds, p.table_rows,
            call.scale, call.T, call.B, call.H, call.HV, row0,
        ),
        tiles | flags | {
            "HAS_DO": do is not None, "IS_VARLEN": p.table is not None,
            "PRECISION": p.precision, "STATE_DTYPE": p.state_dtype,
        },
        **options,
    )  # fmt: skip


def sum_heads(x, like):
    """Sums x [B, T, HV, D] fp32 over the value heads of each head of `like` [B, T, H, D].

    Grid: elements.
    """
    y = torch.empty_like(like)
    group = x.shape[2] // like.shape[2]
    _sum_heads(
        (-(-y.numel() // 1024),), (x, y, y.numel(), y.shape[3], group), {"BN": 1024}, num_warps=4
    )
    return y

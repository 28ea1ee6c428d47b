"""Launchers of the token-serial decay families. Nothing is read on the host."""

import torch

from flaop.launch.kernel import Kernel, arch, prepare
from flaop.launch.table import chunk_table, zero_outside
from flaop.triton_kernels.configs import decay_recurrent as configs

from .problem import CHUNK, DTYPE_NAMES, row_count

_fwd = Kernel("decay.recurrent", "fused_recurrent_decay_fwd_kernel")
_bwd_reverse = Kernel("decay.recurrent_bwd", "fused_recurrent_decay_bwd_kernel_reverse")
_bwd_forward = Kernel("decay.recurrent_bwd", "fused_recurrent_decay_bwd_kernel_forward")
_bwd_rows = Kernel("decay.recurrent_bwd", "fused_recurrent_decay_bwd_kernel_rows")
_bwd_gate = Kernel("decay.recurrent_bwd", "fused_recurrent_decay_bwd_kernel_gate")

_TENSORS = ("q", "k", "v", "g", "g_gamma", "gv", "initial_state")


def _prepared(call):
    return call._replace(**{name: prepare(getattr(call, name)) for name in _TENSORS})


def _flags(call):
    """Constants that say which gates there are."""
    return {
        "USE_G": call.g is not None and not call.channel,
        "USE_G_GAMMA": call.g_gamma is not None,
        "USE_GK": call.channel,
        "USE_GV": call.gv is not None,
        "IS_VARLEN": call.cu_seqlens is not None,
    }


def _inputs(call):
    return call.q, call.k, call.v, call.g, call.g_gamma, call.gv


def _parts(table, *names):
    """Fields of a chunk table; None each without one."""
    return [None if table is None else getattr(table, name) for name in names]


def _config(function, call, *more):
    """(constexpr tiles, launch options) of a configuration function for this call."""
    tile = function(arch(call.q.device), call.K, call.V, DTYPE_NAMES[call.q.dtype], *more)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    return tile, options


def _tiles(call, tile):
    """Tiles of a state along K and V."""
    return -(-call.K // tile["BK"]), -(-call.V // tile["BV"])


def forward(call):
    """(o [B, T, HV, V] in v's dtype, final_state fp32 or None if not asked for).

    Grid: sequences x value heads x tiles of the state. With K > 256 o is a sum of fp32 parts.
    """
    call = _prepared(call)
    table = chunk_table(call.cu_seqlens, call.T, 0, CHUNK)
    tile, options = _config(configs.fused_recurrent_fwd, call, call.state_v_first)
    NK, NV = _tiles(call, tile)
    o = torch.empty_like(call.v)
    parts = o if NK == 1 else o.new_empty(NK, *o.shape, dtype=torch.float32)
    final_state = None
    if call.output_final_state:
        final_state = o.new_empty(call.state_shape, dtype=torch.float32)
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "V": call.V, **tile,
        "HAS_INITIAL_STATE": call.initial_state is not None,
        "STORE_FINAL_STATE": call.output_final_state,
        "STATE_V_FIRST": call.state_v_first, **_flags(call),
    }  # fmt: skip
    args = (
        *_inputs(call), call.initial_state, *_parts(table, "bounds"), parts, final_state,
        call.scale, call.T, call.B * call.T,
    )  # fmt: skip
    _fwd((call.N * call.HV * NK * NV,), args, constants, **options)
    if NK > 1:
        o = parts.sum(0).to(o.dtype)
    zero_outside(o, table)
    return o, final_state


def _launch_reverse(call, table, rows, do, dht, want_gates, want_dh0):
    """(dk_write, dv_write, D at the ends of chunks or None, dh0 or None).

    Grid: sequences x value heads x tiles of the state.
    """
    tile, options = _config(configs.fused_recurrent_bwd, call, call.state_v_first)
    NK, NV = _tiles(call, tile)
    tokens = (call.B, call.T, call.HV)
    dk_write = call.v.new_empty(NV, *tokens, call.K, dtype=torch.float32)
    dv_write = call.v.new_empty(NK, *tokens, call.V, dtype=torch.float32)
    d_end = dv_write.new_empty(rows, *call.state_shape[1:]) if want_gates else None
    dh0 = torch.empty_like(call.initial_state) if want_dh0 else None
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "V": call.V, **tile, "CHUNK": CHUNK,
        "HAS_DHT": dht is not None, "STORE_END": want_gates, "STORE_DH0": want_dh0,
        "STATE_V_FIRST": call.state_v_first, **_flags(call),
    }  # fmt: skip
    args = (
        *_inputs(call), do, dht, *_parts(table, "bounds", "offsets"),
        dk_write, dv_write, d_end, dh0, call.scale, call.T, call.B,
    )  # fmt: skip
    _bwd_reverse((call.N * call.HV * NK * NV,), args, constants, **options)
    return dk_write, dv_write, d_end, dh0


def _launch_forward(call, table, rows, do, d_end, want_gv):
    """(dq_state, o_state, ends along K, ends along V), the last three None where not wanted.

    Grid: sequences x value heads x tiles of the state.
    """
    tile, options = _config(configs.fused_recurrent_bwd, call, call.state_v_first)
    NK, NV = _tiles(call, tile)
    tokens = (call.B, call.T, call.HV)
    dq_state = call.v.new_empty(NV, *tokens, call.K, dtype=torch.float32)
    o_state = end_rows = end_columns = None
    if d_end is not None:
        end_rows = dq_state.new_empty(NV, rows, call.HV, call.K)
    if want_gv:
        o_state = dq_state.new_empty(NK, *tokens, call.V)
        end_columns = dq_state.new_empty(NK, rows, call.HV, call.V)
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "V": call.V, **tile, "CHUNK": CHUNK,
        "HAS_INITIAL_STATE": call.initial_state is not None,
        "STORE_END": d_end is not None, "STORE_O": want_gv,
        "STATE_V_FIRST": call.state_v_first, **_flags(call),
    }  # fmt: skip
    args = (
        *_inputs(call), do, call.initial_state, *_parts(table, "bounds", "offsets"),
        d_end, dq_state, o_state, end_rows, end_columns, call.scale, call.T, call.B, rows,
    )  # fmt: skip
    _bwd_forward((call.N * call.HV * NK * NV,), args, constants, **options)
    return dq_state, o_state, end_rows, end_columns


def _launch_rows(call, table, like, parts, y, a, b):
    """The gradient of `like`: parts and scale (a . b) y, summed over the value heads of a group.

    Grid: blocks of tokens x heads x slabs of channels.
    """
    tile, options = _config(configs.fused_recurrent_bwd_rows, call)
    dx = torch.empty_like(like)
    heads, D = like.shape[2:]
    constants = {
        "HV": call.HV, "HX": heads, "HA": a.shape[2], "D": D, "E": a.shape[3],
        "NP": parts.shape[0], **tile,
    }  # fmt: skip
    tokens = call.B * call.T
    grid = -(-tokens // tile["BT"]) * heads * -(-D // tile["BD"])
    _bwd_rows((grid,), (parts, y, a, b, dx, call.scale, tokens), constants, **options)
    zero_outside(dx, table)
    return dx


def _launch_gate(call, table, rows, x, y, g, g_gamma, dx, dy, ends):
    """(dg, dg_gamma), None where absent. Grid: chunk rows x value heads x slabs of channels."""
    tile, options = _config(configs.fused_recurrent_bwd_gate, call)
    scalar = g is None or g.dim() == 3
    dg = None if g is None else torch.empty_like(g)
    sums = None if g_gamma is None else dx.new_empty(rows, call.HV)
    D = x.shape[3]
    constants = {
        "HV": call.HV, "HX": x.shape[2], "D": D, "NP": dx.shape[0], "BT": CHUNK, **tile,
        "SCALAR": scalar, "USE_G": g is not None, "USE_G_GAMMA": g_gamma is not None,
        "IS_VARLEN": table is not None,
    }  # fmt: skip
    args = (
        x, y, g, g_gamma, dx, dy, ends, dg, sums, *_parts(table, "bounds", "rows"),
        call.T, call.B, rows,
    )  # fmt: skip
    slabs = 1 if scalar else -(-D // tile["BD"])
    _bwd_gate((rows * call.HV * slabs,), args, constants, **options)
    if dg is not None:
        zero_outside(dg, table)
    return dg, None if sums is None else sums.sum(0).to(g_gamma.dtype)


def backward(call, d_o, d_final_state, grad_mask):
    """Gradients, None where not asked for: simple_gla (q, k, v, g, g_gamma, initial_state), gla
    (q, k, v, g, initial_state, gv).

    d_o [B, T, HV, V] or None; d_final_state as final_state or None. Memory in fp32: up to two
    copies of q and of v per value head and tile of the state, and a state for each 64 tokens where
    gradients of gates are asked for.
    """
    call = _prepared(call)
    names = ("q", "k", "v", "g", "g_gamma", "initial_state")
    if call.channel:
        names = ("q", "k", "v", "g", "initial_state", "gv")
    wanted = {
        name: asked and getattr(call, name) is not None
        for name, asked in zip(names, grad_mask, strict=True)
    }
    want_g = wanted["g"] or wanted.get("g_gamma", False)
    want_gv = wanted.get("gv", False)
    rows = row_count(call.B, call.T, call.N, call.cu_seqlens is not None)
    table = chunk_table(call.cu_seqlens, call.T, rows, CHUNK)
    do = torch.zeros_like(call.v) if d_o is None else prepare(d_o)
    found = dict.fromkeys(names)
    dk_write, dv_write, d_end, found["initial_state"] = _launch_reverse(
        call, table, rows, do, prepare(d_final_state), want_g or want_gv, wanted["initial_state"]
    )
    q, k, v = call.q, call.k, call.v
    if wanted["q"] or want_g or want_gv:
        dq_state, o_state, end_rows, end_columns = _launch_forward(
            call, table, rows, do, d_end, want_gv
        )
    if wanted["q"]:
        found["q"] = _launch_rows(call, table, q, dq_state, k, v, do)
    if wanted["k"]:
        found["k"] = _launch_rows(call, table, k, dk_write, q, v, do)
    if wanted["v"]:
        found["v"] = _launch_rows(call, table, v, dv_write, do, q, k)
    if want_g:
        found["g"], found["g_gamma"] = _launch_gate(
            call, table, rows, q, k, call.g, call.g_gamma, dq_state, dk_write, end_rows
        )
    if want_gv:
        found["gv"], _ = _launch_gate(
            call, table, rows, do, v, call.gv, None, o_state, dv_write, end_columns
        )
    return tuple(found[name] if wanted[name] else None for name in names)

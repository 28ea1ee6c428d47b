"""Launchers of the token-serial delta rule. Nothing is read on the host.

A call is one of KDA or of gated_delta_rule (flaop.validation.kda, .gated_delta_rule): g has a gate
per channel [B, T, HV, K], one per head [B, T, HV], or is None.
"""

import torch

from flaop.launch.kernel import Kernel, arch, prepare
from flaop.launch.table import chunk_table, zero_outside
from flaop.triton_kernels.configs import recurrent as configs

_fwd = Kernel("delta.recurrent", "fused_recurrent_delta_fwd_kernel")
_bwd_reverse = Kernel("delta.recurrent_bwd", "fused_recurrent_delta_bwd_kernel_reverse")
_bwd_forward = Kernel("delta.recurrent_bwd", "fused_recurrent_delta_bwd_kernel_forward")
_bwd_qk = Kernel("delta.recurrent_bwd", "fused_recurrent_delta_bwd_kernel_qk")
_bwd_gate = Kernel("delta.recurrent_bwd", "fused_recurrent_delta_bwd_kernel_gate")

CHUNK = 64  # tokens of one suffix sum of the gate gradient
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def _prepared(call):
    return call._replace(**{name: prepare(getattr(call, name)) for name in _TENSORS})


def _table(call):
    """Only its boundaries are used: no rows are asked for."""
    return chunk_table(call.cu_seqlens, call.T, 0, 64)


def _bounds(table):
    return None if table is None else table.bounds


def _gates(call):
    """Gates of a token and value head."""
    return 0 if call.g is None else call.g.shape[3:].numel()


def _activations(call):
    """Constants that say how gate, beta, q and k are read."""
    return {
        "USE_L2NORM": call.use_qk_l2norm_in_kernel,
        "USE_GATE": call.use_gate_in_kernel,
        "BOUNDED": call.lower_bound is not None,
        "HAS_A_LOG": call.use_gate_in_kernel and call.A_log is not None,
        "HAS_BIAS": call.use_gate_in_kernel and call.dt_bias is not None,
        "USE_BETA_SIGMOID": call.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": call.allow_neg_eigval,
        "IS_VARLEN": call.cu_seqlens is not None,
    }


def _config(function, call, *more):
    config = function(arch(call.q.device), call.K, call.V, _DTYPES[call.q.dtype], *more)
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    return config, options


def _launch_forward(call, store_u):
    """o [B, T, HV, V]; final_state fp32 or None; u [B, T, HV, V] fp32 or None.

    Grid: V tiles x N x HV.
    """
    call, table = _prepared(call), _table(call)
    o = torch.empty_like(call.v)
    u = torch.empty_like(call.v, dtype=torch.float32) if store_u else None
    final_state = None
    if call.output_final_state:
        final_state = call.q.new_empty(call.state_shape, dtype=torch.float32)
    tile, options = _config(configs.fused_recurrent_fwd, call, call.state_v_first)
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "V": call.V, "GATES": _gates(call),
        **tile, **_activations(call),
        "HAS_INITIAL_STATE": call.initial_state is not None,
        "STORE_FINAL_STATE": call.output_final_state,
        "STORE_U": store_u,
        "STATE_V_FIRST": call.state_v_first,
    }  # fmt: skip
    args = (
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state,
        _bounds(table), o, u, final_state,
        call.scale, call.lower_bound or 0.0, call.T,
    )  # fmt: skip
    tiles = -(-call.V // tile["BV"])
    _fwd((tiles * call.N * call.HV,), args, constants, **options)
    zero_outside(o, table)
    if store_u:
        zero_outside(u, table)
    return o, final_state, u


def forward(call):
    """(o [B, T, HV, V] in v's dtype, final_state fp32 or None if not asked for)."""
    return _launch_forward(call, False)[:2]


def forward_residuals(call):
    """(o, final_state or None, u [B, T, HV, V] fp32: what each token writes, beta (v - S'^T k))."""
    return _launch_forward(call, True)


def _launch_reverse(call, table, u, do, dht, want_dh0):
    """dv [B, T, HV, V]; du, the same in fp32; dk_write [tiles, B, T, HV, K] fp32; dh; dh0 or None.

    dh [ceil(B T / CHUNK), HV, K, V], or V first, fp32: gradients of states at the ends of chunks.
    Grid: V tiles x N x HV.
    """
    tile, options = _config(configs.fused_recurrent_bwd, call, call.state_v_first)
    tiles = -(-call.V // tile["BV"])
    dv = torch.empty_like(call.v)
    du = torch.empty_like(u)
    dk_write = u.new_empty(tiles, call.B, call.T, call.HV, call.K)
    dh = u.new_empty(-(-call.B * call.T // CHUNK), *call.state_shape[1:])
    dh0 = torch.empty_like(call.initial_state) if want_dh0 else None
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "V": call.V, "GATES": _gates(call),
        **tile, "CHUNK": CHUNK, **_activations(call),
        "HAS_DHT": dht is not None,
        "STORE_DH0": want_dh0,
        "STATE_V_FIRST": call.state_v_first,
    }  # fmt: skip
    args = (
        call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias,
        _bounds(table), u, do, dht, dv, du, dk_write, dh, dh0,
        call.scale, call.lower_bound or 0.0, call.T, call.B * call.T,
    )  # fmt: skip
    _bwd_reverse((tiles * call.N * call.HV,), args, constants, **options)
    zero_outside(dv, table)
    return dv, du, dk_write, dh, dh0


def _launch_recompute(call, table, u, do, du, dh, dht):
    """dq_state, dk_erase [tiles, B, T, HV, K]; dbeta, dot [tiles, B, T, HV]; dg_chunk; dg_end.

    dg_chunk [tiles, ceil(B T / CHUNK), HV, K], dg_end [tiles, N, HV, K] or None. All fp32.
    Grid: V tiles x N x HV.
    """
    tile, options = _config(configs.fused_recurrent_bwd, call, call.state_v_first)
    tiles = -(-call.V // tile["BV"])
    dq_state = u.new_empty(tiles, call.B, call.T, call.HV, call.K)
    dk_erase = torch.empty_like(dq_state)
    dbeta = u.new_empty(tiles, call.B, call.T, call.HV)
    dot = torch.empty_like(dbeta)
    dg_chunk = u.new_empty(tiles, dh.shape[0], call.HV, call.K)
    dg_end = None if dht is None else u.new_empty(tiles, call.N, call.HV, call.K)
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "V": call.V, "GATES": _gates(call),
        **tile, "CHUNK": CHUNK, **_activations(call),
        "HAS_INITIAL_STATE": call.initial_state is not None,
        "HAS_DHT": dht is not None,
        "STATE_V_FIRST": call.state_v_first,
    }  # fmt: skip
    args = (
        call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state,
        _bounds(table), u, do, du, dh, dht,
        dq_state, dk_erase, dbeta, dot, dg_chunk, dg_end,
        call.scale, call.lower_bound or 0.0, call.T, call.N, call.B * call.T,
    )  # fmt: skip
    _bwd_forward((tiles * call.N * call.HV,), args, constants, **options)
    return dq_state, dk_erase, dbeta, dot, dg_chunk, dg_end


def _launch_qk(call, table, dq_state, dk_write, dk_erase, dot):
    """dq, dk [B, T, H, K] in the inputs' dtype. Grid: blocks of tokens x H."""
    tile, options = _config(configs.fused_recurrent_bwd_rows, call)
    dq, dk = torch.empty_like(call.q), torch.empty_like(call.k)
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "NV": dq_state.shape[0], **tile,
        "USE_L2NORM": call.use_qk_l2norm_in_kernel,
    }  # fmt: skip
    tokens = call.B * call.T
    args = (call.q, call.k, dq_state, dk_write, dk_erase, dot, dq, dk, tokens)
    _bwd_qk((-(-tokens // tile["BT"]) * call.H,), args, constants, **options)
    zero_outside(dq, table)
    zero_outside(dk, table)
    return dq, dk


def _launch_gate(call, table, dq_state, dk_write, dk_erase, dbeta_parts, dg_chunk, dg_end):
    """dg (or None), dbeta in the inputs' dtype; dA_log [N, HV], d_dt_bias [N, HV, gates] fp32.

    Grid: N x HV.
    """
    tile, options = _config(configs.fused_recurrent_bwd_rows, call)
    dg = None if call.g is None else torch.empty_like(call.g)
    dbeta = torch.empty_like(call.beta)
    dA_log = dq_state.new_empty(call.N, call.HV)
    d_dt_bias = dq_state.new_empty(call.N, call.HV, _gates(call))
    constants = {
        "H": call.H, "HV": call.HV, "K": call.K, "GATES": _gates(call),
        "NV": dq_state.shape[0], **tile, "CHUNK": CHUNK, **_activations(call),
        "HAS_DHT": dg_end is not None,
    }  # fmt: skip
    args = (
        call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias,
        _bounds(table), dq_state, dk_write, dk_erase, dbeta_parts, dg_chunk, dg_end,
        dg, dbeta, dA_log, d_dt_bias,
        call.lower_bound or 0.0, call.T, call.N, call.B * call.T,
    )  # fmt: skip
    _bwd_gate((call.N * call.HV,), args, constants, **options)
    if dg is not None:
        zero_outside(dg, table)
    zero_outside(dbeta, table)
    return dg, dbeta, dA_log, d_dt_bias


def backward(call, d_o, d_final_state, u, grad_mask):
    """Gradients of (q, k, v, g, beta, A_log, dt_bias, initial_state), None where not asked for.

    d_o [B, T, HV, V] or None; d_final_state as final_state or None; u from forward_residuals.
    Memory in fp32: V tiles x three keys per token and value head, one copy of v, and a state for
    each 64 tokens.
    """
    call, table = _prepared(call), _table(call)
    inputs = (
        call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state
    )  # fmt: skip
    wanted = [asked and x is not None for asked, x in zip(grad_mask, inputs, strict=True)]
    do = torch.zeros_like(call.v) if d_o is None else prepare(d_o)
    dht, u = prepare(d_final_state), prepare(u)
    dv, du, dk_write, dh, dh0 = _launch_reverse(call, table, u, do, dht, wanted[7])
    dq = dk = dg = dbeta = dA_log = d_dt_bias = None
    want_qk, want_gate = any(wanted[:2]), any(wanted[3:7])
    if want_qk or want_gate:
        dq_state, dk_erase, dbeta_parts, dot, *dg_parts = _launch_recompute(
            call, table, u, do, du, dh, dht
        )
        if want_qk:
            dq, dk = _launch_qk(call, table, dq_state, dk_write, dk_erase, dot)
        if want_gate:
            dg, dbeta, dA_log, d_dt_bias = _launch_gate(
                call, table, dq_state, dk_write, dk_erase, dbeta_parts, *dg_parts
            )
    if wanted[5]:
        dA_log = dA_log.sum(0).to(call.A_log.dtype)
    if wanted[6]:
        d_dt_bias = d_dt_bias.sum(0).view(call.dt_bias.shape).to(call.dt_bias.dtype)
    found = (dq, dk, dv, dg, dbeta, dA_log, d_dt_bias, dh0)
    return tuple(x if want else None for x, want in zip(found, wanted, strict=True))

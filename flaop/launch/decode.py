"""Launchers of the decode ops on a pool of states. Nothing is read on the host.

A call is one of flaop.validation.steps. A row is a sequence of the call; state_indices and
write_indices say which slots of the pool [slots, HV, K, V] (or [slots, HV, V, K]) it reads and
writes. A slot outside the pool is never touched.
"""

import torch

from flaop._extension import bindings
from flaop.triton_kernels.configs import decode as configs

from .decay import chunk as decay_chunk
from .delta import chunk as kda_chunk
from .delta import gdn as gdn_chunk
from .delta.problem import DTYPE_NAMES
from .kernel import Kernel, arch

_step_delta = Kernel("decode.delta", "decode_delta_kernel_step")
_step_decay = Kernel("decode.decay", "decode_decay_kernel_step")
_commit = Kernel("decode.commit", "decode_kernel_commit")
_gather = Kernel("decode.pool", "decode_kernel_gather")
_scatter = Kernel("decode.pool", "decode_kernel_scatter")
_checkpoint = Kernel("decode.pool", "decode_kernel_checkpoint")
_zero = Kernel("decode.pool", "decode_kernel_zero")

CHUNK = 64
_CHUNK_PATHS = {
    "kda": kda_chunk.forward,
    "gated_delta_rule": gdn_chunk.forward,
    "simple_gla": decay_chunk.forward,
    "gla": decay_chunk.forward,
}
# strides that keep a row 16-byte aligned, in elements of 16 bits
_ALIGNED = 8


def _config(function, call, *flags):
    """(constexpr tiles, launch options) of a configuration function for a call's pool."""
    state = call.state
    tile = function(arch(state.device), call.K, call.V, DTYPE_NAMES[state.dtype], *flags)
    names = ("num_warps", "num_stages", "maxnreg")
    options = {name: tile.pop(name) for name in names if name in tile}
    return tile, options


def _rows(x):
    """The tensor itself if its last dimension is contiguous, else a copy."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _flat(x):
    """A contiguous [N]; None stays None."""
    return None if x is None else x.contiguous()


def _slots_aligned(state):
    return state.shape[0] < 2 or state.stride(0) % _ALIGNED == 0


def _rows_aligned(*tensors):
    """Whether every row starts at a multiple of 16 bytes if the first one does."""
    return all(
        size == 1 or stride % _ALIGNED == 0
        for x in tensors
        if x is not None
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def _strides(*tensors):
    """Batch, token and head strides of each; zeros for None."""
    return [n for x in tensors for n in ((0, 0, 0) if x is None else x.stride()[:3])]


class _Slots:
    """Where a call reads and writes the pool, as kernel arguments."""

    def __init__(self, call):
        reads = _rows(call.state_indices)
        writes = reads if call.write_indices is None else _rows(call.write_indices)
        accepted = call.num_accepted_tokens
        self.tensors = (
            call.state, reads, writes, _flat(call.has_initial_state),
            reads if accepted is None else accepted.contiguous(), _flat(call.cu_seqlens),
        )  # fmt: skip
        self.numbers = (
            call.state.shape[0], reads.shape[1] if reads.dim() == 2 else 0,
            int(accepted is not None),
            call.state.stride(0), reads.stride(0), writes.stride(0),
        )  # fmt: skip
        self.flags = {
            "SLOTS_ALIGNED": _slots_aligned(call.state),
            "INITIAL_MASK": call.has_initial_state is not None,
            "IS_VARLEN": call.cu_seqlens is not None,
            "STATE_V_FIRST": call.state_v_first,
        }


def _launch_delta(call, o, kept):
    """Grid: V tiles x value heads x rows."""
    slots = _Slots(call)
    q, k, v = (_rows(x) for x in (call.q, call.k, call.v))
    channel = call.channel
    g = _rows(call.g) if channel else call.g
    tile, options = _config(configs.step, call, call.state_v_first)
    constants = {
        "K": call.K, "V": call.V,
        "GATES": 0 if g is None else call.K if channel else 1, **tile,
        "ROWS_ALIGNED": _rows_aligned(q, k, v, g if channel else None),
        "USE_L2NORM": call.use_qk_l2norm_in_kernel,
        "USE_GATE": call.use_gate_in_kernel,
        "BOUNDED": call.lower_bound is not None,
        "HAS_A_LOG": call.use_gate_in_kernel and call.A_log is not None,
        "HAS_BIAS": call.use_gate_in_kernel and call.dt_bias is not None,
        "USE_BETA_SIGMOID": call.use_beta_sigmoid_in_kernel,
        "NEG_EIGVAL": call.allow_neg_eigval,
        **slots.flags, "VERIFY": kept is not None,
    }  # fmt: skip
    args = (
        q, k, v, g, call.beta, _flat(call.A_log), _flat(call.dt_bias), *slots.tensors,
        o, *(kept or (None, None, None)),
        call.scale, call.lower_bound or 0.0, call.T, call.N, call.H, call.HV, *slots.numbers,
        *_strides(q, k, v, g, call.beta),
    )  # fmt: skip
    grid = -(-call.V // tile["BV"]) * call.HV * call.N
    _step_delta((grid,), args, constants, **options)
    return o


def _launch_decay(call, o, kept):
    """Grid: tiles of the state x value heads x rows. With K > 256 o is a sum of fp32 parts."""
    slots = _Slots(call)
    q, k, v = (_rows(x) for x in (call.q, call.k, call.v))
    channel = call.channel
    g = _rows(call.g) if channel else call.g
    tile, options = _config(configs.step, call, call.state_v_first)
    tiles_k, tiles_v = -(-call.K // tile["BK"]), -(-call.V // tile["BV"])
    parts = o if tiles_k == 1 else o.new_empty(tiles_k, *o.shape, dtype=torch.float32)
    constants = {
        "K": call.K, "V": call.V, **tile,
        "ROWS_ALIGNED": _rows_aligned(q, k, v, g if channel else None),
        "USE_G": g is not None and not channel, "USE_G_GAMMA": call.g_gamma is not None,
        "USE_GK": channel, **slots.flags, "VERIFY": kept is not None,
    }  # fmt: skip
    args = (
        q, k, v, g, _flat(call.g_gamma), *slots.tensors, parts, *(kept or (None, None, None)),
        call.scale, call.T, call.N, call.B * call.T, call.H, call.HV, *slots.numbers,
        *_strides(q, k, v, g),
    )  # fmt: skip
    _step_decay((tiles_k * tiles_v * call.HV * call.N,), args, constants, **options)
    if tiles_k > 1:
        o = parts.sum(0).to(o.dtype)
    return o


def _run(call, kept=None):
    o = call.v.new_empty(call.B, call.T, call.HV, call.V)
    return (_launch_delta if call.delta else _launch_decay)(call, o, kept)


def step(call, remember=True):
    """o [B, T, HV, V] in v's dtype; the states in the pool move on. One launch.

    remember: later calls that differ in addresses alone may go without Python (docs/launch.md).
    """
    o = _run(call)
    if remember:
        bindings.complete()
    return o


def verify(call):
    """(o as step has it, k [B, T, H, K], u [B, T, HV, V], g [B, T, HV] or [B, T, HV, K]), the last
    three fp32; g is empty without gates. The pool stays as it is. One launch."""

    def wide(*shape):
        return call.v.new_empty(shape, dtype=torch.float32)

    k, u = wide(call.B, call.T, call.H, call.K), wide(call.B, call.T, call.HV, call.V)
    g = wide(0)
    if call.gated:
        g = wide(call.B, call.T, call.HV, *([call.K] if call.channel else []))
    o = _run(call, (k, u, g if call.gated else None))
    return o, k, u, g


def commit(call):
    """The accepted tokens of a verify call into the pool. Grid: tiles of the state x value heads x
    rows."""
    tile, options = _config(configs.commit, call, call.state_v_first)
    indices = call.state_indices
    g = call.g
    constants = {
        "K": call.K, "V": call.V,
        "GATES": 0 if g is None else call.K if g.dim() == 4 else 1, **tile,
        "SLOTS_ALIGNED": _slots_aligned(call.state),
        "INITIAL_MASK": call.has_initial_state is not None,
        "IS_VARLEN": call.cu_seqlens is not None,
        "STATE_V_FIRST": call.state_v_first,
    }  # fmt: skip
    args = (
        call.k.contiguous(), call.u.contiguous(), None if g is None else g.contiguous(),
        call.state, indices, _flat(call.has_initial_state),
        call.num_accepted_tokens.contiguous(), _flat(call.cu_seqlens),
        call.T, call.H, call.HV, call.state.shape[0], call.state.stride(0), indices.stride(0),
    )  # fmt: skip
    tiles = -(-call.K // tile["BK"]) * -(-call.V // tile["BV"])
    _commit((tiles * call.HV * call.N,), args, constants, **options)


def chunk_pool(call):
    """o [B, T, HV, V] by the chunk path of the family, from and into the slots of the pool.

    Memory beside that of the chunk path: the states that enter and leave, in fp32.
    """
    s = call.step
    entering = _gather_states(s)
    if s.T == 0:
        o, leaving = s.v.new_empty(s.B, s.T, s.HV, s.V), entering
    else:
        visit = None
        if call.checkpoint_interval and call.checkpoint_indices.shape[1]:

            def visit(p, h, row0, row1):
                _store_checkpoints(call, p, h, row0, row1)

        o, leaving = _CHUNK_PATHS[s.family](call.chunk_call(entering), visit)
        _zero_padding(s, o)
    _scatter_states(call, leaving)
    return o


def _state_blocks(call):
    """(number of programs, constants, options) of a kernel that copies states."""
    tile, options = _config(configs.copies, call)
    size = call.K * call.V
    constants = {"KV": size, **tile, "SLOTS_ALIGNED": _slots_aligned(call.state)}
    return -(-size // tile["BD"]) * call.HV * call.N, constants, options


def _gather_states(call):
    """The states that enter, [N, HV, K, V] (or V first) fp32; zero for padding and new slots.

    Grid: blocks of a head's state x value heads x rows.
    """
    state, indices = call.state, call.state_indices
    h0 = state.new_empty(call.N, *state.shape[1:], dtype=torch.float32)
    grid, constants, options = _state_blocks(call)
    args = (
        state, indices, _flat(call.has_initial_state), h0,
        call.HV, state.shape[0], state.stride(0), indices.stride(0),
    )  # fmt: skip
    constants["INITIAL_MASK"] = call.has_initial_state is not None
    _gather((grid,), args, constants, **options)
    return h0


def _scatter_states(call, ht):
    """Final states ht [N, HV, K, V] (or V first) fp32 to their slots and last checkpoints.

    Grid: blocks of a head's state x value heads x rows.
    """
    s = call.step
    state, reads = s.state, s.state_indices
    writes = reads if s.write_indices is None else s.write_indices
    points = _rows(call.checkpoint_indices)
    grid, constants, options = _state_blocks(s)
    checkpoints = points is not None and points.shape[1] > 0
    args = (
        ht, state, reads, writes, points if checkpoints else None, _flat(s.cu_seqlens),
        s.T, s.HV, state.shape[0], points.shape[1] if checkpoints else 0,
        call.checkpoint_interval, state.stride(0), reads.stride(0), writes.stride(0),
        points.stride(0) if checkpoints else 0,
    )  # fmt: skip
    constants |= {"CHECKPOINTS": checkpoints, "IS_VARLEN": s.cu_seqlens is not None}
    _scatter((grid,), args, constants, **options)


def _store_checkpoints(call, p, h, row0, row1):
    """States h [rows', HV, K, V] fp32 that enter the chunks of rows [row0, row1), those that end an
    interval to their slots. Grid: tiles of the state x value heads x rows of h."""
    s = call.step
    state, indices, points = s.state, s.state_indices, _rows(call.checkpoint_indices)
    tile, options = _config(configs.checkpoint, s)
    constants = {
        "K": s.K, "V": s.V, **tile, "SLOTS_ALIGNED": _slots_aligned(state),
        "V_FIRST": s.state_v_first, "IS_VARLEN": p.table is not None,
    }  # fmt: skip
    args = (
        h, p.table_rows, state, indices, points,
        s.B, s.HV, row0, state.shape[0], points.shape[1], call.checkpoint_interval // CHUNK,
        state.stride(0), indices.stride(0), points.stride(0),
    )  # fmt: skip
    tiles = -(-s.K // tile["BK"]) * -(-s.V // tile["BV"])
    _checkpoint((tiles * s.HV * (row1 - row0),), args, constants, **options)


def _zero_padding(call, o):
    """Zero outputs of padding rows. Grid: blocks of channels x rows."""
    tile, options = _config(configs.zero, call)
    indices, D = call.state_indices, call.HV * call.V
    args = (
        o, indices, _flat(call.cu_seqlens), call.T, D, call.state.shape[0], indices.stride(0)
    )  # fmt: skip
    constants = {**tile, "IS_VARLEN": call.cu_seqlens is not None}
    _zero((-(-D // tile["BD"]) * call.N,), args, constants, **options)

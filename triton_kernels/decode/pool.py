"""Between a pool of states and the chunk path, which takes and returns fp32 states.

Only rows whose slot lies in the pool are read or written; the others start from zero.
"""

import triton
import triton.language as tl

from ..delta.scan import state_pointers
from .slots import slot_pointer, token_range


@triton.jit
def block_position(HV, KV: tl.constexpr, BD: tl.constexpr):
    """(row, offset of the head in a state, offsets [BD] in the head, mask) of a program."""
    ND: tl.constexpr = (KV + BD - 1) // BD
    i_nh = tl.program_id(0) // ND
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    return i_nh // HV, (i_nh % HV).to(tl.int64) * KV, o_d, o_d < KV


@triton.jit(do_not_specialize=["HV", "slots", "slot_stride", "index_stride"])
def decode_kernel_gather(
    state,  # [slots, HV, K, V] (or V first), slots slot_stride apart
    state_indices,  # [N] int32, index_stride apart
    has_initial_state,  # [N] bool, or None
    h0,  # [N, HV, K, V] (or V first) fp32, written
    HV,
    slots,
    slot_stride,
    index_stride,
    KV: tl.constexpr,
    BD: tl.constexpr,
    SLOTS_ALIGNED: tl.constexpr,
    INITIAL_MASK: tl.constexpr,
):
    """One program per (row, value head, block of its state)."""
    i_n, o_head, o_d, m_d = block_position(HV, KV, BD)
    slot = tl.load(state_indices + i_n.to(tl.int64) * index_stride)
    m_read = m_d & (slot >= 0) & (slot < slots)
    if INITIAL_MASK:
        m_read = m_read & (tl.load(has_initial_state + i_n) != 0)
    p_s = slot_pointer(state, slot, slot_stride, SLOTS_ALIGNED) + o_head + o_d
    b_s = tl.load(p_s, mask=m_read, other=0.0).to(tl.float32)
    tl.store(h0 + i_n.to(tl.int64) * HV * KV + o_head + o_d, b_s, mask=m_d)


@triton.jit(do_not_specialize=[
    "T", "HV", "slots", "M", "interval",
    "slot_stride", "read_stride", "write_stride", "checkpoint_stride",
])  # fmt: skip
def decode_kernel_scatter(
    ht,  # [N, HV, K, V] (or V first) fp32
    state,  # [slots, HV, K, V], as ht; slots slot_stride apart; written
    state_indices,  # [N] int32, read_stride apart
    write_indices,  # [N] int32, write_stride apart; may be state_indices itself
    checkpoint_indices,  # [N, M] int32 with CHECKPOINTS, rows checkpoint_stride apart, else None
    cu_seqlens,  # [N+1] int32 or int64 if IS_VARLEN, else None
    T,
    HV,
    slots,
    M,
    interval,
    slot_stride,
    read_stride,
    write_stride,
    checkpoint_stride,
    KV: tl.constexpr,
    BD: tl.constexpr,
    SLOTS_ALIGNED: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Final states, to their checkpoint, too, where a sequence ends with an interval.

    One program per (row, value head, block of its state).
    """
    i_n, o_head, o_d, m_d = block_position(HV, KV, BD)
    i_row = i_n.to(tl.int64)
    slot = tl.load(state_indices + i_row * read_stride)
    if (slot < 0) | (slot >= slots):
        return
    b_s = tl.load(ht + i_row * HV * KV + o_head + o_d, mask=m_d, other=0.0)
    b_s = b_s.to(state.dtype.element_ty)
    slot = tl.load(write_indices + i_row * write_stride)
    m_write = m_d & (slot >= 0) & (slot < slots)
    tl.store(slot_pointer(state, slot, slot_stride, SLOTS_ALIGNED) + o_head + o_d, b_s, m_write)
    if CHECKPOINTS:
        _, _, n_tok = token_range(cu_seqlens, i_n, T, IS_VARLEN)
        column = n_tok // interval - 1
        m_end = (n_tok > 0) & (n_tok % interval == 0) & (column < M)
        p_slot = checkpoint_indices + i_row * checkpoint_stride + column
        slot = tl.load(p_slot, mask=m_end, other=-1)
        m_write = m_d & (slot >= 0) & (slot < slots)
        p_s = slot_pointer(state, slot, slot_stride, SLOTS_ALIGNED) + o_head + o_d
        tl.store(p_s, b_s, m_write)


@triton.jit(do_not_specialize=[
    "B", "HV", "row0", "slots", "M", "every",
    "slot_stride", "read_stride", "checkpoint_stride",
])  # fmt: skip
def decode_kernel_checkpoint(
    h,  # [rows', HV, K, V] fp32: states that enter the chunks of rows row0, row0 + 1, ...
    table,  # [rows, 2] int32: sequence and chunk of a row if IS_VARLEN, else None
    state,  # [slots, HV, K, V], or [slots, HV, V, K] if V_FIRST; slots slot_stride apart; written
    state_indices,  # [N] int32, read_stride apart
    checkpoint_indices,  # [N, M] int32, rows checkpoint_stride apart
    B,
    HV,
    row0,
    slots,
    M,
    every,  # chunks of an interval
    slot_stride,
    read_stride,
    checkpoint_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS_ALIGNED: tl.constexpr,
    V_FIRST: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """States in the middle of sequences to their checkpoints.

    One program per (row of h, value head, tile of the state).
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k, i_v = tl.program_id(0) // NV % NK, tl.program_id(0) % NV
    i_rh = tl.program_id(0) // (NK * NV)
    row, i_hv = i_rh // HV, i_rh % HV
    if IS_VARLEN:
        i_n = tl.load(table + 2 * (row0 + row))
        i_c = tl.load(table + 2 * (row0 + row) + 1)
    else:
        i_n, i_c = (row0 + row) % B, (row0 + row) // B
    column = i_c // every - 1
    if (i_n < 0) | (i_c % every != 0) | (column < 0) | (column >= M):
        return
    slot = tl.load(state_indices + i_n.to(tl.int64) * read_stride)
    m_live = (slot >= 0) & (slot < slots)
    slot = tl.load(checkpoint_indices + i_n.to(tl.int64) * checkpoint_stride + column)
    if m_live & (slot >= 0) & (slot < slots):
        o_k = i_k * BK + tl.arange(0, BK)
        o_v = i_v * BV + tl.arange(0, BV)
        m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
        p_h = state_pointers(h, i_rh.to(tl.int64) * (K * V), o_k, o_v, K, V, False)
        b_s = tl.load(p_h, mask=m_s, other=0.0).to(state.dtype.element_ty)
        p_slot = slot_pointer(state, slot, slot_stride, SLOTS_ALIGNED)
        p_s = state_pointers(p_slot, i_hv.to(tl.int64) * (K * V), o_k, o_v, K, V, V_FIRST)
        tl.store(p_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["T", "D", "slots", "index_stride"])
def decode_kernel_zero(
    o,  # [B, T, D], written where a row is padding
    state_indices,  # [N] int32, index_stride apart
    cu_seqlens,  # [N+1] int32 or int64 if IS_VARLEN (then B = 1), else None
    T,
    D,
    slots,
    index_stride,
    BT: tl.constexpr,
    BD: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Zero outputs of padding. One program per (row, block of D)."""
    blocks = (D + BD - 1) // BD
    i_n = tl.program_id(0) // blocks
    slot = tl.load(state_indices + i_n.to(tl.int64) * index_stride)
    if (slot >= 0) & (slot < slots):
        return
    i_b, bos, n_tok = token_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_d = tl.program_id(0) % blocks * BD + tl.arange(0, BD)
    b_zero = tl.zeros([BT, BD], dtype=o.dtype.element_ty)
    for start in range(0, n_tok, BT):
        o_t = start + tl.arange(0, BT)
        p_o = o + (i_b * T + bos + o_t)[:, None] * D + o_d[None, :]
        tl.store(p_o, b_zero, mask=(o_t < n_tok)[:, None] & (o_d < D)[None, :])

"""Token-serial decay families, backward. S' is the decayed state, D the gradient of the state that
a token leaves, before the token itself reads.

    reverse in time   dk_write = D v;  dv_write = D^T k;  D = exp(g) (D + scale q do^T) exp(gv)
                      (the D that is left is d_initial_state)
    forward in time   dq_state = scale S' do;  o_state = scale S'^T q
    rows              dq = dq_state + (scale v . do) k;  dk = dk_write + (scale v . do) q;
                      dv = dv_write + (scale q . k) do
    gates             dg = suffix sum of q dq_state - k dk_write;
                      dgv = suffix sum of do o_state - v dv_write

What a token reads of its own write would enter the suffix sums twice with opposite signs and drown
the gradients of fast gates in rounding; without it every term has decayed. The sums start anew in
every chunk: at a chunk's last token rows (columns) of <S', D> stand for - k dk_write (for
- v dv_write). Sums over the other axis of the state come out once per tile and are added in a fixed
order, fp32.
"""

import triton
import triton.language as tl

from ..delta.gates import LOG2_GATE_FLOOR, LOG2E
from ..delta.recurrent import state_offsets
from ..delta.rows import chunk_position
from .recurrent import decay_rows, tile_position


@triton.jit
def chunk_row(offsets, i_n, i_c, B, IS_VARLEN: tl.constexpr):
    """Number of a sequence's chunk among the rows of all."""
    if IS_VARLEN:
        return (tl.load(offsets + i_n) + i_c).to(tl.int64)
    else:
        return (i_c * B + i_n).to(tl.int64)


@triton.jit
def load_gates(
    g, g_gamma, gv, i_row, i_hv, o_k, o_v, m_k, m_v, K: tl.constexpr, V: tl.constexpr,
    USE_G: tl.constexpr, USE_G_GAMMA: tl.constexpr, USE_GK: tl.constexpr, USE_GV: tl.constexpr,
):  # fmt: skip
    """exp(g) and exp(gv) of a token and head, row i_row of [B, T, HV], as decay_rows gives them."""
    b_g, b_gamma, b_gv = 0.0, 0.0, 0.0
    if USE_GK:
        b_g = tl.load(g + i_row * K + o_k, mask=m_k, other=0.0)
    elif USE_G:
        b_g = tl.load(g + i_row)
    if USE_G_GAMMA:
        b_gamma = tl.load(g_gamma + i_hv).to(tl.float32)
    if USE_GV:
        b_gv = tl.load(gv + i_row * V + o_v, mask=m_v, other=0.0)
    return decay_rows(b_g, b_gamma, b_gv, USE_G, USE_G_GAMMA, USE_GK, USE_GV)


@triton.jit(do_not_specialize=["scale", "T", "B"])
def fused_recurrent_decay_bwd_kernel_reverse(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] with USE_G, [B, T, HV, K] with USE_GK, else None
    g_gamma,  # [HV] or None
    gv,  # [B, T, HV, V] or None
    do,  # [B, T, HV, V]
    dht,  # [N, HV, K, V], or [N, HV, V, K] if STATE_V_FIRST, or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    offsets,  # [N+1] int32 if IS_VARLEN, else None
    dk_write,  # [NV, B, T, HV, K] fp32, written
    dv_write,  # [NK, B, T, HV, V] fp32, written
    d_end,  # [rows, HV, K, V] (or V first) fp32 or None, written: D at the ends of chunks
    dh0,  # as dht, or None
    scale,
    T,
    B,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_GV: tl.constexpr,
    HAS_DHT: tl.constexpr,
    STORE_END: tl.constexpr,
    STORE_DH0: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """One program per (sequence, value head, tile of the state)."""
    i_k, i_v, i_nh, i_hv, bos, eos = tile_position(bounds, T, HV, K, V, BK, BV, IS_VARLEN)
    i_h = i_hv // (HV // H)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = state_offsets(i_nh, o_k, o_v, K, V, STATE_V_FIRST)
    if HAS_DHT:
        b_d = tl.load(dht + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_d = tl.zeros([BK, BV], dtype=tl.float32)
    rows = tl.cast(B, tl.int64) * T * HV
    p_dk = dk_write + i_v * rows * K + o_k
    p_dv = dv_write + i_k * rows * V + o_v
    chunks = tl.cdiv(eos - bos, CHUNK)
    for i_back in range(0, chunks):
        i_c = chunks - 1 - i_back
        start = bos + i_c * CHUNK
        end = tl.minimum(start + CHUNK, eos)
        if STORE_END:
            i_row = chunk_row(offsets, i_nh // HV, i_c, B, IS_VARLEN) * HV + i_hv
            tl.store(d_end + state_offsets(i_row, o_k, o_v, K, V, STATE_V_FIRST), b_d, mask=m_s)
        for i in range(start, end):
            i_t = start + end - 1 - i
            i_row = i_t * HV + i_hv
            o_q = (i_t * H + i_h) * K + o_k
            b_q = tl.load(q + o_q, mask=m_k, other=0.0).to(tl.float32) * scale
            b_k = tl.load(k + o_q, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(v + i_row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_do = tl.load(do + i_row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_row, b_column = load_gates(
                g, g_gamma, gv, i_row, i_hv, o_k, o_v, m_k, m_v, K, V,
                USE_G, USE_G_GAMMA, USE_GK, USE_GV,
            )  # fmt: skip
            tl.store(p_dk + i_row * K, tl.sum(b_d * b_v[None, :], 1), mask=m_k)
            tl.store(p_dv + i_row * V, tl.sum(b_d * b_k[:, None], 0), mask=m_v)
            b_d += b_q[:, None] * b_do[None, :]
            if USE_G or USE_G_GAMMA or USE_GK:
                b_d *= b_row
            if USE_GV:
                b_d *= b_column
    if STORE_DH0:
        tl.store(dh0 + o_s, b_d.to(dh0.dtype.element_ty), mask=m_s)


@triton.jit(do_not_specialize=["scale", "T", "B", "rows"])
def fused_recurrent_decay_bwd_kernel_forward(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV] with USE_G, [B, T, HV, K] with USE_GK, else None
    g_gamma,  # [HV] or None
    gv,  # [B, T, HV, V] or None
    do,  # [B, T, HV, V]
    initial_state,  # [N, HV, K, V], or [N, HV, V, K] if STATE_V_FIRST, or None
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    offsets,  # [N+1] int32 if IS_VARLEN, else None
    d_end,  # [rows, HV, K, V] (or V first) fp32 or None: D at the ends of chunks
    dq_state,  # [NV, B, T, HV, K] fp32, written
    o_state,  # [NK, B, T, HV, V] fp32, written with STORE_O
    end_rows,  # [NV, rows, HV, K] fp32 or None, written: rows of <S', D> at the ends of chunks
    end_columns,  # [NK, rows, HV, V] fp32, written with STORE_O: its columns
    scale,
    T,
    B,
    rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_GV: tl.constexpr,
    HAS_INITIAL_STATE: tl.constexpr,
    STORE_END: tl.constexpr,
    STORE_O: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """One program per (sequence, value head, tile of the state)."""
    i_k, i_v, i_nh, i_hv, bos, eos = tile_position(bounds, T, HV, K, V, BK, BV, IS_VARLEN)
    i_h = i_hv // (HV // H)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    if HAS_INITIAL_STATE:
        o_s = state_offsets(i_nh, o_k, o_v, K, V, STATE_V_FIRST)
        b_s = tl.load(initial_state + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BK, BV], dtype=tl.float32)
    tokens = tl.cast(B, tl.int64) * T * HV
    ends = tl.cast(rows, tl.int64) * HV
    # the write waits for the next token: what is left after the last is its S'
    b_k = tl.zeros([BK], dtype=tl.float32)
    b_v = tl.zeros([BV], dtype=tl.float32)
    for i_c in range(0, tl.cdiv(eos - bos, CHUNK)):
        start = bos + i_c * CHUNK
        for i_t in range(start, tl.minimum(start + CHUNK, eos)):
            i_row = i_t * HV + i_hv
            o_q = (i_t * H + i_h) * K + o_k
            b_row, b_column = load_gates(
                g, g_gamma, gv, i_row, i_hv, o_k, o_v, m_k, m_v, K, V,
                USE_G, USE_G_GAMMA, USE_GK, USE_GV,
            )  # fmt: skip
            b_s += b_k[:, None] * b_v[None, :]
            if USE_G or USE_G_GAMMA or USE_GK:
                b_s *= b_row
            if USE_GV:
                b_s *= b_column
            b_k = tl.load(k + o_q, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(v + i_row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_do = tl.load(do + i_row * V + o_v, mask=m_v, other=0.0).to(tl.float32) * scale
            b_dq = tl.sum(b_s * b_do[None, :], 1)
            tl.store(dq_state + (i_v * tokens + i_row) * K + o_k, b_dq, mask=m_k)
            if STORE_O:
                b_q = tl.load(q + o_q, mask=m_k, other=0.0).to(tl.float32) * scale
                b_o = tl.sum(b_s * b_q[:, None], 0)
                tl.store(o_state + (i_k * tokens + i_row) * V + o_v, b_o, mask=m_v)
        if STORE_END:
            i_row = chunk_row(offsets, i_nh // HV, i_c, B, IS_VARLEN) * HV + i_hv
            o_e = state_offsets(i_row, o_k, o_v, K, V, STATE_V_FIRST)
            b_e = b_s * tl.load(d_end + o_e, mask=m_s, other=0.0)
            tl.store(end_rows + (i_v * ends + i_row) * K + o_k, tl.sum(b_e, 1), mask=m_k)
            if STORE_O:
                p_e = end_columns + (i_k * ends + i_row) * V + o_v
                tl.store(p_e, tl.sum(b_e, 0), mask=m_v)


@triton.jit(do_not_specialize=["scale", "tokens"])
def fused_recurrent_decay_bwd_kernel_rows(
    parts,  # [NP, tokens, HV, D] fp32: what the state or its gradient gives
    y,  # [tokens, HX, D]
    a,  # [tokens, HA, E]
    b,  # [tokens, HA, E]
    dx,  # [tokens, HX, D], written: sums over a group of parts + scale (a . b) y
    scale,
    tokens,
    HV: tl.constexpr,
    HX: tl.constexpr,
    HA: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    NP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """dq, dk or dv. One program per (block of BT tokens, head, slab of D)."""
    ND: tl.constexpr = (D + BD - 1) // BD
    G: tl.constexpr = HV // HX
    i_x = (tl.program_id(0) // ND % HX).to(tl.int64)
    i_t = (tl.program_id(0) // (ND * HX)).to(tl.int64) * BT + tl.arange(0, BT)
    m_t = i_t < tokens
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    m_td = m_t[:, None] & (o_d < D)[None, :]
    o_x = (i_t * HX + i_x)[:, None] * D + o_d[None, :]
    b_y = tl.load(y + o_x, mask=m_td, other=0.0).to(tl.float32) * scale
    b_dx = tl.zeros([BT, BD], dtype=tl.float32)
    for i_g in range(0, G):
        i_hv = i_x * G + i_g
        b_dot = tl.zeros([BT], dtype=tl.float32)
        for i_e in range(0, E, BD):
            o_e = i_e + tl.arange(0, BD)
            m_te = m_t[:, None] & (o_e < E)[None, :]
            o_a = (i_t * HA + i_hv // (HV // HA))[:, None] * E + o_e[None, :]
            b_a = tl.load(a + o_a, mask=m_te, other=0.0).to(tl.float32)
            b_dot += tl.sum(b_a * tl.load(b + o_a, mask=m_te, other=0.0).to(tl.float32), 1)
        b_dx += b_dot[:, None] * b_y
        for i_p in range(0, NP):
            i_row = (i_p * tl.cast(tokens, tl.int64) + i_t) * HV + i_hv
            b_dx += tl.load(parts + i_row[:, None] * D + o_d[None, :], mask=m_td, other=0.0)
    tl.store(dx + o_x, b_dx.to(dx.dtype.element_ty), mask=m_td)


@triton.jit
def suffix_terms(
    x, y, dx, dy, ends, t0, b_len, i_row, i_hv, o_d, tokens, rows,
    HV: tl.constexpr, HX: tl.constexpr, D: tl.constexpr, NP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """(x dx - y dy [BT, BD] without y dy of the chunk's last token, the sum of ends [BD])."""
    o_t = tl.arange(0, BT)
    m_d = o_d < D
    m_td = (o_t < b_len)[:, None] & m_d[None, :]
    m_write = (o_t < tl.minimum(b_len, BT) - 1)[:, None] & m_d[None, :]
    o_x = ((t0 + o_t) * HX + i_hv // (HV // HX))[:, None] * D + o_d[None, :]
    b_x = tl.load(x + o_x, mask=m_td, other=0.0).to(tl.float32)
    b_y = tl.load(y + o_x, mask=m_td, other=0.0).to(tl.float32)
    b_c = tl.zeros(b_x.shape, dtype=tl.float32)
    b_end = tl.zeros(o_d.shape, dtype=tl.float32)
    for i_p in range(0, NP):
        o_p = ((i_p * tokens + t0 + o_t) * HV + i_hv)[:, None] * D + o_d[None, :]
        b_c += b_x * tl.load(dx + o_p, mask=m_td, other=0.0)
        b_c -= b_y * tl.load(dy + o_p, mask=m_write, other=0.0)
        p_end = ends + ((i_p * tl.cast(rows, tl.int64) + i_row) * HV + i_hv) * D + o_d
        b_end += tl.load(p_end, mask=m_d, other=0.0)
    return b_c, b_end


@triton.jit(do_not_specialize=["T", "B", "rows"])
def fused_recurrent_decay_bwd_kernel_gate(
    x,  # [B, T, HX, D]: q, or do for dgv
    y,  # [B, T, HX, D]: k, or v
    g,  # [B, T, HV] or None with SCALAR, else [B, T, HV, D]
    g_gamma,  # [HV] or None
    dx,  # [NP, B, T, HV, D] fp32: dq_state, or o_state
    dy,  # [NP, B, T, HV, D] fp32: dk_write, or dv_write
    ends,  # [NP, rows, HV, D] fp32: rows (columns) of <S', D> at the ends of chunks
    dg,  # as g, written
    dg_gamma,  # [rows, HV] fp32 or None, written: sums over the chunk
    bounds,  # [N+1] int64 if IS_VARLEN (then B = 1), else None
    table,  # [rows, 2] int32 if IS_VARLEN, else None
    T,
    B,
    rows,
    HV: tl.constexpr,
    HX: tl.constexpr,
    D: tl.constexpr,
    NP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SCALAR: tl.constexpr,
    USE_G: tl.constexpr,
    USE_G_GAMMA: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """dg (and dg_gamma), or dgv. One program per (chunk row, value head, slab of D); SCALAR: all D.
    """
    NS: tl.constexpr = 1 if SCALAR else (D + BD - 1) // BD
    i_row, i_hv = tl.program_id(0) // (NS * HV), tl.program_id(0) // NS % HV
    t0, b_len = chunk_position(bounds, table, i_row, T, B, BT, IS_VARLEN)
    if b_len <= 0:
        # partial sums of rows that hold no chunk
        if USE_G_GAMMA:
            tl.store(dg_gamma + i_row * HV + i_hv, 0.0)
        return
    tokens = tl.cast(B, tl.int64) * T
    o_t = tl.arange(0, BT)
    m_t = o_t < b_len
    o_g = (t0 + o_t) * HV + i_hv
    if SCALAR:
        b_c = tl.zeros([BT], dtype=tl.float32)
        b_end = 0.0
        for i_d in range(0, D, BD):
            o_d = i_d + tl.arange(0, BD)
            b_c_d, b_end_d = suffix_terms(
                x, y, dx, dy, ends, t0, b_len, i_row, i_hv, o_d, tokens, rows, HV, HX, D, NP, BT
            )
            b_c += tl.sum(b_c_d, 1)
            b_end += tl.sum(b_end_d, 0)
        b_dg = tl.cumsum(b_c, 0, reverse=True) + b_end
        b_g = tl.zeros([BT], dtype=tl.float32)
        if USE_G:
            b_g += tl.load(g + o_g, mask=m_t, other=0.0).to(tl.float32)
        if USE_G_GAMMA:
            b_g += tl.load(g_gamma + i_hv).to(tl.float32)
        # at the floor the gate is constant
        b_dg = tl.where(m_t & (b_g * LOG2E > LOG2_GATE_FLOOR), b_dg, 0.0)
        if USE_G:
            tl.store(dg + o_g, b_dg.to(dg.dtype.element_ty), mask=m_t)
        if USE_G_GAMMA:
            tl.store(dg_gamma + i_row * HV + i_hv, tl.sum(b_dg, 0))
    else:
        o_d = tl.program_id(0) % NS * BD + tl.arange(0, BD)
        b_c, b_end = suffix_terms(
            x, y, dx, dy, ends, t0, b_len, i_row, i_hv, o_d, tokens, rows, HV, HX, D, NP, BT
        )
        b_dg = tl.cumsum(b_c, 0, reverse=True) + b_end[None, :]
        m_td = m_t[:, None] & (o_d < D)[None, :]
        o_gd = o_g[:, None] * D + o_d[None, :]
        b_g = tl.load(g + o_gd, mask=m_td, other=0.0).to(tl.float32)
        b_dg = tl.where(b_g * LOG2E > LOG2_GATE_FLOOR, b_dg, 0.0)
        tl.store(dg + o_gd, b_dg.to(dg.dtype.element_ty), mask=m_td)

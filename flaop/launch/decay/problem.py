"""One call of a decay family as the launchers of the chunk kernels see it.

Rows are (sequence, chunk) pairs. Batched calls order them by chunk, then sequence; packed calls by
sequence, then chunk (launch/table.py). A segment is a range of rows [row0, row1) that is worked on
at once; tensors with one entry a row that live for a segment alone are indexed by row - row0.
"""

from typing import NamedTuple

import torch

from ..kernel import arch, configured, prepare
from ..table import chunk_table

CHUNK = 64
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Problem(NamedTuple):
    """One call as the launchers see it: aligned contiguous tensors, sizes, flags."""

    call: object
    q: torch.Tensor  # [B, T, H, K]
    k: torch.Tensor  # [B, T, H, K]
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor | None  # [B, T, HV], or [B, T, HV, K] (channel gates)
    g_gamma: torch.Tensor | None  # [HV]
    h0: torch.Tensor | None  # [N, HV, K, V] or [N, HV, V, K]
    table: object  # ChunkTable or None
    rows: int  # (sequence, chunk) rows of the grid
    precision: str  # of products of the input dtype
    state_dtype: torch.dtype  # operand dtype of products with the state
    stored_state: torch.dtype  # of states kept per chunk

    def config(self, function, *flags):
        """(constexpr tiles, launch options) of a configuration function for this call."""
        call = self.call
        dtype = DTYPE_NAMES[self.q.dtype]
        return configured(function, arch(self.q.device), call.K, call.V, CHUNK, dtype, *flags)

    @property
    def gate(self):
        """Constexprs of the scalar gates; a channel gate is no kernel's scalar gate."""
        return {
            "USE_G": self.g is not None and self.g.dim() == 3,
            "USE_G_GAMMA": self.g_gamma is not None,
            "GATE_DTYPE": gate_dtype(self.q),
        }

    @property
    def channel(self):
        """Whether the gate has a value per key channel (family gla)."""
        return self.g is not None and self.g.dim() == 4

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


def gate_dtype(q):
    """Of sums of scalar gates."""
    return torch.float64 if q.dtype == torch.float32 else torch.float32


def row_count(B, T, N, packed, chunk=CHUNK):
    """(sequence, chunk) rows, from shapes alone: an upper bound for packed calls."""
    return max(-(-T // chunk) + N - 1, 0) if packed else B * -(-T // chunk)


def problem(call):
    """The Problem of a checked call; builds the chunk table of a packed one."""
    B, T, N = call.B, call.T, call.N
    rows = row_count(B, T, N, call.cu_seqlens is not None)
    dtype = call.q.dtype
    return Problem(
        call,
        *(prepare(x) for x in (call.q, call.k, call.v)),
        *(prepare(x) for x in (call.g, call.g_gamma, call.initial_state)),
        table=chunk_table(call.cu_seqlens, T, rows, CHUNK),
        rows=rows,
        precision="tf32x3" if dtype == torch.float32 else "tf32",
        # 65504 is less than a sum of values may reach
        state_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        stored_state=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )

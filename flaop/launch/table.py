"""Launchers of the chunk table of packed sequences."""

from typing import NamedTuple

import torch

from .kernel import Kernel, scratch

_bounds = Kernel("chunk_table", "chunk_table_kernel_bounds")
_rows = Kernel("chunk_table", "chunk_table_kernel_rows")
_zero = Kernel("chunk_table", "zero_outside_kernel")


class ChunkTable(NamedTuple):
    """What kernels read instead of cu_seqlens. All on the device."""

    bounds: torch.Tensor  # [N+1] int64, monotone, within [0, T]
    offsets: torch.Tensor  # [N+1] int32, chunks before sequence n
    rows: torch.Tensor  # [rows, 2] int32, (sequence, chunk), -1 past the last


def chunk_table(cu_seqlens, T, rows, chunk):
    """Builds the table in two launches; `rows` is the shape-only bound. None for batched calls."""
    if cu_seqlens is None:
        return None
    N = cu_seqlens.numel() - 1
    bounds = scratch(cu_seqlens.new_empty(N + 1, dtype=torch.int64))
    offsets = scratch(cu_seqlens.new_empty(N + 1, dtype=torch.int32))
    table = scratch(cu_seqlens.new_empty(rows, 2, dtype=torch.int32))
    args = (cu_seqlens.contiguous(), bounds, offsets, T, N)
    _bounds((1,), args, {"BT": chunk, "BN": 1024}, num_warps=4)
    _rows((-(-rows // 256),), (offsets, table, N, rows), {"BR": 256}, num_warps=4)
    return ChunkTable(bounds, offsets, table)


def zero_outside(x, table):
    """Zeros in the rows of x [1, T, ...] that belong to no sequence.

    Nothing to do without a table.
    """
    if table is None or x.numel() == 0:
        return
    _zero_rows(x, table.bounds, x.shape[1])


def zero_unused(x, table):
    """Zeros in what x [rows, ...] has for chunks past the last.

    Nothing to do without a table.
    """
    if table is not None:
        _zero_rows(x, table.offsets, x.shape[0])


def _zero_rows(x, bounds, rows):
    args = (x, bounds, rows, bounds.numel() - 1, x.numel() // rows)
    _zero((-(-rows // 64),), args, {"BT": 64, "BD": 64}, num_warps=4)

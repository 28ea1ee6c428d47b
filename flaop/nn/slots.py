"""Slots: caches whose buffers hold many sequences, addressed by indices on the device."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Slots(NamedTuple):
    """Where the sequences of a batch live in caches."""

    indices: Tensor  # [N] int32; outside of the slots: a padding row
    rows: Tensor  # [N] int64, rows of the buffers: the spare one for a padding row


class SlotCache(nn.Module):
    """Buffers [num_slots + 1, ...]: a row per slot, and a spare one that padding rows write to.

    Static buffers of a module, updated in place, are what a captured or compiled step reads and
    writes. Caches of a model hold those of its layers.
    """

    def __init__(self, num_slots: int):
        super().__init__()
        self.num_slots = num_slots

    def select(
        self,
        state_indices: Tensor | Slots | None,  # [N]
        x: Tensor,  # [B, T, ...]
        cu_seqlens: Tensor | None = None,  # [N + 1]
    ) -> Slots:
        """The slots of the N sequences of x: B, or the packed ones.

        Args:
            state_indices: [N] int32 or int64 on the device of x, no slot twice. A sequence whose
                index is negative, or not of a slot, is padding: its outputs mean nothing, and no
                slot changes. None: sequence n is in slot n.
        """
        if isinstance(state_indices, Slots):
            return state_indices
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state_indices is None:
            state_indices = torch.arange(N, dtype=torch.int32, device=x.device)
        elif state_indices.shape != (N,):
            raise ValueError(
                f"state_indices must be [{N}], one slot per sequence, got "
                f"{list(state_indices.shape)}"
            )
        valid = (state_indices >= 0) & (state_indices < self.num_slots)
        rows = torch.where(valid, state_indices, self.num_slots).long()
        return Slots(state_indices.to(torch.int32), rows)

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Zeroes the slots of rows [N] int64, or all."""
        for buffer in self.buffers():
            if rows is None:
                buffer.zero_()
            else:
                buffer.index_fill_(0, rows, 0)

    @torch.no_grad()
    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copies slots src [N] int64 to slots dst [N] int64; all are read before one is written."""
        for buffer in self.buffers():
            buffer.index_copy_(0, dst, buffer.index_select(0, src))

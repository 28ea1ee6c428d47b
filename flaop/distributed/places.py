"""Where the sequences lie, as one rank sees it. Nothing is read on the host."""

from typing import NamedTuple

import torch
from torch import Tensor

from flaop.distributed.group import Group


class Places(NamedTuple):
    """Truth values are tensors on the device for packed sequences, else plain ones."""

    cu_seqlens: Tensor | None  # [N + 1] int64, offsets in the shard; sequences elsewhere are empty
    starts: Tensor | bool  # [N]: the sequence's first token is here; an empty sequence is somewhere
    ends: Tensor | bool  # [N]: its last token is here
    enters: Tensor | bool  # [N]: it goes on here from the rank before; at most one
    leaves: Tensor | bool  # [N]: it goes on at the next rank; at most one
    passes: tuple[Tensor | bool, ...]  # for every rank: one that enters it also leaves it


def find_places(cu_seqlens: Tensor | None, T: int, group: Group) -> Places:
    """The places of sequences for shards of T tokens.

    Args:
        cu_seqlens: global offsets [N + 1]; None: every member of a batch spans all ranks.
    """
    _, rank, size = group
    if cu_seqlens is None:
        passes = tuple(0 < j < size - 1 for j in range(size))
        return Places(None, rank == 0, rank == size - 1, rank > 0, rank < size - 1, passes)
    bounds = cu_seqlens.long().clamp(0, size * T).cummax(0).values
    first, last = rank * T, (rank + 1) * T
    start, end = bounds[:-1], bounds[1:]
    # A token at a border belongs to the rank after it; the end of all shards to the last rank.
    home = (start // max(T, 1)).clamp(max=size - 1)
    end_home = torch.where(end > start, (end - 1) // max(T, 1), home)
    return Places(
        (bounds - first).clamp(0, T),
        home == rank,
        end_home == rank,
        (start < first) & (end > first),
        (start < last) & (end > last),
        tuple(((start < j * T) & (end > (j + 1) * T)).any() for j in range(size)),
    )


def choose(condition: Tensor | bool, x: Tensor | float, y: Tensor | float) -> Tensor | float:
    """x where the condition holds, else y; a tensor of conditions [N] runs along dimension 0."""
    if isinstance(condition, bool):
        return x if condition else y
    rank = max(z.dim() for z in (x, y) if isinstance(z, Tensor))
    return torch.where(condition.view(-1, *[1] * (rank - 1)), x, y)


def row_of(x: Tensor, condition: Tensor | bool) -> Tensor:
    """The row [1, ...] of x [N, ...] whose condition holds, any if none does; batched: all rows."""
    if isinstance(condition, bool):
        return x
    return x.index_select(0, condition.long().argmax(0, keepdim=True))


def masked(x: Tensor, condition: Tensor | bool) -> Tensor:
    """x [N, ...], zero where the condition does not hold: a function of x on every rank."""
    if isinstance(condition, bool):
        return x if condition else x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)
    return x.masked_fill(~condition.view(-1, *[1] * (x.dim() - 1)), 0)

"""Summaries of shards between ranks: one all-gather, then a fold over the ranks on one side.

    E <- state + transfer E                 from the farthest rank to the neighbour

The fold is in float64: its products are neither cast by autocast nor rounded to TF32, and few.
"""

import torch
import torch.distributed._functional_collectives  # noqa: F401  (registers the ops below)
from torch import Tensor

from flaop.distributed.group import Group
from flaop.distributed.places import choose

# Called as ops: the names of the functions around them changed between versions of torch.
_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def all_gather(x: Tensor, group: Group) -> Tensor:
    """[size * n, ...]: the tensors [n, ...] of all ranks in order. Has no gradient."""
    return _wait(_all_gather(x.contiguous(), group.size, group.name))


def gather_summaries(state: Tensor, transfer: Tensor, group: Group) -> list[tuple[Tensor, Tensor]]:
    """(state, transfer) of every rank, by one collective.

    Args:
        state: [n, HV, K, V].
        transfer: [n, HV, K, K], or a diagonal [n, HV, K] or [n, HV, 1].

    Returns:
        The same, a diagonal as [n, HV, K, 1].
    """
    if transfer.dim() == 3:
        transfer = transfer.unsqueeze(-1).expand(-1, -1, state.shape[2], 1)
    widths = (state.shape[3], transfer.shape[3])
    gathered = all_gather(torch.cat((state, transfer), dim=-1), group)
    parts = gathered.unflatten(0, (group.size, state.shape[0])).unbind(0)
    return [part.split(widths, dim=-1) for part in parts]


def through(transfer: Tensor, x: Tensor) -> Tensor:
    """What the transfer of :func:`gather_summaries` or of a summary op makes of x [n, HV, K, V],
    float64."""
    transfer, x = transfer.double(), x.double()
    if transfer.dim() == 3:
        return transfer.unsqueeze(-1) * x
    return transfer * x if transfer.shape[-1] != x.shape[2] else transfer @ x


def fold(
    summaries: list[tuple[Tensor, Tensor]], passes: tuple[Tensor | bool, ...]
) -> Tensor | None:
    """What reaches the rank behind the last of the summaries, float64; None without any.

    Args:
        summaries: from the farthest rank to the neighbour.
        passes: for each of these ranks, whether what reaches it goes on behind it.
    """
    reached = None
    for (state, transfer), on in zip(summaries, passes, strict=True):
        state = state.double()
        if reached is not None:
            state = state + choose(on, through(transfer, reached), 0.0)
        reached = state
    return reached

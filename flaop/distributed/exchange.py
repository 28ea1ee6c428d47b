"""Tokens that one rank needs of others, with gradients: of the rank before, or of all."""

import torch
import torch.distributed._functional_collectives  # noqa: F401  (registers the ops below)
from torch import Tensor

from flaop.distributed.fold import all_gather
from flaop.distributed.group import Group

# Called as ops: the names of the functions around them changed between versions of torch.
_all_to_all = torch.ops._c10d_functional.all_to_all_single.default
_reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def from_rank_before(x: Tensor, group: Group) -> Tensor:
    """The x of the rank before, zeros on the first rank; every rank must call it, and its backward.

    Args:
        x: of one shape on every rank.
    """
    return _FromRankBefore.apply(x, *group)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """[B, size * T, ...]: the shards x [B, T, ...] of all ranks in order, on each of them."""
    return _GatherTokens.apply(x, *group)


class _FromRankBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *group):
        ctx.group = group
        return _shift(x, Group(*group), 1)

    @staticmethod
    def backward(ctx, dy):
        return _shift(dy, Group(*ctx.group), -1), None, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *group):
        ctx.group = group
        gathered = all_gather(x, Group(*group))
        return gathered.unflatten(0, (-1, x.shape[0])).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, dy):
        name, _, size = ctx.group
        parts = dy.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        return _wait(_reduce_scatter(parts, "sum", size, name)), None, None, None


def _shift(x: Tensor, group: Group, by: int) -> Tensor:
    """The x of rank - by; zeros where there is no such rank."""
    name, rank, size = group
    flat = x.contiguous().view(-1)
    to, source = rank + by, rank - by
    sent = [flat.shape[0] if i == to else 0 for i in range(size)]
    received = [flat.shape[0] if i == source else 0 for i in range(size)]
    y = _wait(_all_to_all(flat if 0 <= to < size else flat[:0], received, sent, name))
    return y.view(x.shape) if 0 <= source < size else torch.zeros_like(flat).view(x.shape)

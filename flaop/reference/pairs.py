"""Products of all pairs of tokens of a chunk under a decay per key channel, exact for any gate.
A decay per head has one channel, D = 1, for all of K.

    P_ij = sum_d x_id y_jd a_(j+1)d ... a_id      j < i,  a = e^g the decay of a token

The decay of a pair does not factor into one of i and one of j for the whole chunk: e^(G_i) e^(-G_j)
overflows. It does inside a block of 2s tokens, for i in its later and j in its earlier half: x_i is
decayed from the middle of the block through i, and y_j from after j to the middle. All factors are
<= 1, so nothing overflows, nothing is subtracted or divided, and a gate of -1000 costs no digits of
its neighbours. s = 1, 2, 4, ... covers each pair once with one batched product a level; to go up a
level, each half is multiplied by the decay over the other. The middle lies in the past of i: what
follows i cannot change its row.

The rows x come in n kinds (queries, keys) that share y.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Smaller decays and factors are zero. They are far below rounding, and the products of two of them
# are subnormal numbers, which slow matrix products down many times.
_LEAST = {torch.float32: 2.0**-60, torch.float64: 2.0**-500}


class Level(NamedTuple):
    rows: Tensor  # [M * blocks, size * n, K], x of the later halves, decayed from the middle
    columns: Tensor  # [M * blocks, size, K], y of the earlier halves, decayed to the middle
    earlier: Tensor  # [M * blocks, 1, D], decay over the earlier half
    later: Tensor  # [M * blocks, 1, D], decay over the later half


def token_decay(g: Tensor) -> Tensor:
    """e^g of natural log gates, a new tensor."""
    least = _LEAST[g.dtype]
    # The clamp spares exp its own subnormal results.
    return torch.threshold_(g.clamp_min(2 * math.log(least)).exp_(), least, 0)


def total_decay(decay: Tensor) -> Tensor:
    """``[M, width, D]`` of each token to ``[M, 1, D]`` over the whole chunk."""
    while decay.shape[1] > 1:
        decay = flush(decay[:, ::2] * decay[:, 1::2])
    return decay


def flush(x: Tensor) -> Tensor:
    """Zeroes what is below any rounding, in place."""
    return torch.hardshrink(x, _LEAST[x.dtype], out=x)


def levels(rows: Tensor, columns: Tensor, decay: Tensor) -> Iterator[Level]:
    """Decays rows and columns level by level, in place: those of a level hold until the next.

    Args:
        rows: ``[M, width, n, K]``, starts as x decayed by its own token and ends as x decayed from
            the start of the chunk.
        columns: ``[M, width, K]``, starts as y and ends as y decayed to the end of the chunk.
        decay: ``[M, width, D]`` of each token, D = K or 1.
    """
    K = columns.shape[-1]
    while decay.shape[1] > 1:
        M, halves, D = decay.shape
        blocks = M * halves // 2
        earlier, later = decay.view(blocks, 2, 1, D).unbind(1)
        later_rows = rows.view(blocks, 2, -1, K)[:, 1]
        earlier_columns = columns.view(blocks, 2, -1, K)[:, 0]
        yield Level(later_rows, earlier_columns, earlier, later)
        flush(later_rows.mul_(earlier))
        flush(earlier_columns.mul_(later))
        decay = flush(earlier * later).view(M, -1, D)


def decay_through(rows: Tensor, columns: Tensor, decay: Tensor) -> None:
    """What :func:`levels` ends with."""
    for _ in levels(rows, columns, decay):
        pass


def kept_levels(rows: Tensor, columns: Tensor, decay: Tensor) -> list[Level]:
    """Copies of the :func:`levels`, for a backward."""
    return [
        level._replace(rows=level.rows.clone(), columns=level.columns.clone())
        for level in levels(rows, columns, decay)
    ]


def pair_products(rows: Tensor, columns: Tensor, decay: Tensor) -> Tensor:
    """``P [n, M, width, width]``, strictly lower triangular; arguments as in :func:`levels`."""
    return level_products(levels(rows, columns, decay), rows)


def level_products(of_levels: Iterable[Level], rows: Tensor) -> Tensor:
    """:func:`pair_products` of levels at hand; ``rows [M, width, n, K]`` gives the shape."""
    M, width, n, _ = rows.shape
    products = rows.new_zeros(n, M, width, width)
    for level in of_levels:
        size = level.columns.shape[1]
        block = torch.bmm(level.rows, level.columns.mT).view(M, -1, size, n, size)
        _lower_blocks(products, size).copy_(block.permute(3, 0, 1, 2, 4))
    return flush(products)


def pair_products_backward(
    d_products: Tensor,
    d_rows: Tensor,
    d_columns: Tensor,
    d_decay: Tensor,
    kept: list[Level],
) -> Tensor:
    """Backward of :func:`pair_products`: gradients of its three arguments, of the decay as log.

    The gradient of the gates goes down the levels with the decays it belongs to, so a pair adds
    only to gates between its two tokens. The usual closed form (q dq - k dk and a suffix sum) adds
    each pair to the gates before it too, and relies on the two terms to cancel.

    Args:
        d_products: gradient of ``P``; only the strictly lower triangle is read.
        d_rows, d_columns: gradients of what :func:`levels` ends with; become those of what it
            starts with.
        d_decay: gradient ``[M, 1, D]`` of the log of the decay over the whole chunk.
        kept: copies of the levels.

    Returns:
        The gradient ``[M, width, D]`` of the log of each token's decay.
    """
    M, _, n, K = d_rows.shape
    D = d_decay.shape[-1]
    for level in reversed(kept):
        blocks, size, _ = level.columns.shape
        later_rows = d_rows.view(blocks, 2, -1, K)[:, 1]
        earlier_columns = d_columns.view(blocks, 2, -1, K)[:, 0]
        by_rows = along_gate(_dot(later_rows, level.rows), D)
        by_columns = along_gate(_dot(earlier_columns, level.columns), D)
        d_earlier = d_decay.view(blocks, 1, D) + level.earlier * by_rows
        d_later = d_decay.view(blocks, 1, D) + level.later * by_columns
        d_decay = torch.stack((d_earlier, d_later), dim=1).view(M, -1, D)

        block = _lower_blocks(d_products, size).permute(1, 2, 3, 0, 4)
        block = block.reshape(blocks, size * n, size)
        later_rows.mul_(level.earlier).baddbmm_(block, level.columns)
        earlier_columns.mul_(level.later).baddbmm_(block.mT, level.rows)
    return d_decay


def along_gate(grad: Tensor, D: int) -> Tensor:
    """The gradient of a gate from that of each of its channels: summed for a gate per head."""
    return grad if D == grad.shape[-1] else grad.sum(-1, keepdim=True)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular ``L [M, width, width]``."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype).expand_as(L)
    A = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    return flush(A.contiguous())


def _lower_blocks(x: Tensor, size: int) -> Tensor:
    """The lower left quarter of each block of 2 size rows on the diagonal, a view.

    From ``[n, M, width, width]`` to ``[n, M, blocks, size, size]``.
    """
    blocks = x.unflatten(3, (-1, 2, size)).unflatten(2, (-1, 2, size))[:, :, :, 1, :, :, 0]
    return blocks.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(1, keepdim=True)

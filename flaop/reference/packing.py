"""Tokens of all sequences laid out as rows, so that all but the recurrence is batched products."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slab(NamedTuple):
    """Consecutive rows that are worked on together."""

    tokens: Tensor  # [rows * width], the token of each place; any past the end of a sequence
    span: slice | None  # the tokens, when they are consecutive and fill all places
    taken: Tensor  # the places that hold a token
    empty: Tensor  # the places past the end of a sequence
    steps: list[tuple[slice, slice]]  # in order of time: a part of M, and its part of the states

    @property
    def states(self) -> slice:
        """The part of the states that the slab reads and writes."""
        parts = [states for _, states in self.steps]
        return slice(min(p.start for p in parts), max(p.stop for p in parts))


class Pieces(NamedTuple):
    """What the rows of a packing are pieces of."""

    lengths: Tensor  # [N] of the sequences
    position: Tensor  # [rows], of the row in its sequence
    sequence: Tensor  # [rows]


class Packing:
    """Rows of ``width`` tokens, one for each piece of a sequence, zero past the sequence's end.

    Rows are ordered by (position in the sequence, sequence), longest sequence first, so the states
    of the sequences alive at a position are the first ones. A packed tensor is ``[M, width, D]``
    with M = rows * heads. Every member of a batch counts as a sequence here.

    Args:
        cu_seqlens: ``[N + 1]`` or ``None``; where it decreases or leaves the tokens it is cut.
        width: tokens of a row; shortened to the power of two that holds the longest sequence.
    """

    def __init__(self, cu_seqlens: Tensor | None, batch: int, length: int, heads: int, width: int):
        self.tokens, self.heads = (batch, length), heads
        if cu_seqlens is None:
            bounds = torch.arange(batch + 1) * length
        else:
            bounds = cu_seqlens.long().clamp(0, length).cummax(0).values
        lengths = bounds.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        self.width = min(width, 1 << max(longest - 1, 0).bit_length())
        self.order = lengths.argsort(descending=True, stable=True)

        pieces = (lengths + self.width - 1) // self.width
        position = torch.arange(-(-longest // self.width))
        alive = len(lengths) - torch.searchsorted(pieces.sort().values, position, right=True)
        self._alive = alive.tolist()
        position = position.repeat_interleave(alive)
        self.rows = len(position)
        sequence = self.order[torch.arange(self.rows) - (alive.cumsum(0) - alive)[position]]
        self.pieces = Pieces(lengths, position, sequence)
        self._start = bounds[sequence] + position * self.width
        self._stop = bounds[sequence + 1]

    def whole(self) -> Slab:
        """All rows as one slab."""
        steps, first = [], 0
        for count in self._alive:
            steps.append((self._along_m(first, count), self._along_m(0, count)))
            first += count
        return self._slab(0, self.rows, steps)

    def slabs(self, most: int) -> list[Slab]:
        """All rows as slabs of at most ``most`` rows, in order of time."""
        slabs, steps, first, last = [], [], 0, 0
        for alive in self._alive:
            for start in range(0, alive, most):
                count = min(most, alive - start)
                if last + count - first > most:
                    slabs.append(self._slab(first, last, steps))
                    steps, first = [], last
                steps.append((self._along_m(last - first, count), self._along_m(start, count)))
                last += count
        if last > first:
            slabs.append(self._slab(first, last, steps))
        return slabs

    def gather(self, x: Tensor, slab: Slab) -> Tensor:
        """``[B, T, heads or fewer, D]`` to ``[M, width, D]``; grouped heads are repeated."""
        x = x.flatten(0, 1)
        if slab.span is not None:
            x = x[slab.span]
        else:
            x = x.index_select(0, slab.tokens).index_fill_(0, slab.empty, 0)
        x = x.unflatten(0, (-1, self.width)).transpose(1, 2)
        groups = self.heads // x.shape[1]
        if groups > 1:
            x = x.repeat_interleave(groups, dim=1)
        return x.contiguous().flatten(0, 1)

    def scatter(self, x: Tensor, slab: Slab, out: Tensor) -> None:
        """``[M, width, D]`` into ``[B, T, heads, D]``."""
        x = x.view(-1, self.heads, self.width, x.shape[-1]).transpose(1, 2)
        out = out.view(-1, *out.shape[2:])
        if slab.span is not None:
            out[slab.span].unflatten(0, (-1, self.width)).copy_(x)
        else:
            x = x.flatten(0, 1).index_select(0, slab.taken).to(out.dtype)
            out.index_copy_(0, slab.tokens[slab.taken], x)

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """``[B, T, heads, size]`` to scatter into: tokens of no sequence stay zero."""
        return torch.zeros(*self.tokens, self.heads, size, dtype=dtype)

    def gather_state(self, state: Tensor) -> Tensor:
        """``[N, heads, K, V]`` to ``[N * heads, K, V]`` in the order of the rows, a copy."""
        return state[self.order].flatten(0, 1).contiguous()

    def scatter_state(self, state: Tensor) -> Tensor:
        """``[N * heads, K, V]`` in the order of the rows to ``[N, heads, K, V]``."""
        state = state.unflatten(0, (-1, self.heads))
        return torch.empty_like(state).index_copy_(0, self.order, state)

    def _along_m(self, first: int, count: int) -> slice:
        return slice(first * self.heads, (first + count) * self.heads)

    def _slab(self, first: int, last: int, steps: list[tuple[slice, slice]]) -> Slab:
        tokens = self._start[first:last].unsqueeze(1) + torch.arange(self.width)
        valid = (tokens < self._stop[first:last].unsqueeze(1)).flatten()
        tokens = tokens.flatten()
        taken, empty = valid.nonzero().squeeze(-1), (~valid).nonzero().squeeze(-1)
        span = None
        if len(empty) == 0 and bool((tokens.diff() == 1).all()):
            start = int(tokens[0]) if len(tokens) else 0
            span = slice(start, start + len(tokens))
        return Slab(tokens.where(valid, 0), span, taken, empty, steps)

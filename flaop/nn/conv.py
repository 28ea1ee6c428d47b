"""Depthwise causal convolution over a short window, with carried state and packed sequences."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.distributed.exchange import from_rank_before
from flaop.distributed.group import Group
from flaop.distributed.places import Places, find_places, masked, row_of

_ACTIVATIONS = {None: lambda x: x, "silu": F.silu}


class ShortConvolution(nn.Module):
    """Depthwise causal convolution: y[t] = act(sum_j weight[:, j] * x[t - (W - 1) + j] + bias).

    It is written as W shifted products, which the compiler fuses with the projection's epilogue
    and the activation. Sums are taken in float32 (float64 for float64 inputs).

    Args:
        hidden_size: number of channels D.
        kernel_size: window W, in tokens.
        bias: whether to add a bias per channel.
        activation: "silu" or None.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        bias: bool = False,
        activation: str | None = "silu",
    ):
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"kernel_size must be at least 1, got {kernel_size}")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.kernel_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, activation={self.activation!r}"

    def forward(
        self,
        x: Tensor,  # [B, T, D]
        state: Tensor | None = None,  # [N, W - 1, D]
        cu_seqlens: Tensor | None = None,  # [N + 1]
        output_state: bool = False,
        group: Group | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolves a piece of a sequence.

        Args:
            x: [B, T, D]; B = 1 with cu_seqlens.
            state: [N, W - 1, D], the last W - 1 inputs before the piece, oldest first; None is
                zeros. N is B, or the number of packed sequences.
            cu_seqlens: [N + 1] int32 or int64 on x's device, bounds of packed sequences.
            output_state: whether to return the state after the piece.
            group: the ranks that hold shards of the sequences, x being this rank's, of at least
                W - 1 tokens; cu_seqlens is global then. The last W - 1 inputs go to the next rank.
                A row of the states is there where its sequence starts and ends, and zero elsewhere.

        Returns:
            y [B, T, D] in x's dtype (zeros outside the packed sequences), and the state
            [N, W - 1, D] in x's dtype or None.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x must be [B, T, {self.hidden_size}], got {tuple(x.shape)}")
        if cu_seqlens is not None and (cu_seqlens.dim() != 1 or x.shape[0] != 1):
            raise ValueError(
                "cu_seqlens must be [N + 1] and needs x with B = 1, got cu_seqlens "
                f"{tuple(cu_seqlens.shape)} and x {tuple(x.shape)}"
            )
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is not None and state.shape != (N, self.kernel_size - 1, self.hidden_size):
            raise ValueError(
                f"state must be [{N}, {self.kernel_size - 1}, {self.hidden_size}], "
                f"got {tuple(state.shape)}"
            )
        if group is not None and group.size > 1:
            return self._sharded(x, state, cu_seqlens, output_state, group)
        if cu_seqlens is None:
            return self._batched(x, state, output_state)
        return self._packed(x, state, cu_seqlens, output_state)

    def _sharded(self, x, state, cu_seqlens, output_state, group):
        carried = self.kernel_size - 1
        if x.shape[1] < carried:
            raise ValueError(
                f"a shard must hold at least kernel_size - 1 = {carried} tokens, got {x.shape[1]}"
            )
        places = find_places(cu_seqlens, x.shape[1], group)
        entering = state
        if carried:
            # zeros where nothing enters, and used even there: every rank runs its backward
            entering = from_rank_before(self._leaving(x, state, places), group)
            if places.cu_seqlens is not None:
                entering = masked(entering.expand(len(places.enters), -1, -1), places.enters)
            if state is not None:
                entering = entering + masked(state.to(x.dtype), places.starts)
        y, final = self(x, entering, places.cu_seqlens, output_state)
        if output_state:
            final = masked(final, places.ends)
        return y, final

    def _leaving(self, x: Tensor, state: Tensor | None, places: Places) -> Tensor:
        """The last W - 1 inputs of what goes on at the next rank, [B, W - 1, D]; packed, B = 1."""
        T, carried = x.shape[1], self.kernel_size - 1
        last = x[:, T - carried :]
        if places.cu_seqlens is None:
            return last
        # those of its own tokens, before them of the state that it started from
        start = row_of(places.cu_seqlens[:-1], places.leaves)
        offset = torch.arange(T - carried, T, device=x.device) - start
        before = 0.0
        if state is not None:
            before = row_of(state.to(x.dtype), places.leaves)[0]
            before = before.index_select(0, (offset + carried).clamp(0, carried - 1))[None]
        return torch.where((offset >= 0)[:, None], last, before)

    def _combine(self, taps: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Weighted sum of the W taps (oldest first), bias and activation, in float32."""
        wide = torch.promote_types(dtype, torch.float32)
        y = sum(tap.to(wide) * self.weight[:, 0, j].to(wide) for j, tap in enumerate(taps))
        if self.bias is not None:
            y = y + self.bias.to(wide)
        return _ACTIVATIONS[self.activation](y)

    def _batched(self, x, state, output_state):
        T, W = x.shape[1], self.kernel_size
        if state is None:
            padded = F.pad(x, (0, 0, W - 1, 0))
        else:
            padded = torch.cat([state.to(x.dtype), x], dim=1)
        y = self._combine([padded[:, j : j + T] for j in range(W)], x.dtype).to(x.dtype)
        # a clone: a view would keep the whole padded piece alive
        return y, padded[:, T:].clone() if output_state else None

    def _packed(self, x, state, cu_seqlens, output_state):
        T, W, N = x.shape[1], self.kernel_size, cu_seqlens.shape[0] - 1
        bounds = cu_seqlens.long().clamp(0, T).cummax(0).values
        position = torch.arange(T, device=x.device)
        sequence = torch.searchsorted(bounds[1:].contiguous(), position, right=True)
        offset = position - bounds[sequence]  # of each token in its sequence
        row = sequence.clamp(max=N - 1)
        padded = F.pad(x[0], (0, 0, W - 1, 0))
        taps = []
        for j in range(W):
            shift = W - 1 - j
            tap = padded[j : j + T]
            if shift:
                outside = 0.0
                if state is not None:
                    outside = state.to(x.dtype)[row, (j + offset).clamp(0, W - 2)]
                tap = torch.where((offset >= shift)[:, None], tap, outside)
            taps.append(tap)
        inside = (position >= bounds[0]) & (position < bounds[-1])
        y = torch.where(inside[:, None], self._combine(taps, x.dtype), 0.0).to(x.dtype)[None]
        if not output_state:
            return y, None
        # row i of the new state is entry `length + i` of (old state, then the sequence)
        i = torch.arange(W - 1, device=x.device)
        entry = (bounds[1:] - bounds[:-1])[:, None] + i
        final = padded[bounds[1:, None] + i]
        carried = 0.0
        if state is not None:
            rows = torch.arange(N, device=x.device)[:, None]
            carried = state.to(x.dtype)[rows, entry.clamp(max=W - 2)]
        return y, torch.where((entry >= W - 1)[..., None], final, carried)

"""Full causal attention without positional encoding, with a static key-value cache."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flaop.distributed import Group, resolve
from flaop.distributed.exchange import gather_tokens
from flaop.nn.slots import SlotCache, Slots


class AttentionState(NamedTuple):
    """Keys and values of the tokens seen so far."""

    k: Tensor  # [B, S, H, D]
    v: Tensor  # [B, S, H, D]


class AttentionCache(SlotCache):
    """Keys and values of max_length tokens per slot, and how many tokens each slot has seen."""

    def __init__(self, num_slots, num_heads, max_length, head_dim, dtype=None, device=None):
        super().__init__(num_slots)
        shape = (num_slots + 1, max_length, num_heads, head_dim)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("v", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("length", torch.zeros(shape[0], dtype=torch.long, device=device))


class _Places(NamedTuple):
    """Where the tokens of a piece go in a cache."""

    sequence: Tensor  # [B, T], or [T] of packed sequences
    row: Tensor  # [B, T], or [1, T]: of the cache; the spare one outside of all sequences
    position: Tensor  # [B, T], or [1, T]: in the sequence
    count: Tensor | int  # new tokens of each sequence


class Attention(nn.Module):
    """Multi-head causal attention by scaled_dot_product_attention, no positional encoding.

    In a hybrid the recurrent layers carry the order of the tokens (arXiv:2510.26692).

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of heads H.
        head_dim: size D of a head.
    """

    context_parallel: Group | None = None

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        width = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "Attention":
        return cls(config.hidden_size, config.num_heads, config.head_dim)

    def set_context_parallel(self, group) -> None:
        """From now on x is this rank's shard of sequences, and cu_seqlens global.

        Keys and values of all ranks are gathered, and the queries of this one attend to them under
        a mask [T, R T]; every rank takes part in every call and every backward. No states.

        Args:
            group: a ProcessGroup, a DeviceMesh of one dimension, (mesh, dimension), or None: no
                shards.
        """
        self.context_parallel = None if group is None else resolve(group)

    def make_cache(
        self, num_slots: int, max_length: int, state_dtype: torch.dtype | None = None
    ) -> AttentionCache:
        """A cache of num_slots sequences; keys and values have the parameters' dtype."""
        weight = self.k_proj.weight
        return AttentionCache(
            num_slots, self.num_heads, max_length, self.head_dim, weight.dtype, weight.device
        )

    def forward(
        self,
        x: Tensor,  # [B, T, hidden_size]
        state: AttentionState | None = None,
        cu_seqlens: Tensor | None = None,  # [N + 1]
        output_state: bool = False,
    ) -> tuple[Tensor, AttentionState | None]:
        """Attends over the carried tokens and the piece.

        Packed sequences (cu_seqlens, B = 1) cost a [T, T] mask and cannot carry a state.
        """
        if cu_seqlens is not None and (state is not None or output_state):
            raise ValueError("attention cannot carry a state through packed sequences")
        q, k, v = self._project(x)
        T = x.shape[1]
        if self.context_parallel is not None:
            if state is not None or output_state:
                raise ValueError("attention cannot carry a state between shards")
            y = _attend_to_all(q, k, v, cu_seqlens, self.context_parallel)
            return self.o_proj(y.flatten(2)), None
        if cu_seqlens is not None:
            y = _attend(q, k, v, attn_mask=_packed_mask(cu_seqlens, T))
        elif state is None:
            y = _attend(q, k, v, is_causal=True)
        else:
            k = torch.cat([state.k.to(k.dtype), k], dim=1)
            v = torch.cat([state.v.to(v.dtype), v], dim=1)
            seen = torch.arange(k.shape[1], device=x.device)
            y = _attend(q, k, v, attn_mask=seen <= seen[k.shape[1] - T :, None])
        return self.o_proj(y.flatten(2)), AttentionState(k, v) if output_state else None

    @torch.no_grad()
    def extend(
        self,
        x: Tensor,  # [B, T, hidden_size]
        cache: AttentionCache,
        state_indices: Tensor | Slots | None = None,  # [N]
        cu_seqlens: Tensor | None = None,  # [N + 1]
    ) -> Tensor:
        """Appends x to the sequences in the cache's slots and attends; reads nothing on the host.

        Arguments as of RecurrentLayer.extend. A token beyond max_length is not stored, and its
        output is NaN. Each sequence's slot is gathered; packed sequences also cost a mask
        [T, N * max_length].
        """
        if self.context_parallel is not None:
            raise ValueError("a layer that holds shards has no cache: set_context_parallel(None)")
        slots = cache.select(state_indices, x, cu_seqlens)
        q, k, v = self._project(x)
        places = _find_places(cache, slots, x.shape[1], cu_seqlens)
        spare, length = cache.num_slots, cache.k.shape[1]
        beyond = places.position >= length
        row = places.row.masked_fill(beyond, spare)
        position = places.position.masked_fill(beyond, 0)
        cache.k[row, position] = k.to(cache.k.dtype)
        cache.v[row, position] = v.to(cache.v.dtype)
        cache.length[slots.rows] = cache.length[slots.rows] + places.count

        k, v = (t[slots.rows].to(q.dtype) for t in (cache.k, cache.v))  # [N, max_length, H, D]
        mask = torch.arange(length, device=x.device) <= position[..., None]
        if cu_seqlens is None:
            mask = mask[:, None]
        else:
            k, v = k.flatten(0, 1)[None], v.flatten(0, 1)[None]
            N = slots.rows.shape[0]
            same = places.sequence[:, None] == torch.arange(N, device=x.device)
            mask = (same[:, :, None] & mask[0][:, None]).flatten(1)
        y = self.o_proj(_attend(q, k, v, attn_mask=mask).flatten(2))
        lost = beyond & (places.row != spare)
        return y.masked_fill(lost[..., None], torch.nan)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, T, H, D]."""
        heads = (self.num_heads, self.head_dim)
        return tuple(p(x).unflatten(-1, heads) for p in (self.q_proj, self.k_proj, self.v_proj))


def _attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """scaled_dot_product_attention of [B, T, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, group: Group
) -> Tensor:
    """The queries of this rank's shard on the keys and values of all ranks, gathered."""
    T, (_, rank, size) = q.shape[1], group
    k, v = (gather_tokens(x, group) for x in (k, v))
    if cu_seqlens is None:
        seen = torch.arange(size * T, device=q.device)
        mask = seen <= seen[rank * T : (rank + 1) * T, None]
    else:
        mask = _packed_mask(cu_seqlens, size * T)[rank * T : (rank + 1) * T]
    return _attend(q, k, v, attn_mask=mask)


def _find_places(cache: AttentionCache, slots: Slots, T: int, cu_seqlens: Tensor | None) -> _Places:
    start = cache.length[slots.rows]
    token = torch.arange(T, device=start.device)
    if cu_seqlens is None:
        row = slots.rows[:, None].expand(-1, T)
        return _Places(row, row, start[:, None] + token, T)
    bounds = cu_seqlens.long().clamp(0, T).cummax(0).values
    sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    outside = (token < bounds[0]) | (token >= bounds[-1])
    sequence = sequence.clamp(max=bounds.shape[0] - 2)
    row = slots.rows[sequence].masked_fill(outside, cache.num_slots)
    position = (start[sequence] + token - bounds[sequence]).masked_fill(outside, 0)
    return _Places(sequence, row[None], position[None], bounds[1:] - bounds[:-1])


def _packed_mask(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T, T]: the causal part of each sequence; a token outside of all sees only itself."""
    bounds = cu_seqlens.long().clamp(0, T).cummax(0).values
    position = torch.arange(T, device=cu_seqlens.device)
    sequence = torch.searchsorted(bounds, position, right=True)
    same = sequence[:, None] == sequence
    outside = (sequence == 0) | (sequence == bounds.shape[0])
    causal = same & (position <= position[:, None]) & ~outside[:, None]
    return causal | torch.eye(T, dtype=torch.bool, device=cu_seqlens.device)

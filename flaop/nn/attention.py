"""Full causal attention without positional encoding, with a static key-value cache."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AttentionState(NamedTuple):
    """Keys and values of the tokens seen so far."""

    k: Tensor  # [B, S, H, D]
    v: Tensor  # [B, S, H, D]


class AttentionCache(nn.Module):
    """Keys and values in buffers of a fixed length; the fill position lives on the device."""

    def __init__(self, batch_size, num_heads, max_length, head_dim, dtype=None, device=None):
        super().__init__()
        shape = (batch_size, num_heads, max_length, head_dim)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("v", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long, device=device))

    @torch.no_grad()
    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


class Attention(nn.Module):
    """Multi-head causal attention by scaled_dot_product_attention, no positional encoding.

    In a hybrid the recurrent layers carry the order of the tokens (arXiv:2510.26692).

    Args:
        hidden_size: width of the residual stream.
        num_heads: number of heads H.
        head_dim: size D of a head.
    """

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

    def make_cache(self, batch_size: int, max_length: int) -> AttentionCache:
        weight = self.k_proj.weight
        return AttentionCache(
            batch_size, self.num_heads, max_length, self.head_dim, weight.dtype, weight.device
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
        if cu_seqlens is not None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=_packed_mask(cu_seqlens, T))
        elif state is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k = torch.cat([state.k.to(k.dtype).transpose(1, 2), k], dim=2)
            v = torch.cat([state.v.to(v.dtype).transpose(1, 2), v], dim=2)
            seen = torch.arange(k.shape[2], device=x.device)
            mask = seen <= seen[k.shape[2] - T :, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        state = AttentionState(k.transpose(1, 2), v.transpose(1, 2)) if output_state else None
        return self.o_proj(y.transpose(1, 2).flatten(2)), state

    @torch.no_grad()
    def extend(self, x: Tensor, cache: AttentionCache) -> Tensor:
        """Appends x [B, T, hidden_size] to the cache and attends; capturable in a CUDA graph.

        The caller keeps the number of tokens within the cache's length.
        """
        q, k, v = self._project(x)
        position = cache.position + torch.arange(x.shape[1], device=x.device)
        cache.k.index_copy_(2, position, k.to(cache.k.dtype))
        cache.v.index_copy_(2, position, v.to(cache.v.dtype))
        cache.position.add_(x.shape[1])
        mask = torch.arange(cache.k.shape[2], device=x.device) <= position[:, None]
        k, v = cache.k.to(q.dtype), cache.v.to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, T, D]."""
        heads = (self.num_heads, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(p(x).unflatten(-1, heads).transpose(1, 2) for p in projections)


def _packed_mask(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T, T]: the causal part of each sequence; a token outside of all sees only itself."""
    bounds = cu_seqlens.long().clamp(0, T).cummax(0).values
    position = torch.arange(T, device=cu_seqlens.device)
    sequence = torch.searchsorted(bounds, position, right=True)
    same = sequence[:, None] == sequence
    outside = (sequence == 0) | (sequence == bounds.shape[0])
    causal = same & (position <= position[:, None]) & ~outside[:, None]
    return causal | torch.eye(T, dtype=torch.bool, device=cu_seqlens.device)

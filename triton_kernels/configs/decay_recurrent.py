"""Tiles of the token-serial kernels of the decay families. K is split over programs if it is large.
"""

from . import recurrent


def fused_recurrent_fwd(arch, K, V, dtype, state_v_first):
    """Forward: dict(BK, BV, num_warps, num_stages)."""
    return recurrent.fused_recurrent_fwd(arch, K if K <= 256 else 128, V, dtype, state_v_first)


def fused_recurrent_bwd(arch, K, V, dtype, state_v_first):
    """Both token-serial backward kernels. Every tile costs fp32 rows of K or V a token in memory.
    """
    return recurrent.fused_recurrent_bwd(arch, min(K, 128), V, dtype, state_v_first)


def fused_recurrent_bwd_rows(arch, K, V, dtype):
    """The sums over tiles, by blocks of tokens: dict(BT, BD, num_warps, num_stages)."""
    return {"BT": 16, "BD": 128, "num_warps": 4, "num_stages": 1}


def fused_recurrent_bwd_gate(arch, K, V, dtype):
    """The suffix sums over chunks of 64 tokens: dict(BD, num_warps, num_stages)."""
    return {"BD": 32, "num_warps": 4, "num_stages": 1}

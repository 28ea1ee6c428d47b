"""Configurations of the kernels within a chunk with channel gates (gla)."""

from .delta import tile


def intra(arch, K, V, dtype):
    """chunk_gla_fwd_kernel_intra: K walked in slabs; a thread holds 32 values of q, k and g each.

    `split`: pairs and decayed operands in two launches, since a loop that makes both spills.
    """
    BK = tile(K, 64 if dtype == "fp32" else 128)
    return {"BK": BK, "num_warps": 8 if BK >= 64 else 4, "num_stages": 1, "split": K > BK}


def bwd_pairs(arch, K, V, dtype):
    """chunk_gla_bwd_kernel_pairs: V walked in slabs."""
    return {"BV": tile(V, 64), "num_warps": 4, "num_stages": 1 if dtype == "fp32" else 2}


def bwd_intra(arch, K, V, dtype):
    """chunk_gla_bwd_kernel_intra: a slab of K a program, V walked in slabs.

    At 64 channels, or with 4 warps, hundreds of registers spill.
    """
    return {"BK": tile(K, 32), "BV": tile(V, 64), "num_warps": 8, "num_stages": 1}

"""Configurations of the chunk kernels with a scalar gate or none, as configs/delta.py has them."""

from . import delta
from .delta import tile

# lines of numbers per token that delta/scalar.py lays ready, and those of their gradients
PARTS = 9
D_PARTS = 3


def pairs(arch, K, V, dtype):
    """chunk_gdn_fwd_kernel_pairs: K walked in slabs."""
    return {"BK": tile(K, 32 if dtype == "fp32" else 64), "num_warps": 4, "num_stages": 1}


def scan(arch, K, V, dtype, narrow=False):
    """chunk_gdn_fwd_kernel_scan: all of K in registers, V split over programs.

    `narrow`: where sequences and heads leave multiprocessors idle, more programs finish sooner.
    """
    config = delta.scan(arch, K, V, dtype)
    return config | {"BV": min(config["BV"], 32)} if narrow else config


def scan_backward(arch, K, V, dtype, narrow=False):
    """chunk_gdn_bwd_kernel_scan."""
    return scan(arch, K, V, dtype, narrow)


def bwd_values(arch, K, V, dtype):
    """chunk_gdn_bwd_kernel_values: V walked in slabs."""
    return {"BV": tile(V, 32 if dtype == "fp32" else 64), "num_warps": 4, "num_stages": 1}


def bwd_intra(arch, K, V, dtype):
    """chunk_gdn_bwd_kernel_intra: a slab of K a program, V walked in slabs."""
    if dtype == "fp32":
        return {"BK": tile(K, 32), "BV": tile(V, 32), "num_warps": 4, "num_stages": 1}
    stages = 2 if arch >= 90 and dtype == "bf16" else 1
    return {"BK": tile(K, 64), "BV": tile(V, 64), "num_warps": 4, "num_stages": stages}


def w_u(arch, K, V, dtype):
    """recompute_w_u_kernel: a slab of K or V a program."""
    return {"BK": tile(K, 64), "BV": tile(V, 64), "num_warps": 4, "num_stages": 1}


def states(arch, K, V, dtype):
    """chunk_delta_fwd_kernel_h: all of K in registers, V split over programs."""
    BK = tile(K, 256)
    BV = tile(V, 32 if dtype == "fp32" or BK == 256 else 64)
    return {"BK": BK, "BV": BV, "num_warps": 8 if BK >= 128 else 4, "num_stages": 1}

"""Configurations of the chunk kernels of the decay families, as configs/delta.py has them."""

from .delta import tile


def states(arch, K, V, dtype):
    """chunk_fwd_kernel_h and chunk_bwd_kernel_dh: a tile of the state a program."""
    config = {"BK": tile(K, 64), "BV": tile(V, 64), "num_warps": 4}
    return config | {"num_stages": 1 if dtype == "fp32" else 3}


def scan(arch, K, V, dtype):
    """chunk_fwd_kernel_scan: all of K in registers, V split over programs; None where they are few.

    Then states and outputs are kernels of their own. Two programs of bf16 share a multiprocessor: a
    third pipeline stage would take their shared memory.
    """
    if K > {"bf16": 128, "fp16": 64, "fp32": 0}[dtype]:
        return None
    warps = 4 if arch >= 90 else 8
    return {"BK": tile(K, 128), "BV": tile(V, 64), "num_warps": warps, "num_stages": 2}


def outputs(arch, K, V, dtype):
    """chunk_fwd_kernel_o and chunk_bwd_kernel_v: K walked in slabs, a tile of V a program."""
    config = {"BK": tile(K, 64), "BV": tile(V, 64), "num_warps": 4}
    return config | {"num_stages": 1 if dtype == "fp32" else 2}


def bwd_qk(arch, K, V, dtype):
    """chunk_bwd_kernel_qk: a slab of K a program, V walked in slabs.

    One slab where it fits, as that program makes dv, too.
    """
    if dtype == "fp32":
        return {"BK": tile(K, 32), "BV": tile(V, 32), "num_warps": 8, "num_stages": 1}
    BK = tile(K, 128)
    return {"BK": BK, "BV": tile(V, 64), "num_warps": 8 if BK > 64 else 4, "num_stages": 2}

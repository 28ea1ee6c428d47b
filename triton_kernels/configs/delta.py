"""Configurations of the chunk kernels of the delta families.

Every function maps (arch, K, V, dtype) to tile sizes, warps and pipeline stages; dtype is "bf16",
"fp16" or "fp32". Tiles are powers of two of at least 16, so that any head size fits with masks.
"""


def tile(size, largest):
    """The power of two that covers `size`, between 16 and `largest`."""
    covering = 1 << max(size - 1, 1).bit_length()
    return min(max(covering, 16), largest)


def pairs(arch, K, V, dtype):
    """chunk_kda_fwd_kernel_pairs: K walked in slabs."""
    if 100 <= arch < 120:
        # products of wider slabs need more than the 512 columns of tensor memory; with 16 warps the
        # compiler leaves it alone
        config = {"BK": 16, "num_warps": 4, "num_stages": 1}
        return config | {"num_warps": 16, "maxnreg": 128} if dtype == "fp32" else config
    wide = dtype == "bf16" and arch >= 90
    return {"BK": tile(K, 64 if wide else 32), "num_warps": 4, "num_stages": 1}


def wy(arch, K, V, dtype):
    """chunk_kda_fwd_kernel_wy: a slab of K or V a program."""
    config = {"BK": tile(K, 64), "BV": tile(V, 64), "num_warps": 4, "num_stages": 1}
    if dtype == "fp32":
        return config
    if arch < 90:
        return config | {"num_warps": 8}
    # three programs on a multiprocessor instead of two
    return config | {"maxnreg": 168}


def scan(arch, K, V, dtype):
    """chunk_delta_fwd_kernel_scan: all of K in registers, V split over programs."""
    BK = tile(K, 256)
    if dtype == "fp32":
        # operands of twice the size, split in three products: narrow tiles, nothing prefetched
        # on sm_100 wider tiles of 256 channels compile to a trap
        if arch < 90 or (arch >= 100 and BK == 256):
            # without the bound ptxas settles for 32 registers and spills thousands
            config = {"BK": BK, "BV": tile(V, 16), "num_warps": 8, "num_stages": 1}
            return config | {"maxnreg": 255}
        return {"BK": BK, "BV": tile(V, 32), "num_warps": 4 if BK <= 128 else 8, "num_stages": 1}
    # accumulators and operands share the registers, or fp16 states are fp32 operands
    narrow = arch < 90 or (BK == 256 and dtype == "fp16")
    BV = tile(V, 32 if narrow else 64)
    if BK <= 128:
        stages = 3 if arch >= 90 and dtype == "bf16" else 2
        return {"BK": BK, "BV": BV, "num_warps": 4, "num_stages": stages}
    return {"BK": BK, "BV": BV, "num_warps": 8, "num_stages": 1}


def scan_backward(arch, K, V, dtype):
    """chunk_delta_bwd_kernel_scan."""
    config = scan(arch, K, V, dtype)
    return config | {"num_stages": min(config["num_stages"], 2)}


def bwd_values(arch, K, V, dtype):
    """chunk_kda_bwd_kernel_values: V walked in slabs."""
    if dtype == "fp32":
        return {"BV": tile(V, 32), "num_warps": 4, "num_stages": 1}
    config = {"BV": tile(V, 64), "num_warps": 4, "num_stages": 1}
    # three programs on a multiprocessor instead of two
    return config | ({"maxnreg": 168} if arch >= 90 else {})


def bwd_intra(arch, K, V, dtype, bounded=True):
    """chunk_kda_bwd_kernel_intra: a slab of K a program, V walked in slabs.

    With unbounded gates the code of six groups of pairs spills at 32 channels.
    """
    BK = tile(K, 32 if bounded else 16)
    return {"BK": BK, "BV": tile(V, 64), "num_warps": 4, "num_stages": 1}


def bwd_qk(arch, K, V, dtype):
    """kda_bwd_kernel_qk: rows of all of K."""
    BK = tile(K, 256)
    return {"BN": 2048 // BK, "BK": BK, "num_warps": 4, "num_stages": 1}

"""Tiles of the kernels on a pool of states: pure functions of what a variant is compiled for.

`dtype` is the pool's. A thread holds at most 64 values of the fp32 state (configs/recurrent.py), or
128 where they come in rows of 16 bits.
"""

from . import recurrent
from .delta import tile

# registers of a thread: twelve warps on a multiprocessor, whose loads hide each other's latency
REGISTERS = 168


def step(arch, K, V, dtype, state_v_first):
    """The step kernels: dict(BK, BV, num_warps, num_stages), with maxnreg where it helps.

    More than 256 channels (decay families) are split over programs.
    """
    config = _state_tile(arch, K, V, dtype, state_v_first)
    # rows of 64 channels spill on sm_100
    if state_v_first and dtype != "fp32" and config["BK"] >= 128 and config["BV"] < V:
        # half as many programs, each of which waits for twice the bytes at once
        return config | {"BV": 2 * config["BV"]}
    return config | {"maxnreg": REGISTERS}


def _state_tile(arch, K, V, dtype, state_v_first):
    return recurrent.fused_recurrent_fwd(arch, K if K <= 256 else 128, V, dtype, state_v_first)


def commit(arch, K, V, dtype, state_v_first):
    """decode_kernel_commit: dict(BK, BV, num_warps, num_stages). K is split, not summed over."""
    return _state_tile(arch, min(K, 128), V, dtype, state_v_first)


def copies(arch, K, V, dtype):
    """decode_kernel_gather and decode_kernel_scatter: dict(BD, num_warps, num_stages)."""
    return {"BD": 1024, "num_warps": 4, "num_stages": 1}


def checkpoint(arch, K, V, dtype):
    """decode_kernel_checkpoint: dict(BK, BV, num_warps, num_stages)."""
    return {"BK": tile(K, 64), "BV": tile(V, 64), "num_warps": 4, "num_stages": 1}


def zero(arch, K, V, dtype):
    """decode_kernel_zero: dict(BT, BD, num_warps, num_stages)."""
    return {"BT": 16, "BD": 256, "num_warps": 4, "num_stages": 1}

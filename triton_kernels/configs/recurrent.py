"""Tiles of the token-serial kernels. A thread holds at most 64 values of the fp32 state."""

STATE_VALUES_PER_WARP = 2048  # 64 in each of 32 threads


def _power_of_two(n, low):
    return max(1 << (n - 1).bit_length(), low)


def fused_recurrent_fwd(arch, K, V, dtype, state_v_first):
    """Forward: dict(BK, BV, num_warps, num_stages).

    [V, K] in memory: one warp reads whole rows of K. [K, V]: rows of 64 values of V, which keeps
    the segments of a load at 128 bytes or more.
    """
    BK = _power_of_two(K, 16)
    widest = STATE_VALUES_PER_WARP // BK if state_v_first else 64
    BV = min(widest, 64, _power_of_two(V, 8))
    num_warps = max(BK * BV // STATE_VALUES_PER_WARP, 1)
    return {"BK": BK, "BV": BV, "num_warps": num_warps, "num_stages": 1}


def fused_recurrent_bwd(arch, K, V, dtype, state_v_first):
    """Both token-serial backward kernels. A V tile costs three fp32 rows of K a token in memory."""
    BK = _power_of_two(K, 16)
    # a tile of the state's gradient passes by beside the state: 64 and 64 values a thread fit
    # without spills on sm_90 and up to K = 128 only
    values = STATE_VALUES_PER_WARP // (1 if arch == 90 and BK < 256 else 2)
    BV = min(64, 8 * values // BK, _power_of_two(V, 8))
    return {"BK": BK, "BV": BV, "num_warps": max(BK * BV // values, 1), "num_stages": 1}


def fused_recurrent_bwd_rows(arch, K, V, dtype):
    """The two backward kernels over blocks of tokens: dict(BT, BK, num_warps, num_stages)."""
    BK = _power_of_two(K, 16)
    return {"BT": 16, "BK": BK, "num_warps": max(BK // 32, 1), "num_stages": 1}

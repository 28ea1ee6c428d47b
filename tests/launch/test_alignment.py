"""Launchers hand on pointers that are aligned whatever the sizes: code for others would be compiled
at a length that is new, inside a capture too."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from flaop.launch.decay import chunk as decay_chunk  # noqa: E402
from flaop.launch.decay import recurrent as decay_recurrent  # noqa: E402
from flaop.launch.delta import chunk, gdn, recurrent  # noqa: E402
from flaop.launch.kernel import recording  # noqa: E402
from flaop.validation import decay, gated_delta_rule, kda  # noqa: E402

H, HV, K, V = 1, 3, 37, 41
LENGTHS = (1, 3, 66, 131)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def wide(*shape):
    return meta(*shape, dtype=torch.float32)


def shapes(T, packed):
    """q, k, v, beta, the state, and cu_seqlens of three sequences or None."""
    B, N = (1, 3) if packed else (3, 3)
    q, v = meta(B, T, H, K), meta(B, T, HV, V)
    cu_seqlens = meta(N + 1, dtype=torch.int64) if packed else None
    return q, v, meta(B, T, HV), wide(N, HV, K, V), cu_seqlens


def both_ways(call, launcher, residuals):
    """Forward and backward of a delta family."""
    d_state = wide(*call.state_shape)
    launcher.forward(call)
    A, A_qk = launcher.forward_residuals(call)[2:4]
    launcher.backward(call, call.v, d_state, (A, A_qk, *[meta(0)] * residuals), (True,) * 8)
    u = recurrent.forward_residuals(call)[2]
    recurrent.backward(call, call.v, d_state, u, (True,) * 8)


def launch_kda(T, packed):
    q, v, beta, state, cu_seqlens = shapes(T, packed)
    g = meta(*v.shape[:3], K)
    for bound in (None, -5.0):
        call = kda.check(
            *(q, q, v, g, beta, None, state, True, cu_seqlens, wide(HV), wide(HV, K)),
            *(True, True, True, False, bound is not None, bound, False),
        )
        both_ways(call, chunk, 6)


def launch_gated_delta_rule(T, packed):
    q, v, beta, state, cu_seqlens = shapes(T, packed)
    call = gated_delta_rule.check(
        *(q, q, v, beta, beta, None, state, True, cu_seqlens, wide(HV), wide(HV)),
        *(True, True, True, False, False),
    )
    both_ways(call, gdn, 2)


def launch_decay(T, packed, channel):
    q, v, head, state, cu_seqlens = shapes(T, packed)
    shared = (None, state, True, cu_seqlens, False, 64)
    if channel:
        call, count = decay.check_gla(q, q, v, meta(*v.shape[:3], K), *shared), 5
    else:
        call, count = decay.check_simple_gla(q, q, v, head, wide(HV), *shared), 6
    d_state = wide(*call.state_shape)
    A = (*decay_chunk.forward_residuals(call), None)[2]
    for split_size in (0, 64):
        split = call._replace(split_size=split_size)
        decay_chunk.backward(split, v, d_state, A, (True,) * count)
    decay_recurrent.forward(call)
    # the gradient of gv, which gla's recurrent path has, is not asked for
    mask = (True,) * 5 + (False,) if channel else (True,) * 6
    decay_recurrent.backward(call, v, d_state, mask)


FAMILIES = {
    "kda": launch_kda,
    "gated_delta_rule": launch_gated_delta_rule,
    "simple_gla": lambda *shape: launch_decay(*shape, False),
    "gla": lambda *shape: launch_decay(*shape, True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pointers_are_aligned_at_any_length(family):
    for T, packed in itertools.product(LENGTHS, (False, True)):
        with recording(90) as records:
            FAMILIES[family](T, packed)
        assert records
        for function, args, *_ in records:
            for name, x in zip(function.arg_names, args, strict=False):
                if isinstance(x, torch.Tensor):
                    offset = x.storage_offset() * x.element_size()
                    assert offset % 16 == 0, (function.fn.__name__, name, T, packed)

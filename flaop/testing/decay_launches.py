"""What the ops of the decay families launch, recorded on meta tensors."""

import torch


def decay_records(case) -> list[tuple]:
    """The launches of a case of testing.launches: its ops forward and backward, and the stages."""
    from flaop.launch.decay import chunk, recurrent, stages
    from flaop.launch.kernel import recording
    from flaop.testing.launches import DTYPES
    from flaop.validation.decay import check_gla, check_simple_gla

    T, H, HV, N, size = 130, 1, 2, 2, case.size

    def meta(*shape, dtype=DTYPES[case.dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    def wide(*shape):
        return meta(*shape, dtype=torch.float32)

    q, k, v = meta(1, T, H, size), meta(1, T, H, size), meta(1, T, HV, size)
    cu_seqlens = meta(N + 1, dtype=torch.int64)
    state = (None, wide(N, HV, size, size), True, cu_seqlens, True, 64)
    if case.gate == "channel":
        call = check_gla(q, k, v, meta(1, T, HV, size), *state)
        mask = (True,) * 5
    else:
        call = check_simple_gla(q, k, v, meta(1, T, HV), wide(HV), *state)
        mask = (True,) * 6
    d_o, d_final_state = meta(*v.shape), wide(*call.state_shape)
    with recording(case.arch) as records:
        A = (*chunk.forward_residuals(call), None)[2]
        for split_size in (0, 64):
            split = call._replace(split_size=split_size)
            chunk.backward(split, d_o, d_final_state, A, mask)
        if case.gate == "channel":
            call = call._replace(gv=meta(*v.shape))
            mask = (True,) * 6
        recurrent.forward(call)
        recurrent.backward(call, d_o, d_final_state, mask)
        if case.gate == "scalar":
            g, gv = wide(1, T, HV), wide(1, T, HV, size)
            stages.local_cumsum(gv, 64, True, 1.0, cu_seqlens)
            h, _ = stages.fwd_h(k, v, g, wide(HV), gv, gv, call.initial_state, True, cu_seqlens)
            stages.fwd_o(q, k, v, h, g, wide(HV), None, cu_seqlens)
    return records

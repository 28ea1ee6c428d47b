"""What the gated delta rule and the public stages of the delta families launch, on meta tensors."""

import torch


def gdn_records(case) -> list[tuple]:
    """The launches of a case of testing.launches: both paths forward and backward, the stages."""
    from flaop.launch.delta import gdn, public, recurrent
    from flaop.launch.kernel import recording
    from flaop.testing.launches import DTYPES
    from flaop.validation.gated_delta_rule import check

    T, H, HV, N, size = 130, 1, 2, 2, case.size

    def meta(*shape, dtype=DTYPES[case.dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    def wide(*shape):
        return meta(*shape, dtype=torch.float32)

    q, k, v, beta = meta(1, T, H, size), meta(1, T, H, size), meta(1, T, HV, size), meta(1, T, HV)
    h0, cu_seqlens = wide(N, HV, size, size), meta(N + 1, dtype=torch.int64)
    call = check(
        *(q, k, v, meta(1, T, HV), beta, None, h0, True, cu_seqlens, wide(HV), wide(HV)),
        *(True, True, True, True, True),
    )
    d_o, d_final_state, mask = meta(*v.shape), wide(*call.state_shape), (True,) * 8
    with recording(case.arch) as records:
        gdn.forward(call)
        A, A_qk = gdn.forward_residuals(call._replace(disable_recompute=True))[2:4]
        gdn.backward(call, d_o, d_final_state, (A, A_qk, meta(0), meta(0)), mask)
        gdn.summary(call)
        gdn.summary_forward(call)
        gdn.summary_backward(call, A, A_qk)
        recurrent.forward(call)
        u = recurrent.forward_residuals(call)[2]
        recurrent.backward(call, d_o, d_final_state, u, mask)
        g, gk = wide(1, T, HV), wide(1, T, HV, size)
        X = public.solve_tril(A, cu_seqlens)
        public.solve_tril_backward(A, X, cu_seqlens)
        w, _ = public.recompute_w_u(k, v, beta, A, g, gk, cu_seqlens)
        public.chunk_delta_fwd_h(k, w, v, g, gk, h0, True, cu_seqlens)
    return records

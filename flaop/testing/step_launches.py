"""What the decode ops launch, recorded on meta tensors."""

import torch

_FAMILIES = {
    "softplus": "kda", "bounded": "kda", "head": "gated_delta_rule",
    "scalar": "simple_gla", "channel": "gla",
}  # fmt: skip


def step_records(case) -> list[tuple]:
    """The launches of a case of testing.launches, of its family's step, verify and commit.

    Packed, a slot per token, every option on: [V, K] in a pool of fp32, [K, V] in one of the case's
    dtype. The others than step are recorded for sm_90 alone.
    """
    from flaop.launch import decode
    from flaop.launch.kernel import recording
    from flaop.testing.launches import DTYPES
    from flaop.validation import steps

    family, size = _FAMILIES[case.gate], case.size
    T, H, HV, N, S, slots = 12, 1, 2, 2, 8, 4

    def meta(*shape, dtype=DTYPES[case.dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    def wide(*shape):
        return meta(*shape, dtype=torch.float32)

    def numbers(*shape):
        return meta(*shape, dtype=torch.int32)

    inputs = {"q": meta(1, T, H, size), "k": meta(1, T, H, size), "v": meta(1, T, HV, size)}
    channel = family in ("kda", "gla")
    inputs["g"] = meta(1, T, HV, size) if channel else meta(1, T, HV)
    inputs["has_initial_state"] = meta(N, dtype=torch.bool)
    inputs["cu_seqlens"] = numbers(N + 1)
    if family == "simple_gla":
        inputs["g_gamma"] = wide(HV)
    if family in ("kda", "gated_delta_rule"):
        inputs |= {
            "beta": meta(1, T, HV), "A_log": wide(HV),
            "dt_bias": wide(HV, size) if channel else wide(HV),
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True,
        }  # fmt: skip
    if case.gate == "bounded":
        inputs["lower_bound"] = -5.0
    with recording(case.arch) as records:
        for v_first, dtype in ((True, torch.float32), (False, DTYPES[case.dtype])):
            pool = {"state": meta(slots, HV, size, size, dtype=dtype), "state_v_first": v_first}
            one_slot = pool | {"state_indices": numbers(N)}
            per_token = pool | {"state_indices": numbers(N, S), "num_accepted_tokens": numbers(N)}
            decode.step(steps.check_step(family, **inputs, **per_token))
            if not v_first or case.arch != 90:
                continue
            call = steps.check_verify(family, **inputs, **one_slot)
            kept = decode.verify(call)[1:]
            if case.gate == "head":
                decode.chunk_pool(steps.PoolCall(call, False, 64, 64, numbers(N, 1)))
            if case.gate in ("head", "softplus"):
                one_slot |= {n: inputs[n] for n in ("cu_seqlens", "has_initial_state")}
                accepted = numbers(N)
                k, u, g = kept
                call = steps.check_commit(num_accepted_tokens=accepted, k=k, u=u, g=g, **one_slot)
                decode.commit(call)
    return [x for x in records if x[0].fn.__name__.startswith("decode_")]

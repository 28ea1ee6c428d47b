"""Decode ops through the interpreter: outputs and every slot of the pool against the token loop."""

import pytest
import torch

from flaop.launch import decode
from flaop.testing.step_checks import SLOTS, assert_step, make_step, wide_pool
from flaop.testing.step_inputs import packed_projection, slot_indices
from flaop.testing.step_oracle import step_oracle
from flaop.validation import steps

FP16 = torch.float16


def run(made, **slots):
    """A step against the token loop; returns o."""
    family, arguments, cache = made
    arguments = {**arguments, **slots}
    before, expected = cache.clone(), wide_pool(arguments)
    expected_o = step_oracle(expected, arguments, dtype=arguments["state"].dtype)
    o = decode.step(steps.check_step(family, **arguments))
    assert_step(arguments, before, cache, o, expected, expected_o)
    return o


STEPS = {
    "kda": dict(B=3, T=1, HV=2),
    "kda bounded": dict(B=2, T=3, K=20, V=8, state_v_first=True, pool_dtype=FP16),
    "kda given": dict(B=2, T=2, H=2, HV=4, K=60, V=40, pool_dtype=FP16),
    "gated_delta_rule": dict(B=3, T=2, H=2, HV=4, state_v_first=True, dtype=FP16),
    "gated_delta_rule given": dict(B=2, T=8, K=32, V=16),
    "gated_delta_rule ungated": dict(B=2, T=3, HV=2, K=128, V=72, state_v_first=True),
    "simple_gla": dict(B=3, T=1, HV=2, pool_dtype=FP16, state_v_first=True),
    "simple_gla constant": dict(B=2, T=3, H=2, K=60, V=8),
    "simple_gla ungated": dict(B=2, T=2, K=16, V=100, dtype=FP16),
    "gla": dict(B=2, T=3, HV=2, K=20, V=40, state_v_first=True),
}


@pytest.mark.parametrize("variant", STEPS)
def test_step(variant):
    """One slot a row; padding, and slots outside the pool, among the rows."""
    sizes = STEPS[variant]
    run(make_step(variant, **sizes), state_indices=slot_indices([4, 0, -1][: sizes["B"]]))
    outside = [SLOTS, 7, 2**31 - 1][: sizes["B"]]
    o = run(make_step(variant, **sizes), state_indices=slot_indices(outside))
    assert not o[0].any() and o[1].any()


@pytest.mark.parametrize("variant", ["kda", "gla"])
@pytest.mark.parametrize("v_first", [False, True])
def test_more_channels(variant, v_first):
    """As many as a program has of K, and in the decay families more."""
    K = 256 if variant == "kda" else 300
    made = make_step(variant, B=2, T=2, K=K, V=24, state_v_first=v_first)
    run(made, state_indices=slot_indices([3, 5]))


@pytest.mark.parametrize("variant", ["kda", "simple_gla"])
def test_other_write_slots_and_new_states(variant):
    """has_initial_state ignores what the slot holds; a write slot outside is not written."""
    made = make_step(variant, B=4, T=2, HV=2)
    made[1]["state"][1] = torch.nan
    step = dict(
        state_indices=slot_indices([1, 2, 3, -1]),
        write_indices=slot_indices([6, -5, 1, 4]),
        has_initial_state=torch.tensor([False, True, True, True]),
    )
    made[1]["state"][6:8] = 0.0
    run(made, **step)


@pytest.mark.parametrize("variant", ["gated_delta_rule", "gla"])
def test_a_slot_per_token(variant):
    accepted = torch.tensor([2, 0, 1, 4, 3], dtype=torch.int32)
    indices = slot_indices([[0, 1, 2], [3, 4, 5], [-1, 6, 6], [0, 0, 0], [0, 0, 6]])
    writes = slot_indices([[2, 0, 1], [3, SLOTS, 5], [7, 7, 7], [7, 7, 7], [6, -1, -1]])
    made = make_step(variant, B=5, T=2, state_v_first=variant == "gla")
    o = run(made, state_indices=indices, write_indices=writes, num_accepted_tokens=accepted)
    assert not o[2:4].any()
    made = make_step(variant, B=5, T=1)
    run(made, state_indices=indices[:, 1:], write_indices=writes[:, ::2])


PACKED = {
    "kda": ([3, 0, 1, 4], False), "gated_delta_rule given": ([0, 2, 8], True),
    "simple_gla": ([0, 0, 5], False), "gla": ([2, 1, 0], True),
}  # fmt: skip


@pytest.mark.parametrize("variant", PACKED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed(variant, dtype):
    """Rows that belong to no sequence, before the first and behind the last one, are zero; so are
    tokens without a slot."""
    lengths, v_first = PACKED[variant]
    made = make_step(variant, lengths=[2, *lengths, 3], HV=2, state_v_first=v_first)
    bounds = made[1]["cu_seqlens"][1:-1].to(dtype)
    made[1]["cu_seqlens"] = bounds
    indices = slot_indices([[5], [6], [8], [7]][: len(lengths)])
    o = run(made, state_indices=indices[:, 0])
    assert not o[0, :2].any() and not o[0, -3:].any()
    made = make_step(variant, lengths=lengths, HV=2, state_v_first=v_first)
    run(made, state_indices=torch.cat([indices, indices - 5], 1))


@pytest.mark.parametrize("bounds", [[3, 3, 8, 6, 30], [2, 5], [-4, 4, 4, 9], [9, 2]])
def test_any_cu_seqlens(bounds):
    """Decreasing or outside values stay inside the tensors."""
    family, arguments, _ = make_step("kda", lengths=[8], K=16, V=8)
    arguments["cu_seqlens"] = torch.tensor(bounds)
    indices = slot_indices(list(range(len(bounds) - 1)))
    decode.step(steps.check_step(family, **arguments, state_indices=indices))


@pytest.mark.parametrize("variant", STEPS)
def test_strided_inputs_and_a_view_of_a_cache(variant):
    sizes = STEPS[variant]
    family, arguments, cache = make_step(variant, padding=33, **sizes)
    views = packed_projection(arguments)
    indices = slot_indices([8, 1, 2][: sizes["B"]])
    copies = {
        n: x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x
        for n, x in views.items()
    }
    o = run((family, views, cache), state_indices=indices)
    copies["state_indices"] = indices
    assert torch.equal(o, decode.step(steps.check_step(family, **copies)))
    assert torch.equal(views["state"], copies["state"])


@pytest.mark.parametrize("variant", STEPS)
def test_several_tokens_are_several_calls(variant):
    """Bitwise, with one slot and with a slot per token."""
    sizes = {**STEPS[variant], "B": 2, "T": 3, "pool_dtype": FP16}
    names = ("q", "k", "v", "g", "beta")
    results = []
    for form in ("one call", "calls", "slots"):
        family, arguments, _ = make_step(variant, **sizes)
        indices = slot_indices([5, 2])
        if form == "calls":
            parts = []
            for t in range(3):
                token = {n: x[:, t : t + 1] for n in names if (x := arguments.get(n)) is not None}
                part = {**arguments, **token, "state_indices": indices}
                parts.append(decode.step(steps.check_step(family, **part)))
            o = torch.cat(parts, 1)
        else:
            if form == "slots":
                indices = slot_indices([[5, 7, 5], [2, 7, 2]])
            o = decode.step(steps.check_step(family, **arguments, state_indices=indices))
        results.append((o, arguments["state"][[5, 2]]))
    for o, state in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(state, results[0][1])


COMMITS = {
    "kda": dict(B=4, T=3, HV=2), "kda given": dict(B=4, T=2, K=60, V=40, pool_dtype=FP16),
    "gated_delta_rule": dict(B=4, T=3, state_v_first=True),
    "gated_delta_rule ungated": dict(B=4, T=3, H=2, HV=4),
    "simple_gla": dict(B=4, T=2, HV=2), "simple_gla constant": dict(B=4, T=2),
    "simple_gla ungated": dict(B=4, T=2), "gla": dict(B=4, T=3, K=300, V=8, state_v_first=True),
    "gla packed": dict(lengths=[2, 0, 3, 4, 1]), "kda packed": dict(lengths=[1, 4, 3, 1, 2], HV=2),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMITS)
def test_verify_and_commit(case):
    """Verify leaves the pool alone and returns what a step does; commit moves it on by the accepted
    tokens, more than there are included."""
    variant = case.removesuffix(" packed")
    family, arguments, cache = make_step(variant, **COMMITS[case])
    if "packed" in case:  # rows of no sequence
        arguments["cu_seqlens"] = arguments["cu_seqlens"][:-1]
    before = cache.clone()
    arguments["state"][2] = torch.nan
    before[2] = cache[2]
    arguments |= dict(
        state_indices=slot_indices([5, -1, 2, 0]),
        has_initial_state=torch.tensor([True, True, False, True]),
    )
    o, *kept = decode.verify(steps.check_verify(family, **arguments))
    assert torch.equal(before.nan_to_num(), cache.nan_to_num())
    for x in kept:
        assert torch.isfinite(x).all()
    k, u, g = kept
    assert k.shape == arguments["k"].shape and u.shape == arguments["v"].shape
    _, again, _ = make_step(variant, **COMMITS[case])
    again = {**arguments, "state": again["state"]}
    assert torch.equal(o, decode.step(steps.check_step(family, **again)))
    accepted = torch.tensor([1, 2, 0, 7], dtype=torch.int32)
    expected = wide_pool(arguments)
    dtype = arguments["state"].dtype
    step_oracle(expected, arguments, dtype=dtype, accepted=accepted.tolist())
    shared = {n: arguments[n] for n in ("state", "state_indices", "has_initial_state")}
    shared |= {"cu_seqlens": arguments["cu_seqlens"], "state_v_first": arguments["state_v_first"]}
    decode.commit(steps.check_commit(num_accepted_tokens=accepted, k=k, u=u, g=g, **shared))
    zero = torch.zeros_like(o)
    assert_step(arguments, before, cache, zero, expected, zero)


POOLS = {
    "kda": dict(lengths=[70, 0, 64, 130, 3, 128], HV=2, state_v_first=True),
    "kda given": dict(B=3, T=130, pool_dtype=FP16),
    "gated_delta_rule": dict(lengths=[128, 5, 0, 64, 131], HV=2),
    "gated_delta_rule given": dict(B=3, T=128, state_v_first=True),
    "simple_gla": dict(lengths=[64, 130, 0, 128], HV=2, pool_dtype=FP16),
    "simple_gla constant": dict(B=3, T=65),
    "gla": dict(lengths=[129, 64, 1], HV=2, K=20, V=8, state_v_first=True),
    "gla batched": dict(B=3, T=128),
}


@pytest.mark.parametrize("case", POOLS)
@pytest.mark.parametrize("interval", [0, 64, 128])
def test_chunk_pool(case, interval):
    family, arguments, cache = make_step(case.removesuffix(" batched"), **POOLS[case])
    N = len(POOLS[case].get("lengths", range(3)))
    arguments["state"][3] = torch.nan
    arguments |= dict(
        state_indices=slot_indices([2, 4, 3, -1, 5, 2][:N]),
        write_indices=slot_indices([2, -1, 3, 6, 8, 10][:N]),
        has_initial_state=torch.tensor([True, True, False, True, True, True][:N]),
    )
    if interval:
        T = arguments["q"].shape[1]
        points = torch.full((N, T // interval + 1), -1, dtype=torch.int32)
        points[0, 0], points[1, 1:2], points[-1, 0] = 0, 1, 7
        arguments |= {"checkpoint_interval": interval, "checkpoint_indices": points}
    before, expected = cache.clone(), wide_pool(arguments)
    expected[3] = 0.0
    expected_o = step_oracle(expected, arguments)
    pool = {n: arguments.pop(n, None) for n in ("checkpoint_interval", "checkpoint_indices")}
    pool["checkpoint_interval"] = pool["checkpoint_interval"] or 0
    o = decode.chunk_pool(steps.check_pool(family, **pool, **arguments))
    assert_step(arguments, before, cache, o, expected, expected_o, limit=2e-3)


@pytest.mark.parametrize("variant", ["kda", "gated_delta_rule", "simple_gla", "gla"])
def test_no_tokens(variant):
    """States move to their write slots as they are, or as zeros."""
    family, arguments, cache = make_step(variant, B=2, T=0)
    arguments |= dict(
        state_indices=slot_indices([1, 2]), write_indices=slot_indices([3, 2]),
        has_initial_state=torch.tensor([True, False]),
    )  # fmt: skip
    for launch, check in ((decode.step, steps.check_step), (decode.chunk_pool, steps.check_pool)):
        arguments["state"][2:4] = 1.0
        o = launch(check(family, **arguments))
        assert o.shape == arguments["v"].shape
        assert torch.equal(arguments["state"][3], arguments["state"][1])
        assert not arguments["state"][2].any()

"""Field reports on decode: pools, padding, slots, drafts (D, and what else concerns them)."""

import doctest
import math

import pytest
import torch

import flaop
from flaop.testing import (
    STEP_FAMILIES,
    relative_error,
    slot_indices,
    step_oracle,
    step_pool,
    step_tokens,
)

SIZES = {"H": 1, "HV": 2, "K": 16, "V": 8}
STATE = {name: SIZES[name] for name in ("HV", "K", "V")}
TOKENS = ("q", "k", "v", "g", "beta")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=STEP_FAMILIES)
def family(request):
    return request.param


def fn(family, form="{}_step_"):
    return getattr(flaop, form.format(family))


def some_tokens(inputs, *index):
    """A part of the tokens of a call."""
    part = {n: inputs[n][index] for n in TOKENS if inputs.get(n) is not None}
    return {**inputs, **part}


def assert_as_the_loop(op, inputs, pool, limit=1e-4):
    """Outputs and every slot; returns the outputs."""
    expected = pool.cpu().double()
    dtype = None if op.__name__.startswith("chunk") else pool.dtype
    reference = step_oracle(expected, inputs, dtype=dtype)
    o = op(**inputs, state=pool)
    assert relative_error(o, reference) < limit
    assert relative_error(pool, expected) < limit
    return o


def test_G09_fewer_rows_than_the_buffers_hold(family, device):
    inputs = step_tokens(family, B=4, T=1, **SIZES, device=device)
    inputs["state_indices"] = slot_indices([2, 0, 5, -1], device)
    pool, _ = step_pool(6, **STATE, device=device)
    o = assert_as_the_loop(fn(family), inputs, pool)
    assert not o[3].any()
    inputs = step_tokens(family, lengths=[100, 200, 212], **SIZES, device=device)
    inputs["cu_seqlens"][-1] = 300
    inputs["state_indices"] = slot_indices([2, 0, 5], device)
    o = assert_as_the_loop(fn(family, "chunk_{}_pool_"), inputs, pool)
    assert not o[:, 300:].any()


@pytest.mark.parametrize("form", ["{}_step_", "{}_commit_"])
def test_D03_any_count_of_accepted_tokens(family, device, form):
    """0 to 4 mean what they say; 5 of 4 slots is padding in a step and all tokens in a commit."""
    counts = [0, 1, 4, 5, -1, 2**31 - 1]
    N, S = len(counts), 4
    inputs = step_tokens(family, B=N, T=S, **SIZES, device=device)
    accepted = slot_indices(counts, device)
    pool, cache = step_pool(N * S + 2, **STATE, device=device, padding=5)
    before = pool.clone()
    if form == "{}_step_":
        inputs["state_indices"] = torch.arange(N * S, device=device).view(N, S).int()
        inputs["num_accepted_tokens"] = accepted
        o = assert_as_the_loop(fn(family), inputs, pool)
        assert not o[[3, 5]].any() and o[[0, 1, 2, 4]].flatten(1).any(1).all()
        unchanged = [*range(12, 16), *range(20, 26)]
    else:
        inputs["state_indices"] = torch.arange(N, dtype=torch.int32, device=device)
        _, *written = fn(family, "{}_verify")(**inputs, state=pool)
        assert torch.equal(pool, before)
        expected = pool.cpu().double()
        step_oracle(expected, inputs, dtype=torch.float32, accepted=counts)
        fn(family, form)(pool, inputs["state_indices"], accepted, *written)
        assert relative_error(pool, expected) < 1e-4
        unchanged = [0, 4, *range(N, N * S + 2)]
    assert torch.equal(pool[unchanged], before[unchanged])


def test_D04_a_step_without_drafts_after_accepted_ones(family, device):
    drafts, accepts = [3, 0, 2, 0, 0, 4], [2, 1, 1, 1, 1, 4]
    S = 5
    pool, _ = step_pool(S + 1, **STATE, device=device)
    plain = pool[:1].clone()
    slots, one = slot_indices([range(S)], device), slot_indices([0], device)
    previous = 1
    for seed, (draft, accepted) in enumerate(zip(drafts, accepts, strict=True)):
        inputs = step_tokens(family, B=1, T=draft + 1, **SIZES, device=device, seed=seed)
        fn(family)(
            **inputs,
            state=pool,
            state_indices=slots,
            num_accepted_tokens=slot_indices([previous], device),
        )
        for t in range(accepted):
            token = some_tokens(inputs, slice(None), slice(t, t + 1))
            fn(family)(**token, state=plain, state_indices=one)
        assert torch.equal(pool[accepted - 1], plain[0])
        previous = accepted


def test_D05_plain_rows_beside_drafts(family, device):
    """One row of one token before one of three: what two separate calls give."""
    inputs = step_tokens(family, lengths=[1, 3], **SIZES, device=device, gates="fast")
    mixed, apart = (step_pool(4, **STATE, device=device)[0] for _ in range(2))
    o = fn(family)(**inputs, state=mixed, state_indices=slot_indices([3, 1], device))
    inputs["cu_seqlens"] = None
    pieces = [
        fn(family)(
            **some_tokens(inputs, slice(None), part),
            state=apart,
            state_indices=slot_indices([slot], device),
        )
        for part, slot in ((slice(0, 1), 3), (slice(1, 4), 1))
    ]
    assert relative_error(o, torch.cat(pieces, 1)) < 1e-6
    assert relative_error(mixed, apart) < 1e-6


def test_D07_prefill_over_what_another_request_left(family, device):
    inputs = step_tokens(family, B=3, T=70, **SIZES, device=device)
    pool, _ = step_pool(5, **STATE, device=device)
    pool[[0, 4]] = torch.nan
    expected = pool.cpu().double()
    inputs["state_indices"] = slot_indices([4, 2, 0], device)
    inputs["has_initial_state"] = torch.tensor([False, True, False], device=device)
    reference = step_oracle(expected, inputs)
    o = fn(family, "chunk_{}_pool_")(**inputs, state=pool)
    assert relative_error(o, reference) < 1e-4
    assert relative_error(pool, expected) < 1e-4


def test_D08_a_trash_slot_for_padded_rows(family, device):
    """Padded rows share slot 0 and carry NaN: rows beside them never see it."""
    pool, _ = step_pool(6, **STATE, device=device)
    expected = pool.cpu().double()
    for seed in range(30):
        inputs = step_tokens(family, B=5, T=1, **SIZES, device=device, seed=seed)
        inputs["state_indices"] = slot_indices([0, 3, 0, 5, 0], device)
        real = some_tokens(inputs, [1, 3]) | {"state_indices": slot_indices([3, 5])}
        reference = step_oracle(expected, real, dtype=torch.float32)
        for name in ("q", "k", "v"):
            inputs[name][[0, 2, 4]] = torch.nan
        o = fn(family)(**inputs, state=pool)
        assert relative_error(o[[1, 3]], reference) < 1e-4
    assert relative_error(pool[1:], expected[1:]) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 16_384])
def test_D02_slots_beyond_32_bits_of_offset(padding):
    """Slot times size of a slot passes 2^31 elements; rows of the cache may be padded."""
    heads, size, slots = 32, 128, 4200
    cache = torch.zeros(slots, heads * size * size + padding, dtype=BF16, device="cuda")
    pool = cache[:, : heads * size * size].unflatten(1, (heads, size, size))
    used = [0, 3971, 4095, 4096, 4199]
    pool[used] = torch.randn(5, heads, size, size, device="cuda").bfloat16()
    inputs = step_tokens("kda given", B=5, T=1, H=heads, K=size, V=size, dtype=BF16, device="cuda")
    small = pool[used].clone()
    o = flaop.kda_step_(**inputs, state=pool, state_indices=slot_indices(used, "cuda"))
    o_small = flaop.kda_step_(**inputs, state=small, state_indices=slot_indices(range(5), "cuda"))
    assert torch.equal(o, o_small) and torch.equal(pool[used], small)
    pool[used] = 0
    assert not any(part.any() for part in cache.split(256))


@pytest.mark.gpu
def test_G13_counts_from_another_stream(family):
    """Counts and slots made on a side stream, with an event between."""
    inputs = step_tokens(family, B=4, T=2, **SIZES, device="cuda")
    slots = torch.arange(12, dtype=torch.int32, device="cuda").view(4, 3)
    pool, _ = step_pool(12, **STATE, device="cuda")
    expected, side = pool.clone(), torch.cuda.Stream()
    for step in range(100):
        counts = torch.full((4,), step % 3 + 1, dtype=torch.int32, device="cuda")
        given = {"state_indices": slots, "num_accepted_tokens": counts}
        torch.cuda.synchronize()
        o_expected = fn(family)(**inputs, state=expected, **given)
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)
            late = counts.clone()
            done = side.record_event()
        torch.cuda.current_stream().wait_event(done)
        late.record_stream(torch.cuda.current_stream())
        o = fn(family)(**inputs, state=pool, **{**given, "num_accepted_tokens": late})
        del late
        assert torch.equal(o, o_expected)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("filled, expected", [(2000.0, 22627.4), (10_000.0, math.inf)])
def test_N14_read_out_beyond_fp16(device, filled, expected):
    """A finite state never reads as NaN; beyond 65504 an fp16 output is inf, a float32 one not."""
    ones = torch.full((1, 1, 1, 128), 128**-0.5, device=device, dtype=FP16)
    pool = torch.full((2, 1, 128, 128), filled, device=device)
    zeros = torch.zeros(1, 1, 1, device=device)

    def read(x):
        arguments = (torch.zeros_like(x), zeros, pool, slot_indices([1], device))
        return flaop.kda_step_(x, x, x, *arguments, scale=1.0)

    o = read(ones)
    assert (pool == filled).all()
    if math.isinf(expected):
        assert (o == expected).all()
        o, expected = read(ones.float()), 113_137.1
    torch.testing.assert_close(o.float(), torch.full_like(o.float(), expected), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_N15_the_pool_alone_decides_its_precision(device, dtype):
    """512 steps of bf16 activations: an fp32 pool keeps fp32 digits, a bf16 pool its own."""
    inputs = step_tokens("kda given", B=2, T=512, **SIZES, dtype=BF16, device=device, gates="slow")
    indices = slot_indices([0, 1], device)
    pool, _ = step_pool(2, **STATE, dtype=dtype, device=device)
    expected = pool.cpu().double()
    step_oracle(expected, inputs | {"state_indices": indices})
    for t in range(0, 512, 8):
        tokens = some_tokens(inputs, slice(None), slice(t, t + 8))
        flaop.kda_step_(**tokens, state=pool, state_indices=indices)
    assert relative_error(pool, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
    if dtype == BF16:
        assert relative_error(pool, expected) > 1e-4


def test_S07_any_alignment(family, device):
    """The same shapes, first aligned, then one and four elements further.

    Rows that are read in other pieces are summed in another order.
    """
    inputs = step_tokens(family, B=2, T=2, **SIZES, dtype=BF16, device=device)
    indices = slot_indices([2, 0], device)
    results = []
    for offset in (0, 1, 4):

        def moved(x, offset=offset):
            buffer = torch.zeros(x.numel() + 8, dtype=x.dtype, device=device)
            return buffer[offset : offset + x.numel()].copy_(x.flatten()).view(x.shape)

        given = {n: moved(x) if torch.is_tensor(x) else x for n, x in inputs.items()}
        pool = moved(step_pool(3, **STATE, dtype=BF16, device=device)[0])
        o = fn(family)(**given, state=pool, state_indices=indices)
        results.append((o, pool))
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            assert relative_error(x, y) < 2e-3


@pytest.mark.parametrize("per_token", [False, True])
def test_S08_strided_indices(family, device, per_token):
    inputs = step_tokens(family, B=3, T=2, **SIZES, device=device)
    table = torch.randperm(40)[:36].view(6, 6).int().to(device)
    slots = {
        "state_indices": table[::2, 1:5:2] if per_token else table[::2, 3],
        "write_indices": table[1::2, :4:2] if per_token else table[1::2, 4],
    }
    pools = [step_pool(40, **STATE, device=device)[0] for _ in range(2)]
    copies = {n: x.contiguous() for n, x in slots.items()}
    outputs = [
        fn(family)(**inputs, state=pool, **given)
        for pool, given in zip(pools, (slots, copies), strict=True)
    ]
    assert torch.equal(*outputs) and torch.equal(*pools)


@pytest.mark.parametrize("name", ["kda_step_", "kda_verify"])
def test_H11_R07_docstring_examples_run_and_use_real_layouts(name):
    function = getattr(flaop, name)
    for test in doctest.DocTestFinder(recurse=False).find(function, name):
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0
    assert "[B, T, H, K]" in function.__doc__

"""CUDA graphs and streams with the decode ops: padded batches, new slots, new boundaries."""

import pytest
import torch

import flaop
from flaop.testing import STEP_FAMILIES, slot_indices, step_pool, step_tokens
from flaop.testing.graphs import compiled_variants, refresh

pytestmark = pytest.mark.gpu

SIZES = {"H": 1, "HV": 2, "K": 128, "V": 128}
STATE = {name: SIZES[name] for name in ("HV", "K", "V")}
B = 8


def fn(family, form="{}_step_"):
    return getattr(flaop, form.format(family))


def arguments(family, T=1, seed=0, **shape):
    shape = shape if "lengths" in shape else {"B": B, "T": T} | shape
    return step_tokens(family, **shape, **SIZES, dtype=torch.bfloat16, device="cuda", seed=seed)


def capture(op, inputs, state):
    """The graph of a call after one warm-up, and its output."""
    flaop.warmup(op, **inputs, state=state)
    before = state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = op(**inputs, state=state)
    assert torch.equal(state, before)
    return graph, o


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_replays_with_fewer_rows(family, dtype):
    """Captured for 8 rows; 8, 3 and none are live, in any slots; other slots stay as they are."""
    state, _ = step_pool(20, **STATE, dtype=dtype, device="cuda")
    inputs = arguments(family) | {
        "state_indices": slot_indices(range(8), "cuda"),
        "has_initial_state": torch.ones(B, dtype=torch.bool, device="cuda"),
    }
    graph, o = capture(fn(family), inputs, state)
    expected = state.clone()
    for seed, live in enumerate((8, 3, 0, 5, 8)):
        values = arguments(family, seed=seed)
        slots = torch.randperm(20)[:live].tolist() + [-1] * (B - live)
        values["state_indices"] = slot_indices(slots, "cuda")
        values["has_initial_state"] = torch.rand(B, device="cuda") < 0.5
        before = state.clone()
        o_expected = fn(family)(**values, state=expected)
        refresh(inputs, values)
        o.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, o_expected) and torch.equal(state, expected)
        others = [slot for slot in range(20) if slot not in slots]
        assert torch.equal(state[others], before[others])
        assert not o[live:].any()


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_speculative_replay(family):
    """A slot per token, any number accepted, any lengths up to four."""
    state, _ = step_pool(40, **STATE, device="cuda")
    bounds = [4 * n for n in range(B + 1)]
    inputs = arguments(family, lengths=[4] * B) | {
        "state_indices": torch.arange(4 * B, dtype=torch.int32, device="cuda").view(B, 4),
        "num_accepted_tokens": slot_indices([1] * B, "cuda"),
        "cu_seqlens": slot_indices(bounds, "cuda"),
    }
    graph, o = capture(fn(family), inputs, state)
    expected = state.clone()
    for seed in range(4):
        values = arguments(family, lengths=[4] * B, seed=seed)
        lengths = torch.randint(0, 5, (B,))
        values["cu_seqlens"] = slot_indices([0, *lengths.cumsum(0).tolist()], "cuda")
        values["state_indices"] = torch.randperm(40, device="cuda")[: 4 * B].view(B, 4).int()
        values["state_indices"][seed] = -1
        values["num_accepted_tokens"] = torch.randint(0, 6, (B,), device="cuda").int()
        o_expected = fn(family)(**values, state=expected)
        refresh(inputs, values)
        o.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, o_expected) and torch.equal(state, expected)


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_verify_and_commit_replay(family):
    state, _ = step_pool(20, **STATE, device="cuda")
    inputs = arguments(family, T=3) | {"state_indices": slot_indices(range(8), "cuda")}
    accepted = slot_indices([3] * B, "cuda")

    def speculate(state, state_indices, **tokens):
        o, *written = fn(family, "{}_verify")(**tokens, state=state, state_indices=state_indices)
        fn(family, "{}_commit_")(state, state_indices, accepted, *written)
        return o

    graph, o = capture(speculate, inputs, state)
    expected = state.clone()
    for seed in range(3):
        values = arguments(family, T=3, seed=seed)
        slots = torch.randperm(20)[:5].tolist() + [-1, 20, -1]
        values["state_indices"] = slot_indices(slots, "cuda")
        accepted.copy_(torch.randint(0, 4, (B,)))
        o_expected = speculate(**values, state=expected)
        refresh(inputs, values)
        o.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, o_expected) and torch.equal(state, expected)


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_prefill_replay(family):
    """Other boundaries, slots and checkpoints."""
    state, _ = step_pool(20, **STATE, device="cuda")
    inputs = arguments(family, lengths=[128] * 4) | {
        "state_indices": slot_indices([0, 1, 2, 3], "cuda"),
        "checkpoint_interval": 64,
        "checkpoint_indices": torch.arange(4, 20, dtype=torch.int32, device="cuda")
        .view(4, 4)
        .repeat(1, 2),
    }
    inputs["checkpoint_indices"][:, 4:] = -1
    graph, o = capture(fn(family, "chunk_{}_pool_"), inputs, state)
    expected = state.clone()
    bounds = ([0, 128, 256, 384, 512], [0, 1, 2, 511, 512], [0, 0, 0, 300, 512])
    for seed, offsets in enumerate(bounds):
        values = arguments(family, lengths=[128] * 4, seed=seed)
        values["cu_seqlens"] = torch.tensor(offsets, device="cuda")
        values["state_indices"] = slot_indices([2, -1, 0, 3], "cuda")
        values["checkpoint_indices"] = inputs["checkpoint_indices"].flip(0)
        options = {n: inputs[n] for n in ("checkpoint_interval",)}
        o_expected = fn(family, "chunk_{}_pool_")(**values, **options, state=expected)
        refresh(inputs, values)
        o.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, o_expected) and torch.equal(state, expected)


@pytest.mark.parametrize("form", ["{}_step_", "chunk_{}_pool_", "{}_verify"])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_the_host_waits_for_nothing(family, form):
    op = fn(family, form)
    state, _ = step_pool(20, **STATE, device="cuda")
    calls = [
        arguments(family, T=2) | {"state_indices": slot_indices(range(B), "cuda")},
        arguments(family, lengths=[2, 0, 3]) | {"state_indices": slot_indices([1, 5, -1], "cuda")},
    ]
    for inputs in calls:
        op(**inputs, state=state)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in calls:
            op(**inputs, state=state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_no_batch_or_length_compiles_anew(family):
    state, _ = step_pool(20, **STATE, device="cuda")

    def call(form, **shape):
        inputs = arguments(family, **shape)
        N = len(shape["lengths"]) if "lengths" in shape else shape["B"]
        fn(family, form)(**inputs, state=state, state_indices=slot_indices(range(N), "cuda"))

    forms = ("{}_step_", "{}_verify")
    for form in forms:
        call(form, B=2, T=1)
        call(form, lengths=[1, 2])
    before = compiled_variants()
    for form in forms:
        for shape in ((1, 1), (3, 8), (16, 2), (17, 5)):
            call(form, B=shape[0], T=shape[1])
        for lengths in ([1], [8] * 3, [0, 0, 1], [1] * 17):
            call(form, lengths=lengths)
    assert compiled_variants() == before


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_current_stream(family):
    """The kernel runs on the stream that is current, behind what it waits for."""
    inputs = arguments(family) | {"state_indices": slot_indices(range(B), "cuda")}
    state, _ = step_pool(20, **STATE, device="cuda")
    expected = state.clone()
    o_expected = fn(family)(**inputs, state=expected)
    given = inputs["v"].clone()
    inputs["v"].fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        inputs["v"].copy_(given)
        o = fn(family)(**inputs, state=state)
    side.synchronize()
    assert torch.equal(o, o_expected) and torch.equal(state, expected)

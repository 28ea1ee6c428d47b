"""Speculative decoding in both forms against a run that takes one token at a time."""

import random

import pytest
import torch

import flaop
from flaop.testing import (
    STEP_FAMILIES,
    STEP_VARIANTS,
    relative_error,
    slot_indices,
    step_oracle,
    step_pool,
    step_tokens,
)

SIZES = {"H": 1, "HV": 2, "K": 32, "V": 24}
STATE = {name: SIZES[name] for name in ("HV", "K", "V")}
TOKENS = ("q", "k", "v", "g", "beta")
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
POOLS = [
    pytest.param(torch.float32, False, id="float32-kv"),
    pytest.param(torch.bfloat16, True, id="bfloat16-vk"),
]
# Slots of a request: one for each token of a call.
S = 4


def fn(variant, form="{}_step_"):
    return getattr(flaop, form.format(variant.split()[0]))


def given(inputs):
    return [n for n in TOKENS if inputs.get(n) is not None]


class Requests:
    """Requests that enter and leave, and what their plain decoding gives, token by token."""

    def __init__(self, family, dtype, v_first, device):
        self.family, self.dtype, self.device = family, dtype, device
        self.v_first = {"state_v_first": v_first}
        self.rng = random.Random(family)
        self.rows = 3
        self.options = {"dtype": dtype, "device": device, "state_v_first": v_first}
        # as unaligned as the other pool: states that are read in other pieces are summed in another
        # order
        self.plain, _ = step_pool(self.rows, **STATE, **self.options, padding=5)
        self.fresh = [True] * self.rows
        self.seed = 0

    def draft(self):
        """Tokens of each row, none where it is padding, and the packed call that verifies them."""
        rng = self.rng
        self.seed += 1
        lengths = [rng.choice([0, 1, 1, 2, 3, 4]) for _ in range(self.rows)]
        inputs = step_tokens(
            self.family, lengths=lengths, **SIZES, device=self.device, dtype=torch.bfloat16,
            gates=rng.choice(["slow", "mixed"]), seed=self.seed,
        )  # fmt: skip
        del inputs["state_v_first"]
        return lengths, inputs | self.v_first

    def decode(self, inputs, lengths, accepted):
        """One token at a time, as many as were accepted; outputs by row."""
        starts = [sum(lengths[:n]) for n in range(self.rows)]
        outputs = [[] for _ in range(self.rows)]
        inputs = inputs | {"cu_seqlens": None}
        for t in range(max(accepted)):
            active = [t < a for a in accepted]
            tokens = [s + t if on else 0 for s, on in zip(starts, active, strict=True)]
            token = {n: inputs[n][0, tokens].unsqueeze(1) for n in given(inputs)}
            slots = [n if on else -1 for n, on in enumerate(active)]
            o = fn(self.family)(
                **{**inputs, **token},
                state=self.plain,
                state_indices=slot_indices(slots, self.device),
                has_initial_state=~torch.tensor(
                    [f and t == 0 for f in self.fresh], device=self.device
                ),
            )
            for n, on in enumerate(active):
                if on:
                    outputs[n].append(o[n, 0])
        return starts, outputs

    def leave(self, counts):
        """Some requests end, and others take their place."""
        self.fresh = [f and c == 0 for f, c in zip(self.fresh, counts, strict=True)]
        for n in range(self.rows):
            if self.rng.random() < 0.05:
                self.fresh[n] = True


@pytest.mark.parametrize("dtype, v_first", POOLS)
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_a_slot_per_token(step_device, family, dtype, v_first):
    """Bitwise the plain run, over 200 steps with rows that bring 0 to 4 tokens."""
    run = Requests(family, dtype, v_first, step_device)
    pool, _ = step_pool(20, **STATE, **run.options, padding=5, seed=1)
    slots = torch.randperm(20)[: run.rows * S].view(run.rows, S).tolist()
    outside = [slot for slot in range(20) if not any(slot in row for row in slots)]
    before = pool[outside].clone()
    accepted = [1] * run.rows
    for _ in range(200):
        lengths, inputs = run.draft()
        counts = [run.rng.randint(1, n) if n else 0 for n in lengths]
        o = fn(family)(
            **inputs,
            state=pool,
            # A row without tokens is padding: its state stays where it is.
            state_indices=slot_indices(
                [row if n else [-1] * S for row, n in zip(slots, lengths, strict=True)],
                step_device,
            ),
            num_accepted_tokens=slot_indices(accepted, step_device),
            has_initial_state=~torch.tensor(run.fresh, device=step_device),
        )
        accepted = [c if c else a for c, a in zip(counts, accepted, strict=True)]
        if not any(lengths):
            continue
        starts, outputs = run.decode(inputs, lengths, counts)
        for n, expected in enumerate(outputs):
            for t, o_t in enumerate(expected):
                assert torch.equal(o[0, starts[n] + t], o_t)
            if counts[n]:
                assert torch.equal(pool[slots[n][counts[n] - 1]], run.plain[n])
        run.leave(counts)
    assert torch.equal(pool[outside], before)


@pytest.mark.parametrize("dtype, v_first", POOLS)
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_verify_and_commit(step_device, family, dtype, v_first):
    """On a frozen pool, over 200 steps, any number of tokens accepted."""
    run = Requests(family, dtype, v_first, step_device)
    pool, _ = step_pool(9, **STATE, **run.options, padding=5, seed=1)
    slots = [7, 2, 4]
    for _ in range(200):
        lengths, inputs = run.draft()
        if not any(lengths):
            continue
        indices = slot_indices(slots, step_device)
        started = ~torch.tensor(run.fresh, device=step_device)
        before = pool.clone()
        o, *written = fn(family, "{}_verify")(
            **inputs, state=pool, state_indices=indices, has_initial_state=started
        )
        assert torch.equal(pool, before)
        counts = [run.rng.randint(0, n) for n in lengths]
        fn(family, "{}_commit_")(
            *(pool, indices, slot_indices(counts, step_device), *written),
            cu_seqlens=inputs["cu_seqlens"],
            has_initial_state=started,
            **run.v_first,
        )
        starts, outputs = run.decode(inputs, lengths, counts)
        for n, expected in enumerate(outputs):
            if expected:
                got = o[0, starts[n] : starts[n] + len(expected)]
                assert relative_error(got, torch.stack(expected)) < 1e-2
                assert relative_error(pool[slots[n]], run.plain[n]) < LIMITS[dtype]
        run.leave(counts)
    others = [slot for slot in range(9) if slot not in slots]
    untouched, _ = step_pool(9, **STATE, **run.options, padding=5, seed=1)
    assert torch.equal(pool[others], untouched[others])


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", STEP_VARIANTS)
def test_what_verify_returns(step_device, variant, dtype, packed):
    """o as the step, and k, u and g in fp32 which commit turns into the states of the loop."""
    shape = {"lengths": [3, 0, 2, 8]} if packed else {"B": 4, "T": 3}
    inputs = step_tokens(variant, **shape, **SIZES, device=step_device, dtype=dtype)
    pool, _ = step_pool(6, **STATE, device=step_device)
    indices = slot_indices([5, 0, -1, 2], step_device)
    o, k, u, g = fn(variant, "{}_verify")(**inputs, state=pool, state_indices=indices)
    stepped = pool.clone()
    o_step = fn(variant)(**inputs, state=stepped, state_indices=indices)
    assert relative_error(o, o_step) < LIMITS[dtype]
    assert k.dtype == u.dtype == g.dtype == torch.float32
    assert k.shape == inputs["k"].shape and u.shape == inputs["v"].shape
    if "ungated" in variant:
        assert g.shape == (0,)
    else:
        channel = variant.split()[0] in ("kda", "gla")
        assert g.shape == ((*u.shape[:3], SIZES["K"]) if channel else u.shape[:3])
    if inputs.get("use_qk_l2norm_in_kernel"):
        norms = (k[0, :3] if packed else k[0]).norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-3, atol=0)
    for tensor in (o, k, u):
        padding = tensor[0, 3:5] if packed else tensor[2]
        assert not padding.any()
    accepted = [2, 0, 1, 99]
    expected = pool.cpu().double()
    step_oracle(
        expected, inputs | {"state_indices": indices}, dtype=torch.float32, accepted=accepted
    )
    before = pool.clone()
    fn(variant, "{}_commit_")(
        *(pool, indices, slot_indices(accepted, step_device), k, u, g),
        cu_seqlens=inputs["cu_seqlens"],
    )
    assert relative_error(pool, expected) < 1e-4
    for slot in (0, 1, 3, 4):
        assert torch.equal(pool[slot], before[slot])


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_fewer_slots_than_tokens(step_device, family):
    """Of a packed sequence the tokens beyond its slots are skipped."""
    inputs = step_tokens(family, lengths=[3, 1], **SIZES, device=step_device)
    pool, _ = step_pool(6, **STATE, device=step_device)
    before = pool.clone()
    indices = slot_indices([[0, 1], [4, 5]], step_device)
    expected = pool.cpu().double()
    reference = step_oracle(expected, inputs | {"state_indices": indices}, dtype=torch.float32)
    o = fn(family)(**inputs, state=pool, state_indices=indices)
    assert not o[0, 2].any()
    assert relative_error(o, reference) < 1e-4 and relative_error(pool, expected) < 1e-4
    assert torch.equal(pool[[2, 3, 5]], before[[2, 3, 5]])


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_write_slots_apart_from_read_slots(step_device, family):
    """Token t goes to write_indices[n, t], and is dropped where that is no slot."""
    inputs = step_tokens(family, B=2, T=2, **SIZES, device=step_device)
    pool, _ = step_pool(9, **STATE, device=step_device)
    before = pool.clone()
    slots = {
        "state_indices": slot_indices([[0, 1, 2], [3, 4, 5]], step_device),
        "write_indices": slot_indices([[6, -1, 8], [9, 7, 8]], step_device),
        "num_accepted_tokens": slot_indices([3, 2], step_device),
    }
    expected = pool.cpu().double()
    reference = step_oracle(expected, inputs | slots, dtype=torch.float32)
    o = fn(family)(**inputs, state=pool, **slots)
    assert relative_error(o, reference) < 1e-4 and relative_error(pool, expected) < 1e-4
    unchanged = [0, 1, 2, 3, 4, 5, 8]
    assert torch.equal(pool[unchanged], before[unchanged])
    assert not torch.equal(pool[6], before[6]) and not torch.equal(pool[7], before[7])

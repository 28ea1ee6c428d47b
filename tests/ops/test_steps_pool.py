"""Decode on a pool of states against the float64 token loop: slots, padding, layouts, dtypes."""

import random

import pytest
import torch

import flaop
from flaop.testing import (
    STEP_FAMILIES,
    STEP_VARIANTS,
    packed_projection,
    relative_error,
    slot_indices,
    step_oracle,
    step_pool,
    step_tokens,
)

SIZES = {"H": 1, "HV": 2, "K": 32, "V": 24}
STATE = {name: SIZES[name] for name in ("HV", "K", "V")}
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
POOLS = [
    pytest.param(dtype, v_first, id=f"{str(dtype)[6:]}-{'vk' if v_first else 'kv'}")
    for dtype in (torch.float32, torch.bfloat16)
    for v_first in (False, True)
]


def fn(variant, form="{}_step_"):
    return getattr(flaop, form.format(variant.split()[0]))


def wide(pool, v_first):
    """The pool as the oracle holds it."""
    pool = pool.mT if v_first else pool
    return pool.cpu().double().contiguous()


def assert_close(got, expected, dtype, what=""):
    assert got.shape == expected.shape
    error = relative_error(got, expected)
    assert error < LIMITS[dtype], f"{what} {error}"


def bits(x):
    """For comparisons in which NaN equals itself."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(size)


class Pool:
    """A pool that is a view of a larger cache, and what the oracle makes of it."""

    def __init__(self, slots, dtype, v_first, device, seed=0):
        self.v_first, self.dtype = v_first, dtype
        self.state, self.cache = step_pool(
            slots, **STATE, dtype=dtype, device=device, state_v_first=v_first, padding=7, seed=seed
        )
        self.expected = wide(self.state, v_first)

    def run(self, op, inputs, accepted=None):
        """Calls the op and the oracle, and compares; returns o and the slots that changed."""
        before = self.cache.clone()
        o = op(**inputs, state=self.state, state_v_first=self.v_first)
        chunk = op.__name__.startswith("chunk")
        expected = step_oracle(self.expected, inputs, dtype=None if chunk else self.dtype)
        narrow = min(self.dtype, o.dtype, key=lambda d: torch.finfo(d).bits)
        assert o.dtype == inputs["v"].dtype
        assert_close(o, expected, narrow, "o")
        changed = (bits(self.cache) != bits(before)).any(1).nonzero().flatten().tolist()
        # Around the states nothing is written.
        front, size = 7 // 3, self.state[0].numel()
        for part in (slice(0, front), slice(front + size, None)):
            assert torch.equal(self.cache[:, part], before[:, part])
        return o, changed

    def check_states(self, slots):
        for slot in slots:
            got = wide(self.state[slot], self.v_first)
            assert_close(got, self.expected[slot], self.dtype, f"slot {slot}")


def without_layout(inputs):
    return {n: x for n, x in inputs.items() if n != "state_v_first"}


@pytest.mark.parametrize("dtype, v_first", POOLS)
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_random_steps(step_device, family, dtype, v_first):
    """Requests come and go; rows are padded; slots are reused without being cleared."""
    rng = random.Random(family)
    slots = 9
    pool = Pool(slots, dtype, v_first, step_device)
    live, free, used = [], list(range(slots)), set()
    for step in range(200):
        while free and (len(live) < 2 or rng.random() < 0.2):
            live.append(free.pop(rng.randrange(len(free))))
            # What the last request left must not matter.
            pool.state[live[-1]] = torch.nan
            pool.expected[live[-1]] = torch.nan
            used.discard(live[-1])
        rows = rng.sample(live, rng.randint(1, min(len(live), 5)))
        fresh = [slot not in used for slot in rows]
        used |= set(rows)
        for _ in range(rng.randint(0, 2)):
            rows.append(rng.choice([-1, -7, slots, slots + 100]))
            fresh.append(rng.random() < 0.5)
        order = rng.sample(range(len(rows)), len(rows))
        rows, fresh = [rows[i] for i in order], [fresh[i] for i in order]
        inputs = without_layout(
            step_tokens(
                family, B=len(rows), T=rng.choice([1, 1, 1, 2, 3]), **SIZES, device=step_device,
                dtype=torch.float32, gates=rng.choice(["slow", "fast", "mixed"]), seed=step,
            )
        )  # fmt: skip
        inputs["state_indices"] = slot_indices(rows, step_device)
        inputs["has_initial_state"] = ~torch.tensor(fresh, device=step_device)
        o, changed = pool.run(fn(family), inputs)
        assert set(changed) <= set(rows)
        padding = [not 0 <= slot < slots for slot in rows]
        assert not o[padding].any()
        if rng.random() < 0.15 and len(live) > 1:
            free.append(live.pop(rng.randrange(len(live))))
    pool.check_states(used & set(live))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", STEP_VARIANTS)
def test_variants(step_device, variant, dtype, state_dtype):
    inputs = step_tokens(variant, B=3, T=2, **SIZES, device=step_device, dtype=dtype)
    v_first = dtype == torch.bfloat16
    pool = Pool(6, state_dtype, v_first, step_device)
    inputs = without_layout(inputs) | {"state_indices": slot_indices([4, -1, 0], step_device)}
    _, changed = pool.run(fn(variant), inputs)
    assert changed == [0, 4]
    pool.check_states(range(6))


@pytest.mark.parametrize("variant", STEP_VARIANTS)
def test_float64(variant):
    inputs = step_tokens(variant, B=3, T=2, **SIZES, dtype=torch.float64)
    pool = Pool(6, torch.float64, False, "cpu")
    inputs = without_layout(inputs) | {"state_indices": slot_indices([4, -1, 0])}
    pool.run(fn(variant), inputs)
    pool.check_states(range(6))


@pytest.mark.parametrize("dtype, v_first", POOLS)
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_one_call_of_many_tokens_is_many_calls(step_device, family, dtype, v_first):
    T = 8
    inputs = step_tokens(
        family, B=4, T=T, **SIZES, device=step_device, dtype=torch.bfloat16, gates="slow"
    ) | {"state_v_first": v_first}
    indices = slot_indices([2, 5, -1, 0], step_device)
    one, many = (
        step_pool(6, **STATE, dtype=dtype, device=step_device, state_v_first=v_first)[0]
        for _ in range(2)
    )
    o = fn(family)(**inputs, state=one, state_indices=indices)
    for t in range(T):
        token = {
            n: inputs[n][:, t : t + 1]
            for n in ("q", "k", "v", "g", "beta")
            if inputs.get(n) is not None
        }
        o_t = fn(family)(**{**inputs, **token}, state=many, state_indices=indices)
        assert torch.equal(o[:, t : t + 1], o_t)
    assert torch.equal(one, many)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_packed_sequences(step_device, family, index_dtype):
    """Empty ones, padding, and tokens past the last offset."""
    lengths = [0, 1, 4, 0, 8, 2, 0]
    inputs = step_tokens(family, lengths=lengths, **SIZES, device=step_device)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(index_dtype)
    inputs["cu_seqlens"][-2:] -= 1  # one token less
    pool = Pool(9, torch.float32, True, step_device)
    inputs = without_layout(inputs)
    inputs["state_indices"] = slot_indices([3, 8, 0, 9, 5, -1, 7], step_device)
    inputs["write_indices"] = slot_indices([3, 8, 1, 2, -1, 6, 4], step_device)
    o, changed = pool.run(fn(family), inputs)
    assert changed == [1, 4, 8]
    assert not o[0, -2:].any()
    pool.check_states(range(9))


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_read_and_write_slots(step_device, family):
    """A copy, in place, and a state that is not kept; all outputs are computed."""
    inputs = without_layout(step_tokens(family, B=4, T=1, **SIZES, device=step_device))
    pool = Pool(8, torch.float32, False, step_device)
    inputs["state_indices"] = slot_indices([3, 5, 1, 8], step_device)
    inputs["write_indices"] = slot_indices([7, 5, -1, 2], step_device)
    o, changed = pool.run(fn(family), inputs)
    assert changed == [5, 7]
    assert o[:3].abs().sum((1, 2, 3)).all() and not o[3].any()
    pool.check_states(range(8))


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_views_of_one_projection(step_device, family):
    """Bitwise what contiguous tensors give."""
    inputs = step_tokens(family, B=3, T=2, **SIZES, device=step_device, dtype=torch.bfloat16)
    views = packed_projection(inputs)
    copies = {n: x.contiguous() if torch.is_tensor(x) else x for n, x in views.items()}
    assert not views["q"].is_contiguous()
    indices = slot_indices([1, 0, 3], step_device)
    pools, outputs = [], []
    for given in (views, copies):
        pools.append(step_pool(4, **STATE, device=step_device)[0])
        outputs.append(fn(family)(**given, state=pools[-1], state_indices=indices))
    assert torch.equal(*outputs) and torch.equal(*pools)


@pytest.mark.parametrize("form", ["{}_step_", "chunk_{}_pool_"])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_fresh_slots_may_hold_anything(step_device, family, form):
    inputs = without_layout(step_tokens(family, B=4, T=3, **SIZES, device=step_device))
    pool = Pool(6, torch.float32, False, step_device)
    for states in (pool.state, pool.expected):
        states[[0, 1, 4]] = torch.nan
    inputs["state_indices"] = slot_indices([0, 3, 1, -1], step_device)
    inputs["has_initial_state"] = torch.tensor([False, True, False, False], device=step_device)
    _, changed = pool.run(fn(family, form), inputs)
    assert changed == [0, 1, 3]
    pool.check_states([0, 1, 2, 3, 5])


@pytest.mark.parametrize("dtype, v_first", POOLS)
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_prefill_then_steps(step_device, family, dtype, v_first):
    """70 tokens by the chunk op and 5 steps are 75 tokens in one call, and the token loop's."""
    inputs = step_tokens(family, B=3, T=75, **SIZES, device=step_device)
    inputs = without_layout(inputs) | {"state_indices": slot_indices([4, -1, 2], step_device)}
    inputs["has_initial_state"] = torch.tensor([True, True, False], device=step_device)

    def tokens(first, last):
        names = [n for n in ("q", "k", "v", "g", "beta") if inputs.get(n) is not None]
        return inputs | {n: inputs[n][:, first:last] for n in names}

    whole, pool = (Pool(6, dtype, v_first, step_device) for _ in range(2))
    prefill = fn(family, "chunk_{}_pool_")
    o, changed = whole.run(prefill, inputs)
    assert changed == [2, 4]
    o_70, changed = pool.run(prefill, tokens(0, 70))
    assert changed == [2, 4]
    pieces = [o_70]
    inputs["has_initial_state"] = None
    for t in range(70, 75):
        o_t, changed = pool.run(fn(family), tokens(t, t + 1))
        assert set(changed) <= {2, 4}
        pieces.append(o_t)
    pool.check_states([2, 4])
    assert_close(torch.cat(pieces, 1), o, dtype)
    for slot in (2, 4):
        assert_close(pool.state[slot], whole.state[slot], dtype)


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_packed_prefill(step_device, family):
    inputs = step_tokens(family, lengths=[0, 70, 1, 0, 130], **SIZES, device=step_device)
    pool = Pool(9, torch.float32, False, step_device)
    inputs = without_layout(inputs)
    inputs["state_indices"] = slot_indices([3, 8, -1, 9, 5], step_device)
    inputs["write_indices"] = slot_indices([6, 8, 1, 2, 0], step_device)
    o, changed = pool.run(fn(family, "chunk_{}_pool_"), inputs)
    assert changed == [0, 6, 8]
    assert not o[0, 70].any()
    pool.check_states(range(9))


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_checkpoints(step_device, family, dtype, packed):
    """The state every 64 tokens in slots of its own; the outputs are those of a plain call."""
    shape = {"lengths": [150, 0, 64, 63, 200]} if packed else {"B": 3, "T": 150}
    inputs = step_tokens(family, **shape, **SIZES, device=step_device, gates="slow")
    inputs = without_layout(inputs)
    if packed:
        indices = [0, 1, 2, 3, -1]
        to = [[10, 11, -1], [12, -1, -1], [2, -1, -1], [13, -1, -1], [14, 15, 16]]
        kept = [0, 2, 3, 10, 11]
    else:
        indices, to, kept = [5, -1, 2], [[6, 8], [0, 1], [20, 9]], [2, 5, 6, 8, 9]
    if packed:  # M >= T // 64
        to = [row + [-1] * (sum(shape["lengths"]) // 64 - 3) for row in to]
    inputs["state_indices"] = slot_indices(indices, step_device)
    plain, pool = (Pool(20, dtype, True, step_device) for _ in range(2))
    prefill = fn(family, "chunk_{}_pool_")
    o_plain, _ = plain.run(prefill, inputs)
    inputs |= {"checkpoint_interval": 64, "checkpoint_indices": slot_indices(to, step_device)}
    o, changed = pool.run(prefill, inputs)
    assert changed == kept
    pool.check_states(range(20))
    assert_close(o, o_plain, torch.float32)
    for slot in kept[: 3 if packed else 2]:
        if slot in indices:
            assert_close(pool.state[slot], plain.state[slot], dtype)


@pytest.mark.parametrize("form", ["{}_step_", "chunk_{}_pool_", "{}_verify"])
@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_nothing_to_do(step_device, family, form):
    """No rows, no sequences, no slots, nothing but padding."""
    op = fn(family, form)

    def call(indices, slots=3, **shape):
        inputs = step_tokens(family, **shape, **SIZES, device=step_device)
        pool, _ = step_pool(slots, **STATE, device=step_device)
        before = pool.clone()
        o = op(**inputs, state=pool, state_indices=slot_indices(indices, step_device))
        o = o[0] if isinstance(o, tuple) else o
        assert o.shape == inputs["v"].shape and not o.any()
        assert torch.equal(pool, before)

    call([], B=0, T=1)
    call([], lengths=[])
    call([0, 1], B=2, T=0)
    call([0, 2], lengths=[0, 0])
    call([0, 1], slots=0, B=2, T=1)
    call([-1, 3], B=2, T=2)


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_the_version_is_bumped_and_gradients_are_refused(step_device, family):
    inputs = step_tokens(family, B=2, T=1, **SIZES, device=step_device)
    pool, cache = step_pool(3, **STATE, device=step_device)
    indices = slot_indices([0, 1], step_device)
    given = {"state": pool, "state_indices": indices}
    fn(family)(**inputs, **given)
    assert pool._version == cache._version == 1
    fn(family, "chunk_{}_pool_")(**inputs, **given)
    assert pool._version == 2
    _, *written = fn(family, "{}_verify")(**inputs, **given)
    assert pool._version == 2
    commit = fn(family, "{}_commit_")
    accepted = slot_indices([1, 1], step_device)
    commit(pool, indices, accepted, *written)
    assert pool._version == 3
    with torch.inference_mode():
        fn(family)(**inputs, **given)
        assert pool._version == 4
        fn(family)(**inputs, state=pool.clone(), state_indices=indices)
    # A state made in inference mode has no version; outside of it nothing goes wrong.
    with torch.inference_mode():
        frozen = pool.clone()
    fn(family)(**inputs, state=frozen, state_indices=indices)
    assert pool._version == 4
    inputs["v"].requires_grad_()
    for form in ("{}_step_", "chunk_{}_pool_", "{}_verify"):
        with pytest.raises(NotImplementedError, match="not differentiable"):
            fn(family, form)(**inputs, **given)
    with pytest.raises(NotImplementedError, match="not differentiable"):
        commit(pool.clone().requires_grad_(), indices, accepted, *written)
    with torch.no_grad():
        fn(family)(**inputs, **given)
    saved = torch.ones(3, requires_grad=True) if step_device == "cpu" else None
    if saved is not None:
        product = (pool[:, 0, 0, 0] * saved).sum()
        fn(family)(**{**inputs, "v": inputs["v"].detach()}, **given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

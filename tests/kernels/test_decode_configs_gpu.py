"""Every configuration row of the kernels on a pool of states, alone, against the token loop.

A row is met by the head sizes of a case, powers of two and others, in both layouts; the families
and their options take turns with them. Memory that no kernel wrote reads as NaN.
"""

import itertools

import pytest
import torch
from flaop.triton_kernels.configs import decode as configs

from flaop.launch import decode
from flaop.testing.cases import pairwise
from flaop.testing.configurations import nan_memory, rows
from flaop.testing.launches import DTYPES
from flaop.testing.step_checks import SLOTS, assert_step, make_step, wide_pool
from flaop.testing.step_inputs import STEP_VARIANTS, slot_indices
from flaop.testing.step_oracle import step_oracle
from flaop.validation import steps

# By the tile that fits them: head sizes that fill it, and such that are no powers of two.
K_SIZES = {256: (256, 200), 128: (128, 100), 64: (64, 60), 32: (32, 20), 16: (16, 12)}
V_SIZES = {64: (128, 72), 32: (32, 24), 16: (16, 12), 8: (8, 5)}
LAYOUTS = (False, True)
AXES = {"dtype": list(DTYPES), "K": list(K_SIZES), "V": list(V_SIZES), "v_first": list(LAYOUTS)}
PAIRS = [tuple(case.values()) for case in pairwise(**AXES)]
VARIANTS = list(STEP_VARIANTS)


def step_v_first(*problem):
    return configs.step(*problem, True)


def step_k_first(*problem):
    return configs.step(*problem, False)


def commit_v_first(*problem):
    return configs.commit(*problem, True)


def commit_k_first(*problem):
    return configs.commit(*problem, False)


ROWS = {
    True: (step_v_first, commit_v_first, configs.checkpoint),
    False: (step_k_first, commit_k_first, configs.checkpoint),
}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("v_first", LAYOUTS)
def test_the_cases_meet_every_row(v_first, arch):
    """No head size, more channels than a program holds included, has a row that those lack."""
    known = set()
    for dtype, K, V in itertools.product(DTYPES, K_SIZES.values(), V_SIZES.values()):
        known |= rows(ROWS[v_first], arch, dtype, K[0], V[0])
    sizes = [size + more for size in (1, 8, 16, 32, 64, 128, 255) for more in (0, 1)]
    for dtype, K, V in itertools.product(DTYPES, (*sizes, 300), (*sizes, 1000)):
        assert rows(ROWS[v_first], arch, dtype, K, V) <= known, (dtype, K, V)


def cases():
    for i, case in enumerate(itertools.product(*AXES.values())):
        dtype, K, V, v_first = case
        odd, variant = (i // 2 + i // 8) % 2, VARIANTS[(i // 2 + 5 * v_first) % len(VARIANTS)]
        values = dtype, K_SIZES[K][odd], V_SIZES[V][odd], v_first, variant
        marks = [] if case in PAIRS else [pytest.mark.slow]
        yield pytest.param(*values, id="-".join(map(str, values)), marks=marks)


def launch(made, function, check, limit=None, **slots):
    """One launch over memory of NaN, against the token loop; its result."""
    arguments = {**made.arguments, **slots}
    on_cpu = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    before, pool = made.cache.clone(), wide_pool(arguments)
    rounding = None if function is decode.chunk_pool else arguments["state"].dtype
    expected_o = step_oracle(pool, on_cpu, dtype=rounding)
    points = ("checkpoint_interval", "checkpoint_indices")
    given = {n: x for n, x in arguments.items() if n not in points or x is not None}
    with nan_memory():
        o = function(check(made.family, **given))
    assert_step(arguments, before, made.cache, o, pool, expected_o, limit)
    return o


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, K, V, v_first, variant", list(cases()))
def test_step_and_commit(dtype, K, V, v_first, variant):
    """Batched with a slot a row, packed with a slot a token and empty sequences, verify and commit;
    one call of three tokens is three calls, bit for bit."""
    sizes = {
        "K": K, "V": V, "state_v_first": v_first, "pool_dtype": DTYPES[dtype],
        "dtype": torch.bfloat16, "device": "cuda", "padding": 40,
    }  # fmt: skip
    batched = {**sizes, "B": 3, "T": 3, "H": 2, "HV": 4}
    made = make_step(variant, **batched)
    made.arguments["state"][0] = torch.nan
    slots = {
        "state_indices": slot_indices([5, 0, SLOTS], "cuda"),
        "has_initial_state": torch.tensor([True, False, True], device="cuda"),
    }
    kept = verify_alone(made, slots)
    made.arguments["state"][0] = 0.0
    o = launch(made, decode.step, steps.check_step, **slots)

    calls = make_step(variant, **batched)
    parts = []
    for t in range(3):
        token = {
            n: x[:, t : t + 1]
            for n in ("q", "k", "v", "g", "beta")
            if (x := calls.arguments.get(n)) is not None
        }
        parts.append(decode.step(steps.check_step(
            calls.family, **{**calls.arguments, **token, **slots}
        )))  # fmt: skip
        slots["has_initial_state"] = torch.ones(3, dtype=torch.bool, device="cuda")
    assert torch.equal(o, torch.cat(parts, 1))
    assert torch.equal(made.arguments["state"][[0, 5]], calls.arguments["state"][[0, 5]])

    check_commit(make_step(variant, **batched), kept, made.arguments["state"])

    packed = {**sizes, "lengths": [3, 0, 1, 4], "H": 1, "HV": 3}
    made = make_step(variant, **packed)
    table = [[0, 1, 2, 3], [4, 4, 4, 4], [5, 6, -1, -1], [7, 8, SLOTS, 7]]
    slots = {
        "state_indices": slot_indices(table, "cuda"),
        "num_accepted_tokens": torch.tensor([2, 9, 2, 0], dtype=torch.int32, device="cuda"),
    }
    launch(made, decode.step, steps.check_step, **slots)


def verify_alone(made, slots):
    """k, u and g of the tokens; the pool stays as it is."""
    before = made.cache.clone()
    with nan_memory():
        _, *kept = decode.verify(steps.check_verify(made.family, **made.arguments, **slots))
    assert all(x.isfinite().all() for x in kept)
    assert torch.equal(before.nan_to_num(), made.cache.nan_to_num())
    return kept


def check_commit(made, kept, expected):
    """All three tokens of the first row, and two of the second: as many steps, but for rounding."""
    arguments = made.arguments
    before = made.cache.clone()
    arguments["state"][0] = torch.nan
    accepted = torch.tensor([3, 2, 1], dtype=torch.int32, device="cuda")
    k, u, g = kept
    decode.commit(steps.check_commit(
        state=arguments["state"], state_indices=slot_indices([5, 0, SLOTS], "cuda"),
        num_accepted_tokens=accepted, k=k, u=u, g=g, state_v_first=arguments["state_v_first"],
        has_initial_state=torch.tensor([True, False, True], device="cuda"),
    ))  # fmt: skip
    state = arguments["state"].double()
    wide = expected.double()
    limit = 1e-5 if expected.dtype == torch.float32 else 1e-2
    assert (state[5] - wide[5]).norm() < limit * wide[5].norm()
    assert state[0].isfinite().all()
    others = [slot for slot in range(SLOTS) if slot not in (0, 5)]
    assert torch.equal(before[others], made.cache[others])


# Of the chunk paths, which have rows of their own: their states go through the kernels of the pool.
POOLS = [
    ("kda", "bf16", 128, 128, True), ("kda given", "fp32", 64, 72, False),
    ("gated_delta_rule", "fp32", 128, 128, False), ("gated_delta_rule given", "bf16", 60, 24, True),
    ("simple_gla", "bf16", 128, 128, False), ("simple_gla ungated", "fp16", 100, 64, True),
    ("gla", "fp32", 128, 64, True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("variant, dtype, K, V, v_first", POOLS)
def test_prefill(variant, dtype, K, V, v_first):
    """Into slots and checkpoints, packed with empty sequences and padding, and batched."""
    sizes = {
        "K": K, "V": V, "state_v_first": v_first, "pool_dtype": DTYPES[dtype],
        "dtype": torch.bfloat16, "device": "cuda", "padding": 40,
    }  # fmt: skip
    for more in ({"lengths": [130, 0, 64, 70, 256], "HV": 2}, {"B": 5, "T": 128}):
        made = make_step(variant, **sizes, **more)
        points = torch.full((5, made.arguments["q"].shape[1] // 64), -1, dtype=torch.int32)
        points[0, 0], points[2, 0], points[4, 1] = 0, 1, SLOTS
        launch(
            made, decode.chunk_pool, steps.check_pool, limit=2e-2,
            state_indices=slot_indices([2, 4, 3, -1, 5], "cuda"),
            write_indices=slot_indices([2, -1, 3, 6, 8], "cuda"),
            has_initial_state=torch.tensor([True, True, False, True, True], device="cuda"),
            checkpoint_interval=64, checkpoint_indices=points.cuda(),
        )  # fmt: skip

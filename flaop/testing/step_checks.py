"""A decode op's outputs and every slot of its pool against the token loop."""

from typing import NamedTuple

import torch
from torch import Tensor

from flaop.testing.comparison import relative_error
from flaop.testing.step_inputs import step_pool, step_tokens

SLOTS = 9
# Of whole tensors: what rounding of inputs' dtype or of the pool's may leave.
LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Made(NamedTuple):
    """Arguments of a step op without slots."""

    family: str
    arguments: dict
    cache: Tensor  # [slots, size], which the pool is a view of


def make_step(
    variant: str,
    pool_dtype: torch.dtype = torch.float32,
    padding: int = 0,
    device: str = "cpu",
    **sizes,
) -> Made:
    """Inputs as step_tokens makes them, with a pool of SLOTS slots, ``padding`` between them."""
    sizes = {"H": 1, "K": 16, "V": 24, **sizes}
    arguments = step_tokens(variant, device=device, **sizes)
    v_first = sizes.get("state_v_first", False)
    shape = SLOTS, arguments["v"].shape[2], sizes["K"], sizes["V"]
    pool, cache = step_pool(
        *shape, dtype=pool_dtype, state_v_first=v_first, padding=padding, device=device
    )
    return Made(variant.split()[0], {**arguments, "state": pool}, cache)


def wide_pool(arguments: dict) -> Tensor:
    """The pool as the token loop takes it: float64 ``[slots, HV, K, V]`` on the CPU."""
    pool = arguments["state"].cpu().double()
    return pool.mT.contiguous() if arguments["state_v_first"] else pool.clone()


def assert_step(
    arguments: dict,
    before: Tensor,
    cache: Tensor,
    o: Tensor,
    pool: Tensor,
    expected_o: Tensor,
    limit: float | None = None,
) -> None:
    """``before`` is the cache as it was, ``pool`` and ``expected_o`` are the token loop's.

    Slots that the loop leaves alone, and what lies around slots, must be as they were bit for bit.
    """
    state, cache, o = arguments["state"].cpu(), cache.cpu(), o.cpu()
    limit = limit or max(LIMITS[o.dtype], LIMITS[state.dtype])
    assert torch.isfinite(o).all() and o.shape == expected_o.shape
    assert relative_error(o, expected_o) < limit
    assert not o[(expected_o == 0).all(-1)].any()
    # the cache as it should be: with the new states where they belong
    where = arguments["state"].storage_offset() - cache.storage_offset()
    wanted = before.cpu().clone()
    old = wanted.as_strided(state.shape, arguments["state"].stride(), where)
    for slot, (got, was) in enumerate(zip(wide_pool(arguments), old)):
        was = was.mT if arguments["state_v_first"] else was
        if not torch.equal(pool[slot], was.double()):
            assert relative_error(got, pool[slot]) < limit, f"slot {slot}"
            old[slot] = state[slot]
    assert torch.equal(wanted, cache), "what belongs to no written slot changed"

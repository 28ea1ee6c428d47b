"""Fixtures shared by the tests: devices, seeds, poisoned memory."""

import collections
import os
import sys

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped, not failed, on a machine without one."""
    if torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords and "slow_on_gpu" in item.keywords:
                item.add_marker("slow")
        if "PYTEST_XDIST_WORKER" in os.environ:
            spread(items)
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def spread(items):
    """Cases of one function apart: at the same time they would compile the same kernels."""
    met = collections.Counter()
    place = {}
    for item in items:
        function = item.nodeid.split("[")[0]
        place[item] = met[function]
        met[function] += 1
    items.sort(key=place.__getitem__)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU always, CUDA where there is one."""
    return request.param


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_launches():
    """For tests that make a launcher choose otherwise: no launch is remembered before or after."""
    from flaop._extension import bindings

    bindings.forget()
    yield bindings.forget
    bindings.forget()


@pytest.fixture
def poison():
    """poison(device, dtype, *shapes): NaN in the memory that outputs of these shapes will get."""

    def fill(device, dtype, *shapes):
        # Freed together, so that as many blocks wait for the outputs.
        blocks = [torch.full(shape, torch.nan, dtype=dtype, device=device) for shape in shapes]
        del blocks

    return fill


@pytest.fixture(autouse=True, scope="session")
def kernels_under_their_own_name():
    """The bare name triton_kernels belongs to another package."""
    yield
    assert "triton_kernels" not in sys.modules

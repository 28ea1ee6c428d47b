"""Processes for the tests of context parallelism, four of them, kept from test to test."""

import pytest

from flaop.testing.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.stop()

"""Interpreter tests have a process of their own: TRITON_INTERPRET=1 acts at a kernel's import."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter(request):
    """Skips outside the interpreter; inside it, memory that no kernel wrote reads as NaN."""
    if not request.path.name.endswith("_interpret.py"):
        yield
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    torch.use_deterministic_algorithms(True)  # fills torch.empty
    yield
    torch.use_deterministic_algorithms(False)

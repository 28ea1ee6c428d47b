"""Launches on the GPU: streams, capture, threads, alignment, and shipped code without triton."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import flaop
from flaop.testing import kda_inputs, relative_error

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles: not in the interpreter's process", allow_module_level=True)

pytestmark = pytest.mark.gpu

FUSED = {"gate_in_kernel": "softplus", "l2norm": True, "beta_sigmoid": True}


def inputs(device="cuda", T=130, seed=0, dtype=torch.bfloat16):
    sizes = {"B": 1, "T": T, "H": 2, "K": 128, "V": 128}
    return kda_inputs(**sizes, dtype=dtype, device=device, seed=seed, **FUSED)


def test_a_kernel_runs_on_the_current_stream():
    """Inputs that a busy side stream makes are read after they are made."""
    x = inputs()
    expected = flaop.chunk_kda(**x)[0]
    noise = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    q = torch.full_like(x["q"], float("nan"))
    with torch.cuda.stream(side):
        for _ in range(30):
            noise = torch.mm(noise, noise).clamp(-1, 1)
        q.copy_(x["q"])
        got = flaop.chunk_kda(**{**x, "q": q})[0]
    side.synchronize()
    assert torch.equal(got, expected)


def test_capture_on_a_side_stream_replays_with_new_values():
    first, second = inputs(seed=1), inputs(seed=2)
    flaop.chunk_kda(**first)
    expected = flaop.chunk_kda(**second)[0]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin()
        got = flaop.chunk_kda(**first)[0]
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    for name, x in second.items():
        if isinstance(x, torch.Tensor):
            first[name].copy_(x)
    graph.replay()
    assert torch.equal(got, expected)


def test_a_thread_that_has_not_used_cuda_launches():
    x, found = inputs(), []
    expected = flaop.chunk_kda(**x)[0]
    thread = threading.Thread(target=lambda: found.append(flaop.chunk_kda(**x)[0]))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_process():
    here, there = inputs("cuda:0"), inputs("cuda:1")
    expected = flaop.chunk_kda(**here)[0]
    got = flaop.chunk_kda(**there)[0]  # cuda:0 is the current device
    assert torch.equal(got.cpu(), expected.cpu())


def step_arguments(offset=0, seed=0):
    """Arguments of a step; the rows of q start `offset` numbers into their storage."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    B, H, K = 3, 2, 128
    q = draw(B * H * K + offset)[offset:].view(B, 1, H, K)
    k, v, g, beta = draw(B, 1, H, K), draw(B, 1, H, K), draw(B, 1, H, K), draw(B, 1, H)
    state = draw(5, H, K, K).float()
    slots = torch.tensor([4, -1, 2], device="cuda", dtype=torch.int32)
    return q, k, v, g, beta, state, slots


OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def gate_parameters():
    return {
        "A_log": torch.zeros(2, device="cuda"),
        "dt_bias": torch.zeros(2, 128, device="cuda"),
    }


def step(arguments):
    """Output and pool of a step, whose pool is a copy."""
    *inputs, state, slots = arguments
    state = state.clone()
    o = flaop.kda_step_(*inputs, state, slots, **gate_parameters(), **OPTIONS)
    return o, state


def test_pointers_of_any_alignment():
    """Code for aligned pointers is not used for others, also where it was loaded first.

    Rows that are read in other pieces are summed in another order.
    """
    expected = step(step_arguments())
    for offset in (1, 4, 8):
        arguments = step_arguments()
        q = step_arguments(offset)[0]
        q.copy_(arguments[0])
        got = step((q, *arguments[1:]))
        for x, y in zip(got, expected, strict=True):
            assert relative_error(x, y) < 1e-3, offset


def test_a_step_goes_without_python_from_the_second_call_on(monkeypatch):
    from flaop.launch import decode

    first, second = step_arguments(seed=3), step_arguments(seed=4)
    expected = [step(x) for x in (first, second)]

    def refuse(call, remember):
        raise AssertionError("the launcher in Python was called")

    with monkeypatch.context() as patch:
        patch.setattr(decode, "step", refuse)
        for arguments, (o, state) in zip((first, second), expected, strict=True):
            got_o, got_state = step(arguments)
            assert torch.equal(got_o, o) and torch.equal(got_state, state)
        # a pool with other strides is another kind of call
        with pytest.raises(AssertionError, match="in Python"):
            *rest, state, slots = first
            step((*rest, torch.cat([state, state], 0), slots))
    # tensors that share an address are told apart from those that do not
    o, _ = step((first[1], *first[1:]))
    plain, _ = step((first[1].clone(), *first[1:]))
    assert torch.equal(o, plain)


_WITHOUT_TRITON = """
import pathlib, sys
import torch
import flaop
from flaop.launch import archive

archive.PATH = pathlib.Path(sys.argv[1])
x = torch.load(sys.argv[2])
o, _ = flaop.chunk_kda(**x["chunk"])
state = x["state"]
y = flaop.kda_step_(*x["inputs"], state, x["slots"], **x["options"])
loaded = any(name.split(".")[0] == "triton" for name in sys.modules)
torch.save({"o": o, "y": y, "state": state, "triton": loaded}, sys.argv[3])
"""


def test_shipped_code_runs_without_triton(tmp_path):
    """And gives the numbers of what this Triton compiles, bit for bit."""
    from flaop import aot

    arch = 10 * torch.cuda.get_device_capability()[0]
    path = tmp_path / "_archive.bin"
    groups = [aot.Group(kind, arch, "bf16", 128) for kind in ("kda", "step")]
    aot.make(path, groups, os.cpu_count())
    *rest, state, slots = step_arguments()
    options = OPTIONS | gate_parameters()
    chunk = {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in inputs().items()}
    given = {
        "chunk": chunk,
        "inputs": tuple(rest),
        "state": state,
        "slots": slots,
        "options": options,
    }
    torch.save(given, tmp_path / "in.pt")
    results = []
    for aot_on in ("1", "0"):
        out = tmp_path / f"{aot_on}.pt"
        command = [sys.executable, "-c", _WITHOUT_TRITON, path, tmp_path / "in.pt", out]
        subprocess.run(command, check=True, env={**os.environ, "FLAOP_AOT": aot_on})
        results.append(torch.load(out))
    shipped, compiled = results
    assert not shipped["triton"] and compiled["triton"]
    for name in ("o", "y", "state"):
        assert torch.equal(shipped[name], compiled[name]), name

"""Sets of options that the CUDA tests of the ops share, compiled side by side before the first one.

A kernel variant takes seconds to compile: CUDA cases vary lengths, gates and values within these
sets, which differ in head sizes, dtypes and flags.
"""

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flaop
from flaop.testing import gdn_inputs, gla_inputs, kda_inputs, simple_gla_inputs

# Arguments of kda_inputs.
FAMILIES = {
    "main": {
        "dtype": "bfloat16", "K": 128, "V": 128, "gate_in_kernel": "bounded", "l2norm": True,
        "beta_sigmoid": True, "initial_state": True,
    },
    "packed": {
        "dtype": "bfloat16", "K": 128, "V": 128, "gate_in_kernel": "bounded", "l2norm": True,
        "beta_sigmoid": True, "initial_state": True, "H": 1, "HV": 2, "lengths": [0, 1, 40, 0, 89],
    },
    "softplus": {
        "dtype": "float16", "K": 64, "V": 24, "H": 2, "HV": 4, "gate_in_kernel": "softplus",
        "l2norm": True, "neg_eigval": True,
    },
    "plain": {
        "dtype": "float32", "K": 60, "V": 24, "initial_state": True, "lengths": [0, 1, 40, 0, 89],
    },
    "wide": {
        "dtype": "bfloat16", "K": 256, "V": 128, "gate_in_kernel": "softplus", "l2norm": True,
        "initial_state": True, "state_v_first": True,
    },
    "odd": {
        "dtype": "float32", "K": 100, "V": 128, "H": 1, "HV": 2, "gate_in_kernel": "bounded",
        "beta_sigmoid": True, "lengths": [0, 1, 40, 0, 89],
    },
    "small": {
        "dtype": "float32", "K": 16, "V": 24, "H": 1, "gate_in_kernel": "softplus", "l2norm": True,
        "beta_sigmoid": True,
    },
}  # fmt: skip
STATELESS = {"initial_state": False, "output_final_state": False}
FAMILIES["main without state"] = FAMILIES["main"] | STATELESS
FAMILIES["packed without state"] = FAMILIES["packed"] | STATELESS
PATHS = ("chunk_kda", "fused_recurrent_kda")


# Arguments of simple_gla_inputs; with a gate per channel, those of gla_inputs.
DECAY_FAMILIES = {
    "simple main": {
        "dtype": "bfloat16", "K": 128, "V": 128, "gate": "g", "initial_state": True,
    },
    "simple packed": {
        "dtype": "bfloat16", "K": 128, "V": 128, "gate": "both", "initial_state": True,
        "H": 1, "HV": 2, "lengths": [0, 1, 40, 0, 89],
    },
    "simple constant": {
        "dtype": "bfloat16", "K": 256, "V": 256, "gate": "g_gamma", "H": 1, "HV": 2,
    },
    "simple without gate": {
        "dtype": "float16", "K": 64, "V": 24, "gate": None, "H": 2, "HV": 4,
        "initial_state": True, "state_v_first": True,
    },
    "simple odd": {
        "dtype": "float32", "K": 60, "V": 24, "gate": "both", "initial_state": True,
        "lengths": [0, 1, 40, 0, 89],
    },
    "simple wide": {"dtype": "bfloat16", "K": 300, "V": 128, "gate": "g", "H": 1, "HV": 2},
    "channel main": {
        "dtype": "bfloat16", "K": 128, "V": 128, "gate": "channel", "initial_state": True,
    },
    "channel packed": {
        "dtype": "float16", "K": 64, "V": 24, "gate": "channel", "initial_state": True,
        "state_v_first": True, "H": 1, "HV": 2, "lengths": [0, 1, 40, 0, 89],
    },
    "channel odd": {
        "dtype": "float32", "K": 100, "V": 128, "gate": "channel", "initial_state": True,
        "lengths": [0, 1, 40, 0, 89],
    },
    "channel 256": {"dtype": "bfloat16", "K": 256, "V": 128, "gate": "channel", "H": 1, "HV": 2},
    "channel wide": {
        "dtype": "bfloat16", "K": 300, "V": 128, "gate": "channel", "H": 1, "initial_state": True,
    },
    "channel small": {"dtype": "float32", "K": 16, "V": 24, "gate": "channel", "H": 1},
    "channel and value": {
        "dtype": "bfloat16", "K": 128, "V": 128, "gate": "channel and value",
        "initial_state": True,
    },
}  # fmt: skip


# Arguments of gdn_inputs, whose gate is called head_gate here.
DELTA_FAMILIES = {
    "delta main": {
        "dtype": "bfloat16", "K": 128, "V": 128, "head_gate": "softplus", "l2norm": True,
        "beta_sigmoid": True, "initial_state": True, "H": 1, "HV": 2,
    },
    "delta packed": {
        "dtype": "bfloat16", "K": 128, "V": 128, "head_gate": "softplus", "l2norm": True,
        "beta_sigmoid": True, "initial_state": True, "H": 1, "HV": 2,
        "lengths": [0, 1, 40, 0, 89],
    },
    "delta given gate": {
        "dtype": "float16", "K": 64, "V": 24, "head_gate": "g", "H": 2, "HV": 4,
        "initial_state": True, "state_v_first": True,
    },
    "delta without gate": {
        "dtype": "float32", "K": 60, "V": 24, "head_gate": None, "l2norm": True,
        "neg_eigval": True, "initial_state": True, "lengths": [0, 1, 40, 0, 89],
    },
    "delta wide": {
        "dtype": "bfloat16", "K": 256, "V": 128, "head_gate": "softplus", "l2norm": True,
        "initial_state": True, "state_v_first": True,
    },
    "delta odd": {
        "dtype": "float32", "K": 100, "V": 128, "head_gate": "g", "H": 1, "HV": 2,
        "lengths": [0, 1, 40, 0, 89],
    },
    "delta small": {
        "dtype": "float32", "K": 16, "V": 24, "head_gate": "softplus", "H": 1, "l2norm": True,
        "beta_sigmoid": True,
    },
}  # fmt: skip


def paths(options):
    """The ops that serve a family."""
    if "head_gate" in options:
        return ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    if "gate" not in options:
        return PATHS
    if options["gate"] == "channel and value":
        return ("fused_recurrent_gla",)
    name = "gla" if options["gate"] == "channel" else "simple_gla"
    return (f"chunk_{name}", f"fused_recurrent_{name}")


def arguments(family, **changes):
    """Inputs of an op: a family with some arguments of its inputs function changed."""
    known = FAMILIES | DECAY_FAMILIES | DELTA_FAMILIES
    options = {"T": 130, **known.get(family, {}), **changes}
    options["dtype"] = getattr(torch, options.get("dtype", "float32"))
    if "head_gate" in options:
        return gdn_inputs(gate=options.pop("head_gate"), **options)
    if "gate" not in options:
        return kda_inputs(**options)
    gate = options.pop("gate")
    if gate in ("channel", "channel and value"):
        return gla_inputs(value_gate=gate != "channel", **options)
    return simple_gla_inputs(gate=gate, **options)


@pytest.fixture(scope="session", name="arguments")
def arguments_fixture():
    return arguments


@pytest.fixture(scope="session")
def compiled_families(tmp_path_factory):
    """Fills Triton's cache on disk, one process for each family and path, the slowest first."""
    command = [sys.executable, os.path.abspath(__file__)]
    chunk, recurrent = [], []
    for family, options in (FAMILIES | DELTA_FAMILIES | DECAY_FAMILIES).items():
        for path in paths(options):
            jobs = chunk if path.startswith("chunk_") else recurrent
            jobs.append([*command, family, path, "cuda"])
    # The processes of one parallel run share a folder: the first of them compiles for all.
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "compiled_families", "a+") as done:
        fcntl.flock(done, fcntl.LOCK_EX)
        if done.seek(0, os.SEEK_END) == 0:
            with ThreadPoolExecutor(max(os.cpu_count() - 2, 1)) as pool:
                # What fails here fails again in a test, with a better message.
                list(pool.map(subprocess.run, chunk + recurrent))
            done.write("compiled")


@pytest.fixture
def device(device, request):
    """The device of the tests, with its kernels compiled."""
    if device == "cuda":
        request.getfixturevalue("compiled_families")
    return device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def decay_device(request):
    """The device of the tests of the decay families, with their kernels compiled."""
    if request.param == "cuda":
        request.getfixturevalue("compiled_families")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def delta_device(request):
    """The device of the tests of the gated delta rule, with its kernels compiled."""
    if request.param == "cuda":
        request.getfixturevalue("compiled_families")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def step_device(request, single_thread):
    """The device of the tests of the decode ops, whose kernels compile in a second."""
    return request.param


@pytest.fixture
def poisoned_memory():
    """Memory that nothing wrote reads as NaN, workspaces included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def single_thread():
    """Products this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def launch_every_kernel(path, inputs):
    """Each combination of what may be asked for and what may be absent."""
    fn = getattr(flaop, path)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    with torch.no_grad():
        fn(**inputs)
        fn(**{**inputs, "output_final_state": False})
    outputs = [x for x in fn(**inputs) if x is not None]
    for part in (outputs, outputs[:1], outputs[1:]):
        for wanted in (leaves, inputs["v"]):
            if part:
                weights = [torch.ones_like(x) for x in part]
                torch.autograd.grad(part, wanted, weights, retain_graph=True, allow_unused=True)


if __name__ == "__main__":
    family, path, device_type = sys.argv[1:]
    launch_every_kernel(path, arguments(family, requires_grad=True, device=device_type))

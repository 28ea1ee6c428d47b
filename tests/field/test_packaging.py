"""Field reports on packaging and import (P)."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import flaop

ROOT = pathlib.Path(flaop.__file__).parent
SOURCE = ROOT.parent


def python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def symbols(kind):
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    command = ["nm", "-D", kind, str(ROOT / "_C.so")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_P01_undefined_symbols_are_none_of_cuda_internals():
    """The extension of a CPU build must load anywhere: no symbol of c10::cuda, no Python."""
    names = symbols("--undefined-only")
    assert "c10" in names
    assert not re.search(r"\bPy[A-Z]|N3c104cuda|N2at4cuda", names)


def test_P01_a_static_standard_library_is_private():
    """Beside torch's, its locales would print no number in an error message, or crash."""
    names = symbols("--defined-only")
    assert "flaop" in names
    assert not re.search(r"St6locale|St7codecvt", names)


def test_P02_the_build_without_nvcc_says_so():
    from flaop._extension import BUILD

    assert BUILD["cuda_library"] or BUILD["cuda_note"]


def test_P03_the_dispatcher_reads_what_is_built():
    """A path that is not built for the device is declined in a sentence, never tried."""
    from flaop.testing import kda_inputs

    inputs = kda_inputs(T=100, H=1, K=128, V=128, dtype=torch.bfloat16)
    assert not flaop.supports("flash_kda", flaop.kda, **inputs)
    assert any(s.startswith("flash_kda: ") for s in flaop.explain(flaop.kda, **inputs).passed_over)


def test_P05_import_leaves_cuda_alone_and_forks():
    """Import, ops, a module on meta, then a fork: the child may do as it likes."""
    python(
        "import os, torch, flaop, flaop.nn\n"
        "x = torch.empty(1, 70, 1, 16, device='meta')\n"
        "flaop.kda(x, x, x, x, x[..., 0])\n"
        "assert not torch.cuda.is_initialized()\n"
        "opened = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "          if os.path.islink(f'/proc/self/fd/{fd}')]\n"
        "assert not [path for path in opened if 'nvidia' in path], opened\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "    y = torch.rand(1, 7, 1, 16, device=device)\n"
        "    flaop.kda(y, y, y, -y, y[..., 0])[0].cpu()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n",
        OMP_NUM_THREADS="1",
    )


def test_P06_without_triton():
    """Import, fake tensors, export and the CPU forward, as on a machine without a driver."""
    python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, flaop\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "x = torch.rand(1, 70, 1, 16)\n"
        "class Block(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return flaop.kda(x, x, x, -x, x[..., 0])[0]\n"
        "with FakeTensorMode() as mode:\n"
        "    assert Block()(mode.from_tensor(x)).shape == x.shape\n"
        "program = torch.export.export(Block(), (x,))\n"
        "assert torch.equal(program.module()(x), Block()(x))\n",
        CUDA_VISIBLE_DEVICES="",
    )


MODULES = sorted(
    str(file.relative_to(SOURCE).with_suffix("")).replace(os.sep, ".").removesuffix(".__init__")
    for file in ROOT.rglob("*.py")
    if file.name != "__main__.py"
)


def test_P07_every_module_imports_by_itself():
    """In one child, each from a clean slate of flaop's modules; those of the GPU need triton."""
    pytest.importorskip("triton")
    python(
        "import importlib, sys, torch, flaop\n"
        f"for name in {MODULES!r}:\n"
        "    importlib.import_module(name)\n"
    )


def test_P07_version_bounds_are_in_the_metadata():
    text = (SOURCE / "pyproject.toml").read_text() if (SOURCE / "pyproject.toml").exists() else ""
    if not text:
        pytest.skip("an installed wheel has no pyproject.toml")
    assert '"torch>=2.11"' in text and '"triton>=3.6"' in text and "requires-python" in text


def test_P08_what_a_report_needs_is_printed():
    """torch, triton, ptxas, device, what is built: by one command."""
    out = subprocess.run(
        [sys.executable, "-m", "flaop", "doctor"], capture_output=True, text=True, timeout=300
    ).stdout
    for word in ("torch", "triton", "ptxas", "flaop", "built", "CPU"):
        assert word in out, word

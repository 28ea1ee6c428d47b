"""Which ptxas assembles Triton's PTX.

Ptxas 12.8 miscompiles some Hopper kernels without a word; 13.0 does not.
"""

import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

MINIMUM = (13, 0)


def _candidates():
    """Paths in order of preference.

    The user's, the toolkit's, the one of the package nvidia-cuda-nvcc.
    """
    yield os.environ.get("TRITON_PTXAS_PATH")
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield os.path.join(home, "bin", "ptxas")
    yield shutil.which("ptxas")
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(pathlib.Path(root).glob("*/bin/ptxas")):
            yield str(path)


def version(path):
    """(major, minor) of the ptxas at `path`, or None if it does not run."""
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", run.stdout)
    return (int(match[1]), int(match[2])) if match else None


@functools.cache
def find():
    """(path, (major, minor)) of the first ptxas that is new enough, or None.

    Triton's own is then used.
    """
    for path in _candidates():
        if path and os.path.isfile(path):
            found = version(path)
            if found and found >= MINIMUM:
                return path, found
    return None


def use():
    """Points Triton at that ptxas, unless the user chose one.

    Called before anything is compiled.
    """
    found = find()
    if found is not None:
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            os.environ.setdefault(name, found[0])

"""Loads the C++ libraries and says what they were built with."""

import json
import sys
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_HOW_TO_BUILD = "run `pip install --no-build-isolation -e .` in flaop's source folder"


def _unusable(problem: str) -> Exception:
    """An ImportError; `python -m flaop ...`, where nothing can catch it, ends with status 1."""
    sentence = f"flaop's {problem}: {_HOW_TO_BUILD}"
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    return SystemExit(sentence) if module == ["flaop"] else ImportError(sentence)


def _read_build_info() -> dict:
    path = _FOLDER / "_build.json"
    if not path.exists() or not (_FOLDER / "_C.so").exists():
        raise _unusable(f"compiled extension is missing from {_FOLDER}")
    return json.loads(path.read_text())


def _public(version: str) -> str:
    """The version without its local part: CPU and CUDA builds of one version are alike to _C."""
    return str(version).split("+")[0]


def _load() -> dict:
    build = _read_build_info()
    # Opened against another torch, the library fails with an undefined symbol, or worse.
    if _public(build["torch"]) != _public(torch.__version__):
        raise _unusable(
            f"compiled extension was built for torch {build['torch']}, and this is torch "
            f"{torch.__version__}"
        )
    torch.ops.load_library(str(_FOLDER / "_C.so"))
    return build


# Facts of the build: torch, compiler, cuda_library, cuda_note.
BUILD = _load()

try:
    from flaop import _bindings  # noqa: E402
except ImportError as error:
    raise _unusable(f"bindings were built for another Python version ({error})") from error

bindings = _bindings

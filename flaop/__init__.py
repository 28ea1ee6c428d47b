"""Linear attention as first-class PyTorch operators.

Importing flaop registers `torch.ops.flaop.*`. It needs no GPU, opens no CUDA context and imports
no triton: the kernels are loaded when a CUDA op first runs.
"""

from flaop import _extension  # noqa: F401  (registers the schemas; must come first)
from flaop._paths import Explanation, backend, explain, supports, warmup
from flaop._version import __version__
from flaop.functional import chunk_kda, flash_kda_fwd, fused_recurrent_kda, kda
from flaop.ops import kda as _kda_kernels  # noqa: F401  (registers kernels and fakes)

__all__ = [
    "Explanation",
    "__version__",
    "backend",
    "chunk_kda",
    "explain",
    "flash_kda_fwd",
    "fused_recurrent_kda",
    "kda",
    "supports",
    "warmup",
]

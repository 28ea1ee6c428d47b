"""The one launch path of Triton kernels.

Interpreter, or compiled at first use and launched from a cache.
"""

import contextlib
import threading

import torch
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from . import ptxas

_lock = threading.Lock()
_recorder = None
_forced_arch = None
_arch = {}
INTERPRETED_ARCH = 90  # the interpreter runs the configurations of Hopper


def arch(device):
    """Compute capability of a device as one number (90 for 9.0)."""
    if _forced_arch is not None:
        return _forced_arch
    if device.type != "cuda":
        return INTERPRETED_ARCH
    if device not in _arch:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise RuntimeError(
                "flaop's Triton kernels need compute capability 8.0 or newer, "
                f"{device} has {major}.{minor}"
            )
        _arch[device] = 10 * major + minor
    return _arch[device]


def prepare(x):
    """The tensor itself if it is contiguous and 16-byte aligned, else such a copy.

    None stays None.
    """
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@contextlib.contextmanager
def recording(target_arch):
    """Collects launches instead of making them: (jit function, arguments, constexprs, options)
    each.

    The launchers then also accept meta tensors, so that everything they would launch on an
    architecture can be compiled ahead of time on a machine without a GPU.
    """
    global _recorder, _forced_arch
    with _lock:
        _recorder, _forced_arch = [], target_arch
    try:
        yield _recorder
    finally:
        _recorder, _forced_arch = None, None


def not_warmed(name):
    """The error of a first use inside a capture, where nothing may be compiled or loaded."""
    return RuntimeError(
        f"{name} is not loaded yet for this dtype, head size and set of options, and a CUDA graph "
        "is being captured: call flaop.warmup(...) with such arguments before the capture"
    )


class Kernel:
    """A jit function and its compiled variants.

    A variant is found by device, argument types, constants and options; never by a size, a stride
    or a value, so a call with other lengths compiles nothing.
    """

    def __init__(self, function):
        self.function = function
        self.interpreted = isinstance(function, InterpretedFunction)
        self.variants = {}

    def __call__(self, grid, args, constants, **options):
        """Launches on the current stream of the first tensor's device.

        grid: 1 to 3 ints. args: the kernel's run-time arguments in order. constants: its
        constexprs. options: num_warps, num_stages, maxnreg.
        """
        if _recorder is not None:
            _recorder.append((self.function, args, constants, options))
            return
        if 0 in grid:
            return
        if self.interpreted:
            self.function[grid](*args, **constants)
            return
        index = args[0].device.index
        key = (
            index, *constants.values(), *options.items(),
            *[a.dtype if isinstance(a, torch.Tensor) else a is None or type(a) for a in args],
        )  # fmt: skip
        if index == torch._C._cuda_getDevice():
            self._launch(key, index, grid, args, constants, options)
        else:
            with torch.cuda.device(index):
                self._launch(key, index, grid, args, constants, options)

    def _launch(self, key, index, grid, args, constants, options):
        variant = self.variants.get(key)
        if variant is None:
            variant = self._compile(key, args, constants, options)
        run, function, metadata, tail = variant
        x, y, z = (*grid, 1, 1)[:3]
        run(
            x, y, z, torch._C._cuda_getCurrentRawStream(index), function, metadata, None,
            knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args, *tail,
        )  # fmt: skip

    def _compile(self, key, args, constants, options):
        name = self.function.fn.__name__
        if torch.cuda.is_current_stream_capturing():
            raise not_warmed(name)
        with _lock:
            if key in self.variants:
                return self.variants[key]
            ptxas.use()
            compiled = self.function.warmup(*args, grid=(1,), **options, **constants)
            run = compiled.run  # loads the machine code
            tail = [constants[p] for p in self.function.arg_names if p in constants]
            variant = (run, compiled.function, compiled.packed_metadata, tail)
            self.variants[key] = variant
        return variant

"""Builds the C++ libraries with CMake and ninja; everything else stands in pyproject.toml."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# Where `python` runs without its environment being activated, cmake and ninja stand beside it.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class CMakeBuild(build_ext):
    """One CMake project makes every library; `flaop._bindings` stands for all of them."""

    def run(self):
        # An editable install wants them beside the sources.
        in_place = self.inplace or getattr(self, "editable_mode", False)
        target = ROOT / "flaop" if in_place else Path(self.build_lib, "flaop").resolve()
        self.build_project(target)

    def build_project(self, target: Path):
        try:
            import torch
        except ImportError:
            raise SystemExit(
                "flaop builds against the torch of the running environment, and there is none: "
                "install torch first, then run pip with --no-build-isolation"
            ) from None
        import pybind11

        options = {
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "CMAKE_INSTALL_PREFIX": str(target),
            "Python_EXECUTABLE": sys.executable,
            "PYBIND11_FINDPYTHON": "ON",
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "FLAOP_TORCH_DIR": str(Path(torch.__file__).parent),
            "FLAOP_TORCH_VERSION": str(torch.__version__),
            "FLAOP_TORCH_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
            "FLAOP_CUDA": os.environ.get("FLAOP_CUDA", "auto"),
            "FLAOP_CUDA_ARCHS": os.environ.get("FLAOP_CUDA_ARCHS", "90a"),
        }
        tag = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
        build = ROOT / "build" / tag
        definitions = [f"-D{name}={value}" for name, value in options.items()]
        cmake = tool("cmake")
        run(cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *definitions)
        run(cmake, "--build", build)
        # The optional library of an earlier build would outlive the option that made it.
        (target / "_kernels.so").unlink(missing_ok=True)
        run(cmake, "--install", build)
        # A wheel carries machine code; beside the sources it is made on demand.
        if target != ROOT / "flaop":
            ship_kernels(target)

    def get_outputs(self):
        names = ("_C.so", "_build.json", "_bindings" + sysconfig.get_config_var("EXT_SUFFIX"))
        return [str(Path(self.build_lib, "flaop", name)) for name in names]


def tool(name: str) -> str:
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise SystemExit(f"flaop needs {name} to build: pip install {name}")
    return path


def ship_kernels(package: Path):
    """Compiles the kernel archive into a built package; without triton or ptxas there is none."""
    if os.environ.get("FLAOP_AOT", "1") == "0":
        return
    if importlib.util.find_spec("triton") is None:
        print("no kernel archive: triton is not installed")
        return
    made = ROOT / "build" / "_archive.bin"
    command = [sys.executable, "-m", "flaop.aot", "--output", str(made)]
    if subprocess.run(command, cwd=package.parent).returncode == 0:
        shutil.copy(made, package / made.name)
    else:
        print("no kernel archive: kernels will be compiled at first use")


def run(*command):
    subprocess.run([str(part) for part in command], check=True)


kernel_packages = find_packages(include=["triton_kernels", "triton_kernels.*"])
setup(
    packages=[
        *find_packages(include=["flaop", "flaop.*"]),
        *(f"flaop.{package}" for package in kernel_packages),
    ],
    # The bare name triton_kernels belongs to another package.
    package_dir={"flaop": "flaop", "flaop.triton_kernels": "triton_kernels"},
    ext_modules=[Extension("flaop._bindings", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)

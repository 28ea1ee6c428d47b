// The dispatcher's tables for Python: thresholds, and the tensor-free choice for tests. And the
// launcher of kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "dispatch/device.h"
#include "dispatch/paths.h"
#include "dispatch/policy.h"
#include "launch/kernel.h"
#include "ops/remembered.h"

namespace py = pybind11;
using namespace flaop::dispatch;

namespace {

std::vector<std::string> paths() {
  std::vector<std::string> names;
  for (size_t i = 0; i < kPathCount; ++i) names.emplace_back(path_name(static_cast<Path>(i)));
  return names;
}

std::vector<std::string> features() {
  std::vector<std::string> names;
  for (size_t i = 0; i < static_cast<size_t>(Feature::kCount); ++i) {
    names.emplace_back(feature_name(static_cast<Feature>(i)));
  }
  return names;
}

std::tuple<std::string, std::vector<std::string>> decide_by_name(
    const std::string& backend, const std::vector<std::string>& needs) {
  FeatureSet set;
  const std::vector<std::string> known = features();
  for (const std::string& need : needs) {
    size_t i = 0;
    while (i < known.size() && known[i] != need) ++i;
    if (i == known.size()) throw py::value_error("unknown feature: " + need);
    set.add(static_cast<Feature>(i));
  }
  Decision decision = decide(parse_backend(backend), set);
  return {std::move(decision.path), std::move(decision.sentences)};
}

using flaop::launch::Grid;
using flaop::launch::Kernel;
using flaop::launch::Kind;
using flaop::launch::Recording;
using flaop::launch::Value;

// Kernels stay loaded as long as the process lives: the handle is their address.
uintptr_t load(const std::string& name, int device, const py::bytes& image,
               const std::string& entry, unsigned warps, unsigned shared,
               const std::string& kinds) {
  const std::string code = image;
  return reinterpret_cast<uintptr_t>(
      new Kernel(name, device, code.data(), entry.c_str(), warps, shared, kinds));
}

int call_library(uintptr_t function, uintptr_t structure, size_t bytes,
                 const std::vector<uint32_t>& pointers, uintptr_t stream) {
  return flaop::launch::call(reinterpret_cast<flaop::launch::Function>(function),
                             reinterpret_cast<const void*>(structure), bytes, pointers,
                             reinterpret_cast<void*>(stream));
}

// Reads an argument as its kind says; false with a Python error set.
bool read(PyObject* argument, Kind kind, Value& value) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  switch (kind) {
    case Kind::kAbsent:
      return true;
    case Kind::kAligned:
    case Kind::kPointer: {
      PyObject* address = PyObject_CallMethodNoArgs(argument, data_ptr);
      if (address == nullptr) return false;
      value.pointer = PyLong_AsUnsignedLongLong(address);
      Py_DECREF(address);
      return PyErr_Occurred() == nullptr;
    }
    case Kind::kInt32:
    case Kind::kInt64:
      value.int64 = PyLong_AsLongLong(argument);
      return value.int64 != -1 || PyErr_Occurred() == nullptr;
    case Kind::kFloat:
      value.number = static_cast<float>(PyFloat_AsDouble(argument));
      return value.number != -1.0f || PyErr_Occurred() == nullptr;
  }
  PyErr_SetString(PyExc_ValueError, "unknown kind of argument");
  return false;
}

// launch(handle, stream, x, y, z, arguments) -> bool; arguments is a list or tuple. False, and no
// launch, if a pointer is not aligned as the kernel takes for granted. Not by pybind11, whose
// calls cost more than the launch.
PyObject* launch(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 6) {
    PyErr_SetString(PyExc_TypeError, "launch takes handle, stream, x, y, z and arguments");
    return nullptr;
  }
  uint64_t numbers[5];
  for (int i = 0; i < 5; ++i) {
    numbers[i] = PyLong_AsUnsignedLongLong(given[i]);
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  const auto& kernel = *reinterpret_cast<const Kernel*>(numbers[0]);
  const std::string& kinds = kernel.kinds();
  PyObject* arguments = PySequence_Fast(given[5], "arguments must be a list or tuple");
  if (arguments == nullptr) return nullptr;
  const py::object keep = py::reinterpret_steal<py::object>(arguments);
  if (static_cast<size_t>(PySequence_Fast_GET_SIZE(arguments)) != kinds.size()) {
    PyErr_Format(PyExc_TypeError, "%s takes %zu arguments, got %zd", kernel.name().c_str(),
                 kinds.size(), PySequence_Fast_GET_SIZE(arguments));
    return nullptr;
  }
  Value values[64];
  for (size_t i = 0; i < kinds.size(); ++i) {
    const Kind kind = static_cast<Kind>(kinds[i]);
    if (!read(PySequence_Fast_GET_ITEM(arguments, i), kind, values[i])) return nullptr;
    if (kind == Kind::kAligned && values[i].pointer % 16 != 0) Py_RETURN_FALSE;
  }
  const Grid grid{static_cast<unsigned>(numbers[2]), static_cast<unsigned>(numbers[3]),
                  static_cast<unsigned>(numbers[4])};
  try {
    const py::gil_scoped_release release;
    kernel.launch(grid, reinterpret_cast<void*>(numbers[1]), values);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// argument_types(arguments) -> bytes: what code is compiled for. Of a tensor its dtype, of a number
// its width, never its value.
PyObject* argument_types(PyObject*, PyObject* given) {
  static PyObject* const dtype = PyUnicode_InternFromString("dtype");
  constexpr uintptr_t kNone = 0, kFloat = 1, kInt32 = 2, kInt64 = 3;
  PyObject* arguments = PySequence_Fast(given, "arguments must be a list or tuple");
  if (arguments == nullptr) return nullptr;
  const py::object keep = py::reinterpret_steal<py::object>(arguments);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(arguments);
  std::vector<uintptr_t> types(count, kNone);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* x = PySequence_Fast_GET_ITEM(arguments, i);
    if (x == Py_None) continue;
    if (PyFloat_Check(x)) {
      types[i] = kFloat;
    } else if (PyLong_Check(x)) {
      const long long number = PyLong_AsLongLong(x);
      if (number == -1 && PyErr_Occurred() != nullptr) return nullptr;
      types[i] = number == static_cast<int32_t>(number) ? kInt32 : kInt64;
    } else {
      // There is one object of each dtype, which is never freed.
      PyObject* type = PyObject_GetAttr(x, dtype);
      if (type == nullptr) return nullptr;
      types[i] = reinterpret_cast<uintptr_t>(type);
      Py_DECREF(type);
    }
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(types.data()),
                                   count * sizeof(uintptr_t));
}

PyMethodDef types_definition = {
    "argument_types", &argument_types, METH_O,
    "argument_types(arguments): bytes that agree where code compiled for one call serves another."};
PyMethodDef launch_definition = {
    "launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&launch)), METH_FASTCALL,
    "launch(handle, stream, x, y, z, arguments): launches a loaded kernel in the current context. "
    "False if a pointer is not aligned as its code takes for granted."};

}  // namespace

PYBIND11_MODULE(_bindings, m) {
  m.doc() = "Tables of flaop's dispatcher.";
  m.attr("SHORT_TOKENS") = kShortTokens;
  m.attr("SHORT_PACKED_TOKENS") = kShortPackedTokens;
  m.attr("FLASH_KDA_BUILT") = kFlashBuilt;
  m.def("paths", &paths, "Names of the paths, in order of preference.");
  m.def("features", &features, "Names of what a call may need of a path.");
  m.def("decide", &decide_by_name, py::arg("backend"), py::arg("needs"),
        "The path for a call with these needs, and a sentence for each path passed over.");
  m.def("compute_capability", &compute_capability, py::arg("device"),
        "10 * major + minor of a CUDA device, 0 if unknown.");
  m.def("load", &load, py::arg("name"), py::arg("device"), py::arg("image"), py::arg("entry"),
        py::arg("warps"), py::arg("shared"), py::arg("kinds"),
        "Loads a kernel's machine code for a device; returns its handle. kinds has a "
        "letter for each run-time argument: P aligned pointer, p pointer, i and l 32 and 64 bit "
        "integer, f 32 bit float, - compiled in.");
  m.def(
      "complete",
      [] {
        if (auto* recording = Recording::current()) recording->set_complete();
      },
      "Says that the launches made are all that the op does: its next calls of the same kind may "
      "go without Python.");
  m.def(
      "scratch",
      [](uint64_t address, uint64_t bytes) {
        if (auto* recording = Recording::current()) recording->add_scratch({address, bytes});
      },
      py::arg("address"), py::arg("bytes"),
      "Says that an op has this memory for itself: where its launches point into it, a call that "
      "goes without Python has memory of its own.");
  m.def("forget", &flaop::forget_launches,
        "Every op goes through Python once more; for tests that make a launcher choose otherwise.");
  m.def("call_library", &call_library, py::arg("function"), py::arg("structure"), py::arg("bytes"),
        py::arg("pointers"), py::arg("stream"),
        "Calls a function of the library of CUDA C++ kernels, all by address; returns its CUDA "
        "error. pointers: bytes at which addresses lie in the structure.");
  m.attr("argument_types") =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&types_definition, nullptr, nullptr));
  m.attr("launch") =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&launch_definition, nullptr, nullptr));
}

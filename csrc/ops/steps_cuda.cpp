// The CUDA kernels of the step ops: from schema to launch without Python, from the second call of
// a kind on. The first goes to the launcher in Python (namespace flaop_launch), which checks the
// arguments, chooses and loads the kernel and launches it. Its launch is remembered by all that it
// may depend on: dtypes, sizes, strides, alignment and devices of the tensors, and the other
// arguments. A call that agrees in all of that is the same launch with other pointers.
#include <ATen/DeviceAccelerator.h>
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>

#include <bit>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "../launch/kernel.h"
#include "boxed.h"

namespace flaop {
namespace {

using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (const int64_t x : key) hash = (hash ^ static_cast<uint64_t>(x)) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
  }
};

struct Remembered {
  const launch::Kernel* kernel;
  launch::Grid grid;
  std::vector<launch::Value> values;
  // For each value: the argument of the op whose address it is, kOutput, or kConstant.
  std::vector<int> sources;
  std::vector<int64_t> output;  // its sizes
};
constexpr int kOutput = -1, kConstant = -2;
// Shapes are few where batch sizes are. Kinds beyond that go through Python each time.
constexpr size_t kMost = 4096;

class Memory {
 public:
  const Remembered* find(const Key& key) {
    const std::shared_lock lock(mutex_);
    const auto found = launches_.find(key);
    return found == launches_.end() ? nullptr : found->second.get();
  }

  void add(Key key, Remembered launch) {
    const std::unique_lock lock(mutex_);
    if (launches_.size() >= kMost) return;
    launches_.emplace(std::move(key), std::make_unique<Remembered>(std::move(launch)));
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<Remembered>, Hash> launches_;
};

Memory& memory() {
  static Memory launches;
  return launches;
}

void add_tensor(Key& key, const at::Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  key.push_back(static_cast<int64_t>(x.scalar_type()) << 8 | x.dim() << 1 |
                static_cast<int64_t>(address % 16 == 0));
  key.push_back(x.device().is_cuda() ? x.device().index() : -1);
  key.insert(key.end(), x.sizes().begin(), x.sizes().end());
  key.insert(key.end(), x.strides().begin(), x.strides().end());
}

// Which argument before this one has the same address, or the argument itself: where addresses
// coincide it does not matter whose a launch takes.
int64_t first_with_address(at::ArrayRef<c10::IValue> arguments, size_t i) {
  const void* address = arguments[i].toTensor().const_data_ptr();
  for (size_t j = 0; j < i; ++j) {
    if (arguments[j].isTensor() && arguments[j].toTensor().const_data_ptr() == address) {
      return static_cast<int64_t>(j);
    }
  }
  return static_cast<int64_t>(i);
}

Key key_of(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  Key key;
  key.reserve(192);
  key.push_back(reinterpret_cast<intptr_t>(&op.schema()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& x = arguments[i];
    if (x.isTensor()) {
      key.push_back(first_with_address(arguments, i));
      add_tensor(key, x.toTensor());
    } else if (x.isDouble()) {
      key.push_back(std::bit_cast<int64_t>(x.toDouble()));
    } else {
      key.push_back(x.isNone() ? -1 : x.isBool() ? x.toBool() : x.toInt());
    }
  }
  return key;
}

at::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op, const Stack& stack) {
  return at::ArrayRef<c10::IValue>(stack).slice(first_argument(op, stack));
}

constexpr size_t kV = 2;

at::Tensor replay(const Remembered& launch, at::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& v = arguments[kV].toTensor();
  const at::DeviceGuard guard(v.device());
  at::Tensor output = at::empty(launch.output, v.options());
  auto values = launch.values;
  for (size_t i = 0; i < values.size(); ++i) {
    const int source = launch.sources[i];
    if (source == kConstant) continue;
    const at::Tensor& x = source == kOutput ? output : arguments[source].toTensor();
    values[i].pointer = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  }
  const c10::Stream stream = at::accelerator::getCurrentStream(v.device().index());
  launch.kernel->launch(launch.grid, stream.native_handle(), values.data());
  return output;
}

// Where each pointer of a launch comes from; false if one is of neither an argument nor the output.
bool trace(const launch::Recorded& recorded, at::ArrayRef<c10::IValue> arguments,
           const at::Tensor& output, std::vector<int>& sources) {
  const auto address = [](const at::Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.const_data_ptr());
  };
  const std::string& kinds = recorded.kernel->kinds();
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto kind = static_cast<launch::Kind>(kinds[i]);
    int source = kConstant;
    if (kind == launch::Kind::kAligned || kind == launch::Kind::kPointer) {
      const uint64_t pointer = recorded.values[i].pointer;
      for (size_t j = 0; source == kConstant && j < arguments.size(); ++j) {
        if (arguments[j].isTensor() && address(arguments[j].toTensor()) == pointer) {
          source = static_cast<int>(j);
        }
      }
      if (source == kConstant) {
        if (address(output) != pointer) return false;
        source = kOutput;
      }
    }
    sources.push_back(source);
  }
  return true;
}

void step(const c10::OperatorHandle& op, Stack* stack) {
  Key key = key_of(op, arguments_of(op, *stack));
  at::Tensor output;
  if (const Remembered* launch = memory().find(key)) {
    output = replay(*launch, arguments_of(op, *stack));
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(std::move(output));
    return;
  }
  const std::vector<c10::IValue> arguments = arguments_of(op, *stack).vec();
  const launch::Recording recording;
  find_op(("flaop_launch::" + op.schema().name().substr(7)).c_str()).callBoxed(*stack);
  const launch::Recorded& recorded = recording.recorded();
  output = stack->back().toTensor();
  std::vector<int> sources;
  if (recorded.sole && trace(recorded, arguments, output, sources)) {
    memory().add(std::move(key), {recorded.kernel, recorded.grid, recorded.values,
                                  std::move(sources), output.sizes().vec()});
  }
}

}  // namespace
}  // namespace flaop

TORCH_LIBRARY_IMPL(flaop, CUDA, m) {
  for (const char* family : {"kda", "gated_delta_rule", "simple_gla", "gla"}) {
    m.impl((std::string(family) + "_step_").c_str(), flaop::boxed<&flaop::step>());
  }
}

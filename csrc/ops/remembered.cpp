// The CUDA kernels of ops that run without Python from the second call of a kind on. The first goes
// to the launcher in Python (namespace flaop_launch), which checks the arguments, chooses and loads
// kernels, allocates and launches. If it says that the launches are all that it did, they are
// remembered by all that they may depend on: dtypes, sizes, strides, alignment and devices of the
// tensors, and the other arguments. A call that agrees in all of that is the same launches with
// other addresses: of its arguments, its outputs and its scratch memory.
#include "remembered.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>

#include <bit>
#include <memory>
#include <mutex>
#include <optional>
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

// Where an address of a launch comes from.
struct Source {
  enum class Kind { kArgument, kOutput, kScratch } kind;
  size_t index;     // of the argument or the output
  uint64_t offset;  // in the scratch memory
};

struct Output {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

struct Remembered {
  std::vector<launch::Launch> launches;
  std::vector<Source> sources;  // of the addresses of all launches, in order; null ones left out
  std::vector<Output> outputs;
  int64_t scratch = 0;  // bytes
};
// Prompts of ever new lengths are as many kinds: when there are so many, all are forgotten.
constexpr size_t kMost = 4096;

// Blocks of scratch memory start at multiples of what the allocator gives.
uint64_t aligned(uint64_t bytes) { return (bytes + 511) / 512 * 512; }

class Memory {
 public:
  std::shared_ptr<const Remembered> find(const Key& key) {
    const std::shared_lock lock(mutex_);
    const auto found = launches_.find(key);
    return found == launches_.end() ? nullptr : found->second;
  }

  void add(Key key, std::shared_ptr<const Remembered> launches) {
    const std::unique_lock lock(mutex_);
    if (launches_.size() >= kMost) launches_.clear();
    launches_.emplace(std::move(key), std::move(launches));
  }

  void clear() {
    const std::unique_lock lock(mutex_);
    launches_.clear();
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Remembered>, Hash> launches_;
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

uint64_t address(const at::Tensor& x) { return reinterpret_cast<uint64_t>(x.const_data_ptr()); }

uint64_t& word(std::vector<uint64_t>& arguments, uint32_t byte) {
  return *reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(arguments.data()) + byte);
}

// The first argument of every op here, on its device.
const at::Tensor& device_of(at::ArrayRef<c10::IValue> arguments) { return arguments[0].toTensor(); }

std::vector<at::Tensor> replay(const Remembered& remembered, at::ArrayRef<c10::IValue> arguments) {
  const at::Device device = device_of(arguments).device();
  const at::DeviceGuard guard(device);
  const at::TensorOptions options = at::TensorOptions().device(device);
  std::vector<at::Tensor> outputs;
  for (const Output& output : remembered.outputs) {
    outputs.push_back(at::empty(output.sizes, options.dtype(output.dtype)));
  }
  at::Tensor scratch;
  uint64_t base = 0;
  if (remembered.scratch > 0) {
    scratch = at::empty({remembered.scratch}, options.dtype(at::kByte));
    base = address(scratch);
  }
  void* stream = at::accelerator::getCurrentStream(device.index()).native_handle();
  auto source = remembered.sources.begin();
  std::vector<uint64_t> changed;
  for (const launch::Launch& launch : remembered.launches) {
    changed = launch.arguments;
    for (const uint32_t place : launch.pointers) {
      uint64_t& pointer = word(changed, place);
      if (pointer == 0) continue;
      switch (source->kind) {
        case Source::Kind::kArgument:
          pointer = address(arguments[source->index].toTensor());
          break;
        case Source::Kind::kOutput:
          pointer = address(outputs[source->index]);
          break;
        case Source::Kind::kScratch:
          pointer = base + source->offset;
          break;
      }
      ++source;
    }
    launch.run(changed.data(), stream);
  }
  return outputs;
}

// What a pointer is of; nullopt for memory that a later call may not have.
std::optional<Source> trace(uint64_t pointer, at::ArrayRef<c10::IValue> arguments,
                            at::ArrayRef<at::Tensor> outputs,
                            const std::vector<launch::Scratch>& scratch) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor() && address(arguments[i].toTensor()) == pointer) {
      return Source{Source::Kind::kArgument, i, 0};
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (address(outputs[i]) == pointer) return Source{Source::Kind::kOutput, i, 0};
  }
  uint64_t start = 0;
  for (const launch::Scratch& block : scratch) {
    if (pointer >= block.address && pointer < block.address + block.bytes) {
      return Source{Source::Kind::kScratch, 0, start + pointer - block.address};
    }
    start += aligned(block.bytes);
  }
  return std::nullopt;
}

// nullptr for a call that cannot be repeated so.
std::shared_ptr<const Remembered> remember(const launch::Recording& recording,
                                           at::ArrayRef<c10::IValue> arguments,
                                           at::ArrayRef<at::Tensor> outputs) {
  if (!recording.complete()) return nullptr;
  auto remembered = std::make_shared<Remembered>();
  for (const at::Tensor& output : outputs) {
    const bool fresh = output.is_contiguous() && output.storage_offset() == 0 &&
                       output.device() == device_of(arguments).device() &&
                       !trace(address(output), arguments, {}, recording.scratch());
    if (!fresh) return nullptr;
    remembered->outputs.push_back({output.sizes().vec(), output.scalar_type()});
  }
  for (const launch::Launch& launch : recording.launches()) {
    std::vector<uint64_t> words = launch.arguments;
    for (const uint32_t place : launch.pointers) {
      const uint64_t pointer = word(words, place);
      if (pointer == 0) continue;
      const auto source = trace(pointer, arguments, outputs, recording.scratch());
      if (!source) return nullptr;
      remembered->sources.push_back(*source);
    }
  }
  for (const launch::Scratch& block : recording.scratch()) {
    remembered->scratch += aligned(block.bytes);
  }
  remembered->launches = recording.launches();
  return remembered;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  Key key = key_of(op, arguments_of(op, *stack));
  const size_t returns = op.schema().returns().size();
  if (const auto remembered = memory().find(key)) {
    std::vector<at::Tensor> outputs = replay(*remembered, arguments_of(op, *stack));
    torch::jit::drop(*stack, op.schema().arguments().size());
    for (at::Tensor& output : outputs) stack->emplace_back(std::move(output));
    return;
  }
  const std::vector<c10::IValue> arguments = arguments_of(op, *stack).vec();
  const launch::Recording recording;
  find_op(("flaop_launch::" + op.schema().name().substr(7)).c_str()).callBoxed(*stack);
  std::vector<at::Tensor> outputs;
  for (const c10::IValue& output :
       at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - returns)) {
    outputs.push_back(output.toTensor());
  }
  if (auto remembered = remember(recording, arguments, outputs)) {
    memory().add(std::move(key), std::move(remembered));
  }
}

}  // namespace

void forget_launches() { memory().clear(); }

}  // namespace flaop

TORCH_LIBRARY_IMPL(flaop, CUDA, m) {
  for (const char* family : {"kda", "gated_delta_rule", "simple_gla", "gla"}) {
    m.impl((std::string(family) + "_step_").c_str(), flaop::boxed<&flaop::run>());
    m.impl(("chunk_" + std::string(family)).c_str(), flaop::boxed<&flaop::run>());
  }
}

#include "kernel.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "driver.h"

namespace flaop::launch {
namespace {

constexpr int kMaxDynamicShared = 8;           // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr unsigned kDefaultShared = 48 << 10;  // what a kernel may have without asking
constexpr int kDeinitialized = 4;              // CUDA_ERROR_DEINITIALIZED: the process is ending
// Triton's kernels end with two pointers to scratch memory, which those of flaop do not use.
constexpr size_t kScratch = 2;
constexpr size_t kMostArguments = 64;

thread_local Recording* current_recording = nullptr;

void check(const Driver& driver, int code, const std::string& what) {
  if (code == kSuccess || code == kDeinitialized) return;
  const char* name = nullptr;
  driver.get_error_name(code, &name);
  throw std::runtime_error(what + ": " + (name ? name : "CUDA error " + std::to_string(code)));
}

const Driver& need_driver() {
  const Driver* found = driver();
  if (found == nullptr) throw std::runtime_error("the CUDA driver (libcuda.so.1) cannot be opened");
  return *found;
}

// A thread that has not used CUDA yet has no context.
void bind_context(const Driver& driver, int device) {
  void* context = nullptr;
  check(driver, driver.ctx_get_current(&context), "cuCtxGetCurrent");
  if (context != nullptr) return;
  int handle = 0;
  check(driver, driver.device_get(&handle, device), "cuDeviceGet");
  check(driver, driver.device_primary_ctx_retain(&context, handle), "cuDevicePrimaryCtxRetain");
  check(driver, driver.ctx_set_current(context), "cuCtxSetCurrent");
}

}  // namespace

Kernel::Kernel(std::string name, int device, const void* image, const char* entry, unsigned warps,
               unsigned shared, std::string kinds)
    : name_(std::move(name)),
      kinds_(std::move(kinds)),
      device_(device),
      threads_(32 * warps),
      shared_(shared) {
  if (kinds_.size() > kMostArguments) throw std::runtime_error(name_ + " has too many arguments");
  const Driver& driver = need_driver();
  bind_context(driver, device_);
  void* module = nullptr;
  check(driver, driver.module_load_data(&module, image), name_ + " cannot be loaded");
  check(driver, driver.module_get_function(&function_, module, entry), name_ + " is not found");
  if (shared_ > kDefaultShared) {
    check(driver, driver.func_set_attribute(function_, kMaxDynamicShared, shared_),
          name_ + " cannot have its shared memory");
  }
}

void Kernel::launch(Grid grid, void* stream, const Value* values) const {
  static const Driver& driver = need_driver();
  void* parameters[kMostArguments + kScratch];
  size_t count = 0;
  for (size_t i = 0; i < kinds_.size(); ++i) {
    if (static_cast<Kind>(kinds_[i]) == Kind::kAbsent) continue;
    parameters[count++] = const_cast<Value*>(values + i);
  }
  uint64_t scratch = 0;
  for (size_t i = 0; i < kScratch; ++i) parameters[count++] = &scratch;
  bind_context(driver, device_);
  check(driver,
        driver.launch_kernel(function_, grid.x, grid.y, grid.z, threads_, 1, 1, shared_, stream,
                             parameters, nullptr),
        name_);
  if (current_recording != nullptr) current_recording->add(*this, grid, values);
}

Recording::Recording() : outer_(current_recording) { current_recording = this; }

Recording::~Recording() {
  current_recording = outer_;
  if (outer_ != nullptr && !launches_.empty()) outer_->nested_ = true;
}

Recording* Recording::current() { return current_recording; }

void Recording::add_scratch(Scratch scratch) {
  for (const Scratch& other : scratch_) {
    overlap_ |= scratch.address < other.address + other.bytes &&
                other.address < scratch.address + scratch.bytes;
  }
  scratch_.push_back(scratch);
}

void Recording::add(const Kernel& kernel, Grid grid, const Value* values) {
  Launch launch;
  launch.kernel = &kernel;
  launch.grid = grid;
  const std::string& kinds = kernel.kinds();
  launch.arguments.resize(kinds.size());
  static_assert(sizeof(Value) == sizeof(uint64_t));
  std::memcpy(launch.arguments.data(), values, kinds.size() * sizeof(Value));
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto kind = static_cast<Kind>(kinds[i]);
    if (kind == Kind::kAligned || kind == Kind::kPointer) {
      launch.pointers.push_back(static_cast<uint32_t>(i * sizeof(Value)));
    }
  }
  launches_.push_back(std::move(launch));
}

void Recording::add(Function function, const void* structure, size_t bytes,
                    std::vector<uint32_t> pointers) {
  Launch launch;
  launch.function = function;
  launch.arguments.resize((bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
  std::memcpy(launch.arguments.data(), structure, bytes);
  launch.pointers = std::move(pointers);
  launches_.push_back(std::move(launch));
}

void Launch::run(const uint64_t* changed, void* stream) const {
  if (kernel != nullptr) {
    kernel->launch(grid, stream, reinterpret_cast<const Value*>(changed));
    return;
  }
  const int code = call(function, changed, arguments.size() * sizeof(uint64_t), pointers, stream);
  if (code != 0) throw std::runtime_error("a CUDA kernel failed, error " + std::to_string(code));
}

int call(Function function, const void* structure, size_t bytes,
         const std::vector<uint32_t>& pointers, void* stream) {
  const int code = function(structure, stream);
  if (code == 0 && current_recording != nullptr) {
    current_recording->add(function, structure, bytes, pointers);
  }
  return code;
}

}  // namespace flaop::launch

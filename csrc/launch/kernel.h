// Kernels as machine code, launched by the driver: what Triton's compiler made, now or when the
// package was built.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flaop::launch {

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

// One letter for each run-time argument of a kernel.
enum class Kind : char {
  kAbsent = '-',   // compiled in: not passed
  kAligned = 'P',  // pointer that the code takes to be 16-byte aligned
  kPointer = 'p',
  kInt32 = 'i',
  kInt64 = 'l',
  kFloat = 'f',
};

union Value {
  uint64_t pointer;
  int32_t int32;
  int64_t int64;
  float number;
};

class Kernel {
 public:
  // Loads machine code into the context that torch uses of a device; the module stays loaded.
  // kinds: see Kind. Throws std::runtime_error with the driver's error.
  Kernel(std::string name, int device, const void* image, const char* entry, unsigned warps,
         unsigned shared, std::string kinds);

  // values: one for each letter of kinds. The device must be the current one, the stream one of it.
  void launch(Grid grid, void* stream, const Value* values) const;

  const std::string& name() const { return name_; }
  const std::string& kinds() const { return kinds_; }

 private:
  std::string name_, kinds_;
  void* function_ = nullptr;
  int device_;
  unsigned threads_, shared_;
};

// A function of the library of CUDA C++ kernels: takes its structure of arguments and a stream,
// returns a CUDA error.
using Function = int (*)(const void* structure, void* stream);

// A launch as it was made, for whoever wants to make it again with other tensors.
struct Launch {
  const Kernel* kernel = nullptr;  // with the arguments as Values, or
  Function function = nullptr;     // with its structure
  Grid grid;                       // of a kernel
  std::vector<uint64_t> arguments;
  std::vector<uint32_t> pointers;  // bytes in `arguments` at which addresses lie

  // Makes it again with `changed` for `arguments`. Throws std::runtime_error.
  void run(const uint64_t* changed, void* stream) const;
};

// Calls a function and, under a Recording, notes the launch; returns the CUDA error.
int call(Function function, const void* structure, size_t bytes,
         const std::vector<uint32_t>& pointers, void* stream);

// Memory that an op allocates for itself.
struct Scratch {
  uint64_t address;
  uint64_t bytes;
};

// While one exists, launches of its thread are recorded as well as made.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // The innermost of this thread, or nullptr.
  static Recording* current();
  void add(const Kernel& kernel, Grid grid, const Value* values);
  void add(Function function, const void* structure, size_t bytes, std::vector<uint32_t> pointers);
  void add_scratch(Scratch scratch);
  // Said by who launched: nothing was done but the launches so far.
  void set_complete() { complete_ = launches_.size(); }

  const std::vector<Launch>& launches() const { return launches_; }
  const std::vector<Scratch>& scratch() const { return scratch_; }
  bool complete() const {
    return complete_ > 0 && complete_ == launches_.size() && !nested_ && !overlap_;
  }

 private:
  std::vector<Launch> launches_;
  std::vector<Scratch> scratch_;
  size_t complete_ = 0;
  bool nested_ = false;   // another one saw launches that this one did not
  bool overlap_ = false;  // scratch memory was given back and used again
  Recording* outer_;
};

}  // namespace flaop::launch

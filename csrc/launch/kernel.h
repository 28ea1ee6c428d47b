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

// A launch as it was made, for whoever wants to make it again with other tensors.
struct Recorded {
  const Kernel* kernel = nullptr;
  Grid grid;
  std::vector<Value> values;
  int launches = 0;
  bool sole = false;  // it is all that the op did
};

// While one exists, launches of its thread are recorded as well as made; the last is kept.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  const Recorded& recorded() const { return recorded_; }
  // The innermost of this thread, or nullptr.
  static Recording* current();
  // Said by who launched: nothing else was done.
  void set_sole() { recorded_.sole = recorded_.launches == 1; }
  void add(const Kernel& kernel, Grid grid, const Value* values);

 private:
  Recorded recorded_;
  Recording* outer_;
};

}  // namespace flaop::launch

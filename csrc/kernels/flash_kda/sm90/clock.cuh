// Where the time of a block goes: with FLAOP_FLASH_CLOCK, cycles of each warp by step, summed over
// chunks and blocks. Without it, nothing.
#pragma once
#include <stdint.h>

namespace flaop::flash {

constexpr int kClockSteps = 16;

#ifdef FLAOP_FLASH_CLOCK
__device__ unsigned long long clocks[16][kClockSteps];

class Clock {
 public:
  __device__ Clock() : last_(clock()) {}
  // The time since the last step goes to this one.
  __device__ __forceinline__ void step(uint32_t (&sums)[16][kClockSteps], int index) {
    const uint32_t now = clock();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][index] += now - last_;
    __syncwarp();
    last_ = clock();
  }

 private:
  uint32_t last_;
};
#define FLAOP_CLOCK_START(shared) \
  Clock clock_;                   \
  uint32_t (&clock_sums)[16][kClockSteps] = (shared).clocks
#define FLAOP_CLOCK_STEP(index) clock_.step(clock_sums, index)
#else
#define FLAOP_CLOCK_START(shared)
#define FLAOP_CLOCK_STEP(index)
#endif

}  // namespace flaop::flash

// Thresholds of the dispatcher, in tokens.
#pragma once

#include <cstdint>

namespace flaop::dispatch {

// A call of at most so many tokens is short: one token-serial kernel beats the chunk pipeline.
inline constexpr int64_t kShortTokens = 64;
// Packed: at most kShortTokens a sequence on average, and at most so many in total.
inline constexpr int64_t kShortPackedTokens = 1024;

// Whether the fused inference kernel is part of this build.
#ifdef FLAOP_FLASH_KDA_BUILT
inline constexpr bool kFlashBuilt = true;
#else
inline constexpr bool kFlashBuilt = false;
#endif
// Compute capability that it is written for.
inline constexpr int kFlashCapability = 90;
// Its head size, and the range of bounded gates that its products allow.
inline constexpr int64_t kFlashHeadSize = 128;
inline constexpr double kFlashLowerBound = -5.0;

}  // namespace flaop::dispatch

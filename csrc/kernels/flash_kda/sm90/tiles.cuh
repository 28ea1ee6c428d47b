// Shared memory of the fused kernel, and the piece of a sequence that a block works on.
#pragma once
#include <stddef.h>

#include "../../kda/common.cuh"
#include "clock.cuh"
#include "flash_kda.h"
#include "hopper.cuh"

namespace flaop::flash {

using bf16 = __nv_bfloat16;

// The tiles that TMA fills, [64, 128]: two halves of 64 channels, a row of one is 128 bytes, and
// eight channels j of token t lie at j ^ t % 8 in it (128-byte swizzle): eight tokens of the same
// channels are in different banks. Places are in bytes. Along the channels of a half, and within
// eight tokens, they move by XOR, and by addition along whole rows.
constexpr unsigned kTileRow = 128, kHalfTile = kTokens * kTileRow, kTile = 2 * kHalfTile;
constexpr unsigned kTileAlignment = 8 * kTileRow;
__device__ __forceinline__ constexpr unsigned swizzled(unsigned token, unsigned channel) {
  return channel / 64 * kHalfTile + token * kTileRow + (2 * channel % kTileRow ^ token % 8 * 16);
}
template <typename T>
__device__ __forceinline__ T& access(bf16* tile, unsigned bytes) {
  return *reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(tile) + bytes);
}
// Operands of wgmma: 16 channels (k), all tokens (n); and 16 tokens (k), all channels (n). With
// this swizzle the first has one stride, between groups of eight tokens, and channels advance the
// start within the row of 128 bytes; the second has two, between halves and between such groups
// (CUTLASS, make_gmma_desc: Swizzle<3,4,3> o ((8,m),(T,2k)):((8T,SBO),(1,T)) for K-major and
// ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)) for MN-major).
__device__ __forceinline__ uint64_t by_channels(const bf16* tile, int step) {
  return operand<true>(tile, step / 4 * kHalfTile + step % 4 * 32, 16, kTileAlignment);
}
__device__ __forceinline__ uint64_t by_tokens(const bf16* tile, int step) {
  return operand<true>(tile, 2 * step * kTileAlignment, kHalfTile, kTileAlignment);
}

// A [64, D] tile that is not swizzled is stored as D / 8 columns of 64 rows of 16 bytes: eight rows
// of a column are a core matrix of wgmma. 16 bytes between columns keep accesses along D off each
// other's banks.
constexpr int kColumn = kTokens * 8 + 8;
__device__ __forceinline__ unsigned place(unsigned token, unsigned channel) {
  return channel / 8 * kColumn + token * 8 + channel % 8;
}
constexpr uint32_t kAlongColumns = kColumn * sizeof(bf16), kAlongTokens = 8 * 8 * sizeof(bf16);
// Operand of wgmma: 16 columns (k), all tokens (n).
__device__ __forceinline__ uint64_t by_columns(const bf16* tile, int step) {
  return operand<false>(tile, 2 * step * kAlongColumns, kAlongColumns, kAlongTokens);
}

constexpr int kWide = kHead / 8 * kColumn, kSquare = kTokens / 8 * kColumn;

__device__ __forceinline__ uint32_t& word(bf16* tile, unsigned token, unsigned channel) {
  return *reinterpret_cast<uint32_t*>(tile + place(token, channel));
}
__device__ __forceinline__ uint32_t word(const bf16* row, unsigned channel) {
  return *reinterpret_cast<const uint32_t*>(row + channel);
}

__device__ __forceinline__ void load8(float (&x)[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 y = *reinterpret_cast<const float4*>(from + i);
    x[i] = y.x;
    x[i + 1] = y.y;
    x[i + 2] = y.z;
    x[i + 3] = y.w;
  }
}

constexpr int kStages = 3;

// What the sides hand on for a chunk. Rows of q and k are not normalised: the factors of rows go
// with the products. G: gate sum from the chunk's start.
struct alignas(kTileAlignment) Stage {
  bf16 q[kTile / 2];   // q, then its rows decayed within blocks, then q exp2(G)
  bf16 k[kTile / 2];   // k, then its rows decayed within blocks, then k exp2(G)
  bf16 g[kTile / 2];   // g, then k decayed to the end of its block, then k exp2(G_last - G)
  float decay[kHead];  // exp2(G_last)
  float q_norm[kTokens], k_norm[kTokens];  // 1 / norm; of q times the scale
  float own[kTokens];                      // q k of a token
  float beta[kTokens];
};

// Decays over blocks.
struct Totals {
  float exact[kBlocks][kHead];
  bf16 rounded[kBlocks + 1][kHead];  // the last: of blocks 1 and 2 together
};

// A block of 16 x 16 values of 16 bits: two halves of eight columns, a row of one is 16 bytes.
using Square = __half[2][kBlock][8];

// Of the coupling side.
struct Scratch {
  float diagonal[kBlocks][kBlock][kBlock + 4];  // diagonal blocks of L, transposed
  Square below[kBlocks * (kBlocks - 1) / 2];    // blocks of L below them, see below()
  Square inverse[kBlocks];                      // inverses of the diagonal blocks, transposed
};
// Index of block (I, J), I > J.
__device__ __forceinline__ constexpr unsigned below(unsigned I, unsigned J) {
  return I * (I - 1) / 2 + J;
}

// Rows are decayed from the start of their block and multiplied by this: half the range of 16
// gates of -5 in base 2, so that no product of a factor of a row and one of a column leaves fp32.
constexpr float kRowScale = 0x1p57f;

// The work of a block: some chunks of one sequence and head, and whose state comes and goes.
struct Piece {
  int sequence, head, index;
  int64_t token;  // the first one in the flattened tensor
  int length;     // tokens
  int chunks;

  __device__ int64_t sequence_head(const flaop_flash_kda& p) const {
    return static_cast<int64_t>(sequence) * p.H + head;
  }
};

struct Shared {
  Stage stage[kStages];
  bf16 v[kTile / 2];       // v of the scanned chunk, then its o
  bf16 A[kSquare];         // k_norm of its rows, the inverse, beta of its columns
  bf16 A_qk[2][kSquare];   // of chunks in turn
  bf16 reciprocal[kWide];  // k by the reciprocals of the rows' factors
  Totals totals[2];        // of chunks in turn
  Scratch scratch;
  float shift[kHead];  // rate times bias of the gate
  // of a stage: inputs loaded, decayed, coupled, scanned
  uint64_t loaded[kStages], decayed[kStages], full[kStages], empty[kStages];
  uint64_t values[2];    // halves of v loaded
  uint64_t paired;       // reciprocal read
  uint64_t transformed;  // A read
  Piece piece;
  int start, end;
#ifdef FLAOP_FLASH_CLOCK
  uint32_t clocks[16][kClockSteps];
#endif
};

static_assert(offsetof(Shared, v) % kTileAlignment == 0);
static_assert(sizeof(Shared) + kTileAlignment <= 232448);

// The stage of a chunk, and the parity of its phase.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ Turn next() const {
    return stage + 1 < kStages ? Turn{stage + 1, parity} : Turn{0, parity ^ 1};
  }
};

// The tensors as TMA reads them: [B T, H, 128], in boxes of 64 tokens of one head by 64 channels.
struct Maps {
  CUtensorMap q, k, v, g;
};

__device__ __forceinline__ int bound(const flaop_flash_kda& p, int n) {
  const int64_t x = p.long_seqlens ? static_cast<const int64_t*>(p.cu_seqlens)[n]
                                   : static_cast<const int32_t*>(p.cu_seqlens)[n];
  return static_cast<int>(x < 0 ? 0 : x > p.T ? p.T : x);
}

// Start and end of a packed sequence: boundaries never decrease, so a wrong one reads nothing
// outside. By all threads of the block.
__device__ __forceinline__ void find_bounds(const flaop_flash_kda& p, Shared& s, int n,
                                            int threads) {
  if (threadIdx.x == 0) s.start = 0;
  __syncthreads();
  int most = 0;
  for (int i = threadIdx.x; i <= n; i += threads) most = max(most, bound(p, i));
  atomicMax(&s.start, most);
  __syncthreads();
  if (threadIdx.x == 0) s.end = n < p.N ? max(s.start, bound(p, n + 1)) : s.start;
  __syncthreads();
}

// Heads are fastest: blocks that run together read neighbouring memory.
__device__ __forceinline__ Piece find_piece(const flaop_flash_kda& p, Shared& s, int sequence,
                                            int head, int index, int threads) {
  int start = 0, length = p.T;
  int64_t first = static_cast<int64_t>(sequence) * p.T;
  if (p.cu_seqlens != nullptr) {
    find_bounds(p, s, sequence, threads);
    start = s.start;
    length = s.end - start;
    first = start;
  }
  const int64_t chunks = (length + kTokens - 1) / kTokens;
  const int from = static_cast<int>(chunks * index / p.pieces);
  const int to = static_cast<int>(chunks * (index + 1) / p.pieces);
  const int until = min(to * kTokens, length);
  return {sequence, head, index, first + from * kTokens, until - from * kTokens, to - from};
}

}  // namespace flaop::flash

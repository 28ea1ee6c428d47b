// The coupling side: a warpgroup makes what couples the tokens of a chunk, products of pairs and
// the inverse, and decays across the blocks of 16 tokens.
#pragma once
#include "inverse.cuh"
#include "pairs.cuh"

namespace flaop::flash {

// Eight channels of every second token of a block.
struct Rows {
  uint4 x[kBlock / 2];
};
// Row i of a tile; at: of the first, whose token is a multiple of eight or follows one.
__device__ __forceinline__ uint4& row(bf16* tile, unsigned at, unsigned i) {
  return access<uint4>(tile, (at ^ i % 4 * 32) + i * 2 * kTileRow);
}
// Multiplies rows of a tile by the factors of channels, and loads those of the next tile.
__device__ __forceinline__ void multiply_rows(Rows& rows, bf16* tile, bf16* next, unsigned at,
                                              const uint32_t (&factor)[4]) {
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const uint4 x = rows.x[i];
    if (next != nullptr) rows.x[i] = row(next, at, i);
    row(tile, at, i) = make_uint4(multiply_bf16(x.x, factor[0]), multiply_bf16(x.y, factor[1]),
                                  multiply_bf16(x.z, factor[2]), multiply_bf16(x.w, factor[3]));
  }
}

// From decays within the block to those from the chunk's start and to its end. A lane: eight
// channels of every second token.
template <bool OUTPUT>
__device__ __forceinline__ void decay_across(Stage& stage, const Totals& totals, unsigned block,
                                             unsigned lane) {
  const int channel = 8 * (lane % 16);
  float before[8], after[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    before[i] = 1.f / kRowScale;
    after[i] = 1.f;
  }
#pragma unroll
  for (int m = 0; m < kBlocks - 1; ++m) {
    const bool later = m >= block;
    float total[8];
    load8(total, &totals.exact[later ? m + 1 : m][channel]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (later) {
        after[i] *= total[i];
      } else {
        before[i] *= total[i];
      }
    }
  }
  if (block == 0 && lane < 16) {
    float own[8];
    load8(own, &totals.exact[0][channel]);
#pragma unroll
    for (int i = 0; i < 8; ++i) stage.decay[channel + i] = own[i] * after[i];
  }
  uint32_t start[4], end[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    start[i] = pack_bf16(before[2 * i], before[2 * i + 1]);
    end[i] = pack_bf16(after[2 * i], after[2 * i + 1]);
  }
  const unsigned at = swizzled(kBlock * block + lane / 16, channel);
  Rows rows;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) rows.x[i] = row(stage.k, at, i);
  multiply_rows(rows, stage.k, OUTPUT ? stage.q : stage.g, at, start);
  if constexpr (OUTPUT) multiply_rows(rows, stage.q, stage.g, at, start);
  if (block < kBlocks - 1) multiply_rows(rows, stage.g, nullptr, at, end);
}

// Six pairs of blocks below the diagonal: the rows of the next block, and but for the first warp
// one of the three pairs that are further apart, whose columns decay over what is between.
template <bool OUTPUT>
__device__ __forceinline__ void pairs_below(Shared& shared, Stage& stage, bf16* A_qk,
                                            Totals& totals, unsigned block, unsigned lane) {
  if (block < 3) pairs<OUTPUT, false, false>(shared, stage, A_qk, block + 1, block, nullptr, lane);
  if (block == 0) return;
  forget(lane);
  unsigned I = 3, J = 1, between = 2;  // of the second warp
  if (block == 2) I = 2, J = 0, between = 1;
  if (block == 3) {
    J = 0, between = kBlocks;
    const unsigned channel = 4 * lane;
    const uint2 x = *reinterpret_cast<const uint2*>(&totals.rounded[1][channel]);
    const uint2 y = *reinterpret_cast<const uint2*>(&totals.rounded[2][channel]);
    *reinterpret_cast<uint2*>(&totals.rounded[kBlocks][channel]) =
        make_uint2(multiply_bf16(x.x, y.x), multiply_bf16(x.y, y.y));
    __syncwarp();
  }
  pairs<OUTPUT, false, true>(shared, stage, A_qk, I, J, totals.rounded[between], lane);
}

// All chunks of a piece.
template <bool OUTPUT>
__device__ __forceinline__ void couple_chunks(Shared& shared) {
  const Piece& piece = shared.piece;  // read anew for each chunk: registers are short
  const auto sync = [] { threads_sync<kWarpgroup>(2); };
  unsigned thread = threadIdx.x % kWarpgroup;
  // blocks above the diagonal are never written again
  for (int i = thread; i < kSquare / 2; i += kWarpgroup) {
    reinterpret_cast<uint32_t*>(shared.A)[i] = 0;
    for (int j = 0; j < 2; ++j) reinterpret_cast<uint32_t*>(shared.A_qk[j])[i] = 0;
  }
  Turn turn;
  FLAOP_CLOCK_START(shared);
  for (int chunk = 0; chunk < piece.chunks; ++chunk) {
    Stage& stage = shared.stage[turn.stage];
    Totals& totals = shared.totals[chunk % 2];
    bf16* const A_qk = shared.A_qk[chunk % 2];
    barrier_wait(&shared.decayed[turn.stage], turn.parity);
    FLAOP_CLOCK_STEP(0);  // waiting for decays
    const Turn next = turn.next();
    // the chunk before the last one had this A_qk, and the stage of the next
    if (OUTPUT && chunk >= 2) barrier_wait(&shared.empty[next.stage], next.parity ^ 1);
    sync();               // the scratch memory has been read
    FLAOP_CLOCK_STEP(1);  // for the scan, and other warps
    forget(thread);
    pairs<OUTPUT, true, false>(shared, stage, A_qk, thread / 32, thread / 32, nullptr, thread % 32);
    barrier_arrive(&shared.paired);
    __syncwarp();
    FLAOP_CLOCK_STEP(2);  // pairs of blocks with themselves
    forget(thread);
    invert_diagonal(shared.scratch, thread / 32, thread % 32);
    __syncwarp();
    FLAOP_CLOCK_STEP(3);  // their inverses
    forget(thread);
    pairs_below<OUTPUT>(shared, stage, A_qk, totals, thread / 32, thread % 32);
    FLAOP_CLOCK_STEP(4);  // pairs of blocks below
    sync();
    FLAOP_CLOCK_STEP(5);  // for other warps
    forget(thread);
    decay_across<OUTPUT>(stage, totals, thread / 32, thread % 32);
    FLAOP_CLOCK_STEP(6);  // decays across blocks
    barrier_wait(&shared.transformed, chunk % 2 ^ 1);
    FLAOP_CLOCK_STEP(7);  // for the scan
    forget(thread);
    // the first column takes longest, the last block of decays least
    invert_column(shared.A, stage, shared.scratch, kBlocks - 1 - thread / 32, thread % 32);
    FLAOP_CLOCK_STEP(8);  // the inverse
    fence_async();
    barrier_arrive(&shared.full[turn.stage]);
    turn = next;
    FLAOP_CLOCK_STEP(9);  // fence
  }
}

}  // namespace flaop::flash

// The scanning side: a warpgroup carries the state of 64 values through the chunks of a piece.
//
// The state is kept transposed, S [values, channels], as accumulators. Everything that depends on
// it stays in registers: an accumulator tile, rounded, is the left operand of the next product.
//   X = V^T - S (k e^G)^T,  V' = X (A beta)^T,  o^T = S (q e^G)^T + V' A_qk^T,
//   S <- S e^(G_last) + V' (k e^(G_last - G))
// q and k come as they are: the factor of a token that normalises k multiplies S (k e^G)^T and is
// in the rows of A, so V' has it too; that of q multiplies o.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Where a state comes from or goes to: a [V, K] matrix.
struct StateSource {
  const void* from;  // or null: zero
  int dtype;
  bool identity;
};

__device__ __forceinline__ float2 load_number2(const void* x, int64_t i, int dtype) {
  if (dtype == FLAOP_F32) return load2(static_cast<const float*>(x) + i);
  if (dtype == FLAOP_BF16)
    return unpack_bf16(*reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(x) + i));
  return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(x) + i));
}

// The part of a tile's left operand that 16 columns of accumulators make.
__device__ __forceinline__ void round_operand(uint32_t (&a)[4], const float* c) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack_bf16(c[2 * i], c[2 * i + 1]);
}

__device__ __forceinline__ void load_tile(bf16* tile, const CUtensorMap& map, int head, int token,
                                          uint64_t* barrier) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    load_box(&access<bf16>(tile, half * kHalfTile), map, 64 * half, head, token, barrier);
}

// Starts loading q, k and g of a chunk. By one thread, once the stage is empty.
template <bool OUTPUT>
__device__ __forceinline__ void load_chunk(const Maps& maps, Shared& shared, int chunk, int stage) {
  const Piece& piece = shared.piece;
  if (chunk >= piece.chunks) return;
  Stage& to = shared.stage[stage];
  uint64_t* barrier = &shared.loaded[stage];
  const int token = static_cast<int>(piece.token) + chunk * kTokens, head = piece.head;
  barrier_expect(barrier, (2 + OUTPUT) * kTile);
  load_tile(to.g, maps.g, head, token, barrier);
  load_tile(to.k, maps.k, head, token, barrier);
  if constexpr (OUTPUT) load_tile(to.q, maps.q, head, token, barrier);
}

// Starts loading a warpgroup's half of v of a chunk. By one thread, once the last one is read.
__device__ __forceinline__ void load_values(const Maps& maps, Shared& shared, int chunk,
                                            int group) {
  const Piece& piece = shared.piece;
  if (chunk >= piece.chunks) return;
  barrier_expect(&shared.values[group], kHalfTile);
  load_box(&access<bf16>(shared.v, group * kHalfTile), maps.v, 64 * group, piece.head,
           static_cast<int>(piece.token) + chunk * kTokens, &shared.values[group]);
}

// Rows of v past the end of a sequence are not its own: zero. By the warpgroup of the half.
__device__ __forceinline__ void end_values(bf16* v, int length, int group, int thread) {
#pragma unroll 1
  for (int t = length + thread / 8; t < kTokens; t += kWarpgroup / 8)
    access<uint4>(v, swizzled(t, 64 * group + 8 * (thread % 8))) = make_uint4(0, 0, 0, 0);
  threads_sync<kWarpgroup>(3 + group);
}

template <bool OUTPUT>
__device__ __forceinline__ void scan(const flaop_flash_kda& p, const Maps& maps, Shared& shared,
                                     int group, bool with_values, StateSource source, float* to) {
  const Piece& piece = shared.piece;  // read anew for each chunk: registers are short
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = 2 * (lane % 4);
  const int value = 64 * group + 16 * warp;  // first row of the warp
  float S[64];  // S[4 j + 2 i], + 1: row value + r + 8 i, channels 8 j + c, + 1
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = value + r + 8 * i, channel = 8 * j + c;
      float2 x = make_float2(0.f, 0.f);
      if (source.from != nullptr)
        x = load_number2(source.from, row * kHead + channel, source.dtype);
      if (source.identity) x = make_float2(row == channel, row == channel + 1);
      S[4 * j + 2 * i] = x.x;
      S[4 * j + 2 * i + 1] = x.y;
    }

  // Two blocks of eight tokens by two of eight values, as load_matrices_transposed wants them.
  const unsigned at = swizzled(8 * (lane / 16) + lane % 8, value + 8 * (lane / 8 % 2));
  const bool loads = group == 1 && warp == 0;  // this warp starts the loads of stages
  if (loads && lane == 0)
    for (int i = 0; i < kStages; ++i) load_chunk<OUTPUT>(maps, shared, i, i);
  if (with_values && thread == 0) load_values(maps, shared, 0, group);
  Turn turn;
  FLAOP_CLOCK_START(shared);
  for (int chunk = 0; chunk < piece.chunks; ++chunk, turn = turn.next()) {
    const Stage& stage = shared.stage[turn.stage];
    barrier_wait(&shared.full[turn.stage], turn.parity);
    FLAOP_CLOCK_STEP(0);  // waiting for operands

    uint32_t state[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) round_operand(state[i], &S[8 * i]);
    float x[32];
    wgmma_fence();
    wgmma_n64<false>(x, state[0], by_channels(stage.k, 0));
#pragma unroll
    for (int i = 1; i < 8; ++i) wgmma_n64<true>(x, state[i], by_channels(stage.k, i));
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
    FLAOP_CLOCK_STEP(1);  // X

    const int length = piece.length - chunk * kTokens;
    if (with_values) {
      barrier_wait(&shared.values[group], chunk % 2);
      if (length < kTokens) end_values(shared.v, length, group, thread);
    }
    uint32_t error[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t v[4] = {0, 0, 0, 0};
      if (with_values) load_matrices_transposed(v, &access<bf16>(shared.v, at + 16 * i * kTileRow));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 y = unpack_bf16(v[j]), norm = load2(&stage.k_norm[16 * i + 8 * (j / 2) + c]);
        error[i][j] =
            pack_bf16(y.x - norm.x * x[8 * i + 2 * j], y.y - norm.y * x[8 * i + 2 * j + 1]);
      }
    }
    FLAOP_CLOCK_STEP(2);  // its rounding
    float y[32];
    wgmma_fence();
    wgmma_n64<false>(y, error[0], by_columns(shared.A, 0));
#pragma unroll
    for (int i = 1; i < 4; ++i) wgmma_n64<true>(y, error[i], by_columns(shared.A, i));
    wgmma_commit();
    wgmma_wait<0>();
    pin(y);
    barrier_arrive(&shared.transformed);
    FLAOP_CLOCK_STEP(3);  // V'

    uint32_t v_new[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) round_operand(v_new[i], &y[8 * i]);
    float o[32];
    if constexpr (OUTPUT) {
      wgmma_fence();
      wgmma_n64<false>(o, state[0], by_channels(stage.q, 0));
#pragma unroll
      for (int i = 1; i < 8; ++i) wgmma_n64<true>(o, state[i], by_channels(stage.q, i));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma_n64<true>(o, v_new[i], by_columns(shared.A_qk[chunk % 2], i));
      wgmma_commit();
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 decay = load2(&stage.decay[8 * j + c]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        S[4 * j + 2 * i] *= decay.x;
        S[4 * j + 2 * i + 1] *= decay.y;
      }
    }
    pin(S);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_n128_transposed(S, v_new[i], by_tokens(stage.g, i));
    wgmma_commit();
    FLAOP_CLOCK_STEP(4);  // products for o and S under way

    float2 norm[8];
    if constexpr (OUTPUT) {
#pragma unroll
      for (int i = 0; i < 8; ++i) norm[i] = load2(&stage.q_norm[8 * i + c]);
    }
    wgmma_wait<0>();
    pin(S);
    if constexpr (OUTPUT) pin(o);
    barrier_arrive(&shared.empty[turn.stage]);
    FLAOP_CLOCK_STEP(5);  // o, S
    if constexpr (OUTPUT) {
      // this warp's values were read from there above, by itself
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t rounded[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 y = norm[2 * i + j / 2];
          rounded[j] = pack_bf16(y.x * o[8 * i + 2 * j], y.y * o[8 * i + 2 * j + 1]);
        }
        store_matrices_transposed(&access<bf16>(shared.v, at + 16 * i * kTileRow), rounded[0],
                                  rounded[1], rounded[2], rounded[3]);
      }
      threads_sync<kWarpgroup>(3 + group);
      FLAOP_CLOCK_STEP(6);  // o in shared memory
      const int64_t first = piece.token + static_cast<int64_t>(chunk) * kTokens;
      const int channel = 64 * group + 8 * (thread % 8);
      uint4 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = access<uint4>(shared.v, swizzled(thread / 8, channel) + 16 * i * kTileRow);
      bf16* o_row =
          static_cast<bf16*>(p.o) + ((first + thread / 8) * p.H + piece.head) * kHead + channel;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (16 * i + thread / 8 < length) store16(o_row, rows[i]);
        o_row += static_cast<int64_t>(16) * p.H * kHead;
      }
    }
    if (loads) {
      barrier_wait(&shared.empty[turn.stage], turn.parity);
      if (elected()) load_chunk<OUTPUT>(maps, shared, chunk + kStages, turn.stage);
      __syncwarp();
    }
    FLAOP_CLOCK_STEP(8);  // loads started
    if (with_values) {
      fence_async();  // the place of v is filled by TMA next
      threads_sync<kWarpgroup>(3 + group);
      if (warp == 0 && elected()) load_values(maps, shared, chunk + 1, group);
      __syncwarp();
    }
    FLAOP_CLOCK_STEP(7);  // o stored
  }

  if (to == nullptr) return;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(&to[(value + r + 8 * i) * kHead + 8 * j + c]) =
          make_float2(S[4 * j + 2 * i], S[4 * j + 2 * i + 1]);
}

}  // namespace flaop::flash

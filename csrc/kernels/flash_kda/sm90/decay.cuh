// The decaying side: a warpgroup turns gates into decays within blocks of 16 tokens; a warp has a
// block.
//
// Gates of [lower_bound, 0] with lower_bound >= -5 let the decays within a block be products in
// fp32: rows from the start of the block, columns to its end for rows of later blocks, and what
// lies between is a factor per block and channel. Within a block columns have the reciprocals of
// the rows' factors, so that no row depends on what follows it.
#pragma once
#include "tiles.cuh"

namespace flaop::flash {

// Twice -inf: the bounded gate of it is zero.
constexpr uint32_t kNoDecay = 0xff80ff80u;

// Boxes do not end where a sequence does: what lies behind is made zero, and a decay of 1.
__device__ __forceinline__ void end_rows(Stage& stage, unsigned length, unsigned block,
                                         unsigned lane) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const unsigned first = kBlock * block + lane / 16;
#pragma unroll 1
  for (unsigned t = first; t < first + kBlock; t += 2) {
    if (t < length) continue;
    const unsigned at = swizzled(t, 8 * (lane % 16));
    access<uint4>(stage.q, at) = access<uint4>(stage.k, at) = zero;
    access<uint4>(stage.g, at) = make_uint4(kNoDecay, kNoDecay, kNoDecay, kNoDecay);
  }
}

// Of the 16 rows of a block: 1 / norm, and the products of queries with their own keys, which the
// rounding of decayed rows would spoil. All are on the diagonals of products of the rows: of k with
// k, and with q eight rows of both as the left operand's sixteen.
template <bool OUTPUT>
__device__ __forceinline__ void row_norms(Stage& stage, float scale, unsigned block,
                                          unsigned lane) {
  const unsigned first = kBlock * block, at = swizzled(first + lane % 16, 8 * (lane / 16));
  float left[2][4] = {}, right[2][4] = {};
  constexpr int kAhead = 3;
  uint32_t ks[kAhead + 1][4], qs[kAhead + 1][4];
  const auto load = [&](int i) {
    const unsigned place = (at ^ i % 4 * 32) + i / 4 * kHalfTile;
    load_matrices(ks[i % (kAhead + 1)], &access<bf16>(stage.k, place));
    if constexpr (OUTPUT) load_matrices(qs[i % (kAhead + 1)], &access<bf16>(stage.q, place));
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
  for (int step = 0; step < kHead / 16; ++step) {
    if (step + kAhead < kHead / 16) load(step + kAhead);
    keep_order();
    const uint32_t (&k)[4] = ks[step % (kAhead + 1)], (&q)[4] = qs[step % (kAhead + 1)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (OUTPUT) {
        const uint32_t both[4] = {k[i], q[i], k[2 + i], q[2 + i]};
        mma(left[i], both, k[i], k[2 + i], bf16());
        mma(right[i], q, q[i], q[2 + i], bf16());
      } else {
        mma(left[i], k, k[i], k[2 + i], bf16());
      }
    }
  }
  if (lane % 4 != lane / 8) return;
  const auto diagonal = [&](const float (&c)[4], int half) {
    return lane / 4 % 2 ? c[2 * half + 1] : c[2 * half];
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned token = first + lane / 4 + 8 * i;
    stage.k_norm[token] = rsqrt_approx(diagonal(left[i], OUTPUT ? 0 : i) + kNormEps);
    if constexpr (OUTPUT) {
      stage.q_norm[token] = scale * rsqrt_approx(diagonal(right[i], i) + kNormEps);
      stage.own[token] = diagonal(left[i], 1);
    }
  }
}

// bias times rate may be infinite where no gate is; two such terms must not meet.
constexpr float kMostBias = 0x1p100f;
// Smaller rates move no gate; zero times an infinite gate would be no number.
constexpr float kLeastRate = 0x1p-100f;

struct HeadGate {
  float rate, bound;  // -exp(A_log) log2 e; 1 / the lower bound in base 2

  __device__ HeadGate(const flaop_flash_kda& p, int head) {
    const float log_rate = p.A_log ? load_number(p.A_log, head, p.A_log_dtype) : 0.f;
    rate = fminf(-kLog2e * exp2_approx(fminf(log_rate, kAmplitudeCap) * kLog2e), -kLeastRate);
    bound = 1.f / (p.lower_bound * kLog2e);
  }
  // rate times the bias of a channel
  __device__ float shift(const flaop_flash_kda& p, int head, int channel) const {
    if (p.dt_bias == nullptr) return 0.f;
    const float x = rate * load_number(p.dt_bias, head * kHead + channel, p.dt_bias_dtype);
    return x > kMostBias ? kMostBias : x < -kMostBias ? -kMostBias : x;
  }
  // The decay of a token, exp2(1 / (bound (1 + exp2(rate x + shift)))): outer(inner(x, shift)).
  __device__ __forceinline__ float inner(float x, float shift) const {
    return fmaf(exp2_approx(rate * x + shift), bound, bound);
  }
  __device__ __forceinline__ float outer(float x) const {
    return exp2_approx(reciprocal_approx(x));
  }
};

// Four values each.
struct Float4 {
  float x[4];
  __device__ __forceinline__ void multiply(const Float4& y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= y.x[i];
  }
  __device__ __forceinline__ uint2 round() const {
    return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  }
};
__device__ __forceinline__ uint2 multiply4(uint2 a, uint2 b) {
  return make_uint2(multiply_bf16(a.x, b.x), multiply_bf16(a.y, b.y));
}
// Four channels of token t of eight; at: of the first.
__device__ __forceinline__ uint2& words(bf16* tile, unsigned at, unsigned t) {
  return access<uint2>(tile, (at ^ t * 16) + t * kTileRow);
}

// Decays within a block: rows of q and k in place, columns of k in the place of g for later blocks
// and apart for this one, and the totals of the block. A lane: four channels of half the tokens,
// twice; it gets the other half's product.
template <bool OUTPUT>
__device__ __forceinline__ void decay_within(Shared& shared, Stage& stage, Totals& totals,
                                             const HeadGate& gate, unsigned block, unsigned half,
                                             unsigned lane, uint32_t parity) {
  constexpr int kHalf = kBlock / 2;
  const bool late = lane >= 16;
  const int channel = 64 * half + 4 * (lane % 16);
  const unsigned first = kBlock * block + kHalf * late;
  unsigned at = swizzled(first, channel);
  bf16* const reciprocal = shared.reciprocal + place(first, channel);
  const float4 shift = *reinterpret_cast<const float4*>(&shared.shift[channel]);
  Float4 a[kHalf];
#pragma unroll
  for (int t = 0; t < kHalf; ++t) {
    const uint2 g = words(stage.g, at, t);
    const float2 x = unpack_bf16(g.x), y = unpack_bf16(g.y);
    a[t] = {gate.inner(x.x, shift.x), gate.inner(x.y, shift.y), gate.inner(y.x, shift.z),
            gate.inner(y.y, shift.w)};
  }
#pragma unroll
  for (int t = 0; t < kHalf; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[t].x[i] = gate.outer(a[t].x[i]);
  forget(at);  // places of tokens are made anew
  unsigned later = at;
  forget(later);
  // what is written from here on is read by then, of the chunk before
  if (half == 0) barrier_wait(&shared.paired, parity);
  Float4 own = a[kHalf - 1], row, column;
#pragma unroll
  for (int t = kHalf - 2; t >= 0; --t) own.multiply(a[t]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(~0u, own.x[i], 16);
    column.x[i] = late ? 1.f : other;
    row.x[i] = late ? kRowScale * other : kRowScale;
    own.x[i] *= other;
  }
  if (!late) {
    *reinterpret_cast<float4*>(&totals.exact[block][channel]) =
        make_float4(own.x[0], own.x[1], own.x[2], own.x[3]);
    *reinterpret_cast<uint2*>(&totals.rounded[block][channel]) = own.round();
  }
  // the assembler moves no load ahead of a store to another token
  constexpr int kAhead = 2;
  uint2 k[kHalf], q[kHalf];
#pragma unroll
  for (int t = kHalf - 1; t >= kHalf - kAhead; --t) k[t] = words(stage.k, at, t);
#pragma unroll
  for (int t = kHalf - 1; t >= 0; --t) {
    if (t >= kAhead) k[t - kAhead] = words(stage.k, at, t - kAhead);
    words(stage.g, at, t) = multiply4(k[t], column.round());
    column.multiply(a[t]);
  }
#pragma unroll
  for (int t = 0; OUTPUT && t < kAhead; ++t) q[t] = words(stage.q, later, t);
#pragma unroll
  for (int t = 0; t < kHalf; ++t) {
    if (OUTPUT && t + kAhead < kHalf) q[t + kAhead] = words(stage.q, later, t + kAhead);
    row.multiply(a[t]);
    Float4 inverse;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // two by one reciprocal: they are the scarcer
      const float both = reciprocal_approx(row.x[i] * row.x[i + 1]);
      inverse.x[i] = both * row.x[i + 1];
      inverse.x[i + 1] = both * row.x[i];
    }
    const uint2 factor = row.round();
    *reinterpret_cast<uint2*>(reciprocal + place(t, 0)) = multiply4(k[t], inverse.round());
    words(stage.k, later, t) = multiply4(k[t], factor);
    if constexpr (OUTPUT) words(stage.q, later, t) = multiply4(q[t], factor);
  }
}

// A number of these types as it lies in memory, and its value.
__device__ __forceinline__ uint32_t load_bits(const void* x, int64_t i, int dtype) {
  return dtype == FLAOP_F32 ? static_cast<const uint32_t*>(x)[i]
                            : static_cast<const uint16_t*>(x)[i];
}
__device__ __forceinline__ float number(uint32_t bits, int dtype) {
  if (dtype == FLAOP_F32) return __uint_as_float(bits);
  if (dtype == FLAOP_BF16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// All chunks of a piece.
template <bool OUTPUT>
__device__ __forceinline__ void decay_chunks(const flaop_flash_kda& p, Shared& shared) {
  // read anew for each chunk: registers are short
  const Piece& piece = shared.piece;
  unsigned thread = threadIdx.x % kWarpgroup;
  const HeadGate gate(p, piece.head);
  shared.shift[thread] = gate.shift(p, piece.head, thread);
  threads_sync<kWarpgroup>(1);
  // of the lane's token of the block, as it lies in memory, so that nothing waits for it
  const auto load_beta = [&](int chunk) -> uint32_t {
    const int t = chunk * kTokens + kBlock * (thread / 32) + thread % kBlock;
    if (t >= piece.length) return 0;
    return load_bits(p.beta, (piece.token + t) * p.H + piece.head, p.beta_dtype);
  };
  uint32_t beta = load_beta(0);
  Turn turn;
  FLAOP_CLOCK_START(shared);
  for (int chunk = 0; chunk < piece.chunks; ++chunk, turn = turn.next()) {
    Stage& stage = shared.stage[turn.stage];
    barrier_wait(&shared.loaded[turn.stage], turn.parity);
    FLAOP_CLOCK_STEP(0);  // waiting for loads
    const int length = piece.length - chunk * kTokens;
    forget(thread);
    if (length < kTokens) {
      end_rows(stage, length, thread / 32, thread % 32);
      __syncwarp();
    }
    const int token = kBlock * (thread / 32) + thread % kBlock;
    stage.beta[token] =
        token < length ? p.beta_bound * sigmoid_base2(number(beta, p.beta_dtype) * kLog2e) : 0.f;
    beta = load_beta(chunk + 1);
    row_norms<OUTPUT>(stage, p.scale, thread / 32, thread % 32);
    __syncwarp();
    FLAOP_CLOCK_STEP(1);  // norms
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      forget(thread);
      decay_within<OUTPUT>(shared, stage, shared.totals[chunk % 2], gate, thread / 32, half,
                           thread % 32, chunk % 2 ^ 1);
      FLAOP_CLOCK_STEP(2 + half);  // decays
    }
    fence_async();
    barrier_arrive(&shared.decayed[turn.stage]);
    FLAOP_CLOCK_STEP(4);  // fence
  }
}

}  // namespace flaop::flash

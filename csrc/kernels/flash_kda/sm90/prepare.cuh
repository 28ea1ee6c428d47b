// The preparing side: two warpgroups make a chunk's operands, from its inputs to the inverse.
//
// Blocks are of 16 tokens. Gates of [lower_bound, 0] with lower_bound >= -5 let the
// decays within a block be products in fp32: rows from the start of the block, columns to its end
// for rows of later blocks, and what lies between is a factor per block and channel. Within a block
// columns have the reciprocals of the rows' factors, so that no row depends on what follows it.
#pragma once
#include "inverse.cuh"
#include "pairs.cuh"

namespace flaop::flash {

constexpr int kPrepareThreads = 2 * kWarpgroup;

// To be measured.
#ifdef FLAOP_FLASH_LOAD_LATE
constexpr bool kLoadLate = true;  // a chunk's loads start behind the pairs of the one before
#else
constexpr bool kLoadLate = false;
#endif
#ifdef FLAOP_FLASH_PREFETCH
constexpr bool kPrefetch = true;  // and go to the L2 cache a chunk earlier
#else
constexpr bool kPrefetch = false;
#endif
#ifdef FLAOP_FLASH_SHARE_RECIPROCALS
constexpr bool kShareReciprocals = true;  // one for the gates of two channels
#else
constexpr bool kShareReciprocals = false;
#endif

// Twice -inf: the bounded gate of it is zero.
constexpr uint32_t kNoDecay = 0xff80ff80u;

// Rows of [.., H, 128] tensors to tiles; zeros past the end.
struct Rows {
  bf16* to;
  const void* from;
};
template <int THREADS>
__device__ __forceinline__ void load_rows_async(const flaop_flash_kda& p, int64_t token, int head,
                                                int length, unsigned thread,
                                                const Rows (&rows)[2]) {
  constexpr int kRows = THREADS / 16;
  const int first = thread / 16, channel = 8 * (thread % 16);
  const int64_t step = static_cast<int64_t>(p.H) * kHead * kRows;
  int64_t at = ((token + first) * p.H + head) * kHead + channel;
  unsigned to = place(first, channel);
#pragma unroll 8
  for (int t = 0; t < kTokens; t += kRows) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (rows[i].from != nullptr)  // nothing is read past the end
        copy_async(rows[i].to + to, static_cast<const bf16*>(rows[i].from) + at,
                   first + t < length);
    at += step;
    to += place(kRows, 0);
  }
}

// Starts loading a chunk: k and g by the first warpgroup, v and q by the last two warps; these have
// the time. Gives what the thread's token has for beta, which arrives later.
template <bool OUTPUT>
__device__ __forceinline__ float load_chunk(const flaop_flash_kda& p, Stage& stage,
                                            const Piece& piece, int chunk, bool with_values,
                                            unsigned thread) {
  const int64_t token = piece.token + static_cast<int64_t>(chunk) * kTokens;
  const int length = min(piece.length - chunk * kTokens, kTokens), head = piece.head;
  if (thread < kWarpgroup) {
    load_rows_async<kWarpgroup>(p, token, head, length, thread, {{stage.k, p.k}, {stage.g, p.g}});
  } else if (with_values) {
    load_rows_async<kWarpgroup / 2>(p, token, head, length, thread % (kWarpgroup / 2),
                                    {{stage.v, p.v}, {stage.q, OUTPUT ? p.q : nullptr}});
  }
  copy_commit();
  return static_cast<int>(thread) < length
             ? load_number(p.beta, (token + thread) * p.H + head, p.beta_dtype)
             : 0.f;
}
__device__ __forceinline__ bool loads(unsigned thread) {
  return thread < kWarpgroup || thread >= kPrepareThreads - kWarpgroup / 2;
}

// Starts moving a chunk to the L2 cache. Four threads a token, one a tensor.
template <bool OUTPUT>
__device__ __forceinline__ void prefetch_chunk(const flaop_flash_kda& p, const Piece& piece,
                                               int chunk, unsigned thread) {
  const unsigned t = chunk * kTokens + thread / 4, tensor = thread % 4;
  if (static_cast<int>(t) >= piece.length || (!OUTPUT && tensor == 3)) return;
  const void* from = tensor == 0 ? p.k : tensor == 1 ? p.g : tensor == 2 ? p.v : p.q;
  const bf16* x = static_cast<const bf16*>(from) + ((piece.token + t) * p.H + piece.head) * kHead;
  prefetch(x);
  prefetch(x + kHead / 2);
}

// Past the end the gate makes a decay of 1. A thread: a channel.
__device__ __forceinline__ void end_gate(bf16* g, int length, unsigned thread) {
  if (thread >= kHead) return;
#pragma unroll 1
  for (int t = max(length, 0); t < kTokens; ++t)
    g[place(t, thread)] = __ushort_as_bfloat16(static_cast<unsigned short>(kNoDecay));
}

// Of eight rows: 1 / norm, and the products of queries with their own keys, which the rounding of
// decayed rows would spoil. All are on the diagonals of products of the rows with themselves, k and
// q together as the sixteen rows of the left operand.
template <bool OUTPUT>
__device__ __forceinline__ void row_norms(Stage& stage, Scratch& s, float scale, unsigned warp,
                                          unsigned lane) {
  const unsigned first = 8 * warp, at = place(first + lane % 8, 8 * (lane / 8));
  float by_k[2][4] = {}, by_q[2][4] = {};
  uint32_t k[4][4], q[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    load_matrices(k[i], stage.k + at + place(0, 32 * i));
    if constexpr (OUTPUT) load_matrices(q[i], stage.q + at + place(0, 32 * i));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t *x = &k[i][2 * j], *y = OUTPUT ? &q[i][2 * j] : x;
      const uint32_t rows[4] = {x[0], y[0], x[1], y[1]};
      mma(by_k[j], rows, x[0], x[1], bf16());
      if constexpr (OUTPUT) mma(by_q[j], rows, y[0], y[1], bf16());
    }
  if (lane % 4 != lane / 8) return;
  const unsigned token = first + lane / 4;
  const auto diagonal = [&](const float (&c)[2][4], int half) {
    return lane / 4 % 2 ? c[0][2 * half + 1] + c[1][2 * half + 1] : c[0][2 * half] + c[1][2 * half];
  };
  stage.k_norm[token] = rsqrt_approx(diagonal(by_k, 0) + kNormEps);
  if constexpr (OUTPUT) {
    stage.q_norm[token] = scale * rsqrt_approx(diagonal(by_q, 1) + kNormEps);
    s.own[token] = diagonal(by_k, 1);
  }
}

// bias times rate may be infinite where no gate is; two such terms must not meet.
constexpr float kMostBias = 0x1p100f;
// Smaller rates move no gate; zero times an infinite gate would be no number.
constexpr float kLeastRate = 0x1p-100f;

struct HeadGate {
  float rate, bound;  // -exp(A_log) log2 e; the lower bound in base 2, or 1 / that

  __device__ HeadGate(const flaop_flash_kda& p, int head) {
    const float log_rate = p.A_log ? load_number(p.A_log, head, p.A_log_dtype) : 0.f;
    rate = fminf(-kLog2e * exp2_approx(fminf(log_rate, kAmplitudeCap) * kLog2e), -kLeastRate);
    bound = p.lower_bound * kLog2e;
    if constexpr (!kShareReciprocals) bound = 1.f / bound;
  }
  // rate times the bias of a channel
  __device__ float shift(const flaop_flash_kda& p, int head, int channel) const {
    if (p.dt_bias == nullptr) return 0.f;
    const float x = rate * load_number(p.dt_bias, head * kHead + channel, p.dt_bias_dtype);
    return x > kMostBias ? kMostBias : x < -kMostBias ? -kMostBias : x;
  }
  // The decay of a token, exp2(bound / (1 + exp2(rate x + shift))): outer(inner(x, shift)).
  __device__ __forceinline__ float inner(float x, float shift) const {
    x = rate * x + shift;
    // from there on the decay is 1, and the product of two stays finite
    if constexpr (kShareReciprocals) return 1.f + exp2_approx(x > 40.f ? 40.f : x);
    return fmaf(exp2_approx(x), bound, bound);
  }
  __device__ __forceinline__ void outer(float& x, float& y) const {
    if constexpr (kShareReciprocals) {
      const float both = bound * reciprocal_approx(x * y), other = x;
      x = exp2_approx(both * y);
      y = exp2_approx(both * other);
    } else {
      x = exp2_approx(reciprocal_approx(x));
      y = exp2_approx(reciprocal_approx(y));
    }
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
__device__ __forceinline__ uint2& words(bf16* tile, unsigned token) {
  return *reinterpret_cast<uint2*>(tile + place(token, 0));
}

// Decays within a block, for half the channels: rows of q and k in place, columns of k in the place
// of g for later blocks and apart for this one, and the totals of the block. A lane: four channels
// of half the tokens; it gets the other half's product.
template <bool OUTPUT>
__device__ __forceinline__ void decay_within(Stage& stage, Scratch& s, const HeadGate& gate,
                                             unsigned block, unsigned half, unsigned lane) {
  constexpr int kHalf = kBlock / 2;
  const bool late = lane >= 16;
  const int channel = 64 * half + 4 * (lane % 16);
  const int at = place(kBlock * block + kHalf * late, channel);
  const float4 shift = *reinterpret_cast<const float4*>(&s.shift[channel]);
  Float4 a[kHalf];
#pragma unroll
  for (int t = 0; t < kHalf; ++t) {
    const uint2 g = words(stage.g + at, t);
    const float2 x = unpack_bf16(g.x), y = unpack_bf16(g.y);
    a[t] = {gate.inner(x.x, shift.x), gate.inner(x.y, shift.y), gate.inner(y.x, shift.z),
            gate.inner(y.y, shift.w)};
  }
#pragma unroll
  for (int t = 0; t < kHalf; ++t)
#pragma unroll
    for (int i = 0; i < 4; i += 2) gate.outer(a[t].x[i], a[t].x[i + 1]);
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
    *reinterpret_cast<float4*>(&s.total[block][channel]) =
        make_float4(own.x[0], own.x[1], own.x[2], own.x[3]);
    *reinterpret_cast<uint2*>(&s.total16[block][channel]) = own.round();
  }
  uint2 k[kHalf];
#pragma unroll
  for (int t = kHalf - 1; t >= 0; --t) {
    k[t] = words(stage.k + at, t);
    words(stage.g + at, t) = multiply4(k[t], column.round());
    column.multiply(a[t]);
  }
#pragma unroll
  for (int t = 0; t < kHalf; ++t) {
    row.multiply(a[t]);
    Float4 inverse;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // two by one reciprocal: they are the scarcer
      const float both = reciprocal_approx(row.x[i] * row.x[i + 1]);
      inverse.x[i] = both * row.x[i + 1];
      inverse.x[i + 1] = both * row.x[i];
    }
    const uint2 factor = row.round();
    words(s.reciprocal + at, t) = multiply4(k[t], inverse.round());
    words(stage.k + at, t) = multiply4(k[t], factor);
    if constexpr (OUTPUT) {
      uint2& q = words(stage.q + at, t);
      q = multiply4(q, factor);
    }
  }
}

// Factors of eight channels to eight tokens of a tile, every second one.
__device__ __forceinline__ void multiply_rows(bf16* tile, const uint32_t (&factor)[4]) {
  constexpr int kRows = 4;  // loaded before the first is stored
#pragma unroll
  for (int t = 0; t < kBlock; t += 2 * kRows) {
    uint4 x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      x[i] = *reinterpret_cast<const uint4*>(tile + place(t + 2 * i, 0));
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      *reinterpret_cast<uint4*>(tile + place(t + 2 * i, 0)) =
          make_uint4(multiply_bf16(x[i].x, factor[0]), multiply_bf16(x[i].y, factor[1]),
                     multiply_bf16(x[i].z, factor[2]), multiply_bf16(x[i].w, factor[3]));
  }
}

// From decays within the block to those from the chunk's start and to its end. A lane: eight
// channels of every second token.
template <bool OUTPUT>
__device__ __forceinline__ void decay_across(Stage& stage, const Scratch& s, unsigned block,
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
    load8(total, &s.total[later ? m + 1 : m][channel]);
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
    load8(own, &s.total[0][channel]);
#pragma unroll
    for (int i = 0; i < 8; ++i) stage.decay[channel + i] = own[i] * after[i];
  }
  uint32_t start[4], end[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    start[i] = pack_bf16(before[2 * i], before[2 * i + 1]);
    end[i] = pack_bf16(after[2 * i], after[2 * i + 1]);
  }
  const int first = place(kBlock * block + lane / 16, channel);
  multiply_rows(stage.k + first, start);
  if constexpr (OUTPUT) multiply_rows(stage.q + first, start);
  if (block < kBlocks - 1) multiply_rows(stage.g + first, end);
}

// Ten pairs of blocks. The first four warps: a block with itself, and its inverse; the others: two
// rows of blocks and what is left.
template <bool OUTPUT>
__device__ __forceinline__ void all_pairs(Stage& stage, Scratch& s, unsigned warp, unsigned lane) {
  if (warp < kBlocks) {
    pairs<OUTPUT, true, false>(stage, s, warp, warp, nullptr, lane);
    __syncwarp();
    invert_diagonal(s, warp, lane);
    return;
  }
  const unsigned J = warp - kBlocks;
  if (J < 3) pairs<OUTPUT, false, false>(stage, s, J + 1, J, nullptr, lane);
  if (J == 2) return;
  forget(lane);
  // (2, 0), (3, 1) and (3, 0): the columns decay over what is between
  if (J == 3) {
    const unsigned channel = 4 * lane;
    const uint2 x = *reinterpret_cast<const uint2*>(&s.total16[1][channel]);
    const uint2 y = *reinterpret_cast<const uint2*>(&s.total16[2][channel]);
    *reinterpret_cast<uint2*>(&s.total16[kBlocks][channel]) = multiply4(x, y);
    __syncwarp();
  }
  pairs<OUTPUT, false, true>(stage, s, J == 0 ? 2 : 3, J % 3, s.total16[J == 3 ? kBlocks : J + 1],
                             lane);
}

// All chunks of a piece. with_values: v is read.
template <bool OUTPUT>
__device__ __forceinline__ void prepare(const flaop_flash_kda& p, Shared& shared,
                                        bool with_values) {
  Scratch& s = shared.scratch;
  const auto sync = [] { threads_sync<kPrepareThreads>(1); };
  // read anew for each chunk: registers are short
  const Piece& piece = shared.piece;
  unsigned thread = threadIdx.x;
  float beta = 0.f;
  if (piece.chunks > 0 && loads(thread))
    beta = load_chunk<OUTPUT>(p, shared.stage[0], piece, 0, with_values, thread);
  const HeadGate gate(p, piece.head);
  if (thread < kHead) s.shift[thread] = gate.shift(p, piece.head, thread);
  // blocks above the diagonal are never written again
  for (int i = thread; i < kSquare / 2; i += kPrepareThreads)
    for (int j = 0; j < 2; ++j) {
      reinterpret_cast<uint32_t*>(shared.stage[j].A)[i] = 0;
      reinterpret_cast<uint32_t*>(shared.stage[j].A_qk)[i] = 0;
    }
  FLAOP_CLOCK_START(shared);
  const auto load_next = [&](int next) {
    if (next >= piece.chunks) return;
    forget(thread);
    if constexpr (kPrefetch) prefetch_chunk<OUTPUT>(p, piece, next + 1, thread);
    if (!loads(thread)) return;
    barrier_wait(&shared.empty[next % 2], next / 2 % 2 ^ 1);
    FLAOP_CLOCK_STEP(5);  // waiting for the scan
    beta = load_chunk<OUTPUT>(p, shared.stage[next % 2], piece, next, with_values, thread);
    FLAOP_CLOCK_STEP(6);  // loads issued
  };
  for (int chunk = 0; chunk < piece.chunks; ++chunk) {
    Stage& stage = shared.stage[chunk % 2];
    copy_wait();
    FLAOP_CLOCK_STEP(0);  // waiting for loads
    sync();
    FLAOP_CLOCK_STEP(1);  // for other warps
    const int length = piece.length - chunk * kTokens;
    if (length < kTokens) {
      end_gate(stage.g, length, thread);
      sync();
    }
    forget(thread);
    if (thread < kTokens)
      s.beta[thread] =
          static_cast<int>(thread) < length ? p.beta_bound * sigmoid_base2(beta * kLog2e) : 0.f;
    row_norms<OUTPUT>(stage, s, p.scale, thread / 32, thread % 32);
    threads_sync<2 * 32>(5 + thread / 64);  // the same rows are decayed by the same two warps
    FLAOP_CLOCK_STEP(2);                    // norms
    forget(thread);
    decay_within<OUTPUT>(stage, s, gate, thread / 64, thread / 32 % 2, thread % 32);
    FLAOP_CLOCK_STEP(3);  // decays
    sync();
    FLAOP_CLOCK_STEP(4);  // for other warps
    // the other stage is free by now, and its loads have half a chunk's time
    if constexpr (!kLoadLate) load_next(chunk + 1);
    forget(thread);
    all_pairs<OUTPUT>(stage, s, thread / 32, thread % 32);
    FLAOP_CLOCK_STEP(7);  // pairs, inverses of diagonal blocks
    sync();
    FLAOP_CLOCK_STEP(8);  // for other warps
    if constexpr (kLoadLate) load_next(chunk + 1);
    forget(thread);
    if (thread < kWarpgroup) {
      invert_column(stage, s, thread / 32, thread % 32);
    } else {
      decay_across<OUTPUT>(stage, s, thread / 32 - kBlocks, thread % 32);
    }
    FLAOP_CLOCK_STEP(9);  // the inverse; decays across blocks
    fence_async();
    barrier_arrive_warp(&shared.full[chunk % 2], thread % 32);
    FLAOP_CLOCK_STEP(10);  // fence
  }
}

}  // namespace flaop::flash

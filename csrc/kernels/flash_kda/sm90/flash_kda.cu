// The fused inference forward of KDA: from raw inputs to outputs in one pass over memory.
//
// One block per (sequence, head, piece). Of its four warpgroups one turns gates into decays
// (decay.cuh), one couples the tokens of a chunk of 64 (couple.cuh), two carry the state of 64
// values each (scan.cuh); each is a chunk ahead of the next, and they meet in three stages of
// shared memory. A sequence in one piece takes one launch; in more, a first pass makes what joins
// them (pieces.h). Nothing of the size of the inputs is ever stored but the outputs.
#include <cuda_runtime.h>

#include "couple.cuh"
#include "decay.cuh"
#include "pieces.h"
#include "scan.cuh"

namespace flaop::flash {
namespace {

constexpr int kThreads = 4 * kWarpgroup;
constexpr int kState = kHead * kHead;
// 65536 registers for two preparing warpgroups and two scanning ones. With fewer the scan's
// products wait for each other.
template <bool OUTPUT>
constexpr int kPrepareRegisters = OUTPUT ? 80 : 88;
template <bool OUTPUT>
constexpr int kScanRegisters = 256 - kPrepareRegisters<OUTPUT>;
// Behind the blocks of (sequence, part, head).
constexpr int kZeroBlocks = 32;

// What a block of the first pass makes: the state that piece `piece` leaves, or its transfer
// matrix.
struct Summary {
  int piece;
  bool transfer;
};
__device__ __forceinline__ Summary summary(const flaop_flash_kda& p, int index) {
  const bool transfer = index >= p.pieces - 1;
  return {transfer ? index - (p.pieces - 1) + 1 : index, transfer};
}

__device__ __forceinline__ float* summary_state(const flaop_flash_kda& p, int index,
                                                int64_t sequence_head) {
  return p.workspace + (static_cast<int64_t>(index) * p.N * p.H + sequence_head) * kState;
}

// Rows of o that lie in no sequence.
__device__ void zero_outside(const flaop_flash_kda& p, Shared& s, int part) {
  find_bounds(p, s, p.N, kThreads);
  const int begin = bound(p, 0), end = s.start;
  const int64_t row = static_cast<int64_t>(p.H) * kHead / 8;
  uint4* o = static_cast<uint4*>(p.o);
  const int64_t stride = static_cast<int64_t>(kZeroBlocks) * kThreads;
  const int64_t first = static_cast<int64_t>(part) * kThreads + threadIdx.x;
  for (int64_t i = first; i < begin * row; i += stride) o[i] = make_uint4(0, 0, 0, 0);
  for (int64_t i = end * row + first; i < p.T * row; i += stride) o[i] = make_uint4(0, 0, 0, 0);
}

template <bool OUTPUT>
__global__ void __launch_bounds__(kThreads, 1)
    flash_kda_kernel(const __grid_constant__ flaop_flash_kda p, const __grid_constant__ Maps maps,
                     int parts) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory + -shared_address(memory) % kTileAlignment);
  const int head = blockIdx.x % p.H, part = blockIdx.x / p.H % parts;
  const int sequence = blockIdx.x / p.H / parts;
  if (sequence >= p.N) return zero_outside(p, s, blockIdx.x - p.N * p.H * parts);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.loaded[i], 1);
      barrier_init(&s.decayed[i], kWarpgroup);
      barrier_init(&s.full[i], kWarpgroup);
      barrier_init(&s.empty[i], 2 * kWarpgroup);
    }
    for (int i = 0; i < 2; ++i) barrier_init(&s.values[i], 1);
    barrier_init(&s.paired, kWarpgroup);
    barrier_init(&s.transformed, 2 * kWarpgroup);
    fence_async();
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.g}) prefetch_map(*map);
  }
  Summary what{part, false};
  if constexpr (!OUTPUT) what = summary(p, part);
  const Piece piece = find_piece(p, s, sequence, head, what.piece, kThreads);
  if (threadIdx.x == 0) s.piece = piece;
#ifdef FLAOP_FLASH_CLOCK
  if (threadIdx.x < 16 * kClockSteps)
    s.clocks[threadIdx.x / kClockSteps][threadIdx.x % kClockSteps] = 0;
#endif
  __syncthreads();

  const int64_t sequence_head = piece.sequence_head(p);
  const int group = threadIdx.x / kWarpgroup;
  if (group < 2) {
    give_registers<kPrepareRegisters<OUTPUT>>();
    if (group == 0) {
      decay_chunks<OUTPUT>(p, s);
    } else {
      couple_chunks<OUTPUT>(s);
    }
  } else {
    take_registers<kScanRegisters<OUTPUT>>();
    StateSource source{nullptr, FLAOP_F32, what.transfer};
    float* to = nullptr;
    if (piece.index == 0 && p.initial_state != nullptr) {
      const int64_t bytes = p.state_dtype == FLAOP_F32 ? 4 : 2;
      source.from = static_cast<const char*>(p.initial_state) + sequence_head * kState * bytes;
      source.dtype = p.state_dtype;
    }
    if constexpr (OUTPUT) {
      if (piece.index > 0) source.from = summary_state(p, piece.index - 1, sequence_head);
      if (piece.index == p.pieces - 1 && p.final_state != nullptr)
        to = p.final_state + sequence_head * kState;
    } else {
      to = summary_state(p, part, sequence_head);
    }
    scan<OUTPUT>(p, maps, s, group - 2, !what.transfer, source, to);
  }
#ifdef FLAOP_FLASH_CLOCK
  __syncwarp();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (OUTPUT && lane < kClockSteps) {
    const unsigned long long sum = s.clocks[warp][lane];
    atomicAdd(&clocks[warp][lane], sum);
  }
#endif
}

constexpr int kJoinRows = 16;
constexpr int kJoinDepth = 32;  // loads of a thread in flight

// The states that pieces leave, in order: S_p <- S_(p-1) transfer_p + S_p. A block: 16 values of a
// sequence and head; a thread: a channel.
__global__ void __launch_bounds__(kHead) join_kernel(const __grid_constant__ flaop_flash_kda p) {
  __shared__ __align__(16) float before[kJoinRows][kHead];
  const int64_t sequence_head = blockIdx.x / (kHead / kJoinRows);
  const int offset = blockIdx.x % (kHead / kJoinRows) * kJoinRows * kHead + threadIdx.x;
  const float* first = summary_state(p, 0, sequence_head) + offset;
  for (int i = 0; i < kJoinRows; ++i) before[i][threadIdx.x] = first[i * kHead];
  for (int piece = 1; piece < p.pieces - 1; ++piece) {
    float* own = summary_state(p, piece, sequence_head) + offset;
    const float* transfer = summary_state(p, p.pieces - 2 + piece, sequence_head) + threadIdx.x;
    float sum[kJoinRows];
#pragma unroll
    for (int i = 0; i < kJoinRows; ++i) sum[i] = own[i * kHead];
    __syncthreads();
    for (int first = 0; first < kHead; first += kJoinDepth) {
      float x[kJoinDepth];
#pragma unroll
      for (int k = 0; k < kJoinDepth; ++k) x[k] = transfer[(first + k) * kHead];
#pragma unroll
      for (int k = 0; k < kJoinDepth; k += 4)
#pragma unroll
        for (int i = 0; i < kJoinRows; ++i) {
          const float4 y = *reinterpret_cast<const float4*>(&before[i][first + k]);
          sum[i] += y.x * x[k];
          sum[i] += y.y * x[k + 1];
          sum[i] += y.z * x[k + 2];
          sum[i] += y.w * x[k + 3];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kJoinRows; ++i) own[i * kHead] = before[i][threadIdx.x] = sum[i];
  }
}

// The driver's function, through the runtime: nothing links against the driver.
struct Encoder {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaError_t error;

  Encoder() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                             cudaEnableDefault, &result);
#else
    error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error == cudaSuccess && result != cudaDriverEntryPointSuccess)
      error = cudaErrorSymbolNotFound;
    encode = reinterpret_cast<decltype(encode)>(found);
  }
};

cudaError_t make_maps(const flaop_flash_kda& p, Maps& maps) {
  static const Encoder encoder;
  if (encoder.error != cudaSuccess) return encoder.error;
  const uint64_t H = p.H, row = kHead * sizeof(bf16);
  const uint64_t tokens = static_cast<uint64_t>(p.cu_seqlens != nullptr ? 1 : p.N) * p.T;
  const cuuint64_t sizes[3] = {kHead, H, tokens}, strides[2] = {row, H * row};
  const cuuint32_t box[3] = {kTileRow / sizeof(bf16), 1, kTokens}, steps[3] = {1, 1, 1};
  const auto make = [&](CUtensorMap& map, const void* x) {
    return encoder.encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(x), sizes,
                          strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  for (const CUresult result :
       {make(maps.q, p.q), make(maps.k, p.k), make(maps.v, p.v), make(maps.g, p.g)})
    if (result != CUDA_SUCCESS) return static_cast<cudaError_t>(result);
  return cudaSuccess;
}

constexpr int kSharedBytes = sizeof(Shared) + kTileAlignment;

template <bool OUTPUT>
cudaError_t launch(const flaop_flash_kda& p, const Maps& maps, int64_t parts, int zero_blocks,
                   cudaStream_t stream) {
  const auto kernel = flash_kda_kernel<OUTPUT>;
  const int64_t blocks = static_cast<int64_t>(p.N) * p.H * parts + zero_blocks;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, kSharedBytes, stream>>>(
      p, maps, static_cast<int>(parts));
  return cudaGetLastError();
}

cudaError_t launch_all(const flaop_flash_kda& p, cudaStream_t stream) {
  if (p.pieces < 1) return cudaErrorInvalidValue;
  Maps maps;
  cudaError_t error = make_maps(p, maps);
  if (error != cudaSuccess) return error;
  if (p.pieces > 1) {
    error = launch<false>(p, maps, summaries(p.pieces), 0, stream);
    if (error != cudaSuccess) return error;
    if (p.pieces > 2) {
      join_kernel<<<static_cast<unsigned>(p.N * p.H * (kHead / kJoinRows)), kHead, 0, stream>>>(p);
      error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
  }
  return launch<true>(p, maps, p.pieces, p.cu_seqlens != nullptr ? kZeroBlocks : 0, stream);
}

}  // namespace
}  // namespace flaop::flash

extern "C" int32_t flaop_flash_kda_pieces(int64_t T, int64_t N, int64_t H, int32_t packed,
                                          int32_t processors) {
  return static_cast<int32_t>(flaop::flash::choose(T, N, H, packed, processors));
}

extern "C" int64_t flaop_flash_kda_workspace(int64_t N, int64_t H, int64_t pieces) {
  return flaop::flash::workspace_bytes(N * H, pieces);
}

#ifdef FLAOP_FLASH_CLOCK
// Cycles by warp and step since the last call, to 16 * 16 numbers.
extern "C" int flaop_flash_kda_clocks(unsigned long long* to) {
  constexpr size_t kBytes = sizeof(flaop::flash::clocks);
  static const unsigned long long zero[16][flaop::flash::kClockSteps] = {};
  cudaError_t error = cudaMemcpyFromSymbol(to, flaop::flash::clocks, kBytes);
  if (error == cudaSuccess) error = cudaMemcpyToSymbol(flaop::flash::clocks, zero, kBytes);
  return error;
}
#endif

extern "C" int flaop_flash_kda_launch(const flaop_flash_kda* params, void* stream) {
  return flaop::flash::launch_all(*params, static_cast<cudaStream_t>(stream));
}

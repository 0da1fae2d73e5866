// Key as int8, less about its mean, and value as fp8, in tiles for the tensor cores of Hopper: blocks of 8 rows x 16
// bytes, of a tile of keys in the order of reference.in_kernel_order, of values transposed. A block of threads copies a
// tile of one head to shared memory and reads it there twice: for its scale, and to write it.
#pragma once
#include "ops/fp8_attention/hopper.cuh"
#include "ops/fp8_attention/tiles.cuh"

namespace kernelwright {

struct QuantizeArgs {
  const void *key, *value;
  void *k8, *v8;
  TileScales* scales;
  i64 key_b, key_h, key_s, value_b, value_h, value_s;
  int keys, heads, tiles;  // tiles of a head
};

constexpr int QUANTIZE_THREADS = 256;
constexpr int QUANTIZE_WARPS = QUANTIZE_THREADS / 32;
constexpr int VECTOR = 8;  // elements that a thread reads at once
constexpr int SAMPLE = 32;  // keys whose mean is subtracted from all, as in reference.py
constexpr unsigned GOLDEN = 2654435769u;  // 2 ** 32 divided by the golden ratio
constexpr float LEAST_SCALE = 7.8886090522101181e-31f;  // 2 ** -100: a float, as is its inverse

// The largest of all threads, of floats that are not negative. Read as integers they have the same order, and what is
// not finite is larger. `shared` has a number for each warp.
__device__ __forceinline__ unsigned largest_of_block(unsigned v, unsigned* shared) {
  v = __reduce_max_sync(~0u, v);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < QUANTIZE_WARPS; w++) v = max(v, shared[w]);
  return v;
}

// Starts to copy the rows of a tile that are there, and zeros for the others.
template <class T, int D, int A> __device__ __forceinline__ void start_tile(T* tile, const T* first, i64 stride, int rows) {
  constexpr int ACROSS = D / A, AT_ONCE = QUANTIZE_THREADS / ACROSS;
  const int column = threadIdx.x % ACROSS * A, row = threadIdx.x / ACROSS;
  const T* from = first + row * stride + column;
#pragma unroll
  for (int i = 0; i < TILE / AT_ONCE; i++, from += AT_ONCE * stride) {
    const bool there = row + i * AT_ONCE < rows;
    start_copy<A * sizeof(T)>(tile + (row + i * AT_ONCE) * D + column, there ? from : first, there);
  }
}

// A thread has the same columns of every row that it reads.
template <class T, int D, int A> struct KeyTile {
  static constexpr int ACROSS = D / VECTOR;  // threads of a row
  static constexpr int AT_ONCE = QUANTIZE_THREADS / ACROSS;  // rows

  // The mean of a few keys, chosen as reference.mean says. Every block of a head adds them in one order, so that all have
  // the same mean.
  // The tile is there for all threads when it returns.
  static __device__ __forceinline__ void mean(const T* keys, i64 stride, int count, float (&of_columns)[VECTOR]) {
    alignas(16) __shared__ float sums[QUANTIZE_WARPS][D];
    alignas(16) __shared__ float means[D];
    float sum[VECTOR];
#pragma unroll
    for (int i = 0; i < SAMPLE / AT_ONCE; i++) {
      const unsigned number = i * AT_ONCE + threadIdx.x / ACROSS;
      Vec<T, VECTOR, A> x;
      x.load(keys + ((i64)number * count / SAMPLE + __umulhi(number * GOLDEN, count / SAMPLE)) * stride);
#pragma unroll
      for (int e = 0; e < VECTOR; e++) sum[e] = i ? sum[e] + x.get(e) : x.get(e);
    }
#pragma unroll
    for (int far = ACROSS; far < 32; far *= 2)
#pragma unroll
      for (int e = 0; e < VECTOR; e++) sum[e] += __shfl_xor_sync(~0u, sum[e], far);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = threadIdx.x % ACROSS * VECTOR;
    if (lane < ACROSS)
#pragma unroll
      for (int e = 0; e < VECTOR; e++) sums[warp][column + e] = sum[e];
    __syncthreads();
    if (threadIdx.x < D) {
      float all = 0.f;
#pragma unroll
      for (int w = 0; w < QUANTIZE_WARPS; w++) all += sums[w][threadIdx.x];
      means[threadIdx.x] = all * (1.f / SAMPLE);
    }
    wait_for_copies();
    __syncthreads();
#pragma unroll
    for (int e = 0; e < VECTOR; e++) of_columns[e] = means[column + e];
  }

  // use(row, v): v are this thread's elements of a row, less `off`; zeros from `rows` on.
  template <class Use>
  static __device__ __forceinline__ void each_row(const T* x, const float (&off)[VECTOR], int rows, Use use) {
#pragma unroll
    for (int i = 0; i < TILE / AT_ONCE; i++) {
      const int row = threadIdx.x / ACROSS + i * AT_ONCE;
      Vec<T, VECTOR> own;
      own.load(x + row * D + threadIdx.x % ACROSS * VECTOR);
      float v[VECTOR];
#pragma unroll
      for (int e = 0; e < VECTOR; e++) v[e] = row < rows ? own.get(e) - off[e] : 0.f;
      use(row, v);
    }
  }

  static __device__ __forceinline__ void write(const QuantizeArgs& a, i64 head, int tile, T* x) {
    __shared__ unsigned largest[QUANTIZE_WARPS], longest[QUANTIZE_WARPS];
    const int vector = threadIdx.x % ACROSS, rows = a.keys - tile * TILE;
    const T* keys = (const T*)a.key + head / a.heads * a.key_b + head % a.heads * a.key_h;
    start_tile<T, D, A>(x, keys + (i64)tile * TILE * a.key_s, a.key_s, rows);
    float off[VECTOR];
    mean(keys + vector * VECTOR, a.key_s, a.keys, off);
    unsigned most = 0, squares_of_longest = 0;
    each_row(x, off, rows, [&](int, const float(&v)[VECTOR]) {
      float squares = 0.f;
#pragma unroll
      for (int e = 0; e < VECTOR; e++) {
        most = max(most, __float_as_uint(fabsf(v[e])));
        squares += v[e] * v[e];
      }
#pragma unroll
      for (int far = 1; far < ACROSS; far *= 2) squares += __shfl_xor_sync(~0u, squares, far);
      squares_of_longest = max(squares_of_longest, __float_as_uint(squares));
    });
    // the barrier of the second maximum stands for both
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
    squares_of_longest = largest_of_block(squares_of_longest, longest);
#pragma unroll
    for (int w = 0; w < QUANTIZE_WARPS; w++) most = max(most, largest[w]);
    const float size = most ? __uint_as_float(most) : LARGEST_INT;
    const float factor = __fmul_rn(__frcp_rn(size), LARGEST_INT);

    unsigned char* out = (unsigned char*)a.k8 + (head * a.tiles + tile) * TILE * D;
    each_row(x, off, rows, [&](int row, const float(&v)[VECTOR]) {
      struct alignas(8) { unsigned four[2]; } eight;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        unsigned of_four[4];
#pragma unroll
        for (int e = 0; e < 4; e++) of_four[e] = eight_bit_integer(v[4 * part + e] * factor);
        eight.four[part] = of_four[0] | of_four[1] << 8 | of_four[2] << 16 | of_four[3] << 24;
      }
      const int of_16 = row % 16, at = row - of_16 + of_16 / 2 % 2 * 8 + of_16 / 4 * 2 + of_16 % 2;
      unsigned char* p = out + (at / 8 * (D / 16) + vector / 2) * 128 + at % 8 * 16 + vector % 2 * 8;
      write_whole(reinterpret_cast<decltype(eight)*>(p), eight);
    });
    if (threadIdx.x == 0) {
      TileScales& scales = a.scales[head * a.tiles + tile];
      scales.keys = __fmul_rn(size, 1.f / LARGEST_INT);
      scales.length = sqrtf(__uint_as_float(squares_of_longest));
    }
  }
};

// A thread reads 4 rows x 8 columns at once. Four threads have 16 rows of the same columns, a block of 8 x 16 bytes after
// transposing: each writes two of its rows.
template <class T, int D, int A> struct ValueTile {
  static constexpr int ROWS = 4, HALVES = D / 64;
  static_assert(QUANTIZE_WARPS * 16 == TILE, "a warp has 16 rows");

  // use(half, rows): rows are this thread's elements of one half of the columns.
  template <class Use> static __device__ __forceinline__ void each_half(const T* x, Use use) {
    const T* own = x + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 8 * ROWS) * D + threadIdx.x % 8 * VECTOR;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      Vec<T, VECTOR> rows[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; i++) rows[i].load(own + i * D + half * 64);
      use(half, rows);
    }
  }

  // Transposes 4 x 4 words among four threads, which are 8 lanes apart: each sends words[i] to the i-th of them, and
  // words[i] becomes what the i-th has sent.
  static __device__ __forceinline__ void exchange(unsigned (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const bool upper = threadIdx.x / 8 & bit;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i & bit) continue;
        const unsigned got = __shfl_xor_sync(~0u, upper ? words[i] : words[i | bit], 8 * bit);
        words[i] = upper ? got : words[i];
        words[i | bit] = upper ? words[i | bit] : got;
      }
    }
  }

  static __device__ __forceinline__ void write(const QuantizeArgs& a, i64 head, int tile, T* x) {
    __shared__ unsigned largest[QUANTIZE_WARPS];
    const int warp = threadIdx.x / 32, vector = threadIdx.x % 8, quarter = threadIdx.x % 32 / 8;
    const T* values = (const T*)a.value + head / a.heads * a.value_b + head % a.heads * a.value_h;
    start_tile<T, D, A>(x, values + (i64)tile * TILE * a.value_s, a.value_s, a.keys - tile * TILE);
    wait_for_copies();
    __syncthreads();
    unsigned most = 0;
    each_half(x, [&](int, const Vec<T, VECTOR>(&rows)[ROWS]) {
#pragma unroll
      for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int e = 0; e < VECTOR; e++) most = max(most, __float_as_uint(fabsf(rows[i].get(e))));
    });
    most = largest_of_block(most, largest);
    // the next power of two: it does not move where probabilities are rounded
    const float size = __uint_as_float(most);
    const unsigned least = __float_as_uint(most ? size * (1.f / LARGEST) : 1.f);
    float scale = fmaxf(__uint_as_float((least + 0x7fffffu) & 0x7f800000u), LEAST_SCALE);
    if (!isfinite(size)) scale = size;
    const float factor = 1.f / scale;

    unsigned char* out = (unsigned char*)a.v8 + (head * a.tiles + tile) * TILE * D;
    each_half(x, [&](int half, const Vec<T, VECTOR>(&rows)[ROWS]) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        unsigned words[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const auto at = [&](int i) { return rows[i].get(4 * part + e) * factor; };
          words[e] = four_e4m3(at(0), at(1), at(2), at(3));
        }
        exchange(words);
        const uint4 row = {words[0], words[1], words[2], words[3]};
        unsigned char* p = out + ((8 * half + vector) * (TILE / 16) + warp) * 128 + (4 * part + quarter) * 16;
        write_whole(reinterpret_cast<uint4*>(p), row);
      }
    });
    if (threadIdx.x == 0) {
      TileScales& scales = a.scales[head * a.tiles + tile];
      scales.values = scale;
      scales.unused = 0.f;
    }
  }
};

// A: elements whose alignment allows one access
template <class T, int D, int A> __device__ __forceinline__ void quantize_kv(const QuantizeArgs& a) {
  alignas(16) __shared__ T tile_of_head[TILE * D];
  const int tile = blockIdx.x / 2 % a.tiles;
  const i64 head = blockIdx.x / 2 / a.tiles;
  if (blockIdx.x % 2 == 0) {
    KeyTile<T, D, A>::write(a, head, tile, tile_of_head);
  } else {
    ValueTile<T, D, A>::write(a, head, tile, tile_of_head);
  }
}

}  // namespace kernelwright

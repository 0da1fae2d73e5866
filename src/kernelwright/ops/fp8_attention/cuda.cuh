// softmax(q8 k8ᵀ) v8 with their scales, on Hopper.
//
// One thread copies tiles of keys and values to shared memory; each warpgroup but its own has 64
// queries. While a warpgroup computes the probabilities of one tile, its product of the tile before
// with the values is under way, and the products of the other warpgroups are.
//
// A thread holds, of its two rows r of 64 and for each 8 keys j, the scores 4 j + 2 r and the one
// after. Tiles of keys are stored in such an order that these are the probabilities that the next
// product wants from this thread: see reference.in_kernel_order.
#pragma once
#include "ops/fp8_attention/hopper.cuh"
#include "ops/fp8_attention/tiles.cuh"

namespace kernelwright {

struct EightArgs {
  const void *query, *k8, *v8;
  const TileScales* scales;
  void* out;
  i64 query_b, query_h, query_s, out_b, out_h, out_s;
  int queries, keys, heads, blocks;  // blocks of queries of a head
  float scale;  // of scores, times log2(e)
};

constexpr int NONE = -(1 << 30);  // less than any score, of a key that is not there
constexpr int SHIFT = 8;  // the largest probability of the first tile is up to 2 ** 8
// Tensor cores keep fewer bits of a running sum of fp8 products than float32 has. After so many tiles
// the sum is added to one in float32, in shared memory. Without that first sight refused Wan's
// attention: 256 tiles, and values with a common mean.
constexpr int TILES_OF_A_SUM = 16;

template <int D, int GROUPS, int STAGES> struct EightShared {
  alignas(128) unsigned char keys[STAGES][TILE * D];
  alignas(128) unsigned char values[STAGES][TILE * D];
  float sums[GROUPS][D / 2][128];  // one of each result that a thread holds
  Barrier there[STAGES], read[STAGES];
};

// 2 ** x for the integer scores of a row, where x is linear in the score. Read as an integer, a float is its exponent and
// then its mantissa: if between powers of two the mantissa may be linear in x, the whole is one multiply-add.
struct Line {
  static constexpr int BIAS = 127, MANTISSA = 23;
  static constexpr int DEPTH = 60;  // 2 ** -60 is nothing beside the largest of a row
  static constexpr float REACH = 110.f;  // of exponents that are surely those of floats
  unsigned slope, offset;

  // `at_zero`: x of the score 0. The factor is at least 2 ** -23, so that keys that are not there have a probability that
  // is nothing, and at most DEPTH.
  __device__ __forceinline__ void set(float factor, int at_zero) {
    slope = __float2int_rn(factor * (1 << MANTISSA));
    offset = (unsigned)(at_zero + BIAS) << MANTISSA;
  }
  __device__ __forceinline__ float operator()(int score) const { return __uint_as_float(score * slope + offset); }
};

__device__ __forceinline__ int exponent(float v) { return (int)(__float_as_uint(v) >> Line::MANTISSA) - Line::BIAS; }
__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float((unsigned)(n + Line::BIAS) << Line::MANTISSA); }

// A thread's two rows. Probabilities are relative to a power of two, the reference, which is raised where one would be
// larger than fp8 allows: seldom after the first tile.
struct TwoRows {
  int reference[2] = {-(1 << 28), -(1 << 28)};  // less than that of any row
  float sum[2];  // of all probabilities
  float decay[2];  // what the results so far have to be multiplied with, for a reference that was raised
  // of the tile of now
  float factor[2];
  int log_v;
  float per_v;
  Line line[2];

  // Whether no score of the tile can leave the range of floats, whatever the scores are. `reach`: what a score and its
  // factor are at most for a key of length 1.
  __device__ __forceinline__ bool begin(const TileScales& scales, const float (&of_row)[2], const float (&reach)[2]) {
    bool fits = true;
    log_v = exponent(scales.values);
    per_v = power_of_two(-log_v) + 0.f * (scales.keys + scales.values);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      factor[r] = fminf(fmaxf(of_row[r] * scales.keys, 1.f / (1 << Line::MANTISSA)), Line::DEPTH);
      decay[r] = 1.f;
      set_line(r);
      fits = fits && fabsf((float)at_zero(r)) + reach[r] * scales.length < Line::REACH;
    }
    return __all_sync(~0u, fits);
  }
  __device__ __forceinline__ int at_zero(int r) const { return log_v - reference[r] + SHIFT; }
  __device__ __forceinline__ void set_line(int r) { line[r].set(factor[r], at_zero(r)); }

  // The slow way, for a first tile, the last one or scores that may lie far apart: raises the references to the maxima
  // of the tile, and its smallest scores to what is nothing beside them.
  template <int N> __device__ __forceinline__ void fit(int (&scores)[N]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int most = NONE;
#pragma unroll
      for (int i = 2 * r; i < N; i += 4) most = max_of_three(most, scores[i], scores[i + 1]);
      most = max(most, __shfl_xor_sync(~0u, most, 1));
      most = max(most, __shfl_xor_sync(~0u, most, 2));
      raise(r, log_v + __float2int_ru(most * factor[r]) - reference[r]);
      const float least = __fdividef((float)(-Line::DEPTH - at_zero(r)), factor[r]);
      if (least > -NONE) line[r] = {0, (unsigned)(Line::BIAS - Line::DEPTH) << Line::MANTISSA};
      const int bound = __float2int_rz(fmaxf(least, NONE));
#pragma unroll
      for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) scores[i] = max(scores[i], bound);
    }
  }
  __device__ __forceinline__ void raise(int r, int by) {
    by = max(by, 0);
    reference[r] += by;
    const float less = by < Line::BIAS ? power_of_two(-by) : 0.f;
    decay[r] *= less, sum[r] *= less;
    set_line(r);
  }

  // From scores to probabilities, in place, and their sums, in parts: one after the other, each would wait for the one
  // before. No probability is larger than its sum.
  template <int N> __device__ __forceinline__ void probabilities(int (&scores)[N], float (&of_tile)[2]) const {
    constexpr int APART = 4;
    float part[2][APART];
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int r = i / 2 % 2;
      float& so_far = part[r][(i / 4 * 2 + i % 2) % APART];
      const float p = line[r](scores[i]);
      so_far = i < 2 * APART ? p : so_far + p;
      scores[i] = __float_as_int(p);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) of_tile[r] = (part[r][0] + part[r][1]) + (part[r][2] + part[r][3]);
  }

  // Makes probabilities smaller, so that fp8 has them all.
  template <int N> __device__ __forceinline__ void lower(int (&p)[N], float (&of_tile)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = of_tile[r];
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const int by = most > LARGEST ? exponent(most) - exponent(LARGEST) + 1 : 0;
      raise(r, by);
      of_tile[r] *= power_of_two(-by);
#pragma unroll
      for (int i = 2 * r; i < N; i += i % 2 ? 3 : 1) p[i] = __float_as_int(__int_as_float(p[i]) * power_of_two(-by));
    }
  }
};

// Leaves only the first `left` keys of a tile.
template <int N> __device__ __forceinline__ void mask(int (&scores)[N], int left) {
  const int end = left - threadIdx.x % 4 * 4;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (i / 8 * 16 + i / 4 % 2 * 2 + i % 2 >= end) scores[i] = NONE;
  }
}

template <int N> __device__ __forceinline__ void round_to_eight(unsigned (&p8)[N / 16][4], const int (&p)[N]) {
#pragma unroll
  for (int k = 0; k < N / 16; k++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int i = 16 * k + 8 * (part / 2) + 2 * (part % 2);
      p8[k][part] = four_e4m3(__int_as_float(p[i]), __int_as_float(p[i + 1]), __int_as_float(p[i + 4]),
                              __int_as_float(p[i + 5]));
    }
  }
}

template <int D, int GROUPS, int STAGES>
__device__ void copy_tiles(const EightArgs& a, EightShared<D, GROUPS, STAGES>& shared, i64 head, int tiles) {
  constexpr int BYTES = TILE * D;
  const unsigned char* keys = (const unsigned char*)a.k8 + head * tiles * BYTES;
  const unsigned char* values = (const unsigned char*)a.v8 + head * tiles * BYTES;
  for (int j = 0; j < tiles; j++) {
    const int stage = j % STAGES, phase = j / STAGES % 2;
    shared.read[stage].wait(phase ^ 1);
    shared.there[stage].arrive_expecting(2 * BYTES);
    bulk_copy(shared.keys[stage], keys + (i64)j * BYTES, BYTES, shared.there[stage]);
    bulk_copy(shared.values[stage], values + (i64)j * BYTES, BYTES, shared.there[stage]);
  }
}

// A thread's part of two queries, 8 apart: rounded to int8 with a scale for each query.
template <class T, int D> struct Queries {
  unsigned eight[D / 32][4];  // as the tensor cores want them: two times 4 columns of each 32, of both rows
  float scale[2];
  float reach[2];  // what a score is at most for a key of length 1, in powers of two
  float none[2];  // 0, or NaN if a number is not finite

  __device__ __forceinline__ Queries(const T* p, i64 stride, const bool (&present)[2], float scale_of_scores) {
    constexpr float ROUNDING = 1.1f;  // integers of query and key make them longer, by less than 5% each
    Vec<T, 4> x[2][D / 16];
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      const int r = i % 2, k = i / 2;
      x[r][k].fill([](int) { return 0.f; });
      if (present[r]) x[r][k].load(p + 8 * r * stride + 16 * k);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float largest = 0.f, squares = 0.f;
#pragma unroll
      for (int i = 0; i < D / 4; i++) {
        const float v = x[r][i / 4].get(i % 4);
        largest = fmaxf(largest, fabsf(v)), squares += v * v;
      }
#pragma unroll
      for (int far = 1; far < 4; far *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, far));
        squares += __shfl_xor_sync(~0u, squares, far);
      }
      if (largest == 0.f) largest = LARGEST_INT;
      const float factor = (1.f / largest) * LARGEST_INT;
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        unsigned four = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) four |= eight_bit_integer(x[r][k].get(i) * factor) << 8 * i;
        eight[k / 2][k % 2 * 2 + r] = four;
      }
      scale[r] = largest * (scale_of_scores / LARGEST_INT);
      reach[r] = sqrtf(squares) * (scale_of_scores * ROUNDING);
      none[r] = 0.f * squares;
    }
  }
};

// The 64 queries from row0 on.
template <class T, int D, int GROUPS, int STAGES>
__device__ void attend(const EightArgs& a, EightShared<D, GROUPS, STAGES>& shared, i64 head, int tiles, int group,
                       int row0) {
  constexpr int STEPS = D / 32;
  const int lane = threadIdx.x % 32, first = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const bool present[2] = {first < a.queries, first + 8 < a.queries};
  const T* of_head = (const T*)a.query + head / a.heads * a.query_b + head % a.heads * a.query_h;
  const Queries<T, D> query(of_head + first * a.query_s + lane % 4 * 4, a.query_s, present, a.scale);
  const TileScales* scales = a.scales + head * tiles;

  float out[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) out[i] = 0.f;
  int scores[TILE / 2];
  unsigned p8[TILE / 32][4];
  TwoRows rows;
  rows.sum[0] = query.none[0], rows.sum[1] = query.none[1];
  float* const sums = &shared.sums[group][0][threadIdx.x % 128];
#pragma unroll
  for (int i = 0; i < D / 2; i++) sums[i * 128] = 0.f;
  int reference_of_sums[2] = {0, 0};
  TileScales next = scales[0];

  const auto stage = [](unsigned j) { return j % STAGES; };
  const auto phase = [](unsigned j) { return j / STAGES % 2; };
  // Warpgroups of head_dim 128 start their products in turn: then one computes probabilities while the products of the
  // other are under way. The three of head_dim 64 do not: timed on H200, they would be 5% slower, and are 3% faster if
  // they look at the scales of a tile before they start its products.
  constexpr bool TURNS = GROUPS == 2;
  const auto begin_tile = [&](int j) {
    const bool fits = rows.begin(next, query.scale, query.reach) && a.keys - j * TILE >= TILE;
    next = scales[smaller(j + 1, tiles - 1)];
    return fits;
  };
  const auto start_scores = [&](int j) {
    shared.there[stage(j)].wait(phase(j));
    if (TURNS) wait_for_turn(group);
    const Operand keys(shared.keys[stage(j)], 8 * D);
    before_products();
    start_new_product(scores, query.eight[0], keys.step(0));
#pragma unroll
    for (int k = 1; k < STEPS; k++) start_product(scores, query.eight[k], keys.step(k));
    end_group();
  };
  const auto start_values = [&](int j) {
    const Operand values(shared.values[stage(j)], 8 * TILE);
    before_products();
#pragma unroll
    for (int k = 0; k < TILE / 32; k++) start_product(out, p8[k], values.step(k));
    end_group();
  };
  const auto pass_turn_on = [&](int j) {
    if (TURNS && (group == 0 || j + 1 < tiles)) give_turn_to(1 - group);
  };
  // From scores to probabilities in fp8, in the time of the product of the tile before with its values.
  const auto attend_tile = [&](int j, bool fits) {
    if (!fits) {
      mask(scores, a.keys - j * TILE);
      rows.fit(scores);
    }
    float of_tile[2];
    rows.probabilities(scores, of_tile);
    const bool large = __any_sync(~0u, of_tile[0] > LARGEST || of_tile[1] > LARGEST);
    wait_for_products<0>();
    results_are_there(out);
    if (j > 0 && threadIdx.x % 128 == 0) shared.read[stage(j - 1)].arrive();
    round_to_eight(p8, scores);
    if (large || !fits) {
      if (large) {
        rows.lower(scores, of_tile);
        round_to_eight(p8, scores);
      }
#pragma unroll
      for (int i = 0; i < D / 2; i++) out[i] *= rows.decay[i / 2 % 2];
    }
    rows.sum[0] += of_tile[0] * rows.per_v, rows.sum[1] += of_tile[1] * rows.per_v;
  };
  // The sums so far, relative to the reference of now. The last ones are the results.
  const auto add_to_sums = [&](bool last) {
    const float fade[2] = {exp2_near((float)(reference_of_sums[0] - rows.reference[0])),
                           exp2_near((float)(reference_of_sums[1] - rows.reference[1]))};
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
      const float sum = sums[i * 128] * fade[i / 2 % 2] + out[i];
      if (!last) sums[i * 128] = sum;
      out[i] = last ? sum : 0.f;
    }
    reference_of_sums[0] = rows.reference[0], reference_of_sums[1] = rows.reference[1];
  };

  if (TURNS && group == 1) give_turn_to(0);
  const bool first_fits = begin_tile(0);
  start_scores(0);
  pass_turn_on(0);
  wait_for_products<0>();
  results_are_there(scores);
  attend_tile(0, first_fits);
  reference_of_sums[0] = rows.reference[0], reference_of_sums[1] = rows.reference[1];
  for (int j = 1; j < tiles; j++) {
    bool fits = !TURNS && begin_tile(j);
    start_scores(j);
    start_values(j - 1);
    pass_turn_on(j);
    if (TURNS) fits = begin_tile(j);
    wait_for_products<1>();
    results_are_there(scores);
    attend_tile(j, fits);
    if (j % TILES_OF_A_SUM == 0) add_to_sums(false);
  }
  start_values(tiles - 1);
  wait_for_products<0>();
  results_are_there(out);
  add_to_sums(true);

  T* p = (T*)a.out + head / a.heads * a.out_b + head % a.heads * a.out_h;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float factor = 1.f / sum;
    T* row = p + (first + 8 * r) * a.out_s;
    // of 16 columns, a thread has two of the first 8 and two of the last: neighbours exchange two, so that each writes
    // four, and four threads write 32 bytes
    const int odd = lane % 2, column = lane % 4 / 2 * 4 + odd * 8;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      const float* y = out + 4 * j + 2 * r;
      const unsigned low = pair<T>(y[0] * factor, y[1] * factor), high = pair<T>(y[4] * factor, y[5] * factor);
      const unsigned got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const uint2 four = odd ? uint2{got, high} : uint2{low, got};
      if (present[r]) *(uint2*)(row + 8 * j + column) = four;
    }
  }
}

// GROUPS warpgroups attend; REGISTERS are those of their threads.
template <class T, int D, int GROUPS, int STAGES, int REGISTERS>
__device__ __forceinline__ void eight_bit_attention(const EightArgs& a) {
  using Shared = EightShared<D, GROUPS, STAGES>;
  unsigned char* const memory = dynamic_shared();
  Shared& shared = *reinterpret_cast<Shared*>(memory + -reinterpret_cast<size_t>(memory) % alignof(Shared));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      shared.there[i].init(1);
      shared.read[i].init(GROUPS);
    }
    barriers_are_made();
  }
  __syncthreads();
  const int tiles = (a.keys + TILE - 1) / TILE, group = threadIdx.x / 128;
  const i64 head = blockIdx.x / a.blocks;
  if (group == 0) {
    give_registers_back<24>();
    if (threadIdx.x == 0) copy_tiles(a, shared, head, tiles);
  } else {
    take_registers<REGISTERS>();
    const int row0 = (blockIdx.x % a.blocks * GROUPS + group - 1) * 64;
    attend<T, D, GROUPS, STAGES>(a, shared, head, tiles, group - 1, row0);
  }
}

}  // namespace kernelwright

// Products of few rows with a weight, as it is or quantized: each tile of the weight is read once for all rows.
//
// A sum's order is the same for any number of rows: 16 (or 32, or 64) partial sums, column by column, added at the end.
// Letters: T rows of x, O rows of the weight, D columns, G groups of columns.
#include "common.h"

namespace {

#ifdef __AVX512F__
constexpr int MOST_ROWS = 6, TILE = 4;  // 24 sums, 4 pieces of the weight and one of x in 32 registers
#else
constexpr int MOST_ROWS = 3, TILE = 2;  // vectors are two registers, of 16
#endif
constexpr int64_t CHUNK = 128 << 10;  // bytes of the weight that a thread takes at once
constexpr int64_t SMALL = 64 << 10;   // below this, to wake another thread costs more than it saves
// Bytes that are asked for ahead. Processors foresee one long stream, and not four short rows: without this a weight of
// [151936, 896] came at 0.61 of the memory's speed, with it at 0.92, and row by row at 0.98 (two Zen 4 cores).
constexpr int64_t AHEAD = 16 << 10;
constexpr int64_t LINE = 64;

struct Weight {
  const void* data;
  int64_t rows, columns, row_bytes;
  int64_t group;  // columns of one
  const void *scales = nullptr, *zeros = nullptr;
  ffi::DataType scale_type = ffi::DataType::F32, zero_type = ffi::DataType::F32;
  bool rounds = false;  // what is made of a quantized number, to bfloat16

  float scale(int64_t row, int64_t g) const { return number(scales, scale_type, g * rows + row); }
  float zero(int64_t row, int64_t g) const { return zeros ? number(zeros, zero_type, g * rows + row) : 0.0f; }
  template <class T>
  const T* row(int64_t at) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(data) + at * row_bytes);
  }
};

// A reader says how a kind of weight is multiplied: STEP columns at a time, which are BYTES of a weight's row (`Group` is
// what it keeps for a group of its columns, `Own` what it sums of the row itself) and X's of a row of x, which is padded
// with zeros to whole steps.
struct Nothing {};
template <class Piece>
static inline void note(Nothing&, const Piece&) {}

// Numbers that are used as they are, made floats.
template <class T>
struct Plain {
  static constexpr int64_t STEP = W, BYTES = STEP * sizeof(T);
  using X = float;
  using Sum = Sixteen;
  using Piece = Sixteen;
  using Input = Sixteen;
  using Own = Nothing;
  struct Group { const T* data; };
  static Group group(const Weight& weight, int64_t row, int64_t) { return {weight.row<T>(row)}; }
  static Piece piece(const Group& group, int64_t at) { return sixteen(group.data + at); }
  static Piece last(const Group& group, int64_t at, int64_t count) { return some_of(group.data + at, count); }
  static Input input(const X* x) { return kept(sixteen(x)); }
  static void add(Sum& to, Piece piece, Input x) { add_product(to, piece, x); }
  static float finish(const Sum& total, Nothing) { return sum(whole(total)); }
};

#ifdef __AVX512BF16__
struct Pairs {  // bfloat16, two products at a time
  static constexpr int64_t STEP = 2 * W, BYTES = 64;
  using X = Bfloat;
  using Sum = __m512;
  using Piece = __m512i;
  using Input = __m512i;
  using Own = Nothing;
  struct Group { const Bfloat* data; };
  static Group group(const Weight& weight, int64_t row, int64_t) { return {weight.row<Bfloat>(row)}; }
  static Piece piece(const Group& group, int64_t at) { return _mm512_loadu_si512(group.data + at); }
  static Piece last(const Group& group, int64_t at, int64_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1, group.data + at);
  }
  static Input input(const X* x) { return kept(_mm512_loadu_si512(x)); }
  static void add(Sum& to, Piece piece, Input x) { to = _mm512_dpbf16_ps(to, (__m512bh)piece, (__m512bh)x); }
  static float finish(const Sum& total, Nothing) { return sum((Floats)total); }
};
#else
using Pairs = Plain<Bfloat>;
#endif

// Numbers of 8 bits with groups: (number - zero) * scale in float32, rounded where x is bfloat16.
#ifdef __AVX512F__
template <bool ROUNDS>
static inline Sixteen scaled(Sixteen numbers, float zero, float scale) {
  const Floats value = (numbers - zero) * scale;
  return ROUNDS ? rounded(value) : value;
}
#else
template <bool ROUNDS>
static inline __m256 scaled(__m256 numbers, float zero, float scale) {
  const __m256 value = (numbers - zero) * scale;
  if (!ROUNDS) return value;
  const __m256i bits = (__m256i)value, lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_and_si256(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lowest),
                                        _mm256_set1_epi32(0xffff0000));
  return _mm256_blendv_ps((__m256)near, value, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));  // NaN stays NaN
}
template <bool ROUNDS>
static inline Sixteen scaled(Sixteen numbers, float zero, float scale) {
  return {scaled<ROUNDS>(numbers.low, zero, scale), scaled<ROUNDS>(numbers.high, zero, scale)};
}
#endif
template <class T, bool ROUNDS>
struct Scaled : Plain<T> {
  struct Group { const T* data; float zero, scale; };
  static Group group(const Weight& weight, int64_t row, int64_t g) {
    return {weight.row<T>(row), weight.zero(row, g), weight.scale(row, g)};
  }
  static Sixteen piece(const Group& group, int64_t at) {
    return scaled<ROUNDS>(sixteen(group.data + at), group.zero, group.scale);
  }
  static Sixteen last(const Group& group, int64_t at, int64_t count) {
    // Times zeros in x, but not NaN: number 0 is finite.
    return scaled<ROUNDS>(some_of(group.data + at, count), group.zero, group.scale);
  }
};

// Numbers of 4 bits, of which there are 16: a group's floats are a table, made once for all its columns.
constexpr Floats INT4 = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr Floats FLOAT4 = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
struct Two { Sixteen even, odd; };

template <bool IS_FLOAT>
struct Table {
  static constexpr int64_t STEP = 2 * W, BYTES = 16;
  using X = float;  // of every 32 columns first the even ones
  using Sum = Sixteen;
  using Piece = Two;
  using Input = Two;
  using Own = Nothing;
  struct Group { const uint8_t* data; Sixteen table; };
  static Group group(const Weight& weight, int64_t row, int64_t g) {
    Floats made = ((IS_FLOAT ? FLOAT4 : INT4) - weight.zero(row, g)) * weight.scale(row, g);
    return {weight.row<uint8_t>(row), sixteen(weight.rounds ? rounded(made) : made)};
  }
#ifdef __AVX512F__
  static Floats look_up(const Floats& table, Words at) {
    return (Floats)_mm512_permutexvar_ps((__m512i)at, (__m512)table);  // by the lowest four bits
  }
  static Piece piece(const Group& group, int64_t at) {
    const Words two = (Words)_mm512_cvtepu8_epi32(bytes(group.data + at / 2));
    return {look_up(group.table, two), look_up(group.table, two >> 4)};
  }
#else
  static __m256 look_up(const Sixteen& table, __m256i at) {  // by the lowest three bits, and the fourth
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, at), _mm256_permutevar8x32_ps(table.high, at),
                            (__m256)_mm256_slli_epi32(at, 28));
  }
  static Piece piece(const Group& group, int64_t at) {
    const __m128i two = bytes(group.data + at / 2);
    const __m256i low = _mm256_cvtepu8_epi32(two), high = _mm256_cvtepu8_epi32(_mm_srli_si128(two, 8));
    return {{look_up(group.table, low), look_up(group.table, high)},
            {look_up(group.table, _mm256_srli_epi32(low, 4)), look_up(group.table, _mm256_srli_epi32(high, 4))}};
  }
#endif
  static Piece last(const Group& group, int64_t at, int64_t) { return piece(group, at); }  // groups are whole steps
  static Input input(const X* x) { return {kept(sixteen(x)), kept(sixteen(x + W))}; }
  static void add(Sum& to, const Piece& piece, const Input& x) {
    add_product(to, piece.even, x.even);
    add_product(to, piece.odd, x.odd);
  }
  static float finish(const Sum& total, Nothing) { return sum(whole(total)); }
};

// Both of 8 bits: exact sums of integers.
struct IntGroup { const int8_t* data; };
#ifdef __AVX512VNNI__
struct Integers {
  // The instruction wants one side unsigned: that is x + 128, and 128 times the weight's own sum is taken off again.
  static constexpr int64_t STEP = 4 * W, BYTES = 64;
  using X = uint8_t;
  using Sum = __m512i;
  using Piece = __m512i;
  using Input = __m512i;
  struct Own { __m512i sum; };
  using Group = IntGroup;
  static constexpr X ZERO = 128;
  static Group group(const Weight& weight, int64_t row, int64_t) { return {weight.row<int8_t>(row)}; }
  static Piece piece(const Group& group, int64_t at) { return _mm512_loadu_si512(group.data + at); }
  static Piece last(const Group& group, int64_t at, int64_t count) {
    return _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, group.data + at);
  }
  static void put(X* to, Ints numbers) {
    const __m128i narrow = _mm512_cvtepi32_epi8((__m512i)numbers);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(narrow, _mm_set1_epi8(int8_t(ZERO))));
  }
  static Input input(const X* x) { return kept(_mm512_loadu_si512(x)); }
  static void add(Sum& to, Piece piece, Input x) { to = _mm512_dpbusd_epi32(to, x, piece); }
  static float finish(const Sum& total, const Own& own) {
    return float(_mm512_reduce_add_epi32(_mm512_sub_epi32(total, own.sum)));
  }
};
static inline void note(Integers::Own& own, __m512i piece) {
  own.sum = _mm512_dpbusd_epi32(own.sum, _mm512_set1_epi8(int8_t(Integers::ZERO)), piece);
}
#else
struct Integers {
  static constexpr int64_t STEP = W, BYTES = 16;
  using X = int16_t;
  using Sum = __m256i;
  using Piece = __m256i;
  using Input = __m256i;
  using Own = Nothing;
  using Group = IntGroup;
  static constexpr X ZERO = 0;
  static Group group(const Weight& weight, int64_t row, int64_t) { return {weight.row<int8_t>(row)}; }
  static Piece piece(const Group& group, int64_t at) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group.data + at)));
  }
  static Piece last(const Group& group, int64_t at, int64_t count) {
    int8_t some[STEP] = {};
    std::memcpy(some, group.data + at, count);
    return piece({some}, 0);
  }
  static void put(X* to, Ints numbers) {
    for (int64_t at = 0; at < W; ++at) to[at] = X(numbers[at]);
  }
  static Input input(const X* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static void add(Sum& to, Piece piece, Input x) { to = _mm256_add_epi32(to, _mm256_madd_epi16(piece, x)); }
  static float finish(const Sum& total, Nothing) {
    int32_t parts[8], all = 0;
    std::memcpy(parts, &total, sizeof(parts));
    for (int32_t part : parts) all += part;
    return float(all);
  }
};
#endif

// Ask for what lies so many bytes behind column `at`, once for each line of the cache.
template <class Reader>
static inline void ask(const void* row, int64_t at, int64_t ahead) {
  const int64_t offset = at / Reader::STEP * Reader::BYTES;
  if (Reader::BYTES == LINE || offset % LINE == 0)
    _mm_prefetch(static_cast<const char*>(row) + offset + ahead, _MM_HINT_T1);
}

// What a product writes: [T, O], each sum as it is or times its steps.
struct Target {
  float* data;
  int64_t stride;
  const float* steps = nullptr;  // [T] of rounded rows
  const Weight* weight = nullptr;

  void put(int64_t t, int64_t row, float value) const {
    data[t * stride + row] = steps ? value * (steps[t] * weight->scale(row, 0)) : value;
  }
};

// Multiply R rows of the weight with N rows of x, [N, stride].
template <class Reader, int R, int N>
void multiply(const Weight& weight, int64_t row, const typename Reader::X* x, int64_t stride, int64_t t, Target to) {
  typename Reader::Sum sums[N][R] = {};
  typename Reader::Group groups[R];
  typename Reader::Own own[R] = {};
  const int64_t ahead = std::max(AHEAD, R * weight.row_bytes);  // never into rows of this tile, which are read beside it
  for (int64_t g = 0, at = 0; at < weight.columns; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) groups[r] = Reader::group(weight, row + r, g);
    const int64_t end = at + weight.group;
    for (; at + Reader::STEP <= end; at += Reader::STEP) {
      typename Reader::Piece pieces[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        ask<Reader>(groups[r].data, at, ahead);
        note(own[r], pieces[r] = Reader::piece(groups[r], at));
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const typename Reader::Input input = Reader::input(x + n * stride + at);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) Reader::add(sums[n][r], pieces[r], input);
      }
    }
    if (at < end) {
      for (int r = 0; r < R; ++r) {
        const typename Reader::Piece piece = Reader::last(groups[r], at, end - at);
        note(own[r], piece);
        for (int n = 0; n < N; ++n) Reader::add(sums[n][r], piece, Reader::input(x + n * stride + at));
      }
      at = end;
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) to.put(t + n, row + r, Reader::finish(sums[n][r], own[r]));
  }
}

template <class Reader, int R>
void multiply_rows(const Weight& weight, int64_t row, const typename Reader::X* x, int64_t stride, int64_t T, Target to) {
  int64_t passes = (T + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t t = 0; t < T; --passes) {
    const int64_t count = (T - t + passes - 1) / passes;
    const typename Reader::X* from = x + t * stride;
    switch (count) {
      case 1: multiply<Reader, R, 1>(weight, row, from, stride, t, to); break;
      case 2: multiply<Reader, R, 2>(weight, row, from, stride, t, to); break;
#ifdef __AVX512F__
      case 3: multiply<Reader, R, 3>(weight, row, from, stride, t, to); break;
      case 4: multiply<Reader, R, 4>(weight, row, from, stride, t, to); break;
      case 5: multiply<Reader, R, 5>(weight, row, from, stride, t, to); break;
      default: multiply<Reader, R, 6>(weight, row, from, stride, t, to);
#else
      default: multiply<Reader, R, 3>(weight, row, from, stride, t, to);
#endif
    }
    t += count;
  }
}

template <class Reader>
void multiply_range(const Weight& weight, int64_t row, int64_t end, const typename Reader::X* x, int64_t stride, int64_t T,
                    Target to) {
  // Few rows of x leave time enough to read the weight row by row.
  const bool is_fast = T <= 2 && Reader::BYTES == LINE;
  for (; !is_fast && row + TILE <= end; row += TILE) multiply_rows<Reader, TILE>(weight, row, x, stride, T, to);
  for (; row < end; ++row) multiply_rows<Reader, 1>(weight, row, x, stride, T, to);
}

template <class Reader>
void run(ffi::ThreadPool& pool, const Weight& weight, const typename Reader::X* x, int64_t stride, int64_t T, Target to) {
  // At least a few chunks for each thread, so that all end together.
  const int64_t bytes = weight.rows * weight.row_bytes;
  int64_t rows = std::min(CHUNK, bytes / (4 * std::max<int64_t>(1, pool.num_threads()))) / weight.row_bytes;
  rows = std::max<int64_t>(1, rows / TILE) * TILE;
  if (bytes < SMALL) rows = weight.rows;
  each(pool, (weight.rows + rows - 1) / std::max<int64_t>(1, rows), [=, &weight](int64_t chunk) {
    multiply_range<Reader>(weight, chunk * rows, std::min(weight.rows, (chunk + 1) * rows), x, stride, T, to);
  });
}

// x [T, D] with rows of `stride`, as a reader wants it.
struct Input {
  const void* data;
  bool is_bfloat;
  int64_t rows, columns;

  // Row t as floats.
  void take(int64_t t, float* to) const {
    if (!is_bfloat) {
      std::memcpy(to, static_cast<const float*>(data) + t * columns, 4 * columns);
      return;
    }
    const Bfloat* from = static_cast<const Bfloat*>(data) + t * columns;
    int64_t d = 0;
    for (; d + W <= columns; d += W) store(to + d, sixteen(from + d));
    for (; d < columns; ++d) to[d] = as_float(from[d]);
  }
};

template <class Reader>
void run_floats(ffi::ThreadPool& pool, const Weight& weight, const Input& input, Target to) {
  const int64_t stride = (input.columns + Reader::STEP - 1) / Reader::STEP * Reader::STEP;
  std::vector<typename Reader::X> x(input.rows * stride);
  std::vector<float> taken(input.columns);
  for (int64_t t = 0; t < input.rows; ++t) {
    typename Reader::X* row = x.data() + t * stride;
    if constexpr (std::is_same_v<typename Reader::X, Bfloat>) {
      std::memcpy(row, static_cast<const Bfloat*>(input.data) + t * input.columns, 2 * input.columns);
    } else if constexpr (std::is_same_v<typename Reader::Piece, Two>) {
      input.take(t, taken.data());
      for (int64_t d = 0; d < input.columns; ++d) row[d / 32 * 32 + d % 2 * W + d % 32 / 2] = taken[d];
    } else {
      input.take(t, row);
    }
  }
  run<Reader>(pool, weight, x.data(), stride, input.rows, to);
}

// Rows are rounded as XLA compiles `numbers.by_row`, with the same bits: it multiplies by the inverse of a step.
void run_rounded(ffi::ThreadPool& pool, const Weight& weight, const Input& input, Target to) {
  const int64_t stride = (input.columns + Integers::STEP - 1) / Integers::STEP * Integers::STEP;
  std::vector<Integers::X> x(input.rows * stride, Integers::ZERO);
  const int64_t padded = (input.columns + W - 1) / W * W;
  std::vector<float> steps(input.rows), row(padded);
  for (int64_t t = 0; t < input.rows; ++t) {
    input.take(t, row.data());
    Floats most{}, odd{};
    for (int64_t d = 0; d < padded; d += W) {
      const Floats size = (Floats)((Words)load(&row[d]) & 0x7fffffff);
      most = larger(size, most);
      odd += size * 0.0f;  // NaN for what is not finite
    }
    steps[t] = std::max(largest(most), 1e-30f) * (1.0f / 127) + sum(odd);
    const float inverse = 1.0f / steps[t];
    for (int64_t d = 0; d < padded; d += W) Integers::put(&x[t * stride + d], nearest(load(&row[d]) * inverse));
  }
  to.steps = steps.data();
  to.weight = &weight;
  run<Integers>(pool, weight, x.data(), stride, input.rows, to);
}

enum Kind : int64_t { FLOAT, INT8, FLOAT8, INT4_, FLOAT4_, ROUNDED };  // as in linear.py

void run_kind(ffi::ThreadPool& pool, int64_t kind, const Weight& weight, const Input& x, Target to) {
  switch (kind) {
    case FLOAT: return x.is_bfloat ? run_floats<Pairs>(pool, weight, x, to) : run_floats<Plain<float>>(pool, weight, x, to);
    case INT8:
      return x.is_bfloat ? run_floats<Scaled<int8_t, true>>(pool, weight, x, to)
                         : run_floats<Scaled<int8_t, false>>(pool, weight, x, to);
    case FLOAT8:
      return x.is_bfloat ? run_floats<Scaled<Float8, true>>(pool, weight, x, to)
                         : run_floats<Scaled<Float8, false>>(pool, weight, x, to);
    case INT4_: return run_floats<Table<false>>(pool, weight, x, to);
    case FLOAT4_: return run_floats<Table<true>>(pool, weight, x, to);
    default: return run_rounded(pool, weight, x, to);
  }
}

// Scales and zeros follow the weight where there are some.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                  ffi::Result<ffi::BufferR2<ffi::F32>> y, int64_t kind) {
  const int64_t rows = w.dimensions()[0], columns = x.dimensions()[1];
  const bool is_bfloat = x.element_type() == ffi::DataType::BF16;
  Weight weight{w.untyped_data(), rows, columns, rows ? int64_t(w.size_bytes()) / rows : 0, columns};
  weight.rounds = is_bfloat;
  if (rest.size() > 0) {
    auto scales = rest.get<ffi::AnyBuffer>(0);
    weight.scales = scales->untyped_data();
    weight.scale_type = scales->element_type();
    weight.group = columns / scales->dimensions()[0];
  }
  if (rest.size() > 1) {
    auto zeros = rest.get<ffi::AnyBuffer>(1);
    weight.zeros = zeros->untyped_data();
    weight.zero_type = zeros->element_type();
  }
  run_kind(pool, kind, weight, {x.untyped_data(), is_bfloat, x.dimensions()[0], columns}, {y->typed_data(), rows});
  return ffi::Error::Success();
}

// Multiply small integers, whose products are exact in every type; the number of results that are wrong.
template <class Reader, class T>
int count_wrong(T (*made)(float), typename Reader::X (*input)(float), typename Reader::X zero) {
  constexpr int64_t ROWS = 5, COLUMNS = 70, TOKENS = 7, STRIDE = 128;
  std::vector<T> weight(ROWS * COLUMNS);
  std::vector<typename Reader::X> x(TOKENS * STRIDE, zero);
  std::vector<float> to(TOKENS * ROWS);
  auto w_at = [](int64_t row, int64_t d) { return float((row * 7 + d * 3) % 5 - 2); };
  auto x_at = [](int64_t t, int64_t d) { return float((t + d) % 3 - 1); };
  for (int64_t row = 0; row < ROWS; ++row)
    for (int64_t d = 0; d < COLUMNS; ++d) weight[row * COLUMNS + d] = made(w_at(row, d));
  for (int64_t t = 0; t < TOKENS; ++t)
    for (int64_t d = 0; d < COLUMNS; ++d) x[t * STRIDE + d] = input(x_at(t, d));
  const Weight described{weight.data(), ROWS, COLUMNS, COLUMNS * int64_t(sizeof(T)), COLUMNS};
  multiply_range<Reader>(described, 0, ROWS, x.data(), STRIDE, TOKENS, {to.data(), ROWS});
  int wrong = 0;
  for (int64_t t = 0; t < TOKENS; ++t) {
    for (int64_t row = 0; row < ROWS; ++row) {
      float expected = 0.0f;
      for (int64_t d = 0; d < COLUMNS; ++d) expected += w_at(row, d) * x_at(t, d);
      wrong += to[t * ROWS + row] != expected;
    }
  }
  return wrong;
}

}  // namespace

extern "C" int jaxllm_check() {
  auto same = [](float value) { return value; };
  return count_wrong<Plain<float>, float>(same, same, 0.0f) +
         count_wrong<Pairs, Bfloat>(bfloat, [](float v) { return Pairs::X(std::is_same_v<Pairs::X, float> ? v : bfloat(v)); }, 0) +
         count_wrong<Integers, int8_t>([](float v) { return int8_t(v); },
                                       [](float v) { return Integers::X(v + Integers::ZERO); }, Integers::ZERO);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<int64_t>("kind"));

// Attention over a paged cache: queries meet the keys of 64 places at a time with an online softmax, in float32.
//
// Decoding and prefill are one loop: R queries of a key-value head, each of which sees the places from its first to its
// last. Decoding cuts a row's keys into chunks of a fixed size, which threads share and which are put together in order,
// so a row's arithmetic is its own, whatever is beside it.
// Letters: R queries, S places of a turn, K key-value heads, G query heads of each, C size of a key, V of a value.
#include "common.h"

namespace {

constexpr int64_t S = 64;
constexpr int64_t CHUNK = 8 * S;    // keys of a row that a thread takes at once when it decodes
constexpr int64_t QUERIES = 112;    // that a thread takes at once in prefill: half of a tile of 32 with 7 heads
constexpr float LOWEST = -1e30f;    // below every score, and finite
constexpr float UNSEEN = -2e30f;    // stands for the score of a place that a query does not see

#ifdef __AVX512F__
constexpr int MOST_ROWS = 6, WIDTH = 4;  // of a product's tile, in queries and in vectors
#else
constexpr int MOST_ROWS = 2, WIDTH = 2;
#endif

static inline int64_t up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- Products: [R, L] · [L, N] of words, a word being a float, or two bfloat16 which are multiplied and added

template <bool PAIRS>
static inline void add_word(Sixteen& to, uint32_t a, Sixteen b) {
#ifdef __AVX512BF16__
  if constexpr (PAIRS) {
    to = (Floats)_mm512_dpbf16_ps((__m512)to, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
    return;
  }
#endif
  float value;
  std::memcpy(&value, &a, 4);
  add_product(to, value, b);
}

template <bool PAIRS, int R, int N>
void multiply(const uint32_t* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t length, float* to,
              int64_t to_stride, const float* shrink) {
  Sixteen sums[R][N] = {};
  if (shrink) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[r][n] = times(sixteen(to + r * to_stride + n * W), shrink[r]);
    }
  }
  for (int64_t at = 0; at < length; ++at) {
    Sixteen from[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) from[n] = kept(sixteen(b + at * b_stride + n * W));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) add_word<PAIRS>(sums[r][n], a[r * a_stride + at], from[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(to + r * to_stride + n * W, sums[r][n]);
  }
}

template <bool PAIRS, int N>
void multiply_rows(int64_t rows, const uint32_t* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t length,
                   float* to, int64_t to_stride, const float* shrink) {
  for (int64_t r = 0, passes = up(rows, MOST_ROWS) / MOST_ROWS; r < rows; --passes) {
    const int64_t count = (rows - r + passes - 1) / passes;
    const uint32_t* from = a + r * a_stride;
    float* into = to + r * to_stride;
    const float* less = shrink ? shrink + r : nullptr;
    switch (count) {
      case 1: multiply<PAIRS, 1, N>(from, a_stride, b, b_stride, length, into, to_stride, less); break;
#ifdef __AVX512F__
      case 2: multiply<PAIRS, 2, N>(from, a_stride, b, b_stride, length, into, to_stride, less); break;
      case 3: multiply<PAIRS, 3, N>(from, a_stride, b, b_stride, length, into, to_stride, less); break;
      case 4: multiply<PAIRS, 4, N>(from, a_stride, b, b_stride, length, into, to_stride, less); break;
      case 5: multiply<PAIRS, 5, N>(from, a_stride, b, b_stride, length, into, to_stride, less); break;
#endif
      default: multiply<PAIRS, MOST_ROWS, N>(from, a_stride, b, b_stride, length, into, to_stride, less);
    }
    r += count;
  }
}

// N, `b_stride` and `to_stride` are multiples of 16. With `shrink` [R] the result is added to `to`, of which so much is
// left.
template <bool PAIRS>
void product(int64_t rows, const uint32_t* a, int64_t a_stride, const float* b, int64_t columns, int64_t length, float* to,
             const float* shrink) {
  int64_t n = 0;
  for (; n + WIDTH * W <= columns; n += WIDTH * W)
    multiply_rows<PAIRS, WIDTH>(rows, a, a_stride, b + n, columns, length, to + n, columns, shrink);
  for (; n < columns; n += W) multiply_rows<PAIRS, 1>(rows, a, a_stride, b + n, columns, length, to + n, columns, shrink);
}

// ---- Elementary functions, to a few units of the last place

// `Vector` has floats; `Bits`, as many words.
template <class Vector, class Bits>
static inline Vector exponential_of(Vector x) {
  const Vector most = 88.0f - Vector{}, least = -87.0f - Vector{};
  x = x > most ? most : x;  // NaN stays
  x = x < least ? least : x;
  // 2^n · 2^f with f within ±1/2; adding 1.5 · 2^23 leaves n in the lowest bits. log 2 in two parts (Cody & Waite).
  const Vector shifted = x * 1.44269504088896341f + 12582912.0f;
  const Vector n = shifted - 12582912.0f;
  Vector f = x - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  Vector p = 1.9875691500e-4f - Vector{};  // Cephes' expf
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  return (Vector)((Bits)p + ((Bits)shifted << 23));
}

static inline Floats exponential(Floats x) {
#ifdef __AVX512F__
  return exponential_of<Floats, Words>(x);
#else
  typedef float Eight __attribute__((vector_size(32)));
  typedef uint32_t EightWords __attribute__((vector_size(32)));
  union { Floats whole; Eight parts[2]; } made{x};
  for (Eight& part : made.parts) part = exponential_of<Eight, EightWords>(part);
  return made.whole;
#endif
}

static inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

// ---- The cache

struct Cache {
  const void* data;
  ffi::DataType type;
  int64_t blocks, heads, tokens, size;
  const float* scales;

  // The number of a place's vector among all.
  int64_t vector(const int32_t* table, int64_t head, int64_t place) const {
    const int64_t block = std::min<int64_t>(std::max<int64_t>(table[place / tokens], 0), blocks - 1);
    return (block * heads + head) * tokens + place % tokens;
  }
};

template <class F>
void with_type(ffi::DataType type, F&& f) {
  switch (type) {
    case ffi::DataType::F32: return f(static_cast<const float*>(nullptr));
    case ffi::DataType::BF16: return f(static_cast<const Bfloat*>(nullptr));
    case ffi::DataType::F16: return f(static_cast<const Half*>(nullptr));
    case ffi::DataType::S8: return f(static_cast<const int8_t*>(nullptr));
    case ffi::DataType::F8E4M3FN: return f(static_cast<const Float8*>(nullptr));
    default: return f(static_cast<const Float8Wide*>(nullptr));
  }
}

// Places of which a turn sees some: [from, end) of those from `start` on. Nothing else is read, because it may be NaN.
struct Span {
  const int32_t* table;
  int64_t head, start, from, end;
};

// A vector's floats, padded with zeros to whole vectors.
template <class T>
void floats(const Cache& cache, int64_t vector, int64_t width, float* to) {
  const T* data = static_cast<const T*>(cache.data) + vector * cache.size;
  const float scale = cache.scales ? cache.scales[vector] : 1.0f;
  int64_t d = 0;
  for (; d + W <= width; d += W) store(to + d, times(sixteen(data + d), scale));
  if (d < width) store(to + d, times(some_of(data + d, width - d), scale));
}

// Keys as words [C or C / 2, S], turned.
template <bool PAIRS>
void take_keys(const Cache& cache, const Span& span, float* to, float* row) {
  const int64_t words = PAIRS ? cache.size / 2 : cache.size;
  for (int64_t s = 0; s < S; ++s) {
    const int64_t place = span.start + s;
    const float* from = row;
    if (place < span.from || place >= span.end) {
      std::memset(row, 0, words * 4);
    } else if (PAIRS || cache.type == ffi::DataType::F32) {
      from = static_cast<const float*>(cache.data) + cache.vector(span.table, span.head, place) * words;
    } else {
      with_type(cache.type, [&](auto* of) {
        floats<std::remove_const_t<std::remove_pointer_t<decltype(of)>>>(
            cache, cache.vector(span.table, span.head, place), cache.size, row);
      });
    }
    for (int64_t d = 0; d < words; ++d) std::memcpy(to + d * S + s, from + d, 4);
  }
}

// Values as words [S or S / 2, width], padded with zeros to whole vectors.
template <bool PAIRS>
void take_values(const Cache& cache, const Span& span, int64_t width, float* to, float* rows) {
  const int64_t padded = up(width, W);
  for (int64_t s = 0; s < S; ++s) {
    const int64_t place = span.start + s;
    float* row = PAIRS ? rows + s % 2 * padded : to + s * padded;
    if (place < span.from || place >= span.end) {
      std::memset(row, 0, padded * 4);
    } else {
      with_type(cache.type, [&](auto* of) {
        floats<std::remove_const_t<std::remove_pointer_t<decltype(of)>>>(
            cache, cache.vector(span.table, span.head, place), width, row);
      });
    }
    if (PAIRS && s % 2) {  // floats that were bfloat16: their upper halves
      for (int64_t d = 0; d < padded; d += W)
        store(to + s / 2 * padded + d, (Floats)((Words)load(rows + d) >> 16 | (Words)load(rows + padded + d)));
    }
  }
}

struct Call {
  Cache keys, values;
  int64_t heads, group, width;  // of queries; of a value
  const int32_t* tables;
  int64_t table_width;
  float scale, softcap;  // of 0: none
  int64_t window;        // of 0: none
  const void* q;
  ffi::DataType q_type;
  const void* sinks;
  ffi::DataType sink_type;
  void* out;
  bool pairs;

  int64_t first(int64_t end) const { return window ? std::max<int64_t>(0, end - window) : 0; }

  void put(int64_t at, float value) const {
    switch (q_type) {
      case ffi::DataType::F32: static_cast<float*>(out)[at] = value; break;
      case ffi::DataType::BF16: static_cast<Bfloat*>(out)[at] = bfloat(value); break;
      default: static_cast<uint16_t*>(out)[at] = _cvtss_sh(value, 0);
    }
  }
};

// R queries of one key-value head, each with what it has seen so far.
struct Queries {
  const Call& call;
  int64_t count, padded;                // R; V in whole vectors
  std::vector<uint32_t> words;          // [R, L]
  std::vector<int64_t> ends;            // [R], behind the last place that each sees
  std::vector<float> values;            // [R, padded], weighted, relative to `highest`
  std::vector<float> highest, total;    // [R]; [R, 16], whose sum counts

  Queries(const Call& call, int64_t count)
      : call(call), count(count), padded(up(call.width, W)), words(count * length()), ends(count),
        values(count * padded), highest(count, LOWEST), total(count * W) {}

  int64_t length() const { return call.pairs ? call.keys.size / 2 : call.keys.size; }

  // Take the head `head` of token `token` as query r, that sees the places before `end`.
  void set(int64_t r, int64_t token, int64_t head, int64_t end) {
    const int64_t at = (token * call.heads + head) * call.keys.size;
    ends[r] = end;
    if (call.pairs) {
      std::memcpy(words.data() + r * length(), static_cast<const Bfloat*>(call.q) + at, length() * 4);
    } else {
      for (int64_t d = 0; d < call.keys.size; ++d) {
        const float value = number(call.q, call.q_type, at + d);
        std::memcpy(words.data() + r * length() + d, &value, 4);
      }
    }
  }

  void start_from_sink(int64_t r, int64_t head) {
    if (!call.sinks) return;
    highest[r] = number(call.sinks, call.sink_type, head);
    total[r * W] = 1.0f;
  }

  void finish(int64_t r, int64_t token, int64_t head) const {
    const float weight = sum(load(&total[r * W])), whole = weight == 0.0f ? 1.0f : weight;
    for (int64_t d = 0; d < call.width; ++d)
      call.put((token * call.heads + head) * call.width + d, values[r * padded + d] / whole);
  }

  // See the places of [from, end) as far as each query may.
  template <bool PAIRS>
  void see(const int32_t* table, int64_t head, int64_t from, int64_t end) {
    std::vector<float> keys(length() * S), values_in(S * padded), scores(count * S), shrink(up(count, W));
    std::vector<float> scratch(std::max(2 * padded, up(call.keys.size, W)));
    std::vector<uint32_t> weights(count * (PAIRS ? S / 2 : S));
    for (int64_t start = from / S * S; start < end; start += S) {
      const Span span{table, head, start, from, end};
      take_keys<PAIRS>(call.keys, span, keys.data(), scratch.data());
      take_values<PAIRS>(call.values, span, call.width, values_in.data(), scratch.data());
      product<PAIRS>(count, words.data(), length(), keys.data(), S, length(), scores.data(), nullptr);
      weigh<PAIRS>(start, scores.data(), weights.data(), shrink.data());
      product<PAIRS>(count, weights.data(), PAIRS ? S / 2 : S, values_in.data(), padded, PAIRS ? S / 2 : S,
                     values.data(), shrink.data());
    }
  }

  // Make weights of the scores [R, S] of the places from `start` on, and say what is left of what was seen before.
  template <bool PAIRS>
  void weigh(int64_t start, float* scores, uint32_t* weights, float* shrink) {
    constexpr Ints STEPS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t r = 0; r < count; ++r) {
      const int32_t last = int32_t(std::min<int64_t>(ends[r] - start, S));
      const int32_t first = int32_t(std::max<int64_t>(call.first(ends[r]) - start, 0));
      Floats most = all(LOWEST);
#pragma GCC unroll 4
      for (int64_t n = 0; n < S; n += W) {
        const Ints place = STEPS + int32_t(n);
        Floats score = load(scores + r * S + n) * call.scale;
        if (call.softcap > 0.0f) score = hyperbolic_tangent(score / call.softcap) * call.softcap;
        if (first > 0 || last < S) score = (place < last) & (place >= first) ? score : all(UNSEEN);
        store(scores + r * S + n, score);
        most = larger(score, most);
      }
      const float now = std::max(highest[r], largest(most));
      shrink[r] = highest[r] - now;
      highest[r] = now;
    }
    for (int64_t r = 0; r < up(count, W); r += W) store(shrink + r, exponential(load(shrink + r)));
    for (int64_t r = 0; r < count; ++r) {
      Floats added = load(&total[r * W]) * shrink[r];
#pragma GCC unroll 4
      for (int64_t n = 0; n < S; n += W) {
        const Floats score = load(scores + r * S + n);
        const Floats weight = score == UNSEEN ? Floats{} : exponential(score - highest[r]);
        added += weight;
#ifdef __AVX512BF16__
        if constexpr (PAIRS) {
          const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weight);
          std::memcpy(weights + (r * S + n) / 2, &narrow, 32);
          continue;
        }
#endif
        store(reinterpret_cast<float*>(weights) + r * S + n, weight);
      }
      store(&total[r * W], added);
    }
  }
};

// What `other` has seen comes behind what `to` has: query r of both.
void put_together(Queries& to, const Queries& other, int64_t r) {
  const float now = std::max(to.highest[r], other.highest[r]);
  const float before = std::exp(to.highest[r] - now), behind = std::exp(other.highest[r] - now);
  store(&to.total[r * W], load(&to.total[r * W]) * before + load(&other.total[r * W]) * behind);
  to.highest[r] = now;
  for (int64_t d = 0; d < to.padded; ++d) {
    float& value = to.values[r * to.padded + d];
    value = value * before + other.values[r * to.padded + d] * behind;
  }
}

void see(Queries& queries, const int32_t* table, int64_t head, int64_t from, int64_t end) {
#ifdef __AVX512BF16__
  if (queries.call.pairs) return queries.see<true>(table, head, from, end);
#endif
  queries.see<false>(table, head, from, end);
}

Call described(ffi::AnyBuffer& q, ffi::AnyBuffer& keys, ffi::AnyBuffer& tables, ffi::RemainingArgs& rest,
               ffi::Result<ffi::AnyBuffer>& out, int64_t given, double scale, int64_t window, double softcap) {
  // Of what may be missing, `given` says in its bits what follows: values, sinks, the scales of both.
  const void* data[4] = {};
  ffi::DataType types[4] = {ffi::DataType::F32, ffi::DataType::F32};
  for (int64_t bit = 0, at = 0; bit < 4; ++bit) {
    if (!(given >> bit & 1)) continue;
    auto buffer = rest.get<ffi::AnyBuffer>(at++);
    data[bit] = buffer->untyped_data();
    types[bit] = buffer->element_type();
  }
  auto size = keys.dimensions();
  Call call{};
  call.keys = {keys.untyped_data(), keys.element_type(), size[0], size[1], size[2], size[3],
               static_cast<const float*>(data[2])};
  call.width = out->dimensions()[2];
  call.values = call.keys;
  if (data[0]) {
    call.values.data = data[0];
    call.values.size = call.width;
    call.values.scales = static_cast<const float*>(data[3]);
  }
  call.heads = q.dimensions()[1];
  call.group = call.heads / size[1];
  call.tables = reinterpret_cast<const int32_t*>(tables.untyped_data());
  call.table_width = tables.dimensions()[1];
  call.scale = float(scale);
  call.softcap = float(softcap);
  call.window = window;
  call.q = q.untyped_data();
  call.q_type = q.element_type();
  call.sinks = data[1];
  call.sink_type = types[1];
  call.out = out->untyped_data();
#ifdef __AVX512BF16__
  call.pairs = call.q_type == ffi::DataType::BF16 && call.keys.type == ffi::DataType::BF16 && size[3] % 2 == 0;
#endif
  return call;
}

ffi::Error decode(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer tables,
                  ffi::BufferR1<ffi::S32> lengths, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                  int64_t given, double scale, int64_t window, double softcap) {
  const Call call = described(q, keys, tables, rest, out, given, scale, window, softcap);
  struct Piece { int64_t row, head, from, end; };
  std::vector<Piece> pieces;
  std::vector<Queries> seen;
  const int64_t rows = q.dimensions()[0], most = call.table_width * call.keys.tokens;
  auto length = [&](int64_t row) { return std::min<int64_t>(lengths.typed_data()[row], most); };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < call.keys.heads; ++head) {
      for (int64_t from = call.first(length(row)); from < length(row); from = (from / CHUNK + 1) * CHUNK) {
        pieces.push_back({row, head, from, std::min(length(row), (from / CHUNK + 1) * CHUNK)});
        seen.emplace_back(call, call.group);
      }
    }
  }
  each(pool, pieces.size(), [&](int64_t at) {
    const Piece& piece = pieces[at];
    for (int64_t g = 0; g < call.group; ++g) seen[at].set(g, piece.row, piece.head * call.group + g, length(piece.row));
    see(seen[at], call.tables + piece.row * call.table_width, piece.head, piece.from, piece.end);
  });
  std::memset(call.out, 0, out->size_bytes());
  for (size_t at = 0; at < pieces.size();) {
    const auto [row, head, from, end] = pieces[at];
    Queries whole(call, call.group);
    for (int64_t g = 0; g < call.group; ++g) whole.start_from_sink(g, head * call.group + g);
    for (; at < pieces.size() && pieces[at].row == row && pieces[at].head == head; ++at)
      for (int64_t g = 0; g < call.group; ++g) put_together(whole, seen[at], g);
    for (int64_t g = 0; g < call.group; ++g) whole.finish(g, row, head * call.group + g);
  }
  return ffi::Error::Success();
}

ffi::Error prefill(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer tables,
                   ffi::BufferR1<ffi::S32> starts, ffi::BufferR1<ffi::S32> lengths, ffi::BufferR1<ffi::S32> positions,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, int64_t given, double scale, int64_t window,
                   double softcap) {
  const Call call = described(q, keys, tables, rest, out, given, scale, window, softcap);
  std::memset(call.out, 0, out->size_bytes());
  struct Piece { int64_t tile, head, query, count; };  // queries are a token's heads, then the next token's
  std::vector<Piece> pieces;
  const int64_t tiles = tables.dimensions()[0], tokens = q.dimensions()[0];
  const int64_t most = call.table_width * call.keys.tokens;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t length = std::min<int64_t>(lengths.typed_data()[tile], tokens - starts.typed_data()[tile]);
    for (int64_t head = 0; head < call.keys.heads; ++head)
      for (int64_t query = 0; query < length * call.group; query += QUERIES)
        pieces.push_back({tile, head, query, std::min(QUERIES, length * call.group - query)});
  }
  each(pool, pieces.size(), [&](int64_t at) {
    const Piece& piece = pieces[at];
    Queries queries(call, piece.count);
    const int64_t start = starts.typed_data()[piece.tile], position = positions.typed_data()[piece.tile];
    auto token = [&](int64_t r) { return (piece.query + r) / call.group; };
    auto head = [&](int64_t r) { return piece.head * call.group + (piece.query + r) % call.group; };
    auto end = [&](int64_t r) { return std::min(position + token(r) + 1, most); };
    for (int64_t r = 0; r < piece.count; ++r) {
      queries.set(r, start + token(r), head(r), end(r));
      queries.start_from_sink(r, head(r));
    }
    see(queries, call.tables + piece.tile * call.table_width, piece.head, call.first(end(0)), end(piece.count - 1));
    for (int64_t r = 0; r < piece.count; ++r) queries.finish(r, start + token(r), head(r));
  });
  return ffi::Error::Success();
}

// What both kernels are given: `inputs` (queries, keys, tables), N arrays that say where rows or tiles are, the rest, and
// the settings.
template <int N, class Binding>
auto bound(Binding&& binding) {
  if constexpr (N > 0) {
    return bound<N - 1>(std::move(binding).template Arg<ffi::BufferR1<ffi::S32>>());
  } else {
    return std::move(binding)
        .RemainingArgs()
        .template Ret<ffi::AnyBuffer>()
        .template Attr<int64_t>("given")
        .template Attr<double>("scale")
        .template Attr<int64_t>("window")
        .template Attr<double>("softcap");
  }
}

auto inputs() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_decode, decode, bound<1>(inputs()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_prefill, prefill, bound<3>(inputs()));

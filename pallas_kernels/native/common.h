// What the native kernels share: vectors of 16 floats, numbers of few bits as floats, and loops over XLA's threads.
//
// `Floats` is a vector of GCC and Clang, which a processor without 512-bit registers takes in parts. Where speed counts,
// the kernels have `Sixteen`, with the same order of sums. Intrinsics stand only where a compiler does not find the
// instruction by itself.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int64_t W = 16;  // floats of a vector

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float LooseFloats __attribute__((vector_size(64), aligned(4), may_alias));

static inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
// Keep what was loaded in a register: GCC 12 loads it again for each product, and a load takes as long as a product.
template <class Vector>
static inline Vector kept(Vector v) {
#ifdef __AVX512F__
  asm("" : "+v"(v));
#endif
  return v;
}
static inline void store(float* to, Floats values) { *reinterpret_cast<LooseFloats*>(to) = values; }
static inline Floats all(float value) { return value - Floats{}; }
static inline Ints nearest(Floats v) {  // whole numbers, of two the even one
#ifdef __AVX512F__
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#else
  union { Floats whole; __m256 parts[2]; } f{v};
  union { __m256i parts[2]; Ints whole; } made{{_mm256_cvtps_epi32(f.parts[0]), _mm256_cvtps_epi32(f.parts[1])}};
  return made.whole;
#endif
}
static inline Floats larger(Floats a, Floats b) {  // b where one is NaN
#ifdef __AVX512F__
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
static inline float largest(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int64_t at = 1; at < W; ++at) most = v[at] > most ? v[at] : most;
  return most;
#endif
}

static inline float sum(Floats v) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  union { Floats whole; Eight half[2]; } a{v};
  union { Eight whole; Four half[2]; } b{a.half[0] + a.half[1]};
  Four c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// ---- Sixteen floats in registers

#ifdef __AVX512F__
typedef Floats Sixteen;
static inline Sixteen sixteen(const Floats& v) { return v; }
static inline Floats whole(const Sixteen& v) { return v; }
static inline Sixteen times(Sixteen v, float by) { return v * by; }
static inline void add_product(Sixteen& to, Sixteen a, Sixteen b) { to += a * b; }
static inline void add_product(Sixteen& to, float a, Sixteen b) { to += a * b; }
#else
// GCC 12 keeps a `Floats` in memory without AVX-512, where each sum waits for the store of the last one.
struct Sixteen { __m256 low, high; };
static inline Sixteen sixteen(const Floats& v) {
  union { Floats whole; Sixteen parts; } made{v};
  return made.parts;
}
static inline Floats whole(const Sixteen& v) {
  union { Sixteen parts; Floats whole; } made{v};
  return made.whole;
}
static inline Sixteen times(Sixteen v, float by) { return {v.low * by, v.high * by}; }
static inline void add_product(Sixteen& to, Sixteen a, Sixteen b) {
  to.low += a.low * b.low;
  to.high += a.high * b.high;
}
static inline void add_product(Sixteen& to, float a, Sixteen b) {
  to.low += a * b.low;
  to.high += a * b.high;
}
static inline void store(float* to, Sixteen v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
#endif

// ---- Numbers in memory, 16 at a time

typedef uint16_t Bfloat;  // the bits of a bfloat16
struct Float8 { uint8_t bits; };  // e4m3fn
struct Float8Wide { uint8_t bits; };  // e5m2
struct Half { uint16_t bits; };

// Written out, because GCC 12 takes `__builtin_convertvector` between these apart, 10 times slower.
static inline __m128i bytes(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
static inline __m256i pairs(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// The conversion of halves is not touched by what is set for denormal numbers.
#ifdef __AVX512F__
static inline Sixteen sixteen(const float* from) { return load(from); }
static inline Sixteen sixteen(const Bfloat* from) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(pairs(from)), 16);
}
static inline Sixteen sixteen(const int8_t* from) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(from)));
}
static inline Sixteen halves(__m256i bits) { return (Floats)_mm512_cvtph_ps(bits); }
#else
static inline Sixteen sixteen(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline Sixteen sixteen(const Bfloat* from) {
  return {(__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes(from)), 16),
          (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes(from + 8)), 16)};
}
static inline Sixteen sixteen(const int8_t* from) {
  const __m128i all = bytes(from);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
static inline Sixteen halves(__m256i bits) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
}
#endif
static inline Sixteen sixteen(const Half* from) { return halves(pairs(from)); }
static inline Sixteen sixteen(const Float8* from) {
  // The bits of e4m3 moved to their places in a half, whose exponents are 8 higher: exact, times 2^8.
  const __m256i bits = _mm256_cvtepu8_epi16(bytes(from));
  const __m256i sizes = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
  const __m256i signs = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
  const __m256i is_nan = _mm256_cmpeq_epi16(sizes, _mm256_set1_epi16(0x7f));
  const __m256i made = _mm256_or_si256(_mm256_or_si256(signs, _mm256_slli_epi16(sizes, 7)),
                                       _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  return times(halves(made), 256.0f);
}
static inline Sixteen sixteen(const Float8Wide* from) {
  return halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes(from)), 8));
}

// The first `count` of 16 numbers; zeros stand for the others.
template <class T>
static inline Sixteen some_of(const T* from, int64_t count) {
  T some[W] = {};
  std::memcpy(some, from, count * sizeof(T));
  return sixteen(some);
}

// Round to the nearest bfloat16, as floats; NaN stays NaN.
static inline Floats rounded(Floats v) {
  Words bits = (Words)v;
  Words near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  Words is_nan = (Words)(v != v);
  return (Floats)((near & ~is_nan) | (bits & is_nan));
}
static inline Bfloat bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline float as_float(Bfloat value) {
  uint32_t bits = uint32_t(value) << 16;
  float made;
  std::memcpy(&made, &bits, 4);
  return made;
}

// One number of an array of a type known only at run time: scales and zeros.
static inline float number(const void* data, ffi::DataType type, int64_t at) {
  switch (type) {
    case ffi::DataType::F32: return static_cast<const float*>(data)[at];
    case ffi::DataType::BF16: return as_float(static_cast<const Bfloat*>(data)[at]);
    case ffi::DataType::F16: return _cvtsh_ss(static_cast<const uint16_t*>(data)[at]);
    case ffi::DataType::U8: return static_cast<const uint8_t*>(data)[at];
    default: return static_cast<const int8_t*>(data)[at];
  }
}

// ---- Work shared among threads

struct Shared {
  std::function<void(int64_t)> work;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};

  void help() {
    for (int64_t at; (at = next.fetch_add(1)) < count;) {
      work(at);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Do `work` for each number below `count`, on XLA's threads and this one. It waits only for pieces that are begun, not
// for threads to come: all of them may be inside of calls like this one, of other devices. One that comes late finds
// nothing to do, and what it looks at lives as long as it does.
template <class F>
static void each(ffi::ThreadPool& pool, int64_t count, F&& work) {
  int64_t helpers = std::min(pool.num_threads(), count) - 1;
  if (helpers < 1) {
    for (int64_t at = 0; at < count; ++at) work(at);
    return;
  }
  auto shared = std::make_shared<Shared>();
  shared->work = work;
  shared->count = count;
  for (int64_t at = 0; at < helpers; ++at) pool.Schedule([shared] { shared->help(); });
  shared->help();
  for (int64_t turn = 0; shared->done.load(std::memory_order_acquire) < count; ++turn) {
    turn < 4096 ? _mm_pause() : std::this_thread::yield();  // then somebody else has the processor
  }
}

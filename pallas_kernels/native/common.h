// What the native kernels share: vectors of 16 floats, numbers of few bits as floats, and loops over XLA's threads.
//
// Vectors are those of GCC and Clang: a processor without 512-bit registers takes them in parts, with the same order of
// sums. Intrinsics stand only where a compiler does not find the instruction by itself.
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
typedef uint16_t LooseHalves __attribute__((vector_size(32), aligned(1), may_alias));
typedef int8_t LooseBytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t LooseUBytes __attribute__((vector_size(16), aligned(1), may_alias));

static inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
static inline void store(float* to, Floats values) { *reinterpret_cast<LooseFloats*>(to) = values; }
static inline Floats all(float value) { return value - Floats{}; }

static inline float sum(Floats v) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  union { Floats whole; Eight half[2]; } a{v};
  union { Eight whole; Four half[2]; } b{a.half[0] + a.half[1]};
  Four c = b.half[0] + b.half[1];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// ---- Numbers in memory, 16 at a time

typedef uint16_t Bfloat;  // the bits of a bfloat16
struct Float8 { uint8_t bits; };  // e4m3fn
struct Float8Wide { uint8_t bits; };  // e5m2
struct Half { uint16_t bits; };

static inline Floats read(const float* from) { return load(from); }
static inline Floats read(const Bfloat* from) {
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(from), Words) << 16);
}
static inline Floats read(const int8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const LooseBytes*>(from), Ints), Floats);
}
static inline Floats halves(Words bits) {  // of which the lower 16 bits of each are a half-precision float
  // Through the conversion of halves, which no setting for denormal numbers touches.
  typedef uint16_t Shorts __attribute__((vector_size(32)));
  union { Shorts whole; __m128i half[2]; } s{__builtin_convertvector(bits, Shorts)};
  union { __m256 half[2]; Floats whole; } f{{_mm256_cvtph_ps(s.half[0]), _mm256_cvtph_ps(s.half[1])}};
  return f.whole;
}
static inline Floats read(const Half* from) {
  return halves(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(from), Words));
}
static inline Floats read(const Float8* from) {
  // The bits of e4m3 moved to their places in a half, whose exponents are 8 higher: exact, times 2^8.
  Words bits = __builtin_convertvector(*reinterpret_cast<const LooseUBytes*>(from), Words);
  Words magnitude = bits & 0x7f;
  Floats value = halves((bits & 0x80) << 8 | magnitude << 7) * 256.0f;
  return (Floats)((Words)value | (Words)(magnitude == 0x7f));  // all bits set is a NaN
}
static inline Floats read(const Float8Wide* from) {
  return halves(__builtin_convertvector(*reinterpret_cast<const LooseUBytes*>(from), Words) << 8);
}

// The first `count` of 16 numbers; zeros stand for the others.
template <class T>
static inline Floats read_some(const T* from, int64_t count) {
  T some[W] = {};
  std::memcpy(some, from, count * sizeof(T));
  return read(some);
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

// FlashInfer's decode kernel XQA (csrc/xqa/mha.cu of its package) as a call of XLA, over caches [N, K, P, C].
//
// flashinfer.py compiles this once for each size of heads and blocks, which are macros of the kernel. FlashInfer's own
// binding reads strides from tensors [N, P, K, C]; XLA hands over sizes without strides, so the call is made here.
#include "xqa/mha.cu"

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// Make the kernel ready on a device: loaded, which cannot be while a graph is captured, and with its shared memory.
// Returns CUDA's error code.
extern "C" int jaxllm_xqa_prepare(int device) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  uint32_t size = 0;
  if (error == cudaSuccess) error = cudaMemcpyFromSymbol(&size, smemSize, sizeof(size));
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel_mha, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
  cudaSetDevice(before);
  return error;
}

static int64_t counter_bytes(int64_t tiles) { return (tiles * sizeof(uint32_t) + 127) / 128 * 128; }

// Bytes of the workspace where the contexts of so many tiles, rows times key-value heads, are each cut into pieces: a
// counter of finished pieces for each tile, then of each piece two numbers and the sums of its heads. The kernel begins
// the sums at a multiple of their size, which leaves less than one of them empty.
extern "C" int64_t jaxllm_xqa_bytes(int64_t tiles, int64_t pieces) {
  const int64_t sums = int64_t{headGrpSize} * headElems * sizeof(InputElem);
  return pieces == 1 ? 0 : counter_bytes(tiles) + (tiles * pieces + 1) * (2 * sizeof(SMemWarpRowMax) + sums);
}

static ffi::Error attend(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                         ffi::BufferR2<ffi::S32> tables, ffi::BufferR1<ffi::S32> lengths, ffi::BufferR1<ffi::F32> sinks,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::BufferR1<ffi::U8>> workspace, float scale,
                         int32_t window, int32_t processors) {
  const auto sizes = keys.dimensions();
  const uint64_t heads = sizes[1], tokens = sizes[2], width = sizes[3];
  const int64_t rows = q.dimensions()[0], tiles = rows * heads;
  if (tokens != tokensPerPage || width != validElemsPerHead || q.dimensions()[1] != int64_t(heads * headGrpSize))
    return ffi::Error::InvalidArgument("the kernel was compiled for other sizes");
  uint8_t* counters = workspace->typed_data();
  if (workspace->element_count() > 0) {
    const cudaError_t error = cudaMemsetAsync(counters, 0, counter_bytes(tiles), stream);
    if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  }
  try {
    launchMHAFlashInfer(
        processors, heads, window, scale, nullptr, static_cast<OutputHead*>(out->untyped_data()),
        static_cast<InputHead const*>(q.untyped_data()), sinks.element_count() > 0 ? sinks.typed_data() : nullptr,
        static_cast<GMemCacheHead*>(keys.untyped_data()), static_cast<GMemCacheHead*>(values.untyped_data()),
        tables.typed_data(), tables.dimensions()[1] * tokens,
        reinterpret_cast<uint32_t const*>(lengths.typed_data()), rows, 1.0f, nullptr,
        reinterpret_cast<uint32_t*>(counters), counters + counter_bytes(tiles), false,
        /*kv_stride_page=*/heads * tokens * width, /*kv_stride_token=*/width, /*kv_stride_head=*/tokens * width, stream);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_xqa, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR1<ffi::U8>>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("processors"),
                              {ffi::Traits::kCmdBufferCompatible});

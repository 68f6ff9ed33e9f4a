"""The benchmarks of `jaxllm bench`: servers, engines, scheduler, kernels and starts."""

"""The benchmarks that `jaxllm bench` runs: of servers, engines, the scheduler, kernels and starts."""

# jaxllm serve, for a CPU or for NVIDIA GPUs:
#   docker build --target cpu    -t jaxllm:cpu    .
#   docker build --target cuda12 -t jaxllm:cuda12 .
# It runs without root and writes into /cache alone, so that it can be started with
#   docker run --read-only --tmpfs /tmp -v jaxllm-cache:/cache -p 8000:8000 -p 50051:50051 jaxllm:cpu
# GPUs need --gpus all and the host's driver; CUDA itself comes with jax.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /source
RUN python -m venv /opt/jaxllm
ENV PATH=/opt/jaxllm/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY pyproject.toml README.md LICENSE ./
COPY jaxllm jaxllm
COPY pallas_kernels pallas_kernels
COPY server server

# Versions are those that pyproject.toml allows.
FROM build AS build-cpu
# hadolint ignore=DL3013
RUN pip install ".[server,otel]"

FROM build AS build-cuda12
# hadolint ignore=DL3013
RUN pip install ".[server,otel,cuda12]"

FROM python:${PYTHON} AS runtime
# The kernels for a CPU are compiled for the processor that runs them, at the first start, and kept in /cache. Debian's
# compiler is the one of the base image's release; to name its version would break the build with the next fix of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin jaxllm \
    && install --directory --owner=10001 --group=10001 /cache
ENV PATH=/opt/jaxllm/bin:$PATH \
    HOME=/cache \
    JAXLLM_CACHE_DIR=/cache/jaxllm \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1
VOLUME /cache
WORKDIR /cache
USER 10001:10001
EXPOSE 8000 50051
# Docker's own check; Kubernetes has its probes. /live fails only if the engine has died.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=4)"]
ENTRYPOINT ["jaxllm"]
CMD ["serve", "--host", "0.0.0.0"]

FROM runtime AS cuda12
COPY --from=build-cuda12 /opt/jaxllm /opt/jaxllm
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The last stage is what a build without --target makes.
FROM runtime AS cpu
COPY --from=build-cpu /opt/jaxllm /opt/jaxllm

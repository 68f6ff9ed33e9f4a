"""The client's calls except generation: tokens, models, load, control, health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm import errors
from jaxllm.client import Adapter
from jaxllm.client.requests import generate_request
from jaxllm.v1 import control_pb2, inference_pb2, types_pb2
from tests.client.fake_server import WAIT, FakeServer, duration, plain


def test_tokenize_and_detokenize(client: Any, server: FakeServer) -> None:
    server.answers[inference_pb2.TokenizeRequest] = inference_pb2.TokenizeResponse(token_ids=[1, 2])
    server.answers[inference_pb2.DetokenizeRequest] = inference_pb2.DetokenizeResponse(text="Hi")
    assert client.tokenize("Hi", add_special_tokens=False) == [1, 2]
    assert plain(server.request) == {"text": "Hi", "add_special_tokens": False}
    assert client.tokenize([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == [1, 2]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
    assert plain(server.request) == {"chat": chat}
    assert client.detokenize([1, 2], model="tiny") == "Hi"
    assert plain(server.request) == {"token_ids": [1, 2], "model": "tiny"}


def test_models_tell_what_calls_leave_open(client: Any, server: FakeServer) -> None:
    model = inference_pb2.Model(
        name="tiny",
        aliases=["t"],
        max_model_len=512,
        vocab_size=100,
        eos_token_ids=[2],
        default_sampling=types_pb2.SamplingParams(temperature=0.0, top_k=20),
        default_stop=types_pb2.StopConditions(max_tokens=16, include_stop=False),
        has_chat=True,
    )
    server.answers[inference_pb2.ListModelsRequest] = inference_pb2.ListModelsResponse(models=[model])
    (read,) = client.models()
    assert (read.name, read.aliases, read.max_model_len, read.eos_token_ids) == ("tiny", ("t",), 512, (2,))
    assert (read.has_chat, read.has_tool_calls, read.dimensions, read.labels) == (True, False, None, ())
    expected = {"temperature": 0.0, "top_k": 20, "max_tokens": 16, "include_stop_str_in_output": False}
    assert read.defaults == expected
    assert generate_request("Hi", read.defaults).sampling == model.default_sampling


def test_models_tell_what_they_pool(client: Any, server: FakeServer) -> None:
    pooling = inference_pb2.Pooling(size=384, takes_dimensions=True, dimensions=[128, 256], labels=["no", "yes"])
    model = inference_pb2.Model(name="tiny", tasks=["embed", "score"], pooling=pooling)
    server.answers[inference_pb2.ListModelsRequest] = inference_pb2.ListModelsResponse(models=[model])
    (read,) = client.models()
    assert (read.tasks, read.pooled_size, read.dimensions) == (("embed", "score"), 384, (128, 256))
    assert (read.labels, read.defaults) == (("no", "yes"), {})


def test_server_info_and_load(client: Any, server: FakeServer) -> None:
    info = control_pb2.GetServerInfoResponse(
        version="0.1.0", state=control_pb2.SERVER_STATE_DRAINING, model_names=["tiny"], mesh={"tensor": 4}
    )
    info.start_time.FromSeconds(10)
    server.answers[control_pb2.GetServerInfoRequest] = info
    server.answers[control_pb2.GetLoadRequest] = control_pb2.GetLoadResponse(
        running=3, waiting=2, waiting_prompt_tokens_uncached=9, prefix_hit_rate=0.5, step_time=duration(0.25)
    )
    read = client.server_info()
    assert (read.version, read.state, read.model_names, read.mesh) == ("0.1.0", "draining", ("tiny",), {"tensor": 4})
    assert read.start_time.timestamp() == 10
    load = client.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (3, 2, 9)
    assert (load.prefix_hit_rate, load.step_seconds) == (0.5, 0.25)


def test_control(client: Any, server: FakeServer) -> None:
    server.answers[control_pb2.AbortRequest] = control_pb2.AbortResponse()
    server.answers[control_pb2.PauseGenerationRequest] = control_pb2.PauseGenerationResponse()
    server.answers[control_pb2.ResumeGenerationRequest] = control_pb2.ResumeGenerationResponse()
    server.answers[control_pb2.ResetPrefixCacheRequest] = control_pb2.ResetPrefixCacheResponse(was_reset=True)
    client.abort("r-1")
    assert list(server.request.request_ids) == ["r-1"]
    client.abort(["r-1", "r-2"])
    assert list(server.request.request_ids) == ["r-1", "r-2"]
    client.pause("keep", clear_cache=False)
    assert server.request.mode == control_pb2.PAUSE_MODE_KEEP
    assert server.request.HasField("clear_cache")
    assert not server.request.clear_cache
    with pytest.raises(errors.UserError, match=r"^mode must be 'abort' or 'wait' or 'keep', got 'stop'\.$"):
        client.pause("stop")
    client.resume()
    assert isinstance(server.request, control_pb2.ResumeGenerationRequest)
    assert client.reset_prefix_cache() is True


def test_adapters(client: Any, server: FakeServer) -> None:
    server.answers[control_pb2.LoadAdapterRequest] = control_pb2.LoadAdapterResponse()
    server.answers[control_pb2.UnloadAdapterRequest] = control_pb2.UnloadAdapterResponse()
    found = control_pb2.Adapter(name="poet", source="a", rank=8)
    server.answers[control_pb2.ListAdaptersRequest] = control_pb2.ListAdaptersResponse(adapters=[found])
    client.load_adapter("poet", "a")
    assert plain(server.request) == {"name": "poet", "source": "a"}
    client.load_adapter("poet", "a", load_inplace=True)
    assert plain(server.request) == {"name": "poet", "source": "a", "load_inplace": True}
    client.unload_adapter("poet")
    assert plain(server.request) == {"name": "poet"}
    assert client.adapters() == [Adapter("poet", "a", 8)]
    server.answers[control_pb2.GetLoadRequest] = control_pb2.GetLoadResponse(running_adapters=["poet"])
    assert (client.load().running_adapters, client.load().waiting_adapters) == (("poet",), ())


def test_health(client: Any, server: FakeServer) -> None:
    states = health_pb2.HealthCheckResponse
    server.answers[health_pb2.HealthCheckRequest] = states(status=states.NOT_SERVING)
    assert client.health("jaxllm.v1.InferenceService") == "not_serving"
    assert server.request.service == "jaxllm.v1.InferenceService"
    with pytest.raises(errors.UnavailableError, match=r"was not ready within 0\.2 s: not_serving$"):
        client.wait_until_ready(0.2)
    started = time.monotonic()
    server.answers[health_pb2.HealthCheckRequest] = lambda _: states(
        status=states.SERVING if time.monotonic() > started + 0.3 else states.NOT_SERVING
    )
    client.wait_until_ready(WAIT)
    assert 0.3 < time.monotonic() - started < WAIT / 2


def test_waiting_for_a_server_that_starts_late(connect: Callable[..., Any], tmp_path: Path) -> None:
    client = connect(f"unix:{tmp_path}/socket")
    with pytest.raises(errors.UnavailableError, match=r"was not ready within 0\.2 s: .*cannot be reached"):
        client.wait_until_ready(0.2)
    late = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = FakeServer()
    states = health_pb2.HealthCheckResponse
    servicer.answers[health_pb2.HealthCheckRequest] = states(status=states.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, late)
    late.add_insecure_port(f"unix:{tmp_path}/socket")
    starter = threading.Timer(0.3, late.start)
    starter.start()
    client.wait_until_ready(WAIT)
    starter.join()
    late.stop(None)

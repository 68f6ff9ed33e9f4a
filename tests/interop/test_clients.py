"""Published clients, unmodified, against servers of ours: each gets the object, the call or the numbers it asked for.

The model that generates is as good as random, so what an answer says is not looked at: only that it is what the schema
allows. The one that embeds is the shipped one. `make interop` installs the clients; one that is missing is skipped.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.serving_process import ServingProcess
from tests.support.sizes import FEW_SLOTS, flags
from training import meanings

pytestmark = pytest.mark.slow
pydantic = pytest.importorskip("pydantic")

KEY, MODEL = "none", "small"
ASKED = "Ada is 36 years old."
MESSAGES: Any = [{"role": "user", "content": ASKED}]


class Person(pydantic.BaseModel):
    """Somebody, in as few tokens as a model needs that does not know when to stop."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=0, le=99)


class Anything(pydantic.BaseModel):
    """What any JSON object is."""

    model_config = pydantic.ConfigDict(extra="allow")


def is_person(value: Any) -> bool:
    return isinstance(value, Person) and value.name in ("Ada", "Grace") and 0 <= value.age <= 99


def long_model(folder: Path) -> Path:
    """Write the embedded model's shape and tokenizer with a context that holds agents' prompts; weights are drawn."""
    source = ROOT / "jaxllm" / "embedded" / "model"
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((source / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: 16384}))
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server's API is: of $INTEROP_URL, or one that is started here."""
    if os.environ.get("INTEROP_URL"):
        yield os.environ["INTEROP_URL"]
        return
    folder = str(long_model(tmp_path_factory.mktemp("model")))
    names = ("--load-format", "dummy", "--served-model-name", MODEL, "--tool-call-parser", "hermes")
    with ServingProcess(folder, *names, *flags(FEW_SLOTS)) as server:
        yield f"{server.http}/v1"


@pytest.fixture(scope="module")
def closing(url: str) -> dict[str, int]:
    """The logit_bias with which a model that draws its tokens soon ends texts and objects."""
    ids: set[int] = set()
    for text in ('"', "}"):
        body = json.dumps({"prompt": text}).encode()
        asked = Request(f"{url.removesuffix('/v1')}/tokenize", body, {"content-type": "application/json"})
        with urlopen(asked) as answer:
            ids |= set(json.load(answer)["tokens"])
    return {str(token): 100 for token in ids}


# openai.


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url, api_key=KEY) as client:
        yield client


def test_openai_parses_an_object(client: Any) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person)
    assert is_person(answer.choices[0].message.parsed)


def test_openai_parses_an_object_while_it_comes(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        assert is_person(stream.get_final_completion().choices[0].message.parsed)
    assert {"content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Person"}}], ids=str)
def test_openai_parses_the_arguments_of_a_call(client: Any, choice: Any) -> None:
    import openai

    tools = [openai.pydantic_function_tool(Person)]
    asked = {"model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": choice}
    answer = client.chat.completions.parse(**asked, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Person" and is_person(call.function.parsed_arguments)
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert is_person(call.function.parsed_arguments) and "tool_calls.function.arguments.done" in kinds


# LangChain.


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("streams", [False, True])
def test_langchain(url: str, method: Any, streams: bool, closing: dict[str, int]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    bias = closing if method == "json_mode" else None
    model = langchain.ChatOpenAI(
        base_url=url, api_key=KEY, model=MODEL, streaming=streams, logit_bias=bias, max_tokens=400
    )
    wanted = Anything if method == "json_mode" else Person
    answer = model.with_structured_output(wanted, method=method).invoke(ASKED)
    assert isinstance(answer, Anything) if method == "json_mode" else is_person(answer)


# instructor.


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(client: Any, mode: str, closing: dict[str, int]) -> None:
    instructor = pytest.importorskip("instructor")
    create = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_retries": 0, "max_tokens": 400}
    if mode == "JSON":
        assert isinstance(create(**asked, response_model=Anything, logit_bias=closing), Anything)
    else:
        assert is_person(create(**asked, response_model=Person))


# pydantic-ai.


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_pydantic_ai(url: str, output: str, closing: dict[str, int]) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))
    is_any = output == "PromptedOutput"
    wanted = getattr(ai, output)(Anything if is_any else Person)
    settings: Any = {"logit_bias": closing, "max_tokens": 400} if is_any else {"max_tokens": 400}
    answer = ai.Agent(model, output_type=wanted, retries=0, model_settings=settings).run_sync(ASKED).output
    assert isinstance(answer, Anything) if is_any else is_person(answer)


def test_pydantic_ai_streams(url: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))

    async def ask(output: Any) -> Any:
        async with ai.Agent(model, output_type=output).run_stream(ASKED) as run:
            return await run.get_output()

    for output in (ai.ToolOutput(Person), ai.NativeOutput(Person)):
        assert is_person(asyncio.run(ask(output)))


# LlamaIndex.


@pytest.mark.parametrize("calls_functions", [True, False])
def test_llama_index(url: str, calls_functions: bool) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    model = like.OpenAILike(
        model=MODEL,
        api_base=url,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=calls_functions,
        should_use_structured_outputs=not calls_functions,
        context_window=16384,
        max_tokens=200,
    )
    assert is_person(model.as_structured_llm(Person).chat([ChatMessage(content=ASKED)]).raw)


# smolagents.


def test_smolagents(url: str, closing: dict[str, int]) -> None:
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    bias = dict.fromkeys(closing, 6)  # as much as it takes, or every number had one digit
    model = smolagents.OpenAIServerModel(
        model_id=MODEL, api_base=url, api_key=KEY, max_tokens=400, temperature=1.0, logit_bias=bias
    )
    agent = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
    agent.run("What is 47 + 38?")
    steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
    messages = [step.model_output_message for step in steps if "max steps" not in str(step.error)]
    assert messages and None not in messages
    for step, message in zip(steps, messages, strict=False):
        if step.token_usage is not None and step.token_usage.output_tokens >= 400:
            continue  # cut off: a model that draws its tokens may write an argument without an end
        assert message.tool_calls and {call.function.name for call in message.tool_calls} <= {"add", "final_answer"}
        for call in message.tool_calls:
            arguments = call.function.arguments
            assert isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)


# Vercel's SDK.


@pytest.mark.parametrize("mode", ["object", "stream", "tool"])
def test_vercel_ai_sdk(url: str, mode: str) -> None:
    node, modules = shutil.which("node"), Path(__file__).parent / "node_modules" / "@ai-sdk"
    if node is None or not modules.exists():
        pytest.skip("make interop installs ai and @ai-sdk/openai-compatible")
    script = Path(__file__).parent / "vercel.mjs"
    ran = subprocess.run([node, str(script), url, MODEL, mode], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert is_person(Person(**json.loads(ran.stdout)))


# Embeddings and ranks.

TEXTS = ["Who keeps bees?", "Paris is the capital of France", "a dog barks"]
QUERY, DOCUMENTS = "Which animal barks?", ["Anna bakes bread.", "A dog barks.", "A banana is yellow."]
EMBEDDER = "jaxllm-embedder"


@pytest.fixture(scope="module")
def embedder() -> Iterator[str]:
    """Where a server with the shipped embedder is: of $INTEROP_EMBEDDER_URL, or one that is started here."""
    if os.environ.get("INTEROP_EMBEDDER_URL"):
        yield os.environ["INTEROP_EMBEDDER_URL"]
        return
    with ServingProcess(EMBEDDER) as server:
        yield server.http


@pytest.fixture(scope="module")
def expected(embedder: str) -> Any:
    """The embeddings of `TEXTS`, asked for without any client."""
    return np.array([item["embedding"] for item in post(f"{embedder}/v1/embeddings", input=TEXTS)["data"]])


def post(url: str, **body: Any) -> dict[str, Any]:
    with urlopen(Request(url, json.dumps(body).encode(), {"content-type": "application/json"})) as answer:
        return json.load(answer)


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str)
def test_openai_embeds(embedder: str, form: dict[str, Any], expected: Any) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{embedder}/v1", api_key=KEY) as client:
        answer = client.embeddings.create(model=EMBEDDER, input=TEXTS, **form)
    found = [item.embedding for item in answer.data]
    if form.get("encoding_format") == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
    assert np.allclose(found, expected, atol=1e-6) and answer.usage.prompt_tokens > 0


def langchain_embeddings(url: str) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    # Else it makes ids of OpenAI's own vocabulary.
    own = {"check_embedding_ctx_length": False}
    return langchain.OpenAIEmbeddings(model=EMBEDDER, base_url=f"{url}/v1", api_key=KEY, **own)


def test_langchain_embeds(embedder: str, expected: Any) -> None:
    model = langchain_embeddings(embedder)
    assert np.allclose(model.embed_documents(TEXTS), expected, atol=1e-6) and np.allclose(
        model.embed_query(TEXTS[1]), expected[1], atol=1e-6
    )
    assert np.allclose(asyncio.run(model.aembed_documents(TEXTS)), expected, atol=1e-6)


def test_llama_index_embeds(embedder: str, expected: Any) -> None:
    llama = pytest.importorskip("llama_index.embeddings.openai")
    model = llama.OpenAIEmbedding(model_name=EMBEDDER, api_base=f"{embedder}/v1", api_key=KEY)
    assert np.allclose(model.get_text_embedding_batch(TEXTS), expected, atol=1e-6)
    assert np.allclose(model.get_query_embedding(TEXTS[0]), expected[0], atol=1e-6)


def test_cohere_ranks(embedder: str) -> None:
    cohere = pytest.importorskip("cohere")
    answer = cohere.ClientV2(api_key=KEY, base_url=embedder).rerank(
        model=EMBEDDER, query=QUERY, documents=DOCUMENTS, top_n=2
    )
    assert [len(answer.results), answer.results[0].index] == [2, 1] and answer.id
    assert answer.results[0].relevance_score > answer.results[1].relevance_score
    assert answer.meta.billed_units.search_units == 1
    older = cohere.Client(api_key=KEY, base_url=embedder).rerank(
        model=EMBEDDER, query=QUERY, documents=[{"text": text} for text in DOCUMENTS], return_documents=True
    )
    assert older.results[0].document.text == DOCUMENTS[1] and len(older.results) == 3


def test_jinas_requests_are_answered_as_jina_does(embedder: str) -> None:
    asked: Any = {"model": EMBEDDER, "query": QUERY, "documents": DOCUMENTS, "top_n": 1}
    answer = post(f"{embedder}/v1/rerank", **asked)
    (best,) = answer["results"]
    assert (best["index"], best["document"]) == (1, {"text": DOCUMENTS[1]}) and best["relevance_score"] <= 1.0
    assert answer["model"] == EMBEDDER and answer["usage"]["total_tokens"] > 0
    (bare,) = post(f"{embedder}/v1/rerank", **asked, return_documents=False)["results"]
    assert bare.keys() == {"index", "relevance_score"}


def test_a_vector_store_finds_what_is_said_in_other_words(embedder: str) -> None:
    faiss = pytest.importorskip("faiss")
    model, world, asked = langchain_embeddings(embedder), meanings.world(), meanings.held_out_pairs(0)
    vectors = np.array(model.embed_documents([text.text for text in world]), "float32")
    store = faiss.IndexFlatIP(vectors.shape[1])
    store.add(vectors)
    queries = np.array([model.embed_query(text.text) for text in asked], "float32")
    _, found = store.search(queries, 1)
    right = sum(text.fits(world[near]) for text, (near,) in zip(asked, found, strict=True))
    print(f"{right} of {len(asked)} among {len(world)}")
    assert len(asked) == 200 and right >= 0.95 * len(asked)

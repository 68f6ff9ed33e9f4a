"""`cohere`: reranking with both of its APIs; and requests as for Jina, which has no package."""

from __future__ import annotations

from typing import Any

import cohere

from tests.clients.common import EMBEDDER, KEY, Site, post

QUERY, DOCUMENTS = "Which animal barks?", ["Anna bakes bread.", "A dog barks.", "A banana is yellow."]


def test_embeddings_rank(embedder: Site) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=embedder.http)
    answer = client.rerank(model=EMBEDDER, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [len(answer.results), answer.results[0].index] == [2, 1] and answer.id
    assert answer.results[0].relevance_score > answer.results[1].relevance_score
    assert answer.meta.billed_units.search_units == 1


def test_embeddings_rank_as_the_older_api_asks(embedder: Site) -> None:
    client = cohere.Client(api_key=KEY, base_url=embedder.http)
    documents = [{"text": text} for text in DOCUMENTS]
    answer = client.rerank(model=EMBEDDER, query=QUERY, documents=documents, return_documents=True)
    assert answer.results[0].document.text == DOCUMENTS[1] and len(answer.results) == 3


def test_embeddings_rank_as_jina_asks(embedder: Site) -> None:
    asked: Any = {"model": EMBEDDER, "query": QUERY, "documents": DOCUMENTS, "top_n": 1}
    answer = post(f"{embedder.api}/rerank", **asked)
    (best,) = answer["results"]
    assert (best["index"], best["document"]) == (1, {"text": DOCUMENTS[1]}) and best["relevance_score"] <= 1.0
    assert answer["model"] == EMBEDDER and answer["usage"]["total_tokens"] > 0
    (bare,) = post(f"{embedder.api}/rerank", **asked, return_documents=False)["results"]
    assert bare.keys() == {"index", "relevance_score"}

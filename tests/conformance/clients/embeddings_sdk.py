#!/usr/bin/env python3
"""The openai and cohere packages against /v1/embeddings and /v2/rerank of the demo model. openai decodes base64 itself unless a format is
given."""

import math

from sdk_venv import enter

enter("openai==3.54.0", "cohere==5.20.7")

import cohere  # noqa: E402 (inside the environment)
import openai  # noqa: E402
from hadron_server import Server  # noqa: E402


def embeds(client, model):
    texts = ["red apple", "green pear", "What is 12 plus 30?"]
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert plain.object == "list" and [item.index for item in plain.data] == [0, 1, 2], plain
    packed = client.embeddings.create(model=model, input=texts)
    for one, other in zip(plain.data, packed.data):
        assert all(abs(a - b) < 1e-7 for a, b in zip(one.embedding, other.embedding, strict=True))
        assert abs(math.hypot(*one.embedding) - 1) < 1e-6
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
    alone = client.embeddings.create(model=model, input=texts[1])
    assert alone.data[0].embedding == packed.data[1].embedding
    try:
        client.embeddings.create(model=model, input=texts, dimensions=8)
    except openai.BadRequestError as error:
        assert error.param == "dimensions", error
    else:
        raise AssertionError("dimensions without matryoshka")
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    except openai.BadRequestError as error:
        assert "--runner generate" in error.message, error
    else:
        raise AssertionError("generation by a pooling server")


def reranks(client, model):
    documents = ["12 plus 30 is 42", "red apple", "What is 12 plus 30?"]
    reply = client.rerank(model=model, query="What is 12 plus 30?", documents=documents, top_n=2)
    assert len(reply.results) == 2 and reply.results[0].index == 2, reply
    assert abs(reply.results[0].relevance_score - 1) < 1e-6, reply
    assert reply.results[0].relevance_score > reply.results[1].relevance_score


with Server("--threads", "1", "--runner", "pooling") as server:
    sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    name = sdk.models.list().data[0].id
    embeds(sdk, name)
    reranks(cohere.ClientV2(base_url=server.url, api_key="none"), name)
print("openai, cohere: embeddings and reranking agree with their types")

"""Typical use of the openai SDK with the demo model. Stops the server with SIGTERM."""

import json
import os
import signal
import threading
import time
import urllib.request

import openai
from openai_outputs import Outputs

URL, MODEL, SERVER = os.environ["URL"], os.environ["MODEL"], int(os.environ["SERVER"])
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="sdk-key", max_retries=0)
QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
ENDLESS = {"prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


def check(condition, what):
    """Fails with a message unless the condition holds; unlike `assert` it also works with `python -O`."""
    if not condition:
        raise SystemExit(f"failed: {what}")
    print(f"ok: {what}")


def raises(kind, reason, call):
    """Checks that a call raises the SDK's exception class, with the server's `reason` in its body."""
    try:
        call()
    except openai.APIError as error:
        body = error.body or {}
        told = (type(error), body.get("reason"))
        if told != (kind, reason):
            raise SystemExit(f"failed: {kind.__name__} with reason {reason} is {error!r}")
        print(f"ok: {kind.__name__} with reason {reason}")
        return error
    raise SystemExit(f"failed: no {kind.__name__}")


def models():
    listed = client.models.list().data
    check([m.id for m in listed] == [MODEL], "models are listed")
    check(client.models.retrieve(MODEL).id == MODEL, "a model is retrieved")


def unary():
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    check("42" in reply.choices[0].message.content, "chat answers")
    check(reply.choices[0].finish_reason == "stop", "and stops")
    usage = reply.usage
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage adds up")
    text = client.completions.create(model=MODEL, prompt=["What is", "The"], n=2, max_tokens=3, seed=1)
    check([c.index for c in text.choices] == [0, 1, 2, 3], "two prompts, two choices each")
    named = client.with_options(default_headers={"X-Request-Id": "mine"})
    reply = named.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    check(reply.id == "chatcmpl-mine" and reply._request_id == "mine", "a request id comes back")


def streams():
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check(text == whole.choices[0].message.content, "a stream says the same")
    check(chunks[-1].choices == [] and chunks[-1].usage == whole.usage, "usage comes last")
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    check(ends == ["stop"], "one end")


def logprobs():
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4
    )
    entries = reply.choices[0].logprobs.content
    check(len(entries) == reply.usage.completion_tokens, "an entry per token")
    check(all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in entries), "three likeliest each")
    check(all(e.logprob == e.top_logprobs[0].logprob for e in entries), "greedy takes the likeliest")
    text = client.completions.create(model=MODEL, prompt="What is", max_tokens=2, logprobs=2, echo=True)
    listed = text.choices[0].logprobs
    check(listed.token_logprobs[0] is None and len(listed.tokens) == len(listed.text_offset), "echoed log-probabilities")


def structured():
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["sum", "fact"]}},
        "required": ["sure", "kind"],
        "additionalProperties": False,
    }
    # A model this small repeats line breaks between the parts of an object endlessly, where a schema allows them.
    compact = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=compact, max_tokens=100, seed=1)
    answer = json.loads(reply.choices[0].message.content)
    good = set(answer) == {"sure", "kind"} and type(answer["sure"]) is bool and answer["kind"] in ("sum", "fact")
    check(good and reply.choices[0].finish_reason == "stop", f"a schema is kept: {answer}")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}, "strict": True}}
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form, max_tokens=100, seed=1)
    answer = json.loads(reply.choices[0].message.content)
    check(answer in ("yes", "no") and reply.choices[0].finish_reason == "stop", f"json_schema is kept: {answer}")
    form["json_schema"]["schema"] = {"type": "no such type"}
    raises(openai.BadRequestError, "invalid_grammar",
           lambda: client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form))


def errors():
    chat = client.chat.completions.create
    error = raises(openai.BadRequestError, "invalid_value", lambda: chat(model=MODEL, messages=QUESTION, temperature=9))
    check(error.param == "temperature" and str(error.code) == "400", "names the parameter")
    raises(openai.BadRequestError, "context_length_exceeded", lambda: chat(model=MODEL, messages=QUESTION, max_tokens=10**6))
    raises(openai.NotFoundError, "unknown_model", lambda: chat(model="other", messages=QUESTION))
    raises(openai.NotFoundError, "unknown_route", lambda: client.moderations.create(input="x"))
    raises(openai.BadRequestError, "wrong_runner", lambda: client.embeddings.create(model=MODEL, input="x"))
    for key, reason in [("wrong", "wrong_key")]:
        other = client.with_options(api_key=key)
        raises(openai.AuthenticationError, reason, other.models.list)
    raises(openai.APIStatusError, "body_limit", lambda: chat(model=MODEL, messages=[{"role": "user", "content": "x" * (9 << 20)}]))
    impatient = client.with_options(timeout=0.001)
    try:
        impatient.chat.completions.create(model=MODEL, messages=QUESTION)
        raise SystemExit("failed: no timeout")
    except openai.APITimeoutError:
        print("ok: APITimeoutError")


def wait_until_idle():
    """The server releases a disconnected client within milliseconds, not immediately."""
    load = urllib.request.Request(f"{URL}/load", headers={"Authorization": "Bearer sdk-key"})
    deadline = time.monotonic() + 5
    while json.load(urllib.request.urlopen(load))["server_load"] > 0:
        if time.monotonic() > deadline:
            raise SystemExit("failed: a client that has left still counts after 5 s")
        time.sleep(0.01)


def overloaded():
    """The error of a request while four others run. They may end first on a busy machine, hence several attempts."""
    for _ in range(10):
        wait_until_idle()
        with client.completions.create(model=MODEL, n=4, stream=True, **ENDLESS) as stream:
            next(iter(stream))
            try:
                client.completions.create(model=MODEL, prompt="x", max_tokens=1)
            except openai.APIError as error:
                return error
    return None


def overload():
    error = overloaded()
    check(isinstance(error, openai.RateLimitError), f"RateLimitError while four others run: {error!r}")
    check((error.body or {}).get("reason") == "max_num_queued_reqs", "with reason max_num_queued_reqs")
    check(1 <= int(error.response.headers["retry-after"]) <= 60, "Retry-After")
    waited = client.with_options(max_retries=5).completions.create(model=MODEL, prompt="x", max_tokens=1)
    check(len(waited.choices) == 1, "the SDK's own retries get through")


def drain():
    """A stream that outlives the drain ends with an error; new requests get 503."""
    stream = iter(client.completions.create(model=MODEL, n=4, stream=True, **ENDLESS))
    next(stream)
    ended = []

    def read():
        try:
            ended.append(sum(1 for _ in stream))
        except openai.APIError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    os.kill(SERVER, signal.SIGTERM)
    refused = None
    while refused is None and reader.is_alive():
        try:
            client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        except openai.RateLimitError:
            pass  # The server has not handled the signal yet, and the stream uses all of its requests.
        except openai.InternalServerError as error:
            refused = (error.body or {}).get("reason")
    check(refused == "draining", f"InternalServerError with reason {refused} in the drain")
    reader.join()
    told = isinstance(ended[0], openai.APIError) and (ended[0].body or {}).get("reason") == "draining"
    check(told or isinstance(ended[0], int), f"the stream ended properly: {ended[0]!r}")
    try:
        client.models.list()
    except openai.APIConnectionError:
        print("ok: APIConnectionError once it is gone")


outputs = Outputs(client, MODEL, check)
parts = (models, unary, streams, logprobs, structured, outputs.parsed, outputs.tools, outputs.reasoning,
         errors, overload, drain)
for part in parts:
    print(f"-- {part.__name__}")
    part()

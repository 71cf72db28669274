#!/usr/bin/env python3
"""litellm and LangChain against requests that exceed the context length: each must raise its own error for this case.

The error is raised by the functions of the packages, from replies of a server of this tree. The script prints the table in
results/overflow_errors.md. Run by hand: the packages take a minute of a processor to install.
"""

import importlib.metadata
import os

from sdk_venv import enter

PACKAGES = ("litellm==1.110.0", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10")
enter(*PACKAGES)

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm requests a list of prices at its import.
import anthropic  # noqa: E402 (inside the environment)
import litellm  # noqa: E402
from hadron_server import Server  # noqa: E402
from langchain_anthropic import ChatAnthropic  # noqa: E402
from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402

LIMIT = 512
LONG = "one two three " * LIMIT
SHORT = "What is 12 plus 30?"
# Name of the case, prompt and max_tokens.
PROMPT, TOTAL = "prompt", "prompt and max_tokens"
CASES = [(PROMPT, LONG, 16), (TOTAL, SHORT, LIMIT)]


def of_litellm(model, base):
    def call(prompt, max_tokens):
        messages = [{"role": "user", "content": prompt}]
        litellm.completion(model=model, api_base=base, api_key="none", messages=messages, max_tokens=max_tokens, num_retries=0)
    return call


def of_langchain(model, base, **fields):
    def call(prompt, max_tokens):
        model(model="demo", base_url=base, api_key="none", max_tokens=max_tokens, max_retries=0, **fields).invoke(prompt)
    return call


def clients(url):
    """Yields the package, the route, a function that sends a request, and the package's error of each case."""
    litellms = dict.fromkeys((PROMPT, TOTAL), litellm.ContextWindowExceededError)
    langchains = dict.fromkeys((PROMPT, TOTAL), ContextOverflowError)
    # Of the two messages of Anthropic's API, langchain-anthropic recognises the message about the prompt.
    anthropics = {PROMPT: ContextOverflowError, TOTAL: anthropic.BadRequestError}
    yield "litellm", "/v1/chat/completions", of_litellm("openai/demo", url + "/v1"), litellms
    yield "litellm", "/v1/messages", of_litellm("anthropic/demo", url), litellms
    yield "langchain-openai", "/v1/chat/completions", of_langchain(ChatOpenAI, url + "/v1"), langchains
    yield "langchain-openai", "/v1/responses", of_langchain(ChatOpenAI, url + "/v1", use_responses_api=True), langchains
    yield "langchain-anthropic", "/v1/messages", of_langchain(ChatAnthropic, url), anthropics


def raised(call, prompt, max_tokens):
    try:
        call(prompt, max_tokens)
    except Exception as error:  # Every error is a result.
        return error
    raise AssertionError("no error")


def main():
    litellm.suppress_debug_info = True
    print("| package | version | route | exceeds the context length | error |\n|---|---|---|---|---|")
    failed = []
    with Server("--max-model-len", str(LIMIT), "--served-model-name", "demo") as server:
        for package, route, call, expected in clients(server.url):
            for case, prompt, max_tokens in CASES:
                error = raised(call, prompt, max_tokens)
                version = importlib.metadata.version(package)
                print(f"| {package} | {version} | `{route}` | {case} | `{type(error).__name__}` |", flush=True)
                if not isinstance(error, expected[case]):
                    failed.append(f"{package} {route} {case}: {error!r}")
    assert not failed, "\n".join(failed)


main()

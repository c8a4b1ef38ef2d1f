"""Asks a server as users of four Python packages do: ``python sdks.py http://127.0.0.1:PORT ANSWERS.json``.

See `calls`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import litellm
import openai
import standin
from calls import call, events, main, plain
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

MODEL = "vllm"
KEY = {"api_key": "none", "max_retries": 0}
HELLO = [{"role": "user", "content": "Hello!"}]
WEATHER = [{"role": "user", "content": standin.QUESTION}]
MOOD = [{"role": "user", "content": standin.ASKED_FOR_JSON}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Say what the weather is.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
CLAUDE_TOOLS = [{"name": "get_weather", "description": "Say what the weather is.", "input_schema": SCHEMA}]


class Mood(BaseModel):
    """An answer in a given form."""

    mood: Literal["good", "bad"]


# openai


def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", **KEY)


def _chat(url: str, **options: Any) -> Any:
    return _openai(url).chat.completions.create(**{"model": MODEL, "messages": HELLO, **options})


def _respond(url: str, **options: Any) -> Any:
    return _openai(url).responses.create(**{"model": MODEL, "input": "Hello!", **options})


@call
def openai_models(url: str) -> Any:
    return [model.id for model in _openai(url).models.list()]


@call
def openai_completion(url: str) -> Any:
    return _openai(url).completions.create(model=MODEL, prompt=standin.PROMPT, max_tokens=16, temperature=0, logprobs=2)


@call
def openai_completion_streamed(url: str) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return events(_openai(url).completions.create(model=MODEL, prompt=standin.PROMPT, max_tokens=16, temperature=0, **options))


@call
def openai_chat(url: str) -> Any:
    extras = {"metadata": {"a": "b"}, "store": False, "user": "me", "service_tier": "auto", "verbosity": "low"}
    return _chat(url, **extras, safety_identifier="me", prompt_cache_key="x", reasoning_effort="low")


@call
def openai_chat_streamed(url: str) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return events(_chat(url, **options))


@call
def openai_chat_async(url: str) -> Any:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **KEY) as client:
            return await asyncio.gather(*(client.chat.completions.create(model=MODEL, messages=HELLO) for _ in range(4)))

    return [plain(answer) for answer in asyncio.run(ask())]


@call
def openai_chat_with_tools(url: str) -> Any:
    """To the end: the call, its result, the answer."""
    first = _chat(url, messages=WEATHER, tools=TOOLS, parallel_tool_calls=False)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = _chat(url, messages=[*WEATHER, message, result], tools=TOOLS)
    return [plain(first), plain(second)]


@call
def openai_chat_with_tools_streamed(url: str) -> Any:
    return events(_chat(url, messages=WEATHER, tools=TOOLS, tool_choice="auto", stream=True))


@call
def openai_chat_stream_helper(url: str) -> Any:
    with _openai(url).chat.completions.stream(model=MODEL, messages=WEATHER, tools=TOOLS) as stream:
        return stream.get_final_completion()


@call
def openai_chat_parsed(url: str) -> Any:
    return _openai(url).chat.completions.parse(model=MODEL, messages=MOOD, response_format=Mood, max_tokens=128)


@call
def openai_response(url: str) -> Any:
    extras = {"instructions": "Be short.", "metadata": {"a": "b"}, "store": False, "truncation": "disabled"}
    return _respond(url, **extras, prompt_cache_key="x", include=["reasoning.encrypted_content"])


@call
def openai_response_streamed(url: str) -> Any:
    return events(_respond(url, stream=True))


@call
def openai_response_with_tools(url: str) -> Any:
    """To the end; the whole output of the first is sent back, as the documentation of OpenAI does it."""
    first = _respond(url, input=WEATHER, tools=FLAT_TOOLS)
    (called,) = [each for each in first.output if each.type == "function_call"]
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"}
    second = _respond(url, input=[*WEATHER, *first.output, result], tools=FLAT_TOOLS)
    return [plain(first), plain(second)]


@call
def openai_response_with_log_probabilities(url: str) -> Any:
    """The answer is sent back as it came, with the figures of each token."""
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 5}
    first = _respond(url, **options, max_output_tokens=64)
    told = [each for item in first.output for part in item.content or () for each in getattr(part, "logprobs", None) or ()]
    second = _respond(url, input=[{"role": "user", "content": "Hello!"}, *first.output, *HELLO], **options)
    return [len(told), plain(first), plain(second)]


@call
def openai_response_with_tools_streamed(url: str) -> Any:
    with _openai(url).responses.stream(model=MODEL, input=WEATHER, tools=FLAT_TOOLS) as stream:
        return [events(stream), plain(stream.get_final_response())]


@call
def openai_response_with_a_hosted_tool(url: str) -> Any:
    """A server that has no search answers without one."""
    return _respond(url, tools=[{"type": "web_search"}])


@call
def openai_response_with_a_grammar(url: str) -> Any:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    return _respond(url, tools=[{"type": "custom", "name": "patch", "format": grammar}])


@call
def openai_response_parsed(url: str) -> Any:
    return _openai(url).responses.parse(model=MODEL, input=MOOD, text_format=Mood, max_output_tokens=128)


@call
def openai_embedding(url: str) -> Any:
    return _openai(url).embeddings.create(model=MODEL, input="Hello!")


@call
def openai_unknown_model(url: str) -> Any:
    return _openai(url).chat.completions.create(model="gpt-4o", messages=HELLO)


@call
def openai_unknown_field(url: str) -> Any:
    return _chat(url, extra_body={"of_next_year": {"a": [1]}})


# anthropic


def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, **KEY)


def _message(url: str, **options: Any) -> Any:
    return _anthropic(url).messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 128, **options})


@call
def anthropic_message(url: str) -> Any:
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    extras = {"system": system, "metadata": {"user_id": "me"}, "stop_sequences": ["zzz"]}
    return _message(url, extra_body={"temperature": 0, "top_k": 1}, **extras)


@call
def anthropic_message_streamed(url: str) -> Any:
    return events(_message(url, stream=True))


@call
def anthropic_stream_helper(url: str) -> Any:
    with _anthropic(url).messages.stream(model=MODEL, messages=HELLO, max_tokens=128) as stream:
        return ["".join(stream.text_stream), plain(stream.get_final_message())]


@call
def anthropic_tools(url: str) -> Any:
    first = _message(url, messages=WEATHER, tools=CLAUDE_TOOLS)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}
    messages = [*WEATHER, {"role": "assistant", "content": first.content}, result]
    second = _message(url, messages=messages, tools=CLAUDE_TOOLS, tool_choice={"type": "auto"})
    return [plain(first), plain(second)]


@call
def anthropic_tools_streamed(url: str) -> Any:
    return events(_message(url, messages=WEATHER, tools=CLAUDE_TOOLS, stream=True))


@call
def anthropic_beta(url: str) -> Any:
    """What Claude Code sends too."""
    extras = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "betas": ["context-management-2025-06-27"]}
    thinking = {"type": "adaptive"}
    return _anthropic(url).beta.messages.create(model=MODEL, messages=HELLO, max_tokens=2048, thinking=thinking, **extras)


@call
def anthropic_tool_runner(url: str) -> Any:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Say what the weather is."""
        return f"sunny in {city}"

    runner = _anthropic(url).beta.messages.tool_runner(model=MODEL, messages=WEATHER, max_tokens=128, tools=[get_weather])
    return [plain(message) for message in runner]


@call
def anthropic_count(url: str) -> Any:
    return _anthropic(url).messages.count_tokens(model=MODEL, messages=HELLO, tools=CLAUDE_TOOLS, system="Be short.")


@call
def anthropic_unknown_model(url: str) -> Any:
    return _anthropic(url).messages.create(model="claude", messages=HELLO, max_tokens=128)


# litellm


def _litellm(url: str, provider: str = "hosted_vllm", path: str = "/v1") -> dict[str, Any]:
    return {"model": f"{provider}/{MODEL}", "api_base": f"{url}{path}", **KEY}


@call
def litellm_completion(url: str) -> Any:
    return litellm.completion(messages=HELLO, **_litellm(url))


@call
def litellm_completion_as_openai(url: str) -> Any:
    return litellm.completion(messages=HELLO, metadata={"a": "b"}, user="me", **_litellm(url, "openai"))


@call
def litellm_completion_streamed(url: str) -> Any:
    return events(litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **_litellm(url)))


@call
def litellm_tools(url: str) -> Any:
    first = litellm.completion(messages=WEATHER, tools=TOOLS, **_litellm(url))
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "get_weather", "content": "sunny"}
    second = litellm.completion(messages=[*WEATHER, message, result], tools=TOOLS, **_litellm(url))
    return [plain(first), plain(second)]


@call
def litellm_tools_streamed(url: str) -> Any:
    return events(litellm.completion(messages=WEATHER, tools=TOOLS, stream=True, **_litellm(url)))


@call
def litellm_text(url: str) -> Any:
    return litellm.text_completion(prompt=standin.PROMPT, max_tokens=16, **_litellm(url))


@call
def litellm_as_anthropic(url: str) -> Any:
    return litellm.completion(messages=WEATHER, tools=TOOLS, max_tokens=128, **_litellm(url, "anthropic", ""))


@call
def litellm_response(url: str) -> Any:
    return litellm.responses(input="Hello!", **_litellm(url, "openai"))


@call
def litellm_embedding(url: str) -> Any:
    return litellm.embedding(input=["Hello!"], **_litellm(url))


# langchain-openai


def _langchain(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", **KEY, **options)


@call
def langchain_invoke(url: str) -> Any:
    return _langchain(url).invoke("Hello!")


@call
def langchain_stream(url: str) -> Any:
    return "".join(piece.text for piece in _langchain(url, stream_usage=True).stream("Hello!"))


@call
def langchain_batch(url: str) -> Any:
    return [answer.text for answer in _langchain(url).batch(["Hello!", "Good morning!"])]


@call
def langchain_tools(url: str) -> Any:
    model = _langchain(url).bind_tools(TOOLS)
    question = HumanMessage(standin.QUESTION)
    first = model.invoke([question])
    second = model.invoke([question, first, ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])])
    return [plain(first), plain(second)]


@call
def langchain_tools_streamed(url: str) -> Any:
    pieces = list(_langchain(url).bind_tools(TOOLS).stream(standin.QUESTION))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return [{**each, "id": ""} for each in whole.tool_calls]


@call
def langchain_structured(url: str) -> Any:
    return _langchain(url, max_tokens=128).with_structured_output(Mood).invoke(standin.ASKED_FOR_JSON)


@call
def langchain_responses(url: str) -> Any:
    return _langchain(url, use_responses_api=True).bind_tools(FLAT_TOOLS).invoke(standin.QUESTION)


@call
def langchain_text(url: str) -> Any:
    return OpenAI(model=MODEL, base_url=f"{url}/v1", max_tokens=16, temperature=0, **KEY).invoke(standin.PROMPT)


@call
def langchain_embedding(url: str) -> Any:
    return OpenAIEmbeddings(model=MODEL, base_url=f"{url}/v1", check_embedding_ctx_length=False, **KEY).embed_query("Hello!")


if __name__ == "__main__":
    main()

"""Request bodies, checked, and what of them the rest of the server reads."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qwen35_engine import MAX_LOGPROBS

from .errors import InvalidRequest

__all__ = ["ChatRequest", "CompletionRequest", "SamplingFields", "parse_chat_request", "parse_completion_request"]

_Request = TypeVar("_Request", bound="SamplingFields")


class _Part(BaseModel):
    """A part of a body. Unknown fields are ignored, so that new clients keep working."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_Part):
    type: Literal["text"]
    text: str


class Function(_Part):
    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _decode(cls, value: object) -> object:
        """OpenAI sends the arguments as JSON in a string; the template wants them as an object."""
        if isinstance(value, str):
            try:
                return json.loads(value) if value.strip() else {}
            except ValueError as error:
                raise ValueError("must be a JSON object in a string") from error
        return value


class ToolCall(_Part):
    function: Function


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="after")
    def _has_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise ValueError("content must be text or a list of text parts")
        return self


class StreamOptions(_Part):
    include_usage: bool | None = None


class SamplingFields(_Part):
    """What chat and completions share. ``cache_prompt: false`` neither takes from the cache nor leaves anything."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    cache_prompt: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)] | None = None
    # What is not supported and would change the answer is refused, not ignored.
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def reuse(self) -> bool:
        return self.cache_prompt is not False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


class CompletionRequest(SamplingFields):
    """``prompt`` is text or token ids; ``ignore_eos`` goes on past the model's end tokens up to ``max_tokens``."""

    prompt: str | list[Annotated[int, Field(ge=0)]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    ignore_eos: bool | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_ids(cls, value: object) -> object:
        if not isinstance(value, str | list) or not value:
            raise ValueError("must be text or a list of token ids, and not empty")
        return value


class ChatRequest(SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[dict[str, Any]], Field(max_length=0)] | None = None  # what tools were before
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Literal[False] | None = None
    response_format: dict[str, Any] | None = None

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise ValueError("only the type 'text' is supported")
        return value

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def template_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    def template_arguments(self) -> dict[str, Any]:
        """Further variables of the template. ``reasoning_effort: none`` switches thinking off."""
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("enable_thinking", self.reasoning_effort != "none")
        return arguments


# What the call to the template sets itself.
_RESERVED_ARGUMENTS = frozenset(
    "messages conversation tools documents chat_template add_generation_prompt continue_final_message tokenize padding"
    " truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Check the body of a chat request.

    Raises:
        InvalidRequest: not JSON, or a field missing, of the wrong type or out of its range. It names the field and does
            not repeat what the client sent.
    """
    request = _parse(ChatRequest, body)
    reserved = _RESERVED_ARGUMENTS & set(request.chat_template_kwargs or {})
    if reserved:
        name = min(reserved)
        raise InvalidRequest(
            f"chat_template_kwargs.{name}: must not be set by a request", param=f"chat_template_kwargs.{name}"
        )
    return request


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Check the body of a completion request.

    Raises:
        InvalidRequest: as of ``parse_chat_request``.
    """
    return _parse(CompletionRequest, body)


def _parse(kind: type[_Request], body: bytes) -> _Request:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the request body must be JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _from_validation(error) from None


def _from_validation(error: ValidationError) -> InvalidRequest:
    """One complaint: of a field that may be several things, the one about the deepest place."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    chosen = max(errors, key=lambda entry: len(entry["loc"]))
    # The branch of a union is no part of a field's name.
    parts = [str(part) for part in chosen["loc"] if part != "str" and "[" not in str(part)]
    param = ".".join(parts)
    return InvalidRequest(f"{param}: {chosen['msg'].removeprefix('Value error, ')}", param=param)

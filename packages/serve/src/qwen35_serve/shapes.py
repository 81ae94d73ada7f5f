"""OpenAI's shapes that chat and completions share."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from typing import Any

from qwen35_engine import Usage

__all__ = ["head", "sse", "usage_body"]


def head(prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """The fields every answer begins with; a stream repeats them in every event."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
    }


def sse(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object, and beside its fields where the reused tokens were, why there were no more, and times."""
    reuse = asdict(usage.reuse) | {"taps_taken": usage.taps_taken, "taps_skipped": usage.taps_skipped}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "reuse": reuse,
        "timing": {name: None if value is None else round(value, 6) for name, value in asdict(usage.timing).items()},
    }

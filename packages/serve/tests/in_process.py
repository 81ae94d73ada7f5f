"""Requests to an application in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from starlette.applications import Starlette


def send(app: Starlette, method: str, path: str, **options: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, timeout=60, **options)

    return asyncio.run(request())


def ask(app: Starlette, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, or for a stream its last event with a usage."""
    response = send(app, "POST", route, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer: dict[str, Any] = response.json()
        return answer
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line and "[DONE]" not in line]
    return next(event for event in map(json.loads, reversed(events)) if event.get("usage"))

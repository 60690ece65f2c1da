"""The agent server: drives a rollout by asking the model for an answer and the resources server to verify it.

Its requests become spans without a line of code here; `gym.rollout` is the program's own.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request

from lens_auto import span_cm


def build(model_url: str, resources_url: str) -> FastAPI:
    """The application.

    Args:
        model_url: Of the model server.
        resources_url: Of the resources server.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/ng-rollout/{rollout_id}/run")
    async def run(rollout_id: str, request: Request) -> dict[str, object]:
        task = await request.json()
        session: aiohttp.ClientSession = app.state.session
        with span_cm("gym.rollout"):
            async with session.post(f"{model_url}/v1/responses", json=task) as response:
                answer = await response.json()
            async with session.post(f"{resources_url}/verify", json={**task, **answer}) as response:
                verdict = await response.json()
        return {"rollout": rollout_id, **answer, **verdict}

    return app


if __name__ == "__main__":
    port, model, resources = sys.argv[1:]
    uvicorn.run(build(model, resources), host="127.0.0.1", port=int(port), log_level="warning")

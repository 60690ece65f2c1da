"""The model server: answers a prompt. This one knows how to add."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request

from lens_auto import span_cm

app = FastAPI()


@app.post("/v1/responses")
async def responses(request: Request) -> dict[str, str]:
    """Answer `a+b`."""
    prompt = (await request.json())["prompt"]
    with span_cm("gym.model.responses"):
        return {"answer": str(sum(int(part) for part in prompt.split("+")))}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

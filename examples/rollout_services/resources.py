"""The resources server: knows the right answer, and verifies one."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request

from lens_auto import span_cm

app = FastAPI()


@app.post("/verify")
async def verify(request: Request) -> dict[str, float]:
    """Reward 1 for the right answer, else 0."""
    task = await request.json()
    with span_cm("gym.verify"):
        return {"reward": float(task["answer"] == task["expected"])}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

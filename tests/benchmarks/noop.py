"""Serve applications that compute nothing: what a request costs before a model does anything.

`alone` is an ingress that reads its body and answers; `chain` passes small arrays through two more deployments, as the
real application does: the first one's response goes un-awaited into the call of the second.
"""

import json
from typing import Any

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

TOKENS, WIDTH, LABELS = 12, 256, 77
MAX_ONGOING = 2_048
ANSWER = json.dumps({"results": [{"scores": [{"label": "as long as a real one", "score": 0.0123456789}] * LABELS}]})


class Alone:
    """Answers at once."""

    async def answer(self) -> str:
        """The same for all."""
        return ANSWER

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def any_path(request: Request) -> Response:
            await request.body()
            return Response(await self.answer(), media_type="application/json")

        return app


class Chained(Alone):
    """Answers once two other deployments did."""

    def __init__(self, first: DeploymentHandle[Any], second: DeploymentHandle[Any]) -> None:
        self._first, self._second = first, second

    async def answer(self) -> str:
        """See `Alone.answer`."""
        ids = np.zeros(TOKENS, np.int32)
        await self._second.score.remote(self._first.encode.remote(ids), np.ones(TOKENS, np.bool_))
        return ANSWER


class First:
    """Rows as an encoder sends them."""

    async def encode(self, ids: NDArray[np.int32]) -> NDArray[np.float16]:
        """`[tokens, width]` zeros."""
        return np.zeros((len(ids), WIDTH), np.float16)


class Second:
    """Scores as a scorer sends them."""

    async def score(self, rows: NDArray[np.float16], keep: NDArray[np.bool_]) -> NDArray[np.float32]:
        """`[labels]` zeros."""
        return np.zeros(LABELS, np.float32)


def alone(_: dict[str, Any]) -> serve.Application:
    """The application of one deployment."""
    return _ingress(Alone).bind()


def chain(_: dict[str, Any]) -> serve.Application:
    """The application of three."""
    return _ingress(Chained).bind(_deployment(First).bind(), _deployment(Second).bind())


def _ingress(cls: type) -> serve.Deployment:
    return _deployment(serve.ingress()(cls))


def _deployment(cls: type) -> serve.Deployment:
    decorate = serve.deployment(max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": 0.1})
    return decorate(cls)

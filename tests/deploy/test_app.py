"""What a replica makes of errors that come from another deployment, and of the number of replicas."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import RequestCancelledError

from deploy.app import _call, _ReplicaCount
from deploy.wire import ReplicaLostError
from tokenalign.errors import NumericalError


def rpc_error(code: grpc.StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), "private")


async def answered_with(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("gone", b"0" * 16),
        RequestCancelledError(),
        rpc_error(grpc.StatusCode.UNAVAILABLE),
        rpc_error(grpc.StatusCode.INTERNAL),
        rpc_error(grpc.StatusCode.UNKNOWN),
    ],
    ids=repr,
)
async def test_a_lost_replica(error: Exception) -> None:
    """However Ray or gRPC words it, a replica that is gone is one error of ours, and the work may be tried again."""
    with pytest.raises(ReplicaLostError) as caught:
        await _call(answered_with(error))
    assert caught.value.__cause__ is error


async def test_errors_of_ours_come_back_as_they_are() -> None:
    """What another deployment raised on purpose is raised here, without Ray's wrapping."""
    own = NumericalError("NaN")
    with pytest.raises(NumericalError) as caught:
        await _call(answered_with(RayTaskError("score", "traceback", own)))
    assert caught.value is own


async def test_a_message_that_is_too_large() -> None:
    """It would fail again wherever it is sent, so it is no lost replica."""
    with pytest.raises(AioRpcError):
        await _call(answered_with(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED)))


class State:
    """States of replicas, as Serve's answer names them: words, no members of its enumeration."""

    RUNNING = "RUNNING"
    STARTING = "STARTING"
    STOPPING = "STOPPING"


class Status:
    """Serve's answer to how many replicas there are; an exception in its place is raised."""

    def __init__(self) -> None:
        self.asked = 0
        self.encoders: dict[str, int] | Exception = {State.RUNNING: 1}
        self.ingresses = {State.RUNNING: 1}

    def __call__(self) -> Any:
        self.asked += 1
        if isinstance(self.encoders, Exception):
            raise self.encoders
        found = {"Encoder": self.encoders, "Ingress": self.ingresses}
        deployments = {name: SimpleNamespace(replica_states=states) for name, states in found.items()}
        return SimpleNamespace(applications={"tokenalign": SimpleNamespace(deployments=deployments)})


async def test_slots_follow_the_replicas(
    monkeypatch: pytest.MonkeyPatch, until: Callable[[Callable[[], bool]], Any]
) -> None:
    """So many batches for each running encoder, shared among running ingresses; a failed question changes nothing."""
    status = Status()
    monkeypatch.setattr("ray.serve.status", status)
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(app_name="tokenalign"))
    monkeypatch.setattr("deploy.app.COUNT_PERIOD_S", 0.001)
    count = _ReplicaCount(batches_per_encoder=2)
    assert count.slots() == 2
    following = asyncio.create_task(count.follow())
    status.encoders = {State.RUNNING: 3, State.STARTING: 5, State.STOPPING: 7}
    await until(lambda: count.slots() == 6)
    status.ingresses = {State.RUNNING: 4}
    await until(lambda: count.slots() == 2)  # 1.5 for each: rounded up, so that no encoder is left out
    for error in (RequestCancelledError(), KeyError("tokenalign"), ValueError("unforeseen")):
        status.encoders = error
        asked = status.asked
        await until(lambda asked=asked: status.asked > asked + 1)
        assert count.slots() == 2
    status.encoders, status.ingresses = {State.RUNNING: 2}, {State.RUNNING: 1}
    await until(lambda: count.slots() == 4)
    following.cancel()

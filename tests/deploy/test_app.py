"""What a replica makes of errors that come from another deployment."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import RequestCancelledError

from deploy.app import _call
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

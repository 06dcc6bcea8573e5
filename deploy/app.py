"""The Ray Serve application: the only file that decorates, binds and knows all deployments."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc  # type: ignore[import-untyped]  # its stubs are a package of their own
import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusOverview

from deploy.encoder import Encoder
from deploy.health import CHECK_PERIOD_S, CHECK_TIMEOUT_S
from deploy.http.gate import Gate
from deploy.http.routes import build_http_app
from deploy.http.tenants import Tenants
from deploy.http.watch import Watch
from deploy.ingress import Ingress
from deploy.label_cache.opening import open_store
from deploy.label_cache.server import EmbeddedServer
from deploy.logs import join_serve
from deploy.scorer import Scorer
from deploy.settings import EMBEDDED, Settings
from deploy.telemetry import Exporter, RaySink, Sink
from deploy.tracing import Tracer, open_tracer
from deploy.wire import (
    EncodeBatch,
    EncodedRows,
    EncoderIdentity,
    LabelReport,
    ReplicaLostError,
    ScoreBatch,
    ScoredBatch,
)
from tokenalign.errors import ConfigError, FingerprintMismatchError, TokenAlignError
from tokenalign.labels import LabelSet

ResultT = TypeVar("ResultT")

MAX_ONGOING_BATCHES = 256  # of an encoder or scorer: above any number of slots, or the router would back off
DRAIN_MARGIN_S = 10.0  # a replica that is to stop gets the longest request's time and this; Serve gives it 20 s
DRAIN_POLL_S = 0.25  # a replica that is to stop looks so often whether its last request is done; Serve waits 2 s
COUNT_PERIOD_S = 1.0  # how often an ingress asks Serve how many replicas there are
MEET_PERIOD_S = 0.5  # between questions to an encoder that still holds another model, while a rollout is under way

# Of a call that went as a message: the other end is gone, or the way to it. Others are faults of the call itself.
LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}

logger = logging.getLogger(__name__)


class CacheServerDeployment:
    """Owns the embedded Valkey server: alive as long as this one replica."""

    def __init__(self, settings: Settings) -> None:
        join_serve()
        _refuse_several_nodes()
        self._server = EmbeddedServer(max_memory_bytes=settings.label_cache.embedded_max_bytes)
        self._server.start()

    async def address(self) -> str:
        """The URL of the running server, started anew if it died."""
        _refuse_several_nodes()
        await asyncio.to_thread(self._server.restart)
        return self._server.url

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop()


class EncoderDeployment(Encoder):
    """The encoder on Serve."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it, in its event loop
        sink, tracer = _watched(settings)
        Encoder.__init__(self, settings, sink=sink, tracer=tracer)
        self._telling = asyncio.create_task(Exporter(sink, self.readings).follow())


class ScorerDeployment(Scorer):
    """The scorer on Serve: its handle to the encoder and, where it is embedded, to the label store."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it; there is no other place to wait for the encoder
        self, settings: Settings, encoder: DeploymentHandle[Any], cache_server: DeploymentHandle[Any] | None
    ) -> None:
        async def encode(batch: EncodeBatch) -> EncodedRows:
            return await _call(encoder.encode.remote(batch))

        async def describe() -> EncoderIdentity:
            return await _call(encoder.describe.remote())

        sink, tracer = _watched(settings)
        store = open_store(settings.label_cache, _address_of(cache_server))
        Scorer.__init__(self, settings, encode, describe, store, sink=sink, tracer=tracer)
        self._telling = asyncio.create_task(Exporter(sink, self.readings).follow())
        await _patiently(self.start)


class IngressDeployment(Ingress):
    """The ingress on Serve: its handles to the other deployments and, where it is embedded, to the label store."""

    async def __init__(  # type: ignore[misc]  # as above
        self,
        settings: Settings,
        encoder: DeploymentHandle[Any],
        scorer: DeploymentHandle[Any],
        cache_server: DeploymentHandle[Any] | None,
    ) -> None:
        async def send(batch: ScoreBatch) -> ScoredBatch:
            return await _call(scorer.score.remote(batch))

        async def describe() -> EncoderIdentity:
            return await _call(encoder.describe.remote())

        async def warm(fingerprint: str, labels: LabelSet, tenant: str | None) -> LabelReport:
            return await _call(scorer.warm.remote(fingerprint, labels, tenant))

        store = open_store(settings.label_cache, _address_of(cache_server))
        self._limits = settings.limits
        self._tenants = Tenants(per_key=settings.label_cache.tenant_per_key)
        self._gate, self._origins = Gate.of(settings.access), settings.access.cors_origins
        self._replicas = _ReplicaCount(settings.batching.batches_per_encoder)
        sink, tracer = _watched(settings)
        self._watch = Watch(sink, tracer, names_requests=False)  # Serve's server in front of us does
        Ingress.__init__(self, settings, send, describe, warm, self._replicas.slots, store, sink=sink, tracer=tracer)
        self._telling = asyncio.create_task(
            Exporter(sink, self.readings, self._watch.readings, self._gate.readings).follow()
        )
        self._counting = asyncio.create_task(self._replicas.follow())
        await _patiently(self.start)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(
            self, self._limits, self._tenants, watch=self._watch, gate=self._gate, cors_origins=self._origins
        )


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application for the `args` of serve_config.yaml; `ConfigError` names every setting at fault."""
    settings = Settings.parse(args)
    cache_server = None
    if settings.label_cache.url == EMBEDDED:
        one = _deployment(CacheServerDeployment, settings).options(num_replicas=1, ray_actor_options={"num_cpus": 0})
        cache_server = one.bind(settings)
    encoder = _deployment(EncoderDeployment, settings).bind(settings)
    scorer = _deployment(ScorerDeployment, settings).bind(settings, encoder, cache_server)
    # More requests than the queue holds must reach the ingress, or Serve would queue them and our 429 never came.
    waiting = 2 * settings.batching.max_queue_texts + 1_024
    ingress = _deployment(serve.ingress()(IngressDeployment), settings, max_ongoing_requests=waiting)
    return ingress.bind(settings, encoder, scorer, cache_server)


def _watched(settings: Settings) -> tuple[Sink, Tracer]:
    """What this replica tells its metrics and its spans; from now on its log lines stand among Serve's."""
    join_serve()
    replica = serve.get_replica_context()
    sink = RaySink({"deployment": replica.deployment, "replica": replica.replica_tag})
    return sink, open_tracer(settings.tracing, deployment=replica.deployment, replica=replica.replica_tag)


def _deployment(cls: type, settings: Settings, *, max_ongoing_requests: int = MAX_ONGOING_BATCHES) -> serve.Deployment:
    name = cls.__name__.removesuffix("Deployment")
    decorate = serve.deployment(
        name=name,
        max_ongoing_requests=max_ongoing_requests,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=settings.batching.request_timeout_s + DRAIN_MARGIN_S,
        health_check_period_s=CHECK_PERIOD_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
    )
    return decorate(cls)


class _ReplicaCount:
    """How many batches an ingress may have in flight: the encoders' slots, shared among the ingresses."""

    def __init__(self, batches_per_encoder: int) -> None:
        self._batches_per_encoder = batches_per_encoder
        self._encoders, self._ingresses = 1, 1

    def slots(self) -> int:
        return math.ceil(self._encoders * self._batches_per_encoder / max(1, self._ingresses))

    async def follow(self) -> None:
        """Asks Serve again and again; a failed question leaves the last answer."""
        app = serve.get_replica_context().app_name
        while True:
            try:
                deployments = (await asyncio.to_thread(serve.status)).applications[app].deployments
                self._encoders = _running(deployments["Encoder"])
                self._ingresses = _running(deployments["Ingress"])
            except (RayError, RayServeException, KeyError) as error:  # no controller, or none that knows us yet
                logger.debug("the replicas could not be counted: %s", error)
            except Exception:
                logger.exception("the replicas could not be counted; the last count stays")
            await asyncio.sleep(COUNT_PERIOD_S)


def _running(deployment: DeploymentStatusOverview) -> int:
    # Serve's answer names states by plain words, where its types have an enumeration of them.
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")


def _refuse_several_nodes() -> None:
    nodes = len([node for node in ray.nodes() if node["Alive"]])  # type: ignore[no-untyped-call]  # Ray leaves it bare
    if nodes > 1:
        raise ConfigError(
            f"label_cache.url: {EMBEDDED!r} serves one node, this cluster has {nodes}; "
            "set it to the redis:// URL of a server that all nodes reach"
        )


def _address_of(cache_server: DeploymentHandle[Any] | None) -> Callable[[], Awaitable[str]] | None:
    """Asks the embedded server where it is; None where there is none."""
    if cache_server is None:
        return None

    async def ask() -> str:
        return await _call(cache_server.address.remote())

    return ask


async def _call(response: Awaitable[ResultT]) -> ResultT:
    """The response of another deployment, its errors brought back to ours."""
    try:
        return await response
    except RayTaskError as error:
        cause: object = error.cause
        if isinstance(cause, TokenAlignError):
            raise cause from error
        raise
    except (RayServeException, RayError) as error:
        raise ReplicaLostError(f"another deployment did not answer: {type(error).__name__}") from error
    except grpc.RpcError as error:
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in LOST:
            raise ReplicaLostError(f"another deployment did not answer: {error.code().name}") from error
        raise


async def _patiently(start: Callable[[], Awaitable[None]]) -> None:
    """Run `start` until the other deployments hold the same model; Serve's own start-up limit ends it otherwise."""
    while True:
        try:
            await start()
        except (FingerprintMismatchError, ReplicaLostError):
            await asyncio.sleep(MEET_PERIOD_S)
        else:
            return

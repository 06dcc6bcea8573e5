"""Spans of requests and batches, exported as OpenTelemetry; the extra `tracing` brings what that needs.

A request's span begins in the ingress, with the caller's W3C context where it brings one. Requests travel on in
batches: a batch's span is a child of the first request's, linked to all of them, and each of them is linked to it.
Context crosses processes as a `Trail`, and each process has a `Tracer` of its own. Attributes are numbers and names,
such as those of stages and errors, never text or labels. Where nothing is recorded `NO_TRACER` stands.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from deploy.settings import TracingSettings
from deploy.trail import NO_TRAIL, Trail, request_ids_of
from tokenalign.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as RecordedSpan

Attribute = str | bool | int | float

_SAMPLED = 0x01


class Span(Protocol):
    """A piece of work that is, or is not, recorded."""

    @property
    def trail(self) -> Trail:
        """What work for this piece carries; without `traceparent` where nothing is recorded."""

    def event(self, name: str) -> None:
        """Notes that something has just happened."""

    def set(self, name: str, value: Attribute) -> None:
        """Sets an attribute."""

    def rename(self, name: str) -> None:
        """Gives it another name."""

    def link(self, trail: Trail) -> None:
        """Links it to the work that has this trail."""

    def fail(self, reason: str) -> None:
        """Marks the work as failed; the reason is the name of an error, not its words."""


class Tracer(Protocol):
    """Makes spans, which end with the `with` that they are entered by; an error that passes through marks them."""

    def request(self, name: str, headers: Mapping[str, str], request_id: str) -> AbstractContextManager[Span]:
        """The span of a request that came with these headers, their names in lower case."""

    def work(self, name: str, trails: Sequence[Trail], **attributes: Attribute) -> AbstractContextManager[Span]:
        """The span of work for the owners of these trails; not recorded where none of theirs is."""

    def close(self) -> None:
        """Returns once what was recorded is exported, or given up."""


class NoSpan:
    """Records nothing."""

    def __init__(self, trail: Trail = NO_TRAIL) -> None:
        self.trail = trail

    def event(self, name: str) -> None:
        """See `Span.event`."""

    def set(self, name: str, value: Attribute) -> None:
        """See `Span.set`."""

    def rename(self, name: str) -> None:
        """See `Span.rename`."""

    def link(self, trail: Trail) -> None:
        """See `Span.link`."""

    def fail(self, reason: str) -> None:
        """See `Span.fail`."""


class NoTracer:
    """Makes spans that record nothing; request ids are handed on all the same."""

    def request(self, name: str, headers: Mapping[str, str], request_id: str) -> AbstractContextManager[Span]:
        """See `Tracer.request`."""
        return nullcontext(NoSpan(Trail((request_id,))))

    def work(self, name: str, trails: Sequence[Trail], **attributes: Attribute) -> AbstractContextManager[Span]:
        """See `Tracer.work`."""
        return nullcontext(NoSpan(trails[0] if len(trails) == 1 else Trail(request_ids_of(trails))))

    def close(self) -> None:
        """See `Tracer.close`."""


NO_TRACER = NoTracer()


def open_tracer(settings: TracingSettings, *, deployment: str, replica: str) -> Tracer:
    """The tracer that the settings ask for; `ConfigError` naming the extra where its packages are missing."""
    if settings.otlp_endpoint is None:
        return NO_TRACER
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "tracing.otlp_endpoint: spans are exported by packages that are not installed; "
            "pip install 'tokenalign[serve,tracing]', or set it to null"
        ) from error
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint)
    return OpenTelemetryTracer(exporter, settings.sample_ratio, deployment=deployment, replica=replica)


class OpenTelemetryTracer:
    """Spans through OpenTelemetry's SDK, exported in the background. It sets nothing that is global in the process."""

    def __init__(
        self,
        exporter: "SpanExporter",
        sample_ratio: float,
        *,
        deployment: str,
        replica: str,
        at_once: bool = False,
    ) -> None:
        """sample_ratio: of requests that bring no context; at_once: exports each span as it ends, for tests"""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            resource=Resource(
                {
                    "service.name": "tokenalign",
                    "service.instance.id": replica,
                    "tokenalign.deployment": deployment,
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("tokenalign")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str], request_id: str) -> Iterator[Span]:
        """See `Tracer.request`."""
        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        started = self._tracer.start_span(
            name,
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            {"tokenalign.request_id": request_id},
        )
        with self._ended(started, (request_id,)) as span:
            yield span

    @contextmanager
    def work(self, name: str, trails: Sequence[Trail], **attributes: Attribute) -> Iterator[Span]:
        """See `Tracer.work`."""
        request_ids = request_ids_of(trails)
        recorded = {trail.traceparent: trail for trail in trails if _is_sampled(trail.traceparent)}
        if not recorded:
            yield NoSpan(Trail(request_ids))
            return
        contexts = [
            self._propagator.extract({"traceparent": trail.traceparent, "tracestate": trail.tracestate})
            for trail in recorded.values()
        ]
        links = [self._trace.Link(self._trace.get_current_span(context).get_span_context()) for context in contexts]
        started = self._tracer.start_span(
            name,
            contexts[0],
            self._trace.SpanKind.INTERNAL,
            {f"tokenalign.{key}": value for key, value in attributes.items()},
            links if len(links) > 1 else None,
        )
        with self._ended(started, request_ids) as span:
            yield span

    def close(self) -> None:
        """See `Tracer.close`."""
        self._provider.shutdown()

    @contextmanager
    def _ended(self, span: "RecordedSpan", request_ids: tuple[str, ...]) -> Iterator[Span]:
        """The span as ours, ended on the way out. An error's words stay out of it, since they may quote a caller."""
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        trail = Trail(request_ids, carrier.get("traceparent", ""), carrier.get("tracestate", ""))
        own = _OpenTelemetrySpan(span, trail)
        try:
            yield own
        except BaseException as error:
            own.fail(type(error).__name__)
            raise
        finally:
            span.end()


class _OpenTelemetrySpan:
    def __init__(self, span: "RecordedSpan", trail: Trail) -> None:
        self._span = span
        self.trail = trail

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, value)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def link(self, trail: Trail) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": trail.traceparent})
        self._span.add_link(trace.get_current_span(context).get_span_context())

    def fail(self, reason: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", reason)
        self._span.set_status(Status(StatusCode.ERROR))


def _is_sampled(traceparent: str) -> bool:
    """Whether a W3C traceparent, 00-trace-span-flags, says that its span is recorded."""
    flags = traceparent.rpartition("-")[2]
    return bool(flags) and bool(int(flags, 16) & _SAMPLED)

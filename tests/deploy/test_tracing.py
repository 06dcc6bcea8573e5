"""A request's trace goes through all deployments and tells nothing of what was asked; it is off unless asked for."""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deploy.settings import Settings, TracingSettings
from deploy.tracing import NO_TRACER, OpenTelemetryTracer, open_tracer
from deploy.trail import NO_TRAIL, Trail
from tokenalign.errors import ConfigError

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"

BODY = {"text": "confidential words", "labels": ["secret label", "another one"]}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Where spans go."""
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> OpenTelemetryTracer:
    """Records each request."""
    return OpenTelemetryTracer(exporter, 1.0, deployment="Ingress", replica="r1", at_once=True)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """The spans that ended so far with that name, in the order of their ends."""
    return [span for span in exporter.get_finished_spans() if span.name == name]


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    return span.get_span_context().span_id


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


class TestAcrossDeployments:
    async def test_a_request_is_one_trace(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """Request, batch, score, labels, encode and pass are each other's children, below the caller's own span."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
            response = await stack.client.post("/v1/classify", json=BODY, headers=headers)
        assert response.status_code == 200
        found = {span.name: span for span in exporter.get_finished_spans()}
        chain = ["POST /v1/classify", "batch", "score", "encode", "pass"]
        assert {*chain, "labels"} <= found.keys()
        assert {span.get_span_context().trace_id for span in found.values()} == {int(TRACE, 16)}
        assert parent_of(found[chain[0]]) == int(PARENT, 16)
        for above, below in [*itertools.pairwise(chain), ("score", "labels")]:
            assert parent_of(found[below]) == id_of(found[above]), (above, below)
        assert {span.get_span_context().trace_state.get("vendor") for span in found.values()} == {"1"}

    async def test_requests_of_one_batch_are_linked(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """The batch is linked to every request, every request to the batch, and the pass is the batch's."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            await stack.together(*({**BODY, "text": f"words {i}"} for i in range(3)))
        requests = named(exporter, "POST /v1/classify")
        [batch], [score] = named(exporter, "batch"), named(exporter, "score")
        assert linked(batch) == {id_of(request) for request in requests}
        assert len(requests) == 3
        assert [linked(request) for request in requests] == [{id_of(batch)}] * 3
        assert parent_of(batch) in linked(batch)
        assert parent_of(score) == id_of(batch)
        assert batch.attributes is not None
        assert batch.attributes["tokenalign.texts"] == 3

    async def test_nothing_that_was_asked_is_told(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """No text, no label and no word of an error that quotes one is in any part of any span."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            for labels in (BODY["labels"], ["secret label", "secret label"]):
                for explain in (False, "all"):
                    await stack.post(text=BODY["text"], labels=labels, explain=explain)
            stack.failures = [ValueError("secret label")]
            assert (await stack.post(**BODY)).status_code == 500
        told = "\n".join(span.to_json() for span in exporter.get_finished_spans())
        assert "POST /v1/classify" in told
        assert not re.search("confidential|secret|words", told)

    async def test_what_was_not_sampled_is_not_recorded(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """The caller's flag is heeded in all deployments; ids of requests travel all the same."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            await stack.client.post("/v1/classify", json=BODY, headers={"traceparent": UNSAMPLED})
            assert exporter.get_finished_spans() == ()
            [batch] = stack.sent
            assert batch.trail.traceparent == ""
            assert len(batch.trail.request_ids) == 1

    async def test_probes_are_not_recorded(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """What asks every few seconds whether the service is well would bury the rest."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            for path in ("/health/live", "/health/ready", "/v2/health/ready", "/v1/model"):
                assert (await stack.client.get(path)).status_code == 200
        assert [span.name for span in exporter.get_finished_spans()] == ["GET /v1/model"]

    async def test_a_failed_request_is_marked(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """A 5xx and what led to it are errors, with the name of the error; a caller's mistake is none of ours."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            stack.failures = [ValueError("secret label")]
            await stack.post(**BODY)
            await stack.post(**{**BODY, "labels": []})
        failed, refused = named(exporter, "POST /v1/classify")
        [batch] = named(exporter, "batch")
        assert [span.status.is_ok for span in (failed, batch, refused)] == [False, False, True]
        assert (failed.attributes or {})["error.type"] == "500"
        assert (batch.attributes or {})["error.type"] == "ValueError"
        assert (refused.attributes or {})["http.response.status_code"] == 422

    async def test_stages_are_events(
        self, run_stack: Any, bert: Any, tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter
    ) -> None:
        """A request's span says when each stage ended, in order."""
        async with run_stack(bert, tracer=tracer) as stack:
            exporter.clear()
            await stack.ask(**BODY)
        [request] = named(exporter, "POST /v1/classify")
        assert [event.name for event in request.events] == ["read", "parse", "validate", "tokenise", "wait", "write"]


class TestOff:
    async def test_it_is_off(self, stack: Any) -> None:
        """As it comes nothing is recorded; a batch carries the ids of its requests and no context."""
        await stack.ask(**BODY)
        [batch] = stack.sent
        assert batch.trail == Trail(batch.trail.request_ids)
        assert len(batch.trail.request_ids) == 1

    def test_nothing_is_loaded(self) -> None:
        """Without an endpoint there is the tracer that does nothing, and no package of OpenTelemetry is needed."""
        assert open_tracer(Settings().tracing, deployment="Ingress", replica="r1") is NO_TRACER
        with NO_TRACER.work("batch", [NO_TRAIL, Trail(("a",)), Trail(("b", "a"))]) as span:
            assert span.trail == Trail(("a", "b"))


class TestOpening:
    def test_with_an_endpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An endpoint has spans exported there."""
        import opentelemetry.exporter.otlp.proto.http.trace_exporter as module

        made: list[Any] = []
        monkeypatch.setattr(module, "OTLPSpanExporter", _exporter_that_notes(made))
        settings = TracingSettings(otlp_endpoint="http://collector:4318/v1/traces", sample_ratio=1.0)
        tracer = open_tracer(settings, deployment="Ingress", replica="r1")
        with tracer.request("request", {}, "id"):
            pass
        tracer.close()
        assert made[0] == {"endpoint": "http://collector:4318/v1/traces"}
        [span] = made[1:]
        assert span.resource.attributes["service.instance.id"] == "r1"
        assert span.resource.attributes["tokenalign.deployment"] == "Ingress"

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error names the setting, and what to install."""
        monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
        settings = TracingSettings(otlp_endpoint="http://collector:4318/v1/traces")
        with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint.*'tokenalign\[serve,tracing\]'"):
            open_tracer(settings, deployment="Ingress", replica="r1")

    @pytest.mark.parametrize("url", ["collector:4318", "http://user:password@collector", "http://c/?key=1", ""])
    def test_endpoints_that_are_none(self, url: str) -> None:
        """A URL without a scheme, or with a secret in it, is refused: settings are logged."""
        with pytest.raises(ConfigError, match="otlp_endpoint") as caught:
            Settings.parse({"tracing": {"otlp_endpoint": url}})
        assert "password@" not in str(caught.value)

    def test_a_share_of_requests(self, exporter: InMemorySpanExporter) -> None:
        """sample_ratio is that of requests without a context; one that brings the flag is recorded all the same."""
        tracer = OpenTelemetryTracer(exporter, 0.0, deployment="Ingress", replica="r1", at_once=True)
        for headers in ({}, {"traceparent": "nonsense"}, {"traceparent": SAMPLED}):
            with tracer.request("request", headers, "id"):
                pass
        assert len(exporter.get_finished_spans()) == 1


def _exporter_that_notes(made: list[Any]) -> Callable[..., InMemorySpanExporter]:
    class Exporter(InMemorySpanExporter):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            made.append(options)

        def export(self, spans: Sequence[ReadableSpan]) -> Any:
            made.extend(spans)
            return super().export(spans)

    return Exporter

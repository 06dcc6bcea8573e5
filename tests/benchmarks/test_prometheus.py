"""What histograms say about a stretch of time."""

import pytest

from tests.benchmarks.prometheus import bucket_counts, histogram_sums, observed_between, quantile_bound

TEXT = """# TYPE ray_tokenalign_stage_seconds histogram
ray_tokenalign_stage_seconds_bucket{{le="0.1",stage="score",pid="1"}} 4.0
ray_tokenalign_stage_seconds_count{{deployment="Scorer",stage="score",pid="1"}} {first}
ray_tokenalign_stage_seconds_sum{{deployment="Scorer",stage="score",pid="1"}} {first_sum}
ray_tokenalign_stage_seconds_count{{deployment="Scorer",stage="score",pid="2"}} 6.0
ray_tokenalign_stage_seconds_sum{{deployment="Scorer",stage="score",pid="2"}} 0.6
ray_tokenalign_batch_texts_count{{deployment="Ingress"}} {first}
ray_tokenalign_batch_texts_sum{{deployment="Ingress"}} 64.0
ray_serve_http_request_latency_ms_count{{status_code="200"}} 3.0
ray_serve_http_request_latency_ms_sum{{status_code="200"}} 30.0
ray_node_cpu_count{{ip="x"}} 2.0
"""


def test_only_what_came_since() -> None:
    """Means are of the new values alone, replicas added up, seconds told in ms; what had none is left out."""
    before = histogram_sums(TEXT.format(first="4.0", first_sum="0.4"))
    after = histogram_sums(TEXT.format(first="8.0", first_sum="2.4"))
    batch, stage = observed_between(before, after)
    assert (batch.name, batch.count, batch.mean, batch.unit) == ("tokenalign_batch_texts", 4, 0.0, "")
    assert (stage.name, stage.count, stage.unit) == ("tokenalign_stage_seconds", 4, "ms")
    assert stage.mean == pytest.approx(500)
    assert stage.described == "deployment Scorer, stage score"


def test_a_histogram_that_is_new() -> None:
    """Everything in it came since."""
    rows = observed_between({}, histogram_sums(TEXT.format(first="4.0", first_sum="0.4")))
    assert [(row.name, row.count) for row in rows] == [
        ("serve_http_request_latency_ms", 3),
        ("tokenalign_batch_texts", 4),
        ("tokenalign_stage_seconds", 10),
    ]
    assert [row.mean for row in rows] == pytest.approx([10, 16, 100])


def test_no_metrics() -> None:
    """An agent that doesn't answer is no error."""
    assert observed_between(histogram_sums(""), histogram_sums("")) == []


def test_bounds_of_quantiles() -> None:
    """Of the values that came since, with the tags asked for; a share that no bucket but the last holds is infinity."""

    def buckets(*counts: int) -> dict[float, float]:
        lines = [
            f'ray_t_seconds_bucket{{le="{bound}",status="{status}",pid="{pid}"}} {count}.0'
            for pid in (1, 2)
            for status in (200, 429)
            for bound, count in zip(("0.01", "0.05", "+Inf"), counts, strict=True)
        ]
        return bucket_counts("\n".join(lines), "t_seconds", status="429")

    before, after = buckets(5, 5, 5), buckets(95, 104, 105)
    assert after == {0.01: 190.0, 0.05: 208.0, float("inf"): 210.0}
    assert [quantile_bound(before, after, share) for share in (0.5, 0.9, 0.99, 0.999)] == [
        0.01,
        0.01,
        0.05,
        float("inf"),
    ]
    assert quantile_bound(after, after, 0.5) is None
    assert quantile_bound({}, {}, 0.5) is None

"""The application's own metrics besides the label cache's: names, and counters that are read into them."""

from collections.abc import Iterator, Mapping

from deploy.telemetry import Metric, Reading

# Up to the time limit of a request; close together where answers should be.
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def _counter(name: str, description: str, *tag_keys: str) -> Metric:
    return Metric(f"tokenalign_{name}_total", "counter", description, tag_keys)


def _gauge(name: str, description: str, *tag_keys: str) -> Metric:
    return Metric(f"tokenalign_{name}", "gauge", description, tag_keys)


def _seconds(name: str, description: str, *tag_keys: str) -> Metric:
    return Metric(f"tokenalign_{name}_seconds", "histogram", description, tag_keys, _SECONDS)


MODEL_INFO = _gauge(
    "model_info", "1 for each model that this replica serves, 0 for one of before.", "model", "fingerprint"
)

# The ingress
REQUEST_SECONDS = _seconds(
    "http_request",
    "Time from a request's arrival in the ingress to the last byte of its answer; 499 where the caller left before.",
    "route",
    "status",
)
REQUESTS_IN_PROGRESS = _gauge("http_requests_in_progress", "Requests that were not answered yet.")
KEY_REQUESTS = _counter("key_requests", "Requests that came with each API key, by its name.", "key")
KEY_REFUSALS = _counter(
    "refused_requests",
    "Requests that were not let through: no_key, wrong_key, not_local (without keys), or quota, of a key by its name.",
    "key",
    "reason",
)
STAGE_SECONDS = _counter(
    "ingress_stage_seconds",
    "Time of requests in each stage: read, parse, validate, tokenise, wait (queued, encoded and scored), write.",
    "stage",
)
STAGE_RUNS = _counter("ingress_stage_runs", "How often requests went through each stage.", "stage")
TEXTS = _counter("texts", "Texts of requests that were tokenised.")
TEXT_TOKENS = _counter("text_tokens", "Tokens of these texts, as many as are read.")
TRUNCATED_TEXTS = _counter("truncated_texts", "Texts of which the end was not read.")
QUEUED_TEXTS = _gauge("queued_texts", "Texts that wait for a batch.")
QUEUED_TOKENS = _gauge("queued_tokens", "Tokens of the texts that wait for a batch.")
BATCHES_IN_FLIGHT = _gauge("batches_in_flight", "Batches that were sent and have not come back.")
BATCH_SLOTS = _gauge("batch_slots", "Batches that may be in flight.")
BATCH_RETRIES = _counter("batch_retries", "Batches that were sent a second time, by what befell the first.", "reason")
QUEUE_WAIT_SECONDS = _seconds("queue_wait", "Time that the oldest text of a batch had waited when it was taken.")
BATCH_SECONDS = _seconds("batch", "Time from sending a batch until its scores are back.")
BATCH_TEXTS = Metric(
    "tokenalign_batch_texts", "histogram", "Texts of a batch.", (), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)
)
BATCH_TOKENS = Metric(
    "tokenalign_batch_tokens",
    "histogram",
    "Tokens of a batch, those of equal texts once.",
    (),
    (64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536),
)
BATCH_FILL = Metric(
    "tokenalign_batch_fill_ratio",
    "histogram",
    "Tokens of a batch as a part of batching.max_batch_tokens; above 1 where a single text has more.",
    (),
    (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
LABEL_SET_LOOKUPS = _counter(
    "label_set_lookups", "Look-ups of label sets by id: where they were found, or why not.", "result"
)
LABEL_SET_CHANGES = _counter("label_set_changes", "Label sets that were defined and deleted here.", "change")
LABEL_SET_DAMAGED = _counter("label_sets_damaged", "Values of the store that were no definition of their set.")

# The scorer
SCORER_STAGE_SECONDS = _seconds(
    "scorer_stage",
    "Time of a batch until its documents were encoded and its labels known, and from then until it was scored.",
    "stage",
)
TRUNCATED_LABELS = _counter("truncated_labels", "Labels of which the end is not read, counted when a set is first met.")

# The encoder
ENCODER_TOKENS = _counter("encoder_tokens", "Tokens that were encoded.", "kind")
ENCODER_PASS_SECONDS = _seconds(
    "encoder_pass", "Time of a forward pass, projection and waiting for a thread included.", "kind"
)
ENCODER_TOKENS_IN_HAND = _gauge("encoder_tokens_in_hand", "Tokens that were received and have not gone back.")
ENCODER_TOKENS_QUEUED = _gauge(
    "encoder_tokens_queued", "Tokens that waited in the ingress that sent last; the autoscaler goes by it."
)


class StageTimes:
    """Time of each stage, summed up over requests: a sum and a count, which cost a request less than a histogram."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._runs: dict[str, int] = {}

    def add(self, stage: str, seconds: float) -> None:
        """Adds one run of a stage."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        self._runs[stage] = self._runs.get(stage, 0) + 1

    def readings(self) -> Iterator[Reading]:
        """What has been added up."""
        for stage, seconds in self._seconds.items():
            yield Reading(STAGE_SECONDS, seconds, (stage,))
        for stage, runs in self._runs.items():
            yield Reading(STAGE_RUNS, runs, (stage,))


class ModelInfo:
    """The models of this replica as a gauge; one out of service is told as 0, since a gauge stays as it was."""

    def __init__(self) -> None:
        self._met: set[tuple[str, str]] = set()

    def readings(self, fingerprints: Mapping[str, str]) -> Iterator[Reading]:
        """1 for each model that is served now, given by name, and 0 for all others that ever were."""
        now = set(fingerprints.items())
        self._met |= now
        for model in sorted(self._met):
            yield Reading(MODEL_INFO, float(model in now), model)

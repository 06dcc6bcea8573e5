"""The settings of the whole application: one object, validated once, from the `args` of serve_config.yaml."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tokenalign.config import describe_validation
from tokenalign.errors import ConfigError
from tokenalign.text import DEFAULT_MAX_WINDOWS

EMBEDDED = "embedded"
NO_STORE = "none"
MIB = 1024 * 1024
STORE_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")

_HOST = r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:,/?#\s]+)(:\d{1,5})?"
_SENTINEL_URL = re.compile(rf"{_HOST}(,{_HOST})*/[^/?#]+(/\d*)?", re.ASCII)
_SET_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CLUSTER_URL = re.compile(rf"{_HOST}(,{_HOST})*/?", re.ASCII)


class _Section(BaseModel):
    # An error must not repeat its input, which may be a password that was put where none belongs.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True)


class Secret(_Section):
    """Where a secret is read from, in the replica: settings never hold one, since Serve logs an app's arguments.

    env: name of an environment variable; file: path of a file, whose last newline is dropped
    """

    env: str | None = Field(default=None, min_length=1)
    file: Path | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Secret":
        if (self.env is None) == (self.file is None):
            raise ValueError("give either env or file")
        return self

    def read(self, what: str) -> str:
        """The secret itself; `ConfigError` naming `what` and the source when it isn't there or is empty."""
        if self.env is not None:
            value, source = os.environ.get(self.env, ""), f"environment variable {self.env}"
        else:
            assert self.file is not None  # noqa: S101  the validator saw to it
            source = f"file {self.file}"
            try:
                value = self.file.read_text(encoding="utf-8").removesuffix("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{what}: {source} can't be read; correct the path or its permissions") from error
        if not value:
            raise ConfigError(f"{what}: {source} is empty or missing; put the secret there")
        return value


class HeadSettings(_Section):
    """Another head on the same encoder: as in `ModelSettings`, where each of these is of the default head."""

    id_or_path: str = Field(min_length=1)
    revision: str | None = None
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    tensor_overrides: dict[str, str] = Field(default_factory=dict)


_HeadName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]


class ModelSettings(_Section):
    """Which head and encoder are served.

    id_or_path: a head: the name of a shipped one, a folder, or a hub id; null is the shipped default
    backbone: a folder or reference to take the encoder from instead of the one that the head names
    device, dtype: of the encoder; "auto" is cuda, mps or cpu, and bfloat16, float16 or float32 there
    scorer_device: of the heads in a scorer; for one on a GPU, Ray must set a share of it aside (`num_gpus`)
    project_on_encoder: send projected rows (width of the head) instead of token states (width of the encoder)
    config_overrides, tensor_overrides: for a head that another program wrote
    heads: others on the same encoder, by the name with which a request asks for one as its `model`
    """

    id_or_path: str | None = None
    revision: str | None = None
    backbone: str | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cache_dir: Path | None = None
    local_files_only: bool = False
    scorer_device: str = "cpu"
    project_on_encoder: bool = True
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    tensor_overrides: dict[str, str] = Field(default_factory=dict)
    heads: dict[_HeadName, HeadSettings] = Field(default_factory=dict)


class BatchingSettings(_Section):
    """How an ingress forms batches.

    max_batch_tokens, max_batch_texts: of one batch that goes to the encoder
    max_queue_texts, max_queue_tokens: that wait in one ingress; past either, a request gets 429
    max_queue_wait_s: so it does while what waits will take longer than this at the pace of late, unless
      `min_open_requests` aren't yet being answered: so many callers are no overload, however long they wait
    batches_per_encoder: in flight for each encoder replica, so that it computes one while the next is on its way
    request_timeout_s: past it a request gets 504
    """

    max_batch_tokens: int = Field(default=4_096, ge=16, le=1_048_576)
    max_batch_texts: int = Field(default=64, ge=1, le=65_536)
    max_queue_texts: int = Field(default=2_048, ge=1, le=1_000_000)
    max_queue_tokens: int = Field(default=262_144, ge=128, le=100_000_000)
    max_queue_wait_s: float = Field(default=0.1, gt=0, le=3_600)
    min_open_requests: int = Field(default=64, ge=0, le=1_000_000)
    batches_per_encoder: int = Field(default=2, ge=1, le=64)
    request_timeout_s: float = Field(default=30.0, gt=0, le=3_600)


class LimitSettings(_Section):
    """What one request may bring; past a limit it is refused with the limit's name.

    max_body_s: that a body may take to arrive
    """

    max_texts: int = Field(default=1_024, ge=1, le=1_000_000)
    max_labels: int = Field(default=2_048, ge=2, le=1_000_000)
    max_text_chars: int = Field(default=100_000, ge=1, le=10_000_000)
    max_windows: int = Field(default=DEFAULT_MAX_WINDOWS, ge=1, le=65_536)
    max_body_bytes: int = Field(default=16 * MIB, ge=1_024, le=1_024 * MIB)
    max_body_s: float = Field(default=30.0, gt=0, le=3_600)


_KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_KeyHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^\s/@?#*]+)$")]


class AccessSettings(_Section):
    """Who may ask, and how much.

    keys_file: lines of a name and the sha256 of a key, on every node; it is read again when it changes
    keys: the same in place, a list of hashes by name; a hash of 256 random bits may be seen by everybody
    allow_unauthenticated: that whoever reaches the service may ask. Without this and without keys, it answers callers
      of its own machine alone
    max_concurrent_per_key, requests_per_s_per_key, burst_per_key: of each key in each ingress replica; the last one is
      what may come at once after a pause, null is the requests of a second
    cors_origins: whose pages browsers may let ask, besides the service's own; * is everybody's
    """

    keys_file: Path | None = None
    keys: dict[_KeyName, tuple[_KeyHash, ...]] = Field(default_factory=dict)
    allow_unauthenticated: bool = False
    max_concurrent_per_key: int | None = Field(default=None, ge=1, le=1_000_000)
    requests_per_s_per_key: float | None = Field(default=None, gt=0, le=1_000_000)
    burst_per_key: int | None = Field(default=None, ge=1, le=1_000_000)
    cors_origins: tuple[_Origin, ...] = ()

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self.keys_file is not None or bool(self.keys)

    @model_validator(mode="after")
    def _check_fit(self) -> "AccessSettings":
        """A setting without an effect is a mistake, and here one that opens a door or leaves it open."""
        if self.has_keys and self.allow_unauthenticated:
            raise ValueError("allow_unauthenticated: is for a service without keys; leave it out, or the keys")
        for name in ("max_concurrent_per_key", "requests_per_s_per_key"):
            if getattr(self, name) is not None and not self.has_keys:
                raise ValueError(f"{name}: is for each key, and there are none; set keys_file, or leave it out")
        if self.burst_per_key is not None and self.requests_per_s_per_key is None:
            raise ValueError("burst_per_key: goes with requests_per_s_per_key; set that too, or leave this out")
        hashes = [found for listed in self.keys.values() for found in listed]
        if len(set(hashes)) != len(hashes):
            raise ValueError("keys: one hash is listed twice; list it once, under the name of who has the key")
        if not all(self.keys.values()):
            raise ValueError("keys: a name has an empty list; give it a hash, or leave the name out")
        return self


class LabelCacheSettings(_Section):
    """Where label representations are kept.

    url: "embedded" (a Valkey server that the application runs itself, on one node), "none", or one of
      redis://host:port/db, unix:///path, redis+sentinel://host:port,host:port/service/db and
      redis+cluster://host:port,host:port, with rediss for TLS, and without a password
    username, password: of the store; sentinel_username, sentinel_password: of the Sentinels that are asked for it
    tls_ca_file: who may have signed the server's certificate, instead of whom the system trusts; tls_cert_file,
      tls_key_file: our own certificate. All PEM, on every node
    signing_key: with it, entries that were not written with it are refused
    tenant_per_key: callers with different keys share neither cached labels nor label sets; where no keys are asked for,
      callers with different `Authorization` headers
    ttl_s: of an entry, shortened by a random part of `ttl_jitter`; a list in use is refreshed
    memory_bytes: of the tier within each scorer
    connect_timeout_s, read_timeout_s: of one attempt to connect, and of one answer
    store_budget_s: the store's share of one request; past it the labels are encoded instead
    lock_ttl_s, lock_wait_s: how long a label stays the task of a replica that was killed while encoding it, and how
      long one request waits for labels that other replicas encode; a wait of 0 has each replica encode for itself
    breaker_failures, breaker_open_s: after so many failures in a row the store is not asked for so long
    """

    url: str = EMBEDDED
    username: str | None = None
    password: Secret | None = None
    sentinel_username: str | None = None
    sentinel_password: Secret | None = None
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    signing_key: Secret | None = None
    tenant_per_key: bool = False
    namespace: str = Field(default="tokenalign", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    ttl_s: float = Field(default=86_400.0, ge=1, le=31_536_000)
    ttl_jitter: float = Field(default=0.1, ge=0, lt=0.5)
    memory_bytes: int = Field(default=256 * MIB, ge=0)
    embedded_max_bytes: int = Field(default=256 * MIB, ge=MIB)
    connect_timeout_s: float = Field(default=0.5, gt=0, le=60)
    read_timeout_s: float = Field(default=0.5, gt=0, le=60)
    store_budget_s: float = Field(default=1.0, gt=0, le=60)
    lock_ttl_s: float = Field(default=3.0, ge=0.1, le=600)
    lock_wait_s: float = Field(default=10.0, ge=0, le=600)
    breaker_failures: int = Field(default=5, ge=1, le=1_000)
    breaker_open_s: float = Field(default=5.0, gt=0, le=3_600)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url in (EMBEDDED, NO_STORE):
            return url
        scheme, _, rest = url.partition("://")
        if scheme not in STORE_SCHEMES:
            raise ValueError(f"must be {EMBEDDED}, {NO_STORE}, {'://…, '.join(STORE_SCHEMES)}://…")
        if "+" in scheme:
            if "@" in rest:
                raise ValueError("holds a user or a password; give them as username and password")
            form = _SENTINEL_URL if scheme.endswith("+sentinel") else _CLUSTER_URL
            if form.fullmatch(rest) is None:
                raise ValueError(
                    "must be redis+sentinel://host:port,host:port/service/db or redis+cluster://host:port,host:port"
                )
            return url
        parts = urlsplit(url)
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError(
                "holds a password; settings are logged, so give it as password: {env: NAME} or {file: PATH}"
            )
        return url

    @model_validator(mode="after")
    def _check_fit(self) -> "LabelCacheSettings":
        """A setting without an effect is a mistake: it shows that something else was meant."""
        reasons = {
            ("sentinel_username", "sentinel_password"): (
                "+sentinel://" not in self.url,
                "is for Sentinels; set url to redis+sentinel://…",
            ),
            ("tls_ca_file", "tls_cert_file", "tls_key_file"): (
                not self.url.startswith("rediss"),
                "is for TLS; set url to rediss://… or rediss+…",
            ),
        }
        for names, (unused, reason) in reasons.items():
            for name in names:
                if unused and getattr(self, name) is not None:
                    raise ValueError(f"{name} {reason}, or leave it out")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together; give both or neither")
        return self


class WarmedList(_Section):
    """A file of labels, one a line or JSON objects, on every node; and what the label set is called."""

    file: Path
    name: str | None = Field(default=None, min_length=1, max_length=200)


class LabelSetSettings(_Section):
    """Lists that are kept under an id.

    warm: are known, and their labels encoded, before the application is ready
    memory_ttl_s: an ingress uses a set for so long without asking the store, so another's delete is heeded after that
    memory_bytes: of the sets in an ingress
    max_bytes: of one set in the store, where it takes room until it is deleted
    near_duplicate_similarity: from which on two labels are told to be hardly told apart
    """

    warm: tuple[WarmedList, ...] = ()
    memory_ttl_s: float = Field(default=10.0, gt=0, le=3_600)
    memory_bytes: int = Field(default=16 * MIB, ge=0)
    max_bytes: int = Field(default=MIB, ge=1_024, le=64 * MIB)
    near_duplicate_similarity: float = Field(default=0.9, gt=0, le=1)


class DialectSettings(_Section):
    """What the interfaces of other programs need to know.

    predict_label_set: which labels `/predict` scores against, since its requests bring none: the id of a label set, or
      the name of one of `label_sets.warm`
    """

    predict_label_set: str | None = Field(default=None, min_length=1, max_length=200)


class ThreadSettings(_Section):
    """Computing threads of each replica; 0 is one per core of the machine."""

    encoder: int = Field(default=0, ge=0, le=1_024)
    scorer: int = Field(default=1, ge=0, le=1_024)


class HealthSettings(_Section):
    """When a replica is taken for broken, and replaced.

    max_pass_s: a forward pass that takes longer counts as one that never ends. Well above the longest that there is on
      a busy machine, or replicas that are merely slow would be replaced
    """

    max_pass_s: float = Field(default=60.0, gt=0, le=86_400)


class TracingSettings(_Section):
    """Whether requests are traced.

    otlp_endpoint: the URL that takes spans as OTLP over HTTP, such as http://collector:4318/v1/traces; null is off
    sample_ratio: of the requests that bring no traceparent; one that does says itself whether it is recorded
    """

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s@?#]+$")
    sample_ratio: float = Field(default=0.01, ge=0, le=1)


class Settings(_Section):
    """Everything that the application needs to know besides the deployments' own options."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    batching: BatchingSettings = Field(default_factory=BatchingSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    access: AccessSettings = Field(default_factory=AccessSettings)
    label_cache: LabelCacheSettings = Field(default_factory=LabelCacheSettings)
    label_sets: LabelSetSettings = Field(default_factory=LabelSetSettings)
    dialects: DialectSettings = Field(default_factory=DialectSettings)
    threads: ThreadSettings = Field(default_factory=ThreadSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)

    @model_validator(mode="after")
    def _check_fit(self) -> "Settings":
        if self.label_sets.warm and self.label_cache.url == NO_STORE:
            raise ValueError(
                "label_sets.warm: label sets are kept in the label store, and label_cache.url is none; "
                f"set it to {EMBEDDED} or a URL, or leave warm out"
            )
        predicted, listed = self.dialects.predict_label_set, [warmed.name for warmed in self.label_sets.warm]
        if predicted is not None and predicted not in listed and not _SET_ID.fullmatch(predicted):
            raise ValueError(
                "dialects.predict_label_set: is neither the id of a label set, which has 32 hex digits, nor the name "
                "of one of label_sets.warm; correct it, or list the file there under this name"
            )
        return self

    @classmethod
    def parse(cls, values: Any) -> "Settings":
        """The validated settings; `ConfigError` names every key at fault."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"settings: {describe_validation(error)}") from error

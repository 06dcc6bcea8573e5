"""From settings to a store that can be used at once and connects later."""

import ssl
from collections.abc import Awaitable, Callable

from deploy.label_cache.breaker import BreakerStore
from deploy.label_cache.following import FollowingStore
from deploy.label_cache.redis_clients import ConnectionOptions
from deploy.label_cache.redis_store import RedisStore
from deploy.label_cache.store import Store
from deploy.settings import EMBEDDED, NO_STORE, LabelCacheSettings, Secret
from tokenalign.errors import ConfigError


def open_store(settings: LabelCacheSettings, embedded_url: Callable[[], Awaitable[str]] | None = None) -> Store | None:
    """The store that the settings name, behind a breaker; None where they name none. Reads secrets and certificates.

    embedded_url: gives the embedded server's address; without it such a store can't be opened. Raises `ConfigError`.
    """
    if settings.url == NO_STORE:
        return None
    if settings.url == EMBEDDED:
        if embedded_url is None:
            raise ConfigError(f"label_cache.url is {EMBEDDED!r}, but no server is embedded here; give it a URL")
        inner: Store = FollowingStore(embedded_url, lambda url: RedisStore.from_url(url, _timeouts_alone(settings)))
    else:
        options = _connection_options(settings)
        _check_certificates(options)
        try:
            inner = RedisStore.from_url(settings.url, options)
        except ValueError as error:
            raise ConfigError(f"label_cache.url: {error}") from error
    return BreakerStore(
        inner,
        failures=settings.breaker_failures,
        open_s=settings.breaker_open_s,
        # A caller's deadline may end each call before a timeout does; half of either is no sound store's time.
        patience_s=min(settings.read_timeout_s, settings.store_budget_s) / 2,
    )


def _timeouts_alone(settings: LabelCacheSettings) -> ConnectionOptions:
    """The embedded server's address has its password, and its clients are on the same machine."""
    return ConnectionOptions(connect_timeout_s=settings.connect_timeout_s, read_timeout_s=settings.read_timeout_s)


def _connection_options(settings: LabelCacheSettings) -> ConnectionOptions:
    return ConnectionOptions(
        username=settings.username,
        password=_read(settings.password, "password"),
        sentinel_username=settings.sentinel_username,
        sentinel_password=_read(settings.sentinel_password, "sentinel_password"),
        tls_ca_file=settings.tls_ca_file,
        tls_cert_file=settings.tls_cert_file,
        tls_key_file=settings.tls_key_file,
        connect_timeout_s=settings.connect_timeout_s,
        read_timeout_s=settings.read_timeout_s,
    )


def _read(secret: Secret | None, name: str) -> str | None:
    return secret.read(f"label_cache.{name}") if secret is not None else None


def _check_certificates(options: ConnectionOptions) -> None:
    """Files that can't be used would otherwise show as a store that can't be reached, for ever."""
    context = ssl.create_default_context()
    try:
        if options.tls_ca_file is not None:
            context.load_verify_locations(options.tls_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"label_cache.tls_ca_file: {options.tls_ca_file} can't be used: {error}; give a file of PEM certificates"
        ) from error
    try:
        if options.tls_cert_file is not None:
            context.load_cert_chain(options.tls_cert_file, options.tls_key_file, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"label_cache.tls_cert_file, label_cache.tls_key_file: {options.tls_cert_file} and {options.tls_key_file} "
            f"can't be used: {error}; give a PEM certificate and its key, without a password"
        ) from error


def _no_password() -> str:
    """What OpenSSL gets instead of asking at the terminal for the password of a key."""
    return ""

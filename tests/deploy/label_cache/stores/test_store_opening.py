"""From settings to stores: every form of address, and every mistake named before anything is asked of a server."""

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.label_cache import StoreError
from deploy.label_cache.breaker import BreakerStore
from deploy.label_cache.opening import open_store
from deploy.label_cache.redis_clients import ConnectionOptions, open_client
from deploy.label_cache.redis_store import RedisStore
from deploy.settings import LabelCacheSettings, Settings
from tokenalign.errors import ConfigError


def settings(**values: Any) -> LabelCacheSettings:
    return Settings.parse({"label_cache": values}).label_cache


class TestSettings:
    @pytest.mark.parametrize(
        "url",
        [
            "redis+sentinel://a:1,b:2/main/3",
            "rediss+sentinel://a/main",
            "redis+sentinel://[::1]:1,[::2]/main",
            "redis+cluster://a:1,b,[::1]:3",
            "rediss+cluster://a/",
        ],
    )
    def test_addresses_of_many_hosts(self, url: str) -> None:
        """Sentinels with a service and a cluster's nodes are taken, and can be opened."""
        assert open_store(settings(url=url)) is not None

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"url": "redis+sentinel://a:1,b:2"}, "must be redis+sentinel://host:port"),
            ({"url": "redis+sentinel://a:1,,b:2/main"}, "must be redis+sentinel://host:port"),
            ({"url": "redis+sentinel://a:port/main"}, "must be redis+sentinel://host:port"),
            ({"url": "redis+sentinel://a/main/db"}, "must be redis+sentinel://host:port"),
            ({"url": "redis+cluster://a:1/2"}, "redis+cluster://host:port,host:port"),
            ({"url": "redis+cluster://"}, "redis+cluster://host:port,host:port"),
            ({"url": "redis+cluster://a?ssl=1"}, "redis+cluster://host:port,host:port"),
            ({"url": "redis+sentinel://:hidden@a/main"}, "user or a password; give them as username and password"),
            ({"url": "redis+other://a"}, "must be embedded, none, redis://"),
            ({"url": "redis://a", "tls_ca_file": "f"}, "tls_ca_file is for TLS; set url to rediss://"),
            ({"url": "rediss://a", "tls_cert_file": "f"}, "tls_cert_file and tls_key_file go together"),
            ({"url": "rediss+cluster://a", "tls_key_file": "f"}, "tls_cert_file and tls_key_file go together"),
            ({"url": "redis://a", "sentinel_username": "u"}, "sentinel_username is for Sentinels; set url to"),
            ({"url": "redis://a", "sentinel_password": {"env": "A"}}, "sentinel_password is for Sentinels"),
            ({"breaker_failures": 0}, "breaker_failures"),
            ({"breaker_open_s": 0}, "breaker_open_s"),
        ],
    )
    def test_mistakes(self, values: dict[str, Any], words: str) -> None:
        """Each is named with what to do, and no password is repeated."""
        with pytest.raises(ConfigError, match=rf"label_cache.*{re.escape(words)}") as caught:
            settings(**values)
        assert "hidden" not in str(caught.value)


class TestOpenStore:
    def test_none(self) -> None:
        """The word "none" is no store."""
        assert open_store(settings(url="none")) is None

    def test_embedded_without_a_server(self) -> None:
        """Where no server is embedded the word can't be meant."""
        with pytest.raises(ConfigError, match=r"label_cache\.url is 'embedded'"):
            open_store(settings())

    async def test_embedded_asks_for_the_address_at_its_first_use(self) -> None:
        """Nothing is asked before, and a server that can't be found is a failed connection."""
        asked = 0

        async def address() -> str:
            nonlocal asked
            asked += 1
            raise OSError("none here")

        store = open_store(settings(), address)
        assert isinstance(store, BreakerStore)
        assert asked == 0
        with pytest.raises(StoreError) as caught:
            await store.ping()
        assert (caught.value.reason, asked) == ("connect", 1)
        await store.close()

    async def test_the_breaker_is_as_set(self) -> None:
        """It opens after as many failures as the settings say."""
        store = open_store(settings(url="redis://127.0.0.1:1", breaker_failures=2, breaker_open_s=60))
        assert store is not None
        reasons = []
        for _ in range(3):
            with pytest.raises(StoreError) as caught:
                await store.ping()
            reasons.append(caught.value.reason)
        assert reasons == ["connect", "connect", "open"]
        await store.close()

    def test_a_missing_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A password that isn't where it should be is named, for servers and for Sentinels."""
        monkeypatch.delenv("NO_SUCH_SECRET", raising=False)
        secret = {"env": "NO_SUCH_SECRET"}
        with pytest.raises(ConfigError, match=r"label_cache\.password: .*NO_SUCH_SECRET"):
            open_store(settings(url="redis://a", password=secret))
        with pytest.raises(ConfigError, match=r"label_cache\.sentinel_password: .*NO_SUCH_SECRET"):
            open_store(settings(url="redis+sentinel://a/main", sentinel_password=secret))

    def test_options_that_redis_does_not_know(self) -> None:
        """An address that nobody could use is an error at the start, not at the first request."""
        with pytest.raises(ConfigError, match=r"label_cache\.url: .*no_such_option"):
            open_store(settings(url="redis://a?no_such_option=1"))

    def test_certificates_that_can_not_be_used(self, tmp_path: Path, certificates: Any) -> None:
        """A missing or a wrong file is named with its setting, instead of a store that is never reached."""
        wrong = tmp_path / "wrong.pem"
        wrong.write_text("no certificate")
        for path in (tmp_path / "missing.pem", wrong):
            with pytest.raises(ConfigError, match=rf"label_cache\.tls_ca_file: {re.escape(str(path))} can't be used"):
                open_store(settings(url="rediss://a", tls_ca_file=path))
            with pytest.raises(ConfigError, match=rf"label_cache\.tls_cert_file.*{re.escape(str(path))}"):
                open_store(settings(url="rediss://a", tls_cert_file=certificates.client, tls_key_file=path))

    @pytest.mark.redis
    async def test_as_an_application_has_it(
        self, tls_server: Any, certificates: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """TLS, our own certificate, a user, and its password from a file: all of it from settings."""
        (tmp_path / "password").write_text("word\n")
        store = open_store(
            settings(
                url=tls_server.url,
                username="cache",
                password={"file": tmp_path / "password"},
                tls_ca_file=certificates.ca,
                tls_cert_file=certificates.client,
                tls_key_file=certificates.key_of(certificates.client),
                read_timeout_s=30,
                connect_timeout_s=30,
            )
        )
        assert store is not None
        await store.set_many({"a": b"A"}, 60)
        assert await store.get_many(["a"]) == [b"A"]
        await store.close()


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "redis+sentinel://a:1",
            "redis+sentinel://a:1/main/none",
            "redis+sentinel://a:1/main?db=2",
            "redis+cluster://a:1/2",
            "redis+cluster://a b:1",
            "redis+cluster://:hidden@a:1",
            "redis+sentinel://u:hidden@a:1/main",
        ],
    )
    def test_what_can_not_work_is_refused_at_once(self, url: str) -> None:
        """The error has the forms that can, and not the password."""
        with pytest.raises(ValueError, match="give redis://host:port") as caught:
            RedisStore.from_url(url)
        assert "hidden" not in str(caught.value)

    def test_a_user_in_the_url_and_a_password_beside_it(self) -> None:
        """Both reach the server: a user is no secret and may be part of the address."""
        client, _ = open_client("redis://user@host", ConnectionOptions(password="word"))
        values = client.get_connection_kwargs()
        assert (values["username"], values["password"]) == ("user", "word")

    def test_passwords_are_not_shown(self) -> None:
        """Options can be logged."""
        shown = repr(ConnectionOptions(username="user", password="hidden", sentinel_password="hidden"))
        assert "user" in shown
        assert "hidden" not in shown

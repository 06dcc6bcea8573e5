"""Settings: every mistake is named with its key, and no secret is among them."""

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.settings import Secret, Settings
from tokenalign.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_shipped_file_is_valid() -> None:
    """The `args` of the project's serve_config.yaml parse, and say what the defaults say where they repeat them."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    [app] = config["applications"]
    assert Settings.parse(app["args"]) == Settings.parse({})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"modle": {}}, "modle: unknown key"),
        ({"model": {"dtpye": "auto"}}, "model.dtpye: unknown key"),
        ({"model": {"dtype": "float64"}}, "model.dtype: .*'float32'"),
        ({"batching": {"max_batch_tokens": 0}}, "batching.max_batch_tokens: .*greater than or equal to 16"),
        ({"batching": {"max_batch_tokens": "many"}}, "batching.max_batch_tokens: .*integer"),
        ({"batching": {"request_timeout_s": 0}}, "batching.request_timeout_s: .*greater than 0"),
        ({"batching": {"request_timeout_s": float("nan")}}, "batching.request_timeout_s"),
        ({"limits": {"max_labels": 1}}, "limits.max_labels: .*greater than or equal to 2"),
        ({"limits": {"max_body_bytes": -1}}, "limits.max_body_bytes"),
        ({"limits": {"max_body_s": 0}}, "limits.max_body_s: .*greater than 0"),
        ({"access": {"keys": {"anna": ["12ab"]}}}, "access.keys.anna"),
        ({"access": {"keys": {"a b": ["0" * 64]}}}, "access.keys"),
        ({"access": {"keys": {"anna": []}}}, "keys: a name has an empty list"),
        ({"access": {"keys": {"anna": ["0" * 64], "bert": ["0" * 64]}}}, "keys: one hash is listed twice"),
        (
            {"access": {"keys_file": "x", "allow_unauthenticated": True}},
            "allow_unauthenticated: is for a service without",
        ),
        ({"access": {"max_concurrent_per_key": 1}}, "max_concurrent_per_key: is for each key, and there are none"),
        ({"access": {"requests_per_s_per_key": 1}}, "requests_per_s_per_key: is for each key, and there are none"),
        ({"access": {"keys_file": "x", "burst_per_key": 1}}, "burst_per_key: goes with requests_per_s_per_key"),
        *(
            ({"access": {"cors_origins": [origin]}}, "access.cors_origins")
            for origin in ("a.example", "https://a.example/", "https://*.a.example", "ftp://a")
        ),
        ({"label_cache": {"url": "http://host"}}, "label_cache.url: must be embedded, none, redis://"),
        ({"label_cache": {"url": "redis://[::1"}}, "label_cache.url"),
        ({"label_cache": {"ttl_jitter": 0.5}}, "label_cache.ttl_jitter: .*less than 0.5"),
        ({"label_cache": {"namespace": "a:b"}}, "label_cache.namespace"),
        ({"label_cache": {"password": "plain"}}, "label_cache.password"),
        ({"label_cache": {"password": {}}}, "label_cache.password: give either env or file"),
        ({"label_cache": {"password": {"env": "A", "file": "b"}}}, "label_cache.password: give either env or file"),
        ({"label_sets": {"warm": [{"file": "a", "nme": "b"}]}}, "label_sets.warm.0.nme: unknown key"),
        ({"label_sets": {"warm": [{"name": "b"}]}}, "label_sets.warm.0.file"),
        (
            {"label_sets": {"warm": [{"file": "a"}]}, "label_cache": {"url": "none"}},
            "label_sets.warm: .* label_cache.url is none; set it to embedded",
        ),
        ({"label_sets": {"near_duplicate_similarity": 0}}, "label_sets.near_duplicate_similarity: .*greater than 0"),
        ({"threads": {"encoder": -1}}, "threads.encoder"),
        (None, r"\(whole\)"),
        ([], r"\(whole\)"),
    ],
)
def test_a_wrong_value_is_named(values: Any, words: str) -> None:
    """The error has the key's path and what it must be."""
    with pytest.raises(ConfigError, match=f"settings: .*{words}"):
        Settings.parse(values)


def test_all_mistakes_at_once() -> None:
    """Every key at fault is named, so that nobody corrects them one start at a time."""
    with pytest.raises(ConfigError) as caught:
        Settings.parse({"threads": {"encoder": -1}, "limits": {"max_texts": 0}, "more": 1})
    for key in ("threads.encoder", "limits.max_texts", "more"):
        assert key in str(caught.value)


@pytest.mark.parametrize("url", ["embedded", "none", "redis://host:1/2", "rediss://user@host", "unix:///run/a.sock"])
def test_urls_that_are_taken(url: str) -> None:
    """The two words, and the three schemes of a store."""
    assert Settings.parse({"label_cache": {"url": url}}).label_cache.url == url


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2@host", "rediss://user:hunter2@host/0", "unix://:hunter2@/a", "redis://host?password=hunter2"],
)
def test_a_password_in_the_url_is_refused(url: str) -> None:
    """A password has no place in settings, which are logged; the refusal, its traceback included, doesn't repeat it."""
    with pytest.raises(ConfigError, match=re.escape("label_cache.url: holds a password")) as caught:
        Settings.parse({"label_cache": {"url": url}})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_settings_are_frozen() -> None:
    """Nothing changes them once they were checked."""
    settings = Settings.parse({})
    with pytest.raises(ValueError, match="frozen"):
        settings.limits.max_texts = 3


class TestSecret:
    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The value of the variable, exactly."""
        monkeypatch.setenv("SOME_SECRET", " hunter2\n")
        assert Secret(env="SOME_SECRET").read("label_cache.password") == " hunter2\n"

    @pytest.mark.parametrize("content", ["hunter2", "hunter2\n"])
    def test_from_a_file(self, tmp_path: Path, content: str) -> None:
        """The file's text without the newline that editors add."""
        path = tmp_path / "secret"
        path.write_text(content)
        assert Secret(file=path).read("label_cache.password") == "hunter2"

    def test_a_missing_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which setting needs it, and which variable is not set."""
        monkeypatch.delenv("SOME_SECRET", raising=False)
        with pytest.raises(ConfigError, match=r"label_cache\.password: environment variable SOME_SECRET is empty"):
            Secret(env="SOME_SECRET").read("label_cache.password")

    def test_an_empty_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An empty secret is as good as none."""
        monkeypatch.setenv("SOME_SECRET", "")
        with pytest.raises(ConfigError, match="SOME_SECRET"):
            Secret(env="SOME_SECRET").read("label_cache.password")

    @pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe"])
    def test_a_file_that_has_none(self, tmp_path: Path, content: bytes | None) -> None:
        """Which setting needs it, and which file is missing, empty or no text."""
        path = tmp_path / "secret"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"label_cache\.password: file {re.escape(str(path))}"):
            Secret(file=path).read("label_cache.password")

    def test_it_is_no_part_of_the_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Settings hold the name of the variable, so that writing them down gives nothing away."""
        monkeypatch.setenv("SOME_SECRET", "hunter2")
        settings = Settings.parse({"label_cache": {"password": {"env": "SOME_SECRET"}}})
        assert settings.label_cache.password is not None
        assert settings.label_cache.password.read("label_cache.password") == "hunter2"
        assert "hunter2" not in settings.model_dump_json() + repr(settings)

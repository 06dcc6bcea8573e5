"""`tokenalign-deploy`: runs the application on this machine, and keeps label sets on a running one."""

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import psutil
import yaml

from deploy.doors import private_ray
from deploy.front import haproxy_program, switches
from deploy.key_commands import add_keys_command, print_new_key
from deploy.label_commands import ServiceError, add_labels_command, warm_labels
from tokenalign.errors import ConfigError, TokenAlignError
from tokenalign.label_files import LabelFile

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

APP_BUILDER = "deploy.app:build_app"
DRAIN_S = 9.0  # what Serve gets to end its replicas in order; then Ray is stopped regardless
KILL_S = 3.0
OBJECT_STORE_BYTES = 512 * 1024 * 1024  # batches in flight are small; Ray's default is a third of the machine's memory

EXAMPLE = {
    "text": "I was charged twice for the same card purchase.",
    "labels": ["duplicate card payment", "cash withdrawal declined", "card not received"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when all went well or after Ctrl-C, 1 when the application failed, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="tokenalign-deploy", description="Run tokenalign as a service.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the application on this machine, until Ctrl-C")
    serve.add_argument("config", nargs="?", type=Path, default=Path("serve_config.yaml"), help="default: %(default)s")
    add_labels_command(commands)
    add_keys_command(commands)
    commands.add_parser("bulk", help="classify the texts of a file on a Ray cluster", add_help=False)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["bulk"]:
            from deploy.bulk_commands import run_bulk_command  # its options come with the library, which takes seconds

            return run_bulk_command(words[1:])
        options = parser.parse_args(words)
        if options.command == "labels":
            warm_labels(options)
            return 0
        if options.command == "keys":
            print_new_key(options)
            return 0
        return _serve(options.config)
    except TokenAlignError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, ServiceError) else 2


def _serve(path: Path) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="tokenalign-", ignore_cleanup_errors=True) as folder,
        _added(private_ray(os.environ, Path(folder), haproxy_program(os.environ))),  # before Ray is imported
    ):
        return _run(path, Path(folder))


def _run(path: Path, folder: Path) -> int:
    config = _load(path)
    host, port = str(config.http_options.host), config.http_options.port
    with_keys = _check_access(config, host)
    if _is_taken(host, port):
        raise ConfigError(
            f"http_options.port: another program listens on {host}:{port}; stop it or choose another port"
        )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    _say(f"starting; first answers in about half a minute ({path})")
    started = time.monotonic()
    _start(path, folder)
    try:
        if not _wait_until_ready(f"http://{host}:{port}", [app.name for app in config.applications], stop):
            return 0 if stop.is_set() else 1
        _say(f"ready after {time.monotonic() - started:.0f} s on http://{host}:{port} (API at /docs); Ctrl-C ends it")
        key = " -H 'authorization: Bearer YOUR-KEY'" if with_keys else ""
        _say(
            f"try:\n\n  curl -s http://{host}:{port}/v1/classify -H 'content-type: application/json'{key} \\\n"
            f"    -d '{json.dumps(EXAMPLE)}'\n"
        )
        _say(f"metrics for Prometheus at {_metrics_url()}")
        stop.wait()
        return 0
    finally:
        _say("stopping")
        _stop()


def _load(path: Path) -> "ServeDeploySchema":
    """The checked configuration: Serve's part by Serve's schema, ours by our settings."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    from deploy.settings import Settings
    from tokenalign.config import describe_validation

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; give the path of a serve_config.yaml") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8: {error.reason} at byte {error.start}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    try:
        config = ServeDeploySchema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_validation(error)}") from error
    if unknown := list(_unknown_keys(values, config)):
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}; remove them or check their spelling")
    for app in config.applications:
        if app.import_path == APP_BUILDER:
            for listed in Settings.parse(app.args).label_sets.warm:
                LabelFile.read(listed.file)
    return config


def _check_access(config: "ServeDeploySchema", host: str) -> bool:
    """Whether callers need a key; `ConfigError` where everybody could ask and nobody said that everybody may."""
    from deploy.http.hosts import is_loopback
    from deploy.http.keys import KeyRing
    from deploy.settings import Settings

    with_keys = False
    for app in config.applications:
        if app.import_path != APP_BUILDER:
            continue
        access = Settings.parse(app.args).access
        if access.has_keys:
            KeyRing(access.keys, access.keys_file)  # reads the file, which may be wrong
            with_keys = True
        if not (access.has_keys or access.allow_unauthenticated or is_loopback(host)):
            raise ConfigError(
                f"http_options.host: {host} can be reached from other machines, and {app.name} has no API keys; "
                "give it some (access.keys_file, `tokenalign-deploy keys new NAME`), listen on 127.0.0.1, "
                "or set access.allow_unauthenticated where something in front sees who asks"
            )
    return with_keys


def _unknown_keys(given: Any, parsed: Any, path: str = "") -> Iterator[str]:
    """The keys that Serve's schema doesn't know: it passes over them without a word, a mistyped num_replicas too."""
    from ray.serve.config import AutoscalingConfig

    schema: Any = AutoscalingConfig if path.endswith(".autoscaling_config.") else type(parsed)  # that one stays a dict
    if isinstance(given, dict) and hasattr(schema, "model_fields"):
        for key, value in given.items():
            if key in schema.model_fields:
                yield from _unknown_keys(value, getattr(parsed, key, None), f"{path}{key}.")
            else:
                yield f"{path}{key}"
    elif isinstance(given, list) and isinstance(parsed, list):
        for i, (one, other) in enumerate(zip(given, parsed, strict=True)):
            yield from _unknown_keys(one, other, f"{path}{i}.")


def _start(path: Path, folder: Path) -> None:
    """A Ray of our own on this machine, and the configuration submitted to it; folder: for files of this run alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ |= switches(os.environ, folder)  # Ray's processes inherit them, and read them as they start
    import ray
    from ray.serve import scripts

    ray.init(
        address="local",
        namespace="serve",
        num_cpus=max(2, os.cpu_count() or 2),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with _silenced():
        scripts.cli.main(["run", str(path), "--non-blocking"], standalone_mode=False)


def _wait_until_ready(url: str, apps: Sequence[str], stop: threading.Event) -> bool:
    """Whether the application became ready; says why when it failed."""
    from ray import serve

    while not stop.wait(0.25):
        if _get(f"{url}/health/ready") == 200:
            return True
        found = serve.status().applications
        for name in apps:
            if name in found and found[name].status == "DEPLOY_FAILED":
                _say(f"application {name} failed to start:\n{_explain(found[name])}")
                return False
    return False


def _metrics_url() -> str:
    """Where Ray gives out the metrics of this machine."""
    import ray

    [node] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray leaves it bare
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"


def _explain(app: Any) -> str:
    """Serve's words on a failed application, without the traceback's frames."""
    words = [app.message, *(d.message for d in app.deployments.values())]
    lines = [line for text in words for line in text.splitlines()]
    errors = [line for line in lines if "Error:" in line and not line.startswith((" ", "\t"))]
    return "\n".join(dict.fromkeys(errors or lines))


def _stop() -> None:
    """Ends Serve and Ray, and what they started, whatever state they are in."""
    import ray
    from ray import serve

    processes = psutil.Process().children(recursive=True)
    draining = threading.Thread(target=serve.shutdown, daemon=True)
    with _silenced():  # Ray reports the end of Serve's controller as a failure, though we asked for it
        draining.start()
        draining.join(DRAIN_S)
    if not draining.is_alive():  # else Ray would end this process under it, before the others are seen to
        ray.shutdown()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=KILL_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def _added(variables: Mapping[str, str]) -> Iterator[None]:
    """Has them in the environment, where none of them is yet."""
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keeps what Ray prints on the way out of the terminal; its logs in /tmp/ray have it too."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _is_taken(host: str, port: int) -> bool:
    """Whether some program takes connections there, HTTP or not."""
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _get(url: str) -> int | None:
    """The status of a GET, or None where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  our own address
            return int(answer.status)
    except URLError as error:
        return getattr(error, "code", None)
    except OSError:
        return None


def _say(words: str) -> None:
    print(f"tokenalign: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

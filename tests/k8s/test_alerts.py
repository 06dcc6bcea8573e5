"""The alerts, run by promtool: they are sound, each fires when it should, and the important ones at no other time."""

import copy
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s/components/monitoring/rules.yaml"
TESTS = Path(__file__).parent / "alerts.yaml"

Promtool = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def promtool() -> Promtool:
    """Runs promtool, of Debian's prometheus; a test is skipped without it, but fails under CI=true."""
    if (program := shutil.which("promtool")) is None:
        reason = "promtool is absent (Debian's package prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must not skip what needs it")
        pytest.skip(reason)
    return lambda *words: subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120)


def rules() -> dict[str, Any]:
    """The groups of the PrometheusRule, as Prometheus itself takes them."""
    return {"groups": yaml.safe_load(RULES.read_text(encoding="utf-8"))["spec"]["groups"]}


def described(groups: dict[str, Any]) -> dict[str, Any]:
    """The rules without annotations, which a test would have to repeat word by word."""
    bare = copy.deepcopy(groups)
    for group in bare["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    return bare


@pytest.fixture
def outcome(promtool: Promtool, tmp_path: Path) -> Callable[[dict[str, Any]], "subprocess.CompletedProcess[str]"]:
    """Runs the unit tests against rules."""

    def run(groups: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(described(groups)))
        tests = yaml.safe_load(TESTS.read_text(encoding="utf-8"))
        (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], **tests}))
        return promtool("test", "rules", tmp_path / "tests.yaml")

    return run


def test_the_rules_are_sound(promtool: Promtool, tmp_path: Path) -> None:
    """Queries and templates are what Prometheus reads."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    done = promtool("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should(outcome: Any) -> None:
    """Every case of alerts.yaml."""
    done = outcome(rules())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("alert", "old", "new"),
    [
        ("TokenalignNotRunning", "< 3", "< 1"),
        ("TokenalignServerErrors", '"5.."', '"..."'),
        ("TokenalignOverloaded", 'route!~"/health/.*"', 'route=~".*"'),
        ("TokenalignSlow", ', status="200"', ""),
        ("TokenalignSeveralModels", " == 1", ""),
        ("TokenalignCacheMisses", "> sum", "< sum"),
    ],
)
def test_the_cases_can_fail(outcome: Any, alert: str, old: str, new: str) -> None:
    """A wrong query is found."""
    changed = rules()
    [rule] = (rule for group in changed["groups"] for rule in group["rules"] if rule["alert"] == alert)
    assert old in rule["expr"]
    rule["expr"] = rule["expr"].replace(old, new)
    done = outcome(changed)
    assert done.returncode != 0
    assert alert in done.stdout + done.stderr

"""The README stays true: each of its Python examples prints what it says, and its files and settings exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)
# Those that ask a running service are run by the tests of the served application.
ALONE = [example for example in EXAMPLES if "http://127.0.0.1:8000" not in example[0]]


def test_there_are_examples() -> None:
    """Every Python block is followed by what it prints, so that none escapes the next test."""
    assert len(EXAMPLES) == README.count("```python") > 1


@pytest.mark.parametrize(("code", "printed"), ALONE)
def test_python_examples_print_what_the_readme_says(code: str, printed: str) -> None:
    """Copied into a file and run without any model hub, an example prints exactly the block below it."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed.strip()


def test_links_lead_somewhere() -> None:
    """Every relative link of README and docs names a file of the project."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_documented() -> None:
    """docs/settings.md names each key of the settings, and no key that is none."""
    from deploy.settings import Settings

    keys = {
        f"{section}.{key}"
        for section, field in Settings.model_fields.items()
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    documented = {
        word
        for row in re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
        for word in re.findall(r"`(\w+\.\w+)`", row)
    }
    assert documented == keys


def test_every_metric_is_documented() -> None:
    """docs/label-cache.md names each metric of the label cache, and none that isn't there."""
    from deploy.label_cache import metrics
    from deploy.telemetry import Metric

    names = {value.name for value in vars(metrics).values() if isinstance(value, Metric)}
    page = (ROOT / "docs" / "label-cache.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(tokenalign_label_\w+)`", page)) == names

"""What can't be served is said before anything is called ready."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from tokenalign.weights import locate_head

pytestmark = pytest.mark.timeout(600)


def test_an_unknown_setting_is_refused_at_once(
    tmp_path: Path, project_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is named, and nothing is started."""
    config = project_config()
    config["applications"][0]["args"]["model"]["devcie"] = "cpu"
    path = tmp_path / "serve_config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    assert main(["serve", str(path)]) == 2
    assert "model.devcie: unknown key" in capsys.readouterr().err


@pytest.mark.serve
def test_an_altered_backbone_is_refused_with_its_hash(tmp_path: Path, launch: Any, project_config: Any) -> None:
    """A head whose backbone has another hash than it names: the process ends, and says which file."""
    head = tmp_path / "head"
    shutil.copytree(locate_head(), head)
    values = json.loads((head / "config.json").read_text())
    values["backbone"]["sha256"] = "0" * 64
    (head / "config.json").write_text(json.dumps(values))
    config = project_config()
    config["applications"][0]["args"]["model"]["id_or_path"] = str(head)
    with launch(config) as served:
        assert served.process.wait(300) == 1
        log = served.log.read_text()
    assert "ready after" not in log
    assert "model.safetensors has sha256 53aa51172d14" in log
    assert "0" * 64 in log

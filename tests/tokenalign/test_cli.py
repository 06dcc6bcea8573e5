"""The command line, in this process on a tiny model; what needs a process of its own has one."""

import io
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenalign.backbone import DTYPES
from tokenalign.cli import COMMANDS, DTYPE_NAMES, TRAIN, main
from tokenalign.terminal import cut_notice, match_line, one_line

LABELS = ["--labels", "card payment", "cash"]


class Cli:
    """Runs `main` on the tiny model."""

    def __init__(self, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._model = ["--model", str(head), "--device", "cpu", "--local-only"]
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> tuple[str, str]:
        """(stdout, stderr) of a run that ends with `code`."""
        self._capsys.readouterr()
        assert main([*self._model, *words]) == code
        return self._capsys.readouterr()

    def json(self, *words: str) -> list[dict[str, Any]]:
        """The objects that stdout holds, one per line."""
        return [json.loads(line) for line in self(*words, "--json")[0].splitlines()]


@pytest.fixture
def cli(bert_head: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line on the tiny BERT."""
    return Cli(bert_head, capsys)


def enter(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_the_cards_command(cli: Cli) -> None:
    """Text, labels and --explain print scores best first, and how each label token matched."""
    out, err = cli("--text", "I was charged twice", *LABELS, "--explain")
    lines = out.splitlines()
    assert lines[0] == "I was charged twice"
    scores = [float(line.split()[0]) for line in lines[1:3]]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1, abs=2e-3)
    assert sum(" -> " in line and "(similarity " in line and "contribution " in line for line in lines) in (1, 2)
    assert err == ""


def test_json_is_one_object_per_text_and_nothing_else(cli: Cli) -> None:
    """Every line of stdout is the library's answer with its text, in order."""
    answers = cli.json("--text", "card", "--text", "not cash", *LABELS, "--explain", "all", "--logits", "--top-k", "1")
    assert [answer["text"] for answer in answers] == ["card", "not cash"]
    for answer in answers:
        assert list(answer["scores"]) == list(answer["logits"]) == [answer["label"]]
        assert {match["label"] for match in answer["matches"]} == {answer["label"]}


def test_json_holds_what_the_library_says(cli: Cli, bert_classifier: Any) -> None:
    """The numbers are the same as in Python."""
    (answer,) = cli.json("--text", "cash declined é", *LABELS)
    assert answer == {"text": "cash declined é", **bert_classifier("cash declined é", LABELS[1:])}


def test_without_explain_no_matches(cli: Cli) -> None:
    """What wasn't asked for is absent."""
    assert "->" not in cli("--text", "card", *LABELS)[0]
    assert "matches" not in cli.json("--text", "card", *LABELS)[0]


def test_one_label_is_enough_for_logits(cli: Cli) -> None:
    """--logits shows them, and lifts the minimum of two."""
    assert list(cli.json("--text", "card", "--labels", "cash", "--logits")[0]["logits"]) == ["cash"]
    out, _ = cli("--text", "card", "--labels", "cash", "--logits")
    assert out.splitlines()[1].split()[0] == "1.000"


def test_options_of_the_answer(cli: Cli, bert_classifier: Any) -> None:
    """Limits, windows and independent scores are those of the library."""
    long = "card " * 200
    windows = ["--long-text", "window", "--window-stride", "100"]
    (answer,) = cli.json("--text", long, *LABELS, "--min-margin", "1", *windows)
    expected = bert_classifier(long, LABELS[1:], min_margin=1, long_text="window", window_stride=100)
    assert answer == {"text": long, **expected}
    assert answer["label"] is None
    assert cli.json("--text", "card", *LABELS, "--min-score", "1")[0]["abstained"]["reason"] == "min_score"
    assert "multi_label: the model" in cli("--text", "card", "--labels", "cash", "--multi-label", code=2)[1]
    assert "has 202 tokens" in cli("--text", long, *LABELS, "--long-text", "error", code=2)[1]


def test_texts_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads one text per line where it stands; blank lines are none."""
    enter(monkeypatch, "card\n\n  \ncash twice\r\n")
    texts = [a["text"] for a in cli.json("--text", "first", "--text", "-", *LABELS)]
    assert texts == ["first", "card", "cash twice"]


def test_no_text_at_all_is_no_answer(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty input gives an empty output."""
    enter(monkeypatch, "")
    assert cli.json("--text", "-", *LABELS) == []


def test_a_bad_line_is_told_by_its_number(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are read in portions; the number in an error is that of the whole input."""
    enter(monkeypatch, "card\n" * 300 + "\u200b\n")
    _, err = cli("--text", "-", *LABELS, code=2)
    assert err.startswith("error: texts[300]: ")


def test_labels_from_a_file(cli: Cli, tmp_path: Path) -> None:
    """One per line, added to --labels; a byte order mark and blank lines are no labels."""
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffcash, not card\r\n\nreceived\n".encode())
    answer = cli.json("--text", "card", "--labels", "fee", "--labels-file", str(path))[0]
    assert set(answer["scores"]) == {"fee", "cash, not card", "received"}


def test_labels_with_descriptions_from_a_file(cli: Cli, tmp_path: Path, bert_classifier: Any) -> None:
    """A JSON line gives a label its descriptions, by which it scores; plain lines may stand beside it."""
    path = tmp_path / "labels.jsonl"
    path.write_text('{"name": "7", "description": ["cash not received", "card declined"]}\n  fee \n')
    (answer,) = cli.json("--text", "cash", "--labels-file", str(path), "--logits")
    labels = [{"name": "7", "description": ["cash not received", "card declined"]}, "fee"]
    assert answer == {"text": "cash", **bert_classifier("cash", labels, return_logits=True)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read: No such file"),
        (b"\xff\xfe\n", "byte 0 is no UTF-8"),
        (b"", "has no labels; write one a line"),
        (b'cash\n\n{"name": "fee", "text": "x"}\n', "labels.txt:3: "),
        (b"cash\ncard\ncash\n", "labels.txt:3: 'cash' is the same label"),
        (b"cash\n", "1 label given"),
    ],
)
def test_a_bad_labels_file(cli: Cli, tmp_path: Path, content: bytes | None, words: str) -> None:
    """Missing, of another encoding, or empty: one line that says so."""
    path = tmp_path / "labels.txt"
    if content is not None:
        path.write_bytes(content)
    out, err = cli("--text", "card", "--labels-file", str(path), code=2)
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "card", "--labels", "one"], "labels: 1 label given, at least 2 needed"),
        (["--text", "card"], "labels: none given; use --labels or --labels-file"),
        (["--text", "card", "--labels", "a", "a"], "labels[1]: 'a' is the same label"),
        (["--text", " ", *LABELS], "texts[0]: is empty"),
        (["--text", "a\ud800", *LABELS], "texts[0]: has a lone surrogate U+D800"),
        (["--text", "card", *LABELS, "--top-k", "0"], "top_k: must be a whole number"),
        (["--text", "card", *LABELS, "--device", "tpu9"], "device 'tpu9' is unknown"),
        (["--text", "card", *LABELS, "--model", "./missing"], "model './missing' is no folder here"),
        (["--text", "card", *LABELS, "--backbone", "./missing"], "backbone './missing' is no folder here"),
        (["--text", "card", *LABELS, "--backbone", ""], "backbone given for this head: "),
    ],
)
def test_errors_are_one_line(cli: Cli, words: list[str], message: str) -> None:
    """Exit code 2, nothing on stdout, one clear line on stderr and no traceback."""
    out, err = cli(*words, code=2)
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--text", "a", "--interactive", *LABELS], ["--text", "a", "--dtype", "int8"]])
def test_misuse_shows_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own exit, with code 2."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: tokenalign" in capsys.readouterr().err


def test_interactive_answers_line_by_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer per line until an empty one; what stands behind it is not read."""
    enter(monkeypatch, "card\ncash twice\n\nnot read\n")
    assert [a["text"] for a in cli.json("--interactive", *LABELS)] == ["card", "cash twice"]


def test_interactive_ends_with_the_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """End of input exits as an empty line does."""
    enter(monkeypatch, "card")
    assert len(cli.json("--interactive", *LABELS)) == 1


def test_interactive_survives_a_bad_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that can't be read is told, and the next one is answered."""
    enter(monkeypatch, "\u200b\ncard\n")
    out, err = cli("--interactive", *LABELS, "--json")
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["card"]
    assert err.startswith("error: has no character that the tokenizer can read")


def test_interactive_loads_the_model_once(cli: Cli, monkeypatch: pytest.MonkeyPatch, bert_classifier: Any) -> None:
    """The model stays resident."""
    loads = []

    def load(*arguments: Any, **options: Any) -> Any:
        loads.append(options)
        return bert_classifier

    monkeypatch.setattr("tokenalign.classifier.TokenAlignClassifier.from_pretrained", load)
    enter(monkeypatch, "card\ncash\ntwice\n")
    assert len(cli.json("--interactive", *LABELS, "--dtype", "bfloat16", "--cache-dir", "c", "--revision", "r")) == 3
    assert [(o["device"], o["dtype"], o["cache_dir"], o["revision"]) for o in loads] == [("cpu", "bfloat16", "c", "r")]
    assert loads[0]["local_files_only"] is True


def test_ctrl_c_exits_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells expect, without a traceback."""

    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    _, err = cli("--interactive", *LABELS, code=130)
    assert err == "\n"


def test_truncation_is_said_plainly(cli: Cli) -> None:
    """The answer says how much was read, and which words were not."""
    text = "card " * 126 + "twice at the end"
    out, _ = cli("--text", text, *LABELS)
    said = " ".join(out.split())
    assert "Cut: 128 of" in said
    assert "after character 630, from 'twice at the end' on" in said
    assert "Cut" not in cli("--text", "card", *LABELS)[0]


def test_warnings_go_to_stderr_once(cli: Cli) -> None:
    """A label problem concerns all texts, so it is told once, and not among the answers."""
    out, err = cli("--text", "card", "--text", "cash", "--labels", "日本", "中国", "cash")
    assert "warning" not in out
    assert err.count("warning: labels[1]: reads the same to the model as label number 0") == 1


def test_no_text_steers_the_terminal(cli: Cli) -> None:
    """Markup is shown as it is; escape sequences and line breaks are not passed on."""
    out, _ = cli("--text", "[red]card[/red] \x1b[31m\ncash", "--labels", "[bold]cash", "card\x1b[0m", "--explain")
    assert out.splitlines()[0] == "[red]card[/red] \ufffd[31m cash"
    assert "[bold]cash" in out
    assert "\x1b" not in out


def test_one_line() -> None:
    """White space is evened out, long texts end with an ellipsis."""
    assert one_line("a\n\tb  c", 10) == "a b c"
    assert one_line("abcdef", 4) == "abc…"


def test_match_line() -> None:
    """`label token -> text word (similarity, contribution)`."""
    match: Any = {"token": "card", "text": "visa", "similarity": 0.8049, "contribution": -1.9}
    assert match_line(match) == "card -> visa (similarity 0.80, contribution -1.90)"


def test_cut_notice_at_the_end_of_the_text() -> None:
    """Where only boilerplate was lost, no words are named."""
    assert cut_notice("card", {"tokens": 9, "used": 8, "cut_at": 4}).endswith("Nothing after character 4 had a say.")


def test_dtypes_are_the_backbones() -> None:
    """The command line, which must not import torch for --help, names the same dtypes."""
    assert set(DTYPE_NAMES) == {"auto", *DTYPES}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_come_from_their_modules(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's module is imported when it runs, parses its own options, and gives the exit code."""
    name, adder, _ = COMMANDS[command]
    module = ModuleType(name)

    def add_parser(subparsers: Any) -> None:
        parser = subparsers.add_parser(command)
        parser.add_argument("--seed", type=int)
        parser.set_defaults(run=lambda options: options.seed)

    setattr(module, adder, add_parser)
    monkeypatch.setitem(sys.modules, name, module)
    assert main([command, "--seed", "7"]) == 7


def test_errors_of_commands_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of training is told like any other."""
    from tokenalign.errors import ConfigError

    def run(options: Namespace) -> int:
        raise ConfigError("data set: not there")

    module = ModuleType(TRAIN)
    add_parser: Any = lambda subparsers: subparsers.add_parser("train").set_defaults(run=run)  # noqa: E731
    monkeypatch.setattr(module, "add_train_parser", add_parser, raising=False)
    monkeypatch.setitem(sys.modules, TRAIN, module)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "error: data set: not there\n"


def test_help_lists_the_commands_without_loading_torch() -> None:
    """`--help` stays quick: neither torch nor transformers nor training is imported for it."""
    code = (
        "import sys, tokenalign.cli\n"
        "try:\n    tokenalign.cli.main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'rich', 'tokenalign.training', 'tokenalign.bulk'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f"tokenalign {command}" in done.stdout


def test_python_m_tokenalign(bert_head: Path) -> None:
    """The module runs as a program, and a reader that leaves early is no error."""
    command = [sys.executable, "-m", "tokenalign", "--model", str(bert_head), "--device", "cpu", "--local-only"]
    program = subprocess.Popen(
        [*command, "--text", "card", *LABELS, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    program.stdout.close()
    assert program.stderr is not None
    with program.stderr:
        assert program.stderr.read() == ""
    assert program.wait() == 0
    done = subprocess.run([*command, "--text", "card", *LABELS], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("card\n")
    assert done.stderr == ""

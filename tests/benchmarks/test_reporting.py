"""The report says what was measured, and what was not."""

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks import throughput
from tests.benchmarks.machine import Machine
from tests.benchmarks.overload import growth
from tests.benchmarks.plots import axis_of, line_plot, stacked_bars
from tests.benchmarks.processes import GENERATOR, Shares
from tests.benchmarks.quality import compared
from tests.benchmarks.report import NAME, Measured, from_json, to_json, write
from tests.benchmarks.reporting import Target, number, shares_table, target_table
from tests.benchmarks.served import Load
from tests.benchmarks.throughput import ONE_BY_ID, ONE_IN_BODY, SIXTEEN, Result, Series

PARTS: dict[str, ModuleType] = {"service": throughput}
MACHINE = Machine("a processor", 2, ["avx2"], 8.0, "Linux", "3.11", {"torch": "2"}, "today", "abc", changed=True)


def load(rate: float, generator: float = 0.1, size: int = 1) -> Load:
    times = {"200": {"p50": 1.0, "p99": 2.0, "mean": 1.0, "max": 3.0}}
    return Load(64, None, rate, size * rate, times, {"200": 9}, Shares(2, 1.0, {GENERATOR: generator, "proxy": 0.3}))


@pytest.fixture
def result() -> Result:
    """A service of 90 texts/s whose generator takes a tenth of the cores, beside a library of 200."""
    series = {
        name: Series(size, [200.0, 200.0], {1: [load(9, size=size)] * 2, 64: [load(90 / size, size=size)] * 2})
        for name, size in ((ONE_BY_ID, 1), (ONE_IN_BODY, 1), (SIXTEEN, 16))
    }
    return Result("haproxy", 77, {32: [150.0], 128: [200.0]}, 128, series)


class TestTargets:
    def test_met_or_not(self) -> None:
        """On either side of the bound, and on it."""
        assert [Target("x", v, 0.85, "at least").met for v in (0.84, 0.85, 0.9)] == [False, True, True]
        assert [Target("x", v, 10.0, "at most").met for v in (9.0, 10.0, 10.1)] == [True, True, False]

    def test_what_was_not_measured_is_neither(self) -> None:
        """No value and no number are told as such, with the reason."""
        missing = Target("x", None, 1.0, "at least", note="no peers")
        assert missing.met is Target("x", math.nan, 1.0, "at least").met is None
        assert "| x (no peers) | - | at least 1.00 | not measured |  |" in target_table([missing])

    def test_a_missed_one_stands_out(self) -> None:
        """With its unit and how far the repeats were apart."""
        text = target_table([Target("p50", 12.34, 10.0, "at most", "ms", spread=0.2)])
        assert text.splitlines()[2] == "| p50 | 12.3 ms | at most 10.0 ms | **no** | 20 % |"

    def test_the_generator_is_taken_off(self, result: Result) -> None:
        """90 texts/s on nine tenths of the cores are 100, half of the library's 200."""
        assert [target.value for target in throughput.targets(result)] == pytest.approx([0.5, 0.5])


class TestReport:
    def measured(self, result: Result) -> Measured:
        return Measured(MACHINE, 12.0, "--quick", "made from words", result)

    def test_it_reads_what_it_wrote(self, result: Result) -> None:
        """A part of an earlier run stays in the report as it was."""
        measured = {"service": self.measured(result)}
        assert from_json(to_json(measured), PARTS) == measured

    def test_a_report_of_an_older_suite(self, result: Result) -> None:
        """A part whose result had another form is left out, and so is one that is no more."""
        values = json.loads(to_json({"service": self.measured(result)}))
        del values["service"]["result"]["best_batch"]
        assert from_json(json.dumps({**values, "gone": values["service"]}), PARTS) == {}

    def test_no_number_is_null(self, result: Result) -> None:
        """Strict readers of JSON know no NaN."""
        part = self.measured(replace(result, library={32: [math.nan]}))
        assert json.loads(to_json({"service": part}))["service"]["result"]["library"] == {"32": [None]}

    def test_all_files(self, result: Result, tmp_path: Path) -> None:
        """The page names the machine, the commit and each part, and every picture that it shows is there."""
        write(tmp_path, {"service": self.measured(result)}, PARTS, "make bench")
        text = (tmp_path / f"{NAME}.md").read_text(encoding="utf-8")
        for words in ("a processor", "commit abc with changes", throughput.TITLE, "| 64 | 90.0 |", "made from words"):
            assert words in text
        shown = [part.split(")")[0] for part in text.split("](")[1:]]
        assert sorted(shown) == sorted(path.name for path in tmp_path.glob("*.svg")) != []

    def test_a_part_that_failed(self, tmp_path: Path) -> None:
        """Its words are in the report, and it has no targets."""
        write(tmp_path, {"service": Measured(MACHINE, 1.0, "", "x", failure="it broke")}, PARTS, "make bench")
        assert "Not measured: it broke" in (tmp_path / f"{NAME}.md").read_text(encoding="utf-8")

    def test_shares(self) -> None:
        """Medians by role, the idle rest, and nobody who did next to nothing."""
        loads = [Shares(2, 1.0, {"proxy": share, "command": 0.0001}) for share in (0.1, 0.2, 0.6)]
        assert shares_table({"now": loads}).splitlines()[2:] == ["| proxy | 20.0 % |", "| idle | 80.0 % |"]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1234.5, "", "1,234"),
        (56.78, "ms", "56.8 ms"),
        (0.8567, "", "0.857"),
        (0.0123, "", "0.012"),
        (99.47, "%", "99.47 %"),
        (math.nan, "", "-"),
        (None, "ms", "-"),
    ],
)
def test_numbers(value: float | None, unit: str, words: str) -> None:
    """As many digits as are worth reading."""
    assert number(value, unit) == words


def elements(svg: str, name: str) -> int:
    root = ElementTree.fromstring(svg)  # noqa: S314  our own words
    return len(root.findall(f"{{http://www.w3.org/2000/svg}}{name}"))


class TestPlots:
    @pytest.mark.parametrize("largest", [0.013, 0.9, 1.0, 7.3, 119.0, 24_531.0])
    def test_axes_hold_their_values(self, largest: float) -> None:
        """In at least two and at most six steps of a round number."""
        top, step = axis_of(largest)
        assert largest <= top < largest + step
        assert 2 <= round(top / step) <= 6

    def test_they_are_xml(self) -> None:
        """Whatever names are in them; every line and bar is there."""
        lines = line_plot("a & b", "x", "y", {"<one>": [(1, 2.0), (64, 5.0)], "two": [(1, 1.0), (64, 1.0)]})
        bars = stacked_bars("title", "ms", {"service": {"a": 1.0, "b": 2.0, "less": -1.0}, "library": {"a": 1.0}})
        assert elements(lines, "polyline") == 2
        assert elements(bars, "rect") == 1 + 3 + 3  # the ground, parts above zero, names


def test_growth_leaves_the_first_third_out() -> None:
    """A process that fills its buffers and then stays as it is doesn't grow; one that goes on growing does."""
    fills = [{"a": size} for size in (10, 50, 100, 100, 100, 100, 100, 100, 100)]
    grows = [{"a": size} for size in (100, 100, 100, 100, 100, 100, 110, 110, 110)]
    assert growth(fills, "a") == 0
    assert growth(grows, "a") == pytest.approx(0.1)
    assert math.isnan(growth([{"a": 1}], "a"))


def test_comparison_of_answers() -> None:
    """The share of equal top labels, and the largest difference of any score."""
    reference = [{"label": "a", "scores": [0.9, 0.1]}, {"label": "b", "scores": [0.4, 0.6]}]
    other = [{"label": "a", "scores": [0.85, 0.15]}, {"label": "a", "scores": [0.6, 0.4]}]
    found = compared(reference, other)
    assert (found.texts, found.unchanged) == (2, 0.5)
    assert found.largest_drift == pytest.approx(0.2)

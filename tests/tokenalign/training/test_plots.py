"""Plots as SVG: well-formed, to scale, and told in words."""

from xml.etree import ElementTree

import pytest

from tokenalign.evaluation import ReliabilityBin
from tokenalign.training.plots import LEFT, SIZE, TOP, interval_plot, reliability_diagram

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    """The picture; a parse error where it isn't well-formed."""
    return ElementTree.fromstring(svg)  # noqa: S314  of our own making


BINS = (ReliabilityBin(0.4, 0.5, 10, 0.45, 0.4), ReliabilityBin(0.9, 1.0, 30, 0.98, 0.5))


def test_bars_of_a_reliability_diagram() -> None:
    """A bar for each bin, as high as its accuracy, as wide as its bin, paler the fewer examples it holds."""
    root = parsed(reliability_diagram('of "a" <b>', BINS))
    assert root.get("aria-label") == 'of "a" <b>'
    bars = [bar for bar in root.findall(f"{SVG}rect") if bar.get("fill-opacity")]
    assert [float(bar.attrib["height"]) for bar in bars] == pytest.approx([0.4 * SIZE, 0.5 * SIZE], abs=0.1)
    assert [float(bar.attrib["x"]) for bar in bars] == pytest.approx(
        [LEFT + 0.4 * SIZE + 1, LEFT + 0.9 * SIZE + 1], abs=0.1
    )
    for bar in bars:
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) == pytest.approx(TOP + SIZE, abs=0.1)
    pale, full = (float(bar.attrib["fill-opacity"]) for bar in bars)
    assert pale < full < 1
    tips = [bar.findtext(f"{SVG}title") for bar in bars]
    assert tips[1] == "confidence 0.980, accuracy 0.500, 30 examples"


def test_points_lie_within_their_intervals() -> None:
    """Names in order, each point between the ends of its line, better ones further right, no word outside."""
    rows = {"this head": (0.9, 0.85, 0.94), "a & b": (0.7, 0.62, 0.77)}
    root = parsed(interval_plot("Accuracy", rows))
    points = [float(point.attrib["cx"]) for point in root.findall(f"{SVG}circle")]
    lines = [line for line in root.findall(f"{SVG}line") if line.get("stroke-width") == "3"]
    assert points[0] > points[1]
    for point, line in zip(points, lines, strict=True):
        assert float(line.attrib["x1"]) < point < float(line.attrib["x2"])
    width = float(root.attrib["width"])
    assert all(0 <= float(text.attrib["x"]) <= width for text in root.findall(f"{SVG}text"))
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert words.index("this head") < words.index("a & b")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_intervals_of_no_width(value: float) -> None:
    """All right or all wrong is a point, not a division by nothing."""
    parsed(interval_plot("Accuracy", {"this head": (value, value, value)}))

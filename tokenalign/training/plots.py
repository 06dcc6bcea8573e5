"""Plots of a report as SVG text; no plotting library is needed."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from tokenalign.evaluation import ReliabilityBin

HEAD, OTHER, FRAME, GRID = "#2f6f8f", "#c9a227", "#555555", "#dddddd"
SIZE, LEFT, TOP = 260, 60, 50  # of a plot's square, and where it begins


def reliability_diagram(title: str, bins: Sequence[ReliabilityBin]) -> str:
    """Accuracy over confidence, bin by bin, and how many examples each holds; on the diagonal they agree."""
    total = sum(bin_.examples for bin_ in bins)
    parts = _opening(title, LEFT + SIZE + 30, TOP + SIZE + 60)
    for i in range(6):
        share = i / 5
        x, y = LEFT + SIZE * share, TOP + SIZE * (1 - share)
        parts.append(_line(LEFT, y, LEFT + SIZE, y, GRID))
        parts.append(_text(LEFT - 8, y + 4, f"{share:g}", "end"))
        parts.append(_text(x, TOP + SIZE + 18, f"{share:g}", "middle"))
    for bin_ in bins:
        x, width = LEFT + SIZE * bin_.low, SIZE * (bin_.high - bin_.low)
        height = SIZE * bin_.accuracy
        tip = f"confidence {bin_.confidence:.3f}, accuracy {bin_.accuracy:.3f}, {bin_.examples:,} examples"
        shade = 0.25 + 0.75 * bin_.examples / total  # a bin of few examples says little, and is pale
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{TOP + SIZE - height:.1f}" width="{width - 2:.1f}" height="{height:.1f}" '
            f'fill="{HEAD}" fill-opacity="{shade:.2f}"><title>{escape(tip)}</title></rect>'
        )
        parts.append(_text(x + width / 2, TOP + SIZE - height - 4, f"{bin_.examples}", "middle", size=9))
    parts.append(_line(LEFT, TOP + SIZE, LEFT + SIZE, TOP, FRAME, dashed=True))
    parts.append(_text(LEFT + SIZE / 2, TOP + SIZE + 40, "confidence; numbers: examples", "middle"))
    parts.append(_text(8, TOP - 10, "accuracy", "start"))
    return _closed(parts)


def interval_plot(title: str, rows: Mapping[str, tuple[float, float, float]]) -> str:
    """One line a name: a value between 0 and 1 and the ends of its interval; the first name is the head itself."""
    left, row = 200, 26
    height = TOP + row * len(rows) + 34
    parts = _opening(title, left + 400, height)
    lowest = min(low for _, low, _ in rows.values())
    start = max(0.0, int(lowest * 10 - 1e-9) / 10)
    span = 1 - start or 1.0

    def at(value: float) -> float:
        return left + 340 * (value - start) / span

    for i in range(6):
        share = start + span * i / 5
        parts.append(_line(at(share), TOP, at(share), TOP + row * len(rows), GRID))
        parts.append(_text(at(share), TOP + row * len(rows) + 16, f"{share:.2f}", "middle"))
    for i, (name, (value, low, high)) in enumerate(rows.items()):
        y = TOP + row * i + row / 2
        colour = HEAD if i == 0 else OTHER
        parts.append(_text(left - 10, y + 4, name, "end"))
        parts.append(_line(at(low), y, at(high), y, colour, width=3))
        parts.append(
            f'<circle cx="{at(value):.1f}" cy="{y:.1f}" r="5" fill="{colour}">'
            f"<title>{value:.3f} ({low:.3f} to {high:.3f})</title></circle>"
        )
    return _closed(parts)


def _opening(title: str, width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(8, 18, title, "start", size=14, colour="black"),
    ]


def _closed(parts: list[str]) -> str:
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, words: str, anchor: str, *, size: int = 12, colour: str = FRAME) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(words)}</text>'

"""Plots as SVG text: lines over an axis, and stacked bars. No plotting library is needed."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#2f6f8f", "#b5523b", "#c9a227", "#4f8f4f", "#7a5c9e", "#8c8c8c", "#3aa6a0", "#d08a5a")
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 48, 58

Points = Sequence[tuple[float, float]]


def line_plot(title: str, x_title: str, y_title: str, lines: Mapping[str, Points]) -> str:
    """Named lines over a logarithmic x axis and a linear y axis from zero."""
    xs = sorted({x for points in lines.values() for x, _ in points})
    top, step = axis_of(max((y for points in lines.values() for _, y in points), default=1.0))
    low, high = math.log(xs[0]), math.log(xs[-1])
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        return LEFT + across * share, TOP + down * (1 - y / top)

    parts = _opening(title, HEIGHT)
    for i in range(round(top / step) + 1):
        y = at(xs[0], i * step)[1]
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + across}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{i * step:g}</text>')
    for x in xs:
        parts.append(
            f'<text x="{at(x, 0)[0]:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#555555">{x:g}</text>'
        )
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        placed = [at(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts += _legend(i, name, colour, LEFT + across + 16, TOP + 10)
    parts.append(f'<text x="{LEFT + across / 2}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_title)}</text>')
    parts.append(f'<text x="18" y="{TOP - 12}">{escape(y_title)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def stacked_bars(title: str, unit: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """One horizontal bar for each name, of parts in the same order and colours; parts of zero or less are left out."""
    names = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    longest = max((sum(max(0.0, v) for v in bar.values()) for bar in bars.values()), default=1.0)
    top, step = axis_of(longest)
    left, across, row = 190, 460, 44
    height = 64 + row * len(bars) + 30 + 20 * len(names)
    parts = _opening(title, height)
    below = 52 + row * len(bars)
    for i in range(round(top / step) + 1):
        x = left + across * i * step / top
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="44" y2="{below}" stroke="#dddddd"/>')
        words = f"{i * step:g} {unit}"
        parts.append(f'<text x="{x:.1f}" y="{below + 16}" text-anchor="middle" fill="#555555">{escape(words)}</text>')
    for n, (name, bar) in enumerate(bars.items()):
        y, x = 50 + row * n, float(left)
        parts.append(f'<text x="{left - 10}" y="{y + 19}" text-anchor="end">{escape(name)}</text>')
        for part, value in bar.items():
            if value > 0:
                length = across * value / top
                colour = COLOURS[names.index(part) % len(COLOURS)]
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="28" fill="{colour}"/>')
                x += length
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 19}">{sum(bar.values()):.1f}</text>')
    for i, name in enumerate(names):
        parts += _legend(i, name, COLOURS[i % len(COLOURS)], left, below + 42)
    return "\n".join([*parts, "</svg>"]) + "\n"


def axis_of(largest: float) -> tuple[float, float]:
    """The end of an axis from zero that holds a value, and the step of its marks: 1, 2 or 5 times a power of ten."""
    if not largest > 0 or math.isinf(largest):
        return 1.0, 0.5
    magnitude = 10.0 ** math.floor(math.log10(largest / 4))
    step = next(m * magnitude for m in (1, 2, 5, 10) if largest / (m * magnitude) <= 6)
    return math.ceil(largest / step) * step, step


def _opening(title: str, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="18" y="22" font-size="15">{escape(title)}</text>',
    ]


def _legend(index: int, name: str, colour: str, x: float, y: float) -> list[str]:
    at = y + 20 * index
    return [
        f'<rect x="{x:.0f}" y="{at - 10:.0f}" width="12" height="12" fill="{colour}"/>',
        f'<text x="{x + 18:.0f}" y="{at:.0f}">{escape(name)}</text>',
    ]

"""What a part of the report is made of: targets, tables, and the words around them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.benchmarks.processes import Shares
from tests.benchmarks.statistics_of import median


@dataclass(frozen=True, slots=True)
class Target:
    """A promise and what was measured; `value` is None where nothing was measured, and `note` says why.

    spread: largest less smallest of the repeats, relative to their median
    """

    what: str
    value: float | None
    bound: float
    kind: Literal["at least", "at most"]
    unit: str = ""
    spread: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where it was not measured."""
        if self.value is None or math.isnan(self.value):
            return None
        return self.value >= self.bound if self.kind == "at least" else self.value <= self.bound


def target_table(targets: Iterable[Target]) -> str:
    """The targets as a Markdown table."""
    rows = [["what", "measured", "target", "met", "spread of repeats"]]
    for target in targets:
        words = {True: "yes", False: "**no**", None: "not measured"}[target.met]
        value = "-" if target.met is None else number(target.value, target.unit)
        what = target.what + (f" ({target.note})" if target.note else "")
        spread = "" if target.spread is None or math.isnan(target.spread) else f"{100 * target.spread:.0f} %"
        rows.append([what, value, f"{target.kind} {number(target.bound, target.unit)}", words, spread])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {head} |", "|" + "---|" * len(rows[0]), *(f"| {row} |" for row in body)])


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, per cents with two decimals, with a unit."""
    if value is None or math.isnan(value):
        return "-"
    size = abs(value)
    digits = 2 if unit == "%" else 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}{' ' + unit if unit else ''}"


def percent(share: float) -> str:
    """A share of 0..1 in per cent."""
    return f"{100 * share:.1f} %"


def shares_table(columns: Mapping[str, Sequence[Shares]], least: float = 0.002) -> str:
    """Median shares of all cores by role, a column for each load; roles below `least` everywhere are left out."""
    medians = {name: _median_shares(shares) for name, shares in columns.items()}
    roles: dict[str, float] = {}
    for shares in medians.values():
        for role, share in shares.items():
            roles[role] = max(roles.get(role, 0.0), share)
    kept = sorted((role for role, share in roles.items() if share >= least), key=lambda role: -roles[role])
    rows = [["share of all cores", *medians]]
    rows += [[role, *(percent(shares.get(role, 0.0)) for shares in medians.values())] for role in kept]
    rows.append(["idle", *(percent(max(0.0, 1 - sum(shares.values()))) for shares in medians.values())])
    return table(rows)


def _median_shares(measured: Sequence[Shares]) -> dict[str, float]:
    roles = {role for shares in measured for role in shares.by_role}
    return {role: median([shares.of(role) for shares in measured]) for role in roles}

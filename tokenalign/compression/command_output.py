"""What `compress` prints: counts, losses, entries and token growth as lines, and the bar of a distillation."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tokenalign.compression.counting import Counts
from tokenalign.compression.token_growth import Growth
from tokenalign.compression.vocabulary_rule import Kept


def count_lines(counts: Counts) -> list[str]:
    """Counts as lines for a reader."""
    short = {"linear_attention": "linear", "full_attention": "full"}
    types = "" if counts.layer_types is None else f" ({', '.join(short.get(t, t) for t in counts.layer_types)})"
    lines = [
        f"  layers               {counts.layers}{types}",
        f"  parameters           {counts.parameters:,}",
        f"  embedding            {counts.embedding_parameters:,} in {counts.rows:,} rows, "
        f"{counts.embedding_share:.1%} of all",
        f"  all but embedding    {counts.stack_parameters:,}",
        f"  model.safetensors    {counts.file_bytes:,} bytes ({counts.file_bytes / 2**20:.1f} MiB)",
    ]
    if counts.recurrent_scalars:
        lines.append(f"  recurrent scalars    {counts.recurrent_scalars}, which distillation leaves as they are")
    return lines


def loss_words(losses: dict[str, float]) -> str:
    """Losses as one phrase."""
    return ", ".join(f"{name} {losses[name]:.4f}" for name in ("total", "interface", "final") if name in losses)


def entry_lines(kept: Kept, before: int) -> list[str]:
    """How many entries each part of the rule brought."""
    lines = [f"  entries              {len(kept.source_ids):,} of {before:,}"]
    return lines + [f"    {reason:<28} {number:,}" for reason, number in kept.by_reason.items()]


def growth_lines(growth: Sequence[Growth]) -> list[str]:
    """Tokens before and after, by language."""
    lines = ["  tokens of the same text, before and after"]
    return lines + [f"    {one.language:<18} {one.before:>7,} {one.after:>7,}  {one.ratio:.2f}x" for one in growth]


def step_bar(console: Console) -> Progress:
    """A bar of steps with a note behind it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )

"""Which of a foreign checkpoint's tensors is which of ours, by name, shape and role; what isn't sure is a problem.

It is the card's architecture that is looked for, so whatever its maths has no place for (a bias in attention, a scorer
behind the blocks) is a problem too, and never dropped.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor

from tokenalign.foreign_names import Kind, TensorName, read_names, split_words

Shape = tuple[int, ...]

WIDTH, BACKBONE_WIDTH, FFN_WIDTH = "width", "backbone_width", "ffn_width"
HEAD_SLOTS: dict[str, tuple[str, ...]] = {
    "input.linear.weight": (WIDTH, BACKBONE_WIDTH),
    "query.weight": (WIDTH, WIDTH),
    "key.weight": (WIDTH, WIDTH),
    "input.weight": (BACKBONE_WIDTH,),
    "input.bias": (BACKBONE_WIDTH,),
    "log_scale": (),
}
BLOCK_SLOTS: dict[str, tuple[str, ...]] = {
    "attention_norm.weight": (WIDTH,),
    "attention_norm.bias": (WIDTH,),
    "query.weight": (WIDTH, WIDTH),
    "key.weight": (WIDTH, WIDTH),
    "value.weight": (WIDTH, WIDTH),
    "output.weight": (WIDTH, WIDTH),
    "ffn_norm.weight": (WIDTH,),
    "ffn_norm.bias": (WIDTH,),
    "ffn_in.weight": (FFN_WIDTH, WIDTH),
    "ffn_in.bias": (FFN_WIDTH,),
    "ffn_out.weight": (WIDTH, FFN_WIDTH),
    "ffn_out.bias": (WIDTH,),
}
_OUR_BLOCK = re.compile(r"blocks\.(0|[1-9]\d?)\.(.+)")
_CALL = re.compile(r"(log|transpose)\((.+)\)")
_ROWS = re.compile(r"(.+)\[(\d{0,9}):(\d{0,9})\]")
_SIDES = ("query", "label", "key", "document")
_FFN_LAYERS = frozenset({"fc", "linear", "dense", "intermediate", "up", "down"})
_INPUT_LAYERS = frozenset({"projection", "linear", "dense", "fc", "input", "in", "down", "reduce", "reduction"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where one of our tensors comes from: `name`, `name[0:256]` (rows), `log(…)` or `transpose(…)` of these."""

    name: str
    rows: tuple[int, int] | None = None
    call: str | None = None

    @classmethod
    def parse(cls, text: str, shapes: Mapping[str, Shape]) -> "Source":
        """The source that an override spells out; ValueError when it doesn't fit the checkpoint's shapes."""
        call, inner = (match[1], match[2]) if (match := _CALL.fullmatch(text)) and text not in shapes else (None, text)
        rows = None
        if inner not in shapes and (match := _ROWS.fullmatch(inner)):
            inner = match[1]
            count = shapes[inner][0] if shapes.get(inner) else 0
            rows = int(match[2] or 0), int(match[3] or count)
            if inner in shapes and not 0 <= rows[0] < rows[1] <= count:
                raise ValueError(f"{text!r} asks for rows {rows[0]} to {rows[1]} of {count}")
        if inner not in shapes:
            raise ValueError(f"{text!r} names no tensor of this checkpoint")
        if call == "transpose" and len(shapes[inner]) != 2:
            raise ValueError(f"{text!r} transposes a tensor of shape {shapes[inner]}, a matrix is needed")
        return cls(inner, rows, call)

    def __str__(self) -> str:
        text = self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"
        return text if self.call is None else f"{self.call}({text})"

    def shape(self, shapes: Mapping[str, Shape], rank: int) -> Shape:
        """Its shape, dimensions of size one dropped where there are more than `rank`."""
        shape = list(shapes[self.name])
        if self.rows is not None:
            shape[0] = self.rows[1] - self.rows[0]
        if self.call == "transpose":
            shape.reverse()
        while len(shape) > rank and 1 in shape:
            shape.remove(1)
        return tuple(shape)

    def take(self, tensors: Mapping[str, Tensor], rank: int) -> Tensor:
        """The tensor itself, fp32 and with `shape`."""
        tensor = tensors[self.name]
        shape = self.shape({self.name: tuple(tensor.shape)}, rank)
        if self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        if self.call == "transpose":
            tensor = tensor.T
        elif self.call == "log":
            tensor = tensor.double().log()
        return tensor.float().reshape(shape).contiguous()


@dataclass(slots=True)
class TensorReading:
    """What the tensors say.

    sources: our names -> where each comes from
    widths: `width`, `backbone_width`, `ffn_width`, as far as the shapes show them
    ignored: foreign names left out at the user's word
    problems: what is missing, ambiguous, misshapen or left over; only where it is empty may `sources` be used
    """

    sources: dict[str, Source] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    blocks: int = 0
    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Module:
    """Tensors of one module: by kind, and more than one of a kind where names coincide after synonyms."""

    container: str
    block: int
    words: tuple[str, ...]
    tensors: dict[Kind, list[str]] = field(default_factory=lambda: {"weight": [], "bias": []})

    def has(self, *words: str) -> bool:
        return not set(words).isdisjoint(self.words)

    @property
    def one_sided(self) -> bool:
        """Whether it stands in a container of labels or of documents alone."""
        return not set(split_words(self.container)).isdisjoint(_SIDES)

    @property
    def number(self) -> int | None:
        return next((int(word) for word in reversed(self.words) if word.isdecimal()), None)


def slot_dims(slot: str) -> tuple[str, ...] | None:
    """The names of the dimensions of one of our tensors; None when we have no such tensor."""
    match = _OUR_BLOCK.fullmatch(slot)
    return BLOCK_SLOTS.get(match[2]) if match else HEAD_SLOTS.get(slot)


def read_tensors(shapes: Mapping[str, Shape], overrides: Mapping[str, str], ignore: Iterable[str]) -> TensorReading:
    """Every tensor of ours with its source, or the problems that keep it from having one.

    shapes: the checkpoint's; overrides: our names -> sources as text; ignore: foreign names or patterns like `scorer.*`
    """
    return _Matcher(shapes, overrides, tuple(ignore)).read()


class _Matcher:
    """One reading of one checkpoint: candidates are collected slot by slot, then each must have exactly one."""

    def __init__(self, shapes: Mapping[str, Shape], overrides: Mapping[str, str], ignore: tuple[str, ...]) -> None:
        self.shapes = shapes
        self.reading = TensorReading()
        self.reading.ignored = [name for name in sorted(shapes) if any(fnmatchcase(name, p) for p in ignore)]
        self.candidates: dict[str, list[Source]] = defaultdict(list)
        self.unclear: list[str] = []  # reported with a better word than "left over"
        self.explained: set[str] = set()  # slots whose problem is said already
        self.forced = self._parse_overrides(overrides)
        self.taken = {source.name for source in self.forced.values()}

    def read(self) -> TensorReading:
        """The steps in order: widths come from the head's own matrices, and help to tell what is in the blocks."""
        modules = _modules(read_names(self.shapes.keys() - set(self.reading.ignored)))
        outside = [module for module in modules if not module.container]
        self._match_matrices(outside)
        self._settle(HEAD_SLOTS, ("input.linear.weight", "query.weight", "key.weight"))
        self._match_input(outside)
        self._match_scale(outside)
        self._settle(HEAD_SLOTS, ("input.weight", "input.bias", "log_scale"))
        blocks = self._numbered_blocks(modules)
        for position, members in blocks:
            self._match_block(f"blocks.{position}.", members)
        named = [int(match[1]) + 1 for slot in self.forced if (match := _OUR_BLOCK.fullmatch(slot))]
        self.reading.blocks = max([position + 1 for position, _ in blocks] + named, default=0)
        for position in range(self.reading.blocks):
            self._settle({f"blocks.{position}.{slot}": dims for slot, dims in BLOCK_SLOTS.items()})
        self._report_left_over()
        return self.reading

    def _parse_overrides(self, overrides: Mapping[str, str]) -> dict[str, Source]:
        forced = {}
        for slot, text in overrides.items():
            if slot_dims(slot) is None:
                known = ", ".join([*HEAD_SLOTS, *(f"blocks.0.{name}" for name in BLOCK_SLOTS)])
                self.reading.problems.append(f"override of tensor {slot!r}: not a name of ours; these are: {known}")
                continue
            try:
                forced[slot] = Source.parse(text, self.shapes)
            except ValueError as error:
                self.explained.add(slot)
                self.reading.problems.append(f"override of tensor {slot!r}: {error}")
        return forced

    # Candidates

    def _add(self, slot: str, names: Iterable[str], rows: tuple[int, int] | None = None) -> None:
        self.candidates[slot] += [Source(name, rows) for name in names if name not in self.taken]

    def _add_matrix(self, slot: str, names: Iterable[str]) -> None:
        """A layer's weight is `[out, in]`; of a bare parameter or a kernel neither name nor square shape tells that."""
        for name in names:
            rows, columns = Source(name).shape(self.shapes, 2)
            if rows != columns or "weight" in name.rpartition(".")[2].lower() or slot in self.forced:
                self._add(slot, [name])
            elif name not in self.taken:
                self.unclear.append(name)
                self.explained.add(slot)
                self.reading.problems.append(
                    f"tensor {slot}: {name!r} may be [out, in] or [in, out]; "
                    f'say tensors={{"{slot}": "{name}"}} if it is [out, in], "transpose({name})" if not'
                )

    def _add_fused(self, slots: tuple[str, ...], module: _Module) -> None:
        for name in module.tensors["weight"]:
            rows = self.shapes[name][0] // len(slots)
            for i, slot in enumerate(slots):
                self._add(slot, [name], (i * rows, (i + 1) * rows))

    def _rank(self, module: _Module) -> int:
        """2 for a matrix, 1 for a vector, 0 for a number, by its weight where it has one; size-1 dimensions aside.

        -1 where names that coincide are of different ranks, so that none of them is taken.
        """
        names = module.tensors["weight"] or module.tensors["bias"]
        ranks = {sum(size != 1 for size in self.shapes[name]) for name in names}
        return ranks.pop() if len(ranks) == 1 else -1

    def _match_matrices(self, modules: list[_Module]) -> None:
        for module in modules:
            if self._rank(module) != 2:
                continue
            label_side, document_side = module.has("query", "label"), module.has("key", "document")
            weights = module.tensors["weight"]
            if module.has("qk") or {"query", "key"} <= set(module.words):
                self._add_fused(("query.weight", "key.weight"), module)
            elif label_side and document_side:
                self._match_neither_side(weights)
            elif label_side:
                self._add_matrix("query.weight", weights)
            elif document_side:
                self._add_matrix("key.weight", weights)
            elif not _INPUT_LAYERS.isdisjoint(module.words):
                self._add_matrix("input.linear.weight", weights)

    def _match_neither_side(self, names: list[str]) -> None:
        names = [name for name in names if name not in self.taken]
        open_slots = [slot for slot in ("query.weight", "key.weight") if slot not in self.forced]
        if names and open_slots:
            self.unclear += names
            self.reading.problems.append(
                f"tensor {' or '.join(open_slots)}: {_listed(names)} speaks of labels and of documents; choose with "
                f'tensors={{"{open_slots[0]}": "…"}}'
            )

    def _match_input(self, modules: list[_Module]) -> None:
        widths = self.reading.widths
        told_apart = widths.get(WIDTH) != widths.get(BACKBONE_WIDTH)  # else a final norm has the same shape
        for module in modules:
            named = module.has("input", "affine", "in") or (told_apart and (module.has("norm") or not module.words))
            if self._rank(module) != 1 or not named or module.has("output", "final", "post", *_SIDES):
                continue
            for kind, names in module.tensors.items():
                source_shapes = {name: Source(name).shape(self.shapes, 1) for name in names}
                fitting = {(widths[BACKBONE_WIDTH],)} if BACKBONE_WIDTH in widths else set(source_shapes.values())
                self._add(f"input.{kind}", [name for name in names if source_shapes[name] in fitting])

    def _match_scale(self, modules: list[_Module]) -> None:
        scalars = [module for module in modules if self._rank(module) == 0]
        logarithmic = [
            module
            for module in scalars
            if ({"log", "scale"} <= set(module.words) or module.has("logscale"))
            and module.number is None  # log2, log10
        ]
        for module in logarithmic:
            self._add("log_scale", module.tensors["weight"])
        if logarithmic or "log_scale" in self.forced:
            return
        unclear = [name for module in scalars for name in module.tensors["weight"] if name not in self.taken]
        if unclear:
            self.unclear += unclear
            self.explained.add("log_scale")
            self.reading.problems.append(
                f"tensor log_scale: {_listed(unclear)} may be the scale of the logits or its logarithm; "
                f'say tensors={{"log_scale": "{unclear[0]}"}} if it is the logarithm, "log({unclear[0]})" if not'
            )

    def _match_block(self, prefix: str, members: list[_Module]) -> None:
        vectors = [m for m in members if self._rank(m) == 1]
        norms = [m for m in vectors if m.has("norm") or (m.has("ffn") and m.tensors["weight"])]  # the first in an FFN
        matrices = [m for m in members if self._rank(m) == 2 and m.tensors["weight"]]
        ffn = [m for m in matrices if _is_ffn(m)]
        for slot, module in _ordered_norms(norms):
            for kind, names in module.tensors.items():
                self._add(f"{prefix}{slot}.{kind}", names)
        for slot, module in self._ordered_ffn(ffn):
            self._add_matrix(f"{prefix}{slot}.weight", module.tensors["weight"])
            self._add(f"{prefix}{slot}.bias", module.tensors["bias"])
        for module in matrices:
            if module in ffn:
                continue
            slots = tuple(f"{prefix}{role}.weight" for role in _attention_roles(module))
            if len(slots) > 1:
                self._add_fused(slots, module)
            elif slots:
                self._add_matrix(slots[0], module.tensors["weight"])

    def _ordered_ffn(self, modules: list[_Module]) -> Iterator[tuple[str, _Module]]:
        """By shape where the two differ in it, else by number, else by word; an unordered one is offered for both."""
        width = self.reading.widths.get(WIDTH)
        numbers = sorted({module.number for module in modules if module.number is not None})
        numbered = len(numbers) == len(modules) == 2
        for module in modules:
            rows, columns = Source(module.tensors["weight"][0]).shape(self.shapes, 2)
            if rows != columns and width in (rows, columns):
                first, second = columns == width, rows == width
            elif numbered:
                first, second = module.number == numbers[0], module.number == numbers[1]
            else:
                second = module.has("down", "output", "projection")
                first = not second and module.has("up", "in", "intermediate", "fc", "expand")
            if first or not second:
                yield "ffn_in", module
            if second or not first:
                yield "ffn_out", module

    def _numbered_blocks(self, modules: list[_Module]) -> list[tuple[int, list[_Module]]]:
        """(our position, its modules) of each block.

        Several containers give the same positions, hence ambiguity. One that is named after a side is not taken, since
        our blocks are shared by labels and documents.
        """
        members: dict[str, dict[int, list[_Module]]] = defaultdict(lambda: defaultdict(list))
        for module in modules:
            if module.container and not module.one_sided:
                members[module.container][module.block].append(module)
        placed = []
        for container, by_number in members.items():
            numbers = sorted(by_number)
            if numbers[0] > 1 or numbers[-1] - numbers[0] >= len(numbers):
                self.reading.problems.append(
                    f"blocks {container}: numbered {', '.join(map(str, numbers))}; one of the blocks is not there"
                )
            placed += [(position, by_number[number]) for position, number in enumerate(numbers)]
        return placed

    # Decisions

    def _settle(self, slots: Mapping[str, tuple[str, ...]], only: Iterable[str] | None = None) -> None:
        """Give each slot its one source and learn widths from the shapes, or say why not."""
        for slot in only or slots:
            dims = slots[slot]
            found = [self.forced[slot]] if slot in self.forced else self.candidates[slot]
            if len(found) != 1:
                self._report_slot(slot, dims, found)
                continue
            source = found[0]
            shape = source.shape(self.shapes, len(dims))
            if len(shape) == len(dims):
                for dim, size in zip(dims, shape, strict=True):
                    self.reading.widths.setdefault(dim, size)
            expected = tuple(self.reading.widths.get(dim, -1) for dim in dims)
            if shape != expected:
                self.reading.problems.append(
                    f"tensor {slot}: {source} has shape {shape}, {self._expected(dims)} is needed"
                )
            self.reading.sources[slot] = source

    def _report_slot(self, slot: str, dims: tuple[str, ...], found: list[Source]) -> None:
        if found:
            self.unclear += [source.name for source in found]
            self.reading.problems.append(
                f"tensor {slot}: {' and '.join(map(str, found))} could all be it; choose one with "
                f'tensors={{"{slot}": "…"}} and leave the others out with ignore=("…",)'
            )
        elif slot not in self.explained:
            self.reading.problems.append(f"tensor {slot}: none found; one of shape {self._expected(dims)} is needed")

    def _expected(self, dims: tuple[str, ...]) -> str:
        sizes = [str(self.reading.widths.get(dim, dim)) for dim in dims]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def _report_left_over(self) -> None:
        covered: dict[str, set[int]] = defaultdict(set)
        for source in self.reading.sources.values():
            covered[source.name] |= set(range(*(source.rows or (0, self._row_count(source.name)))))
        left = []
        for name in sorted(self.shapes.keys() - set(self.reading.ignored) - set(self.unclear)):
            unused = self._row_count(name) - len(covered[name])
            if name not in covered or unused == self._row_count(name):
                left.append(f"{name} {self.shapes[name]}")
            elif unused:
                left.append(f"{unused} rows of {name} {self.shapes[name]}")
        if left:
            self.reading.problems.append(
                f"tensors left over, whose maths this head doesn't have: {', '.join(left)}; where one is a tensor of "
                'ours, say so with tensors={…}, and ignore=("name or pattern",) leaves out what scores can do without'
            )

    def _row_count(self, name: str) -> int:
        return self.shapes[name][0] if self.shapes[name] else 1


def _modules(names: list[TensorName]) -> list[_Module]:
    modules: dict[tuple[str, int, tuple[str, ...]], _Module] = {}
    for name in names:
        key = (name.container, name.block, name.words)
        modules.setdefault(key, _Module(*key)).tensors[name.kind].append(name.name)
    return list(modules.values())


def _is_ffn(module: _Module) -> bool:
    if module.has("ffn"):
        return True
    if module.has("query", "key", "value", "qkv", "kv", "qk", "attention"):
        return False
    return not _FFN_LAYERS.isdisjoint(module.words) or (module.has("w") and module.number is not None)


def _attention_roles(module: _Module) -> tuple[str, ...]:
    """The roles that a matrix has in attention, in the order of its rows; none where its name says nothing."""
    words = set(module.words)
    sides = tuple(side for side in ("query", "key", "value") if side in words)
    if len(sides) == 3:
        return ()  # "query_key_value" is a habit of models that lay it out head by head
    if sides:
        return sides
    if "qkv" in words or {"in", "projection"} <= words or words == {"c", "attention"}:
        return "query", "key", "value"
    if "kv" in words:
        return "key", "value"
    if "qk" in words:
        return "query", "key"
    return ("output",) if words & {"output", "projection"} else ()


def _ordered_norms(modules: list[_Module]) -> Iterator[tuple[str, _Module]]:
    """The norm before attention and the one before the FFN: by word, else by number where there are just two."""
    numbered = []
    for module in modules:
        if module.has("output", "final"):
            continue  # of a block that normalises behind its layers, which ours doesn't
        if module.has("ffn", "post"):
            yield "ffn_norm", module
        elif module.has("attention", "input", "pre"):
            yield "attention_norm", module
        elif module.number is not None:
            numbered.append((module.number, module))
    if len({number for number, _ in numbered}) == 2:
        first = min(number for number, _ in numbered)
        for number, module in numbered:
            yield ("attention_norm" if number == first else "ffn_norm"), module


def _listed(names: list[str]) -> str:
    return " and ".join(repr(name) for name in names)

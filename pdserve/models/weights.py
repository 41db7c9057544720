"""Parameters that know how to fill themselves: from slices of checkpoint tensors, or at random.

A Weight holds one or more checkpoint modules stacked along their rows (q, k, v; gate, up), so fused
matrices need no special case in the loader (nano-vllm's idea). It knows what of each a rank holds,
and takes one part after another into tensors that are there from the beginning. WeightSet owns all
weights of a model. Knows no files and no architecture; models/layers declares weights,
models/loader.py fills them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from pdserve.kernels.collective.ops import slice_of
from pdserve.kernels.linear.matrix import Matrix, Shard
from pdserve.kernels.linear.schemes.scheme import Cut, Pieces, Scheme
from pdserve.models.dummy import fill_normal
from pdserve.models.sources.source import Read, Source, reads_of

Init = Literal["matrix", "bias", "ones", "zeros"]
BIAS_STD = 0.02


class StoredTensor(Protocol):
    """A checkpoint tensor that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        ...

    def read(self, window: tuple[slice, ...]) -> Tensor:
        """This part of it."""
        ...


@dataclass(frozen=True)
class Stacked:
    """One of `count` matrices that a checkpoint holds in one tensor of three dims, by number. name:
    of the tensor, after the module's."""

    name: str
    number: int
    count: int


@dataclass(frozen=True)
class Part:
    """A module of the checkpoint that a weight holds: of its `rows` the rank has part `index` of
    `count`. is_equal False: parts may differ (`collective.ops.slice_of`). columns: those that the
    rank has of it; None: as of the whole weight.

    first, of_rows: the rows are those from `first` on of a module that has of_rows of them, because
    its checkpoint stores several matrices in one; None: they are all of it. order: each run of so
    many rows is held in this order; () leaves rows as they are. stacked: the module is one of a
    stack; None: it has tensors of its own.
    """

    module: str
    rows: int
    index: int = 0
    count: int = 1
    is_equal: bool = True
    columns: Shard | None = None
    first: int = 0
    of_rows: int | None = None
    order: tuple[int, ...] = ()
    stacked: Stacked | None = None

    @property
    def drawn_as(self) -> str:
        """What random numbers of its matrix follow from."""
        if self.stacked is None:
            return f"{self.module}.weight"
        return f"{self.module}.{self.stacked.name}.{self.stacked.number}"

    def __post_init__(self) -> None:
        if self.is_equal and self.rows % self.count:
            raise ValueError(
                f"{self.module} has {self.rows} rows, which {self.count} ranks cannot share: "
                "choose an engine.tensor_parallel that divides them"
            )

    @property
    def held(self) -> slice:
        """Rows of the module that the rank has."""
        if not self.is_equal:
            assert self.of_rows is None, "unequal parts of a module's first matrix alone"
            return slice_of(self.rows, self.index, self.count)
        each = self.rows // self.count
        return slice(self.first + self.index * each, self.first + (self.index + 1) * each)

    @property
    def module_rows(self) -> int:
        return self.rows if self.of_rows is None else self.of_rows

    @property
    def num_held(self) -> int:
        return self.held.stop - self.held.start

    def cut(self, num_columns: int, shard: Shard) -> Cut:
        """What the rank holds of its matrix: num_columns, of columns that ranks share the shard's.
        Its own `columns` go before the shard."""
        shard = self.columns or shard
        count, index = (shard.count, shard.index) if shard.axis == "in" else (1, 0)
        columns = slice(index * num_columns, (index + 1) * num_columns)
        return Cut(self.held, self.module_rows, columns, num_columns * count)

    def ordered(self, rows: Tensor) -> Tensor:
        """The rank's rows of something that the module has a row of for each of its own."""
        if not self.order:
            return rows
        dtype = rows.dtype
        codes = rows.view(torch.uint8) if dtype.itemsize == 1 else rows  # torch picks no e4m3
        runs = codes.unflatten(0, (-1, len(self.order)))
        return runs[:, list(self.order)].flatten(0, 1).view(dtype)


@dataclass(frozen=True)
class Plain:
    """A tensor that is held as the checkpoint has it, whatever the scheme: a row of this shape for
    each row of the weight."""

    row: tuple[int, ...]
    dtype: torch.dtype
    init: Init


@dataclass(frozen=True)
class StoredMatrix:
    """The matrix of a weight, allocated by its scheme. sources, cuts: one for each part."""

    matrix: Matrix
    scheme: Scheme
    sources: Sequence[Source]
    cuts: Sequence[Cut]


class _Place(ABC):
    """Where the tensors of one part go. reads: by their checkpoint names. What was read waits here
    until nothing is missing."""

    def __init__(self, reads: Mapping[str, Read]) -> None:
        self.reads = reads
        self._awaited = {name for name, read in reads.items() if read.window is not None}
        self._raw: dict[str, Tensor] = {}

    def load(self, name: str, stored: StoredTensor) -> None:
        read = self.reads[name]
        _check(name, stored, read)
        if read.window is None:
            return
        rest = stored.shape[len(read.window) :]
        self._raw[name] = stored.read((*read.window, *(slice(0, size) for size in rest)))
        if self._awaited == self._raw.keys():
            raw, self._raw = self._raw, {}
            self.put(raw)

    @abstractmethod
    def put(self, raw: Mapping[str, Tensor]) -> None:
        """Take what was read, once all is there."""

    @abstractmethod
    def draw(self, seed: int) -> None:
        """Fill what the rank holds of the part with random values."""


class _PlainPlace(_Place):
    """target: the part's rows of a plain tensor."""

    def __init__(self, name: str, plain: Plain, part: Part, target: Tensor) -> None:
        self._name = name
        self._shape = (part.module_rows, *plain.row)
        self._first = (part.held.start, *[0] * len(plain.row))
        self._init = plain.init
        self._part = part
        self._target = target
        read = Read((self._shape,), (part.held,))
        if part.stacked is not None:
            one = slice(part.stacked.number, part.stacked.number + 1)
            read = Read(((part.stacked.count, *self._shape),), (one, part.held))
        super().__init__({name: read})

    def put(self, raw: Mapping[str, Tensor]) -> None:
        rows = raw[self._name]
        self._target.copy_(self._part.ordered(rows if self._part.stacked is None else rows[0]))

    def draw(self, seed: int) -> None:
        if self._init in ("ones", "zeros"):
            self._target.fill_(float(self._init == "ones"))
        else:
            std = BIAS_STD if self._init == "bias" else self._shape[-1] ** -0.5
            stacked = self._part.stacked
            key = self._name if stacked is None else f"{self._name}.{stacked.number}"
            fill_normal(self._target, std, f"{seed}/{key}", self._first, self._shape)


class _MatrixPlace(_Place):
    """first: the row of the matrix at which the part begins."""

    def __init__(self, part: Part, stored: StoredMatrix, index: int, first: int) -> None:
        module = self._module = part.module
        self._part = part
        self._matrix = stored.matrix
        self._scheme = stored.scheme
        self._source = stored.sources[index]
        self._cut = stored.cuts[index]
        self._first = first
        with errors_named(module):
            reads = reads_of(self._source, self._cut)
        super().__init__({f"{module}.{name}": read for name, read in reads.items()})

    def put(self, raw: Mapping[str, Tensor]) -> None:
        own = {name[len(self._module) + 1 :]: tensor for name, tensor in raw.items()}
        with errors_named(self._module):
            pieces = self._source.pieces(own, self._cut).reordered(self._part.ordered)
            self._scheme.take(self._matrix, self._first, pieces)

    def draw(self, seed: int) -> None:
        cut = self._cut
        is_dense = self._matrix.kind == "dense"
        if is_dense:  # drawn where they stay, without a copy
            numbers = self._matrix.data.narrow(0, self._first, cut.num_rows)
        else:
            numbers = torch.empty(cut.num_rows, cut.num_columns, device=self._matrix.data.device)
        first = (cut.rows.start, cut.columns.start)
        whole = (cut.of_rows, cut.of_columns)
        key = f"{seed}/{self._part.drawn_as}"
        fill_normal(numbers, cut.of_columns**-0.5, key, first, whole)
        if not is_dense:
            self._scheme.take(self._matrix, self._first, Pieces(numbers))


class Weight:
    """tensors: what it holds; plain ones by the checkpoint's name after the module's, those of the
    matrix as "weight", "scales" and "zeros". parts: stacked in this order. finish: called with the
    tensors when all are filled; afterwards the weight keeps none of them."""

    def __init__(
        self,
        parts: Sequence[Part],
        plain: Mapping[str, Plain],
        device: torch.device,
        finish: Callable[[Mapping[str, Tensor]], None],
        stored: StoredMatrix | None = None,
    ) -> None:
        num_rows = sum(part.num_held for part in parts)
        self.tensors = {} if stored is None else _tensors_of(stored.matrix)
        self.tensors |= {
            name: torch.empty((num_rows, *each.row), dtype=each.dtype, device=device)
            for name, each in plain.items()
        }
        self._finish: Callable[[Mapping[str, Tensor]], None] | None = finish
        self._places: list[_Place] = []
        self._by_name: dict[str, list[_Place]] = {}
        self.missing: set[str] = set()
        first = 0
        for index, part in enumerate(parts):
            if stored is not None:
                self._add(_MatrixPlace(part, stored, index, first))
            for name, each in plain.items():
                target = self.tensors[name].narrow(0, first, part.num_held)
                self._add(_PlainPlace(f"{part.module}.{name}", each, part, target))
            first += part.num_held

    @property
    def names(self) -> list[str]:
        """Of the checkpoint tensors that it takes."""
        return list(self._by_name)

    def load(self, name: str, stored: StoredTensor) -> None:
        """Read what the rank holds of checkpoint tensor `name`, converting floating dtypes;
        ValueError on a wrong shape or dtype, or on numbers that cannot be right."""
        for place in self._by_name[name]:
            place.load(name, stored)
        self.missing.discard(name)

    def draw(self, seed: int) -> None:
        """Random values under which activations keep their scale through any number of layers
        (norms scale by one); those of a rank are a part of the whole model's."""
        for place in self._places:
            place.draw(seed)
        self.missing.clear()

    def finish(self) -> None:
        """Hands the tensors over. Called once."""
        finish, self._finish = self._finish, None
        assert finish is not None, "a weight is finished once"
        finish(self.tensors)
        self.tensors = {}
        self._places = []
        self._by_name = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def _add(self, place: _Place) -> None:
        self._places.append(place)
        for name, read in place.reads.items():
            self._by_name.setdefault(name, []).append(place)
            if read.window is not None:
                self.missing.add(name)


class WeightSet:
    """All weights of one rank's model; `by_name` finds the one that holds a checkpoint tensor.
    elsewhere: the names of tensors that other ranks hold, or nobody; a name that ends in a dot
    means all tensors of that module."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.all: list[Weight] = []
        self.by_name: dict[str, Weight] = {}
        self.elsewhere: tuple[str, ...] = ()

    def add(self, weight: Weight) -> None:
        self.all.append(weight)
        self.by_name.update(dict.fromkeys(weight.names, weight))

    def find_unknown(self, names: Iterable[str]) -> list[str]:
        """The checkpoint names that neither this rank nor another has a place for."""
        known = frozenset(self.elsewhere)

        def is_known(name: str) -> bool:
            modules = accumulate(f"{module}." for module in name.split(".")[:-1])
            return name in self.by_name or name in known or not known.isdisjoint(modules)

        return [name for name in names if not is_known(name)]

    def missing(self) -> list[str]:
        """Checkpoint names not loaded so far, sorted."""
        return sorted(name for weight in self.all for name in weight.missing)

    def finish(self) -> None:
        """All are filled: the model may be used."""
        for weight in self.all:
            weight.finish()


@contextmanager
def errors_named(module: str) -> Iterator[None]:
    """Says of which module of a checkpoint a ValueError is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from error


def _tensors_of(m: Matrix) -> dict[str, Tensor]:
    named = {"weight": m.data, "scales": m.scales, "zeros": m.zeros}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _check(name: str, stored: StoredTensor, read: Read) -> None:
    if stored.shape not in read.shapes:
        said = " or ".join(str(list(shape)) for shape in read.shapes)
        raise ValueError(
            f"{name} has shape {list(stored.shape)} in the checkpoint; config.json says {said}"
        )
    if stored.dtype not in read.dtypes:
        raise ValueError(
            f"{name} is {stored.dtype} in the checkpoint; config.json says "
            f"{' or '.join(read.dtypes)}"
        )

"""Parameters that know how to fill themselves: from slices of checkpoint tensors, or at random.

A Weight holds one or more checkpoint modules stacked along their rows (q, k, v; gate, up), so fused
matrices need no special case in the loader (nano-vllm's idea). It knows what a rank holds of each,
and takes one part after another into tensors that exist from the beginning. WeightSet owns all
weights of a model. This file knows no files and no architecture: models/layers declares weights,
and models/loader.py fills them.
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
from pdserve.models.sources.source import DOWNLOAD, Read, Source, TensorError, reads_of

Init = Literal["matrix", "bias", "ones", "zeros"]
BIAS_STD = 0.02


class StoredTensor(Protocol):
    """A checkpoint tensor that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""
        ...

    def read(self, window: tuple[slice, ...]) -> Tensor:
        """Reads this part of the tensor."""
        ...


@dataclass(frozen=True)
class Stacked:
    """One of `count` matrices, by number, that a checkpoint holds in one tensor of three dims.

    name: the tensor's, after the module's.
    """

    name: str
    number: int
    count: int


@dataclass(frozen=True)
class Part:
    """A module of the checkpoint that a weight holds. The rank has part `index` of `count` of its
    `rows`.

    is_equal: if false, parts may have different sizes (`collective.ops.slice_of`).
    columns: those that the rank has of it; None: those of the whole weight.
    first, of_rows: its checkpoint stores several matrices in one module of of_rows rows, and these
        rows begin at `first`; None: they are all of it.
    order: each run of len(order) rows is held in this order; () leaves rows as they are.
    stacked: the module is one of a stack; None: it has tensors of its own.
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
        """The name from which the random numbers of its matrix are drawn."""
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
            assert self.of_rows is None, "only a whole module can have unequal parts"
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
        """Returns what the rank holds of its matrix. num_columns is the rank's number of columns.
        The part's own `columns` take precedence over the shard."""
        shard = self.columns or shard
        count, index = (shard.count, shard.index) if shard.axis == "in" else (1, 0)
        columns = slice(index * num_columns, (index + 1) * num_columns)
        return Cut(self.held, self.module_rows, columns, num_columns * count)

    def ordered(self, rows: Tensor) -> Tensor:
        """Puts the rank's rows, or anything with one entry per row, in the order they are held."""
        if not self.order:
            return rows
        dtype = rows.dtype
        codes = rows.view(torch.uint8) if dtype.itemsize == 1 else rows  # torch cannot index e4m3
        runs = codes.unflatten(0, (-1, len(self.order)))
        return runs[:, list(self.order)].flatten(0, 1).view(dtype)


@dataclass(frozen=True)
class Plain:
    """A tensor that is held as the checkpoint has it, whatever the scheme. For each row of the
    weight it has one row of this shape."""

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
    """The target of the tensors of one part. reads: by their checkpoint names. Tensors that were
    read wait here until none is missing."""

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
        """Takes what was read, once all tensors are there."""

    @abstractmethod
    def draw(self, seed: int) -> None:
        """Fills what the rank holds of the part with random values."""


class _PlainPlace(_Place):
    """The part's rows of a plain tensor, which is `target`."""

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
    """The part's rows of the matrix, which begin at row `first`."""

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
        if is_dense:  # drawn in place, without a copy
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
    """The tensors of one or several modules, stacked by rows.

    tensors: what it holds; plain ones by the checkpoint's name after the module's, those of the
        matrix as "weight", "scales", "zeros" and "row_scales".
    parts: stacked in this order.
    finish: is called with the tensors when all are filled; then the weight keeps none of them.
    """

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
        """Names of the checkpoint tensors that it takes."""
        return list(self._by_name)

    def load(self, name: str, stored: StoredTensor) -> None:
        """Reads what the rank holds of checkpoint tensor `name`, converting floating dtypes. Raises
        TensorError for a wrong shape or dtype, or for numbers that cannot be right."""
        for place in self._by_name[name]:
            place.load(name, stored)
        self.missing.discard(name)

    def draw(self, seed: int) -> None:
        """Draws random values under which activations keep their scale through any number of layers
        (norms scale by one). Those of a rank are a part of the whole model's."""
        for place in self._places:
            place.draw(seed)
        self.missing.clear()

    def finish(self) -> None:
        """Hands the tensors over. It may be called once."""
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
    """All weights of one rank's model. `by_name` finds the weight that holds a checkpoint tensor.

    elsewhere: names of tensors that other ranks hold, or nobody; a name that ends in a dot means
        all tensors of that module.
    """

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
        """Returns the checkpoint names for which neither this rank nor another has a place."""
        known = frozenset(self.elsewhere)

        def is_known(name: str) -> bool:
            modules = accumulate(f"{module}." for module in name.split(".")[:-1])
            return name in self.by_name or name in known or not known.isdisjoint(modules)

        return [name for name in names if not is_known(name)]

    def missing(self) -> list[str]:
        """Returns the checkpoint names that are not loaded so far, sorted."""
        return sorted(name for weight in self.all for name in weight.missing)

    def finish(self) -> None:
        """Finishes all weights, which must be filled. Then the model may be used."""
        for weight in self.all:
            weight.finish()


@contextmanager
def errors_named(module: str) -> Iterator[None]:
    """Puts the name of a checkpoint's module before the tensor's in a TensorError, and before the
    message of any other ValueError."""
    try:
        yield
    except TensorError as error:
        raise TensorError(f"{module}.{error.name}", error.problem) from error
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from error


def _tensors_of(m: Matrix) -> dict[str, Tensor]:
    named = {
        "weight": m.data,
        "scales": m.scales,
        "zeros": m.zeros,
        "row_scales": m.row_scales,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _check(name: str, stored: StoredTensor, read: Read) -> None:
    cure = f"correct config.json, or {DOWNLOAD}"
    if stored.shape not in read.shapes:
        said = " or ".join(str(list(shape)) for shape in read.shapes)
        raise TensorError(
            name,
            f"has shape {list(stored.shape)} in the checkpoint; config.json says {said}: {cure}",
        )
    if stored.dtype not in read.dtypes:
        raise TensorError(
            name,
            f"is {stored.dtype} in the checkpoint; config.json says {' or '.join(read.dtypes)}: "
            f"{cure}",
        )

"""The objects of a head: exactly those of docs/format.md, in exactly their types and layouts."""

from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5s, h5t

from tracekit.model import Array, DType
from tracekit.store.limits import FORMAT, MAX_DATASETS, MAX_DIMENSION, chunk_limit
from tracekit.store.rules import corrupt
from tracekit.store.schema import (
    DTYPE_ATTRIBUTE,
    DTYPES,
    FORMAT_ATTRIBUTE,
    OPTIONAL_TABLES,
    TABLES,
    WIDTHS,
    Role,
    uint,
)
from tracekit.store.userblock import UserBlock

SHUFFLE_FILTER, ZSTD_FILTER = 2, 32015
_RANKS = {role.group: role.rank for role in Role} | {"keys": 3, "values": 3, "arrays": 1}
_POOLS = {f"u{width}": width for width in WIDTHS}


@dataclass(frozen=True)
class PayloadSpec:
    """One payload dataset.

    Args:
        path: its path under `/payload`.
        shape: its shape.
        chunk_rows: rows of a chunk.
        dtype: unsigned integer of its elements.
        logical: what the elements are; None for a pool.
        first_chunk: row of the table `chunks` of its first chunk.
    """

    path: str
    shape: tuple[int, ...]
    chunk_rows: int
    dtype: np.dtype[Any]
    logical: DType | None
    first_chunk: int

    @property
    def rows(self) -> int:
        """Rows along axis 0."""
        return self.shape[0]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.rows // self.chunk_rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = self.dtype.itemsize
        for extent in self.shape[1:]:
            size *= extent
        return size


def parse_structure(file: h5py.File, block: UserBlock) -> tuple[dict[str, Array], dict[str, PayloadSpec]]:
    """Return the tables and the payload datasets of a head.

    Raises:
        TraceCorrupt: E-09 to E-14.
    """
    root = _members(file, "/")
    _expect_names("/", root, {"index", "payload"}, h5py.Group)
    version = _attributes(file, "/", {FORMAT_ATTRIBUTE})[FORMAT_ATTRIBUTE]
    if version != "{}.{}".format(*FORMAT):
        raise corrupt("E-14", f"Attribute {FORMAT_ATTRIBUTE} is {version!r}, against the user block.")
    for group in root.values():
        _attributes(group, group.name, set())
    index = _members(root["index"], "/index")
    absent = OPTIONAL_TABLES - set(index)
    _expect_names("/index", index, set(TABLES) - absent, h5py.Dataset)
    tables = {
        name: np.zeros(0, dtype) if name in absent else _table(index[name], name, block)
        for name, dtype in TABLES.items()
    }
    return tables, _payload(root["payload"])


def _payload(group: h5py.Group) -> dict[str, PayloadSpec]:
    datasets: dict[str, h5py.Dataset] = {}
    for name, child in _members(group, "/payload").items():
        if name not in _RANKS or not isinstance(child, h5py.Group):
            raise corrupt("E-09", f"/payload/{name} is no group of a trace.", object=name)
        _attributes(child, child.name, set())
        for number, dataset in _members(child, child.name).items():
            known = (
                number in _POOLS if name == "arrays" else number.isdecimal() and number == str(int(number))
            )
            if not known or not isinstance(dataset, h5py.Dataset):
                raise corrupt("E-09", f"/payload/{name}/{number} is no dataset of a trace.", object=number)
            datasets[f"{name}/{number}"] = dataset
    if len(datasets) > MAX_DATASETS:
        raise corrupt("E-12", f"{len(datasets)} datasets are over the limit of {MAX_DATASETS}.")
    specs: dict[str, PayloadSpec] = {}
    first = 0
    for path in sorted(datasets, key=str.encode):
        specs[path] = spec = _payload_spec(datasets[path], path, first)
        first += spec.chunks
    for role in Role:
        present = sum(path.startswith(f"{role.group}/") for path in specs)
        absent = [n for n in range(present) if f"{role.group}/{n}" not in specs]
        if absent:
            raise corrupt("E-09", f"/payload/{role.group}/{absent[0]} is missing.")
    return specs


def _payload_spec(dataset: h5py.Dataset, path: str, first_chunk: int) -> PayloadSpec:
    group, _, name = path.partition("/")
    pool = group == "arrays"
    attributes = _attributes(dataset, path, set() if pool else {DTYPE_ATTRIBUTE})
    logical = None if pool else DTYPES.get(attributes[DTYPE_ATTRIBUTE])
    if not pool and logical is None:
        raise corrupt(
            "E-14", f"{path}: {attributes[DTYPE_ATTRIBUTE]!r} is no dtype of a trace.", dataset=path
        )
    width = _POOLS[name] if logical is None else logical.container.itemsize
    _expect_type(dataset, path, uint(width))
    creation, shape = dataset.id.get_create_plist(), _fixed_shape(dataset, path)
    if len(shape) != _RANKS[group] or not all(0 < n <= MAX_DIMENSION for n in shape[1:]) or shape[0] < 1:
        raise corrupt("E-12", f"{path} has the shape {list(shape)}.", dataset=path)
    if creation.get_layout() != h5d.CHUNKED:
        raise corrupt("E-12", f"{path} is not chunked.", dataset=path)
    chunk = creation.get_chunk()
    spec = PayloadSpec(path, shape, chunk[0], uint(width), logical, first_chunk)
    size = chunk[0] * spec.row_bytes
    if chunk[1:] != shape[1:] or not 0 < chunk[0] <= shape[0] or size > chunk_limit(spec.row_bytes):
        raise corrupt("E-12", f"{path} has chunks of {list(chunk)} in {list(shape)}.", dataset=path)
    filters = [creation.get_filter(i) for i in range(creation.get_nfilters())]
    if [known[0] for known in filters] != [SHUFFLE_FILTER, ZSTD_FILTER] or filters[0][2] != (width,):
        raise corrupt("E-13", f"{path} has other filters than shuffle and zstd.", dataset=path)
    return spec


def _table(dataset: h5py.Dataset, name: str, block: UserBlock) -> Array:
    path, dtype = f"/index/{name}", TABLES[name]
    _attributes(dataset, path, set())
    _expect_type(dataset, path, dtype)
    creation, shape = dataset.id.get_create_plist(), _fixed_shape(dataset, path)
    if len(shape) != 1 or shape[0] * dtype.itemsize > block.head:
        raise corrupt("E-12", f"{path} has the shape {list(shape)} in a head of {block.head} bytes.")
    if name in OPTIONAL_TABLES and not shape[0]:
        raise corrupt("E-12", f"{path} has no row and is there.", dataset=path)
    if creation.get_layout() != h5d.CONTIGUOUS:
        raise corrupt("E-12", f"{path} is not contiguous.", dataset=path)
    if creation.get_nfilters():
        raise corrupt("E-13", f"{path} has filters.", dataset=path)
    table = np.zeros(shape, dtype)
    if table.size:
        dataset.id.read(h5s.ALL, h5s.ALL, table)
    return table


def _members(group: h5py.Group, path: str) -> dict[str, Any]:
    members = {}
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise corrupt("E-10", f"{path}: {name} is a soft or external link.", object=name)
        members[name] = group[name]
    return members


def _expect_names(path: str, found: dict[str, Any], names: set[str], kind: type) -> None:
    for name in sorted(names ^ set(found)):
        state = "missing" if name in names else "more than a trace has"
        raise corrupt("E-09", f"{path}: {name} is {state}.", object=name)
    for name, child in found.items():
        if not isinstance(child, kind):
            raise corrupt("E-09", f"{path}: {name} is no {kind.__name__.lower()}.", object=name)


def _attributes(target: Any, path: str, names: set[str]) -> dict[str, str]:
    """Return the attributes, which are exactly `names` and fixed-length ASCII."""
    found = {h5a.open(target.id, index=i).name.decode() for i in range(h5a.get_num_attrs(target.id))}
    if found != names:
        raise corrupt("E-09", f"{path} has the attributes {sorted(found)}, not {sorted(names)}.")
    values = {}
    for name in names:
        attribute = h5a.open(target.id, name.encode())
        kind = attribute.get_type()
        scalar = attribute.get_space().get_simple_extent_type() == h5s.SCALAR
        if kind.get_class() != h5t.STRING or kind.is_variable_str() or not scalar or kind.get_size() > 64:
            raise corrupt("E-14", f"{path}: attribute {name} is no short text.", attribute=name)
        value = np.zeros((), f"S{kind.get_size()}")
        attribute.read(value)
        values[name] = bytes(value.item()).decode("ascii", "replace")
    return values


def _expect_type(dataset: h5py.Dataset, path: str, dtype: np.dtype[Any]) -> None:
    if not dataset.id.get_type().equal(h5t.py_create(dtype)):
        raise corrupt("E-11", f"{path} has another element type than {dtype}.", dataset=path)


def _fixed_shape(dataset: h5py.Dataset, path: str) -> tuple[int, ...]:
    creation, space = dataset.id.get_create_plist(), dataset.id.get_space()
    if creation.get_layout() == h5d.VIRTUAL or creation.get_external_count():
        raise corrupt("E-10", f"{path} is stored in other files.", dataset=path)
    if space.get_simple_extent_type() != h5s.SIMPLE:
        raise corrupt("E-12", f"{path} has no shape.", dataset=path)
    shape = space.get_simple_extent_dims()
    if space.get_simple_extent_dims(maxdims=True) != shape:
        raise corrupt("E-12", f"{path} may grow.", dataset=path)
    return tuple(shape)

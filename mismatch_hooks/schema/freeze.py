"""Deep immutability for records: snapshots taken once, at construction, that pickle and compare by value."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any


class SchemaError(ValueError):
    """A record was built from values that break one of its invariants."""


class FrozenMapping(Mapping[Any, Any]):
    """An immutable, hashable mapping, keyed by strings or enum members, whose values are frozen too.

    A ``types.MappingProxyType`` cannot be pickled, and records travel to worker processes.
    """

    __slots__ = ("_items",)
    _items: dict[Any, Any]

    def __init__(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        snapshot = dict(items)
        for key in snapshot:
            if not isinstance(key, str | Enum):
                raise SchemaError(f"a mapping in a record has the key {key!r}; keys are strings or enum members.")
        object.__setattr__(self, "_items", {key: freeze(value) for key, value in snapshot.items()})

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __eq__(self, other: object) -> bool:
        return dict(self._items) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"FrozenMapping is immutable; cannot set {name}.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"FrozenMapping is immutable; cannot delete {name}.")

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (dict(self._items),)


def freeze(value: Any) -> Any:
    """Return an immutable snapshot: mappings, sequences and sets recursively; scalars, enums and records as is.

    Raises:
        SchemaError: the value is mutable and of no kind that can be snapshotted (a tensor, an array, an open file).
    """
    if value is None or isinstance(value, str | bytes | bool | int | float | Enum | FrozenMapping):
        return value
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, Set):
        return frozenset(freeze(member) for member in value)
    if isinstance(value, Sequence):
        return tuple(freeze(member) for member in value)
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return value
    raise SchemaError(
        f"a record cannot hold a {type(value).__name__}; it takes scalars, sequences, mappings and records."
    )


def thaw(value: Any) -> Any:
    """Return ``value`` as plain JSON-ready data: enums by value, records and mappings as dicts, sequences as lists."""
    if isinstance(value, Enum):
        return value.name.lower() if isinstance(value.value, int) else value.value
    if isinstance(value, Mapping):
        return {thaw(key): thaw(member) for key, member in value.items()}
    if isinstance(value, frozenset | set):
        return sorted((thaw(member) for member in value), key=repr)
    if isinstance(value, list | tuple):
        return [thaw(member) for member in value]
    names = getattr(type(value), "__dataclass_fields__", None)
    if names is not None:
        return {name: thaw(getattr(value, name)) for name in names}
    return value

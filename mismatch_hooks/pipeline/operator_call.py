"""How a call of an operator in a live engine is taken apart, so that it can be played again anywhere."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Operands = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorCall:
    """What is needed to capture calls of one patch site and to play those of either engine.

    Both sides' calls of a factor agree on the names and layouts of operands (tensors with one row a token, no batch)
    and of the result. Weights and parameters are no operands: each side plays with its own.

    Attributes:
        places: module names as the rollout's model has them; the n-th call of a forward is of the n-th, round and
            round, so that one shared function has as many as it has callers.
        take: from a live call's positional and keyword arguments to its operands; None for a call that has none to
            speak of, such as one that has to read what only its engine holds.
        play: calls an implementation of this site on operands and returns what it returned; None where the operator
            cannot be called outside a forward, as one that reads a paged KV cache.
        repeat: for such an operator: calls an implementation on the arguments of the live call once more and returns
            what it returned, writing over nothing.
        result: from what an implementation returned to the tensor that is compared; None where a live call returns
            something else than what ``play`` returns.
    """

    places: tuple[str, ...]
    take: Callable[[tuple[Any, ...], Mapping[str, Any]], Operands | None]
    play: Callable[[Callable[..., Any], Operands], Any] | None = None
    repeat: Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any] | None = None
    result: Callable[[Any], Any] | None = lambda returned: returned

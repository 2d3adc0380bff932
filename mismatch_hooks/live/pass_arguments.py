"""Evidence for what is no place in a model but an argument of one scoring pass (batch size, path, write-back)."""

from collections.abc import Mapping
from dataclasses import dataclass

from mismatch_hooks.schema.enums import Choice, SwitchStatus, Value
from mismatch_hooks.schema.score import CallCount, SwitchState


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one pass showed of one argument.

    Attributes:
        value: the value that the pass really ran with, as seen from what the engine did; None if it cannot be told.
        expected: forwards (or requests) that a pass with the value that was asked for makes.
        observed: those that it made.
    """

    value: Value | None
    expected: int
    observed: int


def switch_states(
    arguments: Mapping[str, tuple[str, Value]], seen: Mapping[str, Seen], *, rank: int
) -> tuple[SwitchState, ...]:
    """Return what each argument of a pass was, next to what was asked for.

    Args:
        arguments: switch path to factor and value, as ``Registry.pass_arguments`` gives them.
        seen: switch path to what the pass showed; an argument that is not in it ran as it always does.
        rank: the engine rank.
    """
    states = []
    for path, (factor, asked) in arguments.items():
        effective = seen[path].value if path in seen else Choice.NATIVE
        applied = effective == asked and type(effective) is type(asked)
        states.append(
            SwitchState(
                factor=factor,
                rank=rank,
                requested=asked,
                effective=effective,
                status=SwitchStatus.APPLIED if applied else SwitchStatus.FELL_BACK,
            )
        )
    return tuple(states)


def call_counts(
    arguments: Mapping[str, tuple[str, Value]], seen: Mapping[str, Seen], *, rank: int
) -> tuple[CallCount, ...]:
    """Return one count for each argument that is not native; its call site is named after its switch."""
    return tuple(
        CallCount(factor=arguments[path][0], site=path, rank=rank, expected=found.expected, observed=found.observed)
        for path, found in seen.items()
        if path in arguments and arguments[path][1] is not Choice.NATIVE
    )

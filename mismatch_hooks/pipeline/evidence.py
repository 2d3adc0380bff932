"""What a verdict needs to have seen beside its passes; a readback that nobody could make is no evidence."""

from collections.abc import Callable, Mapping

from mismatch_hooks.pipeline.contracts import contract_of
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.environment import ExecutionFingerprint
from mismatch_hooks.schema.factor import MismatchFactor, ReferenceImplementation
from mismatch_hooks.schema.readback import Unobservable

# From an execution, a factor and one role of its switch to why there is no such evidence of it, or "".
_Look = Callable[[ExecutionFingerprint, MismatchFactor, PolicyRole], str]


def missing_evidence(
    factor: MismatchFactor, execution: ExecutionFingerprint, reference: ReferenceImplementation | None = None
) -> tuple[str, ...]:
    """Return one sentence for each kind of evidence that the factor requires and this execution does not have.

    Args:
        factor: what is examined; only the roles of its switch are looked at.
        execution: what was read around the passes.
        reference: the implementation that was bound; what it requires of the settings has to be in effect.
    """
    unset = tuple(
        f"Reference {reference.name} needs a setting: {why}"
        for setting in (reference.required_settings if reference else ())
        for role in factor.switch.roles
        if reference and (why := setting.broken(execution.settings[role]))
    )
    return unset + tuple(
        f"No {name} from {role.value}: {why}."
        for name in factor.evidence
        for role in factor.switch.roles
        if (why := EVIDENCE[name](execution, factor, role) if name in EVIDENCE else _setting(execution, role, name))
    )


def _setting(execution: ExecutionFingerprint, role: PolicyRole, key: str) -> str:
    found = execution.settings[role].effective(key)
    return found.reason if isinstance(found, Unobservable) else ""


def _readback(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    settings = execution.settings[role].settings
    if not settings:
        return "the engine reports no setting at all"
    found = settings.get(factor.switch.path)
    return f"{factor.switch.path}: {found.reason}" if isinstance(found, Unobservable) else ""


def _weights(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    return "" if execution.weights.get(role) else "its weights were not digested"


def _libraries(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    ours = [name for name in execution.environment.libraries if name.startswith(f"{role.value}:")]
    return "" if ours else "no installed library was read back"


def _collectives(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    readback = execution.settings[role]
    unread = _setting(execution, role, "parallel.tensor")
    if unread or readback.effective("parallel.tensor") == 1:
        return unread
    found = contract_of(readback, factor.contract).collectives
    return "" if found else f"{factor.contract or factor.operator} has no collective on {role.value}"


def _placement(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    return "" if execution.identity.batch_placement else "no sequence has a place in a batch"


def _shape(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    return "" if execution.identity.model_shape else "the model's shape is not known"


def _positions(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    return _setting(execution, role, "model.rope.inverse_frequency_last")


def _vocabulary(execution: ExecutionFingerprint, factor: MismatchFactor, role: PolicyRole) -> str:
    return _setting(execution, role, "model.vocab.size")


EVIDENCE: Mapping[str, _Look] = {
    "effective-config readback": _readback,
    "model-state fingerprint": _weights,
    "library versions": _libraries,
    "collective contract": _collectives,
    "batch placement": _placement,
    "model shape": _shape,
    "position cache": _positions,
    "vocab shard map": _vocabulary,
    "log-sum-exp export": lambda execution, factor, role: "no engine exports the sums of its vocabulary shards",
}

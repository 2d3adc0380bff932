"""The fingerprint of one ablation: what was compared, where, with which settings, implementations, weights and sums."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable

from mismatch_hooks.live.weights import combined_digest
from mismatch_hooks.pipeline.contracts import contract_of
from mismatch_hooks.schema.enums import Origin, PolicyRole
from mismatch_hooks.schema.environment import EnvironmentFingerprint, ExecutionFingerprint
from mismatch_hooks.schema.fingerprint import fingerprint
from mismatch_hooks.schema.identity import ComparisonIdentity
from mismatch_hooks.schema.readback import Readback, Reading
from mismatch_hooks.schema.score import ScoringSequence, WeightsDigest
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.thresholds import fingerprint as thresholds_fingerprint

_OPERATORS = ("embedding", "norm", "linear", "rope", "attention", "activation", "head")
_REVISION_CHARACTERS = 16
_DETERMINISM = ("training.deterministic_algorithms", "training.matmul.tf32", "engine.threads")


def execution_of(
    sequences: Sequence[ScoringSequence],
    readbacks: Mapping[PolicyRole, Readback],
    weights: Mapping[PolicyRole, WeightsDigest],
    *,
    shape: ModelShape,
    origin: Origin,
) -> ExecutionFingerprint:
    """Return what the verdicts of one ablation depend on.

    Args:
        sequences: what is scored, in one batch, in this order.
        readbacks: the settings in effect.
        weights: what is loaded.
        shape: of the model.
        origin: what the factors that are not examined are bound to.
    """
    return ExecutionFingerprint(
        identity=_identity(sequences, weights[PolicyRole.TRAINING], shape),
        environment=_environment(readbacks),
        settings=readbacks,
        implementations={
            role: {operator: contract_of(readback, operator).layout for operator in _OPERATORS}
            for role, readback in readbacks.items()
        },
        weights={role: combined_digest(digest) for role, digest in weights.items()},
        collectives={
            role: tuple(
                f"{operator}: {one.op} over {one.group_size} by {one.backend}"
                for operator in _OPERATORS
                for one in contract_of(readback, operator).collectives
            )
            for role, readback in readbacks.items()
        },
        origin=origin.value,
        thresholds=thresholds_fingerprint(),
    )


def _identity(sequences: Sequence[ScoringSequence], weights: WeightsDigest, shape: ModelShape) -> ComparisonIdentity:
    prompts = [one.prompt_token_ids for one in sequences]
    # The rollouts of a group share their prompt; a sample of a step may hold a part of some groups.
    groups = tuple(prompts.index(prompt) for prompt in prompts)
    sizes = {groups.count(group) for group in groups}
    return ComparisonIdentity(
        prompt_ids=tuple(one.prompt_token_ids for one in sequences),
        response_ids=tuple(one.response_token_ids for one in sequences),
        active_mask=tuple(one.response_mask for one in sequences),
        # Rows are scored unpacked, each from position 0, in one batch and in this order; sequences that the loop's
        # dynamic sampling dropped have no training log-probs and are never scored.
        position_ids=tuple(
            tuple(range(len(one.prompt_token_ids), len(one.prompt_token_ids) + len(one.response_token_ids)))
            for one in sequences
        ),
        checkpoint=weights.version,
        revision=combined_digest(weights),
        model_shape=fingerprint(shape),
        rollout_group=groups,
        group_size=sizes.pop() if len(sizes) == 1 else 0,
        batch_placement=tuple((0, row) for row in range(len(sequences))),
        sampled_in=(True,) * len(sequences),
    )


def _environment(readbacks: Mapping[PolicyRole, Readback]) -> EnvironmentFingerprint:
    # By role: the engines may live in two processes with two installations, and neither may hide the other's.
    values = {
        (role.value, key): str(setting.effective)
        for role, readback in readbacks.items()
        for key, setting in readback.settings.items()
        if isinstance(setting, Reading)
    }
    return EnvironmentFingerprint(
        python=platform.python_version(),
        torch=_version("torch"),
        driver=_both(values, "engine.driver"),
        device=_both(values, "engine.device"),
        libraries={
            f"{role}:{key.removeprefix('library.')}": one
            for (role, key), one in values.items()
            if key.startswith("library.")
        },
        determinism={
            f"{role}:{key}": one
            for (role, key), one in values.items()
            if key.startswith("environment.") or key in _DETERMINISM
        },
        own_version=_version("mismatch-hooks"),
        own_revision=own_revision(),
    )


def _both(values: Mapping[tuple[str, str], str], key: str) -> str:
    return ", ".join(f"{role}: {one}" for (role, name), one in values.items() if name == key)


@cache
def own_revision() -> str:
    """Return a digest of this package's own sources: a version number stays while somebody edits a checkout."""
    package = files("mismatch_hooks")
    found = hashlib.sha256()
    for path, source in sorted(_sources(package, "")):
        found.update(f"{path}\n{len(source)}\n".encode() + source)
    return found.hexdigest()[:_REVISION_CHARACTERS]


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in ("tests", "__pycache__"):
            yield from _sources(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield path + entry.name, entry.read_bytes()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""

"""The fingerprint of one ablation: what was compared, where, with which settings, implementations, weights and sums."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

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
    return ComparisonIdentity(
        prompt_ids=tuple(one.prompt_token_ids for one in sequences),
        response_ids=tuple(one.response_token_ids for one in sequences),
        active_mask=tuple(one.response_mask for one in sequences),
        # Rows are scored unpacked, each from position 0.
        position_ids=tuple(
            tuple(range(len(one.prompt_token_ids), len(one.prompt_token_ids) + len(one.response_token_ids)))
            for one in sequences
        ),
        checkpoint=weights.version,
        revision=combined_digest(weights),
        model_shape=fingerprint(shape),
        rollout_group=tuple(range(len(sequences))),
        group_size=0,
        batch_placement=tuple((0, row) for row in range(len(sequences))),
        sampled_in=(True,) * len(sequences),
    )


def _environment(readbacks: Mapping[PolicyRole, Readback]) -> EnvironmentFingerprint:
    found = {key: setting for readback in readbacks.values() for key, setting in readback.settings.items()}
    values = {key: str(setting.effective) for key, setting in found.items() if isinstance(setting, Reading)}
    return EnvironmentFingerprint(
        python=platform.python_version(),
        torch=_version("torch"),
        driver=values.get("engine.driver", ""),
        device=values.get("engine.device", ""),
        libraries={key.removeprefix("library."): one for key, one in values.items() if key.startswith("library.")},
        determinism={key: one for key, one in values.items() if key.startswith("environment.") or key in _DETERMINISM},
        own_version=_version("mismatch-hooks"),
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""

"""The closed vocabularies of the design: every member is a word that a verdict, a plan or an event may use."""

from enum import Enum, IntEnum, StrEnum


class PolicyRole(Enum):
    """The two sides under test."""

    ROLLOUT = "rollout"
    TRAINING = "training"


class ExecutionPath(Enum):
    """How a log-prob was computed; floating point does not make these equal, so every score names its own."""

    TRAINING_FULL_PREFILL = "training_full_prefill"
    ROLLOUT_FULL_PREFILL = "rollout_full_prefill"
    ROLLOUT_DECODE = "rollout_decode"


class Arm(StrEnum):
    """One assignment of native or reference to both roles."""

    BOTH_NATIVE = "both_native"
    ROLLOUT_REFERENCE_ONLY = "rollout_reference_only"
    TRAINING_REFERENCE_ONLY = "training_reference_only"
    BOTH_REFERENCE = "both_reference"

    @property
    def choices(self) -> "dict[PolicyRole, Choice]":
        """What each role is bound to in this arm."""
        rollout = self in (Arm.ROLLOUT_REFERENCE_ONLY, Arm.BOTH_REFERENCE)
        training = self in (Arm.TRAINING_REFERENCE_ONLY, Arm.BOTH_REFERENCE)
        return {
            PolicyRole.ROLLOUT: Choice.REFERENCE if rollout else Choice.NATIVE,
            PolicyRole.TRAINING: Choice.REFERENCE if training else Choice.NATIVE,
        }

    def expected(self, origin: "Origin") -> "ExpectedOutcome":
        """What must be seen in this arm before any other is read."""
        exact = self is Arm.BOTH_REFERENCE and origin is Origin.ALIGNED
        return ExpectedOutcome.BITWISE_IDENTICAL if exact else ExpectedOutcome.MEASURE_ONLY


class ExpectedOutcome(Enum):
    """Whether an arm checks the measurement itself, or is what is measured."""

    BITWISE_IDENTICAL = "bitwise_identical"
    MEASURE_ONLY = "measure_only"


class Choice(Enum):
    """What one role runs for one factor."""

    NATIVE = "native"
    REFERENCE = "reference"


# What a switch is set to: native or reference, or one plain value of a sweep.
Value = Choice | str | int | float


class Expansion(Enum):
    """Which arms a factor is examined with."""

    STANDARD_FOUR = "standard_four"
    VALUE_SWEEP = "value_sweep"
    PAIRWISE = "pairwise"
    CONTENT = "content"


class SettingChannel(Enum):
    """Where a setting is set."""

    ENVIRONMENT_VARIABLE = "environment variable"
    ENGINE_ARGUMENT = "engine argument"
    CONFIG_FIELD = "config field"
    MODULE_PATCH = "module patch"
    SCORING_PASS = "argument of a scoring pass"


class Origin(Enum):
    """What every other factor is bound to while one is examined."""

    NATIVE = "native"
    ALIGNED = "aligned"


class ModelFamily(Enum):
    """The row of the threshold table that a model belongs to."""

    DENSE = "dense"
    MOE = "moe"
    LARGE_MOE = "large_moe"


class NoiseFloor(IntEnum):
    """How much noise the run itself carries, in the order in which the noise is added."""

    SINGLE_LAYER_ANCHOR = 0
    FULL_MODEL_SINGLE_DEVICE = 1
    SHARDED_SINGLE_NODE = 2
    PRODUCTION = 3


class RebindCost(IntEnum):
    """What changing a switch costs, cheapest first; cases run in this order."""

    PER_REQUEST = 0
    ENGINE_REBUILD = 1
    PROCESS_GROUP_REBUILD = 2
    PROCESS_RESTART = 3


class FactorCategory(Enum):
    """Where a factor's difference enters."""

    INPUT_IDENTITY = "input_identity"
    ENVIRONMENT = "environment"
    KERNEL_IMPLEMENTATION = "kernel_implementation"
    SHARDING_AND_REDUCTION = "sharding_and_reduction"
    OUTPUT_NUMERICS = "output_numerics"


class ReferenceAuthority(IntEnum):
    """Why a reference may be believed, most authoritative first."""

    FP64_ORACLE = 0
    SHARED_BACKEND = 1
    SELF_WRITTEN = 2


class SwitchStatus(Enum):
    """What became of a requested switch."""

    APPLIED = "applied"
    FELL_BACK = "fell_back"
    UNSUPPORTED = "unsupported"
    UNOBSERVABLE = "unobservable"
    ERROR = "error"


class GateName(Enum):
    """A precondition for reading the arms; a failed gate blocks the verdict."""

    SWITCH_EFFECTIVE = "switch_effective"
    EVIDENCE_COMPLETE = "evidence_complete"
    SHARDS_COMPLETE = "shards_complete"
    PITFALLS_CLEAR = "pitfalls_clear"


class Diagnosis(Enum):
    """The answer for one factor. The first three say "cannot judge" and never mix with "judged, clean"."""

    VARIANT_DID_NOT_APPLY = "variant_did_not_apply"
    INSUFFICIENT_EVIDENCE = "insufficient_evidence"
    REFERENCE_ITSELF_IS_BROKEN = "reference_itself_is_broken"
    CAUSED_BY_TRAINING_SIDE = "caused_by_training_side"
    CAUSED_BY_ROLLOUT_SIDE = "caused_by_rollout_side"
    CAUSED_BY_BOTH_SIDES = "caused_by_both_sides"
    NOT_THIS_FACTOR = "not_this_factor"
    COUPLED_WITH_OTHER_FACTORS = "coupled_with_other_factors"

    @property
    def judged(self) -> bool:
        """True when the arms were read, False when nothing could be concluded."""
        return self not in (
            Diagnosis.VARIANT_DID_NOT_APPLY,
            Diagnosis.INSUFFICIENT_EVIDENCE,
            Diagnosis.REFERENCE_ITSELF_IS_BROKEN,
        )


class PlanOutcome(Enum):
    """Why a factor has no arms in a plan; these are not diagnoses."""

    PLANNED = "planned"
    SKIPPED = "skipped"
    NOT_SWITCHABLE_IN_PROCESS = "not_switchable_in_process"


class Source(Enum):
    """Where the effective value of a setting was read."""

    REQUESTED = "requested"
    MODEL_FILE = "model file"
    GENERATION_CONFIG = "generation config"
    CLASS_DEFAULT = "class default"
    ENVIRONMENT = "environment"
    LIVE_MODULE = "live module"


class DeterminismLevel(IntEnum):
    """How far a collective's result is the same bits, in the order of what it promises."""

    NONE = 0
    STABLE_WITHIN_PROCESS = 1
    STABLE_ACROSS_RUNS = 2
    STABLE_ACROSS_TOPOLOGY = 3

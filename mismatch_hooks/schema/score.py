"""What one scoring pass returns: log-prob shards, evidence that the binding ran, and what was loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.enums import Choice, ExecutionPath, PolicyRole, SwitchStatus, Value
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSequence:
    """One captured sequence as every arm scores it.

    Attributes:
        prompt_token_ids: the prompt, in order.
        response_token_ids: the sampled tokens, in order.
        response_mask: True on active tokens; as long as the response.
        temperature: what the sampler divided the logits by; 0.0 is greedy.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise SchemaError("a sequence has an empty prompt; its first response token has no log-prob.")
        if len(self.response_mask) != len(self.response_token_ids):
            raise SchemaError(
                f"a sequence has {len(self.response_token_ids)} response tokens and {len(self.response_mask)} mask "
                "entries; both describe the same tokens."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The switch values in force on one role during one scoring pass.

    Attributes:
        role: the side that is bound.
        choices: factor id to ``Choice``, or to the value of a sweep; a factor that is not named stays native.
        parameters: factor id to the plain parameters of its reference (rope theta), one truth for both roles.
        environment: variables that every process of the engine has set while the binding is put in place and held.
    """

    role: PolicyRole
    choices: Mapping[str, Value] = field(default_factory=FrozenMapping)
    parameters: Mapping[str, Mapping[str, object]] = field(default_factory=FrozenMapping)
    environment: Mapping[str, str] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", FrozenMapping(self.choices))
        object.__setattr__(self, "environment", FrozenMapping(self.environment))
        object.__setattr__(self, "parameters", FrozenMapping(self.parameters))

    @property
    def bound(self) -> tuple[str, ...]:
        """The factors that this binding takes off native, sorted."""
        return tuple(sorted(factor for factor, choice in self.choices.items() if choice is not Choice.NATIVE))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """How often one call site ran the bound implementation in one pass on one rank.

    Attributes:
        factor: the factor that is bound there.
        site: the call site as a person would name it (``"model.layers.*.self_attn.rotary_emb"``).
        rank: the engine rank that counted.
        expected: calls that a pass with this many model forwards must make.
        observed: calls counted by the bound implementation itself.
    """

    factor: str
    site: str
    rank: int
    expected: int
    observed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchState:
    """What a readback says about one factor's switch on one rank, while the binding is in force.

    Attributes:
        factor: the factor.
        rank: the engine rank that was read.
        requested: the choice or value in the binding.
        effective: the one that the live modules are on, or None when it is none of the switch's or cannot be read.
        status: what became of the request.
        trace: what was tried and why each was rejected, in order.
    """

    factor: str
    rank: int
    requested: Value
    effective: Value | None
    status: SwitchStatus
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSlice:
    """Consecutive log-probs of one sequence.

    Attributes:
        sequence: index into the scored batch.
        start: response position of the first value.
        logprobs: nats; fp32 values, which a float holds exactly.
    """

    sequence: int
    start: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobShard:
    """The log-probs that one rank computed, and how many ranks it believes there are."""

    rank: int
    world_size: int
    slices: tuple[ShardSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Proof of what ran during one scoring pass.

    Attributes:
        forwards: model forwards counted on each rank, in rank order.
        calls: one count per bound call site and rank.
        switches: what the readback said of each bound factor while it was bound, per rank.
    """

    forwards: tuple[int, ...]
    calls: tuple[CallCount, ...] = ()
    switches: tuple[SwitchState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One scoring pass of one role.

    Attributes:
        path: how the log-probs were computed.
        binding: what was bound.
        shards: one per rank.
        evidence: what ran.
        seconds: wall time of the pass.
    """

    path: ExecutionPath
    binding: Binding
    shards: tuple[LogprobShard, ...]
    evidence: Evidence
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDigest:
    """What is loaded on one side, by content.

    Attributes:
        role: the side.
        version: the version label that the loop gave; proves nothing, and is reported beside the content.
        tensors: Hugging Face tensor name to the BLAKE3 of its bytes, −0.0 taken as 0.0, or ``"unobservable: reason"``.
        derived: tensors made at load time (rotary tables), digested likewise; compared only where both sides have them.
    """

    role: PolicyRole
    version: str
    tensors: Mapping[str, str]
    derived: Mapping[str, str] = field(default_factory=FrozenMapping)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", FrozenMapping(self.tensors))
        object.__setattr__(self, "derived", FrozenMapping(self.derived))

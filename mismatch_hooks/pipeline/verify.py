"""The four gates: what must hold before an arm may be read. A gate that was not observed does not hold."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mismatch_hooks.pipeline.score import PassKey
from mismatch_hooks.schema.enums import Choice, GateName, PolicyRole, SettingChannel, SwitchStatus, Value
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.score import CallCount, LogprobShard, Score, ScoringSequence, SwitchState, WeightsDigest
from mismatch_hooks.schema.verdict import Gate


def verify(
    factor: MismatchFactor,
    passes: Mapping[PassKey, Score],
    other_side: Mapping[PolicyRole, Sequence[SwitchState]],
    sequences: Sequence[ScoringSequence],
    pitfalls: Sequence[str],
    notes: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> tuple[Gate, ...]:
    """Evaluate all four gates of one factor, in order.

    Args:
        factor: what was examined.
        passes: role and value to its score.
        other_side: role that was bound to what the *other* role's switches read at that moment.
        sequences: what was scored.
        pitfalls: sentences of the guards that were tripped.
        notes: sentences that a reader of the verdict should know.
        missing: sentences on evidence that the factor requires and nobody has.
    """
    return (
        switch_effective(factor, passes, other_side),
        evidence_complete(factor, passes, missing),
        shards_complete(passes, sequences),
        pitfalls_clear(pitfalls, notes),
    )


def verify_content(rollout: WeightsDigest, training: WeightsDigest) -> tuple[Gate, ...]:
    """Evaluate all four gates of a comparison of contents, for which nothing is bound and nothing is scored."""
    unread = [
        f"{name} on {side.role.value} ({why.removeprefix('unobservable: ')})"
        for side in (rollout, training)
        for name, why in side.tensors.items()
        if why.startswith("unobservable")
    ]
    read = f"All {len(training.tensors)} tensors were read on both sides."
    return (
        Gate(name=GateName.SWITCH_EFFECTIVE, ok=True, reason="Nothing is switched: contents are compared."),
        Gate(
            name=GateName.EVIDENCE_COMPLETE,
            ok=not unread and bool(training.tensors),
            reason=read if training.tensors and not unread else f"Not every tensor was read: {'; '.join(unread[:4])}.",
        ),
        Gate(name=GateName.SHARDS_COMPLETE, ok=True, reason="Every rank's copy was compared under one name."),
        pitfalls_clear(()),
    )


def switch_effective(
    factor: MismatchFactor,
    passes: Mapping[PassKey, Score],
    other_side: Mapping[PolicyRole, Sequence[SwitchState]],
) -> Gate:
    """Hold when each pass read back the value it asked for on its own role, and native on the other role."""
    problems = _missing_passes(factor, passes)
    for (role, choice), score in _of(factor, passes):
        states = [state for state in score.evidence.switches if state.factor == factor.id]
        problems += _switch_problems(factor, role, choice, states)
        unread = set(range(len(score.evidence.forwards))) - {state.rank for state in states}
        if states and unread:
            problems.append(f"{factor.switch.path} was not read back on {role.value} ranks {sorted(unread)}.")
    for role in factor.switch.roles:
        other = PolicyRole.TRAINING if role is PolicyRole.ROLLOUT else PolicyRole.ROLLOUT
        if other not in factor.switch.roles:
            continue
        states = [state for state in other_side.get(role, ()) if state.factor == factor.id]
        leaks = _switch_problems(factor, other, Choice.NATIVE, states)
        problems += [f"{leak[:-1]} while only {role.value} was on {_bound(factor)}." for leak in leaks]
    if problems:
        return Gate(name=GateName.SWITCH_EFFECTIVE, ok=False, reason=" ".join(problems))
    return Gate(
        name=GateName.SWITCH_EFFECTIVE,
        ok=True,
        reason=f"{factor.switch.path} read back as requested in {len(list(_of(factor, passes)))} passes"
        + (", and native on the other side." if len(factor.switch.roles) > 1 else "."),
    )


def _switch_problems(
    factor: MismatchFactor, role: PolicyRole, value: Value, states: Sequence[SwitchState]
) -> list[str]:
    if not states:
        return [f"{factor.switch.path} was not read back on {role.value} with {words(value)} requested."]
    problems = []
    for state in states:
        # The type too: 1, 1.0 and True are equal and are not one value of a switch.
        same = state.effective == value and type(state.effective) is type(value)
        if same and state.status is SwitchStatus.APPLIED:
            continue
        found = state.status.value if state.effective is None else words(state.effective)
        detail = f" ({'; '.join(state.trace)})" if state.trace else ""
        problems.append(
            f"{factor.switch.path} on {role.value} rank {state.rank}: requested {words(value)}, effective "
            f"{found}{detail}."
        )
    return problems


def _bound(factor: MismatchFactor) -> str:
    return "the reference" if factor.references else "what was bound"


def words(value: Value) -> str:
    """Return a switch's value as a person would say it."""
    return value.value if isinstance(value, Choice) else str(value)


def _of(factor: MismatchFactor, passes: Mapping[PassKey, Score]) -> Iterator[tuple[PassKey, Score]]:
    """The passes in which the factor's switch can be told: those of the roles that have it."""
    return ((key, score) for key, score in passes.items() if key[0] in factor.switch.roles)


def _missing_passes(factor: MismatchFactor, passes: Mapping[PassKey, Score]) -> list[str]:
    needed = {(role, value) for bound in factor.arms.values() for role, value in bound.items()}
    missing = sorted(needed - set(passes), key=lambda key: (key[0].value, words(key[1])))
    return [f"No pass of {role.value} with {words(value)} bound arrived." for role, value in missing]


def evidence_complete(factor: MismatchFactor, passes: Mapping[PassKey, Score], missing: Sequence[str] = ()) -> Gate:
    """Hold when every declared call site ran what was bound exactly as often as the counted forwards demand.

    And when nothing is ``missing`` of what the factor needs to have seen beside them.
    """
    problems = [*_missing_passes(factor, passes), *missing]
    ran = 0
    for (role, choice), score in passes.items():
        if not score.evidence.forwards or not all(score.evidence.forwards):
            problems.append(f"No model forward was counted on {role.value} with {words(choice)} bound.")
        if choice is Choice.NATIVE:
            continue
        counts = [count for count in score.evidence.calls if count.factor == factor.id]
        declared = {site.name for site in factor.call_sites if site.role is role}
        ranks = range(len(score.evidence.forwards))
        silent = {(name, rank) for name in declared for rank in ranks} - {(one.site, one.rank) for one in counts}
        problems += [f"No evidence from {name} on {role.value} rank {rank}." for name, rank in sorted(silent)]
        for count in counts:
            ran += count.observed
            if count.expected < 1 or count.observed != count.expected:
                problems.append(_miscounted(factor, count, role))
    if problems:
        return Gate(name=GateName.EVIDENCE_COMPLETE, ok=False, reason=" ".join(problems))
    return Gate(
        name=GateName.EVIDENCE_COMPLETE,
        ok=True,
        reason=f"All {ran} calls of the bound call sites ran {_bound(factor)}.",
    )


def _miscounted(factor: MismatchFactor, count: CallCount, role: PolicyRole) -> str:
    where = f"on {role.value} rank {count.rank}"
    if factor.switch.channel is SettingChannel.SCORING_PASS:
        return (
            f"The pass took {count.observed} forwards {where} where {count.site} as asked makes {count.expected}: the "
            "engine scheduled it otherwise, as one in a process of its own does with requests that arrive one by one."
        )
    return (
        f"{count.observed} of {count.expected} calls of the bound {count.site} ran {where}; a compiled graph or stored "
        "forward skips the reference, so run the engine eagerly."
    )


def shards_complete(passes: Mapping[PassKey, Score], sequences: Sequence[ScoringSequence]) -> Gate:
    """Hold when, in every pass, ranks 0 … world_size − 1 sent one shard each, covering each active token once."""
    problems: list[str] = []
    for (role, choice), score in passes.items():
        where = f"{role.value} with {words(choice)} bound"
        problems += [f"{problem} ({where})." for problem in _shard_problems(score.shards, sequences)]
    if problems:
        return Gate(name=GateName.SHARDS_COMPLETE, ok=False, reason=" ".join(problems))
    worlds = sorted({len(score.shards) for score in passes.values()})
    return Gate(
        name=GateName.SHARDS_COMPLETE,
        ok=True,
        reason=f"Each of {len(passes)} passes has every shard ({', '.join(map(str, worlds))}) and covers "
        "each token once.",
    )


def _shard_problems(shards: Sequence[LogprobShard], sequences: Sequence[ScoringSequence]) -> list[str]:
    if not shards:
        return ["No shard arrived"]
    worlds = {shard.world_size for shard in shards}
    if len(worlds) > 1:
        return [f"Shards disagree on the world size: {sorted(worlds)}"]
    world = worlds.pop()
    ranks = sorted(shard.rank for shard in shards)
    if ranks != list(range(world)):
        return [f"Shards from ranks {ranks} arrived, one from each of 0 to {world - 1} is needed"]
    covered = [[0] * len(sequence.response_token_ids) for sequence in sequences]
    for shard in shards:
        for piece in shard.slices:
            if not 0 <= piece.sequence < len(covered):
                return [f"Rank {shard.rank} names sequence {piece.sequence} of {len(covered)}"]
            row = covered[piece.sequence]
            if piece.start < 0 or piece.start + len(piece.logprobs) > len(row):
                stop = piece.start + len(piece.logprobs)
                return [
                    f"Rank {shard.rank} covers tokens {piece.start} to {stop} of sequence {piece.sequence}, "
                    f"which has {len(row)}"
                ]
            for position in range(piece.start, piece.start + len(piece.logprobs)):
                row[position] += 1
    return list(_coverage_problems(covered, sequences))[:4]


def _coverage_problems(covered: Sequence[Sequence[int]], sequences: Sequence[ScoringSequence]) -> Iterable[str]:
    for index, (row, sequence) in enumerate(zip(covered, sequences, strict=True)):
        for position, (times, active) in enumerate(zip(row, sequence.response_mask, strict=True)):
            if active and times != 1:
                yield f"Token {position} of sequence {index} was covered {times} times"
                break


def pitfalls_clear(sentences: Sequence[str], notes: Sequence[str] = ()) -> Gate:
    """Hold when no guard was tripped; what a reader should know is said either way."""
    if sentences:
        return Gate(name=GateName.PITFALLS_CLEAR, ok=False, reason=" ".join((*sentences, *notes)))
    clear = "No known trap invalidates the reading."
    return Gate(name=GateName.PITFALLS_CLEAR, ok=True, reason=" ".join((clear, *notes)))

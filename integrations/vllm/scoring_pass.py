"""One scoring pass of vLLM without the engine: what is asked of it, what comes back, and what that proves."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_hooks.integrations.vllm.worker import as_value
from mismatch_hooks.live.pass_arguments import Seen, call_counts, switch_states
from mismatch_hooks.schema.enums import Choice, ExecutionPath, SwitchStatus, Value
from mismatch_hooks.schema.score import CallCount, Evidence, ScoringSequence, ShardSlice, SwitchState

BATCH_SIZE, PATH, PACKING = "scoring.batch_size", "scoring.path", "scoring.packing"


def request(sequence: ScoringSequence, path: ExecutionPath) -> tuple[list[int], Any]:
    """The prompt and the sampling parameters with which the engine goes over a response along ``path``."""
    if path is ExecutionPath.ROLLOUT_DECODE:
        from mismatch_hooks.integrations.vllm.forced_decode import forced_params

        return list(sequence.prompt_token_ids), forced_params(sequence.response_token_ids)
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        prompt_logprobs=0,
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return [*sequence.prompt_token_ids, *sequence.response_token_ids], params


def response_logprobs(sequence: ScoringSequence, path: ExecutionPath, output: Any) -> tuple[float, ...]:
    """The log-probs of a response out of a finished request, fp32 nats; NaN where the engine delivered nothing."""
    if path is ExecutionPath.ROLLOUT_DECODE and output is not None:
        from mismatch_hooks.integrations.vllm.forced_decode import forced_logprobs

        decoded = forced_logprobs(sequence.response_token_ids, output.outputs[0])
        return decoded + (math.nan,) * (len(sequence.response_token_ids) - len(decoded))
    if output is None or output.prompt_logprobs is None:
        return (math.nan,) * len(sequence.response_token_ids)
    start = len(sequence.prompt_token_ids)
    found = (
        (output.prompt_logprobs[start + offset] or {}).get(token)
        for offset, token in enumerate(sequence.response_token_ids)
    )
    return tuple(math.nan if entry is None else float(entry.logprob) for entry in found)


def batches(sequences: Sequence[ScoringSequence], size: Value) -> list[list[int]]:
    """The sequences that take part in a pass, cut into batches of which each is finished before the next begins."""
    scored = [index for index, sequence in enumerate(sequences) if sequence.response_token_ids]
    rows = size if isinstance(size, int) else max(len(scored), 1)
    return [scored[first : first + rows] for first in range(0, len(scored), rows)]


def asked_size(arguments: Mapping[str, tuple[str, Value]]) -> Value:
    """The sequences that are to be computed together: one where they may share no batch."""
    if arguments.get(PACKING, ("", Choice.NATIVE))[1] is not Choice.NATIVE:
        return 1
    return arguments.get(BATCH_SIZE, ("", Choice.NATIVE))[1]


def asked_path(asked: Value) -> ExecutionPath:
    """The path that a binding asks for; prefill where it asks for none."""
    return ExecutionPath.ROLLOUT_FULL_PREFILL if asked is Choice.NATIVE else ExecutionPath(asked)


def decoded_tokens(slices: Sequence[ShardSlice], path: ExecutionPath) -> dict[str, Seen]:
    """What a pass that decoded shows of its path: of how many tokens the engine decoded the very one."""
    if path is ExecutionPath.ROLLOUT_FULL_PREFILL:
        return {}
    tokens = [math.isfinite(value) for piece in slices for value in piece.logprobs]
    return {PATH: Seen(value=path.value, expected=len(tokens), observed=sum(tokens))}


def expected_forwards(
    sequences: Sequence[ScoringSequence], batches: Sequence[Sequence[int]], path: ExecutionPath
) -> int:
    """The model forwards of a pass of which the scheduler cuts up no batch."""
    if path is ExecutionPath.ROLLOUT_FULL_PREFILL:
        return len(batches)
    return sum(max(len(sequences[index].response_token_ids) for index in batch) for batch in batches)


def evidence(
    passes: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, tuple[str, Value]],
    expected: int,
    seen_by_all: Mapping[str, Seen],
) -> Evidence:
    """What every worker counted and read, and what the pass as a whole showed of its arguments.

    Args:
        passes: the workers' replies at the end of the pass.
        arguments: switch path to factor and value.
        expected: forwards of a pass of which the scheduler cuts up no batch.
        seen_by_all: switch path to what the pass showed, the same on every rank.
    """
    ranks = sorted(passes, key=lambda reply: int(reply["rank"]))
    calls = [CallCount(**plain) for reply in ranks for plain in reply["calls"]]
    switches = [switch_state(plain) for reply in ranks for plain in reply["switches"]]
    for rank, reply in enumerate(ranks):
        seen = dict(seen_by_all)
        for path in (BATCH_SIZE, PACKING):
            if path in arguments and arguments[path][1] is not Choice.NATIVE:
                # A batch that the scheduler cut up took more forwards; then its size was not the one asked for.
                forwards, asked = int(reply["forwards"]), arguments[path][1]
                value = asked if forwards == expected else None
                seen[path] = Seen(value=value, expected=expected, observed=forwards)
        calls += call_counts(arguments, seen, rank=rank)
        switches += switch_states(arguments, seen, rank=rank)
    return Evidence(
        forwards=tuple(int(reply["forwards"]) for reply in ranks), calls=tuple(calls), switches=tuple(switches)
    )


def switch_state(plain: Mapping[str, Any]) -> SwitchState:
    """One worker's reading of a switch, from plain data."""
    effective = plain["effective"]
    return SwitchState(
        factor=plain["factor"],
        rank=plain["rank"],
        requested=as_value(plain["requested"]),
        effective=None if effective is None else as_value(effective),
        status=SwitchStatus(plain["status"]),
        trace=tuple(plain["trace"]),
    )

"""Rows are digested by value at the moment they are handed over, and only a complete point is published."""

import base64

import torch
from blake3 import blake3

from mismatch_hooks.live.activation_recorder import ActivationRecorder, token_digests, traced_tokens
from mismatch_hooks.schema.activation import ModuleActivations
from mismatch_hooks.schema.score import ScoringSequence

ROWS = torch.tensor([[1.0, -2.5], [0.0, 4.0], [3.0, 1.0]])


def recorded(rows: torch.Tensor, *, values: bool = False) -> ModuleActivations:
    recorder = ActivationRecorder([[5] * len(rows)], ["embedding"] if values else [])
    recorder.add("embedding", rows, sequence=0, start=0)
    (module,) = recorder.finish()[0]
    return module


def test_a_digest_is_the_hash_of_the_rows_fp32_bytes() -> None:
    (sequence,) = recorded(ROWS).sequences
    assert sequence.digests == tuple(blake3(row.numpy().tobytes()).hexdigest(length=8) for row in ROWS)
    assert sequence.largest == (2.5, 4.0, 3.0)


def test_equal_values_have_one_digest_in_every_dtype_and_layout_in_memory() -> None:
    spread = torch.empty(2, 3).t().copy_(ROWS)
    digests = {recorded(rows).sequences[0].digests for rows in (ROWS, ROWS.bfloat16(), ROWS.half(), spread)}
    assert len(digests) == 1
    assert recorded(ROWS.bfloat16()).dtype == "bfloat16"


def test_one_changed_bit_changes_the_rows_digest_and_no_other() -> None:
    changed = ROWS.clone()
    changed[1, 1] = torch.nextafter(changed[1, 1], torch.tensor(9.0))
    before, after = recorded(ROWS).sequences[0].digests, recorded(changed).sequences[0].digests
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_minus_zero_is_zero() -> None:
    assert recorded(ROWS).sequences == recorded(torch.tensor([[1.0, -2.5], [-0.0, 4.0], [3.0, 1.0]])).sequences


def test_heads_are_flattened_into_the_row() -> None:
    assert recorded(ROWS.view(3, 1, 2)).width == 2


def test_what_is_written_over_a_tensor_later_is_not_seen() -> None:
    rows = ROWS.clone()
    recorder = ActivationRecorder([[5, 6, 7]], ["embedding"])
    recorder.add("embedding", rows, sequence=0, start=0)
    rows.zero_()
    assert recorder.finish()[0] == [recorded(ROWS, values=True)]


def test_the_first_row_of_a_position_is_kept() -> None:
    recorder = ActivationRecorder([[5, 6, 7]])
    recorder.add("embedding", ROWS[:2], sequence=0, start=0)
    recorder.add("embedding", torch.stack([torch.zeros(2), ROWS[2]]), sequence=0, start=1)
    recorder.add("embedding", torch.zeros(3, 2), sequence=0, start=0)
    assert recorder.finish()[0] == [recorded(ROWS)]


def test_a_pass_in_pieces_is_one_pass() -> None:
    recorder = ActivationRecorder([[5, 6, 7]], ["embedding"])
    recorder.add("embedding", ROWS[1:], sequence=0, start=1)
    recorder.add("embedding", ROWS[:2], sequence=0, start=0)
    assert recorder.finish()[0] == [recorded(ROWS, values=True)]


def test_values_are_kept_only_where_they_were_asked_for() -> None:
    assert recorded(ROWS).sequences[0].values == ""
    assert base64.b64decode(recorded(ROWS, values=True).sequences[0].values) == ROWS.numpy().tobytes()


def test_an_incomplete_point_is_left_out_and_counted() -> None:
    recorder = ActivationRecorder([[5, 6, 7], [8, 9]])
    recorder.add("embedding", ROWS, sequence=0, start=0)
    recorder.add("embedding", ROWS[:1], sequence=1, start=1)
    assert recorder.finish() == ([], {"embedding": "4 of 5 rows were recorded"})


def test_a_point_that_never_ran_is_left_out_with_the_reason() -> None:
    recorder = ActivationRecorder([[5, 6, 7]])
    recorder.expect("embedding")
    modules, left_out = recorder.finish()
    assert modules == [] and left_out["embedding"].startswith("no row was recorded")


def test_a_point_that_is_left_out_stays_left_out() -> None:
    recorder = ActivationRecorder([[5, 6, 7]])
    recorder.add("embedding", ROWS, sequence=0, start=0)
    recorder.leave_out("embedding", "its rows are cut")
    recorder.add("embedding", ROWS, sequence=0, start=0)
    assert recorder.finish() == ([], {"embedding": "its rows are cut"})


def test_the_head_has_no_row_for_the_last_token() -> None:
    recorder = ActivationRecorder([[5, 6, 7], [8]])
    recorder.add("head", ROWS[:2], sequence=0, start=0)
    (head,) = recorder.finish()[0]
    assert [len(sequence.digests) for sequence in head.sequences] == [2, 0]


def scored(prompt: tuple[int, ...], response: tuple[int, ...]) -> ScoringSequence:
    return ScoringSequence(prompt_token_ids=prompt, response_token_ids=response, response_mask=(True,) * len(response))


def test_a_sequence_without_a_response_takes_no_part() -> None:
    assert traced_tokens([scored((1, 2), (3,)), scored((4,), ())]) == [[1, 2, 3], []]


def test_tokens_are_told_apart_by_where_the_prompt_ends() -> None:
    digests = token_digests([scored((1, 2), (3,)), scored((1,), (2, 3)), scored((1, 2), (3,))])
    assert digests[0] == digests[2] != digests[1]

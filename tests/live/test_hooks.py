"""The hooks object over fake engines: what it records, and that nothing that fails in it reaches the loop."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_hooks import MismatchHooks, RolloutSequence, SamplingSettings
from mismatch_hooks.live.config import ConfigError
from mismatch_hooks.model_meta.shapes import shape_from_config
from mismatch_hooks.schema.enums import Choice, PolicyRole, SettingChannel
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.score import LogprobShard, ScoringSequence
from tests.fake_engines import FACTOR, FakeEngine

SHAPE = shape_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
)
CONFIG = {"factors": [FACTOR], "ablate_every": 1, "time_budget": 1.0, "sinks": ["jsonl"], "sample_sequences": 12}
ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING


class Loop:
    """A loop of twelve sequences of forty tokens a step, over two fake engines."""

    def __init__(self, folder: Path, rollout: FakeEngine, training: FakeEngine, **options: Any) -> None:
        self.rollout, self.training, self.folder = rollout, training, folder
        self.computes = training
        config = {**CONFIG, **options.pop("config", {})}
        self.hooks = MismatchHooks(config, rollout=rollout, training=training, shape=SHAPE, run_dir=folder, **options)

    def step(self, step: int, *, sequences: Sequence[int] | None = None, **of_samples: Any) -> None:
        """Sample, compute, end the step, as a real loop does; samples have what is named beside."""
        scored = [
            ScoringSequence(
                prompt_token_ids=(1,),
                response_token_ids=tuple((step * 1000 + row * 40 + i) % 97 for i in range(40)),
                response_mask=(True,) * 40,
            )
            for row in range(12)
        ]
        sampled = [
            RolloutSequence(
                prompt_token_ids=one.prompt_token_ids,
                response_token_ids=one.response_token_ids,
                rollout_logprobs=tuple(self.rollout.logprobs(one, Choice.NATIVE)),
                **of_samples,
            )
            for one in scored
        ]
        rows = range(12) if sequences is None else sequences
        computed = torch.tensor([self.computes.logprobs(scored[row], Choice.NATIVE) for row in rows])
        self.hooks.capture_rollout(step, sampled)
        mask = torch.ones_like(computed, dtype=torch.bool)
        self.hooks.capture_training(step, computed, mask, advantages=torch.ones(len(rows)), sequences=sequences)
        self.hooks.end_step(step, host_metrics={"reward": 0.5})

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Close the hooks, and return the events of one type as an independent reader sees them."""
        self.hooks.close()
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def verdict(self) -> dict[str, Any]:
        """Return the only verdict."""
        (verdict,) = self.events("verdict")
        return verdict


@pytest.fixture
def two_steps(tmp_path: Path) -> Iterator[Any]:
    """Run two steps (the second one ablates) over engines made with the given options."""
    loops: list[Loop] = []

    def run(
        rollout: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None, **options: Any
    ) -> Loop:
        loop = Loop(
            tmp_path, FakeEngine(ROLLOUT, **(rollout or {})), FakeEngine(TRAINING, **(training or {})), **options
        )
        loops.append(loop)
        loop.step(0)
        loop.step(1)
        return loop

    yield run
    for loop in loops:
        loop.hooks.close()


# ---- what is recorded ---------------------------------------------------------------------------------------------


def test_a_step_event_holds_the_metrics_of_all_tokens_and_the_hosts_figures(two_steps: Any) -> None:
    steps = two_steps(rollout={"native_error": 0.01}).events("step")
    assert [event["step"] for event in steps] == [0, 1]
    assert steps[1]["metrics"]["tokens"] == 480
    assert steps[1]["metrics"]["sequences"] == 12
    assert 0.005 < steps[1]["metrics"]["dlogp_mean"] < 0.012
    assert steps[1]["metrics"]["token_coverage"] == 1.0
    assert steps[1]["host"] == {"reward": 0.5}


def test_equal_engines_are_equal_on_every_token(two_steps: Any) -> None:
    metrics = two_steps().events("step")[0]["metrics"]
    assert (metrics["dlogp_max"], metrics["bitwise_fraction"]) == (0.0, 1.0)


def test_only_the_sequences_of_the_captured_minibatch_count_and_the_coverage_says_so(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING))
    loop.step(0, sequences=[4, 2, 9])
    (event,) = loop.events("step")
    assert (event["metrics"]["tokens"], event["metrics"]["token_coverage"]) == (120, 0.25)


def test_a_forward_after_the_weights_moved_is_not_captured(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config={"ablate_every": 0})
    sampled = [RolloutSequence(prompt_token_ids=(1,), response_token_ids=(2, 3), rollout_logprobs=(-1.0, -2.0))] * 2
    ones = torch.ones(1, 2, dtype=torch.bool)
    loop.hooks.capture_rollout(0, sampled)
    loop.hooks.capture_training(0, torch.tensor([[-1.0, -2.0]]), ones, sequences=[0])
    loop.training.writes += 1
    loop.hooks.capture_training(0, torch.tensor([[-9.0, -9.0]]), ones, sequences=[1])
    loop.hooks.end_step(0)
    (event,) = loop.events("step")
    assert (event["metrics"]["tokens"], event["metrics"]["dlogp_max"]) == (2, 0.0)


def test_micro_batches_of_one_forward_are_merged(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config={"ablate_every": 0})
    sampled = [RolloutSequence(prompt_token_ids=(1,), response_token_ids=(2, 3), rollout_logprobs=(-1.0, -2.0))] * 2
    ones = torch.ones(1, 2, dtype=torch.bool)
    loop.hooks.capture_rollout(0, sampled)
    loop.hooks.capture_training(0, torch.tensor([[-1.0, -2.5]]), ones, sequences=[0], complete=False)
    loop.hooks.capture_training(0, torch.tensor([[-1.0, -2.0]]), ones, sequences=[1])
    loop.hooks.end_step(0)
    (event,) = loop.events("step")
    assert (event["metrics"]["tokens"], event["metrics"]["clip_fraction"]) == (4, 0.25)


# ---- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "training", "expected"),
    [
        pytest.param({"native_error": 0.2}, {}, "caused_by_rollout_side", id="rollout departs from the reference"),
        pytest.param({}, {"native_error": 0.2}, "caused_by_training_side", id="training departs from the reference"),
        pytest.param({"other_error": 0.1}, {}, "not_this_factor", id="the reference changes no bit"),
    ],
)
def test_the_verdict_names_the_side(two_steps: Any, rollout: Any, training: Any, expected: str) -> None:
    verdict = two_steps(rollout, training).verdict()
    assert (verdict["factor"], verdict["diagnosis"]) == (FACTOR, expected)
    assert all(gate["ok"] for gate in verdict["gates"].values())


def test_c15_training_logprobs_that_are_a_copy_of_the_rollouts_block_the_verdict(tmp_path: Path) -> None:
    rollout, training = FakeEngine(ROLLOUT), FakeEngine(TRAINING, other_error=0.01)
    loop = Loop(tmp_path, rollout, training)
    loop.computes = rollout  # what the loop hands over is the rollout's, whatever its trainer would give
    for step in (0, 1):
        loop.step(step)
    verdict = loop.verdict()
    assert verdict["diagnosis"] == "insufficient_evidence"
    reason = verdict["gates"]["pitfalls_clear"]["reason"]
    assert "(480 of 480 tokens equal, where the trainer's own forward gives 0); nothing was compared" in reason
    assert [event["metrics"].get("not_measured") for event in loop.events("step")] == [1.0, 1.0]


def test_c15_control_two_engines_that_are_equal_to_the_bit_are_no_copy(two_steps: Any) -> None:
    loop = two_steps()
    assert loop.verdict()["diagnosis"] == "not_this_factor"
    # From the ablation on it is known that the trainer's own forward gives these values.
    assert [event["metrics"].get("not_measured") for event in loop.events("step")] == [1.0, None]


def test_an_ablation_spends_two_passes_and_two_a_factor_two_for_the_proof_and_one_to_decode(two_steps: Any) -> None:
    loop = two_steps()
    assert (loop.rollout.passes, loop.training.passes) == (4, 3)  # rollout decodes the tokens once
    verdict = loop.verdict()
    assert (verdict["passes"], verdict["ablation_passes"]) == (4, 7)


@pytest.mark.parametrize(
    ("error", "kind", "verdicts"),
    [
        pytest.param(0.02, "dlogp_mean", 0, id="a finding of the first step waits for its turn"),
        pytest.param(0.5, "clip_fraction", 1, id="a clip_fraction over its limit does not"),
    ],
)
def test_what_asks_for_an_ablation_out_of_turn(two_steps: Any, error: float, kind: str, verdicts: int) -> None:
    loop = two_steps({"native_error": error}, config={"ablate_every": 50})
    assert kind in {alert["kind"] for alert in loop.events("alert")}
    assert len(loop.events("verdict")) == verdicts


@pytest.mark.parametrize(
    ("error", "every", "first"),
    [
        pytest.param(0.5, 50, FACTOR, id="after an alert what a setting points to comes first"),
        pytest.param(0.0, 1, "weights.sync", id="in turn the cheapest does"),
    ],
)
def test_a_setting_says_what_is_examined_first(two_steps: Any, error: float, every: int, first: str) -> None:
    settings = {**FakeEngine(side=ROLLOUT).settings, "model.rope.theta": 1e4}
    config = {"ablate_every": every, "factors": ["weights.sync", FACTOR]}
    training = {"settings": {**settings, "model.rope.theta": 5e5}}
    loop = two_steps({"native_error": error, "settings": settings}, training, config=config)
    found = [verdict["factor"] for verdict in loop.events("verdict")]
    assert (found[0], len(found)) == (first, 2)


@pytest.mark.parametrize(
    ("rollout", "gate", "expected"),
    [
        pytest.param(
            {"switch_does_nothing": True},
            "switch_effective evidence_complete",
            "variant_did_not_apply",
            id="switch does nothing",
        ),
        pytest.param({"leaks": True}, "switch_effective", "variant_did_not_apply", id="switch leaks to the other side"),
        pytest.param({"silent_skip": True}, "evidence_complete", "insufficient_evidence", id="readback lies"),
        pytest.param({"shards": lambda shard: ()}, "shards_complete", "insufficient_evidence", id="no shard"),
        pytest.param(
            {"shards": lambda shard: (LogprobShard(rank=0, world_size=2, slices=shard.slices),)},
            "shards_complete",
            "insufficient_evidence",
            id="a rank is missing",
        ),
        pytest.param(
            {"tensors": {"model.layers.0.weight": "another"}},
            "pitfalls_clear",
            "insufficient_evidence",
            id="weights differ",
        ),
    ],
)
def test_a_failed_gate_blocks_the_verdict(two_steps: Any, rollout: Any, gate: str, expected: str) -> None:
    verdict = two_steps({"native_error": 0.2, **rollout}).verdict()
    assert verdict["diagnosis"] == expected
    assert [name for name, found in verdict["gates"].items() if not found["ok"]] == gate.split()
    assert verdict["arms"] == {}


def test_an_engine_that_is_not_as_it_was_ends_ablation_and_the_run_goes_on(two_steps: Any) -> None:
    loop = two_steps({"drifts": True})
    loop.step(2)
    assert loop.rollout.passes == 5  # all of step 1; a drift is taken for a decode that differs, until the proof
    assert loop.events("verdict") == []
    assert [event["step"] for event in loop.events("step")] == [0, 1, 2]
    (end,) = [event for event in loop.events("run") if event["state"] == "finished"]
    assert "log-probs after the arms differ" in end["ablation"]["off"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"rollout_logprobs": (-1.0,) * 9},
            "sequence 1: 9 rollout_logprobs for 8 response tokens; one belongs to each, so pass the engine's lists "
            "uncut and unpadded.",
            id="log-probs",
        ),
        pytest.param(
            {"response_mask": (True,) * 3}, "sequence 1: response_mask has 3 entries for 8 response tokens.", id="mask"
        ),
    ],
)
def test_c14a_lists_of_two_lengths_are_named_by_their_sequence_and_stop_no_loop(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING))
    whole: dict[str, Any] = {
        "prompt_token_ids": (1,),
        "response_token_ids": (2,) * 8,
        "rollout_logprobs": (-1.0,) * 8,
    }
    loop.hooks.capture_rollout(0, [RolloutSequence(**whole), RolloutSequence(**{**whole, **changes})])
    loop.hooks.capture_training(0, torch.full((2, 8), -1.0), torch.ones(2, 8, dtype=torch.bool))
    loop.hooks.end_step(0)
    first, *_ = loop.events("error")
    assert (first["cause"], first["message"]) == ("capture_rollout", f"CaptureError: {sentence}")
    assert [event["metrics"] for event in loop.events("step")] == [{}]  # nothing cut, nothing padded, nothing measured


# ---- nothing reaches the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bind", "score", "read_back", "weights_digest", "mutation_count"])
@pytest.mark.parametrize("side", ["rollout", "training"])
def test_an_engine_that_raises_does_not_stop_the_loop_and_is_counted(two_steps: Any, side: str, method: str) -> None:
    loop = two_steps(**{side: {"fail": {method: RuntimeError("planted")}}})
    assert [event["step"] for event in loop.events("step")] == [0, 1]
    assert any("planted" in event["message"] for event in loop.events("error"))


def test_an_interrupt_inside_an_ablation_passes_through_and_both_engines_are_unbound(two_steps: Any) -> None:
    rollout, training = FakeEngine(ROLLOUT), FakeEngine(TRAINING, fail={"score": KeyboardInterrupt()})
    loops: list[Loop] = []

    @contextmanager
    def running(folder: Path) -> Iterator[Loop]:
        loop = Loop(folder, rollout, training)
        loops.append(loop)
        with loop.hooks:
            yield loop

    folder = two_steps().folder / "second"
    with pytest.raises(KeyboardInterrupt), running(folder) as loop:
        loop.step(0)
        loop.step(1)
    assert (rollout.bound, training.bound) == (None, None)
    assert [event["state"] for event in loops[0].events("run")] == ["started", "stopped"]


def test_an_unwritable_folder_and_a_full_disk_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING))
    loop.step(0)
    loop.step(1)
    assert loop.hooks.last_step is not None
    assert loop.hooks.last_step["tokens"] == 480
    assert loop.hooks.last_step["errors"] > 0
    loop.hooks.close()


def test_logprobs_that_are_not_finite_are_counted_and_block_the_verdict(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING))
    loop.step(0)
    sampled = [RolloutSequence(prompt_token_ids=(1,), response_token_ids=(2, 3), rollout_logprobs=(-1.0, -2.0))]
    loop.hooks.capture_rollout(1, sampled)
    loop.hooks.capture_training(1, torch.tensor([[-1.0, math.nan]]), torch.ones(1, 2, dtype=torch.bool))
    loop.hooks.end_step(1)
    assert loop.events("step")[1]["metrics"]["nonfinite"] == 1
    assert not loop.verdict()["gates"]["pitfalls_clear"]["ok"]


def test_a_callback_that_raises_is_counted(two_steps: Any) -> None:
    def refuse(alert: object) -> None:
        raise ValueError("planted")

    loop = two_steps({"native_error": 0.2}, on_alert=refuse)
    assert any(event["cause"] == "on_alert" for event in loop.events("error"))


# ---- many ranks ---------------------------------------------------------------------------------------------------


def test_every_rank_enters_the_gather_once_a_step_whatever_failed_before(tmp_path: Path) -> None:
    entered: list[dict[str, Any]] = []

    def gather(mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        entered.append(dict(mine))
        return [mine, mine]

    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), world_size=2, gather=gather)
    loop.step(0)
    loop.training.fail["mutation_count"] = RuntimeError("planted")
    loop.step(1)
    assert [bool(one) for one in entered] == [True, False]
    steps = loop.events("step")
    assert steps[0]["metrics"]["tokens"] == 960
    assert steps[1]["metrics"] == {}


def test_two_ranks_without_a_gather_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gather: got None with world_size 2"):
        Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), world_size=2)


def test_an_unknown_factor_stops_the_start_and_names_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no factor matches 'attention.rope'.*attention\.rope_fusion"):
        Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config={"factors": ["attention.rope"]})


# ---- weights ------------------------------------------------------------------------------------------------------


def test_a_tensor_that_differs_is_alerted_in_its_step_and_stays_named_until_it_is_equal_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config={"ablate_every": 0})
    loop.step(0)
    loop.rollout.tensors = {"model.layers.0.weight": "stale"}
    loop.step(1)
    loop.rollout.tensors = {"model.layers.0.weight": "same"}
    loop.step(2)
    steps = loop.events("step")
    assert [step["weights"]["differing"] for step in steps] == [[], ["model.layers.0.weight"], []]
    assert [step["metrics"]["weights_mismatched"] for step in steps] == [0, 1, 0]
    assert steps[1]["weights"]["rollout"]["digest"] != steps[1]["weights"]["training"]["digest"]
    (alert,) = [alert for alert in loop.events("alert") if alert["kind"] == "weights"]
    assert (alert["step"], alert["state"], alert["title"]) == (
        1,
        "opened",
        "1 tensors differ between the sides at step 1",
    )


def test_tensors_that_nobody_could_read_are_counted_apart_and_block_the_verdict(tmp_path: Path) -> None:
    unread = {"model.layers.0.weight": "unobservable: sharded over 2 ranks"}
    loop = Loop(tmp_path, FakeEngine(ROLLOUT, tensors=unread), FakeEngine(TRAINING, tensors=unread))
    loop.step(0)
    loop.step(1)
    metrics = loop.events("step")[0]["metrics"]
    assert (metrics["weights_checked"], metrics["weights_unread"], metrics["weights_mismatched"]) == (0, 1, 0)
    assert "cannot be compared" in loop.verdict()["gates"]["pitfalls_clear"]["reason"]


def test_the_step_of_the_last_weight_update_is_told_with_a_cache_that_outlived_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING))
    for step in range(4):
        loop.rollout.writes += step == 2  # by the sync before the samples of step 2
        loop.step(step, cached_tokens=256, cache_outlived_weights=True)
    reasons = [event["reason"] for event in loop.events("gate") if event["gate"] == "pitfalls_clear"]
    assert [" at step 2" in reason for reason in reasons] == [False, True, True], reasons


def test_the_sampling_settings_of_the_requests_are_read_back_once_there_are_requests(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config={"ablate_every": 0})
    settings = SamplingSettings(temperature=0.7, sources={"temperature": "generation_config.json"})
    sampled = [
        RolloutSequence(prompt_token_ids=(1,), response_token_ids=(2,), rollout_logprobs=(-1.0,), sampling=one)
        for one in (settings, settings)
    ]
    loop.hooks.capture_rollout(0, sampled)
    loop.hooks.capture_training(0, torch.tensor([[-1.0], [-1.0]]), torch.ones(2, 1, dtype=torch.bool))
    loop.hooks.end_step(0)
    first, second = (event["settings"] for event in loop.events("readback"))
    assert not any(key.startswith("rollout.sampling.") for key in first)
    temperature = second["rollout.sampling.temperature"]["rollout"]
    assert (temperature["effective"], temperature["source"]) == (0.7, "generation config")
    assert second["rollout.sampling.top_p"]["rollout"]["effective"] == 1.0


# ---- private ------------------------------------------------------------------------------------------------------


def test_no_token_id_is_in_anything_that_was_written(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT, native_error=0.01), FakeEngine(TRAINING))
    marked = (7171717, 8282828) * 8
    sampled = [
        RolloutSequence(prompt_token_ids=(9393939,), response_token_ids=marked, rollout_logprobs=(-1.5,) * 16)
        for _ in range(12)
    ]
    for step in (0, 1):
        loop.hooks.capture_rollout(step, sampled)
        computed = torch.full((12, 16), -1.25)
        loop.hooks.capture_training(step, computed, torch.ones_like(computed, dtype=torch.bool))
        loop.hooks.end_step(step)
    assert len(loop.events("verdict")) == 1
    written = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(marker in written for marker in ("7171717", "8282828", "9393939"))


def test_a_setting_that_is_not_pinned_is_streamed_with_the_readback(tmp_path: Path) -> None:
    needed = RequiredSetting(
        key="max_tokens", readback="fake.most", channel=SettingChannel.ENGINE_ARGUMENT, at_least=50, guards="x"
    )
    settings = {**FakeEngine(side=ROLLOUT).settings, "fake.most": 40}
    loop = Loop(tmp_path, FakeEngine(side=ROLLOUT, settings=settings, required=(needed,)), FakeEngine(side=TRAINING))
    loop.step(0)
    why = "max_tokens on rollout is 40; it has to be 50 or more."
    expected = {"key": "max_tokens", "side": "rollout", "readback": "fake.most", "guards": "x", "why": why}
    assert [event["unpinned"] for event in loop.events("readback")] == [[expected]] * 2


# ---- origins ------------------------------------------------------------------------------------------------------


def test_both_origins_are_examined_side_by_side(two_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_hooks.live.planning.needed_operators", lambda *_: ())
    loop = two_steps(rollout={"native_error": 0.2}, config={"origin": "both"})
    found = [(event["origin"], event["diagnosis"]) for event in loop.events("verdict")]
    assert found == [("aligned", "caused_by_rollout_side"), ("native", "caused_by_rollout_side")]
    opening = loop.events("run")[0]["plan"]
    assert (opening["origins"], opening["fallback"]) == (["aligned", "native"], "")


@pytest.mark.parametrize("origin", ["aligned", "both"])
def test_where_aligned_is_not_to_be_had_the_run_is_from_native_and_says_why(origin: str, two_steps: Any) -> None:
    loop = two_steps(config={"origin": origin})  # fake engines have one switch
    assert [event["origin"] for event in loop.events("verdict")] == ["native"]
    assert "operator.norm.implementation: " in loop.events("run")[0]["plan"]["fallback"]


@pytest.mark.parametrize(
    ("floor", "ranks", "words"),
    [
        pytest.param("single_layer_anchor", 1, "", id="one layer on one device"),
        pytest.param(
            "full_model_single_device", 2, "parallel.tensor on rollout is 2; name a later floor", id="two ranks"
        ),
        pytest.param("full_model_single_device", None, "parallel.tensor on rollout is not observable", id="unread"),
        pytest.param("sharded_single_node", 2, "", id="sharded"),
    ],
)
def test_a_noise_floor_that_the_run_is_not_on_is_refused(
    floor: str, ranks: int | None, words: str, tmp_path: Path
) -> None:
    extra = {} if ranks is None else {"parallel.tensor": ranks}
    sides = [
        FakeEngine(side=role, settings={**FakeEngine(side=role).settings, **extra}) for role in (ROLLOUT, TRAINING)
    ]
    if words:
        with pytest.raises(ConfigError, match=f"noise_floor: got '{floor}', and {words}"):
            Loop(tmp_path, *sides, config={"noise_floor": floor})
        return
    loop = Loop(tmp_path, *sides, config={"noise_floor": floor})
    for step in (0, 1):
        loop.step(step)
    assert loop.verdict()["noise_floor"] == floor

"""One test per correction of the published framework, by its number; what each correction demands is its sentence.

Most rules have tests of their own where the code is. Here each is driven once more through the code that a run uses, so
that none of the numbers can be lost.
"""

import builtins
import math
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch_hooks.operator_checks.norm.adapter as norm_adapter
from mismatch_hooks.cli import main
from mismatch_hooks.live.registry import GROUP, load_registry
from mismatch_hooks.model_meta.shapes import shape_from_config
from mismatch_hooks.pipeline.contracts import (
    compare_contracts,
    contract_of,
    repeats_differ,
    same_bits,
    same_meaning,
)
from mismatch_hooks.pipeline.diagnose import diagnose_from_aligned, diagnose_from_native, diagnose_sweep
from mismatch_hooks.pipeline.discover import unmet_prerequisites
from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.pipeline.score import read_arms
from mismatch_hooks.pipeline.verify import shards_complete
from mismatch_hooks.schema.contract import CollectiveContract, ComparisonRule, KnownEquivalence, OperatorContract
from mismatch_hooks.schema.enums import (
    Arm,
    Choice,
    DeterminismLevel,
    Diagnosis,
    Expansion,
    ModelFamily,
    NoiseFloor,
    PolicyRole,
    SettingChannel,
)
from mismatch_hooks.schema.environment import RequiredSetting
from mismatch_hooks.schema.factor import LibraryPin, Prerequisites
from mismatch_hooks.schema.fingerprint import fingerprint
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.identity import ComparisonIdentity
from mismatch_hooks.schema.plan import Surroundings
from mismatch_hooks.schema.thresholds import threshold
from tests.ablating import ablate_tiny
from tests.pipeline.samples import (
    EPSILONS,
    ROLLOUT,
    ROPE,
    SEQUENCES,
    TRAINING,
    WHOLE,
    arm_tokens,
    arms,
    passes,
    readback,
    score,
    shard,
)
from tests.tiny_engines import TinyEngines

BITWISE, SEMANTIC = ComparisonRule.MUST_MATCH_BITWISE, ComparisonRule.MUST_MATCH_SEMANTICALLY
NOISE = np.random.default_rng(0).normal(0.0, 0.05, (12, 128))


def test_all_corrections_are_here() -> None:
    numbers = re.findall(r"def test_correction_(\d\d)_", Path(__file__).read_text(encoding="utf-8"))
    assert sorted(set(numbers)) == [f"{number:02d}" for number in range(1, 28)]


@pytest.mark.parametrize("arguments", [["list", "--operator", "nrom"], ["plan", "--factor", "norm.rmsnorn"]])
def test_correction_01_an_unknown_name_is_an_error_that_names_what_exists(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "norm" in captured.err


def _collective(**changes: Any) -> CollectiveContract:
    plain = CollectiveContract(
        op="all_reduce",
        group="tensor",
        group_size=2,
        reduction_order="open",
        accumulate_precision="bfloat16",
        backend="gloo",
        determinism=DeterminismLevel.NONE,
    )
    return replace(plain, **changes)


def test_correction_02_a_collective_that_one_side_lacks_is_reported_and_not_cut_off() -> None:
    one = OperatorContract(precision="bfloat16", collectives=(_collective(),))
    three = OperatorContract(precision="bfloat16", collectives=(_collective(),) * 3)
    found = compare_contracts(one, three, {"collectives[[]*].op": SEMANTIC})
    assert [(issue.path, issue.values[ROLLOUT], issue.values[TRAINING]) for issue in found] == [
        ("collectives[1].op", None, "all_reduce"),
        ("collectives[2].op", None, "all_reduce"),
    ]


def test_correction_03_determinism_is_ordered_as_it_is_declared() -> None:
    assert list(DeterminismLevel) == sorted(DeterminismLevel)
    assert DeterminismLevel.NONE < DeterminismLevel.STABLE_ACROSS_RUNS < DeterminismLevel.STABLE_ACROSS_TOPOLOGY


def _plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, *, file: str, count: int = 1) -> None:
    """An installed distribution whose one operator declares ``count`` factors, the first in ``file``."""
    package = folder / "thirty_checks" / "probe"
    (package / "factors").mkdir(parents=True)
    for init in (folder / "thirty_checks", package, package / "factors"):
        (init / "__init__.py").write_text("", encoding="utf-8")
    (package / "adapter.py").write_text("", encoding="utf-8")
    for index in range(count):
        name = file if index == 0 else f"f{index}"
        declared = _DECLARATION.format(name=f"f{index}")
        (package / "factors" / f"{name}.py").write_text(declared, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    entry = EntryPoint(name="thirty", value="thirty_checks", group=GROUP)
    monkeypatch.setattr("mismatch_hooks.live.registry.entry_points", lambda group: [entry])


_DECLARATION = """
import builtins
from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

builtins.mh_declared = getattr(builtins, "mh_declared", 0) + 1
FACTOR = MismatchFactor(
    id="probe.{name}",
    category=FactorCategory.ENVIRONMENT,
    question="?",
    switch=Switch(path="probe.{name}", allowed=("native", 1), roles=(PolicyRole.ROLLOUT,)),
    expansion=Expansion.VALUE_SWEEP,
    call_sites=(CallSite(role=PolicyRole.ROLLOUT, name="x"),),
)
"""


@pytest.fixture
def fresh_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of an earlier test's plugin is imported, and the real registry is back afterwards."""
    monkeypatch.delattr("builtins.mh_declared", raising=False)

    def forget() -> None:
        load_registry.cache_clear()
        for name in [name for name in sys.modules if name.startswith("thirty_checks")]:
            del sys.modules[name]

    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("file", "loads"), [pytest.param("f0", True, id="as the id"), pytest.param("other", False, id="another name")]
)
def test_correction_04_a_factors_file_is_named_after_the_last_segment_of_its_id(
    file: str, loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_plugins: None
) -> None:
    _plugin(tmp_path, monkeypatch, file=file)
    found = load_registry()
    assert ("probe.f0" in found.factors) is loads
    if not loads:
        assert "declares 'probe.f0'; its file and folder say 'probe.other'" in found.broken["thirty_checks.probe"]


def test_correction_05_each_factor_is_declared_once_however_many_there_are_and_how_often_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_plugins: None
) -> None:
    _plugin(tmp_path, monkeypatch, file="f0", count=40)
    found = load_registry()
    found.select("all")
    found.select("probe.*")
    load_registry().select("probe.f7")
    assert len(found.factors) == builtins.mh_declared == 40  # type: ignore[attr-defined]


def test_correction_06_bitwise_and_semantic_are_two_rules() -> None:
    other_nan = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    assert (same_bits(0.0, -0.0), same_meaning(0.0, -0.0)) == (False, True)
    assert (same_bits(math.nan, math.nan), same_bits(math.nan, other_nan)) == (True, False)
    assert same_meaning(math.nan, other_nan)
    assert (same_bits(1e-5, float(np.float32(1e-5))), same_meaning(1e-5, float(np.float32(1e-5)))) == (False, True)
    assert not same_meaning(1e-5, 1.1e-5)


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        pytest.param((), "No shard arrived", id="none"),
        pytest.param((shard(0, 2, WHOLE),), "one from each of 0 to 1 is needed", id="fewer"),
        pytest.param((shard(0, 1, WHOLE), shard(0, 1, WHOLE)), "Shards from ranks [0, 0] arrived", id="duplicated"),
        pytest.param((shard(0, 1, WHOLE), shard(1, 2, WHOLE)), "disagree on the world size", id="disagreeing"),
        pytest.param((shard(0, 2, WHOLE), shard(1, 2, WHOLE)), "was covered 2 times", id="covered twice"),
    ],
)
def test_correction_07_each_rank_brings_one_shard_and_each_token_comes_once(shards: Any, words: str) -> None:
    found = passes()
    key = (ROLLOUT, Choice.NATIVE)
    gate = shards_complete({**found, key: replace(found[key], shards=shards)}, SEQUENCES)
    assert not gate.ok and words in gate.reason
    assert shards_complete(found, SEQUENCES).ok


def test_correction_08_a_sweep_has_a_baseline_and_attributes_nothing() -> None:
    sweep = load_registry().factors["rollout.batch_size"]
    assert sweep.expansion is Expansion.VALUE_SWEEP and next(iter(sweep.arms)) == "native"
    found = diagnose_sweep({"native": arm_tokens(NOISE), "rollout=1": arm_tokens(0.1 * NOISE)}, **EPSILONS)
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert [effect.arm for effect in found.effects] == ["rollout=1"]
    low, high = found.effects[0].interval
    assert low <= found.effects[0].dlogp_change <= high < 0


def test_correction_09_prerequisites_are_versions_of_distributions_and_not_importability() -> None:
    needs = Prerequisites(required_packages={"numpy": ">=99"})  # numpy can be imported all the same
    here = Surroundings(packages={"numpy": np.__version__}, cuda_devices=0, model_traits=())
    (unmet,) = unmet_prerequisites(needs, here)
    assert np.__version__ in unmet and ">=99" in unmet
    assert unmet_prerequisites(Prerequisites(required_packages={"numpy": f"=={np.__version__}"}), here) == ()


def test_correction_10_a_proven_equivalence_suppresses_what_it_matches_and_nothing_else() -> None:
    rollout = OperatorContract(precision="bfloat16", layout="a", extra={"epsilon": 1e-5})
    training = OperatorContract(precision="float32", layout="b", extra={"epsilon": 1e-6})
    rules = {"precision": BITWISE, "layout": BITWISE, "extra.*": BITWISE}
    proof = KnownEquivalence(path="layout", values={ROLLOUT: "a", TRAINING: "b"}, verified_by="tests/x.py::test_y")
    assert [one.path for one in compare_contracts(rollout, training, rules)] == ["extra.epsilon", "layout", "precision"]
    assert [one.path for one in compare_contracts(rollout, training, rules, [proof])] == ["extra.epsilon", "precision"]
    zero = replace(proof, path="extra.epsilon", values={ROLLOUT: 0.0, TRAINING: 1})
    for left, right in ((-0.0, 1), (0.0, True), (False, 1)):  # equal to what was proven, and something else
        found = compare_contracts(
            replace(rollout, extra={"epsilon": left}), replace(training, extra={"epsilon": right}), rules, [zero]
        )
        assert "extra.epsilon" in [one.path for one in found]
    other = replace(proof, values={ROLLOUT: "b", TRAINING: "a"})
    assert len(compare_contracts(rollout, training, rules, [other])) == 3
    with pytest.raises(SchemaError, match="name the test that proves it"):
        replace(proof, verified_by="")


def test_correction_11_a_repeat_is_compared_and_changes_no_metric() -> None:
    # Driven through an ablation in tests/live/test_ablation.py, and over real process groups in the gemm operator's.
    first = score(ROLLOUT, Choice.NATIVE)
    other = replace(first, shards=(shard(slices=((0, 0, (-1.0, -2.5)), WHOLE[1])),))
    before = first.shards
    assert repeats_differ(first, {"NCCL_ALGO=Ring": first, "NCCL_ALGO=Tree": other}) == {"NCCL_ALGO=Tree": 1}
    assert first.shards is before


def test_correction_12_no_round_trip_through_exp() -> None:
    def figures(training: list[float], rollout: list[float]) -> dict[str, float]:
        return dict(measure(*from_lists([training], [rollout]), epsilon_low=0.2, epsilon_high=0.2).finalize())

    tiny, huge = 1e-12, figures([-0.1, -0.1], [-0.2, -100.1])
    assert figures([-1.0 + tiny], [-1.0])["k3"] == pytest.approx(math.expm1(tiny) - tiny, rel=1e-2, abs=1e-28)
    assert huge["ratio_max"] == pytest.approx(2.688117e43, rel=1e-6)
    assert huge["nonfinite"] == 0
    assert figures([-0.5, math.nan, -math.inf], [-0.6, -0.5, -0.5])["nonfinite"] == 2


def test_correction_13_a_setting_is_looked_up_by_its_readback_path_and_reported_by_its_key() -> None:
    wanted = RequiredSetting(
        key="enable_prefix_caching",
        readback="rollout.prefix_caching",
        channel=SettingChannel.ENGINE_ARGUMENT,
        value=False,
    )
    assert wanted.broken(readback(ROLLOUT, {"rollout.prefix_caching": False})) == ""
    assert wanted.broken(readback(ROLLOUT, {"rollout.prefix_caching": True})) == (
        "enable_prefix_caching on rollout is True; it has to be False."
    )
    assert "cannot be read" in wanted.broken(readback(ROLLOUT, {"enable_prefix_caching": False}))


def test_correction_14_a_mapping_in_a_record_is_frozen_all_the_way_down() -> None:
    inner = {"x": [1, 2]}
    contract = OperatorContract(precision="bfloat16", extra={"inner": inner})
    inner["x"].append(3)
    assert contract.extra["inner"]["x"] == (1, 2)
    with pytest.raises(TypeError):
        contract.extra["inner"]["x"] = 0


def test_correction_15_a_fingerprint_refuses_what_it_cannot_spell() -> None:
    with pytest.raises(SchemaError, match="cannot contain a Tensor"):
        fingerprint({"weights": torch.zeros(1)})
    assert fingerprint({"a": 1, "b": (2,)}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": (2.0,)})


def _identity(**changes: Any) -> ComparisonIdentity:
    plain: dict[str, Any] = {
        "prompt_ids": ((1,), (1,)),
        "response_ids": ((2, 3), (4,)),
        "active_mask": ((True, True), (True,)),
        "position_ids": ((1, 2), (1,)),
        "checkpoint": "model",
        "revision": "7",
        "model_shape": "s",
        "rollout_group": (0, 0),
        "group_size": 2,
        "batch_placement": ((0, 0), (0, 1)),
        "sampled_in": (True, True),
    }
    return ComparisonIdentity(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"active_mask": ((True,), (True,))}, "active_mask of sequence 0 has 1 entries for 2", id="mask"),
        pytest.param({"position_ids": ((1, 2), ())}, "position_ids of sequence 1 has 0 entries for 1", id="positions"),
        pytest.param({"prompt_ids": ((1,),)}, "prompt_ids has 1 entries for 2 sequences", id="sequences"),
        pytest.param({"group_size": 4}, r"group_size is 4 and the groups have \[2\] rollouts", id="group"),
    ],
)
def test_correction_16_an_identity_is_checked_where_it_is_built(changes: dict[str, Any], words: str) -> None:
    assert _identity() == _identity()
    with pytest.raises(SchemaError, match=words):
        _identity(**changes)


def test_correction_17_a_threshold_depends_on_whether_routing_is_replayed() -> None:
    with_replay, without = (
        threshold(ModelFamily.MOE, NoiseFloor.PRODUCTION, routing_replay=replayed).dlogp_mean_suspect_above
        for replayed in (True, False)
    )
    assert (with_replay, without) == (0.008, 0.02)


@pytest.mark.parametrize("version", [">=1.0", "1.0,<2", "~=1.2", "1.*", "latest", ""])
def test_correction_18_a_pin_is_one_version_and_every_library_of_a_reference_has_one(version: str) -> None:
    with pytest.raises(SchemaError, match="accepts one exact observed version"):
        LibraryPin(package="torch", version=version)
    for factor in load_registry().factors.values():
        for reference in factor.references:
            assert set(reference.prerequisites.required_packages) <= {pin.package for pin in reference.pinned_libraries}


@pytest.mark.parametrize("given", [True, 8192.0, 8192.5, "8192"])
def test_correction_19_an_integer_setting_refuses_what_only_looks_like_one(given: Any) -> None:
    wanted = RequiredSetting(
        key="max_num_batched_tokens", readback="rollout.most", channel=SettingChannel.ENGINE_ARGUMENT, at_least=4096
    )
    assert wanted.broken(readback(ROLLOUT, {"rollout.most": 8192})) == ""
    assert "accepts an integer" in wanted.broken(readback(ROLLOUT, {"rollout.most": given}))


def test_correction_20_qwen3_has_its_published_shape() -> None:
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    shape = shape_from_config(published)
    found = (shape.layers, shape.hidden_size, shape.query_heads, shape.kv_heads, shape.head_dim)
    assert found == (28, 1024, 16, 8, 128)
    assert shape.head_dim * shape.query_heads != shape.hidden_size  # the head dim is a number of its own


def test_correction_21_no_token_is_nan_and_never_a_perfect_zero() -> None:
    nothing = measure(*from_lists([[-1.0]], [[-1.0]], [[False]]), epsilon_low=0.2, epsilon_high=0.2).finalize()
    assert nothing["tokens"] == 0
    assert math.isnan(nothing["dlogp_mean"]) and math.isnan(nothing["clip_fraction"])
    empty = arm_tokens(np.zeros((0, 0)))
    for found in (
        diagnose_from_native(dict.fromkeys(Arm, empty), **EPSILONS),
        diagnose_from_aligned(dict.fromkeys(Arm, empty)),
    ):
        assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE


@pytest.mark.engine
def test_correction_22_the_downcast_sweep_varies_the_points_and_the_head_is_a_factor_of_its_own(
    llama_engines: TinyEngines,
) -> None:
    from mismatch_hooks.integrations.megatron.logprobs import token_logprobs

    factors = load_registry().factors
    sweep = factors["logprob.precision_downcast"]
    model = llama_engines.models[TRAINING]
    # A head whose logits are no bf16 values, so that storing them as such is a point of its own.
    hook = model.output_layer.register_forward_hook(lambda *call: (call[2][0].float() * 1.0007, call[2][1]))
    try:
        ids = torch.arange(40).view(2, 20)
        with torch.no_grad():
            found = {point: token_logprobs(model, ids, write_back=str(point)) for point in sweep.switch.values}
    finally:
        hook.remove()
    # No two points give the same values: each really writes back somewhere else.
    assert len({tuple(values.flatten().tolist()) for values in found.values()}) == len(found) == 4
    assert factors["logprob.head_dtype"].expansion is Expansion.STANDARD_FOUR
    assert factors["logprob.head_dtype"].switch.path != sweep.switch.path


@pytest.mark.parametrize("faulty", Arm)
def test_correction_23_an_arm_is_patched_by_its_name_and_no_other_one_moves(faulty: Arm) -> None:
    # Whatever the order in which arms are listed, what is read as an arm is the two passes that its name says.
    bound = faulty.choices
    found = {key: replace(one, shards=(shard(slices=WHOLE),)) for key, one in passes().items()}
    rollout = (ROLLOUT, bound[ROLLOUT])
    found[rollout] = replace(found[rollout], shards=(shard(slices=((0, 0, (-1.5, -2.0)), WHOLE[1])),))
    tokens, readings = read_arms(ROPE, found, SEQUENCES, **EPSILONS)
    moved = {arm for arm in Arm if np.any(tokens[arm].dlogp)}
    assert moved == {arm for arm in Arm if arm.choices[ROLLOUT] is bound[ROLLOUT]}
    assert {reading.arm for reading in readings if reading.metrics["dlogp_max"] == 0.5} == moved


def _aligned(both: float, rollout_native: float, training_native: float, reference: float = 0.0) -> Diagnosis:
    found = arms(both * NOISE, training_native * NOISE, rollout_native * NOISE, reference * NOISE)
    return diagnose_from_aligned(found).diagnosis


def test_correction_24_both_sides_may_depart_and_that_is_no_coupling() -> None:
    assert _aligned(1.0, 1.0, 1.0) is Diagnosis.CAUSED_BY_BOTH_SIDES
    assert _aligned(1.0, 0.0, 0.0) is Diagnosis.INSUFFICIENT_EVIDENCE  # impossible at a bitwise floor
    assert _aligned(0.0, 1.0, 1.0) is Diagnosis.NOT_THIS_FACTOR
    native = arms(NOISE, 1e-3 * NOISE, 1e-3 * NOISE, 1e-3 * NOISE)
    assert diagnose_from_native(native, **EPSILONS).diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE  # either one would do


def test_correction_25_from_native_a_verdict_carries_a_paired_test_and_guesses_nothing() -> None:
    redrawn = [np.random.default_rng(seed).normal(0.0, 0.05, NOISE.shape) for seed in (1, 2, 3)]
    found = diagnose_from_native(arms(NOISE, *redrawn), **EPSILONS)
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert len(found.effects) == 3
    assert all(0.0 < effect.p_value <= 1.0 and effect.resolvable > 0.0 for effect in found.effects)


def test_correction_26_a_reference_of_one_factor_is_not_bitwise_while_others_are_native() -> None:
    assert _aligned(1.0, 1.0, 1.0, reference=1.0) is Diagnosis.REFERENCE_ITSELF_IS_BROKEN
    still_noisy = arms(NOISE, NOISE + 1e-3, NOISE - 1e-3, NOISE * 0.999)
    assert diagnose_from_native(still_noisy, **EPSILONS).diagnosis is not Diagnosis.REFERENCE_ITSELF_IS_BROKEN


def test_correction_26_a_reference_is_checked_alone_on_the_same_operands_while_others_are_native(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (healthy,) = ablate_tiny(llama_engines, "norm.rmsnorm").verdicts
    assert healthy.diagnosis is not Diagnosis.REFERENCE_ITSELF_IS_BROKEN
    assert [one.references.differing for one in healthy.replays if one.references] == [0, 0]

    build = norm_adapter._training_norm

    def one_step_off(norm: Any, epsilon: float) -> Any:
        def broken(original: Any) -> Any:
            reference = build(norm, epsilon)(original)
            return lambda states: torch.nextafter(reference(states), torch.full((), torch.inf, dtype=states.dtype))

        return broken

    monkeypatch.setattr(norm_adapter, "_training_norm", one_step_off)
    (found,) = ablate_tiny(llama_engines, "norm.rmsnorm").verdicts
    assert found.diagnosis is Diagnosis.REFERENCE_ITSELF_IS_BROKEN, found.reason
    assert "by up to 1 ULP of bfloat16" in found.reason
    assert "at model.layers.0.input_layernorm" in found.reason
    assert all(gate.ok for gate in found.gates)


def test_correction_27_an_interval_is_clustered_by_sequence() -> None:
    # One sequence of twelve carries the whole change: many tokens, and one event.
    changed = NOISE.copy()
    changed[0] *= 0.01
    found = diagnose_from_native(arms(NOISE, changed, NOISE, changed), **EPSILONS)
    effect = next(one for one in found.effects if one.arm == Arm.ROLLOUT_REFERENCE_ONLY)
    assert (effect.sequences, effect.tokens) == (12, 12 * 128)
    assert effect.interval[0] < 0.0 < effect.interval[1]
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE


def test_contracts_are_built_from_what_was_read_back() -> None:
    settings = {
        "model.dtype": "bfloat16",
        "model.norm.epsilon": 1e-5,
        "operator.norm.implementation": "RMSNorm",
        "operator.linear.implementation": "ColumnParallelLinear",
        "parallel.tensor": 2,
        "parallel.tensor.backend": "gloo",
    }
    side = readback(TRAINING, settings)
    norm = contract_of(side, "norm")
    assert (norm.precision, norm.layout, dict(norm.extra)) == ("bfloat16", "RMSNorm", {"epsilon": 1e-5})
    (one, two) = contract_of(side, "linear").collectives
    assert (one.op, one.group_size, one.backend, one.determinism) == ("all_reduce", 2, "gloo", DeterminismLevel.NONE)
    assert one == two
    alone = readback(PolicyRole.ROLLOUT, {**settings, "parallel.tensor": 1, "model.norm.epsilon": 1e-6})
    assert [issue.path for issue in compare_contracts(contract_of(alone, "norm"), norm)] == ["extra.epsilon"]
    issues = compare_contracts(contract_of(alone, "linear"), contract_of(side, "linear"))
    assert "collectives[1].op" in [issue.path for issue in issues]

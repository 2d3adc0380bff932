"""The fingerprint of an ablation moves with everything that a verdict depends on, and with nothing else."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from mismatch_hooks.live.execution import execution_of, own_revision
from mismatch_hooks.pipeline.evidence import missing_evidence
from mismatch_hooks.schema.enums import Origin, PolicyRole, SettingChannel
from mismatch_hooks.schema.environment import EnvironmentFingerprint, ExecutionFingerprint, RequiredSetting, ReuseKey
from mismatch_hooks.schema.identity import ComparisonIdentity
from tests.live.test_hooks import SHAPE
from tests.pipeline.samples import FP32, ROLLOUT, ROPE, SEQUENCES, TRAINING, digest, readback

SETTINGS = {
    "library.numpy": "2.0",
    "environment.NCCL_ALGO": "Ring",
    "engine.device": "cpu",
    "engine.driver": "580.1",
    "operator.norm.implementation": "RMSNorm",
    "parallel.tensor": 2,
    "parallel.tensor.backend": "gloo",
}


def execution(**changes: Any) -> ExecutionFingerprint:
    given: dict[str, Any] = {
        "sequences": SEQUENCES,
        "readbacks": {role: readback(role, SETTINGS) for role in PolicyRole},
        "weights": {role: digest(role, {"a": "1"}) for role in PolicyRole},
        "origin": Origin.NATIVE,
        **changes,
    }
    return execution_of(given["sequences"], given["readbacks"], given["weights"], shape=SHAPE, origin=given["origin"])


def test_everything_that_was_read_back_is_in_it() -> None:
    found = execution()
    assert found.environment.libraries == {"rollout:numpy": "2.0", "training:numpy": "2.0"}
    assert found.environment.determinism == {f"{role.value}:environment.NCCL_ALGO": "Ring" for role in PolicyRole}
    assert found.environment.driver == "rollout: 580.1, training: 580.1"
    assert found.environment.own_revision == own_revision() != ""
    assert found.implementations[TRAINING]["norm"] == "RMSNorm"
    assert found.collectives[ROLLOUT][0] == "embedding: all_reduce over 2 by gloo"
    assert found.identity.position_ids == ((1, 2), (1, 2, 3))
    assert found.digest == execution().digest


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"origin": Origin.ALIGNED}, id="origin"),
        pytest.param({"sequences": SEQUENCES[:1]}, id="tokens"),
        pytest.param({"weights": {role: digest(role, {"a": "2"}) for role in PolicyRole}}, id="weights"),
        *(
            pytest.param(
                {"readbacks": {role: readback(role, {**SETTINGS, key: "other"}) for role in PolicyRole}}, id=key
            )
            for key in SETTINGS
        ),
    ],
)
def test_it_moves_with_every_input(changes: dict[str, Any]) -> None:
    assert execution(**changes).digest != execution().digest


# Another value of each field of the identity of SEQUENCES, of the lengths that the others have.
_OTHER_IDENTITY: dict[str, Any] = {
    "prompt_ids": ((1,), (2,)),
    "response_ids": ((2, 3), (4, 5, 7)),
    "active_mask": ((True, True), (True, True, True)),
    "position_ids": ((0, 1), (1, 2, 3)),
    "rollout_group": (5, 5),
    "group_size": 0,
    "batch_placement": ((0, 1), (0, 0)),
    "sampled_in": (True, False),
}


def test_the_rollouts_of_one_prompt_are_one_group() -> None:
    assert (execution().identity.rollout_group, execution().identity.group_size) == ((0, 0), 2)
    three = (*SEQUENCES, replace(SEQUENCES[0], prompt_token_ids=(9,)))
    found = execution(sequences=three).identity
    assert (found.rollout_group, found.group_size) == ((0, 0, 2), 0)


def test_two_installations_are_two_entries() -> None:
    other = {TRAINING: readback(TRAINING, {"library.numpy": "1.26"}), ROLLOUT: readback(ROLLOUT, SETTINGS)}
    found = execution(readbacks=other).environment.libraries
    assert found == {"training:numpy": "1.26", "rollout:numpy": "2.0"}


@pytest.mark.parametrize("record", ["identity", "environment", ""], ids=["identity", "environment", "execution"])
def test_it_moves_with_every_field(record: str) -> None:
    whole = execution()
    part: Any = getattr(whole, record) if record else whole
    for one in fields(part):
        value = getattr(part, one.name)
        if isinstance(value, str):
            other: Any = value + "x"
        elif isinstance(part, ComparisonIdentity):
            other = _OTHER_IDENTITY[one.name]
        elif isinstance(part, EnvironmentFingerprint):
            other = {**value, "more": "1"}
        elif one.name in ("identity", "environment"):
            continue
        else:
            other = {**value, TRAINING: ("changed",) if one.name == "collectives" else "changed"}
        changed = replace(part, **{one.name: other})
        moved = replace(whole, **{record: changed}) if record else changed
        assert moved.digest != whole.digest, one.name


def test_it_is_the_same_in_every_process_and_under_every_hash_seed() -> None:
    code = "from tests.live.test_execution import execution; print(execution().digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert found == {execution().digest}


def test_what_may_be_kept_ends_at_the_first_part_that_differs() -> None:
    before = ReuseKey(process={"isa": "avx2"}, engine={"dtype": "bf16"}, request={"batch": 1})
    assert before.kept_from(before) == ("process", "process_group", "engine", "request")
    assert replace(before, request={"batch": 2}).kept_from(before) == ("process", "process_group", "engine")
    assert replace(before, process={"isa": "avx512"}).kept_from(before) == ()


@pytest.mark.parametrize(
    ("setting", "sentences"),
    [
        pytest.param("Ring", (), id="as the reference needs it"),
        pytest.param(
            "Tree",
            tuple(
                f"Reference fp32 needs a setting: NCCL_ALGO on {role.value} is 'Ring'; it has to be 'Tree'."
                for role in PolicyRole
            ),
            id="otherwise",
        ),
    ],
)
def test_a_setting_that_a_reference_needs_is_evidence(setting: str, sentences: tuple[str, ...]) -> None:
    needed = RequiredSetting(
        key="NCCL_ALGO",
        readback="environment.NCCL_ALGO",
        channel=SettingChannel.ENVIRONMENT_VARIABLE,
        value=setting,
    )
    reference = replace(FP32, required_settings=(needed,))
    factor = replace(ROPE, required_evidence=())
    assert missing_evidence(factor, execution(), reference) == sentences
    assert missing_evidence(factor, execution()) == ()

"""Do decode and prefill disagree inside the rollout engine?"""

from mismatch_hooks.schema.enums import ExecutionPath, Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.execution_path",
    category=FactorCategory.ENVIRONMENT,
    question="Does decoding token by token give the rollout engine other log-probs than a prefill of the same tokens?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="scoring.path",
        allowed=("native", ExecutionPath.ROLLOUT_DECODE.value),
        roles=(PolicyRole.ROLLOUT,),
        channel=SettingChannel.SCORING_PASS,
    ),
    live_value=ExecutionPath.ROLLOUT_DECODE.value,
    call_sites=(CallSite(role=PolicyRole.ROLLOUT, name="scoring.path"),),
    recommendation=(
        "What differs between decode and prefill is inside the rollout engine and no trainer setting removes it: look "
        "for operators that depend on the number of rows."
    ),
)

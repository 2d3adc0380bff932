"""Does a row's result depend on its neighbours in the rollout engine?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.batch_size",
    category=FactorCategory.ENVIRONMENT,
    question="Does a sequence's log-prob depend on how many sequences the rollout engine computes together?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="scoring.batch_size",
        allowed=("native", 1, 2, 4, 8),
        roles=(PolicyRole.ROLLOUT,),
        channel=SettingChannel.SCORING_PASS,
    ),
    call_sites=(CallSite(role=PolicyRole.ROLLOUT, name="scoring.batch_size"),),
    required_evidence=("batch placement",),
    recommendation=(
        "Where a batch size changes bits, the engine's kernels are not batch-invariant: bind references that are, or "
        "use the engine's batch-invariant operators where the device has them."
    ),
)

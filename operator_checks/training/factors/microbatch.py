"""Does batching of the trainer's log-prob forward matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="training.microbatch",
    category=FactorCategory.ENVIRONMENT,
    question="Does a sequence's log-prob depend on how many sequences share the trainer's forward?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="scoring.micro_batch",
        allowed=("native", 1, 2, 4, "whole"),
        roles=(PolicyRole.TRAINING,),
        channel=SettingChannel.SCORING_PASS,
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="scoring.micro_batch"),),
    required_evidence=("batch placement",),
    recommendation=(
        "Where a micro-batch changes bits, padding or the number of rows reaches the kernels: compute log-probs with "
        "one micro-batch size throughout, and compare the padded width."
    ),
)

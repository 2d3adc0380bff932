"""Does a sequence see a neighbour in its row?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="input.attention_mask",
    category=FactorCategory.INPUT_IDENTITY,
    question="Does a sequence attend to what is not its own: a neighbour packed into its row, or padding?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="scoring.packing",
        allowed=("native", "unpacked"),
        channel=SettingChannel.SCORING_PASS,
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="scoring.packing"),
        CallSite(role=PolicyRole.TRAINING, name="scoring.packing"),
    ),
    required_evidence=("batch placement",),
    recommendation=(
        "Where training=unpacked is far lower than native, the trainer's rows leak: give the attention the boundaries "
        "of packed sequences (cu_seqlens, or a block-diagonal mask) and start positions anew at each. Where it differs "
        "by rounding alone, it is the number of rows that matters; see training.microbatch."
    ),
)

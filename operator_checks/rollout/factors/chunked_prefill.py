"""Does cutting prompts into chunks change bits?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.chunked_prefill",
    category=FactorCategory.ENVIRONMENT,
    question="Does chunked prefill change the log-probs?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="rollout.chunked_prefill",
        allowed=("native", False, True),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Build the engine with enable_chunked_prefill=False, or with max_num_batched_tokens above a prompt.",
)

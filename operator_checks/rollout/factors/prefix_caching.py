"""Do cached prefix blocks change bits?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.prefix_caching",
    category=FactorCategory.ENVIRONMENT,
    question="Does serving a prompt from the prefix cache change the log-probs?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="rollout.prefix_caching",
        allowed=("native", False, True),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Build the engine with enable_prefix_caching=False, or reset the cache after every weight sync.",
)

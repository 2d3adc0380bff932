"""Does the dtype of the KV cache matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.kv_cache_dtype",
    category=FactorCategory.ENVIRONMENT,
    question="Does storing keys and values in fewer bits cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="rollout.kv_cache_dtype",
        allowed=("native", "auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Build the engine with kv_cache_dtype='auto', which is the model's own dtype.",
)

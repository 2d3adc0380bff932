"""Does quantising the rollout weights matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.quantization",
    category=FactorCategory.ENVIRONMENT,
    question="Does quantising the rollout's weights cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="rollout.quantization",
        allowed=("native", "none", "fp8", "int8"),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Sample with unquantised weights, or correct for the sampler with truncated importance sampling.",
)

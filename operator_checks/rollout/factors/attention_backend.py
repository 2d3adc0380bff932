"""Does the attention backend of the rollout engine matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.attention_backend",
    category=FactorCategory.ENVIRONMENT,
    question="Does the rollout's attention backend cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="operator.attention.implementation",
        allowed=("native", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Build the engine with the attention backend whose arm is lowest; read back the live class.",
)

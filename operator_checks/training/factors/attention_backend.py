"""Does the trainer's attention backend matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="training.attention_backend",
    category=FactorCategory.ENVIRONMENT,
    question="Does the trainer's attention backend cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="training.attention_backend",
        allowed=("native", "flash", "fused", "unfused", "local"),
        roles=(PolicyRole.TRAINING,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.CONFIG_FIELD,
    ),
    recommendation="Build the model with the attention_backend whose arm is lowest; read back the live module.",
)

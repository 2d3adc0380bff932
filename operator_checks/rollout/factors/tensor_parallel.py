"""Does the rollout's tensor-parallel size matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.tensor_parallel",
    category=FactorCategory.ENVIRONMENT,
    question="Does the rollout's tensor-parallel size cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="parallel.tensor",
        allowed=("native", 1, 2, 4, 8),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.PROCESS_GROUP_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Use the tensor-parallel size whose arm is lowest on the rollout side.",
)

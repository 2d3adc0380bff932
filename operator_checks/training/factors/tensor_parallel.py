"""Does the trainer's tensor-parallel size matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="training.tensor_parallel",
    category=FactorCategory.ENVIRONMENT,
    question="Does the trainer's tensor-parallel size cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="parallel.tensor",
        allowed=("native", 1, 2, 4, 8),
        roles=(PolicyRole.TRAINING,),
        rebind_cost=RebindCost.PROCESS_GROUP_REBUILD,
        channel=SettingChannel.CONFIG_FIELD,
    ),
    recommendation="Use the tensor_model_parallel_size whose arm is lowest on the training side.",
)

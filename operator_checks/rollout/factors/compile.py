"""Does compiling the rollout model matter?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, RebindCost, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="rollout.compile",
    category=FactorCategory.ENVIRONMENT,
    question="Does torch.compile or a captured graph change the log-probs?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="engine.compiled",
        allowed=("native", False, True),
        roles=(PolicyRole.ROLLOUT,),
        rebind_cost=RebindCost.ENGINE_REBUILD,
        channel=SettingChannel.ENGINE_ARGUMENT,
    ),
    recommendation="Build the engine with enforce_eager=True, or accept what the compiled arm measures.",
)

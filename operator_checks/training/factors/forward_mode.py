"""Does the mode of the trainer's log-prob forward matter: train or eval, recomputed or not?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="training.forward_mode",
    category=FactorCategory.ENVIRONMENT,
    question="Does a forward in training mode, dropout and recomputation included, give other log-probs than in eval?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="training.mode",
        allowed=("native", "eval", "train"),
        roles=(PolicyRole.TRAINING,),
        channel=SettingChannel.CONFIG_FIELD,
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="GPTModel: training"),),
    pitfalls=("dropout_active",),
    recommendation="Set both dropouts to 0, or compute the log-probs that enter the ratio in eval mode.",
)

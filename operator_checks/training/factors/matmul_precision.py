"""Do the trainer's global matmul flags matter: tf32, reduced-precision reduction?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="training.matmul_precision",
    category=FactorCategory.ENVIRONMENT,
    question="Do tf32 or a reduced-precision reduction in the trainer's matmuls change the log-probs?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="training.matmul_precision",
        allowed=("native", "full", "reduced"),
        roles=(PolicyRole.TRAINING,),
        channel=SettingChannel.CONFIG_FIELD,
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="torch: matmul precision flags"),),
    recommendation=(
        "Turn tf32 and reduced-precision reduction off on both sides, or on on both: "
        "torch.set_float32_matmul_precision and torch.backends.cuda.matmul.allow_*_reduced_precision_reduction."
    ),
)

"""Did the last weight sync deliver every tensor?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, SettingChannel
from mismatch_hooks.schema.factor import MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="weights.sync",
    category=FactorCategory.INPUT_IDENTITY,
    question="Does the rollout engine multiply with the weights that the trainer has, tensor by tensor?",
    expansion=Expansion.CONTENT,
    switch=Switch(path="weights.digest", allowed=("native", "a fresh sync"), channel=SettingChannel.MODULE_PATCH),
    recommendation=(
        "Deliver the named tensors, by these names and in Hugging Face's layout (q, k and v of a fused tensor taken "
        "apart by group), and compare again; until then no kernel can be judged."
    ),
)

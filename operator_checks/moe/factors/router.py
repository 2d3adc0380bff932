"""Do precision and ties in the choice of experts make rollout and training disagree?"""

from mismatch_hooks.schema.enums import FactorCategory
from mismatch_hooks.schema.factor import MismatchFactor, Prerequisites, Switch

FACTOR = MismatchFactor(
    id="moe.router",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Do the router's precision and its top-k ties cause the mismatch?",
    switch=Switch(path="operator.moe.router", allowed=("native", "reference")),
    prerequisites=Prerequisites(
        required_model_traits=("moe",), blocked_by=("no mixture of experts has run on both engines",)
    ),
)

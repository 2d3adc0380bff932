"""Does the order in which experts are computed make rollout and training disagree?"""

from mismatch_hooks.schema.enums import FactorCategory
from mismatch_hooks.schema.factor import MismatchFactor, Prerequisites, Switch

FACTOR = MismatchFactor(
    id="moe.grouped_gemm",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the order of the experts' computation cause the mismatch?",
    switch=Switch(path="operator.moe.grouped_gemm", allowed=("native", "reference")),
    prerequisites=Prerequisites(
        required_model_traits=("moe",), blocked_by=("no mixture of experts has run on both engines",)
    ),
)

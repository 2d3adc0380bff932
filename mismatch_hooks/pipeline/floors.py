"""Is a run on the noise floor that it is said to be on? Each floor adds one source of noise to the one before."""

from collections.abc import Mapping

from mismatch_hooks.schema.enums import NoiseFloor, PolicyRole
from mismatch_hooks.schema.readback import Readback
from mismatch_hooks.schema.shape import ModelShape


def noise_above(floor: NoiseFloor, shape: ModelShape, readbacks: Mapping[PolicyRole, Readback]) -> str:
    """Return the first source of noise that this run has and its floor has not, in words; "" where it is on its floor.

    Args:
        floor: what the run is said to be on.
        shape: of the model.
        readbacks: the settings in effect; a degree of parallelism that cannot be read counts as noise.
    """
    if floor is NoiseFloor.SINGLE_LAYER_ANCHOR and shape.layers > 1:
        return f"the model has {shape.layers} layers"
    if floor >= NoiseFloor.SHARDED_SINGLE_NODE:
        return ""
    for role, readback in readbacks.items():
        ranks = readback.effective("parallel.tensor")
        if ranks != 1:
            return f"parallel.tensor on {role.value} is {ranks if isinstance(ranks, int) else 'not observable'}"
    return ""

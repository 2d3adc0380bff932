"""How large a mismatch is expected, and when it is suspect: constants by family, noise floor and routing replay."""

from dataclasses import dataclass

from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor
from mismatch_hooks.schema.fingerprint import fingerprint as fingerprint_of
from mismatch_hooks.schema.freeze import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One row of the table: what |dlogp| looks like when all is well, and from where on nothing explains it.

    Nobody has published healthy ranges of clip_fraction. ``clip_fraction_suspect_above`` is therefore no second opinion
    but the most that the row's own mean can explain: by Markov's inequality at most ``mean |dlogp| / edge`` of the
    tokens lie beyond an edge, and the two edges of the default clip range, ln 1.2 and −ln 0.8, average 0.20. A larger
    clip_fraction, spread over both edges, puts the mean above its own limit, whatever the tail looks like. It is a
    backstop: a clip_fraction below it proves nothing (a bf16 model of 135 M parameters showed a suspect mean of 0.0465
    at a clip_fraction of 0.0195).

    Attributes:
        model_family: the family that the row is for; None is every family.
        noise_floor: the floor that the row is for.
        routing_replay: the *effective* routing-replay state that the row is for; None is either.
        dlogp_mean_expected: lowest and highest mean |dlogp| of a healthy run, nats.
        dlogp_mean_suspect_above: mean |dlogp|, nats, that no healthy run exceeds.
        clip_fraction_suspect_above: clip_fraction that no healthy run exceeds, at the default clip range of 0.2/0.2.
    """

    model_family: ModelFamily | None
    noise_floor: NoiseFloor
    routing_replay: bool | None
    dlogp_mean_expected: tuple[float, float]
    dlogp_mean_suspect_above: float
    clip_fraction_suspect_above: float

    def __post_init__(self) -> None:
        lowest, highest = self.dlogp_mean_expected
        if not 0.0 <= lowest <= highest <= self.dlogp_mean_suspect_above:
            raise SchemaError(
                f"Threshold: dlogp_mean_expected {self.dlogp_mean_expected} and dlogp_mean_suspect_above "
                f"{self.dlogp_mean_suspect_above} are out of order; accepts 0 <= lowest <= highest <= suspect."
            )


def _row(
    model_family: ModelFamily | None,
    noise_floor: NoiseFloor,
    routing_replay: bool | None,
    expected: tuple[float, float],
    *,
    suspect: float,
    clipped: float,
) -> Threshold:
    return Threshold(
        model_family=model_family,
        noise_floor=noise_floor,
        routing_replay=routing_replay,
        dlogp_mean_expected=expected,
        dlogp_mean_suspect_above=suspect,
        clip_fraction_suspect_above=clipped,
    )


# With replay, a mixture's limit equals its expectation: no drop below it means that replay did not take effect.
THRESHOLDS = (
    _row(None, NoiseFloor.SINGLE_LAYER_ANCHOR, None, (0.0, 0.0), suspect=1e-6, clipped=5e-6),
    _row(None, NoiseFloor.FULL_MODEL_SINGLE_DEVICE, None, (0.0, 1e-6), suspect=1e-5, clipped=5e-5),
    _row(None, NoiseFloor.SHARDED_SINGLE_NODE, None, (0.0, 1e-4), suspect=1e-3, clipped=5e-3),
    _row(ModelFamily.DENSE, NoiseFloor.PRODUCTION, False, (0.002, 0.008), suspect=0.01, clipped=0.05),
    _row(ModelFamily.MOE, NoiseFloor.PRODUCTION, False, (0.007, 0.008), suspect=0.02, clipped=0.1),
    _row(ModelFamily.MOE, NoiseFloor.PRODUCTION, True, (0.0, 0.008), suspect=0.008, clipped=0.04),
    _row(ModelFamily.LARGE_MOE, NoiseFloor.PRODUCTION, False, (0.01, 0.03), suspect=0.05, clipped=0.25),
    _row(ModelFamily.LARGE_MOE, NoiseFloor.PRODUCTION, True, (0.0, 0.008), suspect=0.008, clipped=0.04),
)


def threshold(model_family: ModelFamily, noise_floor: NoiseFloor, *, routing_replay: bool) -> Threshold:
    """Return the row for a run; an exact family beats the row for every family.

    Args:
        model_family: as configured.
        noise_floor: as configured.
        routing_replay: whether replay is in effect, as read back; what was asked for does not count.

    Raises:
        SchemaError: no row covers the combination, for example routing replay on a dense model.
    """
    for family in (model_family, None):
        for row in THRESHOLDS:
            if (row.model_family, row.noise_floor) == (family, noise_floor) and row.routing_replay in (
                None,
                routing_replay,
            ):
                return row
    known = ", ".join(_name(row) for row in THRESHOLDS if row.noise_floor is noise_floor)
    raise SchemaError(
        f"no threshold for model_family {model_family.value}, noise_floor {noise_floor.name.lower()}, routing_replay "
        f"{str(routing_replay).lower()}; this floor has rows for {known}: correct model_family, or the replay setting."
    )


def fingerprint() -> str:
    """Return the hexadecimal SHA-256 of the whole table; a verdict made under another one is stale."""
    return fingerprint_of(THRESHOLDS)


def _name(row: Threshold) -> str:
    family = "every family" if row.model_family is None else row.model_family.value
    return family if row.routing_replay is None else f"{family} {'with' if row.routing_replay else 'without'} replay"

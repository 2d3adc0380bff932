"""The ``mismatch_hooks`` section of a training config: every key checked at start, refused in one sentence."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

SECTION = "mismatch_hooks"
SinkName = Literal["wandb", "jsonl", "console"]


class ConfigError(ValueError):
    """The configuration is refused; the message names the key, what was given and what is accepted."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ClipFractionAlert(_Section):
    """When a regression of clip_fraction is called."""

    window: Annotated[int, Field(ge=3)] = 50  # steps that the baseline is learned from, then it is frozen
    min_steps: Annotated[int, Field(ge=3)] = 10  # steps before relative detection speaks; absolute limits always do

    @model_validator(mode="after")
    def _window_holds_min_steps(self) -> Self:
        if self.window < self.min_steps:
            raise ValueError(
                f"window is {self.window} and min_steps {self.min_steps}; window must be at least min_steps"
            )
        return self


class Alerts(_Section):
    """What is watched besides what is always watched (non-finite log-probs, falling coverage, missing metrics)."""

    clip_fraction: ClipFractionAlert = ClipFractionAlert()


class HooksConfig(_Section):
    """One run's hooks."""

    enabled: bool = True
    ablate_every: Annotated[int, Field(ge=0)] = 20  # steps; 0 = capture and metrics only
    sample_sequences: Annotated[int, Field(ge=1)] = 16  # sequences re-scored in an ablation; 10 or more can accuse
    time_budget: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.05  # share of wall time for ablation
    # What all others are bound to while one factor is examined; aligned needs a reference for each of the operators.
    origin: Literal["aligned", "native", "both"] = "aligned"
    factors: Literal["all"] | tuple[str, ...] = "all"  # ids or globs
    # Kept on their references while the loop samples and trains: ids or globs; "id:reference@rollout" names one of a
    # factor's references, and one side.
    align: Literal["all"] | tuple[str, ...] = ()
    model_family: Literal["dense", "moe", "large_moe"] = "dense"
    noise_floor: Literal["single_layer_anchor", "full_model_single_device", "sharded_single_node", "production"] = (
        "production"
    )
    sinks: tuple[SinkName, ...] = ("wandb", "jsonl", "console")
    wandb_project: str = "mismatch_hooks"  # used only when no W&B run is open already
    sink_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0  # seconds a sink may hold the loop, once
    scoring_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0  # seconds for one rollout scoring pass
    trace: bool = False  # after an ablation, compare what every module gives: two to four more prefill passes
    alerts: Alerts = Alerts()

    @field_validator("factors", "align", mode="before")
    @classmethod
    def _all_or_names(cls, given: object) -> object:
        if given == "all":
            return given
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise ValueError(f"got {given!r}; accepts all, or a list of factor ids and globs")
        return tuple(given)

    @field_validator("sinks", mode="before")
    @classmethod
    def _from_list(cls, given: object) -> object:
        if isinstance(given, list) and any(given.count(name) > 1 for name in given):
            raise ValueError(f"got {given!r}; accepts each sink once")
        return tuple(given) if isinstance(given, list) else given


def check_config(raw: Mapping[str, Any] | HooksConfig) -> HooksConfig:
    """Return the checked section.

    Raises:
        ConfigError: names the first wrong key, what was given, what is accepted, and the nearest key.
    """
    if isinstance(raw, HooksConfig):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{SECTION}: got {raw!r} ({type(raw).__name__}); accepts a mapping such as {{enabled: true}}."
        )
    try:
        return HooksConfig.model_validate(dict(raw))
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join([SECTION, *path])
    given, kind = first["input"], first["type"]
    if kind == "extra_forbidden":
        known = list(_section(path).model_fields)
        near = get_close_matches(path[-1], known, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"{key}: unknown key; accepts {', '.join(known)}.{hint}"
    if kind == "literal_error":
        accepted = [word.strip("'\" ") for word in str(first["ctx"]["expected"]).replace(" or ", ",").split(",")]
        near = get_close_matches(str(given), accepted, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return f"{key}: got {given!r}; accepts {', '.join(accepted)}.{hint}"
    if kind == "value_error":
        return f"{key}: {first['ctx']['error']}."
    if kind in ("int_type", "greater_than_equal"):
        least = next(bound.ge for bound in _section(path).model_fields[path[-1]].metadata if hasattr(bound, "ge"))
        return f"{key}: got {given!r} ({type(given).__name__}); accepts an integer of {least} or more."
    return f"{key}: got {given!r} ({type(given).__name__}); {_accepted(first)}."


def _accepted(found: Mapping[str, Any]) -> str:
    context = found.get("ctx", {})
    bounds = {
        "bool_type": "accepts true or false",
        "float_type": "accepts a number",
        "string_type": "accepts text",
        "greater_than": f"accepts more than {context.get('gt')}",
        "less_than_equal": f"accepts {context.get('le')} or less",
        "finite_number": "accepts a finite number",
        "tuple_type": "accepts a list",
        "invalid_key": "keys are text",
        "model_type": "accepts a mapping",
    }
    return bounds.get(found["type"], str(found["msg"]).replace("Input should be", "accepts").lower())


def _section(path: list[str]) -> type[BaseModel]:
    """The section that holds the last key of ``path``."""
    section: type[BaseModel] = HooksConfig
    for name in path[:-1]:
        annotation = section.model_fields[name].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return section

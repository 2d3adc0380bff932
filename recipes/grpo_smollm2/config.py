"""The frozen configuration of a run, read from YAML with every key checked."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from recipes.grpo_smollm2.errors import RecipeError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Model(_Section):
    """Which model is trained and where its converted files are kept."""

    name: Literal["smollm2", "tiny_llama", "tiny_qwen3"]
    cache: str = ".cache"  # relative paths count from the repository root
    tied: bool = False  # tiny models only: the head shares the embedding; smollm2 is tied by its own file
    seed: Annotated[int, Field(ge=0)] = 0  # tiny models only: draws the weights
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of both engines' weights and activations


class Task(_Section):
    """What is asked and how many answers are drawn in a step."""

    kind: Literal["addition", "even_tokens"]
    prompts: Count = 4  # a step
    samples: Annotated[int, Field(ge=2)] = 4  # answers to each prompt; one group of GRPO
    max_response_tokens: Count = 40


class Sampling(_Section):
    """How the rollout engine draws a token; the log-probs it returns are always the raw ones."""

    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 = off
    top_k: Annotated[int, Field(ge=0)] = 0  # 0 = off
    min_p: Share = 0.0  # 0 = off


class Grpo(_Section):
    """The update."""

    epsilon_low: Share = 0.2
    epsilon_high: Positive = 0.2
    kl_coefficient: NonNegative = 0.0  # 0 = off: no copy of the initial policy is kept
    minibatches: Count = 1  # optimizer steps a rollout; 2 or more add a log-prob pass before the first


class Optimizer(_Section):
    """AdamW on fp32 master weights."""

    learning_rate: NonNegative = 1.0e-5
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0

    @field_validator("betas", mode="before")
    @classmethod
    def _from_list(cls, given: object) -> object:
        return tuple(given) if isinstance(given, list) else given


class Rollout(_Section):
    """The vLLM engine."""

    engine_core_in_process: bool = True  # false: the engine core runs in a process of its own
    prefix_caching: bool = False
    max_model_len: Count = 256  # tokens, prompt and response together
    kv_cache_mib: Count = 512


class Wandb(_Section):
    """The run's own W&B run; the environment variable WANDB_MODE wins over ``mode``."""

    mode: Literal["offline", "online", "disabled"] = "disabled"
    project: str = "grpo_smollm2"
    name: str | None = None


class Inject(_Section):
    """A fault planted on purpose, to see the alert and the verdict fire."""

    kind: Literal["rollout_rope_theta"]
    step: Annotated[int, Field(ge=0)]  # the first step that samples with the fault
    factor: Positive = 0.1  # the rotary base is multiplied by this


class Config(_Section):
    """One run."""

    loop: str = "train.py"  # the file, next to the YAML, whose main() runs this configuration
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Count = 24
    time_limit_s: NonNegative = 0.0  # seconds; no step begins that would end later, so a slow host does fewer. 0 = none
    model: Model
    task: Task
    sampling: Sampling = Sampling()
    grpo: Grpo = Grpo()
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    wandb: Wandb = Wandb()
    inject: Inject | None = None
    mismatch_hooks: dict[str, Any] = {"enabled": False}  # passed on as it is; the library checks it

    @property
    def hooks_enabled(self) -> bool:
        """Whether the run carries the mismatch hooks."""
        return bool(self.mismatch_hooks["enabled"])

    @field_validator("inject", mode="before")
    @classmethod
    def _from_shorthand(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        found = re.fullmatch(r"rope_theta@(\d+)", given)
        if found is None:
            raise ValueError("rope_theta@STEP, or a mapping of kind, step and factor")
        return {"kind": "rollout_rope_theta", "step": int(found[1])}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        enabled = self.mismatch_hooks.get("enabled")
        if not isinstance(enabled, bool):
            raise RecipeError(f"mismatch_hooks.enabled: got {enabled!r}; accepts true or false.")
        if self.inject is not None and not enabled:
            raise RecipeError(
                f"inject: got {self.inject.kind} while mismatch_hooks.enabled is false; "
                "accepts a fault only where something watches: set mismatch_hooks.enabled to true."
            )
        if self.task.kind == "addition" and self.model.name != "smollm2":
            raise RecipeError(
                f"task.kind: got 'addition' with model.name {self.model.name!r}, which has no tokenizer; "
                "accepts even_tokens there."
            )
        sequences = self.task.prompts * self.task.samples
        if sequences % self.grpo.minibatches:
            raise RecipeError(
                f"grpo.minibatches: got {self.grpo.minibatches}; accepts a divisor of the {sequences} sequences a step "
                "(task.prompts × task.samples)."
            )
        return self


def parse(raw: Mapping[str, object]) -> Config:
    """The checked configuration of a raw mapping, as YAML gives it.

    Raises:
        RecipeError: the first wrong key, with its path, what was given and what is accepted.
    """
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as invalid:
        raise RecipeError(_sentence(invalid)) from None


def load(path: Path, overrides: Iterable[str] = ()) -> dict[str, object]:
    """The raw mapping of a YAML file with ``key.sub=value`` overrides applied; values are read as YAML.

    Raises:
        RecipeError: the file is absent or not a mapping, or an override has no ``=`` or leads through a value.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file; give the path of a recipe's YAML file.") from None
    except yaml.YAMLError as broken:
        raise RecipeError(
            f"{path}: not readable as YAML ({' '.join(str(broken).split())}); correct the file."
        ) from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: got {type(raw).__name__} at the top level; accepts a mapping of keys.")
    for override in overrides:
        _override(raw, override)
    return raw


def _override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set: got {override!r}; accepts KEY=VALUE with a dotted key, as in grpo.minibatches=2.")
    *sections, last = key.split(".")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise RecipeError(f"--set {override}: {section} is a value, not a section; accepts keys of sections only.")
    raw[last] = yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """YAML as people write it: YAML 1.1 reads ``1e-5`` as text, because it has no point."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _sentence(invalid: ValidationError) -> str:
    # An unknown key explains a missing one (a misspelling is both), so it goes first.
    error = min(invalid.errors(), key=lambda found: found["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(_section(error["loc"][:-1]).model_fields)
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        return f"{path}: unknown key; accepts {', '.join(known)}." + (f" Did you mean {near[0]!r}?" if near else "")
    if error["type"] == "missing":
        return f"{path}: missing; add this key."
    given = error["input"]
    accepted = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    sentence = f"{path}: got {given!r} ({type(given).__name__}); accepts {accepted}."
    choices = re.findall(r"'([^']*)'", accepted) if error["type"] == "literal_error" else []
    near = difflib.get_close_matches(str(given), choices, n=1)
    return sentence + (f" Did you mean {near[0]!r}?" if near else "")


def _section(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        candidates = (annotation, *get_args(annotation))
        section = next(found for found in candidates if isinstance(found, type) and issubclass(found, BaseModel))
    return section

from pathlib import Path
from typing import Any

import pytest

from recipes.grpo_smollm2.config import load, parse
from recipes.grpo_smollm2.errors import RecipeError

FOLDER = Path(__file__).parents[2] / "recipes" / "grpo_smollm2"


def tiny(**changes: Any) -> dict[str, Any]:
    return {"model": {"name": "tiny_llama"}, "task": {"kind": "even_tokens"}, **changes}


@pytest.mark.parametrize("name", ["smollm2.yaml", "tiny_llama.yaml", "tiny_qwen3.yaml"])
def test_every_shipped_configuration_is_accepted_and_names_its_loop(name: str) -> None:
    config = parse(load(FOLDER / name))
    assert (FOLDER / config.loop).is_file()


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        pytest.param(
            tiny(grpo={"epsilonlow": 0.2}),
            "grpo.epsilonlow: unknown key; accepts epsilon_low, epsilon_high, kl_coefficient, minibatches. "
            "Did you mean 'epsilon_low'?",
            id="misspelled key of a section",
        ),
        pytest.param(
            tiny(inject={"kind": "rollout_rope_theta", "stepp": 3}),
            "inject.stepp: unknown key; accepts kind, step, factor. Did you mean 'step'?",
            id="misspelled key of an optional section",
        ),
        pytest.param(tiny(steps="4"), "steps: got '4' (str); accepts a valid integer.", id="number as text"),
        pytest.param(tiny(steps=True), "steps: got True (bool); accepts a valid integer.", id="bool as number"),
        pytest.param(tiny(steps=0), "steps: got 0 (int); accepts greater than or equal to 1.", id="out of range"),
        pytest.param({"task": {"kind": "even_tokens"}}, "model: missing; add this key.", id="missing section"),
        pytest.param(
            tiny(wandb={"mode": "ofline"}),
            "wandb.mode: got 'ofline' (str); accepts 'offline', 'online' or 'disabled'. Did you mean 'offline'?",
            id="misspelled choice",
        ),
        pytest.param(
            tiny(inject="rope@8", mismatch_hooks={"enabled": True}),
            "inject: got 'rope@8' (str); accepts rope_theta@STEP, or a mapping of kind, step and factor.",
            id="shorthand that is none",
        ),
        pytest.param(
            tiny(inject="rope_theta@8"),
            "inject: got rollout_rope_theta while mismatch_hooks.enabled is false; "
            "accepts a fault only where something watches: set mismatch_hooks.enabled to true.",
            id="fault without hooks",
        ),
        pytest.param(
            tiny(mismatch_hooks={"enabled": "yes"}),
            "mismatch_hooks.enabled: got 'yes'; accepts true or false.",
            id="flag that is no flag",
        ),
        pytest.param(
            tiny(task={"kind": "addition"}),
            "task.kind: got 'addition' with model.name 'tiny_llama', which has no tokenizer; "
            "accepts even_tokens there.",
            id="words for a model without a tokenizer",
        ),
        pytest.param(
            tiny(grpo={"minibatches": 3}),
            "grpo.minibatches: got 3; accepts a divisor of the 16 sequences a step (task.prompts × task.samples).",
            id="minibatches of unequal size",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse(raw)
    assert str(refused.value) == sentence
    assert refused.value.exit_code == 2


def test_overrides_are_read_as_yaml_and_reach_nested_keys() -> None:
    overrides = ["grpo.minibatches=2", "optimizer.learning_rate=3e-5", "mismatch_hooks.enabled=true", "wandb.name=a"]
    config = parse(load(FOLDER / "tiny_llama.yaml", overrides))
    assert config.grpo.minibatches == 2
    assert config.optimizer.learning_rate == 3e-5
    assert config.hooks_enabled
    assert config.wandb.name == "a"


def test_the_shorthand_of_a_fault_names_its_step() -> None:
    config = parse(load(FOLDER / "smollm2.yaml", ["inject=rope_theta@8"]))
    assert config.inject is not None
    assert (config.inject.kind, config.inject.step) == ("rollout_rope_theta", 8)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps", "--set: got 'steps'; accepts KEY=VALUE with a dotted key, as in grpo.minibatches=2."),
        ("steps.more=1", "--set steps.more=1: steps is a value, not a section; accepts keys of sections only."),
    ],
    ids=["no value", "through a value"],
)
def test_an_override_that_leads_nowhere_is_refused_in_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(FOLDER / "tiny_llama.yaml", [override])
    assert str(refused.value) == sentence


def test_an_absent_or_broken_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file; give the path of a recipe's YAML file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(RecipeError, match="not readable as YAML"):
        load(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- a", encoding="utf-8")
    with pytest.raises(RecipeError, match="got list at the top level; accepts a mapping of keys"):
        load(tmp_path / "list.yaml")

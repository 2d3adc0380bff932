"""The section of a training config: every wrong key is one sentence with what was given and what is accepted."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from mismatch_hooks.live.config import ConfigError, HooksConfig, check_config

KEYS = ", ".join(HooksConfig.model_fields)


def test_an_empty_section_is_the_default() -> None:
    assert check_config({}) == HooksConfig()
    assert (check_config({}).ablate_every, check_config({}).sample_sequences) == (20, 16)


def test_a_full_section_is_taken_as_given() -> None:
    config = check_config(
        {
            "enabled": True,
            "ablate_every": 0,
            "time_budget": 1,
            "factors": ["attention.*"],
            "sinks": ["jsonl"],
            "alerts": {"clip_fraction": {"window": 20, "min_steps": 5}},
        }
    )
    assert (config.ablate_every, config.time_budget, config.factors, config.sinks) == (
        0,
        1.0,
        ("attention.*",),
        ("jsonl",),
    )
    assert (config.alerts.clip_fraction.window, config.alerts.clip_fraction.min_steps) == (20, 5)
    assert check_config(config) is config


def test_a_parsed_section_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        check_config({}).ablate_every = 5


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        pytest.param(
            {"enabld": True},
            f"mismatch_hooks.enabld: unknown key; accepts {KEYS}. Did you mean 'enabled'?",
            id="a key with a slip",
        ),
        pytest.param({"zzz": 1}, f"mismatch_hooks.zzz: unknown key; accepts {KEYS}.", id="a key like no other"),
        pytest.param(
            {"alerts": {"clip_fractio": {}}},
            "mismatch_hooks.alerts.clip_fractio: unknown key; accepts clip_fraction. Did you mean 'clip_fraction'?",
            id="a nested key",
        ),
        pytest.param(
            {"alerts": {"clip_fraction": {"windw": 3}}},
            "mismatch_hooks.alerts.clip_fraction.windw: unknown key; accepts window, min_steps. Did you mean 'window'?",
            id="a key two levels down",
        ),
        pytest.param({1: 2}, "mismatch_hooks.1: got 1 (int); keys are text.", id="a key that is no text"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(raw: Any, sentence: str) -> None:
    _refused(raw, sentence)


@pytest.mark.parametrize(
    ("key", "given", "sentence"),
    [
        pytest.param("enabled", "yes", "got 'yes' (str); accepts true or false.", id="text for a switch"),
        pytest.param("enabled", 1, "got 1 (int); accepts true or false.", id="1 for true"),
        pytest.param("ablate_every", True, "got True (bool); accepts an integer of 0 or more.", id="true for steps"),
        pytest.param("ablate_every", "20", "got '20' (str); accepts an integer of 0 or more.", id="text for steps"),
        pytest.param("ablate_every", 2.0, "got 2.0 (float); accepts an integer of 0 or more.", id="a whole float"),
        pytest.param("ablate_every", 2.5, "got 2.5 (float); accepts an integer of 0 or more.", id="a fraction"),
        pytest.param("ablate_every", -1, "got -1 (int); accepts an integer of 0 or more.", id="negative steps"),
        pytest.param(
            "sample_sequences", True, "got True (bool); accepts an integer of 1 or more.", id="true for sequences"
        ),
        pytest.param("sample_sequences", 0, "got 0 (int); accepts an integer of 1 or more.", id="no sequence"),
        pytest.param("time_budget", True, "got True (bool); accepts a number.", id="true for a share"),
        pytest.param("time_budget", "5%", "got '5%' (str); accepts a number.", id="per cent"),
        pytest.param("time_budget", 0, "got 0 (int); accepts more than 0.0.", id="no budget"),
        pytest.param("time_budget", 1.5, "got 1.5 (float); accepts 1.0 or less.", id="more than all time"),
        pytest.param("time_budget", math.nan, "got nan (float); accepts a finite number.", id="NaN"),
        pytest.param("sink_timeout", math.inf, "got inf (float); accepts a finite number.", id="infinity"),
        pytest.param("scoring_timeout", 0, "got 0 (int); accepts more than 0.0.", id="no time"),
        pytest.param("wandb_project", 3, "got 3 (int); accepts text.", id="a number for a name"),
        pytest.param("sinks", "wandb", "got 'wandb' (str); accepts a list.", id="one sink outside a list"),
        pytest.param("sinks", ["jsonl", "jsonl"], "got ['jsonl', 'jsonl']; accepts each sink once.", id="a sink twice"),
        pytest.param(
            "factors",
            "attention.rope_fusion",
            "got 'attention.rope_fusion'; accepts all, or a list of factor ids and globs.",
            id="one factor outside a list",
        ),
        pytest.param("factors", [1], "got [1]; accepts all, or a list of factor ids and globs.", id="a number as id"),
        pytest.param("factors", None, "got None; accepts all, or a list of factor ids and globs.", id="nothing"),
        pytest.param("alerts", None, "got None (NoneType); accepts a mapping.", id="an empty YAML section"),
    ],
)
def test_a_wrong_type_or_value_is_refused(key: str, given: Any, sentence: str) -> None:
    _refused({key: given}, f"mismatch_hooks.{key}: {sentence}")


@pytest.mark.parametrize(
    ("key", "given", "sentence"),
    [
        pytest.param("origin", "natve", "accepts aligned, native, both. Did you mean 'native'?", id="near"),
        pytest.param("origin", "neither", "accepts aligned, native, both.", id="far"),
        pytest.param("model_family", "mo", "accepts dense, moe, large_moe. Did you mean 'moe'?", id="one of three"),
        pytest.param(
            "noise_floor",
            "producton",
            "accepts single_layer_anchor, full_model_single_device, sharded_single_node, production. Did you mean "
            "'production'?",
            id="one of four",
        ),
    ],
)
def test_a_word_that_is_not_accepted_is_refused_with_the_nearest(key: str, given: str, sentence: str) -> None:
    _refused({key: given}, f"mismatch_hooks.{key}: got {given!r}; {sentence}")


def test_an_unknown_sink_is_named_by_its_place() -> None:
    _refused(
        {"sinks": ["jsonl", "wandbb"]},
        "mismatch_hooks.sinks.1: got 'wandbb'; accepts wandb, jsonl, console. Did you mean 'wandb'?",
    )


def test_a_window_shorter_than_min_steps_contradicts_itself() -> None:
    _refused(
        {"alerts": {"clip_fraction": {"window": 5}}},
        "mismatch_hooks.alerts.clip_fraction: window is 5 and min_steps 10; window must be at least min_steps.",
    )
    _refused(
        {"alerts": {"clip_fraction": {"min_steps": 2}}},
        "mismatch_hooks.alerts.clip_fraction.min_steps: got 2 (int); accepts an integer of 3 or more.",
    )


@pytest.mark.parametrize(("given", "kind"), [(5, "int"), (None, "NoneType"), ([], "list"), (True, "bool")])
def test_a_section_that_is_no_mapping_is_refused(given: Any, kind: str) -> None:
    _refused(given, f"mismatch_hooks: got {given!r} ({kind}); accepts a mapping such as {{enabled: true}}.")


def _refused(raw: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(raw)
    assert str(refused.value) == sentence

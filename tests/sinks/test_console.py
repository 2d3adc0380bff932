import io
import sys
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from mismatch_hooks.sinks.console import ConsoleSink, figure, render_step, spans
from mismatch_hooks.sinks.event import Event
from tests.sinks.samples import alert, verdict


def shown(capsys: pytest.CaptureFixture[str], *events: Event) -> str:
    sink = ConsoleSink()
    for event in events:
        sink.emit(event)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(len(line) <= 100 for line in captured.err.splitlines())
    return captured.err


def test_a_step_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    events = [Event(type=kind, step=0, payload={"metrics": {"clip_fraction": 0.1}}) for kind in ("step", "overhead")]
    assert shown(capsys, *events) == ""


def test_a_run_that_cannot_be_aligned_says_so_at_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"off": "", "left_out": [], "fallback": "some operators have no reference here (x.norm: needs CUDA)"}
    text = shown(capsys, Event(type="run", payload={"state": "started", "plan": plan}))
    assert text == "Ablating from native: some operators have no reference here (x.norm: needs CUDA).\n"
    assert shown(capsys, Event(type="run", payload={"state": "started", "plan": {**plan, "fallback": ""}})) == ""


def test_a_verdict_of_the_path_that_decodes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, Event(type="verdict", step=20, payload=verdict(path="rollout_decode")))
    assert "attention.rope_fusion · from native, rollout decodes · step 20" in text


def test_a_verdict_shows_diagnosis_arms_gates_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, Event(type="verdict", step=20, payload=verdict()))
    for part in (
        "attention.rope_fusion · from native · step 20",
        "insufficient evidence",
        "612 tokens resolve 0.0031 and nothing moved [by more].",
        "both_native         0.0437         0.0115",
        "-0.0009 [-0.0031, +0.0012]",
        "gate switch_effective   ok  holds",
        "do                      Raise sample_sequences to 256.",
    ):
        assert part in text


def test_a_blocked_verdict_shows_no_arms_and_the_gates_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, Event(type="verdict", step=20, payload=verdict(blocked="evidence_complete")))
    assert "gate evidence_complete  BLOCKED  0 of 28 calls ran" in text
    assert "both_native" not in text


def test_contracts_that_differ_are_shown_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    issues = [
        {"path": "extra.epsilon", "rule": "must match semantically", "values": {"rollout": 1e-6, "training": 1e-5}},
        {"path": "collectives[1].op", "rule": "must match semantically", "values": {"rollout": None, "training": "x"}},
    ]
    text = " ".join(shown(capsys, Event(type="verdict", step=20, payload=verdict(issues=issues))).split())
    assert "contracts extra.epsilon must match semantically: rollout 1e-06, training 1e-05;" in text
    assert "rollout has none, training x" in text.replace("│ │ ", "")


def test_differences_between_the_sides_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    path = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"
    differences = [
        {"key": "model.rope.theta", "training": 10000.0, "rollout": 10500.0},
        {"key": "operator.attention.implementation", "training": "unobservable: no module", "rollout": path},
    ]
    event = Event(type="readback", payload={"settings": {}, "differences": differences})
    text = shown(capsys, event, event)
    assert text.count("model.rope.theta") == 1
    assert "10000" in text
    assert "10500" in text
    assert "CPUAttentionBackendImpl" in text


def test_settings_to_pin_are_listed_with_the_readback(capsys: pytest.CaptureFixture[str]) -> None:
    why = "enable_chunked_prefill on rollout is True; it has to be False."
    event = Event(
        type="readback", payload={"settings": {}, "unpinned": [{"key": "enable_chunked_prefill", "why": why}]}
    )
    text = shown(capsys, event, event)
    assert text.count(f"1 setting to pin, or bits may move by themselves:\n  {why}\n") == 1


def test_an_alert_says_what_happened_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, Event(type="alert", step=9, payload=alert()))
    assert "ALERT opened  step 9  clip_fraction rose from 0.011 to 0.21" in text
    assert "Compare the rope settings of both sides." in text


def test_the_closing_summary_has_metrics_verdicts_errors_missing_steps_and_paths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left_out = [{"factor": "attention.backend", "outcome": "not_switchable_in_process", "reason": "engine rebuild"}]
    ending: dict[str, Any] = {
        "state": "finished",
        "errors": {"sink wandb": 3},
        "missing": {"wandb": [3, 4, 5, 9]},
        "paths": {"jsonl": "/runs/demo/events.jsonl"},
    }
    text = shown(
        capsys,
        Event(type="run", payload={"state": "started", "plan": {"off": "", "left_out": left_out}}),
        Event(type="step", step=0, payload={"metrics": {"clip_fraction": 0.25, "dlogp_mean": 0.1}}),
        Event(type="step", step=1, payload={"metrics": {"clip_fraction": 0.125, "dlogp_mean": float("nan")}}),
        Event(type="verdict", step=1, payload=verdict(blocked="pitfalls_clear")),
        Event(
            type="overhead",
            step=1,
            payload={"metrics": {"run_overhead_fraction": 0.0123, "run_ablation_fraction": 0.104}},
        ),
        Event(type="run", payload=ending),
    )
    summary = text[text.index("─ mismatch_hooks ─") :]
    for part in (
        "steps  2 (finished)",
        "clip_fraction     0.1250      0.2500",
        "dlogp_mean           nan      0.1000",
        "insufficient evidence  (from native, step 1)",
        "gates ok               switch_effective, evidence_complete, shards_complete",
        "gate BLOCKED           pitfalls_clear: 0 of 28 calls ran",
        "attention.backend: `mismatch-hooks plan` says what",
        "1.23% of the run's time, ablation 10.4%",
        "sink wandb: 3 errors, kept from the run",
        "steps 3–5, 9 in wandb",
        "/runs/demo/events.jsonl",
    ):
        assert part in summary


def test_what_is_printed_appears_above_a_live_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(file=terminal, force_terminal=True, width=100, record=True)
    with Progress(console=console) as progress:
        progress.add_task("GRPO", total=2)
        ConsoleSink().emit(Event(type="alert", step=9, payload=alert()))
    assert "clip_fraction rose" in console.export_text()  # through the bar's own console, which moves the bar


def test_a_step_line_has_the_loops_figures_where_it_passed_them() -> None:
    event = Event(type="step", step=7, payload={"metrics": {"clip_fraction": 0.0114}, "host": {"reward": 0.5}})
    line = str(render_step(event, overhead={"overhead_fraction": 0.0123}))
    assert line == "step     7  reward 0.5000  clip_fraction 0.0114  |dlogp| –  hooks 1.2%"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (0.0, "0"),
        (12, "12"),
        (0.04371, "0.0437"),
        (1e-9, "1.00e-09"),
        (float("inf"), "inf"),
    ],
)
def test_figures_are_short(value: object, text: str) -> None:
    assert figure(value) == text


def test_steps_in_a_row_are_drawn_together() -> None:
    assert spans([12, 3, 4, 5, 10]) == "3–5, 10, 12"


def test_a_verdict_says_how_far_the_operators_implementations_are_apart_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    near = {"elements": 8, "differing": 3, "max_abs": 0.0156, "max_ulp": 62, "dtype": "bfloat16"}
    one = {
        "captured_on": "rollout",
        "calls": 4,
        "departs": {"rollout": near},
        "natives": None,
        "references": {**near, "differing": 0},
        "place": "model.layers.0.mlp",
        "reproduced": 4,
        "reason": "",
    }
    refused = {"captured_on": "training", "calls": 0, "reason": "training: a rank holds a part of the model"}
    text = shown(capsys, Event(type="verdict", step=20, payload={**verdict(), "replays": [one, refused]}))
    said = " ".join(text.replace("│", " ").split())
    assert "4 calls on rollout: rollout native from its reference by up to 0.0156 (62 ULP); references same" in said
    assert "farthest at model.layers.0.mlp" in said
    assert "replay training: a rank holds a part of the model" in said


HELD = {"operators": {"rollout": {"norm.rmsnorm": "fp32"}}, "steps": 0, "equal_steps": 0}


def test_an_aligned_run_says_what_it_holds_and_how_many_steps_were_equal(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, Event(type="alignment", payload=HELD))
    assert text == "kept on their references while sampling and training:\n  rollout: norm.rmsnorm (fp32)\n"
    closing = {"state": "finished", "alignment": {**HELD, "steps": 20, "equal_steps": 19}}
    summary = shown(capsys, Event(type="alignment", payload=HELD), Event(type="run", payload=closing))
    assert "19 of 20 steps equal to the bit on every token" in summary
    assert "on rollout" in summary and "norm.rmsnorm (fp32)" in summary


def test_a_step_that_is_not_equal_names_tokens_and_where_the_sides_part(capsys: pytest.CaptureFixture[str]) -> None:
    first = [{"sequence": 2, "position": 24, "rollout": -5.5373087, "training": -5.5416942}]
    found = {**HELD, "tokens": 337, "unequal": 3, "first": first, "where": "sequence 2 by prefill: No difference."}
    text = shown(capsys, Event(type="alignment", step=27, payload=found))
    assert text == (
        "NOT ALIGNED  step 27  3 of 337 tokens are not equal to the bit\n"
        "  sequence 2, token 24: rollout -5.537309, training -5.541694\n"
        "  sequence 2 by prefill: No difference.\n"
    )

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from mismatch_hooks.cli import main
from mismatch_hooks.sinks.event import Event
from mismatch_hooks.sinks.jsonl import JsonlSink
from tests.sinks.samples import alert, verdict

LOOP = """
    import json, os, pathlib, sys, time

    def main(raw, *, out):
        print("an engine's chatter")
        os.write(1, b"chatter from native code\\n")
        out.mkdir(parents=True)
        (out / "result.json").write_text(json.dumps({"raw": raw, "loss": float("nan")}))
        if raw.get("sleep"):
            (out / "ready").touch()
            try:
                time.sleep(raw["sleep"])
            finally:
                (out / "closed").touch()
"""


def make_recipe(
    folder: Path, loop: str = LOOP, yaml: str = "loop: loop.py\nsteps: 24\noptimizer: {lr: 1e-5}\n"
) -> Path:
    (folder / "loop.py").write_text(textwrap.dedent(loop))
    (folder / "recipe.yaml").write_text(yaml)
    return folder / "recipe.yaml"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "loop", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return make_recipe(tmp_path)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mismatch_hooks", *map(str, arguments)]


def write_run(folder: Path, *, ended: bool = True) -> None:
    sink = JsonlSink(folder / "events.jsonl")
    sink.emit(Event(type="run", payload={"state": "started"}))
    for number in range(3):
        metrics = {"clip_fraction": number / 8, "dlogp_mean": 0.0437, "ratio_max": float("inf")}
        sink.emit(Event(type="step", step=number, payload={"metrics": metrics, "host": {"reward": 0.5}}))
        sink.emit(Event(type="overhead", step=number, payload={"metrics": {"overhead_fraction": 0.0123}}))
    sink.emit(Event(type="verdict", step=2, payload=verdict()))
    sink.emit(Event(type="alert", step=2, payload=alert()))
    if ended:
        sink.emit(Event(type="run", payload={"state": "finished", "paths": {"jsonl": "events.jsonl"}}))
    sink.close()


def test_run_prints_one_document_on_standard_output_and_everything_else_on_standard_error(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["run", str(recipe), "--steps", "3", "--set", "optimizer.lr=2e-6", "--set", "task.kind=even"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    printed = capfd.readouterr()
    document = json.loads(printed.out)
    assert document["out"] == str(out)
    assert document["result"]["raw"] == {
        "loop": "loop.py",
        "steps": 3,
        "optimizer": {"lr": 2e-6},
        "task": {"kind": "even"},
    }
    assert document["result"]["loss"] == "NaN"
    assert document["summary"] is None  # the hooks were off
    assert "an engine's chatter" in printed.err
    assert "chatter from native code" in printed.err


def test_run_without_json_says_where_the_results_are(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(recipe)]) == 0
    printed = capfd.readouterr()
    [out] = (tmp_path / "runs").iterdir()
    assert out.name.startswith("recipe-")
    assert printed.out == ""
    assert f"results in runs/{out.name}" in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["run", "{dir}/recip.yaml"], "Did you mean {dir}/recipe.yaml?", id="misspelled recipe"),
        pytest.param(
            ["run", "{recipe}", "--set", "steps"], "--set: got 'steps'; accepts KEY=VALUE", id="no equals sign"
        ),
        pytest.param(["run", "{recipe}", "--set", "steps.x=1"], "steps holds a value, not keys", id="through a value"),
        pytest.param(["run", "{recipe}", "--set", "a=[1"], "--set a=[1: the value is not YAML", id="broken value"),
        pytest.param(["run", "{recipe}", "--set", "loop=lop.py"], "loop: there is no {dir}/lop.py", id="no such loop"),
        pytest.param(["run", "{recipe}", "--set", "loop="], "loop: got None; accepts the name", id="no loop"),
        pytest.param(["run", "{recipe}", "--steps", "0"], "Invalid value for '--steps'", id="zero steps"),
        pytest.param(["tail", "{dir}/nowhere"], "nowhere: no run there (no events.jsonl)", id="no such run"),
        pytest.param(["tail", "{dir}", "--no-follow"], "no run there (no events.jsonl)", id="a folder that is no run"),
        pytest.param(["rnu"], "No such command 'rnu'. Did you mean 'run'?", id="misspelled command"),
    ],
)
def test_a_wrong_call_gets_one_sentence_and_exit_code_2(
    recipe: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    names = {"recipe": str(recipe), "dir": str(recipe.parent)}
    assert main([argument.format(**names) for argument in arguments]) == 2
    printed = capfd.readouterr()
    assert said.format(**names) in printed.err
    assert printed.err.strip().count("\n") == 0
    assert printed.out == ""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        pytest.param(
            "type('RecipeError', (Exception,), {'exit_code': 2})('steps: got 0; accepts 1.')", 2, id="by code"
        ),
        pytest.param("__import__('mismatch_hooks').ConfigError('steps: got 0; accepts 1.')", 2, id="of this library"),
    ],
)
def test_what_a_recipe_refuses_at_start_is_one_sentence(
    tmp_path: Path, recipe: Path, capfd: pytest.CaptureFixture[str], raised: str, code: int
) -> None:
    make_recipe(tmp_path, f"def main(raw, *, out):\n    raise {raised}\n")
    assert main(["run", str(recipe)]) == code
    assert capfd.readouterr().err == "steps: got 0; accepts 1.\n"


def test_a_fault_inside_a_recipe_keeps_its_traceback(tmp_path: Path, recipe: Path) -> None:
    make_recipe(tmp_path, "def main(raw, *, out):\n    raise ValueError('a bug')\n")
    done = subprocess.run(command("run", recipe), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: a bug" in done.stderr


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_an_interrupted_run_cleans_up_and_exits_with_the_signals_code(
    recipe: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    started = subprocess.Popen(
        command("run", recipe, "--set", "sleep=60", "--out", out), stderr=subprocess.PIPE, text=True
    )
    while not (out / "ready").exists():
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(sent)
    _, printed = started.communicate(timeout=20)
    assert started.returncode == code
    assert (out / "closed").exists()
    assert "Traceback" not in printed


def test_a_loop_in_a_package_is_imported_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_recipes" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "beside.py").write_text("ANSWER = 42\n")
    loop = "from package_of_recipes.inner.beside import ANSWER\n\ndef main(raw, *, out):\n    print(__name__, ANSWER)\n"
    recipe = make_recipe(package, loop)
    monkeypatch.chdir("/")
    done = subprocess.run(command("run", recipe), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert "package_of_recipes.inner.loop 42" in done.stderr


def test_tail_replays_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["tail", str(tmp_path)]) == 0
    text = capsys.readouterr().err
    for part in (
        "step     1  reward 0.5000  clip_fraction 0.1250  |dlogp| 0.0437  hooks 1.2%",
        "attention.rope_fusion · from native · step 2",
        "ALERT opened  step 2",
        "steps  3 (finished)",
    ):
        assert part in text


def test_tail_json_is_one_document_with_non_finite_numbers_spelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, ended=False)
    assert main(["tail", str(tmp_path), "--no-follow", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "started"
    assert document["steps"] == 3
    assert document["metrics"]["last"]["ratio_max"] == "Infinity"
    assert document["metrics"]["peak"]["clip_fraction"] == 0.25
    assert document["verdicts"][0]["diagnosis"] == "insufficient_evidence"
    assert document["alerts"][0]["title"] == "clip_fraction rose from 0.011 to 0.21"


def test_tail_follows_a_live_run_until_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = threading.Timer(0.3, write_run, args=(tmp_path,))
    writer.start()
    assert main(["tail", str(tmp_path)]) == 0
    writer.join()
    assert "steps  3 (finished)" in capsys.readouterr().err


def test_a_torn_last_line_is_no_reason_for_tail_to_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, ended=False)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"v":1,"type":"st')
    assert main(["tail", str(tmp_path), "--no-follow"]) == 0
    assert "steps  3 (started)" in capsys.readouterr().err


def test_garbage_in_an_event_file_is_one_sentence_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").write_text("garbage\n{}\n")
    assert main(["tail", str(tmp_path), "--no-follow"]) == 2
    assert "events.jsonl line 1 is not JSON" in capsys.readouterr().err


def test_importing_the_command_line_imports_neither_torch_nor_rich_nor_wandb() -> None:
    heavy = ["torch", "rich", "wandb", "pydantic", "numpy", "vllm", "megatron"]
    program = f"import sys, mismatch_hooks.cli; print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "[]\n"


# ---- list, plan, doctor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(["list"], "attention.rope_fusion", id="list"),
        pytest.param(["plan", "--operator", "attention"], "both_reference", id="plan"),
        pytest.param(["doctor"], "megatron-core", id="doctor"),
    ],
)
def test_what_is_shown_as_a_table_is_one_document_with_json(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments)
    assert shown in capsys.readouterr().out
    main([*arguments, "--json"])
    assert shown in json.dumps(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["list", "--operator", "nope"], "--operator: got 'nope'; registered: ", id="operator"),
        pytest.param(["plan", "--factor", "a.b"], "no factor matches 'a.b'; registered: ", id="factor"),
        pytest.param(
            ["plan", "--origin", "alligned"],
            "--origin: got 'alligned'; accepts native, aligned, both. Did you mean 'aligned'?",
            id="origin",
        ),
        pytest.param(["plan", "--model", "/nowhere"], "/nowhere", id="model"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_list_and_plan_load_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys; from mismatch_hooks.cli import main; main(['plan', '--json']); main(['list', '--json']);"
        "sys.exit(any(name.split('.')[0] in ('torch', 'vllm', 'megatron', 'wandb') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

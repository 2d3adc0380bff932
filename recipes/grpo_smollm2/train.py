"""GRPO on SmolLM2-135M-Instruct, with megatron-core as the trainer and vLLM as the sampler, in one process.

What it shows: a complete on-policy loop (sample, reward, advantages, clipped loss, AdamW on fp32 masters, weight sync
after the optimizer steps), and the lines where the mismatch hooks come in. They are marked; delete them and the loop
still trains. With ``mismatch_hooks.enabled: false`` nothing of the library is imported.

What it leaves out: more than one rank, micro-batches, packing, checkpoints, asynchronous rollouts.

    python -m recipes.grpo_smollm2.train recipes/grpo_smollm2/smollm2.yaml --out runs/demo --set steps=10
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch

from recipes.grpo_smollm2.config import Config, load, parse
from recipes.grpo_smollm2.errors import RecipeError
from recipes.grpo_smollm2.grpo import group_advantages, kl_to_initial, make_batch, policy_loss
from recipes.grpo_smollm2.prepare import prepare_model
from recipes.grpo_smollm2.progress import display
from recipes.grpo_smollm2.reward import make_task
from recipes.grpo_smollm2.session import Record, Summary, quiet_engines, seed_everything, stop_on_sigterm
from recipes.grpo_smollm2.timing import Phases
from recipes.grpo_smollm2.tracking import tracking


def main(raw: Mapping[str, object], *, out: Path) -> Summary:
    """Run the configuration and leave ``result.json``, and what the sinks write, in ``out``.

    Raises:
        RecipeError: a key is wrong or something that the run needs is absent; nothing has started then.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the hooks, W&B and the engines have been closed.
    """
    started = time.monotonic()
    config = parse(raw)
    require_engines()
    check_hooks(config)
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(stop_on_sigterm())
        show = stack.enter_context(display(config.steps))
        record = Record(path=out / "result.json")

        # ---- the model, the two engines, the task ----------------------------------------------------------------
        folder = prepare_model(config.model, say=show.say)
        show.say("starting megatron-core and vLLM")
        quiet_engines()
        # Here and not at the top: the engines take seconds to import, and a misspelled key should not wait for them.
        from recipes.grpo_smollm2.rollout import Rollout
        from recipes.grpo_smollm2.trainer import Trainer

        trainer = Trainer(folder, config)
        stack.callback(trainer.close)
        rollout = Rollout(
            folder,
            config,
            worker_extension=worker_extension(config),
            logits_processors=logits_processors(config),
        )
        stack.callback(rollout.close)
        task = make_task(config, folder, vocabulary=trainer.shape.vocabulary)
        log = stack.enter_context(tracking(config, out=out))
        # After the engines: starting vLLM seeds the global generators with a seed of its own choice.
        prompt_rng = seed_everything(config.seed)

        # ==== mismatch_hooks: created once, when enabled ==========================================================
        hooks = None
        if config.hooks_enabled:
            from mismatch_hooks import MismatchHooks, shape_from_folder
            from mismatch_hooks.integrations.megatron import MegatronBackend
            from mismatch_hooks.integrations.vllm import VllmBackend

            shape = shape_from_folder(folder)
            sampler = VllmBackend(rollout.llm, weight_version=lambda: rollout.weight_version)
            scorer = MegatronBackend(
                trainer.model,
                shape=shape,
                micro_batch=config.task.prompts * config.task.samples,  # as the loop's own forward: the same padding
                weight_version=lambda: trainer.weight_version,
            )
            hooks = stack.enter_context(
                MismatchHooks(
                    config.mismatch_hooks,
                    rollout=sampler,
                    training=scorer,
                    shape=shape,
                    run_dir=out,
                    clip_range=(config.grpo.epsilon_low, config.grpo.epsilon_high),
                )
            )
        # ==========================================================================================================

        for step in range(config.steps):
            if record.would_end_late(time.monotonic() - started, limit_s=config.time_limit_s):
                show.say(f"time_limit_s {config.time_limit_s:g} is used up after {step} of {config.steps} steps")
                break
            phases = Phases()
            if config.inject is not None and step == config.inject.step:
                rollout.llm.collective_rpc("inject_rope_theta", args=(config.inject.factor,))

            # ---- sample: every prompt `samples` times --------------------------------------------------------------
            problems = [task.draw(prompt_rng) for _ in range(config.task.prompts)]
            problems = [problem for problem in problems for _ in range(config.task.samples)]
            prompts = [problem.prompt_ids for problem in problems]
            params = rollout.sampling_params(step=step, stop_token_ids=task.stop_token_ids)
            outputs = rollout.sample(prompts, params)
            responses = [list(output.outputs[0].token_ids) for output in outputs]
            phases.mark("sample")

            # ==== mismatch_hooks: what was sampled ==================================================================
            if hooks:
                hooks.capture_rollout(step, sampler.sequences(outputs, params))
                phases.mark("hooks")
            # ========================================================================================================

            # ---- reward, advantages ----------------------------------------------------------------------------------
            rewards = torch.tensor([task.reward(*pair) for pair in zip(problems, responses, strict=True)])
            advantages = group_advantages(rewards.view(config.task.prompts, config.task.samples))
            batch = make_batch(prompts, responses, advantages)

            # ---- log-probs before the update -------------------------------------------------------------------------
            # The ratio of the loss is against the trainer's own log-probs, not the rollout's: how those two differ is
            # the question that the hooks answer. With one minibatch they come from the forward that the gradient flows
            # through, so the ratio is 1 and the clip never bites; with several they take a pass of their own.
            one_minibatch = config.grpo.minibatches == 1
            with torch.set_grad_enabled(one_minibatch):
                training_logprobs = trainer.token_logprobs(batch)
            logprobs_before_update = training_logprobs.detach()
            phases.mark("forward")

            # ==== mismatch_hooks: the same tokens, as the trainer sees them, before any weight moves ================
            if hooks:
                hooks.capture_training(step, logprobs_before_update, batch.response_mask, advantages=batch.advantages)
                phases.mark("hooks")
            # ========================================================================================================

            # ---- update: one optimizer step a minibatch --------------------------------------------------------------
            losses, grad_norms = [], []
            before = logprobs_before_update.chunk(config.grpo.minibatches)
            for minibatch, before_update in zip(batch.minibatches(config.grpo.minibatches), before, strict=True):
                if not one_minibatch:
                    training_logprobs = trainer.token_logprobs(minibatch)
                loss = policy_loss(
                    training_logprobs,
                    before_update,
                    minibatch,
                    epsilon_low=config.grpo.epsilon_low,
                    epsilon_high=config.grpo.epsilon_high,
                )
                if config.grpo.kl_coefficient:
                    initial = trainer.initial_logprobs(minibatch)
                    distance = kl_to_initial(training_logprobs, initial, minibatch.response_mask)
                    loss = loss + config.grpo.kl_coefficient * distance
                phases.mark("forward")
                loss.backward()
                phases.mark("backward")
                losses.append(loss.item())
                grad_norms.append(trainer.update())
                phases.mark("optimizer")

            # ---- the new weights go to the rollout engine ------------------------------------------------------------
            rollout.sync(trainer.export(), weight_version=trainer.weight_version)
            phases.mark("sync")

            figures = {
                "reward": rewards.mean().item(),
                "loss": sum(losses) / len(losses),
                "grad_norm": sum(grad_norms) / len(grad_norms),
                "response_length": batch.response_mask.sum(dim=1).float().mean().item(),
                "seconds": phases.total(),
            }
            log(step, figures)

            # ==== mismatch_hooks: the step is over ==================================================================
            if hooks:
                hooks.end_step(step, host_metrics=figures)
                phases.mark("hooks")
            # ========================================================================================================

            record.add(figures | {"phases": phases.seconds}, responses=responses)
            show.step(step, figures, hooks=hooks.last_step if hooks else None)

        return record.finish(weights=dict(trainer.export()), optimizer=trainer.optimizer_tensors(), prompts=prompt_rng)


def require_engines() -> None:
    """Refuse before anything has started where an engine is absent."""
    for package, extra in {"megatron.core": "megatron", "vllm": "vllm"}.items():
        try:
            found = find_spec(package)
        except ModuleNotFoundError:  # the parent package is absent
            found = None
        if found is None:
            raise RecipeError(
                f"{package} is not installed, and this recipe needs both engines; run make setup, or install "
                f"mismatch-hooks[{extra}]."
            )


def check_hooks(config: Config) -> None:
    """Refuse a wrong key of the hooks now, and not once the engines have started."""
    if config.hooks_enabled:
        from mismatch_hooks import ConfigError, check_config

        try:
            check_config(config.mismatch_hooks)
        except ConfigError as refused:
            raise RecipeError(str(refused)) from None


def worker_extension(config: Config) -> str | None:
    """The class that vLLM's workers are extended with, by name: nothing of it is imported here."""
    if not config.hooks_enabled:
        return None
    if config.inject is not None:
        return "recipes.grpo_smollm2.inject.InjectingWorker"
    return "mismatch_hooks.integrations.vllm.worker.WorkerExtension"


def logits_processors(config: Config) -> list[str]:
    """What vLLM's sampler gains, by name: the hooks can then have it decode the tokens of a response once more."""
    return ["mismatch_hooks.integrations.vllm.forced_decode:ForcedTokens"] if config.hooks_enabled else []


def command(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="recipes.grpo_smollm2.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path, help="the recipe's YAML file")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_smollm2"), help="where results go")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    given = parser.parse_args(arguments)
    try:
        summary = main(load(given.config, given.set), out=given.out)
    except RecipeError as refused:
        print(refused, file=sys.stderr)
        return refused.exit_code
    except KeyboardInterrupt as stopped:
        print(f"stopped; what was done until then is in {given.out}", file=sys.stderr)
        return getattr(stopped, "exit_code", 130)
    print(f"mean reward {summary.reward_first:.3f} (first five steps) -> {summary.reward_last:.3f} (last five)")
    print(f"results in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(command())

"""In-context models: an OpenAI-compatible chat endpoint plays the episodes; nothing is trained.

    export OPENAI_API_KEY=...
    bash run.sh webshop --model https://api.openai.com/v1 --model-name gpt-4 --examples 1
"""

from lab import play_env as envs
from lab.harness.settings import SettingsError
from lab.playing import conversation
from lab.playing.conversation import ContextFull
from lab.playing.endpoint import Endpoint
from lab.playing.episodes import play_at_endpoint
from lab.program.run import Run
from lab.program.tasks import marks
from lab.tokens import Trajectory


def play(run: Run, trajectories: list[Trajectory]) -> tuple[list[Trajectory], dict]:
    """Plays the episodes; those that were not lost, and what all requests took."""
    s = run.settings
    ours = s.options.protocol == "ours"  # ETO's has its examples in the opening
    shown = examples(run) if ours and s.examples else []

    def play_one(env, t, ask):
        read = 0

        def answer(messages):
            nonlocal read
            if read >= s.max_tokens:
                raise ContextFull
            first, *rest = messages
            reply, used = ask([*shown, without_prompt(first, env) if shown else first, *rest])
            read = used["prompt_tokens"] + used["completion_tokens"]
            return reply

        conversation.play(env, t, answer, envs.STOPS[s.options.protocol])

    played, spent = play_at_endpoint(run, Endpoint(s), trajectories, play_one)
    return played, cost(spent, s)


def without_prompt(message: dict, env) -> dict:
    return {**message, "content": message["content"].removeprefix(env.prompt).strip()}


def examples(run: Run) -> list[dict]:
    """The conversations of `examples` successful experts of tasks that are not evaluated, drawn by
    the seed. The environment's rules open the first of them only."""
    s, env, found = run.settings, run.tasks.make_env(), []
    rng = run.rng("examples")
    evaluated = {mark for split in run.tasks.splits for task in run.tasks.of_split(split)
                 for mark in marks(env, task)}
    if s.experts:
        experts = envs.read_experts(s.experts, env)
        experts = rng.sample(experts, len(experts))
    else:
        tasks = env.tasks("train")
        experts = ((task, *envs.converse(env, env.reset(task), env.expert()))
                   for task in rng.sample(tasks, len(tasks)))
    for task, messages, reward in experts:
        if reward >= envs.SUCCESS and not marks(env, task) & evaluated:
            if s.experts:
                run.tasks.check_openings([(task, messages, reward)])
            found.append(messages)
        if len(found) == s.examples:
            break
    env.close()
    if len(found) < s.examples:
        raise SettingsError(f"--examples {s.examples}: only {len(found)} experts succeed on tasks "
                            "that are not evaluated; give fewer")
    return [without_prompt(m, env) if n and m is messages[0] else m
            for n, messages in enumerate(found) for m in messages]


def cost(spent: dict, s) -> dict:
    """What the requests took, with dollars where prices are given and all tokens known."""
    if (s.price_in or s.price_out) and not spent["unreported"]:
        dollars = spent["prompt_tokens"] * s.price_in + spent["completion_tokens"] * s.price_out
        return dict(**spent, dollars=round(dollars / 1e6, 6))
    return spent

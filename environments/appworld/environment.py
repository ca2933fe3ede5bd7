"""The environment AppWorld: an agent writes Python code that calls the APIs of a person's apps."""

from pathlib import Path

from environments import saying
from environments.appworld import data
from environments.appworld.judging import Judge
from environments.appworld.processes import CodeResult, ProcessEnded
from environments.appworld.python_code import block, code_of
from environments.appworld.tasks import TaskGenerator
from envs import Environment, Step

PROMPT = """\
You do what a person asks for, by Python code that calls the interfaces of the person's apps. \
Reply with one block of code, between ```python and ```; you then read what it printed. Names that \
it defines stay for your later blocks. Nobody answers questions: look up what you need.

The interfaces are documented by interfaces, so print what these return:
- apis.api_docs.show_app_descriptions(): the apps that there are
- apis.api_docs.show_api_descriptions(app_name=...): the interfaces of an app
- apis.api_docs.show_api_doc(app_name=..., api_name=...): the arguments and results of one
An interface is called as apis.APP.API(argument=value, ...). The person's name and passwords are \
in apis.supervisor. Most apps want an access_token, which their login returns; the username is the \
email address, for the phone its number. Long lists come in pages, by page_index from 0.

When all is done, call apis.supervisor.complete_task(); where something was asked, with \
answer=..., the bare number or words. You have 30 replies."""
FORM = "There is no block of code, ```python ... ```, in this reply."


class AppWorld(Environment):
    """The tasks of the official AppWorld, or of a small AppWorld in the same format.

    At the end of an episode, the reward is 1 if all tests of the task pass, and otherwise 0. If the
    agent's code kills its process or exceeds the time limit, the episode ends with reward 0.

    Args:
        view: "full" or "short". Both views show the same text.
        appworld_root: Path of the folder that contains the official `data`, or None for the small
            AppWorld.
        appworld_reward: "all", or "tests" for the fraction of tests that pass.
    """
    name = "appworld"
    rules = PROMPT
    max_turns = data.MAX_REPLIES

    def __init__(self, view: str = "full", appworld_root: str | None = None,
                 appworld_reward: str = "all"):
        super().__init__(view)
        # Unlike in other environments, the short view keeps the prompt. The tiny model, which would
        # not need the prompt, never plays AppWorld.
        self.prompt = PROMPT
        python = data.interpreter()
        if appworld_root:
            root = data.checked_path(Path(appworld_root).resolve())
        else:
            root = data.small_appworld()
        self.splits = data.splits(root, official=bool(appworld_root))
        self.test_splits = tuple(self.splits)[2:]
        self.share_of_tests = appworld_reward == "tests"
        self.judge = Judge(python, root)
        self._episode = None

    def task_generator(self):
        return TaskGenerator(self)

    def start(self, task: dict) -> str:
        self.close()
        self._task = task
        self._replies = 0
        self._episode = self.judge.start_episode(task)
        owner = self._episode.owner
        return (f"I am {owner['first_name']} {owner['last_name']}; my email address is "
                f"{owner['email']} and my phone number {owner['phone_number']}.\n\n"
                f"{self._episode.text}")

    def step(self, reply: str) -> Step:
        self._replies += 1
        last = self._replies == self.max_turns
        code = code_of(reply)
        result = CodeResult(FORM, done=False, calls=[])
        try:
            if code is not None:
                result = self._episode.run(code)
            if not result.done and not last:
                return Step(result.output, 0.0, False, idle=code is None)
            changes = self._episode.changes()
        except ProcessEnded as error:
            self._episode = None
            return Step(f"The episode is over: {error}.", 0.0, True)
        self.close()
        reward = self.judge.share(self._task, changes)
        if not self.share_of_tests:
            reward = float(reward == 1)
        return Step(result.output, reward, True)

    def possible(self) -> tuple[list[str], str]:
        return [], "Python, such as print(apis.supervisor.show_profile())"

    def reply(self, action: str) -> str:
        return action if "```" in action else block(action)

    def expert(self):
        return saying(map(block, self.solution(self._task)))

    def close(self) -> None:
        if self._episode:
            self._episode.end()
        self._episode = None

    def solution(self, task: dict) -> list[str]:
        """Returns the code of a task's solution, one item for each reply."""
        return task["code"] if "code" in task else data.solution(self.judge.root, task["start"])

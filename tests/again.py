"""An environment as the core plays it: an episode that breaks is played again from its start."""

import time

from worlds import EnvError


class Again:
    """`env`, whose episodes are begun and played to where they were, at most so many times."""

    def __init__(self, env, times: int = 2, wait: float = 0.0):
        self.env, self.times, self.wait = env, times, wait

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, task):
        self.task, self.replies = task, []
        return self.play()

    def step(self, reply):
        self.replies.append(reply)
        return self.play(last=True)

    def play(self, last=False):
        """The last step of the episode, alone or after all before; EnvError where it stays."""
        for left in range(self.times, -1, -1):
            try:
                found = None if last else self.env.reset(self.task)
                for reply in self.replies[-1:] if last else self.replies:
                    found = self.env.step(reply)
                return found
            except EnvError:
                self.env.close()
                if not left:
                    raise
                time.sleep(self.wait)
                last = False

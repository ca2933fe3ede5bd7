"""The page of a run: what it is made of, and what a browser does with it."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from look.page import BROWSERS, QUIET

CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """Headless Chromium, spoken to over two pipes in its own protocol (--remote-debugging-pipe)."""

    def __init__(self):
        self.home = tempfile.TemporaryDirectory()
        theirs_in, self.to = os.pipe()
        self.source, theirs_out = os.pipe()
        for end, number in ((theirs_in, 103), (theirs_out, 104)):
            os.dup2(end, number, inheritable=True)
            os.close(end)
        self.process = subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3<&103 4>&104 103<&- 104>&-', "bash", CHROMIUM, *QUIET,
             "--no-sandbox", f"--user-data-dir={self.home.name}", "--remote-debugging-pipe",
             "about:blank"], pass_fds=(103, 104), stderr=subprocess.DEVNULL)
        for number in (103, 104):
            os.close(number)
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params) -> dict:
        """What the browser answers to a command; what it tells meanwhile is in `events`."""
        self.number += 1
        message = dict(id=self.number, method=method, params=params)
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def read(self) -> dict:
        while b"\0" not in self.rest:
            part = os.read(self.source, 1 << 16)
            assert part, "the browser has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=height,
             deviceScaleFactor=1, mobile=width < 600)
        self("Emulation.setEmulatedMedia", features=[
            dict(name="prefers-color-scheme", value=scheme)])
        self("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.read()

    def js(self, expression: str):
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True,
                     awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, *keys: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38}
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            common = dict(key=key, windowsVirtualKeyCode=codes.get(key, ord(key.upper()[0])))
            self("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self("Input.dispatchKeyEvent", type="keyUp", **common)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.to)
        os.close(self.source)
        self.home.cleanup()

"""The page of a run: what it is made of, and what a browser does with it."""

import json
import os
import re
import select
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report import METRICS, SETTINGS, trajectory, write_lines

from harness.files import ROOT, RunError, read_jsonl
from look.conversations import FIELDS, conversations
from look.page import BROWSERS, QUIET, main, make_page, page, write_page

CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium; apt-get install chromium")

# Everything that could leave its place: markup, the end of the script that holds the data, quotes,
# characters that show nothing or turn the direction of reading, half of a surrogate pair.
HOSTILE = ("<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
           "</script></title><!-- ' \" ` & &amp; {{ 7*7 }} {% raw %} \u2028 \u2029 \x00 \x1b[31m "
           "\x07 \u202e gnirts \ufeff \ud800 \U0001f600 javascript:alert(1) " + "x" * 300)
TASKS = [f"webshop-train-{i}" for i in range(4)]


def pair(task, kind, chosen, rejected, trains="target", weight=0.5):
    sides = [dict(file="", agent=agent, iteration=int(agent != "expert"), rollout=0, reward=reward)
             for agent, reward in (chosen, rejected)]
    return dict(task=task, trains=trains, kind=kind, chosen=sides[0], rejected=sides[1],
                weight=weight, sft_weight=weight)


@pytest.fixture
def run(tmp_path):
    """Four tasks in two iterations and an evaluated one; what the failure agent reads is hostile.

    Rewards of target and failure agent: task 0: 0.2, 0.9 then 1, 0.1; 1: 0.5, 0.25 twice; 2: 1, 1
    twice; 3: 0, 0 then 0, 0.7.
    """
    folder = tmp_path / "run"
    rewards = {1: ((0.2, 0.9), (0.5, 0.25), (1.0, 1.0), (0.0, 0.0)),
               2: ((1.0, 0.1), (0.5, 0.25), (1.0, 1.0), (0.0, 0.7))}
    script = ["search[curtain]", "click[red]", "click[Buy Now]"]
    phases = ["experts.jsonl"]
    write_lines(folder / "experts.jsonl", [trajectory(t, "expert", 1.0, script, 0) for t in TASKS])
    for i, of_tasks in rewards.items():
        for k, agent in enumerate(("target", "failure")):
            replies = [*script[:k + 1], f"Thought: hm\nAction: {agent}"]
            rows = [trajectory(t, agent, r[k], replies, i) for t, r in zip(TASKS, of_tasks)]
            if agent == "failure":
                rows[0]["messages"][4]["content"] = HOSTILE
                rows[0]["messages"][3]["content"] = HOSTILE  # its second reply
            write_lines(folder / f"iter{i}/{agent}.jsonl", rows)
            phases.append(f"iter{i}/{agent}.jsonl")
    write_lines(folder / "iter1/pairs-target.jsonl", [
        pair(TASKS[0], "expert>target", ("expert", 1.0), ("target", 0.2)),
        pair(TASKS[0], "expert>failure", ("expert", 1.0), ("failure", 0.9)),
        pair(TASKS[0], "failure>failure", ("failure", 0.9), ("target", 0.2), weight=1.0),
        pair(TASKS[1], "expert>target", ("expert", 1.0), ("target", 0.5))])
    write_lines(folder / "eval-0-target-test.jsonl", [
        trajectory("webshop-test-0", "target", 0.3, ["click[x]"], 0)])
    write_lines(folder / "eval-1-target-test.jsonl", [
        trajectory("webshop-test-0", "target", 0.8, ["click[y]"], 1)])
    phases += ["iter1/pairs-target.jsonl", "eval-0-target-test.jsonl", "eval-1-target-test.jsonl"]
    margins = [dict(event="margins", phase="iter1/target-agent", when=when, pairs={
        TASKS[0]: [[-10.0, -20.0 - x, x], [-10.0, -30.0, 2 * x], [-30.0, -20.0, -x]]})
        for when, x in (("before", 0.0), ("after", 0.25))]
    train = [{**METRICS[7], "step": n, "kinds": {"expert>target": dict(
        pairs=2, chosen_log_prob=-1.0, rejected_log_prob=-2.0, margin=n / 10, accuracy=0.5)}}
        for n in range(1, 4)]
    metrics = [*METRICS[:7], *train, *margins, *METRICS[8:],
               {**METRICS[3], "reason": HOSTILE, "phase": HOSTILE}]
    write_lines(folder / "metrics.jsonl", metrics)
    (folder / "config.json").write_text(json.dumps(
        {"settings": {**SETTINGS, "model": HOSTILE, "cut_turns": 0}, "versions": {}}))
    (folder / "phases.json").write_text(json.dumps(dict.fromkeys(phases, {})))
    (folder / "result.json").write_text("{}")
    return folder


def data_of(html: str) -> dict:
    return json.loads(re.search(r' id="data">(.*?)</script>', html)[1])


# -------------------------------------------------------------------------- what it is made of


def test_the_page_is_one_file_of_ascii_that_refers_to_nothing_outside(run):
    path = write_page(run)
    html = path.read_bytes()
    assert path.name == "run.html" and html.isascii()
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(html.decode())
    links = [a[name] for _, a in tags for name in ("src", "href", "action", "srcset") if name in a]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert b"url(" not in html.split(b"</style>")[0] and b"@import" not in html
    policy = next(a["content"] for _, a in tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy


def test_what_the_files_say_is_in_no_markup(run):
    html = page(run)
    assert html.count("<script") == html.count("</script") == 2  # the data and ours
    assert "<img" not in html and "<!--" not in html and "onerror=\"" not in html
    data = data_of(html)
    texts = ["".join(data["pieces"][n] for n in text) for text in data["texts"]]
    assert HOSTILE in texts


def test_trajectories_keep_what_they_are_and_lose_their_token_ids(run):
    data = conversations(run)
    assert [t["id"] for t in data["tasks"]][0] == TASKS[3]  # a failure of 0.7 above the target's 0
    task = next(t for t in data["tasks"] if t["id"] == TASKS[0])
    runs = [dict(zip(FIELDS, row)) for row in task["runs"]]
    assert [(r["agent"], r["iteration"], r["reward"]) for r in runs] == [
        ("expert", 0, 1.0), ("target", 1, 0.2), ("failure", 1, 0.9), ("target", 2, 1.0),
        ("failure", 2, 0.1)]
    text = lambda n: "".join(data["pieces"][k] for k in data["texts"][n if n >= 0 else -1 - n])
    read = read_jsonl(run / "iter1/failure.jsonl")[0]["messages"]
    assert [(n < 0, text(n)) for n in runs[2]["messages"]] == [
        (m["role"] == "assistant", m["content"]) for m in read]
    assert "ids" not in json.dumps(data) and "action_mask" not in json.dumps(data)


def test_each_pair_has_its_margins_in_the_order_of_its_file(run):
    data = conversations(run)
    pairs = {t["id"]: t["pairs"] for t in data["tasks"]}
    assert pairs[TASKS[0]] == [
        [1, "target", "expert>target", 0, 1, 0.5, 0.5, [-10, -20, 0], [-10, -20.25, 0.25]],
        [1, "target", "expert>failure", 0, 2, 0.5, 0.5, [-10, -30, 0], [-10, -30, 0.5]],
        [1, "target", "failure>failure", 2, 1, 1.0, 1.0, [-30, -20, 0], [-30, -20, -0.25]]]
    assert [p[-2:] for p in pairs[TASKS[1]]] == [[None, None]]  # it was not measured


def test_the_task_is_told_by_what_others_do_not_say(run):
    for file in ("experts.jsonl", "eval-0-target-test.jsonl", "eval-1-target-test.jsonl"):
        rows = read_jsonl(run / file)
        for n, row in enumerate(rows):
            row["messages"][0]["content"] = (
                f"Rules of the shop\n\nWebShop [SEP] Instruction: [SEP] buy {file} {n} [SEP] "
                "Search")
        write_lines(run / file, rows)
    assert [t["say"] for t in conversations(run)["tasks"]][0] == "buy experts.jsonl 3"


def test_a_run_that_goes_on_can_be_looked_at(run):
    """Its last line is half written, its last file of no finished phase, and a checkpoint there."""
    (run / "result.json").unlink()
    phases = json.loads((run / "phases.json").read_text())
    del phases["iter2/failure.jsonl"]
    (run / "phases.json").write_text(json.dumps(phases))
    (run / "iter2/failure.jsonl").write_text("{half")
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"event": "train", "phase": "iter2/target-ag')
    html = page(run)
    assert "not finished: 2 phases so far" in html and "in iter1/target-agent at step 3" in html
    assert all(row[0] != "failure" or row[1] == 1 for t in data_of(html)["tasks"]
               for row in t["runs"])


@pytest.mark.parametrize("keep", [1, 2, 5, 7])
def test_a_run_of_any_length_can_be_looked_at(run, keep):
    for path in (run / "iter2", run / "iter1"):
        shutil.rmtree(path)
    (run / "result.json").unlink()
    (run / "phases.json").write_text(json.dumps({"experts.jsonl": {}}))
    write_lines(run / "metrics.jsonl", METRICS[:keep])
    assert "<h2" in page(run)
    (run / "phases.json").write_text("{}")
    write_lines(run / "metrics.jsonl", [])
    assert "not finished: 0 phases so far" in page(run)


@pytest.mark.parametrize("change", [
    lambda row: row.pop("reward"), lambda row: row.update(reward=float("nan")),
    lambda row: row.update(reward="much"), lambda row: row.update(messages=[{"role": "user"}]),
    lambda row: row.update(messages=[{"role": "user", "content": 7}]),
    lambda row: row.update(steps=None), lambda row: row.update(task=[])])
def test_a_damaged_trajectory_is_one_line_that_names_the_file(run, change):
    rows = read_jsonl(run / "iter2/target.jsonl")
    change(rows[1])
    write_lines(run / "iter2/target.jsonl", rows)
    with pytest.raises(RunError, match="iter2/target.jsonl: damaged") as refused:
        page(run)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="not a run"):
        page(tmp_path)


def test_where_there_is_no_room_the_least_telling_conversations_are_left_out(run):
    whole = len(page(run))
    html = page(run, megabytes=0.0025)
    data = data_of(html)
    there = [all(row[-1] is not None for row in t["runs"]) for t in data["tasks"]]
    assert there == sorted(there, reverse=True) and set(there) == {True, False}
    assert len(html) < whole and re.search(r"no room for the conversations of \d of 5 tasks", html)


def test_the_successes_that_joined_the_experts_are_marked(run):
    joined = [*read_jsonl(run / "experts.jsonl"), read_jsonl(run / "iter1/target.jsonl")[2]]
    write_lines(run / "iter1/experts.jsonl", joined)
    phases = json.loads((run / "phases.json").read_text())
    (run / "phases.json").write_text(json.dumps({**phases, "iter1/experts.jsonl": {}}))
    marked = [(t["id"], row[0]) for t in conversations(run)["tasks"] for row in t["runs"]
              if row[FIELDS.index("joined")] and row[0] != "expert"]
    assert marked == [(TASKS[2], "target")]


def test_the_page_comes_at_the_end_of_a_run_and_cannot_undo_it(toy_run, tmp_path, capsys):
    import coevolve
    from harness import start

    folder = toy_run()  # without a page
    assert not (folder / "run.html").exists()
    pairs = [json.loads(line) for line in open(folder / "iter1/pairs-target.jsonl")]
    settings = json.loads((folder / "config.json").read_text())["settings"]
    again = [x for name in ("model", "iterations", "sft_epochs", "dpo_epochs", "max_tokens",
                            "max_new_tokens", "threads", "slots", "dpo_lr", "out")
             for x in ("--" + name.replace("_", "-"), str(settings[name]))]

    def fails(run_dir):
        raise KeyError("no such\nthing")

    start.main(coevolve.coevolve, again, [fails, make_page])
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    assert any("is finished, but fails failed: KeyError" in line for line in lines)
    assert any("run.html, 0." in line for line in lines)
    data = data_of((folder / "run.html").read_text())
    assert sum(len(t["pairs"]) for t in data["tasks"]) >= len(pairs) > 0
    assert all(p[-1] and p[-2][2] == 0.0 for t in data["tasks"] for p in t["pairs"])


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
            ready, _, _ = select.select([self.source], [], [], 60)
            part = os.read(self.source, 1 << 16) if ready else b""
            assert part, "the browser has ended" if ready else "the browser says nothing"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(message)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path, width: int = 1200, height: int = 900, scheme: str = "light",
             fragment: str = "") -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height,
             deviceScaleFactor=1, mobile=width < 600)
        self("Emulation.setEmulatedMedia", features=[
            dict(name="prefers-color-scheme", value=scheme)])
        address = f"{Path(path).resolve().as_uri()}#{fragment}"
        for url in ("about:blank", address):  # else another fragment would load nothing
            self.events.clear()
            self("Page.navigate", url=url)
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


@pytest.fixture(scope="module")
def browser():
    found = Browser()
    yield found
    found.close()


def rows_of(browser) -> list[str]:
    return browser.js("[...document.querySelectorAll('#list tr[data-task]')].map("
                      "tr => tr.dataset.task.replace('webshop-', ''))")


def choose(browser, id: str, value: str) -> None:
    browser.js(f"{{const e = document.getElementById({id!r}); e.value = {value!r}; "
               "e.dispatchEvent(new Event('input', {bubbles: true}))}")


def problems(browser) -> list:
    """What went wrong in the page, and what it asked for beside itself."""
    wrong = [e for e in browser.events if e["method"] in (
        "Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")]
    asked = [e["params"]["request"]["url"] for e in browser.events
             if e["method"] == "Network.requestWillBeSent"]
    return wrong + [url for url in asked if not url.endswith("/run.html")]


@needs_browser
def test_the_page_loads_without_errors_or_requests(run, browser):
    browser.open(write_page(run))
    browser.js("for (const e of document.querySelectorAll('#detail button')) e.click()")
    assert problems(browser) == []
    assert rows_of(browser) == ["train-3", "train-1", "train-0", "train-2", "test-0"]


@needs_browser
def test_filters_and_sorting(run, browser):
    browser.open(write_page(run))
    choose(browser, "split", "test")
    assert rows_of(browser) == ["test-0"]
    choose(browser, "split", "train")
    choose(browser, "show", "hard")  # a failure of 0.6 or more: tasks 0 (0.9) and 3 (0.7)
    assert rows_of(browser) == ["train-3", "train-0"]
    choose(browser, "sort", "-hardest")
    assert rows_of(browser) == ["train-0", "train-3"]
    choose(browser, "show", "all")
    choose(browser, "sort", "reward")  # the target's last: 1, 0.5, 1, 0
    assert rows_of(browser) == ["train-3", "train-1", "train-0", "train-2"]
    choose(browser, "course", "better")
    assert rows_of(browser) == ["train-0"]
    choose(browser, "course", "changed")
    assert rows_of(browser) == ["train-3", "train-0"]
    choose(browser, "course", "same")
    assert rows_of(browser) == ["train-1", "train-2"]
    choose(browser, "course", "all")
    choose(browser, "show", "pairs")
    assert rows_of(browser) == ["train-1", "train-0"]
    choose(browser, "show", "all")
    choose(browser, "search", "TRAIN-2")
    assert rows_of(browser) == ["train-2"]
    choose(browser, "search", "nothing like it")
    assert rows_of(browser) == []
    choose(browser, "search", "")
    browser.js("document.querySelector('#list th:last-child button').click()")  # change
    assert rows_of(browser)[0] == "train-0"
    assert browser.js("document.querySelector('#list th:last-child').ariaSort") == "descending"


@needs_browser
def test_a_task_opens_with_its_conversations_side_by_side(run, browser):
    browser.open(write_page(run))
    browser.js("document.querySelector('tr[data-task=webshop-train-0] button').click()")
    heads = "[...document.querySelectorAll('.talk .who')].map(e => e.textContent)"
    assert [head.split(" ")[0] for head in browser.js(heads)] == ["expert", "target", "failure"]
    browser.js("document.querySelector('[data-iteration=\"1\"]').click()")
    heads_now = browser.js(heads)
    assert "iteration 1" in heads_now[1] and "0.20" in heads_now[1]
    # The target does what the expert does once, then "target"; the failure agent twice.
    assert "parts from the expert at turn 2" in heads_now[1]
    marked = browser.js("[...document.querySelectorAll('.turn.parts .action')].map("
                        "e => e.textContent)")
    assert marked[0] == "target" and marked[1].startswith("<script>")
    pairs = browser.js("[...document.querySelectorAll('.pairs tbody tr')].map(e => "
                       "[...e.cells].map(c => c.textContent))")
    assert [p[0] for p in pairs] == ["expert 1>target 0.20", "expert 1>failure 0.90",
                                     "failure 0.90>target 0.20"]
    assert pairs[0][3:6] == ["0.50", "0.50", "0.00 \u2192 0.25"]
    # A page that is cut off can be read whole, and only there is a button for it.
    cut = "[...document.querySelectorAll('.all')].filter(e => !e.hidden).length"
    assert browser.js("document.querySelectorAll('.talk .page').length") == 8
    assert browser.js(cut) == 1
    browser.js("[...document.querySelectorAll('.all')].find(e => !e.hidden).click()")
    assert browser.js("document.querySelectorAll('.page.clamped').length") == 7
    browser.js("document.querySelectorAll('.pairs tbody button')[2].click()")
    heads_now = browser.js(heads)
    assert len(heads_now) == 2 and "chosen" in heads_now[0] and "rejected" in heads_now[1]
    assert browser.js("location.hash") == "#webshop-train-0"


@needs_browser
def test_what_grpo_played_is_told_by_its_step(run, browser):
    write_lines(run / "iter1/target-agent/episodes.jsonl", [
        trajectory("webshop-added-0", "target", 0.5, ["click[x]"], step) for step in (7, 8)])
    phases = json.loads((run / "phases.json").read_text())
    (run / "phases.json").write_text(json.dumps({**phases, "iter1/target-agent": {}}))
    browser.open(write_page(run), fragment="webshop-added-0")
    assert browser.js("document.querySelector('.map th').textContent") == "step"
    assert "step 8" in browser.js("document.querySelector('.talk .who').textContent")
    browser.open(run / "run.html", fragment="webshop-train-0")
    assert browser.js("document.querySelector('.map th').textContent") == "iteration"


@needs_browser
def test_hostile_text_stays_text(run, browser):
    browser.open(write_page(run))
    browser.js("document.querySelector('tr[data-task=webshop-train-0] button').click()")
    browser.js("document.querySelector('[data-iteration=\"1\"]').click()")
    assert browser.js("document.title") != "pwned" and problems(browser) == []
    assert browser.js("document.querySelectorAll('#detail script, #detail img').length") == 0
    shown = browser.js("[...document.querySelectorAll('.talk .page')].map(e => e.textContent)")
    said = browser.js("[...document.querySelectorAll('.talk .action')].map(e => e.textContent)")
    clean = HOSTILE.replace("\ud800", "\ufffd")  # as the protocol sends it
    assert clean in [text.replace("\ud800", "\ufffd") for text in shown] and clean in [
        text.replace("\ud800", "\ufffd") for text in said]
    named = browser.js("[...document.querySelectorAll('.talk .control')].map(e => "
                       "e.dataset.name)")
    assert {"U+0000", "U+001B", "U+0007", "U+202E", "U+2028", "U+FEFF", "U+D800"} <= set(named)


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_is_as_wide_as_the_screen(run, browser, width):
    browser.open(write_page(run), width=width, height=844)
    assert browser.js("document.documentElement.scrollWidth") <= width
    browser.js("document.querySelector('tr[data-task=webshop-train-0] button').click()")
    browser.js("for (const e of document.querySelectorAll('.all, [data-iteration=all]')) e.click()")
    assert browser.js("document.documentElement.scrollWidth") <= width
    size = browser.js("parseFloat(getComputedStyle(document.querySelector('.page')).fontSize)")
    assert size >= 12


CONTRAST = """(() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(x => x / 255)
    .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("h1, h3, .note, td, .action, .page, .agent, .chip, .here")]
    .filter(e => e.textContent.trim() && e.getClientRects().length).map(e => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className || e.tagName]; })
    .sort((x, y) => x[0] - y[0])[0]; })()"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(run, browser, scheme):
    """At least 4.5 : 1, as WCAG 2 asks of small text; dark mode is dark."""
    browser.open(write_page(run), scheme=scheme)
    ratio, where = browser.js(CONTRAST)
    assert ratio >= 4.5, where
    paper = browser.js("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", paper)[:3])) / 3
    assert brightness < 60 if scheme == "dark" else brightness > 200


@needs_browser
def test_the_keyboard_is_enough(run, browser):
    browser.open(write_page(run))
    chosen = "document.querySelector('tr[aria-current]').dataset.task"
    assert browser.js(chosen) == "webshop-train-3"
    browser.key("j")
    assert browser.js(chosen) == "webshop-train-1"
    browser.key("j", "k", "k", "k")  # and no further than the first
    assert browser.js(chosen) == "webshop-train-3"
    browser.key("h")
    assert "iteration 1" in browser.js("document.querySelectorAll('.who')[1].textContent")
    browser.key("l", "l")
    assert browser.js("document.querySelectorAll('.who').length") == 5  # all
    browser.key("/", "t", "e", "s", "t")
    assert rows_of(browser) == ["test-0"]
    browser.key("Escape", "ArrowDown", "Enter")
    assert browser.js("document.activeElement.closest('tr').dataset.task") == "webshop-test-0"
    assert browser.js(chosen) == "webshop-test-0"
    browser.key("Tab")  # the list is one stop, whatever its length
    assert browser.js("document.activeElement.id") == "detail"
    for _ in range(5):
        browser.key("Tab")
        assert browser.js("document.activeElement.matches('#detail button, #detail summary, "
                          "#detail [tabindex]')")


@needs_browser
def test_an_address_names_a_task(run, browser):
    path = write_page(run)
    browser.open(path, fragment="webshop-train-2")
    assert browser.js("document.querySelector('tr[aria-current]').dataset.task") == (
        "webshop-train-2")
    browser.open(path, fragment="%zz")
    assert problems(browser) == []


@needs_browser
def test_the_picture(run, tmp_path, capsys):
    main([str(run), "--picture", str(tmp_path / "page.png"), "--size", "800,600"])
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert "run.html" in capsys.readouterr().out


def test_the_readme_shows_a_small_picture():
    picture = ROOT / "docs/page.png"
    assert "docs/page.png" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 300_000

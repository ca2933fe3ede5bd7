"""The page of a run: its contents, and how a browser shows it."""

import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser

import pytest
from conftest import ROOT
from test_report import PHASES, evaluation, exploration, trained, trajectory, write_lines, write_run

from common.files import read_jsonl
from lab.page.figures import means, training_figures
from lab.page.page import conversations, main, page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser",
                                                "google-chrome"))), None)
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium; apt-get install chromium")

# Text that could escape from its place: markup, the end of the script that holds the data, quotes,
# invisible characters, characters that change the direction of text, and a lone surrogate
HOSTILE = ("<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
           "</script></title><!-- ' \" ` & &amp; {{ 7*7 }} {% raw %} \u2028 \u2029 \x00 \x1b[31m "
           "\x07 \u202e gnirts \ufeff \ud800 \U0001f600 javascript:alert(1) " + "x" * 300)
TASKS = [f"webshop-train-{i}" for i in range(4)]


def pair(task, kind, chosen, rejected, weight=0.5):
    sides = [dict(agent=agent, iteration=int(agent != "expert"), rollout=0, reward=reward)
             for agent, reward in (chosen, rejected)]
    return dict(task=task, kind=kind, chosen=sides[0], rejected=sides[1], weight=weight,
                sft_weight=weight)


@pytest.fixture
def run(tmp_path):
    """Four tasks in two iterations and an evaluated one. The failure agent's observations are
    hostile, and its own pairs are a part of the target's. The last pair is a fork's and has no
    weights."""
    rewards = {1: ((0.2, 0.9), (0.5, 0.25), (1.0, 1.0), (0.0, 0.0)),
               2: ((1.0, 0.1), (0.5, 0.25), (1.0, 1.0), (0.0, 0.7))}
    phases = {"experts.jsonl": {**PHASES["experts.jsonl"], "dropped": {HOSTILE: 2}},
              "eval-0-target-test.jsonl": evaluation("target", 0, 0.3, 0.0)}
    for i in rewards:
        phases |= {f"iter{i}/{agent}.jsonl": exploration(agent, 4, 0.25, 0.25, 0.5, i=i)
                   for agent in ("target", "failure")}
    phases |= {"iter1/failure-agent": trained(name="failure", i=1, steps=3),
               "iter1/pairs-target.jsonl": PHASES["iter1/pairs-target.jsonl"],
               "iter1/target-agent": trained(name="target", i=1, steps=3),
               "eval-1-target-test.jsonl": evaluation("target", 1, 0.8, 0.0)}
    folder = write_run(tmp_path / "run", phases, model=HOSTILE, cut_turns=0)
    script = ["search[curtain]", "click[red]", "click[Buy Now]"]
    write_lines(folder / "experts.jsonl", [trajectory(t, "expert", 1.0, script, 0) for t in TASKS])
    for i, of_tasks in rewards.items():
        for k, agent in enumerate(("target", "failure")):
            replies = [*script[:k + 1], f"Thought: hm\nAction: {agent}", *k * ["click[end]"]]
            rows = [trajectory(t, agent, r[k], replies, i) for t, r in zip(TASKS, of_tasks)]
            if agent == "failure":
                rows[0]["messages"][4]["content"] = HOSTILE
                rows[0]["messages"][3]["content"] = HOSTILE  # its second reply
            elif i == 2:
                rows.append(trajectory(TASKS[0], agent, 0.4, replies, i, rollout=1))
            write_lines(folder / f"iter{i}/{agent}.jsonl", rows)
    pairs = [
        pair(TASKS[0], "expert>target", ("expert", 1.0), ("target", 0.2)),
        pair(TASKS[0], "expert>failure", ("expert", 1.0), ("failure", 0.9)),
        pair(TASKS[0], "failure>failure", ("failure", 0.9), ("target", 0.2), weight=1.0),
        pair(TASKS[1], "expert>target", ("expert", 1.0), ("target", 0.5))]
    del pairs[3]["weight"], pairs[3]["sft_weight"]
    write_lines(folder / "iter1/pairs-target.jsonl", pairs)
    first, last = ([[-110.0, -120.0 - x, x], [-10.0, -30.0, 2 * x], [-30.0, -20.0, -x]]
                   for x in (0.0, 0.25))
    write_lines(folder / "iter1/target-agent/margins.jsonl", [
        row | dict(first=a, last=b) for row, a, b in zip(pairs, first, last)])
    write_lines(folder / "iter1/failure-agent/margins.jsonl", [
        pairs[2] | dict(first=[0, 0, 0], last=[0, 0, 9])])
    write_lines(folder / "iter1/target-agent/train.jsonl", [dict(
        step=n, loss=0.7, kinds={"expert>target": dict(
            count=2, chosen=-1.0, rejected=-2.0, margin=n / 10, accuracy=0.5)})
        for n in range(1, 4)])
    (folder / "result.json").write_text("{}")
    return folder


def data_of(made: str) -> dict:
    return json.loads(zlib.decompress(base64.b64decode(
        re.search(r' id="data">(.*?)</script>', made)[1])))


def test_the_page_is_one_file_that_refers_to_nothing_outside_and_holds_no_markup_of_a_run(run):
    main([str(run)])
    made = (run / "run.html").read_text(encoding="ascii")
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(made)
    links = [a[name] for _, a in tags for name in ("src", "href", "action", "srcset") if name in a]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert str(links).count("data:image/svg+xml") == 2  # and training's
    policy = next(a["content"] for _, a in tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert made.count("<script") == made.count("</script") == 2  # the data and ours
    assert "<img src=x" not in made and "<!--" not in made and 'onerror="' not in made
    assert json.dumps(HOSTILE) in json.dumps(data_of(made))


def test_trajectories_are_unchanged_and_the_most_telling_tasks_come_first(run):
    """First are tasks with a low last reward of the target, then those with hard failures."""
    data = conversations(run, 1.0)
    assert [t["id"].removeprefix("webshop-") for t in data["tasks"]] == [
        "train-3", "train-1", "train-0", "train-2", "test-0"]
    task = data["tasks"][2]
    assert [(r["agent"], r["iteration"], r["reward"]) for r in task["runs"]] == [
        ("expert", 0, 1.0), ("target", 1, 0.2), ("failure", 1, 0.9), ("target", 2, 1.0),
        ("target", 2, 0.4), ("failure", 2, 0.1)]
    assert task["runs"][2]["messages"] == read_jsonl(run / "iter1/failure.jsonl")[0]["messages"]
    assert task["runs"][2]["opening"] == 1 and not {"ids", "action_mask"} & {*task["runs"][2]}


def test_the_page_of_an_unfinished_run(run, tmp_path):
    """Beyond the size limit the conversations of the least interesting tasks are left out. A file
    that is missing, or of an unfinished phase, is skipped. A new run has no phases.json yet."""
    main([str(run), "--megabytes", "0.0005"])
    made = (run / "run.html").read_text()
    there = [all(r["messages"] for r in t["runs"]) for t in data_of(made)["tasks"]]
    assert there == sorted(there, reverse=True) and {*there} == {True, False}
    assert re.search(r"leaves out the conversations of \d of 5 tasks", made)

    (run / "result.json").unlink()
    phases = json.loads((run / "phases.json").read_text())
    del phases["iter2/failure.jsonl"]
    (run / "phases.json").write_text(json.dumps(phases))
    (run / "iter2/failure.jsonl").write_text("{half")
    (run / "eval-1-target-test.jsonl").unlink()
    made = page(run)
    assert "9 phases so far, the last eval-1-target-test.jsonl" in made
    assert {r["iteration"] for t in data_of(made)["tasks"] for r in t["runs"]
            if r["agent"] == "failure"} == {1}

    begun = write_run(tmp_path / "begun", {})
    (begun / "phases.json").unlink()
    made = page(begun)
    assert "0 phases so far" in made and data_of(made)["tasks"] == []


def test_the_page_of_a_run_of_the_core(small_run):
    """The page has every pair with its margins in training, and every trajectory with its
    messages."""
    data = conversations(small_run, 9.0)
    for name in "target", "failure":
        measured = read_jsonl(small_run / f"iter1/{name}-agent/margins.jsonl")
        assert len(measured) == len(read_jsonl(small_run / f"iter1/pairs-{name}.jsonl"))
        for t in data["tasks"]:
            made = [(p["kind"], p["first"], p["last"], t["runs"][p["chosen"]]["reward"],
                     t["runs"][p["rejected"]]["reward"]) for p in t["pairs"] if p["trains"] == name]
            assert made == [(r["kind"], r["first"], r["last"], r["chosen"]["reward"],
                             r["rejected"]["reward"]) for r in measured if r["task"] == t["id"]]
    played = [r["messages"] for t in data["tasks"] for r in t["runs"] if r["from"] == "iter1/target"]
    explored = [row["messages"] for row in read_jsonl(small_run / "iter1/target.jsonl")]
    assert sorted(played, key=str) == sorted(explored, key=str)
    assert len(training_figures(small_run)) == 4  # both SFT agents, both trained ones


def in_browser(tmp_path, made: str, script: str = "", fragment: str = ""):
    """Returns the page's HTML in a browser, or with a script its object `told` at the end."""
    path = tmp_path / "shown.html"
    if script:  # in the page's own module, which its policy would not let run
        made = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", made)
        made = made.replace("</script>\n</body>", f"""
            const pick = (id, value) => {{
              $(id).value = value;
              $(id).dispatchEvent(new Event("input", {{bubbles: true}})); }};
            const all = selector => [...document.querySelectorAll(selector)];
            const texts = selector => all(selector).map(e => e.textContent);
            const shown = () => all("#list input").map(e => e.value.slice(8));
            const cells = () => all("#rows tr").map(tr => [...tr.cells].map(td => td.textContent
              .replace("\\u2013", "-").replace(" \\u2192 ", "~")).join("|"));
            const columns_shown = () => texts(".who").map(text =>
              text.replace(/(iteration|\\d turns).*/, "")).join(", ");
            const told = {{}}; {script}
            document.body.textContent = JSON.stringify(told);
            </script></body>""")
    path.write_text(made)
    done = subprocess.run(
        [CHROMIUM, "--headless", "--disable-gpu", "--no-sandbox", "--virtual-time-budget=5000",
         "--window-size=1400,1000", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         f"{path.as_uri()}#{fragment}"],
        capture_output=True, text=True, errors="surrogatepass")
    if not script:
        return done.stdout
    return json.loads(html.unescape(re.search(r"<body>(.*)</body>", done.stdout, re.S)[1]))


def test_a_long_training_curve_has_the_means_of_consecutive_steps():
    x, y = means([(step, step ** 2) for step in range(1, 81)])
    assert (len(x), x[0], y[0]) == (40, 1.5, 2.5)  # (1 + 2) / 2, (1 + 4) / 2
    assert means([(1, 3)]).tolist() == [[1], [3]]


def test_figures_need_no_backend_that_a_notebook_sets():
    notebook = os.environ | dict(MPLBACKEND="module://matplotlib_inline.backend_inline")
    code = "from lab.page import figures; print(figures.matplotlib.get_backend().lower())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=notebook, text=True,
                          capture_output=True)
    assert done.stdout == "agg\n", done.stderr


@needs_browser
def test_the_policy_lets_the_page_work_and_its_address_names_a_task(run, tmp_path):
    shown = in_browser(tmp_path, page(run), fragment=TASKS[1])
    assert re.search(rf'<p id="id"[^>]*>{TASKS[1]}</p>', shown)
    assert "<title>pwned" not in shown and '<img src="x"' not in shown


@needs_browser
def test_the_tasks_are_found_and_shown_side_by_side(run, tmp_path):
    """A fork may rename its target agent."""
    for file in run.rglob("*.json*"):
        file.write_text(file.read_text().replace('"target"', '"student"'))
    told = in_browser(tmp_path, page(run), """
        told.listed = {};
        for (const {value} of $("show").options) {
          pick("show", value);
          told.listed[value] = shown().join(" "); }
        pick("show", "all"); pick("search", "TRAIN-2 red"); told.found = shown(); pick("search", "");
        all("#list input")[1].click(); told.fork = cells();
        all("#list input")[2].click(); told.hash = location.hash; told.pairs = cells();
        told.squares = [...all("#list label")[2].querySelectorAll("i")].map(e => e.className).join(" ");
        told.heads = texts(".who"); told.cut = texts(".cut .number");
        told.parts = texts(".parts .action").map(text => text.slice(0, 8));
        told.said = texts(".action, .page");
        told.pwned = document.title === "pwned" || all("#detail script, #detail img").length;
        all("#rows button")[2].click(); told.pair = columns_shown();
        all("#map th button")[1].click(); told.later = columns_shown();
        all("#map td button")[1].click(); told.reward = columns_shown();
        told.broken = document.body.innerText.match(/\\[object|undefined|NaN/g);""")
    assert told.pop("said").count(HOSTILE) == 2
    assert told == {
        "pwned": 0, "broken": None, "found": ["train-2"], "hash": "#webshop-train-0",
        "listed": {
            "all": "train-3 train-1 train-0 train-2 test-0", "pairs": "train-1 train-0",
            "hard": "train-3 train-0 test-0",  # failures of 0.7, 0.9 and 0.8, at least 0.6
            "solved": "train-2", "failed": "train-3 train-1 train-0 test-0",
            "better": "train-0 test-0", "worse": ""},
        "squares": "bad hard hard bad",  # means: student 0.2, 0.7; failure agent 0.9, 0.1
        "fork": ["expert 1 > student 0.5|student|-|-|-|-|-"],
        "pairs": [
            "expert 1 > failure 0.9|student|0.50|0.50|0.00~0.50|-10.0~-10.0|-30.0~-30.0",
            "expert 1 > student 0.2|student|0.50|0.50|0.00~0.25|-110.0~-110.0|-120.0~-120.3",
            "failure 0.9 > student 0.2|student|1.00|1.00|0.00~-0.25|-30.0~-30.0|-20.0~-20.0"],
        # It opens at the first pair with the failure agent, which repeats one action of the expert.
        "heads": [
            "expert 1 chosen3 turns, done",
            "failure 0.9 rejectediteration 1, rollout 0, 4 turns, done, differs at turn 2",
            "student 0.2iteration 1, rollout 0, 2 turns, done, differs at turn 2"],
        "parts": ["<script>", "target"], "cut": ["4, not trained on"],
        "pair": "failure 0.9 chosen, student 0.2 rejected, expert 1",
        # The expert, the best failure of each agent, and the rest
        "later": "expert 1, student 1 0.4, failure 0.1, student 0 1",
        "reward": "expert 1, student 0 1, student 1 0.4, failure 0.1"}

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
from lab.page.figures import training_figures
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
    hostile."""
    rewards = {1: ((0.2, 0.9), (0.5, 0.25), (1.0, 1.0), (0.0, 0.0)),
               2: ((1.0, 0.1), (0.5, 0.25), (1.0, 1.0), (0.0, 0.7))}
    phases = {"experts.jsonl": {**PHASES["experts.jsonl"], "dropped": {HOSTILE: 2}},
              "eval-0-target-test.jsonl": evaluation("target", 0, 0.3, 0.0)}
    for i in rewards:
        phases |= {f"iter{i}/{agent}.jsonl": exploration(agent, 4, 0.25, 0.25, 0.5, i=i)
                   for agent in ("target", "failure")}
    phases |= {"iter1/pairs-target.jsonl": PHASES["iter1/pairs-target.jsonl"],
               "iter1/target-agent": trained(name="target", i=1, steps=3),
               "eval-1-target-test.jsonl": evaluation("target", 1, 0.8, 0.0)}
    folder = write_run(tmp_path / "run", phases, model=HOSTILE, cut_turns=0)
    script = ["search[curtain]", "click[red]", "click[Buy Now]"]
    write_lines(folder / "experts.jsonl", [trajectory(t, "expert", 1.0, script, 0) for t in TASKS])
    for i, of_tasks in rewards.items():
        for k, agent in enumerate(("target", "failure")):
            replies = [*script[:k + 1], f"Thought: hm\nAction: {agent}"]
            rows = [trajectory(t, agent, r[k], replies, i) for t, r in zip(TASKS, of_tasks)]
            if agent == "failure":
                rows[0]["messages"][4]["content"] = HOSTILE
                rows[0]["messages"][3]["content"] = HOSTILE  # its second reply
            write_lines(folder / f"iter{i}/{agent}.jsonl", rows)
    pairs = [
        pair(TASKS[0], "expert>target", ("expert", 1.0), ("target", 0.2)),
        pair(TASKS[0], "expert>failure", ("expert", 1.0), ("failure", 0.9)),
        pair(TASKS[0], "failure>failure", ("failure", 0.9), ("target", 0.2), weight=1.0),
        pair(TASKS[1], "expert>target", ("expert", 1.0), ("target", 0.5))]
    write_lines(folder / "iter1/pairs-target.jsonl", pairs)
    first, last = ([[-110.0, -120.0 - x, x], [-10.0, -30.0, 2 * x], [-30.0, -20.0, -x]]
                   for x in (0.0, 0.25))
    write_lines(folder / "iter1/target-agent/margins.jsonl", [
        row | dict(first=a, last=b) for row, a, b in zip(pairs, first, last)])
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
    assert sum(link.startswith("data:image/svg+xml") for link in links) == 2  # and training's
    assert "url(" not in made.split("</style>")[0] and "@import" not in made
    policy = next(a["content"] for _, a in tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert made.count("<script") == made.count("</script") == 2  # the data and ours
    assert "<img src=x" not in made and "<!--" not in made and 'onerror="' not in made
    assert HOSTILE in [m["content"] for task in data_of(made)["tasks"] for r in task["runs"]
                       for m in r["messages"]]


def test_trajectories_are_unchanged_and_the_most_telling_tasks_come_first(run):
    """First are tasks with a low last reward of the target, then those with hard failures."""
    data = conversations(run, 1.0)
    assert [t["id"].removeprefix("webshop-") for t in data["tasks"]] == [
        "train-3", "train-1", "train-0", "train-2", "test-0"]
    task = data["tasks"][2]
    assert [(r["agent"], r["iteration"], r["reward"]) for r in task["runs"]] == [
        ("expert", 0, 1.0), ("target", 1, 0.2), ("failure", 1, 0.9), ("target", 2, 1.0),
        ("failure", 2, 0.1)]
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
    assert "8 phases so far, the last eval-1-target-test.jsonl" in made
    assert all(r["agent"] != "failure" or r["iteration"] == 1 for t in data_of(made)["tasks"]
               for r in t["runs"])

    begun = write_run(tmp_path / "begun", {})
    (begun / "phases.json").unlink()
    made = page(begun)
    assert "0 phases so far" in made and data_of(made)["tasks"] == []


def test_the_page_of_a_run_of_the_core(small_run):
    """The page has every pair with its margins in training, and every trajectory with its
    messages."""
    data = conversations(small_run, 9.0)
    for name in "target", "failure":
        rows = read_jsonl(small_run / f"iter1/pairs-{name}.jsonl")
        measured = read_jsonl(small_run / f"iter1/{name}-agent/margins.jsonl")
        for t in data["tasks"]:
            made = [p for p in t["pairs"] if p["trains"] == name]
            assert [(p["kind"], *(t["runs"][p[side]]["reward"] for side in ("chosen", "rejected")))
                    for p in made] == [(r["kind"], r["chosen"]["reward"], r["rejected"]["reward"])
                                       for r in rows if r["task"] == t["id"]]
            assert [(p["first"], p["last"]) for p in made] == [
                (r["first"], r["last"]) for r in measured if r["task"] == t["id"]]
    played = [r["messages"] for t in data["tasks"] for r in t["runs"] if r["from"] == "iter1/target"]
    assert sorted(map(str, played)) == sorted(str(r["messages"])
                                              for r in read_jsonl(small_run / "iter1/target.jsonl"))
    assert data["agents"] == ["target", "failure"]
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
            const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {{key}}));
            const shown = () => all("#list tr[data-task]").map(tr => tr.dataset.task.slice(8));
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


def test_figures_need_no_backend_that_a_notebook_sets():
    notebook = os.environ | dict(MPLBACKEND="module://matplotlib_inline.backend_inline")
    code = "from lab.page import figures; print(figures.matplotlib.get_backend().lower())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=notebook, text=True,
                          capture_output=True)
    assert done.stdout == "agg\n", done.stderr


@needs_browser
def test_the_policy_lets_the_page_work_and_its_address_names_a_task(run, tmp_path):
    shown = in_browser(tmp_path, page(run), fragment=TASKS[1])
    assert re.search(rf'data-task="{TASKS[1]}" aria-current="true"', shown)
    assert shown.count('class="who ') == 3  # expert, target, failure agent of the last iteration
    assert "<title>pwned" not in shown and '<img src="x"' not in shown


@needs_browser
def test_the_tasks_are_filtered_sorted_and_shown_side_by_side(run, tmp_path):
    told = in_browser(tmp_path, page(run), """
        told.all = shown();
        pick("split", "train"); pick("show", "hard"); pick("sort", "-hardest"); told.hard = shown();
        pick("show", "pairs"); told.pairs = shown();
        pick("show", "all"); pick("sort", "reward"); told.reward = shown();
        pick("course", "better"); told.better = shown();
        pick("course", "all"); pick("search", "TRAIN-2"); told.search = shown();
        pick("search", ""); pick("sort", "telling"); pick("split", "all");
        document.querySelector("tr[data-task=webshop-train-0] button").click();
        told.hash = location.hash;
        document.querySelector('[data-iteration="1"]').click();
        told.heads = all(".talk .who").map(e => e.textContent);
        told.broken = document.body.innerText.match(/\\[object|undefined|NaN/g);
        told.parts = all(".turn.parts .action").map(e => e.textContent.slice(0, 8));
        told.rows = all(".pairs tbody tr").map(e => [...e.cells].map(c => c.textContent));
        told.pwned = document.title === "pwned" || all("#detail script, #detail img").length;
        told.said = all(".talk .page, .talk .action").map(e => e.textContent);
        told.named = all(".talk .control").map(e => e.dataset.name);
        told.whole = all(".all").filter(e => !e.hidden).length;
        all(".pairs tbody button")[2].click();
        told.sides = all(".talk .who").map(e => e.className);
        press("j"); told.next = current.id;""")
    assert not told["pwned"] and told["said"].count(HOSTILE) == 2
    assert {"U+0000", "U+001B", "U+202E", "U+2028", "U+FEFF", "U+D800"} <= {*told["named"]}
    assert told["all"] == ["train-3", "train-1", "train-0", "train-2", "test-0"]
    assert told["hard"] == ["train-0", "train-3"]  # failures of 0.9 and 0.7, at least 0.6
    assert told["pairs"] == ["train-0", "train-1"]
    assert told["reward"] == ["train-3", "train-1", "train-0", "train-2"]  # 0, 0.5, 1, 1
    assert told["better"] == ["train-0"]
    assert (told["search"], told["hash"]) == (["train-2"], "#webshop-train-0")
    # The target repeats the expert's first action, the failure agent its first two.
    assert [head.split(" ")[0] for head in told["heads"]] == ["expert", "target", "failure"]
    assert told["heads"][0].endswith("3 turns") and "0.20" in told["heads"][1]
    assert told["heads"][1].endswith("2 turns, differs from the expert at turn 2")
    assert told["broken"] is None
    assert told["parts"] == ["target", "<script>"]
    assert [row[0] for row in told["rows"]] == [
        "expert 1>target 0.20", "expert 1>failure 0.90", "failure 0.90>target 0.20"]
    assert told["rows"][0][3:6] == ["0.50", "0.50", "0.00 \u2192 0.25"]
    assert told["whole"] == 1  # of eight pages one is cut off and has a button
    assert told["sides"] == ["who chosen", "who rejected"]
    assert told["next"] == "webshop-train-2"

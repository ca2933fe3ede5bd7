"""The page of a run: its contents, and how a browser shows it."""

import base64
import html
import json
import re
import shutil
import subprocess
import zlib

import pytest
from bs4 import BeautifulSoup
from conftest import table
from test_report import PHASES, trajectory, write_lines, write_run

from common.files import read_json, read_jsonl
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
SCRIPT = ["search[curtain]", "click[red]", "click[Buy Now]"]
REPLIES = dict(expert=SCRIPT, target=["search[curtain]", "Thought: hm\nAction: target"],
               failure=[*SCRIPT[:2], "Thought: hm\nAction: failure", "click[end]"])
REWARDS = {"experts.jsonl": [1.0] * 4,
           "iter1/target.jsonl": [0.2, 0.5, 1.0, 0.0], "iter1/failure.jsonl": [0.9, 0.25, 1.0, 0.0],
           "iter2/target.jsonl": [1.0, 0.5, 1.0, 0.0], "iter2/failure.jsonl": [0.1, 0.25, 1.0, 0.7],
           "eval-0-target-test.jsonl": [0.3], "eval-1-target-test.jsonl": [0.8]}
# The kind and the weight of a pair, and the log-probabilities of its chosen and rejected
# trajectories and the margin, before and after training
PAIRS = table("""
    expert>target -> 0.5 -> [-110, -120, 0] -> [-110, -120.25, 0.25]
    expert>failure -> 0.5 -> [-10, -30, 0] -> [-10, -30, 0.5]
    failure>target -> 1.0 -> [-30, -20, 0] -> [-30, -20, -0.25]""")


@pytest.fixture
def run(tmp_path):
    """Four tasks in two iterations and an evaluated one. A reply and an observation of the failure
    agent are hostile, and its own pairs are a part of the target's. The last pair is a fork's and
    has no weights."""
    phases = PHASES | {"experts.jsonl": PHASES["experts.jsonl"] | {"dropped": {HOSTILE: 2}}}
    for name in "target", "failure":
        phases[f"iter2/{name}.jsonl"] = PHASES[f"iter1/{name}.jsonl"] | dict(i=2)
    folder = write_run(tmp_path / "run", phases, REWARDS, REPLIES, model=HOSTILE, cut_turns=0)
    for file in folder.glob("iter*/failure.jsonl"):
        file.write_text(file.read_text().replace("click[red]", json.dumps(HOSTILE)[1:-1], 2))
    with open(folder / "iter2/target.jsonl", "a") as file:
        file.write(json.dumps(trajectory("webshop-train-0", "target", 0.4, 2, rollout=1,
                                         replies=REPLIES["target"])))
    pairs, margins = [], []
    for kind, weight, first, last in PAIRS:
        chosen, rejected = [dict(agent=name, iteration=int(name != "expert"), rollout=0)
                            for name in kind.split(">")]
        pair = dict(task="webshop-train-0", kind=kind, chosen=chosen, rejected=rejected)
        margins.append(pair | dict(first=json.loads(first), last=json.loads(last)))
        pairs.append(pair | dict(weight=float(weight), sft_weight=float(weight)))
    pairs.append(dict(pair, task="webshop-train-1"))
    write_lines(folder / "iter1/pairs-target.jsonl", pairs)
    write_lines(folder / "iter1/target-agent/margins.jsonl", margins)
    write_lines(folder / "iter1/failure-agent/margins.jsonl", [margins[2] | dict(last=[0, 0, 9])])
    write_lines(folder / "iter1/target-agent/train.jsonl", [dict(step=1, loss=0.7)])
    (folder / "result.json").write_text("{}")
    return folder


def data_of(made: str) -> dict:
    data = BeautifulSoup(made, "html.parser").find(id="data").string
    return json.loads(zlib.decompress(base64.b64decode(data)))


def test_the_page_is_one_file_that_refers_to_nothing_outside_and_holds_no_markup_of_a_run(run):
    main([str(run)])
    made = (run / "run.html").read_text(encoding="ascii")
    read = BeautifulSoup(made, "html.parser")
    links = []
    for name in "src", "href", "action", "srcset":
        links += [tag[name] for tag in read.find_all(attrs={name: True})]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert str(links).count("data:image/svg+xml") == 2  # and training's
    policy = read.find("meta", attrs={"http-equiv": True})["content"]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert made.count("<script") == made.count("</script") == 2  # the data and ours
    assert "<img src=x" not in made and "<!--" not in made
    assert json.dumps(HOSTILE) in json.dumps(data_of(made))


def test_trajectories_are_unchanged_and_the_most_telling_tasks_come_first(run):
    """First are tasks with a low last reward of the target, then those with hard failures."""
    data = conversations(run, 1.0)
    ids = [task["id"].removeprefix("webshop-") for task in data["tasks"]]
    assert ids == ["train-3", "train-1", "train-0", "train-2", "test-0"]
    runs = data["tasks"][2]["runs"]
    assert [f"{r['agent']} {r['iteration']} {r['reward']}" for r in runs] == [
        "expert 0 1.0", "target 1 0.2", "failure 1 0.9", "target 2 1.0", "target 2 0.4",
        "failure 2 0.1"]
    assert runs[2]["messages"] == read_jsonl(run / "iter1/failure.jsonl")[0]["messages"]
    assert runs[2]["opening"] == 1 and not {"ids", "action_mask"} & runs[2].keys()


def test_the_page_of_an_unfinished_run(run):
    """Beyond the size limit the conversations of the least interesting tasks are left out. A file
    that is missing, or of an unfinished phase, is skipped. A new run has no phases.json yet."""
    main([str(run), "--megabytes", "0.0005"])
    made = (run / "run.html").read_text()
    there = [bool(task["runs"][0]["messages"]) for task in data_of(made)["tasks"]]
    assert there == sorted(there, reverse=True) and {*there} == {True, False}
    assert re.search(r"leaves out the conversations of \d of 5 tasks", made)

    (run / "result.json").unlink()
    phases = read_json(run / "phases.json")
    del phases["iter2/failure.jsonl"]
    (run / "phases.json").write_text(json.dumps(phases))
    (run / "iter2/failure.jsonl").write_text("{half")
    (run / "eval-1-target-test.jsonl").unlink()
    made = page(run)
    assert "14 phases so far, the last iter2/target.jsonl" in made
    runs = data_of(made)["tasks"][2]["runs"]
    assert [r["iteration"] for r in runs if r["agent"] == "failure"] == [1]

    (run / "phases.json").unlink()
    made = page(run)
    assert "0 phases so far" in made and data_of(made)["tasks"] == []


def test_the_page_of_a_run_of_the_core(small_run):
    """The page has every pair with its margins in training, hence both of its trajectories."""
    pairs = []
    for task in conversations(small_run, 9.0)["tasks"]:
        pairs += [(task["id"], p["trains"], p["first"], p["last"]) for p in task["pairs"]]
    expected = []
    for name in "target", "failure":
        expected += [(row["task"], name, row["first"], row["last"])
                     for row in read_jsonl(small_run / f"iter1/{name}-agent/margins.jsonl")]
    assert sorted(pairs) == sorted(expected)
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


@needs_browser
def test_the_policy_lets_the_page_work_and_its_address_names_a_task(run, tmp_path):
    shown = in_browser(tmp_path, page(run), fragment="webshop-train-1")
    assert re.search(r'<p id="id"[^>]*>webshop-train-1</p>', shown)
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
    assert "".join(told.pop("said")).count(HOSTILE) == 2
    assert told == {
        "pwned": 0, "broken": None, "found": ["train-2"], "hash": "#webshop-train-0",
        "listed": {
            "all": "train-3 train-1 train-0 train-2 test-0", "pairs": "train-1 train-0",
            "hard": "train-3 train-0 test-0",  # failures of 0.7, 0.9 and 0.8, at least 0.6
            "solved": "train-2", "failed": "train-3 train-1 train-0 test-0",
            "better": "train-0 test-0", "worse": ""},
        "squares": "bad hard hard bad",  # means: student 0.2, 0.7; failure agent 0.9, 0.1
        "fork": ["failure 0.25 > student 0.5||-|-|-|-|-"],  # no step used it
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

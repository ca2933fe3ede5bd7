// The task browser of a page: its list, its filters, and one task's conversations side by side.
// What a run's files say becomes text nodes only.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const ENDINGS = {done: "done", budget: "out of steps", context: "out of context"};
const AT_ONCE = 200; // rows of the list; more on demand

// ---------------------------------------------------------------------------------- reading

function textOf(message) { // a number of a text, -1 - n where the agent wrote it
  return data.texts[message < 0 ? -1 - message : message].map(n => data.pieces[n]).join("");
}

function read(row) { // a trajectory: its fields by name, and its turns
  const run = Object.fromEntries(data.fields.map((field, n) => [field, row[n]]));
  run.opening = [];
  run.turns = [];
  for (const message of run.messages || []) {
    if (message < 0) run.turns.push({reply: textOf(message), page: null});
    else if (run.turns.length) run.turns[run.turns.length - 1].page = textOf(message);
    else run.opening.push(textOf(message));
  }
  return run;
}

const actionOf = reply => {
  const at = reply.lastIndexOf("Action:");
  return {thought: at < 0 ? "" : reply.slice(0, at), action: at < 0 ? reply : reply.slice(at + 7)};
};
const plain = reply => actionOf(reply).action.split(/\s+/).filter(Boolean).join(" ");

function partingTurn(a, b) { // the first turn with different actions, from 0; null if there is none
  for (let n = 0; n < Math.max(a.turns.length, b.turns.length); n++)
    if (!a.turns[n] || !b.turns[n] || plain(a.turns[n].reply) !== plain(b.turns[n].reply)) return n;
  return null;
}

const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const grade = reward => reward >= data.success ? "good" : reward >= data.hard ? "hard" : "bad";
const show = reward => reward.toFixed(reward >= data.success || reward === 0 ? 0 : 2);
const fixed = (x, digits) => (Number(x.toFixed(digits)) < 0 ? "\u2212" : "") + Math.abs(x).toFixed(digits);
const signed = x => (x > 0 ? "+" : "") + fixed(x, 2);

const tasks = data.tasks.map((task, order) => {
  const at = Object.fromEntries(data.fields.map((field, n) => [field, n]));
  const rows = task.runs.filter(row => row[at.agent] !== "expert");
  const course = {}; // agent -> [[iteration, mean reward], ...]
  for (const agent of new Set(rows.map(row => row[at.agent]))) {
    const by = new Map();
    for (const row of rows) if (row[at.agent] === agent)
      by.set(row[at.iteration], [...(by.get(row[at.iteration]) || []), row[at.reward]]);
    course[agent] = [...by].sort((a, b) => a[0] - b[0]).map(([i, all]) => [i, mean(all)]);
  }
  const target = (course.target || []).map(x => x[1]);
  const second = Object.entries(course).filter(x => x[0] !== "target").flatMap(x => x[1]);
  const failures = rows.map(row => row[at.reward]).filter(r => r < data.success);
  return {...task, order, course,
    words: (task.id + " " + task.say).toLowerCase(),
    hardest: failures.length ? Math.max(...failures) : null,
    reward: target.length ? target[target.length - 1] : null,
    change: target.length > 1 ? target[target.length - 1] - target[0] : null,
    above: rows.some(row => row[at.agent] !== "target" && row[at.reward] < data.success
      && rows.some(other => other[at.agent] === "target" && other[at.iteration] === row[at.iteration]
        && other[at.reward] < row[at.reward])),
    changed: Object.values(course).some(points => points.some(p => p[1] !== points[0][1]))};
});
const agents = [...new Set(tasks.flatMap(task => Object.keys(task.course)))];

// ----------------------------------------------------------------------------------- making

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {}))
    if (value !== null && value !== undefined && value !== false)
      name in element && !name.startsWith("aria") ? element[name] = value : element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// Characters that show nothing or turn the reading order are named, and stay in the text.
const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff])/u;

function visible(text) {
  return text.split(HIDDEN).map((part, n) => n % 2 ? make("span", {className: "control",
    "data-name": "U+" + part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}, part) : part);
}

function written(text, known) { // a page: separators faint, what the opening said already as "..."
  return text.split(/( \[SEP\] | \| )/).flatMap((part, n) => n % 2 ? [make("span", {className: "bar"}, part)]
    : known.has(part.trim()) ? [make("span", {className: "known", title: part}, part)] : visible(part));
}

const pill = reward => make("span", {className: "reward " + grade(reward)}, show(reward));
const agentClass = agent => "agent " + (["expert", "target", "failure", "positive"].includes(agent) ? agent : "other");

// ------------------------------------------------------------------------------------- list

const COLUMNS = {task: "task", reward: "rewards", hardest: "hardest", change: "change"};
let listed = [], drawn = 0, current = null;

const WANTED = {
  all: () => true, hard: t => t.hardest !== null && t.hardest >= data.hard, above: t => t.above,
  pairs: t => t.pairs.length > 0, "no-pairs": t => t.pairs.length === 0,
  solved: t => t.reward !== null && t.reward >= data.success,
  failed: t => t.reward !== null && t.reward < data.success,
};
const COURSES = {
  all: () => true, changed: t => t.changed, same: t => !t.changed,
  better: t => t.change > 1e-9, worse: t => t.change < -1e-9,
};

function ordered(found, by) {
  if (by === "telling") return found.sort((a, b) => a.order - b.order);
  if (by === "task" || by === "-task") {
    const sign = by === "task" ? 1 : -1;
    return found.sort((a, b) => sign * a.id.localeCompare(b.id, "en", {numeric: true}));
  }
  const sign = by.startsWith("-") ? -1 : 1, key = by.replace("-", "");
  const value = key === "pairs" ? t => t.pairs.length : t => t[key];
  return found.sort((a, b) => (value(a) === null) - (value(b) === null)
    || sign * (value(a) - value(b)) || a.order - b.order);
}

function filter() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  listed = ordered(tasks.filter(t => words.every(word => t.words.includes(word))
    && ($("split").value === "all" || t.split === $("split").value)
    && WANTED[$("show").value](t) && COURSES[$("course").value](t)), $("sort").value);
  $("count").textContent = `${listed.length} of ${tasks.length} tasks`;
  drawn = 0;
  $("list").replaceChildren(table());
  $("list").scrollTop = 0;
  grow();
}

function table() {
  const by = $("sort").value;
  const heads = Object.entries(COLUMNS).map(([key, name]) => {
    const now = by === key ? "ascending" : by === "-" + key ? "descending" : null;
    const turned = now ? (now === "ascending" ? "-" + key : key) : key === "task" ? key : "-" + key;
    return make("th", {scope: "col", className: key === "task" ? "left" : "", "aria-sort": now},
      make("button", {type: "button", title: {reward: "each agent's reward in each iteration, a row an agent; sorted by the target's last",
        hardest: "highest reward of a failure", change: "of the target's reward, last minus first",
        task: "by name"}[key], onclick: () => sortBy(turned)},
        name + (now ? (now === "ascending" ? " \u2191" : " \u2193") : "")));
  });
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}));
}

function sortBy(value) {
  if (![...$("sort").options].some(option => option.value === value))
    $("sort").append(make("option", {value}, "by name, backwards"));
  $("sort").value = value;
  filter();
  const sorted = $("list").querySelector("th[aria-sort] button");
  if (sorted) sorted.focus();
}

function grow() {
  const body = $("list").querySelector("tbody"), upTo = Math.min(listed.length, drawn + AT_ONCE);
  body.append(...listed.slice(drawn, upTo).map(row));
  drawn = upTo;
  const button = $("list").querySelector(".more");
  if (button) button.remove();
  if (drawn < listed.length)
    $("list").append(make("button", {type: "button", className: "plain more", onclick: grow},
      `${Math.min(AT_ONCE, listed.length - drawn)} more`));
}

function row(task) {
  const squares = agents.filter(agent => task.course[agent]).map(agent => make("div", {},
    make("span", {className: "squares", role: "img", "aria-label": said(agent, task), title: said(agent, task)},
      ...task.course[agent].slice(-8).map(([, reward]) => make("i", {className: grade(reward)})))));
  return make("tr", {"data-task": task.id, "aria-current": current && current.id === task.id ? "true" : null,
    onclick: () => open(task)},
    make("td", {className: "left"}, make("button", {type: "button"}, ...visible(task.say || task.id)),
      make("small", {}, ...visible(task.id))),
    make("td", {}, ...squares),
    make("td", {}, task.hardest === null ? "\u2013" : show(task.hardest)),
    make("td", {}, task.change === null ? "\u2013" : signed(task.change)));
}

const said = (agent, task) => `${agent}: ` + task.course[agent].map(([i, r]) => `${show(r)} in iteration ${i}`).join(", ");

// ------------------------------------------------------------------------------ one task

let runs = [], columns = [], pair = null, iteration = null;

function open(task, quiet) {
  current = task;
  runs = task.runs.map(read);
  const explored = runs.filter(run => run.agent !== "expert" && !/^(eval|chat)/.test(run.from));
  iteration = explored.length ? Math.max(...explored.map(run => run.iteration)) : null;
  columns = explored.length ? ofIteration(iteration) : firstAndLast();
  pair = null;
  draw();
  for (const tr of $("list").querySelectorAll("tr[data-task]"))
    tr.dataset.task === task.id ? tr.setAttribute("aria-current", "true") : tr.removeAttribute("aria-current");
  if (quiet) return;
  history.replaceState(null, "", "#" + encodeURIComponent(task.id));
  $("detail").scrollTop = 0;
  if (matchMedia("(max-width: 900px)").matches) $("detail").scrollIntoView();
}

const ofIteration = i => runs.map((run, n) => n).filter(n => runs[n].agent === "expert" || runs[n].iteration === i);

function firstAndLast() { // of an evaluated task: the target before and after, the others after
  const of = agent => runs.map((run, n) => n).filter(n => runs[n].agent === agent);
  const found = new Set(of("expert"));
  for (const agent of new Set(runs.map(run => run.agent))) {
    const mine = of(agent);
    if (agent === "target") found.add(mine[0]);
    found.add(mine[mine.length - 1]);
  }
  return [...found].sort((a, b) => a - b);
}

function choose(i) { // an iteration, or "all"
  iteration = i;
  pair = null;
  columns = i === "all" ? runs.map((run, n) => n) : ofIteration(i);
  draw();
}

function draw() {
  const task = current, first = runs[columns[0]] || runs[0];
  $("detail").replaceChildren(
    make("p", {className: "steps"},
      make("button", {type: "button", className: "plain back", onclick: toList}, "to the list"),
      make("button", {type: "button", className: "plain", onclick: () => step(-1), "aria-label": "previous task"}, "\u2039"),
      make("button", {type: "button", className: "plain", onclick: () => step(1), "aria-label": "next task"}, "\u203a")),
    make("div", {className: "head"}, make("h3", {}, ...visible(task.say || task.id)),
      make("p", {className: "id"}, ...visible(task.id)),
      first.opening.length ? make("details", {}, make("summary", {}, "What the agent reads first"),
        make("div", {className: "opening"}, ...visible(first.opening.join("\n\n")))) : null),
    make("div", {className: "overview"}, map(), pairs()), talk());
}

function map() { // agents x iterations: every trajectory of the task, to be shown or hidden
  const iterations = [...new Set(runs.filter(run => run.agent !== "expert").map(run => run.iteration))].sort((a, b) => a - b);
  const chip = n => make("button", {type: "button", className: "chip " + grade(runs[n].reward),
    "aria-pressed": String(columns.includes(n)), title: `${runs[n].from}, rollout ${runs[n].rollout}`,
    "aria-label": `${runs[n].agent}, iteration ${runs[n].iteration}, rollout ${runs[n].rollout}: reward ${show(runs[n].reward)}`,
    onclick: () => {
      columns = columns.includes(n) ? columns.filter(m => m !== n) : [...columns, n].sort((a, b) => a - b);
      pair = null;
      redraw(`.chip[title="${CSS.escape(runs[n].from)}, rollout ${runs[n].rollout}"]`);
    }}, show(runs[n].reward));
  const head = i => make("button", {type: "button", className: "plain", "aria-pressed": String(iteration === i),
    onclick: () => { choose(i); focusOn(`[data-iteration="${i}"]`); }, "data-iteration": String(i)}, String(i));
  const body = [...new Set(runs.map(run => run.agent))].map(agent => {
    const cells = agent === "expert"
      ? [make("td", {colSpan: iterations.length + 1}, ...runs.map((r, n) => n).filter(n => runs[n].agent === agent).map(chip))]
      : iterations.map(i => make("td", {}, ...runs.map((r, n) => n)
          .filter(n => runs[n].agent === agent && runs[n].iteration === i).map(chip)));
    return make("tr", {}, make("th", {scope: "row", className: agentClass(agent)}, ...visible(agent)), ...cells);
  });
  return make("div", {className: "map", tabIndex: 0, role: "region", "aria-label": "Trajectories of this task, by agent and iteration"}, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}, "iteration"),
      ...iterations.map(i => make("th", {scope: "col"}, head(i))),
      iterations.length > 1 ? make("th", {}, head("all")) : make("th"))),
    make("tbody", {}, ...body)));
}

function focusOn(selector) {
  const found = $("detail").querySelector(selector);
  if (found) found.focus({preventScroll: true});
}

function redraw(selector) {
  draw();
  focusOn(selector);
}

function pairs() {
  const all = current.pairs.map((p, n) => [n, ...p]);
  const shown = typeof iteration === "number" ? all.filter(p => p[1] === iteration) : all;
  if (!all.length) return null;
  const lines = shown.map(([n, i, trains, kind, chosen, rejected, weight, sft, before, after]) => {
    const a = runs[chosen], b = runs[rejected], parted = partingTurn(a, b);
    const expert = runs.find(run => run.agent === "expert");
    const longest = expert && data.cut_turns >= 0 ? expert.steps + data.cut_turns : Infinity;
    const name = run => make("span", {className: agentClass(run.agent)}, ...visible(run.agent),
      run.iteration && run.iteration !== i ? ` (${run.iteration})` : "");
    const move = (what, digits) => !before || !after ? "\u2013"
      : `${fixed(before[what], digits)} \u2192 ${fixed(after[what], digits)}`;
    return make("tr", {"aria-selected": String(pair === n), "data-pair": String(n)},
      make("td", {className: "left"}, make("button", {type: "button", onclick: () => {
        pair = pair === n ? null : n;
        columns = pair === null ? ofIteration(i) : [chosen, rejected];
        redraw(`tr[data-pair="${n}"] button`);
      }}, name(a), " ", show(a.reward), make("span", {className: "arrow"}, ">"), name(b), " ", show(b.reward)),
        b.steps > longest ? make("small", {}, `its first ${longest} turns`) : null),
      make("td", {className: "left"}, ...visible(trains), typeof iteration === "number" ? "" : `, ${i}`),
      make("td", {}, parted === null || !a.messages || !b.messages ? "\u2013" : String(parted + 1)),
      make("td", {}, weight.toFixed(2)), make("td", {}, sft.toFixed(2)),
      make("td", {}, move(2, 2)), make("td", {}, move(0, 1)), make("td", {}, move(1, 1)));
  });
  const heads = [["pair", "left"], ["trains", "left"], ["parts at turn"], ["weight"], ["SFT weight"], ["margin"],
    ["log p chosen"], ["log p rejected"]];
  return make("div", {className: "pairs"}, shown.length ? make("div", {className: "scroll", tabIndex: 0, role: "region",
    "aria-label": "Pairs made of these trajectories"}, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map(([text, side]) => make("th", {scope: "col", className: side || ""}, text)))),
    make("tbody", {}, ...lines))) : make("p", {className: "note"}, "No pair was made of these trajectories."),
    shown.length ? make("p", {className: "note"}, shown.some(p => p[8] && p[9])
      ? "Margin and log-probabilities in nats, before \u2192 after this training. Choose a pair to see its two sides."
      : "The margins of these pairs were not measured. Choose a pair to see its two sides.") : null);
}

function talk() { // the chosen trajectories, one column each, turn beside turn
  const shown = columns.map(n => runs[n]);
  if (!shown.length) return make("p", {className: "note"}, "Choose a reward above to see how it came about.");
  if (shown.every(run => !run.messages)) return make("p", {className: "note"}, "The page had no room for these conversations; run.sh page --megabytes makes more.");
  const parted = shown.map((run, n) => n && run.messages && shown[0].messages ? partingTurn(shown[0], run) : null);
  const cells = shown.map((run, n) => who(run, n, parted[n], shown[0]));
  const known = new Set(shown[0].opening.flatMap(text => text.split(/ \[SEP\] | \| |\n/)).map(x => x.trim()).filter(x => x.length > 40));
  const longest = Math.max(...shown.map(run => run.turns.length));
  for (let turn = 0; turn <= longest; turn++) for (const [n, run] of shown.entries())
    cells.push(turn < run.turns.length ? cell(run, turn, n ? parted[n] : undefined, known, shown[0])
      : turn === run.turns.length ? make("div", {className: "end"}, pill(run.reward), " " + ending(run)) : make("div"));
  const grid = make("div", {className: "talk", role: "group", "aria-label": "Conversations side by side", tabIndex: 0}, ...cells);
  grid.style.gridTemplateColumns = `repeat(${shown.length}, minmax(min(17rem, 78vw), 1fr))`;
  return grid;
}

const ending = run => [ENDINGS[run.ended] || run.ended, run.raw !== null && run.raw !== run.reward ? `raw reward ${run.raw}` : "",
  run.cut ? `${run.cut} cut repl${run.cut > 1 ? "ies" : "y"}` : ""].filter(Boolean).join(", ");

function who(run, n, parted, first) {
  const side = pair === null ? null : n ? "rejected" : "chosen";
  const where = run.agent === "expert" ? "" : ` \u00b7 iteration ${run.iteration}` + (runs.some(other => other !== run
    && other.agent === run.agent && other.iteration === run.iteration) ? ` \u00b7 rollout ${run.rollout}` : "");
  return make("div", {className: "who " + (side || "")},
    make("span", {className: agentClass(run.agent)}, ...visible(run.agent)), where + " ", pill(run.reward), " ",
    side ? make("span", {className: "tag " + side}, side) : null,
    run.joined && run.agent !== "expert" ? make("span", {className: "tag chosen"}, "joined the experts") : null,
    make("p", {}, `${run.steps} step${run.steps === 1 ? "" : "s"}` + (!n || !run.messages || !first.messages ? ""
      : parted === null ? `, acts as the ${first.agent} does` : `, parts from the ${first.agent} at turn ${parted + 1}`)));
}

function cell(run, turn, parted, known, first) {
  const {reply, page} = run.turns[turn], {thought, action} = actionOf(reply);
  const state = parted === undefined ? "" : parted === null || turn < parted ? "same" : turn === parted ? "parts" : "parted";
  const body = [make("span", {className: "number"}, String(turn + 1))];
  if (state === "parts") body.push(make("div", {className: "here"}, `parts from the ${first.agent} here`));
  if (thought.trim()) body.push(make("div", {className: "thought"}, ...visible(thought.replace(/^Thought:\s*/, "").trim())));
  body.push(make("div", {className: "action"}, ...visible(action.trim())));
  if (page !== null) {
    const text = make("div", {className: "page clamped"}, ...written(page, known));
    body.push(text);
    if (page.length > 240 || page.split("\n").length > 5) body.push(make("button", {type: "button", className: "all",
      "aria-expanded": "false", onclick: event => {
        const closed = text.classList.toggle("clamped");
        event.target.textContent = closed ? "all of it" : "less";
        event.target.setAttribute("aria-expanded", String(!closed));
      }}, "all of it"));
  }
  return make("div", {className: "turn " + state}, ...body);
}

// ------------------------------------------------------------------------------------ start

function step(by) {
  const at = listed.findIndex(task => current && task.id === current.id), to = at < 0 ? 0 : at + by;
  if (to < 0 || to >= listed.length) return;
  while (to >= drawn) grow();
  open(listed[to]);
  const tr = $("list").querySelectorAll("tr[data-task]")[to];
  tr.scrollIntoView({block: "nearest"});
  if ($("list").contains(document.activeElement)) tr.querySelector("button").focus({preventScroll: true});
}

function toList() {
  const chosen = $("list").querySelector("tr[aria-current] button") || $("list");
  chosen.focus({preventScroll: true});
  chosen.scrollIntoView({block: "nearest"});
}

function turnIteration(by) {
  const found = [...$("detail").querySelectorAll("[data-iteration]")].map(button => button.dataset.iteration);
  const to = found.indexOf(String(iteration)) + by;
  if (to >= 0 && to < found.length) choose(found[to] === "all" ? "all" : Number(found[to]));
}

function keys(event) {
  const typing = event.target instanceof Element && event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") toList();
  else if (typing) return;
  else if (event.key === "j" || event.key === "ArrowDown" && $("list").contains(event.target)) step(1);
  else if (event.key === "k" || event.key === "ArrowUp" && $("list").contains(event.target)) step(-1);
  else if (event.key === "h") turnIteration(-1);
  else if (event.key === "l") turnIteration(1);
  else if (event.key === "/") $("search").focus();
  else return;
  event.preventDefault();
}

function named() { // the task that the address names
  try {
    const id = decodeURIComponent(location.hash.slice(1));
    return tasks.find(task => task.id === id);
  } catch (error) {
    return undefined;
  }
}

if ($("browser") && tasks.length) {
  const splits = [...new Set(tasks.map(task => task.split))];
  $("split").append(...["all", ...splits].map(split => make("option", {value: split}, split)));
  for (const id of ["filters", "browser", "keys"]) $(id).hidden = false;
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", event => event.preventDefault());
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", () => { if (named()) open(named()); });
  filter();
  open(named() || tasks[0], true);
}

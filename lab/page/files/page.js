// The task browser of a page: the list of tasks, its filters, and the conversations of one task,
// side by side. Content of a run's files becomes text nodes only, so it is never markup.

const $ = id => document.getElementById(id);
const bytes = Uint8Array.from(atob($("data").textContent), c => c.charCodeAt(0));
const data = await new Response(
  new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
const ENDINGS = {done: "done", turn_limit: "turn limit", context_limit: "context limit", refused: "refused"};
// Classes in page.css for the colours of agents. Agents with other names share those in OTHERS.
const KNOWN = ["expert", "target", "failure", "positive"], OTHERS = ["one", "two", "three"];
const PHONE = "(max-width: 900px)"; // as in page.css

// ----------------------------------------------------------------------------------- data

function read(run) { // returns a trajectory with its opening and its exchanges
  const [opening, exchanges] = [[], []]; // an exchange is a reply and its observation, if any
  for (const [n, {role, content}] of (run.messages || []).entries()) {
    if (n < run.opening) opening.push(content);
    else if (role === "assistant") exchanges.push({reply: content, page: null});
    else exchanges[exchanges.length - 1].page = content;
  }
  return {...run, opening, exchanges};
}

function split(reply) { // returns the thought before the action, and the action
  const start = reply.lastIndexOf("Action:");
  if (start < 0) return {thought: "", action: reply};
  return {thought: reply.slice(0, start).replace(/^\s*Thought:/, ""),
    action: reply.slice(start + 7)};
}

const words = text => text.split(/\s+/).filter(Boolean);
const acts = exchange => exchange && words(split(exchange.reply).action).join(" ");

// Returns the index of the first turn with different actions, or null if there is none.
function partingTurn(a, b) {
  if (!a.messages || !b.messages) return null;
  for (let n = 0; n < Math.max(a.exchanges.length, b.exchanges.length); n++)
    if (acts(a.exchanges[n]) !== acts(b.exchanges[n])) return n;
  return null;
}

function course(runs, agent) { // returns [iteration, mean reward] pairs of an agent, in order
  const by = new Map();
  for (const run of runs.filter(run => run.agent === agent))
    by.set(run.iteration, [...(by.get(run.iteration) || []), run.reward]);
  return [...by].sort((a, b) => a[0] - b[0])
    .map(([i, all]) => [i, all.reduce((a, b) => a + b) / all.length]);
}

// Returns true if another agent's failure has a higher reward than the target in some iteration.
const isAbove = runs => runs.some(a => a.agent !== "target" && a.reward < data.success
  && runs.some(b => b.agent === "target" && b.iteration === a.iteration && b.reward < a.reward));

const tasks = data.tasks.map((task, order) => {
  const runs = task.runs.filter(run => run.agent !== "expert");
  const courses = Object.fromEntries([...new Set(runs.map(run => run.agent))]
    .map(agent => [agent, course(runs, agent)]));
  const target = (courses.target || []).map(point => point[1]);
  const failures = runs.map(run => run.reward).filter(reward => reward < data.success);
  return {...task, order, courses,
    words: `${task.id} ${task.say}`.toLowerCase(),
    hardest: failures.length ? Math.max(...failures) : null,
    reward: target.length ? target[target.length - 1] : null,
    change: target.length > 1 ? target[target.length - 1] - target[0] : null,
    above: isAbove(runs),
    changed: Object.values(courses).some(points => points.some(p => p[1] !== points[0][1]))};
});
const agents = [...new Set([...data.agents, // in the order in which the run made them
  ...tasks.flatMap(task => Object.keys(task.courses))])];

// ------------------------------------------------------------------------------- elements

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

const say = (tag, className, ...children) => make(tag, {className}, ...children);
const button = (className, label, onclick, more) =>
  make("button", {type: "button", className, onclick, ...more}, ...[label].flat());
const region = (className, label, ...children) =>
  make("div", {className, tabIndex: 0, role: "region", "aria-label": label}, ...children);
const table = (heads, rows) => make("table", {},
  make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));

// Invisible characters and those that change the text direction stay in the text. The page shows
// their names.
const HIDDEN = new RegExp("([\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200b-\\u200f"
  + "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ud800-\\udfff])", "u");

function visible(text) {
  const name = c => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return text.split(HIDDEN).map((part, n) =>
    n % 2 ? make("span", {className: "control", "data-name": name(part)}, part) : part);
}

function written(page, known) { // parts that the opening contains are shortened to "..."
  return page.split(/( \[SEP\] | \| )/).flatMap(part => known.has(part.trim())
    ? [make("span", {className: "known", title: part}, part)] : visible(part));
}

const grade = reward =>
  reward >= data.success ? "good" : reward >= data.hard ? "hard" : "bad";
const show = reward => reward.toFixed(Number.isInteger(reward) ? 0 : 2);
const fixed = (x, digits) =>
  (Number(x.toFixed(digits)) < 0 ? "\u2212" : "") + Math.abs(x).toFixed(digits);
const signed = x => (x > 0 ? "+" : "") + fixed(x, 2);
const pill = reward => say("span", "reward " + grade(reward), show(reward));
function classOf(agent) {
  const index = agents.filter(name => !KNOWN.includes(name)).indexOf(agent);
  return "agent " + (KNOWN.includes(agent) ? agent : OTHERS[index % OTHERS.length]);
}
const named = agent => say("span", classOf(agent), ...visible(agent));

// ------------------------------------------------------------------------------------- list

const COLUMNS = [["task", ""], ["rewards", "rewards by iteration, one row per agent"],
  ["hardest", "highest reward of a failure"],
  ["change", "last reward of the target minus its first one"]];
const WANTED = {
  all: () => true,
  hard: t => t.hardest !== null && t.hardest >= data.hard,
  above: t => t.above,
  pairs: t => t.pairs.length > 0,
  "no-pairs": t => t.pairs.length === 0,
  solved: t => t.reward !== null && t.reward >= data.success,
  failed: t => t.reward !== null && t.reward < data.success};
const COURSES = {
  all: () => true,
  changed: t => t.changed,
  same: t => !t.changed,
  better: t => t.change > 1e-9,
  worse: t => t.change < -1e-9};
let listed = [], current = null;

function ordered(list, by) {
  const sign = by.startsWith("-") ? -1 : 1, key = by.replace("-", "");
  if (key === "task")
    return list.sort((a, b) => a.id.localeCompare(b.id, "en", {numeric: true}));
  const value = t => key === "telling" ? t.order : key === "pairs" ? t.pairs.length : t[key];
  return list.sort((a, b) => (value(a) === null) - (value(b) === null)
    || sign * (value(a) - value(b)) || a.order - b.order);
}

function filter() {
  const wanted = words($("search").value.toLowerCase()), part = $("split").value;
  const fits = t => wanted.every(word => t.words.includes(word))
    && (part === "all" || t.split === part)
    && WANTED[$("show").value](t) && COURSES[$("course").value](t);
  listed = ordered(tasks.filter(fits), $("sort").value);
  $("count").textContent = `${listed.length} of ${tasks.length} tasks`;
  $("list").replaceChildren(table(COLUMNS.map(([name, title]) =>
    make("th", {scope: "col", title, className: name === "task" ? "left" : ""}, name)),
    listed.map(row)));
  $("list").scrollTop = 0;
  mark();
}

function row(task) {
  const rewards = agent => `${agent}: ` + task.courses[agent]
    .map(([i, reward]) => `${show(reward)} in iteration ${i}`).join(", ");
  const squares = agent => make("div", {}, make("span",
    {className: "squares", role: "img", "aria-label": rewards(agent), title: rewards(agent)},
    ...task.courses[agent].slice(-8).map(([, reward]) => say("i", grade(reward)))));
  return make("tr", {"data-task": task.id, onclick: () => open(task)},
    say("td", "left", button("", visible(task.say || task.id)),
      make("small", {}, ...visible(task.id))),
    make("td", {}, ...agents.filter(agent => task.courses[agent]).map(squares)),
    make("td", {}, task.hardest === null ? "\u2013" : show(task.hardest)),
    make("td", {}, task.change === null ? "\u2013" : signed(task.change)));
}

// Marks the row of the current task. It is the only row in the order of the Tab key.
function mark() {
  const rows = [...$("list").querySelectorAll("tr[data-task]")];
  const chosen = rows.find(tr => current && tr.dataset.task === current.id);
  for (const tr of rows) {
    if (tr === chosen) tr.setAttribute("aria-current", "true");
    else tr.removeAttribute("aria-current");
    tr.querySelector("button").tabIndex = tr === (chosen || rows[0]) ? 0 : -1;
  }
}

// --------------------------------------------------------------------------------- one task

// The trajectories of the current task, the indices of those that are shown, the selected pair (or
// null), and the selected iteration (null for none, or "all").
let runs = [], columns = [], pair = null, iteration = null;

// GRPO plays a task again in each step, other methods in each iteration.
const unit = run => run.from.endsWith("/episodes") ? "step" : "iteration";
const numbers = wanted => runs.map((run, n) => n).filter(n => wanted(runs[n]));
const ofIteration = i => numbers(run => run.agent === "expert" || run.iteration === i);

function open(task, atStart) {
  current = task;
  runs = task.runs.map(read);
  pair = iteration = null;
  const explored = runs.filter(run => run.agent !== "expert" && !run.from.startsWith("eval"));
  if (explored.length) {
    iteration = Math.max(...explored.map(run => run.iteration));
    columns = ofIteration(iteration);
  } else { // an evaluated task: the first result of the target, and the last one of each agent
    const first = runs.findIndex(run => run.agent === "target");
    const again = n => runs.slice(n + 1).some(run => run.agent === runs[n].agent);
    columns = runs.map((run, n) => n).filter(n => n === first || !again(n));
  }
  draw();
  mark();
  if (atStart) return;
  history.replaceState(null, "", addressOf(task));
  $("detail").scrollTop = 0;
  if (matchMedia(PHONE).matches) $("detail").scrollIntoView();
}

function choose(i) { // selects an iteration, or "all"
  iteration = i;
  pair = null;
  columns = i === "all" ? numbers(() => true) : ofIteration(i);
  draw();
}

function draw() {
  const task = current, shown = columns.map(n => runs[n]);
  const opening = (shown[0] || runs[0]).opening;
  $("detail").replaceChildren(
    say("p", "steps", button("plain back", "back to the list", toList),
      button("plain", "\u2039", () => step(-1), {"aria-label": "previous task"}),
      button("plain", "\u203a", () => step(1), {"aria-label": "next task"})),
    say("div", "head", make("h3", {}, ...visible(task.say || task.id)),
      say("p", "id", ...visible(task.id)),
      opening.length ? make("details", {}, make("summary", {}, "First messages to the agent"),
        say("div", "opening", ...visible(opening.join("\n\n")))) : ""),
    say("div", "overview", map(), pairs()), talk(shown));
  fit();
}

function fit() { // shows the button "show all" under texts that are cut off
  const cut = text => !text.classList.contains("clamped")
    || text.scrollHeight > text.clientHeight + 1;
  const texts = [...$("detail").querySelectorAll(".page")], isCut = texts.map(cut);
  for (const [n, text] of texts.entries()) text.nextElementSibling.hidden = !isCut[n];
}

function redraw(selector) { // draws again, and moves the focus back to the element
  draw();
  $("detail").querySelector(selector)?.focus({preventScroll: true});
}

// Returns the map of all trajectories of the task, agents x iterations. A click shows or hides one.
function map() {
  const iterations = [...new Set(runs.filter(run => run.agent !== "expert")
    .map(run => run.iteration))].sort((a, b) => a - b);
  const whole = i => button("plain", String(i), () => {
    choose(i);
    redraw(`[data-iteration="${i}"]`);
  }, {"aria-pressed": String(iteration === i), "data-iteration": String(i)});
  const body = [...new Set(runs.map(run => run.agent))].map(agent => {
    const cells = agent === "expert"
      ? [make("td", {colSpan: iterations.length + 1},
        ...numbers(run => run.agent === agent).map(chip))]
      : iterations.map(i => make("td", {},
        ...numbers(run => run.agent === agent && run.iteration === i).map(chip)));
    return make("tr", {}, make("th", {scope: "row"}, named(agent)), ...cells);
  });
  return region("map", "Trajectories of this task, by agent and iteration", table(
    [make("th", {}, runs.some(run => unit(run) === "step") ? "step" : "iteration"),
      ...iterations.map(i => make("th", {scope: "col"}, whole(i))),
      make("th", {}, iterations.length > 1 ? whole("all") : "")], body));
}

function chip(n) {
  const run = runs[n], on = columns.includes(n);
  const toggle = () => {
    columns = on ? columns.filter(m => m !== n) : [...columns, n].sort((a, b) => a - b);
    pair = null;
    redraw(`[data-run="${n}"]`);
  };
  return button("chip " + grade(run.reward), show(run.reward), toggle, {
    "aria-pressed": String(on), "data-run": String(n), title: `${run.from}, rollout ${run.rollout}`,
    "aria-label": `${run.agent}, ${unit(run)} ${run.iteration}, rollout ${run.rollout}: reward `
      + show(run.reward)});
}

// Returns the number of turns of a rejected trajectory that training uses (--cut-turns).
function longest() {
  const expert = runs.find(run => run.agent === "expert");
  return expert && data.cut_turns >= 0 ? expert.turns + data.cut_turns : Infinity;
}

const HEADS = [["pair", "left"], ["trains", "left"], ["differs at"], ["weight"], ["SFT weight"],
  ["margin"], ["log p chosen"], ["log p rejected"]];

function pairs() { // returns a table of the pairs of the selected iteration, or of all
  if (!current.pairs.length) return null;
  const all = current.pairs.map((pair, n) => ({...pair, n}));
  const shown = typeof iteration === "number" ? all.filter(p => p.iteration === iteration) : all;
  if (!shown.length)
    return say("p", "note", "These trajectories are in no pair.");
  const measured = shown.some(p => p.first);
  return say("div", "pairs", region("scroll", "Pairs of these trajectories", table(
    HEADS.map(([name, side]) => make("th", {scope: "col", className: side || ""}, name)),
    shown.map(pairRow))),
    say("p", "note", (measured
      ? "Margin and log-probabilities are in nats, in the first \u2192 last training step. "
      : "") + "Select a pair to see its two sides."));
}

function pairRow(made) {
  const {n, iteration: i, trains, kind, chosen, rejected, weight, first, last} = made;
  const a = runs[chosen], b = runs[rejected], parted = partingTurn(a, b);
  const side = run => [named(run.agent), // with a buffer, sides may be from earlier iterations
    run.iteration && run.iteration !== i ? ` (${run.iteration})` : "", ` ${show(run.reward)}`];
  const moved = (what, digits) => make("td", {}, first
    ? `${fixed(first[what], digits)} \u2192 ${fixed(last[what], digits)}` : "\u2013");
  const toggle = () => {
    pair = pair === n ? null : n;
    columns = pair === null ? ofIteration(i) : [chosen, rejected];
    redraw(`tr[data-pair="${n}"] button`);
  };
  return make("tr", {"aria-selected": String(pair === n), "data-pair": String(n), title: kind},
    say("td", "left", button("", [...side(a), say("span", "arrow", ">"), ...side(b)], toggle),
      b.turns > longest() ? make("small", {}, `first ${longest()} turns only`) : null),
    say("td", "left", ...visible(trains), typeof iteration === "number" ? "" : `, ${i}`),
    make("td", {}, parted === null ? "\u2013" : String(parted + 1)),
    make("td", {}, weight.toFixed(2)), make("td", {}, made.sft_weight.toFixed(2)),
    moved(2, 2), moved(0, 1), moved(1, 1));
}

// Returns the shown trajectories, one column each, aligned by turn. Each one is compared with the
// first one.
function talk(shown) {
  if (!shown.length)
    return say("p", "note", "Select a reward above to see its conversation.");
  if (shown.every(run => !run.messages))
    return say("p", "note", "To limit its size, this page leaves out these conversations. "
      + "bash run.sh page RUN --megabytes N makes a larger page.");
  const parted = shown.map((run, n) => n ? partingTurn(shown[0], run) : undefined);
  const known = new Set(shown[0].opening.flatMap(text => text.split(/ \[SEP\] | \| |\n/))
    .map(piece => piece.trim()).filter(piece => piece.length > 40));
  const cells = shown.map((run, n) => who(run, n, parted[n], shown[0]));
  for (let turn = 0; turn <= Math.max(...shown.map(run => run.exchanges.length)); turn++)
    for (const [n, run] of shown.entries()) {
      if (turn < run.exchanges.length) cells.push(cell(run, turn, parted[n], known, shown[0], n));
      else cells.push(turn > run.exchanges.length ? make("div")
        : say("div", "end", pill(run.reward), " ", ending(run)));
    }
  const grid = make("div", {className: "talk", role: "group", tabIndex: 0,
    "aria-label": "Conversations side by side"}, ...cells);
  grid.style.gridTemplateColumns = `repeat(${shown.length}, minmax(min(17rem, 78vw), 1fr))`;
  return grid;
}

function ending(run) {
  const raw = (run.raw_reward ?? run.reward) !== run.reward ? `raw reward ${run.raw_reward}` : "";
  return [ENDINGS[run.ended] || run.ended, raw].filter(Boolean).join(", ");
}

function who(run, n, parted, first) {
  const side = pair === null ? "" : n ? "rejected" : "chosen";
  const several = runs.some(other => other !== run && other.agent === run.agent
    && other.iteration === run.iteration);
  const where = run.agent === "expert" ? "" : ` \u00b7 ${unit(run)} ${run.iteration}`
    + (several ? ` \u00b7 rollout ${run.rollout}` : "");
  const compared = !n || !run.messages || !first.messages ? ""
    : parted === null ? `, same actions as the ${first.agent}`
      : `, differs from the ${first.agent} at turn ${parted + 1}`;
  return say("div", "who " + side, named(run.agent), where + " ", pill(run.reward), " ",
    side ? say("span", "tag " + side, side) : null,
    make("p", {}, `${run.turns} turn${run.turns === 1 ? "" : "s"}${compared}`));
}

function cell(run, turn, parted, known, first, n) {
  const {reply, page} = run.exchanges[turn], {thought, action} = split(reply);
  const state = parted === undefined ? "" : parted === null || turn < parted ? "same"
    : turn === parted ? "parts" : "parted";
  const beyond = pair !== null && n === 1 && turn >= longest();
  return say("div", `turn ${state}${beyond ? " beyond" : ""}`,
    say("span", "number", String(turn + 1)),
    state === "parts" ? say("div", "here", `differs from the ${first.agent} here`) : null,
    beyond && turn === longest() ? say("div", "here", "training leaves out the rest") : null,
    thought.trim() ? say("div", "thought", ...visible(thought.trim())) : null,
    say("div", "action", ...visible(action.trim())),
    ...(page === null ? [] : observation(page, known)));
}

function observation(page, known) {
  const text = say("div", "page clamped", ...written(page, known));
  const more = button("all", "show all", () => {
    const clamped = text.classList.toggle("clamped");
    more.textContent = clamped ? "show all" : "show less";
    more.setAttribute("aria-expanded", String(!clamped));
  }, {"aria-expanded": "false"});
  return [text, more];
}

// ----------------------------------------------------------------------------- keys and start

function step(by) { // opens the next task of the list (1), or the previous one (-1)
  const index = listed.findIndex(task => current && task.id === current.id);
  const to = index < 0 ? 0 : index + by;
  if (to < 0 || to >= listed.length) return;
  const inList = $("list").contains(document.activeElement);
  open(listed[to]);
  const tr = $("list").querySelectorAll("tr[data-task]")[to];
  if (!matchMedia(PHONE).matches) tr.scrollIntoView({block: "nearest"});
  if (inList) tr.querySelector("button").focus({preventScroll: true});
}

function toList() {
  const chosen = $("list").querySelector("td button[tabindex='0']") || $("search");
  chosen.focus({preventScroll: true});
  chosen.scrollIntoView({block: "nearest"});
}

function turnIteration(by) {
  const iterations = [...$("detail").querySelectorAll("[data-iteration]")]
    .map(element => element.dataset.iteration);
  const to = iterations.indexOf(String(iteration)) + by;
  if (to >= 0 && to < iterations.length)
    choose(iterations[to] === "all" ? "all" : Number(iterations[to]));
}

const KEYS = {
  j: () => step(1), k: () => step(-1), h: () => turnIteration(-1), l: () => turnIteration(1),
  "/": () => $("search").focus(), Escape: toList};

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof Element && event.target.matches("input, select, textarea");
  if (typing && event.key !== "Escape") return;
  const inList = $("list").contains(event.target);
  const key = inList && {ArrowDown: "j", ArrowUp: "k"}[event.key] || event.key;
  if (!Object.hasOwn(KEYS, key)) return;
  event.preventDefault();
  KEYS[key]();
}

const addressOf = task => "#" + encodeURIComponent(task.id);
const fromAddress = () => tasks.find(task => addressOf(task) === location.hash);

if ($("browser") && tasks.length) {
  const splits = ["all", ...new Set(tasks.map(task => task.split))];
  $("split").append(...splits.map(value => make("option", {value}, value)));
  for (const id of ["filters", "browser", "keys"]) $(id).hidden = false;
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", event => event.preventDefault());
  document.addEventListener("keydown", keys);
  addEventListener("resize", fit);
  addEventListener("hashchange", () => { if (fromAddress()) open(fromAddress()); });
  current = fromAddress() || tasks[0];
  filter();
  open(current, true);
}

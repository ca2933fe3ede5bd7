// The task browser of a page: the list of tasks, and the trajectories of one task side by side.
// Content of a run's files becomes text nodes only, so it is never markup.

const $ = id => document.getElementById(id);
const bytes = Uint8Array.from(atob($("data").textContent), c => c.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
const {tasks, target, success, hard, cut_turns} = await new Response(unpacked).json();

for (const {runs, pairs} of tasks)
  for (const pair of pairs) pair.sides = [runs[pair.chosen], runs[pair.rejected]];
const isExpert = run => run.agent === "expert";
const played = task => task.runs.filter(run => !isExpert(run));
const agents = [...new Set(tasks.flatMap(played).map(run => run.agent))];

// ------------------------------------------------------------------------------- elements

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const text = (tag, className, ...children) => make(tag, {className}, ...children);
const button = (name, onclick, ...children) =>
  make("button", {type: "button", name, onclick}, ...children);
const show = number => String(Number(number.toFixed(2)));
const grade = reward => reward >= success ? "good" : reward >= hard ? "hard" : "bad";
const colour = agent => agent === target ? "target"
  : ["expert", "failure"].includes(agent) ? agent : "other";
const named = (agent, number = "") => text("span", `agent ${colour(agent)}`, agent, number);

function label(run) { // returns the agent, its rollout if there are several, and the reward
  const several = task.runs.filter(other => other.agent === run.agent
    && other.iteration === run.iteration).length > 1;
  return [named(run.agent, several ? ` ${run.rollout}` : ""), " ",
    text("span", `reward ${grade(run.reward)}`, show(run.reward))];
}

// ----------------------------------------------------------------------------------- list

function course(task, agent) { // returns the mean reward of each iteration
  const rewards = {}; // the keys of an object are in ascending order if they are integers
  for (const run of task.runs)
    if (run.agent === agent) (rewards[run.iteration] ??= []).push(run.reward);
  return Object.values(rewards).map(all => all.reduce((a, b) => a + b) / all.length);
}

const last = task => course(task, target).at(-1);
const change = task => last(task) - course(task, target)[0];
const FILTERS = {
  all: () => true,
  hard: task => played(task).some(run => grade(run.reward) === "hard"),
  pairs: task => task.pairs.length > 0,
  solved: task => last(task) >= success,
  failed: task => last(task) < success,
  better: task => change(task) > 1e-9,
  worse: task => change(task) < -1e-9};

function filter() {
  const words = $("search").value.toLowerCase().split(/\s+/);
  const listed = tasks.filter(FILTERS[$("show").value]).filter(task =>
    words.every(word => `${task.id} ${task.say}`.toLowerCase().includes(word)));
  $("count").textContent = `${listed.length} of ${tasks.length} tasks`;
  $("list").replaceChildren(...listed.map(item));
}

// The tasks are radio buttons, so that the arrow keys move through the list.
function item(other) {
  const radio = make("input", {type: "radio", name: "task", value: other.id,
    checked: other === task, onclick: () => select(other)});
  const squares = agents.map(agent => {
    const rewards = course(other, agent);
    return make("div", {role: "img", title: `${agent}: ${rewards.map(r => show(r)).join(", ")}`},
      ...rewards.slice(-8).map(reward => text("i", grade(reward))));
  });
  return make("label", {}, radio, text("span", "say", other.say || other.id),
    text("span", "squares", ...squares), make("small", {}, other.id));
}

// ------------------------------------------------------------------------------- one task

// The current task, its iteration, its columns (trajectories), and the selected pair, if any
let task, iteration, columns, pair;

const addressOf = task => "#" + encodeURIComponent(task.id);

function select(other) {
  open(other);
  history.replaceState(null, "", addressOf(other));
  const {top} = $("detail").getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) $("detail").scrollIntoView(); // on a phone it is below
}

const iterations = () => [...new Set(played(task).map(run => run.iteration))]
  .sort((a, b) => a - b);
const hasOther = pair => pair.sides.some(run => !["expert", target].includes(run.agent));

// Opens a task in its last iteration that has a pair with the failure agent, or else any pair.
function open(other) {
  task = other;
  const {pairs} = task, paired = pairs.some(hasOther) ? pairs.filter(hasOther) : pairs;
  const [{messages, opening}] = task.runs;
  $("title").textContent = task.say || task.id;
  $("id").textContent = task.id;
  $("opening").textContent = messages?.slice(0, opening).map(m => m.content).join("\n\n");
  $("first").hidden = !opening;
  $("lacking").hidden = messages !== null;
  turnTo(Math.max(...(paired.length ? paired.map(pair => pair.iteration) : iterations())));
}

// Shows an iteration at its first pair with the failure agent, one with the expert if there is one.
function turnTo(i) {
  iteration = i;
  columns = ordered([]);
  const all = pairsHere();
  const first = all.find(pair => isExpert(pair.sides[0]) && hasOther(pair))
    || all.find(hasOther) || all[0];
  arrange(first ? first.sides : [], first);
}

function arrange(front, selected) { // moves trajectories to the front
  columns = ordered(front);
  pair = selected;
  draw();
}

// Orders trajectories by interest: `front`, the expert, the best failure of each agent, and the rest
// of the iteration.
function ordered(front) {
  const here = task.runs.filter(run => isExpert(run) || run.iteration === iteration);
  const failures = here.filter(run => run.reward < success).sort((a, b) => b.reward - a.reward);
  const best = agents.flatMap(agent => failures.find(run => run.agent === agent) || []);
  return [...new Set([...front, ...here.filter(isExpert), ...best, ...here])];
}

function pairsHere() { // returns the pairs of the iteration, in the order of their columns
  const order = [...columns, ...task.runs]; // sides from earlier iterations come last
  const rank = pair => {
    const places = pair.sides.map(run => order.indexOf(run));
    return Math.max(...places) + Math.min(...places) / order.length;
  };
  return task.pairs.filter(pair => pair.iteration === iteration)
    .sort((a, b) => rank(a) - rank(b));
}

function draw(every = false) {
  const {name} = document.activeElement;
  const all = pairsHere(), few = every ? all : all.slice(0, 4);
  $("map").replaceChildren(map());
  $("pairs").hidden = !all.length;
  $("rows").replaceChildren(...few.map(pairRow));
  $("more").hidden = few.length === all.length;
  $("more").textContent = `all ${all.length} pairs`;
  $("talk").style.gridTemplateColumns = `repeat(${columns.length}, minmax(min(17rem, 78vw), 1fr))`;
  $("talk").replaceChildren(...talk());
  $("talk").scrollTo(0, 0);
  if (document.activeElement === document.body) // the button that was pressed is drawn again
    document.getElementsByName(name)[0]?.focus({preventScroll: true});
}

// GRPO plays a task again in each step, other methods in each iteration.
const unit = run => run.from.endsWith("/episodes") ? "step" : "iteration";
const place = run => `${unit(run)} ${run.iteration}, rollout ${run.rollout}`;

function map() { // returns a table of all rewards of the task, agents x iterations
  const turn = i => make("th", {ariaCurrent: String(i === iteration)},
    button(`iteration ${i}`, () => turnTo(i), String(i)));
  const chip = run => make("span", {title: place(run)}, button(
    `${run.agent} ${place(run)}`, () => arrange([columns[0], run]),
    text("span", `reward ${grade(run.reward)}`, show(run.reward))));
  const chips = (agent, i) => make("td", {},
    ...task.runs.filter(run => run.agent === agent && run.iteration === i).map(chip));
  const row = agent => make("tr", {}, make("th", {}, named(agent)),
    ...iterations().map(i => chips(agent, i)));
  const [first] = played(task);
  return make("table", {}, make("tr", {}, make("th", {}, first ? unit(first) : ""),
    ...iterations().map(turn)), ...agents.filter(agent => course(task, agent).length).map(row));
}

function pairRow(made, n) {
  const {sides: [chosen, rejected], weight, sft_weight, first, last} = made;
  const cell = content => make("td", {}, content ?? "\u2013");
  const moved = (i, digits) =>
    cell(first && `${first[i].toFixed(digits)} \u2192 ${last[i].toFixed(digits)}`);
  return make("tr", {ariaCurrent: String(made === pair)},
    text("td", "left", button(`pair ${n}`, () => arrange(made.sides, made),
      ...label(chosen), " > ", ...label(rejected))),
    text("td", "left", made.trains), cell(weight?.toFixed(2)), cell(sft_weight?.toFixed(2)),
    moved(2, 2), moved(0, 1), moved(1, 1));
}

// ------------------------------------------------------------------------ the conversations

const message = (run, turn, n) => run.messages?.[run.opening + 2 * turn + n]?.content ?? "";
const action = (run, turn) => message(run, turn, 0).split("Action:").pop().trim();

function parting(run) { // returns the first turn with another action than in the first column
  const [first] = columns, turns = Math.max(first.turns, run.turns);
  for (let turn = 0; turn < turns; turn++)
    if (action(run, turn) !== action(first, turn)) return turn;
  return null;
}

function talk() { // returns the cells of the grid: the heads, and then one row per turn
  const cells = columns.map(head), parted = columns.map(parting);
  for (let turn = 0; turn < Math.max(...columns.map(run => run.turns)); turn++)
    cells.push(...columns.map((run, n) => cell(run, turn, parted[n], n)));
  return cells;
}

function head(run, n) {
  const side = pair && ["chosen", "rejected"][n], parted = parting(run);
  const facts = isExpert(run) ? [] : [place(run)];
  facts.push(`${run.turns} turns`, run.ended.replace("_", " "));
  if ("raw_reward" in run) facts.push(`raw reward ${show(run.raw_reward)}`);
  if (n && run.messages) facts.push(parted === null
    ? "same actions as the first column" : `differs at turn ${parted + 1}`);
  return text("div", `who ${side || ""}`, ...label(run), side ? ` ${side}` : "",
    text("p", "note", facts.join(", ")));
}

function cell(run, turn, parted, n) {
  if (turn >= run.turns || !run.messages) return make("div");
  const reply = message(run, turn, 0), done = action(run, turn), page = message(run, turn, 1);
  // Training leaves out the later turns of a rejected trajectory (--cut-turns).
  const isCut = pair && n === 1 && cut_turns >= 0
    && turn >= task.runs.find(isExpert).turns + cut_turns;
  const state = isCut ? "cut" : !n ? "" : parted === turn ? "parts"
    : parted === null || turn < parted ? "same" : "";
  return text("div", `turn ${state}`,
    text("span", "number", isCut ? `${turn + 1}, not trained on` : `${turn + 1}`),
    text("div", "thought", reply.slice(0, reply.lastIndexOf(done)).trim()),
    text("div", "action", done),
    page.length < 200 ? text("div", "page", page)
      : text("details", "page", make("summary", {}, text("div", "long", page))));
}

// ----------------------------------------------------------------------------------- start

const fromAddress = () => tasks.find(task => addressOf(task) === location.hash);
$("filters").addEventListener("input", filter);
$("more").addEventListener("click", () => draw(true));
addEventListener("hashchange", () => { if (fromAddress()) open(fromAddress()); });
if (tasks.length) {
  $("browser").hidden = false;
  $("agents").textContent = agents.join(", ");
  open(fromAddress() || tasks[0]);
  filter();
}

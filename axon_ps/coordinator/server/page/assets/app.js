// The page's elements, and the actions of its buttons. Every element is made once, and changed only with its value.
import { ask, follow, followLog, key, model, token } from "/feed.js";
import { draw, recolour } from "/charts.js";
import { ago, bytes, number, seconds } from "/words.js";

const $ = (id) => document.getElementById(id);
const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const SERVER = "ROLE_SHARD";
const SHOWN_STEPS = 60;
const SLOW = 0.1; // a worker that is last in this many more of the steps than by chance is marked

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function make(tag, parent, className = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  parent.append(element);
  return element;
}

// The children of `parent`, one for each of `items` by key: made when new, removed when gone, kept in order.
const children = new WeakMap();

function each(parent, items, keyOf, create, update) {
  if (!children.has(parent)) children.set(parent, new Map());
  const there = children.get(parent);
  const wanted = new Set(items.map(keyOf));
  for (const [k, element] of there) if (!wanted.has(k)) { element.remove(); there.delete(k); }
  let before = parent.firstElementChild;
  for (const item of items) {
    let element = there.get(keyOf(item));
    if (!element) { element = create(item); there.set(keyOf(item), element); }
    if (element !== before) parent.insertBefore(element, before); else before = before.nextElementSibling;
    update(element, item);
  }
}

// ---------------------------------------------------------------- the job

const over = () => Boolean(model.membership.is_over);

function newest(name) {
  const curve = model.curves.get(name);
  return curve && curve[1].length ? curve[1][curve[1].length - 1] : undefined;
}

function job() {
  const { status } = model;
  put($("job"), status.job);
  document.title = `${status.job} – axon_ps`;
  set($("state"), "data-state", status.phase ?? "");
  put($("state"), status.headline ?? "");
  const counters = status.counters ?? {};
  const facts = [
    ["version", number(Number(status.version ?? 0))],
    ...progress(status.progress),
    ["loss", number(newest("loss"))],
    ["steps / s", number(status.steps_per_s)],
    ["parameters", number(Number(status.parameters ?? 0))],
    ["replication", number(status.replication ?? 1)],
    ["steps aborted", number(counters.steps_aborted ?? 0)],
    ["members lost", number(counters.losses ?? 0)],
    ["checkpoint", checkpoint(status.checkpoints ?? {})],
    ["leading for", seconds(status.uptime_s ?? 0)],
  ];
  each($("facts"), facts, (f) => f[0], ([name]) => {
    const pair = make("div", $("facts"));
    put(make("dt", pair), name);
    make("dd", pair);
    return pair;
  }, (pair, [, value]) => put(pair.lastElementChild, value));
  const stuck = status.phase === "stalled"; // otherwise these waits are part of every step
  const waits = over() ? [] : (status.pending ?? []).filter((w) => stuck || !/^votes of|^gradients at|has waited/.test(w)).slice(0, 8);
  each($("pending"), waits, (w) => w, () => make("li", $("pending")), put);
}

function progress(report) {
  if (!report?.steps) return [];
  const since = report.at && !report.by_version ? model.began + model.at - report.at : 0;
  const left = (report.steps - (report.step ?? 0)) / (report.steps_per_s || NaN) - since;
  return [["step", `${report.step ?? 0} of ${report.steps}`], ...(left > 0 && !over() ? [["left", seconds(left)]] : [])];
}

function checkpoint(known) {
  if (known.activity?.startsWith("writing")) return "being written";
  return known.uri ? `version ${known.version ?? 0}, ${ago(known.age_s ?? 0)}` : "none yet";
}

// ---------------------------------------------------------------- members

const isServer = (m) => m.role === SERVER;
const nameOf = (m) => `${isServer(m) ? "shard server" : "worker"} ${m.rank ?? 0}`;
const loadOf = (m) => model.loads.get(key(m.role, m.rank ?? 0)) ?? {};
const isDraining = (m) => isServer(m) && (model.status.draining ?? []).includes(m.rank ?? 0);

function mark(m) {
  const load = loadOf(m);
  if ((model.status.awaited ?? []).includes(m.incarnation)) return ["slow", "has not come back after the coordinator's restart"];
  if (isDraining(m)) return ["busy", "draining"];
  if (isServer(m) && load.copying_slices) return ["busy", `copying ${load.copying_slices} slices`];
  const workers = (model.membership.workers ?? []).length;
  const among = Math.min(100, model.steps.length);
  if (!isServer(m) && workers > 1 && among > 9 && (load.last_in ?? 0) / among > SLOW + 1.5 / workers && load.lag_s > 0.02) {
    return ["slow", `the others wait for it: last in ${load.last_in} of 100 steps`];
  }
  return ["fine", ""];
}

const sum = (members, name) => members.reduce((total, m) => total + (loadOf(m)[name] ?? 0), 0);

function short(m) {
  const load = loadOf(m);
  if (isServer(m)) return `${load.primary_slices ?? 0} + ${load.backup_slices ?? 0}`;
  return load.lag_s === undefined ? "" : `+${seconds(load.lag_s)}`;
}

function sentence(m) {
  const load = loadOf(m);
  const what = isServer(m)
    ? `primary of ${load.primary_slices ?? 0} slices, backup of ${load.backup_slices ?? 0}`
    : load.lag_s === undefined ? "" : `${seconds(load.lag_s)} after the first`;
  return [`${nameOf(m)} on ${m.node}`, what, mark(m)[1]].filter(Boolean).join(", ");
}

function members() {
  const { shards = [], workers = [] } = model.membership;
  put($("count"), `${shards.length} shard server${shards.length === 1 ? "" : "s"}, ${workers.length} worker${workers.length === 1 ? "" : "s"}, generation ${model.membership.generation ?? 0}`);
  const nodes = new Map();
  for (const m of [...shards, ...workers]) nodes.set(m.node, [...(nodes.get(m.node) ?? []), m]);
  const size = shards.length + workers.length > 64 ? "small" : "large";
  set($("nodes"), "data-size", size);
  each($("nodes"), [...nodes].sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true })), (n) => n[0], ([node]) => {
    const group = make("section", $("nodes"), "node");
    set(group, "aria-label", `node ${node}`);
    const head = make("h3", group);
    put(make("span", head), node);
    make("small", head);
    make("ul", group);
    return group;
  }, (group, [, there]) => {
    const list = group.lastElementChild;
    const sent = sum(there, "sent_bytes_per_s"), received = sum(there, "received_bytes_per_s");
    put(group.firstElementChild.lastElementChild, sent || received ? `${bytes(sent)}/s out, ${bytes(received)}/s in` : "");
    each(list, there, (m) => m.incarnation, (m) => {
      const tile = make("button", make("li", list), `tile ${isServer(m) ? "server" : "worker"}`);
      tile.type = "button";
      put(make("b", tile), `${isServer(m) ? "S" : "W"}${m.rank ?? 0}`);
      make("span", tile);
      tile.addEventListener("click", () => show(m.incarnation));
      return tile.parentElement;
    }, (item, m) => {
      const tile = item.firstElementChild;
      set(tile, "data-mark", mark(m)[0]);
      set(tile, "aria-label", sentence(m));
      set(tile, "title", sentence(m));
      if (size === "large") put(tile.lastElementChild, short(m));
    });
  });
}

// ---------------------------------------------------------------- one member

let shown = null;
let mayOperate = false;

function show(incarnation) {
  shown = incarnation;
  put($("m-answer"), "");
  $("member").showModal();
  member();
}

function member() {
  if (!shown || !$("member").open) return;
  const m = [...(model.membership.shards ?? []), ...(model.membership.workers ?? [])].find((x) => x.incarnation === shown);
  $("m-drain").hidden = !m || !isServer(m) || !mayOperate || isDraining(m);
  if (!m) return void put($("m-note"), "It is no member any more.");
  const load = loadOf(m);
  put($("m-name"), `${nameOf(m)} on ${m.node}`);
  const rows = [["incarnation", m.incarnation.slice(0, 8)]];
  if (isServer(m)) {
    rows.push(["address", m.address], ["slices", `primary of ${load.primary_slices ?? 0}, backup of ${load.backup_slices ?? 0}, copying ${load.copying_slices ?? 0}`]);
  } else {
    rows.push(["replica", m.replica < 0 ? "in none" : `${m.replica ?? 0}`], ["last in", `${load.last_in ?? 0} of the newest 100 steps`], ["lag", seconds(load.lag_s ?? 0)]);
  }
  if (load.sent_bytes_per_s || load.received_bytes_per_s) rows.push(["network", `${bytes(load.sent_bytes_per_s ?? 0)}/s out, ${bytes(load.received_bytes_per_s ?? 0)}/s in`]);
  if (load.memory_bytes) rows.push(["memory", bytes(load.memory_bytes)]);
  for (const [name, value] of Object.entries(load.metrics ?? {}).sort()) {
    rows.push([name, name.endsWith("_bytes") ? bytes(value) : number(value)]);
  }
  each($("m-facts"), rows, (r) => r[0], ([name]) => {
    const row = make("tr", $("m-facts"));
    set(put(make("th", row), name), "scope", "row");
    make("td", row);
    return row;
  }, (row, [, value]) => put(row.lastElementChild, value));
  put($("m-note"), isDraining(m) ? "It is being drained." : isServer(m) && !mayOperate ? "Draining needs the job's token." : "");
}

async function drain() {
  const m = (model.membership.shards ?? []).find((x) => x.incarnation === shown);
  const what = `Drain ${nameOf(m)}?\n\nThe other servers take its slices while training goes on; then it leaves the job and its process ends. ` +
    "A supervisor that restarts it (systemd, compose, Kubernetes) makes it a new, empty server: that is a restart. axon-ps run does not.";
  if (!confirm(what)) return;
  const reply = await ask(`/api/servers/${m.rank ?? 0}/drain`, { method: "POST" });
  put($("m-answer"), reply.ok ? `It has ${(await reply.json()).slices} slices to hand over.` : await reply.text());
}

// ---------------------------------------------------------------- steps

const PHASES = ["computing_s", "waiting_s", "summing_s"];

function steps() {
  const recent = model.steps.slice(-SHOWN_STEPS);
  const longest = Math.max(1e-6, ...recent.map((s) => s.duration_s ?? 0));
  each($("steps"), recent, keyOfStep, (s) => {
    const bar = make("li", $("steps"));
    bar.dataset.key = keyOfStep(s);
    for (const phase of PHASES) make("i", bar, phase);
    return bar;
  }, (bar, s) => {
    set(bar, "data-outcome", s.outcome);
    const known = PHASES.reduce((sum, phase) => sum + (s[phase] ?? 0), 0);
    PHASES.forEach((phase, n) => {
      const length = known ? s[phase] ?? 0 : n ? 0 : s.duration_s ?? 0;
      const height = `${Math.min(100, (100 * length) / longest).toFixed(1)}%`;
      if (bar.children[n].style.height !== height) bar.children[n].style.height = height;
    });
    if (!bar.title) {
      bar.title = stepSentence(s);
      set(bar, "aria-label", bar.title);
    }
  });
  put($("longest"), recent.length ? `the highest: ${seconds(longest)}` : "");
  const said = recent.find((s) => keyOfStep(s) === chosen) ?? recent[recent.length - 1];
  put($("laststep"), said ? stepSentence(said) : "none yet");
  for (const bar of $("steps").children) set(bar, "data-chosen", bar.dataset.key === chosen ? "yes" : "no");
}

// The step whose details are shown: under the pointer, or reached by arrow keys; else the newest.
let chosen = "";
const keyOfStep = (s) => `${s.model ?? 0}/${s.step}`;

function choose(bar) {
  chosen = bar?.dataset.key ?? "";
  steps();
}

function chooseByKey(event) {
  const bars = [...$("steps").children];
  const at = bars.findIndex((bar) => bar.dataset.key === chosen);
  const next = { ArrowLeft: at < 0 ? bars.length - 1 : Math.max(0, at - 1), ArrowRight: at + 1, Home: 0, End: bars.length - 1, Escape: -1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose(bars[next]);
}

function stepSentence(s) {
  if (s.outcome !== "commit") return `the step to version ${(s.version ?? 0) + 1}: ${s.outcome}: ${s.reason ?? ""}`;
  const waited = s.waiting_s > 0.001 ? `, ${seconds(s.waiting_s)} waiting for worker ${s.waited_for ?? 0}` : "";
  return `version ${s.version ?? 0}: ${seconds(s.duration_s ?? 0)}${waited}`;
}

// ---------------------------------------------------------------- stragglers and events

function stragglers() {
  const rows = [...model.loads.values()].filter((l) => l.role !== SERVER && l.last_in)
    .sort((a, b) => (b.cost_s ?? 0) - (a.cost_s ?? 0)).slice(0, 8);
  each($("stragglers"), rows, (l) => l.rank ?? 0, (l) => {
    const row = make("tr", $("stragglers"));
    set(put(make("th", row), `worker ${l.rank ?? 0}`), "scope", "row");
    for (let n = 0; n < 3; n++) make("td", row);
    return row;
  }, (row, l) => {
    const [, last, cost, lag] = row.children;
    put(last, `${l.last_in}`);
    put(cost, seconds(l.cost_s ?? 0));
    put(lag, seconds(l.lag_s ?? 0));
  });
}

function events() {
  const list = $("events");
  each(list, model.events.slice(-100).reverse(), (e) => `${model.history}/${e.number}`, (e) => {
    const row = make("li", list);
    set(row, "data-kind", e.kind);
    make("time", row);
    put(make("b", row), e.kind);
    make("span", row);
    return row;
  }, (row, e) => {
    const [time, , text] = row.children;
    put(time, clock.format(new Date(1000 * (model.began + (e.at_s ?? 0)))));
    put(text, e.text);
  });
}

// ---------------------------------------------------------------- the log

let logged = [];
const processOf = (r) => (r.role ? nameOf(r).replace("shard ", "") : "coordinator");

function log() {
  const lowest = Number($("level").value);
  const newest = logged.filter((r) => (r.level ?? 0) >= lowest).slice(-200).reverse();
  put($("logged"), newest.length ? "newest first; axon-ps logs has all" : "nothing yet");
  each($("log"), newest, (r) => r.number, (r) => {
    const row = make("li", $("log"));
    set(row, "data-level", `${Math.min(40, 10 * Math.floor((r.level ?? 0) / 10))}`);
    put(make("time", row), clock.format(new Date(1000 * r.at_s)));
    put(make("b", row), processOf(r));
    put(make("span", row), r.text ?? "");
    return row;
  }, () => {});
}

// ---------------------------------------------------------------- all of it

let pending = false;

function changed() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    for (const render of [job, members, steps, stragglers, events, member]) render();
    draw($("charts"), model);
    $("main").hidden = false;
    $("login").hidden = true;
    document.body.dataset.ready = "yes";
  });
}

function connection(text, trouble) {
  const since = trouble && $("main").hidden === false ? `${text}. What is shown is as of ${clock.format(new Date(1000 * (model.began + model.at)))}.` : text;
  put($("connection"), over() && trouble ? "the job has finished, and its coordinator has ended" : since);
  document.body.dataset.trouble = trouble ? "yes" : "";
  if (!trouble && !connection.up) mayI();
  connection.up = !trouble;
}

async function mayI() {
  mayOperate = (await ask("/api/operator").catch(() => ({ ok: false }))).ok;
  document.body.dataset.operator = mayOperate ? "yes" : "no";
  member();
}

function refused(text, done) {
  put($("refusal"), token.get() ? text : "");
  $("main").hidden = true;
  $("login").hidden = false;
  put($("state"), "signed out");
  $("token").focus();
  $("login").onsubmit = (event) => {
    event.preventDefault();
    token.set($("token").value.trim());
    $("token").value = "";
    done();
  };
}

$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
$("m-close").addEventListener("click", () => $("member").close());
$("m-drain").addEventListener("click", drain);
$("level").addEventListener("change", log);
$("steps").addEventListener("pointerover", (event) => choose(event.target.closest("li")));
$("steps").addEventListener("pointerleave", () => choose(null));
$("steps").addEventListener("blur", () => choose(null));
$("steps").addEventListener("keydown", chooseByKey);
followLog(() => !$("main").hidden, (records) => { logged = records; log(); });
follow({ changed, connection, refused });

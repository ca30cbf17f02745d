// The page: takes a summary of the group each second, and shows it.
import { asked } from "./ask.js";
import { byId, html } from "./dom.js";
import { listen, say } from "./feed.js";
import { age, bytes, count, duration, rate } from "./format.js";
import { Graph } from "./graph.js";
import { Errors, Logs, workerPage } from "./logs.js";
import { renderStacks } from "./stack.js";
import { Table } from "./table.js";
import { Tiles } from "./tiles.js";
import "./trace.js";

const latencies = [
  { key: "p50", title: "p50", value: (row) => row.latency.p50_s, cell: (row) => duration(row.latency.p50_s) },
  { key: "p90", title: "p90", value: (row) => row.latency.p90_s, cell: (row) => duration(row.latency.p90_s) },
  { key: "p99", title: "p99", value: (row) => row.latency.p99_s, cell: (row) => duration(row.latency.p99_s) },
];
const totalCalls = { key: "count", title: "Total", about: "since counting began", value: (row) => row.count, cell: (row) => count(row.count) };
const errors = {
  key: "errors", title: "Errors", value: (row) => row.errors, tone: (row) => (row.errors ? "bad" : ""),
  cell: (row) => html("span", { title: Object.entries(row.error_types ?? {}).map(([name, times]) => `${name}: ${times}`).join("\n") || null }, count(row.errors)),
};
const perSecond = { key: "per_s", title: "Calls/s", value: (row) => row.per_s, cell: (row) => rate(row.per_s) };
const inFlight = { key: "in_flight", title: "In flight", value: (row) => row.in_flight, cell: (row) => count(row.in_flight) };
const busy = { key: "busy", title: "Load", about: "how many are under way on average", value: (row) => row.busy, cell: (row) => rate(row.busy) };
const name = (key, title) => ({ key, title, text: true, value: (row) => row[key], cell: (row) => html("code", {}, row[key]) });

const CALLS = {
  functions: { sort: "per_s", columns: [name("function", "Function"), perSecond, ...latencies, busy, inFlight, totalCalls, errors] },
  series: { sort: "per_s", columns: [name("function", "Function"), name("caller", "Caller"), name("callee", "Callee"), perSecond, ...latencies, inFlight, totalCalls, errors] },
  pairs: {
    sort: "per_s",
    columns: [
      name("caller", "Caller"), name("callee", "Callee"),
      { key: "state", title: "Connection", text: true, value: (row) => row.state },
      perSecond, latencies[0], latencies[2], inFlight,
      { key: "waiting", title: "Waiting", about: "calls that wait for a connection or for room", value: (row) => row.waiting, cell: (row) => count(row.waiting) },
      { key: "sent_bytes", title: "Sent", value: (row) => row.sent_bytes, cell: (row) => bytes(row.sent_bytes) },
      { key: "received_bytes", title: "Received", value: (row) => row.received_bytes, cell: (row) => bytes(row.received_bytes) },
      { key: "reconnects", title: "Reconnects", value: (row) => row.reconnects, tone: (row) => (row.reconnects ? "warn" : "") },
      totalCalls, errors,
    ],
  },
};

const WORKERS = [
  { key: "id", title: "Worker", text: true, value: (row) => row.id, cell: (row) => html("a", { href: workerPage(row.name), title: "logs, errors and history of this worker" }, html("code", {}, row.name)) },
  { key: "state", title: "State", text: true, value: (row) => row.state, cell: (row) => html("span", { class: `state ${row.state}`, title: row.error || `${row.host}, process ${row.pid}, arpc ${row.version}` }, row.state) },
  { key: "handled_per_s", title: "In/s", about: "calls handled per second", value: (row) => row.handled_per_s, cell: (row) => rate(row.handled_per_s) },
  { key: "calls_per_s", title: "Out/s", about: "calls made per second", value: (row) => row.calls_per_s, cell: (row) => rate(row.calls_per_s) },
  { key: "p50", title: "p50", about: "of the calls it handles", value: (row) => row.latency.p50_s, cell: (row) => duration(row.latency.p50_s) },
  { key: "p99", title: "p99", about: "of the calls it handles", value: (row) => row.latency.p99_s, cell: (row) => duration(row.latency.p99_s) },
  { key: "handlers", title: "Running", about: "handlers that run or await", value: (row) => row.handlers, cell: (row) => count(row.handlers) },
  { key: "queued", title: "Queue", about: "what waits for a thread or for room", value: (row) => row.queued, cell: (row) => count(row.queued), tone: (row) => (row.queued > 0 && row.threads_busy >= row.threads_max ? "warn" : "") },
  { key: "threads", title: "Threads", about: "busy of those started", value: (row) => row.threads_busy, cell: (row) => `${row.threads_busy}/${row.threads}` },
  { key: "lag", title: "Lag", about: "how late the loop was at worst in ten seconds", value: (row) => row.lag_max_s, cell: (row) => duration(row.lag_max_s), tone: (row) => (row.lag_max_s > 0.25 ? "bad" : row.lag_max_s > 0.05 ? "warn" : "") },
  { key: "sent", title: "Out", about: "bytes sent per second", value: (row) => row.sent_bytes_per_s, cell: (row) => `${bytes(row.sent_bytes_per_s)}/s` },
  { key: "cpu", title: "CPU", about: "of one CPU; more than 100% is more than one", value: (row) => row.cpus, cell: (row) => `${Math.round(100 * row.cpus)}%` },
  { key: "memory", title: "Memory", value: (row) => row.memory_bytes, cell: (row) => bytes(row.memory_bytes) },
  { key: "rrefs", title: "RRefs", about: "owned / used", value: (row) => row.rrefs_owned + row.rrefs_used, cell: (row) => `${count(row.rrefs_owned)}/${count(row.rrefs_used)}` },
  { key: "uptime", title: "Up", value: (row) => row.uptime_s, cell: (row) => age(row.uptime_s) },
];

const RREFS = [
  { ...name("type", "Type"), cell: (row) => html("code", { title: row.state }, row.state === "ready" ? row.type : `${row.type} (${row.state})`) },
  name("owner", "Owner"),
  { key: "count", title: "Values", value: (row) => row.count, cell: (row) => count(row.count) },
  { key: "forks", title: "Held", about: "by other workers", value: (row) => row.forks, cell: (row) => count(row.forks) },
  { key: "oldest", title: "Oldest", value: (row) => row.oldest_s, cell: (row) => age(row.oldest_s) },
];

const CONTEXTS = [
  { ...name("creator", "Creator"), cell: (row) => html("code", { title: `context ${row.id}` }, row.creator) },
  { key: "workers", title: "Workers", value: (row) => row.workers.length },
  { key: "messages", title: "Edges", about: "sends and receives recorded", value: (row) => row.sends + row.recvs },
  { key: "age", title: "Age", value: (row) => row.age_s, cell: (row) => age(row.age_s) },
  { key: "running", title: "Pass", text: true, value: (row) => (row.is_running ? "running" : "–") },
];

let latest = null;
let view = "functions";
let selected = null;
let isPaused = false;

const isShown = (row) => row.caller === selected || row.callee === selected;
const workers = new Table(byId("workers"), WORKERS, {
  sort: "id", descending: false, empty: "no worker has answered yet",
  onRow: (row) => ({ class: row.name === selected ? "selected" : null, "data-worker": row.name }),
});
const calls = new Table(byId("calls-table"), CALLS.functions.columns, { sort: "per_s", empty: "no calls yet" });
const rrefs = new Table(byId("rrefs"), RREFS, { sort: "count", empty: "no values are held by reference" });
const contexts = new Table(byId("contexts"), CONTEXTS, { sort: "age", empty: "no context is open" });
const graph = new Graph(byId("graph"), (worker) => { selected = selected === worker ? null : worker; if (selected && view === "functions") chooseView("series"); show(); });

// -- showing

function show() {
  if (!latest) return;
  const { history } = latest;
  const states = Object.groupBy ? Object.groupBy(latest.workers, (worker) => worker.state) : {};
  const troubled = latest.workers.filter((worker) => worker.state === "lost" || worker.state === "late");
  byId("about").textContent = `${latest.workers.length} worker${latest.workers.length === 1 ? "" : "s"}${troubled.length ? `, ${troubled.map((worker) => `${worker.name} ${worker.state}`).join(", ")}` : ""}`;
  document.title = troubled.length ? `(!) arpc · ${troubled.length} ${troubled[0].state}` : "arpc";
  byId("footer").textContent = `arpc ${latest.version} · served by ${latest.served_by} · counting for ${age(latest.counting_s)}`;
  byId("workers-hint").textContent = Object.entries(states).map(([state, list]) => `${list.length} ${state}`).join(" · ");
  tiles.render(latest, history);
  workers.render(latest.workers);
  graph.render(latest.workers, latest.pairs, selected);
  byId("graph-hint").textContent = selected ? `${selected} only: choose it again for all` : "width: calls per second";
  showCalls();
  rrefs.render(latest.rrefs);
  byId("rrefs-hint").textContent = `${count(latest.rrefs.reduce((sum, row) => sum + row.count, 0))} values`;
  contexts.render(latest.contexts);
  byId("contexts-hint").textContent = `${latest.contexts.length} open`;
  memory();
}

function showCalls() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const rows = latest[view].filter((row) =>
    (!selected || view === "functions" || isShown(row)) &&
    (!wanted || [row.function, row.caller, row.callee].some((part) => part?.toLowerCase().includes(wanted))));
  calls.empty = wanted || selected ? "nothing that fits" : "no calls yet";
  calls.render(rows);
}

const total = (group, key) => group.workers.reduce((sum, worker) => sum + (worker.error ? 0 : worker[key]), 0);
const TILES = [
  { key: "calls", title: "Calls per second", value: (group) => rate(group.calls_per_s), history: "calls" },
  { key: "latency", title: "Latency p50 · p99", value: (group) => `${duration(group.latency.p50_s)} · ${duration(group.latency.p99_s)}`, drawn: latencyBars },
  { key: "in_flight", title: "In flight", value: (group) => count(group.in_flight), history: "in_flight" },
  { key: "errors", title: "Errors per second", value: (group) => rate(group.errors_per_s), history: "errors", tone: (group) => (group.errors_per_s ? "bad" : "") },
  { key: "bytes", title: "Bytes per second", value: (group) => bytes(group.sent_bytes_per_s), history: "sent_bytes" },
  { key: "cpu", title: "CPUs in use", value: (group) => count(Math.round(10 * total(group, "cpus")) / 10), history: "cpu_s" },
  { key: "memory", title: "Memory", value: (group) => bytes(total(group, "memory_bytes")), history: "memory_bytes" },
  { key: "lag", title: "Worst loop lag", value: (group) => duration(group.lag_max_s), history: "lag_s", tone: (group) => (group.lag_max_s > 0.25 ? "bad" : group.lag_max_s > 0.05 ? "warn" : "") },
];

const tiles = new Tiles(byId("tiles"), byId("range"), TILES);
const stands = { isPaused: () => isPaused };
new Logs(byId("logs"), { search: byId("log-search"), level: byId("log-level"), ...stands });
new Errors(byId("errors"), { hint: byId("errors-hint"), ...stands });

function latencyBars(group) {
  const { p50_s: low, p90_s: middle, p99_s: high } = group.latency;
  const scale = (value) => (value == null ? 0 : Math.max(4, (100 * Math.log10(1 + value / 1e-6)) / 7));
  return html("div", { class: "bars" }, ...[["p50", low], ["p90", middle], ["p99", high]].map(([label, value]) => {
    const bar = html("span", { class: "bar-fill" });
    bar.style.width = `${Math.min(100, scale(value))}%`;
    return html("div", { class: "bar-row" }, html("span", {}, label), html("span", { class: "bar-track" }, bar), html("span", {}, duration(value)));
  }));
}

function memory() {
  const shares = latest.workers.filter((worker) => worker.shared_memory.capacity_bytes);
  byId("memory").replaceChildren(...(shares.length ? shares.map((worker) => {
    const { capacity_bytes: capacity, used_bytes: used, resident_bytes: resident, borrowed_bytes: borrowed = 0 } = worker.shared_memory;
    const [held, full] = [html("span", { class: "meter-resident" }), html("span", { class: "meter-used" })];
    held.style.width = `${(100 * resident) / capacity}%`;
    full.style.width = `${(100 * used) / capacity}%`;
    const about = `${bytes(used)} used, ${bytes(resident)} resident of ${bytes(capacity)}; ${bytes(borrowed)} borrowed from others`;
    return html("div", { class: "meter-row" }, html("code", {}, worker.name),
      html("span", { class: "meter", role: "img", "aria-label": about, title: about }, held, full),
      html("span", { class: "meter-text" }, bytes(used)));
  }) : [html("p", { class: "empty" }, "no worker shares memory")]));
}

// -- what people do

function chooseView(name) {
  view = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.setAttribute("aria-selected", String(tab.dataset.view === name));
    tab.tabIndex = tab.dataset.view === name ? 0 : -1;
  }
  calls.rows = null;
  calls.setColumns(CALLS[name].columns, CALLS[name].sort);
  if (latest) showCalls();
}

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => chooseView(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    chooseView(next.dataset.view);
    next.focus();
  });
}
byId("filter").addEventListener("input", () => latest && showCalls());
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Resume" : "Pause";
  say(isPaused ? "paused" : "live");
  if (!isPaused) show();
});
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("arpc-theme", document.documentElement.dataset.theme);
});
byId("stack-button").addEventListener("click", async (event) => {
  const button = event.currentTarget;
  button.disabled = true;
  try {
    renderStacks(byId("stack"), await asked("api/stack"));
  } catch (error) {
    byId("stack").replaceChildren(html("p", { class: "error" }, `Nothing could be learnt: ${error.message}`));
  } finally {
    button.disabled = false;
  }
});

byId("logout").hidden = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
listen((summary) => {
  latest = summary;
  if (isPaused) return;
  say("live");
  show();
});

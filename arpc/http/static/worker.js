// The page of one worker.
import { asked } from "./ask.js";
import { byId, html } from "./dom.js";
import { listen, say } from "./feed.js";
import { age, bytes, count, duration, rate } from "./format.js";
import { Errors, Logs } from "./logs.js";
import { renderStacks } from "./stack.js";
import { Table } from "./table.js";
import { Tiles } from "./tiles.js";

const worker = new URLSearchParams(location.search).get("name") ?? "";
const TILES = [
  { key: "cpu", title: "CPU", value: (row) => `${Math.round(100 * row.cpus)}%`, history: "cpu_s" },
  { key: "memory", title: "Memory", value: (row) => bytes(row.memory_bytes), history: "memory_bytes" },
  { key: "handled", title: "Calls handled per second", value: (row) => rate(row.handled_per_s), history: "handled" },
  { key: "calls", title: "Calls made per second", value: (row) => rate(row.calls_per_s), history: "calls" },
  { key: "handlers", title: "Handlers running", value: (row) => count(row.handlers), history: "handlers" },
  { key: "in_flight", title: "Calls in flight", value: (row) => count(row.in_flight), history: "in_flight" },
  { key: "sent", title: "Bytes sent per second", value: (row) => bytes(row.sent_bytes_per_s), history: "sent_bytes" },
  { key: "lag", title: "Worst loop lag", value: (row) => duration(row.lag_max_s), history: "lag_s", tone: (row) => (row.lag_max_s > 0.25 ? "bad" : row.lag_max_s > 0.05 ? "warn" : "") },
];
const columns = (key, title) => [
  { key: "function", title: "Function", text: true, value: (row) => row.function, cell: (row) => html("code", {}, row.function) },
  { key, title, text: true, value: (row) => row[key], cell: (row) => html("code", {}, row[key]) },
  { key: "per_s", title: "Calls/s", value: (row) => row.per_s, cell: (row) => rate(row.per_s) },
  { key: "p50", title: "p50", value: (row) => row.latency.p50_s, cell: (row) => duration(row.latency.p50_s) },
  { key: "p99", title: "p99", value: (row) => row.latency.p99_s, cell: (row) => duration(row.latency.p99_s) },
  { key: "count", title: "Total", value: (row) => row.count, cell: (row) => count(row.count) },
  { key: "errors", title: "Errors", value: (row) => row.errors, cell: (row) => count(row.errors), tone: (row) => (row.errors ? "bad" : "") },
];

const tiles = new Tiles(byId("tiles"), byId("range"), TILES, worker);
const handled = new Table(byId("handled"), columns("caller", "Caller"), { sort: "per_s", empty: "nobody has called it yet" });
const made = new Table(byId("made"), columns("callee", "Callee"), { sort: "per_s", empty: "it has called nobody yet" });
new Logs(byId("logs"), { search: byId("log-search"), level: byId("log-level"), worker, linked: false });
new Errors(byId("errors"), { worker, linked: false, hint: byId("errors-hint") });

byId("name").textContent = worker;
byId("json").href = `api/workers/${encodeURIComponent(worker)}`;
document.title = `arpc · ${worker}`;

function show(group) {
  say("live");
  const row = group.workers.find((one) => one.name === worker);
  const problem = row ? row.error : `There is no worker ${worker} in this group.`;
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem;
  if (!row) return;
  byId("about").replaceChildren(
    html("span", { class: `state ${row.state}` }, row.state),
    ` id ${row.id}${row.pid ? ` · process ${row.pid} on ${row.host} · up for ${age(row.uptime_s)}` : ""}`);
  tiles.render(row, row.history);
  handled.render(group.series.filter((one) => one.callee === worker));
  made.render(group.series.filter((one) => one.caller === worker));
}

byId("stack-button").addEventListener("click", async (event) => {
  const button = event.currentTarget;
  button.disabled = true;
  try {
    renderStacks(byId("stack"), (await asked("api/stack")).filter((one) => one.name === worker));
  } catch (error) {
    byId("stack").replaceChildren(html("p", { class: "error" }, `Nothing could be learnt: ${error.message}`));
  } finally {
    button.disabled = false;
  }
});

listen(show);

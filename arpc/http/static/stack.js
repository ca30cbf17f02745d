// What waits, worker by worker, with links from a call to the handler that it waits for.
import { html } from "./dom.js";
import { duration } from "./format.js";

const anchor = (caller, callee, id) => `handler-${caller}-${callee}-${id}`;

export function renderStacks(element, workers) {
  const known = new Set(workers.flatMap((worker) => worker.handlers.map((handler) => anchor(handler.caller, worker.name, handler.id))));
  const parts = workers.map((worker) => one(worker, known));
  element.replaceChildren(...(parts.length ? parts : [html("p", { class: "empty" }, "No worker answered.")]));
}

function one(worker, known) {
  const items = [
    ...worker.handlers.map((handler) => item(
      html("span", {}, html("strong", {}, handler.function), ` for ${handler.caller}`), [handler.kind, left(handler.left_s)],
      handler.frames, handler.awaits, worker.name, known, anchor(handler.caller, worker.name, handler.id))),
    ...worker.tasks.map((task) => item(html("span", {}, "task ", html("strong", {}, task.name)), [], task.frames, task.awaits, worker.name, known)),
  ];
  const claimed = new Set([...worker.handlers, ...worker.tasks].filter((each) => each.awaits).map((each) => `${each.awaits.to}/${each.awaits.id}`));
  for (const call of worker.calls) {
    if (claimed.has(`${call.to}/${call.id}`)) continue;
    items.push(item(html("span", {}, "call of ", html("strong", {}, call.function), ` to ${call.to}`), [call.state, left(call.left_s)], [], { to: call.to, id: call.id, function: call.function }, worker.name, known));
  }
  return html("section", { class: "stack-worker" },
    html("h3", {}, html("code", {}, worker.name), html("span", { class: "hint" }, ` process ${worker.pid} · ${worker.handlers.length} handlers · ${worker.calls.length} calls · ${worker.requests_waiting} waiting`)),
    items.length ? html("ul", {}, ...items) : html("p", { class: "empty" }, "nothing waits here"));
}

const left = (seconds) => (seconds == null ? "no deadline" : `${duration(Math.max(0, seconds))} left`);

function item(title, facts, frames, awaits, here, known, id = null) {
  const place = awaits ? anchor(here, awaits.to, awaits.id) : null;
  const target = awaits ? `${awaits.function} on ${awaits.to}` : "";
  return html("li", { id },
    html("div", {}, title, ...facts.map((fact) => html("span", { class: "fact" }, fact))),
    frames.length ? html("ol", { class: "frames" }, ...frames.map((frame) => html("li", {}, html("code", {}, frame)))) : null,
    awaits ? html("p", { class: "awaits" }, "awaits ", known.has(place) ? html("a", { href: `#${place}` }, target) : target) : null);
}

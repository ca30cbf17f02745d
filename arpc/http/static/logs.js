// The last lines that workers logged, and which of their handlers failed, with the tracebacks.
import { asked } from "./ask.js";
import { html } from "./dom.js";
import { age, count } from "./format.js";

const PERIOD_MS = 2_000;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

// Asks again and again, but only while the element can be seen.
function whileSeen(element, act) {
  let isSeen = false;
  new IntersectionObserver((entries) => {
    const was = isSeen;
    isSeen = entries.at(-1).isIntersecting;
    if (isSeen && !was) act();
  }).observe(element);
  setInterval(() => isSeen && !document.hidden && act(), PERIOD_MS);
}

// controls: the elements of the search, the level, and for a group the worker; isPaused tells whether to stand still
export class Logs {
  constructor(element, { search, level, worker = "", linked = true, isPaused = () => false }) {
    Object.assign(this, { element, search, level, worker, linked, number: 0 });
    for (const control of [search, level]) control.addEventListener("input", () => this.refresh());
    whileSeen(element, () => isPaused() || this.refresh());
  }

  async refresh() {
    const number = ++this.number;
    const wanted = { level: this.level.value, search: this.search.value.trim(), worker: this.worker };
    try {
      const lines = await asked("api/logs", wanted);
      if (number === this.number) this.render(lines, wanted.level || wanted.search);
    } catch (error) {
      if (number === this.number) this.element.replaceChildren(html("p", { class: "error" }, `The logs could not be had: ${error.message}`));
    }
  }

  render(lines, isFiltered) {
    const { element } = this;
    const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 30;
    const opened = new Set([...element.querySelectorAll("details[open]")].map((details) => details.dataset.key));
    const empty = isFiltered ? "no line that fits" : "nothing was logged since counting began, at the levels that the program has set";
    element.replaceChildren(...(lines.length ? lines.map((line) => this.line(line, opened)) : [html("p", { class: "empty" }, empty)]));
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  }

  line(line, opened) {
    const key = `${line.worker}/${line.time_s}`;
    return html("div", { class: `log ${line.level.toLowerCase()}` },
      html("time", { datetime: new Date(line.time_s * 1000).toISOString() }, clock(line.time_s)),
      html("span", { class: "level" }, line.level),
      this.linked ? html("a", { href: workerPage(line.worker) }, line.worker) : null,
      html("code", { class: "logger" }, line.logger),
      html("span", { class: "message" }, line.message, line.peer ? html("span", { class: "fact" }, `for ${line.peer}`) : null,
        line.traceback ? html("details", { "data-key": key, open: opened.has(key) }, html("summary", {}, "traceback"), html("pre", {}, line.traceback)) : null));
  }
}

export class Errors {
  constructor(element, { worker = "", linked = true, hint = null, isPaused = () => false } = {}) {
    Object.assign(this, { element, worker, linked, hint });
    whileSeen(element, () => isPaused() || this.refresh());
  }

  async refresh() {
    try {
      this.render(await asked("api/errors", { worker: this.worker }));
    } catch (error) {
      this.element.replaceChildren(html("p", { class: "error" }, `The errors could not be had: ${error.message}`));
    }
  }

  render(rows) {
    const opened = new Set([...this.element.querySelectorAll("details[open]")].map((details) => details.dataset.key));
    const total = rows.reduce((sum, row) => sum + row.count, 0);
    if (this.hint) this.hint.textContent = total ? `${count(total)} since counting began` : "";
    this.element.replaceChildren(...(rows.length
      ? rows.map((row) => this.row(row, opened))
      : [html("p", { class: "empty" }, "no handler has failed since counting began")]));
  }

  row(row, opened) {
    const key = `${row.worker}/${row.function}/${row.error}`;
    return html("details", { class: "failure", "data-key": key, open: opened.has(key) },
      html("summary", {},
        html("strong", {}, row.error), html("span", { class: "message" }, row.message.split("\n")[0]),
        html("span", { class: "fact" }, `${count(row.count)}× in `, html("code", {}, row.function), " on ",
          this.linked ? html("a", { href: workerPage(row.worker) }, row.worker) : row.worker, ` for ${row.caller}, `,
          `${age(Math.max(0, Date.now() / 1000 - row.last_s))} ago`)),
      html("pre", {}, row.traceback));
  }
}

export const workerPage = (name) => `worker.html?${new URLSearchParams({ name })}`;

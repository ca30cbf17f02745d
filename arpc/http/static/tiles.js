// Numbers of the moment, each over a line of the last minute or of the last hour.
import { sparkline } from "./chart.js";
import { html } from "./dom.js";
import { asked } from "./ask.js";

const RANGES = { minute: { slots: 60, about: "last minute" }, hour: { slots: 360, about: "last hour" } };
const HOUR_PERIOD_MS = 10_000; // as often as it gets a new value

export class Tiles {
  // tiles: {key, title, value: latest => string, history?: name, tone?: latest => string, drawn?: latest => Node}
  constructor(element, buttons, tiles, worker = "") {
    Object.assign(this, { element, tiles, worker, range: "minute", hour: {}, latest: null, minute: {}, timer: 0 });
    this.buttons = Object.keys(RANGES).map((range) =>
      html("button", { type: "button", "aria-pressed": String(range === this.range), onclick: () => this.choose(range) }, RANGES[range].about));
    buttons.replaceChildren(...this.buttons);
  }

  render(latest, minute) {
    Object.assign(this, { latest, minute });
    const history = this.range === "hour" ? this.hour : minute;
    const { slots, about } = RANGES[this.range];
    this.element.replaceChildren(...this.tiles.map((tile) =>
      html("div", { class: `tile ${tile.tone?.(latest) ?? ""}`, "data-tile": tile.key },
        html("p", { class: "label" }, tile.title),
        html("p", { class: "value" }, tile.value(latest)),
        tile.drawn ? tile.drawn(latest) : sparkline(history[tile.history] ?? [], `${tile.title}, ${about}`, slots))));
  }

  async choose(range) {
    this.range = range;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(Object.keys(RANGES)[index] === range)));
    clearInterval(this.timer);
    if (range === "hour") {
      this.timer = setInterval(() => this.fetchHour(), HOUR_PERIOD_MS);
      await this.fetchHour();
    }
    if (this.latest) this.render(this.latest, this.minute);
  }

  async fetchHour() {
    const answer = await asked("api/history", { worker: this.worker }).catch(() => null); // the feed says what is wrong
    if (answer) this.hour = answer.history;
  }
}

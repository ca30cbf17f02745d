// Who calls whom: workers on a circle, calls as arrows as wide as they are many.
import { svg } from "./dom.js";
import { duration, rate } from "./format.js";

const SIZE = 440;
const MIDDLE = SIZE / 2;

export class Graph {
  constructor(element, onSelect) {
    this.element = element;
    this.onSelect = onSelect;
    this.key = "";
  }

  render(workers, pairs, selected) {
    const places = layout(workers);
    const focused = document.activeElement?.dataset?.worker;
    const heights = [...places.values()].map((place) => place.y);
    const [top, bottom] = [Math.min(...heights) - 48, Math.max(...heights) + 48];
    const drawn = svg("svg", { viewBox: `0 ${top} ${SIZE} ${bottom - top}`, class: "graph", role: "group", "aria-label": "Call graph of the workers" });
    const most = Math.max(...pairs.map((pair) => pair.per_s), 1e-9);
    const few = workers.length <= 6;
    const edges = pairs.filter((pair) => places.has(pair.caller) && places.has(pair.callee) && (pair.count || pair.in_flight));
    const labels = new Labels();
    for (const place of places.values()) labels.block(place.x - place.size, place.y - place.size, 2 * place.size, 2 * place.size);
    const nodes = workers.map((worker) => this.node(worker, places.get(worker.name), workers.length, selected, labels));
    // the busiest first: where there is no room for all, theirs are shown
    const busiest = [...edges].sort((a, b) => b.per_s - a.per_s);
    const texts = new Map(few ? busiest.map((pair) => [pair, rateLabel(pair, places, labels)]) : []);
    for (const pair of edges) drawn.append(edge(pair, places, most, selected, texts.get(pair)));
    drawn.append(...nodes);
    this.element.replaceChildren(drawn);
    if (focused) drawn.querySelector(`[data-worker="${CSS.escape(focused)}"]`)?.focus();
  }

  node(worker, place, total, selected, labels) {
    const radius = total > 24 ? 7 : total > 12 ? 11 : 17;
    const away = radius + (total > 12 ? 8 : 12);
    const anchor = Math.abs(place.dx) < 0.3 ? "middle" : place.dx > 0 ? "start" : "end";
    const about = `${worker.name}: ${worker.state}, ${rate(worker.handled_per_s)} calls/s handled, ${worker.in_flight} in flight`;
    const select = () => this.onSelect(worker.name);
    return svg("g", {
      class: `node ${worker.state} ${selected === worker.name ? "selected" : ""}`,
      tabindex: 0, role: "button", "aria-pressed": String(selected === worker.name), "aria-label": about,
      "data-worker": worker.name, onclick: select,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(); } },
    },
      svg("title", {}, about),
      svg("circle", { cx: place.x, cy: place.y, r: radius }),
      total <= 24 ? svg("text", { class: "id", x: place.x, y: place.y, dy: "0.35em", "text-anchor": "middle" }, String(worker.id)) : null,
      nameLabel(worker.name, place, away, anchor, labels));
  }
}

// Where texts are, so that none is put over another or over a worker. Widths are estimated: the page is not laid out yet.
class Labels {
  constructor() {
    this.taken = [];
  }

  block(x, y, width, height) {
    this.taken.push({ x, y, width, height });
  }

  place(text, x, y, size, anchor) {
    const width = text.length * size * 0.62 + 4;
    const box = { x: x - width * { start: 0, middle: 0.5, end: 1 }[anchor], y: y - size * 0.65, width, height: size * 1.3 };
    const isInside = box.x >= -30 && box.x + width <= SIZE + 30;
    const isFree = this.taken.every((other) => box.x + box.width <= other.x || other.x + other.width <= box.x
      || box.y + box.height <= other.y || other.y + other.height <= box.y);
    if (isInside && isFree) this.taken.push(box);
    return isInside && isFree;
  }
}

function nameLabel(name, place, away, anchor, labels) {
  const shown = name.length > 16 ? `${name.slice(0, 15)}…` : name;
  const x = place.x + place.dx * away;
  const y = place.y + place.dy * (away + (Math.abs(place.dy) > 0.3 ? 6 : 0));
  if (!labels.place(shown, x, y, 12.5, anchor)) return null; // its title tells the name
  return svg("text", { class: "name", x, y, dy: "0.35em", "text-anchor": anchor }, shown);
}

function rateLabel(pair, places, labels) {
  if (pair.per_s <= 0.05) return null;
  const text = `${rate(pair.per_s)}/s`;
  const [from, to] = [places.get(pair.caller), places.get(pair.callee)];
  // nearer to where it comes from: in the middle of the circle all of them meet
  const spots = from === to ? [loop(from).middle] : [0.3, 0.38, 0.22, 0.46, 0.54, 0.62].flatMap((part) => [8, 14].map((off) => curve(from, to).at(part, off)));
  const spot = spots.find(({ x, y }) => labels.place(text, x, y, 10.5, "middle"));
  return spot ? svg("text", { class: "rate", x: spot.x, y: spot.y, dy: "0.35em", "text-anchor": "middle" }, text) : null;
}

function layout(workers) {
  const radius = workers.length === 1 ? 0 : MIDDLE - 78;
  return new Map(workers.map((worker, index) => {
    const angle = (2 * Math.PI * index) / workers.length - Math.PI / 2 - (workers.length === 2 ? Math.PI / 2 : 0);
    const [dx, dy] = [Math.cos(angle), Math.sin(angle)];
    return [worker.name, { x: MIDDLE + dx * radius, y: MIDDLE + dy * radius, dx, dy, size: workers.length > 24 ? 7 : workers.length > 12 ? 11 : 17 }];
  }));
}

function edge(pair, places, most, selected, label) {
  const from = places.get(pair.caller);
  const to = places.get(pair.callee);
  const strength = Math.sqrt(pair.per_s / most);
  const state = ["edge", pair.per_s > 0.05 || pair.in_flight ? "busy" : "idle", pair.errors ? "failing" : ""];
  if (selected) state.push(pair.caller === selected || pair.callee === selected ? "chosen" : "dimmed");
  const about = `${pair.caller} → ${pair.callee}: ${rate(pair.per_s)}/s, p50 ${duration(pair.latency.p50_s)}, p99 ${duration(pair.latency.p99_s)}, ${pair.in_flight} in flight, ${pair.errors} errors`;
  const width = 1 + 4 * strength;
  const { path, end, toward } = from === to ? loop(from) : curve(from, to);
  return svg("g", { class: state.join(" ").trim() },
    svg("title", {}, about),
    svg("path", { d: path, "stroke-width": width.toFixed(2) }),
    svg("path", { d: tip(end, toward, width), class: "tip" }),
    label ?? null);
}

function curve(from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const [ux, uy] = [dx / length, dy / length];
  const bend = Math.min(34, length * 0.16); // both directions of a pair show
  const control = { x: (from.x + to.x) / 2 - uy * bend, y: (from.y + to.y) / 2 + ux * bend };
  const toward = direction(control, to);
  const end = shorten(control, to, to.size + 12);
  const start = shorten(control, from, from.size + 2);
  const along = (part, axis) => (1 - part) ** 2 * start[axis] + 2 * part * (1 - part) * control[axis] + part ** 2 * end[axis];
  const at = (part, off) => ({ x: along(part, "x") - uy * off, y: along(part, "y") + ux * off });
  return { path: `M${point(start)} Q${point(control)} ${point(end)}`, at, end, toward };
}

function loop(place) {
  const out = place.dx || place.dy ? place : { dx: 0, dy: -1 };
  const center = { x: place.x - out.dx * (place.size + 14), y: place.y - out.dy * (place.size + 14) };
  const [sx, sy] = [-out.dy * 9, out.dx * 9];
  const start = { x: place.x - out.dx * place.size + sx, y: place.y - out.dy * place.size + sy };
  const end = { x: place.x - out.dx * (place.size + 8) - sx, y: place.y - out.dy * (place.size + 8) - sy };
  const middle = { x: center.x - out.dx * 24, y: center.y - out.dy * 24 };
  return { path: `M${point(start)} A14 14 0 1 0 ${point(end)}`, middle, end, toward: { x: out.dx, y: out.dy } };
}

function direction(from, to) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  return { x: (to.x - from.x) / length, y: (to.y - from.y) / length };
}

function tip(end, toward, width) {
  const half = 3.2 + width * 0.8;
  const ahead = { x: end.x + toward.x * 10, y: end.y + toward.y * 10 };
  const side = (sign) => ({ x: end.x - sign * toward.y * half, y: end.y + sign * toward.x * half });
  return `M${point(ahead)} L${point(side(1))} L${point(side(-1))} z`;
}

function shorten(from, to, by) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  return { x: to.x - (dx / length) * by, y: to.y - (dy / length) * by };
}

const point = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;

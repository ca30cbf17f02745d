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
    for (const pair of edges) drawn.append(edge(pair, places, most, selected, few));
    for (const worker of workers) drawn.append(this.node(worker, places.get(worker.name), workers.length, selected));
    this.element.replaceChildren(drawn);
    if (focused) drawn.querySelector(`[data-worker="${CSS.escape(focused)}"]`)?.focus();
  }

  node(worker, place, total, selected) {
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
      total <= 40 ? svg("text", { x: place.x + place.dx * away, y: place.y + place.dy * away, dy: place.dy > 0.3 ? "0.8em" : place.dy < -0.3 ? "0" : "0.35em", "text-anchor": anchor }, worker.name) : null);
  }
}

function layout(workers) {
  const radius = workers.length === 1 ? 0 : MIDDLE - 78;
  return new Map(workers.map((worker, index) => {
    const angle = (2 * Math.PI * index) / workers.length - Math.PI / 2 - (workers.length === 2 ? Math.PI / 2 : 0);
    const [dx, dy] = [Math.cos(angle), Math.sin(angle)];
    return [worker.name, { x: MIDDLE + dx * radius, y: MIDDLE + dy * radius, dx, dy, size: workers.length > 24 ? 7 : workers.length > 12 ? 11 : 17 }];
  }));
}

function edge(pair, places, most, selected, few) {
  const from = places.get(pair.caller);
  const to = places.get(pair.callee);
  const strength = Math.sqrt(pair.per_s / most);
  const state = ["edge", pair.per_s > 0.05 || pair.in_flight ? "busy" : "idle", pair.errors ? "failing" : ""];
  if (selected) state.push(pair.caller === selected || pair.callee === selected ? "chosen" : "dimmed");
  const about = `${pair.caller} → ${pair.callee}: ${rate(pair.per_s)}/s, p50 ${duration(pair.latency.p50_s)}, p99 ${duration(pair.latency.p99_s)}, ${pair.in_flight} in flight, ${pair.errors} errors`;
  const width = 1 + 4 * strength;
  const { path, middle, end, toward } = from === to ? loop(from) : curve(from, to);
  return svg("g", { class: state.join(" ").trim() },
    svg("title", {}, about),
    svg("path", { d: path, "stroke-width": width.toFixed(2) }),
    svg("path", { d: tip(end, toward, width), class: "tip" }),
    few && pair.per_s > 0.05 ? svg("text", { x: middle.x, y: middle.y, dy: "0.35em", "text-anchor": "middle" }, `${rate(pair.per_s)}/s`) : null);
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
  // nearer to where it comes from: in the middle of the circle all of them meet
  const at = (part) => ["x", "y"].map((axis) => (1 - part) ** 2 * start[axis] + 2 * part * (1 - part) * control[axis] + part ** 2 * end[axis]);
  const [x, y] = at(0.3);
  return { path: `M${point(start)} Q${point(control)} ${point(end)}`, middle: { x: x - uy * 8, y: y + ux * 8 }, end, toward };
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

// The last minute, or the last hour, as a small line.
import { svg } from "./dom.js";

const WIDTH = 200;
const HEIGHT = 40;

// slots: how many values fill the line; fewer begin further right
export function sparkline(values, label, slots = 60) {
  const shown = values.slice(-slots);
  const most = Math.max(...shown, 0);
  const scale = most > 0 ? (HEIGHT - 4) / most : 0;
  const step = WIDTH / (slots - 1);
  const left = WIDTH - (shown.length - 1) * step;
  const points = shown.map((value, index) => `${(left + index * step).toFixed(1)},${(HEIGHT - 2 - value * scale).toFixed(1)}`);
  const chart = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (points.length > 1) {
    chart.append(
      svg("polygon", { class: "area", points: `${left.toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}` }),
      svg("polyline", { class: "line", points: points.join(" ") }),
    );
  }
  return chart;
}

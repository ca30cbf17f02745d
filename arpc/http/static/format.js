// Numbers as people read them.

// without zeros at the end, but only those behind the point
const trim = (value, digits) => value.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

export function count(value) {
  if (value == null) return "–";
  if (value < 1000) return Number.isInteger(value) ? String(value) : trim(value, value < 10 ? 2 : 1);
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${trim(value / size, value / size < 100 ? 1 : 0)}${unit}`;
  }
  return trim(value, 0);
}

export function rate(value) {
  return value ? (value < 0.1 ? "<0.1" : count(value < 10 ? Math.round(value * 10) / 10 : Math.round(value))) : "0";
}

export function bytes(value) {
  if (value == null) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${trim(value / size, value / size < 10 ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1e-3) return `${trim(seconds * 1e6, seconds < 1e-5 ? 1 : 0)} µs`;
  if (seconds < 1) return `${trim(seconds * 1e3, seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0)} ms`;
  return `${trim(seconds, seconds < 10 ? 2 : 1)} s`;
}

export function age(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return "<1 s";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

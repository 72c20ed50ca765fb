// The curves, drawn by uPlot: loss and rates first, then the other values that the training script reports.
import { bytes, number } from "/words.js";

const FIRST = ["loss", "steps_per_s", "grad_norm", "sent_bytes_per_s"];
const TITLES = { loss: "loss", steps_per_s: "steps / s", grad_norm: "gradient norm", sent_bytes_per_s: "bytes sent / s" };
const FROM_ZERO = /_per_s$|bytes/; // a rate's height means something
const MOST = 8;
const HEIGHT = 150;
const REDRAW_MS = 1000;
const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const plots = new Map();
let drawn = 0;

const title = (name) => TITLES[name] ?? name.replaceAll("_", " ").replace(" per s", " / s");
const shown = (name, value) => (name.includes("bytes") ? bytes(value) : number(value));
const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim(); // as the theme is when it is drawn

export function recolour() {
  for (const plot of plots.values()) plot.chart.redraw();
}

export function draw(parent, model) {
  if (performance.now() - drawn < REDRAW_MS && drawn) return;
  drawn = performance.now();
  const names = [...FIRST.filter((n) => model.curves.has(n)), ...[...model.curves.keys()].filter((n) => !FIRST.includes(n))].slice(0, MOST);
  for (const [name, plot] of plots) if (!names.includes(name)) { plot.chart.destroy(); plot.figure.remove(); plots.delete(name); }
  for (const name of names) {
    const [at, values] = model.curves.get(name);
    if (values.length < 2) continue;
    const plot = plots.get(name) ?? begin(parent, name);
    const newest = shown(name, values[values.length - 1]);
    plot.value.textContent = newest;
    plot.figure.setAttribute("aria-label", `${title(name)}: ${newest} now, between ${shown(name, Math.min(...values))} and ${shown(name, Math.max(...values))} since the history began`);
    plot.chart.setData([at.map((t) => model.began + t), values]);
    const width = plot.box.clientWidth;
    if (width && Math.abs(width - plot.chart.width) > 2) plot.chart.setSize({ width, height: HEIGHT });
  }
}

function begin(parent, name) {
  const figure = document.createElement("figure");
  figure.className = "card";
  figure.setAttribute("role", "img");
  const caption = document.createElement("figcaption");
  const value = document.createElement("b");
  caption.append(title(name), " ", value);
  const box = document.createElement("div");
  figure.append(caption, box);
  parent.append(figure);
  const ink = colour("--quiet"), grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui" };
  const chart = new uPlot({
    width: box.clientWidth || 300, height: HEIGHT, padding: [8, 26, 0, 0], legend: { show: false }, cursor: { y: false },
    scales: { y: { range: (_, low, high) => (FROM_ZERO.test(name) ? [0, high > 0 ? 1.1 * high : 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
    axes: [{ ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map((t) => clock.format(new Date(1000 * t))) }, { ...axis, size: 52, values: (_, ticks) => ticks.map((t) => shown(name, t)) }],
    series: [{}, { stroke: colour("--accent"), width: 1.75, fill: colour("--fill"), points: { show: false } }],
  }, [[], []], box);
  const plot = { figure, value, box, chart };
  plots.set(name, plot);
  return plot;
}

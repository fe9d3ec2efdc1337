// Line charts and stacked bars as SVG: axes, a legend with the last values, and a cursor that reads every series at one step.
import { el, number } from "./dom.js";

const WIDTH = 560, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22, MOST_POINTS = 150, COLORS = 8;

/** The least round number that is not below `value`: ends of axes that can be halved in the head. */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 3, 4, 5, 6, 8].find((factor) => factor * unit >= value * (1 - 1e-9)) ?? 10) * unit;
}

/** Each value as the mean of the last `steps` values up to it. */
const smoothed = (values, steps) => values.map(([x], index) => { const last = values.slice(Math.max(0, index - steps + 1), index + 1); return [x, last.reduce((sum, [, y]) => sum + y, 0) / last.length]; });

/** `series`: {name, values: [[x, y], ...], marks?: true}. `stacked` draws areas that add up; `smooth` draws lines as means of the
 *  last so many values, with the values themselves behind them. */
export function chart(title, series, { stacked = false, floor = 0, ceiling = null, digits = 2, unit = "", smooth = 1 } = {}) {
  const raw = smooth > 1 && !stacked ? series.filter((each) => each.values.length && !each.marks).map((each) => ({ ...each, values: thinned(each.values), behind: true })) : [];
  if (raw.length) series = series.map((each) => (each.marks ? each : { ...each, values: smoothed(each.values, smooth) }));
  const drawn = [...raw, ...series.filter((each) => each.values.length).map((each) => ({ ...each, values: each.marks ? each.values : thinned(each.values) }))];
  if (!drawn.length) return el("p", { class: "empty" }, "no steps yet");
  const xs = series.flatMap((each) => each.values.map(([x]) => x));
  const [low, high] = [Math.min(...minmax(xs)), Math.max(...minmax(xs))];
  const tops = stacked ? sums(drawn) : drawn.flatMap((each) => each.values.map(([, y]) => y));
  const [least, most] = minmax(tops);
  const bottom = Math.min(floor ?? least, least), above = Math.max(ceiling ?? most, most, bottom + 1e-9);
  const top = bottom === 0 ? roundUp(above) : above;
  const half = stacked ? 0.5 : 0;
  const x = (value) => LEFT + ((value - low + half) / Math.max(high - low + 2 * half, 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - bottom) / (top - bottom)) * (HEIGHT - BOTTOM - TOP);
  const last = series.filter((each) => each.values.length).map((each) => `${each.name} ${number(each.values.at(-1)[1], digits)}${unit}`).join(", ");
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${last} at step ${high}` });
  for (const value of [bottom, (bottom + top) / 2, top])
    svg.append(el("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }), el("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, top >= 10_000 ? compact(value) : number(value, top - bottom < 10 ? 2 : 0)));
  for (const value of [...new Set([low, Math.round((low + high) / 2), high])])
    svg.append(el("text", { x: x(value), y: HEIGHT - 6, "text-anchor": stacked ? "middle" : value === low ? "start" : value === high ? "end" : "middle" }, value));
  stacked ? drawStack(svg, drawn, x, y, bottom) : drawLines(svg, drawn, x, y);
  const legend = el("ul", { class: "legend" }, series.map((each, index) => el("li", { class: `c${index % COLORS}` }, el("i"), each.name, " ", el("b", {}, each.values.length ? number(each.values.at(-1)[1], digits) + unit : "–"))));
  const cursor = el("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = low + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (high - low);
    const step = Math.max(low, Math.min(high, Math.round(at)));
    cursor.setAttribute("visibility", "visible"); cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step));
    series.forEach((each, index) => { const found = each.values.find(([value]) => value === step); legend.children[index].lastChild.textContent = found ? `${number(found[1], digits)}${unit} (${step})` : "–"; });
  });
  svg.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
  return el("div", {}, svg, legend, el("button", { type: "button", class: "link", title: `${title} as a picture`, click: () => savePng(svg, title) }, "PNG"));
}

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "fill-opacity", "font-size", "font-family", "visibility"];

/** The chart as a file, twice as large: with the styles that it has here, on the ground of the page. */
function savePng(svg, title) {
  const copy = svg.cloneNode(true), copied = [copy, ...copy.querySelectorAll("*")];
  [svg, ...svg.querySelectorAll("*")].forEach((node, index) => { const has = getComputedStyle(node); for (const name of DRAWN) copied[index].setAttribute(name, has.getPropertyValue(name)); });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", WIDTH); copy.setAttribute("height", HEIGHT);
  const image = new Image();
  image.onload = () => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * WIDTH, height: 2 * HEIGHT }), context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(svg.closest("section")).backgroundColor;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    el("a", { href: canvas.toDataURL("image/png"), download: `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.png` }).click();
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}

/** Columns of steps by bins of rewards, as `RewardHistogram` says: the stronger a cell, the larger its share of the column. */
export function heatmap(title, { first, last, width, low, high, counts }) {
  if (!counts.length) return el("p", { class: "empty" }, "no steps yet");
  const bins = counts[0].length;
  const across = (WIDTH - LEFT - RIGHT) / counts.length, up = (HEIGHT - BOTTOM - TOP) / bins;
  const edge = (bin) => number(low + ((high - low) * bin) / bins, 2);
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: steps ${first} to ${last}, rewards from ${edge(0)} to ${edge(bins)}` });
  counts.forEach((column, index) => {
    const all = column.reduce((sum, count) => sum + count, 0), from = first + index * width;
    column.forEach((count, bin) => count && svg.append(el("rect", { class: "fill c0", x: (LEFT + index * across).toFixed(2), y: (HEIGHT - BOTTOM - (bin + 1) * up).toFixed(2), width: Math.max(across - 0.3, 0.8).toFixed(2), height: (up - 0.3).toFixed(2), "fill-opacity": (0.12 + (0.88 * count) / all).toFixed(2) },
      el("title", {}, `steps ${from} to ${Math.min(from + width - 1, last)}: ${count} of ${all} episodes have a reward from ${edge(bin)} to ${edge(bin + 1)}`))));
  });
  for (const bin of [0, bins / 2, bins]) svg.append(el("text", { x: LEFT - 6, y: HEIGHT - BOTTOM - bin * up + 4, "text-anchor": "end" }, edge(bin)));
  svg.append(el("text", { x: LEFT, y: HEIGHT - 6 }, first), el("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, last));
  return el("div", {}, svg, el("p", { class: "legend dim" }, "rewards by step; the stronger a cell, the larger its share of the step's episodes"));
}

const compact = (value) => value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });

/** Means of neighbours where there are more points than can be distinguished; the legend and the cursor still read single steps. */
function thinned(values) {
  const width = Math.ceil(values.length / MOST_POINTS);
  if (width === 1) return values;
  const means = [];
  for (let from = 0; from < values.length; from += width) {
    const part = values.slice(from, from + width);
    means.push([part[Math.floor(part.length / 2)][0], part.reduce((sum, [, value]) => sum + value, 0) / part.length]);
  }
  return means;
}

function minmax(values) {
  let least = Infinity, most = -Infinity;
  for (const value of values) { if (value < least) least = value; if (value > most) most = value; }
  return [least, most];
}

function sums(series) {
  const totals = new Map();
  for (const each of series) for (const [x, y] of each.values) totals.set(x, (totals.get(x) ?? 0) + y);
  return [0, ...totals.values()];
}

function drawLines(svg, series, x, y) {
  series.forEach((each) => {
    const color = `c${each.color}`;
    if (each.marks) {
      for (const [at, value] of each.values) svg.append(el("circle", { class: `mark ${color}`, cx: x(at), cy: y(value), r: 3.5 }, el("title", {}, `${each.name} at step ${at}: ${number(value, 3)}`)));
      return;
    }
    if (each.values.length === 1 && each.behind) return;
    const path = each.values.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg.append(el("path", { class: `line ${color}${each.behind ? " behind" : ""}`, d: path }));
    if (each.values.length === 1) svg.append(el("circle", { class: `mark ${color}`, cx: x(each.values[0][0]), cy: y(each.values[0][1]), r: 2.5 }));
  });
}

function drawStack(svg, series, x, y, bottom) {
  const base = new Map();
  const steps = new Set(series.flatMap((each) => each.values.map(([at]) => at)));
  const width = Math.max((WIDTH - LEFT - RIGHT) / Math.max(steps.size, 1) - 0.4, 0.8);
  for (const each of series)
    for (const [at, value] of each.values) {
      const from = base.get(at) ?? 0;
      base.set(at, from + value);
      const left = Math.min(Math.max(x(at) - width / 2, LEFT), WIDTH - RIGHT - width);
      svg.append(el("rect", { class: `fill c${each.color}`, x: left.toFixed(2), width: width.toFixed(2), y: y(from + value).toFixed(2), height: Math.max(y(from) - y(from + value), 0).toFixed(2) }));
    }
}

/** Give every series the color of its place, so that one without values does not move the others. */
export const colored = (series) => series.map((each, index) => ({ ...each, color: index % COLORS }));

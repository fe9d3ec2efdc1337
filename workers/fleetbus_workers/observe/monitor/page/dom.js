// Elements out of data. Text only ever becomes text nodes: what policies and tasks say is never markup.

/** An element: `el("td", {class: "number"}, "12")`. Functions become listeners, `style` is an object of properties. */
export function el(tag, attributes = {}, ...children) {
  const svg = SVG.has(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") for (const [property, set] of Object.entries(value)) node.style.setProperty(property, set);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => child.nodeType ? child : String(child)));
  return node;
}

const SVG = new Set(["svg", "path", "line", "rect", "circle", "text", "g", "title"]);

export const number = (value, digits = 0) =>
  value === null || value === undefined || Number.isNaN(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${(value / size).toFixed(1)}\u00a0${unit}`;
  return `${value}\u00a0B`;
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(0)} %`);

/** A value of a metric in its unit. */
export const quantity = (value, { unit, digits }) => unit === "ratio" ? percent(value) : unit === "s" ? seconds(value) : unit === "bytes" ? bytes(value) : number(value, digits);

/** A table of `rows`; columns are `[title, cell(row), class, field]`. `open(row)` makes rows reachable by keyboard; `sort` is
 *  `{by, go(by)}`: columns with a field are then sorted by a click, the second time from the largest on. */
export function table(caption, columns, rows, open, sort) {
  const head = el("tr", {}, columns.map(([title, , kind, field]) => sort && field ? sorter(title, kind, field, sort) : el("th", { scope: "col", class: kind }, title)));
  const body = rows.map((row) => {
    const cells = columns.map(([, cell, kind]) => {
      const content = cell(row);
      return el("td", { class: kind }, content?.nodeType || Array.isArray(content) ? content : String(content ?? ""));
    });
    if (!open) return el("tr", {}, cells);
    return el("tr", { tabindex: "0", click: (event) => event.target.closest("a") || open(row), keydown: (event) => event.key === "Enter" && event.target.tagName === "TR" && open(row) }, cells);
  });
  return el("div", { class: "scroll", tabindex: rows.length ? undefined : "-1" }, el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)));
}

function sorter(title, kind, field, { by, go }) {
  const order = by === field ? "ascending" : by === `-${field}` ? "descending" : "none";
  const next = order === "ascending" ? `-${field}` : order === "descending" ? "" : field;
  return el("th", { scope: "col", class: kind, "aria-sort": order }, el("button", { type: "button", class: "sort", click: () => go(next) }, title, { ascending: " ▲", descending: " ▼", none: "" }[order]));
}

export const section = (title, ...content) => el("section", { "aria-label": title }, el("h2", {}, title), ...content);

/** URL parameters with some of them set, or left out if they are empty. */
export function changed(query, changes) {
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) value || value === 0 ? next.set(name, value) : next.delete(name);
  return next;
}

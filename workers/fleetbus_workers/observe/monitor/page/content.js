// What messages have in them: text with the colors of a terminal, Markdown, diffs, images, values as a tree.
import { colored, isDiff } from "./diff.js";
import { el } from "./dom.js";
import { markdown } from "./markdown.js";

const ESCAPES = /\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[([0-9;:]*)m|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]?/g;
const MOST_NODES = 2000, MOST_DEPTH = 50, MOST_JSON = 200_000, LINE = 80;

/** The text as nodes: colors of a terminal as classes, its other escape sequences left out. */
export function text(said) {
  if (!said.includes("\x1b")) return [said];
  const nodes = [];
  let at = 0, color = "";
  const add = (part) => part && nodes.push(color ? el("span", { class: color }, part) : part);
  for (const match of said.matchAll(ESCAPES)) {
    add(said.slice(at, match.index));
    at = match.index + match[0].length;
    if (match[1] !== undefined) color = colorOf(match[1], color);
  }
  add(said.slice(at));
  return nodes;
}

/** The class after a sequence that selects colors; those of 256 and more are left out. */
function colorOf(codes, before) {
  let color = before;
  const numbers = codes.split(/[;:]/).map(Number);
  for (const [index, code] of numbers.entries()) {
    if (code === 38 || code === 48) return code === 38 ? "" : color;
    if (code === 0 || code === 39) color = "";
    else if (code >= 30 && code <= 37) color = `ansi${code - 30}`;
    else if (code >= 90 && code <= 97) color = `ansi${code - 90}`;
    else if (code === 1 && index === 0 && !color) color = "ansibold";
  }
  return color;
}

/** The content of a message: a text, or texts and images in order. */
export const content = (parts) => typeof parts === "string" ? text(parts) : (parts ?? []).flatMap((part, index) => [...(index ? ["\n"] : []), ...(part.type === "Image" ? [image(part)] : text(part.text || `[${part.type} ${part.object?.slice(0, 12) ?? ""}]`))]);

/** The content as a reader wants it; what is no more than text stands there as it was said. */
export function read(parts) {
  const pieces = typeof parts === "string" ? [{ text: parts }] : (parts ?? []);
  const shown = pieces.map((part) => part.type === "Image" ? image(part) : rendered(part.text ?? ""));
  return shown.some((node, index) => node && pieces[index].type !== "Image") ? shown.map((node, index) => node ?? el("pre", {}, content([pieces[index]]))) : [el("pre", {}, content(parts))];
}

/** A text of more than words: JSON as a tree, Markdown, a diff in colors; else null. */
function rendered(said) {
  const value = json(said), left = { nodes: MOST_NODES };
  return value ? el("div", { class: "tree" }, Object.entries(value).slice(0, MOST_NODES + 1).map(([key, each]) => branch(key, each, left))) : prose(said);
}

/** Markdown, or a diff in colors; else null. */
export const prose = (said) => said.includes("\x1b") ? null : isDiff(said) && !said.includes("```") ? el("pre", {}, colored(said)) : markdown(said);

/** What a long text is as JSON, if it is an object or a list. */
function json(said) {
  if (said.length <= LINE || said.length > MOST_JSON || !"{[".includes(said.trimStart()[0] ?? " ")) return null;
  try { return JSON.parse(said); } catch { return null; }
}

function image({ object, width, height }) {
  const shown = el("img", { src: `api/images/${encodeURIComponent(object)}`, loading: "lazy", alt: `image ${object.slice(0, 12)}`, title: `${width || "?"} × ${height || "?"}, ${object.slice(0, 12)}`, width: width || null, height: height || null, error: () => shown.replaceWith(`[Image ${object.slice(0, 12)}: not to be shown]`) });
  return shown;
}

/** A call with its arguments: in a line, or as a tree if they are long. */
export function call({ name, arguments: given }) {
  const line = JSON.stringify(given ?? {});
  if (line.length <= LINE) return el("pre", { class: "dim" }, `→ ${name}(${line})`);
  const left = { nodes: MOST_NODES };
  return el("details", { class: "tree", open: true }, el("summary", {}, `→ ${name}`), Object.entries(given).map(([key, value]) => branch(key, value, left)));
}

function branch(name, value, left, depth = 0) {
  if ((left.nodes -= 1) < 0 || depth > MOST_DEPTH) return el("pre", { class: "dim" }, `${name}: …`);
  if (value === null || typeof value !== "object") return el("pre", {}, el("span", { class: "dim" }, `${name}: `), typeof value === "string" ? text(value) : String(value));
  const entries = Object.entries(value);
  return el("details", {}, el("summary", {}, `${name}: ${Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`}`), entries.slice(0, MOST_NODES + 1).map(([key, each]) => branch(key, each, left, depth + 1)));
}

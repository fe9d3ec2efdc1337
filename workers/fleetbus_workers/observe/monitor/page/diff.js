// Differences of lines: those that a text states, colored, and that of two texts.
import { el } from "./dom.js";

const HUNK = /^@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? [+][0-9]{1,9}(?:,([0-9]{1,9}))? @@/, ANY_HUNK = new RegExp(HUNK.source, "m");
const CONTEXT = 3, MOST_CELLS = 1_000_000, MOST_LINES = 5000, MOST_COLORED = 20_000;
const KINDS = { "+": "added", "-": "removed" };

/** Whether there is a unified diff in a text. */
export const isDiff = (said) => ANY_HUNK.test(said);

/** The text with the lines of its hunks colored; `whole`: of all its lines, as where it says of itself that it is a diff. */
export function colored(said, whole = false) {
  let removed = 0, added = 0;
  const lines = said.split("\n"), rest = lines.slice(MOST_COLORED).map((line) => `\n${line}`).join("");
  return [...lines.slice(0, MOST_COLORED).flatMap((line, index) => {
    const begins = line.match(HUNK), before = index ? "\n" : "";
    if (begins) { removed = Number(begins[1] ?? 1); added = Number(begins[2] ?? 1); return [before, el("span", { class: "hunk" }, line)]; }
    const inside = removed > 0 || added > 0;
    if (!inside && /^(---|[+][+][+]|diff |index )/.test(line)) return [before, el("span", { class: "dim" }, line)];
    if (line[0] !== "+") removed -= 1;
    if (line[0] !== "-") added -= 1;
    return [before, (inside || whole) && KINDS[line[0]] ? el("span", { class: KINDS[line[0]] }, line) : line];
  }), rest];
}

/** What changed from one text to another, with some lines around it; null if nothing did, or more than is compared. */
export function between(before, after) {
  const one = before.split("\n"), other = after.split("\n");
  if (before === after || one.length + other.length > MOST_LINES) return null;
  let top = 0, end = 0;
  while (top < Math.min(one.length, other.length) && one[top] === other[top]) top += 1;
  while (end < Math.min(one.length, other.length) - top && one[one.length - 1 - end] === other[other.length - 1 - end]) end += 1;
  const changes = align(one.slice(top, one.length - end), other.slice(top, other.length - end));
  if (!changes) return null;
  const lines = [...one.slice(0, top).map((line) => [" ", line]), ...changes, ...one.slice(one.length - end).map((line) => [" ", line])];
  const changed = lines.map(([mark]) => mark !== " ");
  const near = (index) => changed.slice(Math.max(0, index - CONTEXT), index + CONTEXT + 1).includes(true);
  const shown = lines.map((line, index) => (near(index) ? line : null));
  return el("pre", {}, shown.flatMap((line, index) => {
    if (!line) return index && !shown[index - 1] ? [] : [el("span", { class: "hunk" }, "…\n")];
    return [el("span", { class: KINDS[line[0]] }, `${line[0]}${line[1]}`), "\n"];
  }));
}

/** The lines of both in order, each with its mark: the longest common part stays; null if that would take long. */
function align(one, other) {
  if (one.length * other.length > MOST_CELLS) return null;
  const width = other.length + 1, common = new Uint16Array((one.length + 1) * width), lines = [];
  for (let i = one.length - 1; i >= 0; i -= 1) for (let j = other.length - 1; j >= 0; j -= 1) common[i * width + j] = one[i] === other[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
  let i = 0, j = 0;
  while (i < one.length || j < other.length) {
    if (i < one.length && j < other.length && one[i] === other[j]) { lines.push([" ", one[i]]); i += 1; j += 1; }
    else if (j >= other.length || (i < one.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) { lines.push(["-", one[i]]); i += 1; }
    else { lines.push(["+", other[j]]); j += 1; }
  }
  return lines;
}

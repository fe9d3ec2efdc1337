// A little Markdown out of text that nobody trusts: headings, lists, tables, code, bold. No links, images or markup of its own.
// One pass, in time that grows with the text alone: who writes the text must not be able to stop the page.
import { isDiff, colored } from "./diff.js";
import { el } from "./dom.js";

const MOST_CHARACTERS = 200_000, MOST_BLOCKS = 3000, MOST_MARKS = 10_000, MOST_ROWS = 1000, MOST_COLUMNS = 50;
const FENCE = /^ {0,3}(```|~~~)[`~]*(|[^`~][^`]*)$/, HEADING = /^(#{1,6}) +(.*)$/s, ITEM = /^( *)([-*+]|[0-9]{1,9}[.)]) +(.*)$/s;
const isRule = (line) => line !== undefined && line.includes("-") && line.includes("|") && /^[ :|-]+$/.test(line);

/** The text as elements; null if there is nothing in it that is more than text. */
export function markdown(said) {
  if (said.length > MOST_CHARACTERS) return null;
  const lines = said.split("\n"), blocks = [], seen = { marks: 0 };
  let at = 0, plain = [];
  const flush = () => { if (plain.some((line) => line.trim())) blocks.push(el("p", {}, inline(plain.join("\n").trim(), seen))); plain = []; };
  const add = (node) => { flush(); seen.marks += 1; blocks.push(node); };
  while (at < lines.length && blocks.length < MOST_BLOCKS) {
    const line = lines[at], fence = line.match(FENCE), heading = line.match(HEADING), item = line.match(ITEM);
    at += 1;
    if (fence) {
      let end = at;
      while (end < lines.length && !(lines[end].trim().startsWith(fence[1]) && !lines[end].trim().replace(/[`~]+/, ""))) end += 1;
      const code = lines.slice(at, end).join("\n");
      add(el("pre", { class: "code" }, fence[2].trim() === "diff" || isDiff(code) ? colored(code, fence[2].trim() === "diff") : code));
      at = end + 1;
    } else if (heading) add(el("h4", {}, inline(heading[2], seen)));
    else if (item) add(el("div", { class: "item", style: { "--depth": Math.min(8, Math.floor(item[1].length / 2)) } }, el("span", { class: "dim" }, /[0-9]/.test(item[2]) ? item[2] : "•"), el("span", {}, inline(item[3], seen))));
    else if (line.includes("|") && isRule(lines[at])) {
      const rows = [];
      for (at += 1; at < lines.length && rows.length < MOST_ROWS && lines[at].includes("|"); at += 1) rows.push(lines[at]);
      const cells = (row, tag) => el("tr", {}, row.trim().replace(/^[|]/, "").replace(/[|]$/, "").split("|", MOST_COLUMNS).map((cell) => el(tag, { class: "wide" }, inline(cell.trim(), seen))));
      add(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, cells(line, "th")), el("tbody", {}, rows.map((row) => cells(row, "td"))))));
    } else if (line.trim()) plain.push(line);
    else flush();
  }
  flush();
  if (at < lines.length) blocks.push(el("pre", {}, lines.slice(at).join("\n")));
  return seen.marks ? el("div", { class: "markdown" }, blocks) : null;
}

/** Code and bold within a text; a mark without its end stays as it is. */
function inline(said, seen) {
  const parts = said.split(/(`|[*][*])/), ends = new Array(parts.length), last = {}, nodes = [];
  for (let index = parts.length - 2; index > 0; index -= 2) { ends[index] = last[parts[index]]; last[parts[index]] = index; }
  let plain = "";
  for (let index = 0; index < parts.length; index += 1) {
    const end = ends[index], within = end && parts.slice(index + 1, end).join("");
    if (!end || !within.trim() || seen.marks > MOST_MARKS) { plain += parts[index]; continue; }
    nodes.push(plain, el(parts[index] === "`" ? "code" : "strong", {}, within));
    plain = "";
    seen.marks += 1;
    index = end;
  }
  return [...nodes, plain];
}

// Two evaluations task by task, of one run or of two: what changed, paired by task, and how certain that is.
import { changed, el, number, section, table } from "./dom.js";
import { pager } from "./episodes.js";

const SLOW_MS = 500;
const signed = (value) => (value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${value.toFixed(3)}`);

/** The comparison that `query` asks for: `one` and `other`, each RUN@EVALUATION. */
export async function evaluations(query, go) {
  const offset = Number(query.get("offset") ?? 0);
  const said = document.getElementById("said"), slow = setTimeout(() => { said.textContent = "reading the logs of the runs"; }, SLOW_MS);
  const answer = await fetch(`/api/comparison?${query}`).finally(() => { clearTimeout(slow); said.textContent = ""; });
  if (!answer.ok) return [section("Evaluations", el("p", { class: "bad", role: "alert" }, await answer.text()))];
  const found = await answer.json();
  const sides = ["one", "other"].map((name) => side(name, found, query));
  const form = el("form", { submit: (event) => event.preventDefault(), change: () => go(changed(query, { ...Object.fromEntries(sides.map(({ name, chosen }) => [name, chosen()])), offset: "" })) }, sides[1].fields, " less ", sides[0].fields);
  const { comparison } = found;
  if (!comparison) return [section("Evaluations", form, el("p", { class: found.problem ? "warn" : "empty", role: "status" }, found.problem))];
  const unpaired = comparison.only_one + comparison.only_other;
  const about = el("p", {}, `${comparison.other} less ${comparison.one}, over ${number(found.total)} tasks that both graded${unpaired ? `; left out: ${number(comparison.only_one)} tasks of the first alone, ${number(comparison.only_other)} of the second alone` : ""}`);
  return [section("Evaluations", form, about, found.total ? whole(comparison) : null), found.total ? tasks(found, offset, query, go) : null].filter(Boolean);
}

/** The fields of one side; `chosen()` is what they say. Another run is asked for its newest evaluation. */
function side(name, { run, others, evaluations, comparison }, query) {
  const [asked, wanted] = (comparison?.[name] || query.get(name) || run).split("@");
  const select = (what, values, value) => el("select", { name: `${name}-${what}`, "aria-label": `${what} of the ${name === "one" ? "first" : "second"} side` }, values.map(([each, title]) => el("option", { value: each, selected: each === value }, title)));
  const runs = select("run", [...new Set([run, ...others, asked])].map((each) => [each, each]), asked);
  const known = evaluations[asked] ?? [];
  const list = select("evaluation", wanted && known.includes(wanted) ? known.map((each) => [each, each]) : [["", "newest"], ...known.map((each) => [each, each])], wanted ?? "");
  return { name, fields: el("span", {}, runs, " ", list), chosen: () => (runs.value === asked && list.value ? `${runs.value}@${list.value}` : runs.value) };
}

/** Means over all tasks with their intervals, drawn on one scale. */
function whole({ reward, success }) {
  const rows = [["reward", reward], ["success", success]];
  const reach = Math.max(1e-9, ...rows.flatMap(([, size]) => [size.value, size.low ?? 0, size.high ?? 0].map(Math.abs)));
  const columns = [
    ["mean over tasks", ([title]) => title], ["difference", ([, size]) => signed(size.value), "number"],
    ["95 % interval", ([, size]) => (size.low === null ? "one task: not known" : `${signed(size.low)} to ${signed(size.high)}`), "number"],
    ["", ([, size]) => bar(size.low ?? size.value, size.high ?? size.value, size.value, reach)], ["", ([, size]) => verdict(size)],
  ];
  return table("Paired differences", columns, rows);
}

function verdict({ low, high }) {
  if (low > 0) return el("span", { class: "good" }, "better");
  if (low !== null && high < 0) return el("span", { class: "bad" }, "worse");
  return el("span", { class: "dim" }, "no difference that is certain");
}

function tasks({ comparison, total, run }, offset, query, go) {
  const sort = { by: query.get("sort") ?? "", go: (by) => go(changed(query, { sort: by, offset: "" }), undefined, { replace: true }) };
  const reach = Math.max(1e-9, ...comparison.tasks.map((each) => Math.abs(each.other - each.one)));
  const columns = [
    ["task", (row) => row.task, "wide", "task"], [comparison.one, (row) => number(row.one, 3), "number", "one"], [comparison.other, (row) => number(row.other, 3), "number", "other"],
    ["difference", (row) => signed(row.other - row.one), "number", "difference"], ["", (row) => bar(Math.min(0, row.other - row.one), Math.max(0, row.other - row.one), null, reach)],
    ["episodes", (row) => row.episodes.join(", "), "number"],
  ];
  const shown = [comparison.one, comparison.other].some((each) => each.split("@")[0] === run);
  const open = shown ? (row) => go(new URLSearchParams({ text: row.task, split: "eval" }), "episodes") : null;
  const form = el("form", { submit: (event) => event.preventDefault() }, pager(offset, total, (next) => go(changed(query, { offset: next })), ["previous", "next"]));
  return section("Tasks", form, table(sort.by ? `sorted by ${comparison[sort.by.replace("-", "")] ?? sort.by.replace("-", "")}` : "those that lost most first", columns, comparison.tasks, open, sort));
}

/** From `low` to `high` on a scale from -`reach` to `reach`, with a mark at 0 and one at `value`. */
function bar(low, high, value, reach) {
  const at = (each) => `${50 + (50 * each) / reach}%`;
  const marks = [0, ...(value === null ? [] : [value])].map((each, index) => el("i", { class: index ? "at" : "zero", style: { left: at(each) } }));
  return el("div", { class: "track scale", role: "img", "aria-label": `${signed(low)} to ${signed(high)}` }, el("i", { class: `span ${high <= 0 ? "c1" : low >= 0 ? "c2" : "c7"}`, style: { left: at(low), width: `${(50 * (high - low)) / reach}%` } }), marks);
}

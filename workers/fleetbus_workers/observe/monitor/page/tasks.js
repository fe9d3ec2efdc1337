// Success, reward and the use of tools by environment and by task: which tasks are learned, and which are not.
import { changed, el, number, percent, section, table } from "./dom.js";
import { pager } from "./episodes.js";

export async function tasks(query, go) {
  const load = async (changes) => (await fetch(`/api/success?${changed(query, changes)}`)).json();
  const offset = Number(query.get("offset") ?? 0);
  const [environments, found] = await Promise.all([load({ by: "env", offset: "" }), load({})]);
  const split = el("select", { name: "split", "aria-label": "Split", change: (event) => go(changed(query, { split: event.target.value, offset: "" })) }, ["", "train", "eval"].map((name) => el("option", { value: name, selected: (query.get("split") ?? "") === name }, name || "any split")));
  const sort = { by: query.get("sort") ?? "", go: (by) => go(changed(query, { sort: by, offset: "" }), undefined, { replace: true }) };
  const columns = (title) => [
    [title, (row) => row.name, "wide", "name"], ["episodes", (row) => number(row.episodes), "number", "episodes"], ["graded", (row) => number(row.graded), "number", "graded"],
    ["success", (row) => percent(row.success), "number", "success"], ["mean reward", (row) => number(row.mean, 2), "number", "mean"],
    ["tool calls per episode", (row) => number(row.tool_calls, 1), "number", "tool_calls"], ["failed calls", (row) => percent(row.tool_errors), "number", "tool_errors"],
  ];
  const form = el("form", { submit: (event) => event.preventDefault() }, split, pager(offset, found.total, (next) => go(changed(query, { offset: next })), ["previous", "next"]));
  if (!found.total) return [section("Tasks", form, el("p", { class: "empty" }, "no episode yet"))];
  return [
    section("Environments", table(`${number(environments.total)} ${environments.total === 1 ? "environment" : "environments, least success first"}`, columns("environment"), environments.rows)),
    section("Tasks", form, table(`${number(found.total)} tasks, ${sort.by ? `sorted by ${sort.by.replace("-", "")}` : "least success first"}`, columns("task"), found.rows, (row) => go(new URLSearchParams({ text: row.name }), "episodes"), sort)),
  ];
}

// Tables of episodes and groups, in pages.
import { changed, el, number, percent, seconds, section, table } from "./dom.js";

const ROWS = 100, MOST_ROWS = 1000, TYPED_MS = 150, INDEXING_MS = 500;
const link = (name, query) => el("a", { href: `/api/episodes?${query}`, download: `episodes.${name.toLowerCase()}`, title: `What is filtered, as ${name}` }, name);
const STATES = ["waiting", "running", "completed", "truncated", "env_failed", "verifier_unknown", "timeout", "lost", "cancelled", "stale"];
const KIND = { waiting: "dim", running: "warn", completed: "good", truncated: "" };

export const toEpisode = (id, turn) => { location.hash = `#/episode/${encodeURIComponent(id)}${turn === undefined ? "" : `?turn=${turn}`}`; };
export const stateOf = (row) => el("span", { class: KIND[row.state] ?? "bad" }, row.state.replaceAll("_", " "));

/** The table of episodes; `query` are URL parameters, `go(query)` shows others. */
export async function episodes(query, go) {
  const offset = Number(query.get("offset") ?? 0);
  const answer = await fetch(`/api/episodes?${query}`);
  const found = answer.ok ? await answer.json() : { total: 0, rows: [], problem: await answer.text() };
  const said = el("input", { type: "text", name: "said", placeholder: "words that were said", title: 'All of them in one turn; "in double quotes" as they follow each other; word* by its beginning', value: query.get("said") ?? "", "aria-label": "Search what was said" });
  const text = el("input", { type: "search", name: "text", placeholder: "id, task, worker or error", value: query.get("text") ?? "", "aria-label": "Filter by id, task, worker or error" });
  const state = el("select", { name: "state", "aria-label": "State" }, el("option", { value: "" }, "any state"), STATES.map((name) => el("option", { value: name, selected: query.get("state") === name }, name.replaceAll("_", " "))));
  const split = el("select", { name: "split", "aria-label": "Split" }, ["", "train", "eval"].map((name) => el("option", { value: name, selected: query.get("split") === name }, name || "any split")));
  const within = [["min_reward", "reward from"], ["max_reward", "to"], ["version", "version"]].map(([name, title]) => el("input", { type: "number", name, step: "any", placeholder: title, value: query.get(name) ?? "", "aria-label": title }));
  within.push(el("input", { type: "text", name: "label", placeholder: "label", value: query.get("label") ?? "", "aria-label": "Label" }));
  let waiting;
  const exported = el("span", {}, link("CSV", changed(query, { format: "csv", offset: "" })), " ", link("JSON", changed(query, { offset: "", limit: MOST_ROWS })));
  const form = el("form", { role: "search", submit: (event) => { event.preventDefault(); apply(); }, input: () => { clearTimeout(waiting); waiting = setTimeout(apply, TYPED_MS); } }, text, said, state, split, within, exported, pager(offset, found.total, (next) => go(changed(query, { offset: next }))));
  function apply() { go(changed(query, { text: text.value, said: said.value, state: state.value, split: split.value, ...Object.fromEntries(within.map((each) => [each.name, each.value])), offset: "" }), undefined, { replace: true }); }
  const columns = [
    ["episode", (row) => row.episode_id, "", "episode_id"], ["state", stateOf], ["reward", (row) => number(row.reward, 2), "number", "reward"],
    ...(query.get("said") ? [["said", (row) => excerpt(row.found), "wide"]] : []),
    ...(found.rows.some((row) => row.labels.length) ? [["labels", (row) => row.labels.join(" "), "wide"]] : []),
    ["task", (row) => row.task_key, "wide", "task_key"], ["turns", (row) => row.turns, "number", "turns"], ["tokens", (row) => number(row.tokens), "number", "tokens"],
    ["seconds", (row) => (row.seconds === null ? "" : number(row.seconds, 2)), "number", "seconds"], ["attempts", (row) => row.attempts, "number", "attempts"],
    ["versions", (row) => row.policy_versions.join(" ")], ["step", (row) => row.trained_in || "", "number"], ["worker", (row) => row.worker, "", "worker"],
    ["error", (row) => row.error_class, "wide", "error_class"],
  ];
  const sort = { by: query.get("sort") ?? "", go: (by) => go(changed(query, { sort: by, offset: "" }), undefined, { replace: true }) };
  const body = found.total ? table(`${number(found.total)} episodes, ${sort.by ? `sorted by ${sort.by.replace("-", "")}` : "newest first"}`, columns, found.rows, (row) => toEpisode(row.episode_id, row.found?.turn), sort) : el("p", { class: "empty" }, "no such episode");
  const here = location.hash;
  if (found.indexed < 1) setTimeout(() => location.hash === here && document.activeElement?.tagName !== "SELECT" && go(query, undefined, { replace: true }), INDEXING_MS);
  return [section("Episodes", form, found.problem ? el("p", { class: "bad", role: "alert" }, found.problem) : found.indexed < 1 ? el("p", { class: "warn" }, `${percent(found.indexed)} of the log is indexed: there may be more`) : null, body)];
}

/** Where an episode matches, and the words around it. */
function excerpt(found) {
  if (!found) return "";
  return [el("span", { class: "dim" }, `turn ${found.turn}, ${found.role}: `), ...found.parts.map((part, index) => (index % 2 ? el("mark", {}, part) : part)), found.texts > 1 ? el("span", { class: "dim" }, ` and in ${found.texts - 1} others`) : null].filter((part) => part !== null);
}

/** GRPO groups: one row per group, one square per episode. */
export async function groups(query, go) {
  const offset = Number(query.get("offset") ?? 0);
  const found = await (await fetch(`/api/groups?${query}`)).json();
  const flat = el("input", { type: "checkbox", checked: query.get("flat") === "1", change: (event) => go(changed(query, { flat: event.target.checked ? "1" : "", offset: "" })) });
  const form = el("form", { submit: (event) => event.preventDefault() }, el("label", {}, flat, " only without signal (all rewards equal)"), pager(offset, found.total, (next) => go(changed(query, { offset: next }))));
  const columns = [
    ["group", (row) => row.group_id], ["task", (row) => row.task_key, "wide"],
    ["episodes", (row) => el("span", { class: "pips" }, row.ids.map((id, index) => pip(id, row.rewards[index], row)))],
    ["graded", (row) => `${row.graded}/${row.episodes}`, "number"], ["mean reward", (row) => number(row.mean, 2), "number"],
    ["spread", (row) => (row.spread === 0 && !row.open ? el("span", { class: "warn" }, "0") : number(row.spread, 2)), "number"],
    ["outcomes", (row) => Object.entries(row.outcomes).map(([name, count]) => `${name.replaceAll("_", " ")} ${count}`).join(", "), "wide"],
    ["trained in step", (row) => row.trained_in || "", "number"],
  ];
  const body = found.total ? table(`${number(found.total)} groups, newest first; green: reward 1, hollow: 0, yellow: open, red: no grade`, columns, found.rows, (row) => go(new URLSearchParams({ group: row.group_id }), "episodes")) : el("p", { class: "empty" }, "no group yet");
  return [section("Groups", form, body)];
}

function pip(id, reward, group) {
  const kind = reward === null ? (group.open ? "open" : "out") : reward >= 1 ? "ok" : reward <= 0 ? "no" : "part";
  const said = reward === null ? (group.open ? "open or no grade" : "no grade") : `reward ${number(reward, 2)}`;
  return el("a", { class: kind, href: `#/episode/${encodeURIComponent(id)}`, title: `${id}: ${said}`, "aria-label": `${id}: ${said}`, tabindex: "-1" });
}

export function pager(offset, total, go, [before, after] = ["newer", "older"]) {
  const last = Math.max(0, Math.floor((total - 1) / ROWS) * ROWS);
  const button = (name, key, to, enabled) => el("button", { type: "button", "data-key": key, disabled: !enabled, click: () => go(to) }, name);
  return el("span", {}, button(before, "[", Math.max(0, offset - ROWS), offset > 0), ` ${total ? offset + 1 : 0}–${Math.min(offset + ROWS, total)} of ${number(total)} `, button(after, "]", offset + ROWS, offset < last));
}

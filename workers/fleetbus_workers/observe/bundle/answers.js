// The answers of a copy of the page: what a server would say, out of the scripts in data. A browser that opens a file may
// fetch nothing, and loads scripts.
"use strict";
(() => {
const ROWS = 100, MOST_ROWS = 1000;
const data = new Map(), waiting = new Map();
const real = globalThis.fetch;

/** Called by each script in data. */
globalThis.fleetbus = { give(name, text) { data.set(name, JSON.parse(text)); } };

/** What a script in data gives; each is loaded once. */
function load(name) {
  if (data.has(name)) return Promise.resolve(data.get(name));
  if (!waiting.has(name)) waiting.set(name, new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${name}.js`;
    script.addEventListener("load", () => resolve(data.get(name)));
    script.addEventListener("error", () => reject(new Error(`data/${name}.js is missing in this copy`)));
    document.head.append(script);
  }));
  return waiting.get(name);
}

const answer = (value, status = 200) => ({ ok: status === 200, status, json: async () => value, text: async () => String(value) });
const page = (rows, query, about = {}) => {
  const offset = Number(query.get("offset") || 0), limit = Math.min(Number(query.get("limit") || ROWS), MOST_ROWS);
  return answer({ total: rows.length, offset, rows: rows.slice(offset, offset + limit), ...about });
};

/** By a field, with "-" before it from the largest on; what has no value comes last. */
function sorted(rows, wanted, fallback = "") {
  const name = (wanted ?? "").replace(/^-/, "") || fallback;
  if (!name) return rows;
  const isKnown = (row) => row[name] !== null && row[name] !== "" && row[name] !== undefined, known = rows.filter(isKnown);
  const order = (a, b) => (a[name] < b[name] ? -1 : a[name] > b[name] ? 1 : 0);
  const up = [...known].sort(order);
  const ordered = (wanted ?? "").startsWith("-") ? [...known].sort((a, b) => order(b, a)) : up;
  return [...ordered, ...rows.filter((row) => !isKnown(row))];
}

/** As the server chooses rows. */
function episodes(rows, query) {
  const given = (name) => { const value = query.get(name); return value === null || value === "" ? null : value; };
  const low = given("min_reward"), high = given("max_reward"), version = given("version"), text = given("text")?.toLowerCase();
  const tests = [
    given("state") && ((row) => row.state === given("state")), given("group") && ((row) => row.group_id === given("group")),
    given("split") && ((row) => row.split === given("split")), given("label") && ((row) => row.labels.includes(given("label"))),
    version && ((row) => row.policy_versions.includes(Number(version))),
    low && ((row) => row.reward !== null && row.reward >= Number(low)), high && ((row) => row.reward !== null && row.reward <= Number(high)),
    text && ((row) => [row.episode_id, row.task_key, row.error_class, row.worker].some((field) => field.toLowerCase().includes(text))),
  ].filter(Boolean);
  const said = given("said") ? { problem: "words that were said are searched on the page that fleetbus serves" } : {};
  return page(sorted(rows.filter((row) => tests.every((test) => test(row))), query.get("sort")), query, said);
}

async function find(path, query) {
  const found = data.get("run"), [, , kind, name] = path.split("/").map(decodeURIComponent);
  if (kind === "episodes" && name) {
    const file = Object.hasOwn(found.files, name) ? found.files[name] : null;
    return file ? answer(await load(file)) : answer(`episode ${name} is not in this copy: ${found.left_out}`, 404);
  }
  if (kind === "runs" && name) return answer("no other run is in this copy", 404);
  switch (kind) {
    case "overview": return answer(found.overview);
    case "curves": return answer(found.curves);
    case "episodes": return episodes(found.rows, query);
    case "groups": return page(found.groups.filter((each) => !query.get("flat") || (each.spread === 0 && !each.open)), query);
    case "success": return page(sorted(found.success[`${query.get("by") === "env" ? "env" : "task"} ${query.get("split") ?? ""}`.trim()], query.get("sort"), "success"), query);
    case "rewards": return answer(found.rewards);
    case "runs": return answer([]);
    default: return answer("not in this copy", 404);
  }
}

globalThis.fetch = (address, options) => {
  const [path, query = ""] = String(address).split("?");
  return path.startsWith("/api/") ? find(path, new URLSearchParams(query)) : real(address, options);
};

/** The events of a run that does not change: each comes once, after all who listen are there. */
globalThis.EventSource = class {
  addEventListener(name, listen) {
    if (!["overview", "curves"].includes(name)) return;
    setTimeout(() => {
      listen({ data: JSON.stringify(data.get("run")[name]) });
      const live = document.getElementById("live");
      live.textContent = data.get("run").copied;
      live.dataset.state = "over";
    });
  }
};
})();

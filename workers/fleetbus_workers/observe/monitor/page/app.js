// Routes, live events, keys. Each view is a function of data to elements; live views are drawn again when an event comes.
import { compare } from "./compare.js";
import { curves } from "./curves.js";
import { el, percent } from "./dom.js";
import { episode } from "./episode.js";
import { episodes, groups } from "./episodes.js";
import { evaluations } from "./evaluations.js";
import { overview } from "./overview.js";
import { runs } from "./runs.js";
import { tasks } from "./tasks.js";

const main = document.getElementById("main"), live = document.getElementById("live");
const seen = { overview: null, points: [], evaluations: [], policy: "", others: new Map(), diagnosed: null, asked: -Infinity };
const DIAGNOSIS_MS = 60000;
let drawing = 0;

const route = () => { const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?"); const [view, ...rest] = path.split("/"); return { view: view || "overview", rest: rest.join("/"), query: new URLSearchParams(query) }; };
/** Show a view; with `replace` the address changes without a step in the history, as while somebody types. */
function go(query, view = route().view, { replace = false } = {}) {
  const text = query.toString(), address = `#/${view}${text ? `?${text}` : ""}`;
  if (!replace) { location.hash = address; return; }
  history.replaceState(null, "", address);
  draw();
}

async function content({ view, rest, query }) {
  switch (view) {
    case "curves": return curves(seen, query, go);
    case "groups": return groups(query, go);
    case "episodes": return episodes(query, go);
    case "tasks": return tasks(query, go);
    case "evaluations": return evaluations(query, go);
    case "runs": return runs(seen.overview?.run ?? "this run", seen.points, go);
    case "episode": return episode(decodeURIComponent(rest));
    case "compare": return compare(...rest.split("/").map(decodeURIComponent));
    default: return seen.overview ? overview(seen.overview, seen) : [el("p", { class: "empty" }, "waiting for the run")];
  }
}

/** Draw the current view; where the keyboard was and how far the page was scrolled stay. */
async function draw({ fresh = false } = {}) {
  const mine = ++drawing, now = route();
  for (const link of document.querySelectorAll("nav a")) link.dataset.view === now.view || (["episode", "compare"].includes(now.view) && link.dataset.view === "episodes") ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  let nodes;
  try { nodes = await content(now); } catch (error) { nodes = [el("p", { class: "bad", role: "alert" }, `error: ${error.message}`)]; }
  if (mine !== drawing) return;
  const rows = [...main.querySelectorAll("tr[tabindex]")], at = rows.indexOf(document.activeElement);
  const open = [...main.querySelectorAll("details")].map((each) => each.open);
  const field = main.contains(document.activeElement) && document.activeElement.name ? document.activeElement : null;
  const turn = (fresh || !main.dataset.view) && now.view === "episode" ? now.query.get("turn") : null;
  main.replaceChildren(...nodes);
  main.dataset.view = now.view;
  if (fresh) document.getElementById("said").textContent = "";
  if (fresh) { scrollTo(0, 0); main.focus({ preventScroll: true }); }
  if (turn !== null) toTurn(turn);
  if (fresh) return;
  [...main.querySelectorAll("details")].forEach((each, index) => { each.open = open[index] ?? each.open; });
  if (field) keepTyping(field);
  if (at >= 0) main.querySelectorAll("tr[tabindex]")[at]?.focus({ preventScroll: true });
}

/** Show a turn of the episode that is drawn. */
function toTurn(turn) {
  const parts = [...main.querySelectorAll("[data-turn]")].filter((each) => each.dataset.turn === turn);
  for (const part of parts) part.setAttribute("aria-current", "true");
  parts[0]?.scrollIntoView();
}

/** The field that had the keyboard, in the new content: with what was typed meanwhile. */
function keepTyping(field) {
  const now = main.querySelector(`[name="${field.name}"]`);
  if (!now) return;
  if (field.tagName !== "BUTTON") now.value = field.value;
  now.focus({ preventScroll: true });
  if (["search", "text"].includes(field.type)) now.setSelectionRange(field.selectionStart, field.selectionEnd);
}

const typing = () => ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
/** A button that is pressed now would lose its click if it was replaced. */
const pressing = () => !!main.querySelector("button:active");
const pointing = () => main.matches(":hover") && !!main.querySelector("svg:hover");

/** How far a long log is read; until then what is shown is of some time ago, or counted from its newest entries alone. */
const reading = ({ log }) => {
  if (log.counted_from > 1) return `counts begin at entry ${log.counted_from.toLocaleString("en")}, all of the log is being read: ${percent(log.older_read / log.last_sequence)}`;
  return log.is_behind && log.followed < 0.9 * log.last_sequence ? `reading the log: ${percent(log.followed / log.last_sequence)}` : "";
};

/** Ask for the diagnosis now and then, while somebody looks at the first view. */
async function diagnose() {
  if (document.hidden || performance.now() - seen.asked < DIAGNOSIS_MS) return;
  // one at a time
  seen.asked = Infinity;
  const answer = await fetch("/api/diagnosis").catch(() => null);
  seen.asked = performance.now();
  if (!answer?.ok) return;
  seen.diagnosed = await answer.json();
  if (route().view === "overview" && !pressing()) draw();
}

function listen() {
  const source = new EventSource("/api/events");
  const say = (text, state) => { if (live.textContent !== text) live.textContent = text; live.dataset.state = state; };
  source.addEventListener("overview", (event) => {
    seen.overview = JSON.parse(event.data);
    document.getElementById("run").textContent = seen.overview.run;
    document.title = `fleetbus · ${seen.overview.run} · step ${seen.overview.numbers.step}`;
    const { ending, log } = seen.overview;
    const more = reading(seen.overview);
    if (ending) say(more ? `over; ${more}` : "over", "over");
    else say(log.problem || (more && log.counted_from > 1 ? `live; ${more}` : more || "live"), log.problem ? "lost" : "live");
    if (route().view === "overview" && !pressing()) { draw(); diagnose(); }
  });
  source.addEventListener("curves", (event) => {
    const { start, points, evaluations, policy, others } = JSON.parse(event.data);
    seen.points = [...seen.points.slice(0, start), ...points];
    Object.assign(seen, { evaluations, policy });
    for (const [name, more] of Object.entries(others)) seen.others.set(name, [...(seen.others.get(name) ?? []).slice(0, more.start), ...more.points]);
    const { view, query } = route();
    if (view === "curves" && !pointing() && !typing()) draw();
    else if (["groups", "episodes", "tasks", "runs"].includes(view) && !query.get("offset") && !typing()) draw();
  });
  source.addEventListener("error", () => say("connection lost; reconnecting", "lost"));
}

function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
}

function move(by) {
  const rows = [...main.querySelectorAll("tr[tabindex]")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + by))].focus();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { typing() ? document.activeElement.blur() : ["episode", "compare"].includes(route().view) && history.back(); return; }
  if (typing()) return;
  const views = { 1: "", 2: "curves", 3: "groups", 4: "episodes", 5: "tasks", 6: "runs", 7: "evaluations" };
  if (event.key in views) location.hash = `#/${views[event.key]}`;
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "t") theme();
  else if (event.key === "/") { main.querySelector("input[type=search]")?.focus(); event.preventDefault(); }
  else if (["[", "]", "m"].includes(event.key)) main.querySelector(`button[data-key="${event.key}"]`)?.click();
});
addEventListener("hashchange", () => draw({ fresh: true }));
document.getElementById("theme").addEventListener("click", theme);
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
/* The key in the address is a cookie by now. */
if (location.search) history.replaceState(null, "", location.pathname + location.hash);
draw();
listen();

// The first view: counters, workers, failures, and the state of the log.
import { drainButton, pauseButton } from "./actions.js";
import { rewardChart } from "./curves.js";
import { bytes, el, number, percent, quantity, seconds, section, table } from "./dom.js";

const MOST_WORKERS = 200;
const STATES = { working: "good", draining: "warn", starting: "dim", silent: "bad", stopped: "dim", failed: "bad" };

export function overview(shown, seen) {
  const { evaluations, diagnosed } = seen;
  const { metrics, numbers, workers, log, server, stalls, notes, ending, operations, league } = shown;
  const acts = shown.actions && !ending;
  return [over(ending), stuck(stalls), worthKnowing(notes), failures(numbers.failures), el("div", { class: "grid" }, section("Reward and success", rewardChart(seen), evaluations.length > 1 ? el("p", {}, el("a", { href: "#/evaluations" }, "newest evaluation less the first, task by task")) : null), cards(metrics, numbers, stalls, acts && !numbers.finished ? pauseButton(shown.paused) : null)), diagnosis(diagnosed), workerTable(workers, metrics, ending, acts), el("div", { class: "grid" }, outcomes(numbers), leagueTable(league), logHealth(log, metrics, numbers, ending)), done(operations), ending && log.problem ? null : natsServer(server)].filter(Boolean);
}

/** For a run that has ended: when and how it ended, and how to resume it. */
const over = (ending) => ending ? el("section", { "aria-label": "Over" }, el("p", { class: "alarm", role: "status" }, ending.line)) : null;

/** What `fleetbus diagnose` finds: since which step, how large it is, and what to do. */
function diagnosis(diagnosed) {
  if (!diagnosed) return null;
  const { diagnosis: found, problem } = diagnosed;
  if (!found) return section("Diagnosis", el("p", { class: "dim" }, problem));
  const named = found.findings.map((each) => el("div", { class: "failure" },
    el("p", { class: "bad" }, `${each.kind.replaceAll("_", " ")} since step ${each.step}${each.time_ns ? ` (${new Date(each.time_ns / 1e6).toLocaleTimeString()})` : ""}: ${each.meaning}`),
    el("p", {}, `${number(each.size.value, 4)} (${number(each.size.low, 4)} to ${number(each.size.high, 4)}) ${each.unit}; ${each.evidence}`),
    el("p", { class: "dim" }, each.advice)));
  return section("Diagnosis", ...(named.length ? named : [el("p", {}, found.last_step ? `nothing is wrong that this can tell, steps ${found.first_step} to ${found.last_step}` : "no step was trained yet")]));
}

/** Why the run is stalled, in the watchdog's words; nothing while it progresses. */
const stuck = (stalls) => stalls.length ? el("section", { "aria-label": "Stuck" }, stalls.map((stall) => el("p", { class: "bad alarm", role: "alert" }, stall.line))) : null;

/** Notes that need no action, such as that every task is solved. */
const worthKnowing = (notes) => notes.length ? el("section", { "aria-label": "Notes" }, notes.map((note) => el("p", { class: "good alarm", role: "status" }, note))) : null;

/** Why episodes have no grade: each kind with its count, its place and its first traceback. */
const failures = (kinds) => kinds.length ? section("Failures", ...kinds.map((kind) => el("div", { class: "failure" }, el("p", { class: "bad" }, kind.line, " · ", el("a", { href: `#/episode/${encodeURIComponent(kind.episode_id)}` }, kind.episode_id)), kind.traceback ? el("details", {}, el("summary", {}, "traceback"), el("pre", {}, kind.traceback)) : null))) : null;

/** The cards of a section, as the table of metrics has them; one for each label of those that are counted by one. */
function derived(metrics, page, numbers) {
  const card = (metric, title, value) => [title, metric.warns ? el("span", { class: value ? "bad" : "" }, quantity(value, metric)) : quantity(value, metric)];
  return metrics.filter((metric) => metric.page === page).flatMap((metric) => {
    const value = numbers[metric.key];
    if (value === null && metric.optional) return [];
    if (value === null || typeof value !== "object") return [card(metric, metric.title, value)];
    return Object.entries(value).map(([label, count]) => card(metric, `${metric.title}: ${label.replaceAll("_", " ")}`, count));
  });
}

function cards(metrics, numbers, stalls, button) {
  const facts = [
    ["step", `${numbers.step}/${numbers.steps}${numbers.finished ? " · finished" : ""}`],
    ["episodes finished", number(numbers.finished_episodes)],
    ["running · waiting", `${number(numbers.running)} · ${number(numbers.waiting)}`],
    ...derived(metrics, "run", numbers),
    ["last progress", numbers.since_progress_seconds === null ? "–" : el("span", { class: stalls.length ? "bad" : "" }, `${seconds(numbers.since_progress_seconds)} ago`)],
  ];
  return el("section", { "aria-label": "Run" }, el("dl", { class: "cards" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))), button);
}

function workerTable(workers, metrics, ending, acts) {
  if (!workers.length) return section("Workers", el("p", { class: "empty" }, ending ? "none any more" : "no heartbeat received yet"));
  const columns = [
    ["worker", (row) => row.worker],
    ["role", (row) => row.role],
    ["state", (row) => el("span", { class: STATES[row.state] }, row.state)],
    ["in flight", (row) => (row.role === "learner" ? `${row.in_flight} groups` : row.slots ? el("span", {}, el("span", { class: "bar", role: "img", "aria-label": `${row.in_flight} of ${row.slots}`, style: { display: "inline-block", width: "80px" } }, el("i", { style: { width: `${Math.min(100, (100 * row.in_flight) / row.slots)}%` } })), ` ${row.in_flight}/${row.slots}`) : "")],
    ["version", (row) => (row.policy_version < 0 ? "" : row.policy_version), "number"],
    ["lane", (row) => row.lane],
    ...(workers.some((row) => row.engine) ? [["engine", (row) => (row.engine ? engineLoad(row.engine, metrics) : "")]] : []),
    ["last heartbeat", (row) => `${seconds(row.seconds)} ago`, "number"],
    ["note", (row) => row.note, "wide"],
    ...(acts ? [["", (row) => (row.state === "working" ? drainButton(row.worker) : "")]] : []),
  ];
  const isLost = (row) => row.state === "silent" || row.state === "failed";
  const lost = workers.filter(isLost);
  const shown = [...lost, ...workers.filter((row) => !isLost(row))].slice(0, MOST_WORKERS);
  const hidden = workers.length > MOST_WORKERS ? `, the first ${MOST_WORKERS} of them` : "";
  return section("Workers", table(`${workers.length} workers${lost.length ? `, ${lost.length} silent or failed` : ""}${hidden}`, columns, workers.length > 20 ? shown : workers));
}

/** What an engine says of itself, as far as it does. */
function engineLoad(load, metrics) {
  const told = metrics.filter((metric) => metric.page === "engine" && load[metric.key] !== null && load[metric.key] !== undefined);
  return told.map((metric) => metric.unit === "ratio" ? `${metric.title} ${percent(load[metric.key])}` : `${number(load[metric.key], metric.digits)} ${metric.title}`).join(" · ");
}

function outcomes(numbers) {
  const graded = new Set(["completed", "truncated"]);
  const rows = [
    ...Object.entries(numbers.outcomes).map(([name, count]) => ["outcome", name, count, graded.has(name) ? "" : "warn"]),
    ...Object.entries(numbers.excluded).map(([name, count]) => ["not trained", name, count, "warn"]),
    ...Object.entries(numbers.errors).map(([name, count]) => ["error class", name, count, "bad"]),
  ];
  if (!rows.length) return section("Outcomes", el("p", { class: "empty" }, "no episode has finished yet"));
  return section("Outcomes", table("Episodes by outcome, reason for exclusion, and error", [["", (row) => row[0]], ["name", (row) => el("span", { class: row[3] }, row[1].replaceAll("_", " "))], ["episodes", (row) => number(row[2]), "number"]], rows));
}

/** Versions of the policy that have played each other, newest first, with ratings and their standard errors. */
function leagueTable(rows) {
  if (!rows?.length) return null;
  const columns = [["version", (row) => row.version, "number"], ["Elo", (row) => number(row.rating), "number"], ["±", (row) => number(row.error), "number"], ["games", (row) => number(row.games), "number"]];
  return section("League", table("Ratings of versions and their standard errors; the oldest one has 0", columns, rows));
}

function logHealth(log, metrics, numbers, ending) {
  const share = log.limit_bytes ? log.bytes / log.limit_bytes : 0;
  const kind = share > 0.9 ? "bad" : share > 0.7 ? "warn" : "";
  const facts = [
    ["stored", `${bytes(log.bytes)}${log.limit_bytes ? ` of ${bytes(log.limit_bytes)}` : ", no limit"}`],
    ["entries", number(log.last_sequence)],
    ["entries/s", number(log.entries_per_second, 1)],
    ["read up to entry", number(log.followed)],
    ["newest entry read", `${seconds(numbers.quiet_seconds)} ago`],
    ...derived(metrics, "log", numbers),
    ["checkpoint at step", numbers.checkpoint || "–"],
  ];
  return section("Log", log.problem ? (ending ? el("p", { class: "empty" }, "no longer served") : el("p", { class: "bad", role: "alert" }, log.problem)) : null, el("div", { class: "bar", role: "img", "aria-label": `the log is ${percent(share)} full` }, el("i", { class: kind, style: { width: `${Math.max(share * 100, 0.5)}%` } })), el("dl", { class: "cards" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

/** What people did to the run, newest first, by the keys that did it. */
function done(operations) {
  if (!operations?.length) return null;
  const time = (row) => new Date((row.at_ns || row.time_ns) / 1e6).toLocaleString();
  const columns = [["when", time], ["role", (row) => row.role], ["key", (row) => el("span", { title: row.key }, row.key.slice(0, 12))], ["did", (row) => row.operation], ["to", (row) => `${row.targets.join(" ")}${row.count > row.targets.length ? ` and ${row.count - row.targets.length} more` : ""}`, "wide"], ["by its own word", (row) => row.author, "wide"]];
  return section("Operations", table("What was done to the run, newest first", columns, [...operations].reverse()));
}

/** The server's consumers and connections: pending messages, and clients that do not read them. */
function natsServer(server) {
  if (!server.version && !server.hint && !server.consumers.length) return null;
  const facts = [
    ["nats-server", server.version || "–"],
    ["up", server.uptime || "–"],
    ["connections", number(server.connections)],
    ["slow consumers", el("span", { class: server.slow_consumers ? "bad" : "" }, number(server.slow_consumers))],
    ["memory", server.memory_bytes === null ? "–" : bytes(server.memory_bytes)],
    ...server.streams.map((stream) => [`stream ${stream.name}`, `${bytes(stream.bytes)}, ${number(stream.entries)} entries`]),
  ];
  const consumers = [["consumers", (row) => row.kind], ["number", (row) => number(row.consumers), "number"], ["pending", (row) => number(row.pending), "number"], ["unacked", (row) => number(row.unacked), "number"], ["redelivered", (row) => number(row.redelivered), "number"]];
  const clients = [["connection", (row) => row.worker], ["role", (row) => row.role], ["unread", (row) => el("span", { class: row.pending_bytes ? "warn" : "" }, bytes(row.pending_bytes)), "number"], ["received", (row) => number(row.received), "number"], ["sent", (row) => number(row.sent), "number"], ["idle", (row) => row.idle, "number"]];
  return section("NATS server",
    !server.version && !server.hint ? null : server.hint ? el("p", { class: "empty" }, server.hint) : el("dl", { class: "cards" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    ...server.problems.map((problem) => el("p", { class: "warn" }, problem)),
    ...server.cut.map((each) => el("p", { class: "bad" }, `${each.worker} was disconnected at ${each.at}: ${each.reason}`)),
    el("div", { class: "grid" },
      server.consumers.length ? table("Durable consumers by content", consumers, server.consumers) : null,
      server.clients.length ? table(`Connections of the run: ${server.clients.length}, most unread bytes first`, clients, server.clients.slice(0, 100)) : null));
}

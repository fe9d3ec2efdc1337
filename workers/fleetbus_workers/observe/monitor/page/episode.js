// One episode: its timeline, then what was said, the sampled tokens colored by log-probability.
import { cancelButton } from "./actions.js";
import { call, content, prose, read } from "./content.js";
import { between } from "./diff.js";
import { el, number, seconds, section, table } from "./dom.js";
import { stateOf, toEpisode } from "./episodes.js";
import { labels } from "./labels.js";
import { lane, seatList, who } from "./lanes.js";

const KINDS = ["waiting", "open", "queue", "generate", "travel", "environment", "verify", "lost"];
const NAMES = { waiting: "waiting for a worker", open: "open and reset", queue: "queue at the engine", generate: "generate", travel: "to and from the engine", environment: "tools and steps", verify: "verify and close", lost: "lost with a worker" };

export async function episode(id) {
  const answer = await fetch(`/api/episodes/${encodeURIComponent(id)}`);
  if (!answer.ok) return [section(`Episode ${id}`, el("p", { class: "bad", role: "alert" }, await answer.text()))];
  const found = await answer.json();
  return [head(found), labels(found), comparison(found), timeline(found.spans), transcript(found)].filter(Boolean);
}

function head({ episode, actions, row, task, claims, result, trained_in, previous, next }) {
  const facts = [
    ["state", row ? stateOf(row) : "–"], ["reward", number(result?.reward, 3)], ["turns", result?.turns ?? "–"], ["tokens", number(result?.tokens)],
    ["attempts", claims.length], ["trained in step", trained_in || "–"], ["policy versions", result?.policy_versions.join(" ") || "–"],
    ["group", row?.group_id ? el("a", { href: `#/episodes?group=${encodeURIComponent(row.group_id)}` }, row.group_id) : "–"], ["task", task?.key ?? "–"], ["worker", row?.worker ?? "–"],
  ];
  const error = result?.error_class ? el("p", { class: "bad" }, `${result.error_class}${result.error || result.note ? `: ${result.error || result.note}` : ""}${result.error_location ? ` (${result.error_location})` : ""}`) : null;
  const traceback = result?.traceback ? el("pre", { class: "bad" }, result.traceback) : null;
  const taken = claims.length > 1 ? el("p", { class: "warn" }, claims.map((claim) => `attempt ${claim.attempt} by ${claim.worker} (${(claim.reason ?? "fresh").replaceAll("_", " ")}, from turn ${claim.resumed_at_turn ?? 0})`).join(" · ")) : null;
  const said = [result?.note, ...Object.entries(result?.info ?? {}).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`)].filter(Boolean);
  const explained = said.length ? el("details", { open: true }, el("summary", {}, "what the environment and its verifier say"), el("pre", {}, said.join("\n"))) : null;
  return section(`Episode ${episode}`, steps({ previous, next }, actions && !result ? cancelButton(episode) : null), el("dl", { class: "cards" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))), error, traceback, explained, taken);
}

/** Buttons to the episodes requested just before and after this one. */
function steps({ previous, next }, cancel) {
  const button = (name, key, to) => el("button", { type: "button", "data-key": key, disabled: !to, click: () => toEpisode(to) }, name);
  return el("form", { submit: (event) => event.preventDefault() }, button("previous", "[", previous), button("next", "]", next), cancel);
}

/** Another sample of the same group beside this one. */
function comparison({ episode, siblings, rewards }) {
  if (!siblings?.length) return null;
  const links = siblings.flatMap((other) => [el("a", { href: `#/compare/${encodeURIComponent(episode)}/${encodeURIComponent(other)}` }, other), ` ${number(rewards[other], 2)}  `]);
  return section("Compare with another sample of the group, by its reward", el("p", {}, links));
}

function timeline(spans) {
  if (!spans.length) return section("Timeline", el("p", { class: "empty" }, "no activity yet"));
  const end = Math.max(...spans.map((span) => span.end), 1e-6);
  const lanes = KINDS.filter((kind) => spans.some((span) => span.kind === kind)).map((kind) => {
    const own = spans.filter((span) => span.kind === kind);
    const spent = own.reduce((sum, span) => sum + span.end - span.start, 0);
    const bars = own.map((span) => el("i", { class: `span c${KINDS.indexOf(kind)}`, title: `${NAMES[kind]}${span.turn >= 0 ? `, turn ${span.turn}` : ""}: ${seconds(span.end - span.start)} from ${seconds(span.start)}${span.worker ? `, ${span.worker}` : ""}`, style: { left: `${(100 * span.start) / end}%`, width: `${(100 * (span.end - span.start)) / end}%` } }));
    return el("div", { class: "lane" }, el("span", {}, `${NAMES[kind]}`), el("div", { class: "track", role: "img", "aria-label": `${NAMES[kind]}: ${seconds(spent)} in ${own.length} spans` }, bars));
  });
  const rows = KINDS.map((kind) => [kind, spans.filter((span) => span.kind === kind)]).filter(([, own]) => own.length).map(([kind, own]) => [NAMES[kind], own.reduce((sum, span) => sum + span.end - span.start, 0), own.length]);
  return section(`Timeline, ${seconds(end)}`, lanes, el("details", {}, el("summary", {}, "as a table"), table("Seconds by kind", [["", (row) => row[0]], ["time", (row) => seconds(row[1]), "number"], ["share", (row) => `${((100 * row[1]) / end).toFixed(0)} %`, "number"], ["spans", (row) => row[2], "number"]], rows)));
}

/** Whether texts are shown as they were sent, or as a reader wants them. */
let raw = localStorage.getItem("texts") === "raw";

function transcript(found) {
  const { turns, task, claims, seats } = found, since = changes();
  const parts = turns.flatMap((turn, index) => [
    ...takeovers(claims, turns, index),
    turn.begins ? el("p", { class: "warn" }, turn.begins) : null,
    ...turn.messages.map((message) => said(message.role, [...texts(message.content), raw ? null : since.output(message, turn)], where(turn, seats), lane(seats, turn, message.role))),
    turn.action ? action(turn, seats, raw ? [] : since.calls(turn)) : el("p", { class: "dim" }, "no action yet"),
  ].filter(Boolean));
  const tools = turns.find((turn) => turn.tools?.length)?.tools ?? [];
  const about = tools.length ? el("details", {}, el("summary", {}, `${tools.length} tools`), tools.map((tool) => el("div", { class: "message tool" }, el("h3", {}, tool.name), texts(tool.description ?? ""), el("pre", {}, JSON.stringify(tool.parameters ?? {}, null, 1))))) : null;
  const prompt = !turns.length && task?.prompt ? said("user", texts(task.prompt), "task", { class: "message user" }) : null;
  const toggle = el("button", { type: "button", class: "action", "data-key": "m", title: "key m", click: () => { raw = !raw; localStorage.setItem("texts", raw ? "raw" : "read"); shown.replaceWith(transcript(found)); } }, raw ? "show Markdown and diffs" : "show texts as they were sent");
  const shown = section("Transcript", el("p", { class: "dim" }, "Sampled tokens are trained on: redder tokens were less likely under the policy. Underlined tokens are masked: prompts and tool results. ", toggle), seatList(seats), about, prompt, parts, takeovers(claims, turns, turns.length));
  return shown;
}

const texts = (parts) => (raw ? [el("pre", {}, content(parts))] : read(parts));

/** Where a call is made again, or a long argument of it given again: what is not as it was the last time. */
function changes() {
  const known = new Map();
  let made = [], answered = 0;
  const note = (key, text, turn) => {
    const before = known.get(key);
    known.set(key, { text, turn: turn.turn });
    const difference = before ? between(before.text, text) : null;
    return difference ? el("details", {}, el("summary", {}, `changed since turn ${before.turn}`), difference) : null;
  };
  const output = (message, turn) => {
    if (message.role !== "tool" || typeof message.content !== "string") return null;
    const call = made.find((each) => each.id && each.id === message.tool_call_id) ?? made[answered];
    answered += 1;
    return call ? note(`${call.name} ${JSON.stringify(call.arguments)}`, message.content, turn) : null;
  };
  const calls = (turn) => {
    made = turn.action.tool_calls ?? [];
    answered = 0;
    return made.flatMap((call) => Object.entries(call.arguments ?? {}).filter(([, value]) => typeof value === "string" && value.includes("\n")).map(([name, value]) => note(`${call.name} ${name} ${JSON.stringify({ ...call.arguments, [name]: "" })}`, value, turn)));
  };
  return { output, calls };
}

/** That another worker continues the episode: before the turn that it begins with, or after the last one. */
function takeovers(claims, turns, index) {
  const begin = ({ resumed_at_turn: turn = 0 }) => { const found = turns.findIndex((each) => each.turn >= turn); return found < 0 ? turns.length : found; };
  const from = index < turns.length ? `from turn ${turns[index].turn}` : "after the last turn";
  return claims.filter((claim) => claim.attempt > 1 && begin(claim) === index).map((claim) => el("p", { class: "takeover" }, `attempt ${claim.attempt}: ${claim.worker} continues ${from} (${(claim.reason ?? "fresh").replaceAll("_", " ")})`));
}

const where = (turn, seats) => `turn ${turn.turn}${turn.seat ? ` · ${who(seats, turn.seat)}` : ""}${turn.segment === undefined ? "" : ` · segment ${turn.segment}, ${turn.held} tokens`}`;
const said = (role, nodes, where, attributes) => el("div", attributes, el("h3", {}, `${role} · ${where}`), nodes);

function action(turn, seats, changed) {
  const { action } = turn;
  const versions = (action.versions ?? []).map(([version, start, stop]) => (start === 0 && stop === action.tokens ? `version ${version}` : `version ${version} for tokens ${start}–${stop}`)).join(", ");
  const title = `assistant · ${where(turn, seats)} · ${action.tokens} tokens${versions ? `, ${versions}` : ""} · ${action.worker} · queued ${seconds(action.seconds_queued)}, generated in ${seconds(action.seconds_generating)}${action.finish_reason === "stop" ? "" : ` · ${action.finish_reason}`}`;
  const masked = el("details", {}, el("summary", {}, `${action.prompt_tokens} prompt tokens, masked`), tokens(action.prompt_ids, action.prompt_words, null));
  const sampled = action.ids.length ? tokens(action.ids, action.words, action.logprobs, action.trainer, new Set(action.differing)) : el("pre", {}, action.text);
  const text = raw ? null : prose(action.text);
  const shown = text ? [text, el("details", {}, el("summary", {}, action.ids.length ? `${action.tokens} sampled tokens by log-probability` : "as it was sent"), sampled)] : [sampled, action.words ? null : el("pre", { class: "dim" }, action.text)];
  return el("div", lane(seats, turn, "assistant"), el("h3", {}, title), action.error ? el("p", { class: "bad" }, action.error) : null, shown, agreement(action), (action.tool_calls ?? []).map(call), changed, masked);
}

function tokens(ids, words, logprobs, trainer, differing) {
  const shown = ids.map((id, index) => {
    const logprob = logprobs?.[index];
    const heat = logprob === undefined ? 0 : Math.min(1, -logprob / 4);
    const about = logprob === undefined ? `id ${id}, masked` : `id ${id}, log-probability ${logprob.toFixed(3)} (${(100 * Math.exp(logprob)).toFixed(1)} %)${ofTrainer(trainer, index, logprob)}`;
    return el("span", { class: logprobs ? (differing?.has(index) ? "token differs" : "token") : "token masked", title: about, style: { "--heat": heat.toFixed(2) } }, words ? words[index] : id);
  });
  return el("pre", { class: words ? "tokens" : "tokens ids" }, shown);
}

/** The trainer's part of what is said of a token. */
function ofTrainer(trainer, index, logprob) {
  const value = trainer?.logprobs[index];
  if (value === null || value === undefined) return trainer ? "\nnot trained" : "";
  const gradient = trainer.gradients[index] ?? 0;
  return `\ntrainer ${value.toFixed(3)}, ${(value - logprob >= 0 ? "+" : "") + (value - logprob).toFixed(3)} to the sampler\n${trainer.clipped[index] ? "clipped" : gradient > 0 ? "made more probable" : gradient < 0 ? "made less probable" : "no gradient"} (${gradient.toExponential(1)})`;
}

/** In how far sampler and trainer agree on the tokens of a turn. */
function agreement({ trainer, logprobs, differing }) {
  if (!trainer) return null;
  const differences = trainer.logprobs.flatMap((value, index) => (value === null ? [] : [Math.abs(value - logprobs[index])]));
  return el("p", { class: differing.length ? "warn" : "dim" }, `${differences.length} tokens trained; the log-probabilities of sampler and trainer differ by ${number(Math.max(...differences), 3)} at most${differing.length ? `, notably for the ${differing.length} outlined` : ""}`);
}

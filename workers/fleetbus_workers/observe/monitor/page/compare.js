// Two samples of one group side by side, turn by turn, with the first sampled token that differs.
import { el, number, section } from "./dom.js";

export async function compare(one, other) {
  const answers = await Promise.all([one, other].map((id) => fetch(`/api/episodes/${encodeURIComponent(id)}`)));
  const failed = answers.find((answer) => !answer.ok);
  if (failed) return [section("Compare", el("p", { class: "bad", role: "alert" }, await failed.text()))];
  const found = await Promise.all(answers.map((answer) => answer.json()));
  const first = firstDifference(...found);
  return [section("First difference", el("p", {}, describe(first, found))), el("div", { class: "grid" }, found.map((episode, side) => column(episode, first, side)))];
}

/** Turn and index of the first sampled token that differs; null if all are alike. */
function firstDifference(a, b) {
  for (let turn = 0; turn < Math.max(a.turns.length, b.turns.length); turn += 1) {
    const [left, right] = [a, b].map((episode) => episode.turns[turn]?.action?.ids ?? []);
    for (let index = 0; index < Math.max(left.length, right.length); index += 1) if (left[index] !== right[index]) return { turn, index };
  }
  return null;
}

function describe(first, found) {
  if (!first) return "Both sampled the same tokens.";
  const words = found.map(({ turns }) => { const action = turns[first.turn]?.action; return action && first.index < action.ids.length ? JSON.stringify(action.words ? action.words[first.index] : action.ids[first.index]) : "nothing more"; });
  return `Alike up to turn ${first.turn}, token ${first.index}: ${words.join(" and ")}.`;
}

function column({ episode, result, turns }, first, side) {
  const shown = turns.map((turn, number) => el("div", { class: "message assistant" }, el("h3", {}, `turn ${turn.turn}`), said(turn), turn.action ? tokens(turn.action, first?.turn === number ? first.index : -1, side) : null));
  return section(`${episode} · reward ${number(result?.reward, 2)}`, el("p", {}, el("a", { href: `#/episode/${encodeURIComponent(episode)}` }, "the whole episode")), shown);
}

const said = (turn) => turn.turn ? turn.messages.map((message) => el("pre", { class: "dim" }, typeof message.content === "string" ? message.content : "[images]")) : null;

function tokens(action, marked, side) {
  return el("pre", { class: "tokens" }, action.ids.map((id, index) => el(index === marked ? "mark" : "span", { class: "token", id: index === marked ? `difference-${side}` : undefined, title: `id ${id}, log-probability ${action.logprobs[index]?.toFixed(3)}` }, action.words ? action.words[index] : `${id} `)));
}

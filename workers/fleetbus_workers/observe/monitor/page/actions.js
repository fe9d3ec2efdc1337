// What the page may do to a run, where it is served with that: each asks first, and says below the header what became of it.
import { el } from "./dom.js";

const said = document.getElementById("said");

/** A button that posts `body` to `/api/actions/<path>` after a question; `describe` makes a sentence of the answer. */
export function actionButton(title, question, path, body, describe) {
  return el("button", { type: "button", class: "action", name: `${path} ${Object.values(body)}`, click: () => confirm(question) && act(path, body, describe) }, title);
}

/** Do it, say what became of it, and give `done(answer)` what was answered. */
export async function act(path, body, describe, done = () => {}) {
  said.textContent = "asking";
  try {
    const answer = await fetch(`/api/actions/${path}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    if (!answer.ok) { said.textContent = await answer.text(); return; }
    const found = await answer.json();
    said.textContent = describe(found);
    done(found);
  } catch (error) { said.textContent = `not done: ${error.message}`; }
}

export const cancelButton = (id) => actionButton("cancel episode", `Cancel episode ${id}? It is never trained.`, "cancel", { episodes: [id] }, ([{ state, worker, outcome }]) => ({ cancelled: `${id}: cancelled by ${worker}`, over: `${id} was over already: ${outcome}`, closing: `${id}: stopped by ${worker}, which is still closing its environment`, open: `${id}: not cancelled, it changed hands meanwhile: try again`, unknown: `${id} was never requested` }[state]));

export const drainButton = (worker) => actionButton("drain", `Drain ${worker}? It finishes or hands back what it has, and stops; \`up\` does not start it again before it is resumed itself.`, "drain", { workers: [worker] }, (states) => ({ unknown: `${worker}: no worker of that name is there`, unanswered: `${worker} does not answer` }[states[worker]] ?? `${worker} drains`));

export const pauseButton = (paused) => actionButton(paused ? "resume admission" : "pause admission", paused ? "Request new episodes again?" : "Request no new episodes? What was requested is played and trained.", "pause", { paused: !paused }, ({ learner }) => (learner ? `${learner}: admission ${paused ? "resumed" : "paused"}` : "no learner works on this run"));

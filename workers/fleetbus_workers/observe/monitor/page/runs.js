// The runs of this machine side by side: their rewards in one chart, and what each reached; a row draws its curves beside.
import { chart, colored } from "./charts.js";
import { el, number, percent, seconds, section, table } from "./dom.js";

const MOST_RUNS = 50, MOST_LINES = 8;

export async function runs(name, points, go) {
  const names = await (await fetch("/api/runs")).json();
  const answers = await Promise.all(names.slice(0, MOST_RUNS).map((run) => fetch(`/api/runs/${encodeURIComponent(run)}`)));
  const others = await Promise.all(answers.filter((answer) => answer.ok).map((answer) => answer.json()));
  const own = { name, values: points.filter((point) => "reward" in point.metrics).map((point) => [point.step, point.metrics.reward]) };
  const beside = others.slice(0, MOST_LINES - 1).map((run) => ({ name: run.run, values: run.steps.map((step, index) => [step, run.reward_by_step[index]]).filter(([, value]) => value !== null) }));
  const columns = [
    ["run", (run) => run.run], ["steps", (run) => run.steps.length, "number"], ["reward, last step", (run) => number(run.reward_by_step.at(-1), 2), "number"],
    ["held out, at start", (run) => percent(run.success_start), "number"], ["at end", (run) => percent(run.success_end), "number"],
    ["time", (run) => seconds(run.wall_seconds), "number"], ["", (run) => (run.finished ? "" : "stopped")], ["task by task", (run) => el("a", { href: `#/evaluations?one=${encodeURIComponent(run.run)}` }, "this run less it")], ["its own page", (run) => `fleetbus monitor ${run.run}`],
  ];
  const list = others.length ? table(`${others.length} other ${others.length === 1 ? "run" : "runs"}; a row draws it beside this one`, columns, others, (run) => go(new URLSearchParams({ beside: run.run }), "curves")) : el("p", { class: "empty" }, "no other run on this machine has ended yet");
  return [el("div", { class: "grid" }, section("Reward of each run", chart("Reward of each run", colored([own, ...beside]), { ceiling: 1 })), section("Runs", list))];
}

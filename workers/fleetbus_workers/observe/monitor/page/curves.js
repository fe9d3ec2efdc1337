// Reward (of every policy that is trained, beside another run's, and its histogram), success, staleness, throughput, and where the learner's time goes, over the steps of the lineage that counts.
import { chart, colored, heatmap } from "./charts.js";
import { changed, el, section } from "./dom.js";

const metricOf = (points) => (name, label = name) => ({ name: label, values: points.filter((point) => name in point.metrics).map((point) => [point.step, point.metrics[name]]) });

/** What each step paid the seats of one of several policies that are trained. */
function ofPolicy([policy, points]) {
  const ofSeats = ({ metrics }) => Object.keys(metrics).filter((name) => name.startsWith("reward_of_")).map((name) => metrics[name]);
  const values = points.map((point) => { const found = ofSeats(point); return [point.step, found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : point.metrics.reward]; });
  return { name: `reward of ${policy}`, values: values.filter(([, value]) => value !== undefined) };
}

/** Reward and success per step, of held-out tasks, of the policies that others train from the same episodes, and of another run. */
export function rewardChart({ points, evaluations, policy, others }, other = null, smooth = 1) {
  const metric = metricOf(points);
  const held = (greedy) => ({ name: greedy ? "held out, greedy" : "held out, sampled", marks: true, values: evaluations.filter((each) => (each.temperature === 0) === greedy).map((each) => [each.step, each.success]) });
  const beside = (name) => ({ name: `${name} of ${other.run}`, values: other.steps.map((step, index) => [step, other[`${name}_by_step`][index]]).filter(([, value]) => value !== null && value !== undefined) });
  return chart("Reward and success", colored([metric("reward"), metric("success"), held(false), held(true), ...(others.size ? [[policy, points], ...others].map(ofPolicy) : []), ...(other ? [beside("reward"), beside("success")] : [])]), { ceiling: 1, smooth });
}

async function load(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

/** A choice of the policy whose other curves are drawn and of the run that is drawn beside, where there are others, and of over how many steps lines are smoothed. */
function chooser(runs, chosen, smooth, policies, shown, query, go) {
  const select = (label, name, options) => el("label", {}, `${label} `, el("select", { name, change: (event) => go(changed(query, { [name]: event.target.value })) }, options));
  const names = ["", ...runs].map((name) => el("option", { value: name, selected: name === chosen }, name || "no other run"));
  const steps = [1, 5, 10, 20, 50].map((count) => el("option", { value: count === 1 ? "" : count, selected: count === smooth }, count === 1 ? "no smoothing" : `mean of ${count} steps`));
  return el("form", { submit: (event) => event.preventDefault() }, policies.length > 1 ? select("further curves of", "policy", policies.map((name) => el("option", { value: name, selected: name === shown }, name))) : null, runs.length ? select("beside", "beside", names) : null, select("lines:", "smooth", steps));
}

export async function curves(seen, query, go) {
  const { policy, others } = seen, shown = others.has(query.get("policy")) ? query.get("policy") : policy, points = others.get(shown) ?? seen.points;
  const chosen = query.get("beside") ?? "", smooth = Number(query.get("smooth") || 1);
  const [rewards, runs, other] = await Promise.all([load("/api/rewards"), load("/api/runs"), chosen ? load(`/api/runs/${encodeURIComponent(chosen)}`) : null]);
  const metric = metricOf(points);
  const rates = points.slice(1).map((point, index) => { const spent = (point.time_ns - points[index].time_ns) / 1e9; return [point, spent > 0 ? spent : null]; }).filter(([, spent]) => spent);
  const per = (name, label, count) => ({ name: label, values: rates.filter(([point]) => count(point) !== undefined).map(([point, spent]) => [point.step, count(point) / spent]) });
  const boxes = [
    ["Staleness, in steps", colored([metric("staleness_mean", "mean"), metric("staleness_max", "max"), metric("staleness_in_flight_mean", "in flight"), metric("staleness_in_queue_mean", "in queue")]), { ceiling: 1 }],
    ["Episodes trained per second", colored([per("episodes", "episodes/s", (point) => point.episodes)]), { digits: 1 }],
    ["Tokens trained per second", colored([per("tokens", "tokens/s", (point) => point.metrics.tokens)]), { digits: 0 }],
    ["Seconds per step: waiting for a batch, reading it, training", colored([metric("seconds_wait", "wait for batch"), metric("seconds_read", "read"), metric("seconds_train", "train")]), { stacked: true, unit: " s" }],
    ["Seconds per step, wall-clock time", colored([{ name: "step", values: rates.map(([point, spent]) => [point.step, spent]) }]), { unit: " s" }],
    ["Groups without signal, episodes excluded", colored([metric("groups_without_signal", "flat groups"), { name: "excluded", values: points.map((point) => [point.step, point.excluded]) }]), { digits: 0 }],
    ["Log-probabilities: sampler and trainer", colored([metric("logprob_difference_max", "largest difference"), metric("ratio_max", "largest ratio")]), { digits: 4 }],
    ["Gradient norm, loss", colored([metric("grad_norm", "gradient norm"), metric("loss")]), { floor: null, digits: 3 }],
    ["Turns per episode, tool errors", colored([metric("turns"), metric("tool_errors", "tool errors")]), { digits: 1 }],
    ...(points.some((point) => "league_win_rate" in point.metrics) ? [
      ["League: rating of the newest version, in points of Elo, and its standard error", colored([metric("league_rating", "rating"), metric("league_rating_error", "error")]), { floor: null, digits: 0 }],
      ["League: points per game against earlier versions", colored([metric("league_win_rate", "win rate")]), { ceiling: 1 }],
    ] : []),
  ];
  return [el("div", { class: "grid" }, section("Reward and success", chooser(runs, chosen, smooth, [policy, ...others.keys()], shown, query, go), rewardChart(seen, other, smooth)), section("Rewards of trained episodes", heatmap("Rewards of trained episodes", rewards)), boxes.map(([title, series, options]) => section(others.size ? `${shown}: ${title}` : title, chart(title, series, { smooth, ...options }))))];
}

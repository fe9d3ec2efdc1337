// The seats of an episode as lanes of its transcript: a colour and a column each, and who plays which.
import { el, number } from "./dom.js";

const COLORS = 8, COLUMNS = 4;

/** Attributes of what one seat was shown or said; those of an episode without seats say no lane. */
export function lane(seats, turn, role) {
  const at = seats.findIndex((each) => each.seat === turn.seat);
  if (at < 0) return { class: `message ${role}`, "data-turn": turn.turn };
  return { class: `message ${role} seat c${at % COLORS}`, "data-turn": turn.turn, "data-seat": turn.seat, style: { "--lane": at % COLUMNS } };
}

/** "customer (simulator)": with the policy, where there are several and the seat is not called like its own. */
export function who(seats, seat) {
  const policy = seats.find((each) => each.seat === seat)?.policy, several = new Set(seats.map((each) => each.policy)).size > 1;
  return several && policy && policy !== seat ? `${seat} (${policy})` : seat;
}

/** Each seat with its policy, its reward, or why it has none, and its turns. */
export function seatList(seats) {
  if (!seats.length) return null;
  const worth = ({ reward, reason }) => reward === null ? (reason ? `no reward: ${reason}` : "no reward yet") : `reward ${number(reward, 3)}`;
  return el("ul", { class: "legend", "aria-label": "Seats" }, seats.map((each, index) => el("li", { class: `c${index % COLORS}` }, el("i"), el("b", {}, each.seat), ` · policy ${each.policy || "unknown"} · ${worth(each)} · ${each.turns} turns`)));
}

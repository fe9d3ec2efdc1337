// What people say of an episode: its labels and comments, and where the page may act, fields to change them.
import { act } from "./actions.js";
import { el, section } from "./dom.js";

const MOST = { name: 48, comment: 2000, author: 200 };
const at = (turn) => (turn === null || turn === undefined ? "" : ` · turn ${turn}`);
const when = (time) => (time ? new Date(time / 1e6).toLocaleString() : "");

/** The section of an episode; `turns` are what a label can be put on besides the whole. */
export function labels(found) {
  const { labels: put, comments, actions, turns } = found;
  if (!actions && !put?.length && !comments?.length) return null;
  const send = (body, told) => act("label", { episode: found.episode, ...body }, () => told, (changed) => shown.replaceWith(labels({ ...found, ...changed })));
  const names = put.map((each) => el("span", { class: "label", title: `${each.author} ${when(each.time_ns)}` }, el("a", { href: `#/episodes?label=${encodeURIComponent(each.name)}` }, each.name), at(each.turn), actions ? remover(`remove label ${each.name}${at(each.turn)}`, () => send({ turn: each.turn, remove: [each.name] }, `label ${each.name} removed`)) : null));
  const said = comments.map((each) => el("div", { class: "message comment" }, el("h3", {}, `comment ${each.sequence}${at(each.turn)} · ${each.author || "somebody"} · ${when(each.time_ns)}`, actions ? remover(`remove comment ${each.sequence}`, () => send({ replaces: each.sequence }, "comment removed")) : null), el("pre", {}, each.text)));
  const shown = section("Labels and comments", names.length ? el("p", { class: "labels" }, names) : el("p", { class: "empty" }, "no label"), said, actions ? fields(turns, send) : null);
  return shown;
}

const remover = (title, click) => el("button", { type: "button", class: "action", title, "aria-label": title, click }, "×");

function fields(turns, send) {
  const turn = el("select", { name: "labelled", "aria-label": "What is labelled" }, el("option", { value: "" }, "whole episode"), turns.map((each) => el("option", { value: each.turn }, `turn ${each.turn}`)));
  const name = el("input", { type: "text", name: "newlabel", maxlength: MOST.name, placeholder: "label", "aria-label": "Label" });
  const comment = el("input", { type: "text", name: "newcomment", class: "wide", maxlength: MOST.comment, placeholder: "comment", "aria-label": "Comment" });
  const author = el("input", { type: "text", name: "author", maxlength: MOST.author, placeholder: "your name", value: localStorage.getItem("author") ?? "", "aria-label": "Your name" });
  function submit(event) {
    event.preventDefault();
    localStorage.setItem("author", author.value.trim());
    const add = name.value.trim() ? [name.value.trim()] : [], text = comment.value.trim();
    if (add.length || text) send({ turn: turn.value === "" ? null : Number(turn.value), add, comment: text, author: author.value.trim() }, "stored in the log");
  }
  return el("form", { submit }, turn, name, comment, author, el("button", { type: "submit" }, "add"));
}

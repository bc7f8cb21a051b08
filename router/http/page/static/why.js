/** Where requests wait now, and why a node takes no work. */

import { byId, el, keep, setText, show } from "./dom.js";
import { duration, plural } from "./format.js";

const MAX_REASONS = 12;

export function draw(snapshot) {
  show(byId("why"), snapshot.sees === "everything");
  const waits = snapshot.waits.map(({ where, why, count, oldest_s }) => ({
    title: `${plural(count, "request")} in ${where}, the oldest for ${duration(oldest_s)}`,
    why,
  }));
  const nodes = snapshot.nodes
    .filter((node) => node.state !== "ready")
    .map((node) => ({ title: `${node.id} is ${node.state}`, why: node.why }));
  const pairs = snapshot.pairs
    .filter((pair) => pair.state !== "ready")
    .map((pair) => ({ title: `${pair.prefill} to ${pair.decode}: ${pair.state}`, why: pair.why }));
  list("waits", waits);
  list("troubles", [...nodes, ...pairs]);
  if (!snapshot.nodes.length) setText(byId("troubles-empty"), "No node has joined the router.");
  else setText(byId("troubles-empty"), "Every node takes work.");
}

function list(id, reasons) {
  show(byId(`${id}-empty`), reasons.length === 0);
  const more = reasons.length - MAX_REASONS;
  const shown = reasons.slice(0, MAX_REASONS);
  if (more > 0) shown.push({ title: `and ${more} more`, why: "" });
  keep(byId(id), shown.map((reason, index) => ({ ...reason, index })), (reason) => String(reason.index), make, update);
}

const make = () => el("li", {}, el("strong"), el("span", { class: "why" }));

function update(element, reason) {
  setText(element.firstChild, reason.title);
  setText(element.lastChild, reason.why);
}

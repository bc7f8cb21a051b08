/** The figures at the top: what the system does now. */

import { byId, el, keep, setText } from "./dom.js";
import { bytes, count, duration, figure, percent } from "./format.js";

/** @param {import("./history.js").History} history */
export function draw(history) {
  const { counts, totals } = history.latest;
  const rate = (read) => history.rate(read);
  const acceptance = rate((each) => each.totals.num_drafted)
    ? history.risen((each) => each.totals.accepted_at.reduce((sum, number) => sum + number, 0)) /
      history.risen((each) => each.totals.num_drafted)
    : null;
  const failed = totals.requests.failed;
  const within = (name) => (history.latency(name, 0.95) === null ? "none measured" : `95 % within ${duration(history.latency(name, 0.95))}`);
  const figures = [
    ["Running now", count(counts.running), `${count(totals.requests.done)} done`, "Requests that nodes work on."],
    ["Waiting now", count(counts.waiting), failed ? `${count(failed)} failed` : "in the router", "Requests that no node has room for yet."],
    ["Tokens per second", figure(history.outputRate ?? 0), "of answers", "The sum over all nodes."],
    ["First token, median", duration(history.latency("ttft", 0.5)), within("ttft"),
      "From the arrival of a request to its first token (TTFT). Half of the requests were faster."],
    ["Next token, median", duration(history.latency("itl", 0.5)), within("itl"), "Time between two tokens of an answer (ITL)."],
    ["Handoff rate", `${bytes(rate((each) => each.totals.transfer_bytes) ?? 0)}/s`, `${count(totals.transfer_pages)} pages so far`,
      "What decode nodes pulled from prefill nodes."],
    ["Drafts accepted", percent(acceptance), "of guessed tokens",
      "Speculation: a small model guesses the next tokens, and the model checks them in one step. Right guesses are accepted."],
    ["Prefix cache", percent(history.hits), "of prompt tokens",
      "The share of prompt tokens that need no computing, since a node still had the KV pages of the same beginning."],
  ];
  keep(byId("numbers"), figures, ([name]) => name, make, update);
}

function make([name, , , meaning]) {
  return el("div", { title: meaning }, el("dl", {}, el("dt", { text: name }), el("dd"), el("dd", { class: "detail" })));
}

function update(element, [, value, detail]) {
  const [shown, below] = element.querySelectorAll("dd");
  setText(shown, value);
  setText(below, detail);
}

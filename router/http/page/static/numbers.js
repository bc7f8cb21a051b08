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
  const figures = [
    ["Running", count(counts.running), `${count(totals.requests.done)} done`],
    ["Waiting", count(counts.waiting), failed ? `${count(failed)} failed` : ""],
    ["Tokens per second", figure(rate((each) => each.totals.output_tokens) ?? 0), "generated"],
    ["First token", duration(history.latency("ttft", 0.5)), `p95 ${duration(history.latency("ttft", 0.95))}`],
    ["Between tokens", duration(history.latency("itl", 0.5)), `p95 ${duration(history.latency("itl", 0.95))}`],
    ["Pages moved", `${bytes(rate((each) => each.totals.transfer_bytes) ?? 0)}/s`, `${count(totals.transfer_pages)} pages so far`],
    ["Drafts accepted", percent(acceptance), "speculation"],
    ["Prefix cache", percent(history.hits), "of prompts found"],
  ];
  keep(byId("numbers"), figures, ([name]) => name, make, update);
}

function make([name]) {
  return el("div", {}, el("dl", {}, el("dt", { text: name }), el("dd"), el("dd", { class: "detail" })));
}

function update(element, [, value, detail]) {
  const [shown, below] = element.querySelectorAll("dd");
  setText(shown, value);
  setText(below, detail);
}

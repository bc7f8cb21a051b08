/**
 * Running requests (from the stream of snapshots) and finished ones (from GET /debug/requests, which is asked only while
 * this view is open, and only for as many as have ended since).
 */

import { Refused, askJson } from "./api.js";
import { byId, el, keep, setText, show } from "./dom.js";
import { clock, count, duration, plural } from "./format.js";
import { openRequest } from "./timeline.js";

const MAX_FINISHED = 1024; // kept here, as in the router
const ROWS = 100; // more are shown on request
const ASK_MS = 3000; // finished requests are asked for at most so often

/** @type {Map<string, any>} lines of finished requests by id, the oldest first */
const finished = new Map();
let latest = null;
let epoch = "";
let numEnded = -1; // in the router's books when the list was last read
let readAt = 0;
let isReading = false;
let numRows = ROWS;
let problem = "";

export function start() {
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("input", () => {
    numRows = ROWS;
    drawRows();
  });
  byId("more-button").addEventListener("click", () => {
    numRows += ROWS;
    drawRows();
  });
}

export function draw(snapshot, isShown) {
  latest = snapshot;
  if (snapshot.router.epoch !== epoch) {
    epoch = snapshot.router.epoch;
    numEnded = -1;
    finished.clear();
  }
  if (!isShown) return;
  if (snapshot.sees === "everything") read();
  drawRows();
}

/** Read the finished requests that have ended since the last time. */
async function read() {
  const { done, failed, cancelled } = latest.totals.requests;
  const ended = done + failed + cancelled;
  if (isReading || ended === numEnded || Date.now() - readAt < ASK_MS) return;
  isReading = true;
  try {
    const fresh = numEnded < 0 ? MAX_FINISHED : ended - numEnded;
    const limit = Math.min(2 * MAX_FINISHED, fresh + latest.num_requests + 20);
    const { requests, most_finished } = await askJson(`debug/requests?limit=${limit}`);
    for (const line of requests.reverse()) if (line.outcome !== "live") finished.set(line.rid, line);
    for (const rid of finished.keys()) {
      if (finished.size <= MAX_FINISHED) break;
      finished.delete(rid);
    }
    setText(byId("requests-kept"), `Running requests, and the last ${count(most_finished)} finished ones. Choose one to see where its time went.`);
    [numEnded, problem] = [ended, ""];
  } catch (error) {
    problem = error instanceof Refused ? error.message : "the finished requests could not be read";
  } finally {
    isReading = false;
    readAt = Date.now();
    drawRows();
  }
}

function drawRows() {
  if (!latest) return;
  if (latest.sees !== "everything") {
    setText(byId("requests-count"), "Requests are shown with the admin key.");
    byId("request-rows").replaceChildren();
    show(byId("more-button"), false);
    return;
  }
  const { state, outcome, text } = Object.fromEntries(new FormData(byId("filters")));
  const live = latest.requests.map((request) => ({ ...request, outcome: "live" }));
  const isLive = new Set(live.map(({ rid }) => rid));
  const all = [...live, ...[...finished.values()].reverse().filter(({ rid }) => !isLive.has(rid))];
  const found = all.filter(
    (line) =>
      (!state || (state === "finished" ? line.outcome !== "live" : line.stage === state)) &&
      (!outcome || line.outcome === outcome) &&
      (!text || [line.rid, line.client_id, line.model, line.node, line.prefill, line.decode].some((value) => value?.includes(text))),
  );
  const running = latest.num_requests > live.length ? `the newest ${count(live.length)} of ${count(latest.num_requests)}` : count(live.length);
  const kept = `${running} running, ${count(all.length - live.length)} finished`;
  setText(byId("requests-count"), problem || `${plural(found.length, "request")} found: ${kept}`);
  keep(byId("request-rows"), found.slice(0, numRows), (line) => line.rid, makeRow, updateRow);
  show(byId("more-button"), found.length > numRows);
}

const CELLS = ["", "", "wide", "wide", "number", "number wide", "number wide", "number", "number wide", "wide"];

function makeRow(line) {
  const opens = el("button", { type: "button", class: "mono", text: line.rid, on: { click: () => openRequest(line.rid, () => row.why) } });
  const row = el("tr", {}, ...CELLS.map((name) => el("td", { class: name })));
  row.firstChild.append(opens);
  return row;
}

function updateRow(row, line) {
  const isLive = line.outcome === "live";
  row.classList.toggle("is-live", isLive);
  row.children[1].classList.toggle("outcome-failed", line.outcome === "failed");
  row.why = line.why ?? row.why ?? "";
  const where = line.node || line.decode || line.prefill || line.why;
  const values = isLive
    ? [line.stage, line.model, clock(latest.at - line.age_s), duration(line.age_s), "", count(line.num_prompt), count(line.num_tokens), "", where]
    : [line.outcome, line.model, clock(line.received_at), duration(line.total_s), duration(line.ttft_s), count(line.num_prompt),
       count(line.num_tokens), line.num_moves ? count(line.num_moves) : "", `${line.longest}, ${duration(line.longest_s)}`];
  values.forEach((value, index) => setText(row.children[index + 1], value));
}

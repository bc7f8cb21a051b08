/** One verdict in words: whether the system does well, and if not, why. */

import { byId, setText } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { BAD, unitsOf } from "./topology.js";

const LONG_S = 10; // a request that has no token after so long is worth a word

const CHECKED =
  "Checked once per second: the router takes requests, every node and every pair of nodes works, no request failed in " +
  `the last 10 s, none waits for a node, and none takes more than ${LONG_S} s before its first token.`;

/** @param {import("./history.js").History} history */
export function draw(history) {
  const numFailed = history.risen((each) => each.totals.requests.failed);
  write(verdictOf(history.latest, numFailed));
}

/** The router does not answer: nothing is known. */
export function drawLost() {
  write({ word: "Unknown", words: "the router does not answer. Below is what it said last." });
}

function write({ word, words }) {
  byId("verdict").className = `verdict is-${word.toLowerCase()}`;
  byId("verdict").title = CHECKED;
  setText(byId("verdict-word"), `${word}:`);
  setText(byId("verdict-words"), words);
}

/**
 * Return the verdict on a snapshot: "Problem", "Busy" or "Healthy", and a sentence.
 * @param {any} snapshot
 * @param {number} numFailed requests that failed in the last ten seconds
 * @returns {{word: string, words: string}}
 */
export function verdictOf(snapshot, numFailed) {
  const { router, counts, sees, pairs, waits } = snapshot;
  if (router.is_draining) return { word: "Problem", words: "the router takes no new requests, because it is shutting down." };
  if (router.reason) return { word: "Problem", words: `${router.reason}.` };
  const units = unitsOf(snapshot.nodes).map(({ name, ranks }) => ranks.find((rank) => rank.state !== "ready") ?? { ...ranks[0], id: name });
  const working = units.filter(({ state }) => state === "ready").length;
  const nodes = sees === "counts" ? "requests are served" : `${count(working)} of ${plural(units.length, "node")} ${working === 1 ? "takes" : "take"} work`;
  const bad = units.filter(({ state }) => BAD.includes(state));
  if (bad.length) {
    const more = bad.length > 1 ? ` ${count(bad.length - 1)} more ${bad.length > 2 ? "are" : "is"} in trouble.` : "";
    return { word: "Problem", words: `${nodes}. ${bad[0].id} is ${bad[0].state}, because ${bad[0].why}.${more}` };
  }
  const pair = pairs.find(({ state }) => state === "faulty");
  if (pair) return { word: "Problem", words: `${pair.prefill} and ${pair.decode} do not work together, because ${pair.why}.` };
  if (numFailed) return { word: "Problem", words: `${plural(numFailed, "request")} failed in the last 10 s.` };
  const resting = units.filter(({ state }) => state !== "ready").map(({ id, state }) => `; ${id} is ${state}`).join("");
  const wait = waits.find(({ where, oldest_s }) => ["queue", "paused"].includes(where) || oldest_s > LONG_S);
  if (wait || counts.waiting) {
    const what = `${plural(wait?.count ?? counts.waiting, "request")} ${(wait?.count ?? counts.waiting) === 1 ? "waits" : "wait"}`;
    const why = wait ? ` in ${wait.where}, the oldest for ${duration(wait.oldest_s)}${wait.why && `, because ${wait.why}`}` : "";
    return { word: "Busy", words: `${nodes}${resting}, and ${what}${why}.` };
  }
  return { word: "Healthy", words: `${nodes}${resting}, nothing waits.` };
}

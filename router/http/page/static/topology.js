/** The live topology: the router, prefill and decode nodes with their ranks, and what travels between them. */

import * as dots from "./dots.js";
import { byId, el, keep, setText, show } from "./dom.js";
import { ago, byName, bytes, count, duration, figure, plural } from "./format.js";
import { openNode } from "./operate.js";

const CROWDED = 12; // nodes of both roles from which cards are drawn small
const OWNERS = ["request", "ticket", "cache"];
export const BAD = ["faulty", "silent", "gone"];
const IDLE_HINT = "Nodes and requests are shown with the admin key.";

/** @param {import("./history.js").History} history */
export function draw(history) {
  const snapshot = history.latest;
  const seesAll = snapshot.sees === "everything";
  drawLinks(history);
  const units = unitsOf(snapshot.nodes);
  byId("topology").classList.toggle("is-crowded", units.length >= CROWDED);
  const numDecode = units.filter((unit) => unit.role === "decode").length;
  const share = units.length >= CROWDED ? Math.min(2, Math.max(0.5, numDecode / Math.max(1, units.length - numDecode))) : 1;
  byId("topology").style.setProperty("--decode-share", `${share}fr`); // of the width, beside 1fr for prefill
  const placed = placedOf(snapshot);
  drawRouter(snapshot, placed?.here.get("router") ?? snapshot.counts.waiting);
  for (const role of ["prefill", "decode"]) {
    const own = units.filter((unit) => unit.role === role);
    keep(byId(`${role}-nodes`), own, (unit) => unit.key, makeCard, (card, unit) => updateCard(card, unit, history, placed));
    show(byId(`${role}-empty`), own.length === 0);
    setText(byId(`${role}-empty`), seesAll ? emptyWords(role, snapshot) : IDLE_HINT);
  }
  show(byId("legend"), seesAll);
  const sizes = [...new Set(snapshot.nodes.map((node) => node.page_size).filter(Boolean))];
  if (sizes.length) setText(byId("page-size"), sizes.join(" or "));
  const { running, waiting } = snapshot.counts;
  show(byId("idle-hint"), running + waiting === 0 && snapshot.models.length > 0);
  if (!byId("view-system").hidden) dots.draw(snapshot);
}

/** Place the dots anew, for example when the view is shown again. */
export function place() {
  dots.place();
}

/**
 * Group nodes into units: the ranks of a group are one unit, and every other node is one.
 * @returns {{key: string, role: string, name: string, ranks: any[]}[]}
 */
export function unitsOf(nodes) {
  const units = new Map();
  for (const node of nodes) {
    const name = node.group ?? node.id;
    const key = `${node.role} ${name}`;
    if (!units.has(key)) units.set(key, { key, role: node.role, name, ranks: [] });
    units.get(key).ranks.push(node);
  }
  for (const unit of units.values()) unit.ranks.sort((a, b) => a.rank - b.rank);
  return [...units.values()].sort((a, b) => byName(a.key, b.key));
}

function emptyWords(role, { nodes, router }) {
  const others = nodes.filter((node) => node.state !== "gone").length;
  if (role === "prefill" && others) return "No prefill node: the decode nodes compute the prompts themselves.";
  return `No ${role} node has joined${router.is_draining ? "" : ` yet. "baton ${role}" starts one`}.`;
}

function drawRouter({ router, counts, models }, numHere) {
  setText(byId("router-waiting"), `${plural(counts.running, "request")} running, ${count(counts.waiting)} waiting`);
  drawLane(byId("router-lane"), numHere, "in the router");
  const model = models.length ? `serves ${models.join(", ")}` : "serves no model yet";
  setText(byId("router-words"), `; ${model}; version ${router.version}, up for ${duration(router.uptime_s)}`);
}

function drawLinks(history) {
  const seesAll = history.latest.sees === "everything";
  const [computed, cached] = ["computed_tokens", "cached_tokens"].map((name) => history.sumRate(name, "prefill"));
  const prompts = seesAll ? computed + cached : (history.promptRate ?? 0);
  const first = history.sumRate("generated_tokens", "prefill");
  const tokens = history.outputRate ?? 0;
  const moved = history.rate((each) => each.totals.transfer_bytes) ?? 0;
  const pages = history.rate((each) => each.totals.transfer_pages) ?? 0;
  const link = (name, rate, words, parts = "") => {
    byId(`link-${name}`).classList.toggle("is-flowing", rate > 0);
    setText(byId(`rate-${name}`), rate > 0 ? words + (seesAll && parts) : "");
  };
  link("prompt", prompts, `${figure(prompts)} prompt tokens/s`, `: ${figure(computed)} computed, ${figure(cached)} cached`);
  link("tokens", tokens, `${figure(tokens)} tokens/s`, `: ${figure(tokens - first)} by decode, ${figure(first)} by prefill`);
  link("pages", pages, `${figure(pages)} pages/s\n${bytes(moved)}/s`);
  const client = byId("link-client").classList;
  client.toggle("is-flowing", prompts + tokens > 0);
}

/** Show how many requests are in a place: as a number, and as so many dots. A full lane shows as many as fit. */
function drawLane(lane, number, noun) {
  const [value, words, dots] = lane.children;
  setText(value, count(number));
  setText(words, ` ${noun}`);
  dots.style.setProperty("--count", String(number));
}

function makeCard(unit) {
  const card = el("article", { class: "node" },
    el("header", {},
      el("button", { type: "button", class: "node-name", text: unit.name, on: { click: () => openNode(card.unit) } }),
      el("span", { class: "state" })),
    el("p", { class: "why" }),
    el("p", { class: "speed" }, el("strong"), el("span", { class: "unit" }), el("span", { class: "more" })),
    el("p", { class: "lane" }, el("b"), el("span", { class: "more" }), el("i", { class: "resting" })),
    el("p", { class: "bar-words load-words" }, el("span"), el("span", { class: "caption" })),
    el("div", { class: "load-bar", role: "img" }, el("i"), el("i", { class: "coming" })),
    el("div", { class: "ranks" }));
  card.parts = Object.fromEntries(["state", "why", "speed", "lane", "load-bar", "load-words", "ranks"].map((name) => [name, card.querySelector(`.${name}`)]));
  return card;
}

function updateCard(card, unit, history, placed) {
  const { state, why, speed, ranks } = card.parts;
  card.unit = unit;
  const worst = unit.ranks.find((node) => BAD.includes(node.state)) ?? unit.ranks.find((node) => node.state !== "ready") ?? unit.ranks[0];
  const isBad = BAD.includes(worst.state);
  card.classList.toggle("is-bad", isBad);
  card.classList.toggle("is-resting", !isBad && worst.state !== "ready");
  state.className = `state ${isBad ? "bad" : worst.state}`;
  setText(state, worst.state);
  setText(why, worst.why);
  show(why, worst.why !== "");
  const first = unit.ranks[0];
  const counter = unit.role === "prefill" ? "computed_tokens" : "generated_tokens";
  const rate = worst.state === "gone" ? 0 : unit.ranks.reduce((sum, node) => sum + history.nodeRate(node.id, counter), 0);
  setText(speed.children[0], figure(rate));
  setText(speed.children[1], unit.role === "prefill" ? " tokens computed/s" : " tokens/s");
  setText(speed.children[2], `, 10 s average${unit.role === "prefill" && first.queued_tokens ? `; ${count(first.queued_tokens)} tokens queued` : ""}`);
  show(speed, worst.state !== "gone");
  drawLoad(card, unit, loadOf(unit, placed), worst.state !== "gone");
  keep(ranks, unit.ranks, (node) => node.id, makeRank, updateRank);
}

/**
 * Count live requests by the node where they are, and by the decode node that they are going to. Null if the snapshot
 * does not list all of them.
 * @returns {{here: Map<string, number>, coming: Map<string, number>} | null}
 */
function placedOf({ requests, num_requests }) {
  if (num_requests > requests.length) return null;
  const [here, coming] = [new Map(), new Map()];
  for (const request of requests) {
    const place = dots.placeOf(request);
    here.set(place, (here.get(place) ?? 0) + 1);
    if (place !== request.decode) coming.set(request.decode, (coming.get(request.decode) ?? 0) + 1);
  }
  return { here, coming };
}

/**
 * Return how many requests are at a unit, how many are coming, and how many run together at most. Both numbers are of
 * the snapshot's own list; only a list that is cut short leaves what the node reported last.
 */
function loadOf(unit, placed) {
  const sum = (numbers) => unit.ranks.reduce((total, { id }) => total + (numbers.get(id) ?? 0), 0);
  const node = unit.ranks[0]; // each rank of a group holds a part of every request
  if (placed === null) return { here: node.running, coming: 0, most: node.max_running };
  return { here: sum(placed.here), coming: unit.role === "decode" ? sum(placed.coming) : 0, most: node.max_running };
}

function drawLoad(card, unit, { here, coming, most }, isHere) {
  const { lane, "load-bar": bar, "load-words": words } = card.parts;
  drawLane(lane, here, `${here === 1 ? "request" : "requests"} ${unit.role === "prefill" ? "in prefill or handoff" : "running"}`);
  [here, coming].forEach((number, index) => (bar.children[index].style.width = `${(100 * number) / Math.max(1, most)}%`));
  const { waiting, running } = unit.ranks[0];
  setText(words.children[0], `slots ${count(here + coming)} of ${count(most)}`);
  setText(words.children[1], [coming ? `${count(coming)} on the way` : "", waiting ? `${count(waiting)} waiting` : ""].filter(Boolean).join(", "));
  bar.title = `Slots: ${count(here + coming)} of ${count(most)} taken. The node last counted ${plural(running, "running sequence")}: a request of several choices has several.`;
  bar.setAttribute("aria-label", bar.title);
  for (const part of [lane, bar, words]) show(part, isHere);
}

function makeRank() {
  const bar = el("div", { class: "pages-bar", role: "img" }, ...OWNERS.map((owner) => el("i", { class: owner })));
  return el("div", { class: "rank" }, el("p", { class: "bar-words" }), bar, el("p", { class: "caption" }, el("span"), el("span")));
}

function updateRank(element, node) {
  const [words, bar, caption] = element.children;
  const isGone = node.state === "gone";
  for (const part of [words, bar, caption.children[0]]) show(part, !isGone);
  const pages = node.pages;
  const used = pages ? pages.request + pages.ticket : node.num_pages - node.free_pages;
  OWNERS.forEach((owner, index) => {
    const number = pages ? pages[owner] : owner === "request" ? used : 0;
    bar.children[index].style.width = `${(100 * number) / Math.max(1, node.num_pages)}%`;
  });
  setText(words, `${node.num_ranks > 1 ? `rank ${node.rank}: ` : ""}memory ${count(used)} of ${plural(node.num_pages, "page")}`);
  const parts = pages
    ? `: ${count(pages.request)} of running requests, ${count(pages.ticket)} offered for the handoff, ${count(pages.cache)} cached and freed when needed, ` +
      `${count(pages.free)} free. ${plural(pages.padding, "more page")} ${pages.padding === 1 ? "is" : "are"} never used by requests.`
    : "";
  const label = `${node.id}, ${words.textContent}${parts}`;
  if (bar.title !== label) {
    bar.title = label;
    bar.setAttribute("aria-label", label);
  }
  setText(caption.children[0], pages?.cache ? `${count(pages.cache)} cached, freed when needed` : "");
  setText(caption.children[1], `${isGone ? "last seen" : "heard from"} ${ago(node.last_seen_s)}`);
}

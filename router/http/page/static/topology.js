/** The live topology: the router, prefill and decode nodes with their ranks, and what travels between them. */

import * as dots from "./dots.js";
import { byId, el, keep, setText, show } from "./dom.js";
import { ago, byName, bytes, count, duration, figure, plural } from "./format.js";
import { openNode } from "./operate.js";

const CROWDED = 12; // nodes of both roles from which cards are drawn small
const OWNERS = ["request", "ticket", "cache", "padding"];
const BAD = ["faulty", "silent", "gone"];
const IDLE_HINT = "Nodes and requests are shown with the admin key.";

/** @param {import("./history.js").History} history */
export function draw(history) {
  const snapshot = history.latest;
  const seesAll = snapshot.sees === "everything";
  drawRouter(snapshot);
  drawLinks(history);
  const units = unitsOf(snapshot.nodes);
  byId("topology").classList.toggle("is-crowded", units.length >= CROWDED);
  const numDecode = units.filter((unit) => unit.role === "decode").length;
  const share = units.length >= CROWDED ? Math.min(2, Math.max(0.5, numDecode / Math.max(1, units.length - numDecode))) : 1;
  byId("topology").style.setProperty("--decode-share", `${share}fr`); // of the width, beside 1fr for prefill
  for (const role of ["prefill", "decode"]) {
    const own = units.filter((unit) => unit.role === role);
    keep(byId(`${role}-nodes`), own, (unit) => unit.key, makeCard, (card, unit) => updateCard(card, unit, history));
    show(byId(`${role}-empty`), own.length === 0);
    setText(byId(`${role}-empty`), seesAll ? emptyWords(role, snapshot) : IDLE_HINT);
  }
  show(byId("legend"), seesAll);
  const sizes = [...new Set(snapshot.nodes.map((node) => node.page_size).filter(Boolean))];
  setText(byId("legend-pages"), sizes.length === 1 ? `Bars: a node's memory in pages, each of ${sizes[0]} tokens:` : "Bars: a node's memory in pages:");
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

function drawRouter({ router, counts, models }) {
  setText(byId("router-waiting"), `${plural(counts.running, "request")} running, ${count(counts.waiting)} waiting here`);
  const model = models.length ? `serves ${models.join(", ")}` : "serves no model yet";
  setText(byId("router-words"), `${model}; version ${router.version}; up for ${duration(router.uptime_s)}`);
}

function drawLinks(history) {
  const prompts = history.rate((each) => each.totals.prompt_tokens) ?? 0;
  const tokens = history.rate((each) => each.totals.output_tokens) ?? 0;
  const moved = history.rate((each) => each.totals.transfer_bytes) ?? 0;
  const pages = history.rate((each) => each.totals.transfer_pages) ?? 0;
  const link = (name, rate, words) => {
    byId(`link-${name}`).classList.toggle("is-flowing", rate > 0);
    setText(byId(`rate-${name}`), rate > 0 ? words : "");
  };
  const hasPrefill = history.latest.nodes.some((node) => node.role === "prefill");
  link("prompt", hasPrefill || history.latest.sees === "counts" ? prompts : 0, `${figure(prompts)} prompt tokens/s`);
  link("tokens", tokens, `${figure(tokens)} tokens/s`);
  link("pages", pages, `${figure(pages)} pages/s\n${bytes(moved)}/s`);
}

function makeCard(unit) {
  const card = el("article", { class: "node" },
    el("header", {},
      el("button", { type: "button", class: "node-name", text: unit.name, on: { click: () => openNode(card.unit) } }),
      el("span", { class: "state" })),
    el("p", { class: "why" }),
    el("p", { class: "speed" }, el("strong"), el("span", { class: "unit" }), el("span", { class: "more" })),
    el("div", { class: "lane", "aria-hidden": "true" }),
    el("div", { class: "ranks" }));
  card.parts = Object.fromEntries(["state", "why", "speed", "lane", "ranks"].map((name) => [name, card.querySelector(`.${name}`)]));
  return card;
}

function updateCard(card, unit, history) {
  const { state, why, speed, lane, ranks } = card.parts;
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
  const rate = worst.state === "gone" ? 0 : unit.ranks.reduce((sum, node) => sum + (history.nodeRate(node.id, counter) ?? 0), 0);
  setText(speed.children[0], figure(rate));
  setText(speed.children[1], unit.role === "prefill" ? " tokens computed/s" : " tokens/s");
  setText(speed.children[2], moreWords(first));
  show(speed, worst.state !== "gone");
  lane.dataset.nodes = unit.ranks.map((node) => node.id).join(" ");
  keep(ranks, unit.ranks, (node) => node.id, makeRank, updateRank);
}

function moreWords(node) {
  if (node.role === "prefill") return node.queued_tokens ? `, ${count(node.queued_tokens)} tokens queued` : "";
  const waiting = node.waiting ? `, ${count(node.waiting)} waiting` : "";
  return `, ${count(node.running)} of ${count(node.max_running)} running${waiting}`;
}

function makeRank() {
  const bar = el("div", { class: "pages-bar", role: "img" }, ...OWNERS.map((owner) => el("i", { class: owner })));
  return el("div", { class: "rank" }, bar, el("p", { class: "caption" }, el("span"), el("span")));
}

function updateRank(element, node) {
  const [bar, caption] = element.children;
  const isGone = node.state === "gone";
  show(bar, !isGone);
  const pages = node.pages;
  const used = pages ? pages.total - pages.free - pages.padding : node.num_pages - node.free_pages;
  const cached = pages?.cache ? `, ${count(pages.cache)} cached` : "";
  const words = `${plural(used - (pages?.cache ?? 0), "page")} in use${cached}, of ${count(node.num_pages)}`;
  OWNERS.forEach((owner, index) => {
    const number = pages ? pages[owner] : owner === "request" ? used : 0;
    bar.children[index].style.width = `${(100 * number) / Math.max(1, node.num_pages)}%`;
  });
  const parts = pages ? `: ${OWNERS.map((owner) => `${owner} ${pages[owner]}`).join(", ")}, free ${pages.free}` : "";
  const label = `Memory of ${node.id}: ${words}${parts}`;
  if (bar.title !== label) {
    bar.title = label;
    bar.setAttribute("aria-label", label);
  }
  setText(caption.children[0], isGone ? "" : node.num_ranks > 1 ? `rank ${node.rank}: ${words.replace(/ pages?/, "")}` : words);
  show(caption.children[0], !isGone);
  setText(caption.children[1], isGone ? `last seen ${ago(node.last_seen_s)}` : `last heartbeat ${ago(node.last_seen_s)}`);
}

/**
 * Draws requests as dots that travel along the arrows: from the client over the router and a prefill node to a decode
 * node, and back as text. Where a request is now, its lane says (topology.js), so that dots and words agree at any
 * instant; only the way between two places is drawn here. Snapshots come once per second, so a dot catches up on the
 * places that its request passed in between. Requests that came and went between two snapshots travel, too, a few per
 * second.
 *
 * The picture is drawn only as long as something moves. It repeats what the cards and the list of requests say in words,
 * so it is hidden from screen readers.
 */

import { byId } from "./dom.js";

const LEG_S = 0.5; // the way along an arrow
const MAX_BRIEF = 8; // dots per snapshot for requests that came and went
const MAX_DOTS = 400; // if frames are not drawn in time, dots on their way out are dropped
const SIZE = 3.6; // radius in pixels
const HEAD = 12; // length of an arrowhead, on which no dot is drawn
const TRAIL = [0, 9, 18]; // pixels between the squares of moving pages
const HUES = { in: "prefill", prompt: "prefill", pages: "pages", local: "decode", tokens: "decode", out: "decode" }; // by arrow
const reducesMotion = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * @typedef {{x: number, y: number}} Point
 * @typedef {"client" | "router" | "prefill" | "decode" | "out"} Place
 * @typedef {{place: Place, legs: string[], progress: number}} Dot the place behind its last leg, and the arrows before it
 */

/** @type {Map<string, Dot>} */
const dots = new Map();
/** @type {Record<string, Point[]>} beginning and end of each arrow */
let arrows = {};
let colours = {};
let numDone = null;
let numBrief = 0;
let frame = 0;
let lastFrame = 0;

/** Move the dots to where their requests are now. */
export function draw(snapshot) {
  const roles = new Map(snapshot.nodes.map((node) => [node.id, node.role]));
  const hasPrefill = snapshot.pairs.length > 0;
  const live = new Set();
  for (const request of snapshot.requests) {
    live.add(request.rid);
    if (!dots.has(request.rid)) dots.set(request.rid, { place: "client", legs: [], progress: 0 });
    follow(dots.get(request.rid), roles.get(placeOf(request)) ?? "router", Boolean(request.prefill));
  }
  let numSeen = 0;
  for (const [rid, dot] of dots) {
    if (live.has(rid) || dot.place === "out") continue;
    follow(dot, "out", hasPrefill);
    numSeen++;
  }
  const { done } = snapshot.totals.requests;
  const numBetween = numDone === null ? 0 : Math.max(0, done - numDone - numSeen);
  numDone = done;
  for (let index = 0; index < Math.min(MAX_BRIEF, numBetween); index++) brief(hasPrefill);
  for (const [rid, dot] of dots) if (dots.size > MAX_DOTS && dot.place === "out") dots.delete(rid);
  place();
}

/** Measure the arrows again, and draw. */
export function place() {
  const canvas = byId("dots");
  const origin = canvas.getBoundingClientRect();
  if (origin.width === 0) return;
  const scale = devicePixelRatio || 1;
  const [width, height] = [Math.round(origin.width * scale), Math.round(origin.height * scale)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const rectOf = (element) => {
    const rect = element.getBoundingClientRect();
    return new DOMRect(rect.x - origin.x, rect.y - origin.y, rect.width, rect.height);
  };
  const arrow = (id) => arrowIn(rectOf(byId(id).querySelector("svg")));
  const client = rectOf(byId("link-client"));
  const tokens = back(arrow("link-tokens"));
  arrows = {
    prompt: arrow("link-prompt"), pages: arrow("link-pages"), tokens, local: [...tokens].reverse(),
    in: arrowIn(client, 0.25), out: back(arrowIn(client, 0.75)),
  };
  const style = getComputedStyle(byId("topology"));
  colours = Object.fromEntries(["prefill", "decode", "pages"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  if (!frame) {
    lastFrame = performance.now();
    frame = requestAnimationFrame(step);
  }
}

/** Return the beginning and the end of an arrow that fills a rectangle, at a share of its width. Arrowheads stay free. */
function arrowIn({ x, y, width, height }, share = 0.5) {
  if (width >= height) return [{ x, y: y + share * height }, { x: x + width - HEAD, y: y + share * height }];
  return [{ x: x + (1 - share) * width, y }, { x: x + (1 - share) * width, y: y + height - HEAD }];
}

/** Return an arrow that points the other way. Its head is where the tail was. */
function back([tail, neck]) {
  const shift = neck.x > tail.x ? { x: HEAD, y: 0 } : { x: 0, y: HEAD };
  return [neck, tail].map(({ x, y }) => ({ x: x + shift.x, y: y + shift.y }));
}

/** Return the node where a request of a snapshot is, or "router". */
export function placeOf({ stage, node, prefill, decode }) {
  if (stage === "prefill") return prefill || node || "router";
  if (stage === "handoff") return prefill || decode || "router";
  if (stage === "decode" || stage === "local prefill") return decode || node || "router";
  return "router";
}

/**
 * Send a dot on its way to a place.
 * @param {Dot} dot
 * @param {Place} place
 * @param {boolean} hasPrefill whether its prompt is computed on a prefill node
 */
function follow(dot, place, hasPrefill) {
  if (dot.place === place) return;
  if (reducesMotion.matches) dot.legs = [];
  else dot.legs.push(...legsBetween(dot.place, place, hasPrefill));
  dot.place = place;
}

/** Return the arrows from one place to another. */
export function legsBetween(from, to, hasPrefill) {
  const there = hasPrefill ? ["prompt", "pages"] : ["local"];
  const toRouter = { client: ["in"], router: [], prefill: ["pages", "tokens"], decode: ["tokens"] }[from];
  const fromRouter = { router: [], prefill: ["prompt"], decode: there, out: ["out"] }[to];
  return from === "prefill" && to === "decode" ? ["pages"] : [...toRouter, ...fromRouter];
}

/** Let a dot travel for a request that no snapshot has shown. */
function brief(hasPrefill) {
  const dot = { place: /** @type {Place} */ ("client"), legs: [], progress: -0.12 * (numBrief % MAX_BRIEF) };
  follow(dot, "decode", hasPrefill);
  follow(dot, "out", hasPrefill);
  dots.set(`brief ${++numBrief}`, dot);
}

function step(now) {
  const seconds = Math.min(0.1, (now - lastFrame) / 1000);
  lastFrame = now;
  const context = byId("dots").getContext("2d");
  const scale = devicePixelRatio || 1;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, context.canvas.width, context.canvas.height);
  let moves = false;
  for (const [rid, dot] of dots) {
    if (dot.legs.length) {
      travel(dot, seconds);
      paint(context, dot);
      moves = true;
    } else if (dot.place === "out") dots.delete(rid);
  }
  frame = moves && !document.hidden ? requestAnimationFrame(step) : 0;
}

function travel(dot, seconds) {
  const haste = 1 + 0.5 * (dot.legs.length - 1); // a dot that is late hurries
  dot.progress += (seconds * haste) / LEG_S;
  if (dot.progress < 1) return;
  dot.legs.shift();
  dot.progress = 0;
}

function paint(context, { legs: [leg], progress }) {
  if (leg === undefined || progress < 0) return;
  const [begin, end] = arrows[leg];
  const length = Math.hypot(end.x - begin.x, end.y - begin.y);
  const eased = progress * progress * (3 - 2 * progress);
  const at = (behind) => {
    const share = Math.max(0, eased - behind / length);
    return { x: begin.x + (end.x - begin.x) * share, y: begin.y + (end.y - begin.y) * share };
  };
  context.fillStyle = colours[HUES[leg]];
  context.beginPath();
  if (leg === "pages") for (const { x, y } of TRAIL.map(at)) context.rect(x - SIZE, y - SIZE, 2 * SIZE - 1, 2 * SIZE - 1);
  else context.arc(at(0).x, at(0).y, SIZE, 0, 2 * Math.PI);
  context.fill();
}

window.addEventListener("resize", place);

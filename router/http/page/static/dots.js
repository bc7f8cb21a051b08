/**
 * Draws requests as dots that travel from the router over a prefill node to a decode node, and back as text. A dot rests
 * in the lane of the place where its request is. Snapshots come once per second, so a dot catches up on the places that
 * its request passed in between. Requests that came and went between two snapshots travel, too, a few per second.
 *
 * The picture is drawn only as long as something moves. It repeats what the cards and the list of requests say in words,
 * so it is hidden from screen readers.
 */

import { byId } from "./dom.js";

const LEG_S = 0.7; // a leg of the way
const MAX_BRIEF = 8; // dots per snapshot for requests that came and went
const MAX_DOTS = 400; // if frames are not drawn in time, dots on their way out are dropped
const SIZE = 3.6; // radius in pixels
const reducesMotion = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * @typedef {{x: number, y: number}} Point
 * @typedef {{place: string, legs: string[], from: Point | null, at: Point | null, progress: number, slot: number,
 *   isLeaving: boolean, prefill: string, decode: string}} Dot places are "router", a node's id, or "out"
 */

/** @type {Map<string, Dot>} */
const dots = new Map();
/** @type {Map<string, DOMRect>} rectangles of lanes by place, relative to the canvas */
let lanes = new Map();
/** @type {Record<string, Point>} where dots pass between two places */
let ports = {};
let colours = {};
let roles = new Map();
let numDone = null;
let numBrief = 0;
let frame = 0;
let lastFrame = 0;

/** Move the dots to where their requests are now. */
export function draw(snapshot) {
  roles = new Map(snapshot.nodes.map((node) => [node.id, node.role]));
  const live = new Set();
  for (const request of snapshot.requests) {
    live.add(request.rid);
    follow(request);
  }
  let numSeen = 0;
  for (const [rid, dot] of dots) {
    if (live.has(rid) || dot.isLeaving) continue;
    leave(dot);
    numSeen++;
  }
  const { done } = snapshot.totals.requests;
  const numBetween = numDone === null ? 0 : Math.max(0, done - numDone - numSeen);
  numDone = done;
  for (let index = 0; index < Math.min(MAX_BRIEF, numBetween); index++) brief(snapshot);
  for (const [rid, dot] of dots) if (dots.size > MAX_DOTS && dot.isLeaving) dots.delete(rid);
  place();
}

/** Measure the places again, and draw. */
export function place() {
  const canvas = byId("dots");
  const origin = canvas.getBoundingClientRect();
  if (origin.width === 0) return;
  const scale = devicePixelRatio || 1;
  const [width, height] = [Math.round(origin.width * scale), Math.round(origin.height * scale)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const relative = (element) => {
    const rect = element.getBoundingClientRect();
    return new DOMRect(rect.x - origin.x, rect.y - origin.y, rect.width, rect.height);
  };
  lanes = new Map([["router", relative(byId("router-lane"))]]);
  for (const lane of document.querySelectorAll(".node .lane")) {
    const rect = relative(lane);
    for (const id of lane.dataset.nodes?.split(" ") ?? []) lanes.set(id, rect);
  }
  const middle = (id) => {
    const rect = relative(byId(id).querySelector("svg"));
    return { x: rect.x + rect.width / 2, y: rect.y + rect.height / 2 };
  };
  ports = { prompt: middle("link-prompt"), pages: middle("link-pages"), tokens: middle("link-tokens") };
  const style = getComputedStyle(byId("topology"));
  colours = Object.fromEntries(["quiet", "prefill", "decode", "pages"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  settle();
  if (!frame) {
    lastFrame = performance.now();
    frame = requestAnimationFrame(step);
  }
}

/** Send the dot of a request on its way to where the request is. */
function follow(request) {
  const { rid, stage, prefill, decode } = request;
  const place = placeOf(stage, request);
  let dot = dots.get(rid);
  if (!dot) {
    dot = { place: "router", legs: [], from: null, at: null, progress: 0, slot: 0, isLeaving: false, prefill, decode };
    dots.set(rid, dot);
    if (place === decode && prefill && lanes.has(prefill)) dot.legs.push(prefill);
  }
  [dot.prefill, dot.decode] = [prefill, decode];
  const last = dot.legs.at(-1) ?? dot.place;
  if (last === place) return;
  if (last === "router" && place === decode && prefill) dot.legs.push(prefill);
  dot.legs.push(place);
}

function placeOf(stage, { node, prefill, decode }) {
  if (stage === "prefill") return prefill || node || "router";
  if (stage === "handoff") return prefill || decode || "router";
  if (stage === "decode" || stage === "local prefill") return decode || node || "router";
  return "router";
}

/** A request has ended: its dot passes the rest of its way, and goes out over the router. */
function leave(dot) {
  const last = dot.legs.at(-1) ?? dot.place;
  if (roles.get(last) === "prefill" && dot.decode) dot.legs.push(dot.decode);
  dot.legs.push("out");
  dot.isLeaving = true;
}

/** Let a dot travel for a request that no snapshot has shown. Its nodes are not known: any ready pair stands for them. */
function brief(snapshot) {
  const pairs = snapshot.pairs.filter((pair) => pair.state === "ready");
  const alone = snapshot.nodes.filter((node) => node.role === "decode" && node.state === "ready");
  if (!pairs.length && !alone.length) return;
  numBrief++;
  const pair = pairs[numBrief % pairs.length];
  const legs = pair ? [pair.prefill, pair.decode, "out"] : [alone[numBrief % alone.length].id, "out"];
  dots.set(`brief ${numBrief}`, {
    place: "router", legs, from: null, at: null, progress: -0.12 * (numBrief % MAX_BRIEF), slot: 0, isLeaving: true, prefill: "", decode: "",
  });
}

/** Give resting dots their slots, in the order of arrival. */
function settle() {
  const numAt = new Map();
  for (const dot of dots.values()) {
    if (dot.legs.length) continue;
    dot.slot = numAt.get(dot.place) ?? 0;
    numAt.set(dot.place, dot.slot + 1);
  }
}

/** Return where a dot rests in a lane, null if the lane is full. */
function slotOf(place, slot) {
  const lane = lanes.get(place);
  if (!lane) return null;
  const pitch = 3 * SIZE;
  const perRow = Math.max(1, Math.floor(lane.width / pitch));
  if (slot >= perRow) return null;
  return { x: lane.x + SIZE + pitch * slot, y: lane.y + lane.height / 2 };
}

const entrance = (place) => slotOf(place === "out" ? "router" : place, 0) ?? slotOf("router", 0);

/** Return the port that a dot passes on its way from one place to another. */
function portOf(from, to) {
  if (to === "out" || to === "router") return ports.tokens;
  if (roles.get(to) === "prefill") return ports.prompt;
  return roles.get(from) === "prefill" ? ports.pages : ports.tokens;
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
    if (dot.legs.length) moves = travel(dot, seconds) || moves;
    else moves = rest(dot, seconds) || moves;
    if (dot.place === "out") dots.delete(rid);
    else paint(context, dot);
  }
  frame = moves && !document.hidden ? requestAnimationFrame(step) : 0;
}

function travel(dot, seconds) {
  const next = dot.legs[0];
  const target = entrance(next);
  if (reducesMotion.matches || !target || (next !== "out" && !lanes.has(next))) {
    arrive(dot, next, target);
    return true;
  }
  dot.from ??= dot.at ?? entrance(dot.place) ?? target;
  const haste = 1 + 0.5 * (dot.legs.length - 1); // a dot that is late hurries
  dot.progress += (seconds * haste) / LEG_S;
  if (dot.progress >= 1) arrive(dot, next, target);
  else dot.at = along(dot.from, portOf(dot.place, next), target, ease(Math.max(0, dot.progress)));
  return true;
}

function arrive(dot, place, at) {
  dot.legs.shift();
  [dot.place, dot.from, dot.at, dot.progress] = [place, null, at, 0];
  settle();
}

/** Move a resting dot to its slot. Return whether it is still on its way. */
function rest(dot, seconds) {
  const target = slotOf(dot.place, dot.slot);
  if (!target || !dot.at || reducesMotion.matches) {
    dot.at = target;
    return false;
  }
  const share = Math.min(1, seconds * 10);
  dot.at = { x: dot.at.x + (target.x - dot.at.x) * share, y: dot.at.y + (target.y - dot.at.y) * share };
  if (Math.abs(dot.at.x - target.x) + Math.abs(dot.at.y - target.y) > 0.3) return true;
  dot.at = target;
  return false;
}

const ease = (share) => share * share * (3 - 2 * share);

/** Return the point at a share of a curve that passes a point in its middle. */
function along(from, over, to, share) {
  const control = { x: 2 * over.x - (from.x + to.x) / 2, y: 2 * over.y - (from.y + to.y) / 2 };
  const mix = (a, b, c) => (1 - share) ** 2 * a + 2 * share * (1 - share) * b + share ** 2 * c;
  return { x: mix(from.x, control.x, to.x), y: mix(from.y, control.y, to.y) };
}

function paint(context, dot) {
  if (!dot.at || dot.progress < 0) return;
  const next = dot.legs[0];
  const carriesPages = next !== undefined && roles.get(dot.place) === "prefill" && roles.get(next) === "decode";
  const role = roles.get(next ?? dot.place) ?? roles.get(dot.place);
  context.fillStyle = carriesPages ? colours.pages : (colours[role] ?? colours.quiet);
  context.globalAlpha = next === "out" ? 1 - Math.max(0, dot.progress) ** 3 : 1;
  context.beginPath();
  if (carriesPages) for (const shift of [0, 9, 18]) context.rect(dot.at.x - SIZE - shift, dot.at.y - SIZE, 2 * SIZE - 1, 2 * SIZE - 1);
  else context.arc(dot.at.x, dot.at.y, SIZE, 0, 2 * Math.PI);
  context.fill();
  context.globalAlpha = 1;
}

window.addEventListener("resize", place);

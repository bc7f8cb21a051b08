/**
 * Draws requests as dots that travel from the client over the router and a prefill node to a decode node, and back as
 * text. They follow the arrows. A dot rests in the lane of the place where its request is; a full lane says "+3". Snapshots come once per second, so a dot catches up on the places that
 * its request passed in between. Requests that came and went between two snapshots travel, too, a few per second.
 *
 * The picture is drawn only as long as something moves. It repeats what the cards and the list of requests say in words,
 * so it is hidden from screen readers.
 */

import { byId } from "./dom.js";

const LEG_S = 0.5; // a leg of the way
const MAX_BRIEF = 8; // dots per snapshot for requests that came and went
const MAX_DOTS = 400; // if frames are not drawn in time, dots on their way out are dropped
const SIZE = 3.6; // radius in pixels
const PITCH = 3 * SIZE; // between two resting dots
const HEAD = 12; // length of an arrowhead, on which no dot is drawn
const TRAIL = [0, 9, 18]; // pixels between the squares of moving pages
const reducesMotion = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * @typedef {{x: number, y: number}} Point
 * @typedef {{place: string, legs: string[], from: Point | null, at: Point | null, trail?: Point[], progress: number, slot: number,
 *   isLeaving: boolean, prefill: string, decode: string}} Dot places are "client", "router", a node's id, or "out"
 * @typedef {{rect: DOMRect, count: number}} Lane with the number of requests that are there
 */

/** @type {Map<string, Dot>} */
const dots = new Map();
/** @type {Map<string, Lane>} lanes by place, relative to the canvas */
let lanes = new Map();
/** @type {Record<string, Point[]>} beginning and end of each arrow */
let arrows = {};
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
  const laneOf = (element) => ({ rect: relative(element), count: Number(element.dataset.count ?? 0) });
  lanes = new Map([["router", laneOf(byId("router-lane"))]]);
  for (const element of document.querySelectorAll(".node .lane")) {
    const lane = laneOf(element);
    for (const id of element.dataset.nodes?.split(" ") ?? []) lanes.set(id, lane);
  }
  const arrow = (id) => arrowIn(relative(byId(id).querySelector("svg")));
  const client = relative(byId("link-client"));
  arrows = {
    prompt: arrow("link-prompt"), pages: arrow("link-pages"), tokens: arrow("link-tokens").reverse(),
    in: arrowIn(client, 0.25), out: arrowIn(client, 0.75).reverse(),
  };
  const style = getComputedStyle(byId("topology"));
  colours = Object.fromEntries(["quiet", "prefill", "decode", "pages"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
  settle();
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

/** Send the dot of a request on its way to where the request is. */
function follow(request) {
  const { rid, prefill, decode } = request;
  const place = placeOf(request);
  let dot = dots.get(rid);
  if (!dot) {
    dot = { place: "client", legs: ["router"], from: null, at: null, progress: 0, slot: 0, isLeaving: false, prefill, decode };
    dots.set(rid, dot);
  }
  [dot.prefill, dot.decode] = [prefill, decode];
  const last = dot.legs.at(-1) ?? dot.place;
  if (last === place) return;
  if (last === "router" && place === decode && prefill && lanes.has(prefill)) dot.legs.push(prefill);
  dot.legs.push(place);
}

/** Return the place where a request of a snapshot is. */
export function placeOf({ stage, node, prefill, decode }) {
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
  const legs = ["router", ...(pair ? [pair.prefill, pair.decode] : [alone[numBrief % alone.length].id]), "out"];
  dots.set(`brief ${numBrief}`, {
    place: "client", legs, from: null, at: null, progress: -0.12 * (numBrief % MAX_BRIEF), slot: 0, isLeaving: true, prefill: "", decode: "",
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

/** Return how many dots a lane shows. A lane with more requests than that has room left for their number. */
function shownIn({ rect, count }) {
  const most = Math.max(1, Math.floor(rect.width / PITCH));
  return count > most ? Math.max(1, most - 3) : most;
}

/** Return where a dot rests in a lane, null if the lane is full. */
function slotOf(place, slot) {
  const lane = lanes.get(place);
  if (!lane || slot >= shownIn(lane)) return null;
  return { x: lane.rect.x + SIZE + PITCH * slot, y: lane.rect.y + lane.rect.height / 2 };
}

/**
 * Return the way of a dot from a point in one place to another place: along the arrow between them, and inside the
 * router along its lane.
 * @returns {Point[]}
 */
function wayOf(from, place, next) {
  const inLane = ({ x }) => ({ x, y: slotOf("router", 0).y });
  const { prompt, pages, tokens } = arrows;
  if (place === "client") return [...arrows.in, slotOf("router", 0)];
  if (next === "out" || next === "router") {
    const back = place === "router" ? [from] : [from, ...tokens];
    if (place !== "router" && tokens[1].y > from.y) return back; // on narrow screens, the arrow is below the nodes
    if (next === "router") return [...back, inLane(tokens[1]), slotOf("router", 0)];
    return [...back, inLane(place === "router" ? from : tokens[1]), { x: arrows.out[0].x, y: slotOf("router", 0).y }, ...arrows.out];
  }
  const arrow = roles.get(next) === "prefill" ? prompt : roles.get(place) === "prefill" ? pages : [...tokens].reverse();
  const target = slotOf(next, 0);
  return place === "router" ? [from, inLane(arrow[0]), ...arrow, target] : [from, ...arrow, target];
}

function step(now) {
  const seconds = Math.min(0.1, (now - lastFrame) / 1000);
  lastFrame = now;
  const context = byId("dots").getContext("2d");
  const scale = devicePixelRatio || 1;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, context.canvas.width, context.canvas.height);
  paintNumbers(context);
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
  if (reducesMotion.matches || (next !== "out" && !lanes.has(next))) {
    arrive(dot, next, slotOf(next, 0));
    return true;
  }
  dot.from ??= dot.at ?? slotOf(dot.place, 0) ?? slotOf("router", 0);
  const way = wayOf(dot.from, dot.place, next);
  const haste = 1 + 0.5 * (dot.legs.length - 1); // a dot that is late hurries
  dot.progress += (seconds * haste) / LEG_S;
  if (dot.progress >= 1) arrive(dot, next, way[way.length - 1]);
  else [dot.at, ...dot.trail] = TRAIL.map((behind) => along(way, ease(Math.max(0, dot.progress)), behind));
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

/** Return the point that lies so many pixels behind a share of a way. */
function along(way, share, behind) {
  const lengths = way.slice(1).map((point, index) => Math.hypot(point.x - way[index].x, point.y - way[index].y));
  let left = Math.max(0, share * lengths.reduce((sum, length) => sum + length, 0) - behind);
  for (const [index, length] of lengths.entries()) {
    if (left <= length && length > 0) {
      const [a, b] = [way[index], way[index + 1]];
      return { x: a.x + ((b.x - a.x) * left) / length, y: a.y + ((b.y - a.y) * left) / length };
    }
    left -= length;
  }
  return way[way.length - 1];
}

/** Write how many requests a full lane does not show. */
function paintNumbers(context) {
  context.fillStyle = colours.quiet;
  context.font = "11px system-ui";
  context.textBaseline = "middle";
  for (const lane of new Set(lanes.values())) {
    const shown = shownIn(lane);
    if (lane.count > shown) context.fillText(`+${lane.count - shown}`, lane.rect.x + PITCH * shown, lane.rect.y + lane.rect.height / 2 + 1);
  }
}

function paint(context, dot) {
  if (!dot.at || dot.progress < 0) return;
  const next = dot.legs[0];
  const carriesPages = next !== undefined && roles.get(dot.place) === "prefill" && roles.get(next) === "decode";
  const role = roles.get(next ?? dot.place) ?? roles.get(dot.place);
  context.fillStyle = carriesPages ? colours.pages : (colours[role] ?? colours.quiet);
  context.globalAlpha = next === "out" ? 1 - Math.max(0, dot.progress) ** 3 : 1;
  context.beginPath();
  if (carriesPages) for (const { x, y } of [dot.at, ...(dot.trail ?? [])]) context.rect(x - SIZE, y - SIZE, 2 * SIZE - 1, 2 * SIZE - 1);
  else context.arc(dot.at.x, dot.at.y, SIZE, 0, 2 * Math.PI);
  context.fill();
  context.globalAlpha = 1;
}

window.addEventListener("resize", place);

/** One request's life: a Gantt chart of its spans, with the reason of each placement, and its text while it runs. */

import { Refused, askJson } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { bytes, clock, count, duration, plural } from "./format.js";

const AGAIN_MS = 1000; // a live request is read again so often
const BRIEF = 0.002; // a span that takes a smaller share of its axis has no bar
const SMALL = 0.3; // if all before decode takes a smaller share, it is drawn a second time, enlarged

/** Colours by the kind of work. Every other span waits. */
const KINDS = {
  prefill: "prefills", "local prefill": "prefills", "first token": "prefills", recompute: "prefills",
  handoff: "hands", offer: "hands", pull: "hands", admission: "hands", decode: "decodes",
};

/** What each span is, for readers who see it for the first time. */
const MEANINGS = {
  receive: "reading the request and making tokens of its text",
  queue: "waiting in the router",
  reserve: "asking a decode node for room",
  dispatch: "on the way to the prefill node",
  "prefill queue": "waiting in the prefill node",
  prefill: "computing the prompt",
  "local prefill": "the decode node computes the prompt itself",
  "first token": "sampling the first token",
  handoff: "pages move to the decode node",
  offer: "the prefill node offers its pages; the decode node reads the offer between two steps",
  pull: "the decode node pulls the pages and checks them; the prefill node keeps them until then",
  admission: "the pages are here; the decode node admits the request at the end of its running step",
  decode: "generating tokens",
  preempted: "waiting, since older requests needed its pages",
  recompute: "computing lost pages again",
  paused: "waiting for nodes",
  finish: "the answer is complete: closing the stream to the client",
};

let opened = 0; // counts openings, so that answers for an earlier one are dropped

/**
 * Open the dialog of one request, and keep it fresh while the request runs.
 * @param {string} rid
 * @param {() => string} [readWhy] returns why the request waits or runs where it does, as long as the router tells it
 */
export async function openRequest(rid, readWhy = () => "") {
  const turn = ++opened;
  const dialog = byId("request-dialog");
  setText(byId("request-title"), rid);
  byId("request-body").replaceChildren(el("p", { class: "caption", text: "Reading" }));
  byId("request-close").onclick = () => dialog.close();
  const text = el("pre", { class: "live-text", tabindex: "0", "aria-label": "Text so far", hidden: true });
  let wantsText = false;
  const showText = el("button", { type: "button", text: "Show its text so far", on: { click: () => { wantsText = true; showText.hidden = true; text.hidden = false; } } });
  dialog.showModal();
  while (turn === opened && dialog.open) {
    const traces = await readTraces(rid);
    if (turn !== opened || !dialog.open) return;
    const isLive = Array.isArray(traces) && traces.some((trace) => trace.outcome === "live");
    if (wantsText && isLive) setText(text, await readText(rid));
    showText.hidden ||= !isLive;
    const parts = Array.isArray(traces) ? traces.flatMap(drawTrace) : [el("p", { class: "error", text: traces })];
    const why = isLive && readWhy() ? [el("p", {}, `Where it is, and why: ${readWhy()}`)] : [];
    byId("request-body").replaceChildren(...why, ...parts, showText, text);
    if (!isLive) return;
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function readTraces(rid) {
  try {
    return (await askJson(`debug/requests/${encodeURIComponent(rid)}`)).requests;
  } catch (error) {
    return error instanceof Refused ? error.message : "the router does not answer";
  }
}

async function readText(rid) {
  try {
    const answer = await askJson(`debug/requests/${encodeURIComponent(rid)}/text`);
    return answer.texts ? answer.texts.join("\n\n") : String(answer.text ?? "");
  } catch (error) {
    return error instanceof Refused ? error.message : "the router does not answer";
  }
}

function drawTrace(trace) {
  const isLive = trace.outcome === "live";
  const cached = trace.num_cached ? `, ${count(trace.num_cached)} of them cached` : "";
  const numTokens = trace.choices.reduce((sum, sequence) => sum + sequence.num_tokens, 0);
  const spans = trace.choices.flatMap((sequence) => sequence.parts);
  const longest = spans.reduce((most, span) => ((span.seconds ?? 0) > (most.seconds ?? 0) ? span : most), spans[0] ?? {});
  const most = longest.seconds ? `Longest part: ${longest.name} (${MEANINGS[longest.name] ?? "other"}), ${duration(longest.seconds)} of ${duration(trace.total_s)}.` : "";
  const facts = [
    `${isLive ? "Running for" : `${trace.outcome} in`} ${duration(trace.total_s)}; received at ${clock(trace.received_at)}; model ${trace.model}`,
    `${plural(trace.num_prompt, "prompt token")}${cached}; ${trace.ttft_s ? `first token after ${duration(trace.ttft_s)}` : "no token yet"}; ${plural(numTokens, "token")}`,
  ];
  return [
    ...(most ? [el("p", {}, el("strong", { text: most }))] : []),
    el("p", { class: "caption", text: facts.join(". ") }),
    ...(trace.error ? [el("p", { class: "error", text: trace.error })] : []),
    drawLegend(),
    ...trace.choices.flatMap((sequence) => drawSequence(sequence, trace)),
  ];
}

function drawSequence(sequence, trace) {
  const title = trace.choices.length > 1 ? [el("h4", { text: `Choice ${sequence.index + 1}: ${plural(sequence.num_tokens, "token")}` })] : [];
  const rows = drawRows(sequence.parts, trace);
  const dropped = sequence.num_forgotten ? [el("p", { class: "caption", text: `${plural(sequence.num_forgotten, "span")} in the middle were dropped; their time counts as the span before.` })] : [];
  return [...title, el("div", { class: "spans" }, ...rows), ...dropped];
}

/** Draw spans on one time axis. If those before decode are too short to be seen there, they get an axis of their own. */
function drawRows(spans, trace) {
  const total = trace.total_s;
  const first = spans.findIndex(({ name }) => name === "decode");
  const start = spans[first]?.start_s ?? 0;
  if (first < 1 || start > SMALL * total) return [...drawAxis("", total), ...spans.flatMap((span) => drawSpan(span, trace, total))];
  const [before, after] = [spans.slice(0, first), spans.slice(first)];
  return [
    ...drawAxis("Whole request", total),
    ...drawTrack("before decode", before, start, total),
    ...after.flatMap((span) => drawSpan(span, trace, total)),
    ...drawAxis("Before decode", start),
    ...before.flatMap((span) => drawSpan(span, trace, start)),
  ];
}

/** Draw ticks at round times, at most six, and one at the end. */
function drawAxis(name, total) {
  const axis = el("div", { class: "axis", "aria-hidden": "true" });
  const power = 10 ** Math.floor(Math.log10((total || 1) / 6));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((each) => total / each <= 6) ?? 10 * power;
  for (let at = 0; at < 0.88 * total; at += step) {
    const tick = el("span", { text: at ? duration(at).replace(/\.0+ /, " ") : "0" });
    tick.style.left = `${(100 * at) / total}%`;
    axis.append(tick);
  }
  if (total > 0) axis.append(el("span", { class: "end", text: duration(total) }));
  return name ? [el("h4", { class: "name", text: name }), axis] : [axis];
}

const drawLegend = () =>
  el("p", { class: "spans-legend" }, ...[["waits", "waiting"], ["prefills", "prefill"], ["hands", "handoff"], ["decodes", "decode"]]
    .map(([kind, words]) => el("span", { class: kind }, el("i"), words)));

/** Draw spans in one row of an axis that is `total` seconds long. `seconds`: of all of them. */
function drawTrack(name, spans, seconds, total) {
  const bars = spans.map((span) => {
    const bar = el("i", { class: KINDS[span.name] ?? "waits" });
    bar.style.left = `${total ? Math.min(99.5, (100 * (span.start_s ?? 0)) / total) : 0}%`;
    bar.style.width = `${total ? (100 * (span.seconds ?? 0)) / total : 0}%`;
    return bar;
  });
  return [
    el("span", { class: "name", text: name }),
    el("div", { class: "track", "aria-hidden": "true" }, ...bars),
    el("span", { class: "number", text: duration(seconds) }),
  ];
}

function drawSpan(span, { ttft_s }, total) {
  const seconds = span.seconds ?? 0;
  const attempt = span.attempt ? `attempt ${span.attempt + 1}` : "";
  const isSent = span.name === "first token" && ttft_s && !span.attempt;
  const sent = isSent ? `sent to the client at ${duration(ttft_s)}, and the handoff happens after that` : "";
  const told = [MEANINGS[span.name] ?? "", sent, span.node ? `on ${span.node}` : "", attempt, ...figuresOf(span)].filter(Boolean).join("; ");
  if (seconds <= BRIEF * total) {
    return [el("span", { class: "name", text: span.name }), el("p", { class: "told brief", text: told }), el("span", { class: "number", text: duration(seconds) })];
  }
  return [...drawTrack(span.name, [span], seconds, total), el("p", { class: "told", text: told })];
}

/** Return what a span counted, and why it is where it is. JSON leaves out what is zero. */
function figuresOf(span) {
  const { name, reason = "" } = span;
  if (name === "queue") {
    return [reason ? `moved: ${reason}` : "", span.num_refused ? `the decode node was full ${plural(span.num_refused, "time")}` : ""];
  }
  if (name === "prefill" || name === "local prefill") {
    const cached = span.num_cached ? `, ${count(span.num_cached)} more were in its cache already` : "";
    return [span.num_prompt ? `${plural(span.num_prompt, "token")}${cached}` : "", reason];
  }
  if (name === "pull") {
    const had = span.had_pages ? `${plural(span.had_pages, "page")} ${span.had_pages === 1 ? "was" : "were"} in its cache already` : "";
    const by = span.way ? ` ${span.way}` : "";
    const moving = span.moving_s >= 0.00005 ? `, ${duration(span.moving_s)} under way without the checks` : "";
    return [`${plural(span.num_pages ?? 0, "page")}, ${bytes(span.num_bytes ?? 0)}${by}${moving}`, had];
  }
  if (name === "decode") {
    const rounds = span.num_steps ? ` in ${plural(span.num_steps, "round")}` : "";
    const drafts = span.num_drafted ? `${count(span.num_accepted ?? 0)} of ${count(span.num_drafted)} drafts accepted` : "";
    return [span.num_tokens ? `${plural(span.num_tokens, "token")}${rounds}` : "", drafts, reason];
  }
  return [reason];
}

/** Time series of the last ten minutes, drawn by uPlot. Legends are made here, since they also say the newest values. */

import { byId, el, setText } from "./dom.js";
import { bytes, clock, duration, figure } from "./format.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";

const WINDOW_S = 600;
const LEAST_S = 5; // a tab that was opened just now shows so much
const HEIGHT = 160;
const share = (value) => `${Math.round(100 * value)} %`;
const steps = uPlot.paths.stepped({ align: 1 });
const DASHES = { solid: [], dashed: [6, 4], dotted: [2, 4] };
const perSecond = (value) => `${figure(value)}/s`;

/**
 * Each chart: title, what it says in words, how a value is written, and its lines as [series, label, colour, style,
 * opacity]. Lines of one chart differ in style, or have their labels at their ends. Counts are drawn in steps.
 */
const CHARTS = [
  ["Time to first token", "From the request's arrival to its first token (TTFT).", duration, [
    ["ttft50", "median", "prefill"], ["ttft95", "p95", "prefill", "dashed"], ["ttft99", "p99", "prefill", "dotted"]]],
  ["Time between tokens", "Between two tokens of an answer (ITL).", duration, [
    ["itl50", "median", "decode"], ["itl95", "p95", "decode", "dashed"], ["itl99", "p99", "decode", "dotted"]]],
  ["Requests", "Running ones, and those that wait in the router.", figure, [
    ["running", "running", "decode"], ["waiting", "waiting", "quiet", "dashed"]]],
  ["Tokens per second", "Prompt tokens go in, computed or cached; answer tokens come out.", perSecond, [
    ["promptTokens", "prompt", "prefill"], ["outputTokens", "answer", "decode", "dashed"]]],
  ["Handoff rate", "What decode nodes pull from prefill nodes.", (value) => `${bytes(value)}/s`, [
    ["transfer", "moved", "pages"]]],
  ["Drafts accepted, by position", "How often the first, second, ... guess of the small model was right.", share,
    [0, 1, 2, 3, 4, 5, 6, 7].map((position) => [`accepted${position}`, `${position + 1}`, "decode", undefined, 1 - 0.11 * position])],
  ["Prefix-cache hits", "Share of prompt tokens that a node had computed before.", share, [["hits", "hits", "prefill"]]],
  ["Moves and preemptions", "Requests that moved to other nodes, or lost their pages to older requests.", perSecond, [
    ["preemptions", "preemptions", "decode"], ["moves", "moves", "bad", "dashed"]]],
  ["Requests finished", "Answers that came to their end.", perSecond, [["requests", "finished", "decode"]]],
];

/** @type {{plot: any, values: Element[], figure: Element, lines: any[], write: (value: number) => string}[]} */
let made = [];
const isDark = matchMedia("(prefers-color-scheme: dark)");
isDark.addEventListener("change", remove); // colours are those of the theme

/** @param {import("./history.js").History} history */
export function draw(history) {
  if (!made.length) made = CHARTS.map(make);
  const { series } = history;
  for (const { plot, values, figure, lines, write } of made) {
    const shown = lines.filter(([name]) => lines.length < 5 || series[name].some((value) => value !== null));
    plot.setData([series.at, ...lines.map(([name]) => series[name])]);
    lines.forEach(([name], index) => {
      const newest = series[name].at(-1);
      setText(values[index].lastChild, newest === null || newest === undefined ? "–" : write(newest));
      /** @type {any} */ (values[index]).hidden = !shown.includes(lines[index]) && index > 0;
    });
    const { clientWidth } = figure;
    if (clientWidth && clientWidth !== plot.width) plot.setSize({ width: clientWidth, height: HEIGHT });
  }
}

function make([title, words, write, lines]) {
  const colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(`--${name}`);
  const values = lines.map(([, label, hue, style = "solid", opacity = 1]) => {
    const mark = el("i");
    mark.style.opacity = String(opacity);
    mark.style.borderColor = colour(hue);
    mark.style.borderTopStyle = style;
    return el("span", {}, mark, `${label} `, el("b"));
  });
  const place = el("div", { class: "plot", "aria-hidden": "true" });
  byId("charts").append(
    el("figure", { class: "panel" },
      el("figcaption", {}, el("h3", { text: title }), el("span", { class: "caption", text: words }), el("span", { class: "values" }, ...values)),
      place));
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const options = {
    width: place.clientWidth || 400,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "charts" }, drag: { x: false, y: false } },
    scales: {
      x: { time: true, range: (_, oldest, newest) => [newest - Math.min(WINDOW_S, Math.max(LEAST_S, newest - oldest)), newest] },
      y: { range: (_, __, most) => [0, marksUpTo(most, write).at(-1)] },
    },
    axes: [
      { ...axis, size: 26, values: (_, times) => times.map((at) => clock(at)) },
      { ...axis, size: 70, splits: (_, __, ___, most) => marksUpTo(most, write), values: (_, marks) => marks.map((mark) => (mark === 0 ? "0" : write(mark))) },
    ],
    padding: [8, 16, 0, 0],
    hooks: { draw: lines.length > 3 ? [drawLabels] : [] },
    series: [{}, ...lines.map(([, label, hue, style = "solid", alpha = 1]) =>
      ({ label, stroke: colour(hue), width: 2, dash: DASHES[style], alpha, points: { show: false }, paths: write === figure ? steps : undefined }))],
  };
  return { plot: new uPlot(options, [[], ...lines.map(() => [])], place), values, figure: place, lines, write };
}

/** Return round marks of an axis from 0 to the first one that is not below the highest value, at most five. */
function marksUpTo(most, write) {
  const top = most > 0 ? most : 1;
  const power = 10 ** Math.floor(Math.log10(top / 4));
  const rounds = [1, 2, 2.5, 5, 10].map((digit) => digit * power).filter((each) => write !== figure || Number.isInteger(each));
  const step = rounds.find((each) => each >= top / 4 - 1e-9 * top) ?? 1;
  return Array.from({ length: 1 + Math.ceil(top / step - 1e-9) }, (_, index) => index * step);
}

/** Write the label of each line at its end. */
function drawLabels(plot) {
  const { ctx, bbox, data, series } = plot;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--quiet");
  series.slice(1).forEach(({ label }, index) => {
    const value = data[index + 1].at(-1);
    if (value !== null && value !== undefined) ctx.fillText(label, bbox.left + bbox.width + 5, plot.valToPos(value, "y", true));
  });
  ctx.restore();
}

function remove() {
  for (const { plot } of made) plot.destroy();
  made = [];
  byId("charts").replaceChildren();
}

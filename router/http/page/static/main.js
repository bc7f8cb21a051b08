/**
 * The page. It follows one stream of snapshots (live.js), keeps ten minutes of figures (history.js) and lets each panel
 * draw the newest snapshot:
 *
 *     live.js -> history.js -> verdict.js   numbers.js   topology.js   why.js   requests.js   charts.js
 *
 * A panel exports `draw`. Nothing is drawn in a hidden tab, since there the stream is closed.
 */

import * as charts from "./charts.js";
import * as chat from "./chat.js";
import { byId, setText, show } from "./dom.js";
import { History } from "./history.js";
import * as keys from "./keys.js";
import { Live } from "./live.js";
import * as numbers from "./numbers.js";
import * as operate from "./operate.js";
import * as requests from "./requests.js";
import * as topology from "./topology.js";
import * as verdict from "./verdict.js";
import * as why from "./why.js";

const VIEWS = ["system", "requests", "charts"];
const history = new History();
const live = new Live(draw, showConnection);
let isRefused = false;
let isLost = false; // until the next snapshot

function draw(snapshot) {
  const before = history.latest;
  if (before && before.sees !== snapshot.sees) history.clear();
  history.add(snapshot);
  isRefused = false;
  keys.draw(snapshot);
  chat.draw(snapshot);
  verdict.draw(history);
  numbers.draw(history);
  topology.draw(history);
  why.draw(snapshot);
  operate.draw(snapshot);
  requests.draw(snapshot, view() === "requests");
  if (view() === "charts") charts.draw(history);
  showView();
}

/** @param {import("./live.js").Connection} connection */
function showConnection(connection) {
  if (connection.name === "connecting" && isLost) return; // the reason of the loss stays until the router answers
  isLost = connection.name === "waiting";
  byId("main").classList.toggle("is-stale", isLost);
  if (isLost) verdict.drawLost();
  const words = {
    connecting: "Connecting",
    live: "Live",
    hidden: "Paused while this tab is hidden",
    refused: "A key is needed",
    waiting: `Connection lost: ${connection.why}. Trying again in ${connection.seconds} s`,
  };
  byId("connection").className = `connection is-${{ live: "live", waiting: "lost" }[connection.name] ?? "between"}`;
  setText(byId("connection-words"), words[connection.name]);
  if (connection.name === "refused") {
    isRefused = true;
    history.clear();
    keys.refused(connection.why);
    showView();
  }
}

/** Return the name of the view that the address names. */
const view = () => VIEWS.find((name) => `#${name}` === location.hash) ?? "system";

function showView() {
  show(byId("locked"), isRefused);
  show(byId("verdict"), !isRefused && byId("verdict-word").textContent !== "");
  for (const name of VIEWS) show(byId(`view-${name}`), name === view() && !isRefused);
  for (const link of document.querySelectorAll(".bar nav a")) {
    if (link.getAttribute("href") === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function changeView() {
  showView();
  if (!history.latest || isRefused) return;
  topology.place();
  if (view() === "charts") charts.draw(history);
  requests.draw(history.latest, view() === "requests");
}

keys.start(() => live.start());
chat.start();
operate.start();
requests.start();
window.addEventListener("hashchange", changeView);
byId("idle-button").addEventListener("click", chat.open);
showView();
live.start();

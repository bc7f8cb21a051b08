/** What an operator may do: look at one node, drain it, put it back, and empty the prefix caches. Each act asks first. */

import { Refused, askJson } from "./api.js";
import { byId, el, keep, setText, show } from "./dom.js";
import { ago, count, duration, figure } from "./format.js";

let snapshot = null;
let opened = null; // the unit whose dialog is open: {role, name}

export function start() {
  byId("node-close").addEventListener("click", () => byId("node-dialog").close());
  byId("node-dialog").addEventListener("close", () => (opened = null));
  byId("confirm-cancel").addEventListener("click", () => byId("confirm-dialog").close());
  byId("flush-button").addEventListener("click", () =>
    confirm({
      title: "Flush the prefix caches of all nodes?",
      words: "Pages that no request uses become free. Prompts that repeat are computed again, so first tokens take longer for a while.",
      action: "Flush",
      act: () => askJson("admin/flush", { method: "POST" }),
    }),
  );
}

export function draw(newest) {
  snapshot = newest;
  show(byId("operate"), newest.sees === "everything" && newest.nodes.length > 0);
  if (opened) drawNode();
}

/** Open the dialog of a node, or of all ranks of a group. */
export function openNode({ role, name }) {
  opened = { role, name };
  byId("node-facts").replaceChildren();
  byId("node-actions").replaceChildren();
  drawNode();
  byId("node-dialog").showModal();
}

function drawNode() {
  const { role, name } = opened;
  const ranks = snapshot.nodes.filter((node) => node.role === role && (node.group ?? node.id) === name);
  setText(byId("node-title"), `${role === "prefill" ? "Prefill" : "Decode"} node ${name}`);
  if (!ranks.length) {
    setText(byId("node-why"), "The router does not know this node any more.");
    byId("node-actions").replaceChildren();
    return;
  }
  const why = ranks.map((node) => node.why).find((words) => words !== "");
  setText(byId("node-why"), why ?? "It takes work.");
  keep(byId("node-facts"), ranks, (node) => node.id, () => el("div", {}, el("h4"), el("dl", { class: "facts" })), drawFacts);
  const isDraining = ranks.some((node) => node.state === "draining");
  const isGone = ranks.every((node) => node.state === "gone");
  const wanted = isGone ? [] : [isDraining ? undrainOf(name) : drainOf(role, name)];
  keep(byId("node-actions"), wanted, (act) => act.action, (act) => el("button", { type: "button", text: act.button, on: { click: () => confirm(act) } }), () => {});
}

function drawFacts(element, node) {
  const [title, list] = element.children;
  setText(title, node.num_ranks > 1 ? `Rank ${node.rank} (${node.id})` : "");
  if (node.counters === null) {
    list.replaceChildren();
    return;
  }
  const { counters, pages } = node;
  const facts = [
    ["State", node.state],
    ["Model", node.model],
    ["Heard from", ago(node.last_seen_s)],
    ["Works at", node.phase ? `${node.phase}, for ${duration(node.phase_age_s ?? 0)}` : "nothing yet"],
    ["Running, waiting", `${count(node.running)} of ${count(node.max_running)}, ${count(node.waiting)}`],
    ["Tickets of handoffs", count(node.tickets)],
    ["Pages", pages
      ? `${count(pages.total)}: ${count(pages.request)} of requests, ${count(pages.ticket)} offered, ${count(pages.cache)} cached (freed when needed), ${count(pages.free)} free, ${count(pages.padding)} never used`
      : `${count(node.num_pages)}, ${count(node.free_pages)} free`],
    ...(node.num_tails ? [["Tail pages", `${count(node.num_tails)}, ${count(node.free_tails)} free or cached`]] : []),
    ["Tokens per page", count(node.page_size)],
    ["Last step or round", node.round_s ? duration(node.round_s) : "–"],
    ["Tokens so far", `${count(counters.computed_tokens)} computed, ${count(counters.cached_tokens)} found in the cache, ${count(counters.generated_tokens)} generated`],
    ["Preemptions", count(counters.preemptions)],
    ["Pages moved", `${figure(counters.bytes_moved / 1e6)} MB in ${duration(counters.transfer_seconds)}`],
  ];
  keep(list, facts.flatMap(([name, value]) => [{ key: `${name} name`, tag: "dt", text: name }, { key: name, tag: "dd", text: value }]),
    (fact) => fact.key, (fact) => el(fact.tag), (fact, { text }) => setText(fact, text));
}

const drainOf = (role, name) => ({
  button: "Drain",
  title: `Drain ${role} node ${name}?`,
  words: "It gets no new request. Requests that it does not finish in time move to other nodes, and their text goes on. You can put it back later.",
  action: "Drain",
  takesTimeout: true,
  act: (timeout_s) => askJson(`admin/nodes/${encodeURIComponent(name)}/drain`, { method: "POST", body: timeout_s === null ? undefined : { timeout_s } }),
});

const undrainOf = (name) => ({
  button: "Put back",
  title: `Give ${name} requests again?`,
  words: "The node takes new requests from now on.",
  action: "Put back",
  act: () => askJson(`admin/nodes/${encodeURIComponent(name)}/undrain`, { method: "POST" }),
});

/**
 * Ask before an act, then do it. A refusal is shown in the dialog.
 * @param {{title: string, words: string, action: string, takesTimeout?: boolean, act: (timeout: number | null) => Promise<any>}} question
 */
function confirm({ title, words, action, takesTimeout = false, act }) {
  const [dialog, button, seconds] = [byId("confirm-dialog"), byId("confirm-do"), byId("confirm-seconds")];
  setText(byId("confirm-title"), title);
  setText(byId("confirm-words"), words);
  setText(byId("confirm-error"), "");
  setText(button, action);
  show(byId("confirm-timeout"), takesTimeout);
  seconds.value = "";
  button.onclick = async () => {
    if (!seconds.reportValidity()) return;
    button.disabled = true;
    try {
      await act(seconds.value === "" ? null : Number(seconds.value));
      dialog.close();
    } catch (error) {
      setText(byId("confirm-error"), error instanceof Refused ? error.message : "the router does not answer");
    } finally {
      button.disabled = false;
    }
  };
  dialog.showModal();
  byId("confirm-cancel").focus();
}

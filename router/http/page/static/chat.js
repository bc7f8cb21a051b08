/** A chat with the served model: streamed, with thoughts and tool calls apart, and drafted tokens in colour. */

import { ask, events } from "./api.js";
import { byId, el, keep, setText, show } from "./dom.js";
import { count, duration, figure, percent } from "./format.js";
import { openRequest } from "./timeline.js";

const MAX_TURNS = 200; // shown and sent; older ones are forgotten
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "draft_steps"];

/** @type {any[]} messages as the API takes them */
let messages = [];
/** @type {any[]} tool calls of the last answer, whose results the user has not written yet */
let calls = [];
/** @type {AbortController | null} */
let controller = null;
let seesRequests = false;

export function start() {
  byId("chat-button").addEventListener("click", () => (byId("chat").hidden ? open() : close()));
  byId("chat-close").addEventListener("click", close);
  byId("chat-clear").addEventListener("click", clear);
  byId("chat-stop").addEventListener("click", () => controller?.abort());
  byId("chat-drafts").addEventListener("change", (event) => byId("transcript").classList.toggle("shows-drafts", event.target.checked));
  byId("chat-settings").addEventListener("submit", (event) => event.preventDefault());
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  byId("chat").addEventListener("keydown", (event) => event.key === "Escape" && close());
}

export function draw(snapshot) {
  seesRequests = snapshot.sees === "everything";
  keep(byId("chat-settings").elements.model, snapshot.models, (name) => name, (name) => el("option", { value: name, text: name }), () => {});
}

export function open() {
  show(byId("chat"), true);
  byId("chat-button").setAttribute("aria-expanded", "true");
  byId("chat-text").focus();
  window.dispatchEvent(new Event("resize")); // the other panels have another width now
}

function close() {
  show(byId("chat"), false);
  byId("chat-button").setAttribute("aria-expanded", "false");
  byId("chat-button").focus();
  window.dispatchEvent(new Event("resize"));
}

function clear() {
  controller?.abort();
  [messages, calls] = [[], []];
  byId("transcript").replaceChildren();
  setText(byId("chat-figures"), "");
  askForMessage();
}

/** Take the text as a message, or as the result of the tool that waits for one, and send it. */
function submit() {
  const text = byId("chat-text").value;
  if (!text.trim() || controller) return;
  const { body, problem } = settings();
  if (problem) {
    setText(byId("chat-figures"), problem);
    return;
  }
  const call = calls.shift();
  setText(byId("chat-figures"), "");
  messages.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
  addTurn(call ? `Result of ${call.function.name}` : "You", "user").text.append(text);
  byId("chat-text").value = "";
  askForMessage();
  if (!calls.length) answer(body, text);
}

function askForMessage() {
  const [call] = calls;
  byId("chat-text").placeholder = call
    ? `Write what ${call.function.name} returns.`
    : "Write a message. Enter sends it, Shift+Enter starts a line.";
}

/** Return the body of the request without its messages, or what is wrong with the settings. */
function settings() {
  const { elements } = byId("chat-settings");
  const body = { model: elements.model.value, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (byId("chat-drafts").checked) body.stream_options.include_drafts = true;
  for (const name of NUMBERS) {
    if (!elements[name].checkValidity()) return { body, problem: `${name}: ${elements[name].validationMessage}` };
    if (elements[name].value !== "") body[name] = Number(elements[name].value);
  }
  const isChat = elements.route.value === "chat";
  if (isChat && elements.reasoning_effort.value) body.reasoning_effort = elements.reasoning_effort.value;
  if (isChat && elements.tools.value.trim()) {
    try {
      body.tools = JSON.parse(elements.tools.value);
    } catch (error) {
      return { body, problem: `The tools are not JSON: ${error.message}` };
    }
  }
  return { body, problem: "" };
}

async function answer(body, text) {
  const { elements } = byId("chat-settings");
  const isChat = elements.route.value === "chat";
  const system = elements.system.value.trim() ? [{ role: "system", content: elements.system.value }] : [];
  const own = (messages = messages.slice(-MAX_TURNS));
  Object.assign(body, isChat ? { messages: [...system, ...messages] } : { prompt: text });
  controller = new AbortController();
  showBusy(true);
  const shown = new Answer(addTurn(`Model: ${body.model}`, "assistant"), body.max_tokens);
  try {
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    for await (const data of events(await ask(path, { method: "POST", body, signal: controller.signal }))) {
      if (data !== "[DONE]") shown.take(JSON.parse(data));
    }
  } catch (error) {
    shown.end(controller.signal.aborted ? "You stopped the answer." : `The request failed: ${error.message}`);
  }
  controller = null;
  showBusy(false);
  shown.end("");
  if (messages !== own) return; // the chat was cleared meanwhile
  const { message } = shown;
  if (message.content || message.tool_calls) messages.push(message);
  else messages.pop(); // what got no answer is not sent again
  calls = [...(message.tool_calls ?? [])];
  askForMessage();
}

function showBusy(isBusy) {
  show(byId("chat-stop"), isBusy);
  byId("chat-send").disabled = isBusy;
}

/** Add a turn to the transcript. Return its elements. */
function addTurn(who, role) {
  const text = el("div", { class: "text" });
  const turn = el("article", { class: `turn ${role}`, "aria-label": who }, el("p", { class: "who", text: who }), text);
  const log = byId("transcript");
  log.append(turn);
  while (log.children.length > MAX_TURNS) log.firstChild.remove();
  scrollDown(true);
  return { turn, text };
}

function scrollDown(always = false) {
  const log = byId("transcript");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

/** An answer as it grows. */
class Answer {
  calls = [];
  #content = "";
  #thoughts = null;
  #callParts = [];
  #drafts = new Drafts();
  #sentAt = performance.now();
  #firstAt = 0;
  #lastAt = 0;
  #numTokens = 0;
  #rid = "";
  #finishReason = "";
  #hasEnded = false;

  constructor({ turn, text }, mostTokens) {
    this.turn = turn;
    this.text = text;
    this.mostTokens = mostTokens;
  }

  /** The answer as a message of the conversation. */
  get message() {
    const calls = this.calls.filter(Boolean);
    return { role: "assistant", content: this.#content || null, tool_calls: calls.length ? calls : undefined };
  }

  /** Show what a chunk brings. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.#rid = chunk.id;
    this.#numTokens = chunk.usage?.completion_tokens ?? this.#numTokens;
    for (const { delta, text, drafts, finish_reason } of chunk.choices) {
      this.#finishReason = finish_reason ?? this.#finishReason;
      this.#drafts.add(drafts ?? []);
      const thought = delta?.reasoning_content ?? delta?.reasoning ?? "";
      const content = delta?.content ?? text ?? "";
      if (thought) this.#drafts.write(this.#thoughtsText(), thought);
      if (content) this.#drafts.write(this.text, content);
      this.#content += content;
      for (const part of delta?.tool_calls ?? []) this.#addCall(part);
      if (thought || content || delta?.tool_calls?.length) this.#note();
    }
    this.#showFigures();
    scrollDown();
  }

  /** The stream has ended, or was cut off for a reason. */
  end(why) {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    if (!this.text.textContent) this.text.remove();
    const words = why || this.#finishWords();
    if (words) this.turn.append(el("p", { class: "caption", text: words }));
    if (this.#rid && seesRequests) {
      this.turn.append(el("p", {}, el("button", { type: "button", text: "Where its time went", on: { click: () => openRequest(this.#rid) } })));
    }
    scrollDown();
  }

  #finishWords() {
    if (this.#finishReason === "length") {
      return this.#numTokens === this.mostTokens ? `Stopped at the limit of ${count(this.#numTokens)} tokens (max_tokens).` : "Stopped: the context is full.";
    }
    return { stop: "The model ended its answer.", tool_calls: "The model waits for the result of its call." }[this.#finishReason] ?? this.#finishReason;
  }

  #note() {
    this.#lastAt = performance.now();
    this.#firstAt ||= this.#lastAt;
  }

  #thoughtsText() {
    if (!this.#thoughts) {
      this.#thoughts = el("div");
      this.turn.insertBefore(el("details", { class: "thoughts", open: true }, el("summary", { text: "Thoughts" }), this.#thoughts), this.text);
    }
    return this.#thoughts;
  }

  #addCall(part) {
    const call = (this.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    if (!this.#callParts[part.index]) {
      const shown = el("div", { class: "call" }, el("span", { class: "caption", text: "calls " }), el("strong"), el("pre"));
      this.#callParts[part.index] = shown;
      this.turn.append(shown);
    }
    setText(this.#callParts[part.index].querySelector("strong"), call.function.name);
    setText(this.#callParts[part.index].querySelector("pre"), call.function.arguments);
  }

  #showFigures() {
    const first = this.#firstAt ? `first token after ${duration((this.#firstAt - this.#sentAt) / 1000)}` : "";
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const rate = seconds > 0 && this.#numTokens > 1 ? `this answer: ${figure((this.#numTokens - 1) / seconds)} tokens/s` : "";
    const tokens = this.#numTokens ? `${count(this.#numTokens)} tokens` : "";
    setText(byId("chat-figures"), [first, tokens, rate, this.#drafts.words].filter(Boolean).join("; "));
  }
}

/**
 * Which tokens were drafted. The raw text of tokens also holds marks of thoughts and calls, which the chunk's own texts
 * leave out, so a shown text is searched in the raw text.
 */
class Drafts {
  #raw = "";
  #flags = []; // of each character of #raw: whether its token was drafted and accepted
  #numTokens = 0;
  #numDrafted = 0;

  get words() {
    return this.#numTokens ? `${percent(this.#numDrafted / this.#numTokens)} of its tokens were drafted and accepted (coloured)` : "";
  }

  /** @param {{text: string, is_draft: boolean | null}[]} entries one per token */
  add(entries) {
    for (const { text, is_draft } of entries) {
      this.#raw += text;
      for (let index = 0; index < text.length; index++) this.#flags.push(is_draft === true);
      this.#numTokens++;
      this.#numDrafted += is_draft === true ? 1 : 0;
    }
  }

  /** Append a text to an element, and mark the parts that were drafted. */
  write(element, text) {
    const at = this.#raw.indexOf(text);
    const flags = at < 0 ? [] : this.#flags.slice(at, at + text.length);
    if (at >= 0) {
      this.#raw = this.#raw.slice(at + text.length);
      this.#flags.splice(0, at + text.length);
    }
    let begin = 0;
    for (let index = 1; index <= text.length; index++) {
      if (index < text.length && Boolean(flags[index]) === Boolean(flags[begin])) continue;
      const part = text.slice(begin, index);
      element.append(flags[begin] ? el("span", { class: "drafted", text: part }) : part);
      begin = index;
    }
  }
}

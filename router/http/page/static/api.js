/**
 * Talks to the router. The key is kept in this module's memory alone: it is sent in a header, and is never part of an
 * address, a cookie or the browser's storage, so that it is gone when the tab is closed.
 */

let key = "";

/** Use a key for all requests from now on; "" for none. */
export function useKey(text) {
  key = text;
}

/** Whether the operator has given a key. */
export const hasKey = () => key !== "";

/** An answer other than 2xx. Its message is the router's own sentence. */
export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/**
 * Send a request. The path is relative, so that the page also works below a path of a proxy.
 * @param {string} path
 * @param {{method?: string, body?: any, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 * @throws {Refused} if the router refuses it
 */
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = new Headers();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (body !== undefined) headers.set("Content-Type", "application/json");
  const response = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (response.ok) return response;
  throw new Refused(response.status, await sentenceOf(response));
}

/** Send a request, and return its JSON. */
export const askJson = async (path, options) => (await ask(path, options)).json();

async function sentenceOf(response) {
  const text = await response.text();
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    return `the router answered ${response.status} ${response.statusText}`;
  }
}

/**
 * Yield the data of each event of a text/event-stream, as text. An event is one or more lines; others than `data` are
 * passed over.
 * @param {Response} response
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

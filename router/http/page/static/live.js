/**
 * Follows GET /live: one stream per tab, and none while the tab is hidden. If the stream ends, it is opened again after
 * a wait that doubles, up to MAX_WAIT_S.
 */

import { Refused, ask, events } from "./api.js";

const FIRST_WAIT_S = 0.5;
const MAX_WAIT_S = 15;
const SILENT_S = 6; // without a snapshot, the connection counts as lost

/**
 * @typedef {{name: "connecting" | "live" | "hidden"} | {name: "waiting", why: string, seconds: number}
 *   | {name: "refused", status: number, why: string}} Connection
 */

export class Live {
  #controller = new AbortController();
  #wait = FIRST_WAIT_S;
  #timer = 0;

  /**
   * @param {(snapshot: any) => void} onSnapshot
   * @param {(connection: Connection) => void} onConnection
   */
  constructor(onSnapshot, onConnection) {
    this.onSnapshot = onSnapshot;
    this.onConnection = onConnection;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#hide() : this.start()));
  }

  /** Open the stream, or open it again, for example with another key. */
  start() {
    this.#stop();
    this.#wait = FIRST_WAIT_S;
    if (document.hidden) this.#hide();
    else this.#follow();
  }

  #hide() {
    this.#stop();
    this.onConnection({ name: "hidden" });
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#controller.abort();
  }

  async #follow() {
    const controller = (this.#controller = new AbortController());
    let watch = 0;
    const expectMore = () => {
      clearTimeout(watch);
      watch = setTimeout(() => controller.abort("silent"), 1000 * SILENT_S);
    };
    this.onConnection({ name: "connecting" });
    let why = "the router ended the stream";
    try {
      expectMore();
      for await (const data of events(await ask("live", { signal: controller.signal }))) {
        if (controller.signal.aborted) break;
        expectMore();
        this.#wait = FIRST_WAIT_S;
        this.onConnection({ name: "live" });
        this.onSnapshot(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        this.onConnection({ name: "refused", status: error.status, why: error.message });
        return;
      }
      why = error instanceof Refused ? error.message : "the router does not answer";
    } finally {
      clearTimeout(watch);
    }
    if (controller !== this.#controller || (controller.signal.aborted && controller.signal.reason !== "silent")) return;
    this.onConnection({ name: "waiting", why, seconds: this.#wait });
    this.#timer = setTimeout(() => this.#follow(), 1000 * this.#wait);
    this.#wait = Math.min(MAX_WAIT_S, 2 * this.#wait);
  }
}

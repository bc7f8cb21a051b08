/**
 * Turns snapshots into rates and percentiles, and keeps those of the last ten minutes. The router counts from its start;
 * everything here is the difference of two snapshots. A router that has started anew (another epoch) begins again at 0.
 */

export const MAX_POINTS = 600; // one per second
const MAX_POSITIONS = 8; // of drafts, whose acceptance is kept
const RECENT_S = 10; // rates, percentiles and shares are those of so many seconds, so that they agree
const GAP_S = 5; // a longer pause between snapshots is shown as a gap

/** Return the amount by which a counter rose. A counter that fell belongs to a process that has started anew. */
const rise = (now, before) => (now >= before ? now - before : 0);

/**
 * Return a quantile of the values that a histogram counted between two snapshots, null if there was none. Values are
 * taken as evenly spread in their bucket; those above the last bound count as the last bound.
 * @param {{bounds_s: number[], counts: number[]}} now
 * @param {{counts: number[]} | undefined} before
 * @param {number} share 0.5 for the median
 */
export function quantile(now, before, share) {
  const counts = now.counts.map((number, index) => rise(number, before?.counts[index] ?? 0));
  const total = counts.reduce((sum, number) => sum + number, 0);
  if (total === 0) return null;
  let left = share * total;
  for (const [index, number] of counts.entries()) {
    if (left <= number && number > 0) {
      const low = index === 0 ? 0 : now.bounds_s[index - 1];
      const high = now.bounds_s[Math.min(index, now.bounds_s.length - 1)];
      return low + (high - low) * (left / number);
    }
    left -= number;
  }
  return now.bounds_s[now.bounds_s.length - 1];
}

/** Return the time between two snapshots of one router. Their `at` may step when the host's clock is set. */
const secondsBetween = (before, now) => now.router.uptime_s - before.router.uptime_s;

/** The names of all series that are kept. */
const SERIES = [
  "at", "ttft50", "ttft95", "ttft99", "itl50", "itl95", "itl99", "running", "waiting", "promptTokens", "outputTokens",
  "requests", "transfer", "hits", "preemptions", "moves",
  ...Array.from({ length: MAX_POSITIONS }, (_, position) => `accepted${position}`),
];

export class History {
  /** @type {Record<string, (number | null)[]>} one value per snapshot, null where there is none */
  series = Object.fromEntries(SERIES.map((name) => [name, []]));
  /** @type {any[]} the last snapshots of this router, the newest last */
  #recent = [];

  /** @returns {any | undefined} */
  get latest() {
    return this.#recent[this.#recent.length - 1];
  }

  /** Forget all, for example since another key sees more. */
  clear() {
    this.#recent = [];
    for (const values of Object.values(this.series)) values.length = 0;
  }

  /** Add a snapshot. A pause or a new router leaves a gap in the series. */
  add(snapshot) {
    const before = this.latest;
    if (before && (before.router.epoch !== snapshot.router.epoch || secondsBetween(before, snapshot) > GAP_S)) {
      this.#recent = [];
      this.#append({ at: snapshot.at - 0.5 });
    }
    this.#recent.push(snapshot);
    while (secondsBetween(this.#recent[0], snapshot) > RECENT_S + 0.5) this.#recent.shift();
    this.#append(this.#point(snapshot));
  }

  /**
   * Return the rise per second of a number of snapshots, null until there are two snapshots.
   * @param {(snapshot: any) => number | undefined} read
   */
  rate(read) {
    const now = this.latest;
    const before = this.#recent[0];
    if (before === now) return null;
    const [end, start] = [read(now), read(before)];
    return end === undefined || start === undefined ? null : rise(end, start) / secondsBetween(before, now);
  }

  /** Return the rise per second of a counter of a node, 0 if the node is new or gone. */
  nodeRate(id, name) {
    return this.rate((snapshot) => snapshot.nodes.find((node) => node.id === id)?.counters?.[name]) ?? 0;
  }

  /** Return the sum of the rates of a counter, which the cards of nodes show one by one. `role`: "" for both. */
  sumRate(name, role = "") {
    const nodes = this.latest.nodes.filter((node) => !role || node.role === role);
    return nodes.reduce((sum, node) => sum + this.nodeRate(node.id, name), 0);
  }

  /** Return the rate of prompt tokens that nodes computed or had cached. An API key alone sees those of ended requests. */
  get promptRate() {
    if (this.latest.sees === "counts") return this.rate((each) => each.totals.prompt_tokens);
    return this.sumRate("computed_tokens") + this.sumRate("cached_tokens");
  }

  /** Return the rate of generated tokens. A prefill node generates the first one of each answer. */
  get outputRate() {
    return this.latest.sees === "counts" ? this.rate((each) => each.totals.output_tokens) : this.sumRate("generated_tokens");
  }

  /** Return a quantile of a latency over the last ten seconds, null if nothing was measured. */
  latency(name, share) {
    return quantile(this.latest.latencies[name], this.#recent[0].latencies[name], share);
  }

  /** Return how much a total rose over the last ten seconds. */
  risen(read) {
    return rise(read(this.latest), read(this.#recent[0]));
  }

  /** Return the share of prompt tokens of the last ten seconds that a prefix cache held, null without a prompt. */
  get hits() {
    if (this.latest.sees === "everything") return this.promptRate > 0 ? this.sumRate("cached_tokens") / this.promptRate : null;
    const prompt = this.risen((snapshot) => snapshot.totals.prompt_tokens);
    return prompt > 0 ? Math.min(1, this.risen((snapshot) => snapshot.totals.cached_tokens) / prompt) : null;
  }

  /** Return the share of rounds of the last ten seconds whose draft at a position was accepted, null without rounds. */
  accepted(position) {
    const rounds = this.risen((snapshot) => snapshot.totals.num_rounds);
    if (rounds === 0 || this.latest.totals.accepted_at[position] === undefined) return null;
    return this.risen((snapshot) => snapshot.totals.accepted_at[position] ?? 0) / rounds;
  }

  #point(snapshot) {
    const point = {
      at: snapshot.at,
      running: snapshot.counts.running,
      waiting: snapshot.counts.waiting,
      promptTokens: this.promptRate,
      outputTokens: this.outputRate,
      requests: this.rate((each) => each.totals.requests.done),
      transfer: this.rate((each) => each.totals.transfer_bytes),
      preemptions: this.rate((each) => each.totals.preemptions),
      moves: this.rate((each) => each.totals.moves),
      hits: this.hits,
    };
    for (const name of ["ttft", "itl"]) {
      for (const share of [50, 95, 99]) point[`${name}${share}`] = this.latency(name, share / 100);
    }
    for (let position = 0; position < MAX_POSITIONS; position++) point[`accepted${position}`] = this.accepted(position);
    return point;
  }

  #append(point) {
    for (const [name, values] of Object.entries(this.series)) {
      values.push(point[name] ?? null);
      if (values.length > MAX_POINTS) values.shift();
    }
  }
}

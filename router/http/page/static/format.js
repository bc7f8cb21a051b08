/** Numbers in words that people read. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** Return a count: "1,234". */
export const count = (number) => whole.format(number);

/** Return a figure of three digits: "0.52", "12.3", "456", "12.3K". */
export function figure(number) {
  if (number === null || Number.isNaN(number)) return "–";
  if (number >= 10_000) return short.format(number);
  if (number >= 100 || Number.isInteger(number)) return whole.format(number);
  return number.toFixed(number >= 10 ? 1 : 2);
}

/** Return a duration: "0.4 ms", "85 ms", "1.25 s", "3 min 20 s", "2 h 5 min". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  if (total < 86_400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86_400)} d ${Math.floor((total % 86_400) / 3600)} h`;
}

/** Return how long ago: "0 s ago", "3 s ago", "2 min 0 s ago". */
export const ago = (seconds) => (seconds < 60 ? `${Math.round(seconds)} s ago` : `${duration(seconds)} ago`);

/** Return a share: "83 %". */
export const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);

/** Return a count with its noun: "1 page", "3 pages". */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return a rate of bytes: "1.20 GB", "34.5 MB". */
export function bytes(number) {
  if (number >= 1e9) return `${figure(number / 1e9)} GB`;
  if (number >= 1e6) return `${figure(number / 1e6)} MB`;
  if (number >= 1e3) return `${figure(number / 1e3)} kB`;
  return `${count(number)} B`;
}

/** Return the time of day of seconds since 1970. */
export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");

/** Compare names so that decode-10 comes after decode-9. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

/** The key: asks for it, and says what the page shows with the key that it has. */

import { hasKey, useKey } from "./api.js";
import { byId, setText, show } from "./dom.js";

const COUNTS_ONLY =
  "This key shows counts and the chat. The admin key also shows the nodes, the requests and why they wait.";

/** @param {() => void} again opens the stream again with the new key */
export function start(again) {
  const [dialog, input] = [byId("key-dialog"), byId("key-input")];
  for (const id of ["key-button", "locked-button"]) byId(id).addEventListener("click", () => ask());
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => (input.value = ""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(input.value.trim());
    dialog.close();
    again();
  });
}

/** The router refused the key, or wants one. */
export function refused(why) {
  const words = hasKey() ? `The router does not accept this key: ${why}` : "";
  show(byId("notice"), false);
  setText(byId("locked-words"), words || "Its operator has given it to you, or to your program, as an API key.");
  ask(words);
}

/** Say what the admin key would show. */
export function draw(snapshot) {
  setText(byId("notice"), COUNTS_ONLY);
  show(byId("notice"), snapshot.sees === "counts");
}

function ask(error = "") {
  setText(byId("key-error"), error);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key-input").focus();
}

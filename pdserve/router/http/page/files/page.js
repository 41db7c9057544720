// The page's two views, and the field for the API key. Started by index.html.

import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { keepKey } from "./server.js";
import { look, startStatus } from "./status.js";

const VIEWS = ["chat", "status"];
let withKey = []; // what to do once there is a key

// Shows the field for the key. then: called once it was given.
function askKey(message, then) {
  withKey.push(then);
  byId("key-said").textContent = message;
  byId("key-form").hidden = false;
  byId("key").focus();
}

function takeKey(event) {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    byId("key-said").textContent = "A key is of ASCII characters without spaces.";
    return;
  }
  keepKey(key);
  byId("key").value = "";
  byId("key-form").hidden = true;
  const waiting = [...new Set(withKey)];
  withKey = [];
  for (const then of waiting) then();
}

function choose(view) {
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === view));
    tab.tabIndex = each === view ? 0 : -1;
    byId(each).hidden = each !== view;
  }
  look();
}

for (const [at, view] of VIEWS.entries()) {
  const tab = byId(`tab-${view}`);
  tab.addEventListener("click", () => choose(view));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[(at + 1) % VIEWS.length];
    choose(other);
    byId(`tab-${other}`).focus();
  });
}
byId("key-form").addEventListener("submit", takeKey);
startStatus(askKey);
startChat(askKey);

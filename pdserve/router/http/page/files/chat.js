// The conversation: what was said, what is asked, and what goes wrong. It lives here alone, and is
// gone with the page.
//
//     idle --send, retry, results--> answering --all came--> idle: the exchange is kept
//                                              --stopped---> idle: kept, if it has content
//                                              --failed----> idle: not kept; Retry asks again
//
// An answer that calls tools waits for their results before anything else can be said.

import { Answer } from "./answer.js";
import { byId, make } from "./dom.js";
import { ServerError, chat, models } from "./server.js";
import { SettingError, hasModels, requestFields, showModels, systemMessages } from "./settings.js";

const WAITS = "The model waits for the results of its calls.";

let messages = []; // that both sides have said
let abort = null; // of the answer that comes
let pending = null; // the results that are waited for: {answer, fields}
let problem = null; // the element that shows what went wrong
let wantKey = () => {}; // shows the field for the key; gets what to do with it

export function startChat(askKey) {
  wantKey = askKey;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("forget").addEventListener("click", forget);
  loadModels();
}

async function loadModels() {
  try {
    showModels(await models());
    clearProblem();
  } catch (error) {
    if (error.status === 401) wantKey(error.message, loadModels);
    else showProblem(error.message, loadModels);
  }
}

function stop() {
  abort?.abort();
}

function forget() {
  stop();
  messages = [];
  pending = null;
  problem = null;
  byId("log").replaceChildren();
  say("");
  byId("message").focus();
}

function send() {
  const field = byId("message");
  const content = field.value;
  if (abort !== null || content.trim() === "") return;
  if (pending !== null) {
    say(WAITS);
    pending.fields[0].focus();
    return;
  }
  const entry = make("div", { class: "turn user" }, make("div", { class: "who" }, "You"), make("div", { class: "text" }, content));
  if (exchange([{ role: "user", content }], [entry])) field.value = "";
}

function sendResults() {
  if (abort !== null) return;
  const { answer, fields } = pending;
  const results = answer.calls.map((call, at) => ({ role: "tool", tool_call_id: call.id, content: fields[at].value }));
  exchange(results, []);
}

// Asks for an answer to the new messages. entries: what shows them, not in the document yet.
// Returns whether it was asked: the settings may be wrong, or another answer comes.
function exchange(asked, entries) {
  if (abort !== null) return false;
  let body;
  try {
    if (!hasModels()) throw new ServerError("The server has not said yet which models it has.");
    body = { ...requestFields(), messages: [...systemMessages(), ...messages, ...asked] };
  } catch (error) {
    if (error instanceof SettingError) {
      byId("settings").open = true;
      error.field.focus();
    }
    say(error.message);
    return false;
  }
  clearProblem();
  for (const entry of entries) entry.classList.remove("dropped");
  byId("log").append(...entries);
  run({ ...body, stream: true, stream_options: { include_usage: true } }, asked, entries);
  return true;
}

async function run(body, asked, entries) {
  const own = new AbortController();
  const answer = new Answer("response_format" in body);
  const log = byId("log");
  const here = () => answer.element.isConnected; // nobody has begun a new conversation
  abort = own;
  log.append(answer.element);
  log.scrollTop = log.scrollHeight;
  isAnswering(true);
  let unenforced = null;
  let failure = null;
  try {
    const told = (headers) => (unenforced = headers.get("x-pdserve-unenforced"));
    for await (const chunk of chat(body, own.signal, told)) answer.add(chunk);
  } catch (error) {
    failure = error;
  }
  if (abort === own) {
    abort = null;
    isAnswering(false);
  }
  if (!here()) return;
  const again = () => {
    if (exchange(asked, entries)) answer.element.remove();
  };
  if (failure === null) {
    const isCut = answer.reason === "length";
    const words = isCut ? "Cut off: the answer has as many tokens as it may" : "";
    if (isCut) answer.forgetCalls(); // they may be half a call
    if (isCut && answer.isEmpty) drop(answer, entries, words);
    else keep(answer, asked, words);
    const ended = pending === null ? "The answer is complete." : WAITS;
    say(unenforced ? `These keywords of the schema are not enforced: ${unenforced}.` : ended);
  } else if (failure.name === "AbortError") {
    answer.forgetCalls();
    if (answer.isEmpty) {
      drop(answer, entries, "Stopped before it said anything; the message is not part of the conversation");
    } else {
      keep(answer, asked, "Stopped");
    }
    say("Stopped.");
  } else if (failure instanceof ServerError) {
    drop(answer, entries, "");
    say("");
    if (failure.status === 401) wantKey(failure.message, again);
    else showProblem(failure.message, again);
  } else {
    drop(answer, entries, "");
    showProblem("This page failed; the browser's console says how.", again);
    throw failure;
  }
}

// The exchange is part of the conversation from now on.
function keep(answer, asked, words) {
  if (pending !== null) {
    for (const field of pending.fields) field.readOnly = true;
    pending.button.remove();
    pending = null;
  }
  answer.end(words);
  messages.push(...asked, answer.message());
  if (answer.calls.length > 0) {
    const button = make("button", { type: "button", class: "primary", on: { click: sendResults } }, "Send the results");
    pending = { answer, fields: answer.askResults(), button };
    answer.append(button);
    pending.fields[0].focus();
  }
  byId("log").scrollTop = byId("log").scrollHeight;
}

// The exchange is no part of the conversation; what came stays readable.
function drop(answer, entries, words) {
  answer.forgetCalls();
  answer.end(words);
  if (answer.content === "" && answer.reasoning === "" && words === "") answer.element.remove();
  else answer.element.classList.add("dropped");
  for (const entry of entries) entry.classList.add("dropped");
}

function showProblem(message, retry) {
  clearProblem();
  problem = make("div", { class: "problem", role: "alert" }, make("p", {}, message), make("button", { type: "button", on: { click: retry } }, "Try again"));
  byId("log").append(problem);
  byId("log").scrollTop = byId("log").scrollHeight;
}

function clearProblem() {
  problem?.remove();
  problem = null;
}

function isAnswering(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  if (is) say("The answer comes …");
}

function say(words) {
  byId("said").textContent = words;
}

// One answer while it comes: puts the chunks of a stream together and shows reasoning, text and
// calls of tools. Knows no conversation and no server.

import { make } from "./dom.js";
import { show } from "./markdown.js";

export class Answer {
  // isJson: the content is of a JSON schema, and is shown as it is.
  constructor(isJson) {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.reason = null; // why it ended
    this.usage = null;
    this._isJson = isJson;
    this._began = performance.now();
    this._first = null;
    this._blocks = [];
    this._waits = false; // to draw what has come
    this._ended = false;
    this._reasoning = make("div");
    this._thought = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this._reasoning);
    this._text = isJson ? make("pre", { class: "text", tabindex: "0" }) : make("div", { class: "text" });
    this._calls = make("div");
    this._meta = make("div", { class: "meta" });
    this.element = make("div", { class: "turn assistant" }, make("div", { class: "who" }, "Assistant"), this._thought, this._text, this._calls, this._meta);
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (this._first === null && (reasoning || delta.content || delta.tool_calls)) this._first = performance.now();
      this.reasoning += reasoning;
      this.content += delta.content ?? "";
      for (const part of delta.tool_calls ?? []) this._addCall(part);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
    this._later();
  }

  // Whether there is something that the conversation can go on from.
  get isEmpty() {
    return this.content === "" && this.calls.length === 0;
  }

  // As the API takes it back. Reasoning of earlier answers is not sent again.
  message() {
    const calls = this.calls.length > 0 ? { tool_calls: this.calls } : {};
    return { role: "assistant", content: this.content, ...calls };
  }

  forgetCalls() {
    this.calls = [];
  }

  // Shows all that came. words: how it ended, where that is worth a word.
  end(words = "") {
    this._ended = true;
    this._draw();
    const parts = [words];
    if (this._first !== null) {
      const tokens = this.usage?.completion_tokens;
      const seconds = (performance.now() - this._first) / 1000;
      if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
      parts.push(`first after ${Math.round(this._first - this._began)} ms`);
      if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    this._meta.textContent = parts.filter((part) => part !== "").join(" · ");
  }

  _addCall(part) {
    const at = part.index ?? 0;
    while (this.calls.length <= at) {
      this.calls.push({ id: "", type: "function", function: { name: "", arguments: "" } });
    }
    const call = this.calls[at];
    call.id = part.id ?? call.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }

  // Draws once a frame, and seldom enough that drawing a long answer takes a quarter of the time.
  _later() {
    if (this._waits || this._ended) return;
    this._waits = true;
    requestAnimationFrame(() => {
      if (this._ended) return;
      const began = performance.now();
      this._draw();
      setTimeout(() => {
        this._waits = false;
        if (this._shown !== this._size()) this._later();
      }, 3 * (performance.now() - began));
    });
  }

  _size() {
    const calls = this.calls.map((call) => call.function.arguments.length + 1);
    return this.content.length + this.reasoning.length + calls.reduce((sum, length) => sum + length, 0);
  }

  _draw() {
    this._shown = this._size();
    const log = this.element.parentElement;
    const follows = log !== null && log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this._thought.hidden = this.reasoning.trim() === "";
    this._reasoning.textContent = this.reasoning.trim();
    if (this._isJson) this._text.textContent = this.content;
    else this._blocks = show(this._text, this.content, this._blocks);
    this._text.hidden = this.content === "";
    while (this._calls.childElementCount < this.calls.length) {
      this._calls.append(make("div", { class: "call" }, make("strong"), make("pre", { tabindex: "0" })));
    }
    this.calls.forEach((call, at) => {
      const [name, given] = this._calls.children[at].children;
      name.textContent = call.function.name;
      given.textContent = call.function.arguments;
    });
    if (follows) log.scrollTop = log.scrollHeight;
  }

  // Asks for a result below each call. Returns the fields, in order.
  askResults() {
    return this.calls.map((call, at) => {
      const field = make("textarea", { rows: "2", class: "code" });
      this._calls.children[at].append(make("label", {}, `Result of ${call.function.name}`, field));
      return field;
    });
  }

  // Puts an element below the calls.
  append(element) {
    this._calls.append(element);
  }
}

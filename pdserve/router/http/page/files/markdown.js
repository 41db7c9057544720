// Shows a model's Markdown: fenced code, headings, lists, quotes, paragraphs; in them code, bold,
// italic and links. Every element is made by name and filled with text, so HTML in an answer is
// text too. Links are followed to http and https alone; pictures are never loaded.
//
// An answer grows while it is shown, so `show` keeps the blocks that did not change.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,40})/;
const HEADING = /^ {0,3}#{1,6}\s+(.*)$/;
const BULLET = /^ {0,6}[-*+]\s+(.*)$/;
const NUMBER = /^ {0,6}(\d{1,9})[.)]\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;

// How far a mark looks for its end: what it costs to read an answer stays in proportion to it.
const FAR = 2000;
const MAX_DEPTH = 4;

// Makes the element show the text. blocks: what the last call for this element returned.
export function show(element, text, blocks = []) {
  const found = blocksOf(text);
  let same = 0;
  while (same < found.length && same < blocks.length && equal(found[same], blocks[same])) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of found.slice(same)) element.append(elementOf(block));
  return found;
}

const equal = (one, other) => one.kind === other.kind && one.text === other.text && one.first === other.first;

function blocksOf(text) {
  const blocks = [];
  let open = null; // the block that the next line may belong to
  let fence = null;
  const add = (kind, line, first = null) => {
    if (open !== null && open.kind === kind) {
      open.lines.push(line);
    } else {
      open = { kind, lines: [line], first };
      blocks.push(open);
    }
  };
  for (const line of text.split("\n")) {
    if (fence !== null) {
      if (line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "") {
        fence = null;
        open = null;
      } else {
        open.lines.push(line);
      }
      continue;
    }
    let match;
    if ((match = FENCE.exec(line)) !== null) {
      fence = match[1];
      open = { kind: "code", lines: [], first: null };
      blocks.push(open);
    } else if (line.trim() === "") {
      open = null;
    } else if ((match = HEADING.exec(line)) !== null) {
      open = null;
      add("heading", match[1]);
      open = null;
    } else if ((match = BULLET.exec(line)) !== null) {
      add("bullets", match[1]);
    } else if ((match = NUMBER.exec(line)) !== null) {
      add("numbers", match[2], match[1]);
    } else if ((match = QUOTE.exec(line)) !== null) {
      add("quote", match[1]);
    } else if (open !== null && (open.kind === "bullets" || open.kind === "numbers") && /^\s/.test(line)) {
      open.lines[open.lines.length - 1] += `\n${line.trim()}`;
    } else {
      add("paragraph", line);
    }
  }
  // one text a block, which is quick to compare; \0 ends an item
  return blocks.map(({ kind, lines, first }) => ({ kind, first, text: lines.join(isList(kind) ? "\0" : "\n") }));
}

const isList = (kind) => kind === "bullets" || kind === "numbers";

function elementOf({ kind, text, first }) {
  if (kind === "code") return make("pre", { tabindex: "0" }, make("code", {}, text));
  if (isList(kind)) {
    const items = text.split("\0").map((item) => make("li", {}, ...inline(item)));
    return kind === "bullets" ? make("ul", {}, ...items) : make("ol", { start: first }, ...items);
  }
  const name = { heading: "h3", quote: "blockquote", paragraph: "p" }[kind];
  return make(name, {}, ...inline(text));
}

// The nodes of a text without blocks.
function inline(text, depth = 0) {
  const nodes = [];
  let plain = 0; // where the text begins that no node shows yet
  let at = 0;
  const put = (node, end) => {
    if (plain < at) nodes.push(document.createTextNode(text.slice(plain, at)));
    nodes.push(node);
    plain = at = end;
  };
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? marked(text, at, depth) : null;
    if (found === null) at++;
    else put(...found);
  }
  if (plain < text.length) nodes.push(document.createTextNode(text.slice(plain)));
  return nodes;
}

// The element that begins here, and where it ends; null: none does.
function marked(text, at, depth) {
  const sign = text[at];
  if (sign === "`") {
    const end = near(text, "`", at + 1);
    return end > at + 1 ? [make("code", {}, text.slice(at + 1, end)), end + 1] : null;
  }
  if (sign === "*") {
    const mark = text[at + 1] === "*" ? "**" : "*";
    const start = at + mark.length;
    const end = near(text, mark, start);
    if (end <= start || /\s/.test(text[start]) || /\s/.test(text[end - 1])) return null;
    const name = mark === "**" ? "strong" : "em";
    return [make(name, {}, ...inline(text.slice(start, end), depth + 1)), end + mark.length];
  }
  if (sign === "[") {
    const middle = near(text, "](", at + 1);
    const end = middle < 0 ? -1 : near(text, ")", middle + 2);
    const address = end < 0 ? null : safeAddress(text.slice(middle + 2, end));
    if (address === null) return null;
    const about = { href: address, rel: "noopener noreferrer nofollow", target: "_blank", title: address };
    return [make("a", about, text.slice(at + 1, middle)), end + 1];
  }
  return null;
}

function near(text, what, from) {
  const found = text.slice(from, from + FAR).indexOf(what);
  return found < 0 ? -1 : from + found;
}

// What a link may lead to: a whole address of http or https. null: it is shown as text.
function safeAddress(given) {
  if (!/^https?:\/\//i.test(given)) return null;
  try {
    const url = new URL(given);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

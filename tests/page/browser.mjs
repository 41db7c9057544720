// Drives Debian's Chromium for tests/page/browser.py: one command a line in, one answer a line out.
//
//     node browser.mjs CHROMIUM [ARGUMENT ...]
//     {"id": 1, "do": "click", "at": "#send"}  -->  {"id": 1, "value": null} or {"id": 1, "error": "..."}
//
// Ends when its input does. Nothing is run in the page: selectors and Playwright's own actions are
// all there is, so the page's policy holds as it does for a person.

import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [executablePath, ...args] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args });
let context;
let page;
let seen;

async function open({ url, dark, width, height }) {
  await context?.close();
  context = await browser.newContext({ colorScheme: dark ? "dark" : "light", viewport: { width, height } });
  page = await context.newPage();
  page.setDefaultTimeout(20_000);
  seen = { requests: [], console: [], dialogs: [], pages: 0 };
  // of the context: also what a new window asks for
  context.on("request", (request) => seen.requests.push({ url: request.url(), body: request.postData() }));
  context.on("page", () => seen.pages++);
  page.on("console", (message) => seen.console.push(`${message.type()}: ${message.text()}`));
  page.on("pageerror", (error) => seen.console.push(`uncaught: ${error.message}`));
  page.on("dialog", (dialog) => {
    seen.dialogs.push(dialog.message());
    dialog.dismiss();
  });
  await page.goto(url);
}

const actions = {
  open,
  reload: () => page.reload(),
  click: ({ at }) => page.locator(at).click(),
  fill: ({ at, text }) => page.locator(at).fill(text),
  press: ({ at, key }) => page.locator(at).press(key),
  text: ({ at }) => page.locator(at).allInnerTexts(),
  values: ({ at }) => page.locator(at).evaluateAll((found) => found.map((element) => element.value)),
  visible: ({ at }) => page.locator(at).isVisible(),
  count: ({ at }) => page.locator(at).count(),
  attributes: ({ at, name }) =>
    page.locator(at).evaluateAll((found, name) => found.map((element) => element.getAttribute(name)), name),
  focused: () => page.locator(":focus").getAttribute("id"),
  storage: async () => (await context.storageState()).origins,
  cookies: () => context.cookies(),
  offline: ({ is }) => context.setOffline(is),
  screenshot: ({ path }) => page.screenshot({ path }),
  seen: () => seen,
};

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  const answer = { id: command.id };
  try {
    answer.value = (await actions[command.do](command)) ?? null;
  } catch (error) {
    answer.error = error.message;
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();

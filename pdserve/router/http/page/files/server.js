// Asks the server that the page came from: JSON, metrics and streams of events. Keeps the API key,
// in this tab's sessionStorage alone. Every failure is a ServerError, whose message is a sentence.
//
// Addresses are relative to the page, which a proxy may show under a prefix.

const KEY = "pdserve-api-key";

export class ServerError extends Error {
  // status: of HTTP; 0: there was no answer, or it broke off
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

export async function metrics(signal) {
  return (await ask("metrics", { signal })).text();
}

// Streams one answer: yields OpenAI's chunks. told: gets the answer's headers. An abort of the
// signal closes the connection, which the server sees.
export async function* chat(body, signal, told = () => {}) {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  told(answer.headers);
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ServerError("The server sent an event that is not JSON.");
    }
    if (chunk.error) throw new ServerError(`The answer broke off: ${sentence(chunk.error.message)}`);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

// The data of server-sent events.
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const full of lines) {
        const line = full.endsWith("\r") ? full.slice(0, -1) : full;
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(answer) {
  let said = "";
  try {
    said = (await answer.json()).error.message;
  } catch {
    // what is no error of this server's: the status is all there is
  }
  const reason = said ? `: ${sentence(said)}` : ".";
  if (answer.status === 401) return new ServerError(`The server refuses the API key${reason}`, 401);
  if (answer.status === 429) {
    const wait = Number(answer.headers.get("retry-after"));
    const later = wait > 0 ? ` Try again in ${wait} ${wait === 1 ? "second" : "seconds"}.` : "";
    return new ServerError(`The server has too much to do${reason}${later}`, 429);
  }
  if (answer.status === 503) return new ServerError(`The server cannot answer now${reason}`, 503);
  return new ServerError(`The server answered with status ${answer.status}${reason}`, answer.status);
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

// What a request says besides its messages: fields of the settings, read when a message is sent.
// SettingError: a sentence, and the field that it is about.

import { byId, make } from "./dom.js";

export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export function showModels(found) {
  const chosen = byId("model").value;
  byId("model").replaceChildren(...found.map(({ id }) => make("option", { value: id, selected: id === chosen }, id)));
  byId("model-name").textContent = found.map(({ id }) => id).join(", ");
}

export const hasModels = () => byId("model").value !== "";

// The fields of a request, without messages.
export function requestFields() {
  const fields = { model: byId("model").value };
  const temperature = number("temperature", "The temperature");
  if (temperature !== null) fields.temperature = temperature;
  const most = number("max-tokens", "The number of tokens");
  if (most !== null) fields.max_completion_tokens = most;
  const schema = json("schema", "The JSON schema");
  if (schema !== null) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json("tools", "The field of tools");
  if (tools !== null && !Array.isArray(tools)) {
    throw new SettingError("The field of tools must hold a list: write [ before the first tool and ] after the last.", byId("tools"));
  }
  if (tools !== null && tools.length > 0) fields.tools = tools;
  return fields;
}

// The system message, in the list that stands before all messages.
export function systemMessages() {
  const content = byId("system").value.trim();
  return content === "" ? [] : [{ role: "system", content }];
}

function number(id, name) {
  const field = byId(id);
  if (!field.validity.valid) throw new SettingError(`${name} is wrong: ${field.validationMessage}`, field);
  return field.value === "" ? null : field.valueAsNumber;
}

function json(id, name) {
  const field = byId(id);
  if (field.value.trim() === "") return null;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    throw new SettingError(`${name} is not JSON: ${error.message}`, field);
  }
}
